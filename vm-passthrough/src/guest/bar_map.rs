//! Which device, and which of its BARs, an address of the guest belongs to.

use std::sync::{PoisonError, RwLock};

use super::DecodedBar;
use crate::PciAddress;

/// Where the BARs of a guest's devices decode, as [`Vmm::bars_changed`](super::Vmm::bars_changed) reported: for a VMM to find
/// what an access that exits is for, without asking the devices.
#[derive(Debug, Default)]
pub struct BarMap(RwLock<Vec<(PciAddress, DecodedBar)>>);

/// What an address falls into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarHit {
    /// The device, by the host's function.
    pub device: PciAddress,
    /// Index of the BAR.
    pub bar: u8,
    /// Offset within the BAR.
    pub offset: u64,
}

impl BarMap {
    /// Takes all BARs of `device` that decode now.
    pub fn set(&self, device: PciAddress, bars: &[DecodedBar]) {
        let mut map = self.0.write().unwrap_or_else(PoisonError::into_inner);
        map.retain(|(other, _)| *other != device);
        map.extend(bars.iter().map(|&bar| (device, bar)));
    }

    /// Number of BARs that decode.
    pub fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether no BAR decodes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What decodes `address` in memory. Where the guest put BARs over each other, one of them.
    pub fn find(&self, address: u64) -> Option<BarHit> {
        self.find_in(false, address)
    }

    /// What decodes the I/O port `port`, likewise.
    pub fn find_port(&self, port: u16) -> Option<BarHit> {
        self.find_in(true, port.into())
    }

    fn find_in(&self, io: bool, address: u64) -> Option<BarHit> {
        let map = self.0.read().unwrap_or_else(PoisonError::into_inner);
        map.iter().filter(|(_, bar)| bar.io == io).find_map(|(device, bar)| {
            let offset = address.checked_sub(bar.address).filter(|&offset| offset < bar.size)?;
            Some(BarHit { device: *device, bar: bar.bar, offset })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_where_it_decodes_now() {
        let map = BarMap::default();
        assert_eq!((map.len(), map.is_empty()), (0, true));
        let (one, two): (PciAddress, PciAddress) =
            ("0000:65:00.0".parse().unwrap(), "0000:65:00.1".parse().unwrap());
        let bar = |bar, address| DecodedBar { bar, address, size: 0x1000, io: false };
        let check = |address, expect: Option<(PciAddress, u8, u64)>| {
            let hit = map.find(address).map(|hit| (hit.device, hit.bar, hit.offset));
            assert_eq!(hit, expect, "{address:#x}");
        };
        let ports = DecodedBar { bar: 1, address: 0xc000, size: 0x20, io: true };
        map.set(one, &[ports, bar(0, 0xc000_0000), bar(2, u64::MAX - 0xfff)]);
        let port = |port| map.find_port(port).map(|hit| (hit.device, hit.bar, hit.offset));
        assert_eq!((port(0xbfff), port(0xc01f), port(0xc020)), (None, Some((one, 1, 0x1f)), None));
        check(0xc000, None);
        assert_eq!((map.len(), map.is_empty()), (3, false));
        map.set(two, &[bar(0, 0xc000_0000)]);
        check(0xbfff_ffff, None);
        check(0xc000_0fff, Some((one, 0, 0xfff)));
        check(0xc000_1000, None);
        check(u64::MAX, Some((one, 2, 0xfff)));
        // What lay under another is found once that is gone.
        map.set(one, &[]);
        check(0xc000_0004, Some((two, 0, 4)));
        map.set(two, &[bar(0, 0xd000_0000)]);
        check(0xc000_0004, None);
    }
}
