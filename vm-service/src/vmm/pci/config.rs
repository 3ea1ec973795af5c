//! Config space of a function that the VMM makes up: bytes, and which of their bits a guest may write.

use vm_passthrough::pci::regs;

/// Bytes of a function's config space.
const SIZE: usize = 4096;
/// Where capabilities end and extended capabilities would start.
const CAPABILITIES_END: usize = 256;

/// Config space as bytes with masks: bits that the guest may write, and bits that it clears by writing 1. All others keep
/// what the VMM set.
#[derive(Clone, Debug)]
pub(in crate::vmm) struct ConfigSpace {
    bytes: Box<[u8; SIZE]>,
    writable: Box<[u8; SIZE]>,
    clear: Box<[u8; SIZE]>,
    fresh: Box<[u8; SIZE]>,
    next_capability: u8,
    last_link: u8,
}

impl ConfigSpace {
    /// An empty one, for capabilities from byte 0x40 on.
    pub(in crate::vmm) fn new() -> Self {
        Self {
            bytes: Box::new([0; SIZE]),
            writable: Box::new([0; SIZE]),
            clear: Box::new([0; SIZE]),
            fresh: Box::new([0; SIZE]),
            next_capability: 0x40,
            last_link: regs::CAPABILITY_LIST as u8,
        }
    }

    /// Sets bytes, whatever the mask.
    pub(in crate::vmm) fn set(&mut self, offset: u16, value: &[u8]) {
        for (at, byte) in (usize::from(offset)..).zip(value) {
            if let Some(slot) = self.bytes.get_mut(at) {
                *slot = *byte;
            }
        }
    }

    /// Lets the guest write the bits of `mask`.
    pub(in crate::vmm) fn allow(&mut self, offset: u16, mask: &[u8]) {
        add(&mut self.writable, offset, mask);
    }

    /// Lets the guest clear the bits of `mask` by writing 1 to them.
    pub(in crate::vmm) fn allow_clearing(&mut self, offset: u16, mask: &[u8]) {
        add(&mut self.clear, offset, mask);
    }

    /// Adds a capability with `body` after its two header bytes, and returns its offset. The list stays as it was
    /// if there is no room.
    pub(in crate::vmm) fn add_capability(&mut self, id: u8, body: &[u8]) -> u16 {
        let offset = self.next_capability;
        let end = usize::from(offset) + 2 + body.len();
        debug_assert!(end <= CAPABILITIES_END, "capability {id:#x} does not fit");
        if end <= CAPABILITIES_END {
            self.set(offset.into(), &[id, 0]);
            self.set(u16::from(offset) + 2, body);
            self.set(self.last_link.into(), &[offset]);
            // Status: there is a capability list.
            self.set(regs::STATUS, &regs::STATUS_CAP_LIST.to_le_bytes());
            self.last_link = offset + 1;
            self.next_capability = u8::try_from(end.next_multiple_of(4)).unwrap_or(0);
        }
        offset.into()
    }

    /// Makes the present bytes those that [`reset`](Self::reset) returns to.
    pub(in crate::vmm) fn freeze(&mut self) {
        self.fresh = self.bytes.clone();
    }

    /// Back to what was frozen.
    pub(in crate::vmm) fn reset(&mut self) {
        self.bytes = self.fresh.clone();
    }

    /// Reads; zeros beyond its end.
    pub(in crate::vmm) fn read(&self, offset: u16, data: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes the bits that the guest may write, and clears those that it clears.
    pub(in crate::vmm) fn write(&mut self, offset: u16, data: &[u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            if let Some(slot) = self.bytes.get_mut(at) {
                let (mask, clear) = (self.writable[at], self.clear[at]);
                *slot = (*slot & !mask | byte & mask) & !(byte & clear);
            }
        }
    }

    /// One byte.
    pub(in crate::vmm) fn u8(&self, offset: u16) -> u8 {
        let mut data = [0; 1];
        self.read(offset, &mut data);
        data[0]
    }

    /// Two bytes.
    pub(in crate::vmm) fn u16(&self, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// Four bytes.
    pub(in crate::vmm) fn u32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.read(offset, &mut data);
        u32::from_le_bytes(data)
    }
}

fn add(masks: &mut [u8; SIZE], offset: u16, mask: &[u8]) {
    for (at, byte) in (usize::from(offset)..).zip(mask) {
        if let Some(slot) = masks.get_mut(at) {
            *slot |= *byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_touch_only_what_is_allowed() {
        let mut config = ConfigSpace::new();
        config.set(0, &[0xaa; 8]);
        config.allow(4, &[0x0f, 0xff]);
        config.freeze();
        config.write(2, &[0x55; 4]);
        config.write(0xfffe, &[1; 4]);
        assert_eq!(config.u32(0), 0xaaaa_aaaa);
        assert_eq!(config.u16(4), 0x55a5);
        assert_eq!(config.u32(0xffe), 0);
        config.set(0xff0, &[0x11]);
        config.allow_clearing(0xff0, &[0x01]);
        config.write(0xff0, &[0xfe]);
        assert_eq!(config.u8(0xff0), 0x11);
        config.write(0xff0, &[0xff]);
        assert_eq!(config.u8(0xff0), 0x10);
        config.reset();
        assert_eq!(config.u16(4), 0xaaaa);
    }

    #[test]
    fn capabilities_are_linked() {
        let mut config = ConfigSpace::new();
        let first = config.add_capability(0x10, &[0; 58]);
        let second = config.add_capability(0x11, &[7; 10]);
        assert_eq!((first, second), (0x40, 0x7c));
        assert_eq!(config.u8(0x34), 0x40);
        assert_eq!(config.u16(0x40), 0x7c10);
        assert_eq!(config.u16(0x7c), 0x0011);
        assert_eq!(config.u16(0x06), 0x10);
    }
}
