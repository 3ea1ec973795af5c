//! Memory for arguments: taken only where the machine has it, so that a wrong extent is an error and not the end of
//! other programs.

/// Checks that the machine has `bytes` bytes of memory at all.
///
/// # Errors
/// What is wanted and what there is.
pub(super) fn check(bytes: u64) -> Result<(), String> {
    let info = rustix::system::sysinfo();
    let there = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit).max(1));
    if bytes > there {
        return Err(format!("{bytes} bytes are wanted, this machine has {there}; use smaller extents"));
    }
    Ok(())
}
