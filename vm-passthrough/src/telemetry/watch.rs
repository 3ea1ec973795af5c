//! Reads several GPUs at once, each on a thread of its own, so that a driver that does not answer keeps nobody waiting.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::{Reader, Telemetry};
use crate::PciAddress;

/// What was heard of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// What it tells, and when that was read.
    Told(Instant, Box<Telemetry>),
    /// It is gone.
    Gone,
    /// Its driver has not answered since.
    Waiting(Instant),
}

/// Readers of GPUs. Dropping it leaves a thread behind for each driver that never answers.
#[derive(Debug)]
pub struct Watch {
    workers: BTreeMap<PciAddress, Worker>,
    send: Sender<Reply>,
    replies: Receiver<Reply>,
    /// How many workers there were, which tells the answers of one from those of its successor.
    made: u64,
}

#[derive(Debug)]
struct Worker {
    id: u64,
    ask: Sender<()>,
    asked: Option<Instant>,
}

#[derive(Debug)]
struct Reply {
    address: PciAddress,
    id: u64,
    at: Instant,
    telemetry: Option<Box<Telemetry>>,
}

impl Default for Watch {
    fn default() -> Self {
        let (send, replies) = channel();
        Self { workers: BTreeMap::new(), send, replies, made: 0 }
    }
}

impl Watch {
    /// One with no GPUs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads these from now on, and no others.
    ///
    /// # Errors
    /// When this process has no threads left; those that were started are read.
    pub fn watch(&mut self, readers: impl IntoIterator<Item = Reader>) -> io::Result<()> {
        self.workers.clear();
        readers.into_iter().try_for_each(|reader| self.add(reader.address(), move || reader.read()))
    }

    fn add(
        &mut self,
        address: PciAddress,
        read: impl Fn() -> Option<Telemetry> + Send + 'static,
    ) -> io::Result<()> {
        self.made += 1;
        let (id, replies) = (self.made, self.send.clone());
        let (ask, asked) = channel();
        let work = move || {
            while asked.recv().is_ok() {
                let telemetry = read().map(Box::new);
                if replies.send(Reply { address, id, at: Instant::now(), telemetry }).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name(format!("gpu {address}")).spawn(work)?;
        self.workers.insert(address, Worker { id, ask, asked: None });
        Ok(())
    }

    /// What each tells now. One that has not answered an earlier time is not waited for, the others until the deadline; one that
    /// answers too late each time tells what it told then.
    pub fn read(&mut self, deadline: Duration) -> BTreeMap<PciAddress, Answer> {
        let begun = Instant::now();
        let mut answers = BTreeMap::new();
        // What was late the last time, and stands for what is late now.
        let mut late = BTreeMap::new();
        while let Ok(reply) = self.replies.try_recv() {
            late.extend(self.take(reply));
        }
        for (address, worker) in &mut self.workers {
            let is_new = worker.asked.is_none();
            let asked = *worker.asked.get_or_insert(begun);
            answers.insert(*address, late.remove(address).unwrap_or(Answer::Waiting(asked)));
            // A thread that has ended has panicked; it stays one that does not answer.
            if is_new {
                let _ = worker.ask.send(());
            }
        }
        let is_due = |watch: &Self| watch.workers.values().any(|worker| worker.asked == Some(begun));
        while is_due(self)
            && let Ok(reply) = self.replies.recv_timeout(deadline.saturating_sub(begun.elapsed()))
        {
            answers.extend(self.take(reply));
        }
        answers
    }

    /// Notes that a worker has answered; `None` where there is no such worker any more.
    fn take(&mut self, reply: Reply) -> Option<(PciAddress, Answer)> {
        let Reply { address, id, at, telemetry } = reply;
        self.workers.get_mut(&address).filter(|worker| worker.id == id)?.asked = None;
        Some((address, telemetry.map_or(Answer::Gone, |told| Answer::Told(at, told))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_does_not_answer_is_waited_for_once_and_keeps_no_other_waiting() {
        let [stuck, quick] =
            ["03:00.0", "04:00.0"].map(|text| text.parse::<PciAddress>().expect("an address"));
        let (release, held) = channel::<()>();
        let held = std::sync::Mutex::new(held);
        let mut watch = Watch::new();
        let hold = move || {
            let _ = held.lock().expect("a lock").recv();
            Some(Telemetry { busy: Some(1), ..Telemetry::default() })
        };
        watch.add(stuck, hold).expect("a thread");
        watch.add(quick, || Some(Telemetry::default())).expect("a thread");
        let first = watch.read(Duration::from_millis(50));
        let Some(&Answer::Waiting(since)) = first.get(&stuck) else { panic!("{first:?}") };
        for _ in 0..3 {
            // An hour would be waited for, were it due.
            let answers = watch.read(Duration::from_secs(3600));
            assert_eq!(answers.get(&stuck), Some(&Answer::Waiting(since)));
            assert!(matches!(answers.get(&quick), Some(Answer::Told(..))), "{answers:?}");
        }
        // It goes on where it answers at last; what that was is old.
        drop(release);
        while watch.read(Duration::from_secs(3600)).get(&stuck) == Some(&Answer::Waiting(since)) {
            std::thread::yield_now();
        }
        let answers = watch.read(Duration::from_secs(3600));
        assert!(
            matches!(answers.get(&stuck), Some(Answer::Told(_, told)) if told.busy == Some(1)),
            "{answers:?}"
        );
        // What a former worker says is no answer of its successor.
        watch.watch([]).expect("nothing");
        assert!(watch.read(Duration::from_secs(3600)).is_empty());
    }
}
