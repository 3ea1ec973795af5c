//! How long it takes to explain one function: alone, and when what is true of the whole host is known.
//!
//! The host is a simulated one with 64 disks and their partitions.

use criterion::{Criterion, criterion_group, criterion_main};
use vm_passthrough::pci::PciAddress;
use vm_passthrough::readiness::{ExplainOptions, Explainer, explain};
use vm_passthrough::sim::{SimFunction, SimHost};

fn address(bus: u8) -> PciAddress {
    PciAddress::new(0, bus, 0, 0).expect("device 0 is a device number")
}

fn build() -> std::io::Result<SimHost> {
    let sim = SimHost::new()?;
    for bus in 1..=64 {
        let port = PciAddress::new(0, 0, bus % 32, bus / 32).expect("both are in range");
        sim.add(&SimFunction::root_port(port))?;
        sim.add(&SimFunction::nvme(address(bus)).below(port).driver("nvme"))?;
        for part in ["", "/nvmeNn1p1", "/nvmeNn1p2"] {
            let path = format!("nvme/nvmeN/nvmeNn1{part}").replace('N', &bus.to_string());
            sim.add_child(address(bus), "block", &path, &[("dev", &format!("259:{bus}\n"))])?;
        }
    }
    sim.write("proc/self/mountinfo", "29 1 259:64 / / rw,relatime - ext4 /dev/nvme64n1p1 rw\n")?;
    Ok(sim)
}

fn explain_one(c: &mut Criterion) {
    let sim = build().expect("a temporary directory can be filled");
    let host = sim.plain_host();
    let options = ExplainOptions::default();
    let codes = |bus| {
        let readiness = explain(&host, address(bus), &options).expect("the function is there");
        readiness.blockers.iter().map(|blocker| blocker.code.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(codes(1), [""; 0]);
    assert_eq!(codes(64), ["mounted-disk"]);

    let mut group = c.benchmark_group("explain");
    group.bench_function("one", |b| b.iter(|| explain(&host, address(1), &options)));
    let explainer = Explainer::new(&host);
    group.bench_function("one of many", |b| b.iter(|| explainer.explain(address(1), &options)));
    group.finish();
}

criterion_group!(benches, explain_one);
criterion_main!(benches);
