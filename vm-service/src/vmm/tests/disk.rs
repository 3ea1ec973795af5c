//! Guests whose disk is at work when they end or reboot.

use std::path::Path;
use std::time::Duration;

use super::guest::{Asm, reader};
use super::*;
use crate::config::Disk;

/// A disk of zeros that a request of [`reader`] fits.
fn zeros() -> tempfile::NamedTempFile {
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(reader::REQUEST).unwrap();
    disk
}

fn with_disk(kernel: &Path, disk: &Path) -> GuestConfig {
    let disks = vec![Disk { path: disk.into(), read_only: false }];
    GuestConfig { disks, ..config(kernel, 1) }
}

/// Requests `stop` once the guest has printed so much.
fn stop_after(screen: &Screen, len: usize, stop: &Stop) {
    let (screen, stop) = (screen.clone(), stop.clone());
    std::thread::spawn(move || {
        while screen.text().len() < len && !stop.requested() {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.request();
    });
}

#[test]
fn what_a_disk_still_reads_does_not_reach_what_a_reboot_loads() {
    if !kvm() {
        return;
    }
    let disk = zeros();
    let kernel = reader::kernel(1, Asm::default().out8(0xcf9, 0x0e).spin());
    let (mut machine, screen, stop) = machine_of(&with_disk(kernel.path(), disk.path()), OnReboot::Restart);
    stop_after(&screen, 3, &stop);
    assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
    let text = screen.text();
    assert!(text.len() >= 3 && text.bytes().all(|byte| byte == b'k'), "{text}");
}
