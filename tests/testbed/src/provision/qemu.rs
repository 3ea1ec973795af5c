//! QEMU on this machine: release 10 or newer.
//!
//! Debian 12's own 7.2 hangs in the MSI step of some runs and aborts on large DMA of the `edu` device, so it is taken
//! from the backports.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::cache::Cache;
use super::command::output_of;
use super::{apt, say};

const OLDEST: u32 = 10;

/// Makes sure that a QEMU that is new enough is installed.
///
/// # Errors
/// When there is none and none can be installed.
pub fn provision_qemu(cache: &Cache) -> Result<()> {
    if installed_release().is_none_or(|release| release < OLDEST) {
        let _lock = cache.lock()?;
        // qemu-utils of another release conflicts with qemu-system-x86, so they come together.
        apt::install_newest(cache, &["qemu-system-x86", "qemu-utils"])?;
    }
    let release = installed_release().context("qemu-system-x86_64 is not there even after installing it")?;
    ensure!(release >= OLDEST, "qemu-system-x86_64 is release {release}, and the testbed needs {OLDEST}");
    Ok(())
}

/// The major release of the installed QEMU.
fn installed_release() -> Option<u32> {
    let text = output_of("qemu-system-x86_64", &["--version"])?;
    parse_release(&text)
}

fn parse_release(version: &str) -> Option<u32> {
    version.strip_prefix("QEMU emulator version ")?.split('.').next()?.parse().ok()
}

/// The files that QEMU needs to run elsewhere: its program, its libraries, its firmware; each with its place there.
///
/// # Errors
/// When one is missing.
pub fn qemu_files() -> Result<Vec<(String, PathBuf)>> {
    let program = "/usr/bin/qemu-system-x86_64";
    let mut files = vec![program.to_owned()];
    files.extend(libraries_of(program)?);
    let firmware = ["bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin", "linuxboot.bin"];
    for name in firmware {
        let found = ["/usr/share/qemu", "/usr/share/seabios"].iter().map(|dir| format!("{dir}/{name}"));
        match found.clone().find(|path| Path::new(path).exists()) {
            Some(path) => files.push(path),
            None => say(format_args!("{name} is not among QEMU's firmware")),
        }
    }
    files
        .into_iter()
        .map(|path| {
            let source = std::fs::canonicalize(&path).with_context(|| format!("QEMU needs {path}"))?;
            Ok((path.trim_start_matches('/').replace("usr/share/seabios", "usr/share/qemu"), source))
        })
        .collect()
}

/// The libraries that a program is linked with, and its loader.
///
/// # Errors
/// When it can't be read.
pub fn libraries_of(program: &str) -> Result<Vec<String>> {
    let listed = output_of("ldd", &[program]).with_context(|| format!("ldd can't read {program}"))?;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    Ok(listed.lines().filter_map(path).collect())
}

#[cfg(test)]
mod tests {
    use super::parse_release;

    #[test]
    fn the_release_is_read_from_the_banner() {
        assert_eq!(parse_release("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright"), Some(10));
        assert_eq!(parse_release("QEMU emulator version 7.2.17"), Some(7));
        assert_eq!(parse_release("something else"), None);
    }
}
