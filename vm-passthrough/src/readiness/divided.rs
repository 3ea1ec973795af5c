//! Devices that a driver of the host has divided: vGPUs, mediated devices, MIG instances. A guest gets the whole, and so the parts
//! must be gone; a part that is a function of its own is served by the driver that made it.

use super::removal::Spare;
use super::{BlockerCode, Case, Severity};
use crate::iommu::is_vfio_driver;
use crate::pci::{self, Part, PartKind, PciFunction, Sriov};

/// How many parts, or types, are named.
const MOST_SHOWN: usize = 4;

pub(super) fn judge(case: &mut Case<'_>) {
    for function in case.taken() {
        if pci::has_vendor_vgpu(case.host, function.address)
            && !function.driver.as_deref().is_some_and(is_vfio_driver)
        {
            vendor_vgpu(case, &function);
            continue;
        }
        let (mig, virtual_gpus): (Vec<_>, Vec<_>) =
            pci::parts(case.host, function.address).into_iter().partition(|part| part.kind == PartKind::Mig);
        if !virtual_gpus.is_empty() {
            vgpus(case, &function, &virtual_gpus);
        }
        if !mig.is_empty() {
            mig_instances(case, &function, &mig);
        }
    }
}

/// A virtual function that NVIDIA's driver makes a vGPU: bound to vfio-pci it is none.
fn vendor_vgpu(case: &mut Case<'_>, function: &PciFunction) {
    let dir = case.host.pci_device(function.address).join("nvidia");
    let now = pci::parts(case.host, function.address).into_iter().find(|part| part.kind == PartKind::Vgpu);
    let types = pci::vgpu_types(case.host, function.address);
    let names: Vec<_> = types.iter().filter_map(|known| known.name.clone()).collect();
    let evidence = match now.and_then(|part| part.type_name) {
        Some(name) => format!("{} makes it {name}", dir.join("current_vgpu_type").display()),
        None => format!(
            "{} is 0: it has no vGPU, and could have {}",
            dir.join("current_vgpu_type").display(),
            some(&names)
        ),
    };
    let whole = match function.sriov {
        Some(Sriov::Virtual { physical }) => match Spare::addresses(case, &[physical]) {
            Ok(spare) => format!("{} instead, which is the whole GPU", spare.pass()),
            Err(why) => format!("pass another GPU, as {why}"),
        },
        _ => "pass a whole GPU instead".into(),
    };
    case.add(
        BlockerCode::VgpuFunction,
        Severity::Blocker,
        function.address,
        evidence,
        format!(
            "{whole}; a vGPU is served to guests by NVIDIA's own driver, which this program can't use: give it to a guest of \
             libvirt (<hostdev managed='no'>), by NVIDIA's Virtual GPU Software User Guide"
        ),
    );
}

fn vgpus(case: &mut Case<'_>, function: &PciFunction, parts: &[Part]) {
    let names: Vec<_> = parts.iter().map(name).collect();
    let sys = case.host.sys.display();
    let commands = parts.iter().take(MOST_SHOWN).map(|part| match part.kind {
        PartKind::Mdev => format!("echo 1 > {sys}/bus/mdev/devices/{}/remove", part.name),
        _ => format!("echo 0 > {sys}/bus/pci/devices/{}/nvidia/current_vgpu_type", part.function),
    });
    let commands: Vec<_> = commands.collect();
    case.add(
        BlockerCode::VgpusInUse,
        Severity::Blocker,
        function.address,
        format!("it is divided into {}", some(&names)),
        format!("stop the guests that have them, and remove each: {}", commands.join("; ")),
    );
}

fn mig_instances(case: &mut Case<'_>, function: &PciFunction, parts: &[Part]) {
    let names: Vec<_> = parts.iter().map(name).collect();
    let address = function.address;
    let capabilities = case.host.proc.join("driver/nvidia/capabilities");
    case.add(
        BlockerCode::MigInUse,
        Severity::Blocker,
        address,
        format!("it has MIG instances, by {}: {}", capabilities.display(), some(&names)),
        format!(
            "stop what runs in them, and remove them: nvidia-smi mig -i {address} -dci; nvidia-smi mig -i {address} -dgi; a guest \
             that gets the whole GPU divides it itself. A single instance can't be passed to a guest"
        ),
    );
}

fn name(part: &Part) -> String {
    match &part.type_name {
        Some(of) => format!("{} ({of})", part.name),
        None => part.name.clone(),
    }
}

/// The first of them, and how many more there are.
fn some(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        [first @ .., _] if first.len() >= MOST_SHOWN => {
            format!("{} and {} more", names[..MOST_SHOWN].join(", "), names.len() - MOST_SHOWN)
        }
        all => all.join(", "),
    }
}
