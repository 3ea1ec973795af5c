//! Measures a guest's network interface at a tap, by vhost-net and without, beside QEMU's in the same L1 with the same Linux
//! kernel and tap: data each way over TCP, and a byte there and back.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::bench::{median, tell};
use crate::agent::{Engine, Guest, GuestPlan, L1, L2, Program, net, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench-net",
    about: "measures data and round trips over a tap beside QEMU, by vhost-net and without",
    variants: Variants::Only(Variant::Iommufd),
    ports: 0,
    devices: &["-mem-prealloc"],
    disks: &[],
    memory_mib: 2048,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, peers: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const ROUNDS: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(600);
const TAP: &str = "bench";
const MAC: &str = "52:54:00:00:00:01";
const HOST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 2);
const PORT: u16 = 7779;
const LEN: usize = 8 << 20;
/// How often each guest carries that each way, after once to warm up.
const PASSES: usize = 5;
const PIECE: usize = 64 << 10;
const TRIPS: usize = 500;
/// What is measured, with its unit.
const FIGURES: [(&str, &str); 3] =
    [("from the guest", "MiB/s"), ("to the guest", "MiB/s"), ("round trip", "us")];

struct Row {
    name: &'static str,
    engine: Engine,
    file: &'static str,
    arguments: &'static [&'static str],
}

const ROWS: [Row; 4] = [
    Row {
        name: "vm-service",
        engine: Engine::VmService,
        file: "[[net]]\ntap = \"bench\"\nmac = \"52:54:00:00:00:01\"\nvhost = false\n",
        arguments: &[],
    },
    Row {
        name: "QEMU",
        engine: Engine::Qemu,
        file: "",
        arguments: &[
            "-netdev",
            "tap,id=n0,ifname=bench,script=no,downscript=no,vhost=off",
            "-device",
            "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:01,romfile=",
        ],
    },
    Row {
        name: "vm-service by vhost-net",
        engine: Engine::VmService,
        file: "[[net]]\ntap = \"bench\"\nmac = \"52:54:00:00:00:01\"\nvhost = true\n",
        arguments: &[],
    },
    Row {
        name: "QEMU by vhost-net",
        engine: Engine::Qemu,
        file: "",
        arguments: &[
            "-netdev",
            "tap,id=n0,ifname=bench,script=no,downscript=no,vhost=on",
            "-device",
            "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:01,romfile=",
        ],
    },
];

fn l1(l1: &mut L1) -> Result<()> {
    net::make_tap(TAP)?;
    let mut measured = [const { [const { Vec::new() }; FIGURES.len()] }; ROWS.len()];
    for round in 0..ROUNDS {
        for at in 0..ROWS.len() {
            let at = (round + at) % ROWS.len();
            let (row, name) = (&ROWS[at], format!("net-{round}-{at}"));
            let plan = GuestPlan {
                engine: row.engine,
                program: Program::Linux,
                memory_mib: 256,
                arguments: row.arguments,
                ..GuestPlan::sharing(&name, "", row.file)
            };
            let guest = Guest::start(l1, &plan)?;
            net::set_up(TAP, HOST)?;
            let listener = TcpListener::bind((HOST, PORT)).context("can't listen")?;
            listener.set_nonblocking(true)?;
            let (mut stream, _) = wait_until("the guest", TIMEOUT, || listener.accept().ok())?;
            stream.set_nonblocking(false)?;
            serve(&mut stream)?;
            let ended = guest.end(TIMEOUT)?;
            for (values, (figure, _)) in measured[at].iter_mut().zip(FIGURES) {
                let told = ended.reports.iter().filter_map(|(_, report)| match report {
                    Report::Value { name, value } if name == figure => value.parse::<f64>().ok(),
                    _ => None,
                });
                let before = values.len();
                values.extend(told);
                ensure!(values.len() > before, "{}: the guest reported no {figure}", row.name);
            }
            ended.succeeded(l1)?;
        }
    }
    for (row, measured) in ROWS.iter().zip(&measured) {
        for (values, (figure, unit)) in measured.iter().zip(FIGURES) {
            tell(l1, &format!("{figure}, {}", row.name), values, unit);
        }
    }
    for pair in [0, 2] {
        for (at, (figure, _)) in FIGURES.iter().enumerate() {
            let ratio = median(&measured[pair][at]) / median(&measured[pair + 1][at]);
            l1.figure(&format!("{figure}, {} / {}", ROWS[pair].name, ROWS[pair + 1].name), ratio, "ratio");
        }
    }
    Ok(())
}

/// The host's side of what [`l2`] measures.
fn serve(stream: &mut TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut byte = [0];
    for _ in 0..TRIPS {
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
    }
    for _ in 0..=PASSES {
        take(stream)?;
        stream.write_all(&byte)?;
        give(stream)?;
        stream.read_exact(&mut byte)?;
    }
    Ok(())
}

fn take(stream: &mut TcpStream) -> Result<()> {
    let (mut piece, mut left) = (vec![0; PIECE], LEN);
    while left > 0 {
        let room = left.min(PIECE);
        let read = stream.read(&mut piece[..room])?;
        ensure!(read > 0, "the other side ended with {left} bytes left");
        left -= read;
    }
    Ok(())
}

fn give(stream: &mut TcpStream) -> Result<()> {
    let piece = vec![0x5a; PIECE];
    for _ in 0..LEN / PIECE {
        stream.write_all(&piece)?;
    }
    Ok(())
}

fn l2(l2: &mut L2) -> Result<()> {
    net::set_up(&net::interface_with(MAC)?, GUEST)?;
    let server = SocketAddrV4::new(HOST, PORT);
    let mut stream = wait_until("the host", TIMEOUT, || TcpStream::connect(server).ok())?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let (mut byte, mut trips) = ([0], Vec::new());
    for _ in 0..TRIPS {
        let begun = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        trips.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let mut tell = |(name, _): (&str, &str), value: f64| {
        l2.report(&Report::Value { name: name.into(), value: value.to_string() });
    };
    tell(FIGURES[2], median(&trips));
    let rate = |begun: Instant| (LEN >> 20) as f64 / begun.elapsed().as_secs_f64();
    for pass in 0..=PASSES {
        let begun = Instant::now();
        give(&mut stream)?;
        stream.read_exact(&mut byte)?;
        let sent = rate(begun);
        let begun = Instant::now();
        take(&mut stream)?;
        let received = rate(begun);
        stream.write_all(&byte)?;
        if pass > 0 {
            tell(FIGURES[0], sent);
            tell(FIGURES[1], received);
        }
    }
    Ok(())
}
