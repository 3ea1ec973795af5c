//! Guests that share the GPU: `vm-service run` with bare guests, side by side.
//!
//! The programs lie beside this one, as `vm-service` and `bare`, or where `VM_SERVICE` and `BARE_GUEST` say.
#![allow(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use vm_accel::{Accelerator, Argument, Buffer, MemoryKind, Worker, arguments};
use vm_cuda::CudaAccelerator;
use vm_ir::{GuestAddr, Module, Trust, text, validate};
use vm_kernels::call::{Operand, Region};

use crate::gpu::{Gpu, TIMEOUT, named};
use crate::skip::skip;
use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Test};

/// What `accel-tiles` sends.
#[path = "../../testbed/guests/kernels/tiles.rs"]
mod tiles;

/// What the guests send.
pub(crate) const KERNELS: &str = include_str!("../../testbed/guests/kernels/accel.vir");
/// The longest that a launch of these guests may take.
const DEADLINE: Duration = Duration::from_secs(1);
/// How long a guest may take for all that it does, even where its processor is emulated.
const GUEST_PATIENCE: Duration = Duration::from_secs(120);
/// How long guests launch side by side.
const SECONDS: u64 = 8;
/// Guests at once.
const MANY: usize = 8;
/// Launches of the host, one at a time, that are timed, and the pause between those that are apart: as the guest does.
const LAUNCHES: usize = 200;
const PAUSE: Duration = Duration::from_millis(2);
/// What a kernel reads from the guest's memory, and writes to it, in MiB.
const LARGE: u64 = 1024;

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![
        Test::new("a guest's kernels work on its own memory", |gpu, report| {
            let ended = Guest::start(gpu, "good", "accel", 32)?.end()?;
            ended.passed()?;
            let stopped = ended.number("an endless kernel was stopped after ")?;
            let overrun = stopped / 1e3 - DEADLINE.as_secs_f64() * 1e3;
            report.figure(figure("deadline overrun", "ms", vec![overrun], None, Some(Aim::AtMost(100.0))));
            ended.checks(report);
            Ok(())
        }),
        Test::new(
            "one guest strays and loops for ever, and its neighbour's results are right",
            |gpu, report| {
                let alone =
                    Guest::start(gpu, "alone", &format!("accel-steady seconds={SECONDS}"), 32)?.end()?;
                alone.passed()?;
                let mut steady = Guest::start(gpu, "steady", &format!("accel-steady seconds={SECONDS}"), 32)?;
                steady.wait_for("bare: steady")?;
                let looping = Guest::start(gpu, "looping", &format!("accel-loop seconds={SECONDS}"), 32)?;
                let (steady, looping) = (steady.end()?, looping.end()?);
                steady.passed()?;
                looping.passed()?;
                let took = |ended: &Ended| ended.number("a launch took ");
                let (beside, alone) = (took(&steady)?, took(&alone)?);
                let peer = Some(("alone".to_owned(), Sample::of(vec![alone])));
                report.figure(figure(
                    "launch and wait beside a guest that loops",
                    "µs",
                    vec![beside],
                    peer,
                    None,
                ));
                looping.checks(report);
                steady.checks(report);
                Ok(())
            },
        ),
        Test::new("a hostile guest gets errors, and its neighbour's results are right", |gpu, report| {
            let hostile = Guest::start(gpu, "hostile", "accel-hostile", 32)?;
            let steady = Guest::start(gpu, "steady", &format!("accel-steady seconds={SECONDS}"), 32)?;
            let (steady, hostile) = (steady.end()?, hostile.end()?);
            steady.passed()?;
            hostile.passed()?;
            hostile.checks(report);
            Ok(())
        }),
        Test::new("eight guests at once", |gpu, report| {
            let guests = (0..MANY)
                .map(|number| {
                    Guest::start(
                        gpu,
                        &format!("many{number}"),
                        &format!("accel-steady seconds={SECONDS}"),
                        32,
                    )
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            let mut took = Vec::new();
            for guest in guests {
                let ended = guest.end()?;
                ended.passed()?;
                took.push(ended.number("a launch took ")?);
            }
            report.figure(figure("launch and wait, eight guests at once", "µs", took, None, None));
            Ok(())
        }),
        Test::new("figures of a guest against the host", figures),
        Test::new("a matrix product and attention of a guest are right", tiles_of_a_guest),
    ]
}

fn figure(
    name: &str,
    unit: &str,
    ours: Vec<f64>,
    peer: Option<(String, Sample)>,
    aim: Option<Aim>,
) -> Figure {
    Figure { name: name.into(), unit: unit.into(), ours: Sample::of(ours), peer, aim }
}

/// The same work from a guest and from this process: silu over host memory, one launch at a time, and batches.
fn figures(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let memory = 2 * LARGE + 64;
    let cmdline = format!("accel-bench mib={LARGE} launches=1");
    let ended = Guest::start(gpu, "bench", &cmdline, memory)?.end()?;
    ended.passed()?;

    let module = validate(text::parse(KERNELS)?, Trust::Guest)?;
    let compiled = gpu.compile(&module)?;
    let worker = gpu.worker()?;
    let (ramp, silu, add) = (
        worker.load(named(&compiled, "ramp")?.artifact())?,
        worker.load(named(&compiled, "silu")?.artifact())?,
        worker.load(named(&compiled, "add")?.artifact())?,
    );
    let bytes = LARGE << 20;
    let pinned = |bytes| worker.allocate_kind(MemoryKind::Pinned, bytes);
    let (x, y) = (pinned(bytes)?, pinned(bytes)?);
    let blocks = |per_block: u64| u32::try_from(bytes / 4 / per_block);
    worker.launch(&ramp, blocks(256)?, &arguments![&x])?;
    let best = |times: Vec<f64>| times.into_iter().fold(f64::INFINITY, f64::min);
    let grid = blocks(1024)?;
    let host_silu =
        best(times(&worker, 10, Duration::ZERO, &|| Ok(worker.launch(&silu, grid, &arguments![&x, &y])?))?);
    let small = pinned(1024)?;
    let (from, to) = (small.view(0, 256)?, small.view(512, 256)?);
    let launch = || worker.launch(&add, 1, &arguments![from, to, 1i32]);
    let host = |pause| {
        let took = times(&worker, LAUNCHES, pause, &|| Ok(launch()?))?;
        anyhow::Ok(Sample::of(took.into_iter().map(|time| time / 1e3).collect()))
    };
    let (in_a_row, apart) = (host(Duration::ZERO)?, host(PAUSE)?);

    let peer = |value: f64| Some(("the host".to_owned(), Sample::of(vec![value])));
    // Rates: the inverse of times, so that more is better.
    let rate = |name: &str, unit: &str, work: f64, guest: f64, host: f64| {
        figure(name, unit, vec![work / guest], peer(work / host), Some(Aim::RatioAtLeast(0.95)))
    };
    let guest = |name: &str| ended.number(&format!("figure {name} "));
    report.figure(rate(
        "silu over 1 GiB of the guest's memory",
        "GB/s",
        2.0 * bytes as f64,
        guest("silu")?,
        host_silu,
    ));
    // In user mode, but for the last: some KVMs emulate the kernel mode of guests that were not made for them.
    for (name, samples, peer) in [
        ("query and wait, which is the way alone", "query", None),
        ("launch and wait", "launch-and-wait", Some(&in_a_row)),
        ("launch and wait, 2 ms apart", "launch-and-wait-apart", Some(&apart)),
        ("launch and wait, in the guest's kernel mode", "launch-and-wait-kernel-mode", Some(&in_a_row)),
    ] {
        let peer = peer.map(|sample| ("the host".to_owned(), sample.clone()));
        let ours = ended.samples(samples)?.into_iter().map(|nanoseconds| nanoseconds / 1e3).collect();
        report.figure(figure(name, "µs", ours, peer, None));
    }
    report.figure(figure("import of 2 GiB", "ms", vec![guest("import")? / 1e3], None, None));
    Ok(())
}

/// A product and attention of the kernel library, in the device's memory: a guest's, which it checks, beside this process's.
fn tiles_of_a_guest(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let ended = Guest::start(gpu, "tiles", &format!("accel-tiles launches={LAUNCHES}"), 32)?.end()?;
    ended.passed()?;
    let worker = gpu.worker()?;
    for (name, launch) in tiles::tiles()? {
        let module = validate(Module::from(launch.entry.kernel(GuestAddr(0x1000))?), Trust::Guest)?;
        let compiled = gpu.compile(&module)?;
        let kernel = worker.load(compiled.first().context("no kernel was compiled")?.artifact())?;
        let held = launch.operands.iter().map(|operand| hold(&worker, operand));
        let held = held.collect::<anyhow::Result<Vec<_>>>()?;
        let arguments = held.iter().map(Held::argument).collect::<anyhow::Result<Vec<_>>>()?;
        let once = || Ok(worker.launch(&kernel, launch.grid, &arguments)?);
        // The first is not counted, as the guest's is not.
        let host = times(&worker, 1 + LAUNCHES, Duration::ZERO, &once)?.split_off(1);
        let [ours, host] = [ended.samples(name)?, host]
            .map(|nanoseconds| nanoseconds.into_iter().map(|nanoseconds| nanoseconds / 1e3).collect());
        let peer = Some(("the host".to_owned(), Sample::of(host)));
        report.figure(figure(&format!("launch and wait, {name} by tensor cores"), "µs", ours, peer, None));
    }
    ended.checks(report);
    Ok(())
}

/// An argument of the host's launches.
enum Held<'a> {
    View(Buffer<CudaAccelerator>, &'a Region),
    Number(vm_accel::Scalar),
}

/// A buffer of ones of bf16 for each view.
fn hold<'a>(worker: &Worker<CudaAccelerator>, operand: &'a Operand) -> anyhow::Result<Held<'a>> {
    match operand {
        Operand::Buffer(_, region) => {
            let ones = vec![0x3f80u16; region.extents.iter().product::<u64>() as usize];
            let buffer = worker.allocate(2 * ones.len() as u64)?;
            worker.write(&buffer, &ones)?;
            Ok(Held::View(buffer, region))
        }
        Operand::Number(bits, ty) => Ok(Held::Number(vm_accel::Scalar::from_bits(*bits, ty.bytes()))),
        Operand::Workspace(_) => bail!("a workspace, which the guest has not"),
    }
}

impl Held<'_> {
    fn argument(&self) -> anyhow::Result<Argument<'_, CudaAccelerator>> {
        Ok(match self {
            Held::View(buffer, region) => {
                let strides: Vec<u64> =
                    region.strides.iter().map(|stride| stride * u64::from(region.element.bytes())).collect();
                buffer.strided(&region.extents, &strides[..strides.len() - 1])?.into()
            }
            Held::Number(number) => (*number).into(),
        })
    }
}

/// Nanoseconds of each of so many launches and the wait for it, a pause before each.
fn times(
    worker: &Worker<CudaAccelerator>,
    turns: usize,
    pause: Duration,
    launch: &dyn Fn() -> anyhow::Result<()>,
) -> anyhow::Result<Vec<f64>> {
    let one = || {
        worker.synchronize(TIMEOUT)?;
        std::thread::sleep(pause);
        let begin = Instant::now();
        launch()?;
        worker.synchronize(TIMEOUT)?;
        Ok(begin.elapsed().as_secs_f64() * 1e9)
    };
    (0..turns).map(|_| one()).collect()
}

/// A guest that runs.
pub(crate) struct Guest {
    name: String,
    process: Child,
    files: PathBuf,
}

/// A guest that has ended.
pub(crate) struct Ended {
    name: String,
    console: String,
    messages: String,
    succeeded: bool,
}

impl Guest {
    pub(crate) fn start(gpu: &Gpu, name: &str, cmdline: &str, memory_mib: u64) -> anyhow::Result<Self> {
        let (service, bare) = (program("VM_SERVICE", "vm-service")?, program("BARE_GUEST", "bare")?);
        if let Err(error) = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            return skip(format!("/dev/kvm does not open: {error}"));
        }
        let Some(address) = &gpu.accelerator.info().address else {
            return skip("the GPU has no PCI address");
        };
        let files = std::env::temp_dir().join(format!("paravirt-{}-{name}", std::process::id()));
        fs::create_dir_all(&files)?;
        let toml = files.join("guest.toml");
        fs::write(
            &toml,
            format!(
                "name = \"{name}\"\nmemory = \"{}M\"\n[boot]\nkernel = \"{}\"\ncmdline = \"{cmdline} hz={}\"\n\
                 [[accelerators]]\ndevice = \"{address}\"\nmemory = \"1G\"\ndeadline = \"{}ms\"\n",
                memory_mib.next_multiple_of(2),
                bare.display(),
                cycles_per_second(),
                DEADLINE.as_millis()
            ),
        )?;
        let process = Command::new(service)
            .args(["run", "--no-reboot", "--console"])
            .arg(format!("file={}", files.join("console").display()))
            .arg(&toml)
            // Each operation that fails, with its reason: what a failed test shows.
            .env("RUST_LOG", "info,vm_service::accelerators=debug")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(files.join("messages"))?)
            .spawn()
            .with_context(|| format!("guest {name} can't be started"))?;
        Ok(Self { name: name.to_owned(), process, files })
    }

    fn read(&self, file: &str) -> String {
        fs::read(self.files.join(file))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Waits until the guest says something.
    fn wait_for(&mut self, text: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + GUEST_PATIENCE;
        while !self.read("console").contains(text) {
            let ended = self.process.try_wait()?.is_some();
            ensure!(
                !ended && Instant::now() < deadline,
                "guest {} did not say {text:?}: {}",
                self.name,
                self.evidence()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    pub(crate) fn end(mut self) -> anyhow::Result<Ended> {
        let deadline = Instant::now() + GUEST_PATIENCE;
        let status = loop {
            match self.process.try_wait()? {
                Some(status) => break status,
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                None => {
                    bail!("guest {} did not end within {GUEST_PATIENCE:?}: {}", self.name, self.evidence())
                }
            }
        };
        Ok(Ended {
            name: self.name.clone(),
            console: self.read("console"),
            messages: self.read("messages"),
            succeeded: status.success(),
        })
    }

    fn evidence(&self) -> String {
        format!("{}\n{}", self.read("console"), self.read("messages"))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.files);
    }
}

impl Ended {
    /// That the guest saw all that it should have.
    pub(crate) fn passed(&self) -> anyhow::Result<()> {
        let passed = self.succeeded && self.console.lines().any(|line| line.trim() == "bare: PASS");
        ensure!(passed, "guest {} failed:\n{}\n{}", self.name, self.console, self.messages);
        Ok(())
    }

    /// The number that stands behind a text.
    pub(crate) fn number(&self, text: &str) -> anyhow::Result<f64> {
        let rest = self.console.split_once(text).map(|(_, rest)| rest);
        let digits = rest.map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default());
        digits
            .and_then(|digits| digits.parse().ok())
            .with_context(|| format!("guest {} printed no `{text}`:\n{}", self.name, self.console))
    }

    /// The numbers that stand behind the name of samples.
    fn samples(&self, name: &str) -> anyhow::Result<Vec<f64>> {
        let head = format!("bare: samples {name} ");
        let numbers = self.console.lines().find_map(|line| line.trim().strip_prefix(head.as_str()));
        let numbers = numbers.map(|numbers| numbers.split_whitespace().map(str::parse).collect());
        let numbers: Result<Vec<f64>, _> = numbers
            .with_context(|| format!("guest {} printed no samples {name}:\n{}", self.name, self.console))?;
        Ok(numbers?)
    }

    fn checks(&self, report: &mut Report) {
        for line in self.console.lines().filter_map(|line| line.trim().strip_prefix("bare: ")) {
            report.note(format!("{}: {line}", self.name));
        }
    }
}

/// A program beside this one, or where a variable says.
fn program(variable: &str, name: &str) -> anyhow::Result<PathBuf> {
    let path = match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => std::env::current_exe()?.with_file_name(name),
    };
    match Path::try_exists(&path) {
        Ok(true) => Ok(fs::canonicalize(path)?),
        _ => skip(format!("{} is not there; put it beside this program, or set {variable}", path.display())),
    }
}

/// Cycles of the time stamp counter in a second.
fn cycles_per_second() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and it reads nothing but the counter.
    let cycles = || unsafe { std::arch::x86_64::_rdtsc() };
    let (start, begin) = (cycles(), Instant::now());
    std::thread::sleep(Duration::from_millis(50));
    let passed = cycles().wrapping_sub(start);
    (passed as f64 / begin.elapsed().as_secs_f64()) as u64
}
