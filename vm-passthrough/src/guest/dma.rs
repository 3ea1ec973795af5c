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

    /// Maps `regions` at their guest-physical addresses, those that are not.
    ///
    /// # Errors
    /// The first that can't be mapped; those before it are, until they are [unmapped](Self::unmap_all).
    pub(super) fn map(&mut self, regions: &[RamRegion]) -> Result<()> {
        for region in regions {
            if !self.iovas.contains(&region.guest) {
                self.space.map(region.guest, region.memory.clone(), DmaPermission::ReadWrite)?;
                self.iovas.push(region.guest);
            }
        }
        Ok(())
    }

    /// Unmaps the region at a guest-physical address, if it is mapped.
    ///
    /// # Errors
    /// When it can't be unmapped; it is as before then.
    pub(super) fn unmap(&mut self, guest: u64) -> Result<()> {
        if let Some(index) = self.iovas.iter().position(|&iova| iova == guest) {
            self.space.unmap(guest)?;
            self.iovas.remove(index);
        }
        Ok(())
    }

    /// Unmaps all of it, the last first.
    ///
    /// # Errors
    /// When a region can't be unmapped. The others are even then; unmapping again tries those that are left.
    pub(super) fn unmap_all(&mut self) -> Result<()> {
        self.iovas.clone().into_iter().rev().map(|guest| self.unmap(guest)).fold(Ok(()), Result::and)
    }
}

impl Drop for DmaRam {
    fn drop(&mut self) {
        if let Err(error) = self.unmap_all() {
            tracing::error!(%error, "a part of the guest's RAM stays mapped for DMA");
        }
    }
}
