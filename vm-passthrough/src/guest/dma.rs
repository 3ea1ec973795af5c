//! The guest's RAM in the DMA address space of its devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sys::Part;
use super::{DeviceError, RamRegion};
use crate::claim::Cancel;
use crate::vfio::{AddressSpace, DmaPermission, Mapping, Result};

/// What is mapped at a time: the Linux kernel pins all of it before it answers, and clears what was never used.
const PIECE: u64 = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// How often its progress is reported.
const PROGRESS: Duration = Duration::from_secs(5);

/// RAM that a device can reach. Every device of a guest maps it; the address space counts.
#[derive(Debug)]
pub(super) struct DmaRam {
    space: Arc<dyn AddressSpace>,
    /// Where it is mapped: the address of each region, and of the piece.
    pieces: Vec<(u64, u64)>,
}

impl DmaRam {
    /// None of it, so far.
    pub(super) fn new(space: Arc<dyn AddressSpace>) -> Self {
        Self { space, pieces: Vec::new() }
    }

    /// Maps `regions` at their guest-physical addresses, those that are not, until it is asked to give up.
    ///
    /// # Errors
    /// The first that can't be mapped, of which nothing is; those before it are, until they are [unmapped](Self::unmap_all).
    pub(super) fn map(&mut self, regions: &[RamRegion], cancel: Option<&Cancel>) -> Result<(), DeviceError> {
        let mut told = Instant::now();
        let all: u64 = regions.iter().map(|region| region.memory.len()).sum();
        let mut done = 0;
        for region in regions {
            let len = region.memory.len();
            for offset in (0..len).step_by(PIECE as usize) {
                if let Err(cause) = self.map_piece(region, offset, cancel) {
                    if let Err(error) = self.unmap(region.guest) {
                        tracing::error!(%error, "a part of the guest's RAM stays mapped for DMA until the device is detached");
                    }
                    return Err(cause);
                }
                if told.elapsed() > PROGRESS {
                    told = Instant::now();
                    tracing::info!(
                        "{} of {} GiB of the guest's RAM are mapped for DMA",
                        (done + offset) >> 30,
                        all >> 30
                    );
                }
            }
            done += len;
        }
        Ok(())
    }

    fn map_piece(
        &mut self,
        region: &RamRegion,
        offset: u64,
        cancel: Option<&Cancel>,
    ) -> Result<(), DeviceError> {
        let piece = (region.guest, region.guest.saturating_add(offset));
        if self.pieces.contains(&piece) {
            return Ok(());
        }
        if cancel.is_some_and(Cancel::is_requested) {
            return Err(DeviceError::Cancelled);
        }
        let memory: Arc<dyn Mapping> = match Part::of(&region.memory, offset, PIECE) {
            Some(part) => Arc::new(part),
            None => region.memory.clone(),
        };
        self.space.map(piece.1, memory, DmaPermission::ReadWrite)?;
        self.pieces.push(piece);
        Ok(())
    }

    /// Unmaps the region at a guest-physical address, as far as it is mapped.
    ///
    /// # Errors
    /// When a piece of it can't be unmapped. The others are even then; unmapping again tries those that are left.
    pub(super) fn unmap(&mut self, guest: u64) -> Result<()> {
        self.unmap_those(|region| region == guest)
    }

    /// Unmaps all of it, the last first.
    ///
    /// # Errors
    /// As for [`unmap`](Self::unmap).
    pub(super) fn unmap_all(&mut self) -> Result<()> {
        self.unmap_those(|_| true)
    }

    fn unmap_those(&mut self, wanted: impl Fn(u64) -> bool) -> Result<()> {
        let mut result = Ok(());
        for (region, iova) in self.pieces.clone().into_iter().rev().filter(|(region, _)| wanted(*region)) {
            match self.space.unmap(iova) {
                Ok(()) => self.pieces.retain(|piece| *piece != (region, iova)),
                Err(error) => result = result.and(Err(error)),
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iommu::IovaRange;
    use crate::sim::{SimLog, SimSpace};
    use crate::vfio::{Backend, HostMemory};

    /// An address space in which whoever maps is asked to give up.
    #[derive(Debug)]
    struct Asks(Arc<SimSpace>, Cancel);

    impl AddressSpace for Asks {
        fn backend(&self) -> Backend {
            self.0.backend()
        }

        fn iova_ranges(&self) -> Result<Vec<IovaRange>> {
            self.0.iova_ranges()
        }

        fn entries_left(&self) -> Result<Option<u64>> {
            self.0.entries_left()
        }

        fn map(&self, iova: u64, memory: Arc<dyn Mapping>, permission: DmaPermission) -> Result<()> {
            self.1.request();
            self.0.map(iova, memory, permission)
        }

        fn unmap(&self, iova: u64) -> Result<()> {
            self.0.unmap(iova)
        }
    }

    #[test]
    fn who_asks_waits_for_one_piece_at_most() {
        let (log, cancel) = (SimLog::default(), Cancel::default());
        let space = SimSpace::new(vec![0..=u64::MAX], &log);
        let mut ram = DmaRam::new(Arc::new(Asks(space.clone(), cancel.clone())));
        let memory = Arc::new(HostMemory::new(3 << 20).unwrap());
        let mapped = ram.map(&[RamRegion { guest: 0x10_0000, memory }], Some(&cancel));
        assert!(matches!(mapped, Err(DeviceError::Cancelled)), "{mapped:?}");
        assert_eq!(log.take(), ["dma map 0x100000+0x100000", "dma unmap 0x100000"]);
        assert_eq!(space.maps(), []);
    }
}
