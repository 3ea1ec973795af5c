//! One device of a guest reads and writes another's memory by DMA, where Linux maps BARs for that, and only as long as the guest has
//! them there.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::bare_edu::EDU;
use super::vmm_killed::signal;
use crate::agent::{Function, Guest, GuestPlan, L1, VM_SERVICE, wait_until};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "peer-to-peer",
    about: "a device of a guest reaches another's BAR by DMA, where it decodes and while the guest has it; where Linux maps no BARs, \
            status says so",
    variants: Variants::Both,
    ports: 2,
    devices: &[
        "-device",
        "edu,bus=port0,dma_mask=0xffffffffffffffff",
        "-object",
        "memory-backend-ram,id=shared,size=1M",
        "-device",
        "ivshmem-plain,memdev=shared,bus=port1",
    ],
    disks: &[],
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const SHARED_MEMORY: (u16, u16) = (0x1af4, 0x1110);
const BAR: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(600);

fn l1(l1: &mut L1) -> Result<()> {
    let (edu, shared) = (Function::find(EDU.0, EDU.1)?, Function::find(SHARED_MEMORY.0, SHARED_MEMORY.1)?);
    let mut daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).spawn()?;
    let both =
        |name, cmdline| GuestPlan { devices: vec![&edu, &shared], ..GuestPlan::bare(name, cmdline, &edu) };

    let plan = GuestPlan { settings: "peer_to_peer = false", ..both("off", "edu msis=1 peer=0 stay") };
    let mut guest = Guest::start(l1, &plan)?;
    guest.wait_for_text("bare: transfer 1", TIMEOUT)?;
    let state = status(l1, "off", |state| !state.is_null())?;
    l1.prove(state["state"] == "off", format!("off: no device reaches the other's BAR: {state}"))?;
    signal(guest.pid(), Signal::TERM)?;
    guest.end(TIMEOUT)?;

    let is_mapped = l1.variant == Variant::Group || maps_dma_bufs()?;
    let cmdline = if is_mapped { "edu msis=1 peer=1 stay" } else { "edu msis=1 peer=0 stay" };
    let mut guest = Guest::start(l1, &both("on", cmdline))?;
    guest.wait_for_text("bare: transfer 1", TIMEOUT)?;
    let said = guest.said();
    l1.step(said.clone());
    ensure!(!said.contains("FAILED"), "{said}");
    let settled = |state: &Value| !state.is_null() && state["state"] != "mapping" && state["state"] != "idle";
    let state = status(l1, "on", settled)?;
    let (_, size) = shared.memory_bar(BAR)?;
    if is_mapped {
        l1.prove(
            state["state"] == "mapped" && state["mapped_bytes"].as_u64() > Some(size),
            format!("a device reads and writes the other's BAR, follows it, and status says so: {state}"),
        )?;
    } else {
        let says =
            state["reason"].as_str().is_some_and(|why| why.contains("maps no BARs for DMA through iommufd"));
        l1.prove(
            state["state"] == "refused" && state["refused_bytes"].as_u64() > Some(size) && says,
            format!("this Linux maps no BARs, and status says so: {state}"),
        )?;
    }

    // It goes, while the other writes to it all the time.
    let detach = ["detach", &shared.address, "--guest", "on", "--surprise"];
    l1.vm_service(&detach, TIMEOUT)?.succeeded()?;
    let words = [0, 4, 2048];
    shared.exchange_words(BAR, &words, Some(&[0; 3]))?;
    let before = transfers(&mut guest);
    wait_until("further transfers", TIMEOUT, || (transfers(&mut guest) >= before + 5).then_some(()))?;
    let left = shared.exchange_words(BAR, &words, None)?;
    l1.prove(left == [0; 3], "once it has gone, the guest's other device writes to it no more")?;
    // And comes back.
    l1.vm_service(&["attach", &shared.address, "--guest", "on"], TIMEOUT)?.succeeded()?;
    signal(guest.pid(), Signal::TERM)?;
    let ended = guest.end(TIMEOUT)?;
    l1.prove(!ended.console.contains("FAILED"), "the guest met nothing else")
        .with_context(|| ended.console)?;
    daemon.kill().and_then(|()| daemon.wait())?;
    l1.prove(edu.driver().is_none() && shared.driver().is_none(), "both are without drivers again, as before")
}

/// Whether iommufd maps dma-bufs of BARs, as Linux does from 6.19 on.
fn maps_dma_bufs() -> Result<bool> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(['.', '-']).map_while(|number| number.trim().parse().ok());
    let version: (u32, u32) = numbers.next().zip(numbers.next()).with_context(|| release.clone())?;
    Ok(version >= (6, 19))
}

/// How many transfers the guest has said.
fn transfers(guest: &mut Guest) -> usize {
    guest.text().matches("bare: transfer ").count()
}

/// What `status` says of peer-to-peer DMA, once it is so.
fn status(l1: &mut L1, guest: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    let mut last = Value::Null;
    let found = wait_until("the state of peer-to-peer DMA", TIMEOUT, || {
        let asked = l1
            .vm_service(&["status", guest, "--json"], TIMEOUT)
            .ok()
            .filter(|asked| asked.code == Some(0))?;
        last = asked.json().ok()?["peer_to_peer"].clone();
        is_so(&last).then(|| last.clone())
    });
    found.with_context(|| format!("{last}"))
}
