//! The link between a root port and the device in its slot: the port reports the speed and the lanes that the device's own link has on
//! the host, now and each time that it is read, as both ends of a link agree. Drivers take the least of the two for their bandwidth.
//!
//! What the port could do is never less than what the device can, and otherwise 32 GT/s and 16 lanes. It is not 64 GT/s for all
//! devices, as drivers that don't know that speed (amdgpu is one) take it for the lowest.

use serde::{Deserialize, Serialize};
use vm_passthrough::PassthroughDevice;
use vm_passthrough::pci::config::walk_capabilities;
use vm_passthrough::pci::{Link, regs};

use super::ConfigSpace;

/// What Link Capabilities and Link Status have in common: a code of the speed (bits 0 to 3) and the lanes (bits 4 to 9) (PCI Express
/// Base 6.0, 7.5.3.6 and 7.5.3.8).
const SPEED: u16 = 0xf;
const LANES: u16 = 0x3f << 4;
/// 32 GT/s, 16 lanes.
const USUAL: u16 = 5 | 16 << 4;
/// The fastest that has a code: 64 GT/s.
const FASTEST: u16 = 6;
/// Max_Payload_Size, in Device Capabilities and in Device Control (7.5.3.3 and 7.5.3.4).
const PAYLOAD_SUPPORTED: u32 = 7;
const PAYLOAD_SHIFT: u16 = 5;

/// The link of a device as registers have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DeviceLink {
    /// The most that it can do.
    most: u16,
    /// What it does now; 0 where that is not known.
    now: u16,
}

impl DeviceLink {
    /// That of a function that a scan found.
    pub(super) fn found(link: Link) -> Self {
        let register = |speed: u32, lanes: u8| {
            let code = match speed {
                2_500 => 1,
                5_000 => 2,
                8_000 => 3,
                16_000 => 4,
                32_000 => 5,
                64_000 => FASTEST,
                _ => 0,
            };
            code | u16::from(lanes) << 4 & LANES
        };
        Self { most: register(link.max_speed, link.max_width), now: register(link.speed, link.width) }
    }

    /// That of a function which a guest has; `None` for one without a link.
    pub(super) fn of(device: &dyn PassthroughDevice) -> Option<Self> {
        let express = express_of(device)?;
        let [most, now] =
            [regs::EXP_LNKCAP, regs::EXP_LNKSTA].map(|register| read(device, express + register));
        Some(Self { most: most & (SPEED | LANES), now: now & (SPEED | LANES) })
    }
}

/// Puts what a port with the PCI Express capability at `express` reports of its link into its registers; no link where it is not
/// `active`.
pub(super) fn show(config: &mut ConfigSpace, express: u16, active: bool, device: Option<DeviceLink>) {
    let device = device.unwrap_or(DeviceLink { most: 0, now: 0 });
    let is_real = |link: u16| (1..=FASTEST).contains(&(link & SPEED)) && link & LANES != 0;
    let most = if is_real(device.most) { device.most } else { 0 };
    let most = (most & SPEED).max(USUAL & SPEED) | (most & LANES).max(USUAL & LANES);
    let now = match active {
        true if is_real(device.now) => device.now | regs::EXP_LNKSTA_DLLLA,
        // It holds nothing back.
        true => most | regs::EXP_LNKSTA_DLLLA,
        false => 0,
    };
    let rest = config.u32(express + regs::EXP_LNKCAP) & !u32::from(SPEED | LANES);
    config.set(express + regs::EXP_LNKCAP, &(rest | u32::from(most)).to_le_bytes());
    config.set(express + regs::EXP_LNKSTA, &now.to_le_bytes());
    // Supported Link Speeds Vector: each up to that.
    config.set(express + regs::EXP_LNKCAP2, &(((1u32 << (most & SPEED)) - 1) << 1).to_le_bytes());
}

/// The code of the payload that the host has a device send, 0 where none is set.
pub(super) fn payload_of(device: &dyn PassthroughDevice) -> u16 {
    express_of(device).map_or(0, |express| read(device, express + regs::EXP_DEVCTL) >> PAYLOAD_SHIFT & 7)
}

/// Sets the payload of a port, and that it has no larger one. A guest then leaves its devices at what the host's path takes: with
/// larger ones they would be beyond it, and drivers program some devices with what they find.
pub(super) fn set_payload(config: &mut ConfigSpace, express: u16, payload: u16) {
    // 6 and 7 are reserved.
    let payload = if payload <= 5 { payload } else { 0 };
    let capabilities = config.u32(express + regs::EXP_DEVCAP) & !PAYLOAD_SUPPORTED;
    config.set(express + regs::EXP_DEVCAP, &(capabilities | u32::from(payload)).to_le_bytes());
    let control = config.u16(express + regs::EXP_DEVCTL) & !(7 << PAYLOAD_SHIFT);
    config.set(express + regs::EXP_DEVCTL, &(control | payload << PAYLOAD_SHIFT).to_le_bytes());
}

/// Where a function has its PCI Express capability.
fn express_of(device: &dyn PassthroughDevice) -> Option<u16> {
    let found = walk_capabilities(|offset| Ok::<_, std::convert::Infallible>(read(device, offset)));
    let found = found.unwrap_or_else(|never| match never {});
    found.into_iter().find(|capability| capability.id == regs::CAP_ID_EXP).map(|found| found.offset.into())
}

fn read(device: &dyn PassthroughDevice, offset: u16) -> u16 {
    let mut data = [0; 2];
    device.config_read(offset, &mut data);
    u16::from_le_bytes(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPRESS: u16 = 0x40;

    fn link(speed: u32, width: u8, max_speed: u32, max_width: u8) -> Option<DeviceLink> {
        Some(DeviceLink::found(Link { speed, width, max_speed, max_width }))
    }

    #[test]
    fn a_port_reports_the_link_of_its_device_and_could_do_no_less() {
        /// Speed and lanes that the port has at most, and has now, and the speeds that it says it supports.
        fn check(active: bool, device: Option<DeviceLink>, most: (u16, u16), now: (u16, u16), speeds: u32) {
            let mut config = ConfigSpace::new();
            config.set(EXPRESS + regs::EXP_LNKCAP, &(u32::MAX).to_le_bytes());
            show(&mut config, EXPRESS, active, device);
            let parts = |link: u16| (link & SPEED, (link & LANES) >> 4);
            let (capabilities, status) =
                (config.u32(EXPRESS + regs::EXP_LNKCAP), config.u16(EXPRESS + regs::EXP_LNKSTA));
            assert_eq!(parts(capabilities as u16), most, "{device:x?}");
            assert_eq!(capabilities >> 10, u32::MAX >> 10, "all else stays");
            assert_eq!(parts(status), now, "{device:x?}");
            assert_eq!(status & regs::EXP_LNKSTA_DLLLA != 0, active);
            assert_eq!(config.u32(EXPRESS + regs::EXP_LNKCAP2), speeds);
        }
        check(false, None, (5, 16), (0, 0), 0x3e);
        // Nothing is known of the link, as of a conventional device, or of one that has gone.
        check(true, None, (5, 16), (5, 16), 0x3e);
        check(true, link(0, 0, 8_000, 4), (5, 16), (5, 16), 0x3e);
        check(true, Some(DeviceLink { most: SPEED | LANES, now: SPEED | LANES }), (5, 16), (5, 16), 0x3e);
        // Slower and narrower than it could be.
        check(true, link(2_500, 4, 8_000, 8), (5, 16), (1, 4), 0x3e);
        check(true, link(32_000, 16, 32_000, 16), (5, 16), (5, 16), 0x3e);
        check(true, link(64_000, 16, 64_000, 32), (6, 32), (6, 16), 0x7e);
        check(false, link(64_000, 16, 64_000, 16), (6, 16), (0, 0), 0x7e);
    }

    #[test]
    fn a_payload_is_set_and_is_the_largest() {
        fn check(payload: u16, expect: u16) {
            let mut config = ConfigSpace::new();
            config.set(EXPRESS + regs::EXP_DEVCAP, &0x8003u32.to_le_bytes());
            config.set(EXPRESS + regs::EXP_DEVCTL, &0x202fu16.to_le_bytes());
            set_payload(&mut config, EXPRESS, payload);
            assert_eq!(config.u32(EXPRESS + regs::EXP_DEVCAP), 0x8000 | u32::from(expect));
            assert_eq!(config.u16(EXPRESS + regs::EXP_DEVCTL), 0x200f | expect << 5);
        }
        check(0, 0);
        check(2, 2);
        check(5, 5);
        check(7, 0);
    }
}
