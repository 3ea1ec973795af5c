//! Reads the structures that VFIO answers with. Pure functions over bytes: whatever the bytes, they end, and they
//! give either an answer that can be or the reason why it can't.

use std::mem::{offset_of, size_of};

use vfio_bindings::bindings::vfio as uapi;

use super::interface::{DeviceInfo, RegionInfo};
use crate::PciAddress;
use crate::iommu::IovaRange;

/// Most bytes that any answer may need. The longest honest one, a region with a sparse area per page of a table, or
/// IOVA ranges around every reserved one, is a few kilobytes.
pub(super) const MAX_ANSWER: usize = 1 << 20;

/// Most regions that a device may claim to have; vfio-pci has 9, and a few more for vendors' own.
const MAX_REGIONS: u32 = 1024;

/// Most interrupt indexes that a device may claim to have; vfio-pci has 5.
const MAX_IRQ_INDEXES: u32 = 32;

/// Most capabilities in the chain of one answer.
const MAX_CAPABILITIES: usize = 64;

/// Most functions that a hot reset may touch: all of a PCI bus.
pub(super) const MAX_HOT_RESET: u32 = 256;

/// Why bytes are no answer.
pub(super) type Malformed = String;

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    bytes.get(offset..)?.first_chunk().map(|field| u16::from_ne_bytes(*field))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..)?.first_chunk().map(|field| u32::from_ne_bytes(*field))
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    bytes.get(offset..)?.first_chunk().map(|field| u64::from_ne_bytes(*field))
}

fn require<T>(value: Option<T>, what: &str) -> Result<T, Malformed> {
    value.ok_or_else(|| format!("an answer too short to have {what}"))
}

/// How many bytes an answer wants: its size field.
pub(super) fn wanted_size(answer: &[u8]) -> Result<usize, Malformed> {
    let wanted = require(u32_at(answer, 0), "a size")? as usize;
    if wanted > MAX_ANSWER {
        return Err(format!("a size of {wanted} bytes"));
    }
    Ok(wanted)
}

/// The device's own description.
pub(super) fn device_info(answer: &[u8]) -> Result<DeviceInfo, Malformed> {
    let flags = require(u32_at(answer, offset_of!(uapi::vfio_device_info, flags)), "flags")?;
    let regions = require(u32_at(answer, offset_of!(uapi::vfio_device_info, num_regions)), "regions")?;
    let irqs = require(u32_at(answer, offset_of!(uapi::vfio_device_info, num_irqs)), "interrupts")?;
    if flags & uapi::VFIO_DEVICE_FLAGS_PCI == 0 {
        return Err("a device that is not PCI".into());
    }
    if !(uapi::VFIO_PCI_NUM_REGIONS..=MAX_REGIONS).contains(&regions) || irqs > MAX_IRQ_INDEXES {
        return Err(format!("{regions} regions and {irqs} interrupt indexes"));
    }
    Ok(DeviceInfo { regions, irqs, reset: flags & uapi::VFIO_DEVICE_FLAGS_RESET != 0 })
}

/// A capability of an answer: its ID, and everything from its header to the end of the answer, as its length is
/// not given.
struct Capability<'a> {
    id: u16,
    body: &'a [u8],
}

/// The capabilities that start at `first`, which is 0 when there are none.
fn capabilities(answer: &[u8], first: u32) -> Result<Vec<Capability<'_>>, Malformed> {
    let mut capabilities = Vec::new();
    let mut offset = first as usize;
    while offset != 0 {
        if capabilities.len() == MAX_CAPABILITIES {
            return Err("a capability chain without an end".into());
        }
        let body = answer.get(offset..).unwrap_or_default();
        let header = (
            u16_at(body, offset_of!(uapi::vfio_info_cap_header, id)),
            u32_at(body, offset_of!(uapi::vfio_info_cap_header, next)),
        );
        let (Some(id), Some(next)) = header else {
            return Err(format!("a capability at {offset:#x}, past its end"));
        };
        capabilities.push(Capability { id, body });
        offset = next as usize;
    }
    Ok(capabilities)
}

/// A region and where it is in the device's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// What the interface tells of it.
    pub(super) info: RegionInfo,
    /// Its first byte in the device's file.
    pub(super) offset: u64,
}

impl Region {
    /// A region that the device does not have.
    pub(super) fn absent(index: u32) -> Self {
        let info = RegionInfo { index, size: 0, readable: false, writable: false, mappable: Vec::new() };
        Self { info, offset: 0 }
    }
}

/// Region `index`. Pages are `page` bytes, a power of two.
pub(super) fn region(answer: &[u8], index: u32, page: u64) -> Result<Region, Malformed> {
    let flags = require(u32_at(answer, offset_of!(uapi::vfio_region_info, flags)), "flags")?;
    let size = require(u64_at(answer, offset_of!(uapi::vfio_region_info, size)), "a size")?;
    let offset = require(u64_at(answer, offset_of!(uapi::vfio_region_info, offset)), "an offset")?;
    // Offsets of files are signed.
    if offset.checked_add(size).is_none_or(|end| end > i64::MAX as u64) {
        return Err(format!("a region of {size:#x} bytes at {offset:#x} of its file"));
    }
    let chain = match flags & uapi::VFIO_REGION_INFO_FLAG_CAPS {
        0 => 0,
        _ => require(u32_at(answer, offset_of!(uapi::vfio_region_info, cap_offset)), "capabilities")?,
    };
    let mut areas = Vec::new();
    if flags & uapi::VFIO_REGION_INFO_FLAG_MMAP != 0 && size != 0 {
        let sparse = capabilities(answer, chain)?
            .into_iter()
            .find(|capability| u32::from(capability.id) == uapi::VFIO_REGION_INFO_CAP_SPARSE_MMAP);
        areas = match sparse {
            Some(capability) => sparse_areas(capability.body)?,
            None => vec![(0, size)],
        };
    }
    Ok(Region {
        info: RegionInfo {
            index,
            size,
            readable: flags & uapi::VFIO_REGION_INFO_FLAG_READ != 0,
            writable: flags & uapi::VFIO_REGION_INFO_FLAG_WRITE != 0,
            mappable: mappable(areas, size, page)?,
        },
        offset,
    })
}

/// The areas of a sparse mapping capability, as they stand.
fn sparse_areas(body: &[u8]) -> Result<Vec<(u64, u64)>, Malformed> {
    let count = offset_of!(uapi::vfio_region_info_cap_sparse_mmap, nr_areas);
    let count = require(u32_at(body, count), "a count of mappable areas")? as usize;
    let areas = body
        .get(offset_of!(uapi::vfio_region_info_cap_sparse_mmap, areas)..)
        .unwrap_or_default()
        .chunks_exact(size_of::<uapi::vfio_region_sparse_mmap_area>());
    if areas.len() < count {
        return Err(format!("{count} mappable areas in room for {}", areas.len()));
    }
    areas
        .take(count)
        .map(|area| {
            let offset = u64_at(area, offset_of!(uapi::vfio_region_sparse_mmap_area, offset));
            let size = u64_at(area, offset_of!(uapi::vfio_region_sparse_mmap_area, size));
            require(offset.zip(size), "a mappable area")
        })
        .collect()
}

/// The whole pages of `areas`, sorted; an error if areas overlap or leave the region.
fn mappable(mut areas: Vec<(u64, u64)>, size: u64, page: u64) -> Result<Vec<(u64, u64)>, Malformed> {
    areas.retain(|&(_, len)| len != 0);
    areas.sort_unstable();
    let mut previous = 0;
    let mut pages = Vec::with_capacity(areas.len());
    for (offset, len) in areas {
        let end = offset.checked_add(len).filter(|&end| end <= size && offset >= previous);
        let Some(end) = end else {
            return Err(format!("a mappable area of {len:#x} bytes at {offset:#x} in a region of {size:#x}"));
        };
        previous = end;
        let first = offset.checked_next_multiple_of(page);
        let last = end & !(page - 1);
        if let Some(first) = first.filter(|&first| first < last) {
            pages.push((first, last - first));
        }
    }
    Ok(pages)
}

/// What a container's IOMMU can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IommuInfo {
    /// Smallest page that it maps.
    pub(super) page: u64,
    /// Addresses that can be mapped, sorted; all, when the kernel does not say.
    pub(super) ranges: Vec<IovaRange>,
    /// How many more mappings there may be; `None` when the kernel does not say.
    pub(super) entries_left: Option<u64>,
}

impl IommuInfo {
    /// What is assumed before there is an IOMMU to ask.
    pub(super) fn unlimited(page: u64) -> Self {
        Self { page, ranges: vec![0..=u64::MAX], entries_left: None }
    }
}

/// What a container's IOMMU can do. Pages of this process are `page` bytes, a power of two.
pub(super) fn iommu_info(answer: &[u8], page: u64) -> Result<IommuInfo, Malformed> {
    let flags = require(u32_at(answer, offset_of!(uapi::vfio_iommu_type1_info, flags)), "flags")?;
    let mut info = IommuInfo::unlimited(page);
    if flags & uapi::VFIO_IOMMU_INFO_PGSIZES != 0 {
        let sizes = u64_at(answer, offset_of!(uapi::vfio_iommu_type1_info, iova_pgsizes));
        let sizes = require(sizes, "page sizes")?;
        if sizes == 0 {
            return Err("no page size".into());
        }
        // Type 1 reports what it can split to, which may be less than a page of this process; never map less.
        info.page = page.max(sizes & sizes.wrapping_neg());
    }
    if flags & uapi::VFIO_IOMMU_INFO_CAPS == 0 {
        return Ok(info);
    }
    let chain = u32_at(answer, offset_of!(uapi::vfio_iommu_type1_info, cap_offset));
    for Capability { id, body } in capabilities(answer, require(chain, "capabilities")?)? {
        match u32::from(id) {
            uapi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => info.ranges = iova_range_capability(body)?,
            uapi::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => {
                let avail = u32_at(body, offset_of!(uapi::vfio_iommu_type1_info_dma_avail, avail));
                info.entries_left = Some(require(avail, "a count of mappings left")?.into());
            }
            _ => {}
        }
    }
    Ok(info)
}

fn iova_range_capability(body: &[u8]) -> Result<Vec<IovaRange>, Malformed> {
    let count = u32_at(body, offset_of!(uapi::vfio_iommu_type1_info_cap_iova_range, nr_iovas));
    let count = require(count, "a count of IOVA ranges")? as usize;
    let ranges = body
        .get(offset_of!(uapi::vfio_iommu_type1_info_cap_iova_range, iova_ranges)..)
        .unwrap_or_default()
        .chunks_exact(size_of::<uapi::vfio_iova_range>());
    if ranges.len() < count {
        return Err(format!("{count} IOVA ranges in room for {}", ranges.len()));
    }
    let pairs = ranges
        .take(count)
        .map(|range| {
            let start = u64_at(range, offset_of!(uapi::vfio_iova_range, start));
            let end = u64_at(range, offset_of!(uapi::vfio_iova_range, end));
            require(start.zip(end), "an IOVA range")
        })
        .collect::<Result<Vec<_>, _>>()?;
    iova_ranges(pairs)
}

/// First and last addresses as ranges, sorted; an error if one is backward or two overlap.
pub(super) fn iova_ranges(mut pairs: Vec<(u64, u64)>) -> Result<Vec<IovaRange>, Malformed> {
    pairs.sort_unstable();
    if let Some((start, end)) = pairs.iter().find(|(start, end)| start > end) {
        return Err(format!("an IOVA range from {start:#x} to {end:#x}"));
    }
    for pair in pairs.windows(2) {
        if let [(_, end), (start, _)] = pair
            && end >= start
        {
            return Err(format!("an IOVA range that ends at {end:#x} and one that starts at {start:#x}"));
        }
    }
    Ok(pairs.into_iter().map(|(start, end)| start..=end).collect())
}

/// What a hot reset touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HotResetInfo {
    /// Every function, with its group; the number is not a group where `owned` is set.
    pub(super) functions: Vec<(PciAddress, u32)>,
    /// For devices opened through iommufd: whether the whole set is ours.
    pub(super) owned: Option<bool>,
}

/// What a hot reset touches.
pub(super) fn hot_reset_info(answer: &[u8]) -> Result<HotResetInfo, Malformed> {
    use uapi::vfio_pci_dependent_device as Entry;
    let flags = require(u32_at(answer, offset_of!(uapi::vfio_pci_hot_reset_info, flags)), "flags")?;
    let count = u32_at(answer, offset_of!(uapi::vfio_pci_hot_reset_info, count));
    let count = require(count, "a count of functions")? as usize;
    let entries = answer
        .get(offset_of!(uapi::vfio_pci_hot_reset_info, devices)..)
        .unwrap_or_default()
        .chunks_exact(size_of::<Entry>());
    if entries.len() < count {
        return Err(format!("{count} functions in room for {}", entries.len()));
    }
    let functions = entries
        .take(count)
        .map(|entry| {
            let group = require(u32_at(entry, offset_of!(Entry, __bindgen_anon_1)), "a group")?;
            let segment = require(u16_at(entry, offset_of!(Entry, segment)), "a segment")?;
            let bus = require(entry.get(offset_of!(Entry, bus)).copied(), "a bus")?;
            let devfn = require(entry.get(offset_of!(Entry, devfn)).copied(), "a function")?;
            let address = PciAddress::new(segment.into(), bus, devfn >> 3, devfn & 7);
            Ok((require(address, "an address")?, group))
        })
        .collect::<Result<_, Malformed>>()?;
    let by_id = flags & uapi::VFIO_PCI_HOT_RESET_FLAG_DEV_ID != 0;
    Ok(HotResetInfo {
        functions,
        owned: by_id.then_some(flags & uapi::VFIO_PCI_HOT_RESET_FLAG_DEV_ID_OWNED != 0),
    })
}

#[cfg(test)]
mod tests;
