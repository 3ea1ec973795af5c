//! How much of a long sweep is taken: all of it, or a part that a number in `SWEEP_SEED` chooses.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The seed, if a part is taken.
pub(crate) fn seed() -> Option<u64> {
    std::env::var("SWEEP_SEED").ok().map(|seed| seed.parse().expect("SWEEP_SEED is a number"))
}

/// Those of the alternatives for `what` that are taken: all, or the one that the seed chooses for it.
pub(crate) fn taken<T>(what: &str, alternatives: impl IntoIterator<Item = T>) -> Vec<T> {
    chosen(seed(), what, alternatives)
}

pub(crate) fn chosen<T>(seed: Option<u64>, what: &str, alternatives: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut all: Vec<T> = alternatives.into_iter().collect();
    if let Some(seed) = seed
        && !all.is_empty()
    {
        let mut hasher = DefaultHasher::new();
        (seed, what).hash(&mut hasher);
        let one = (hasher.finish() % all.len() as u64) as usize;
        all = vec![all.swap_remove(one)];
    }
    all
}

/// Whether `what` is in the part that is taken, one in `parts`: all are without a seed.
#[allow(dead_code)]
pub(crate) fn part(what: &str, parts: u64) -> bool {
    taken(what, 0..parts).first() == Some(&0)
}
