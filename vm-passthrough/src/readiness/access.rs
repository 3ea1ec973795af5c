//! Whether VFIO is there and this process may use it.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use super::facts::CpuVendor;
use super::{BlockerCode, Case, Severity};
use crate::iommu::{DriverReason, VFIO_DRIVER, is_vfio_driver};
use crate::{PciAddress, files};

pub(super) fn judge(case: &mut Case<'_>) {
    for function in case.taken() {
        let choice = case.vfio_driver(&function);
        if let DriverReason::NotLoaded { module, alias, list } = &choice.reason {
            variant(case, function.address, module, &format!("{alias} in {}", list.display()));
        }
        // Of companions it is said once.
        let of_target = function.address == case.function.address;
        if of_target && choice.reason != DriverReason::Bound {
            driver(case, &choice.driver);
            sysfs(case);
        }
    }
    nodes(case);
}

/// That more can be had for a function than vfio-pci gives.
fn variant(case: &mut Case<'_>, function: PciAddress, module: &str, found: &str) {
    case.add(
        BlockerCode::VfioVariantNotLoaded,
        Severity::Warning,
        function,
        format!("{found} is the alias of {module}, which has registered no driver"),
        format!(
            "load it before the claim: modprobe {module} (at every boot: echo {module} > /etc/modules-load.d/{module}.conf); or \
             ask for vfio-pci by name (--vfio-driver)"
        ),
    );
}

fn driver(case: &mut Case<'_>, name: &str) {
    let registered = case.host.sys.join("bus/pci/drivers").join(name);
    if !is_vfio_driver(name) {
        case.blocker(
            BlockerCode::VfioPciUnavailable,
            format!("{name} was asked for, and is no VFIO driver by its name"),
            "name vfio-pci, or a variant of it, whose names end in -vfio-pci or _vfio_pci; or none, for the best",
        );
        return;
    }
    if registered.exists() {
        return;
    }
    if name != VFIO_DRIVER {
        case.blocker(
            BlockerCode::VfioPciUnavailable,
            format!("{} is missing", registered.display()),
            format!("load it: modprobe {name}; or name another, or none for the best"),
        );
        return;
    }
    let release = release(case);
    let (list, loadable) = has_vfio_module(case);
    let (evidence, remedy) = if loadable {
        (
            format!("{} is missing; {} has the module", registered.display(), list.display()),
            "load it: modprobe vfio-pci (at every boot: echo vfio-pci > /etc/modules-load.d/vfio-pci.conf)"
                .to_owned(),
        )
    } else {
        (
            format!("{} is missing and {} has no vfio-pci", registered.display(), list.display()),
            format!(
                "install the modules of Linux {release}, or a Linux kernel built with CONFIG_VFIO_PCI \
                 (Debian: apt install linux-image-{})",
                match case.facts.vendor {
                    CpuVendor::Arm => "arm64",
                    CpuVendor::Other => "ARCHITECTURE",
                    _ => "amd64",
                }
            ),
        )
    };
    case.blocker(BlockerCode::VfioPciUnavailable, evidence, remedy);
}

/// Returns the release of the running Linux kernel.
fn release(case: &Case<'_>) -> String {
    files::read_trimmed(&case.host.proc.join("sys/kernel/osrelease")).unwrap_or_default()
}

/// Returns the path of the running Linux kernel's list of modules, and whether vfio-pci is in it.
fn has_vfio_module(case: &Case<'_>) -> (PathBuf, bool) {
    let list = case.host.modules.join(release(case)).join("modules.dep");
    let text = files::read(&list).ok().flatten().unwrap_or_default();
    let found = text.lines().any(|line| line.split(':').next().is_some_and(is_vfio_module));
    (list, found)
}

fn is_vfio_module(path: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or_default();
    file.starts_with("vfio-pci.ko") || file.starts_with("vfio_pci.ko")
}

/// The device nodes of one back end, and whether each is there and open to this process.
fn nodes(case: &mut Case<'_>) {
    let dev = &case.host.dev;
    let dir = case.host.pci_device(case.function.address);
    let mut group = vec![dev.join("vfio/vfio")];
    let mut iommufd = vec![dev.join("iommu")];
    // Their own nodes are there only once vfio-pci has them.
    if case.function.driver.as_deref().is_some_and(is_vfio_driver) {
        group.extend(case.function.iommu_group.map(|number| dev.join(format!("vfio/{number}"))));
        for name in files::names(&dir.join("vfio-dev")).unwrap_or_default() {
            iommufd.push(dev.join("vfio/devices").join(name));
        }
        if iommufd.len() == 1 {
            // The Linux kernel has no character devices for functions.
            iommufd.clear();
        }
    }
    let mut there = false;
    let mut denied = Vec::new();
    for backend in [&iommufd, &group] {
        let Ok(stats) = backend.iter().map(std::fs::metadata).collect::<Result<Vec<_>, _>>() else {
            continue;
        };
        if stats.is_empty() {
            continue;
        }
        there = true;
        let closed =
            |stat: &std::fs::Metadata| !case.facts.credentials.may(stat.mode(), stat.uid(), stat.gid(), 6);
        let closed: Vec<_> = backend.iter().zip(&stats).filter(|(_, stat)| closed(stat)).collect();
        if closed.is_empty() {
            return;
        }
        denied.extend(closed.into_iter().map(|(path, stat)| {
            format!("{} ({:o}, owner {})", path.display(), stat.mode() & 0o777, stat.uid())
        }));
    }
    let dev = dev.display();
    if there {
        case.blocker(
            BlockerCode::Permission,
            format!("user {} may not read and write {}", case.facts.credentials.uid, denied.join(", ")),
            format!(
                "run as root, or give the nodes to a group of yours by a udev rule: \
                 SUBSYSTEM==\"vfio\", GROUP=\"kvm\", MODE=\"0660\" (checked: {dev}/vfio, {dev}/iommu)"
            ),
        );
    } else {
        let is_loadable =
            case.host.sys.join("bus/pci/drivers").join(VFIO_DRIVER).exists() || has_vfio_module(case).1;
        // A Linux kernel without character devices for functions has no nodes of the second kind.
        let backends = [&group, &iommufd].into_iter().filter(|nodes| !nodes.is_empty());
        let missing: Vec<_> = backends.map(|nodes| format!("not {}", shown(nodes))).collect();
        case.blocker(
            BlockerCode::VfioNodeMissing,
            format!("no back end of VFIO has all of its device nodes: {}", missing.join(", ")),
            if is_loadable {
                "load the modules: modprobe -a vfio vfio_iommu_type1 (or iommufd); in a container, give it the devices \
                 (--device /dev/vfio)"
            } else {
                "they appear with the VFIO modules, which this Linux kernel lacks"
            },
        );
    }
}

/// A back end's nodes, as in `/dev/vfio/vfio and /dev/vfio/7`.
fn shown(nodes: &[PathBuf]) -> String {
    nodes.iter().map(|node| node.display().to_string()).collect::<Vec<_>>().join(" and ")
}

/// Whether the function can be bound to vfio-pci by this process.
fn sysfs(case: &mut Case<'_>) {
    let sys = &case.host.sys;
    let dir = case.host.pci_device(case.function.address);
    if let Some(directory) = &case.facts.sys_read_only {
        case.blocker(
            BlockerCode::Permission,
            format!("{} is mounted read-only, so no driver can be bound", directory.display()),
            format!(
                "mount -o remount,rw {}; a container needs --privileged, or a claim from outside; a systemd unit with \
                 ProtectKernelTunables=yes needs ReadWritePaths={0}/bus/pci {0}/devices",
                sys.display()
            ),
        );
        return;
    }
    let mut files = vec![dir.join("driver_override"), sys.join("bus/pci/drivers_probe")];
    if let Some(driver) = &case.function.driver {
        files.push(sys.join("bus/pci/drivers").join(driver).join("unbind"));
    }
    let closed: Vec<PathBuf> = files
        .into_iter()
        .filter(|path| {
            std::fs::metadata(path)
                .is_ok_and(|stat| !case.facts.credentials.may(stat.mode(), stat.uid(), stat.gid(), 2))
        })
        .collect();
    if !closed.is_empty() {
        let closed: Vec<_> = closed.iter().map(|path| path.display().to_string()).collect();
        let address = case.function.address;
        case.blocker(
            BlockerCode::Permission,
            format!("user {} may not write {}", case.facts.credentials.uid, closed.join(", ")),
            format!(
                "let root bind it to vfio-pci beforehand, by a persistent claim of {address}; or run as root"
            ),
        );
    }
}
