//! Measures what a guest with a device waits for as it has much RAM: making 4 GiB present, and mapping them for DMA, with one
//! thread and with two, for each kind of pages. Two processors of this machine must be free, for L1 has two:
//!
//! ```sh
//! cargo testbed --jobs 1 --processors 2 --markdown bench-map
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::bare_edu::EDU;
use super::bench::{median, tell};
use crate::agent::{Function, L1, MAP_RAM};
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench-map",
    about: "measures prefaulting 4 GiB of RAM and mapping it for DMA, with 1 and with 2 threads",
    variants: Variants::Both,
    ports: 1,
    // Or the first to use its memory would wait for this machine to make it.
    devices: &["-mem-prealloc", "-device", "edu,bus=port0,dma_mask=0xffffffffffffffff"],
    disks: &[],
    memory_mib: 6144,
    deadline: Duration::from_secs(7200),
    contents: Contents { library_examples: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(3600);
const ROUNDS: usize = 7;
const GIB: usize = 4;
/// Pages of 2 MiB in the pool.
const POOL: &str = "/proc/sys/vm/nr_hugepages";

fn l1(l1: &mut L1) -> Result<()> {
    let processors = std::thread::available_parallelism()?.get();
    ensure!(processors >= 2, "L1 has {processors} processor; run `cargo testbed --processors 2 bench-map`");
    let edu = Function::find(EDU.0, EDU.1)?;
    l1.vm_service(&["claim", &edu.address], TIMEOUT)?.succeeded()?;
    for (pages, what, pool) in [
        ("transparent", "transparent huge pages", 0),
        ("small", "pages of 4 KiB", 0),
        ("reserved", "reserved pages of 2 MiB", GIB << 9),
    ] {
        set_pool(pool)?;
        let (backend, gib, rounds) = (l1.variant.to_string(), GIB.to_string(), ROUNDS.to_string());
        let options = ["--backend", &backend, "--pages", pages, "--gib", &gib, "--rounds", &rounds];
        let said = l1
            .program(MAP_RAM, &[&[edu.address.as_str()], &options[..]].concat(), TIMEOUT)?
            .succeeded()?
            .stdout;
        let mut times = BTreeMap::<&str, Vec<f64>>::new();
        for line in said.lines() {
            let (name, seconds) = line.split_once('\t').with_context(|| format!("it said {line:?}"))?;
            times.entry(name).or_default().push(seconds.parse()?);
        }
        for (name, values) in &times {
            ensure!(values.len() == ROUNDS, "{name} was measured {} times", values.len());
            tell(l1, &format!("{what}: {name}"), values, "s");
        }
        let pairs = times.iter().filter_map(|(name, values)| {
            let (step, threads) = name.split_once(", ")?;
            let alone = times.get(format!("{step}, 1 thread").as_str())?;
            (threads != "1 thread")
                .then(|| (format!("{what}: 1 thread / {name}"), median(alone) / median(values)))
        });
        for (name, ratio) in pairs {
            l1.figure(&name, ratio, "ratio");
        }
    }
    set_pool(0)?;
    l1.vm_service(&["release", &edu.address], TIMEOUT)?.succeeded().map(drop)
}

/// Has the Linux kernel reserve `pages` huge pages.
fn set_pool(pages: usize) -> Result<()> {
    // So that there are as many.
    fs::write("/proc/sys/vm/compact_memory", "1")?;
    fs::write(POOL, pages.to_string()).with_context(|| format!("can't write {POOL}"))?;
    let has = fs::read_to_string(POOL)?;
    ensure!(has.trim() == pages.to_string(), "of {pages} huge pages the pool has {}", has.trim());
    Ok(())
}
