//! A Linux guest's own virtio-net driver at taps of the host, one carried by vhost-net and one by `vm-service`: data goes both ways,
//! before and after the guest restarts, and then it powers off as its power button is pressed.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::agent::{Guest, GuestPlan, L1, L2, Program, net, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-net",
    about: "a Linux guest exchanges data over taps, by vhost-net and without, also after a restart; its power button ends it",
    variants: Variants::Both,
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 1024,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

/// One network: a tap, the host on it, the guest on it and its address there.
struct Network {
    tap: &'static str,
    host: Ipv4Addr,
    guest: Ipv4Addr,
    mac: &'static str,
}

const NETWORKS: [Network; 2] = [
    Network {
        tap: "own",
        host: Ipv4Addr::new(10, 78, 0, 1),
        guest: Ipv4Addr::new(10, 78, 0, 2),
        mac: "52:54:00:00:00:01",
    },
    // What follows from the guest's name.
    Network {
        tap: "kernel",
        host: Ipv4Addr::new(10, 79, 0, 1),
        guest: Ipv4Addr::new(10, 79, 0, 2),
        mac: "02:2e:dc:fc:1b:5c",
    },
];
const FILE: &str = "[[net]]\ntap = \"own\"\nmac = \"52:54:00:00:00:01\"\nvhost = false\n\n\
                    [[net]]\ntap = \"kernel\"\nvhost = true\n";
const PORT: u16 = 7778;
const LEN: usize = 2 << 20;
const GUEST_SEED: u64 = 0x6775_6573_7423;
const HOST_SEED: u64 = 0x0068_6f73_7423;
const TIMEOUT: Duration = Duration::from_secs(600);
/// What the host has the guest do at last.
const RESTART: u8 = b'r';
const AWAIT_BUTTON: u8 = b'p';

fn l1(l1: &mut L1) -> Result<()> {
    let plan = GuestPlan {
        program: Program::Linux,
        memory_mib: 256,
        terminal: true,
        ..GuestPlan::sharing("netguest", "", FILE)
    };
    let refused = Guest::start(l1, &GuestPlan { terminal: false, ..plan.clone() })?.end(TIMEOUT)?;
    l1.prove(
        refused.process.code == Some(1)
            && refused
                .process
                .stderr
                .contains("the host has no network interface own; make it with `ip tuntap add"),
        format!("without its tap no guest starts: {}", refused.process.stderr.trim()),
    )?;
    for network in &NETWORKS {
        net::make_tap(network.tap)?;
    }
    let mut guest = Guest::start(l1, &plan)?;
    let mut listeners = Vec::new();
    for network in &NETWORKS {
        net::set_up(network.tap, network.host)?;
        listeners.push(TcpListener::bind((network.host, PORT)).context("can't listen")?);
    }
    for what in [RESTART, AWAIT_BUTTON] {
        exchange(l1, &listeners, what).map_err(|error| error.context(guest.said()))?;
    }
    guest.wait_for("the guest at its power button", TIMEOUT, |report| {
        matches!(report, Report::Value { name, .. } if name == "power-button").then_some(())
    })?;
    guest.press(b"\x01p")?;
    let ended = guest.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(
        ended.process.stderr.contains("the guest powered itself off"),
        "the guest powers off as its power button is pressed",
    )
}

/// Exchanges data with the guest on each network, and tells it what to do then.
fn exchange(l1: &mut L1, listeners: &[TcpListener], what: u8) -> Result<()> {
    for (network, listener) in NETWORKS.iter().zip(listeners) {
        let (received, sent) = net::serve_once(listener, TIMEOUT, LEN, GUEST_SEED, HOST_SEED)?;
        l1.proved(format!(
            "{LEN} bytes came through the tap {}, checksum {received:016x}, and as many went, {sent:016x}",
            network.tap
        ));
    }
    let (mut stream, _) = wait_until("the guest", TIMEOUT, || listeners[0].accept().ok())?;
    stream.write_all(&[what])?;
    l1.proved(if what == RESTART { "the guest restarts" } else { "so it is after the restart" });
    Ok(())
}

fn l2(l2: &mut L2) -> Result<()> {
    for network in &NETWORKS {
        let interface = net::interface_with(network.mac)?;
        net::set_up(&interface, network.guest)?;
        let server = SocketAddrV4::new(network.host, PORT);
        let (sent, received) = net::exchange(server, LEN, GUEST_SEED, HOST_SEED)?;
        l2.prove(
            true,
            format!(
                "{interface} sent {LEN} bytes, checksum {sent:016x}, and received as many, {received:016x}"
            ),
        )?;
        let features = fs::read_to_string(format!("/sys/class/net/{interface}/device/features"))?;
        // Checksums and TCP segments either way, mergeable buffers; interrupts and notifications where they are asked for.
        let has = |bit: usize| features.as_bytes().get(bit) == Some(&b'1');
        l2.prove(
            [0, 1, 7, 8, 11, 12, 15, 29].into_iter().all(has),
            format!("{interface} leaves checksums and segments to the host: {}", features.trim()),
        )?;
    }
    let mut what = [0];
    TcpStream::connect((NETWORKS[0].host, PORT))?.read_exact(&mut what)?;
    match what[0] {
        RESTART => l2.restart(),
        AWAIT_BUTTON => l2.await_power_button(TIMEOUT),
        other => bail!("the host asks for {other}"),
    }
}
