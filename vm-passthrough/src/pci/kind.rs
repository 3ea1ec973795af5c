//! What a function is to those who pass devices to guests, from its class, its IDs and its driver.

use super::{DeviceType, PciClass, PciIds};

const AMD: u16 = 0x1022;
const AMD_GRAPHICS: u16 = 0x1002;
const GOOGLE: u16 = 0x1ac1;
const HAILO: u16 = 0x1e60;
const INTEL: u16 = 0x8086;
const NVIDIA: u16 = 0x10de;

/// The type as far as class and IDs tell; `Other` may still turn out to be an accelerator by its driver.
pub(super) fn from_ids(class: PciClass, ids: &PciIds) -> DeviceType {
    match (class.base(), class.subclass(), ids.vendor) {
        (0x03, _, NVIDIA) => DeviceType::GpuNvidia,
        // AMD's data-centre GPUs say that they are processing accelerators.
        (0x03 | 0x12, _, AMD_GRAPHICS) => DeviceType::GpuAmd,
        (0x03, _, INTEL) => DeviceType::GpuIntel,
        _ if is_npu(ids) => DeviceType::Npu,
        (0x12, ..) => DeviceType::Accelerator,
        (0x01, 0x08, _) => DeviceType::Nvme,
        (0x02, ..) => DeviceType::Network,
        (0x06, ..) => DeviceType::Bridge,
        _ => DeviceType::Other,
    }
}

/// The type when `driver` is bound and, where it matters, has made an accel device.
pub(super) fn refine(
    found: DeviceType,
    driver: Option<&str>,
    has_accel: impl FnOnce() -> bool,
) -> DeviceType {
    match (found, driver) {
        (DeviceType::Accelerator | DeviceType::Other, Some("intel_vpu" | "amdxdna")) => DeviceType::Npu,
        (DeviceType::Other, Some(_)) if has_accel() => DeviceType::Accelerator,
        _ => found,
    }
}

/// NPUs that don't tell by their class: Intel's share 0x1200 with FPGA cards, AMD's say "signal processing".
fn is_npu(ids: &PciIds) -> bool {
    matches!(
        (ids.vendor, ids.device),
        (INTEL, 0x7d1d | 0xad1d | 0x643e | 0xb03e | 0xfd3e | 0xd71d)
            | (AMD, 0x1502 | 0x17f0)
            | (GOOGLE, 0x089a)
            | (HAILO, _)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_types() {
        fn check(
            class: u32,
            vendor: u16,
            device: u16,
            driver: Option<&str>,
            accel: bool,
            expect: DeviceType,
        ) {
            let ids = PciIds { vendor, device, subsystem_vendor: 0, subsystem_device: 0, revision: 0 };
            let found = refine(from_ids(PciClass(class), &ids), driver, || accel);
            assert_eq!(found, expect, "{class:06x} {vendor:04x}:{device:04x} {driver:?}");
        }
        use DeviceType::*;
        check(0x03_0000, 0x10de, 0x2684, None, false, GpuNvidia);
        check(0x03_0200, 0x10de, 0x2330, None, false, GpuNvidia);
        check(0x04_0300, 0x10de, 0x22ba, None, false, Other);
        check(0x06_8000, 0x10de, 0x22a3, None, false, Bridge);
        check(0x03_0000, 0x1002, 0x5159, None, false, GpuAmd);
        check(0x03_8000, 0x1002, 0x740c, None, false, GpuAmd);
        check(0x12_0000, 0x1002, 0x74a1, Some("amdgpu"), false, GpuAmd);
        check(0x03_0000, 0x8086, 0x56a0, None, false, GpuIntel);
        check(0x03_0000, 0x1a03, 0x2000, None, false, Other);
        check(0x12_0000, 0x8086, 0x7d1d, None, false, Npu);
        check(0x12_0000, 0x8086, 0x9999, Some("intel_vpu"), true, Npu);
        check(0x12_0000, 0x8086, 0x0b30, Some("dfl-pci"), false, Accelerator);
        check(0x11_8000, 0x1022, 0x1502, None, false, Npu);
        check(0x11_8000, 0x1022, 0x1234, Some("amdxdna"), true, Npu);
        check(0x11_8000, 0x1022, 0x1234, Some("other"), false, Other);
        check(0x12_0000, 0x1da3, 0x1020, Some("habanalabs"), true, Accelerator);
        check(0x0b_4000, 0x1da3, 0x0001, Some("x"), true, Accelerator);
        check(0x0b_4000, 0x1da3, 0x0001, None, true, Other);
        check(0x01_0802, 0x144d, 0xa80a, None, false, Nvme);
        check(0x01_0601, 0x8086, 0xa102, None, false, Other);
        check(0x02_0000, 0x8086, 0x10d3, None, false, Network);
        check(0x06_0400, 0x8086, 0x3420, None, false, Bridge);
    }
}
