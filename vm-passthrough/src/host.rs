//! Where this crate meets the host: the roots of the file systems that it reads, and the writes that change
//! which driver owns a function.
//!
//! Reads go straight to files below the roots. Writes to sysfs go through [`SysfsWriter`], because a write
//! there is a command to the Linux kernel (it binds, unbinds, removes); a simulated host answers the same
//! commands on an ordinary directory tree.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The host that devices are taken from: roots of its file systems and the way to command its kernel.
///
/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct Host {
    /// Root of sysfs, `/sys` on a real host.
    pub sys: PathBuf,
    /// Root of the device nodes, `/dev` on a real host.
    pub dev: PathBuf,
    /// Root of procfs, `/proc` on a real host.
    pub proc: PathBuf,
    /// Root of the Linux kernel's modules, `/lib/modules` on a real host; a directory per kernel release is in it.
    pub modules: PathBuf,
    /// Directory of this crate's own state, the ledger of claims; `/run/vm-passthrough` on a real host. It is
    /// meant to lie on a file system that a reboot empties, as a reboot also undoes every driver binding.
    pub state: PathBuf,
    writer: Arc<dyn SysfsWriter>,
}

impl Host {
    /// The machine that this process runs on.
    pub fn system() -> Self {
        Self {
            sys: "/sys".into(),
            dev: "/dev".into(),
            proc: "/proc".into(),
            modules: "/lib/modules".into(),
            state: "/run/vm-passthrough".into(),
            writer: Arc::new(KernelWriter),
        }
    }

    /// A host below `root` (`root/sys`, `root/dev`, `root/proc`, `root/lib/modules`,
    /// `root/run`), commanded through `writer`.
    pub fn at(root: &Path, writer: Arc<dyn SysfsWriter>) -> Self {
        Self {
            sys: root.join("sys"),
            dev: root.join("dev"),
            proc: root.join("proc"),
            modules: root.join("lib/modules"),
            state: root.join("run"),
            writer,
        }
    }

    /// The directory of a PCI function in sysfs, `SYS/bus/pci/devices/ADDRESS`.
    pub fn pci_device(&self, address: crate::PciAddress) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address.to_string())
    }

    /// The way to write to sysfs.
    pub fn writer(&self) -> &dyn SysfsWriter {
        &*self.writer
    }
}

/// Writes values to sysfs attributes, with a deadline.
///
/// A write to `unbind` blocks in the Linux kernel, beyond the reach of any signal, while a process holds the
/// function open. An implementation must return when the deadline passes even then.
pub trait SysfsWriter: std::fmt::Debug + Send + Sync {
    /// Writes `value` to the attribute at `path`.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when `deadline` passed first; the write may still take effect later.
    /// Otherwise whatever the kernel answered.
    fn write(&self, path: &Path, value: &str, deadline: Duration) -> io::Result<()>;

    /// Reads the attribute at `path`. Needed for the few whose reads take the function's lock in the Linux kernel, as
    /// `driver_override` does, and so block like a write while an `unbind` is stuck.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn read(&self, path: &Path, deadline: Duration) -> io::Result<String> {
        let _ = deadline;
        std::fs::read_to_string(path)
    }
}

/// Writes to the real sysfs, each time from a process of its own that is left behind at the deadline.
#[derive(Debug)]
struct KernelWriter;

impl SysfsWriter for KernelWriter {
    fn write(&self, path: &Path, value: &str, deadline: Duration) -> io::Result<()> {
        crate::claim::write_attribute(path, value, deadline)
    }

    fn read(&self, path: &Path, deadline: Duration) -> io::Result<String> {
        crate::claim::read_attribute(path, deadline)
    }
}
