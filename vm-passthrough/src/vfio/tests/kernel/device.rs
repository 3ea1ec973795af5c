//! The ioctls of a device's file, as vfio-pci answers them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, File};
use std::os::fd::{IntoRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::io::Errno;

use super::{
    Node, State, append, capability, find, get32, get64, memory, number, pairs, put32, put64, users,
};
use crate::PciAddress;
use crate::vfio::sys::duplicate;

/// A region of a device.
#[derive(Clone, Debug, Default)]
pub(in crate::vfio::tests) struct Region {
    pub(in crate::vfio::tests) size: u64,
    /// `VFIO_REGION_INFO_FLAG_*`, without capabilities.
    pub(in crate::vfio::tests) flags: u32,
    /// Where only parts can be mapped: those.
    pub(in crate::vfio::tests) sparse: Option<Vec<(u64, u64)>>,
    /// Whether it holds the MSI-X table, and so has the MSI-X mappable capability.
    pub(in crate::vfio::tests) msix: bool,
}

/// Effect of a reset on the function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::vfio::tests) enum Effect {
    /// Its registers have their first values again.
    Resets,
    /// Nothing, and success is reported.
    Nothing,
    /// It fails.
    Fails(Errno),
}

/// A function, as vfio-pci has it.
#[derive(Debug)]
pub(in crate::vfio::tests) struct Device {
    /// Holds the content of the regions.
    pub(in crate::vfio::tests) file: File,
    pub(super) name: String,
    pub(in crate::vfio::tests) group: u32,
    /// Whether it has a reset (`VFIO_DEVICE_FLAGS_RESET`).
    pub(in crate::vfio::tests) has_reset: bool,
    pub(in crate::vfio::tests) regions: Vec<Region>,
    /// Flags and vectors of each interrupt index; `None` for an absent index.
    pub(in crate::vfio::tests) irqs: Vec<Option<(u32, u32)>>,
    /// Interrupt vectors that the host has left for it.
    pub(in crate::vfio::tests) free_vectors: u32,
    /// The eventfds of enabled vectors, by index and vector.
    pub(in crate::vfio::tests) triggers: BTreeMap<(u32, u32), Option<OwnedFd>>,
    /// Signalled to unmask INTx.
    pub(in crate::vfio::tests) unmask: Option<OwnedFd>,
    /// The token of its physical function's user.
    pub(in crate::vfio::tests) token: Option<[u8; 16]>,
    /// Whether opening it resets it.
    pub(in crate::vfio::tests) open_resets: bool,
    /// Effects of the next function resets; the last one repeats.
    pub(in crate::vfio::tests) resets: VecDeque<Effect>,
    pub(in crate::vfio::tests) reset_count: usize,
    /// Functions that a hot reset reaches; empty if the slot or bus has no reset.
    pub(in crate::vfio::tests) hot_set: Vec<PciAddress>,
    pub(in crate::vfio::tests) hot_reset: Effect,
    /// Whether iommufd reports the whole set as owned (`VFIO_PCI_HOT_RESET_FLAG_DEV_ID_OWNED`).
    pub(in crate::vfio::tests) hot_owned: bool,
    /// PCI config space after a reset.
    pub(in crate::vfio::tests) config: Vec<u8>,
    /// Bytes of the device's config region that a reset changes: offset and value.
    pub(in crate::vfio::tests) after_reset: Vec<(u64, u8)>,
    pub(super) bound: bool,
    pub(in crate::vfio::tests) attached: Option<u32>,
}

impl Device {
    /// The file's offset of a region's byte.
    pub(in crate::vfio::tests) fn at(region: u64, offset: u64) -> u64 {
        (region << 40) + offset
    }

    pub(in crate::vfio::tests) fn read(&self, region: u64, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.file.read_exact_at(&mut data, Self::at(region, offset)).expect("bytes of a region");
        data
    }

    pub(in crate::vfio::tests) fn write(&self, region: u64, offset: u64, data: &[u8]) {
        self.file.write_all_at(data, Self::at(region, offset)).expect("room in a region");
    }

    /// Signals a vector of an interrupt index.
    pub(in crate::vfio::tests) fn fire(&self, index: u32, vector: u32) {
        let event = self.triggers[&(index, vector)].as_ref().expect("a trigger");
        rustix::io::write(event, &1u64.to_ne_bytes()).expect("an eventfd");
    }

    pub(super) fn apply(&mut self, sysfs: &Path, effect: &Effect) -> Result<(), Errno> {
        self.reset_count += 1;
        match effect {
            Effect::Resets => {
                fs::write(sysfs, &self.config).expect("config space in sysfs");
                self.after_reset.iter().for_each(|&(offset, byte)| self.write(7, offset, &[byte]));
                Ok(())
            }
            Effect::Nothing => Ok(()),
            Effect::Fails(error) => Err(*error),
        }
    }

    fn set_irqs(&mut self, argument: &[u8]) -> Result<i32, Errno> {
        const UNMASK: u32 = 16;
        const TRIGGER: u32 = 32;
        let (flags, index) = (get32(argument, 4), get32(argument, 8));
        let (start, count) = (get32(argument, 12), get32(argument, 16));
        let (data, action) = (flags & 7, flags & 0x38);
        let vectors = self.irqs.get(index as usize).copied().flatten().map(|(_, count)| count);
        let end = start.checked_add(count).ok_or(Errno::INVAL)?;
        // An absent index has no vectors.
        if start >= vectors.unwrap_or(0).max(1) || end > vectors.unwrap_or(0) {
            return Err(Errno::INVAL);
        }
        let is_enabled = self.triggers.keys().any(|&(of, _)| of == index);
        if data == 1 {
            if action != TRIGGER || count != 0 || !is_enabled {
                return Err(Errno::INVAL);
            }
            self.triggers.retain(|&(of, _), _| of != index);
            return Ok(0);
        }
        if data != 4 || argument.len() < 20 + 4 * count as usize || count == 0 {
            return Err(Errno::INVAL);
        }
        let mut events = Vec::new();
        for position in 0..count as usize {
            let fd = get32(argument, 20 + 4 * position) as i32;
            let is_event = || {
                let link = fs::read_link(format!("/proc/self/fd/{fd}")).ok();
                link.is_some_and(|link| link.to_string_lossy().contains("eventfd"))
            };
            events.push(match fd {
                -1 => None,
                fd if is_event() => Some(duplicate(fd).map_err(|_| Errno::BADF)?),
                _ => return Err(Errno::BADF),
            });
        }
        match action {
            UNMASK => {
                if index != 0 || !is_enabled || start != 0 || count != 1 {
                    return Err(Errno::INVAL);
                }
                self.unmask = events.pop().flatten();
            }
            TRIGGER => {
                // Only one of INTx, MSI and MSI-X is enabled at a time, and the number of vectors does not grow.
                let others = |&(of, _): &(u32, u32)| of < 3 && index < 3 && of != index;
                let last = self.triggers.keys().filter(|(of, _)| *of == index).map(|(_, at)| at + 1).max();
                if self.triggers.keys().any(others) || last.is_some_and(|last| end > last) {
                    return Err(Errno::INVAL);
                }
                // MSI and MSI-X: all vectors up to the last are enabled, or none.
                if matches!(index, 1 | 2) && !is_enabled && end > self.free_vectors {
                    return Ok(self.free_vectors as i32);
                }
                for (vector, event) in (start..).zip(events) {
                    self.triggers.insert((index, vector), event);
                }
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(0)
    }
}

impl State {
    pub(super) fn of_device(
        &mut self,
        address: PciAddress,
        number: u32,
        argument: &mut [u8],
    ) -> Result<i32, Errno> {
        match number {
            number::BIND => return self.bind(address, argument),
            number::ATTACH => {
                let id = get32(argument, 8);
                if !self.device(address).bound {
                    return Err(Errno::INVAL);
                }
                self.ioases.get(&id).ok_or(Errno::NOENT)?;
                self.device(address).attached = Some(id);
                return Ok(0);
            }
            number::HOT_RESET_INFO => return self.hot_reset_info(address, argument),
            number::HOT_RESET => return self.hot_reset(address, argument),
            number::FEATURE if !self.dma_bufs => return Err(Errno::NOTTY),
            _ => {}
        }
        let device = self.device(address);
        match number {
            number::DEVICE_INFO => {
                put32(argument, 4, 2 | u32::from(device.has_reset));
                put32(argument, 8, device.regions.len() as u32);
                put32(argument, 12, device.irqs.len() as u32);
                Ok(0)
            }
            number::REGION_INFO => {
                let index = get32(argument, 8);
                // No device here decodes VGA addresses.
                let region = device.regions.get(index as usize).filter(|_| index != 8);
                let region = region.ok_or(Errno::INVAL)?;
                let mut capabilities = Vec::new();
                capabilities.extend(region.msix.then(|| capability(3, 1, &[])));
                capabilities.extend(region.sparse.as_deref().map(|areas| capability(1, 1, &pairs(areas))));
                put32(argument, 4, region.flags | if capabilities.is_empty() { 0 } else { 8 });
                put64(argument, 16, region.size);
                put64(argument, 24, Device::at(index.into(), 0));
                if !capabilities.is_empty() {
                    append(argument, 32, 12, &capabilities);
                }
                Ok(0)
            }
            number::IRQ_INFO => {
                let irq = device.irqs.get(get32(argument, 8) as usize).copied().flatten();
                let (flags, count) = irq.ok_or(Errno::INVAL)?;
                put32(argument, 4, flags);
                put32(argument, 12, count);
                Ok(0)
            }
            number::SET_IRQS => device.set_irqs(argument),
            number::FEATURE => {
                // Get a dma-buf (feature 11) of one range.
                let (region, ranges) = (get32(argument, 8), get32(argument, 20));
                let size = device.regions[region as usize].size;
                let (start, len) = (get64(argument, 24), get64(argument, 32));
                if get32(argument, 4) != 1 << 16 | 11 || ranges != 1 || len == 0 || start + len > size {
                    return Err(Errno::INVAL);
                }
                Ok(OwnedFd::from(device.file.try_clone().expect("a file")).into_raw_fd())
            }
            _ => Err(Errno::NOTTY),
        }
    }

    fn bind(&mut self, address: PciAddress, argument: &mut [u8]) -> Result<i32, Errno> {
        let (flags, tokens) = (get32(argument, 4), self.tokens);
        if flags & !u32::from(tokens) != 0 {
            return Err(Errno::INVAL);
        }
        if !matches!(find(get32(argument, 8) as i32), Some((_, Node::Iommu))) {
            return Err(Errno::BADF);
        }
        let device = self.device(address);
        // The device is bound through another open file.
        if device.bound && users(&device.name) > 1 {
            return Err(Errno::INVAL);
        }
        let mut token = [0; 16];
        if flags & 1 != 0 {
            memory().read_exact_at(&mut token, get64(argument, 16)).map_err(|_| Errno::FAULT)?;
        }
        let group = self.device(address).group;
        if !self.groups[&group].viable {
            return Err(Errno::PERM);
        }
        self.open(address, (flags & 1 != 0).then_some(token))?;
        let device = self.device(address);
        (device.bound, device.attached) = (true, None);
        put32(argument, 12, 1);
        Ok(0)
    }

    fn hot_reset_info(&mut self, address: PciAddress, argument: &mut [u8]) -> Result<i32, Errno> {
        let (bound, owned) = (self.device(address).bound, self.device(address).hot_owned);
        let set = self.device(address).hot_set.clone();
        if set.is_empty() {
            return Err(Errno::NODEV);
        }
        let room = (argument.len() - 12) / 8;
        if bound {
            put32(argument, 4, 1 | if owned { 2 } else { 0 });
        }
        put32(argument, 8, set.len() as u32);
        if set.len() > room {
            return Err(Errno::NOSPC);
        }
        for (position, function) in set.iter().enumerate() {
            let group = self.devices.get(function).map_or(99, |device| device.group);
            let at = 12 + 8 * position;
            put32(argument, at, if bound { 0 } else { group });
            argument[at + 4..at + 6].copy_from_slice(&(function.domain() as u16).to_ne_bytes());
            argument[at + 6] = function.bus();
            argument[at + 7] = function.device() << 3 | function.function();
        }
        Ok(0)
    }

    fn hot_reset(&mut self, address: PciAddress, argument: &mut [u8]) -> Result<i32, Errno> {
        let bound = self.device(address).bound;
        let set = self.device(address).hot_set.clone();
        let count = get32(argument, 8) as usize;
        if get32(argument, 4) != 0 || (count == 0) != bound || argument.len() != 12 + 4 * count {
            return Err(Errno::INVAL);
        }
        let mut groups = BTreeSet::new();
        for position in 0..count {
            match find(get32(argument, 12 + 4 * position) as i32) {
                Some((_, Node::Group(group))) => groups.insert(group),
                _ => return Err(Errno::INVAL),
            };
        }
        if !bound && set.iter().any(|function| !groups.contains(&self.device(*function).group)) {
            return Err(Errno::INVAL);
        }
        let effect = self.device(address).hot_reset.clone();
        for function in set {
            let path = self.sysfs_config(function);
            if let Some(device) = self.devices.get_mut(&function) {
                device.apply(&path, &effect)?;
            }
        }
        Ok(0)
    }
}
