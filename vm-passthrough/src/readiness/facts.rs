//! What is true of the whole host and bears on every function: mounts, swap, routes, limits, credentials.

use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use super::Case;
use super::disks::{DiskFacts, Mounts};
use super::tunnel::Tunnels;
use crate::iommu::VfioDrivers;
use crate::{Host, files};

/// Read once, judged for many functions.
#[derive(Debug, Default)]
pub(super) struct HostFacts {
    /// Mounts that this process and the host's first one see.
    pub(super) mounts: Mounts,
    /// Who else may use disks, read when a function has any.
    disks: OnceLock<DiskFacts>,
    /// The directory of sysfs that is mounted read-only, of those through which drivers are bound.
    pub(super) sys_read_only: Option<PathBuf>,
    /// Devices that are swapped to, as in `/dev/dm-1`.
    pub(super) swaps: Vec<String>,
    /// Network interfaces that default routes go through, with the file that says so.
    pub(super) default_routes: Vec<(String, PathBuf)>,
    /// Every block device and network interface: its name, and where its directory is.
    pub(super) blocks: Vec<(String, PathBuf)>,
    pub(super) nets: Vec<(String, PathBuf)>,
    /// DRM devices and framebuffers, in the same way.
    pub(super) displays: Vec<(String, PathBuf)>,
    /// Serial consoles of the host: the name, where its directory is, and the file that names it.
    pub(super) consoles: Vec<(String, PathBuf, PathBuf)>,
    /// Block devices that mounted btrfs file systems are on.
    pub(super) btrfs: Vec<String>,
    /// Address ranges of `iomem`, with their names, outer ones first.
    pub(super) resources: Vec<(u64, u64, String)>,
    pub(super) credentials: Credentials,
    pub(super) memlock: Option<Memlock>,
    /// How many files this process may have open, `None` when there is no limit or it is not known.
    pub(super) open_files: Option<u64>,
    /// Bits of a physical address.
    pub(super) physical_bits: Option<u8>,
    pub(super) vendor: CpuVendor,
    /// Whether this host is itself a virtual machine, and has no firmware setup and no slots of its own.
    pub(super) is_virtual: bool,
    /// Bytes of RAM in all, and those that can be had without swapping; `None` where it is not known.
    pub(super) total_memory: Option<u64>,
    pub(super) available_memory: Option<u64>,
    /// The least memory that a cgroup of this process may have, and the file that says so.
    pub(super) memory_limit: Option<(u64, PathBuf)>,
    /// Which VFIO drivers there are for which functions.
    pub(super) vfio_drivers: VfioDrivers,
    /// What is behind USB4 tunnels, read when a function may be.
    tunnels: OnceLock<Result<Tunnels, String>>,
    /// What could not be read, and why.
    unread: Vec<(PathBuf, String)>,
}

/// Who makes the CPUs, and so what the IOMMU is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CpuVendor {
    Intel,
    Amd,
    Arm,
    #[default]
    Other,
}

/// Who this process is to the Linux kernel.
#[derive(Debug, Default)]
pub(super) struct Credentials {
    pub(super) uid: u32,
    pub(super) groups: Vec<u32>,
    capabilities: u64,
}

/// Capability numbers (Linux `include/uapi/linux/capability.h`).
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_IPC_LOCK: u32 = 14;

impl Credentials {
    fn has(&self, capability: u32) -> bool {
        self.capabilities >> capability & 1 != 0
    }

    /// Whether locked memory is not counted against the limit.
    pub(super) fn locks_freely(&self) -> bool {
        self.has(CAP_IPC_LOCK)
    }

    /// Whether it may open a file with these permissions, `want` being bits of 4 (read) and 2 (write).
    pub(super) fn may(&self, mode: u32, owner: u32, group: u32, want: u32) -> bool {
        let class = match () {
            () if self.has(CAP_DAC_OVERRIDE) => return true,
            () if owner == self.uid => mode >> 6,
            () if self.groups.contains(&group) => mode >> 3,
            () => mode,
        };
        class & want == want
    }
}

/// `RLIMIT_MEMLOCK`, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memlock {
    /// The limit, `None` when there is none.
    pub(super) limit: Option<u64>,
    /// What the process has locked.
    pub(super) locked: u64,
}

impl HostFacts {
    pub(super) fn read(host: &Host) -> Self {
        let mut facts = Self::default();
        facts.read_mounts(host);
        facts.read_routes(host);
        facts.read_process(host);
        facts.read_cpu(host);
        facts.read_memory(host);
        facts.vfio_drivers = VfioDrivers::read(host);
        facts.swaps = facts
            .text_if_any(host.proc.join("swaps"))
            .lines()
            .skip(1)
            .filter_map(|line| line.split_ascii_whitespace().next())
            .map(str::to_owned)
            .collect();
        facts.blocks = links(&host.sys.join("class/block"));
        facts.nets = links(&host.sys.join("class/net"));
        facts.displays = links(&host.sys.join("class/drm"));
        facts.displays.extend(links(&host.sys.join("class/graphics")));
        facts.read_consoles(host);
        // A directory with the file system's UUID is there while it is mounted.
        let btrfs = host.sys.join("fs/btrfs");
        for uuid in files::names(&btrfs).unwrap_or_default() {
            facts.btrfs.extend(files::names(&btrfs.join(uuid).join("devices")).unwrap_or_default());
        }
        for line in files::read(&host.proc.join("iomem")).ok().flatten().unwrap_or_default().lines() {
            facts.resources.extend(resource(line));
        }
        facts
    }

    /// Who else may use disks.
    pub(super) fn disks(&self, host: &Host) -> &DiskFacts {
        self.disks.get_or_init(|| DiskFacts::read(host, self.blocks.iter().map(|(name, _)| name.as_str())))
    }

    /// What is behind USB4 tunnels.
    pub(super) fn tunnels(&self, host: &Host) -> Result<&Tunnels, &String> {
        self.tunnels.get_or_init(|| Tunnels::read(host)).as_ref()
    }

    /// Text of a file that every host has; its absence is noted.
    fn text(&mut self, path: PathBuf) -> String {
        let reason = match files::read(&path) {
            Ok(Some(text)) => return text,
            Ok(None) => "there is no such file".into(),
            Err(error) => error.to_string(),
        };
        self.unread.push((path, reason));
        String::new()
    }

    /// Text of a file that a host has only if its Linux kernel can do what it tells of: without swapping there is no
    /// `/proc/swaps`.
    fn text_if_any(&mut self, path: PathBuf) -> String {
        match files::read(&path) {
            Ok(text) => text.unwrap_or_default(),
            Err(error) => {
                self.unread.push((path, error.to_string()));
                String::new()
            }
        }
    }

    fn read_mounts(&mut self, host: &Host) {
        let own = self.text(host.proc.join("self/mountinfo"));
        // What the host's own mount namespace has, when this process is in another one and may look.
        let first = files::read(&host.proc.join("1/mountinfo")).ok().flatten().unwrap_or_default();
        for (text, is_own) in [(&first, false), (&own, true)] {
            self.mounts.add(host, text, "");
            if is_own {
                self.sys_read_only = ["devices", "bus/pci"]
                    .map(|of| host.sys.join(of))
                    .into_iter()
                    .find(|directory| is_read_only(text, &host.sys, directory));
            }
        }
    }

    fn read_routes(&mut self, host: &Host) {
        const REJECT: u32 = 0x200;
        let path = host.proc.join("net/route");
        for line in self.text(path.clone()).lines().skip(1) {
            let words: Vec<_> = line.split_ascii_whitespace().collect();
            if let [name, "00000000", _, flags, _, _, _, "00000000", ..] = words[..]
                && u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & REJECT == 0)
            {
                self.default_routes.push((name.to_owned(), path.clone()));
            }
        }
        // Absent where IPv6 is off.
        let path = host.proc.join("net/ipv6_route");
        let text = files::read(&path).ok().flatten().unwrap_or_default();
        for line in text.lines() {
            let words: Vec<_> = line.split_ascii_whitespace().collect();
            if let [destination, "00", _, _, _, _, _, _, flags, name] = words[..]
                && destination.bytes().all(|byte| byte == b'0')
                && u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & REJECT == 0)
            {
                self.default_routes.push((name.to_owned(), path.clone()));
            }
        }
    }

    fn read_process(&mut self, host: &Host) {
        let status = self.text(host.proc.join("self/status"));
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        let numbers = |text: &str| -> Vec<u32> {
            text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
        };
        // Real, effective, saved, file system.
        let effective = |name| numbers(field(name)).get(1).copied().unwrap_or_default();
        self.credentials = Credentials {
            uid: effective("Uid:"),
            groups: [vec![effective("Gid:")], numbers(field("Groups:"))].concat(),
            capabilities: u64::from_str_radix(field("CapEff:").trim(), 16).unwrap_or_default(),
        };
        let locked = numbers(field("VmLck:")).first().map_or(0, |&kib| u64::from(kib) << 10);
        let limits = self.text(host.proc.join("self/limits"));
        let soft = |name: &str| {
            limits.lines().find_map(|line| line.strip_prefix(name))?.split_ascii_whitespace().next()
        };
        self.open_files = soft("Max open files").and_then(|count| count.parse().ok());
        self.memlock = match soft("Max locked memory") {
            Some("unlimited") => Some(Memlock { limit: None, locked }),
            Some(bytes) => bytes.parse().ok().map(|limit| Memlock { limit: Some(limit), locked }),
            None => None,
        };
    }

    fn read_consoles(&mut self, host: &Host) {
        let (active, cmdline) = (host.sys.join("class/tty/console/active"), host.proc.join("cmdline"));
        let [named, asked] = [&active, &cmdline].map(|path| files::read_trimmed(path).unwrap_or_default());
        // Names as in `ttyS4`, and options as in `console=ttyS4,115200n8`.
        let asked = asked.split_ascii_whitespace().filter_map(|word| word.strip_prefix("console="));
        let asked = asked.filter_map(|console| Some((console.split(',').next()?, &cmdline)));
        for (name, source) in named.split_ascii_whitespace().map(|name| (name, &active)).chain(asked) {
            if name.contains('/') || self.consoles.iter().any(|(other, ..)| other == name) {
                continue;
            }
            if let Ok(path) = std::fs::read_link(host.sys.join("class/tty").join(name)) {
                self.consoles.push((name.to_owned(), path, source.clone()));
            }
        }
    }

    fn read_cpu(&mut self, host: &Host) {
        let text = self.text(host.proc.join("cpuinfo"));
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim())
        };
        self.physical_bits = field("address sizes")
            .and_then(|text| text.split(' ').next()?.parse().ok())
            .filter(|bits| (32..=64).contains(bits));
        self.vendor = match field("vendor_id") {
            // Zhaoxin's processors have VT-d too.
            Some("GenuineIntel" | "CentaurHauls" | "Shanghai") => CpuVendor::Intel,
            Some("AuthenticAMD" | "HygonGenuine") => CpuVendor::Amd,
            _ if field("CPU implementer").or_else(|| field("CPU part")).is_some() => CpuVendor::Arm,
            _ => CpuVendor::Other,
        };
        // The processor says so on x86; elsewhere the firmware does.
        let flag = field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
        let product = files::read_trimmed(&host.sys.join("class/dmi/id/product_name")).unwrap_or_default();
        let named = ["KVM", "QEMU", "Virtual Machine"].iter().any(|name| product.contains(name));
        self.is_virtual = flag || named || host.sys.join("hypervisor/type").exists();
    }

    fn read_memory(&mut self, host: &Host) {
        let text = self.text_if_any(host.proc.join("meminfo"));
        let bytes = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        (self.total_memory, self.available_memory) = (bytes("MemTotal:"), bytes("MemAvailable:"));
        let groups = self.text_if_any(host.proc.join("self/cgroup"));
        // Only version 2 has this line and these files.
        let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
        // A group outside what this process may see begins with `..`.
        let Some(own) = own.map(Path::new).filter(|own| own.components().all(is_name)) else { return };
        let files = own.ancestors().map(|group| host.sys.join("fs/cgroup").join(group).join("memory.max"));
        let limit = |file: PathBuf| Some((files::read_trimmed(&file)?.parse().ok()?, file));
        self.memory_limit = files.filter_map(limit).min();
    }
}

/// Whether a directory of sysfs is on a read-only mount, by a `mountinfo`.
fn is_read_only(mountinfo: &str, sys: &Path, directory: &Path) -> bool {
    let covering = mountinfo.lines().filter_map(|line| {
        // Mount ID, parent ID, device number, root, mount point, options (proc_pid_mountinfo(5)).
        let mut words = line.split(' ').skip(4);
        let point = Path::new(words.next()?);
        let covers = point.starts_with(sys) && directory.starts_with(point);
        covers.then_some((point.components().count(), words.next()?))
    });
    // The deepest is seen, and of several there the last.
    let seen = covering.max_by_key(|(depth, _)| *depth);
    seen.is_some_and(|(_, options)| options.split(',').any(|option| option == "ro"))
}

fn is_name(part: Component<'_>) -> bool {
    matches!(part, Component::Normal(_))
}

/// What could not be read.
pub(super) fn judge(case: &mut Case<'_>) {
    for (path, reason) in &case.facts.unread {
        case.unchecked(
            case.function.address,
            format!("{} can't be read: {reason}", path.display()),
            "run this as root, with procfs and sysfs mounted",
        );
    }
}

/// The links in a directory and where they lead.
fn links(dir: &Path) -> Vec<(String, PathBuf)> {
    let names = files::names(dir).unwrap_or_default();
    names
        .into_iter()
        .filter_map(|name| std::fs::read_link(dir.join(&name)).ok().map(|to| (name, to)))
        .collect()
}

/// A line of `iomem`: its range and its name. Without privilege its addresses are 0.
fn resource(line: &str) -> Option<(u64, u64, String)> {
    let (range, name) = line.trim().split_once(" : ")?;
    let (start, end) = range.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    (end > start).then(|| (start, end, name.to_owned()))
}
