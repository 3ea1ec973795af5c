//! Instances on this host's `/dev/kvm`, without devices, and with one of a simulated host, which can be claimed and not opened.
//! Where KVM does not open, these tests say so and pass.

use std::thread::sleep;

use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::pci::BarKind;
use vm_passthrough::readiness::ExplainOptions;
use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};
use vm_passthrough::{PassthroughManager, PciAddress};

use super::handle::{AttachRequest, DetachHow};
use super::*;
use crate::config::Boot;
use crate::vmm::tests::Screen;
use crate::vmm::tests::guest::Asm;
use crate::vmm::{Console, End, OnReboot};

const TIMEOUT: Duration = Duration::from_secs(60);

/// What happened to an instance, and how it ended.
type Lived = (Vec<String>, Result<End, Vec<String>>);

/// Runs a guest in a thread of its own.
fn start(guest: Asm, devices: Option<Devices>, screen: &Screen, stop: &Stop) -> Option<JoinHandle<Lived>> {
    Some(start_with(guest, devices, screen, stop)?.1)
}

/// As [`start`], with what asks of it.
fn start_with(
    guest: Asm,
    devices: Option<Devices>,
    screen: &Screen,
    stop: &Stop,
) -> Option<(Handle, JoinHandle<Lived>)> {
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
        hot_plug_slots: Some(1),
        accelerators: Vec::new(),
        vsock: None,
        disks: Vec::new(),
        nets: Vec::new(),
    };
    let console = Console { output: Box::new(screen.clone()), input: None };
    let options = MachineOptions { console, on_reboot: OnReboot::End, ..MachineOptions::default() };
    let instance = Instance::new(&config, options, devices, stop).expect("a machine");
    let handle = instance.handle();
    let run = move || {
        // It is loaded while the instance lives.
        let _kernel = kernel;
        let mut happened = Vec::new();
        let ran = instance.run(|Progress { event, .. }| {
            let event = format!("{event:?}");
            happened.extend(event.split('(').next().map(str::to_owned));
        });
        (happened, ran.map(|report| report.end))
    };
    Some((handle, std::thread::spawn(run)))
}

#[test]
fn several_guests_live_in_one_process_and_end_apart() {
    let stops = [(); 3].map(|()| Stop::new().expect("an eventfd"));
    let [own, asked, early] = &stops;
    early.request();
    let start = |guest, stop| start(guest, None, &Screen::default(), stop);
    let Some(spins) = start(Asm::default().spin(), asked) else { return };
    let powers_off = start(Asm::default().power_off(), own).expect("a guest");
    let stopped_early = start(Asm::default().spin(), early).expect("a guest");
    let end = |guest: JoinHandle<Lived>| guest.join().expect("no panic");
    let (mut happened, ran) = end(powers_off);
    // Whoever boots it may hear of that after it has ended.
    happened.retain(|event| event != "Booted");
    assert_eq!((happened.join(" ").as_str(), ran), ("Start Started Ended MachineDropped", Ok(End::Shutdown)));
    let (happened, ran) = end(stopped_early);
    assert_eq!((happened.join(" ").as_str(), ran), ("Stop Start MachineDropped", Ok(End::Stopped)));
    assert!(!spins.is_finished());
    asked.request();
    let (happened, ran) = end(spins);
    assert_eq!((happened.contains(&"Started".to_owned()), ran), (true, Ok(End::Stopped)));
}

#[test]
fn a_guest_boots_while_its_device_is_claimed_and_ends_with_what_fails() {
    const DEVICE: u64 = 0xe010_0000;
    let check = |stops: bool, expect: &str, claimed: &str, last: &str| {
        let sim = SimHost::new().expect("a host");
        let address: PciAddress = "0000:01:00.0".parse().expect("an address");
        sim.add(&SimFunction::nvme(address).group(1).driver("nvme")).expect("a function");
        let (drivers, screen, stop) =
            (SimDrivers::new(&sim), Screen::default(), Stop::new().expect("an eventfd"));
        // No driver lets go of it before the guest waits for it.
        let (seen, asks, started) = (screen.clone(), stop.clone(), Instant::now());
        drivers.observe(move || {
            while seen.text() != "id " && started.elapsed() < TIMEOUT {
                sleep(Duration::from_millis(1));
            }
            if stops {
                asks.request();
            }
        });
        let mut manager = PassthroughManager::with_host(drivers.host()).expect("a manager");
        let functions = manager.scan_devices().expect("a scan").to_vec();
        let claim = ClaimOptions::default();
        let options = DeviceOptions { claim, backend: None, without_reset: false };
        let explain = ExplainOptions::for_memory(4 << 20);
        let devices = Devices::new(manager, functions, options, explain);
        let guest = Asm::default().load32(DEVICE).print("id ").load32(DEVICE + 0x10).print("bar").power_off();
        let Some(guest) = start(guest, Some(devices), &screen, &stop) else { return };
        let (happened, ran) = guest.join().expect("no panic");
        assert_eq!(screen.text(), "id ");
        let ran = ran.map_or_else(|errors| errors.join(";"), |end| end.to_string());
        assert!(ran.contains(expect), "{ran}");
        assert!(happened.iter().any(|event| event == claimed), "{happened:?}");
        assert!(happened.join(" ").ends_with(last), "{happened:?}");
        assert_eq!(sim.driver_of(address).as_deref(), Some("nvme"));
    };
    check(true, "the guest was stopped", "NotClaimed", "MachineDropped");
    // The simulated host has no VFIO.
    check(false, "VFIO_GET_API_VERSION", "Claimed", "MachineDropped Released");
}

/// Asks of a guest, and waits for what is answered.
fn ask<T: Send + 'static>(
    ask: impl FnOnce(Box<dyn FnOnce(Result<T, Refused>) + Send>),
) -> Result<T, Refused> {
    let (sender, answers) = channel();
    ask(Box::new(move |answer| sender.send(answer).expect("somebody waits")));
    answers.recv_timeout(TIMEOUT).expect("an answer")
}

#[test]
fn a_guest_that_runs_is_asked_and_answers_once() {
    let sim = SimHost::new().expect("a host");
    let [disk, bare, absent, long, wide] =
        ["01:00.0", "02:00.0", "03:00.0", "04:00.0", "05:00.0"].map(|text| text.parse().expect("an address"));
    sim.add_driver("nvme").expect("a driver");
    sim.add(&SimFunction::nvme(disk).group(1).driver("nvme")).expect("a function");
    sim.add(&SimFunction::nvme(bare).no_group().driver("nvme")).expect("a function");
    // One BAR that is larger than any slot's window below 4 GiB, and one larger than any above.
    for (address, kind, at, size) in
        [(long, BarKind::Memory32, 0xb000_0000, 64 << 20), (wide, BarKind::Memory64, 1 << 40, 512 << 30)]
    {
        let group = address.bus().into();
        let function = SimFunction::nvme(address).bar(4, kind, true, at, size).group(group).driver("nvme");
        sim.add(&function).expect("a function");
    }
    let drivers = SimDrivers::new(&sim);
    let manager = PassthroughManager::with_host(drivers.host()).expect("a manager");
    let options = DeviceOptions { claim: ClaimOptions::default(), backend: None, without_reset: false };
    let devices = Devices::new(manager, Vec::new(), options, ExplainOptions::for_memory(4 << 20));
    let stop = Stop::new().expect("an eventfd");
    let screen = Screen::default();
    let guest = Asm::default().print("up").spin();
    let Some((handle, guest)) = start_with(guest, Some(devices), &screen, &stop) else { return };
    // Its slots have their windows then.
    let started = Instant::now();
    while screen.text() != "up" && started.elapsed() < TIMEOUT {
        sleep(Duration::from_millis(1));
    }
    let attach = |address| {
        let request = AttachRequest { functions: vec![address], ..AttachRequest::default() };
        ask(|answer| handle.attach(request, answer))
    };
    let check = |address, expect: &str| {
        let answer = attach(address).expect_err("it is refused");
        let text = format!("{answer:?} {answer}");
        assert!(text.contains(expect), "{text}");
        for address in [disk, bare, long, wide] {
            assert_eq!(sim.driver_of(address).as_deref(), Some("nvme"), "{address}");
        }
    };
    check(absent, "NotFound");
    check(bare, "no-iommu");
    for large in [long, wide] {
        check(large, "bars-too-large");
        check(large, "have the guest start with it");
    }
    // The simulated host has no VFIO: it is claimed, and given back.
    check(disk, "VFIO");
    check(disk, "VFIO");
    let gone = ask(|answer| handle.detach(disk, DetachHow::Surprise, answer)).expect_err("it is not there");
    assert!(matches!(&gone, Refused::NotFound(text) if text.contains("0000:01:00.0")), "{gone:?}");
    assert!(!guest.is_finished());
    handle.stop();
    let (happened, ran) = guest.join().expect("no panic");
    assert_eq!(ran, Ok(End::Stopped), "{happened:?}");
    // Whoever comes too late is answered, too.
    let late = attach(disk).expect_err("it has ended");
    assert!(matches!(&late, Refused::Conflict(text) if text.contains("has ended")), "{late:?}");
    handle.reset();
}
