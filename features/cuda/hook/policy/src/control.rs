//! What is asked of a program with the hook from outside, and how: over a Unix socket, one request and one answer, each a line of JSON.
//!
//! Nothing here opens a socket. What comes over one is hostile: it is bounded before it is parsed, and nothing in it is trusted.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The most bytes of a request.
pub const REQUEST: usize = 4 << 10;
/// The most bytes of an answer.
pub const ANSWER: usize = 8 << 20;
/// The longest that a pause may be tried.
pub const LONGEST: u64 = 24 * 60 * 60;

/// What is asked.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// What the program is, and what has how much of its memory.
    Status {
        /// So many of the largest allocations are listed.
        #[serde(default)]
        largest: usize,
        /// Call stacks, too; from here on they are recorded.
        #[serde(default)]
        stacks: bool,
    },
    /// Give devices' memory back.
    Pause {
        /// In so many seconds, or not at all.
        timeout: u64,
    },
    /// Take it again.
    Resume,
    /// Pass the memory of an exported allocation, as descriptors of files beside the answer.
    Import {
        /// What the handle has of its process.
        nonce: u64,
        /// The allocation's number.
        number: u64,
    },
}

/// What is answered.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It was not done, and why.
    Error(String),
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Pause`].
    Paused(Changed),
    /// To [`Request::Resume`].
    Resumed(Changed),
    /// To [`Request::Import`], with as many descriptors.
    Exported {
        /// What was asked for when it was allocated.
        bytes: u64,
        /// The sizes of its pieces, in order.
        pieces: Vec<u64>,
    },
}

/// Is the program paused?
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// No.
    Running,
    /// It is about to be, or to go on.
    Changing,
    /// Yes.
    Paused,
}

/// A program with the hook.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// Its file.
    pub program: String,
    /// `VMM` or `MONITOR`.
    pub mode: String,
    /// Is it paused?
    pub state: State,
    /// Its threads that wait until it goes on.
    pub waiting: u32,
    /// Its memory; none while it changes.
    pub memory: Option<Accounts>,
    /// What call stacks hold, if that was asked, the most first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stacks: Option<Vec<Holder>>,
}

/// What has how much, in bytes.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Accounts {
    /// What it may have.
    pub quota: Option<u64>,
    /// Virtual memory with memory behind it.
    pub r#virtual: u64,
    /// The driver's own allocations.
    pub native: u64,
    /// Memory of both host and devices, which the driver moves itself.
    pub managed: u64,
    /// What the devices' memory pools hold, also of memory that was freed.
    pub pools: u64,
    /// Physical memory that the program made for its own virtual memory.
    pub physical: u64,
    /// Arrays, as their descriptors say: the driver takes as much at least.
    pub arrays: u64,
    /// What a pause gave back.
    pub paused: u64,
    /// Page-locked memory of the host that is kept for pauses.
    #[serde(default)]
    pub reserved: u64,
    /// What was allocated and gets memory once it is used.
    pub promised: u64,
    /// So much of `virtual` stays where it is, also in a pause.
    pub pinned: u64,
    /// How many allocations there are.
    pub allocations: u64,
    /// The largest of them.
    pub largest: Vec<Owner>,
}

/// An allocation.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Owner {
    /// Where it is; of physical memory and arrays the handle.
    pub address: u64,
    /// What was asked for.
    pub bytes: u64,
    /// Which of virtual memory it was, counted from 1; 0 of the driver's own.
    pub number: u64,
    /// What the program calls it.
    pub tag: Option<String>,
    /// Need its contents not outlive a pause?
    pub droppable: bool,
    /// Does it stay where it is?
    pub pinned: bool,
    /// Did the driver allocate it itself?
    pub native: bool,
    /// `virtual`, or what the driver allocated itself: `device`, `managed`, `pool`, `physical`, `array`.
    pub kind: String,
}

/// What a call stack holds.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// Bytes of all its allocations that are not freed.
    pub bytes: u64,
    /// How many they are.
    pub allocations: u64,
    /// Its functions, the innermost first; none of what was allocated before stacks were recorded.
    pub frames: Vec<Frame>,
}

/// A place in code.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Frame {
    /// The file that it is of; empty if it is of none.
    pub file: String,
    /// How far it is behind the first address that the file is mapped at.
    pub offset: u64,
    /// The function, if the file exports it.
    pub function: Option<String>,
}

/// What a pause or its end did.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// Bytes of devices that were given back or taken again.
    pub bytes: u64,
    /// So many of them without their contents, as the program said that it may be.
    pub dropped: u64,
    /// Pinned bytes that stayed.
    pub pinned: u64,
    /// Bytes of the driver's own allocations, which stayed.
    pub native: u64,
    /// Bytes that the driver did not unmap.
    pub failed: u64,
    /// How long it took.
    pub milliseconds: u64,
}

/// What is wrong with a line.
#[derive(Debug, Error)]
pub enum Wrong {
    /// The other side is gone, or slow.
    #[error("no whole line came: {0}")]
    Lost(#[from] io::Error),
    /// It is too long.
    #[error("more than {0} bytes came without an end of the line")]
    TooLong(usize),
    /// It is not what is understood.
    #[error("not understood: {0}")]
    Json(#[from] serde_json::Error),
}

/// A socket, as far as lines need one.
pub trait Channel: Read + Write {
    /// Lets reads and writes fail after so long.
    ///
    /// # Errors
    /// The system's.
    fn limit(&self, time: Duration) -> io::Result<()>;
}

impl Channel for std::os::unix::net::UnixStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

fn limit(channel: &impl Channel, deadline: Instant) -> io::Result<()> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => channel.limit(left),
    }
}

/// Reads a line of at most so many bytes, all of it before the deadline.
///
/// # Errors
/// [`Wrong`].
pub fn read<T: for<'a> Deserialize<'a>>(
    channel: &mut impl Channel,
    most: usize,
    deadline: Instant,
) -> Result<T, Wrong> {
    let mut line = Vec::new();
    let mut part = [0; 4 << 10];
    loop {
        limit(channel, deadline)?;
        let count = match channel.read(&mut part) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // A deadline that passed reads as "would block".
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            Err(error) => return Err(error.into()),
        };
        let end = part[..count].iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&part[..end.unwrap_or(count)]);
        if line.len() > most {
            return Err(Wrong::TooLong(most));
        }
        if end.is_some() {
            return Ok(serde_json::from_slice(&line)?);
        }
    }
}

/// A value as a line.
///
/// # Errors
/// [`Wrong::Json`].
pub fn line(value: &impl Serialize) -> Result<Vec<u8>, Wrong> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// Writes a line, all of it before the deadline.
///
/// # Errors
/// [`Wrong`].
pub fn write(channel: &mut impl Channel, value: &impl Serialize, deadline: Instant) -> Result<(), Wrong> {
    let line = line(value)?;
    let mut rest = line.as_slice();
    while !rest.is_empty() {
        limit(channel, deadline)?;
        match channel.write(rest) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The directories that a user's sockets may be in, the best first.
pub fn folders(runtime: Option<&Path>, user: u32) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        runtime.filter(|path| path.is_absolute()).map(|path| path.join("vmhook")).into_iter().collect();
    let own = PathBuf::from(format!("/run/user/{user}/vmhook"));
    if !folders.contains(&own) {
        folders.push(own);
    }
    folders.push(format!("/tmp/vmhook-{user}").into());
    // What an address of a socket has no room for.
    folders.retain(|folder| folder.as_os_str().len() <= 80);
    folders
}

/// The name of a process's socket.
pub fn socket(folder: &Path, pid: u32) -> PathBuf {
    folder.join(format!("{pid}.sock"))
}

/// Why a directory is not used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refused {
    /// It is a link, or a file.
    #[error("it is no directory")]
    NoDirectory,
    /// Somebody else's.
    #[error("it belongs to user {0}")]
    Owner(u32),
    /// Others may go in.
    #[error("its mode is {0:o}, not 700")]
    Mode(u32),
}

/// That a directory is the user's alone, by what `lstat` says of it.
///
/// # Errors
/// [`Refused`].
pub fn is_private(is_directory: bool, owner: u32, mode: u32, user: u32) -> Result<(), Refused> {
    match (is_directory, owner == user, mode & 0o7777) {
        (false, ..) => Err(Refused::NoDirectory),
        (_, false, _) => Err(Refused::Owner(owner)),
        (.., 0o700) => Ok(()),
        (.., mode) => Err(Refused::Mode(mode)),
    }
}

/// May who connected from a process of this user ask anything? Only the program's own user.
pub fn may_ask(peer: u32, user: u32) -> bool {
    peer == user
}

/// Feeds arbitrary bytes to the reader of requests and of answers, for fuzzing, in parts of a size that the first byte says: each is understood, and
/// then can be written and read again, or is refused in words.
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    /// What is left to be read, and how much comes at once.
    struct Bytes<'a>(&'a [u8], usize);
    impl Read for Bytes<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(into.len());
            let (part, rest) = self.0.split_at(count);
            into[..count].copy_from_slice(part);
            self.0 = rest;
            Ok(count)
        }
    }
    impl Write for Bytes<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    impl Channel for Bytes<'_> {
        fn limit(&self, _: Duration) -> io::Result<()> {
            Ok(())
        }
    }
    fn again<T: for<'a> Deserialize<'a> + Serialize + PartialEq + std::fmt::Debug>(
        bytes: &[u8],
        size: usize,
    ) {
        let deadline = Instant::now() + Duration::from_secs(60);
        match read::<T>(&mut Bytes(bytes, size), REQUEST, deadline) {
            Ok(value) => {
                let line = line(&value).expect("what was read can be written");
                let same: T = read(&mut Bytes(&line, size), ANSWER, deadline).expect("and read again");
                assert_eq!(same, value);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let (size, data) = data.split_first().map_or((1, data), |(size, rest)| (usize::from(*size) + 1, rest));
    again::<Request>(data, size);
    again::<Answer>(data, size);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a peer sends, in parts.
    struct Peer(Vec<&'static [u8]>, Vec<u8>);

    impl Read for Peer {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let part = self.0.remove(0);
            into[..part.len()].copy_from_slice(part);
            Ok(part.len())
        }
    }

    impl Write for Peer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let part = &bytes[..bytes.len().min(7)];
            self.1.extend_from_slice(part);
            Ok(part.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Channel for Peer {
        fn limit(&self, _: Duration) -> io::Result<()> {
            Ok(())
        }
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn only_requests_are_understood() {
        let check = |parts: &[&'static [u8]], expected: Result<Request, &str>| {
            let read = read::<Request>(&mut Peer(parts.to_vec(), Vec::new()), REQUEST, later());
            match (read, expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read, expected),
                (Err(error), Err(says)) => assert!(error.to_string().contains(says), "{parts:?}: {error}"),
                (read, expected) => panic!("{parts:?}: {read:?}, not {expected:?}"),
            }
        };
        check(&[b"{\"do\":\"resume\"}\n"], Ok(Request::Resume));
        check(&[b"{\"do\":", b"\"pause\",\"timeout\":3}", b"\nmore"], Ok(Request::Pause { timeout: 3 }));
        check(&[b"{\"do\":\"status\"}\n"], Ok(Request::Status { largest: 0, stacks: false }));
        check(&[b"{\"do\":\"pause\"}\n"], Err("timeout"));
        check(&[b"{\"do\":\"pause\",\"timeout\":-1}\n"], Err("not understood"));
        check(&[b"{\"do\":\"explode\"}\n"], Err("unknown variant"));
        check(&[b"\xff\xfe\0\n"], Err("not understood"));
        check(&[b"\n"], Err("not understood"));
        check(&[b"{\"do\":\"resume\"}"], Err("timed out"));
        check(&[b"{\"do\":\"resume\"}", b""], Err("unexpected end of file"));
        check(&[&[b'['; 4000]], Err("timed out"));
        check(&[&[b'['; 4000], b"\n"], Err("not understood"));
        check(&[&[b'['; 4000], &[b'['; 4000]], Err("more than 4096 bytes"));
        check(&[&[b'['; 4000], &[b'\n'; 1], b""], Err("not understood"));
    }

    #[test]
    fn changed_lines_are_refused_in_words() {
        let owner = Owner {
            address: 1 << 40,
            bytes: 7,
            kind: "virtual".into(),
            number: 1,
            tag: Some("\u{1f600}\"\n".into()),
            droppable: true,
            pinned: false,
            native: false,
        };
        let memory = Accounts { quota: Some(u64::MAX), largest: vec![owner], ..Accounts::default() };
        let holder = Holder { bytes: 7, allocations: 1, frames: vec![Frame::default()] };
        let status = Status {
            pid: 7,
            program: "/bin/true".into(),
            mode: "VMM".into(),
            state: State::Paused,
            waiting: 3,
            memory: Some(memory),
            stacks: Some(vec![holder]),
        };
        let lines = [
            line(&Request::Status { largest: 3, stacks: true }),
            line(&Request::Import { nonce: u64::MAX, number: 1 }),
            line(&Request::Pause { timeout: 30 }),
            line(&Answer::Paused(Changed::default())),
            line(&Answer::Status(Box::new(status))),
        ];
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut below = |most: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random as usize % most
        };
        for line in lines {
            let line = [b"\x05", line.expect("JSON").as_slice()].concat();
            fuzz(&line);
            for _ in 0..2_000 {
                let mut changed = line.clone();
                for _ in 0..=below(3) {
                    let at = below(changed.len());
                    match below(3) {
                        0 => changed[at] = below(256) as u8,
                        1 => changed.truncate(at + 1),
                        _ => changed.insert(at, b"\"\\{}[],:0\n"[below(10)]),
                    }
                }
                fuzz(&changed);
            }
        }
    }

    #[test]
    fn answers_come_whole() {
        let mut peer = Peer(Vec::new(), Vec::new());
        let answer = Answer::Exported { bytes: 7, pieces: vec![2 << 20, 4 << 20] };
        write(&mut peer, &answer, later()).expect("a write");
        assert_eq!(peer.1, b"{\"exported\":{\"bytes\":7,\"pieces\":[2097152,4194304]}}\n");
        let late = write(&mut peer, &answer, Instant::now()).expect_err("too late");
        assert!(late.to_string().contains("timed out"), "{late}");
    }

    #[test]
    fn sockets_are_where_their_user_alone_is() {
        let check = |runtime: Option<&str>, expected: &[&str]| {
            assert_eq!(
                folders(runtime.map(Path::new), 7),
                expected.iter().map(PathBuf::from).collect::<Vec<_>>()
            );
        };
        check(None, &["/run/user/7/vmhook", "/tmp/vmhook-7"]);
        check(Some("/run/user/7"), &["/run/user/7/vmhook", "/tmp/vmhook-7"]);
        check(Some("/own"), &["/own/vmhook", "/run/user/7/vmhook", "/tmp/vmhook-7"]);
        check(Some("relative"), &["/run/user/7/vmhook", "/tmp/vmhook-7"]);
        check(Some(&format!("/{}", "long".repeat(30))), &["/run/user/7/vmhook", "/tmp/vmhook-7"]);
        let check = |is_directory, owner, mode, expected| {
            assert_eq!(is_private(is_directory, owner, mode, 7), expected);
        };
        check(true, 7, 0o40700, Ok(()));
        check(true, 8, 0o40700, Err(Refused::Owner(8)));
        check(true, 0, 0o41777, Err(Refused::Owner(0)));
        check(true, 7, 0o40755, Err(Refused::Mode(0o755)));
        check(false, 7, 0o120777, Err(Refused::NoDirectory));
        assert!(may_ask(7, 7) && !may_ask(8, 7) && !may_ask(0, 7));
    }
}
