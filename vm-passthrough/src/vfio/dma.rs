//! What is mapped for DMA in an address space, and what may be: the checks made before the Linux kernel is asked,
//! so that a refusal says why.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::interface::{DmaPermission, Mapping, Result, VfioError};
use crate::iommu::IovaRange;

/// One mapping.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) memory: Arc<dyn Mapping>,
    pub(super) permission: DmaPermission,
    /// How often it was mapped.
    users: usize,
}

/// The mappings of a space, which never overlap.
#[derive(Debug, Default)]
pub(crate) struct DmaMappings {
    entries: BTreeMap<u64, Entry>,
}

/// What is to be done for a mapping that was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// The Linux kernel must map it.
    Map,
    /// The same memory is mapped there already; it was counted.
    Counted,
}

/// What is to be done for an unmapping that was asked for.
#[derive(Debug)]
pub(crate) enum Release {
    /// The Linux kernel must unmap N bytes.
    Unmap(u64),
    /// Somebody else still uses it; it was counted.
    Counted,
}

impl DmaMappings {
    /// Checks a mapping against those that exist, and counts it when it is one of them.
    pub(crate) fn plan(
        &mut self,
        iova: u64,
        memory: &dyn Mapping,
        permission: DmaPermission,
    ) -> Result<Plan> {
        let end = last(iova, memory.len())?;
        if let Some(entry) = self.entries.get_mut(&iova)
            && entry.memory.address() == memory.address()
            && entry.memory.len() == memory.len()
            && entry.permission == permission
        {
            entry.users = entry.users.saturating_add(1);
            return Ok(Plan::Counted);
        }
        // The only mapping that can reach into the range starts last among those that start no later than its end.
        match self.entries.range(..=end).next_back() {
            Some((&start, entry)) if start.saturating_add(entry.memory.len() - 1) >= iova => {
                Err(VfioError::Range {
                    start: iova,
                    end,
                    reason: format!(
                        "{start:#x}..={:#x} is mapped already; unmap it first",
                        start.saturating_add(entry.memory.len() - 1)
                    ),
                })
            }
            _ => Ok(Plan::Map),
        }
    }

    /// Notes a mapping that the kernel made.
    pub(crate) fn insert(&mut self, iova: u64, memory: Arc<dyn Mapping>, permission: DmaPermission) {
        self.entries.insert(iova, Entry { memory, permission, users: 1 });
    }

    /// Counts an unmapping.
    pub(crate) fn release(&mut self, iova: u64) -> Result<Release> {
        match self.entries.get_mut(&iova) {
            None => Err(VfioError::Range {
                start: iova,
                end: iova,
                reason: "nothing is mapped from there on".into(),
            }),
            Some(entry) if entry.users > 1 => {
                entry.users -= 1;
                Ok(Release::Counted)
            }
            Some(entry) => Ok(Release::Unmap(entry.memory.len())),
        }
    }

    /// Forgets a mapping that the kernel unmapped, and releases the memory.
    pub(crate) fn remove(&mut self, iova: u64) {
        self.entries.remove(&iova);
    }

    /// All mappings, by address.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, &Entry)> {
        self.entries.iter().map(|(&iova, entry)| (iova, entry))
    }

    /// Length of the mapping that starts at an address.
    pub(crate) fn len_at(&self, iova: u64) -> Option<u64> {
        self.entries.get(&iova).map(|entry| entry.memory.len())
    }

    /// Number of bytes mapped.
    pub(super) fn bytes(&self) -> u64 {
        self.entries.values().fold(0, |sum, entry| sum.saturating_add(entry.memory.len()))
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}

/// Last address of `len` bytes from `iova` on.
fn last(iova: u64, len: u64) -> Result<u64> {
    len.checked_sub(1).and_then(|len| iova.checked_add(len)).ok_or_else(|| VfioError::Range {
        start: iova,
        end: u64::MAX,
        reason: format!("{len:#x} bytes from there on are not within 64 bits"),
    })
}

/// Checks that a range is made of whole pages and may be mapped: it lies in one of the `allowed` ranges, which are
/// sorted, and there is room for one more mapping.
pub(crate) fn check_range(
    iova: u64,
    memory: &dyn Mapping,
    page: u64,
    allowed: &[IovaRange],
    entries_left: Option<u64>,
) -> Result<()> {
    let end = last(iova, memory.len())?;
    let refuse = |reason: String| Err(VfioError::Range { start: iova, end, reason });
    let page = page.max(1);
    if !iova.is_multiple_of(page)
        || !memory.len().is_multiple_of(page)
        || !memory.address().is_multiple_of(page)
    {
        return refuse(format!(
            "addresses and length must be multiples of {page:#x} (memory at {:#x})",
            memory.address()
        ));
    }
    if entries_left == Some(0) {
        return refuse(
            "0 entries are left for it; map fewer, larger ranges, or raise dma_entry_limit of the module \
             vfio_iommu_type1"
                .into(),
        );
    }
    if allowed.iter().any(|range| range.contains(&iova) && range.contains(&end)) {
        return Ok(());
    }
    refuse(why_not_allowed(iova, end, allowed))
}

/// Which gap between the allowed ranges, or beyond them, the range hits.
fn why_not_allowed(start: u64, end: u64, allowed: &[IovaRange]) -> String {
    let mut free = 0u64;
    for range in allowed {
        // The gap below this range, if there is one, is free..=range.start() - 1.
        if *range.start() > free && start < *range.start() && end >= free {
            return format!(
                "{free:#x}..={:#x} is reserved (for interrupts or by the firmware); leave a hole in the guest's RAM \
                 there. The group's reserved_regions in sysfs lists it",
                range.start() - 1
            );
        }
        match range.end().checked_add(1) {
            Some(next) => free = next,
            None => return "the IOMMU does not translate it".into(),
        }
    }
    match free.checked_sub(1) {
        Some(last) => format!(
            "the IOMMU translates no address above {last:#x}; place the guest's RAM below, or turn on wider IOMMU \
             page tables in the host's firmware"
        ),
        None => "the IOMMU translates no address at all".into(),
    }
}

#[cfg(test)]
mod tests;
