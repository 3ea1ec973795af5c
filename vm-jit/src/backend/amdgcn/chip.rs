//! Chips, by the names that LLVM has for them.

use std::fmt;
use std::str::FromStr;

/// A chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Chip {
    /// CDNA 2: MI210, MI250.
    Gfx90a,
    /// CDNA 3: MI300.
    Gfx942,
    /// CDNA 4: MI350.
    Gfx950,
    /// RDNA 3: RX 7900.
    Gfx1100,
    /// RDNA 4: RX 9070.
    Gfx1201,
}

impl Chip {
    /// All, from old to new.
    pub const ALL: [Chip; 5] = [Chip::Gfx90a, Chip::Gfx942, Chip::Gfx950, Chip::Gfx1100, Chip::Gfx1201];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Chip::Gfx90a => "gfx90a",
            Chip::Gfx942 => "gfx942",
            Chip::Gfx950 => "gfx950",
            Chip::Gfx1100 => "gfx1100",
            Chip::Gfx1201 => "gfx1201",
        }
    }

    /// Threads of a wave.
    pub const fn wave(self) -> u32 {
        match self {
            Chip::Gfx90a | Chip::Gfx942 | Chip::Gfx950 => 64,
            Chip::Gfx1100 | Chip::Gfx1201 => 32,
        }
    }

    /// What LLVM is told to do without. With registers of 16 bits it loses values that are computed: those of `copysign`, and
    /// others that go by way of a scalar register (llvm-project, pull requests 218644 and 225175).
    pub(super) const fn features(self) -> &'static str {
        match self {
            Chip::Gfx90a | Chip::Gfx942 | Chip::Gfx950 => "",
            Chip::Gfx1100 | Chip::Gfx1201 => "-real-true16",
        }
    }

    /// Registers of 32 bits that a thread of a block of so many has at most: those of CDNA's accumulators, too. The waves of a block run
    /// at a time, on four SIMDs.
    pub(super) const fn registers(self, threads: u32) -> u32 {
        let waves = threads.div_ceil(self.wave()).div_ceil(4);
        let (all, most) = if self.wave() == 64 { (512, 512) } else { (1536, 256) };
        let each = all / if waves == 0 { 1 } else { waves };
        if each < most { each } else { most }
    }

    /// Bytes of shared memory (LDS) that a block can have.
    pub const fn shared_bytes(self) -> u64 {
        match self {
            Chip::Gfx950 => 160 << 10,
            _ => 64 << 10,
        }
    }
}

impl fmt::Display for Chip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No chip has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no chip `{0}`; there are {all}", all = Chip::ALL.map(Chip::name).join(", "))]
pub struct UnknownChip(String);

impl FromStr for Chip {
    type Err = UnknownChip;

    fn from_str(text: &str) -> Result<Chip, UnknownChip> {
        Chip::ALL.into_iter().find(|chip| chip.name() == text).ok_or_else(|| UnknownChip(text.to_owned()))
    }
}
