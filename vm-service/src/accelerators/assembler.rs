//! What makes code objects for a worker on an AMD GPU.
//!
//! Nothing in the worker's own process takes LLVM IR, as NVIDIA's driver takes PTX, and once it is confined it starts no others. So
//! before that it starts one process more, which has a user of its own, opens libraries alone, and runs LLVM for it, each time
//! in [processes with limits](vm_passthrough::accelerator::rocm::assemble):
//!
//! ```text
//! worker ──socket──▶ assembler ──▶ llc, ld.lld
//!        IR (memfd), a pipe ▶       ◀ the code object, by the pipe
//! ```
//!
//! What was taken over by a guest's IR holds nothing of the guest, its GPU or the VMM. It ends when the worker does.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use vm_jit::Target;
use vm_passthrough::accelerator::rocm::assemble::{Assembler, Limits, VARIABLE, end_all};
use vm_passthrough::accelerator::{Assemble, AssembleError};

use crate::os::process::{packets, socketpair};
use crate::os::sandbox::{self, Measures, Nodes, Profile};

/// How long LLVM may take for a module, within what the worker has for it.
const LIMITS: Limits = Limits { time: Duration::from_secs(10), memory: 2 << 30, output: 64 << 20 };
/// How long an answer is waited for: behind others.
const ANSWER: Duration = Duration::from_secs(25);
/// How long its start is waited for.
const START: Duration = Duration::from_secs(20);
/// How many modules are assembled at a time, and how many wait.
const THREADS: usize = 2;
const WAITING: usize = 32;
/// The most bytes of a module's LLVM IR.
const INPUT: u64 = 64 << 20;
/// What an answer begins with: the code object follows, or the reason why there is none.
const GOOD: u8 = 1;
const BAD: u8 = 0;

/// A message of the worker.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// The first: confine yourself, and look for LLVM.
    Begin(Measures),
    /// Assemble for a chip. With the LLVM IR, and the pipe for the answer.
    Assemble(String),
}

/// The answer to the first: what [`Assemble::identity`] says, or why there is no assembler.
type Begun = Result<String, String>;

/// The worker's end.
#[derive(Debug)]
pub(super) struct Remote {
    socket: OwnedFd,
    identity: String,
}

impl Remote {
    /// Starts the process, which is this program by its hidden command.
    ///
    /// # Errors
    /// When it can't be started, or finds no LLVM; with what to do.
    pub(super) fn start(measures: Measures) -> Result<Self, String> {
        let failed = |error: io::Error| format!("the assembler's process can't be started: {error}");
        let (socket, theirs) = socketpair().map_err(failed)?;
        let program = std::env::current_exe().map_err(failed)?;
        let started =
            Command::new(program).arg("accelerator-assembler").stdin(theirs).stdout(Stdio::null()).spawn();
        // It ends when the socket is closed, as this process ends: nobody waits for it.
        drop(started.map_err(failed)?);
        Self::begin(socket, measures)
    }

    /// Begins with what is at the other end of a socket.
    ///
    /// # Errors
    /// When it finds no LLVM, or has gone.
    pub(super) fn begin(socket: OwnedFd, measures: Measures) -> Result<Self, String> {
        let failed = |error: io::Error| format!("the assembler's process does not answer: {error}");
        packets::send(&socket, &Order::Begin(measures), &[]).map_err(failed)?;
        readable(&socket, Instant::now() + START).map_err(failed)?;
        match packets::receive::<Begun>(&socket).map_err(failed)? {
            Some((begun, _)) => Ok(Self { socket, identity: begun? }),
            None => Err(failed(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    fn ask(&self, code: &[u8], chip: &str) -> io::Result<Vec<u8>> {
        let mut input = File::from(memfd_create("llvm-ir", MemfdFlags::CLOEXEC)?);
        input.write_all(code)?;
        let (answer, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        packets::offer(&self.socket, &Order::Assemble(chip.into()), &[input.as_fd(), theirs.as_fd()])?;
        drop(theirs);
        let (until, mut answer, mut bytes) = (Instant::now() + ANSWER, File::from(answer), Vec::new());
        let mut part = vec![0; 64 << 10];
        loop {
            readable(&answer, until)?;
            match answer.read(&mut part)? {
                0 => return Ok(bytes),
                read => bytes.extend_from_slice(&part[..read]),
            }
            if bytes.len() as u64 > LIMITS.output + 1 {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
        }
    }
}

impl Assemble for Remote {
    fn product(&self) -> String {
        "code object".into()
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn assemble(&self, code: &[u8], target: &Target) -> Result<Vec<u8>, AssembleError> {
        let Target::Amdgcn(options) = target else {
            return Err(format!("{target} is not an AMD GPU").into());
        };
        let answer = self
            .ask(code, options.chip.name())
            .map_err(|error| format!("the assembler's process gave no answer: {error}"))?;
        match answer.split_first() {
            Some((&GOOD, object)) => Ok(object.to_vec()),
            Some((_, reason)) => Err(String::from_utf8_lossy(reason).into()),
            None => Err("the assembler's process has too much to do or has ended".into()),
        }
    }
}

/// Waits until there is something to read, or an end.
fn readable(file: impl std::os::fd::AsFd, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&timeout)) {
            Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The process, until the worker ends. Standard input is its socket.
pub(crate) fn main() -> Result<(), String> {
    let socket = sandbox::enter(Some(sandbox::WORKER_FILES))?;
    let ended = serve(&socket, |measures| {
        // It starts programs, so that its system calls are not listed.
        let measures = Measures { calls: false, ..measures };
        let confinement = sandbox::settle(Profile::Driver, measures, Nodes::None, &[])?;
        tracing::debug!(%confinement, "the assembler is confined");
        Assembler::find()
            .map_err(|error| format!("{error}, below a folder that this process may open: see {VARIABLE}"))
    });
    end_all();
    ended
}

/// Does what a worker asks, once `begin` has found an assembler.
fn serve(socket: &OwnedFd, begin: impl FnOnce(Measures) -> Result<Assembler, String>) -> Result<(), String> {
    let gone = |error: io::Error| format!("nothing can be read from the worker: {error}");
    let assembler = match packets::receive::<Order>(socket).map_err(gone)? {
        Some((Order::Begin(measures), _)) => begin(measures).map(|found| found.limits(LIMITS)),
        Some(_) => return Err("the first order is not to begin".into()),
        None => return Ok(()),
    };
    let begun: Begun = assembler.as_ref().map(Assembler::identity).map_err(Clone::clone);
    packets::send(socket, &begun, &[]).map_err(gone)?;
    let assembler = assembler?;
    let (orders, waiting) = sync_channel(WAITING);
    let waiting = Arc::new(Mutex::new(waiting));
    for _ in 0..THREADS {
        let (waiting, assembler) = (Arc::clone(&waiting), assembler.clone());
        let work = move || work(&waiting, &assembler);
        std::thread::Builder::new()
            .name("assembler".into())
            .spawn(work)
            .map_err(|error| format!("a thread can't be started: {error}"))?;
    }
    loop {
        match packets::receive::<Order>(socket).map_err(gone)? {
            None => return Ok(()),
            Some((Order::Begin(_), _)) => return Err("it was begun twice".into()),
            Some((Order::Assemble(chip), files)) => {
                let Ok([input, answer]) = <[OwnedFd; 2]>::try_from(files) else {
                    return Err("what is to be assembled comes with two files".into());
                };
                match orders.try_send((chip, File::from(input), File::from(answer))) {
                    // The pipe ends without an answer.
                    Ok(()) | Err(TrySendError::Full(_)) => {}
                    Err(TrySendError::Disconnected(_)) => return Err("its threads have ended".into()),
                }
            }
        }
    }
}

type Waiting = Mutex<Receiver<(String, File, File)>>;

/// Assembles one module after the other.
fn work(waiting: &Waiting, assembler: &Assembler) {
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((chip, input, mut answer)) = next else { return };
        let made = read(&input)
            .map_err(|error| format!("its input can't be read: {error}"))
            .and_then(|code| assembler.assemble(&code, &chip).map_err(|error| error.to_string()));
        let (kind, bytes) = made.map_or_else(|reason| (BAD, reason.into_bytes()), |object| (GOOD, object));
        // A worker that does not wait has its reasons.
        if let Err(error) = answer.write_all(&[kind]).and_then(|()| answer.write_all(&bytes)) {
            tracing::debug!(%error, "the worker took no answer");
        }
    }
}

/// All of a file, from its beginning.
fn read(file: &File) -> io::Result<Vec<u8>> {
    let bytes = file.metadata()?.len();
    if bytes > INPUT {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut code = vec![0; bytes as usize];
    file.read_exact_at(&mut code, 0)?;
    Ok(code)
}

/// One that runs in this process, on a thread.
///
/// # Errors
/// When there is no LLVM.
#[cfg(test)]
pub(super) fn here() -> Result<Remote, String> {
    let (socket, theirs) = socketpair().map_err(|error| error.to_string())?;
    std::thread::spawn(move || {
        // What was wrong the other end is told.
        let _ = serve(&theirs, |_| Assembler::find().map_err(|error| error.to_string()));
    });
    Remote::begin(socket, Measures::without(&sandbox::Measure::ALL))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap()
    }

    #[test]
    fn code_comes_back_or_the_reason() {
        let remote = match here() {
            Ok(remote) => remote,
            Err(reason) => return println!("skipped: {reason}"),
        };
        let good = b"define amdgpu_kernel void @k() { ret void }";
        let check =
            |code: &[u8], on: &str, told: Option<&str>| match (remote.assemble(code, &target(on)), told) {
                (Ok(object), None) => assert!(object.starts_with(b"\x7fELF"), "{object:?}"),
                (Err(error), Some(told)) => assert!(error.to_string().contains(told), "{error}"),
                (answer, told) => panic!("{answer:?}, not {told:?}"),
            };
        check(good, "amdgcn:gfx942", None);
        check(b"define amdgpu_kernel void @k() {", "amdgcn:gfx942", Some("refused the code"));
        check(good, "amdgcn:gfx1100", None);
        check(good, "cpu", Some("is not an AMD GPU"));
        // Several threads ask at a time.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| check(good, "amdgcn:gfx1201", None));
            }
        });
        assert!(remote.identity().starts_with("llvm O2 "));
    }

    #[test]
    fn what_is_no_order_ends_it() {
        let find = |_| Assembler::find().map_err(|error| error.to_string());
        let ended = |send: &dyn Fn(&OwnedFd)| {
            let (ours, theirs) = socketpair().unwrap();
            send(&ours);
            drop(ours);
            serve(&theirs, find)
        };
        assert_eq!(ended(&|_| ()), Ok(()));
        let order = |ours: &OwnedFd, order: &Order| packets::send(ours, order, &[]).unwrap();
        let early = ended(&|ours| order(ours, &Order::Assemble("gfx942".into())));
        assert_eq!(early, Err("the first order is not to begin".into()));
        let begin = Order::Begin(Measures::without(&sandbox::Measure::ALL));
        let no = ended(&|ours| order(ours, &begin));
        // The other end has gone before it is told.
        assert!(no.is_err(), "{no:?}");
        let (ours, theirs) = socketpair().unwrap();
        order(&ours, &begin);
        let absent = serve(&theirs, |_| Err("there is none".into()));
        assert_eq!(absent, Err("there is none".into()));
        let (begun, _) = packets::receive::<Begun>(&ours).unwrap().unwrap();
        assert_eq!(begun, Err("there is none".into()));
    }
}
