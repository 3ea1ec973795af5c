//! The class `SYS/class/accel`: a link for each device, whose `device` leads to the PCI function or platform device.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use crate::{NpuDevice, NpuError, NpuKind, Roots};

/// Most devices that are looked at; the subsystem has 256 minor numbers.
const MAX_DEVICES: usize = 1024;
/// Most bytes of a file; the longest has 7.
const MAX_BYTES: u64 = 64;
/// Most characters of a name.
const MAX_NAME: usize = 64;

/// Every device of the subsystem, in the order of its number. What of a device can't be read, as of one that has just
/// gone, is left out.
///
/// # Errors
/// [`NpuError::NoDriver`] where there is no such subsystem; [`NpuError::Read`].
pub fn devices(roots: &Roots) -> Result<Vec<NpuDevice>, NpuError> {
    let class = roots.sys.join("class/accel");
    let entries = match fs::read_dir(&class) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(NpuError::NoDriver { path: class });
        }
        Err(source) => return Err(NpuError::Read { path: class, source }),
    };
    let mut devices = Vec::new();
    for entry in entries.take(MAX_DEVICES) {
        let entry = entry.map_err(|source| NpuError::Read { path: class.clone(), source })?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("accel")?.parse().ok());
        if let Some(number) = number {
            devices.push(device(roots, number, &entry.path().join("device")));
        }
    }
    devices.sort_unstable_by_key(|device| device.number);
    Ok(devices)
}

fn device(roots: &Roots, number: u32, path: &Path) -> NpuDevice {
    let driver = link(&path.join("driver"));
    let is_pci = link(&path.join("subsystem")).as_deref() == Some("pci");
    let id = |name| u16::from_str_radix(read(&path.join(name))?.trim().strip_prefix("0x")?, 16).ok();
    NpuDevice {
        number,
        kind: driver.as_deref().map_or(NpuKind::Other, NpuKind::of_driver),
        driver,
        address: if is_pci { link(path).filter(|name| is_address(name)) } else { None },
        ids: if is_pci { id("vendor").zip(id("device")) } else { None },
        node: Some(roots.dev.join(format!("accel/accel{number}"))),
        provider: None,
        emulated: None,
    }
}

/// Whether a name is a PCI address: `0000:00:0b.0`.
fn is_address(name: &str) -> bool {
    let fields: Vec<_> = name.split([':', '.']).collect();
    let [domain, bus, device, function] = fields[..] else { return false };
    let is_hex = |field: &str, lengths: std::ops::RangeInclusive<usize>| {
        lengths.contains(&field.len()) && field.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    is_hex(domain, 4..=8) && is_hex(bus, 2..=2) && is_hex(device, 2..=2) && is_hex(function, 1..=1)
}

/// The last part of where a link leads, as one short line.
fn link(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    let name = target.file_name()?.to_string_lossy();
    let shown = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    Some(name.chars().take(MAX_NAME).map(shown).collect())
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A device of a fake tree: what it is called, its bus, its driver, its vendor and device ID.
    type Fake<'a> = (&'a str, &'a str, &'a str, Option<&'a str>, &'a str, &'a str);

    fn list(fakes: &[Fake<'_>]) -> Vec<NpuDevice> {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        fs::create_dir_all(sys.join("class/accel")).unwrap();
        for (name, device, bus, driver, vendor, id) in fakes {
            let device = sys.join("devices").join(device);
            fs::create_dir_all(&device).unwrap();
            symlink(sys.join("bus").join(bus), device.join("subsystem")).unwrap();
            if let Some(driver) = driver {
                symlink(sys.join("bus").join(bus).join("drivers").join(driver), device.join("driver"))
                    .unwrap();
            }
            fs::write(device.join("vendor"), vendor).unwrap();
            fs::write(device.join("device"), id).unwrap();
            let accel = device.join("accel").join(name);
            fs::create_dir_all(&accel).unwrap();
            symlink(&device, accel.join("device")).unwrap();
            symlink(&accel, sys.join("class/accel").join(name)).unwrap();
        }
        let roots = Roots { sys, dev: "/dev".into() };
        devices(&roots).unwrap()
    }

    #[test]
    fn devices_are_found_with_what_they_are() {
        let found = list(&[
            ("accel1", "0000:c5:00.1", "pci", Some("amdxdna"), "0x1022\n", "0x17f0\n"),
            ("accel0", "0000:00:0b.0", "pci", Some("intel_vpu"), "0x8086\n", "0x7d1d\n"),
            ("accel2", "fdab0000.npu", "platform", Some("rocket"), "", ""),
            ("other", "0000:00:0c.0", "pci", None, "0x8086\n", "0x1\n"),
        ]);
        let shown: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "Intel NPU accel0 at 0000:00:0b.0",
                "AMD XDNA NPU accel1 at 0000:c5:00.1",
                "Rockchip NPU accel2"
            ]
        );
        assert_eq!(found[0].ids, Some((0x8086, 0x7d1d)));
        assert_eq!(found[0].node.as_deref(), Some(Path::new("/dev/accel/accel0")));
        assert_eq!(found[2].ids, None);
        let told = |index: usize| found[index].no_provider().to_string();
        assert!(told(0).contains("onnxruntime-ep-openvino"), "{}", told(0));
        assert!(told(2).ends_with("run the model elsewhere"), "{}", told(2));
    }

    #[test]
    fn hostile_values_are_left_out_or_cut() {
        let long = "d".repeat(200);
        let found = list(&[
            ("accel0", "evil\n0000:00:0b.0", "pci", Some("a\x1b[2J"), "0xfffff\n", "zzz"),
            ("accel99999999999", "x", "pci", None, "", ""),
            ("accel7", "0000:00:0d.0", "pci", Some(&long), "", ""),
        ]);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].address.as_ref(), found[0].ids), (None, None));
        assert_eq!(found[0].driver.as_deref(), Some("a\u{fffd}[2J"));
        assert_eq!(found[0].kind, NpuKind::Other);
        assert_eq!(found[1].driver.as_ref().map(String::len), Some(MAX_NAME));
        let nowhere = Roots { sys: "/nowhere".into(), dev: "/dev".into() };
        assert!(matches!(devices(&nowhere), Err(NpuError::NoDriver { .. })));
    }

    #[test]
    fn addresses() {
        let check = |name: &str, expect: bool| assert_eq!(is_address(name), expect, "{name}");
        check("0000:00:0b.0", true);
        check("10000:e1:00.7", true);
        check("", false);
        check("fdab0000.npu", false);
        check("0000:00:0b", false);
        check("0000:00:0b.0.0", false);
        check("00g0:00:0b.0", false);
    }
}
