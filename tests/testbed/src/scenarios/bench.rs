//! Measures what an operator waits for: from `run` to the guest driver's first completed I/O, beside QEMU in the same
//! L1 with the same Linux kernel, initial RAM disk and device, in turns; the same from the host's own driver, which `run` takes
//! the device from first; and claim and release.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::agent::{Engine, Function, Guest, GuestPlan, L1, L2, NvmeDisk};
use crate::report::Report;
use crate::scenario::{Contents, Disk, Scenario, Variant};
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench",
    about: "measures run to first I/O beside QEMU -accel kvm -device vfio-pci, claim, and release",
    variants: Variant::ALL,
    devices: &[
        "-device",
        "pcie-root-port,id=port0,chassis=1,addr=4.0",
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0",
    ],
    disks: &[Disk { name: "disk", mib: 16 }],
    memory_mib: 3072,
    deadline: Duration::from_secs(900),
    contents: Contents { linux_guest: true, bare_guest: false, qemu: true, example: false },
    l1,
    l2: Some(l2),
};

const ROUNDS: usize = 7;
const PATIENCE: Duration = Duration::from_secs(120);
const SEED: u64 = 0x6265_6e63_6821;
const LEN: usize = 64 << 10;
const FIRST_IO: &str = "first-io";

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    NvmeDisk::of(&nvme)?.write_pattern(SEED, 0, LEN)?;

    let (mut claims, mut releases) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for (command, driver, times) in
            [("claim", "vfio-pci", &mut claims), ("release", "nvme", &mut releases)]
        {
            let ended = l1.vm_service(&[command, &nvme.address], PATIENCE)?.succeeded()?;
            ensure!(
                nvme.driver().as_deref() == Some(driver),
                "after {command} the driver is {:?}",
                nvme.driver()
            );
            times.push(ended.took.as_secs_f64() * 1e3);
        }
        // The nvme driver goes on after its probe returned, and a claim in the midst of it waits for it.
        NvmeDisk::of(&nvme)?;
    }
    tell(l1, "claim", &claims, "ms");
    tell(l1, "release", &releases, "ms");

    // Both start from a function that is already bound to vfio-pci; `run` also from one that the host's driver has.
    let (mut ours, mut qemus, mut fulls) = (Vec::new(), Vec::new(), Vec::new());
    let (mut parts, mut full) = (Parts::default(), Parts::default());
    for round in 0..ROUNDS {
        let mut cases = [
            (Engine::VmService, Some("vfio-pci"), &mut ours),
            (Engine::Qemu, Some("vfio-pci"), &mut qemus),
            (Engine::VmService, None, &mut fulls),
        ];
        cases.rotate_left(round % 3);
        for (engine, driver, times) in cases {
            if nvme.driver().as_deref() != Some(driver.unwrap_or("nvme")) {
                nvme.bind(driver)?;
            }
            if driver.is_none() {
                NvmeDisk::of(&nvme)?;
            }
            let name = format!("{engine:?}-{round}").to_lowercase();
            let plan = GuestPlan { engine, ..GuestPlan::linux(&name, &nvme) };
            let mut guest = Guest::start(l1, &plan)?;
            let (when, ()) = guest.wait_for("the first I/O", PATIENCE, |report| {
                matches!(report, Report::Value { name, .. } if name == FIRST_IO).then_some(())
            })?;
            let ended = guest.end(PATIENCE)?.succeeded(l1)?;
            times.push(when.as_secs_f64());
            if engine == Engine::VmService {
                let parts = if driver.is_some() { &mut parts } else { &mut full };
                parts.add(&ended.process.json()?)?;
                parts.exits.push(ended.access_exits()? as f64);
            }
        }
    }
    tell(l1, "run to first I/O, vm-service", &ours, "s");
    tell(l1, "run to first I/O, QEMU", &qemus, "s");
    tell(l1, "run until the guest starts", &parts.startup, "ms");
    tell(l1, "of it opening the device", &parts.open, "ms");
    tell(l1, "of it attaching the device", &parts.attach, "ms");
    tell(l1, "run from the host's driver to first I/O, vm-service", &fulls, "s");
    tell(l1, "run from the host's driver until the guest starts", &full.startup, "ms");
    tell(l1, "of it claiming the device", &full.claim, "ms");
    tell(l1, "of it opening the device from the host's driver", &full.open, "ms");
    tell(l1, "of it attaching the device from the host's driver", &full.attach, "ms");
    tell(l1, "exits for accesses until power-off", &parts.exits, "exits");
    l1.figure("run to first I/O, vm-service / QEMU", median(&ours) / median(&qemus), "ratio");
    l1.figure(
        "run from the host's driver to first I/O, vm-service / QEMU, which claims nothing",
        median(&fulls) / median(&qemus),
        "ratio",
    );
    nvme.bind(None)
}

/// What `vm-service run --json` tells of its start.
#[derive(Default)]
struct Parts {
    claim: Vec<f64>,
    startup: Vec<f64>,
    open: Vec<f64>,
    attach: Vec<f64>,
    exits: Vec<f64>,
}

impl Parts {
    fn add(&mut self, report: &Value) -> Result<()> {
        let told = |pointer: &str| {
            let value = report.pointer(pointer).and_then(Value::as_f64);
            value.with_context(|| format!("`run --json` tells no {pointer}"))
        };
        self.startup.push(told("/startup_ms")?);
        self.claim.push(told("/devices/0/claim_ms")?);
        self.open.push(told("/devices/0/open_ms")?);
        self.attach.push(told("/devices/0/attach_ms")?);
        Ok(())
    }
}

fn l2(l2: &mut L2) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    let checksum = NvmeDisk::of(&nvme)?.check_pattern(SEED, 0, LEN)?;
    l2.report(&Report::Value { name: FIRST_IO.into(), value: format!("{checksum:016x}") });
    Ok(())
}

fn tell(l1: &mut L1, what: &str, values: &[f64], unit: &str) {
    l1.figure(&format!("{what}, median of {}", values.len()), median(values), unit);
    l1.figure(&format!("{what}, least"), values.iter().copied().fold(f64::INFINITY, f64::min), unit);
    l1.figure(&format!("{what}, most"), values.iter().copied().fold(0.0, f64::max), unit);
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.get(sorted.len() / 2), sorted.len() % 2) {
        (None, _) => f64::NAN,
        (Some(&middle), 1) => middle,
        (Some(&upper), _) => (sorted[sorted.len() / 2 - 1] + upper) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
