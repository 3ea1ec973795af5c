//! The provided methods of the interface, which a simple device and a simple space keep.

use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use super::*;
use crate::iommu::IovaRange;

/// A device and a space without any provided method replaced. They record mappings and resets.
#[derive(Debug, Default)]
struct Simple {
    mapped: Mutex<Vec<u64>>,
    resets: Mutex<usize>,
}

impl AddressSpace for Simple {
    fn backend(&self) -> Backend {
        Backend::Group
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>> {
        Ok(vec![0..=0xffff])
    }

    fn entries_left(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn map(&self, iova: u64, memory: Arc<dyn Mapping>, _: DmaPermission) -> Result<()> {
        dma::check_range(iova, &*memory, 0x1000, &self.iova_ranges()?, None)?;
        self.mapped.lock().unwrap().push(iova);
        Ok(())
    }

    fn unmap(&self, iova: u64) -> Result<()> {
        self.mapped.lock().unwrap().retain(|mapped| *mapped != iova);
        Ok(())
    }
}

impl DeviceFile for Simple {
    fn address(&self) -> PciAddress {
        GPU.parse().unwrap()
    }

    fn space(&self) -> Arc<dyn AddressSpace> {
        Arc::new(Self::default())
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo { regions: 9, irqs: 5, reset: true }
    }

    fn region(&self, index: u32) -> Result<RegionInfo> {
        Err(VfioError::OutOfRegion { region: index, offset: 0, len: 0 })
    }

    fn read(&self, region: u32, offset: u64, _: &mut [u8]) -> Result<()> {
        Err(VfioError::OutOfRegion { region, offset, len: 0 })
    }

    fn write(&self, region: u32, offset: u64, _: &[u8]) -> Result<()> {
        Err(VfioError::OutOfRegion { region, offset, len: 0 })
    }

    fn map(&self, region: u32, offset: u64, len: u64) -> Result<Arc<dyn Mapping>> {
        Err(VfioError::OutOfRegion { region, offset, len })
    }

    fn irq(&self, _: u32) -> Result<IrqInfo> {
        Ok(IrqInfo { count: 0, eventfd: false, maskable: false, noresize: false })
    }

    fn set_triggers(&self, _: u32, _: u32, _: &[IrqTrigger<'_>]) -> Result<()> {
        Ok(())
    }

    fn set_unmask_event(&self, _: u32, _: BorrowedFd<'_>) -> Result<()> {
        Ok(())
    }

    fn disable_irqs(&self, _: u32) -> Result<()> {
        Ok(())
    }

    fn reset(&self) -> Result<()> {
        *self.resets.lock().unwrap() += 1;
        Ok(())
    }

    fn kvm_file(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_simple_device_is_awake_and_nobody_takes_it_away() {
    let device = Simple::default();
    assert!(!device.is_virtual());
    assert!(!device.is_wanted_back());
    device.wake().unwrap();
    let expect = ResetReport { method: None, evidence: ResetEvidence::LinuxReport };
    assert_eq!(device.reset_and_prove().unwrap(), expect);
    assert_eq!(*device.resets.lock().unwrap(), 1, "its own reset is believed");
}

#[test]
fn a_simple_space_maps_all_or_nothing() {
    let space = Simple::default();
    let ranges = |iovas: &[u64]| -> Vec<(u64, Arc<dyn Mapping>)> {
        iovas.iter().map(|&iova| (iova, memory(0x1000) as Arc<dyn Mapping>)).collect()
    };
    AddressSpace::map_all(&space, &ranges(&[0x1000, 0x3000]), DmaPermission::Read).unwrap();
    assert_eq!(*space.mapped.lock().unwrap(), [0x1000, 0x3000]);
    refused(space.map_all(&ranges(&[0x5000, 0x1_0000]), DmaPermission::Read), "no address above 0xffff");
    assert_eq!(*space.mapped.lock().unwrap(), [0x1000, 0x3000]);
    // It does not say where a mapping starts.
    assert_eq!(space.mapped_from(0x1000), None);
}
