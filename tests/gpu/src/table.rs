//! What came out: a record for each test, with its figures.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Passed,
    /// With what went wrong.
    Failed(String),
    /// With the reason.
    Skipped(String),
}

/// Repeated measurements of one thing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) median: f64,
    /// The tenth and the ninetieth percentile.
    pub(crate) spread: [f64; 2],
    pub(crate) count: usize,
}

impl Sample {
    /// Of measurements; without any it is not a number.
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values.get(((values.len().max(1) - 1) as f64 * part).round() as usize).copied();
        let at = |part| at(part).unwrap_or(f64::NAN);
        Self { median: at(0.5), spread: [at(0.1), at(0.9)], count: values.len() }
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [low, high] = self.spread;
        write!(f, "{} ({}..{})", Short(self.median), Short(low), Short(high))
    }
}

/// A number in four digits or so.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.abs() {
            size if size >= 1000.0 => write!(f, "{:.0}", self.0),
            size if size >= 100.0 => write!(f, "{:.1}", self.0),
            size if size >= 10.0 => write!(f, "{:.2}", self.0),
            _ => write!(f, "{:.3}", self.0),
        }
    }
}

/// What a figure should be.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Aim {
    /// Ours over the peer's, at most.
    RatioAtMost(f64),
    /// Ours over the peer's, at least.
    RatioAtLeast(f64),
    /// Ours less the peer's, at most.
    MoreByAtMost(f64),
    /// Ours, at most.
    AtMost(f64),
}

/// A measurement beside that of its peer, taken in the same run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    /// Of both samples.
    pub(crate) unit: String,
    pub(crate) ours: Sample,
    /// The peer's name and sample.
    pub(crate) peer: Option<(String, Sample)>,
    pub(crate) aim: Option<Aim>,
}

impl Figure {
    /// Ours over the peer's.
    fn ratio(&self) -> Option<f64> {
        self.peer.as_ref().map(|(_, peer)| self.ours.median / peer.median)
    }

    /// Whether the aim is met; `None` without one.
    pub(crate) fn met(&self) -> Option<bool> {
        let ratio = self.ratio().unwrap_or(f64::NAN);
        Some(match self.aim? {
            Aim::RatioAtMost(bound) => ratio <= bound,
            Aim::RatioAtLeast(bound) => ratio >= bound,
            Aim::MoreByAtMost(bound) => {
                self.peer.as_ref().is_some_and(|(_, peer)| self.ours.median - peer.median <= bound)
            }
            Aim::AtMost(bound) => self.ours.median <= bound,
        })
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} {}", self.name, self.ours, self.unit)?;
        if let Some((name, peer)) = &self.peer {
            write!(f, "; {name}: {peer}; ratio {:.3}", self.ratio().unwrap_or(f64::NAN))?;
        }
        match self.aim {
            None => Ok(()),
            Some(aim) => {
                let met = if self.met() == Some(true) { "met" } else { "MISSED" };
                match aim {
                    Aim::RatioAtMost(bound) => write!(f, "; aim ratio ≤ {bound}: {met}"),
                    Aim::RatioAtLeast(bound) => write!(f, "; aim ratio ≥ {bound}: {met}"),
                    Aim::MoreByAtMost(bound) => write!(f, "; aim ≤ {bound} more: {met}"),
                    Aim::AtMost(bound) => write!(f, "; aim ≤ {bound}: {met}"),
                }
            }
        }
    }
}

/// What a running test adds to its record.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Lines for the reader: counts, say.
    pub(crate) notes: Vec<String>,
    pub(crate) figures: Vec<Figure>,
}

impl Report {
    /// Adds a line for the reader.
    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds a figure.
    pub(crate) fn figure(&mut self, figure: Figure) {
        self.figures.push(figure);
    }
}

/// One test that ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) section: String,
    pub(crate) test: String,
    pub(crate) outcome: Outcome,
    pub(crate) seconds: f64,
    pub(crate) report: Report,
}

impl Record {
    /// A record without figures.
    pub(crate) fn new(section: &str, test: &str, outcome: Outcome) -> Self {
        Self { section: section.into(), test: test.into(), outcome, seconds: 0.0, report: Report::default() }
    }
}

/// All records, each printed when it comes.
pub(crate) struct Table(Vec<Record>);

impl Table {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a record and prints it.
    pub(crate) fn add(&mut self, record: Record) {
        let name = format!("{}: {}", record.section, record.test);
        match &record.outcome {
            Outcome::Passed => println!("{name}: ok in {:.1} s", record.seconds),
            Outcome::Failed(reason) => println!("{name}: FAILED: {}", reason.replace('\n', "\n    ")),
            // What all of them lack is printed once.
            Outcome::Skipped(_) if self.0.iter().any(|before| before.outcome == record.outcome) => {
                println!("{name}: skipped: as above");
            }
            Outcome::Skipped(reason) => println!("{name}: skipped: {reason}"),
        }
        record.report.notes.iter().for_each(|note| println!("    {note}"));
        self.0.push(record);
    }

    /// Prints every figure in one place.
    pub(crate) fn print_figures(&self) {
        let figures: Vec<&Figure> = self.0.iter().flat_map(|record| &record.report.figures).collect();
        if figures.is_empty() {
            return;
        }
        println!("figures: median (10th..90th percentile)");
        figures.iter().for_each(|figure| println!("    {figure}"));
        let met = |wanted| figures.iter().filter(|figure| figure.met() == Some(wanted)).count();
        println!("aims: {} met, {} missed", met(true), met(false));
    }

    /// Writes every record into a file, as JSON.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        Ok(std::fs::write(path, serde_json::to_vec_pretty(&self.0)?)?)
    }

    pub(crate) fn failed(&self) -> usize {
        self.0.iter().filter(|record| matches!(record.outcome, Outcome::Failed(_))).count()
    }

    /// The last line.
    pub(crate) fn summary(&self) -> String {
        let count =
            |wanted: fn(&Outcome) -> bool| self.0.iter().filter(|record| wanted(&record.outcome)).count();
        format!(
            "{} passed, {} failed, {} skipped",
            count(|outcome| matches!(outcome, Outcome::Passed)),
            self.failed(),
            count(|outcome| matches!(outcome, Outcome::Skipped(_)))
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_says_whether_its_aim_is_met() {
        let check = |ours: f64, peer: f64, aim: Aim, met: bool| {
            let sample = |median| Sample::of(vec![median; 3]);
            let figure = Figure {
                name: "a".into(),
                unit: "ms".into(),
                ours: sample(ours),
                peer: Some(("b".into(), sample(peer))),
                aim: Some(aim),
            };
            assert_eq!(figure.met(), Some(met), "{figure}");
        };
        check(1.0, 2.0, Aim::RatioAtMost(0.5), true);
        check(1.1, 2.0, Aim::RatioAtMost(0.5), false);
        check(1.9, 2.0, Aim::RatioAtLeast(0.95), true);
        check(f64::NAN, 2.0, Aim::RatioAtLeast(0.95), false);
        check(2.6, 2.0, Aim::MoreByAtMost(0.5), false);
        check(2.4, 2.0, Aim::MoreByAtMost(0.5), true);
        check(1.0, 0.1, Aim::AtMost(1.0), true);
        let sample = Sample::of((1..=101).rev().map(f64::from).collect());
        assert_eq!((sample.median, sample.spread), (51.0, [11.0, 91.0]));
    }
}
