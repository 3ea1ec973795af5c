//! What a Linux guest does with an e1000, a card that has no interrupts but INTx and is reset through an I/O BAR.

use std::fs;

use anyhow::{Context, Result};

use super::linux_e1000e::exchange_with_host;
use crate::agent::{Function, L2};

/// Intel's 82540EM, as QEMU's e1000.
pub(super) const E1000: (u16, u16) = (0x8086, 0x100e);

/// The guest's side.
pub(super) fn exchange(l2: &mut L2) -> Result<()> {
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
pub(super) fn interrupts(card: &Function) -> Result<u64> {
    let line = card.attribute("irq").context("the card has no line")?;
    let interrupts = fs::read_to_string("/proc/interrupts")?;
    let row = interrupts.lines().find_map(|row| row.trim_start().strip_prefix(&line)?.strip_prefix(':'));
    let counts = row.unwrap_or_default().split_whitespace().map_while(|word| word.parse::<u64>().ok());
    Ok(counts.sum())
}
