//! Measures what an operator waits for: from `run` to the guest driver's first completed I/O, beside QEMU and
//! cloud-hypervisor in the same L1 with the same Linux kernel, initial RAM disk and device, in turns; the same from the host's
//! own driver, which `run` takes the device from first, and the others don't; and claim and release.
//!
//! cloud-hypervisor is measured where the testbed gets one, which must be static:
//!
//! ```sh
//! RUSTFLAGS='-C target-feature=+crt-static' cargo build --release --target x86_64-unknown-linux-gnu   # in its checkout
//! cargo testbed --cloud-hypervisor target/x86_64-unknown-linux-gnu/release/cloud-hypervisor --markdown bench
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::agent::{Engine, Function, Guest, GuestPlan, L1, L2, NvmeDisk};
use crate::report::Report;
use crate::scenario::{Contents, Disk, Scenario, Variants};
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench",
    about: "measures run to first I/O beside QEMU and cloud-hypervisor, claim, and release",
    variants: Variants::Both,
    ports: 1,
    devices: &[
        // Or the first to use it would wait for this machine to make it.
        "-mem-prealloc",
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0",
    ],
    disks: &[Disk { name: "disk", mib: 16 }],
    memory_mib: 3072,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, peers: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const ROUNDS: usize = 5;
const TIMEOUT: Duration = Duration::from_secs(600);
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
            let ended = l1.vm_service(&[command, &nvme.address], TIMEOUT)?.succeeded()?;
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

    let mut rows = vec![
        Row::new("vm-service", Engine::VmService, Some("vfio-pci")),
        Row::new("QEMU", Engine::Qemu, Some("vfio-pci")),
        Row::new("cloud-hypervisor", Engine::CloudHypervisor, Some("vfio-pci")),
        Row::new("vm-service from the host's driver", Engine::VmService, None),
    ];
    rows.retain(|row| {
        let program = row.engine.program();
        let is_there = Path::new(program).exists();
        if !is_there {
            let (name, reason) = (row.figure(), format!("no {} at {program}", row.name));
            l1.report(&Report::Unmeasured { name, reason });
        }
        is_there
    });
    for round in 0..ROUNDS {
        let count = rows.len();
        for at in 0..count {
            rows[(round + at) % count].run(l1, &nvme, round)?;
        }
    }
    for row in &rows {
        tell(l1, &row.figure(), &row.times, "s");
        for (part, values) in &row.parts {
            tell(l1, &format!("{}, {part}", row.name), values, if *part == EXITS { "exits" } else { "ms" });
        }
    }
    let (ours, peers): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.engine == Engine::VmService);
    for (our, peer) in ours.iter().flat_map(|our| peers.iter().map(move |peer| (our, peer))) {
        let ratio = median(&our.times) / median(&peer.times);
        l1.figure(&format!("run to first I/O, {} / {}", our.name, peer.name), ratio, "ratio");
    }
    nvme.bind(None)
}

const EXITS: &str = "exits for accesses until power-off";

/// Who runs the guest, and how long that took.
struct Row {
    name: &'static str,
    engine: Engine,
    /// The driver that has the device before; `None` for the host's own.
    driver: Option<&'static str>,
    times: Vec<f64>,
    /// What `vm-service run --json` tells of its start.
    parts: BTreeMap<&'static str, Vec<f64>>,
}

impl Row {
    fn new(name: &'static str, engine: Engine, driver: Option<&'static str>) -> Self {
        Self { name, engine, driver, times: Vec::new(), parts: BTreeMap::new() }
    }

    fn figure(&self) -> String {
        format!("run to first I/O, {}", self.name)
    }

    /// Runs the guest once.
    fn run(&mut self, l1: &mut L1, nvme: &Function, round: usize) -> Result<()> {
        if nvme.driver().as_deref() != Some(self.driver.unwrap_or("nvme")) {
            nvme.bind(self.driver)?;
        }
        if self.driver.is_none() {
            NvmeDisk::of(nvme)?;
        }
        let name = format!("{:?}-{round}", self.engine).to_lowercase();
        let plan = GuestPlan { engine: self.engine, ..GuestPlan::linux(&name, nvme) };
        let mut guest = Guest::start(l1, &plan)?;
        let (when, ()) = guest.wait_for("the first I/O", TIMEOUT, |report| {
            matches!(report, Report::Value { name, .. } if name == FIRST_IO).then_some(())
        })?;
        let ended = guest.end(TIMEOUT)?.succeeded(l1)?;
        self.times.push(when.as_secs_f64());
        if self.engine == Engine::VmService {
            let report = ended.process.json()?;
            for (part, pointer) in [
                ("until the guest starts", "/startup_ms"),
                ("claiming", "/devices/0/claim_ms"),
                ("opening", "/devices/0/open_ms"),
                ("attaching", "/devices/0/attach_ms"),
            ] {
                let value = report.pointer(pointer).and_then(Value::as_f64);
                let value = value.with_context(|| format!("`run --json` tells no {pointer}"))?;
                self.parts.entry(part).or_default().push(value);
            }
            self.parts.entry(EXITS).or_default().push(ended.access_exits()? as f64);
        }
        Ok(())
    }
}

fn l2(l2: &mut L2) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    let checksum = NvmeDisk::of(&nvme)?.check_pattern(SEED, 0, LEN)?;
    l2.report(&Report::Value { name: FIRST_IO.into(), value: format!("{checksum:016x}") });
    Ok(())
}

pub(super) fn tell(l1: &mut L1, what: &str, values: &[f64], unit: &str) {
    l1.figure(&format!("{what}, median of {}", values.len()), median(values), unit);
    l1.figure(&format!("{what}, least"), values.iter().copied().fold(f64::INFINITY, f64::min), unit);
    l1.figure(&format!("{what}, most"), values.iter().copied().fold(0.0, f64::max), unit);
}

pub(super) fn median(values: &[f64]) -> f64 {
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
