//! Disks with files for guests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Cache, Step, apt};

/// How long filling one may take.
const DEADLINE: Duration = Duration::from_secs(10 * 60);

/// Makes sure that what makes file systems is installed.
///
/// # Errors
/// When it can't be.
pub fn provision_disk(cache: &Cache) -> Result<()> {
    apt::install(cache, &["e2fsprogs"])
}

/// Makes the image of a disk with a directory's files, in ext2, and as large as that takes.
///
/// # Errors
/// When a file can't be read, or the image not be made.
pub fn make_disk(image: &Path, directory: &Path, log: PathBuf) -> Result<()> {
    let (bytes, files) = size(directory)?;
    // Beside the files: maps of blocks, names, and the last block of each file.
    let bytes = bytes + bytes / 16 + files * 8192 + (16 << 20);
    let file = File::create(image).with_context(|| format!("can't create {}", image.display()))?;
    file.set_len(bytes.next_multiple_of(1 << 20))?;
    let mut command = Command::new("mke2fs");
    // Not every user has it in the path.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command.args(["-q", "-F", "-t", "ext2", "-b", "4096", "-m", "0", "-E", "root_owner=0:0"]);
    command.arg("-N").arg((files + 64).to_string()).arg("-d").arg(directory).arg(image);
    Step { what: "making a disk for a guest", log, deadline: DEADLINE }.run(&mut command)
}

/// Bytes of all files below a directory, and how many there are, with directories.
fn size(directory: &Path) -> Result<(u64, u64)> {
    let (mut bytes, mut files) = (0, 1);
    let read = || format!("can't read {}", directory.display());
    for entry in fs::read_dir(directory).with_context(read)? {
        let entry = entry?;
        let kind = entry.metadata()?;
        if kind.is_dir() {
            let (more_bytes, more_files) = size(&entry.path())?;
            (bytes, files) = (bytes + more_bytes, files + more_files);
        } else {
            (bytes, files) = (bytes + kind.len(), files + 1);
        }
    }
    Ok((bytes, files))
}
