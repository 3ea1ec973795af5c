//! Where this crate meets the host: the roots of the file systems that it reads, and the writes that change
//! which driver owns a function.
//!
//! Reads go straight to files below the roots. Writes to sysfs go through [`SysfsWriter`], because a write
//! there is a command to the Linux kernel (it binds, unbinds, removes); a simulated host answers the same
//! commands on an ordinary directory tree. What only the Linux kernel itself can tell of a disk, a [`DiskProbe`] asks.

mod processes;
mod sys;

pub use processes::{Ending, ProcessControl};

use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::files;

/// The host that devices are taken from: roots of its file systems and the way to command its kernel.
///
/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct Host {
    /// Root of sysfs, `/sys` on a real host.
    pub sys: PathBuf,
    /// Where USB4 and Thunderbolt are, `/sys/bus/thunderbolt` on a real host.
    pub thunderbolt: PathBuf,
    /// Root of the device nodes, `/dev` on a real host.
    pub dev: PathBuf,
    /// Root of procfs, `/proc` on a real host.
    pub proc: PathBuf,
    /// Root of the Linux kernel's modules, `/lib/modules` on a real host; a directory per kernel release is in it.
    pub modules: PathBuf,
    /// Directory of this crate's own state, the ledger of claims; `/run/vm-passthrough` on a real host. It is
    /// meant to lie on a file system that a reboot empties, as a reboot also undoes every driver binding.
    pub state: PathBuf,
    /// Directory for what outlives a boot, as claims that are made again; `/var/lib/vm-passthrough` on a real host.
    pub lasting: PathBuf,
    /// Database of udev, `/run/udev/data` on a real host: what it found on each disk.
    pub udev: PathBuf,
    /// The root of the tree of a captured or simulated host.
    root: Option<PathBuf>,
    writer: Arc<dyn SysfsWriter>,
    disks: Option<Arc<dyn DiskProbe>>,
    processes: Option<Arc<dyn ProcessControl>>,
}

impl Host {
    /// The machine that this process runs on.
    pub fn system() -> Self {
        Self {
            sys: "/sys".into(),
            thunderbolt: "/sys/bus/thunderbolt".into(),
            dev: "/dev".into(),
            proc: "/proc".into(),
            modules: "/lib/modules".into(),
            state: "/run/vm-passthrough".into(),
            lasting: "/var/lib/vm-passthrough".into(),
            udev: "/run/udev/data".into(),
            root: None,
            writer: Arc::new(KernelWriter),
            disks: Some(Arc::new(KernelProbe)),
            processes: Some(Arc::new(processes::KernelProcesses)),
        }
    }

    /// A host below `root` (`root/sys`, `root/dev`, `root/proc`, `root/lib/modules`,
    /// `root/run`, `root/var/lib`), commanded through `writer`. Whoever holds its disks is known only from its files, unless
    /// [`with_disk_probe`](Self::with_disk_probe) says whom to ask.
    pub fn at(root: &Path, writer: Arc<dyn SysfsWriter>) -> Self {
        // `with_host_paths` can find only an absolute path reliably.
        let root = std::path::absolute(root).unwrap_or_else(|_| root.into());
        Self {
            sys: root.join("sys"),
            thunderbolt: root.join("sys/bus/thunderbolt"),
            dev: root.join("dev"),
            proc: root.join("proc"),
            modules: root.join("lib/modules"),
            state: root.join("run"),
            lasting: root.join("var/lib/vm-passthrough"),
            udev: root.join("run/udev/data"),
            root: Some(root),
            writer,
            disks: None,
            processes: None,
        }
    }

    /// Where a captured tree has a device node or an attribute that a link in it names by its path on the captured host;
    /// `None` for other paths.
    pub(crate) fn captured_path(&self, path: &Path) -> Option<PathBuf> {
        let root = self.root.as_ref().filter(|root| !path.starts_with(root))?;
        if let Ok(node) = path.strip_prefix("/dev") {
            return Some(self.dev.join(node));
        }
        let attribute = path.strip_prefix("/sys").ok()?;
        // Attributes are compared by their canonical paths.
        Some(std::fs::canonicalize(root).ok()?.join("sys").join(attribute))
    }

    /// The same host, whose disks `probe` knows.
    #[must_use]
    pub fn with_disk_probe(self, probe: Arc<dyn DiskProbe>) -> Self {
        Self { disks: Some(probe), ..self }
    }

    /// The same host, whose processes `control` ends.
    #[must_use]
    pub fn with_process_control(self, control: Arc<dyn ProcessControl>) -> Self {
        Self { processes: Some(control), ..self }
    }

    /// A text in which paths below the tree of a captured or simulated host are those of the host itself, as commands for an
    /// operator need them.
    #[must_use]
    pub fn with_host_paths(&self, text: String) -> String {
        let Some(root) = &self.root else { return text };
        const TOPS: [(&str, &str); 7] = [
            ("sys", "sys"),
            ("dev", "dev"),
            ("proc", "proc"),
            ("lib", "lib"),
            ("run/udev", "run/udev"),
            ("run", "run/vm-passthrough"),
            ("var", "var"),
        ];
        let tops =
            TOPS.map(|(here, there)| (format!("{}/", root.join(here).display()), format!("/{there}/")));
        let (mut rest, mut told) = (&*text, String::new());
        // In one pass, and by the longest: what was replaced is the host's already.
        loop {
            let found =
                tops.iter().filter_map(|(here, there)| Some((rest.find(here.as_str())?, here, there)));
            let Some((at, here, there)) =
                found.min_by_key(|(at, here, _)| (*at, std::cmp::Reverse(here.len())))
            else {
                return told + rest;
            };
            told += &rest[..at];
            told += there;
            rest = &rest[at + here.len()..];
        }
    }

    /// The way to write to sysfs.
    pub fn writer(&self) -> &dyn SysfsWriter {
        &*self.writer
    }

    /// Whom to ask whether disks are held; `None` for a host that is only files.
    pub fn disk_probe(&self) -> Option<&dyn DiskProbe> {
        self.disks.as_deref()
    }

    /// What ends its processes; `None` for a host that is only files, whose process IDs are not this machine's.
    pub fn processes(&self) -> Option<&dyn ProcessControl> {
        self.processes.as_deref()
    }
}

/// Writes values to sysfs attributes, with a deadline.
///
/// A write to `unbind` blocks in the Linux kernel, beyond the reach of any signal, while a process holds the
/// function open. An implementation must return when the deadline passes even then.
pub trait SysfsWriter: std::fmt::Debug + Send + Sync {
    /// Whether the host is only files that nothing is to change, as a captured tree: the ledger is not written either.
    fn only_reads(&self) -> bool {
        false
    }

    /// Writes `value` to the attribute at `path`.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when `deadline` passed first; the write may still take effect later.
    /// Otherwise whatever the kernel answered.
    fn write(&self, path: &Path, value: &str, deadline: Duration) -> io::Result<()>;

    /// As [`write`](Self::write), of an attribute of a function that only one may change at a time: who holds its `lock`
    /// (flock(2)). An implementation whose write may outlive this call, or this process, keeps a duplicate of `lock` until
    /// the write has ended.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn write_locked(
        &self,
        path: &Path,
        value: &str,
        deadline: Duration,
        lock: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let _ = lock;
        self.write(path, value, deadline)
    }

    /// Reads the attribute at `path`. Needed for the few whose reads take the function's lock in the Linux kernel, as
    /// `driver_override` does, and so block like a write while an `unbind` is stuck.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn read(&self, path: &Path, deadline: Duration) -> io::Result<String> {
        let bytes = self.read_bytes(path, deadline)?;
        String::from_utf8(bytes)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the attribute is not text"))
    }

    /// As [`read`](Self::read), of what is no text, at most a page of it: config space, which a function that stalls may keep
    /// from being answered.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn read_bytes(&self, path: &Path, deadline: Duration) -> io::Result<Vec<u8>> {
        let _ = deadline;
        read_page(path)
    }
}

/// The first page of a file, more than which no attribute has.
pub(crate) fn read_page(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    files::open(path)?.take(4096).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes to the real sysfs, each time from a process of its own that is left behind at the deadline.
#[derive(Debug)]
struct KernelWriter;

impl SysfsWriter for KernelWriter {
    fn write(&self, path: &Path, value: &str, deadline: Duration) -> io::Result<()> {
        sys::write(path, value, deadline, None)
    }

    fn write_locked(
        &self,
        path: &Path,
        value: &str,
        deadline: Duration,
        lock: BorrowedFd<'_>,
    ) -> io::Result<()> {
        sys::write(path, value, deadline, Some(lock))
    }

    fn read_bytes(&self, path: &Path, deadline: Duration) -> io::Result<Vec<u8>> {
        sys::read(path, deadline)
    }
}

/// Asks whether disks and partitions are held exclusively: mounted in any namespace, swapped to, part of a RAID, a volume
/// group or a ZFS pool, exported. No file names all of these.
///
/// An implementation changes nothing on the disk and returns when the deadline passes, even if a driver is stuck.
pub trait DiskProbe: std::fmt::Debug + Send + Sync {
    /// The state of each node, in the same order.
    fn probe(&self, nodes: &[DiskNode], deadline: Duration) -> Vec<DiskState>;
}

/// The node of a disk or partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskNode {
    /// Its path.
    pub path: PathBuf,
    /// Its number in sysfs, as in `259:1`. A node of another number is another disk's.
    pub number: String,
}

/// Whether a disk is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// Nobody holds it exclusively. It may be open all the same.
    Free,
    /// Somebody does.
    Held,
    /// It is not known, and why.
    Unknown(String),
}

/// Opens the nodes with `O_EXCL` (open(2)), which the Linux kernel refuses with `EBUSY` while somebody else holds them, and
/// closes them again.
///
/// It does so in a process of its own that is left behind at the deadline, as an open waits for whoever scans the disk's
/// partitions, and so for its driver. For the moment that a free disk is open, mounting it fails. `O_NONBLOCK` keeps the
/// drivers from waiting for a medium.
#[derive(Debug)]
struct KernelProbe;

impl DiskProbe for KernelProbe {
    fn probe(&self, nodes: &[DiskNode], deadline: Duration) -> Vec<DiskState> {
        let mut states: Vec<_> =
            nodes.iter().map(|node| node.check().err().map(DiskState::Unknown)).collect();
        let asked: Vec<&Path> = nodes
            .iter()
            .zip(&states)
            .filter(|(_, state)| state.is_none())
            .map(|(node, _)| node.path.as_path())
            .collect();
        let mut answers = sys::open_exclusively(&asked, deadline).into_iter();
        for state in &mut states {
            state.get_or_insert_with(|| match answers.next() {
                Some(Ok(())) => DiskState::Free,
                Some(Err(error)) if error.raw_os_error() == Some(libc::EBUSY) => DiskState::Held,
                Some(Err(error)) => DiskState::Unknown(error.to_string()),
                None => DiskState::Unknown("nothing was answered".into()),
            });
        }
        states.into_iter().flatten().collect()
    }
}

impl DiskNode {
    /// Whether the node is there and is the one that sysfs means.
    fn check(&self) -> Result<(), String> {
        let data = std::fs::metadata(&self.path).map_err(|error| error.to_string())?;
        let number = format!("{}:{}", libc::major(data.rdev()), libc::minor(data.rdev()));
        if !data.file_type().is_block_device() {
            return Err("it is no block device".into());
        }
        if number != self.number {
            return Err(format!("it is the node of {number}, and sysfs has {}", self.number));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::process::Command;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn node(path: &str, number: &str) -> DiskNode {
        DiskNode { path: path.into(), number: number.into() }
    }

    fn unknown(nodes: &[DiskNode], expect: &[&str]) {
        let states = KernelProbe.probe(nodes, SECOND * 10);
        assert_eq!(states.len(), nodes.len());
        for (state, expect) in states.iter().zip(expect) {
            assert!(matches!(state, DiskState::Unknown(why) if why.contains(expect)), "{states:?}");
        }
    }

    #[test]
    fn what_is_no_node_of_the_disk_is_not_opened() {
        assert_eq!(KernelProbe.probe(&[], SECOND), []);
        unknown(&[node("/dev/null", "1:3"), node("/no/disk", "8:0")], &["no block device", "No such file"]);
    }

    /// A disk of the Linux kernel's own, where it lets one be made.
    struct Loop(String);

    impl Loop {
        fn new(file: &Path) -> Option<Self> {
            std::fs::write(file, vec![0; 1 << 20]).unwrap();
            let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
            match made {
                Ok(made) if made.status.success() => {
                    Some(Self(String::from_utf8(made.stdout).unwrap().trim().to_owned()))
                }
                Ok(made) => {
                    println!("skipped: no loop device: {}", String::from_utf8_lossy(&made.stderr).trim());
                    None
                }
                Err(error) => {
                    println!("skipped: losetup can't be run: {error}");
                    None
                }
            }
        }

        fn node(&self) -> DiskNode {
            let name = self.0.strip_prefix("/dev/").unwrap();
            let number = std::fs::read_to_string(format!("/sys/class/block/{name}/dev")).unwrap();
            node(&self.0, number.trim())
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            Command::new("losetup").args(["--detach", &self.0]).status().unwrap();
        }
    }

    #[test]
    fn the_linux_kernel_knows_who_holds_a_disk() {
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = Loop::new(&dir.path().join("disk")) else { return };
        let node = disk.node();
        let ask = || KernelProbe.probe(&[node.clone(), node.clone()], SECOND * 10);
        assert_eq!(ask(), [DiskState::Free, DiskState::Free]);
        let open =
            |flags| std::fs::OpenOptions::new().read(true).custom_flags(flags).open(&node.path).unwrap();
        let shared = open(0);
        assert_eq!(ask(), [DiskState::Free, DiskState::Free], "an ordinary open holds nothing");
        let held = open(libc::O_EXCL);
        assert_eq!(ask(), [DiskState::Held, DiskState::Held]);
        drop((held, shared));
        assert_eq!(ask(), [DiskState::Free, DiskState::Free]);
        unknown(&[DiskNode { number: "8:0".into(), ..node.clone() }], &["sysfs has 8:0"]);
    }
}
