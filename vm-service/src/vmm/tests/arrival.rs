//! Guests that run before their devices have arrived.

use std::thread;

use super::*;

/// Config space behind the first port.
const DEVICE: u64 = 0xe010_0000;
/// Bridge control of the first port, in whose upper half the bit is that resets what is behind it.
const BRIDGE_CONTROL: u64 = 0xe000_803c;

/// Prints what identifies the device behind the first port, and then what needs the device.
fn reader() -> Asm {
    let early = Asm::default().load32(DEVICE).expect_eax(FakeDevice::ID, "id ");
    early.load32(DEVICE + 0x10).expect_eax(0xc000_0000, "bar ")
}

fn expect(machine: &Machine, index: u8) -> Arc<FakeDevice> {
    let device = Arc::new(FakeDevice::new(index).on(machine.vmm().bars()));
    machine.expect(ExpectedFunction::like(&*device)).unwrap();
    device
}

/// Runs a guest that is to have a device until it has printed `held`, which comes right before an access that is held; then
/// does `then`. What became of it, and what it has printed in the end.
fn run(
    guest: Asm,
    on_reboot: OnReboot,
    held: &'static str,
    then: impl FnOnce(&MachineHandle, Arc<FakeDevice>, &Stop) + Send + 'static,
) -> Option<(RunReport, String, Arc<FakeDevice>)> {
    if !kvm() {
        return None;
    }
    let kernel = guest.elf();
    let (mut machine, screen, stop) = machine(kernel.path(), 2, on_reboot);
    let device = expect(&machine, 0);
    let (slots, seen, asks, arrives) = (machine.handle(), screen.clone(), stop.clone(), device.clone());
    let other = thread::spawn(move || {
        let started = Instant::now();
        while seen.text() != held && started.elapsed() < TIMEOUT {
            thread::sleep(Duration::from_millis(1));
        }
        // It would go on at once if it were not held.
        thread::sleep(Duration::from_millis(200));
        assert_eq!(seen.text(), held);
        then(&slots, arrives, &asks);
    });
    let report = machine.run(&stop).unwrap();
    other.join().unwrap();
    Some((report, screen.text(), device))
}

#[test]
fn who_reaches_for_a_device_is_held_until_it_is_there() {
    let arrive = |slots: &MachineHandle, device: Arc<FakeDevice>, _: &Stop| {
        slots.arrive(device.clone()).unwrap();
        assert!(matches!(slots.arrive(device), Err(MachineError::Twice { .. })));
        let other = Arc::new(FakeDevice::new(7));
        assert!(matches!(slots.arrive(other), Err(MachineError::NotThere { .. })));
    };
    let check = |guest: Asm, held, prints, resets| {
        let Some((report, text, device)) = run(guest.power_off(), OnReboot::End, held, arrive) else {
            return;
        };
        assert_eq!((report.end, text.as_str(), device.resets()), (End::Shutdown, prints, resets));
    };
    let data = Asm::default().store32(DEVICE + 4, 2).load32(0xc000_0000).expect_eax(0xa5a5_a5a5, "data");
    check(reader().bytes(&data.finish()), "id ", "id bar data", 0);
    // So is a write, and a reset of its bus.
    let decode = Asm::default().print("w").store32(DEVICE + 4, 2).load32(DEVICE + 4).expect_eax(2, "on");
    check(decode, "w", "won", 0);
    let reset = Asm::default().print("r").store16(BRIDGE_CONTROL + 2, 1 << 6).print("eset");
    check(reset, "r", "reset", 1);
}

#[test]
fn all_devices_are_there_before_one_is_reached() {
    if !kvm() {
        return;
    }
    let kernel = reader().power_off().elf();
    let (mut machine, screen, stop) = machine(kernel.path(), 1, OnReboot::End);
    let devices = [expect(&machine, 0), expect(&machine, 1)];
    let (slots, seen) = (machine.handle(), screen.clone());
    let other = thread::spawn(move || {
        let [first, second] = devices;
        slots.arrive(first).unwrap();
        let started = Instant::now();
        while seen.text() != "id " && started.elapsed() < TIMEOUT {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(200));
        assert_eq!(seen.text(), "id ");
        slots.arrive(second).unwrap();
    });
    assert_eq!(machine.run(&stop).unwrap().end, End::Shutdown);
    other.join().unwrap();
    assert_eq!(screen.text(), "id bar ");
}

#[test]
fn a_guest_that_is_held_ends_at_once() {
    let asked = Instant::now();
    let stop = |_: &MachineHandle, _, stop: &Stop| stop.request();
    if let Some((report, text, _)) = run(reader().print("!").spin(), OnReboot::Restart, "id ", stop) {
        assert_eq!((report.end, text.as_str()), (End::Stopped, "id "));
        assert!(asked.elapsed() < TIMEOUT);
    }
    // The second vCPU is held in a read through the ports, and the first crashes. mov ax, 0x600; mov ds, ax; mov eax,
    // 0x80010010; mov dx, 0xcf8; out dx, eax; mov byte [0], 1; mov dl, 0xfc; in eax, dx; mov dx, 0x3f8; out dx, al; hlt
    let code = [
        &[0xb8, 0x00, 0x06, 0x8e, 0xd8, 0x66, 0xb8, 0x10, 0x00, 0x01, 0x80, 0xba, 0xf8, 0x0c, 0x66, 0xef][..],
        &[0xc6, 0x06, 0x00, 0x00, 0x01, 0xb2, 0xfc, 0x66, 0xed, 0xba, 0xf8, 0x03, 0xee, 0xf4],
    ]
    .concat();
    if kvm() {
        let crash = Asm::default().start_second(&code).wait_while(0x6000, 0).bytes(&[0x0f, 0x0b]);
        let kernel = crash.elf();
        let (mut machine, screen, stop) = machine(kernel.path(), 2, OnReboot::End);
        expect(&machine, 0);
        assert_eq!(machine.run(&stop).unwrap().end, End::TripleFault);
        assert_eq!(screen.text(), "");
    }
}

#[test]
fn a_reboot_while_a_device_is_awaited_resets_none_and_waits_again() {
    // The second vCPU: mov ax, 0x600; mov ds, ax; cmp byte [0], 3; je +9; inc byte [0]; mov dx, 0xcf9; mov al, 14; out dx, al; hlt
    let code = [
        &[0xb8, 0x00, 0x06, 0x8e, 0xd8, 0x80, 0x3e, 0x00, 0x00, 0x03, 0x74, 0x0a][..],
        &[0xfe, 0x06, 0x00, 0x00, 0xba, 0xf9, 0x0c, 0xb0, 0x0e, 0xee, 0xf4],
    ]
    .concat();
    let guest = Asm::default().print("r").start_second(&code);
    let guest = guest.load32(DEVICE + 0x10).expect_eax(0xc000_0000, "bar").power_off();
    let arrive = |slots: &MachineHandle, device: Arc<FakeDevice>, _: &Stop| slots.arrive(device).unwrap();
    let Some((report, text, device)) = run(guest, OnReboot::Restart, "rrrr", arrive) else { return };
    assert_eq!((report.end, report.restarts, text.as_str()), (End::Shutdown, 3, "rrrrbar"));
    assert_eq!(device.resets(), 0);
}
