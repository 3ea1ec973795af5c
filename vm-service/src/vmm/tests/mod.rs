//! The machine on this host's `/dev/kvm`, with tiny guests. Where it does not open, these tests say so and pass.

mod arrival;
mod boot;
mod disk;
pub(crate) mod guest;
#[path = "../../../tests/shared/storage.rs"]
mod storage;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest::Asm;

use super::*;
use crate::config::{Boot, GuestConfig};
use crate::vmm::testing::FakeDevice;

/// Nothing that a tiny guest does takes so long, even where KVM guests are emulated.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Default)]
pub(crate) struct Screen(Arc<Mutex<Vec<u8>>>);

impl Screen {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl std::io::Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn config(kernel: &Path, vcpus: u8) -> GuestConfig {
    GuestConfig {
        name: "test".into(),
        vcpus,
        memory: 4 << 20,
        hugepages: None,
        numa_nodes: None,
        boot: Boot { kernel: kernel.into(), initrd: None, cmdline: "a=b".into() },
        devices: Vec::new(),
        settings: BTreeMap::new(),
        peer_to_peer: true,
        hot_plug_slots: Some(0),
        accelerators: Vec::new(),
        vsock: None,
        disks: Vec::new(),
        nets: Vec::new(),
        unconfined: Vec::new(),
    }
}

fn kvm() -> bool {
    let opens = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if let Err(error) = &opens {
        println!("skipped: /dev/kvm does not open: {error}");
    }
    opens.is_ok()
}

/// A machine, what it prints, and a stop that cuts its power if it takes too long.
fn machine(kernel: &Path, vcpus: u8, on_reboot: OnReboot) -> (Machine, Screen, Stop) {
    machine_of(&config(kernel, vcpus), on_reboot)
}

fn machine_of(config: &GuestConfig, on_reboot: OnReboot) -> (Machine, Screen, Stop) {
    let screen = Screen::default();
    let console = Console { output: Box::new(screen.clone()), input: None };
    let options = MachineOptions { console, on_reboot, ..MachineOptions::default() };
    let machine = Machine::new(config, options).unwrap();
    let stop = Stop::new().unwrap();
    let late = stop.clone();
    std::thread::spawn(move || {
        std::thread::sleep(TIMEOUT);
        late.request();
    });
    (machine, screen, stop)
}

/// Gives a machine that does not run a device.
fn add(machine: &Machine, device: Arc<FakeDevice>) -> Result<(), MachineError> {
    machine.expect(ExpectedFunction::like(&*device))?;
    machine.handle().arrive(device)
}

/// Runs a guest and checks how it ends and what it prints.
fn check(guest: Asm, vcpus: u8, end: End, prints: &str) -> Option<RunReport> {
    if !kvm() {
        return None;
    }
    let kernel = guest.elf();
    let (mut machine, screen, stop) = machine(kernel.path(), vcpus, OnReboot::End);
    let report = machine.run(&stop).unwrap();
    assert_eq!((report.end, screen.text().as_str()), (end, prints));
    Some(report)
}

#[test]
fn a_guest_prints_and_powers_off() {
    let report = check(Asm::default().print("hello").power_off(), 1, End::Shutdown, "hello");
    if let Some(report) = report {
        assert_eq!(report.exits.port_writes, 6);
        assert_eq!(report.restarts, 0);
        assert_eq!(report.exits.hot_spots()[0], (HotSpot::PortWrite(0x3f8), 5));
    }
}

#[test]
fn a_kernel_in_a_bzimage_is_entered_unpacked() {
    if !kvm() {
        return;
    }
    let good = Asm::default().print("kernel").power_off().bzimage();
    // A magic number of another format: the bzImage's own code has to deal with it.
    let other = Asm::default().print("kernel").power_off().bzimage();
    let mut bytes = std::fs::read(other.path()).unwrap();
    bytes[1024 + 0x400] ^= 0xff;
    std::fs::write(other.path(), bytes).unwrap();
    for (kernel, prints) in [(good, "kernel"), (other, "!")] {
        let (mut machine, screen, stop) = machine(kernel.path(), 1, OnReboot::End);
        assert_eq!(machine.run(&stop).unwrap().end, End::Shutdown);
        assert_eq!(screen.text(), prints);
    }
}

#[test]
fn every_way_to_reset_is_one() {
    for (port, value) in [(0xcf9, 0x06), (0xcf9, 0x0e), (0x64, 0xfe)] {
        check(Asm::default().out8(port, value).spin(), 1, End::Reboot, "");
    }
    // An empty interrupt table and an invalid opcode.
    check(Asm::default().bytes(&[0x0f, 0x0b]), 1, End::TripleFault, "");
    // Values that mean nothing do nothing.
    let nothing =
        Asm::default().out8(0xcf9, 2).out8(0x64, 0xff).out8(0x600, 5 << 2).out8(0x600, 4 << 2 | 1 << 5);
    check(nothing.print("on").power_off(), 1, End::Shutdown, "on");
}

#[test]
fn the_power_button_interrupts_the_guest() {
    if !kvm() {
        return;
    }
    // Pin 5 of the I/O APIC as vector 0x45; the processor takes no interrupts, so its local APIC keeps it as requested.
    let guest = Asm::default()
        .store32(0xfee0_00f0, 0x1ff)
        .store32(0xfec0_0000, 0x1a)
        .store32(0xfec0_0010, 0x45)
        .store32(0xfec0_0000, 0x1b)
        .store32(0xfec0_0010, 0)
        .print("r")
        .wait_while(0xfee0_0220, 0)
        .load32(0xfee0_0220)
        .expect_eax(1 << 5, "p")
        .power_off();
    let kernel = guest.elf();
    let (mut machine, screen, stop) = machine(kernel.path(), 1, OnReboot::End);
    let (button, watched, asked) = (machine.power_button(), screen.clone(), stop.clone());
    // Before the guest runs nothing hears of it.
    button.press();
    let pressing = std::thread::spawn(move || {
        while watched.text().is_empty() && !asked.requested() {
            std::thread::sleep(Duration::from_millis(5));
        }
        button.press();
    });
    assert_eq!(machine.run(&stop).unwrap().end, End::Shutdown);
    pressing.join().unwrap();
    assert_eq!(screen.text(), "rp");
}

#[test]
fn a_reboot_starts_afresh() {
    if !kvm() {
        return;
    }
    // At each start the zero-initialised memory and the serial scratch register must be zero; the guest then writes
    // to both and resets. It is stopped once the fake device was reset often enough.
    let bss = 0x10_0800;
    let guest = Asm::default()
        .load32(bss)
        .expect_eax(0, "z")
        .store32(bss, 7)
        .bytes(&[0x66, 0xba, 0xff, 0x03, 0xec, 0x0f, 0xb6, 0xc0])
        .expect_eax(0, "s")
        .out8(0x3ff, 0x5a)
        .out8(0xcf9, 0x0e)
        .spin();
    // The program ends before 0x800.
    let kernel = guest::elf(&guest.finish(), 0x10_0000, 0x10_0000, 0x1000);
    let (mut machine, screen, stop) = machine(kernel.path(), 2, OnReboot::Restart);
    let device = Arc::new(FakeDevice::new(0));
    add(&machine, device.clone()).unwrap();
    let watch = (stop.clone(), device.clone());
    let started = Instant::now();
    std::thread::spawn(move || {
        while watch.1.resets() < 3 && started.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        watch.0.request();
    });
    let report = machine.run(&stop).unwrap();
    assert_eq!(report.end, End::Stopped);
    assert!(report.restarts >= 3, "{report:?}");
    assert_eq!(report.restarts as usize, device.resets());
    let text = screen.text();
    assert!(text.len() >= 6 && "zs".repeat(text.len()).starts_with(&text), "{text}");
}

/// One that crashes as soon as it starts is not restarted as fast as the machine can.
#[test]
fn a_guest_that_crashes_at_once_restarts_more_and_more_slowly() {
    if !kvm() {
        return;
    }
    let kernel = Asm::default().bytes(&[0x0f, 0x0b]).elf();
    let (mut machine, _, stop) = machine(kernel.path(), 1, OnReboot::Restart);
    let soon = stop.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(4));
        soon.request();
    });
    let started = Instant::now();
    let report = machine.run(&stop).unwrap();
    assert_eq!(report.end, End::Stopped);
    // At 0, 0.1, 0.3, 0.7, 1.5, 3.1, 6.3 s at the soonest, and every 10 s after 22.7 s.
    let most = 7 + started.elapsed().as_secs_f64() as u32 / 6;
    assert!(report.restarts <= most, "{} restarts in {:?}", report.restarts, started.elapsed());
    assert!(started.elapsed() < TIMEOUT, "a stop while it waits ends it");
}

#[test]
fn a_pending_stop_ends_guests_that_loop_for_ever() {
    if !kvm() {
        return;
    }
    for vcpus in [1, 2] {
        for guest in [Asm::default().spin(), Asm::default().bytes(&[0xf4]).spin()] {
            let kernel = guest.elf();
            let (mut machine, _, stop) = machine(kernel.path(), vcpus, OnReboot::End);
            stop.request();
            let started = Instant::now();
            assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
            assert!(started.elapsed() < Duration::from_secs(10));
            // It can be run again, and stopped while it runs.
            let stop = Stop::new().unwrap();
            let later = stop.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                later.request();
            });
            assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
        }
    }
}

#[test]
fn a_guest_may_have_all_vcpus_that_there_are() {
    if kvm() {
        let kernel = Asm::default().spin().elf();
        drop(machine(kernel.path(), u8::MAX, OnReboot::End));
    }
}

#[test]
fn a_guest_that_never_exits_is_reported_once() {
    let hint = |guest: Asm| {
        let kernel = guest.elf();
        let (mut machine, _, stop) = machine(kernel.path(), 2, OnReboot::End);
        machine.silence = Duration::from_millis(500);
        let soon = stop.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(3));
            soon.request();
        });
        let log =
            crate::log::limit::testing::logged(|| assert_eq!(machine.run(&stop).unwrap().end, End::Stopped));
        log.matches("has touched no device for 500ms").count()
    };
    if kvm() {
        assert_eq!(hint(Asm::default().spin()), 1);
        assert_eq!(hint(Asm::default().print("x").spin()), 0);
    }
}

#[test]
fn two_vcpus_meet() {
    // mov ax, 0x600; mov ds, ax; mov byte [0], 1; hlt; jmp back
    let second = [0xb8, 0x00, 0x06, 0x8e, 0xd8, 0xc6, 0x06, 0x00, 0x00, 0x01, 0xf4, 0xeb, 0xfd];
    let guest = Asm::default().store32(0x6000, 0).start_second(&second);
    // wait: mov rbx, 0x6000; cmp dword [rbx], 1; jne wait
    let guest = guest
        .bytes(&[0x48, 0xbb])
        .bytes(&0x6000u64.to_le_bytes())
        .bytes(&[0x83, 0x3b, 0x01, 0xf3, 0x90, 0x75, 0xf9]);
    check(guest.print("met").power_off(), 2, End::Shutdown, "met");
}

#[test]
fn hostile_accesses_do_nothing() {
    let mut guest = Asm::default();
    for port in [0x0, 0x3fd, 0x3fe, 0x5fe, 0x600, 0xcf8, 0xcf9, 0xcfa, 0xcfc, 0xcfe, 0xcff, 0x1000, 0xfffc] {
        guest = guest.out32(port, 0xffff_fff3).in32(port);
    }
    for address in [
        0xe000_0000,
        0xe000_0ffd,
        0xe000_0fff,
        0xe00f_ffff,
        0xe010_0000,
        0xefff_fffc,
        0xc000_0000,
        0xdfff_ffff,
        0xfec0_0001,
        0xffff_fff0u64,
    ] {
        guest = guest.load32(address).store32(address, u32::MAX);
    }
    let guest = guest.load32(0xe00f_8000).expect_eax(u32::MAX, "none").load32(0xe000_0000);
    check(guest.expect_eax(0x0008_1b36, " bridge").power_off(), 1, End::Shutdown, "none bridge");
}

#[test]
fn a_string_of_reads_of_a_port_is_as_many_reads() {
    // Of the console's scratch register, and of PCI's address register.
    let guest = Asm::default()
        .out8(0x3ff, 0x5a)
        .repeat_in(0x3ff, false, 0x5000, 4)
        .load32(0x5000)
        .expect_eax(0x5a5a_5a5a, "bytes")
        .out32(0xcf8, 0x8000_1234)
        .repeat_in(0xcf8, true, 0x5000, 2)
        .load32(0x5004)
        .expect_eax(0x8000_1234, " words")
        .power_off();
    check(guest, 1, End::Shutdown, "bytes words");
}

#[test]
fn a_device_is_reached_where_the_machine_placed_it() {
    if !kvm() {
        return;
    }
    // Turn decoding on in the device behind the first port, then read its BAR.
    let guest = Asm::default()
        .store32(0xe010_0004, 2)
        .load32(0xe010_0010)
        .expect_eax(0xc000_0000, "bar ")
        .load32(0xc000_0010)
        .expect_eax(0xa5a5_a5a5, "data")
        .power_off();
    let kernel = guest.elf();
    let (mut machine, screen, stop) = machine(kernel.path(), 1, OnReboot::End);
    let device = Arc::new(FakeDevice::new(0).on(machine.vmm().bars()));
    add(&machine, device.clone()).unwrap();
    assert!(matches!(add(&machine, device), Err(MachineError::Twice { .. })));
    assert_eq!(machine.run(&stop).unwrap().end, End::Shutdown);
    assert_eq!(screen.text(), "bar data");
}

#[test]
fn a_reboot_keeps_what_was_plugged_and_lets_go_of_what_was_asked_for() {
    if !kvm() {
        return;
    }
    const SLOT: u64 = 0xe000_8058;
    const DEVICE: u64 = 0xe010_0000;
    // It waits for a device, says whether its BAR has a place, listens to the slot's button, and reboots when that is pressed or
    // the device goes.
    let guest = Asm::default()
        .print("boot ")
        .wait_while(SLOT, 3 << 8)
        .load32(DEVICE)
        .expect_eax(FakeDevice::ID, "there ")
        .load32(DEVICE + 0x10)
        .expect_eax(0xc000_0000, "placed ")
        .store16(SLOT + 2, 0x108)
        .store16(SLOT, 0x101)
        .print("listens ")
        .wait_while(SLOT, 0x0040_0101)
        .out8(0xcf9, 0x0e)
        .spin();
    let kernel = guest.elf();
    let config = GuestConfig { hot_plug_slots: Some(1), ..config(kernel.path(), 1) };
    let (mut machine, screen, stop) = machine_of(&config, OnReboot::Restart);
    let (handle, seen, late) = (machine.handle(), screen.clone(), stop.clone());
    let operator = std::thread::spawn(move || {
        let started = Instant::now();
        let wait = |text: &str| {
            while !seen.text().ends_with(text) && started.elapsed() < TIMEOUT {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let device = Arc::new(FakeDevice::new(0));
        let address = vm_passthrough::PassthroughDevice::address(&*device);
        wait("boot ");
        handle.plug(vec![device.clone()]).unwrap();
        wait("there ?listens ");
        let (sender, answers) = std::sync::mpsc::channel();
        handle.ask(address, move |answer| sender.send(answer).unwrap()).unwrap();
        let answer = answers.recv_timeout(TIMEOUT);
        wait("boot there placed listens ");
        let resets = device.resets();
        // It is out of its slot, and not dropped yet: the next start waits for it too.
        let out = handle.unplug(address).unwrap();
        wait("listens boot ");
        let later = device.resets();
        drop(out);
        handle.plug(vec![Arc::new(FakeDevice::new(1))]).unwrap();
        wait("boot there ?listens ");
        late.request();
        (answer, resets, later)
    });
    assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
    assert_eq!(operator.join().unwrap(), (Ok(GuestAnswer::LetGo), 1, 2));
    let lives = ["boot there ?listens ", "boot there placed listens ", "boot there ?listens "];
    assert_eq!(screen.text(), lives.concat());
}

#[test]
fn a_device_comes_and_goes_while_the_guest_runs() {
    if !kvm() {
        return;
    }
    // Slot control and status of the only port, and the bus behind it.
    const SLOT: u64 = 0xe000_8058;
    const DEVICE: u64 = 0xe010_0000;
    const PRESENT: u32 = 1 << 22;
    // The power indicator.
    const OFF: u32 = 3 << 8;
    let guest = Asm::default()
        .load32(DEVICE)
        .expect_eax(u32::MAX, "empty ")
        .wait_while(SLOT, OFF)
        .load32(DEVICE)
        .expect_eax(FakeDevice::ID, "there ")
        .store32(SLOT, 0xffff_0000)
        .print("taken ")
        .wait_while(SLOT, PRESENT)
        .load32(DEVICE)
        .expect_eax(u32::MAX, "gone");
    let kernel = guest.power_off().elf();
    let screen = Screen::default();
    let console = Console { output: Box::new(screen.clone()), input: None };
    let options = MachineOptions { console, on_reboot: OnReboot::End, ..MachineOptions::default() };
    let config = GuestConfig { hot_plug_slots: Some(1), ..config(kernel.path(), 1) };
    let mut machine = Machine::new(&config, options).unwrap();
    let stop = Stop::new().unwrap();
    let (slots, seen, late) = (machine.handle(), screen.clone(), stop.clone());
    let operator = std::thread::spawn(move || {
        let started = Instant::now();
        let wait = |text: &str| {
            while !seen.text().contains(text) && started.elapsed() < TIMEOUT {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let device = Arc::new(FakeDevice::new(0));
        wait("empty");
        slots.plug(vec![device.clone()]).unwrap();
        assert!(matches!(slots.plug(vec![Arc::new(FakeDevice::new(1))]), Err(MachineError::NoPort)));
        wait("taken");
        let out = slots.unplug(vm_passthrough::PassthroughDevice::address(&*device)).unwrap();
        wait("gone");
        late.request();
        out.len()
    });
    machine.run(&stop).unwrap();
    assert_eq!(screen.text(), "empty there taken gone");
    assert_eq!(operator.join().unwrap(), 1);
    let slots = machine.handle();
    drop(machine);
    assert!(matches!(slots.plug(vec![Arc::new(FakeDevice::new(0))]), Err(MachineError::NoPort)));
}

#[test]
fn a_vcpu_that_is_stuck_is_said_with_what_it_is_stuck_in() {
    if !kvm() {
        return;
    }
    let guest = Asm::default().store32(0xe010_0004, 2).print("x").load32(0xc000_0000 + FakeDevice::STUCK);
    let kernel = guest.power_off().elf();
    let (mut machine, screen, stop) = machine(kernel.path(), 1, OnReboot::End);
    machine.vcpu_stop = Duration::from_secs(1);
    add(&machine, Arc::new(FakeDevice::new(0).on(machine.vmm().bars()))).unwrap();
    let asks = (screen, stop.clone());
    std::thread::spawn(move || {
        while asks.0.text().is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(500));
        asks.1.request();
    });
    let error = machine.run(&stop).unwrap_err();
    let expect = "vCPU 0 did not stop within 1s: it is stuck in its read of page 0xc0000000";
    assert!(error.to_string().contains(expect), "{error}");
    assert!(matches!(machine.run(&stop), Err(MachineError::Unusable)));
    let another = add(&machine, Arc::new(FakeDevice::new(1)));
    assert!(matches!(another, Err(MachineError::Unusable)), "{another:?}");
}

/// Longer than a stop once waited.
#[test]
fn a_reset_by_the_guest_is_waited_for_when_it_is_stopped() {
    if !kvm() {
        return;
    }
    // Secondary bus reset of the first port.
    let kernel = Asm::default().print("x").store16(0xe000_803e, 1 << 6).spin().elf();
    let (mut machine, screen, stop) = machine(kernel.path(), 1, OnReboot::End);
    let device = Arc::new(FakeDevice::with_reset(0, Duration::from_secs(12)));
    add(&machine, device.clone()).unwrap();
    let asks = stop.clone();
    std::thread::spawn(move || {
        while screen.text().is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(500));
        asks.request();
    });
    assert_eq!(machine.run(&stop).unwrap().end, End::Stopped);
    assert_eq!(device.resets(), 1);
}

#[test]
fn an_output_that_never_returns_does_not_keep_the_guest_from_ending() {
    struct Stuck;
    impl std::io::Write for Stuck {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            loop {
                std::thread::park();
            }
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    if !kvm() {
        return;
    }
    let kernel = Asm::default().print("hello").power_off().elf();
    let console = Console { output: Box::new(Stuck), input: None };
    let options = MachineOptions { console, ..MachineOptions::default() };
    let mut machine = Machine::new(&config(kernel.path(), 1), options).unwrap();
    assert_eq!(machine.run(&Stop::new().unwrap()).unwrap().end, End::Shutdown);
}

#[test]
fn what_does_not_boot_is_said_exactly() {
    if !kvm() {
        return;
    }
    fn check(kernel: PathBuf, initrd: Option<PathBuf>, cmdline: &str, expect: &str) {
        let mut config = config(&kernel, 1);
        config.boot.initrd = initrd;
        config.boot.cmdline = cmdline.into();
        let stop = Stop::new().unwrap();
        let made = Machine::new(&config, MachineOptions::default());
        let error = made.and_then(|mut machine| machine.run(&stop)).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }
    let good = || Asm::default().power_off().finish();
    let file = |bytes: &[u8]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    };
    let path = |file: &tempfile::NamedTempFile| file.path().to_owned();
    check("/nonexistent/kernel".into(), None, "", "/nonexistent/kernel can't be read");
    check(path(&file(b"hello")), None, "", "neither the ELF magic number nor a Linux setup header");
    check(path(&file(b"\x7fELF\x02\x01")), None, "", "ends within its ELF headers");
    let outside = guest::elf(&good(), 0x10_0000, 0x20_0000, 0);
    check(path(&outside), None, "", "entry point 0x200000 is not in it");
    let big = guest::elf(&good(), 0x10_0000, 0x10_0000, 64 << 20);
    check(path(&big), None, "", "0x100000 to 0x");
    let low = guest::elf(&good(), 0x8000, 0x8000, 0);
    check(path(&low), None, "", "RAM for it is from 0x100000 to 0x400000");
    let wraps = guest::elf(&good(), u64::MAX - 0xfff, u64::MAX - 0xfff, 0x2000);
    check(path(&wraps), None, "", "raise `memory`");
    let kernel = Asm::default().power_off().elf();
    let initrd = file(&vec![0; 4 << 20]);
    check(path(&kernel), Some(path(&initrd)), "", "has 4194304 bytes, but only");
    check(path(&kernel), None, &"x".repeat(2048), "2048 bytes, but the kernel takes at most 2047");
    check(path(&kernel), None, "a\0b", "zero byte");
    let mut header = vec![0; 1024];
    header[0x202..0x206].copy_from_slice(b"HdrS");
    check(path(&file(&header)), None, "", "not a bzImage");
}

#[test]
fn no_kvm_says_what_to_do() {
    let options = MachineOptions { kvm: "/nonexistent/kvm".into(), ..MachineOptions::default() };
    let error = Machine::new(&config(Path::new("k"), 1), options).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/kvm") && error.contains("load kvm_intel or kvm_amd"), "{error}");
}
