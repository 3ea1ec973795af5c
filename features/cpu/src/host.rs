//! What the Linux kernel says of the machine.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, OnceLock};

use vm_accel::{Error, Health, Result};

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

/// Ticks of all processors that were busy, and all of them.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let numbers: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .filter_map(|n| n.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; the guests' are in the first two.
    let all: u64 = numbers.iter().take(8).sum();
    let idle = numbers.get(3)? + numbers.get(4)?;
    Some((all.saturating_sub(idle), all))
}

/// Says how busy the machine is since it was asked last.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    last: Mutex<(u64, u64)>,
}

impl Watch {
    pub(crate) fn health(&self) -> Result<Health> {
        let (free, total) = memory()?;
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let busy = ticks(&stat).and_then(|(busy, all)| {
            let (before_busy, before_all) = std::mem::replace(&mut *last, (busy, all));
            let share = busy.saturating_sub(before_busy) * 100;
            share.checked_div(all.saturating_sub(before_all)).map(|percent| percent.min(100) as u32)
        });
        Ok(Health { busy, memory_used: Some(total.saturating_sub(free)), ..Health::default() })
    }
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
        assert_eq!(ticks("cpu  10 0 10 70 10 0 0 0 5 0\ncpu0 1"), Some((20, 100)));
        assert_eq!(ticks("intr 1"), None);
    }
}
