//! Power: a function is in D0, and answers, before anything is done with it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::interface::{DeviceFile, Result, VfioError};
use super::{CONFIG_REGION, VfioDevice};
use crate::deadlines::WAKE;
use crate::{Host, PciAddress};

/// How long a function may take from D3hot to D0 (PCI Express Base 6.0, 5.9).
const D3HOT_DELAY: Duration = Duration::from_millis(10);

const PM_CAPABILITY: u8 = 0x01;
const CAPABILITIES_POINTER: u64 = 0x34;
const STATUS: u64 = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;

/// Whether the Linux kernel has the function in D3cold.
pub(super) fn is_cold(host: &Host, address: PciAddress) -> bool {
    std::fs::read_to_string(host.pci_device(address).join("power_state"))
        .is_ok_and(|state| state.trim() == "D3cold")
}

/// Wakes a function and waits until it is in D0 and answers.
pub(super) fn wake(host: &Host, device: &VfioDevice) -> Result<()> {
    wake_until(host, device, Instant::now() + WAKE)
}

/// Wakes a function and waits until it is in D0 and answers, or the deadline.
pub(super) fn wake_until(host: &Host, device: &VfioDevice, deadline: Instant) -> Result<()> {
    let address = device.address();
    if is_cold(host, address) {
        wake_from_cold(host, address, deadline)?;
    }
    wait_until_it_answers(device, deadline)?;
    let Some(capability) = find_capability(device, PM_CAPABILITY)? else { return Ok(()) };
    let control = u64::from(capability) + 4;
    let mut delay = D3HOT_DELAY;
    loop {
        let value = read_u16(device, control)?;
        if value & 0b11 == 0 {
            return wait_until_it_answers(device, deadline);
        }
        if Instant::now() >= deadline {
            return Err(VfioError::Lost {
                address,
                reason: format!(
                    "it stays in D{} (power control reads {value:#06x}); a full power cycle of the host may bring it \
                     back",
                    value & 0b11
                ),
            });
        }
        // vfio-pci catches this write and lets the Linux kernel change the state, with the waits that it needs.
        device.write(CONFIG_REGION, control, &(value & !0b11).to_le_bytes())?;
        sleep(delay);
        delay = (delay * 2).min(Duration::from_millis(200));
    }
}

/// Opening the function resumes it already. Where that did not help, tells the Linux kernel to keep it on.
fn wake_from_cold(host: &Host, address: PciAddress, deadline: Instant) -> Result<()> {
    let control = host.pci_device(address).join("power/control");
    let before = std::fs::read_to_string(&control).unwrap_or_default();
    let lost = |reason: String| VfioError::Lost { address, reason };
    host.writer().write(&control, "on", left(deadline)).map_err(|error| {
        lost(format!("it is in D3cold, and writing `on` to {} failed: {error}", control.display()))
    })?;
    let woken = wait(deadline, || !is_cold(host, address));
    if before.trim() == "auto"
        && let Err(error) = host.writer().write(&control, "auto", D3HOT_DELAY * 100)
    {
        tracing::warn!(%address, %error, "could not give runtime power management back");
    }
    if woken {
        return Ok(());
    }
    Err(lost(
        "it stays in D3cold; turn off runtime power management of it and of the port above it, or boot with \
         pcie_port_pm=off"
            .into(),
    ))
}

/// Waits until config space reads are not all ones, which is what a function that is not ready gives.
fn wait_until_it_answers(device: &VfioDevice, deadline: Instant) -> Result<()> {
    let mut answer = Ok(false);
    let answered = wait(deadline, || {
        let mut class = [0xff; 4];
        answer = device.read(CONFIG_REGION, 0x08, &mut class).map(|()| class != [0xff; 4]);
        matches!(answer, Ok(true) | Err(_)) || device.is_wanted_back()
    });
    match answer {
        Ok(true) if answered => Ok(()),
        Err(error) => Err(error),
        Ok(_) if device.is_wanted_back() => Err(VfioError::WantedBack { address: device.address() }),
        Ok(_) => Err(VfioError::Lost {
            address: device.address(),
            reason: "its config space reads all ones: it is gone, without power, or hung; look at the Linux kernel's \
                     log, then reseat it or power-cycle the host"
                .into(),
        }),
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Asks again and again until `done` or the deadline; at least once.
fn wait(deadline: Instant, mut done: impl FnMut() -> bool) -> bool {
    let mut delay = Duration::from_millis(1);
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        sleep(delay.min(left(deadline)));
        delay = (delay * 2).min(Duration::from_millis(100));
    }
}

fn read_u16(device: &dyn DeviceFile, offset: u64) -> Result<u16> {
    let mut value = [0; 2];
    device.read(CONFIG_REGION, offset, &mut value)?;
    Ok(u16::from_le_bytes(value))
}

/// Where a capability is in config space. The walk ends after as many steps as capabilities fit.
pub(super) fn find_capability(device: &dyn DeviceFile, id: u8) -> Result<Option<u8>> {
    if read_u16(device, STATUS)? & STATUS_CAPABILITIES == 0 {
        return Ok(None);
    }
    let mut pointer = [0; 1];
    device.read(CONFIG_REGION, CAPABILITIES_POINTER, &mut pointer)?;
    let mut offset = pointer[0] & !0b11;
    for _ in 0..(256 - 64) / 4 {
        if offset < 0x40 {
            break;
        }
        let [found, next] = read_u16(device, offset.into())?.to_le_bytes();
        match found {
            0xff => break,
            found if found == id => return Ok(Some(offset)),
            _ => offset = next & !0b11,
        }
    }
    Ok(None)
}
