//! A user that only one worker is, so that the Linux kernel keeps it from all processes and files of others.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::process::{geteuid, getpid};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use super::sys;

/// The first of the users that workers become, and of the groups. Nobody assigns those from 0x7000_0000 to 0x7fff_ffff:
/// not systemd, nor what makes users, nor containers (systemd's `UIDS-GIDS.md`). The process id is added, which is below
/// 2^22 and no other process's meanwhile.
const FIRST: u32 = 0x7100_0000;

/// Has no program that this thread executes gain a capability.
///
/// # Errors
/// The Linux kernel's.
pub(super) fn bound_capabilities() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            // The Linux kernel knows no more.
            Err(Errno::INVAL) => break,
            removed => removed?,
        }
    }
    Ok(())
}

/// Becomes that user, a member of the groups to which `devices` belong alone.
///
/// # Errors
/// Why it can't: only root may, and in a user namespace only where these users are mapped.
pub(super) fn become_nobody_else(devices: &[PathBuf]) -> Result<u32, String> {
    if !geteuid().is_root() {
        return Err("only root can give it one".into());
    }
    let user = FIRST + getpid().as_raw_nonzero().get().unsigned_abs();
    let mut groups: Vec<u32> = devices
        .iter()
        .filter_map(|device| std::fs::metadata(device).ok())
        // What everybody may open takes no group, and root's is none to give.
        .filter(|data| data.gid() != 0 && data.mode() & 0o066 == 0o060)
        .map(|data| data.gid())
        .collect();
    groups.sort_unstable();
    groups.dedup();
    sys::set_user(user, &groups).map_err(|error| format!("the Linux kernel refuses it: {error}"))?;
    Ok(user)
}
