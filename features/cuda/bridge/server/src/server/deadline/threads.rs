//! The threads that look at a session's streams.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::pace::Clock;
use super::{MOST, Watch};
use crate::server::session::{RELAXED, Session};
use crate::server::sys::Word;
use crate::wire::code;

/// How often the streams are looked at, of the deadline.
const LOOKS: u32 = 8;
const OFTENEST: Duration = Duration::from_millis(5);
const SELDOMEST: Duration = Duration::from_millis(100);

impl Watch {
    /// Starts to look at a session's streams, until it has ended. Without a thread for that nothing may go on.
    pub(in crate::server) fn start(self: &Arc<Self>, session: &Arc<Session>) {
        let interval =
            self.deadline.map_or(SELDOMEST, |deadline| (deadline / LOOKS).clamp(OFTENEST, SELDOMEST));
        let (this, of) = (self.clone(), session.clone());
        let mut spawned = spawn("deadline", move || this.look_on(&of, interval));
        if let (Ok(()), Some(deadline)) = (&spawned, self.deadline) {
            // The driver may keep the one who asks waiting for what does not end.
            let (this, of) = (self.clone(), session.clone());
            let patience = deadline.saturating_mul(MOST).div_duration_f64(interval).min(1e9) as u32 + LOOKS;
            spawned = spawn("guard", move || this.guard(&of, interval, patience));
        }
        if let Err(error) = spawned {
            tracing::error!(%error, "a CUDA program is not served: no thread can look at its streams");
            session.end();
        }
    }

    fn look_on(&self, session: &Session, interval: Duration) {
        let mut is_relaxed = false;
        let mut before = Instant::now();
        let mut clock = self.pace.as_ref().map(Clock::new);
        while !session.has_ended() {
            match (&self.pace, &mut clock) {
                (Some(pace), Some(clock)) => pace.sleep(clock, interval),
                _ => sleep(interval),
            }
            let now = Instant::now();
            if !is_relaxed {
                // What this thread asks must not end captures of others. That can be said once the driver has begun.
                let (name, mut mode) = ("cuThreadExchangeStreamCaptureMode", [RELAXED]);
                is_relaxed = session.driver().named(name, &[Word::At(0)], &mut mode) != code::NOT_INITIALIZED;
            }
            // A thread that was not let run has seen nothing meanwhile.
            let passed = (now - before).min(2 * interval);
            before = now;
            let looked = self.look(session, passed);
            if let (Some(pace), Some(clock)) = (&self.pace, &mut clock) {
                pace.count(clock, &looked);
                session.turn.look();
            }
            if looked.late {
                session.end_late();
            }
            self.missed.store(0, SeqCst);
        }
    }

    fn guard(&self, session: &Session, interval: Duration, patience: u32) {
        while !session.has_ended() {
            sleep(interval);
            if self.missed.fetch_add(1, SeqCst) > patience {
                session.end_late();
            }
        }
    }
}

fn spawn(name: &str, act: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(act).map(drop)
}
