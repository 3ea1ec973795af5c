//! Concurrent claims: a driver that never returns delays only its own device, and no claim sees another half made.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::*;
use crate::ledger::crash::At;
use crate::ledger::{self, LedgerEntry};
use crate::pci;

const CHILD: &str = "VM_PASSTHROUGH_TEST_STUCK";
const TIMEOUT: Duration = Duration::from_secs(60);
/// Deadline of an operation that must stay stuck.
const FOREVER: Duration = Duration::from_secs(3600);

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the record of a claim while its owner waits.
fn record(host: &Host, target: PciAddress) -> LedgerEntry {
    let claims = ledger::claims(host, TIMEOUT).unwrap();
    claims.into_iter().map(Result::unwrap).find(|claim| claim.entry.target == target).unwrap()
}

/// Claims, shares, releases and removes another device while an operation on the GPU is stuck.
fn check_others_go_on(sim: &SimHost, host: &Host) {
    let mut manager = manager(host.clone());
    let options = within(TIMEOUT);
    manager.claim(nvme(), &options).unwrap();
    assert!(on_vfio(sim, &[nvme()]));
    release(&mut manager, nvme()).unwrap();
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"));
    drop(manager.share(nvme()).unwrap());
    manager.claim(nvme(), &ClaimOptions { persistent: true, ..options.clone() }).unwrap();
    release(&mut manager, nvme()).unwrap();
    let tentative = ClaimOptions { persistent: true, tentative: true, ..options.clone() };
    let claimed = manager.claim(nvme(), &tentative).unwrap();
    manager.keep(&[claimed]).unwrap();
    release(&mut manager, nvme()).unwrap();
    assert_eq!(manager.recover().unwrap().failed.len(), 0);
    // The device is removed while it is claimed.
    manager.claim(nvme(), &options).unwrap();
    sim.remove(nvme()).unwrap();
    release(&mut manager, nvme()).unwrap();
    sim.add(&SimFunction::nvme(nvme()).group(2).driver("nvme")).unwrap();
}

/// Checks that other managers get errors that name the process that holds the GPU.
fn check_it_is_kept(host: &Host, is_releasing: bool) {
    let owner = format!("process {} (tester)", std::process::id());
    let entry = record(host, gpu());
    assert!(entry.alive && entry.entry.claimed == is_releasing && entry.entry.releasing == is_releasing);
    let mut other = manager(host.clone());
    let hurried = ClaimOptions { lock_deadline: SHORT, ..within(TIMEOUT) };
    let locked = ["cannot claim 0000:01:00.", "timed out after 0.1 s waiting for ", &owner];
    fails(other.claim(gpu(), &hurried), &locked);
    fails(other.claim(audio(), &hurried), &locked);
    let changing = match is_releasing {
        true => format!("is being released: {owner} claimed it; wait"),
        false => format!("is being claimed by {owner}; wait"),
    };
    fails(release_within(&mut other, gpu(), SHORT), &[&changing]);
    assert!(other.recover().unwrap().recovered.is_empty());
}

/// An unprivileged process gets the error of the ledger, as before functions had locks.
#[test]
fn what_cannot_be_locked_is_an_error_of_the_ledger() {
    let sim = new_sim();
    sim.write("run/locks", "").unwrap();
    let mut manager = manager(SimDrivers::new(&sim).host());
    let claimed = manager.claim(gpu(), &within(TIMEOUT));
    assert!(matches!(&claimed, Err(ManagerError::Claim(ClaimError::Ledger(_)))), "{claimed:?}");
    let shared = manager.share(gpu());
    assert!(matches!(&shared, Err(ManagerError::Claim(ClaimError::Ledger(_)))), "{shared:?}");
}

#[test]
fn a_surrendered_lock_is_free() {
    let sim = new_sim();
    let host = SimDrivers::new(&sim).host();
    let functions = BTreeSet::from([gpu(), audio()]);
    let mut locks = FunctionLocks::take(&host, &functions, LONG, Instant::now() + LONG, || false).unwrap();
    assert!(locks.cover([gpu(), audio()]));
    assert!(!locks.cover([gpu(), usb()]));
    locks.surrender(gpu());
    assert!(!locks.cover([gpu()]) && locks.cover([audio()]));
    assert!(FunctionLock::take(&host, gpu(), LONG).unwrap().is_some());
}

/// A claim and a release wait for a claim that another process has not completed, but not past their deadline.
#[test]
fn an_incomplete_claim_is_waited_for() {
    type Act = fn(&Host, Duration) -> Result<(), ClaimError>;
    let claim: Act = |host, lock_deadline| {
        let options = ClaimOptions { lock_deadline, ..within(TIMEOUT) };
        take(host, gpu(), &options, || pci::scan(host)).map(drop)
    };
    let release: Act = |host, deadline| release_persistent(host, gpu(), deadline);
    for (act, is_claim) in [(claim, true), (release, false)] {
        let sim = new_sim();
        let (before, host) = (bindings(&sim), SimDrivers::new(&sim).host());
        let mut owner = manager(host.clone());
        let tentative = ClaimOptions { persistent: true, tentative: true, ..within(TIMEOUT) };
        let claimed = owner.claim(gpu(), &tentative).unwrap();
        let acting = thread::spawn(move || {
            let waits = Cell::new(0);
            crash::observe(move |at| {
                waits.set(waits.get() + usize::from(at == At::Wait));
                assert!(waits.get() < 1000, "it waits past its deadline");
            });
            let hurried = act(&host, SHORT);
            // The owner completes its claim at the first wait.
            let owner = RefCell::new(Some(owner));
            crash::observe(move |at| {
                if at == At::Wait
                    && let Some(mut owner) = owner.take()
                {
                    owner.keep(std::slice::from_ref(&claimed)).unwrap();
                }
            });
            (hurried, act(&host, TIMEOUT))
        });
        let (hurried, patient) = acting.join().unwrap();
        assert!(matches!(&hurried, Err(ClaimError::InProgress { releasing: false, .. })), "{hurried:?}");
        patient.unwrap();
        assert_eq!(on_vfio(&sim, &[gpu(), audio(), usb()]), is_claim);
        assert_eq!(bindings(&sim) == before, !is_claim);
    }
}

#[test]
fn a_release_is_recorded_before_its_first_write() {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    manager.claim(gpu(), &within(TIMEOUT)).unwrap();
    let (host, seen) = (drivers.host(), std::sync::Arc::new(std::sync::Mutex::new(Vec::new())));
    let sink = seen.clone();
    drivers.observe(move || sink.lock().unwrap().push(record(&host, gpu()).entry.releasing));
    release(&mut manager, gpu()).unwrap();
    let seen = seen.lock().unwrap();
    assert!(!seen.is_empty() && seen.iter().all(|&releasing| releasing), "{seen:?}");
}

fn is_written(drivers: &SimDrivers, path: &str) -> bool {
    drivers.writes().iter().any(|(written, _)| written.ends_with(path))
}

#[test]
fn a_stuck_claim_delays_no_other_device() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    drivers.hold(gpu());
    let host = drivers.host();
    let claim = thread::spawn(move || {
        let mut manager = manager(host);
        manager.claim(gpu(), &within(FOREVER)).map(|_| manager)
    });
    wait_until("the unbind does not begin", || is_written(&drivers, "nvidia/unbind"));
    check_others_go_on(&sim, &drivers.host());
    check_it_is_kept(&drivers.host(), false);
    assert!(!claim.is_finished());
    drivers.let_go(gpu());
    let mut manager = claim.join().unwrap().unwrap();
    release(&mut manager, gpu()).unwrap();
    assert_eq!(bindings(&sim), before);
}

#[test]
fn a_stuck_release_delays_no_other_device() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    manager(drivers.host()).claim(gpu(), &persistent()).unwrap();
    drivers.hold(gpu());
    let host = drivers.host();
    let released = thread::spawn(move || {
        let mut manager = manager(host);
        let claimed = manager.find_claim(gpu()).unwrap();
        manager.release_within(&claimed, FOREVER)
    });
    wait_until("the unbind does not begin", || is_written(&drivers, "vfio-pci/unbind"));
    check_others_go_on(&sim, &drivers.host());
    check_it_is_kept(&drivers.host(), true);
    assert!(!released.is_finished());
    drivers.let_go(gpu());
    released.join().unwrap().unwrap();
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
}

/// A dead process's claim that can't be undone blocks neither other recoveries nor claims of other devices.
#[test]
fn a_stuck_recovery_delays_no_other_device() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    for target in [gpu(), nvme()] {
        let mut owner = manager(drivers.host());
        owner.claim(target, &ClaimOptions::default()).unwrap();
        let path = sim.path(&format!("run/ledger/{target}.claim"));
        let record = fs::read(&path).unwrap();
        drop(owner);
        for function in [gpu(), audio(), usb(), nvme()].into_iter().filter(|other| other.same_slot(target)) {
            sim.set_driver(function, Some(VFIO_DRIVER)).unwrap();
            sim.set(function, "driver_override", "vfio-pci\n").unwrap();
        }
        fs::write(&path, record).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    drivers.hold(gpu());
    let host = drivers.host();
    let recovery = thread::spawn(move || recover(&host, FOREVER).unwrap());
    wait_until("nothing is unbound", || {
        drivers
            .writes()
            .iter()
            .any(|write| (write.0.ends_with("unbind"), &*write.1) == (true, "0000:01:00.0"))
    });
    wait_until("the other claim is not undone", || ledger_files(&sim) == ["0000:01:00.0.claim"]);
    check_others_go_on(&sim, &drivers.host());
    drivers.let_go(gpu());
    let recovery = recovery.join().unwrap();
    assert!(recovery.failed.is_empty() && recovery.recovered.len() == 2, "{recovery:?}");
    assert_eq!(bindings(&sim), before);
}

#[test]
fn a_stuck_process_delays_no_other_process() {
    if let Ok(root) = std::env::var(CHILD) {
        let drivers = SimDrivers::at(Path::new(&root));
        drivers.hold(gpu());
        let _ = manager(drivers.host()).claim(gpu(), &within(FOREVER));
        unreachable!("its driver lets go of it never");
    }
    let sim = new_sim();
    let before = bindings(&sim);
    let host = SimDrivers::new(&sim).host();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "claim::tests::locks::a_stuck_process_delays_no_other_process", "--test-threads=1"])
        .env(CHILD, sim.root())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the child does not unbind it", || sim.driver_of(gpu()).is_none());
    check_others_go_on(&sim, &host);
    let owner = format!("waiting for process {} (tester) to unlock 0000:01:00.0", child.id());
    let hurried = ClaimOptions { lock_deadline: SHORT, ..within(TIMEOUT) };
    fails(manager(host.clone()).claim(gpu(), &hurried), &["cannot claim 0000:01:00.0", &owner]);
    child.kill().unwrap();
    child.wait().unwrap();
    // The next claim of one of the functions undoes it.
    let mut next = manager(host);
    next.claim(audio(), &within(TIMEOUT)).unwrap();
    release(&mut next, audio()).unwrap();
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
}

/// A thread that stops at its `point`th point until it is resumed.
struct Stopped {
    thread: JoinHandle<Result<(), ManagerError>>,
    /// Receives `true` when the thread has reached the point, and is disconnected when it has ended.
    here: Receiver<bool>,
    go_on: std::sync::mpsc::Sender<()>,
}

type Work = fn(Host) -> Result<(), ManagerError>;

impl Stopped {
    fn start(root: &Path, point: usize, work: Work) -> Self {
        let ((here_sender, here), (go_on, wait)) = (channel(), channel());
        let drivers = SimDrivers::at(root);
        drivers.observe(crash::crash_point);
        let thread = thread::spawn(move || {
            let passed = std::cell::Cell::new(0);
            crash::observe(move |at| {
                if at == At::Point && passed.replace(passed.get() + 1) == point {
                    here_sender.send(true).unwrap();
                    wait.recv_timeout(TIMEOUT).unwrap();
                }
            });
            work(drivers.host())
        });
        Self { thread, here, go_on }
    }
}

/// Runs `first` to each of its points, then `second` until it ends or waits for `first`, and then both to their ends. Calls
/// `check` each time with the point, both results, and whether `second` waited.
fn interleave(
    prepare: impl Fn(&SimHost),
    first: Work,
    second: Work,
    check: impl Fn(usize, &SimHost, Result<(), ManagerError>, Result<(), ManagerError>, bool),
) {
    for point in 0.. {
        let sim = new_sim();
        prepare(&sim);
        let stopped = Stopped::start(sim.root(), point, first);
        let Ok(true) = stopped.here.recv() else {
            stopped.thread.join().unwrap().unwrap();
            assert!(point > 30, "only {point} points");
            return;
        };
        let (go_on, waited) =
            (stopped.go_on.clone(), std::sync::Arc::new(std::sync::atomic::AtomicBool::default()));
        let (root, waits) = (sim.root().to_owned(), waited.clone());
        let second = thread::spawn(move || {
            crash::observe(move |at| {
                if at == At::Wait && !waits.swap(true, std::sync::atomic::Ordering::SeqCst) {
                    go_on.send(()).unwrap();
                }
            });
            second(SimDrivers::at(&root).host())
        });
        let second = second.join().unwrap();
        // It may be running already.
        let _ = stopped.go_on.send(());
        let first = stopped.thread.join().unwrap();
        check(point, &sim, first, second, waited.load(std::sync::atomic::Ordering::SeqCst));
    }
}

fn claim_and_release(host: Host, address: PciAddress) -> Result<(), ManagerError> {
    let mut manager = manager(host);
    let claimed = manager.claim(address, &within(TIMEOUT))?;
    manager.release(&claimed)
}

/// Whether a claim was refused as another process has one of the functions.
fn is_taken(result: &Result<(), ManagerError>) -> bool {
    matches!(result, Err(ManagerError::Claim(ClaimError::Taken { .. } | ClaimError::NotClaimed(_))))
}

#[test]
fn claims_of_one_device_come_one_after_the_other_wherever_they_meet() {
    let before = bindings(&new_sim());
    interleave(
        |_| (),
        |host| claim_and_release(host, gpu()),
        |host| claim_and_release(host, audio()),
        |point, sim, first, second, _| {
            first.unwrap_or_else(|error| panic!("{point}: {error}"));
            assert!(second.is_ok() || is_taken(&second), "{point}: {second:?}");
            assert_eq!(bindings(sim), before, "{point}");
            assert!(ledger_files(sim).is_empty(), "{point}");
        },
    );
}

#[test]
fn a_release_and_a_claim_meet_anywhere() {
    let before = bindings(&new_sim());
    interleave(
        |sim| drop(manager(SimDrivers::new(sim).host()).claim(gpu(), &persistent()).unwrap()),
        |host| release(&mut manager(host), gpu()),
        |host| claim_and_release(host, gpu()),
        |point, sim, first, second, _| {
            // The claim may be taken up before it is released.
            assert!(first.is_ok() || is_taken(&first), "{point}: {first:?}");
            second.unwrap_or_else(|error| panic!("{point}: {error}"));
            if first.is_ok() {
                assert_eq!(bindings(sim), before, "{point}");
                assert!(ledger_files(sim).is_empty(), "{point}");
            }
        },
    );
}

#[test]
fn a_recovery_and_a_claim_meet_anywhere() {
    let before = bindings(&new_sim());
    interleave(
        |sim| {
            let host = SimDrivers::new(sim).host();
            let mut owner = manager(host);
            owner.claim(gpu(), &ClaimOptions::default()).unwrap();
            let path = sim.path("run/ledger/0000:01:00.0.claim");
            let record = fs::read(&path).unwrap();
            drop(owner);
            fs::write(&path, record).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            for address in [gpu(), audio(), usb()] {
                sim.set_driver(address, Some(VFIO_DRIVER)).unwrap();
                sim.set(address, "driver_override", "vfio-pci\n").unwrap();
            }
        },
        |host| claim_and_release(host, gpu()),
        |host| manager(host).recover().map(|recovery| assert!(recovery.failed.is_empty(), "{recovery:?}")),
        |point, sim, first, second, _| {
            first.and(second).unwrap_or_else(|error| panic!("{point}: {error}"));
            assert_eq!(bindings(sim), before, "{point}");
            assert!(ledger_files(sim).is_empty(), "{point}");
        },
    );
}

/// A claim never waits for one of another device that is stopped in a write to sysfs, or with its functions locked.
#[test]
fn claims_of_two_devices_wait_for_records_alone() {
    let before = bindings(&new_sim());
    let free = std::cell::Cell::new(0);
    interleave(
        |_| (),
        |host| claim_and_release(host, gpu()),
        |host| claim_and_release(host, nvme()),
        |point, sim, first, second, waited| {
            first.and(second).unwrap_or_else(|error| panic!("{point}: {error}"));
            assert_eq!(bindings(sim), before, "{point}");
            free.set(free.get() + usize::from(!waited));
        },
    );
    // Before and after each of eight writes to claim it and eight to release it.
    assert!(free.get() >= 32, "{}", free.get());
}
