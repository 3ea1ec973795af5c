//! Reset methods that a killed process left narrowed are put back with the rest.

use super::*;

fn sim_with_resets() -> SimHost {
    let sim = new_sim();
    sim.set(gpu(), "reset_method", "flr bus\n").unwrap();
    sim.set(audio(), "reset_method", "bus\n").unwrap();
    sim
}

fn resets(sim: &SimHost, address: PciAddress) -> String {
    fs::read_to_string(sim.device_dir(address).unwrap().join("reset_method")).unwrap()
}

#[test]
fn narrowed_reset_methods_are_put_back() {
    let sim = sim_with_resets();
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    let claim = manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    assert_eq!(claim.functions[2].resets.as_deref(), Some("flr bus"));
    assert_eq!(claim.functions[1].resets.as_deref(), Some("bus"));
    sim.set(gpu(), "reset_method", "bus\n").unwrap();
    release(&mut manager, gpu()).unwrap();
    assert_eq!(resets(&sim, gpu()), "flr bus\n");
    assert_eq!(resets(&sim, audio()), "bus\n");
    let written = |name: &str| drivers.writes().iter().filter(|(path, _)| path.ends_with(name)).count();
    assert_eq!(written("reset_method"), 1, "what is as it was is not touched");
}

#[test]
fn those_of_a_function_that_stays_on_vfio_are_put_back_too() {
    let sim = sim_with_resets();
    let drivers = SimDrivers::new(&sim);
    sim.add_driver(VFIO_DRIVER).unwrap();
    sim.set_driver(gpu(), Some(VFIO_DRIVER)).unwrap();
    let mut manager = manager(drivers.host());
    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    sim.set(gpu(), "reset_method", "bus\n").unwrap();
    release(&mut manager, gpu()).unwrap();
    assert_eq!(resets(&sim, gpu()), "flr bus\n");
    assert!(on_vfio(&sim, &[gpu()]));
}

#[test]
fn a_list_that_linux_refuses_gives_way_to_its_own() {
    let sim = sim_with_resets();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    sim.set(gpu(), "reset_method", "bus\n").unwrap();
    drivers.fail("reset_method", "flr bus", 1, libc::EINVAL);
    release(&mut manager, gpu()).unwrap();
    assert_eq!(resets(&sim, gpu()), "default\n");
    assert_eq!(bindings(&sim), before);
}

/// The write that timed out may still take effect, so nothing is written after it.
#[test]
fn a_list_that_linux_does_not_take_in_time_is_left() {
    let sim = sim_with_resets();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    sim.set(gpu(), "reset_method", "bus\n").unwrap();
    drivers.fail("reset_method", "flr bus", 1, libc::ETIMEDOUT);
    release(&mut manager, gpu()).unwrap();
    assert_eq!(resets(&sim, gpu()), "bus\n");
    assert_eq!(bindings(&sim), before);
}

#[test]
fn no_deadline_is_too_long() {
    let sim = new_sim();
    let mut manager = manager(SimDrivers::new(&sim).host());
    drop(Ledger::lock(manager.host(), Duration::MAX).unwrap());
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    release(&mut manager, nvme()).unwrap();
}
