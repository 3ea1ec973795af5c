//! The guest's RAM in the DMA address space of its devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sys::Part;
use super::{DeviceError, RamRegion};
use crate::claim::Cancel;
use crate::vfio::{AddressSpace, Backend, DmaPermission, Mapping, Result, VfioError};

/// What is mapped at a time where there are entries enough: the Linux kernel pins all of it before it answers, and clears what was
/// never used.
const PIECE: u64 = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// How many of them at the same time, where the address space gains by that: type1 has a lock around each, iommufd has none.
const AT_ONCE: usize = 4;
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
    /// That there are too few entries for all, before any is mapped. Otherwise the first that can't be mapped, of which nothing is;
    /// those before it are, until they are [unmapped](Self::unmap_all).
    pub(super) fn map(&mut self, regions: &[RamRegion], cancel: Option<&Cancel>) -> Result<(), DeviceError> {
        let chosen = self.piece(regions)?;
        let mut told = Instant::now();
        let all: u64 = regions.iter().map(|region| region.memory.len()).sum();
        let mut done = 0;
        let at_once = if self.space.backend() == Backend::Iommufd { AT_ONCE } else { 1 };
        for region in regions {
            let len = region.memory.len();
            // As another device has mapped it. Where it is one piece, all of it is.
            let piece = self.space.mapped_from(region.guest).unwrap_or(chosen).max(1);
            let mut next = 0;
            while next < len {
                let offset = next;
                let starts = std::iter::successors(Some(offset), |start| start.checked_add(piece));
                let batch: Vec<_> = starts.take_while(|start| *start < len).take(at_once).collect();
                next = batch.last().map_or(len, |last| last.saturating_add(piece));
                if let Err(cause) = self.map_pieces(region, &batch, piece, cancel) {
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

    /// How large pieces are to be, so that there are entries for those regions that no device has mapped. Where there are few, half
    /// of them are left for what comes later.
    fn piece(&self, regions: &[RamRegion]) -> Result<u64> {
        let Some(left) = self.space.entries_left()? else { return Ok(PIECE) };
        let new = regions.iter().filter(|region| self.space.mapped_from(region.guest).is_none());
        let lens: Vec<_> = new.map(|region| region.memory.len()).collect();
        let needed = |piece: u64| lens.iter().map(|len| len.div_ceil(piece)).sum::<u64>();
        let largest = lens.iter().copied().max().unwrap_or(0);
        let mut piece = PIECE;
        while needed(piece) > left / 2 && piece < largest {
            piece = piece.saturating_mul(2);
        }
        match needed(piece) {
            needed if needed > left => Err(VfioError::DmaEntries { needed, left }),
            _ => Ok(piece),
        }
    }

    /// Maps those pieces of `len` bytes at `offsets` that are not, all or none.
    fn map_pieces(
        &mut self,
        region: &RamRegion,
        offsets: &[u64],
        len: u64,
        cancel: Option<&Cancel>,
    ) -> Result<(), DeviceError> {
        let at = |offset: u64| region.guest.saturating_add(offset);
        let missing = offsets.iter().filter(|&&offset| !self.pieces.contains(&(region.guest, at(offset))));
        let ranges: Vec<(u64, Arc<dyn Mapping>)> = missing
            .map(|&offset| match Part::of(&region.memory, offset, len) {
                Some(part) => (at(offset), Arc::new(part) as Arc<dyn Mapping>),
                None => (at(offset), region.memory.clone()),
            })
            .collect();
        if ranges.is_empty() {
            return Ok(());
        }
        if cancel.is_some_and(Cancel::is_requested) {
            return Err(DeviceError::Cancelled);
        }
        self.space.map_all(&ranges, DmaPermission::ReadWrite)?;
        self.pieces.extend(ranges.iter().map(|(iova, _)| (region.guest, *iova)));
        Ok(())
    }

    /// Whether a device reaches any of these bytes.
    pub(super) fn reaches(&self, guest: u64, len: u64) -> bool {
        let last = guest.saturating_add(len.saturating_sub(1));
        let is_in = |&(_, start): &(u64, u64)| {
            let mapped = self.space.mapped_from(start).unwrap_or(u64::MAX);
            start <= last && guest <= start.saturating_add(mapped - 1)
        };
        len > 0 && self.pieces.iter().any(is_in)
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
    use crate::vfio::HostMemory;

    /// An address space with so many entries, in which whoever maps is asked to give up.
    #[derive(Debug)]
    struct Asks(Arc<SimSpace>, Cancel, Option<u64>);

    impl AddressSpace for Asks {
        fn backend(&self) -> Backend {
            self.0.backend()
        }

        fn iova_ranges(&self) -> Result<Vec<IovaRange>> {
            self.0.iova_ranges()
        }

        fn entries_left(&self) -> Result<Option<u64>> {
            Ok(self.2.map(|all| all - self.0.maps().len() as u64))
        }

        fn mapped_from(&self, iova: u64) -> Option<u64> {
            self.0.mapped_from(iova)
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
    fn who_asks_waits_for_those_under_way_at_most() {
        let (log, cancel) = (SimLog::default(), Cancel::default());
        let space = SimSpace::new(vec![0..=u64::MAX], &log);
        let mut ram = DmaRam::new(Arc::new(Asks(space.clone(), cancel.clone(), None)));
        let memory = Arc::new(HostMemory::new(6 << 20).unwrap());
        let mapped = ram.map(&[RamRegion { guest: 0x10_0000, memory }], Some(&cancel));
        assert!(matches!(mapped, Err(DeviceError::Cancelled)), "{mapped:?}");
        let lines = log.take();
        assert_eq!(lines[..2], ["dma map 0x100000+0x100000", "dma map 0x200000+0x100000"]);
        assert_eq!((lines.len(), lines.last().unwrap().as_str()), (8, "dma unmap 0x100000"));
        assert_eq!(space.maps(), []);
    }

    #[test]
    fn pieces_are_as_large_as_there_are_few_entries_and_alike_for_all_devices() {
        let memory = |mib: u64| Arc::new(HostMemory::new((mib << 20) as usize).unwrap());
        let regions =
            [RamRegion { guest: 0, memory: memory(5) }, RamRegion { guest: 1 << 32, memory: memory(9) }];
        let check = |entries: Option<u64>, expect: &[(u64, u64)], refused: Option<&str>| {
            let log = SimLog::default();
            let space = SimSpace::new(vec![0..=u64::MAX], &log);
            let limited: Arc<dyn AddressSpace> = Arc::new(Asks(space.clone(), Cancel::default(), entries));
            let (mut first, mut second) = (DmaRam::new(limited.clone()), DmaRam::new(limited));
            let mapped = first.map(&regions, None);
            assert_eq!(mapped.as_ref().err().map(ToString::to_string).as_deref(), refused, "{entries:?}");
            let lens = || log.take().iter().filter(|line| line.starts_with("dma map")).count();
            assert_eq!(lens(), expect.iter().map(|(count, _)| *count as usize).sum::<usize>(), "{entries:?}");
            let largest = |from: u64| space.mapped_from(from).map(|len| len >> 20);
            let pieces = [largest(0), largest(1 << 32)];
            assert_eq!(
                pieces.into_iter().flatten().collect::<Vec<_>>(),
                expect.iter().map(|(_, mib)| *mib).collect::<Vec<_>>()
            );
            if mapped.is_ok() {
                second.map(&regions, None).unwrap();
                assert_eq!(lens(), 0, "the second device maps nothing else");
                drop(first);
                assert_ne!(space.maps(), []);
                drop(second);
            }
            assert_eq!(space.maps(), []);
        };
        check(None, &[(5, 1), (9, 1)], None);
        check(Some(100), &[(5, 1), (9, 1)], None);
        // Exactly half of them.
        check(Some(28), &[(5, 1), (9, 1)], None);
        check(Some(27), &[(3, 2), (5, 2)], None);
        check(Some(8), &[(1, 5), (2, 8)], None);
        check(Some(2), &[(1, 5), (1, 9)], None);
        let few = "mapping the guest's RAM for DMA takes 2 entries at least, and 1 are left for its devices: raise the \
                   limit, which holds for a guest from its first device on (echo 65535 > \
                   /sys/module/vfio_iommu_type1/parameters/dma_entry_limit), or use iommufd, which has none";
        check(Some(1), &[], Some(few));
    }
}
