//! Choices that are kept: what a file of the cache holds, and under which key.
//!
//! A file may come from another machine, or from anybody who can write there. It is bounded, and says nothing that is believed
//! unless it is about what was asked for and names variants that the family has: what it can do at worst is to choose a slower one.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use vm_jit::cache::{Cache, Key};

use super::{Candidate, Figure, Outcome};

/// No choice takes more bytes.
const LARGEST: usize = 64 << 10;

/// What a choice is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Subject {
    pub(super) family: String,
    pub(super) class: String,
    pub(super) device: String,
    pub(super) target: String,
    pub(super) trust: String,
}

/// A choice, as a file holds it.
#[derive(Serialize, Deserialize)]
struct Record {
    subject: Subject,
    candidates: Vec<(String, Kept)>,
    chosen: u32,
}

/// What came of a variant. Times are of one launch, in nanoseconds: median, least, greatest.
#[derive(Serialize, Deserialize)]
enum Kept {
    Measured([u64; 3], u32),
    Slower([u64; 3], u32),
    Failed(String),
    Late,
}

/// A choice that was kept.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) chosen: usize,
    pub(super) candidates: Vec<Candidate>,
}

/// The key of a choice among variants of these names.
pub(super) fn key(subject: &Subject, names: &[String]) -> Key {
    let Subject { family, class, device, target, trust } = subject;
    let head = [env!("CARGO_PKG_VERSION"), family, class, device, target, trust];
    let parts: Vec<&[u8]> =
        head.into_iter().chain(names.iter().map(String::as_str)).map(str::as_bytes).collect();
    Key::of("choice", &parts)
}

/// Keeps a choice. One that can't be kept is measured again the next time.
pub(super) fn keep(
    cache: &Cache,
    subject: &Subject,
    names: &[String],
    candidates: &[Candidate],
    chosen: usize,
) {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let times = |figure: &Figure| [figure.median, figure.least, figure.greatest].map(nanos);
    let kept = |candidate: &Candidate| {
        let kept = match &candidate.outcome {
            Outcome::Measured(figure) => Kept::Measured(times(figure), figure.samples),
            Outcome::Slower(figure) => Kept::Slower(times(figure), figure.samples),
            // What a driver or an assembler says may be long.
            Outcome::Failed(reason) => Kept::Failed(reason.chars().take(500).collect()),
            Outcome::Late => Kept::Late,
        };
        (candidate.name.clone(), kept)
    };
    let record = Record {
        subject: subject.clone(),
        candidates: candidates.iter().map(kept).collect(),
        chosen: u32::try_from(chosen).unwrap_or(u32::MAX),
    };
    match postcard::to_allocvec(&record) {
        Ok(bytes) if bytes.len() <= LARGEST => cache.put(&key(subject, names), bytes),
        Ok(bytes) => {
            tracing::warn!(family = subject.family, bytes = bytes.len(), "a choice is too large to be kept")
        }
        Err(error) => tracing::warn!(family = subject.family, %error, "a choice could not be kept"),
    }
}

/// The choice that is kept, if it is one of these variants. Whatever else is found there is removed.
pub(super) fn read(cache: &Cache, subject: &Subject, names: &[String]) -> Option<Choice> {
    let key = key(subject, names);
    let bytes = cache.get(&key)?;
    match decode(&bytes, subject, names) {
        Ok(choice) => Some(choice),
        Err(what) => {
            let (family, class) = (&subject.family, &subject.class);
            tracing::warn!(%key, family, class, what, "a kept choice is not used, and removed");
            cache.remove(&key);
            None
        }
    }
}

fn decode(bytes: &[u8], subject: &Subject, names: &[String]) -> Result<Choice, &'static str> {
    if bytes.len() > LARGEST {
        return Err("it is larger than any choice");
    }
    let (record, rest) = postcard::take_from_bytes::<Record>(bytes).map_err(|_| "it is no choice")?;
    if !rest.is_empty() || record.subject != *subject {
        return Err("it is about something else");
    }
    if !record.candidates.iter().map(|(name, _)| name).eq(names) {
        return Err("it is of other variants");
    }
    let chosen = record.chosen as usize;
    if !matches!(record.candidates.get(chosen), Some((_, Kept::Measured(..)))) {
        return Err("its choice was not measured");
    }
    let figure = |[median, least, greatest]: [u64; 3], samples| Figure {
        median: Duration::from_nanos(median),
        least: Duration::from_nanos(least),
        greatest: Duration::from_nanos(greatest),
        samples,
    };
    let candidates = record.candidates.into_iter().map(|(name, kept)| {
        let outcome = match kept {
            Kept::Measured(times, samples) => Outcome::Measured(figure(times, samples)),
            Kept::Slower(times, samples) => Outcome::Slower(figure(times, samples)),
            Kept::Failed(reason) => Outcome::Failed(reason),
            Kept::Late => Outcome::Late,
        };
        Candidate { name, outcome }
    });
    Ok(Choice { chosen, candidates: candidates.collect() })
}
