//! The suite that every accelerator must pass, on the fake HIP.

mod common;

use std::sync::Arc;

use vm_accel::{Accelerator, conformance};
use vm_rocm::fake::{Fake, FakeOptions};

/// Nothing was used wrongly, and all was ended.
fn clean(fake: &Fake) {
    assert_eq!(fake.faults(), Vec::<String>::new());
    assert_eq!(fake.left(), Vec::<String>::new());
}

#[test]
fn conforms() {
    let check = |architecture: &str, wavefront, unified| {
        let options =
            FakeOptions { architecture: architecture.into(), wavefront, unified, ..FakeOptions::default() };
        let fake = Fake::new(options);
        let device = Arc::new(fake.accelerator());
        assert_eq!((device.info().target.as_str(), device.info().unified), (architecture, unified));
        let programs = |program| common::program(architecture, program);
        assert!(conformance::check(&device, &programs) >= conformance::CASES);
        clean(&fake);
    };
    check("gfx942", 64, true);
    check("gfx1100", 32, false);
}

#[test]
fn queues_of_two_devices_wait_for_each_other() {
    let fakes = [FakeOptions::default(), FakeOptions::default()].map(Fake::new);
    let [one, other] = fakes.each_ref().map(|fake| Arc::new(fake.accelerator()));
    conformance::events_between(&one, &other);
    drop((one, other));
    fakes.iter().for_each(clean);
}
