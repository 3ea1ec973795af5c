//! Which chip an NVIDIA GPU is, by its boot registers.
//!
//! # Sources
//! The fields of `NV_PMC_BOOT_0`, `NV_PMC_BOOT_1` and `NV_PMC_BOOT_42` are those of NVIDIA's open-gpu-kernel-modules 595.45.04
//! (`src/common/inc/swref/published/nv_ref.h`) and of open-gpu-doc (`manuals/volta/gv100/dev_master.ref.txt`,
//! `manuals/ampere/ga100/dev_boot.ref.txt`). Chips from Maxwell on are those of `nv_arch.h` there, older ones those of nouveau
//! (Linux, `drivers/gpu/drm/nouveau/nvkm/engine/device/base.c`). From Blackwell on the block of these registers is said to be
//! at `NV_PMC0_PRI_BASE`, which is 0 for all that is published.
//!
//! # What is never guessed
//! A register that reads all ones is of a function that is gone, asleep or does not decode; `0xbadfXXXX` is what NVIDIA's chips
//! answer for a register that is switched off, in reset or locked (`dev_pri_ringstation_sys.h`); zero is no chip. Each is
//! an error of its own, as are a chip that this table does not have, a big-endian one, and two registers that disagree.

use std::fmt;

use thiserror::Error;

use super::registers::{RegisterError, Registers};
use crate::pci::PciFunction;

/// `NV_PMC_BOOT_0`: architecture, implementation and revision.
pub const BOOT_0: u64 = 0x0;
/// `NV_PMC_BOOT_1`: byte order of old chips, and whether the function is a virtual one.
pub const BOOT_1: u64 = 0x4;
/// `NV_PMC_BOOT_42`: the same as `NV_PMC_BOOT_0`, in fields that do not run out, from Maxwell on.
pub const BOOT_42: u64 = 0xa00;

/// What `NV_PMC_BOOT_1` reads in a chip that is switched to big-endian (nouveau, `nvkm_device_endianness`).
const BIG_ENDIAN: u32 = 0x0100_0001;
/// The first architecture that has `NV_PMC_BOOT_42`: Maxwell (`NV_PMC_BOOT_42_ARCHITECTURE_GM100`).
const FIRST_WITH_BOOT_42: u16 = 0x11;

/// A generation of NVIDIA's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display, strum::IntoStaticStr)]
#[expect(missing_docs, reason = "the names are NVIDIA's")]
pub enum Architecture {
    Tesla,
    Fermi,
    Kepler,
    Maxwell,
    Pascal,
    Volta,
    Turing,
    Ampere,
    Hopper,
    Ada,
    Blackwell,
}

impl Architecture {
    /// By the number in the boot registers.
    fn of(number: u16) -> Option<Self> {
        Some(match number {
            0x05 | 0x08..=0x0a => Self::Tesla,
            0x0c | 0x0d => Self::Fermi,
            0x0e..=0x10 => Self::Kepler,
            0x11 | 0x12 => Self::Maxwell,
            0x13 => Self::Pascal,
            0x14 => Self::Volta,
            0x16 => Self::Turing,
            0x17 => Self::Ampere,
            0x18 => Self::Hopper,
            0x19 => Self::Ada,
            0x1a | 0x1b => Self::Blackwell,
            _ => return None,
        })
    }
}

/// Chips by architecture and implementation, as one number: `NV_PMC_BOOT_42_CHIP_ID`. Those of systems on a chip that have no PCI
/// function are left out.
const CHIPS: &[(u16, &str)] = &[
    (0x050, "G80"),
    (0x084, "G84"),
    (0x086, "G86"),
    (0x092, "G92"),
    (0x094, "G94"),
    (0x096, "G96"),
    (0x098, "G98"),
    (0x0a0, "GT200"),
    (0x0a3, "GT215"),
    (0x0a5, "GT216"),
    (0x0a8, "GT218"),
    (0x0aa, "MCP77/MCP78"),
    (0x0ac, "MCP79/MCP7A"),
    (0x0af, "MCP89"),
    (0x0c0, "GF100"),
    (0x0c1, "GF108"),
    (0x0c3, "GF106"),
    (0x0c4, "GF104"),
    (0x0c8, "GF110"),
    (0x0ce, "GF114"),
    (0x0cf, "GF116"),
    (0x0d7, "GF117"),
    (0x0d9, "GF119"),
    (0x0e4, "GK104"),
    (0x0e6, "GK106"),
    (0x0e7, "GK107"),
    (0x0f0, "GK110"),
    (0x0f1, "GK110B"),
    (0x106, "GK208B"),
    (0x108, "GK208"),
    (0x117, "GM107"),
    (0x118, "GM108"),
    (0x120, "GM200"),
    (0x124, "GM204"),
    (0x126, "GM206"),
    (0x130, "GP100"),
    (0x132, "GP102"),
    (0x134, "GP104"),
    (0x136, "GP106"),
    (0x137, "GP107"),
    (0x138, "GP108"),
    (0x140, "GV100"),
    (0x162, "TU102"),
    (0x164, "TU104"),
    (0x166, "TU106"),
    (0x167, "TU117"),
    (0x168, "TU116"),
    (0x170, "GA100"),
    (0x172, "GA102"),
    (0x173, "GA103"),
    (0x174, "GA104"),
    (0x176, "GA106"),
    (0x177, "GA107"),
    (0x17f, "GA102F"),
    (0x180, "GH100"),
    (0x192, "AD102"),
    (0x193, "AD103"),
    (0x194, "AD104"),
    (0x196, "AD106"),
    (0x197, "AD107"),
    (0x1a0, "GB100"),
    (0x1a2, "GB102"),
    (0x1a3, "GB110"),
    (0x1a4, "GB112"),
    (0x1ab, "GB10B"),
    (0x1b2, "GB202"),
    (0x1b3, "GB203"),
    (0x1b5, "GB205"),
    (0x1b6, "GB206"),
    (0x1b7, "GB207"),
    (0x1bb, "GB20B"),
    (0x1bc, "GB20C"),
];

/// What the boot registers read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootRegisters {
    /// [`BOOT_0`].
    pub boot_0: u32,
    /// [`BOOT_1`]; `None` where it was not read, as [`BOOT_0`] told that nothing can be.
    pub boot_1: Option<u32>,
    /// [`BOOT_42`]; `None` where the chip has none.
    pub boot_42: Option<u32>,
}

impl BootRegisters {
    /// Reads them. It has no side effects. What follows from [`BOOT_0`] not to be there is not read.
    ///
    /// # Errors
    /// When a register can't be read.
    pub fn read(registers: &(impl Registers + ?Sized)) -> Result<Self, RegisterError> {
        let boot_0 = registers.read32(BOOT_0)?;
        let mut boot = Self { boot_0, boot_1: None, boot_42: None };
        if absent("NV_PMC_BOOT_0", boot_0).is_some() {
            return Ok(boot);
        }
        let boot_1 = registers.read32(BOOT_1)?;
        boot.boot_1 = Some(boot_1);
        // Zero is what it reads in most chips.
        let answers = boot_1 == 0 || boot_1 != BIG_ENDIAN && absent("NV_PMC_BOOT_1", boot_1).is_none();
        if answers && chip_id(boot_0) >> 4 >= FIRST_WITH_BOOT_42 {
            boot.boot_42 = Some(registers.read32(BOOT_42)?);
        }
        Ok(boot)
    }
}

/// A stepping: A1, B0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revision {
    /// The letter, as a hexadecimal digit: 0xa for A.
    pub major: u8,
    /// The number behind it, 0 to 15.
    pub minor: u8,
    /// More of it, where [`BOOT_42`] tells: 0 for most chips.
    pub extended: u8,
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}{}", self.major, self.minor)?;
        if self.extended == 0 { Ok(()) } else { write!(f, ".{}", self.extended) }
    }
}

/// What a chip says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chip {
    /// Architecture and implementation as one number, 0x180 for GH100.
    pub id: u16,
    /// Its name, as in GH100.
    pub name: &'static str,
    /// Its generation.
    pub architecture: Architecture,
    /// Its stepping.
    pub revision: Revision,
    /// Whether the function is a virtual one, of SR-IOV or of a hypervisor (`NV_PMC_BOOT_1_VGPU`).
    pub is_virtual: bool,
    /// Whether [`BOOT_42`] says the same. False before Maxwell, and where that register was locked or read zero.
    pub confirmed: bool,
}

impl fmt::Display for Chip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) revision {}", self.name, self.architecture, self.revision)?;
        if self.is_virtual { f.write_str(", a virtual function") } else { Ok(()) }
    }
}

/// Why registers do not tell which chip it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unidentified {
    /// All ones.
    #[error("{register} reads all ones: the function is gone, asleep, in reset, or does not decode its BARs")]
    AllOnes {
        /// Which register.
        register: &'static str,
    },
    /// `0xbadfXXXX`.
    #[error(
        "{register} reads {value:#010x}, which NVIDIA's chips answer for a register that is switched off, in reset or locked"
    )]
    ErrorPattern {
        /// Which register.
        register: &'static str,
        /// What it reads.
        value: u32,
    },
    /// Zero.
    #[error(
        "{register} reads zero, which is no chip: its BAR may be another's, or the function not be started yet"
    )]
    Zero {
        /// Which register.
        register: &'static str,
    },
    /// The other byte order.
    #[error(
        "its registers are big-endian (NV_PMC_BOOT_1 reads {BIG_ENDIAN:#010x}, NV_PMC_BOOT_0 {boot_0:#010x}): a driver of a \
         big-endian host has switched them, which a reset undoes"
    )]
    BigEndian {
        /// What [`BOOT_0`] reads.
        boot_0: u32,
    },
    /// A chip that is not in the table.
    #[error(
        "NV_PMC_BOOT_0 reads {boot_0:#010x}, chip {id:#05x}, which is not in the table of {known} chips: it is newer, older or no GPU of NVIDIA's",
        known = CHIPS.len()
    )]
    UnknownChip {
        /// What [`BOOT_0`] reads.
        boot_0: u32,
        /// Architecture and implementation as one number.
        id: u16,
    },
    /// The two registers that must agree do not.
    #[error(
        "NV_PMC_BOOT_0 reads {boot_0:#010x} and NV_PMC_BOOT_42 {boot_42:#010x}, which are two chips; it is broken or hostile"
    )]
    Disagreement {
        /// What [`BOOT_0`] reads.
        boot_0: u32,
        /// What [`BOOT_42`] reads.
        boot_42: u32,
    },
}

impl Unidentified {
    /// Whether a function that starts may read so for a while.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::AllOnes { .. } | Self::ErrorPattern { .. } | Self::Zero { .. })
    }
}

/// Says which chip it is.
///
/// # Errors
/// What the registers read instead.
pub fn identify(boot: BootRegisters) -> Result<Chip, Unidentified> {
    let BootRegisters { boot_0, boot_1, boot_42 } = boot;
    if let Some(absent) = absent("NV_PMC_BOOT_0", boot_0) {
        return Err(absent);
    }
    let boot_1 = boot_1.unwrap_or(0);
    match absent("NV_PMC_BOOT_1", boot_1) {
        // Zero is what it reads in most chips.
        None | Some(Unidentified::Zero { .. }) => {}
        Some(absent) => return Err(absent),
    }
    if boot_1 == BIG_ENDIAN {
        return Err(Unidentified::BigEndian { boot_0 });
    }
    let id = chip_id(boot_0);
    let architecture = Architecture::of(id >> 4);
    let (Some(architecture), Some(&(_, name))) = (architecture, CHIPS.iter().find(|(known, _)| *known == id))
    else {
        return Err(Unidentified::UnknownChip { boot_0, id });
    };
    let mut revision = Revision { major: nibble(boot_0, 4), minor: nibble(boot_0, 0), extended: 0 };
    let mut confirmed = false;
    if let Some(boot_42) = boot_42 {
        match absent("NV_PMC_BOOT_42", boot_42) {
            None => {
                let other = Revision {
                    major: nibble(boot_42, 16),
                    minor: nibble(boot_42, 12),
                    extended: nibble(boot_42, 8),
                };
                if (boot_42 >> 20 & 0x3ff) as u16 != id
                    || (other.major, other.minor) != (revision.major, revision.minor)
                {
                    return Err(Unidentified::Disagreement { boot_0, boot_42 });
                }
                revision = other;
                confirmed = true;
            }
            Some(gone @ Unidentified::AllOnes { .. }) => return Err(gone),
            // It may be locked, and chips of which nothing says that they have it read zero.
            Some(_) => {}
        }
    }
    let is_virtual = architecture >= Architecture::Turing && boot_1 & 0x3_0000 != 0;
    Ok(Chip { id, name, architecture, revision, is_virtual, confirmed })
}

/// Architecture and implementation from [`BOOT_0`]. The architecture's uppermost bit is apart from the others (`ARCHITECTURE_1`).
fn chip_id(boot_0: u32) -> u16 {
    let architecture = (boot_0 >> 8 & 1) << 5 | (boot_0 >> 24 & 0x1f);
    (architecture << 4 | (boot_0 >> 20 & 0xf)) as u16
}

fn nibble(value: u32, shift: u32) -> u8 {
    (value >> shift & 0xf) as u8
}

/// What a value says that is no register's.
fn absent(register: &'static str, value: u32) -> Option<Unidentified> {
    match value {
        u32::MAX => Some(Unidentified::AllOnes { register }),
        0 => Some(Unidentified::Zero { register }),
        _ if value >> 16 == 0xbadf => Some(Unidentified::ErrorPattern { register, value }),
        _ => None,
    }
}

/// The chip that the PCI ID database has for a GPU: GH100 for `GH100 [H100 SXM5 80GB]`, Navi 31 for `Navi 31 [Radeon RX 7900 XTX]`.
/// It is what the vendor's and device's numbers stand for. Of AMD's and Intel's GPUs nothing else is told here: no register of theirs is read.
pub fn chip_by_name(function: &PciFunction) -> Option<&'static str> {
    let (chip, model) = function.device_name()?.split_once('[')?;
    let chip = chip.trim();
    (!chip.is_empty() && model.ends_with(']')).then_some(chip)
}
