//! The config space that a guest sees.
//!
//! It is built once, from the bytes that the device shows at the start, by an allow list: a register reads zero and
//! ignores writes unless a row of a table says otherwise. Each row ([`Register`]) says of every bit whether it is
//! kept from the start, read from the device each time, writable by the guest, written through to the device, or
//! cleared by writing 1.
//!
//! | part | the guest sees |
//! | --- | --- |
//! | header | [`header`]: BARs and the expansion ROM without the addresses that the host gave them, an interrupt pin where it leads somewhere |
//! | power management, MSI, MSI-X, PCI Express | virtualised: [`power`], [`msi`], [`msix`], [`express`] |
//! | vendor-specific (0x09) | the device's own registers: read and written through, within the length that they state. Drivers need them (virtio finds its registers there), and they reach no further than the device's BARs do |
//! | vendor-specific extended (0x000b) | read from the device, within the length that it states; not writable: some are of the link (error injection of its controller, say) or of the device's flash |
//! | designated vendor-specific (0x0023) | nothing: whoever is designated gives it a meaning beyond the device. CXL's has memory decoded and caches kept coherent |
//! | advanced error reporting (0x0001) | virtualised: [`errors`]. What the device shows is the host's to clear |
//! | device serial number (0x0003) | as it is (some network drivers choose their firmware by it) |
//! | SR-IOV, ARI, ATS, PRI, PASID, resizable BARs | nothing: they act on the host's IOMMU, bus or address map |
//! | vital product data | nothing: writes would outlast the guest, in the device's flash |
//! | link and slot features, power budgeting, LTR, TPH, DOE, IDE, all that is not listed | nothing |
//! | registers outside any capability | nothing |
//!
//! A hidden capability is unlinked from the chain; shown ones keep their offsets, as drivers may know them. Bytes of
//! a capability that overlaps another shown one are hostile, and it is hidden too.

pub(super) mod errors;
pub(super) mod express;
pub(super) mod header;
pub(super) mod msi;
pub(super) mod msix;
pub(super) mod power;

use self::header::BarRegisters;
use self::msi::Msi;
use self::msix::Msix;
use crate::pci::config::{
    CONFIG_SIZE, EXTENDED_CONFIG_SIZE, HEADER_SIZE, capabilities, extended_capabilities,
};
use crate::pci::{Capability, ExtendedCapability, regs};

/// One row of a table: what the guest may do with the bits of a register. A bit in none of the masks reads zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Register {
    /// Offset from the start of the header or capability.
    pub(super) offset: u16,
    /// Width in bytes: 1, 2 or 4.
    pub(super) width: u8,
    /// Bits that read what they were at the start, until written.
    pub(super) keep: u32,
    /// Bits that are read from the device each time.
    pub(super) live: u32,
    /// Bits that read what the guest wrote.
    pub(super) writable: u32,
    /// Bits of what they read that writing 1 clears.
    pub(super) acknowledge: u32,
    /// Bits that the guest's writes set in the device.
    pub(super) through: u32,
    /// Live bits that writing 1 clears. vfio-pci drops such writes, so the guest reads 0 until the bit was 0 in the device.
    pub(super) clear: u32,
}

impl Register {
    /// Reads zero, ignores writes.
    pub(super) const NONE: Self =
        Self { offset: 0, width: 4, keep: 0, live: 0, writable: 0, acknowledge: 0, through: 0, clear: 0 };
}

/// The virtual config space of one function.
#[derive(Clone, Debug)]
pub(super) struct ConfigSpace {
    /// What bits that are not live read.
    shadow: Bytes,
    /// The shadow after a reset.
    power_on: Bytes,
    live: Bytes,
    writable: Bytes,
    acknowledge: Bytes,
    through: Bytes,
    clear: Bytes,
    /// Bits of `clear` that the guest cleared, and the device has not since.
    cleared: Bytes,
    /// Where the capabilities are that need acting on.
    pub(super) power: Option<u16>,
    pub(super) express: Option<u16>,
    errors: Option<u16>,
    pub(super) msi: Option<Msi>,
    pub(super) msix: Option<Msix>,
}

#[derive(Clone)]
struct Bytes(Box<[u8; EXTENDED_CONFIG_SIZE]>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[…]")
    }
}

impl Bytes {
    fn zero() -> Self {
        Self(Box::new([0; EXTENDED_CONFIG_SIZE]))
    }

    fn put(&mut self, offset: usize, width: u8, value: u32) {
        for (index, byte) in value.to_le_bytes().into_iter().take(width.into()).enumerate() {
            if let Some(place) = self.0.get_mut(offset + index) {
                *place = byte;
            }
        }
    }
}

/// What decides, beside the device's bytes, how its config space looks.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// The BARs that the guest sees.
    pub(super) bars: BarRegisters,
    /// MSI vectors that VFIO has.
    pub(super) msi_vectors: u32,
    /// MSI-X vectors that VFIO has.
    pub(super) msix_vectors: u32,
    /// Sizes of the memory BARs, 0 for none: MSI-X structures must lie in them.
    pub(super) bar_sizes: [u64; 6],
    /// Whether the function can be reset on its own.
    pub(super) reset: bool,
}

impl ConfigSpace {
    /// Builds it from the device's bytes: 256 of them, or 4096.
    pub(super) fn new(device: &[u8], facts: &Facts) -> Self {
        let mut builder = Builder::new(device);
        // The header has been taken by nobody yet.
        builder.take(0, HEADER_SIZE, HEADER_SIZE);
        builder.rows(0, header::REGISTERS);
        header::add_bars(&mut builder, &facts.bars);

        let pointer = usize::from(regs::CAPABILITY_LIST);
        let mut link = pointer;
        for Capability { id, offset } in capabilities(device) {
            let offset = usize::from(offset);
            if add_capability(&mut builder, id, offset, facts) {
                builder.put(offset, 2, id.into());
                builder.put(link, 1, offset as u32);
                link = offset + 1;
            }
        }
        if link != pointer {
            builder.put(regs::STATUS.into(), 2, regs::STATUS_CAP_LIST.into());
        }

        // When the first one is hidden, an empty header there (ID 0, version 0) carries the link.
        let mut link = CONFIG_SIZE;
        for ExtendedCapability { id, version, offset } in extended_capabilities(device) {
            let offset = usize::from(offset);
            if add_extended(&mut builder, id, offset) {
                builder.put(offset, 4, u32::from(id) | u32::from(version) << 16);
                if link != offset {
                    let header = builder.space.get32(link as u16);
                    builder.put(link, 4, header & 0xf_ffff | (offset as u32) << 20);
                }
                link = offset;
            }
        }
        let mut space = builder.space;
        space.power_on = space.shadow.clone();
        space
    }

    /// Shows the interrupt pin: 1 to 4 for INTA to INTD, 0 for none.
    pub(super) fn show_pin(&mut self, pin: u8) {
        for bytes in [&mut self.shadow, &mut self.power_on] {
            bytes.put(regs::INTERRUPT_PIN.into(), 1, pin.into());
        }
    }

    /// Forgets what the guest wrote.
    pub(super) fn reset(&mut self) {
        self.shadow = self.power_on.clone();
        self.cleared = Bytes::zero();
    }

    /// Whether a read of `len` bytes at `offset` needs the device's bytes.
    pub(super) fn is_live(&self, offset: usize, len: usize) -> bool {
        self.live.0.iter().skip(offset).take(len).any(|&mask| mask != 0)
    }

    /// Whether a write of `len` bytes at `offset` reaches the device.
    pub(super) fn is_through(&self, offset: usize, len: usize) -> bool {
        self.through.0.iter().skip(offset).take(len).any(|&mask| mask != 0)
    }

    /// Turns the device's bytes at `offset` into what the guest reads there.
    pub(super) fn merge(&mut self, offset: usize, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            let at = offset + index;
            let masks = self.shadow.0.get(at).zip(self.live.0.get(at));
            let Some(((&shadow, &live), cleared)) = masks.zip(self.cleared.0.get_mut(at)) else { return };
            if live != 0 {
                *cleared &= *byte;
            }
            *byte = *byte & live & !*cleared | shadow & !live;
        }
    }

    /// Takes a write of the guest into the shadow.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) {
        for (index, &byte) in data.iter().enumerate() {
            let at = offset + index;
            let masks = self.writable.0.get(at).zip(self.acknowledge.0.get(at));
            let Some((shadow, (&mask, &acknowledge))) = self.shadow.0.get_mut(at).zip(masks) else { return };
            *shadow = (*shadow & !mask | byte & mask) & !(byte & acknowledge);
            if let Some((cleared, &clear)) = self.cleared.0.get_mut(at).zip(self.clear.0.get(at)) {
                *cleared |= byte & clear;
            }
        }
    }

    /// The shadow's bytes at `offset`, up to 4.
    pub(super) fn bytes(&self, offset: usize) -> [u8; 4] {
        std::array::from_fn(|index| self.shadow.0.get(offset + index).copied().unwrap_or(0))
    }

    /// Sets the shadow's bytes at `offset`, whatever the guest may write there.
    pub(super) fn restore(&mut self, offset: usize, bytes: &[u8]) {
        for (place, &byte) in self.shadow.0.iter_mut().skip(offset).zip(bytes) {
            *place = byte;
        }
    }

    /// What a write of the guest means for the device, which now has `device` there: bits that the guest may not
    /// write stay, bits that writing 1 clears are written as 0.
    pub(super) fn compose(&self, offset: usize, data: &[u8], device: &mut [u8]) {
        for (index, (device, &byte)) in device.iter_mut().zip(data).enumerate() {
            let at = offset + index;
            let Some((&through, &clear)) = self.through.0.get(at).zip(self.clear.0.get(at)) else { return };
            *device = *device & !through & !clear | byte & through;
        }
    }

    /// The shadow's 16 bits at `offset`; zero past the end.
    pub(super) fn get16(&self, offset: u16) -> u16 {
        let at = usize::from(offset);
        match self.shadow.0.get(at..at + 2) {
            Some(&[low, high]) => u16::from_le_bytes([low, high]),
            _ => 0,
        }
    }

    /// The shadow's 32 bits at `offset`; zero past the end.
    pub(super) fn get32(&self, offset: u16) -> u32 {
        u32::from(self.get16(offset)) | u32::from(self.get16(offset.saturating_add(2))) << 16
    }

    /// Sets the shadow's 32 bits at `offset`.
    pub(super) fn set32(&mut self, offset: u16, value: u32) {
        self.shadow.put(offset.into(), 4, value);
    }
}

/// Adds what the guest may see of a capability; false if it sees nothing.
fn add_capability(builder: &mut Builder<'_>, id: u8, offset: usize, facts: &Facts) -> bool {
    match id {
        regs::CAP_ID_PM => power::add(builder, offset),
        regs::CAP_ID_MSI => msi::add(builder, offset, facts),
        regs::CAP_ID_VNDR => {
            // Its length, the two bytes of the list included, is in the third byte.
            let len = builder.byte(offset + 2).into();
            builder.add_raw(offset, 2, len, CONFIG_SIZE)
        }
        regs::CAP_ID_EXP => express::add(builder, offset, facts),
        regs::CAP_ID_MSIX => msix::add(builder, offset, facts),
        _ => false,
    }
}

/// Adds what the guest may see of an extended capability; false if it sees nothing.
fn add_extended(builder: &mut Builder<'_>, id: u16, offset: usize) -> bool {
    match id {
        regs::EXT_CAP_ID_ERR => errors::add(builder, offset),
        regs::EXT_CAP_ID_DSN => {
            if !builder.take(offset, 12, EXTENDED_CONFIG_SIZE) {
                return false;
            }
            let keep = |offset| Register { offset, keep: u32::MAX, ..Register::NONE };
            builder.rows(offset, &[keep(4), keep(8)]);
            true
        }
        // The length is in the upper 12 bits of the second register.
        regs::EXT_CAP_ID_VNDR => {
            let len = usize::from(builder.word(offset + 6) >> 4);
            if len < 8 || !builder.take(offset, len, EXTENDED_CONFIG_SIZE) {
                return false;
            }
            builder.set_live(offset + 4, len - 4);
            true
        }
        _ => false,
    }
}

/// A config space in the making.
struct Builder<'a> {
    /// The device's bytes.
    device: &'a [u8],
    /// Which bytes belong to the header or a shown capability.
    taken: Vec<bool>,
    space: ConfigSpace,
}

impl<'a> Builder<'a> {
    fn new(device: &'a [u8]) -> Self {
        let space = ConfigSpace {
            shadow: Bytes::zero(),
            power_on: Bytes::zero(),
            live: Bytes::zero(),
            writable: Bytes::zero(),
            acknowledge: Bytes::zero(),
            through: Bytes::zero(),
            clear: Bytes::zero(),
            cleared: Bytes::zero(),
            power: None,
            express: None,
            errors: None,
            msi: None,
            msix: None,
        };
        Self { device, taken: vec![false; EXTENDED_CONFIG_SIZE], space }
    }

    /// The device's byte; zero past its end.
    fn byte(&self, at: usize) -> u8 {
        self.device.get(at).copied().unwrap_or(0)
    }

    /// The device's 16 bits; zero past its end.
    fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.byte(at), self.byte(at + 1)])
    }

    /// The device's 32 bits; zero past its end.
    fn dword(&self, at: usize) -> u32 {
        u32::from(self.word(at)) | u32::from(self.word(at + 2)) << 16
    }

    /// Takes `len` bytes at `offset` for a capability; false, and nothing taken, when they reach `end` or belong to
    /// another.
    fn take(&mut self, offset: usize, len: usize, end: usize) -> bool {
        let Some(range) = offset.checked_add(len).filter(|&last| last <= end).map(|last| offset..last) else {
            return false;
        };
        let Some(taken) = self.taken.get_mut(range) else { return false };
        if taken.contains(&true) {
            return false;
        }
        taken.fill(true);
        true
    }

    /// Shows registers of the header or capability at `base`.
    fn rows(&mut self, base: usize, rows: &[Register]) {
        for row in rows {
            let at = base + usize::from(row.offset);
            for (index, keep) in row.keep.to_le_bytes().into_iter().take(row.width.into()).enumerate() {
                let device = self.byte(at + index);
                if let Some(byte) = self.space.shadow.0.get_mut(at + index) {
                    *byte |= device & keep;
                }
            }
            for (bytes, mask) in [
                (&mut self.space.live, row.live),
                (&mut self.space.writable, row.writable),
                (&mut self.space.acknowledge, row.acknowledge),
                (&mut self.space.through, row.through),
                (&mut self.space.clear, row.clear),
            ] {
                bytes.put(at, row.width, mask);
            }
        }
    }

    /// Sets what the shadow reads.
    fn put(&mut self, offset: usize, width: u8, value: u32) {
        self.space.shadow.put(offset, width, value);
    }

    /// Has `len` bytes at `offset` read from the device.
    fn set_live(&mut self, offset: usize, len: usize) {
        if let Some(live) = self.space.live.0.get_mut(offset..offset + len) {
            live.fill(0xff);
        }
    }

    /// Shows a capability of `len` bytes as it is, read and written through from its byte `header` on.
    fn add_raw(&mut self, offset: usize, header: usize, len: usize, end: usize) -> bool {
        if len < header || !self.take(offset, len, end) {
            return false;
        }
        self.set_live(offset + header, len - header);
        if let Some(through) = self.space.through.0.get_mut(offset + header..offset + len) {
            through.fill(0xff);
        }
        true
    }
}
