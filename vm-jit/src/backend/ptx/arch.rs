//! NVIDIA architectures and PTX versions.

use std::fmt;
use std::str::FromStr;

/// A version of the PTX language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the point.
    pub major: u8,
    /// Behind it.
    pub minor: u8,
}

impl Version {
    /// `major.minor`.
    pub const fn new(major: u8, minor: u8) -> Version {
        Version { major, minor }
    }

    /// The newest PTX that a driver takes, from what `cuDriverGetVersion` gives (13000 for CUDA 13.0), by
    /// the release notes of the CUDA toolkits.
    pub const fn of_driver(cuda: u32) -> Version {
        let (major, minor) = (cuda / 1000, (cuda % 1000 / 10) as u8);
        match major {
            0..=9 => Version::new(6, if minor >= 2 { 2 } else { 0 }),
            10 => Version::new(6, 3 + if minor > 2 { 2 } else { minor }),
            11 => Version::new(7, if minor > 8 { 8 } else { minor }),
            12 => Version::new(
                8,
                if minor > 9 {
                    8
                } else if minor > 5 {
                    minor - 1
                } else {
                    minor
                },
            ),
            _ => Version::new(9, minor),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What an architecture is.
struct Row {
    name: &'static str,
    /// The number in the name.
    sm: u16,
    /// The first PTX version that names it.
    first: Version,
    /// The PTX version that is written unless a driver is too old for it: the first that has all that this
    /// crate uses there.
    preferred: Version,
    /// KiB of shared memory that one block can have (CUDA C programming guide, table of compute capabilities).
    shared_kib: u32,
}

const fn row(name: &'static str, sm: u16, first: (u8, u8), preferred: (u8, u8), shared_kib: u32) -> Row {
    let (first, preferred) = (Version::new(first.0, first.1), Version::new(preferred.0, preferred.1));
    Row { name, sm, first, preferred, shared_kib }
}

const TABLE: &[Row] = &[
    row("sm_70", 70, (6, 0), (7, 4), 96),
    row("sm_72", 72, (6, 1), (7, 4), 96),
    row("sm_75", 75, (6, 3), (7, 4), 64),
    row("sm_80", 80, (7, 0), (7, 4), 163),
    row("sm_86", 86, (7, 1), (7, 4), 99),
    row("sm_87", 87, (7, 4), (7, 4), 163),
    row("sm_89", 89, (7, 8), (8, 1), 99),
    row("sm_90", 90, (7, 8), (8, 1), 227),
    row("sm_90a", 90, (8, 0), (8, 1), 227),
    row("sm_100", 100, (8, 6), (8, 6), 227),
    row("sm_100a", 100, (8, 6), (8, 6), 227),
    row("sm_103", 103, (8, 8), (8, 8), 227),
    row("sm_103a", 103, (8, 8), (8, 8), 227),
    row("sm_110", 110, (9, 0), (9, 0), 227),
    row("sm_110a", 110, (9, 0), (9, 0), 227),
    row("sm_120", 120, (8, 7), (8, 7), 99),
    row("sm_120a", 120, (8, 7), (8, 7), 99),
    row("sm_121", 121, (8, 8), (8, 8), 99),
    row("sm_121a", 121, (8, 8), (8, 8), 99),
];

/// An NVIDIA architecture, sm_70 to sm_121.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arch(u8);

impl Arch {
    /// Every architecture that this crate knows.
    pub fn all() -> impl Iterator<Item = Arch> {
        (0..TABLE.len() as u8).map(Arch)
    }

    /// The best one for a device of this compute capability: with what is peculiar to it (the `a` of
    /// `sm_90a`) where there is such a one, else the newest that it still runs. `None` below 7.0.
    pub fn of_device(major: u32, minor: u32) -> Option<Arch> {
        let sm = major.checked_mul(10)?.checked_add(minor)?;
        let exact = TABLE.iter().rposition(|row| u32::from(row.sm) == sm);
        let older = || TABLE.iter().rposition(|row| u32::from(row.sm) < sm && !row.name.ends_with('a'));
        exact.or_else(older).map(|i| Arch(i as u8))
    }

    fn row(self) -> &'static Row {
        &TABLE[usize::from(self.0)]
    }

    /// Its name: `sm_90a`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The number in its name: 90.
    pub fn sm(self) -> u16 {
        self.row().sm
    }

    /// The first PTX version that names it.
    pub fn first_version(self) -> Version {
        self.row().first
    }

    /// The PTX version that is written for it unless it is capped.
    pub fn preferred_version(self) -> Version {
        self.row().preferred
    }

    /// Bytes of shared memory that one block can have.
    pub fn shared_bytes(self) -> u64 {
        u64::from(self.row().shared_kib) * 1024
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arch {
    type Err = UnknownArch;

    fn from_str(name: &str) -> Result<Arch, UnknownArch> {
        Arch::all().find(|arch| arch.name() == name).ok_or_else(|| UnknownArch(name.to_owned()))
    }
}

/// No architecture has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no architecture `{0}`; there are {names}", names = Arch::all().map(Arch::name).collect::<Vec<_>>().join(", "))]
pub struct UnknownArch(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_names() {
        let of = |major, minor| Arch::of_device(major, minor).map(Arch::name);
        assert_eq!(of(7, 0), Some("sm_70"));
        assert_eq!(of(9, 0), Some("sm_90a"));
        assert_eq!(of(8, 8), Some("sm_87"));
        assert_eq!(of(13, 0), Some("sm_121"));
        assert_eq!(of(6, 1), None);
        assert_eq!(of(u32::MAX, 0), None);
        for arch in Arch::all() {
            assert_eq!(arch.name().parse(), Ok(arch));
            assert!(arch.first_version() <= arch.preferred_version());
        }
        assert!("sm_61".parse::<Arch>().unwrap_err().to_string().contains("sm_90a"));
    }

    #[test]
    fn drivers() {
        let of = |cuda| Version::of_driver(cuda).to_string();
        assert_eq!(of(10_020), "6.5");
        assert_eq!(of(11_080), "7.8");
        assert_eq!(of(12_020), "8.2");
        assert_eq!(of(12_080), "8.7");
        assert_eq!(of(12_090), "8.8");
        assert_eq!(of(13_000), "9.0");
    }
}
