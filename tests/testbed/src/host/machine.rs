//! L1 as a QEMU process: its command line, its reports, its deadline.

use std::fs::File;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use acpi_tables::sdt::Sdt;
use acpi_tables::{Aml as _, aml};
use anyhow::{Context, Result};

use super::Run;
use crate::report::Report;
use crate::scenario::CUPY_DISK;

/// L1's processor, without fast string operations: with them Linux clears and copies memory by `rep stosb` and `rep movsb`,
/// which are emulated byte by byte, each a slow one in a page that has held code. A guest's RAM is cleared in a third of the
/// time without, and it no longer matters what was in it.
const CPU: &str = "max,-erms,-fsrm";
/// Device number of the first root port.
const FIRST_PORT: u8 = 4;

/// A running L1.
#[derive(Debug)]
pub(super) struct Machine {
    qemu: Child,
    /// Commands for its monitor.
    monitor: File,
    reports: Receiver<Report>,
    /// When the scenario began that it runs.
    began: Instant,
    /// Counted from then.
    deadline: Duration,
}

/// What came of waiting for a report.
#[derive(Debug)]
pub(super) enum Next {
    /// A report.
    Report(Report),
    /// L1 has powered off or QEMU ended.
    Ended,
    /// So long after the scenario began.
    TooLate(Duration),
}

/// Files of one run, all in its directory.
#[derive(Clone, Debug)]
pub(super) struct Files {
    /// The directory.
    pub(super) directory: PathBuf,
}

impl Files {
    pub(super) fn console(&self) -> PathBuf {
        self.directory.join("console.log")
    }

    pub(super) fn reports(&self) -> PathBuf {
        self.directory.join("reports.log")
    }

    pub(super) fn qemu(&self) -> PathBuf {
        self.directory.join("qemu.log")
    }

    pub(super) fn initrd(&self) -> PathBuf {
        self.directory.join("initrd.cpio")
    }

    /// The disk with CuPy.
    pub(super) fn cupy(&self) -> PathBuf {
        self.directory.join("cupy.img")
    }

    pub(super) fn disk(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.img"))
    }
}

impl Machine {
    /// Starts QEMU for scenarios of one [machine](Scenario::has_machine_of), the first of which is `scenario`.
    pub(super) fn start(batch: &[&Run], kernel: &Path, files: &Files) -> Result<Self> {
        let Run { scenario, variant, processors, sweep, .. } = batch.first().context("no scenario")?;
        let names: Vec<&str> = batch.iter().map(|run| run.scenario.name).collect();
        let memory_mib = batch.iter().map(|run| run.scenario.memory_mib).max().unwrap_or_default();
        for disk in scenario.disks {
            let path = files.disk(disk.name);
            let file = File::create(&path).with_context(|| format!("can't create {}", path.display()))?;
            file.set_len(disk.mib << 20)?;
        }
        let sweep = sweep.seed().map(|seed| format!(" testbed.sweep={seed}")).unwrap_or_default();
        let mut command = Command::new("qemu-system-x86_64");
        // One processor but for measuring, whatever nested guests have. QEMU 10.0 emulates several in threads that race: now
        // and then it stopped at an assertion (`iotlb_to_section`) after a device's memory had moved, or L1 lost a timer
        // while guests ran (`helper_vmrun` changes `interrupt_request` without the lock that others set it under).
        command
            .args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", &processors.to_string()])
            .args(["-m", &memory_mib.to_string()])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-device", "intel-iommu,intremap=on,caching-mode=on"])
            .arg("-serial")
            .arg(format!("file:{}", files.console().display()))
            .args(["-chardev", "stdio,id=report,signal=off", "-serial", "chardev:report"])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(files.initrd())
            .arg("-append")
            // What the Linux kernel does not know is in the environment of all processes. Log files are not looked at here, and each
            // write to one would be one more at which `claim_kill9` kills.
            .arg(format!(
                "console=ttyS0 quiet panic=-1 no_timer_check intel_iommu=on VM_SERVICE_LOG_DIR= testbed.level=1 testbed.scenario={} testbed.variant={variant}{sweep}",
                names.join(",")
            ));
        for port in 0..scenario.ports {
            let place = format!("id=port{port},chassis={},addr={:x}.0", port + 1, FIRST_PORT + port);
            command.arg("-device").arg(format!("pcie-root-port,{place}"));
        }
        for argument in scenario.devices {
            let mut argument = argument.replace(CUPY_DISK, &files.cupy().display().to_string());
            for disk in scenario.disks {
                argument = argument
                    .replace(&format!("{{{}}}", disk.name), &files.disk(disk.name).display().to_string());
            }
            if argument.contains(EXTERNAL_PORTS) {
                let table = files.directory.join("external-ports.aml");
                let ports = FIRST_PORT..FIRST_PORT + scenario.ports.saturating_sub(1);
                std::fs::write(&table, external_ports(ports))
                    .with_context(|| format!("can't write {}", table.display()))?;
                argument = argument.replace(EXTERNAL_PORTS, &table.display().to_string());
            }
            command.arg(argument);
        }
        let monitor = monitor(files)?;
        command
            .arg("-chardev")
            .arg(format!("pipe,id=monitor,path={}", files.directory.join(MONITOR).display()))
            .args(["-mon", "chardev=monitor,mode=readline"]);
        let log =
            File::create(files.qemu()).with_context(|| format!("can't create {}", files.qemu().display()))?;
        let mut qemu = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("can't run qemu-system-x86_64")?;
        let stdout = qemu.stdout.take().context("QEMU has no standard output")?;
        let mut copy = File::create(files.reports())?;
        let (sender, reports) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n') {
                let Ok(line) = line else { break };
                let line = String::from_utf8_lossy(&line).into_owned();
                let _ = std::io::Write::write_all(&mut copy, format!("{}\n", line.trim_end()).as_bytes());
                if let Some(report) = Report::parse(&line)
                    && sender.send(report).is_err()
                {
                    break;
                }
            }
        });
        Ok(Self { qemu, monitor, reports, began: Instant::now(), deadline: scenario.deadline })
    }

    /// Counts from now what the next scenario takes.
    pub(super) fn begin(&mut self, deadline: Duration) {
        (self.began, self.deadline) = (Instant::now(), deadline);
    }

    /// Gives a command to QEMU's monitor.
    ///
    /// # Errors
    /// When it takes none.
    pub(super) fn command(&mut self, command: &str) -> Result<()> {
        writeln!(self.monitor, "{command}")
            .with_context(|| format!("QEMU's monitor does not take `{command}`"))
    }

    /// Waits for the next report.
    pub(super) fn next(&mut self) -> Next {
        loop {
            let left = self.deadline.saturating_sub(self.began.elapsed());
            match self.reports.recv_timeout(left.min(SILENCE)) {
                Ok(report) => return Next::Report(report),
                Err(RecvTimeoutError::Disconnected) => return Next::Ended,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Next::TooLate(self.deadline),
                // One that has ended takes nothing, which is seen above.
                Err(RecvTimeoutError::Timeout) => {
                    let _ = self.qemu.stdin.as_mut().map(|stdin| stdin.write_all(&[XON]));
                }
            }
        }
    }

    /// How long processors have run for it until now, as the kernel counts: in ticks, of which Linux has 100 in a second.
    pub(super) fn processor_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.qemu.id())).unwrap_or_default();
        // Behind the name, which may have spaces: fields 3, 4 …; 14 and 15 are the times of the user and of the system.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let ticks: u64 =
            fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 10)
    }

    /// Waits for QEMU to end by itself, and kills it when it does not. Tells whether L1 powered off.
    pub(super) fn end(mut self) -> Result<bool> {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if let Some(status) = self.qemu.try_wait()? {
                return Ok(status.success());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(false)
    }
}

/// In the device arguments, the path of an ACPI table that calls all root ports external but the last.
const EXTERNAL_PORTS: &str = "{external-ports}";

/// An ACPI table by which firmware says of root ports, by their device numbers, that what is below them is outside the machine: the
/// device property `ExternalFacingPort` (Microsoft, "DSD for PCIe root ports", UUID efcc06cc-73ac-4bc3-bff0-76143807c389).
fn external_ports(devices: std::ops::Range<u8>) -> Vec<u8> {
    const UUID: [u8; 16] =
        [0xcc, 0x06, 0xcc, 0xef, 0xac, 0x73, 0xc3, 0x4b, 0xbf, 0xf0, 0x76, 0x14, 0x38, 0x07, 0xc3, 0x89];
    let property = aml::Package::new(vec![&"ExternalFacingPort", &1u8]);
    let properties = aml::Package::new(vec![&property]);
    let uuid = aml::BufferData::new(UUID.to_vec());
    let dsd = aml::Name::new("_DSD".into(), &aml::Package::new(vec![&uuid, &properties]));
    let mut body = Vec::new();
    for device in devices {
        let place = format!("\\_SB_.PCI0.S{:02X}_", device << 3);
        aml::Scope::new(place.as_str().into(), vec![&dsd]).to_aml_bytes(&mut body);
    }
    let mut table = Sdt::new(*b"SSDT", 36, 2, *b"TESTBD", *b"EXTERNAL", 1);
    table.append_slice(&body);
    table.as_slice().to_vec()
}

/// How long L1 may say nothing before it is interrupted. That race of QEMU 10.0 loses interrupts with one processor too: L1 is halted
/// then, with its timer's interrupt pending, and goes on at the next one of any device.
const SILENCE: Duration = Duration::from_secs(10);
/// What interrupts it: a character on the line of its reports, which Linux takes for flow control and does not echo.
const XON: u8 = 0x11;

/// Name of the two FIFOs that QEMU's monitor reads and writes, without their endings.
const MONITOR: &str = "monitor";

/// Makes the FIFOs, and opens the one that takes commands.
fn monitor(files: &Files) -> Result<File> {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    for ending in ["in", "out"] {
        let path = files.directory.join(format!("{MONITOR}.{ending}"));
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .with_context(|| format!("can't make {}", path.display()))?;
    }
    // Opened to read too, it does not wait for QEMU.
    let path = files.directory.join(format!("{MONITOR}.in"));
    let fifo = File::options().read(true).write(true).open(&path);
    fifo.with_context(|| format!("can't open {}", path.display()))
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
