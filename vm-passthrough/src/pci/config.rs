//! Config space as raw bytes: bounded walks over the capability lists, and the PCI Express link registers.
//!
//! The bytes come from a device and may be anything. A walk visits each offset at most once, so it ends
//! on a list that loops, and reads only bytes of config space.

use std::convert::Infallible;
use std::fmt;

use super::{Capability, ExtendedCapability, Link, ResizableBar, regs};

/// Bytes of the conventional config space.
pub const CONFIG_SIZE: usize = 256;
/// Bytes of the PCI Express extended config space.
pub const EXTENDED_CONFIG_SIZE: usize = 4096;
/// Bytes of the header, which every function has and any user may read on Linux.
pub const HEADER_SIZE: usize = 64;

/// The state of a function, judged by its config space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigState {
    /// The function answers.
    Alive,
    /// All ones: nothing answers.
    Absent,
    /// The function asks to be read again later, as after a reset (Request Retry Status, PCI Express 6.0, 2.3.2): the vendor
    /// ID reads 0x0001, which no function has.
    Retry,
    /// The IDs read zero, or all of status, class and header type does.
    Zeros,
    /// Registers read all ones that never do in a function that answers.
    PartlyOnes,
}

impl ConfigState {
    /// The bytes of the header that [`of`](Self::of) needs.
    pub const LEN: usize = 16;

    /// Classifies a config space by its first bytes; `None` with fewer than [`LEN`](Self::LEN). The IDs of a virtual function
    /// read all ones (SR-IOV 1.1, 3.4.1.1).
    ///
    /// Linux takes the same values of the IDs for an absent function, except those of a retry (`pci_bus_generic_read_dev_vendor_id`
    /// in `drivers/pci/probe.c`).
    pub fn of(config: &[u8], is_virtual: bool) -> Option<Self> {
        let header =
            config.get(..HEADER_SIZE.min(config.len())).filter(|header| header.len() >= Self::LEN)?;
        let read = |offset: u16| header.read_u16(offset.into()).unwrap_or(u16::MAX);
        let ids = [read(regs::VENDOR_ID), read(regs::VENDOR_ID + 2)];
        let class = [read(regs::CLASS_REVISION), read(regs::CLASS_REVISION + 2)];
        Some(if header.iter().all(|&byte| byte == 0xff) {
            Self::Absent
        } else if ids[0] == 0x0001 {
            Self::Retry
        } else if ids == [0, 0] || header[usize::from(regs::STATUS)..Self::LEN].iter().all(|&byte| byte == 0)
        {
            Self::Zeros
        } else if (!is_virtual && ids.contains(&u16::MAX))
            || [read(regs::COMMAND), read(regs::STATUS)].contains(&u16::MAX)
            || class == [u16::MAX; 2]
            || read(regs::HEADER_TYPE) as u8 & regs::HEADER_TYPE_MASK == regs::HEADER_TYPE_MASK
        {
            Self::PartlyOnes
        } else {
            Self::Alive
        })
    }
}

impl fmt::Display for ConfigState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alive => "answers",
            Self::Absent => "reads all ones",
            Self::Retry => "reads vendor ID 0x0001, as of a function that is still being reset",
            Self::Zeros => "reads zeros",
            Self::PartlyOnes => "reads ones in part",
        })
    }
}

/// Something that config space can be read from.
pub trait ConfigSource {
    /// Fills `data` from `offset` on and returns how many bytes there were; fewer than asked when the rest can't
    /// be read.
    fn read(&self, offset: usize, data: &mut [u8]) -> usize;

    /// A little-endian 16-bit register.
    fn read_u16(&self, offset: usize) -> Option<u16> {
        let mut data = [0; 2];
        (self.read(offset, &mut data) == data.len()).then(|| u16::from_le_bytes(data))
    }

    /// A little-endian 32-bit register.
    fn read_u32(&self, offset: usize) -> Option<u32> {
        let mut data = [0; 4];
        (self.read(offset, &mut data) == data.len()).then(|| u32::from_le_bytes(data))
    }
}

impl ConfigSource for [u8] {
    fn read(&self, offset: usize, data: &mut [u8]) -> usize {
        let there = self.get(offset..).unwrap_or_default();
        let len = there.len().min(data.len());
        data[..len].copy_from_slice(&there[..len]);
        len
    }
}

/// The capability list of `config`, the conventional config space, in the order of the list. It ends early where the list
/// leaves `config`.
pub fn capabilities(config: &[u8]) -> Vec<Capability> {
    // A byte past the end reads as zero, which ends the list.
    let read = |offset: u16| Ok::<_, Infallible>(config.read_u16(offset.into()).unwrap_or(0));
    walk_capabilities(read).unwrap_or_else(|never| match never {})
}

/// The capability list of a function, of whose config space `read` gives 16 bits at an even offset below 256 (PCI Local Bus
/// 3.0, 6.7), in the order of the list. It ends early where the list leads into the header, loops, or reads all ones.
///
/// # Errors
/// The first of `read`'s.
pub fn walk_capabilities<E>(mut read: impl FnMut(u16) -> Result<u16, E>) -> Result<Vec<Capability>, E> {
    let mut found = Vec::new();
    if read(regs::STATUS)? & regs::STATUS_CAP_LIST == 0 {
        return Ok(found);
    }
    // One bit per dword: each of the 64 is visited at most once.
    let mut visited = 0u64;
    let [mut offset, _] = read(regs::CAPABILITY_LIST)?.to_le_bytes();
    loop {
        offset &= 0xfc;
        if usize::from(offset) < HEADER_SIZE || visited & (1 << (offset >> 2)) != 0 {
            return Ok(found);
        }
        visited |= 1 << (offset >> 2);
        let [id, next] = read(offset.into())?.to_le_bytes();
        match id {
            0xff => return Ok(found),
            // A null capability: it holds nothing, and the list goes on.
            0 => {}
            id => found.push(Capability { id, offset }),
        }
        offset = next;
    }
}

/// The extended capability list of `config` (PCI Express 6.0, 7.6), in the order of the list. It ends early where
/// the list leaves what can be read, loops, or reads all ones.
pub fn extended_capabilities(config: &(impl ConfigSource + ?Sized)) -> Vec<ExtendedCapability> {
    let mut found = Vec::new();
    let mut visited = [0u64; EXTENDED_CONFIG_SIZE / 4 / 64];
    let mut offset = CONFIG_SIZE;
    while offset >= CONFIG_SIZE {
        let (word, bit) = (offset / 4 / 64, 1 << (offset / 4 % 64));
        if visited[word] & bit != 0 {
            break;
        }
        visited[word] |= bit;
        let Some(header) = config.read_u32(offset) else { break };
        if header == 0 || header == u32::MAX {
            break;
        }
        let id = header as u16;
        // ID 0 is a null capability: it holds nothing, and the list goes on.
        if id != 0 {
            found.push(ExtendedCapability { id, version: (header >> 16 & 0xf) as u8, offset: offset as u16 });
        }
        offset = (header >> 20 & 0xffc) as usize;
    }
    found
}

/// The BARs that can be resized, from the capability at `offset` (PCI Express 6.0, 7.8.6). Registers of a BAR that can't be,
/// or was there already, are passed over.
pub(super) fn resizable(config: &(impl ConfigSource + ?Sized), offset: usize) -> Vec<ResizableBar> {
    const MOST: u32 = 6;
    let mut found: Vec<ResizableBar> = Vec::new();
    let count = config.read_u32(offset + 8).map_or(0, |control| (control >> 5 & 7).min(MOST));
    for entry in 0..count as usize {
        let registers = (config.read_u32(offset + 4 + 8 * entry), config.read_u32(offset + 8 + 8 * entry));
        let (Some(capability), Some(control)) = registers else { break };
        let index = (control & 7) as u8;
        if u32::from(index) >= MOST || capability == u32::MAX || found.iter().any(|bar| bar.index == index) {
            continue;
        }
        // From bit 4 on, 1 MiB to 128 TiB; in the control register from bit 16 on, 256 TiB to 8 EiB.
        let low = (4..32).filter(|bit| capability >> bit & 1 != 0).map(|bit| 1 << (bit + 16));
        let high = (16..32).filter(|bit| control >> bit & 1 != 0).map(|bit| 1 << (bit + 32));
        found.push(ResizableBar { index, sizes: low.chain(high).collect() });
    }
    found
}

/// The link, from the PCI Express capability at `offset` (PCI Express 6.0, 7.5.3.6, 7.5.3.8 and 7.5.3.18);
/// `None` for a function that has no link of its own.
pub(super) fn link(config: &[u8], offset: usize) -> Option<Link> {
    let at = |register: u16| offset + usize::from(register);
    let capabilities = config.read_u32(at(regs::EXP_LNKCAP))?;
    let status = config.read_u16(at(regs::EXP_LNKSTA))?;
    let max_width = (capabilities >> 4 & 0x3f) as u8;
    if max_width == 0 || capabilities == u32::MAX {
        return None;
    }
    // The Supported Link Speeds Vector of version 2 names every speed; the code in Link Capabilities names the
    // highest.
    let version = config.read_u16(at(regs::EXP_FLAGS))? & regs::EXP_FLAGS_VERS;
    let vector = match config.read_u32(at(regs::EXP_LNKCAP2)) {
        Some(vector) if version >= 2 => vector >> 1 & 0x7f,
        _ => 0,
    };
    let max_speed = if vector == 0 {
        link_speed(capabilities as u16 & 0xf)
    } else {
        link_speed(vector.ilog2() as u16 + 1)
    };
    let width = if status == u16::MAX { 0 } else { (status >> 4 & 0x3f) as u8 };
    let speed = if width == 0 { 0 } else { link_speed(status & 0xf) };
    Some(Link { speed, width, max_speed, max_width })
}

/// Megatransfers per second of a link speed code, 0 for an unknown one.
fn link_speed(code: u16) -> u32 {
    match code {
        1 => 2_500,
        2 => 5_000,
        3 => 8_000,
        4 => 16_000,
        5 => 32_000,
        6 => 64_000,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(first: u8, entries: &[(usize, &[u8])]) -> Vec<u8> {
        let mut config = vec![0; EXTENDED_CONFIG_SIZE];
        config[0x06] = 0x10;
        config[0x34] = first;
        for (at, bytes) in entries {
            config[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        config
    }

    #[test]
    fn a_config_space_shows_its_function() {
        use ConfigState::{Absent, Alive, PartlyOnes, Retry, Zeros};
        let check = |changed: &[(usize, u32)], expect: ConfigState, of_virtual: ConfigState| {
            let mut header = [0; HEADER_SIZE];
            // A GPU in a multifunction device: IDs, command and status, class, header type.
            for (at, word) in [(0, 0x2684_10de), (4, 0x0010_0006), (8, 0x0300_00a1), (12, 0x0080_0000)] {
                header[at..at + 4].copy_from_slice(&u32::to_le_bytes(word));
            }
            for (at, word) in changed {
                header[*at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
            let found = [false, true].map(|is_virtual| ConfigState::of(&header, is_virtual).unwrap());
            assert_eq!(found, [expect, of_virtual], "{changed:x?}");
        };
        check(&[], Alive, Alive);
        let ones: Vec<_> = (0..16).map(|dword| (dword * 4, u32::MAX)).collect();
        check(&ones, Absent, Absent);
        for ids in [0xffff_0001, 0x0001_0001, 0x0000_0001] {
            check(&[(0, ids)], Retry, Retry);
        }
        // As a root complex completes the rest of the header.
        let retry: Vec<_> = std::iter::once((0, 0xffff_0001)).chain(ones[1..].iter().copied()).collect();
        check(&retry, Retry, Retry);
        check(&(0..16).map(|dword| (dword * 4, 0)).collect::<Vec<_>>(), Zeros, Zeros);
        check(&[(0, 0)], Zeros, Zeros);
        check(&[(4, 6), (8, 0), (12, 0)], Zeros, Zeros);
        for ids in [0x0000_ffff, 0xffff_0000, 0xffff_10de, u32::MAX] {
            check(&[(0, ids)], PartlyOnes, Alive);
        }
        for part in [(4, 0x0010_ffff), (4, 0xffff_0006), (8, u32::MAX), (12, 0x00ff_0000), (12, u32::MAX)] {
            check(&[part], PartlyOnes, PartlyOnes);
        }
        assert_eq!(ConfigState::of(&[0xff; 15], false), None);
    }

    #[test]
    fn finds_what_bars_can_be() {
        let check = |registers: &[u32], expect: &[(u8, &[u64])]| {
            let mut bytes = vec![0; 0x100];
            bytes.extend(registers.iter().flat_map(|register| register.to_le_bytes()));
            let found = resizable(&bytes[..], 0x100);
            let found: Vec<_> = found.iter().map(|bar| (bar.index, &bar.sizes[..])).collect();
            assert_eq!(found, expect, "{registers:x?}");
        };
        const HEADER: u32 = 0x15;
        let mib = |n: u64| n << 20;
        check(&[HEADER, 0x1c00, 0x820], &[(0, &[mib(64), mib(128), mib(256)])]);
        // Two; the second up to 128 TiB and 8 EiB.
        check(&[HEADER, 0x10, 0x41, 0x8000_0000, 0x8000_0042], &[(1, &[mib(1)]), (2, &[128 << 40, 1 << 63])]);
        // Hostile: too many BARs, a BAR twice, an invalid index, and a capability at the end of config space.
        check(&[HEADER, 0x10, 0xe1, 0x20, 1, 0x20, 6, 0x20, 0x3], &[(1, &[mib(1)]), (3, &[mib(2)])]);
        check(&[HEADER, u32::MAX, u32::MAX], &[]);
        check(&[HEADER], &[]);
        check(&[HEADER, 0x10, 0], &[]);
    }

    #[test]
    fn walks_capabilities() {
        fn check(first: u8, entries: &[(usize, &[u8])], expect: &[(u8, u8)]) {
            let found: Vec<_> =
                capabilities(&config(first, entries)).iter().map(|c| (c.id, c.offset)).collect();
            assert_eq!(found, expect, "{first:#x} {entries:x?}");
        }
        check(0x40, &[(0x40, &[1, 0x50]), (0x50, &[0x11, 0])], &[(1, 0x40), (0x11, 0x50)]);
        // The low two bits of a pointer are reserved.
        check(0x43, &[(0x40, &[1, 0x52]), (0x50, &[5, 0])], &[(1, 0x40), (5, 0x50)]);
        // Loops: on itself, and over two.
        check(0x40, &[(0x40, &[1, 0x40])], &[(1, 0x40)]);
        check(0x40, &[(0x40, &[1, 0x50]), (0x50, &[5, 0x40])], &[(1, 0x40), (5, 0x50)]);
        // Into the header.
        check(0x10, &[], &[]);
        check(0x40, &[(0x40, &[1, 0x3c])], &[(1, 0x40)]);
        // A null capability, then one that reads all ones.
        check(0x40, &[(0x40, &[0, 0x50]), (0x50, &[9, 0x60]), (0x60, &[0xff, 0xff])], &[(9, 0x50)]);
        // The last dword.
        check(0xfc, &[(0xfc, &[9, 0])], &[(9, 0xfc)]);
        // No list without the status bit, and nothing of a short read.
        let mut space = config(0x40, &[(0x40, &[1, 0])]);
        assert_eq!(capabilities(&space[..64]), []);
        space[0x06] = 0;
        assert_eq!(capabilities(&space), []);
    }

    #[test]
    fn walks_extended_capabilities() {
        fn check(entries: &[(usize, u32)], expect: &[(u16, u8, u16)]) {
            let entries: Vec<_> = entries.iter().map(|(at, word)| (*at, word.to_le_bytes())).collect();
            let entries: Vec<_> = entries.iter().map(|(at, bytes)| (*at, &bytes[..])).collect();
            let space = config(0, &entries);
            let found: Vec<_> =
                extended_capabilities(&space[..]).iter().map(|c| (c.id, c.version, c.offset)).collect();
            assert_eq!(found, expect);
        }
        check(&[(0x100, 0x1501_0010), (0x150, 0x0002_000d)], &[(0x10, 1, 0x100), (0x0d, 2, 0x150)]);
        check(&[(0x100, 0x1001_0010)], &[(0x10, 1, 0x100)]);
        check(&[(0x100, 0x0ff1_0010)], &[(0x10, 1, 0x100)]);
        check(&[(0x100, 0xffc1_0010), (0xffc, 0x1001_0003)], &[(0x10, 1, 0x100), (3, 1, 0xffc)]);
        check(&[(0x100, 0x1501_0000), (0x150, 0x0001_0001)], &[(1, 1, 0x150)]);
        check(&[(0x100, u32::MAX)], &[]);
        check(&[], &[]);
        assert_eq!(extended_capabilities(&config(0, &[])[..256]), []);
    }

    proptest! {
        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..=4096)) {
            prop_assert!(capabilities(&bytes).len() <= 48);
            prop_assert!(extended_capabilities(&bytes[..]).len() <= 960);
            for offset in [0x40, 0xf0, 0xff, 0xffe] {
                link(&bytes, offset);
            }
        }
    }
}
