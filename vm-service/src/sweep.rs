//! How much of a long random test is taken: all of it, or with a number in `SWEEP_SEED` a part that begins at another place.

use proptest::test_runner::{RngAlgorithm, TestRng};

/// What part, if not all.
///
/// # Panics
/// When it is no number.
pub(crate) fn seed() -> Option<u64> {
    std::env::var("SWEEP_SEED").ok().map(|seed| seed.parse().expect("SWEEP_SEED is a number"))
}

/// How many of `all` are taken: a part is a quarter.
pub(crate) fn count(all: usize) -> usize {
    if seed().is_some() { all / 4 } else { all }
}

/// Random numbers, the same for the same `number` and seed.
pub(crate) fn random(number: u8) -> TestRng {
    let mut bytes = [number; 32];
    if let Some(seed) = seed() {
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
    }
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}
