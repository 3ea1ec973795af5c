//! Which of the driver's functions the libraries above it name: `consumers.txt`, parsed.

use std::sync::LazyLock;

use vm_cuda_api::names::{Symbol, find};
use vm_cuda_api::{FUNCTIONS, number};

use crate::calls::{MODES, Mode};

/// A library, or a program.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Consumer {
    /// What it is called here.
    pub name: String,
    /// Its packages with their versions.
    pub packages: Vec<String>,
    /// The functions that it names, by their numbers.
    pub functions: Vec<usize>,
}

impl Consumer {
    /// How many of them cross the bridge, in whatever way.
    #[must_use]
    pub fn supported(&self) -> usize {
        self.functions.iter().filter(|function| MODES[**function] != Mode::Unsupported).count()
    }
}

/// All of them, by their names.
///
/// # Panics
/// Never: a test parses the table.
pub static CONSUMERS: LazyLock<Vec<Consumer>> =
    LazyLock::new(|| parse(include_str!("../consumers.txt")).expect("consumers.txt is well formed"));

/// The names of all, without what they name: each start of a command line that takes one asks.
pub fn names() -> impl Iterator<Item = &'static str> {
    let lines = include_str!("../consumers.txt").lines();
    lines
        .filter(|line| !line.starts_with(['#', ' ']))
        .filter_map(|line| line.split(' ').next())
        .filter(|name| !name.is_empty())
}

/// Why a function is not supported, as far as somebody names it: `unsupported.txt`.
#[must_use]
pub fn reason(function: &str) -> Option<&'static str> {
    reasons().find(|(names, _)| is_of(function, names)).map(|(_, reason)| reason)
}

/// A name, or the front of several before a `*`, with the reason.
fn reasons() -> impl Iterator<Item = (&'static str, &'static str)> {
    let text = include_str!("../unsupported.txt");
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' '))
}

/// Forms of a function for per-thread streams are of its name.
fn is_of(function: &str, names: &str) -> bool {
    let plain = |suffix: &str| function.strip_suffix(suffix) == Some(names);
    match names.strip_suffix('*') {
        Some(front) => function.starts_with(front),
        None => function == names || plain("_ptsz") || plain("_ptds"),
    }
}

/// The function that a name means: that of the name, if it tells a version, or has none; else the newest, as `cuGetProcAddress` has it.
fn meant(name: &str) -> Option<usize> {
    let symbols = FUNCTIONS.iter().enumerate().map(|(at, function)| Symbol {
        name: &function.name,
        since: function.since,
        what: at,
    });
    find(symbols, i32::MAX, name, i32::MAX, 0).ok().and_then(|(found, _)| found).or_else(|| number(name))
}

/// Says what is wrong with a line.
fn parse(text: &str) -> Result<Vec<Consumer>, String> {
    let mut consumers: Vec<Consumer> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix("  ") {
            let functions = &mut consumers.last_mut().ok_or(line)?.functions;
            functions.push(meant(name).ok_or(line)?);
        } else {
            let mut words = line.split(' ').map(str::to_owned);
            let name = words.next().ok_or(line)?;
            consumers.push(Consumer { name, packages: words.collect(), functions: Vec::new() });
        }
    }
    for consumer in &mut consumers {
        consumer.functions.sort_unstable();
        consumer.functions.dedup();
    }
    Ok(consumers)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_of_consumers() {
        assert!(names().eq(CONSUMERS.iter().map(|consumer| consumer.name.as_str())));
    }

    #[test]
    fn names_mean_functions() {
        let check = |name: &str, expect: Option<&str>| {
            assert_eq!(meant(name).map(|at| FUNCTIONS[at].name.as_str()), expect, "{name}");
        };
        check("cuMemAlloc", Some("cuMemAlloc_v2"));
        check("cuMemAlloc_v2", Some("cuMemAlloc_v2"));
        check("cuCtxCreate_v2", Some("cuCtxCreate_v2"));
        check("cuGraphInstantiate", Some("cuGraphInstantiateWithFlags"));
        check("cuMemcpyAsync_ptsz", Some("cuMemcpyAsync_ptsz"));
        check("cuNothing", None);
    }

    #[test]
    fn each_function_crosses_or_there_is_a_reason_and_each_reason_has_a_function() {
        let mut used = BTreeSet::new();
        for consumer in CONSUMERS.iter() {
            assert!(!consumer.functions.is_empty() && !consumer.packages.is_empty(), "{}", consumer.name);
            for &function in &consumer.functions {
                let name = &FUNCTIONS[function].name;
                let of: Vec<_> = reasons().filter(|(names, _)| is_of(name, names)).collect();
                let crosses = MODES[function] != Mode::Unsupported;
                let who = &consumer.name;
                assert_eq!(
                    of.len(),
                    usize::from(!crosses),
                    "{name} of {who}: see calls.txt and unsupported.txt: {of:?}"
                );
                used.extend(of);
            }
        }
        let unused: Vec<_> = reasons().filter(|reason| !used.contains(reason)).collect();
        assert!(unused.is_empty(), "unsupported.txt has what nobody names: {unused:?}");
    }

    #[test]
    fn the_documentation_says_how_many() {
        let docs = include_str!("../../../../../docs/bridge.md");
        for consumer in CONSUMERS.iter() {
            let (count, supported) = (consumer.functions.len(), consumer.supported());
            let row =
                format!("| {} | {} | {count} | {supported} |", consumer.name, consumer.packages.join(", "));
            assert!(docs.contains(&row), "docs/bridge.md has no line {row}");
        }
    }

    #[test]
    fn what_is_no_list_is_told() {
        let check = |text: &str, wrong: &str| assert_eq!(parse(text), Err(wrong.to_owned()));
        check("  cuInit", "  cuInit");
        check("a b==1\n  cuNothing", "  cuNothing");
        let parsed = parse("# a\n\na b==1 c==2\n  cuMemAlloc\n  cuMemAlloc_v2\n").expect("a list");
        assert_eq!(parsed[0].packages, ["b==1", "c==2"]);
        assert_eq!((parsed[0].functions.len(), parsed[0].supported()), (1, 1));
    }
}
