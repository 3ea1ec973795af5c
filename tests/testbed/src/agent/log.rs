//! The Linux kernel's messages.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result};
use rustix::fs::OFlags;

/// All messages that the Linux kernel still has.
///
/// # Errors
/// When they can't be read.
pub fn kernel_log() -> Result<String> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open("/dev/kmsg")
        .context("can't open /dev/kmsg")?;
    let mut log = String::new();
    let mut record = [0; 8192];
    // One record a read; the end, and a record that was overwritten meanwhile, are errors.
    while let Ok(len @ 1..) = file.read(&mut record) {
        log.push_str(&String::from_utf8_lossy(&record[..len]));
    }
    Ok(log)
}
