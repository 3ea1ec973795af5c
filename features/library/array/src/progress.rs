//! Reports of compilations that take long.

use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// What is told of a compilation: the kernel's name, and for how long it has been compiled; none once it is.
pub type Report = fn(&str, Option<Duration>);

/// How often a report is made, and before the first of which nothing is said.
const INTERVAL: Duration = Duration::from_secs(1);

static REPORT: OnceLock<Report> = OnceLock::new();

/// Has compilations of this process reported that take over a second. The first caller's report stays.
pub fn report_compilation(report: Report) {
    REPORT.get_or_init(|| report);
}

/// Runs a compilation.
pub(crate) fn reported<T>(name: &str, compile: impl FnOnce() -> T) -> T {
    match REPORT.get() {
        Some(report) => every(INTERVAL, name, *report, compile),
        None => compile(),
    }
}

fn every<T>(
    interval: Duration,
    name: &str,
    report: impl Fn(&str, Option<Duration>) + Send,
    run: impl FnOnce() -> T,
) -> T {
    let since = Instant::now();
    let (over, ended) = channel::<()>();
    thread::scope(|scope| {
        let watch = move || {
            let mut told = false;
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                report(name, Some(since.elapsed()));
                told = true;
            }
            if told {
                report(name, None);
            }
        };
        // Without a thread nothing is told.
        let _ = thread::Builder::new().name("progress".into()).spawn_scoped(scope, watch);
        let result = run();
        drop(over);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_told_until_its_end() {
        let (told, tells) = channel();
        let report = move |name: &str, since: Option<Duration>| {
            told.send((name.to_owned(), since.is_some())).unwrap();
        };
        let first = every(Duration::ZERO, "slow", report, || tells.recv().unwrap());
        assert_eq!(first, ("slow".to_owned(), true));
        let last = tells.iter().last();
        assert_eq!(last, Some(("slow".to_owned(), false)));
    }

    #[test]
    fn what_is_quick_is_not_told() {
        let report = |_: &str, _: Option<Duration>| panic!("nothing is to be told");
        assert_eq!(every(Duration::MAX, "quick", report, || 7), 7);
    }
}
