//! Memory and events that programs of one server share: what a worker exports, another finds by a token that nobody guesses.
//!
//! The driver's own handles are numbers that whoever knows of processes makes up. They stay between workers and their server: a program has the token,
//! and what it makes up reaches no driver. A worker that was taken over finds what its program could find. What it exports is gone with it.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use super::session::locked;
use crate::orders;
use crate::wire::code;
use crate::wire::preamble::{TOKEN, Token, random};

/// Bytes of a `CUipcMemHandle`, and of a `CUipcEventHandle`.
pub(super) const HANDLE: usize = 64;
/// The most that a worker exports.
const MOST: usize = 1 << 12;
/// The most files that it does: the server keeps them open.
const MOST_FILES: usize = 64;

/// What is shared.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Kind {
    Memory,
    Event,
}

/// A handle of either side.
pub(super) type Handle = [u8; HANDLE];

/// What a worker asks: 0 to export and 2 to find, and 1 more for events.
fn question(kind: Kind, finds: bool) -> u8 {
    u8::from(kind == Kind::Event) + if finds { 2 } else { 0 }
}

/// Exports a file, finds one, and forgets one.
const FILES: [u8; 3] = [4, 5, 6];

/// Words in place of a handle.
fn with_words<const COUNT: usize>(words: [u64; COUNT]) -> Handle {
    let mut handle = [0; HANDLE];
    words.iter().zip(handle.chunks_mut(8)).for_each(|(word, to)| to.copy_from_slice(&word.to_ne_bytes()));
    handle
}

fn first_word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word))
}

/// The server's permission to keep a file open, which ends when it is dropped.
pub type Permit = Box<dyn Send>;

/// A file of memory.
struct Exported {
    by: u64,
    file: Arc<OwnedFd>,
    bytes: u64,
    _permit: Permit,
}

/// What all workers of a server export.
#[derive(Clone, Default)]
pub struct Exports(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    workers: u64,
    exported: HashMap<Token, (u64, Kind, Handle)>,
    /// The driver's files of memory, by token.
    files: HashMap<Token, Exported>,
    /// What each worker exports.
    tokens: HashMap<u64, HashMap<(Kind, Handle), Token>>,
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Exports")
    }
}

impl Exports {
    /// Answers what a worker asks, until it ends; what it exported is found no more then.
    ///
    /// # Errors
    /// When the connection fails, or a worker asks for something else.
    pub fn serve(&self, worker: &UnixStream) -> io::Result<()> {
        self.serve_with(worker, &|| Some(Box::new(())))
    }

    /// The same, where each file that the worker exports takes a permit.
    ///
    /// # Errors
    /// As for [`serve`](Self::serve).
    pub fn serve_with(&self, worker: &UnixStream, permit: &dyn Fn() -> Option<Permit>) -> io::Result<()> {
        let number = {
            let mut table = locked(&self.0);
            table.workers += 1;
            table.workers
        };
        let result = loop {
            let mut asked = [0; 1 + HANDLE];
            let mut files = match orders::take(worker, &mut asked) {
                Err(error) => break Err(error),
                Ok(None) => break Ok(()),
                Ok(Some(files)) => files,
            };
            let [question, handle @ ..] = asked;
            let kind = if question & 1 == 0 { Kind::Memory } else { Kind::Event };
            let mut found = None;
            let [export_file, find_file, forget_file] = FILES;
            let answer = match (question, files[0].take()) {
                (0 | 1, None) => self.export(number, kind, handle),
                (2 | 3, None) => self.find(kind, handle),
                (of, Some(file)) if of == export_file => {
                    self.export_file(number, file, first_word(&handle), permit)
                }
                (of, None) if of == find_file => self.find_file(&handle).map(|(file, bytes)| {
                    found = Some(file);
                    with_words([bytes])
                }),
                (of, None) if of == forget_file => {
                    self.forget_file(number, &handle);
                    Ok(handle)
                }
                _ => break Err(io::ErrorKind::InvalidData.into()),
            };
            let (code, handle) = answer.map_or_else(|code| (code, [0; HANDLE]), |handle| (0, handle));
            let found = found.as_ref().map(|file| file.as_fd());
            if let Err(error) =
                orders::send(worker, &[&code.to_ne_bytes()[..], &handle].concat(), found.as_slice())
            {
                break Err(error);
            }
        };
        let mut table = locked(&self.0);
        table.exported.retain(|_, (by, ..)| *by != number);
        table.files.retain(|_, file| file.by != number);
        table.tokens.remove(&number);
        result
    }

    /// The token of what a worker exports: always the same of the same.
    fn export(&self, by: u64, kind: Kind, handle: Handle) -> Result<Handle, u32> {
        let table = &mut *locked(&self.0);
        let tokens = table.tokens.entry(by).or_default();
        let token = match tokens.get(&(kind, handle)) {
            Some(token) => *token,
            None if tokens.len() >= MOST => return Err(code::OUT_OF_MEMORY),
            None => {
                let token = random().map_err(|_| code::OUT_OF_MEMORY)?;
                table.exported.insert(token, (by, kind, handle));
                tokens.insert((kind, handle), token);
                token
            }
        };
        let mut given = [0; HANDLE];
        given[..TOKEN].copy_from_slice(&token);
        Ok(given)
    }

    fn export_file(
        &self,
        by: u64,
        file: OwnedFd,
        bytes: u64,
        permit: &dyn Fn() -> Option<Permit>,
    ) -> Result<Handle, u32> {
        let files = &mut locked(&self.0).files;
        if files.values().filter(|file| file.by == by).count() >= MOST_FILES {
            return Err(code::OUT_OF_MEMORY);
        }
        let permit = permit().ok_or(code::OUT_OF_MEMORY)?;
        let token = random().map_err(|_| code::OUT_OF_MEMORY)?;
        files.insert(token, Exported { by, file: Arc::new(file), bytes, _permit: permit });
        let mut given = [0; HANDLE];
        given[..TOKEN].copy_from_slice(&token);
        Ok(given)
    }

    fn find_file(&self, given: &Handle) -> Result<(Arc<OwnedFd>, u64), u32> {
        let token = given.first_chunk().ok_or(code::INVALID_VALUE)?;
        let table = locked(&self.0);
        let found = table.files.get(token).ok_or(code::INVALID_VALUE)?;
        Ok((Arc::clone(&found.file), found.bytes))
    }

    /// Only who exported it does.
    fn forget_file(&self, by: u64, given: &Handle) {
        locked(&self.0).files.retain(|token, file| file.by != by || given.first_chunk() != Some(token));
    }

    fn find(&self, kind: Kind, given: Handle) -> Result<Handle, u32> {
        let (token, rest) = given.split_first_chunk().ok_or(code::INVALID_VALUE)?;
        let table = locked(&self.0);
        let found = table.exported.get(token).filter(|(_, known, _)| *known == kind);
        let is_whole = rest.iter().all(|byte| *byte == 0);
        found.filter(|_| is_whole).map(|(.., handle)| *handle).ok_or(code::INVALID_VALUE)
    }
}

/// A worker's connection for them.
#[derive(Debug)]
pub(super) struct Sharing(Mutex<UnixStream>);

impl Sharing {
    pub(super) fn new(server: UnixStream) -> Self {
        Self(Mutex::new(server))
    }

    /// What a program is given for a handle of the driver.
    pub(super) fn export(&self, kind: Kind, handle: Handle) -> Result<Handle, u32> {
        self.ask(question(kind, false), handle)
    }

    /// The driver's handle for what a program was given.
    pub(super) fn find(&self, kind: Kind, given: Handle) -> Result<Handle, u32> {
        self.ask(question(kind, true), given)
    }

    /// What a program is given for a file of the driver, of so much memory, and what it says when that is closed.
    pub(super) fn export_file(&self, file: &OwnedFd, bytes: u64) -> Result<(Handle, [u64; 2]), u32> {
        let (given, _) = self.exchange(FILES[0], with_words([bytes]), Some(file.as_fd()))?;
        Ok((given, [first_word(&given), first_word(&given[8..])]))
    }

    /// The driver's file for what a program was given, and how much memory it is.
    pub(super) fn find_file(&self, given: Handle) -> Result<(OwnedFd, u64), u32> {
        let (answer, file) = self.exchange(FILES[1], given, None)?;
        Ok((file.ok_or(code::INVALID_VALUE)?, first_word(&answer)))
    }

    /// Has what a program exported closed, of which it has no file any more.
    pub(super) fn forget(&self, token: [u64; 2]) -> Result<(), u32> {
        self.ask(FILES[2], with_words(token)).map(drop)
    }

    fn ask(&self, question: u8, handle: Handle) -> Result<Handle, u32> {
        self.exchange(question, handle, None).map(|(handle, _)| handle)
    }

    fn exchange(
        &self,
        question: u8,
        handle: Handle,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<(Handle, Option<OwnedFd>), u32> {
        let server = locked(&self.0);
        let mut answer = [0; 4 + HANDLE];
        let asked =
            orders::send(&server, &[&[question][..], &handle].concat(), file.as_slice()).and_then(|()| {
                orders::take(&server, &mut answer)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
            });
        let files = asked.map_err(|error| {
            tracing::warn!(%error, "the server says no more what programs share");
            // Nobody knows what the next answer would be of. It may have been closed already.
            let _ = server.shutdown(Shutdown::Both);
            code::NOT_SUPPORTED
        })?;
        let [a, b, c, d, handle @ ..] = answer;
        let [file, _] = files;
        match u32::from_ne_bytes([a, b, c, d]) {
            0 => Ok((handle, file)),
            code => Err(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker's connection, and what it does when it has ended.
    fn worker(exports: &Exports) -> (Sharing, std::thread::JoinHandle<io::Result<()>>) {
        let (near, far) = UnixStream::pair().unwrap();
        let exports = exports.clone();
        (Sharing::new(near), std::thread::spawn(move || exports.serve(&far)))
    }

    #[test]
    fn a_token_is_good_for_what_it_was_given_for_as_long_as_its_worker_lives() {
        let (exports, others) = (Exports::default(), Exports::default());
        let (one, ended) = worker(&exports);
        let (two, _) = worker(&exports);
        let (three, _) = worker(&others);
        let given = one.export(Kind::Memory, [7; HANDLE]).unwrap();
        assert_eq!(one.export(Kind::Memory, [7; HANDLE]), Ok(given));
        assert_ne!(two.export(Kind::Memory, [7; HANDLE]), Ok(given));
        assert_ne!(one.export(Kind::Event, [7; HANDLE]), Ok(given));
        assert_eq!(two.find(Kind::Memory, given), Ok([7; HANDLE]));
        let mut forged = given;
        forged[3] ^= 1;
        let mut longer = given;
        longer[HANDLE - 1] = 1;
        let refused = Err(code::INVALID_VALUE);
        assert_eq!(two.find(Kind::Memory, forged), refused);
        assert_eq!(two.find(Kind::Memory, longer), refused);
        assert_eq!(two.find(Kind::Event, given), refused);
        // The driver's own handle.
        assert_eq!(two.find(Kind::Memory, [7; HANDLE]), refused);
        assert_eq!(three.find(Kind::Memory, given), refused);
        drop(one);
        ended.join().unwrap().unwrap();
        assert_eq!(two.find(Kind::Memory, given), refused);
    }

    #[test]
    fn a_file_is_found_until_who_exported_it_forgets_it() {
        let exports = Exports::default();
        let ((one, ended), (two, _)) = (worker(&exports), worker(&exports));
        let file = |name| rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let number = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        let (first, second) = (file("first"), file("second"));
        let (given, token) = one.export_file(&first, 77).unwrap();
        let (other, _) = one.export_file(&second, 0).unwrap();
        assert_eq!(
            two.find_file(given).map(|(file, bytes)| (number(&file), bytes)),
            Ok((number(&first), 77))
        );
        assert_eq!(two.find(Kind::Memory, given), Err(code::INVALID_VALUE));
        // It is not its own to forget.
        two.forget(token).unwrap();
        assert!(two.find_file(given).is_ok());
        one.forget(token).unwrap();
        assert!(matches!(two.find_file(given), Err(code::INVALID_VALUE)));
        assert_eq!(two.find_file(other).map(|(file, _)| number(&file)), Ok(number(&second)));
        for _ in 1..MOST_FILES {
            one.export_file(&first, 0).unwrap();
        }
        assert_eq!(one.export_file(&first, 0), Err(code::OUT_OF_MEMORY));
        drop(one);
        ended.join().unwrap().unwrap();
        assert!(matches!(two.find_file(other), Err(code::INVALID_VALUE)));
    }

    #[test]
    fn a_worker_exports_no_more_than_it_may_and_asks_for_nothing_else() {
        let exports = Exports::default();
        let (one, _) = worker(&exports);
        for number in 0..MOST as u64 {
            let mut handle = [0; HANDLE];
            handle[..8].copy_from_slice(&number.to_ne_bytes());
            exports.export(1, Kind::Memory, handle).unwrap();
        }
        assert_eq!(exports.export(1, Kind::Memory, [9; HANDLE]), Err(code::OUT_OF_MEMORY));
        assert_eq!(one.ask(9, [0; HANDLE]), Err(code::NOT_SUPPORTED));
        assert_eq!(one.find(Kind::Memory, [0; HANDLE]), Err(code::NOT_SUPPORTED));
    }

    #[test]
    fn a_file_is_exported_with_a_permit_that_ends_with_it() {
        let exports = Exports::default();
        let (near, far) = UnixStream::pair().unwrap();
        let permits = Arc::new(());
        let server = std::thread::spawn(move || {
            let permit = || (Arc::strong_count(&permits) < 4).then(|| Box::new(permits.clone()) as Permit);
            let served = exports.serve_with(&far, &permit);
            (served, Arc::strong_count(&permits))
        });
        let worker = Sharing::new(near);
        let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let [(_, first), ..] = [(); 3].map(|()| worker.export_file(&file, 0).unwrap());
        assert_eq!(worker.export_file(&file, 0), Err(code::OUT_OF_MEMORY));
        worker.forget(first).unwrap();
        worker.export_file(&file, 0).unwrap();
        assert_eq!(worker.export_file(&file, 0), Err(code::OUT_OF_MEMORY));
        drop(worker);
        let (served, left) = server.join().unwrap();
        served.unwrap();
        assert_eq!(left, 1);
    }
}
