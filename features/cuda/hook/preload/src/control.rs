//! Answers who asks from outside: over a socket of the user's alone, by threads of its own, which no signal of the program's comes to.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg,
    sockopt::{socket_error, socket_peercred},
};
use vm_hook::client;
use vm_hook::control::{self, Accounts, Answer, Changed, Request, State, Status};
use vm_hook::log::{self, Level, Value};
use vm_hook::options::{Mode, Options};

use crate::{gate, hook, pause, sys};

/// How long a request may come, and an answer be taken.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How many are answered at the same time.
const CONNECTIONS: usize = 64;
/// The most descriptors that one answer takes along; the system's limit is 253.
pub(crate) const DESCRIPTORS: usize = 250;
/// The most call stacks that are told.
const STACKS: usize = 100;

/// The socket, and whose it is.
static SOCKET: OnceLock<(PathBuf, u32)> = OnceLock::new();

/// The descriptor that is listened to.
static LISTENS: AtomicI32 = AtomicI32::new(-1);

/// Begins to answer, once. A program that can't be asked runs on.
pub(crate) fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let listener = match bind() {
            Ok(listener) => listener,
            Err(text) => {
                let text = format!("there is no socket, so nobody can pause this program: {text}");
                return log::line(Level::Error, "control", &[("text", Value::Text(text))]);
            }
        };
        let started =
            sys::without_signals(|| Builder::new().name("vmhook-control".into()).spawn(|| listen(listener)));
        if let Err(error) = started {
            log::line(
                Level::Error,
                "control",
                &[("text", Value::Text(format!("no thread answers: {error}")))],
            );
            remove();
        }
    });
}

/// In a child that was forked: it has nobody who answers, and does not look as if.
pub(crate) fn forget() {
    sys::close(LISTENS.swap(-1, Ordering::AcqRel));
}

/// Does the program have a socket?
pub(crate) fn is_on() -> bool {
    SOCKET.get().is_some_and(|(_, pid)| *pid == std::process::id())
}

/// Removes the socket, in the process that made it.
pub(crate) fn remove() {
    if let Some((path, pid)) = SOCKET.get()
        && *pid == std::process::id()
    {
        let _ = std::fs::remove_file(path);
    }
}

fn bind() -> Result<UnixListener, String> {
    let mut wrong = Vec::new();
    for folder in client::folders() {
        match bind_in(&folder) {
            Ok((listener, path)) => {
                let _ = SOCKET.set((path, std::process::id()));
                LISTENS.store(listener.as_raw_fd(), Ordering::Release);
                return Ok(listener);
            }
            Err(error) => wrong.push(format!("{}: {error}", folder.display())),
        }
    }
    Err(wrong.join("; "))
}

fn bind_in(folder: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let opened = client::prepare(folder)?;
    remove_stale(folder);
    let path = control::socket(folder, std::process::id());
    if std::fs::symlink_metadata(&path).is_ok() {
        return Err(io::Error::other("a process of this number answers there already"));
    }
    // Who finds it finds one that is listened to: others remove what nobody listens to.
    let [new, there] =
        ["new", "sock"].map(|end| client::within(&opened, format!("{}.{end}", std::process::id())));
    client::remove_stale(&new);
    let listener = UnixListener::bind(&new)?;
    std::fs::rename(&new, &there)?;
    Ok((listener, path))
}

/// Removes sockets that nobody listens to any more.
fn remove_stale(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten().take(1000) {
        let path = entry.path();
        if path.extension().is_some_and(|end| end == "sock") {
            client::remove_stale(&path);
        }
    }
}

fn listen(listener: UnixListener) {
    static OPEN: AtomicUsize = AtomicUsize::new(0);
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // As when the program has no descriptors left.
            Err(_) => {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if OPEN.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS {
            OPEN.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let started = Builder::new().name("vmhook-answer".into()).spawn(move || {
            hook::inside(|| serve(stream));
            OPEN.fetch_sub(1, Ordering::AcqRel);
        });
        if started.is_err() {
            OPEN.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn serve(mut stream: UnixStream) {
    let user = rustix::process::geteuid().as_raw();
    // Who is not known is not answered.
    if !socket_peercred(&stream).is_ok_and(|peer| control::may_ask(peer.uid.as_raw(), user)) {
        return;
    }
    let request = control::read(&mut stream, control::REQUEST, Instant::now() + TIMEOUT);
    let (mut files, mut kept) = (Vec::new(), Vec::new());
    let answer = match request {
        Err(error) => Answer::Error(error.to_string()),
        Ok(Request::Status { largest, stacks }) => {
            Answer::Status(Box::new(status(largest.min(10_000), stacks)))
        }
        Ok(Request::Pause { timeout }) => {
            let (time, start) = (Duration::from_secs(timeout.min(control::LONGEST)), Instant::now());
            let deliver = |changed: Changed| {
                let answer = Answer::Paused(since(start, changed));
                let until = Instant::now() + TIMEOUT;
                send(&stream, &answer, &[]).is_ok() && is_received(&stream, until)
            };
            match pause::pause(time, || is_there(&stream), deliver) {
                Ok(()) => return,
                Err(text) => Answer::Error(text),
            }
        }
        Ok(Request::Resume) => {
            let start = Instant::now();
            match pause::resume() {
                Ok((changed, saved)) => {
                    // The thread frees it after the response, when the program runs again.
                    kept = saved;
                    Answer::Resumed(since(start, changed))
                }
                Err(text) => Answer::Error(text),
            }
        }
        Ok(Request::Import { nonce, number }) => match crate::sharing::export(nonce, number) {
            Ok((bytes, pieces, descriptors)) => {
                files = descriptors;
                Answer::Exported { bytes, pieces }
            }
            Err(text) => Answer::Error(text),
        },
    };
    // Who is gone gets no answer; what was done stays done.
    let _ = match files.is_empty() {
        true => control::write(&mut stream, &answer, Instant::now() + TIMEOUT).map_err(io::Error::other),
        false => send(&stream, &answer, &files),
    };
    drop(kept);
}

/// Is the other side there, which need not have more to say?
fn is_there(stream: &UnixStream) -> bool {
    let mut one = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut one, Some(&now)).is_err() || !one[0].revents().contains(PollFlags::HUP)
}

/// Waits until the client has read all that was written. A client that is gone before, or reads nothing until the deadline, has not.
fn is_received(stream: &UnixStream, deadline: Instant) -> bool {
    loop {
        // If the client closes its end with unread bytes, Linux sets an error before it drops them.
        let unread = sys::unread(stream);
        if !matches!(socket_error(stream), Ok(Ok(()))) {
            return false;
        }
        if unread == 0 {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a short answer, and descriptors beside it.
fn send(mut stream: &UnixStream, answer: &Answer, files: &[OwnedFd]) -> io::Result<()> {
    let line = control::line(answer).map_err(io::Error::other)?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let borrowed: Vec<_> = files.iter().map(std::os::fd::AsFd::as_fd).collect();
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(io::Error::other("too many descriptors"));
    }
    let sent = sendmsg(stream, &[io::IoSlice::new(&line)], &mut ancillary, SendFlags::NOSIGNAL)?;
    io::Write::write_all(&mut stream, &line[sent..])
}

fn since(start: Instant, changed: Changed) -> Changed {
    Changed { milliseconds: start.elapsed().as_millis() as u64, ..changed }
}

fn status(largest: usize, stacks: bool) -> Status {
    let seen = hook::look(|manager| {
        let state = if manager.is_paused() { State::Paused } else { State::Running };
        let memory = Accounts { reserved: sys::reserve::bytes(), ..manager.accounts(largest) };
        (state, memory, stacks.then(|| manager.holders()))
    });
    if stacks {
        crate::stacks::record();
    }
    let (state, memory, holders) = match seen {
        Some((state, memory, holders)) => (state, Some(memory), holders),
        None => (State::Changing, None, None),
    };
    let state = if pause::is_changing() { State::Changing } else { state };
    let stacks = holders.map(|mut holders| {
        holders.truncate(STACKS);
        let named = holders.into_iter().map(|(mut holder, stack)| {
            holder.frames = crate::stacks::frames(&stack);
            holder
        });
        named.collect()
    });
    let program = std::fs::read_link("/proc/self/exe").map(|path| path.to_string_lossy().into_owned());
    let mode = match Options::get().mode {
        Mode::Vmm => "VMM",
        Mode::Monitor => "MONITOR",
    };
    Status {
        pid: std::process::id(),
        program: program.unwrap_or_default(),
        mode: mode.into(),
        state,
        waiting: gate::waiting(),
        memory,
        stacks,
    }
}
