//! The port of a Linux guest's card has errors of PCI Express: the guest lives on, the operator hears of them, and the guest is told, so
//! that its own driver recovers.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddrV4, TcpListener};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::agent::{Function, Guest, GuestPlan, L1, L2, VM_SERVICE, kernel_log, net, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::linux_e1000e::{CARDS, E1000E, GUEST, HOST, PORT};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "device-errors",
    about: "a Linux guest's driver recovers from errors of PCI Express, not fatal and fatal, which its operator hears of",
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

const NAME: &str = "errors";
const TIMEOUT: Duration = Duration::from_secs(600);
const LEN: usize = 256 << 10;
const GUEST_SEED: u64 = 0x6572_726f_7267;
const HOST_SEED: u64 = 0x6572_726f_7268;

/// What QEMU injects at the port above the card, how Linux names it there, its severity, and what the guest reports then.
const ERRORS: [(&str, &str, &str, &str); 2] = [
    ("POISON_TLP", "TLP", "non-fatal", "its driver has recovered from an error that is not fatal"),
    ("SDN", "SDES", "fatal", "its driver has recovered from a fatal error"),
];
const BEGUN: &str = "its card works";

fn l1(l1: &mut L1) -> Result<()> {
    let cards = Function::find_all(E1000E.0, E1000E.1)?;
    let [mine, given] =
        <[Function; 2]>::try_from(cards).map_err(|cards| anyhow!("these are not two: {cards:?}"))?;
    net::set_up(&net::interface_of(&mine)?, HOST)?;
    let listener = TcpListener::bind((HOST, PORT)).context("can't listen")?;
    let exchange = || net::serve_once(&listener, TIMEOUT, LEN, GUEST_SEED, HOST_SEED).map(drop);
    let mut daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).spawn()?;
    let mut guest = Guest::start(l1, &GuestPlan::linux(NAME, &given))?;
    exchange()?;
    wait_for(&mut guest, BEGUN)?;
    for (error, name, severity, recovered) in ERRORS {
        l1.monitor(&format!("pcie_aer_inject_error port1 {error}"));
        let counted = format!("counted 1 {severity} error ({name})");
        guest.wait_for_log(&counted, TIMEOUT)?;
        l1.proved(format!("its process says what the Linux kernel of the host {counted}"));
        exchange().with_context(|| guest.said())?;
        wait_for(&mut guest, recovered)?;
    }
    wait_until("the daemon's metric", TIMEOUT, || {
        let text = metrics().ok()?;
        text.lines().any(|line| line.contains("\"device-error\"") && line.ends_with(" 2")).then_some(())
    })?;
    l1.proved("the daemon counts both as events");
    guest.end(TIMEOUT)?.succeeded(l1)?;
    daemon.kill().and_then(|()| daemon.wait())?;
    l1.prove(given.driver().as_deref() == Some("e1000e"), "the host's driver has the card again")?;
    net::interface_of(&given).map(drop)
}

/// What the daemon answers to Prometheus.
fn metrics() -> Result<String> {
    let mut stream = UnixStream::connect("/run/vm-passthrough/daemon.sock")?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// Waits until the guest's agent has proved something.
fn wait_for(guest: &mut Guest, what: &str) -> Result<()> {
    let proved =
        |report: &Report| matches!(report, Report::Proved { what: proved } if proved == what).then_some(());
    guest.wait_for(what, TIMEOUT, proved).map(drop)
}

fn l2(l2: &mut L2) -> Result<()> {
    let card = Function::find(E1000E.0, E1000E.1)?;
    net::set_up(&net::interface_of(&card)?, GUEST)?;
    let exchange = || net::exchange(SocketAddrV4::new(HOST, PORT), LEN, GUEST_SEED, HOST_SEED).map(drop);
    exchange()?;
    l2.prove(true, BEGUN)?;
    for (times, (.., severity, recovered)) in (1..).zip(ERRORS) {
        let log = || kernel_log().unwrap_or_default();
        wait_until("the end of the recovery", TIMEOUT, || {
            (log().matches("AER: device recovery").count() == times).then_some(())
        })?;
        let log = log();
        let lines: Vec<_> =
            log.lines().filter(|line| line.contains("AER") || line.contains(&card.address)).collect();
        let is_told = log
            .to_lowercase()
            .contains(&format!("({severity}) error message received from {}", card.address))
            && log.matches("AER: device recovery successful").count() == times;
        l2.prove(is_told, format!("its Linux kernel has handled a {severity} error of {}", card.address))
            .with_context(|| lines.join("\n"))?;
        exchange().with_context(|| lines.join("\n"))?;
        l2.prove(true, recovered)?;
    }
    Ok(())
}
