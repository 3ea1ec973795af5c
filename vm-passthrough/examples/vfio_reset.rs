//! Opens claimed functions in one DMA address space, puts each to sleep and wakes it, resets it and says what proves it.
//!
//! ```text
//! vfio_reset [--backend iommufd|group] ADDRESS…
//! ```
//!
//! Exits with 1 when a function can't be opened or reset.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::vfio::{
    self, AddressSpace as _, Backend, CONFIG_REGION, DeviceFile as _, DmaPermission, ERR_IRQ, HostMemory,
    MSI_IRQ, MSIX_IRQ, REQ_IRQ, VfioDevice,
};
use vm_passthrough::{PassthroughManager, PciAddress};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (mut functions, mut backend) = (Vec::<PciAddress>::new(), None);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--backend" => {
                backend = match arguments.next().as_deref() {
                    Some("iommufd") => Some(Backend::Iommufd),
                    Some("group") => Some(Backend::Group),
                    other => return Err(format!("--backend takes iommufd or group, not {other:?}").into()),
                };
            }
            text => functions.push(text.parse()?),
        }
    }
    if functions.is_empty() {
        return Err("usage: vfio_reset [--backend iommufd|group] ADDRESS…".into());
    }

    let mut manager = PassthroughManager::new()?;
    for &address in &functions {
        if manager.claimed(address).is_none() {
            manager.claim(address, &ClaimOptions::default())?;
        }
    }
    let space = vfio::open_space(manager.host(), &functions, backend)?;
    println!("back end {}", space.backend());
    // Mapped before any device joins, and still there when they have left.
    let memory = Arc::new(HostMemory::new(0x10_0000)?);
    space.map(0x10_0000, memory.clone(), DmaPermission::ReadWrite)?;

    let mut devices = Vec::new();
    for &address in &functions {
        let device = manager.claimed(address).ok_or("it was just claimed")?.open(&space)?;
        let config = device.region(CONFIG_REGION)?;
        let vectors =
            [MSI_IRQ, MSIX_IRQ, ERR_IRQ, REQ_IRQ].map(|index| device.irq(index).map(|irq| irq.count));
        println!(
            "{address}: config space of {} bytes, MSI, MSI-X, ERR, REQ vectors {vectors:?}",
            config.size
        );
        sleep_and_wake(&device)?;
        let start = Instant::now();
        let report = device.reset_and_prove()?;
        let method = report.method.map_or("the Linux kernel's choice".into(), |method| method.to_string());
        println!("{address}: reset by {method} in {:?}, shown by {:?}", start.elapsed(), report.evidence);
        println!("{address}: {:?} afterwards", device.presence());
        devices.push(device);
    }
    println!("IOVA ranges {:x?}, entries left {:?}", space.iova_ranges()?, space.entries_left()?);
    for device in devices {
        device.close()?;
    }
    space.unmap(0x10_0000)?;
    space.close()?;
    if Arc::strong_count(&memory) != 1 {
        return Err("the address space kept memory that it had unmapped".into());
    }
    Ok(())
}

/// Puts a function that has the power management capability into D3hot and wakes it.
fn sleep_and_wake(device: &VfioDevice) -> Result<(), Box<dyn Error>> {
    let read = |offset: u64| -> vfio::Result<u16> {
        let mut value = [0; 2];
        device.read(CONFIG_REGION, offset, &mut value)?;
        Ok(u16::from_le_bytes(value))
    };
    let mut capability = u64::from(read(0x34)? & 0xfc);
    for _ in 0..48 {
        if capability < 0x40 {
            break;
        }
        let [id, next] = read(capability)?.to_le_bytes();
        if id != 0x01 {
            capability = u64::from(next & 0xfc);
            continue;
        }
        let control = capability + 4;
        device.write(CONFIG_REGION, control, &(read(control)? | 0b11).to_le_bytes())?;
        let asleep = read(control)? & 0b11;
        device.wake()?;
        let awake = read(control)? & 0b11;
        println!("{}: D{asleep} after it was put to sleep, D{awake} after it was woken", device.address());
        if asleep != 3 || awake != 0 {
            return Err("it did not go to sleep and wake".into());
        }
        return Ok(());
    }
    println!("{}: no power management", device.address());
    Ok(())
}
