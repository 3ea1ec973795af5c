//! Files in the kernel's place that take for ever to load, or are none.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{CWD, FileType, mknodat};

use super::guest::Asm;
use super::*;

/// Runs a machine and answers with how that ended and what the guest printed; a panic when it does not end.
fn run(kernel: &Path, on_reboot: OnReboot) -> (Result<End, String>, String) {
    let (sender, ended) = mpsc::channel();
    let kernel = kernel.to_owned();
    std::thread::spawn(move || {
        let screen = Screen::default();
        let console = Console { output: Box::new(screen.clone()), input: None };
        let options = MachineOptions { console, on_reboot, ..MachineOptions::default() };
        let stop = Stop::new().unwrap();
        let made = Machine::new(&config(&kernel, 1), options);
        let ran = made.and_then(|mut machine| machine.run(&stop));
        let ran = ran.map(|report| report.end).map_err(|error| error.to_string());
        sender.send((ran, screen.text()))
    });
    ended.recv_timeout(TIMEOUT + Duration::from_secs(30)).expect("an end")
}

/// An ELF file of 64 KiB with N program headers of this kind, which all say the same.
fn elf(count: u16, kind: u32, offset: u64, address: u64, len: u64) -> Vec<u8> {
    let code = Asm::default().print("k").power_off().finish();
    let mut file = std::fs::read(guest::elf(&code, 0x10_0000, 0x10_0000, 0).path()).unwrap();
    let first = file[64..120].to_vec();
    file[56..58].copy_from_slice(&(count + 1).to_le_bytes());
    // The headers take the place of the code, which goes to the end.
    let mut headers = file[..64].to_vec();
    for header in 0..=count {
        let mut bytes = first.clone();
        if header > 0 {
            bytes[0..4].copy_from_slice(&kind.to_le_bytes());
            for (at, value) in [(8, offset), (24, address), (32, len), (40, len)] {
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
        } else {
            bytes[8..16].copy_from_slice(&0xf000u64.to_le_bytes());
        }
        headers.extend(bytes);
    }
    let mut file = headers;
    assert!(file.len() <= 0xf000);
    file.resize(0xf000, 0);
    file.extend(&code);
    file.resize(0x1_0000, 0);
    file
}

#[test]
fn segments_that_overlap_are_refused() {
    if !kvm() {
        return;
    }
    let kernel = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(kernel.path(), elf(1_000, 1, 0, 0x20_0000, 0x1_0000)).unwrap();
    let (ended, _) = run(kernel.path(), OnReboot::End);
    assert!(ended.as_ref().is_err_and(|error| error.contains("overlap")), "{ended:?}");
}

#[test]
fn a_note_is_not_read_however_long_it_is() {
    if !kvm() {
        return;
    }
    let kernel = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(kernel.path(), elf(1, 4, 0x1_0000, 0, 1 << 40)).unwrap();
    kernel.as_file().set_len((1 << 40) + 0x1_0000).unwrap();
    assert_eq!(run(kernel.path(), OnReboot::End), (Ok(End::Shutdown), "k".into()));
}

#[test]
fn a_fifo_in_the_kernels_place_is_no_kernel_and_what_replaces_a_kernel_waits_for_the_next_start() {
    if !kvm() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (path, fifo) = (folder.path().join("kernel"), folder.path().join("fifo"));
    let make = || mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
    make();
    let (ended, _) = run(&fifo, OnReboot::End);
    assert!(ended.as_ref().is_err_and(|error| error.contains("not a regular file")), "{ended:?}");
    // It comes while the guest runs, which reboots for ever.
    std::fs::copy(Asm::default().print("k").out8(0xcf9, 0x0e).spin().elf().path(), &path).unwrap();
    let (screen, stop) = (Screen::default(), Stop::new().unwrap());
    let console = Console { output: Box::new(screen.clone()), input: None };
    let options = MachineOptions { console, ..MachineOptions::default() };
    let mut machine = Machine::new(&config(&path, 1), options).unwrap();
    std::fs::rename(fifo, path).unwrap();
    let stops = stop.clone();
    let watches = std::thread::spawn(move || {
        let until = std::time::Instant::now() + TIMEOUT;
        while screen.text().len() < 2 && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        stops.request();
        screen.text()
    });
    assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
    assert!(watches.join().unwrap().starts_with("kk"));
}
