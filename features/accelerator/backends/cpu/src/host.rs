//! What the Linux kernel says of the machine.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use vm_accel::{Error, Result};

/// Free and total bytes of memory.
///
/// # Errors
/// [`Error::Host`] where `/proc/meminfo` does not say.
pub(crate) fn memory() -> Result<(u64, u64)> {
    // It stays open, so that a process which has given up opening files can still ask.
    static FILE: OnceLock<File> = OnceLock::new();
    let failed = |error: io::Error| host(&error.to_string());
    let file = match FILE.get() {
        Some(file) => file,
        None => {
            let file = File::open("/proc/meminfo").map_err(failed)?;
            FILE.get_or_init(|| file)
        }
    };
    // Both are among the first lines.
    let mut bytes = [0; 1024];
    let len = file.read_at(&mut bytes, 0).map_err(failed)?;
    let text = String::from_utf8_lossy(&bytes[..len]);
    match (meminfo(&text, "MemAvailable"), meminfo(&text, "MemTotal")) {
        (Some(free), Some(total)) => Ok((free, total)),
        _ => Err(host("it lacks MemAvailable or MemTotal")),
    }
}

fn host(cause: &str) -> Error {
    Error::Host { what: "reading /proc/meminfo", cause: cause.to_owned() }
}

/// A line of `/proc/meminfo`, in bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The processor's name.
pub(crate) fn name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    line.map_or_else(|| format!("{} processor", std::env::consts::ARCH), |(_, name)| name.trim().to_owned())
}

/// The Linux kernel's version.
pub(crate) fn version() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    if text.trim().is_empty() { "Linux".into() } else { format!("Linux {}", text.trim()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc() {
        let text = "MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:   12000000 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(24_000_000 * 1024));
        assert_eq!(meminfo(text, "MemAvailable"), Some(12_000_000 * 1024));
        assert_eq!(meminfo(text, "Mem"), None);
        assert_eq!(meminfo("MemTotal: x kB", "MemTotal"), None);
    }
}
