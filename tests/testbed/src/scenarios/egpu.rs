//! An enclosure at a hot-plug port: connected, used by a Linux guest, pulled, and back. The port, its hot-plug and what is in the
//! enclosure are QEMU's, the IOMMU and Linux real to them; the tree of USB4 is files, and the connection manager plays itself here.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::agent::{Finished, Function, Guest, GuestPlan, L1, L2, PortSlot, VM_SERVICE, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::host_wants_back::Others;

pub(super) const HOTPLUG: Scenario = Scenario {
    name: "egpu-hotplug",
    about: "an enclosure is connected when it may be, its display goes to a running Linux guest, and it is disconnected from there",
    l1: hotplug,
    ..RECONNECT
};

pub(super) const SURPRISE: Scenario = Scenario {
    name: "egpu-surprise",
    about: "what falls off the bus in an enclosure is recovered rung by rung, or given up",
    l1: surprise,
    l2: None,
    contents: Contents { bare_guest: true, ..Contents::NONE },
    ..RECONNECT
};

pub(super) const RECONNECT: Scenario = Scenario {
    name: "egpu-reconnect",
    about: "an enclosure's cable is pulled while a Linux guest uses it; it comes back, is connected, and the guest gets it again",
    variants: Variants::Both,
    ports: 4,
    devices: &[
        // Ports do hot-plug themselves, and the firmware calls all external but the last.
        "-global",
        "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
        "-acpitable",
        "file={external-ports}",
        "-device",
        "edu,bus=port3,dma_mask=0xffffffffffffffff",
    ],
    disks: &[],
    memory_mib: 1280,
    deadline: Duration::from_secs(900),
    contents: Contents { linux_guest: true, bare_guest: true, ..Contents::NONE },
    l1: reconnect,
    l2: Some(l2),
};

const DISPLAY: (u16, u16) = (0x1234, 0x1111);
const GUEST: &str = "egpu";
const TIMEOUT: Duration = Duration::from_secs(300);
const TREE: &str = "/run/usb4";
const ID: &str = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30";
const WORDS: [u32; 2] = [0x6567_7075, 0x1234_5678];
const AT: [u64; 2] = [0, 0x1000];

/// An enclosure with a display, as its connection manager has it.
struct Enclosure {
    router: PathBuf,
    slot: Option<PortSlot>,
    /// The port that it comes to next: each time another, as QEMU does not wholly forget a display that was pulled, and cables
    /// go where they like.
    port: usize,
}

impl Enclosure {
    fn new() -> Result<Self> {
        let devices = Path::new(TREE).join("devices");
        let put = |dir: &str, files: &[(&str, &str)]| -> Result<()> {
            let dir = devices.join(dir);
            fs::create_dir_all(&dir)?;
            for (name, text) in files {
                fs::write(dir.join(name), format!("{text}\n"))?;
            }
            Ok(())
        };
        put("domain0", &[("security", "user"), ("iommu_dma_protection", "0"), ("deauthorization", "1")])?;
        put("0-0", &[("generation", "4"), ("unique_id", "00000000-0000-0000-0000-000000000001")])?;
        put(
            "0-1",
            &[
                ("authorized", "0"),
                ("unique_id", ID),
                ("vendor_name", "Acme"),
                ("device_name", "Enclosure"),
                ("generation", "4"),
                ("rx_speed", "20.0 Gb/s"),
                ("rx_lanes", "2"),
                ("tx_speed", "20.0 Gb/s"),
                ("tx_lanes", "2"),
            ],
        )?;
        Ok(Self { router: devices.join("0-1"), slot: None, port: 0 })
    }

    fn is_authorized(&self) -> bool {
        fs::read_to_string(self.router.join("authorized")).is_ok_and(|text| text.trim() == "1")
    }

    /// Builds and takes down the tunnel as `authorized` says.
    fn serve(&mut self, l1: &mut L1) -> Result<()> {
        match (self.is_authorized(), &self.slot) {
            (true, None) => {
                l1.monitor(&format!("device_add bochs-display,bus=port{},vgamem=4M", self.port));
                self.port += 1;
                let display =
                    wait_until("the display", TIMEOUT, || Function::find(DISPLAY.0, DISPLAY.1).ok())?;
                self.slot = Some(PortSlot::of(&display)?);
            }
            (false, Some(_)) => self.pull_tunnel()?,
            _ => {}
        }
        Ok(())
    }

    fn pull_tunnel(&mut self) -> Result<()> {
        pull(&self.slot.take().context("nothing is there")?)
    }

    fn away(&self) -> PathBuf {
        Path::new(TREE).join("away")
    }

    /// Pulls the cable.
    fn pull(&mut self) -> Result<()> {
        fs::rename(&self.router, self.away())?;
        self.pull_tunnel()
    }

    /// Plugs the cable in again.
    fn plug(&self) -> Result<()> {
        fs::write(self.away().join("authorized"), "0\n")?;
        Ok(fs::rename(self.away(), &self.router)?)
    }

    /// Serves until `ready` has something.
    fn until<T>(&mut self, l1: &mut L1, what: &str, mut ready: impl FnMut() -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.serve(l1)?;
            if let Some(ready) = ready() {
                return Ok(ready);
            }
            ensure!(Instant::now() < deadline, "{what} did not come");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Runs `vm-service egpu` with these arguments.
    fn command(&mut self, l1: &mut L1, arguments: &[&str]) -> Result<Finished> {
        l1.step(format!("egpu {}", arguments.join(" ")));
        let arguments = [&["egpu", "--thunderbolt", TREE], arguments].concat();
        let mut child = Command::new(VM_SERVICE)
            .args(&arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let started = Instant::now();
        self.until(l1, "its end", || child.try_wait().transpose())??;
        let took = started.elapsed();
        let output = child.wait_with_output()?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Finished {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
            took,
        })
    }
}

/// Pulls what is in a slot, whether it had power or not: QEMU takes out only what has.
fn pull(slot: &PortSlot) -> Result<()> {
    slot.set_power(true)?;
    slot.pull()
}

/// `egpu watch`, in the background.
struct Watch {
    child: Child,
    /// What it prints: changes and warnings.
    printed: PathBuf,
    /// What it logs, where an enclosure's name may stand too.
    log: PathBuf,
}

impl Watch {
    fn start(arguments: &[&str]) -> Result<Self> {
        let [printed, log] = ["/run/egpu-watch.out", "/run/egpu-watch.log"].map(PathBuf::from);
        let child = Command::new(VM_SERVICE)
            .args(["egpu", "--thunderbolt", TREE, "watch", "--interval", "200"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(File::create(&printed)?)
            .stderr(File::create(&log)?)
            .spawn()?;
        Ok(Self { child, printed, log })
    }

    fn printed(&self) -> String {
        fs::read_to_string(&self.printed).unwrap_or_default()
    }

    /// What it printed, and then what it logged.
    fn said(&self) -> String {
        self.printed() + &fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The last state that it told.
    fn state(&self) -> Option<String> {
        let said = self.printed();
        let is_change =
            |line: &&str| line.contains(" Acme Enclosure ") && !line.contains(" Acme Enclosure warning");
        let line = said.lines().rfind(is_change)?;
        Some(line.split(" Acme Enclosure ").nth(1)?.split([' ', ':']).next()?.to_owned())
    }

    /// How often it told that state.
    fn times(&self, state: &str) -> usize {
        self.printed().matches(&format!(" Acme Enclosure {state}\n")).count()
    }

    /// Milliseconds from the third missed heartbeat until the first reset begins, by the times of the log.
    fn to_first_reset(&self) -> Result<f64> {
        let said = self.said();
        let time = |line: &str| Some(seconds_of_day(line.split('T').nth(1)?.split('Z').next()?)? * 1000.0);
        let mut missed = said.lines().filter(|line| line.contains("heartbeat missed")).filter_map(time);
        let mut reset = said.lines().filter(|line| line.contains("soft-reset begins")).filter_map(time);
        let (missed, reset) = missed.nth(2).zip(reset.next()).with_context(|| said.clone())?;
        ensure!(reset >= missed, "the reset came first, or midnight did");
        Ok(reset - missed)
    }

    fn wait_for(&self, l1: &mut L1, enclosure: &mut Enclosure, state: &str) -> Result<()> {
        let is = || (self.state().as_deref() == Some(state)).then_some(());
        enclosure.until(l1, state, is).with_context(|| self.said())
    }
}

/// `HH:MM:SS.ssssss` in seconds.
fn seconds_of_day(time: &str) -> Option<f64> {
    time.split(':').try_fold(0.0, |seconds, part| Some(seconds * 60.0 + part.parse::<f64>().ok()?))
}

impl Drop for Watch {
    fn drop(&mut self) {
        // It has ended, or ends now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A Linux guest that looks for the display, and the daemon.
fn start(l1: &mut L1, edu: &Function, turns: &str) -> Result<(Guest, Child)> {
    let cmdline = format!("turns={turns}");
    let plan = GuestPlan { devices: Vec::new(), cmdline: &cmdline, ..GuestPlan::linux(GUEST, edu) };
    let mut guest = Guest::start(l1, &plan)?;
    let daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).spawn()?;
    wait_for(&mut guest, "it looks for the display, turn 0")?;
    let knows = |asked: &Finished| asked.code == Some(0) && asked.stdout.contains(GUEST);
    wait_until("the daemon", TIMEOUT, || l1.vm_service(&["guests"], TIMEOUT).ok().filter(knows))?;
    Ok((guest, daemon))
}

/// Waits until the guest's agent has proved something.
fn wait_for(guest: &mut Guest, what: &str) -> Result<()> {
    let proved =
        |report: &Report| matches!(report, Report::Proved { what: proved } if proved == what).then_some(());
    guest.wait_for(what, TIMEOUT, proved).map(drop)
}

fn display() -> Result<Function> {
    Function::find(DISPLAY.0, DISPLAY.1)
}

fn is_settled(l1: &mut L1) -> bool {
    let claims = l1.vm_service(&["claims", "--json"], TIMEOUT).and_then(|claims| claims.json());
    let edus = Function::find_all(EDU.0, EDU.1).unwrap_or_default();
    claims.is_ok_and(|claims| {
        let of = |claim: &serde_json::Value| !edus.iter().any(|edu| claim["address"] == edu.address.as_str());
        claims["claims"].as_array().is_some_and(|claims| !claims.iter().any(of))
    })
}

fn hotplug(l1: &mut L1) -> Result<()> {
    let mut enclosure = Enclosure::new()?;
    let refused = enclosure.command(l1, &["connect"])?;
    l1.prove(
        refused.code == Some(3) && refused.stderr.contains("no DMA protection") && !enclosure.is_authorized(),
        format!("without DMA protection it is refused: {}", refused.stderr.trim()),
    )?;
    fs::write(Path::new(TREE).join("devices/domain0/iommu_dma_protection"), "1\n")?;
    enclosure.command(l1, &["policy", "--authorise", "never"])?.succeeded()?;
    let refused = enclosure.command(l1, &["connect"])?;
    l1.prove(
        refused.code == Some(3) && !enclosure.is_authorized(),
        format!("by the policy it is refused: {}", refused.stderr.trim()),
    )?;
    enclosure.command(l1, &["policy", "--authorise", "ask", "--minimum-rate", "20"])?.succeeded()?;
    let connected = enclosure.command(l1, &["connect", "--remember", "--json"])?.succeeded()?;
    let (took, connected) = (connected.took, connected.json()?);
    let display = display()?;
    l1.prove(
        connected["state"] == "ready" && connected["functions"][0] == display.address.as_str(),
        "it is connected, and the display is there",
    )?;
    l1.figure("from connect to ready", took.as_secs_f64(), "s");
    let known = enclosure.command(l1, &["policy", "--json"])?.succeeded()?.json()?;
    l1.prove(known["known"][0]["enclosure"] == ID, "it is known from now on")?;
    let explained = l1.vm_service(&["explain", &display.address], TIMEOUT)?;
    l1.prove(
        explained.stdout.contains("tunnelled"),
        "it is told to be behind a tunnel, as Linux says of what is below an external port",
    )
    .with_context(|| explained.stdout)?;

    let edu = Function::find(EDU.0, EDU.1)?;
    let (mut guest, mut daemon) = start(l1, &edu, "2")?;
    let asked = Instant::now();
    l1.vm_service(&["attach", &display.address, "--guest", GUEST], TIMEOUT)?.succeeded()?;
    wait_for(&mut guest, "it uses the display, turn 0")?;
    l1.figure("from attach to use in the guest", asked.elapsed().as_secs_f64(), "s");
    let status = enclosure.command(l1, &["disconnect", "--json"])?.succeeded()?;
    l1.figure("disconnect, from the guest", status.took.as_secs_f64(), "s");
    l1.prove(status.json()?["state"] == "disconnected" && !enclosure.is_authorized(), "it is disconnected")?;
    wait_for(&mut guest, "it is gone, turn 0")?;
    let is_settled = is_settled(l1);
    l1.prove(!display.path().exists() && is_settled, "nothing of it is left, and nothing of it is claimed")?;
    // All of it by one command.
    let asked = Instant::now();
    enclosure.command(l1, &["connect", "--guest", GUEST])?.succeeded()?;
    wait_for(&mut guest, "it uses the display, turn 1")?;
    l1.figure("from connect to use in the guest", asked.elapsed().as_secs_f64(), "s");
    enclosure.command(l1, &["disconnect"])?.succeeded()?;
    wait_for(&mut guest, "it is gone, turn 1")?;
    enclosure.pull_after_disconnect()?;
    let again = enclosure.command(l1, &["disconnect", ID])?;
    l1.prove(again.code == Some(1), format!("what is not connected is said to be: {}", again.stderr.trim()))?;
    guest.end(TIMEOUT)?.succeeded(l1)?;
    daemon.kill().and_then(|()| daemon.wait())?;
    Ok(())
}

impl Enclosure {
    /// Pulls the cable of what is disconnected.
    fn pull_after_disconnect(&self) -> Result<()> {
        Ok(fs::rename(&self.router, self.away())?)
    }
}

fn reconnect(l1: &mut L1) -> Result<()> {
    let mut enclosure = Enclosure::new()?;
    fs::write(Path::new(TREE).join("devices/domain0/iommu_dma_protection"), "1\n")?;
    enclosure.command(l1, &["policy", "--authorise", "known"])?.succeeded()?;
    // Its guest, and the daemon, do not run yet.
    let connected = enclosure.command(l1, &["connect", "--remember", "--guest", GUEST])?;
    l1.prove(
        enclosure.is_authorized() && connected.stderr.contains("it was not given to egpu"),
        "it is connected, and waits for its guest",
    )
    .with_context(|| connected.stderr)?;
    let watch = Watch::start(&[])?;
    let edu = Function::find(EDU.0, EDU.1)?;
    let others = Others::start(l1, &edu)?;
    let (mut guest, mut daemon) = start(l1, &edu, "2")?;
    for turn in 0..2 {
        // Nobody attaches it.
        watch.wait_for(l1, &mut enclosure, "in-use")?;
        let display = display()?;
        wait_for(&mut guest, &format!("it uses the display, turn {turn}"))?;
        let pulled = Instant::now();
        enclosure.pull()?;
        watch.wait_for(l1, &mut enclosure, "absent")?;
        wait_until("the guest's letting go", TIMEOUT, || (!guest.holds_a_device()).then_some(()))?;
        wait_until("its going", TIMEOUT, || (!display.path().exists()).then_some(()))?;
        wait_until("the ledger", TIMEOUT, || is_settled(l1).then_some(()))?;
        l1.figure("from the pulled cable until all is settled", pulled.elapsed().as_secs_f64(), "s");
        wait_for(&mut guest, &format!("it is gone, turn {turn}"))?;
        l1.proved(format!("turn {turn}: pulled in mid-use, guest and host go on"));
        if turn == 0 {
            let (plugged, before) = (Instant::now(), watch.times("ready"));
            enclosure.plug()?;
            let is = || (watch.times("ready") > before).then_some(());
            enclosure.until(l1, "ready", is).with_context(|| watch.said())?;
            l1.figure("from the plugged cable to ready, by the policy", plugged.elapsed().as_secs_f64(), "s");
        }
    }
    // That it lost a device is told by its exit status, too.
    let ended = guest.end(TIMEOUT)?;
    l1.prove(
        ended.reports.iter().any(|(_, report)| *report == Report::Passed),
        "the guest goes on to its own end",
    )
    .with_context(|| ended.process.stderr)?;
    others.end(l1)?;
    daemon.kill().and_then(|()| daemon.wait())?;
    Ok(())
}

fn surprise(l1: &mut L1) -> Result<()> {
    let mut enclosure = Enclosure::new()?;
    fs::write(Path::new(TREE).join("devices/domain0/iommu_dma_protection"), "1\n")?;
    enclosure.command(l1, &["policy", "--authorise", "known"])?.succeeded()?;
    enclosure.command(l1, &["connect", "--remember"])?.succeeded()?;
    let watch = Watch::start(&[])?;
    watch.wait_for(l1, &mut enclosure, "ready")?;
    // Without power it answers nothing, whatever resets it; with a new tunnel it has power.
    let silenced = Instant::now();
    enclosure.slot.as_ref().context("nothing is there")?.set_power(false)?;
    watch.wait_for(l1, &mut enclosure, "recovering")?;
    l1.figure("from the last answer to the first reset", silenced.elapsed().as_secs_f64(), "s");
    watch.wait_for(l1, &mut enclosure, "ready").with_context(|| watch.said())?;
    l1.figure("from the last answer to ready again", silenced.elapsed().as_secs_f64(), "s");
    let said = watch.said();
    l1.prove(said.contains("off the bus"), "it was seen to be off the bus").with_context(|| said.clone())?;
    ensure!(display()?.path().exists(), "the display is not there");
    let at = |what: &str| said.find(&format!(" Acme Enclosure recovering ({what})"));
    let rungs = ["soft-reset", "hard-reset", "reconnect"].map(at);
    l1.prove(
        rungs.iter().all(Option::is_some) && rungs.is_sorted(),
        "a soft reset and a hard reset were tried before the new tunnel",
    )
    .with_context(|| said.clone())?;
    l1.figure("from the third missed heartbeat to the first reset", watch.to_first_reset()?, "ms");
    l1.proved("a new tunnel brings back what no reset did");
    // One whose tunnel does not come back is given up.
    enclosure.slot.as_ref().context("nothing is there")?.set_power(false)?;
    let slot = enclosure.slot.take().context("nothing is there")?;
    let deadline = Instant::now() + TIMEOUT;
    let mut is_taken_down = false;
    while watch.state().as_deref() != Some("failed") {
        if !enclosure.is_authorized() && !is_taken_down {
            pull(&slot)?;
            is_taken_down = true;
        }
        if Instant::now() > deadline {
            bail!("it is not given up:\n{}", watch.said());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let said = watch.said();
    l1.prove(
        said.contains("failed (unrecovered)") && !enclosure.is_authorized(),
        "what no rung brings back is given up, and its tunnel taken down",
    )
    .with_context(|| said)
}

fn l2(l2: &mut L2) -> Result<()> {
    let turns: usize = l2.parameter("turns")?.parse()?;
    let find = || Function::find(DISPLAY.0, DISPLAY.1).ok();
    for turn in 0..turns {
        // It may be there already: the watch gives it to the guest as soon as the guest can take it.
        l2.prove(true, format!("it looks for the display, turn {turn}"))?;
        let display = wait_until("the display", TIMEOUT, find)?;
        display.exchange_words(0, &AT, Some(&WORDS))?;
        ensure!(display.exchange_words(0, &AT, None)? == WORDS, "it does not keep what was written");
        l2.prove(true, format!("it uses the display, turn {turn}"))?;
        // Until it is gone it keeps what is written, or answers nothing.
        wait_until("its going", TIMEOUT, || {
            let words = display.exchange_words(0, &AT, None).unwrap_or_else(|_| vec![u32::MAX; 2]);
            (words != WORDS && find().is_none()).then_some(())
        })?;
        l2.prove(true, format!("it is gone, turn {turn}"))?;
    }
    Ok(())
}
