//! How much of a long sweep is taken: all of its points, or a part that a seed chooses.

use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::{Context, Result};

/// The environment variable with the seed. Without it sweeps are whole.
pub const VARIABLE: &str = "SWEEP_SEED";

/// Which points of a sweep are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    seed: Option<u64>,
}

impl Sweep {
    /// As the environment says.
    ///
    /// # Errors
    /// When the seed is no number.
    pub fn of_environment() -> Result<Self> {
        Self::parse(std::env::var(VARIABLE).ok().as_deref())
    }

    /// As a seed says; whole without one.
    ///
    /// # Errors
    /// When the seed is no number.
    pub fn parse(seed: Option<&str>) -> Result<Self> {
        let parse =
            |seed: &str| seed.parse().with_context(|| format!("{VARIABLE} is {seed:?}, and no number"));
        Ok(Self { seed: seed.map(parse).transpose()? })
    }

    /// The seed that chooses a part.
    pub fn seed(self) -> Option<u64> {
        self.seed
    }

    /// Whether all points are taken.
    pub fn is_whole(self) -> bool {
        self.seed.is_none()
    }

    /// Whether this point is taken: of each `every` neighbours, counted from 0, a random one is.
    pub fn takes(self, point: usize, every: usize) -> bool {
        let Some(seed) = self.seed else { return true };
        let (block, place) = (point / every, point % every);
        let mut hasher = DefaultHasher::new();
        (seed, block).hash(&mut hasher);
        hasher.finish() % every as u64 == place as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_spread_and_seeds_take_turns() {
        let taken = |seed: Option<&str>| -> Vec<usize> {
            let sweep = Sweep::parse(seed).expect("a seed");
            (0..300).filter(|&point| sweep.takes(point, 3)).collect()
        };
        assert_eq!(taken(None).len(), 300);
        let mut all = [false; 300];
        for seed in 0..20 {
            let part = taken(Some(&seed.to_string()));
            assert_eq!(part, taken(Some(&seed.to_string())));
            assert!(part.iter().map(|point| point / 3).eq(0..100), "{part:?}");
            part.into_iter().for_each(|point| all[point] = true);
        }
        assert!(all.iter().filter(|&&taken| taken).count() > 290);
        assert!(Sweep::parse(Some("x")).is_err());
    }
}
