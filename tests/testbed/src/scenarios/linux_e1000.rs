//! A Linux guest's own e1000 driver, of a card that has no interrupts but INTx and is reset through an I/O BAR, exchanges data
//! with a peer.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::linux_e1000e::{E1000E, exchange_with_guest, exchange_with_host};
use crate::agent::{Function, L1, L2};
use crate::scenario::{Contents, Scenario, Variant};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-e1000",
    about: "a Linux guest's e1000 driver, which has INTx alone and ports, exchanges data with a peer over TCP",
    variants: Variant::ALL,
    ports: 2,
    devices: &[
        "-netdev",
        "hubport,id=net0,hubid=0",
        "-netdev",
        "hubport,id=net1,hubid=0",
        "-device",
        "e1000e,netdev=net0,mac=52:54:00:00:00:01,bus=port0",
        "-device",
        "e1000,netdev=net1,mac=52:54:00:00:00:02,bus=port1",
    ],
    disks: &[],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

/// Intel's 82540EM, as QEMU's e1000.
const E1000: (u16, u16) = (0x8086, 0x100e);

fn l1(l1: &mut L1) -> Result<()> {
    let (mine, given) = (Function::find(E1000E.0, E1000E.1)?, Function::find(E1000.0, E1000.1)?);
    let explained = l1.vm_service(&["explain", &given.address], Duration::from_secs(240))?.succeeded()?;
    l1.prove(
        explained.stdout.contains("ready"),
        format!("{} is ready, though it has INTx alone", given.address),
    )?;
    exchange_with_guest(l1, &mine, &given, Some("e1000"))
}

fn l2(l2: &mut L2) -> Result<()> {
    let card = Function::find(E1000.0, E1000.1)?;
    let before = interrupts(&card)?;
    let interface = exchange_with_host(l2, &card)?;
    let count = interrupts(&card)? - before;
    l2.prove(
        card.message_vectors().is_empty() && count > 10,
        format!("{interface} interrupted the guest {count} times by INTx"),
    )?;
    let ports = fs::read_to_string("/proc/ioports")?;
    let ports = ports.lines().find(|line| line.contains(&card.address)).map(str::trim);
    l2.prove(ports.is_some(), format!("it has ports: {ports:?}"))
}

/// How often the line of a card has interrupted.
fn interrupts(card: &Function) -> Result<u64> {
    let line = card.attribute("irq").context("the card has no line")?;
    let interrupts = fs::read_to_string("/proc/interrupts")?;
    let row = interrupts.lines().find_map(|row| row.trim_start().strip_prefix(&line)?.strip_prefix(':'));
    let counts = row.unwrap_or_default().split_whitespace().map_while(|word| word.parse::<u64>().ok());
    Ok(counts.sum())
}
