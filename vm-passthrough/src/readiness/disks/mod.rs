//! Whether the host uses the disks behind a function, or what is made of them.
//!
//! Files tell most of it, and by whom: mounts, swap, what is stacked on a disk, what exports it. Not all of it: a ZFS pool
//! names its disks nowhere, nor does a mount in a namespace that no process is in. What files say nothing of is asked of
//! the Linux kernel, by the host's [`DiskProbe`](crate::host::DiskProbe).

mod facts;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

pub(super) use facts::{DiskFacts, Mounts};

use super::host_use::below;
use super::{BlockerCode, Case, Severity};
use crate::host::{DiskNode, DiskState};
use crate::pci::PciFunction;
use crate::{blocks, files};

/// Where the host's own system is mounted, without which it does not run or boot.
const SYSTEM_MOUNTS: [&str; 7] = ["/", "/boot", "/boot/efi", "/efi", "/usr", "/var", "/nix"];

/// How long the Linux kernel may take to say whether disks are held.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

pub(super) fn judge(case: &mut Case<'_>, function: &PciFunction) {
    let disks = disks(case, function);
    if disks.is_empty() {
        return;
    }
    let (mut uses, mut used) = (BTreeSet::new(), BTreeSet::new());
    for disk in &disks {
        let found = uses_of(case, disk);
        if !found.is_empty() {
            used.insert(disk.as_str());
            uses.extend(found);
        }
    }
    uses.extend(case.facts.disks(case.host).controllers(case.host, function));
    let mut unknown = Vec::new();
    if case.options.check_open_files {
        probe(case, function, &disks, &used, &mut uses, &mut unknown);
    }
    if !unknown.is_empty() {
        case.unchecked(
            function.address,
            format!("whether something holds its disks is not known: {}", unknown.join("; ")),
            "run this as root, and make sure yourself that nothing uses them (lsblk, fuser)",
        );
    }
    if uses.is_empty() {
        return;
    }
    let has_system = uses.iter().any(|found| {
        let point = found.rsplit_once(" is mounted on ").map(|(_, point)| point);
        point.is_some_and(|point| SYSTEM_MOUNTS.contains(&point))
    });
    let uses: Vec<_> = uses.into_iter().collect();
    let (sys, proc) = (case.host.sys.display(), case.host.proc.display());
    case.add(
        BlockerCode::MountedDisk,
        Severity::Blocker,
        function.address,
        format!("{}, by {sys}/class/block, {proc}/self/mountinfo and {proc}/swaps", uses.join(", ")),
        match has_system {
            true => {
                "leave it with the host, whose own system is on it; pass another device, or one of another IOMMU group"
            }
            false => {
                "unmount it (umount), switch the swap off (swapoff), and stop what is made of it or exports it (vgchange -an, \
                 mdadm --stop, zpool export, losetup -d, targetcli, nvmetcli)"
            }
        },
    );
}

/// The function's disks and their partitions, as `class/block` names them.
fn disks(case: &Case<'_>, function: &PciFunction) -> Vec<String> {
    let mut disks = BTreeSet::new();
    for name in below(&case.facts.blocks, &function.address.to_string()) {
        disks.insert(name.to_owned());
        // A path of a multipath NVMe disk, nvme0c1n1; the disk is nvme0n1, below no function.
        let Some(disk) = multipath_disk(name) else { continue };
        let part = format!("{disk}p");
        let belongs = |name: &str| name == disk || name.strip_prefix(&part).is_some_and(is_number);
        disks.extend(case.facts.blocks.iter().map(|(name, _)| name).filter(|name| belongs(name)).cloned());
    }
    disks.into_iter().collect()
}

/// Who uses a disk or partition, or what is made of it.
pub(super) fn uses_of(case: &Case<'_>, disk: &str) -> Vec<String> {
    let host = case.host;
    let stack = blocks::stack(host, disk);
    let mut uses: Vec<_> = stack
        .iter()
        .map(|(below, above)| {
            format!("{} is held by {}", blocks::shown(host, below), blocks::shown(host, above))
        })
        .collect();
    let all: BTreeSet<&str> =
        std::iter::once(disk).chain(stack.iter().map(|(_, above)| above.as_str())).collect();
    for name in all {
        let shown = blocks::shown(host, name);
        let number = blocks::number(host, name).unwrap_or_default();
        if let Some(point) = case.facts.mounts.of(host, name, &number) {
            uses.push(format!("{shown} is mounted on {point}"));
        } else if case.facts.btrfs.iter().any(|disk| disk == name) {
            uses.push(format!("{shown} is part of a mounted btrfs"));
        }
        let is_swap = |path: &String| {
            let last = path.rsplit('/').next().unwrap_or_default();
            path.starts_with('/') && (last == name || blocks::mapped(host, name).as_deref() == Some(last))
        };
        if case.facts.swaps.iter().any(is_swap) {
            uses.push(format!("{shown} is swapped to"));
        }
        // A disk of a bcache has this directory, a cache among them, which no holder shows.
        if blocks::directory(host, name).join("bcache").exists() {
            uses.push(format!("{shown} is part of a bcache"));
        }
        uses.extend(
            case.facts.disks(host).uses_of(host, name, &number).map(|what| format!("{shown} {what}")),
        );
    }
    uses
}

/// Asks about the disks and partitions that show no use.
fn probe(
    case: &Case<'_>,
    function: &PciFunction,
    disks: &[String],
    used: &BTreeSet<&str>,
    uses: &mut BTreeSet<String>,
    unknown: &mut Vec<String>,
) {
    let Some(probe) = case.host.disk_probe() else { return };
    // A partition's use keeps its disk from being held, and the other way round.
    let whole = |name: &str| whole_disk(case, name);
    let taken: BTreeSet<String> =
        used.iter().map(|name| whole(name).unwrap_or_else(|| (*name).to_owned())).collect();
    let mut asked = Vec::new();
    for name in disks {
        let disk = whole(name);
        let is_used = used.contains(name.as_str())
            || disk.as_ref().map_or_else(|| taken.contains(name), |disk| used.contains(disk.as_str()));
        let Some(number) = blocks::number(case.host, name).filter(|_| !is_used) else { continue };
        match asleep(case, function, disk.as_deref().unwrap_or(name)) {
            Rest::Awake => asked.push((name, disk, DiskNode { path: blocks::node(case.host, name), number })),
            Rest::Empty => {}
            Rest::Asleep(why) => unknown.push(format!("{name} {why}")),
        }
    }
    if asked.is_empty() {
        return;
    }
    let nodes: Vec<DiskNode> = asked.iter().map(|(_, _, node)| node.clone()).collect();
    let states = probe.probe(&nodes, PROBE_DEADLINE);
    let held: BTreeSet<&str> = asked
        .iter()
        .zip(&states)
        .filter(|((_, disk, _), state)| disk.is_some() && **state == DiskState::Held)
        .filter_map(|((_, disk, _), _)| disk.as_deref())
        .collect();
    for ((name, _, node), state) in asked.iter().zip(&states) {
        match state {
            // The Linux kernel holds a disk along with its partitions.
            DiskState::Held if held.contains(name.as_str()) => {}
            DiskState::Held => {
                uses.insert(format!(
                    "{name} is held by something that no file names, as {} can't be opened with O_EXCL (a ZFS pool, a \
                     storage target, a mount namespace without processes)",
                    node.path.display()
                ));
            }
            DiskState::Unknown(why) => unknown.push(format!("{}: {why}", node.path.display())),
            DiskState::Free => {}
        }
    }
    for (name, _, _) in asked.iter().skip(states.len()) {
        unknown.push(format!("{name} was not answered for"));
    }
}

/// Whether a disk can be opened without a change of its state.
enum Rest {
    Awake,
    /// There is no medium in it, so nothing to hold.
    Empty,
    Asleep(&'static str),
}

fn asleep(case: &Case<'_>, function: &PciFunction, disk: &str) -> Rest {
    let dir = blocks::directory(case.host, disk);
    let is =
        |attribute: &str, value: &str| files::read_trimmed(&dir.join(attribute)).as_deref() == Some(value);
    if is("removable", "1") {
        return match is("size", "0") {
            true => Rest::Empty,
            false => Rest::Asleep("is removable, and asking could wake its drive"),
        };
    }
    let is_asleep = |dir: &Path| {
        files::read_trimmed(&dir.join("power/runtime_status"))
            .is_some_and(|state| state.starts_with("suspend"))
    };
    let function = case.host.pci_device(function.address).canonicalize().unwrap_or_default();
    let dir = dir.canonicalize().unwrap_or_default();
    let mut above = dir.ancestors().take_while(|above| above.starts_with(&function));
    match is_asleep(&function) || above.any(is_asleep) {
        true => Rest::Asleep("is suspended, and asking could wake it"),
        false => Rest::Awake,
    }
}

/// The disk that a partition is of.
fn whole_disk(case: &Case<'_>, name: &str) -> Option<String> {
    let dir = blocks::directory(case.host, name);
    if !dir.join("partition").exists() {
        return None;
    }
    let dir = dir.canonicalize().ok()?;
    Some(dir.parent()?.file_name()?.to_str()?.to_owned())
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// `nvme0n1` of `nvme0c1n1`.
fn multipath_disk(name: &str) -> Option<String> {
    let (subsystem, rest) = name.strip_prefix("nvme")?.split_once('c')?;
    let (controller, namespace) = rest.split_once('n')?;
    [subsystem, controller, namespace]
        .into_iter()
        .all(is_number)
        .then(|| format!("nvme{subsystem}n{namespace}"))
}
