//! Instances on this host's `/dev/kvm`, without devices, and with one of a simulated host, which can be claimed and not opened.
//! Where KVM does not open, these tests say so and pass.

use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::thread::{JoinHandle, sleep};

use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::guest::PeerReport;
use vm_passthrough::pci::BarKind;
use vm_passthrough::readiness::ExplainOptions;
use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};
use vm_passthrough::{PassthroughManager, PciAddress};

use super::handle::{AttachRequest, DetachHow};
use super::wire::{Done, Report, Room};
use super::*;
use crate::config::Boot;
use crate::deadlines::VMM_GIVES_UP;
use crate::os::process::{ChildProgram, packets};
use crate::os::sandbox;
use crate::vmm::tests::Screen;
use crate::vmm::tests::guest::Asm;
use crate::vmm::{Console, End, GuestAnswer, OnReboot};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A VMM's answer that leaves everything open.
const NO_LIMIT: Room = Room { slot: Ok(None), memlock: None };

/// What happened to an instance, and how it ended.
type Lived = (Vec<String>, Result<End, Vec<String>>);

/// This program, as a guest's VMM that is a test here.
fn this_program(test: &str) -> ChildProgram {
    let test = format!("guest::tests::{test}");
    let arguments = ["--exact", &test, "--ignored", "--nocapture", "--test-threads=1"];
    let path = std::env::current_exe().expect("this program");
    ChildProgram { path, arguments: arguments.map(Into::into).to_vec() }
}

#[test]
#[ignore = "it is the process that the other tests start"]
fn a_vmm() {
    vmm_main().expect("a VMM");
}

/// A guest that boots this program.
fn config(kernel: &std::path::Path) -> GuestConfig {
    GuestConfig {
        name: "test".into(),
        vcpus: 1,
        memory: 4 << 20,
        hugepages: None,
        numa_nodes: None,
        boot: Boot { kernel: kernel.into(), initrd: None, cmdline: String::new() },
        devices: Vec::new(),
        settings: BTreeMap::new(),
        peer_to_peer: true,
        hot_plug_slots: Some(1),
        accelerators: Vec::new(),
        vsock: None,
        disks: Vec::new(),
        nets: Vec::new(),
        unconfined: Vec::new(),
    }
}

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
    start_as("a_vmm", guest, devices, screen, stop)
}

/// As [`start_with`], with the VMM that a test here is.
fn start_as(
    vmm: &str,
    guest: Asm,
    devices: Option<Devices>,
    screen: &Screen,
    stop: &Stop,
) -> Option<(Handle, JoinHandle<Lived>)> {
    let is_taken_over = vmm != "a_vmm";
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        println!("skipped: /dev/kvm does not open: {error}");
        return None;
    }
    let kernel = guest.elf();
    let config = config(kernel.path());
    let console = Console { output: Box::new(screen.clone()), input: None };
    let options = MachineOptions { console, on_reboot: OnReboot::End, ..MachineOptions::default() };
    let mut vmm = VmmOptions { program: this_program(vmm), ..VmmOptions::default() };
    if is_taken_over {
        (vmm.order, vmm.stop) = (Duration::from_secs(2), Duration::from_secs(2));
    }
    let inbox = Inbox::new(stop).expect("an eventfd");
    let handle = inbox.handle();
    let instance = Instance::new(&config, options, vmm, devices, inbox).expect("a machine");
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
        let options = DeviceOptions {
            claim,
            backend: None,
            without_reset: false,
            roms: BTreeMap::new(),
            vf_tokens: BTreeMap::new(),
        };
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
    check(true, "the guest's power was cut", "NotClaimed", "MachineDropped");
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
        [(long, BarKind::Memory32, 0xb000_0000, 64 << 20), (wide, BarKind::Memory64, 1 << 42, 2 << 40)]
    {
        let group = address.bus().into();
        let function = SimFunction::nvme(address).bar(4, kind, true, at, size).group(group).driver("nvme");
        sim.add(&function).expect("a function");
    }
    let drivers = SimDrivers::new(&sim);
    let manager = PassthroughManager::with_host(drivers.host()).expect("a manager");
    let options = DeviceOptions {
        claim: ClaimOptions::default(),
        backend: None,
        without_reset: false,
        roms: BTreeMap::new(),
        vf_tokens: BTreeMap::new(),
    };
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
    // The simulated host has no VFIO: it is claimed, and released.
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
    let late = ask(|answer| handle.reset(answer)).expect_err("it has ended");
    assert!(matches!(&late, Refused::Conflict(text) if text.contains("has ended")), "{late:?}");
}

#[test]
fn a_device_that_is_detached_while_it_is_claimed_is_given_back_and_the_guest_runs_on() {
    let sim = SimHost::new().expect("a host");
    let disk: PciAddress = "0000:01:00.0".parse().expect("an address");
    sim.add_driver("nvme").expect("a driver");
    sim.add(&SimFunction::nvme(disk).group(1).driver("nvme")).expect("a function");
    let drivers = SimDrivers::new(&sim);
    // No driver lets go of it before somebody wants it back.
    let (reached, reaches) = channel();
    let (go, goes) = channel::<()>();
    drivers.observe(move || {
        let _ = reached.send(());
        let _ = goes.recv_timeout(TIMEOUT);
    });
    let manager = PassthroughManager::with_host(drivers.host()).expect("a manager");
    let claim = ClaimOptions::default();
    let options = DeviceOptions {
        claim,
        backend: None,
        without_reset: false,
        roms: BTreeMap::new(),
        vf_tokens: BTreeMap::new(),
    };
    let devices = Devices::new(manager, Vec::new(), options, ExplainOptions::for_memory(4 << 20));
    let stop = Stop::new().expect("an eventfd");
    let screen = Screen::default();
    let guest = Asm::default().print("up").spin();
    let Some((handle, guest)) = start_with(guest, Some(devices), &screen, &stop) else { return };
    let started = Instant::now();
    while screen.text() != "up" && started.elapsed() < TIMEOUT {
        sleep(Duration::from_millis(1));
    }
    let (told, answers) = channel();
    let tell = told.clone();
    let request = AttachRequest { functions: vec![disk], ..AttachRequest::default() };
    handle.attach(request, move |attached| tell.send(format!("{attached:?}")).expect("somebody waits"));
    reaches.recv_timeout(TIMEOUT).expect("its driver is asked for it");
    // Other requests are answered while the claim waits.
    let absent = "0000:02:00.0".parse().expect("an address");
    let gone = ask(|answer| handle.detach(absent, DetachHow::Surprise, answer)).expect_err("it is not there");
    assert!(matches!(&gone, Refused::NotFound(text) if text.contains("0000:02:00.0")), "{gone:?}");
    handle.detach(disk, DetachHow::Surprise, move |detached| {
        told.send(format!("{detached:?}")).expect("somebody waits");
    });
    drop(go);
    let answered = [(); 2].map(|()| answers.recv_timeout(TIMEOUT).expect("an answer"));
    assert!(answered[0].contains("was detached before it had come"), "{answered:?}");
    assert_eq!(answered[1], "Ok(Surprise)");
    assert_eq!(sim.driver_of(disk).as_deref(), Some("nvme"));
    assert!(!guest.is_finished());
    handle.stop();
    let (happened, ran) = guest.join().expect("no panic");
    assert_eq!(ran, Ok(End::Stopped), "{happened:?}");
    assert!(happened.contains(&"NotClaimed".to_owned()), "{happened:?}");
}

#[test]
fn a_guest_that_is_reset_and_not_to_be_restarted_ends_with_that() {
    let (stop, screen) = (Stop::new().expect("an eventfd"), Screen::default());
    let Some((handle, guest)) = start_with(Asm::default().spin(), None, &screen, &stop) else { return };
    assert_eq!(ask(|answer| handle.reset(answer)), Ok(()));
    assert_eq!(guest.join().expect("no panic").1, Ok(End::Reset));
}

/// A VMM as one may be that a guest has taken over: it answers that its machine is made, and from then on does what `act` does.
fn taken_over(mut act: impl FnMut(&OwnedFd, Order)) {
    taken_over_with(|keeper, _, order| act(keeper, order));
}

/// As [`taken_over`], with the descriptors that its first order came with.
fn taken_over_with(mut act: impl FnMut(&OwnedFd, &mut Vec<OwnedFd>, Order)) {
    let (keeper, mut files) = (sandbox::enter(None).expect("a socket"), Vec::new());
    while let Some((order, came)) = packets::receive(&keeper).expect("an order") {
        match order {
            Order::Make(_) => {
                files = came;
                say(&keeper, Done::Made(sandbox::Confinement::default()));
            }
            Order::Ping => {
                packets::send(&keeper, &Report::Here(PeerReport::default()), &[]).expect("a keeper")
            }
            order => act(&keeper, &mut files, order),
        }
    }
}

fn say(keeper: &OwnedFd, done: Done) {
    packets::send(keeper, &Report::Done(Ok(done)), &[]).expect("a keeper");
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_does_nothing() {
    taken_over(|_, _| ());
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_talks_nonsense() {
    let nonsense = br#"{"Started":{"restarts":0,"more":1}}"#;
    taken_over(|keeper, _| assert!(rustix::io::write(keeper, nonsense).is_ok()));
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_answers_something_else() {
    taken_over(|keeper, order| match order {
        Order::RoomFor(_) => say(keeper, Done::GivenUp),
        _ => say(keeper, Done::It),
    });
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_answers_twice() {
    taken_over(|keeper, _| [Done::It, Done::It].into_iter().for_each(|done| say(keeper, done)));
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_dies() {
    taken_over(|_, _| std::process::abort());
}

/// It opens nothing, says of everything that it is done, and ends nothing.
#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_goes_on() {
    taken_over(|keeper, order| say(keeper, Done::Room(NO_LIMIT).for_order(&order)));
}

/// As [`a_vmm_that_goes_on`].
#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_reports_without_end() {
    taken_over(|keeper, order| {
        say(keeper, Done::Room(NO_LIMIT).for_order(&order));
        if matches!(order, Order::Boot) {
            let keeper = keeper.try_clone().expect("a descriptor");
            std::thread::spawn(move || {
                let reports = (0..).map(|restarts| Report::Started { restarts });
                reports.take_while(|report| packets::send(&keeper, report, &[]).is_ok()).for_each(drop);
            });
        }
    });
}

/// Goes on as [`a_vmm_that_goes_on`], and reports this once the guest is to run.
fn reports(report: impl Fn() -> Report) {
    taken_over(|keeper, order| {
        say(keeper, Done::Room(NO_LIMIT).for_order(&order));
        if matches!(order, Order::Boot) {
            packets::send(keeper, &report(), &[]).expect("a keeper");
        }
    });
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_answers_for_a_slot() {
    reports(|| Report::Asked("0000:01:00.0".parse().expect("an address"), GuestAnswer::LetGo));
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_is_there_unasked() {
    reports(|| Report::Here(PeerReport::default()));
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_restarts_what_never_started() {
    reports(|| Report::Started { restarts: 1 });
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_closes_its_channel() {
    let keeper = sandbox::enter(None).expect("a socket");
    drop(packets::receive::<Order>(&keeper).expect("an order"));
    say(&keeper, Done::Made(sandbox::Confinement::default()));
    drop(packets::receive::<Order>(&keeper).expect("an order"));
    say(&keeper, Done::It);
    drop(keeper);
    sleep(TIMEOUT);
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_asks_nonsense_for_workers() {
    taken_over_with(|keeper, files, order| {
        say(keeper, Done::Room(NO_LIMIT).for_order(&order));
        // As its keeper gave them: stop, reset, power button, workers.
        let nonsense = br#"{"Kill":"all"}"#;
        assert!(!matches!(order, Order::Boot) || rustix::io::write(&files[3], nonsense).is_ok());
    });
}

#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_hears_what_nobody_told() {
    taken_over_with(|keeper, files, order| {
        say(keeper, Done::Room(NO_LIMIT).for_order(&order));
        // As its keeper gave them: stop first.
        let stop = &files[0];
        assert!(!matches!(order, Order::Boot) || rustix::io::write(stop, &1u64.to_ne_bytes()).is_ok());
    });
}

/// What the process is that makes no machine.
#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_makes_nothing() {
    let _keeper = sandbox::enter(None).expect("a socket");
    sleep(TIMEOUT);
}

#[test]
fn a_vmm_that_makes_no_machine_ends_at_its_deadline_or_when_the_guest_is_stopped() {
    let check = |stops: bool, expect: &str| {
        let (stop, kernel) = (Stop::new().expect("an eventfd"), Asm::default().spin().elf());
        let config = config(kernel.path());
        let vmm = VmmOptions {
            program: this_program("a_vmm_that_makes_nothing"),
            made: Duration::from_secs(if stops { 600 } else { 1 }),
            ..VmmOptions::default()
        };
        let inbox = Inbox::new(&stop).expect("an eventfd");
        let handle = inbox.handle();
        if stops {
            handle.stop();
        }
        let made = Instance::new(&config, MachineOptions::default(), vmm, None, inbox);
        let error = made.err().expect("no machine").to_string();
        assert!(error.contains(expect), "{error}");
        let late = ask(|answer| handle.reset(answer)).expect_err("it has ended");
        assert!(matches!(late, Refused::Conflict(_)), "{late:?}");
    };
    check(false, "was killed, as it did not make the machine within 1 s; see its messages in the log");
    check(true, &format!("was killed, as it did not make the machine within {} s", VMM_GIVES_UP.as_secs()));
}

impl Done {
    /// This where it answers that order.
    fn for_order(self, order: &Order) -> Self {
        if matches!(order, Order::RoomFor(_)) { self } else { Self::It }
    }
}

#[test]
fn a_vmm_that_misbehaves_is_killed_and_everything_goes_back() {
    let check_with = |vmm: &str, resets: bool, expect: &[&str]| {
        let sim = SimHost::new().expect("a host");
        let disk: PciAddress = "0000:01:00.0".parse().expect("an address");
        sim.add(&SimFunction::nvme(disk).group(1).driver("nvme")).expect("a function");
        let manager = PassthroughManager::with_host(SimDrivers::new(&sim).host()).expect("a manager");
        let options = DeviceOptions {
            claim: ClaimOptions::default(),
            backend: None,
            without_reset: false,
            roms: BTreeMap::new(),
            vf_tokens: BTreeMap::new(),
        };
        let devices = Devices::new(manager, Vec::new(), options, ExplainOptions::for_memory(4 << 20));
        let (stop, screen) = (Stop::new().expect("an eventfd"), Screen::default());
        let Some((handle, guest)) = start_as(vmm, Asm::default().spin(), Some(devices), &screen, &stop)
        else {
            return;
        };
        let begun = Instant::now();
        let request = AttachRequest { functions: vec![disk], ..AttachRequest::default() };
        let refused = ask(|answer| handle.attach(request, answer)).expect_err("nothing can be opened");
        if resets {
            let refused = ask(|answer| handle.reset(answer)).expect_err("nothing is reset");
            let refused = refused.to_string();
            assert!(expect.iter().any(|expect| refused.contains(expect)), "{refused}");
        }
        handle.stop();
        while !guest.is_finished() {
            assert!(begun.elapsed() < TIMEOUT, "{vmm}: it does not end");
            sleep(Duration::from_millis(1));
        }
        let (happened, ran) = guest.join().expect("no panic");
        let ran = ran.map_or_else(|errors| errors.join(";"), |end| end.to_string());
        let said = format!("{refused} {ran}");
        assert!(expect.iter().any(|expect| said.contains(expect)), "{vmm}: {said}; {happened:?}");
        assert_eq!(sim.driver_of(disk).as_deref(), Some("nvme"), "{vmm}");
    };
    let check = |vmm, expect| check_with(vmm, false, &[expect]);
    check(
        "a_vmm_that_does_nothing",
        "was killed, as it did not boot the guest within 2 s; see its messages in the log",
    );
    check("a_vmm_that_talks_nonsense", "was killed, as it made an invalid report (");
    check("a_vmm_that_answers_something_else", "was killed, as it answered another order than it was given;");
    // The second answer is to nothing, or not to the next order where that has been given by then.
    let twice = [
        "was killed, as it answered an order that it was not given;",
        "was killed, as it answered another order than it was given;",
    ];
    check_with("a_vmm_that_answers_twice", false, &twice);
    check("a_vmm_that_answers_for_a_slot", "as it answered for a slot that the guest was not asked for;");
    check("a_vmm_that_is_there_unasked", "as it said unasked that it is there;");
    check(
        "a_vmm_that_restarts_what_never_started",
        "as it reported the start of a guest that did not start;",
    );
    check(
        "a_vmm_that_closes_its_channel",
        "was killed, as it closed its channel; see its messages in the log",
    );
    check("a_vmm_that_asks_nonsense_for_workers", "was killed, as it made an invalid request for a worker (");
    check(
        "a_vmm_that_dies",
        "was ended by signal 6; see its messages in the log, and the Linux kernel's log (dmesg)",
    );
    check("a_vmm_that_goes_on", "was killed, as it did not end the guest within 2 s; see");
    check("a_vmm_that_hears_what_nobody_told", "was killed, as it did not end the guest within 2 s; see");
    // Its answers wait behind its reports.
    check("a_vmm_that_reports_without_end", "was killed, as it did not ");
    check_with("a_vmm_that_goes_on", true, &["was killed, as it did not reset the guest within 2 s; see"]);
}

/// It is one that has not been taken over, with a name of its own.
#[test]
#[ignore = "it is a process that another test starts"]
fn a_vmm_that_keeps_what_it_had() {
    a_vmm();
}

#[test]
fn a_vmm_that_keeps_a_device_is_killed_for_it() {
    const VMM: &str = "a_vmm_that_keeps_what_it_had";
    let sim = SimHost::new().expect("a host");
    let disk: PciAddress = "0000:01:00.0".parse().expect("an address");
    sim.add(&SimFunction::nvme(disk).group(1).driver("nvme")).expect("a function");
    let drivers = SimDrivers::new(&sim);
    let mut manager = PassthroughManager::with_host(drivers.host()).expect("a manager");
    let mut claim = ClaimOptions::default();
    claim.deadline = Duration::from_secs(1);
    manager.claim(disk, &claim).expect("claimed");
    let options = DeviceOptions {
        claim,
        backend: None,
        without_reset: false,
        roms: BTreeMap::new(),
        vf_tokens: BTreeMap::new(),
    };
    let devices = Devices::new(manager, Vec::new(), options, ExplainOptions::for_memory(4 << 20));
    let (stop, screen) = (Stop::new().expect("an eventfd"), Screen::default());
    let Some((handle, guest)) =
        start_as(VMM, Asm::default().print("up").spin(), Some(devices), &screen, &stop)
    else {
        return;
    };
    let started = Instant::now();
    while screen.text() != "up" && started.elapsed() < TIMEOUT {
        sleep(Duration::from_millis(1));
    }
    // As if it had the device open for as long as it lives.
    drivers.hold(disk);
    let lives = || {
        std::fs::read_dir("/proc").expect("processes").flatten().any(|process| {
            std::fs::read_to_string(process.path().join("cmdline")).is_ok_and(|words| words.contains(VMM))
        })
    };
    assert!(lives());
    let lets_go = std::thread::spawn(move || {
        while lives() && started.elapsed() < TIMEOUT {
            sleep(Duration::from_millis(1));
        }
        drivers.let_go(disk);
    });
    let request = AttachRequest { functions: vec![disk], ..AttachRequest::default() };
    let refused = ask(|answer| handle.attach(request, answer)).expect_err("nothing can be opened");
    handle.stop();
    let (happened, ran) = guest.join().expect("no panic");
    lets_go.join().expect("no panic");
    let ran = ran.expect_err("its VMM was killed").join(";");
    let expect = "was killed, as it kept 0000:01:00.0 open after it was detached";
    assert!(ran.contains(expect), "{refused}; {ran}; {happened:?}");
    assert_eq!(sim.driver_of(disk).as_deref(), Some("nvme"));
}
