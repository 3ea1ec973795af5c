//! The DMA mappings of a container, as type 1 makes them, and of iommufd.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;

use rustix::io::Errno;

use super::{
    Device, State, append, capability, find, get32, get64, mapped_file, memory, number, pairs, put32, put64,
    users,
};

/// A DMA mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::vfio::tests) struct Map {
    pub(in crate::vfio::tests) len: u64,
    /// Address in this process, or where it begins in its file.
    pub(in crate::vfio::tests) start: u64,
    pub(in crate::vfio::tests) writable: bool,
    /// Whether a file is mapped, not memory of the process.
    pub(in crate::vfio::tests) file: bool,
}

pub(super) type Maps = BTreeMap<u64, Map>;

fn overlaps(maps: &Maps, iova: u64, len: u64) -> bool {
    maps.iter().any(|(&start, map)| start < iova.saturating_add(len) && iova < start + map.len)
}

/// Removes the mappings within a range and returns their bytes. Rejects a range that splits a mapping.
fn unmap(maps: &mut Maps, iova: u64, len: u64) -> Result<u64, Errno> {
    let end = iova.checked_add(len).filter(|_| len != 0).ok_or(Errno::INVAL)?;
    let cuts = |(&start, map): (&u64, &Map)| {
        (start < iova && start + map.len > iova) || (start < end && start + map.len > end)
    };
    if maps.iter().any(cuts) {
        return Err(Errno::INVAL);
    }
    let inside: Vec<u64> = maps.range(iova..end).map(|(&start, _)| start).collect();
    Ok(inside.iter().filter_map(|start| maps.remove(start)).map(|map| map.len).sum())
}

impl State {
    pub(super) fn of_container(&mut self, number: u32, argument: &mut [u8]) -> Result<i32, Errno> {
        if !self.iommu_set {
            return Err(Errno::INVAL);
        }
        match number {
            number::IOMMU_INFO => {
                // Flags: page sizes, and capabilities.
                put32(argument, 4, 3);
                put64(argument, 8, self.page_sizes);
                let left = self.dma_limit - self.container.len() as u32;
                let capabilities = [
                    // The migration capability, which is of no interest.
                    capability(2, 1, &[0; 24]),
                    capability(1, 1, &pairs(&self.iova_ranges)),
                    capability(3, 1, &left.to_ne_bytes()),
                ];
                append(argument, 24, 16, &capabilities);
                Ok(0)
            }
            number::MAP_DMA => {
                let (flags, start) = (get32(argument, 4), get64(argument, 8));
                let (iova, len) = (get64(argument, 16), get64(argument, 24));
                let page = self.page_sizes & self.page_sizes.wrapping_neg();
                if flags & !3 != 0 || flags & 3 == 0 || len == 0 || (iova | len | start) % page != 0 {
                    return Err(Errno::INVAL);
                }
                let map = Map { len, start, writable: flags & 2 != 0, file: false };
                if overlaps(&self.container, iova, len) {
                    return Err(Errno::EXIST);
                }
                if self.container.len() as u32 >= self.dma_limit {
                    return Err(Errno::NOSPC);
                }
                self.check_iova(iova, len)?;
                mapped_file(start).ok_or(Errno::FAULT)?;
                self.container.insert(iova, map);
                Ok(0)
            }
            number::UNMAP_DMA => {
                let (iova, len) = (get64(argument, 8), get64(argument, 16));
                let unmapped = unmap(&mut self.container, iova, len)?;
                put64(argument, 16, unmapped);
                Ok(0)
            }
            _ => Err(Errno::NOTTY),
        }
    }

    fn check_iova(&self, iova: u64, len: u64) -> Result<(), Errno> {
        let last = iova.checked_add(len - 1).ok_or(Errno::OVERFLOW)?;
        let fits = self.iova_ranges.iter().any(|&(start, end)| start <= iova && last <= end);
        if fits { Ok(()) } else { Err(Errno::INVAL) }
    }

    pub(super) fn of_iommufd(&mut self, number: u32, argument: &mut [u8]) -> Result<i32, Errno> {
        match number {
            number::IOAS_ALLOC => {
                let id = self.ioases.keys().next_back().map_or(1, |last| last + 1);
                self.ioases.insert(id, Maps::new());
                put32(argument, 8, id);
                Ok(0)
            }
            number::DESTROY => {
                let id = get32(argument, 4);
                let attached = |device: &Device| device.attached == Some(id) && users(&device.name) > 0;
                if !self.ioases.contains_key(&id) {
                    return Err(Errno::NOENT);
                }
                if self.devices.values().any(attached) {
                    return Err(Errno::BUSY);
                }
                self.ioases.remove(&id);
                Ok(0)
            }
            number::IOVA_RANGES => {
                self.ioases.get(&get32(argument, 4)).ok_or(Errno::NOENT)?;
                let (room, address) = (get32(argument, 8) as usize, get64(argument, 16));
                let bytes = pairs(&self.iova_ranges).split_off(8);
                let written = bytes.len().min(16 * room);
                memory().write_all_at(&bytes[..written], address).map_err(|_| Errno::FAULT)?;
                put32(argument, 8, self.iova_ranges.len() as u32);
                put64(argument, 24, self.alignment);
                if self.iova_ranges.len() > room { Err(Errno::MSGSIZE) } else { Ok(0) }
            }
            number::IOAS_MAP | number::IOAS_MAP_FILE => {
                let is_file = number == number::IOAS_MAP_FILE;
                let (flags, id, start) = (get32(argument, 4), get32(argument, 8), get64(argument, 16));
                let (len, iova) = (get64(argument, 24), get64(argument, 32));
                // A fixed address, for reading at least.
                if flags & !7 != 0 || flags & 5 != 5 || len == 0 || (iova | len) % self.alignment != 0 {
                    return Err(Errno::INVAL);
                }
                self.check_iova(iova, len)?;
                let maps = self.ioases.get(&id).ok_or(Errno::NOENT)?;
                if overlaps(maps, iova, len) {
                    return Err(Errno::EXIST);
                }
                match is_file {
                    true => drop(find(get32(argument, 12) as i32).ok_or(Errno::BADF)?),
                    // A BAR has no pages.
                    false => match mapped_file(start) {
                        Some(file) if !file.contains("memfd:vfio-") => {}
                        _ => return Err(Errno::FAULT),
                    },
                }
                let map = Map { len, start, writable: flags & 2 != 0, file: is_file };
                self.ioases.get_mut(&id).ok_or(Errno::NOENT)?.insert(iova, map);
                Ok(0)
            }
            number::IOAS_UNMAP => {
                let maps = self.ioases.get_mut(&get32(argument, 4)).ok_or(Errno::NOENT)?;
                match unmap(maps, get64(argument, 8), get64(argument, 16))? {
                    0 => Err(Errno::NOENT),
                    unmapped => {
                        put64(argument, 16, unmapped);
                        Ok(0)
                    }
                }
            }
            _ => Err(Errno::NOTTY),
        }
    }
}
