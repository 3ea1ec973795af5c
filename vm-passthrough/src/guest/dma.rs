//! The guest's RAM in the DMA address space of its devices.

use std::sync::Arc;

use super::RamRegion;
use crate::vfio::{AddressSpace, DmaPermission, Result};

/// RAM that a device can reach. Every device of a guest maps it; the address space counts.
#[derive(Debug)]
pub(super) struct DmaRam {
    space: Arc<dyn AddressSpace>,
    /// Where it is mapped.
    iovas: Vec<u64>,
}

impl DmaRam {
    /// None of it, so far.
    pub(super) fn new(space: Arc<dyn AddressSpace>) -> Self {
        Self { space, iovas: Vec::new() }
    }

    /// Maps `regions` at their guest-physical addresses.
    ///
    /// # Errors
    /// The first that can't be mapped; those before it are, until they are [unmapped](Self::unmap).
    pub(super) fn map(&mut self, regions: &[RamRegion]) -> Result<()> {
        for region in regions {
            self.space.map(region.guest, region.memory.clone(), DmaPermission::ReadWrite)?;
            self.iovas.push(region.guest);
        }
        Ok(())
    }

    /// Unmaps it.
    ///
    /// # Errors
    /// When a region can't be unmapped. The others are even then; unmapping again tries those that are left.
    pub(super) fn unmap(&mut self) -> Result<()> {
        let (mut result, mut left) = (Ok(()), Vec::new());
        while let Some(iova) = self.iovas.pop() {
            if let Err(error) = self.space.unmap(iova) {
                result = result.and(Err(error));
                left.push(iova);
            }
        }
        left.reverse();
        self.iovas = left;
        result
    }
}

impl Drop for DmaRam {
    fn drop(&mut self) {
        if let Err(error) = self.unmap() {
            tracing::error!(%error, "a part of the guest's RAM stays mapped for DMA");
        }
    }
}
