//! Measures interrupts by a pin (INTx) beside QEMU's in the same L1 with the same Linux kernel and device: an e1000, which has no
//! others. The guest has the card raise one, waits until the guest's own driver has served it, and so on; KVM's counters
//! say how many exits that took.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::bench::{median, tell};
use super::e1000::{self, E1000};
use crate::agent::{Engine, Function, Guest, GuestPlan, L1, L2, Registers, net};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench-intx",
    about: "measures interrupts of a device that has INTx alone, and exits for each, beside QEMU",
    variants: Variants::Only(Variant::Iommufd),
    ports: 1,
    devices: &[
        "-mem-prealloc",
        "-netdev",
        "hubport,id=net0,hubid=0",
        "-device",
        "e1000,netdev=net0,mac=52:54:00:00:00:01,bus=port0",
    ],
    disks: &[],
    memory_mib: 2048,
    deadline: Duration::from_secs(3600),
    contents: Contents { linux_guest: true, peers: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

/// Guests of each.
const GUESTS: usize = 3;
/// How often each guest measures, after once to warm up.
const PASSES: usize = 5;
/// Interrupts of a pass.
const COUNT: u64 = 2000;
const TIMEOUT: Duration = Duration::from_secs(600);

/// Interrupt Cause Set of the card; it reads what is not served (82540EM manual, 13.4.18, for the writes).
const CAUSE_SET: usize = 0xc8;
/// A transmit descriptor was written back: the driver finds none, and that is all.
const WRITTEN_BACK: u32 = 1;

/// What a pass begins and ends with.
const BEGIN: &str = "begin";
const END: &str = "end";
/// Interrupts in a second.
const RATE: &str = "interrupts";

/// KVM's counters that are told, and what of: all exits, and those to user space for memory and for ports.
const COUNTERS: [&str; 3] = ["exits", "mmio_exits", "io_exits"];

fn l1(l1: &mut L1) -> Result<()> {
    let card = Function::find(E1000.0, E1000.1)?;
    l1.vm_service(&["claim", &card.address], TIMEOUT)?.succeeded()?;
    let rows = [("vm-service", Engine::VmService), ("QEMU", Engine::Qemu)];
    let mut rates = [const { Vec::new() }; 2];
    let mut exits = [const { [const { Vec::new() }; COUNTERS.len()] }; 2];
    for round in 0..GUESTS {
        for at in 0..rows.len() {
            let at = (round + at) % rows.len();
            let name = format!("intx-{round}-{at}");
            let plan = GuestPlan { engine: rows[at].1, ..GuestPlan::linux(&name, &card) };
            let mut guest = Guest::start(l1, &plan)?;
            for pass in 0..=PASSES {
                let reported = |what: &str, wanted: &Report| match wanted {
                    Report::Value { name, value } if *name == format!("{what} {pass}") => Some(value.clone()),
                    _ => None,
                };
                guest.wait_for(BEGIN, TIMEOUT, |report| reported(BEGIN, report))?;
                let before = counters()?;
                let (_, rate) = guest.wait_for(END, TIMEOUT, |report| reported(END, report))?;
                let after = counters()?;
                if pass > 0 {
                    rates[at].push(rate.parse()?);
                    for (values, (after, before)) in exits[at].iter_mut().zip(after.iter().zip(before)) {
                        values.push((after - before) as f64 / COUNT as f64);
                    }
                }
            }
            guest.end(TIMEOUT)?.succeeded(l1)?;
        }
    }
    for (at, (name, _)) in rows.iter().enumerate() {
        tell(l1, &format!("{RATE}, {name}"), &rates[at], "1/s");
        for (values, counter) in exits[at].iter().zip(COUNTERS) {
            tell(l1, &format!("{counter} for each, {name}"), values, "exits");
        }
    }
    l1.figure(&format!("{RATE}, vm-service / QEMU"), median(&rates[0]) / median(&rates[1]), "ratio");
    let [ours, peers] = &exits;
    l1.figure("exits for each, vm-service / QEMU", median(&ours[0]) / median(&peers[0]), "ratio");
    l1.vm_service(&["release", &card.address], TIMEOUT)?.succeeded().map(drop)
}

/// KVM's counters, of all guests together.
fn counters() -> Result<[u64; COUNTERS.len()]> {
    let mut values = [0; COUNTERS.len()];
    for (value, counter) in values.iter_mut().zip(COUNTERS) {
        let path = Path::new("/sys/kernel/debug/kvm").join(counter);
        let text = fs::read_to_string(&path).with_context(|| format!("can't read {}", path.display()))?;
        *value = text.trim().parse()?;
    }
    Ok(values)
}

fn l2(l2: &mut L2) -> Result<()> {
    let card = Function::find(E1000.0, E1000.1)?;
    net::turn_on(&net::interface_of(&card)?)?;
    let bar = card.path().join("resource0");
    let file = OpenOptions::new().read(true).write(true).open(&bar)?;
    let registers = Registers::map(&file).with_context(|| format!("can't map {}", bar.display()))?;
    // What comes with the link's being up is over by then.
    std::thread::sleep(Duration::from_secs(5));
    let mut taken = 0;
    for pass in 0..=PASSES {
        l2.report(&Report::Value { name: format!("{BEGIN} {pass}"), value: String::new() });
        // The console is written, and L1 has read its counters.
        std::thread::sleep(Duration::from_millis(500));
        let before = e1000::interrupts(&card)?;
        let begun = Instant::now();
        for _ in 0..COUNT {
            registers.write(CAUSE_SET, WRITTEN_BACK);
            let since = Instant::now();
            while registers.read(CAUSE_SET) & WRITTEN_BACK != 0 {
                ensure!(since.elapsed() < TIMEOUT, "an interrupt did not come");
            }
        }
        let took = begun.elapsed().as_secs_f64();
        taken = e1000::interrupts(&card)? - before;
        let rate = taken as f64 / took;
        l2.report(&Report::Value { name: format!("{END} {pass}"), value: rate.to_string() });
    }
    let message = card.message_vectors();
    l2.prove(
        message.is_empty() && taken >= COUNT,
        format!("{COUNT} causes in the last pass made {taken} interrupts, by the pin"),
    )
}
