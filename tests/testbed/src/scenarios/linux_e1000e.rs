//! A Linux guest's own e1000e driver exchanges data with a peer: a second e1000e of L1, on the same network.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::agent::{Ended, Function, Guest, GuestPlan, L1, L2, net};
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-e1000e",
    about: "a Linux guest's e1000e driver exchanges data with a peer over TCP; the host then has the card again",
    variants: Variants::Both,
    ports: 2,
    devices: CARDS,
    disks: &[],
    memory_mib: 1536,
    deadline: Duration::from_secs(600),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

/// Two cards of one network, in slots that do their hot-plug themselves.
pub(super) const CARDS: &[&str] = &[
    "-global",
    "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
    "-netdev",
    "hubport,id=net0,hubid=0",
    "-netdev",
    "hubport,id=net1,hubid=0",
    "-device",
    "e1000e,netdev=net0,mac=52:54:00:00:00:01,bus=port0",
    "-device",
    "e1000e,id=given,netdev=net1,mac=52:54:00:00:00:02,bus=port1",
];
/// Intel's 82574, as QEMU's e1000e.
pub(super) const E1000E: (u16, u16) = (0x8086, 0x10d3);

pub(super) const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub(super) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
pub(super) const PORT: u16 = 7777;
const TIMEOUT: Duration = Duration::from_secs(240);
const LEN: usize = 1 << 20;
const GUEST_SEED: u64 = 0x6775_6573_7422;
const HOST_SEED: u64 = 0x0068_6f73_7422;

fn l1(l1: &mut L1) -> Result<()> {
    let cards = Function::find_all(E1000E.0, E1000E.1)?;
    ensure!(cards.len() == 2, "{} cards are there, not 2", cards.len());
    exchange_with_guest(l1, &cards[0], &cards[1], Some("e1000e"))
}

/// Gives a card, which has this driver or none, to a Linux guest, which exchanges data with L1's own.
pub(super) fn exchange_with_guest(
    l1: &mut L1,
    mine: &Function,
    given: &Function,
    driver: Option<&str>,
) -> Result<()> {
    l1.prove(
        given.driver().as_deref() == driver,
        format!("{} has the host's driver: {driver:?}", given.address),
    )?;

    exchange_with(l1, mine, &GuestPlan::linux("network", given))?;
    l1.prove(
        given.driver().as_deref() == driver,
        format!("{} has the host's driver again: {driver:?}", given.address),
    )?;
    if driver.is_some() {
        net::interface_of(given)?;
    }
    Ok(())
}

/// Exchanges data between L1's own card and a guest's.
pub(super) fn exchange_with(l1: &mut L1, mine: &Function, plan: &GuestPlan<'_>) -> Result<Ended> {
    net::set_up(&net::interface_of(mine)?, HOST)?;
    let listener = TcpListener::bind((HOST, PORT)).context("can't listen")?;
    let peer = std::thread::spawn(move || {
        net::serve_once(&listener, Duration::from_secs(240), LEN, GUEST_SEED, HOST_SEED)
    });
    let ended =
        Guest::start(l1, plan).and_then(|guest| guest.end(TIMEOUT)).and_then(|ended| ended.succeeded(l1));
    if ended.is_err() {
        // The peer still waits for the guest, and hears that nobody comes. It fails when the guest has been there.
        drop(TcpStream::connect((HOST, PORT)));
    }
    let exchanged = peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))?;
    let ended = ended?;
    let (received, sent) = exchanged?;
    l1.proved(format!(
        "the peer received {LEN} bytes, checksum {received:016x}, and sent as many, {sent:016x}"
    ));
    Ok(ended)
}

/// The guest's side.
pub(super) fn l2(l2: &mut L2) -> Result<()> {
    let card = Function::find(E1000E.0, E1000E.1)?;
    exchange_with_host(l2, &card)?;
    let vectors = card.message_vectors();
    l2.prove(
        !vectors.is_empty() && vectors.iter().all(|kind| kind == "msix"),
        format!("the card interrupts the guest by MSI-X ({} vectors)", vectors.len()),
    )
}

/// The guest's side of the exchange; the name of the card's interface.
pub(super) fn exchange_with_host(l2: &mut L2, card: &Function) -> Result<String> {
    let interface = net::interface_of(card)?;
    net::set_up(&interface, GUEST)?;
    let start = Instant::now();
    let (sent, received) = net::exchange(SocketAddrV4::new(HOST, PORT), LEN, GUEST_SEED, HOST_SEED)?;
    let took = start.elapsed();
    l2.prove(
        true,
        format!(
            "the guest sent {LEN} bytes, checksum {sent:016x}, and received as many, {received:016x}, in {took:.1?}"
        ),
    )?;
    Ok(interface)
}
