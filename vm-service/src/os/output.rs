//! A bounded queue in front of a descriptor that may be slow, or never take anything.
//!
//! ```text
//! push ──▶ queue ──▶ thread ──▶ write(2), for as long as it takes
//!  never waits         nobody waits for it without a timeout
//! ```
//!
//! Pipes, terminals and files belong to the operator, and whoever reads them may stop. A thread of the VMM that wrote to
//! one itself would stop too. Making the descriptor non-blocking is no way out: it would be so for every other process
//! that shares it, and a file on storage that does not answer blocks all the same.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes that are written at once: as many as a pipe takes in one piece.
const CHUNK: usize = 4096;
/// How long to wait with the next attempt where another process has made the descriptor non-blocking and it is full.
const RETRY: Duration = Duration::from_millis(10);

/// What the thread reports to the queue's owner.
#[derive(Debug)]
pub(crate) enum News {
    /// There is room again for what was asked for.
    Room,
    /// Something could not be written and is lost. It is reported once, until something can be written again.
    Failed(io::Error),
}

/// The queue.
#[derive(Debug)]
pub(crate) struct OutputQueue {
    limit: usize,
    state: Mutex<State>,
    /// Notified when there is something to write, or the end has come.
    work: Condvar,
    /// Notified when something was taken from the queue or was written.
    progress: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: VecDeque<u8>,
    /// Bytes that the thread is writing.
    in_hand: usize,
    /// Bytes that were written or given up, since the start.
    done: u64,
    /// Room that somebody asked for in vain; 0 for nobody.
    wanted: usize,
    /// Whether the thread waits for work.
    idle: bool,
    /// Nothing is written any more.
    ended: bool,
}

impl OutputQueue {
    /// A queue for `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), work: Condvar::new(), progress: Condvar::new() })
    }

    /// Starts the thread that writes to `output`. It runs until [`end`](Self::end) is called and `output` lets it go; while
    /// `output` does not, it holds nothing but `output`, `news` and the queue.
    ///
    /// # Errors
    /// When there are no threads left.
    pub(crate) fn start(
        self: &Arc<Self>,
        name: &str,
        output: impl Write + Send + 'static,
        news: impl FnMut(News) + Send + 'static,
    ) -> io::Result<()> {
        let queue = self.clone();
        let body = move || {
            // Also when `output` panics: then nobody waits for it.
            let queue = EndsWithThread(queue);
            queue.0.serve(output, news);
        };
        std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, state: &mut State, room: usize) -> bool {
        let has = state.ended || self.limit - state.bytes.len() >= room;
        if !has {
            state.wanted = state.wanted.max(room);
        }
        has
    }

    /// Takes all of `bytes`, or nothing and answers `false`; [`News::Room`] then reports when there is room for them. After
    /// the end they are dropped. It never waits.
    pub(crate) fn push(&self, bytes: &[u8]) -> bool {
        let mut state = self.state();
        if !self.has(&mut state, bytes.len()) {
            return false;
        }
        if !state.ended {
            state.bytes.extend(bytes);
            // Waking a thread takes a system call, which one that is busy does not need.
            if std::mem::take(&mut state.idle) {
                self.work.notify_one();
            }
        }
        true
    }

    /// Whether there is room for `room` bytes; if not, [`News::Room`] reports when there is.
    pub(crate) fn has_room(&self, room: usize) -> bool {
        self.has(&mut self.state(), room)
    }

    /// Waits until there may be room for `room` bytes, no longer than `timeout`.
    pub(crate) fn wait_for_room(&self, room: usize, timeout: Duration) {
        let mut state = self.state();
        if !self.has(&mut state, room) {
            drop(self.progress.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Waits until everything is written, but no longer than `most`, and no longer than `timeout` while nothing moves.
    /// What is not written then is dropped; answers how many bytes that is, of which those under way may still get there.
    pub(crate) fn flush(&self, timeout: Duration, most: Duration) -> usize {
        let mut state = self.state();
        let begin = Instant::now();
        let (mut moved, mut done) = (begin, state.done);
        loop {
            let left = state.bytes.len() + state.in_hand;
            let now = Instant::now();
            if state.done != done {
                (moved, done) = (now, state.done);
            }
            let until = (moved + timeout).min(begin + most);
            if left == 0 || now >= until || state.ended {
                state.bytes.clear();
                return left;
            }
            let waited = self.progress.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the thread as soon as `output` lets it go; nobody waits for that. What is not written is dropped.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        state.bytes.clear();
        self.work.notify_all();
        self.progress.notify_all();
    }

    /// Waits for something to write and puts it into `chunk`; `None` at the end. Answers whether somebody waits for the
    /// room that there is now.
    fn take(&self, chunk: &mut Vec<u8>) -> Option<bool> {
        let mut state = self.state();
        while state.bytes.is_empty() && !state.ended {
            state.idle = true;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.idle = false;
        if state.ended {
            return None;
        }
        chunk.clear();
        let count = state.bytes.len().min(CHUNK);
        chunk.extend(state.bytes.drain(..count));
        state.in_hand = count;
        self.progress.notify_all();
        let reported = state.wanted > 0 && self.limit - state.bytes.len() >= state.wanted;
        if reported {
            state.wanted = 0;
        }
        Some(reported)
    }

    fn done(&self, count: usize) {
        let mut state = self.state();
        state.in_hand -= count;
        state.done += count as u64;
        self.progress.notify_all();
    }

    fn serve(&self, mut output: impl Write, mut news: impl FnMut(News)) {
        let mut chunk = Vec::with_capacity(CHUNK);
        let mut failing = false;
        while let Some(room) = self.take(&mut chunk) {
            if room {
                news(News::Room);
            }
            let mut rest = chunk.len();
            let written = write(&mut output, &chunk, |count| {
                failing &= count == 0;
                rest -= count;
                self.done(count);
                count > 0 || !self.state().ended
            });
            if let Err(error) = written {
                self.done(rest);
                if !std::mem::replace(&mut failing, true) {
                    news(News::Failed(error));
                }
            }
        }
    }
}

/// Writes all of `bytes`, for as long as that takes: `went` hears how many went out, also of none, and whether to go on.
///
/// # Errors
/// When what is left can't be written.
pub(crate) fn write(
    output: &mut impl Write,
    mut bytes: &[u8],
    mut went: impl FnMut(usize) -> bool,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = match output.write(bytes).and_then(|count| output.flush().map(|()| count)) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        bytes = &bytes[count..];
        if !went(count) {
            return Ok(());
        }
        if count == 0 {
            std::thread::sleep(RETRY);
        }
    }
    Ok(())
}

/// This process's standard output or error, past the lock and the buffer that [`std::io`] puts before it: what waits here
/// must not keep anybody else from writing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Standard {
    Output,
    Error,
}

impl Write for Standard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let file = match self {
            Self::Output => rustix::stdio::stdout(),
            Self::Error => rustix::stdio::stderr(),
        };
        Ok(rustix::io::write(file, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct EndsWithThread(Arc<OutputQueue>);

impl Drop for EndsWithThread {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use std::convert::Infallible;
    use std::io::{self, Write};
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// An output that takes nothing before it is opened, as a pipe that nobody reads.
    pub(crate) struct Gate<W> {
        output: W,
        asked: Sender<()>,
        open: Receiver<Infallible>,
    }

    impl<W> Gate<W> {
        /// One that is shut; what reports that somebody waits in it; and what opens it when it is dropped.
        pub(crate) fn shut(output: W) -> (Self, Receiver<()>, Sender<Infallible>) {
            let ((asked, report), (opener, open)) = (channel(), channel());
            (Self { output, asked, open }, report, opener)
        }
    }

    impl<W: Write> Write for Gate<W> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.asked.send(());
            let Err(_opened) = self.open.recv();
            self.output.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            self.output.flush()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::testing::Gate;
    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(50);

    fn started(limit: usize, output: impl Write + Send + 'static) -> (Arc<OutputQueue>, Receiver<News>) {
        let queue = OutputQueue::new(limit);
        let (send, receive) = channel();
        let news = move |news| drop(send.send(news));
        queue.start("test", output, news).expect("a thread");
        (queue, receive)
    }

    /// Reports when its output has no room.
    struct Watched<W>(W, Sender<()>);

    impl<W: Write> Write for Watched<W> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.write(bytes).inspect_err(|error| {
                if error.kind() == io::ErrorKind::WouldBlock {
                    let _ = self.1.send(());
                }
            })
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    /// Pushes until the queue is full and its thread is `stuck` with what it took, and answers how many bytes that took.
    fn fill(queue: &OutputQueue, stuck: &Receiver<()>) -> usize {
        let (begin, mut pushed, mut is_stuck) = (Instant::now(), 0, false);
        loop {
            assert!(begin.elapsed() < LONG, "{pushed} bytes, stuck: {is_stuck}");
            // In this order: one that is stuck takes no more, so that the queue stays full.
            is_stuck |= stuck.try_recv().is_ok();
            match queue.push(&[b'x'; 100]) {
                true => pushed += 100,
                false if is_stuck => return pushed,
                false => std::thread::yield_now(),
            }
        }
    }

    #[test]
    fn what_fits_is_written_in_order() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let (queue, news) = started(1000, writer);
        for round in 0..100u8 {
            assert!(queue.push(&[round; 10]));
        }
        assert_eq!(queue.flush(LONG, LONG), 0);
        queue.end();
        let mut got = Vec::new();
        reader.read_to_end(&mut got).expect("what was written");
        assert!(got.iter().enumerate().all(|(at, &byte)| byte == (at / 10) as u8) && got.len() == 1000);
        assert_eq!(news.iter().count(), 0);
    }

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let (gate, asked, opener) = Gate::shut(writer);
        let (queue, news) = started(1000, gate);
        let pushed = fill(&queue, &asked);
        assert!(!queue.push(&[0; 1000]) && !queue.has_room(1000));
        let begin = Instant::now();
        queue.wait_for_room(1000, SHORT);
        assert!(begin.elapsed() >= SHORT);
        let left = queue.flush(SHORT, LONG);
        assert!(left >= 900 && begin.elapsed() < LONG, "{left}");
        // What was dropped makes room, and what the thread has in hand still gets there.
        assert!(queue.push(b"end"));
        drop(opener);
        let mut got = vec![0; pushed];
        let mut at = 0;
        while !got[..at].ends_with(b"end") {
            at += reader.read(&mut got[at..]).expect("what was written");
        }
        assert!(matches!(news.recv_timeout(LONG), Ok(News::Room)));
        queue.end();
        assert!(queue.push(&[0; 5000]) && queue.has_room(5000), "after the end everything is dropped");
    }

    #[test]
    fn a_slow_reader_gets_time_as_long_as_it_reads() {
        struct Slow;
        impl Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                std::thread::sleep(Duration::from_millis(20));
                Ok(bytes.len().min(10))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (queue, _news) = started(1000, Slow);
        assert!(queue.push(&[0; 500]));
        assert_eq!(queue.flush(Duration::from_secs(1), LONG), 0);
        assert!(queue.push(&[0; 1000]));
        assert!(queue.flush(LONG, Duration::from_millis(100)) > 0, "but no more than it may have at most");
    }

    #[test]
    fn failures_are_told_once_and_a_full_descriptor_is_tried_again() {
        let (reader, writer) = io::pipe().expect("a pipe");
        rustix::io::ioctl_fionbio(&writer, true).expect("non-blocking");
        let (send, full) = channel();
        let (queue, news) = started(1000, Watched(writer, send));
        let pushed = fill(&queue, &full);
        let mut reader = reader;
        let mut got = vec![0; pushed];
        reader.read_exact(&mut got).expect("all of it");
        assert_eq!(queue.flush(LONG, LONG), 0);
        while news.try_recv().is_ok() {}
        drop(reader);
        for _ in 0..3 {
            assert!(queue.push(b"x"));
            assert_eq!(queue.flush(LONG, LONG), 0);
        }
        queue.end();
        let reported: Vec<News> = news.iter().collect();
        assert!(
            matches!(&reported[..], [News::Failed(error)] if error.kind() == io::ErrorKind::BrokenPipe),
            "{reported:?}"
        );
    }

    #[test]
    fn nobody_waits_for_a_thread_that_panicked() {
        struct Panics;
        impl Write for Panics {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                panic!("as wanted")
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (queue, _news) = started(10, Panics);
        assert!(queue.push(b"x"));
        let begin = Instant::now();
        queue.flush(LONG, LONG);
        assert!(begin.elapsed() < LONG && queue.push(&[0; 100]));
    }
}
