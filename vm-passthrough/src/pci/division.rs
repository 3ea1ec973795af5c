//! The parts that a device is divided into while a driver of the host has it: mediated devices, NVIDIA's vGPUs on virtual
//! functions, and MIG instances.
//!
//! * Mediated devices (Linux `Documentation/ABI/testing/sysfs-bus-vfio-mdev`): a function that can have some has
//!   `mdev_supported_types/TYPE` with `name` and `available_instances`; each one that there is is a directory `UUID` below the
//!   function, with a link `mdev_type`.
//! * vGPUs of NVIDIA without mediated devices (NVIDIA Virtual GPU Software User Guide, "Creating an NVIDIA vGPU on a Linux with KVM
//!   Hypervisor that Uses a Vendor-Specific VFIO Framework"): a virtual function that NVIDIA's driver has bound has
//!   `nvidia/creatable_vgpu_types`, lines of `ID : NAME`, and `nvidia/current_vgpu_type`, the ID of its vGPU, or 0.
//! * MIG (NVIDIA Multi-Instance GPU User Guide, "Device Nodes and Capabilities"): `/proc/driver/nvidia/capabilities/gpuMINOR/mig` has
//!   a directory `giN` for each GPU instance, and in it `ciN` for each compute instance. MINOR is the `Device Minor` in
//!   `/proc/driver/nvidia/gpus/ADDRESS/information`.
//!
//! No such hardware was at hand: this was written by these documents, and is tested on trees made by them.

use std::path::Path;

use super::{PciAddress, virtual_functions};
use crate::{Host, files};

/// Most entries of a directory that are looked at; a GPU has fewer than a hundred parts, or types.
const MAX_ENTRIES: usize = 1024;

/// A part of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is.
    pub kind: PartKind,
    /// Its name: a UUID, the address of a virtual function, or the numbers of a MIG instance, as in `gi1/ci0`.
    pub name: String,
    /// Its type, where that has a name, as in `NVIDIA L40-1B`.
    pub type_name: Option<String>,
    /// The function that it belongs to: the device itself, or a virtual function of it.
    pub function: PciAddress,
}

/// What a part of a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "kebab-case")]
#[non_exhaustive]
pub enum PartKind {
    /// A mediated device.
    Mdev,
    /// A vGPU that NVIDIA's driver has put on a virtual function.
    Vgpu,
    /// A MIG instance.
    Mig,
}

/// A type of vGPU, or of mediated device, that a function can get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartType {
    /// What is written to have one: the ID of a vGPU type, or the name of a directory.
    pub id: String,
    /// Its name, where it has one.
    pub name: Option<String>,
}

/// The parts that a function, with its virtual functions, is divided into.
pub fn parts(host: &Host, address: PciAddress) -> Vec<Part> {
    let virtual_functions = virtual_functions(host, address);
    let mut parts = mig_instances(host, address);
    for function in std::iter::once(address).chain(virtual_functions).take(MAX_ENTRIES) {
        parts.extend(vgpu(host, function));
        parts.extend(mediated(host, function));
    }
    parts
}

/// Whether NVIDIA's driver makes the function a vGPU, or could: VFIO is served by that driver then.
pub fn has_vendor_vgpu(host: &Host, address: PciAddress) -> bool {
    host.pci_device(address).join("nvidia/current_vgpu_type").exists()
}

/// The vGPU types that a virtual function can get from NVIDIA's driver.
pub fn vgpu_types(host: &Host, address: PciAddress) -> Vec<PartType> {
    let text = files::read(&host.pci_device(address).join("nvidia/creatable_vgpu_types"));
    let text = text.ok().flatten().unwrap_or_default();
    let types = text.lines().take(MAX_ENTRIES).filter_map(|line| {
        let (id, name) = line.split_once(':')?;
        // The first line may name the columns.
        let id: u32 = id.trim().parse().ok()?;
        Some(PartType { id: id.to_string(), name: Some(name.trim().to_owned()) })
    });
    types.collect()
}

/// The types of mediated devices of which a function can get one more.
pub fn mdev_types(host: &Host, address: PciAddress) -> Vec<PartType> {
    let dir = host.pci_device(address).join("mdev_supported_types");
    let names = files::names(&dir).unwrap_or_default().into_iter().take(MAX_ENTRIES);
    let is_available = |id: &String| {
        let left = files::read_trimmed(&dir.join(id).join("available_instances"));
        left.and_then(|left| left.parse::<u64>().ok()).is_some_and(|left| left > 0)
    };
    let of = |id: String| PartType { name: files::read_trimmed(&dir.join(&id).join("name")), id };
    names.filter(is_available).map(of).collect()
}

/// The vGPU on a virtual function.
fn vgpu(host: &Host, function: PciAddress) -> Option<Part> {
    let dir = host.pci_device(function).join("nvidia");
    let id: u32 = files::read_trimmed(&dir.join("current_vgpu_type"))?.parse().ok()?;
    if id == 0 {
        return None;
    }
    // A type of which there can't be more is not listed.
    let known = vgpu_types(host, function).into_iter().find(|known| known.id == id.to_string());
    let type_name = known.and_then(|known| known.name).unwrap_or_else(|| format!("type {id}"));
    Some(Part { kind: PartKind::Vgpu, name: function.to_string(), type_name: Some(type_name), function })
}

/// The mediated devices of a function.
fn mediated(host: &Host, function: PciAddress) -> Vec<Part> {
    let dir = host.pci_device(function);
    // Most functions can have none; theirs are not looked for.
    if !dir.join("mdev_supported_types").exists() {
        return Vec::new();
    }
    let names = files::names(&dir).unwrap_or_default().into_iter().take(MAX_ENTRIES);
    let part = |name: String| {
        let id = files::link_name(&dir.join(&name).join("mdev_type"))?;
        let type_name =
            files::read_trimmed(&dir.join("mdev_supported_types").join(&id).join("name")).unwrap_or(id);
        is_uuid(&name).then_some(Part { kind: PartKind::Mdev, name, type_name: Some(type_name), function })
    };
    names.filter_map(part).collect()
}

fn is_uuid(name: &str) -> bool {
    name.len() == 36 && name.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

/// The MIG instances of a GPU: compute instances, and GPU instances that have none.
fn mig_instances(host: &Host, function: PciAddress) -> Vec<Part> {
    let Some(minor) = nvidia_minor(host, function) else { return Vec::new() };
    let dir = host.proc.join(format!("driver/nvidia/capabilities/gpu{minor}/mig"));
    let mut parts = Vec::new();
    for instance in numbered(&dir, "gi") {
        let computes = numbered(&dir.join(&instance), "ci");
        let names = computes.iter().map(|compute| format!("{instance}/{compute}"));
        let names = names.chain(computes.is_empty().then(|| instance.clone()));
        parts.extend(names.map(|name| Part { kind: PartKind::Mig, name, type_name: None, function }));
    }
    parts
}

/// The number that NVIDIA's driver gave a GPU, as in `/dev/nvidia0`.
pub(crate) fn nvidia_minor(host: &Host, address: PciAddress) -> Option<u32> {
    let path = host.proc.join("driver/nvidia/gpus").join(address.to_string()).join("information");
    let text = files::read(&path).ok()??;
    text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse().ok()
}

/// The entries of a directory that are this prefix and a number, in order of that.
fn numbered(dir: &Path, prefix: &str) -> Vec<String> {
    let names = files::names(dir).unwrap_or_default().into_iter().take(MAX_ENTRIES);
    let mut found: Vec<(u32, String)> =
        names.filter_map(|name| Some((name.strip_prefix(prefix)?.parse().ok()?, name))).collect();
    found.sort();
    found.into_iter().map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimFunction, SimHost};

    const GPU: &str = "0000:01:00.0";
    const VF: &str = "0000:01:00.4";
    const UUID: &str = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    fn sim() -> SimHost {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::gpu(address(GPU)).sriov(4).driver("nvidia")).unwrap();
        sim.add(&SimFunction::gpu(address(VF)).virtual_of(address(GPU)).driver("nvidia")).unwrap();
        sim
    }

    fn shown(sim: &SimHost) -> Vec<String> {
        let show = |part: &Part| {
            format!(
                "{} {} {} {}",
                part.kind,
                part.name,
                part.type_name.as_deref().unwrap_or("-"),
                part.function
            )
        };
        parts(&sim.plain_host(), address(GPU)).iter().map(show).collect()
    }

    #[test]
    fn a_whole_device_has_no_parts() {
        assert_eq!(shown(&sim()), [""; 0]);
        assert!(!has_vendor_vgpu(&sim().plain_host(), address(VF)));
    }

    #[test]
    fn vgpus_on_virtual_functions() {
        let sim = sim();
        let dir = format!("sys/bus/pci/devices/{VF}/nvidia");
        sim.write(
            &format!("{dir}/creatable_vgpu_types"),
            "ID    : vGPU Name\n1428 : NVIDIA H200X-141C\n1414 : NVIDIA H200X-1-18C\nx : y\n:\n",
        )
        .unwrap();
        let host = sim.plain_host();
        for (current, expect) in [
            ("0\n", None),
            ("1414\n", Some("vgpu 0000:01:00.4 NVIDIA H200X-1-18C 0000:01:00.4")),
            ("7\n", Some("vgpu 0000:01:00.4 type 7 0000:01:00.4")),
            ("-1\n", None),
            ("", None),
        ] {
            sim.write(&format!("{dir}/current_vgpu_type"), current).unwrap();
            assert_eq!(shown(&sim), expect.into_iter().collect::<Vec<_>>());
            assert!(has_vendor_vgpu(&host, address(VF)));
        }
        let ids: Vec<_> = vgpu_types(&host, address(VF)).into_iter().map(|known| known.id).collect();
        assert_eq!(ids, ["1428", "1414"]);
    }

    #[test]
    fn mediated_devices() {
        let sim = sim();
        let dir = format!("sys/bus/pci/devices/{GPU}");
        let types = format!("{dir}/mdev_supported_types");
        for (id, name, left) in [("nvidia-63", "GRID P4-1Q", "7"), ("nvidia-64", "GRID P4-2Q", "0")] {
            sim.write(&format!("{types}/{id}/name"), name).unwrap();
            sim.write(&format!("{types}/{id}/available_instances"), left).unwrap();
        }
        let host = sim.plain_host();
        let one = PartType { id: "nvidia-63".into(), name: Some("GRID P4-1Q".into()) };
        assert_eq!(mdev_types(&host, address(GPU)), [one]);
        assert_eq!(shown(&sim), [""; 0]);
        sim.link(&format!("{dir}/{UUID}/mdev_type"), &format!("{types}/nvidia-63")).unwrap();
        sim.link(&format!("{dir}/power/mdev_type"), &format!("{types}/nvidia-63")).unwrap();
        assert_eq!(shown(&sim), [format!("mdev {UUID} GRID P4-1Q {GPU}")]);
    }

    #[test]
    fn mig_instances_in_order_of_their_numbers() {
        let sim = sim();
        sim.write(&format!("proc/driver/nvidia/gpus/{GPU}/information"), "Model: x\nDevice Minor: \t 2\n")
            .unwrap();
        for path in [
            "gpu2/mig/gi10/ci0",
            "gpu2/mig/gi1/ci1",
            "gpu2/mig/gi1/ci0",
            "gpu2/mig/gi3",
            "gpu2/mig/gix/ci0",
            "gpu0/mig/gi1/ci0",
        ] {
            sim.write(&format!("proc/driver/nvidia/capabilities/{path}/access"), "DeviceFileMinor: 3\n")
                .unwrap();
        }
        let names: Vec<_> =
            parts(&sim.plain_host(), address(GPU)).into_iter().map(|part| part.name).collect();
        assert_eq!(names, ["gi1/ci0", "gi1/ci1", "gi3", "gi10/ci0"]);
        assert_eq!(shown(&sim)[0], format!("mig gi1/ci0 - {GPU}"));
    }
}
