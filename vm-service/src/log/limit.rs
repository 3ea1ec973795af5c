//! How often one cause may be logged: a guest must not fill the operator's log.
//!
//! A cause is a place in the code that logs something, together with the guest or device that it names in a field: one guest
//! must not silence another's messages. Each has a bucket of messages that fills slowly; what finds it empty
//! is left out, and counted. The count is logged with the next message of that cause, or once the cause has been silent for a
//! while, or at the end. Every message passes here, whichever crate it is of, so that no place can be forgotten; only
//! the operator's own commands, which name each device, are let through.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// How many messages of a cause are logged at once, and how long it takes until one more may be.
const SHOWN: (u32, Duration) = (10, Duration::from_secs(10));
/// The same for what is logged with `--verbose` only.
const VERBOSE: (u32, Duration) = (200, Duration::from_millis(50));
/// After so long a cause is over.
const SILENCE: Duration = Duration::from_secs(5);
/// What is kept of a message that was left out, to name its cause by.
const NAME: usize = 100;
/// Fields that name whose message it is. None of their values is a guest's choice.
const SOURCES: [&str; 3] = ["guest", "device", "accelerator"];
/// The most causes that are told apart by their sources. The messages of further sources count as those of the place in the code.
const MAX_SOURCES: usize = 512;
/// What no guest can make longer: commands before and after it runs.
const OPERATORS: [&str; 5] = [
    "vm_service::cli::commands",
    "vm_service::os::signals",
    "vm_passthrough::claim",
    "vm_passthrough::ledger",
    "vm_passthrough::pci",
];

/// Lets messages through, or counts them.
pub(super) struct Limit(pub(super) Arc<Causes>);

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let target = metadata.target();
        if OPERATORS.iter().any(|prefix| target.starts_with(prefix)) {
            return true;
        }
        let (burst, refill) = if *metadata.level() <= Level::INFO { SHOWN } else { VERBOSE };
        let name = || {
            let mut name = Name::default();
            event.record(&mut name);
            name.0
        };
        let mut source = Source::default();
        event.record(&mut source);
        let passes = self.0.take((metadata.callsite(), source.0), (burst, refill), Instant::now(), name);
        if !passes {
            self.0.watch();
        }
        passes
    }
}

/// A place in the code, and the guest or device that it names; empty where it names none.
type Cause = (Identifier, String);

type Log = dyn Fn(&str) + Send + Sync;

/// All causes that have logged something.
pub(super) struct Causes {
    state: Mutex<State>,
    log: Box<Log>,
}

#[derive(Default)]
struct State {
    buckets: HashMap<Cause, Bucket>,
    /// Whether a thread waits for causes to fall silent.
    watched: bool,
}

struct Bucket {
    left: u32,
    /// When it was last filled.
    filled: Instant,
    left_out: u64,
    /// When something was last left out.
    last: Instant,
    name: String,
}

impl Causes {
    /// Counts are logged by `log`.
    pub(super) fn new(log: impl Fn(&str) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), log: Box::new(log) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a message of `cause` may be logged now.
    fn take(
        &self,
        mut cause: Cause,
        (burst, refill): (u32, Duration),
        now: Instant,
        name: impl FnOnce() -> String,
    ) -> bool {
        let mut state = self.state();
        if state.buckets.len() >= MAX_SOURCES && !state.buckets.contains_key(&cause) {
            // A bucket that is full again is like a new one.
            let full = SHOWN.1 * SHOWN.0;
            state.buckets.retain(|_, bucket| {
                bucket.left_out > 0 || now.saturating_duration_since(bucket.filled) < full
            });
            if state.buckets.len() >= MAX_SOURCES {
                cause.1.clear();
            }
        }
        let source = cause.1.clone();
        let bucket = state.buckets.entry(cause).or_insert_with(|| Bucket {
            left: burst,
            filled: now,
            left_out: 0,
            last: now,
            name: String::new(),
        });
        let gained = now.saturating_duration_since(bucket.filled).as_nanos() / refill.as_nanos();
        let gained = u32::try_from(gained).unwrap_or(u32::MAX);
        match bucket.left.checked_add(gained) {
            Some(left) if left < burst => {
                bucket.left = left;
                bucket.filled += refill * gained;
            }
            _ => (bucket.left, bucket.filled) = (burst, now),
        }
        if bucket.left == 0 {
            if bucket.left_out == 0 {
                bucket.name = name();
                if !source.is_empty() {
                    bucket.name += &format!(" [{source}]");
                }
            }
            bucket.left_out += 1;
            bucket.last = now;
            return false;
        }
        bucket.left -= 1;
        let counted = bucket.count();
        drop(state);
        counted.iter().for_each(|count| (self.log)(count));
        true
    }

    /// Tells how much was left out of causes that have been silent since `before`; answers whether others are left.
    pub(super) fn log_silent(&self, before: Option<Instant>) -> bool {
        let mut state = self.state();
        let over = |bucket: &Bucket| before.is_none_or(|before| bucket.last <= before);
        let counts: Vec<_> =
            state.buckets.values_mut().filter(|bucket| over(bucket)).filter_map(Bucket::count).collect();
        let others = state.buckets.values().any(|bucket| bucket.left_out > 0);
        state.watched &= others;
        drop(state);
        counts.iter().for_each(|count| (self.log)(count));
        others
    }

    /// Has a thread log the counts once their causes are silent.
    fn watch(self: &Arc<Self>) {
        let mut state = self.state();
        if std::mem::replace(&mut state.watched, true) {
            return;
        }
        let causes = Arc::clone(self);
        let thread = std::thread::Builder::new().name("log".into()).spawn(move || {
            loop {
                std::thread::sleep(SILENCE);
                if !causes.log_silent(Instant::now().checked_sub(SILENCE)) {
                    return;
                }
            }
        });
        // Without a thread to spare the next message, or the end, does.
        state.watched = thread.is_ok();
    }
}

impl Bucket {
    /// What was left out, once.
    fn count(&mut self) -> Option<String> {
        let count = std::mem::take(&mut self.left_out);
        (count > 0)
            .then(|| format!("({count} messages are left out that are like this one: {})\n", self.name))
    }
}

/// The words of a message.
#[derive(Default)]
struct Name(String);

impl Visit for Name {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // It fails where the text is longer than what is kept.
            let _ = write!(Short(&mut self.0), "{value:?}");
        }
    }
}

/// The guest or device that a message names.
#[derive(Default)]
struct Source(String);

impl Visit for Source {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.0.is_empty() && SOURCES.contains(&field.name()) {
            // It fails where the text is longer than what is kept.
            let _ = write!(Short(&mut self.0), "{value:?}");
        }
    }
}

struct Short<'a>(&'a mut String);

impl fmt::Write for Short<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            if self.0.len() >= NAME {
                return Err(fmt::Error);
            }
            self.0.push(if letter.is_control() { ' ' } else { letter });
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! A log of one thread.

    use std::io;

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[derive(Clone, Default)]
    struct Text(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Text {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What `run` logs, as the operator's log has it in the end.
    pub(crate) fn logged(run: impl FnOnce()) -> String {
        let text = Text::default();
        let (writer, counts) = (text.clone(), text.clone());
        let causes = Causes::new(move |count| counts.0.lock().unwrap().extend(count.bytes()));
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .finish()
            .with(Limit(causes.clone()));
        tracing::subscriber::with_default(subscriber, run);
        causes.log_silent(None);
        let bytes = text.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::logged;
    use super::*;

    #[test]
    fn each_cause_is_told_a_little_and_counted() {
        let text = logged(|| {
            for number in 0..10_000 {
                tracing::warn!(number, "a queue broke");
                tracing::info!("restart {number}");
                tracing::error!(text = "x".repeat(5000), "too \u{1b}[2J much {}", "y".repeat(200));
                tracing::info!(target: "vm_service::cli::commands::claim", "device {number}");
            }
        });
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        for cause in ["a queue broke", "restart ", "too "] {
            assert_eq!(count(cause), SHOWN.0 as usize + 1, "{cause}");
            let logged =
                format!("({} messages are left out that are like this one: {cause}", 10_000 - SHOWN.0);
            assert_eq!(count(&logged), 1, "{logged}");
        }
        assert_eq!(count("device "), 10_000);
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn a_guest_or_device_does_not_silence_another() {
        let fail = |device: &str| tracing::warn!(device, "an access failed");
        let end = |guest: &str| tracing::info!(guest, "{guest} ended");
        let text = logged(|| {
            for _ in 0..10_000 {
                fail("0000:01:00.0");
                end("loud");
            }
            fail("0000:02:00.0");
            end("quiet");
        });
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        // Each with the count of what was left out.
        assert_eq!((count("0000:01:00.0"), count("loud ended")), (11, 11), "{text}");
        assert_eq!((count("0000:02:00.0"), count("quiet ended")), (1, 1), "{text}");
        // Any number of sources is shown a bounded number of times.
        let text = logged(|| (0..10_000).for_each(|number| end(&number.to_string())));
        assert!(text.lines().count() <= MAX_SOURCES + SHOWN.0 as usize + 1, "{}", text.lines().count());
    }

    #[test]
    fn no_cause_is_told_faster_than_its_bucket_fills() {
        static CALLSITE: tracing::callsite::DefaultCallsite = {
            static METADATA: tracing::Metadata<'static> = tracing::metadata! {
                name: "test", target: "test", level: Level::WARN, fields: &[], callsite: &CALLSITE,
                kind: tracing::metadata::Kind::EVENT,
            };
            tracing::callsite::DefaultCallsite::new(&METADATA)
        };
        let counts = Arc::new(Mutex::new(Vec::new()));
        let logged = counts.clone();
        let causes = Causes::new(move |count| logged.lock().unwrap().push(count.to_owned()));
        let start = Instant::now();
        let take = |millis: u64| {
            let now = start + Duration::from_millis(millis);
            causes.take((tracing::callsite::Identifier(&CALLSITE), String::new()), SHOWN, now, || {
                "cause".into()
            })
        };
        // An hour of one each millisecond: the burst, and one every ten seconds.
        let passed = (0..3_600_000).filter(|millis| take(*millis)).count();
        assert_eq!(passed, 10 + 359);
        assert_eq!(counts.lock().unwrap().len(), 359);
        // Silence is logged once, with what it ended.
        let quiet = |millis| causes.log_silent(Some(start + Duration::from_millis(millis)));
        assert!(quiet(3_599_998) && counts.lock().unwrap().len() == 359);
        assert!(!quiet(3_599_999) && counts.lock().unwrap().len() == 360);
        assert!(!quiet(3_700_000) && counts.lock().unwrap().len() == 360);
        // After a long one there is a whole burst, and no more.
        assert_eq!((0..100).filter(|_| take(u64::from(u32::MAX))).count(), 10);
    }
}
