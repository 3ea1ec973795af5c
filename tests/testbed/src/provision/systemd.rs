//! systemd on this machine, for an L1 that is to have it.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

use super::{Cache, apt};

/// What there is of it, with what it starts services by since release 255.
const PROGRAMS: &[&str] = &["systemd", "systemctl", "systemd-run", "systemd-executor"];
const PLACES: &[&str] = &["/usr/lib/systemd", "/lib/systemd", "/usr/bin", "/bin"];
/// The units that others need to start at all.
const UNITS: &[&str] =
    &["sysinit", "basic", "multi-user", "sockets", "slices", "shutdown", "umount", "final"];

/// Makes sure that systemd is installed; it need not run.
///
/// # Errors
/// When it can't be installed.
pub fn provision_systemd(cache: &Cache) -> Result<()> {
    apt::install(cache, &["systemd"])
}

/// The programs of systemd, and the files of its units.
///
/// # Errors
/// When one is missing.
pub fn systemd_files() -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for name in PROGRAMS {
        match PLACES.iter().map(|place| Path::new(place).join(name)).find(|path| path.exists()) {
            Some(path) => files.push(path),
            None if *name == "systemd-executor" => {}
            None => bail!("{name} is not there even after installing systemd"),
        }
    }
    for name in UNITS {
        let unit = Path::new("/usr/lib/systemd/system").join(format!("{name}.target"));
        ensure!(unit.exists(), "systemd needs {}", unit.display());
        files.push(unit);
    }
    Ok(files)
}
