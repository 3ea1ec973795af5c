//! Instances on this host's `/dev/kvm`, without devices. Where it does not open, these tests say so and pass.

use std::io;

use super::*;
use crate::config::Boot;
use crate::vmm::tests::guest::Asm;
use crate::vmm::{Console, End, OnReboot};

/// What began in an instance, and how it ended.
type Lived = (Vec<Action>, Result<End, Vec<String>>);

/// Runs a guest in a thread of its own.
fn start(guest: Asm, stop: &Stop) -> Option<JoinHandle<Lived>> {
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        println!("skipped: /dev/kvm does not open: {error}");
        return None;
    }
    let kernel = guest.elf();
    let config = GuestConfig {
        name: "test".into(),
        vcpus: 1,
        memory: 4 << 20,
        boot: Boot { kernel: kernel.path().into(), initrd: None, cmdline: String::new() },
        devices: Vec::new(),
        accelerators: Vec::new(),
        vsock: None,
        disks: Vec::new(),
    };
    let console = Console { output: Box::new(io::sink()), input: None };
    let options = MachineOptions { console, on_reboot: OnReboot::End, ..MachineOptions::default() };
    let instance = Instance::new(&config, options, None, stop).expect("a machine");
    Some(std::thread::spawn(move || {
        // It is loaded while the instance lives.
        let _kernel = kernel;
        let mut begun = Vec::new();
        let ran = instance.run(|progress| match progress {
            Progress::Begins(action) => begun.push(action),
            Progress::Happened { .. } => {}
        });
        (begun, ran.map(|report| report.end))
    }))
}

#[test]
fn several_guests_live_in_one_process_and_end_apart() {
    let stops = [(); 3].map(|()| Stop::new().expect("an eventfd"));
    let [own, asked, early] = &stops;
    early.request();
    let Some(spins) = start(Asm::default().spin(), asked) else { return };
    let powers_off = start(Asm::default().power_off(), own).expect("a guest");
    let stopped_early = start(Asm::default().spin(), early).expect("a guest");
    let end = |guest: JoinHandle<Lived>| guest.join().expect("no panic");
    assert_eq!(end(powers_off), (vec![Action::Boot, Action::DropMachine], Ok(End::Shutdown)));
    assert_eq!(end(stopped_early), (vec![Action::DropMachine], Ok(End::Stopped)));
    assert!(!spins.is_finished());
    asked.request();
    let (begun, ran) = end(spins);
    assert_eq!((begun.first(), ran), (Some(&Action::Boot), Ok(End::Stopped)));
}
