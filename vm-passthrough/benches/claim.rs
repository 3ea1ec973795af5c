//! How long it takes to claim a GPU with its two companions, and to give them back, on a simulated host: the plan, the
//! checks, the ledger and the writes, without what a real driver needs to let go of its device.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};
use vm_passthrough::{PassthroughManager, PciAddress};

fn address(bus: u8, function: u8) -> PciAddress {
    PciAddress::new(0, bus, 0, function).expect("the parts are in range")
}

fn claim_and_release(c: &mut Criterion) {
    let sim = SimHost::new().expect("a temporary directory can be filled");
    let gpu = address(1, 0);
    let companions = [(address(1, 1), 0x04_0300, "snd_hda_intel"), (address(1, 2), 0x0c_0330, "xhci_hcd")]
        .map(|(address, class, driver)| {
            SimFunction::new(address, 0x10de, 0x22ba, class).group(1).driver(driver)
        });
    let others = (2..100).map(|bus| SimFunction::nvme(address(bus, 0)).group(bus.into()).driver("nvme"));
    for function in
        [SimFunction::gpu(gpu).group(1).driver("nvidia")].into_iter().chain(companions).chain(others)
    {
        sim.add(&function).expect("a function can be added");
    }
    let mut manager =
        PassthroughManager::with_host(SimDrivers::new(&sim).host()).expect("the host has a PCI bus");
    c.bench_function("claim and release a GPU with two companions, of 101 functions", |b| {
        b.iter(|| {
            let claim = manager.claim(gpu, &ClaimOptions::default()).expect("it can be claimed");
            assert_eq!(black_box(&claim).functions.len(), 3);
            manager.release(&claim).expect("it can be released");
        });
    });
    assert_eq!(sim.driver_of(gpu).as_deref(), Some("nvidia"));
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(50);
    targets = claim_and_release
}
criterion_main!(benches);
