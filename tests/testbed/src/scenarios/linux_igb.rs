//! A Linux guest's own igbvf driver has a virtual function of an igb, and exchanges data with a peer of L1 on the same network.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::linux_e1000e::{E1000E, exchange_with_guest, exchange_with_host};
use super::vmm_killed::signal;
use crate::agent::{Function, Guest, GuestPlan, L1, L2, net};
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-igb",
    about: "virtual functions are created, one exchanges data for a Linux guest, and none is removed while it is used",
    variants: Variants::Both,
    ports: 2,
    devices: &[
        "-netdev",
        "hubport,id=net0,hubid=0",
        "-netdev",
        "hubport,id=net1,hubid=0",
        "-device",
        "e1000e,netdev=net0,mac=52:54:00:00:00:01,bus=port0",
        "-device",
        "igb,netdev=net1,mac=52:54:00:00:00:02,bus=port1",
    ],
    disks: &[],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, bare_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// QEMU's igb, Intel's 82576, and its virtual functions.
pub(super) const IGB: (u16, u16) = (0x8086, 0x10c9);
pub(super) const IGB_VF: (u16, u16) = (0x8086, 0x10ca);

fn l1(l1: &mut L1) -> Result<()> {
    let physical = Function::find(IGB.0, IGB.1)?;
    l1.prove(physical.driver().as_deref() == Some("igb"), format!("igb drives {}", physical.address))?;
    l1.vm_service(&["vfs", "create", &physical.address, "3"], TIMEOUT)?.succeeded()?;
    let found = Function::find_all(IGB_VF.0, IGB_VF.1)?;
    l1.prove(
        found.len() == 3 && found.iter().all(|function| function.driver().is_none()),
        format!("`vfs create` makes three virtual functions, which no driver of the host takes: {found:?}"),
    )?;
    let claim = l1.vm_service(&["claim", &physical.address], TIMEOUT)?;
    l1.prove(
        claim.code == Some(3) && claim.stderr.contains("vfs-in-use"),
        "the physical function is not claimed from under them",
    )
    .with_context(|| format!("{}{}", claim.stdout, claim.stderr))?;

    let mut holder = Guest::start(l1, &GuestPlan::bare("holder", "spin", &found[1]))?;
    holder.wait_for_log("attached in", TIMEOUT)?;
    for arguments in
        [&["vfs", "remove", &physical.address][..], &["vfs", "remove", &physical.address, "--force"]]
    {
        let refused = l1.vm_service(arguments, TIMEOUT)?;
        ensure!(
            refused.code == Some(1) && refused.stderr.contains(&format!("{} is claimed", found[1].address)),
            "{arguments:?}: {:?} {}",
            refused.code,
            refused.stderr
        );
    }
    l1.proved("`vfs remove` removes none while a guest has one, by force neither");
    // A virtual function has the link of its physical one, which is up while its interface is.
    net::turn_on(&net::interface_of(&physical)?)?;
    let peer = Function::find(E1000E.0, E1000E.1)?;
    exchange_with_guest(l1, &peer, &found[0], None)?;
    l1.prove(holder.runs(), "the guest with the other virtual function runs on")?;
    // The second one ends also a guest that takes its time for the first.
    for _ in 0..2 {
        signal(holder.pid(), Signal::TERM)?;
    }
    holder.end(TIMEOUT)?;
    l1.vm_service(&["vfs", "remove", &physical.address], TIMEOUT)?.succeeded()?;
    l1.prove(Function::find_all(IGB_VF.0, IGB_VF.1)?.is_empty(), "`vfs remove` removes all of them")?;
    l1.prove(physical.driver().as_deref() == Some("igb"), "the physical function stayed with igb")
}

/// The guest's side.
pub(super) fn l2(l2: &mut L2) -> Result<()> {
    let card = Function::find(IGB_VF.0, IGB_VF.1)?;
    exchange_with_host(l2, &card)?;
    let vectors = card.message_vectors();
    l2.prove(
        !vectors.is_empty() && vectors.iter().all(|kind| kind == "msix"),
        format!("it interrupts the guest by MSI-X ({} vectors)", vectors.len()),
    )
}
