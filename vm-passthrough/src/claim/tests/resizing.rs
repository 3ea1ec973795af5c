//! BARs that are given other sizes while a function is claimed.

use super::*;
use crate::claim::bind::Binder;
use crate::pci;

const GIB: u64 = 1 << 30;

/// BAR 1 of the GPU with so many bytes.
pub(super) fn options(size: u64) -> ClaimOptions {
    ClaimOptions {
        bar_sizes: BTreeMap::from([(gpu(), BTreeMap::from([(1, size)]))]),
        ..ClaimOptions::default()
    }
}

fn size(sim: &SimHost) -> Option<u64> {
    pci::bar_size(&sim.plain_host(), gpu(), 1)
}

#[test]
fn a_scan_finds_the_sizes() {
    let sim = new_sim();
    let function = pci::read_function(&sim.plain_host(), gpu()).unwrap();
    let sizes: Vec<_> = (26..35).map(|exponent| 1 << exponent).collect();
    assert_eq!((function.bar_sizes(1), function.bar_sizes(0)), (&sizes[..], &[][..]));
}

#[test]
fn a_bar_has_another_size_while_it_is_claimed() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    assert_eq!(size(&sim), Some(16 * GIB));
    for asked in [256 << 20, 16 * GIB, 8 * GIB] {
        let claim = manager.claim(gpu(), &options(asked)).unwrap();
        assert_eq!(size(&sim), Some(asked));
        assert!(on_vfio(&sim, &[gpu(), audio(), usb()]));
        manager.release(&claim).unwrap();
        assert_eq!(bindings(&sim), before, "{asked:#x}");
    }
    let writes = drivers.writes();
    let resizes: Vec<_> = writes.iter().filter(|(path, _)| path.ends_with("resource1_resize")).collect();
    let values: Vec<_> = resizes.iter().map(|(_, value)| value.as_str()).collect();
    assert_eq!(values, ["8", "14", "13", "14"], "what has the size already is left alone");
}

#[test]
fn what_a_bar_cannot_have_is_refused_and_nothing_touched() {
    fn check(options: &ClaimOptions, expect: &[&str]) {
        let sim = new_sim();
        let (before, drivers) = (bindings(&sim), SimDrivers::new(&sim));
        fails(manager(drivers.host()).claim(gpu(), options), expect);
        assert_eq!((bindings(&sim), drivers.writes()), (before, vec![]));
    }
    check(
        &options(32 * GIB),
        &["BAR 1 of 0000:01:00.0 can't have 34359738368 bytes: it can have 67108864, "],
    );
    check(&options(3), &["can't have 3 bytes"]);
    let other = |index| ClaimOptions {
        bar_sizes: BTreeMap::from([(gpu(), BTreeMap::from([(index, GIB)]))]),
        ..ClaimOptions::default()
    };
    check(&other(0), &["BAR 0 of 0000:01:00.0", "the device can't resize it"]);
    check(&other(5), &["BAR 5 of 0000:01:00.0", "the device can't resize it"]);
}

#[test]
fn a_window_that_is_too_small_is_named_and_all_undone() {
    let sim = new_sim();
    let (before, drivers) = (bindings(&sim), SimDrivers::new(&sim));
    drivers.fail("resource1_resize", "13", 1, libc::ENOSPC);
    let mut manager = manager(drivers.host());
    let expect = ["can't give BAR 1 8 GiB", "resource1_resize", "the bridges above it have no room"];
    fails(manager.claim(gpu(), &options(8 * GIB)), &expect);
    assert_eq!((bindings(&sim), ledger_files(&sim)), (before, vec![]));
    // One that can't go back keeps its size, and nothing else from being released.
    let claim = manager.claim(gpu(), &options(8 * GIB)).unwrap();
    drivers.fail("resource1_resize", "14", 1, libc::ENOSPC);
    manager.release(&claim).unwrap();
    assert_eq!((size(&sim), sim.driver_of(gpu()).as_deref()), (Some(8 * GIB), Some("nvidia")));
    assert_eq!(ledger_files(&sim), [""; 0]);
}

#[test]
fn a_size_that_does_not_stay_is_noticed() {
    let sim = new_sim();
    let (before, drivers) = (bindings(&sim), SimDrivers::new(&sim));
    let file = sim.device_dir(gpu()).unwrap().join("resource");
    let resource = fs::read_to_string(&file).unwrap();
    drivers.observe(move || fs::write(&file, &resource).unwrap());
    let expect = ["can't give BAR 1 8 GiB", "it has 16 GiB afterwards", "everything is as it was before"];
    fails(manager(drivers.host()).claim(gpu(), &options(8 * GIB)), &expect);
    assert_eq!((bindings(&sim), ledger_files(&sim)), (before, vec![]));
}

/// 1 MiB is the smallest size of a resizable BAR, with the value 0 (PCI Express Base 6.0, 7.8.6.2). The GPU does not support it.
#[test]
fn a_size_below_the_smallest_is_rounded_up() {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let host = drivers.host();
    let lock = FunctionLock::take(&host, gpu(), LONG).unwrap().unwrap();
    let sizes = BTreeMap::from([(1, 4096)]);
    let taken = Binder::new(&host, LONG).take(&lock, Some("nvidia"), VFIO_DRIVER, &sizes);
    assert!(matches!(&taken, Err(BindError::Refused { .. })), "{taken:?}");
    let writes = drivers.writes();
    let (path, value) = writes.last().unwrap();
    assert!(path.ends_with("resource1_resize") && value == "0", "{writes:?}");
}

#[test]
fn one_that_is_on_vfio_already_keeps_its_sizes() {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let claim = |options: &ClaimOptions| manager(drivers.host()).claim(gpu(), options).map(drop);
    claim(&ClaimOptions { persistent: true, ..options(8 * GIB) }).unwrap();
    fails(claim(&options(GIB)), &["BAR 1 of 0000:01:00.0 can't be resized while vfio-pci has"]);
    claim(&options(8 * GIB)).unwrap();
    assert_eq!(size(&sim), Some(8 * GIB));
    release(&mut manager(drivers.host()), gpu()).unwrap();
    assert_eq!(size(&sim), Some(16 * GIB));
    sim.set_driver(gpu(), Some(VFIO_DRIVER)).unwrap();
    fails(claim(&options(GIB)), &["can't be resized while vfio-pci has the function"]);
}
