//! Measures what an operator waits for when a guest that runs gets a device, and when the device is taken back: beside QEMU in
//! the same L1 with the same Linux kernel, initial RAM disk and device, by native PCI Express hot-plug and by ACPI, QEMU's
//! default. The device is at vfio-pci before, as the others don't take it from its driver.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use super::bench;
use super::bench::tell;
use super::hot_attach_cycles::{self as cycles, Daemon, wait_for, without_device, write_pattern};
use crate::agent::{Engine, Function, Guest, GuestPlan, L1, VM_SERVICE, wait_until};
use crate::scenario::{Contents, Scenario, Variant};
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench-hot-attach",
    about: "measures attaching to a guest that runs, and detaching, beside QEMU's device_add and device_del",
    contents: Contents { linux_guest: true, peers: true, ..Contents::NONE },
    l1,
    deadline: Duration::from_secs(2 * 3600),
    l2: Some(cycles::l2),
    ..bench::SCENARIO
};

const GUESTS: usize = 2;
/// How often each guest gets the device.
const CYCLES: usize = 5;
/// How often another one gets it, to see what is left of that.
const MANY: usize = 100;
const TIMEOUT: Duration = Duration::from_secs(600);
const QMP: &str = "/tmp/qmp";
/// Between two cycles.
const SETTLE: Duration = Duration::from_secs(3);

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    write_pattern(&nvme)?;
    l1.vm_service(&["claim", &nvme.address], TIMEOUT)?.succeeded()?;
    let mut daemon = Daemon::start()?;
    let mut rows = [
        Row::new("vm-service", Engine::VmService, &[]),
        Row::new(
            "QEMU, native",
            Engine::Qemu,
            &["-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"],
        ),
        Row::new("QEMU, ACPI", Engine::Qemu, &[]),
    ];
    for round in 0..GUESTS {
        for at in 0..rows.len() {
            let at = (round + at) % rows.len();
            rows[at].run(l1, &nvme, &format!("guest{at}-{round}"))?;
        }
    }
    wear(l1, &nvme)?;
    daemon.end()?;
    let figures: [(&str, Times); 3] = [
        ("request to visible in the guest", |row| &row.seen),
        ("request to first I/O", |row| &row.used),
        ("detaching", |row| &row.detached),
    ];
    for (what, times) in figures {
        for row in &rows {
            tell(l1, &format!("{what}, {}", row.name), times(row), "ms");
        }
        let [ours, peers @ ..] = &rows;
        for peer in peers {
            let ratio = bench::median(times(ours)) / bench::median(times(peer));
            l1.figure(&format!("{what}, {} / {}", ours.name, peer.name), ratio, "ratio");
        }
    }
    l1.vm_service(&["release", &nvme.address], TIMEOUT)?.succeeded().map(drop)
}

type Times = fn(&Row) -> &Vec<f64>;

/// Who runs the guest, and how long that took, in milliseconds.
struct Row {
    name: &'static str,
    engine: Engine,
    arguments: &'static [&'static str],
    seen: Vec<f64>,
    used: Vec<f64>,
    detached: Vec<f64>,
}

impl Row {
    fn new(name: &'static str, engine: Engine, arguments: &'static [&'static str]) -> Self {
        Self { name, engine, arguments, seen: Vec::new(), used: Vec::new(), detached: Vec::new() }
    }

    /// Runs a guest once.
    fn run(&mut self, l1: &mut L1, nvme: &Function, name: &str) -> Result<()> {
        let socket = format!("unix:{QMP},server=on,wait=off");
        let mut arguments = self.arguments.to_vec();
        match self.engine {
            Engine::Qemu => {
                arguments.extend(["-qmp", &socket, "-device", "pcie-root-port,id=hot,chassis=1,slot=1"]);
            }
            _ => arguments.extend(cycles::PATIENT),
        }
        let cmdline = format!("cycles={CYCLES}");
        let plan = GuestPlan { engine: self.engine, ..without_device(name, nvme, &cmdline) };
        let mut guest = Guest::start(l1, &GuestPlan { arguments: &arguments, ..plan })?;
        wait_for(&mut guest, "ready")?;
        let mut qmp = (self.engine == Engine::Qemu).then(Qmp::connect).transpose()?;
        self.cycle(l1, &mut guest, qmp.as_mut(), nvme, name).map_err(|error| guest.explain(error))?;
        cycles::end(l1, guest, |guest| match &mut qmp {
            Some(qmp) => qmp.execute("system_powerdown", json!({})),
            None => cycles::press_power_button(guest),
        })
    }

    /// Gives the guest the device some times.
    fn cycle(
        &mut self,
        l1: &mut L1,
        guest: &mut Guest,
        mut qmp: Option<&mut Qmp>,
        nvme: &Function,
        name: &str,
    ) -> Result<()> {
        for cycle in 0..CYCLES {
            let begun = guest.age();
            let since = |when: Duration| (when - begun).as_secs_f64() * 1e3;
            // Who asks waits for the answer, while the guest goes on.
            let asked = match &mut qmp {
                Some(qmp) => qmp.plug(l1.variant, nvme).map(|()| None)?,
                None => {
                    let mut attach = Command::new(VM_SERVICE);
                    Some(attach.args(["attach", &nvme.address, "--guest", name]).spawn()?)
                }
            };
            self.seen.push(since(wait_for(guest, &format!("seen {cycle}"))?));
            self.used.push(since(wait_for(guest, &format!("used {cycle}"))?));
            if let Some(mut attach) = asked {
                ensure!(attach.wait()?.success(), "attach failed");
            }
            let begun = Instant::now();
            match &mut qmp {
                Some(qmp) => qmp.unplug()?,
                None => {
                    l1.vm_service(&["detach", &nvme.address], TIMEOUT)?.succeeded()?;
                }
            }
            self.detached.push(begun.elapsed().as_secs_f64() * 1e3);
            wait_for(guest, &format!("gone {cycle}"))?;
            // Linux ignores what is plugged within a second after it has switched a slot off (`remove_board` in
            // `drivers/pci/hotplug/pciehp_ctrl.c`).
            std::thread::sleep(SETTLE);
        }
        Ok(())
    }
}

/// Has a guest get and lose the device many times.
fn wear(l1: &mut L1, nvme: &Function) -> Result<()> {
    for (process, [first, last]) in cycles::wear(l1, nvme, MANY)? {
        for (what, first, last, unit) in [
            ("descriptors", first.descriptors, last.descriptors, "descriptors"),
            ("mappings", first.mappings, last.mappings, "mappings"),
            ("memory", first.kib, last.kib, "KiB"),
        ] {
            l1.figure(&format!("{what} of the {process} after the first cycle"), first as f64, unit);
            l1.figure(&format!("{what} of the {process} after {MANY} more"), last as f64, unit);
        }
    }
    Ok(())
}

/// Whether a message answers a command.
fn is_answer(message: &Value) -> bool {
    message.get("return").is_some() || message.get("error").is_some()
}

/// QEMU's machine protocol.
struct Qmp(BufReader<UnixStream>);

impl Qmp {
    fn connect() -> Result<Self> {
        let socket = wait_until("QEMU's socket", TIMEOUT, || UnixStream::connect(Path::new(QMP)).ok())?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let mut this = Self(BufReader::new(socket));
        this.next(|message| message.get("QMP").is_some())?;
        this.execute("qmp_capabilities", json!({}))?;
        Ok(this)
    }

    fn plug(&mut self, variant: Variant, function: &Function) -> Result<()> {
        let mut device =
            json!({ "driver": "vfio-pci", "host": function.address, "bus": "hot", "id": "device" });
        if variant == Variant::Iommufd {
            device["iommufd"] = "iommufd0".into();
        }
        self.execute("device_add", device)
    }

    /// Repeats `device_del` while QEMU refuses it because the slot's power indicator blinks: the guest still switches the slot on or off.
    fn unplug(&mut self) -> Result<()> {
        const BUSY: &str = "guest is busy";
        let is_gone =
            |message: &Value| message["event"] == "DEVICE_DELETED" && message["data"]["device"] == "device";
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.send("device_del", json!({ "id": "device" }))?;
            let mut has_gone = false;
            let answer = self.next(|message| {
                has_gone |= is_gone(message);
                is_answer(message)
            })?;
            match answer["error"]["desc"].as_str() {
                _ if has_gone => return Ok(()),
                None => return self.next(is_gone).map(drop),
                Some(error) if error.contains(BUSY) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Some(error) => bail!("QEMU refuses device_del: {error}"),
            }
        }
    }

    fn execute(&mut self, command: &str, arguments: Value) -> Result<()> {
        self.send(command, arguments)?;
        let answer = self.next(is_answer)?;
        ensure!(answer.get("error").is_none(), "QEMU refuses {command}: {answer}");
        Ok(())
    }

    fn send(&mut self, command: &str, arguments: Value) -> Result<()> {
        writeln!(self.0.get_mut(), "{}", json!({ "execute": command, "arguments": arguments }))?;
        Ok(())
    }

    /// Waits for a message.
    fn next(&mut self, mut is_it: impl FnMut(&Value) -> bool) -> Result<Value> {
        loop {
            let mut line = String::new();
            ensure!(self.0.read_line(&mut line)? > 0, "QEMU has closed its socket");
            let message: Value = serde_json::from_str(&line)?;
            if is_it(&message) {
                return Ok(message);
            }
        }
    }
}
