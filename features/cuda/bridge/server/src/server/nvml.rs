//! Questions to NVIDIA's NVML, of devices that the program has.
//!
//! It is asked in the worker of who asks: who asks in a loop, or finds NVML waiting for a device, holds up no other program.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::facts;
use super::session::{Session, locked};
use super::sys::nvml::{self, Handle, Nvml};
use crate::wire::nvml::Question;
use crate::wire::{code, control, facts::uuid_text};

/// How many questions may be asked at once, and how long it is until there may be one more: what a program asks when it begins is not held up, and
/// who goes on asking does not keep the driver from what others have it do.
const BURST: u32 = 4096;
const PAUSE: Duration = Duration::from_millis(1);

/// Those of a session by their UUIDs; nothing is known of one that NVML does not have.
type Devices = HashMap<[u8; 16], Option<Handle>>;

/// What a session has asked.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Its devices; none where there is no NVML.
    devices: OnceLock<Option<Devices>>,
    pace: Mutex<Pace>,
}

/// How many questions may be asked now.
#[derive(Debug)]
struct Pace {
    left: u32,
    since: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self { left: BURST, since: Instant::now() }
    }
}

impl Pace {
    /// One more is asked at a time: how long that has to wait.
    fn take(&mut self, now: Instant) -> Duration {
        let more = now.saturating_duration_since(self.since).as_nanos() / PAUSE.as_nanos();
        let more = u32::try_from(more).unwrap_or(BURST);
        self.since += PAUSE * more;
        self.left = self.left.saturating_add(more).min(BURST);
        if self.left == BURST {
            self.since = now;
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return Duration::ZERO;
        }
        self.since += PAUSE;
        self.since.saturating_duration_since(now)
    }
}

/// NVML, and the session's devices as it names them. Both are looked for before this process is confined, and are not there if it is already: the client
/// has a session for these questions.
fn found(session: &Session) -> Result<(&'static Nvml, &Devices), u32> {
    let asked = session.asked();
    if asked.devices.get().is_none() {
        let nvml = match session.driver().version() {
            Some(_) if !session.has_started() => nvml::nvml(),
            _ => None,
        };
        let devices = nvml.map(|nvml| {
            let find = |uuid| (uuid, nvml.device(&uuid_text(uuid)));
            facts::find(session, find)
        });
        // Another order of the session's is not served meanwhile.
        let _ = asked.devices.set(devices.transpose()?);
    }
    let devices = asked.devices.get().and_then(Option::as_ref).ok_or(code::NOT_SUPPORTED)?;
    Ok((nvml::nvml().ok_or(code::NOT_SUPPORTED)?, devices))
}

/// What is free of a device's memory.
pub(super) fn free(session: &Session, uuid: [u8; 16]) -> Result<u64, u32> {
    let (nvml, devices) = found(session)?;
    sleep(locked(&session.asked().pace).take(Instant::now()));
    nvml.free(devices.get(&uuid).copied().flatten().ok_or(code::NOT_FOUND)?).ok_or(code::NOT_SUPPORTED)
}

/// What NVML answers.
pub(super) fn ask(session: &Session, question: &mut Question) -> Result<Vec<u8>, u32> {
    let (nvml, devices) = found(session)?;
    sleep(locked(&session.asked().pace).take(Instant::now()));
    let result = nvml.ask(question, |uuid| devices.get(&uuid).copied().flatten());
    Ok(question.answer(result))
}

/// Does something come of a session of questions within [`control::QUIET`]?
pub(super) fn asks_more(connection: &UnixStream) -> io::Result<bool> {
    let until = Instant::now() + control::QUIET;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            comes => return Ok(comes? > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_in_a_loop_waits() {
        let begin = Instant::now();
        let mut pace = Pace { left: BURST, since: begin };
        let mut waited = |at: Duration| pace.take(begin + at);
        for _ in 0..BURST {
            assert_eq!(waited(Duration::ZERO), Duration::ZERO);
        }
        assert_eq!(waited(Duration::ZERO), PAUSE);
        assert_eq!(waited(PAUSE), PAUSE);
        assert_eq!(waited(10 * PAUSE), Duration::ZERO);
        assert_eq!(waited(Duration::from_secs(3600)), Duration::ZERO);
        for _ in 1..BURST {
            assert_eq!(waited(Duration::from_secs(3600)), Duration::ZERO);
        }
        assert_eq!(waited(Duration::from_secs(3600)), PAUSE);
    }
}
