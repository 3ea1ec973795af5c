//! The guest's RAM in the DMA address space of its devices, all of it or nothing.

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
    /// Maps `regions` at their guest-physical addresses.
    ///
    /// # Errors
    /// When one can't be mapped; none is then.
    pub(super) fn map(space: &Arc<dyn AddressSpace>, regions: &[RamRegion]) -> Result<Self> {
        let mut ram = Self { space: space.clone(), iovas: Vec::with_capacity(regions.len()) };
        for region in regions {
            // What is mapped so far is unmapped by the drop.
            space.map(region.guest, region.memory.clone(), DmaPermission::ReadWrite)?;
            ram.iovas.push(region.guest);
        }
        Ok(ram)
    }

    /// Unmaps it.
    ///
    /// # Errors
    /// When a region can't be unmapped. The others are even then.
    pub(super) fn unmap(mut self) -> Result<()> {
        self.unmap_all()
    }

    fn unmap_all(&mut self) -> Result<()> {
        let mut result = Ok(());
        while let Some(iova) = self.iovas.pop() {
            result = result.and(self.space.unmap(iova));
        }
        result
    }
}

impl Drop for DmaRam {
    fn drop(&mut self) {
        if let Err(error) = self.unmap_all() {
            tracing::error!(%error, "a part of the guest's RAM stays mapped for DMA");
        }
    }
}
