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

/// An instruction, or a form of one, that not every architecture has (PTX ISA, "Target ISA Notes" and "PTX ISA Notes" of each).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feature {
    /// `mma.m8n8k4` on f16, by quarters of a warp.
    MmaM8N8K4,
    /// `.L1::evict_first` and such on loads and stores.
    EvictionPriority,
    /// `tanh.approx.f32`.
    TanhApprox,
    /// `ldmatrix`.
    LdMatrix,
    /// `mma.m16n8k8` on f16.
    MmaF16K8,
    /// `mma.m8n8k16` on i8.
    MmaI8K16,
    /// `cvt.rn.bf16.f32`.
    CvtBf16,
    /// `fma` on bf16.
    FmaBf16,
    /// `min` and `max` on f16 and bf16.
    MinMaxHalf,
    /// `min.NaN` and `max.NaN` on f32.
    MinMaxNaN,
    /// `redux.sync` on integers.
    Redux,
    /// `createpolicy` and `.L2::cache_hint`.
    CachePolicy,
    /// `cp.async`.
    CpAsync,
    /// `mbarrier`, with `cp.async.mbarrier.arrive` and waits for a parity.
    Mbarrier,
    /// Waits at an `mbarrier` that give the thread's time away.
    MbarrierTryWait,
    /// `mma.m16n8k16` on f16.
    MmaF16,
    /// `mma.m16n8k16` on bf16.
    MmaBf16,
    /// `mma.m16n8k8` on tf32.
    MmaTf32,
    /// `mma.m16n8k32` on i8.
    MmaI8,
    /// Conversions between f32, f16 and f8.
    CvtF8,
    /// `mma.m16n8k32` on f8.
    MmaF8,
    /// `add`, `sub`, `mul` and comparisons of bf16.
    ArithmeticBf16,
    /// Clusters of blocks, and stores into the shared memory of others that a barrier counts.
    Cluster,
    /// The Tensor Memory Accelerator: `cp.async.bulk.tensor`.
    Tma,
    /// `wgmma`.
    Wgmma,
    /// `setmaxnreg`.
    SetMaxNReg,
}

impl Feature {
    /// The first PTX version that has it.
    const fn version(self, sm: u16) -> Version {
        match self {
            Feature::MmaM8N8K4 => Version::new(6, 4),
            Feature::LdMatrix | Feature::MmaF16K8 | Feature::MmaI8K16 => Version::new(6, 5),
            Feature::TanhApprox
            | Feature::CvtBf16
            | Feature::FmaBf16
            | Feature::MinMaxHalf
            | Feature::MinMaxNaN
            | Feature::Redux
            | Feature::CpAsync
            | Feature::MmaF16
            | Feature::MmaBf16
            | Feature::MmaTf32
            | Feature::MmaI8 => Version::new(7, 0),
            Feature::Mbarrier => Version::new(7, 1),
            Feature::EvictionPriority | Feature::CachePolicy => Version::new(7, 4),
            Feature::CvtF8 if sm == 89 => Version::new(8, 1),
            Feature::CvtF8 | Feature::ArithmeticBf16 | Feature::MbarrierTryWait => Version::new(7, 8),
            Feature::Tma | Feature::Wgmma | Feature::SetMaxNReg => Version::new(8, 0),
            Feature::Cluster => Version::new(8, 1),
            Feature::MmaF8 => Version::new(8, 4),
        }
    }
}

/// A set of features.
#[derive(Clone, Copy)]
struct Features(u64);

impl Features {
    const fn and(self, more: &[Feature]) -> Features {
        let (mut bits, mut i) = (self.0, 0);
        while i < more.len() {
            bits |= 1 << more[i] as u32;
            i += 1;
        }
        Features(bits)
    }

    const fn has(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u32 != 0
    }
}

const VOLTA: Features = Features(0).and(&[Feature::MmaM8N8K4, Feature::EvictionPriority]);
const TURING: Features =
    VOLTA.and(&[Feature::TanhApprox, Feature::LdMatrix, Feature::MmaF16K8, Feature::MmaI8K16]);
const AMPERE: Features = TURING.and(&[
    Feature::CvtBf16,
    Feature::FmaBf16,
    Feature::MinMaxHalf,
    Feature::MinMaxNaN,
    Feature::Redux,
    Feature::CachePolicy,
    Feature::CpAsync,
    Feature::Mbarrier,
    Feature::MmaF16,
    Feature::MmaBf16,
    Feature::MmaTf32,
    Feature::MmaI8,
]);
const ADA: Features = AMPERE.and(&[Feature::CvtF8, Feature::MmaF8]);
const HOPPER: Features =
    ADA.and(&[Feature::ArithmeticBf16, Feature::MbarrierTryWait, Feature::Cluster, Feature::Tma]);
/// Not in what came later.
const HOPPER_A: Features = HOPPER.and(&[Feature::Wgmma, Feature::SetMaxNReg]);
const BLACKWELL: Features = HOPPER;
const BLACKWELL_A: Features = BLACKWELL.and(&[Feature::SetMaxNReg]);

/// What an architecture is.
struct Row {
    name: &'static str,
    /// The number in the name.
    sm: u16,
    features: Features,
    /// The first PTX version that names it.
    first: Version,
    /// The PTX version that is written unless a driver is too old for it: the first that has all that this
    /// crate uses there.
    preferred: Version,
    /// KiB of shared memory that one block can have (CUDA C programming guide, table of compute capabilities).
    shared_kib: u32,
}

const fn row(
    name: &'static str,
    sm: u16,
    features: Features,
    first: (u8, u8),
    preferred: (u8, u8),
    shared_kib: u32,
) -> Row {
    let (first, preferred) = (Version::new(first.0, first.1), Version::new(preferred.0, preferred.1));
    Row { name, sm, features, first, preferred, shared_kib }
}

const TABLE: &[Row] = &[
    row("sm_70", 70, VOLTA, (6, 0), (7, 4), 96),
    row("sm_72", 72, VOLTA, (6, 1), (7, 4), 96),
    row("sm_75", 75, TURING, (6, 3), (7, 4), 64),
    row("sm_80", 80, AMPERE, (7, 0), (7, 4), 163),
    row("sm_86", 86, AMPERE, (7, 1), (7, 4), 99),
    row("sm_87", 87, AMPERE, (7, 4), (7, 4), 163),
    row("sm_89", 89, ADA, (7, 8), (8, 4), 99),
    row("sm_90", 90, HOPPER, (7, 8), (8, 4), 227),
    row("sm_90a", 90, HOPPER_A, (8, 0), (8, 1), 227),
    row("sm_100", 100, BLACKWELL, (8, 6), (8, 6), 227),
    row("sm_100a", 100, BLACKWELL_A, (8, 6), (8, 6), 227),
    row("sm_103", 103, BLACKWELL, (8, 8), (8, 8), 227),
    row("sm_103a", 103, BLACKWELL_A, (8, 8), (8, 8), 227),
    row("sm_110", 110, BLACKWELL, (9, 0), (9, 0), 227),
    row("sm_110a", 110, BLACKWELL_A, (9, 0), (9, 0), 227),
    row("sm_120", 120, BLACKWELL, (8, 7), (8, 7), 99),
    row("sm_120a", 120, BLACKWELL_A, (8, 7), (8, 7), 99),
    row("sm_121", 121, BLACKWELL, (8, 8), (8, 8), 99),
    row("sm_121a", 121, BLACKWELL_A, (8, 8), (8, 8), 99),
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

    /// Has it an instruction, and the PTX version too?
    pub(super) fn has(self, feature: Feature, version: Version) -> bool {
        self.row().features.has(feature) && version >= feature.version(self.sm())
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

    /// Features don't only grow.
    #[test]
    fn features() {
        let check = |feature, wanted: &[&str]| {
            let newest = Version::new(9, 0);
            let found: Vec<&str> =
                Arch::all().filter(|arch| arch.has(feature, newest)).map(Arch::name).collect();
            assert_eq!(found, wanted, "{feature:?}");
        };
        check(Feature::Wgmma, &["sm_90a"]);
        check(Feature::SetMaxNReg, &["sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"]);
        let all: Vec<&str> = Arch::all().map(Arch::name).collect();
        check(Feature::CpAsync, &all[3..]);
        check(Feature::MmaF8, &all[6..]);
        check(Feature::MmaM8N8K4, &all);
        let ada: Arch = "sm_89".parse().unwrap();
        assert!(!ada.has(Feature::MmaF8, Version::new(8, 3)) && ada.has(Feature::MmaF8, Version::new(8, 4)));
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
