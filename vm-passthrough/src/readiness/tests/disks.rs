//! Disks that the host uses: one test for each way.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::PassthroughManager;
use crate::claim::ClaimOptions;
use crate::host::{DiskNode, DiskProbe, DiskState};

/// A disk with two partitions.
fn disk() -> Scene {
    let scene = Scene::new();
    let add = |path, attributes: &[(&str, &str)]| {
        scene.sim.add_child(address(DISK), "block", path, attributes).unwrap();
    };
    add("nvme/nvme0/nvme0n1", &[("dev", "259:0\n"), ("removable", "0\n"), ("size", "4096\n")]);
    add("nvme/nvme0/nvme0n1/nvme0n1p1", &[("dev", "259:1\n"), ("partition", "1\n")]);
    add("nvme/nvme0/nvme0n1/nvme0n1p2", &[("dev", "259:2\n"), ("partition", "2\n")]);
    scene
}

/// A process that has a file open.
fn opened(scene: Scene, path: &str) -> Scene {
    std::fs::create_dir_all(scene.sim.path("proc/4242/fd")).unwrap();
    std::os::unix::fs::symlink(scene.sim.path(path), scene.sim.path("proc/4242/fd/3")).unwrap();
    scene.write("proc/4242/comm", "qemu\n")
}

/// Puts `above` onto `below`.
fn stacked(scene: Scene, below: &str, above: &str) -> Scene {
    if !scene.sim.path(&format!("sys/class/block/{above}")).exists() {
        scene.sim.add_virtual("block", above, &[("dev", &format!("253:{}\n", above.len()))]).unwrap();
    }
    scene.write(&format!("sys/class/block/{below}/holders/{above}/x"), "")
}

/// Asserts that the disk counts as used, and why, and that it is not claimed.
fn used(scene: &Scene, evidence: &[&str]) {
    used_for(scene, evidence, &["umount", "swapoff", "vgchange"]);
}

/// As [`used`], by the host's own system, which nobody unmounts.
fn used_by_system(scene: &Scene, evidence: &[&str]) {
    used_for(scene, evidence, &["leave it with the host", "another device"]);
}

fn used_for(scene: &Scene, evidence: &[&str], fix: &[&str]) {
    scene.check(Code::MountedDisk, Blocks, evidence, fix);
    not_claimed(scene, &scene.sim.plain_host(), "mounted-disk");
}

fn not_claimed(scene: &Scene, host: &Host, code: &str) {
    let mut manager = PassthroughManager::with_host(host.clone()).unwrap();
    let error = manager.claim(address(DISK), &ClaimOptions::default()).unwrap_err().to_string();
    assert!(error.contains(code), "{error}");
    assert_eq!(scene.sim.driver_of(address(DISK)).as_deref(), Some("nvme"));
}

fn free(scene: &Scene) {
    let readiness = scene.explain();
    assert_eq!(readiness.blockers, [], "{readiness}");
}

fn mount(device: &str, point: &str) -> String {
    format!("29 1 {device} / {point} rw,relatime - ext4 /dev/root rw\n")
}

#[test]
fn mounted() {
    let path = "proc/self/mountinfo";
    free(&disk());
    free(&disk().write(path, &mount("8:1", "/")));
    let mounts = mount("259:1", "/boot");
    used_by_system(&disk().write(path, &mounts), &["nvme0n1p1 is mounted on /boot", "/self/mountinfo"]);
    // Mounted on the host, while this process is in a mount namespace of its own.
    used_by_system(&disk().write("proc/1/mountinfo", &mounts), &["/boot"]);
    // The file system has a number of its own, and names its disks.
    let many = "40 1 0:51 / /data rw - bcachefs /dev/sdz:/dev/disk/by-id/x rw\n";
    let scene = disk().write("dev/nvme0n1p2", "").write(path, many);
    free(&scene);
    scene.sim.link("dev/disk/by-id/x", "dev/nvme0n1p2").unwrap();
    used(&scene, &["nvme0n1p2 is mounted on /data"]);
}

#[test]
fn mounted_in_another_namespace() {
    let scene = disk();
    let process = |pid: u32, namespace: &str, mounts: &str| {
        std::fs::create_dir_all(scene.sim.path(&format!("proc/{pid}/ns"))).unwrap();
        let link = scene.sim.path(&format!("proc/{pid}/ns/mnt"));
        std::os::unix::fs::symlink(format!("mnt:[{namespace}]"), link).unwrap();
        scene.sim.write(&format!("proc/{pid}/mountinfo"), mounts).unwrap();
        scene.sim.write(&format!("proc/{pid}/comm"), "postgres\n").unwrap();
    };
    process(1, "1", "");
    process(70, "1", &mount("259:1", "/never-read"));
    process(71, "2", &mount("8:1", "/"));
    free(&scene);
    process(72, "3", &mount("259:1", "/var/db"));
    used(&scene, &["nvme0n1p1 is mounted on /var/db in the mount namespace of process 72 (postgres)"]);
}

#[test]
fn mounts_of_as_many_namespaces_are_read_as_any_host_has() {
    // Of the last three processes, which alone have mounts.
    let with_mount_of = |pid: u32| {
        let scene = disk();
        for pid in 1001..=1000 + 4098 {
            std::fs::create_dir_all(scene.sim.path(&format!("proc/{pid}/ns"))).unwrap();
            let link = scene.sim.path(&format!("proc/{pid}/ns/mnt"));
            std::os::unix::fs::symlink(format!("mnt:[{pid}]"), link).unwrap();
        }
        for last in 5096..=5098 {
            let device = if last == pid { "259:1" } else { "8:1" };
            scene.sim.write(&format!("proc/{last}/mountinfo"), &mount(device, "/srv")).unwrap();
        }
        scene
    };
    let evidence = &["nvme0n1p1 is mounted on /srv in the mount namespace of process 5097"];
    with_mount_of(5097).check(Code::MountedDisk, Blocks, evidence, &["umount"]);
    free(&with_mount_of(5098));
}

#[test]
fn mounted_through_lvm_on_raid() {
    let scene = stacked(stacked(disk(), "nvme0n1p2", "md0"), "md0", "dm-3");
    // Hostile: a holder that holds itself.
    let scene = stacked(scene, "dm-3", "md0")
        .write("sys/class/block/dm-3/dm/name", "vg-root\n")
        .write("proc/self/mountinfo", &mount("253:4", "/"));
    used_by_system(
        &scene,
        &["nvme0n1p2 is held by md0", "md0 is held by dm-3 (vg-root)", "dm-3 (vg-root) is mounted on /"],
    );
}

#[test]
fn a_mapped_disk_that_a_process_has_open() {
    let mapped = |path: &str| {
        let scene = stacked(disk(), "nvme0n1p1", "dm-3").write("sys/class/block/dm-3/dm/name", "vg-vm\n");
        opened(scene, path)
    };
    // With udev the name below mapper is a link, without a node of its own.
    for path in ["dev/dm-3", "dev/mapper/vg-vm"] {
        let scene = mapped(path);
        let readiness = scene.explain();
        let found: Vec<_> = readiness.blockers.iter().map(|b| b.code).collect();
        assert_eq!(found, [Code::MountedDisk, Code::InUse], "{readiness}");
        assert!(readiness.blockers[0].evidence.contains("nvme0n1p1 is held by dm-3 (vg-vm)"), "{readiness}");
        let who = |path: &std::path::Path| format!("process 4242 (qemu) has {} open", path.display());
        let shown = who(&std::path::Path::new("/").join(path));
        assert!(readiness.blockers[1].evidence.contains(&shown), "{readiness}");
        let who = who(&scene.sim.path(path));
        not_claimed(&scene, &scene.sim.plain_host(), "in-use");
        let holders = super::holders(&scene.sim.plain_host(), address(DISK));
        assert!(holders.iter().any(|holder| holder.to_string() == who), "{holders:?}");
    }
    // One that nobody has open holds the disk all the same.
    used(&mapped("dev/dm-4"), &["nvme0n1p1 is held by dm-3 (vg-vm)"]);
}

#[test]
fn part_of_a_raid_that_nobody_uses() {
    used(&stacked(disk(), "nvme0n1p2", "md127"), &["nvme0n1p2 is held by md127"]);
}

#[test]
fn behind_drbd() {
    used(&stacked(disk(), "nvme0n1p2", "drbd0"), &["nvme0n1p2 is held by drbd0"]);
}

#[test]
fn part_of_a_bcache() {
    used(&stacked(disk(), "nvme0n1p2", "bcache0"), &["nvme0n1p2 is held by bcache0"]);
    // A cache is held by nothing that shows.
    used(
        &disk().write("sys/class/block/nvme0n1p2/bcache/block_size", "512\n"),
        &["nvme0n1p2 is part of a bcache"],
    );
}

#[test]
fn swapped_to() {
    let swaps = |device: &str| format!("Filename Type Size Used Priority\n{device} partition 1 0 -2\n");
    used(&disk().write("proc/swaps", &swaps("/dev/nvme0n1p2")), &["nvme0n1p2 is swapped to"]);
    free(&disk().write("proc/swaps", &swaps("/dev/sda2")));
}

#[test]
fn part_of_a_btrfs() {
    let scene = disk().write("sys/fs/btrfs/aaaa-bbbb/devices/nvme0n1p2", "");
    used(&scene, &["nvme0n1p2 is part of a mounted btrfs"]);
}

#[test]
fn part_of_a_zfs_pool() {
    let member = |label: &str| format!("S:disk/by-id/x\nE:ID_FS_LABEL={label}\nE:ID_FS_TYPE=zfs_member\n");
    let scene = disk().write("run/udev/data/b259:1", &member("tank"));
    // Not imported.
    free(&scene);
    let scene = scene.write("proc/spl/kstat/zfs/other/state", "ONLINE\n");
    free(&scene);
    let scene = scene.write("proc/spl/kstat/zfs/tank/state", "ONLINE\n");
    used(&scene, &["nvme0n1p1 is part of the imported ZFS pool tank"]);
    free(&scene.write("run/udev/data/b259:1", "E:ID_FS_LABEL=tank\nE:ID_FS_TYPE=ext4\n"));
}

#[test]
fn exported() {
    let nvme = "sys/kernel/config/nvmet/subsystems/nqn.a";
    let target = |enable: &str| {
        let scene = disk().write("dev/nvme0n1p2", "");
        scene.sim.link("dev/disk/by-id/x", "dev/nvme0n1p2").unwrap();
        scene
            .write(&format!("{nvme}/namespaces/7/device_path"), "/dev/disk/by-id/x\n")
            .write(&format!("{nvme}/namespaces/7/enable"), enable)
    };
    free(&target("0\n"));
    used(&target("1\n"), &["nvme0n1p2 is exported as namespace 7 of the NVMe target nqn.a"]);
    let whole = |path: &str| {
        disk()
            .write(&format!("sys/bus/pci/devices/{DISK}/nvme/nvme0/dev"), "243:0\n")
            .write(&format!("{nvme}/passthru/device_path"), path)
            .write(&format!("{nvme}/passthru/enable"), "1\n")
    };
    used(&whole("/dev/nvme0\n"), &["nvme0 is exported as the NVMe target nqn.a"]);
    free(&whole("/dev/nvme1\n"));
    let lio = |enable: &str| {
        disk()
            .write("sys/kernel/config/target/core/iblock_0/vol/udev_path", "/dev/nvme0n1p1\n")
            .write("sys/kernel/config/target/core/iblock_0/vol/enable", enable)
    };
    free(&lio("0\n"));
    used(&lio("1\n"), &["nvme0n1p1 is exported as the SCSI target iblock_0/vol"]);
}

#[test]
fn behind_a_loop_device() {
    let backed = |file: &str| {
        let scene = disk();
        scene.sim.add_virtual("block", "loop4", &[("dev", "7:4\n")]).unwrap();
        scene.write("sys/class/block/loop4/loop/backing_file", file)
    };
    used(&backed("/dev/nvme0n1p1\n"), &["nvme0n1p1 is behind loop4"]);
    free(&backed("/srv/image\n"));
    free(&backed("/dev/nvme0n1p10\n"));
}

#[test]
fn a_multipath_disk() {
    // The disk is below no function, its path is, which has no node.
    let scene = Scene::new();
    scene.sim.add_child(address(DISK), "block", "nvme/nvme3/nvme3c4n1", &[]).unwrap();
    scene.sim.add_virtual("block", "nvme3n1", &[("dev", "259:7\n")]).unwrap();
    scene.sim.add_virtual("block", "nvme3n1p1", &[("dev", "259:8\n")]).unwrap();
    free(&scene);
    // No parts of it.
    for (name, number) in [("sda", "8:0\n"), ("nvme3n1px", "259:9\n"), ("nvme3n10", "259:10\n")] {
        scene.sim.add_virtual("block", name, &[("dev", number)]).unwrap();
    }
    let path = "proc/self/mountinfo";
    let others = ["8:0", "259:9", "259:10"].map(|number| mount(number, "/srv"));
    let scene = scene.write(path, &others.concat());
    free(&scene);
    let scene = scene.write(path, &mount("259:8", "/srv"));
    used(&scene, &["nvme3n1p1 is mounted on /srv"]);
    used(&scene.write(path, &mount("259:7", "/srv")), &["nvme3n1 is mounted on /srv"]);
}

/// Answers for nodes by their name, free for others, and notes what it was asked.
#[derive(Debug, Default)]
struct FakeProbe {
    answers: BTreeMap<&'static str, DiskState>,
    asked: Mutex<Vec<String>>,
}

impl DiskProbe for FakeProbe {
    fn probe(&self, nodes: &[DiskNode], deadline: Duration) -> Vec<DiskState> {
        assert!(!nodes.is_empty() && deadline > Duration::ZERO);
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut asked = self.asked.lock().unwrap();
        asked.extend(nodes.iter().map(|node| format!("{} {}", name(&node.path), node.number)));
        let answer = |node: &DiskNode| self.answers.get(name(&node.path).as_str()).cloned();
        nodes.iter().map(|node| answer(node).unwrap_or(DiskState::Free)).collect()
    }
}

/// What is found when the Linux kernel answers so, and what it was asked.
fn probed(scene: &Scene, answers: &[(&'static str, DiskState)]) -> (Readiness, Vec<String>, Host) {
    let probe = Arc::new(FakeProbe { answers: answers.iter().cloned().collect(), asked: Mutex::default() });
    let host = scene.sim.plain_host().with_disk_probe(probe.clone());
    let readiness = explain(&host, address(DISK), &scene.options).unwrap();
    let asked = probe.asked.lock().unwrap().clone();
    (readiness, asked, host)
}

#[test]
fn held_by_something_that_no_file_names() {
    use DiskState::{Free, Held};
    fn check(answers: &[(&'static str, DiskState)], expect: &[&str]) {
        let scene = disk();
        let (readiness, asked, host) = probed(&scene, answers);
        assert_eq!(asked, ["nvme0n1 259:0", "nvme0n1p1 259:1", "nvme0n1p2 259:2"]);
        let found: Vec<_> = readiness.blockers.iter().map(|b| (b.code, b.severity)).collect();
        if expect.is_empty() {
            assert_eq!(found, [], "{readiness}");
            return;
        }
        assert_eq!(found, [(Code::MountedDisk, Blocks)], "{readiness}");
        let evidence = &readiness.blockers[0].evidence;
        for name in ["nvme0n1", "nvme0n1p1", "nvme0n1p2"] {
            let told = evidence.contains(&format!("{name} is held by something that no file names"));
            assert_eq!(told, expect.contains(&name), "{name}: {readiness}");
        }
        not_claimed(&scene, &host, "mounted-disk");
    }
    check(&[], &[]);
    check(&[("nvme0n1", Held)], &["nvme0n1"]);
    // Holding a partition keeps others from the disk.
    check(&[("nvme0n1", Held), ("nvme0n1p2", Held), ("nvme0n1p1", Free)], &["nvme0n1p2"]);
}

#[test]
fn what_is_used_is_not_probed_for() {
    let path = "proc/self/mountinfo";
    let (_, asked, _) = probed(&disk().write(path, &mount("259:1", "/boot")), &[]);
    assert_eq!(asked, ["nvme0n1p2 259:2"]);
    let (_, asked, _) = probed(&disk().write(path, &mount("259:0", "/boot")), &[]);
    assert_eq!(asked, [""; 0]);
    let mut scene = disk();
    scene.options.check_open_files = false;
    assert_eq!(probed(&scene, &[]).1, [""; 0]);
    assert_eq!(probed(&Scene::new(), &[]).1, [""; 0]);
}

#[test]
fn what_can_not_be_known_is_told() {
    fn check(scene: &Scene, answers: &[(&'static str, DiskState)], expect: &[&str], asked: usize) {
        let (readiness, nodes, _) = probed(scene, answers);
        assert_eq!(nodes.len(), asked, "{nodes:?}");
        let found: Vec<_> = readiness.blockers.iter().map(|b| (b.code, b.severity)).collect();
        let unchecked = [(Code::Unchecked, Warns)];
        assert_eq!(found, if expect.is_empty() { &[][..] } else { &unchecked }, "{readiness}");
        for part in expect {
            assert!(readiness.blockers[0].evidence.contains(part), "no `{part}` in {readiness}");
        }
    }
    let denied = DiskState::Unknown("Permission denied".into());
    check(&disk(), &[("nvme0n1p1", denied)], &["dev/nvme0n1p1: Permission denied"], 3);
    // Nothing that could wake a drive is done.
    let scene =
        |attribute: &str, value: &str| disk().write(&format!("sys/class/block/nvme0n1/{attribute}"), value);
    check(&scene("removable", "1\n"), &[], &["nvme0n1 is removable", "nvme0n1p1 is removable"], 0);
    check(&scene("removable", "1\n").write("sys/class/block/nvme0n1/size", "0\n"), &[], &[], 0);
    let suspended = format!("sys/bus/pci/devices/{DISK}/nvme/nvme0/power/runtime_status");
    check(&disk().write(&suspended, "suspended\n"), &[], &["nvme0n1p2 is suspended"], 0);
    check(&disk().write(&suspended, "active\n"), &[], &[], 3);
    check(&disk().write(&suspended, "unsupported\n"), &[], &[], 3);
}
