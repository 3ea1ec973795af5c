//! Work that may take long: on a thread of its own, with progress reported, until a deadline or the operator's Ctrl-C.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::os::signals::StopSignals;

/// How often progress is reported.
const TELL: Duration = Duration::from_secs(2);

enum News<T> {
    Done(Result<T, Failure>),
    Panicked,
    Signal(&'static str),
}

/// Runs `work` and waits for it. When a signal comes or the deadline passes it is given up: it ends with the process,
/// which is about to end, and so does what it started on a device.
///
/// # Errors
/// What `work` fails with; a signal; the deadline.
pub(crate) fn run<T: Send + 'static>(
    what: &str,
    deadline: Duration,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    telling(what, deadline, &|so_far| tracing::info!("{what}: {:.0} s so far", so_far.as_secs_f64()), work)
}

/// The same; every two seconds `tell` is called with how long it has taken so far.
///
/// # Errors
/// As [`run`].
pub(crate) fn telling<T: Send + 'static>(
    what: &str,
    deadline: Duration,
    tell: &dyn Fn(Duration),
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (send, receive) = mpsc::channel();
    let asked = send.clone();
    let signals = StopSignals::start(move |signal| {
        // Nobody receives once the work is done.
        let _ = asked.send(News::Signal(signal));
    });
    let _signals = signals.map_err(|error| {
        Failure::failed(format_args!("signals can't be waited for: {error}; raise `ulimit -n`"))
    })?;
    start(send, work)?;
    UNDER_WAY.fetch_add(1, Ordering::Relaxed);
    let result = attend(what, deadline, tell, &receive)?;
    UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    result
}

/// Work that was begun and has not been seen to end.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Whether work was given up that still runs. The process then must end at once: a device's library would wait for it.
pub(crate) fn gave_up() -> bool {
    UNDER_WAY.load(Ordering::Relaxed) > 0
}

/// Starts `work` on a thread that sends what comes of it.
fn start<T: Send + 'static>(
    send: Sender<News<T>>,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let body = move || {
        let news = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => News::Done(result),
            Err(_) => News::Panicked,
        };
        let _ = send.send(news);
    };
    let thread = std::thread::Builder::new().name("kernel".into()).spawn(body);
    thread.map(drop).map_err(|error| {
        Failure::failed(format_args!("no thread can be started: {error}; raise `ulimit -u`"))
    })
}

/// Waits for the first thing that ends the wait, and reports progress. An outer error is that the work did not end.
fn attend<T>(
    what: &str,
    deadline: Duration,
    tell: &dyn Fn(Duration),
    news: &Receiver<News<T>>,
) -> Result<Result<T, Failure>, Failure> {
    let start = Instant::now();
    loop {
        let left = deadline.saturating_sub(start.elapsed());
        match news.recv_timeout(left.min(TELL)) {
            Ok(News::Done(result)) => return Ok(result),
            Ok(News::Signal(signal)) => {
                return Err(Failure::failed(format_args!("{what}: cancelled by {signal}")));
            }
            Ok(News::Panicked) | Err(RecvTimeoutError::Disconnected) => {
                return Ok(Err(Failure::failed(format_args!(
                    "{what}: it ended without a result, which is a bug of this program; please report it"
                ))));
            }
            Err(RecvTimeoutError::Timeout) if start.elapsed() >= deadline => {
                return Err(Failure::failed(format_args!(
                    "{what}: not done after {} s; give it more time with --deadline, or less work",
                    deadline.as_secs_f64()
                )));
            }
            Err(RecvTimeoutError::Timeout) => tell(start.elapsed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_is_told() {
        const LONG: Duration = Duration::from_secs(300);
        let check = |expect: Result<u32, &str>, signal, deadline, work: fn() -> Result<u32, Failure>| {
            let (send, receive) = mpsc::channel();
            if let Some(signal) = signal {
                send.send(News::Signal(signal)).expect("sent");
            }
            start(send, work).expect("a thread");
            let ended = attend("the work", deadline, &|_| (), &receive).and_then(|result| result);
            match (ended.map_err(|failure| failure.message), expect) {
                (Ok(got), Ok(expect)) => assert_eq!(got, expect),
                (Err(got), Err(expect)) => assert!(got.contains(expect), "{got}"),
                (got, expect) => panic!("{got:?}, not {expect:?}"),
            }
        };
        let endless = || {
            std::thread::sleep(Duration::from_secs(600));
            Ok(0)
        };
        check(Ok(7), None, LONG, || Ok(7));
        check(Err("no"), None, LONG, || Err(Failure::failed("no")));
        check(Err("the work: not done after 0.1 s"), None, Duration::from_millis(100), endless);
        check(Err("it ended without a result"), None, LONG, || panic!("as wanted"));
        check(Err("the work: cancelled by SIGINT"), Some("SIGINT"), LONG, endless);
    }
}
