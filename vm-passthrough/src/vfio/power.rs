//! Power: a function is in D0, and answers, before anything is done with it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::interface::{DeviceFile, Result, VfioError};
use super::{CONFIG_REGION, VfioDevice};
use crate::deadlines::WAKE;
use crate::pci::config::{ConfigState, walk_capabilities};
use crate::pci::regs;
use crate::{Host, PciAddress};

/// How long a function may take from D3hot to D0 (PCI Express Base 6.0, 5.9).
const D3HOT_DELAY: Duration = Duration::from_millis(10);

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
    let capabilities = walk_capabilities(|offset| read_u16(device, offset))?;
    let Some(capability) = capabilities.iter().find(|capability| capability.id == regs::CAP_ID_PM) else {
        return Ok(());
    };
    let control = u16::from(capability.offset) + regs::PM_CTRL;
    let mut delay = D3HOT_DELAY;
    loop {
        let value = read_u16(device, control)?;
        let state = value & regs::PM_CTRL_STATE_MASK;
        if state == 0 {
            return wait_until_it_answers(device, deadline);
        }
        if Instant::now() >= deadline {
            return Err(VfioError::Lost {
                address,
                reason: format!(
                    "it stays in D{state} (power control reads {value:#06x}); a full power cycle of the host may bring \
                     it back"
                ),
            });
        }
        // vfio-pci catches this write and lets the Linux kernel change the state, with the waits that it needs.
        device.write(CONFIG_REGION, control.into(), &(value - state).to_le_bytes())?;
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

/// Waits until config space reads as that of a function that is ready.
fn wait_until_it_answers(device: &VfioDevice, deadline: Instant) -> Result<()> {
    // VFIO returns the IDs that Linux knows, and reads the rest from the function.
    let mut answer = Ok(ConfigState::Absent);
    let answered = wait(deadline, || {
        let mut header = [0xff; ConfigState::LEN];
        answer = device
            .read(CONFIG_REGION, 0, &mut header)
            .map(|()| ConfigState::of(&header, false).unwrap_or(ConfigState::Absent));
        matches!(answer, Ok(ConfigState::Alive) | Err(_)) || device.is_wanted_back()
    });
    match answer {
        Ok(ConfigState::Alive) if answered => Ok(()),
        Err(error) => Err(error),
        Ok(_) if device.is_wanted_back() => Err(VfioError::WantedBack { address: device.address() }),
        Ok(state) => Err(VfioError::Lost {
            address: device.address(),
            reason: format!(
                "its config space {state}: it is gone, without power, or hung; look at the Linux kernel's log, then reseat it or \
                 power-cycle the host"
            ),
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

fn read_u16(device: &dyn DeviceFile, offset: u16) -> Result<u16> {
    let mut value = [0; 2];
    device.read(CONFIG_REGION, offset.into(), &mut value)?;
    Ok(u16::from_le_bytes(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_asks_until_it_is_done_or_over() {
        let ask = |deadline: Instant, answers: &[bool]| {
            let mut asked = 0;
            let done = wait(deadline, || {
                asked += 1;
                answers[asked - 1]
            });
            (done, asked)
        };
        let now = Instant::now();
        let later = now + WAKE;
        assert_eq!(ask(later, &[true]), (true, 1));
        assert_eq!(ask(later, &[false, false, true]), (true, 3));
        // At least once.
        assert_eq!(ask(now, &[true]), (true, 1));
        assert_eq!(ask(now, &[false]), (false, 1));
    }
}
