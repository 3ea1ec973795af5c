//! Guests whose disk is at work when they end or reboot.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use super::guest::{Asm, reader};
use super::storage::Storage;
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

/// That nobody uses the disk any more: this process has it open no more, and whoever does has it locked. A child of another test has
/// what was open when it was forked until it becomes its program.
fn unused(disk: &Path) {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open: Vec<_> = open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
    // The test's own.
    assert_eq!(open.iter().filter(|path| *path == disk).count(), 1, "{open:?}");
    let file = std::fs::File::open(disk).unwrap();
    wait_for(|| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok(), "nobody gives it up");
}

/// Waits until something is so.
fn wait_for(is_so: impl Fn() -> bool, otherwise: &str) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "{otherwise}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_a_disk_still_reads_does_not_reach_what_a_reboot_loads() {
    if !kvm() {
        return;
    }
    let disk = zeros();
    // So many requests that the disk is not done when the next program is loaded, however slowly that goes.
    let kernel = reader::kernel(256, Asm::default().out8(0xcf9, 0x0e).spin());
    let (mut machine, screen, stop) = machine_of(&with_disk(kernel.path(), disk.path()), OnReboot::Restart);
    stop_after(&screen, 3, &stop);
    assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
    let text = screen.text();
    assert!(text.len() >= 3 && text.bytes().all(|byte| byte == b'k'), "{text}");
}

#[test]
fn a_full_queue_keeps_no_guest_from_rebooting() {
    if !kvm() {
        return;
    }
    let disk = zeros();
    let kernel = reader::kernel(256, Asm::default().out8(0xcf9, 0x0e).spin());
    let (mut machine, screen, stop) = machine_of(&with_disk(kernel.path(), disk.path()), OnReboot::Restart);
    stop_after(&screen, 2, &stop);
    let report = machine.run(&stop).unwrap();
    assert_eq!(report.end, End::Stopped);
    assert!(report.restarts >= 1, "{report:?}");
}

#[test]
fn no_disk_is_used_after_the_run_however_it_ended() {
    if !kvm() {
        return;
    }
    // Stopped, powered off, and ended by an error: an instruction where there is no memory.
    let nowhere =
        Asm::default().bytes(&[0x48, 0xb8]).bytes(&0xd000_0000u64.to_le_bytes()).bytes(&[0xff, 0xe0]);
    let cases = [
        (Asm::default().print("s").spin(), Some(End::Stopped)),
        (Asm::default().power_off(), Some(End::Shutdown)),
        (nowhere, None),
    ];
    for (then, end) in cases {
        let disk = zeros();
        let kernel = reader::kernel(256, then);
        let (mut machine, screen, stop) = machine_of(&with_disk(kernel.path(), disk.path()), OnReboot::End);
        stop_after(&screen, 2, &stop);
        let ran = machine.run(&stop);
        drop(machine);
        unused(disk.path());
        match (ran, end) {
            (Ok(report), Some(end)) => assert_eq!(report.end, end),
            (Err(MachineError::Vcpu { .. }), None) => {}
            (ran, end) => panic!("{ran:?} instead of {end:?}"),
        }
    }
}

#[test]
fn a_disk_whose_storage_does_not_answer_is_told_in_time_and_stays_locked_until_it_does() {
    if !kvm() {
        return;
    }
    let disk = zeros();
    let Some(storage) = Storage::hold(disk.path()) else { return };
    let kernel = reader::kernel(1, Asm::default().spin());
    let (mut machine, _, stop) = machine_of(&with_disk(kernel.path(), disk.path()), OnReboot::End);
    let asks = stop.clone();
    let asking = std::thread::spawn(move || {
        let is_read = storage.is_read(TIMEOUT / 2);
        asks.request();
        (storage, is_read)
    });
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(machine.run(&stop).map_err(|error| error.to_string())));
    let error = ended.recv_timeout(TIMEOUT).expect("an end").unwrap_err();
    let (storage, is_read) = asking.join().unwrap();
    assert!(is_read, "the guest does not read");
    for part in
        ["the disk ", " did not stop within 10s and is still in use", "see whether its storage still answers"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    let file = std::fs::File::open(disk.path()).unwrap();
    let free = || flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    assert!(!free(), "another guest could write what is still read");
    // It answers again.
    storage.allow();
    drop(storage);
    wait_for(free, "nobody gives it up");
}

#[test]
fn vcpus_and_disks_run_in_threads_that_are_confined() {
    if !kvm() {
        return;
    }
    /// Whether a thread of this name may do no more than it needs.
    fn is_confined(name: &str) -> bool {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        // One that has ended meanwhile has no files.
        let read = |thread: &std::fs::DirEntry, file| std::fs::read_to_string(thread.path().join(file));
        threads.filter(|thread| read(thread, "comm").is_ok_and(|comm| comm.trim() == name)).any(|thread| {
            let status = read(&thread, "status").unwrap_or_default();
            let has = |field: &str, value: &str| {
                status.lines().any(|line| line.split_once(':') == Some((field, &format!("\t{value}"))))
            };
            has("Seccomp", "2") && has("NoNewPrivs", "1") && has("CapEff", "0000000000000000")
        })
    }
    let disk = zeros();
    let kernel = reader::kernel(1, Asm::default().spin());
    let (mut machine, _, stop) = machine_of(&with_disk(kernel.path(), disk.path()), OnReboot::End);
    let end = stop.clone();
    let seen = std::thread::spawn(move || {
        let mut left = vec!["vcpu0", "virtio-blk"];
        while !left.is_empty() && !end.requested() {
            std::thread::sleep(Duration::from_millis(5));
            left.retain(|name| !is_confined(name));
        }
        end.request();
        left
    });
    assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
    assert_eq!(seen.join().unwrap(), [""; 0]);
}
