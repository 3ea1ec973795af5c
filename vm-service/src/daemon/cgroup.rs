//! A cgroup for the processes of a guest, where no systemd makes them a scope: Linux counts what they use together, and who turns
//! controllers on can bound it (Documentation/admin-guide/cgroup-v2.rst).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use vm_passthrough::Host;

use crate::guest::control::{self, GuestHome};
use crate::os::sandbox::join_cgroup;

/// The cgroup of a guest, of version 2, below the daemon's own. Dropping it removes it, unless processes are in it.
pub(super) struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one; `None` where this user can't have any. Those of guests that ended under no daemon are removed.
    pub(super) fn of(host: &Host, name: &str) -> Option<Self> {
        let parent = own(host)?;
        let path_of = |name: &str| parent.join(format!("vm-guest-{name}"));
        let names = control::names(host).unwrap_or_default();
        names
            .iter()
            .filter(|name| !GuestHome::is_taken(host, name))
            .for_each(|name| drop(Self(path_of(name))));
        let path = path_of(name);
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                tracing::debug!("the guest {name} has no cgroup of its own: {}: {error}", path.display());
                None
            }
            _ => Some(Self(path)),
        }
    }

    /// Has what the command starts begin in it.
    ///
    /// # Errors
    /// When it is gone, or this process has no descriptors left.
    pub(super) fn take(&self, command: &mut Command) -> io::Result<()> {
        join_cgroup(command, File::options().write(true).open(self.0.join("cgroup.procs"))?);
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // It fails while processes are in it.
        let _ = fs::remove_dir(&self.0);
    }
}

/// The directory of this process's cgroup.
fn own(host: &Host) -> Option<PathBuf> {
    let groups = fs::read_to_string(host.proc.join("self/cgroup")).ok()?;
    let own = Path::new(groups.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let mounts = fs::read_to_string(host.proc.join("self/mountinfo")).ok()?;
    let mount = mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        mount.split(' ').nth(4).filter(|_| kind.starts_with("cgroup2 "))
    })?;
    // One that is outside of this process's namespace begins with `..`.
    (!own.starts_with("..")).then(|| Path::new(mount).join(own))
}
