//! Replays a recording before a server.
//!
//! Calls go by streams, one at a time in the order of their tickets, each to a lane of the server for its lane then. Addresses of device memory are
//! those that this driver gives in the place of those that were recorded, in the frames' words and so in kernels' parameters. Bytes that were not
//! kept are zeros, and what kernels compute is so another; what is compared is each result, and how much is returned.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::{Answer, Call, Part, Recording, ReplayError, name};
use crate::orders;
use crate::wire::{self, Header, VERSION, control};

/// How long an answer is waited for: kernels of a processor take their time.
const PATIENCE: Duration = Duration::from_secs(600);
/// The most differences that are told.
const DIFFERENCES: usize = 100;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;

/// A call that was answered in another way.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Difference {
    /// Its place in the recording.
    pub call: usize,
    /// Its function.
    pub function: &'static str,
    /// The result, and how many bytes were returned, as recorded.
    pub recorded: (u32, usize),
    /// The same now.
    pub replayed: (u32, usize),
}

/// What came of a replay.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Report {
    /// Calls that were made.
    pub calls: usize,
    /// Answers that were compared.
    pub answers: usize,
    /// How many were others.
    pub different: usize,
    /// The first of those.
    pub differences: Vec<Difference>,
}

/// Device memory: where it was, how long it is, where it is now.
#[derive(Debug, Default)]
struct Moved(BTreeMap<u64, (u64, u64)>);

impl Moved {
    /// Where an address of then is now.
    fn find(&self, at: u64) -> Option<u64> {
        let (start, (len, now)) = self.0.range(..=at).next_back()?;
        (at - start <= *len).then(|| now.wrapping_add(at - start))
    }

    /// Replaces addresses in words.
    fn place(&self, bytes: &mut [u8]) {
        for bytes in bytes.as_chunks_mut().0 {
            if let Some(now) = self.find(u64::from_ne_bytes(*bytes)) {
                *bytes = now.to_ne_bytes();
            }
        }
    }

    /// Learns of memory by what gave it.
    fn learn(&mut self, call: &Call, then: &Part, now: &[u8]) {
        let word = |bytes: &[u8], at: usize| {
            bytes
                .get(8 * at..)
                .and_then(|bytes| bytes.first_chunk())
                .map_or(0, |word| u64::from_ne_bytes(*word))
        };
        let len = match name(call.number).map(vm_cuda_api::names::base) {
            Some("cuMemAlloc" | "cuMemAllocAsync" | "cuMemAllocFromPoolAsync" | "cuMemAddressReserve") => {
                word(&call.payload.kept, 1)
            }
            Some("cuMemAllocPitch") => word(&then.kept, 1).saturating_mul(word(&call.payload.kept, 3)),
            Some("cuModuleGetGlobal" | "cuLibraryGetGlobal") => word(&then.kept, 1),
            _ => return,
        };
        if then.kept.len() >= 8 && now.len() >= 8 {
            self.0.insert(word(&then.kept, 0), (len, word(now, 0)));
        }
    }
}

struct Replay<'a> {
    connection: &'a UnixStream,
    lanes: HashMap<u64, UnixStream>,
    /// Memory of the host that the session had, by its address: the lengths, one after another.
    windows: HashMap<u64, VecDeque<u64>>,
    moved: Moved,
}

/// Replays a recording before the server at the other end of a connection.
///
/// # Errors
/// When the server ends, or does not answer.
pub fn replay(connection: &UnixStream, recording: &Recording) -> Result<Report, ReplayError> {
    let mut replay =
        Replay { connection, lanes: HashMap::new(), windows: HashMap::new(), moved: Moved::default() };
    replay.begin(recording).map_err(ReplayError::Begin)?;
    let mut report = Report::default();
    for (at, call) in recording.calls.iter().enumerate() {
        let function = name(call.number).unwrap_or_default();
        let server = |source| ReplayError::Server { call: at, function, source };
        let answer = replay.call(at as u64, call).map_err(server)?;
        report.calls += 1;
        if let (Some(then), Some((code, reply))) = (&call.answer, answer) {
            report.answers += 1;
            if !is_same(function, then, code, reply.len()) {
                report.different += 1;
                if report.differences.len() < DIFFERENCES {
                    let (recorded, replayed) = ((then.code, then.reply.len), (code, reply.len()));
                    report.differences.push(Difference { call: at, function, recorded, replayed });
                }
            }
            if then.code == 0 && code == 0 {
                replay.moved.learn(call, &then.reply, &reply);
            }
        }
    }
    Ok(report)
}

/// Whether work has ended is another matter each time.
fn is_same(function: &str, then: &Answer, code: u32, len: usize) -> bool {
    let asks_whether = function.starts_with("cuStreamQuery") || function == "cuEventQuery";
    let is_either = |code| code == 0 || code == NOT_READY;
    if asks_whether && is_either(then.code) && is_either(code) {
        return true;
    }
    // Whole words are returned by a stream, and bytes in memory.
    then.code == code && then.reply.len.next_multiple_of(8) == len.next_multiple_of(8)
}

impl Replay<'_> {
    fn give(&self, order: orders::Order, more: &[u8], file: Option<&OwnedFd>) -> io::Result<u64> {
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        orders::give(self.connection, order, more, &files)
    }

    /// Begins the session, and does what had no turn among the calls.
    fn begin(&mut self, recording: &Recording) -> io::Result<()> {
        self.connection.set_read_timeout(Some(PATIENCE))?;
        self.connection.set_write_timeout(Some(PATIENCE))?;
        let refused = |code| io::Error::other(format!("CUDA's error {code}"));
        match self.give([control::HELLO, VERSION.into(), 0, 0], &[], None)? {
            0 => {}
            code => return Err(refused(code)),
        }
        for (order, more) in &recording.orders {
            match *order {
                [control::VARIABLE, name, ..] => {
                    // One that this server does not take is of the machine where it was recorded.
                    self.give([control::VARIABLE, name, more.len() as u64, 0], more, None)?;
                }
                [control::WINDOW, at, len, _] => self.windows.entry(at).or_default().push_back(len),
                [control::CALLBACKS, ..] => self.callbacks()?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Has functions of the program, which is not there, return at once.
    fn callbacks(&self) -> io::Result<()> {
        let (mut ours, theirs) = UnixStream::pair()?;
        self.give([control::CALLBACKS, 0, 0, 0], &[], Some(&theirs.into()))?;
        let answer = move || {
            let mut words = [0; 8 * control::CALL];
            while ours.read_exact(&mut words).and_then(|()| ours.write_all(&[0; 8])).is_ok() {}
        };
        std::thread::Builder::new().name("callbacks".into()).spawn(answer).map(drop)
    }

    fn lane(&mut self, lane: u64) -> io::Result<&UnixStream> {
        if !self.lanes.contains_key(&lane) {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_read_timeout(Some(PATIENCE))?;
            ours.set_write_timeout(Some(PATIENCE))?;
            match self.give([control::LANE, 0, 0, 0], &[], Some(&theirs.into()))? {
                0 => self.lanes.insert(lane, ours),
                code => return Err(io::Error::other(format!("no lane: CUDA's error {code}"))),
            };
        }
        self.lanes.get(&lane).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Makes memory of the host that a call is of.
    fn window(&mut self, call: &Call) -> io::Result<()> {
        let at = call.payload.kept.first_chunk().map(|word| u64::from_ne_bytes(*word));
        let Some(len) = at.and_then(|at| self.windows.get_mut(&at)?.pop_front()) else { return Ok(()) };
        let file = memfd_create("replayed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        // If there is no such memory, the call says so.
        self.give([control::WINDOW, at.unwrap_or(0), len, 0], &[], Some(&file)).map(drop)
    }

    /// Makes a call; the result and what was returned, of one that is answered.
    fn call(&mut self, ticket: u64, call: &Call) -> io::Result<Option<(u32, Vec<u8>)>> {
        if name(call.number) == Some("cuMemHostAlloc") {
            self.window(call)?;
        }
        let asks = call.answer.is_some();
        // Inline they are whole words.
        let len = (call.payload.len + call.bulk.len.next_multiple_of(8)) as u32;
        let header = Header { len, call: call.number, asks, is_bulk: false, ticket };
        let mut frame = header.to_bytes().to_vec();
        frame.extend_from_slice(&call.payload.kept);
        if call.number != wire::own::IMAGE {
            self.moved.place(&mut frame[Header::SIZE..]);
        }
        frame.resize(Header::SIZE + len as usize, 0);
        let mut lane = self.lane(call.lane)?;
        lane.write_all(&frame)?;
        if !asks {
            return Ok(None);
        }
        let mut head = [0; wire::Answer::SIZE];
        lane.read_exact(&mut head)?;
        let answer = wire::Answer::from_bytes(head).map_err(io::Error::other)?;
        let mut reply = vec![0; answer.len as usize];
        lane.read_exact(&mut reply)?;
        // What is printed is this process's, and is not asked for.
        Ok(Some((answer.code & !wire::Answer::PRINTED, reply)))
    }
}
