//! What the whole host's files say of who uses disks: mounts in all namespaces, exports, loop devices, ZFS pools.

use std::collections::{BTreeMap, BTreeSet};

use crate::pci::PciFunction;
use crate::{Host, blocks, files};

/// Most mount namespaces that are looked into.
const MOST_NAMESPACES: usize = 4096;

/// What is mounted where.
#[derive(Debug, Default)]
pub(in crate::readiness) struct Mounts {
    /// Mount point by device number, as in `259:1`.
    by_number: BTreeMap<String, String>,
    /// Mount point by the name of the block device. Of file systems that have a number of their own, as one has that is on
    /// several disks, only the source tells.
    by_name: BTreeMap<String, String>,
}

impl Mounts {
    /// Adds those of a `mountinfo` (proc_pid_mountinfo(5)); `whose` follows the mount point where it is reported.
    pub(in crate::readiness) fn add(&mut self, host: &Host, mountinfo: &str, whose: &str) {
        for line in mountinfo.lines() {
            // Mount ID, parent ID, device number, root, mount point; after a hyphen the type and the source.
            let mut words = line.split(' ').skip(2);
            let (Some(device), Some(point)) = (words.next(), words.nth(1)) else { continue };
            let point = || format!("{point}{whose}");
            if device.starts_with("0:") {
                let source =
                    line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(1)).unwrap_or_default();
                // bcachefs names all of its disks.
                for path in source.split(':').filter(|part| part.starts_with("/dev/")) {
                    if let Some(name) = blocks::name_of(host, path) {
                        self.by_name.insert(name, point());
                    }
                }
            }
            self.by_number.insert(device.to_owned(), point());
        }
    }

    /// Where a block device is mounted.
    pub(in crate::readiness) fn of(&self, host: &Host, name: &str, number: &str) -> Option<&str> {
        let by_name =
            || self.by_name.iter().find(|(named, _)| blocks::is_named(host, name, named)).map(|(_, at)| at);
        self.by_number.get(number).or_else(by_name).map(String::as_str)
    }
}

/// Who uses disks without being seen in `class/block`.
#[derive(Debug, Default)]
pub(in crate::readiness) struct DiskFacts {
    /// Mounts of other namespaces, with a process that is in each.
    elsewhere: Mounts,
    /// What uses a block device by its path: what [`blocks::name_of`] answered, and the use.
    users: Vec<(String, String)>,
    /// NVMe controllers that are exported as a whole, `nvme0`, and by what.
    controllers: Vec<(String, String)>,
    /// The imported ZFS pools.
    pools: BTreeSet<String>,
}

impl DiskFacts {
    /// Reads them; `block_devices` are all names in `class/block`.
    pub(in crate::readiness) fn read<'a>(host: &Host, block_devices: impl Iterator<Item = &'a str>) -> Self {
        let mut facts = Self::default();
        facts.read_namespaces(host);
        facts.read_nvme_targets(host);
        facts.read_scsi_targets(host);
        for name in block_devices.filter(|name| name.starts_with("loop")) {
            let path = blocks::directory(host, name).join("loop/backing_file");
            let backing = files::read_trimmed(&path).unwrap_or_default();
            let backing = backing.strip_suffix(" (deleted)").unwrap_or(&backing);
            facts.add_user(host, backing, || format!("is behind {name}"));
        }
        facts.pools =
            files::names(&host.proc.join("spl/kstat/zfs")).unwrap_or_default().into_iter().collect();
        facts
    }

    fn add_user(&mut self, host: &Host, path: &str, what: impl FnOnce() -> String) {
        if let Some(name) = blocks::name_of(host, path) {
            self.users.push((name, what()));
        }
    }

    /// What is mounted in the namespaces that processes are in, beside this process's.
    fn read_namespaces(&mut self, host: &Host) {
        let namespace = |pid: &str| files::link_name(&host.proc.join(pid).join("ns/mnt"));
        let mut seen: BTreeSet<String> = ["self", "1"].into_iter().filter_map(namespace).collect();
        let processes = files::names(&host.proc).unwrap_or_default();
        for pid in processes.iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
            if !namespace(pid).is_some_and(|namespace| seen.insert(namespace)) {
                continue;
            }
            let process = host.proc.join(pid);
            let Ok(Some(mountinfo)) = files::read(&process.join("mountinfo")) else { continue };
            let command = files::read_trimmed(&process.join("comm")).unwrap_or_default();
            self.elsewhere.add(
                host,
                &mountinfo,
                &format!(" in the mount namespace of process {pid} ({command})"),
            );
            if seen.len() > MOST_NAMESPACES {
                break;
            }
        }
    }

    /// Linux's NVMe target, which opens disks without holding them (`configfs`, `drivers/nvme/target/configfs.c`).
    fn read_nvme_targets(&mut self, host: &Host) {
        let subsystems = host.sys.join("kernel/config/nvmet/subsystems");
        for nqn in files::names(&subsystems).unwrap_or_default() {
            let subsystem = subsystems.join(&nqn);
            let enabled = |dir: &std::path::Path| {
                let device = files::read_trimmed(&dir.join("device_path"))?;
                (files::read_trimmed(&dir.join("enable"))? == "1").then_some(device)
            };
            for number in files::names(&subsystem.join("namespaces")).unwrap_or_default() {
                if let Some(device) = enabled(&subsystem.join("namespaces").join(&number)) {
                    self.add_user(host, &device, || {
                        format!("is exported as namespace {number} of the NVMe target {nqn}")
                    });
                }
            }
            let controller =
                enabled(&subsystem.join("passthru")).and_then(|path| blocks::name_of(host, &path));
            self.controllers
                .extend(controller.map(|name| (name, format!("is exported as the NVMe target {nqn}"))));
        }
    }

    /// Linux's SCSI target, LIO (`configfs`, `drivers/target/target_core_configfs.c`).
    fn read_scsi_targets(&mut self, host: &Host) {
        let core = host.sys.join("kernel/config/target/core");
        for adapter in files::names(&core).unwrap_or_default() {
            for name in files::names(&core.join(&adapter)).unwrap_or_default() {
                let store = core.join(&adapter).join(&name);
                let enabled = files::read_trimmed(&store.join("enable")).as_deref() == Some("1");
                let path = files::read_trimmed(&store.join("udev_path")).filter(|_| enabled);
                self.add_user(host, &path.unwrap_or_default(), || {
                    format!("is exported as the SCSI target {adapter}/{name}")
                });
            }
        }
    }

    /// What uses a block device, as the end of a sentence.
    pub(in crate::readiness) fn uses_of<'a>(
        &'a self,
        host: &'a Host,
        name: &'a str,
        number: &str,
    ) -> impl Iterator<Item = String> + 'a {
        let mounted = self.elsewhere.of(host, name, number).map(|point| format!("is mounted on {point}"));
        let users = self.users.iter().filter(|(named, _)| blocks::is_named(host, name, named));
        let pool = self.pool(host, number).map(|pool| format!("is part of the imported ZFS pool {pool}"));
        mounted.into_iter().chain(users.map(|(_, what)| what.clone())).chain(pool)
    }

    /// The imported ZFS pool that a disk is part of, by what udev read from it.
    fn pool(&self, host: &Host, number: &str) -> Option<String> {
        if self.pools.is_empty() || number.is_empty() {
            return None;
        }
        let found = files::read(&host.udev.join(format!("b{number}"))).ok()??;
        let property = |name: &str| {
            found.lines().find_map(|line| line.strip_prefix("E:")?.strip_prefix(name)?.strip_prefix('='))
        };
        if property("ID_FS_TYPE")? != "zfs_member" {
            return None;
        }
        self.pools.get(property("ID_FS_LABEL")?).cloned()
    }

    /// The function's controllers that are exported as a whole.
    pub(in crate::readiness) fn controllers(&self, host: &Host, function: &PciFunction) -> Vec<String> {
        let dir = host.pci_device(function.address).join("nvme");
        let own = self.controllers.iter().filter(|(name, _)| dir.join(name).exists());
        own.map(|(name, what)| format!("{name} {what}")).collect()
    }
}
