//! `vmhook demo`: programs that show what the hook is for, each run once with the driver's memory and once with the hook's.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{io, thread};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use vm_hook::driver::GRANULE;

use crate::child::{self, Mode, Runner};
use crate::sys::{self, Driver};
use crate::trace::{self, Trace};
use crate::{output, plot, units};

/// What an array has at first: from here on the hook moves memory.
const FIRST: u64 = 256 << 20;
/// How many blocks fill a device.
const BLOCKS: u64 = 64;

/// Run a program with the driver's memory and with the hook's, and draw both
#[derive(Args)]
pub(crate) struct Demo {
    /// Which program
    #[arg(value_enum)]
    which: Which,
    /// Where the picture goes: a file whose name ends in .png or .svg
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    program: ProgramOptions,
    /// The hook's library; beside this program, or in ../lib, without it
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// How long each of the two runs may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
}

/// What a demo's program is told.
#[derive(Args)]
struct ProgramOptions {
    /// The device
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Device memory that the program may use, as in 8G; without it nearly all that is free
    #[arg(long, value_parser = units::parsed)]
    most: Option<u64>,
    /// How long the program waits between steps, in milliseconds, so that they can be told apart in the picture
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 20)]
    pause: u64,
}

/// The programs.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Which {
    /// An array grows by halves: allocate, copy, free
    Resize,
    /// The device is filled with blocks, every other one is freed, and the sum is asked for
    Fragmentation,
}

/// A demo's program itself.
#[derive(Args)]
pub(crate) struct Program {
    #[arg(value_enum)]
    which: Which,
    #[command(flatten)]
    options: ProgramOptions,
}

/// Why a demo ends early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The driver refuses.
    #[error(transparent)]
    Driver(#[from] sys::Error),
    /// There is no picture.
    #[error(transparent)]
    Plot(#[from] plot::Error),
    /// Or no log.
    #[error(transparent)]
    Trace(#[from] trace::Error),
    /// The program gives no answer.
    #[error(transparent)]
    Child(#[from] child::Error),
    /// What was found can't be told.
    #[error(transparent)]
    Output(#[from] output::Error),
    /// No folder for logs can be made.
    #[error("can't make a folder for the logs: {0}")]
    Folder(#[from] io::Error),
    /// What was written is not there.
    #[error("a word of the array is {is}, and was {was}: please report this")]
    Contents {
        /// What it is.
        is: u32,
        /// What was written.
        was: u32,
    },
    /// The device has too little memory.
    #[error("{} are free, and the demo needs {}: end what else runs on the device, or say another by --device", units::bytes(*.free), units::bytes(*.needed))]
    Small {
        /// What is free.
        free: u64,
        /// What is needed.
        needed: u64,
    },
}

/// How long something took, and that it failed if it did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Step {
    from: u64,
    to: u64,
    nanoseconds: u64,
    failed: Option<String>,
}

/// What a program answers.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    device: String,
    /// Blocks that were freed, and the size of each.
    freed: u64,
    block: u64,
    steps: Vec<Step>,
}

impl Program {
    /// Runs it, and writes its answer.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        let driver = Driver::open(self.options.device)?;
        let (free, _) = driver.memory()?;
        // The driver needs some itself.
        let most = (free - free / 20).min(self.options.most.unwrap_or(u64::MAX));
        let pause = Duration::from_millis(self.options.pause);
        let answer = match self.which {
            Which::Resize => resize(&driver, most, pause)?,
            Which::Fragmentation => fragment(&driver, most, pause)?,
        };
        Ok(output::say(&serde_json::json!(answer).to_string())?)
    }
}

/// Grows an array by halves, as long as the old and the new one fit together.
fn resize(driver: &Driver, most: u64, pause: Duration) -> Result<Answer, Error> {
    let grown = |bytes: u64| (bytes / 2 * 3).next_multiple_of(GRANULE);
    let mut answer = Answer { device: driver.device_name()?, freed: 0, block: 0, steps: Vec::new() };
    if FIRST + grown(FIRST) > most {
        return Err(Error::Small { free: most, needed: FIRST + grown(FIRST) });
    }
    let mut array = driver.allocate(FIRST)?;
    driver.fill(&array, 0, 1, FIRST / 4)?;
    driver.synchronize()?;
    while array.bytes() + grown(array.bytes()) <= most {
        thread::sleep(pause);
        let (from, to) = (array.bytes(), grown(array.bytes()));
        let start = Instant::now();
        let larger = match driver.allocate(to) {
            Ok(larger) => larger,
            Err(error) => {
                answer.steps.push(Step { from, to, nanoseconds: 0, failed: Some(error.to_string()) });
                break;
            }
        };
        driver.copy(&larger, &array, from)?;
        driver.free(array)?;
        let nanoseconds = start.elapsed().as_nanos() as u64;
        array = larger;
        answer.steps.push(Step { from, to, nanoseconds, failed: None });
        // All of it can be used, and the old part has what was there.
        let number = answer.steps.len() as u32 + 1;
        driver.fill(&array, from, number, (to - from) / 4)?;
        for (offset, was) in [(0, 1), (from - 4, number - 1), (from, number), (to - 4, number)] {
            let is = driver.read(&array, offset)?;
            if is != was {
                return Err(Error::Contents { is, was });
            }
        }
    }
    thread::sleep(pause);
    driver.free(array)?;
    Ok(answer)
}

/// Fills the device with blocks, frees every other one, and asks for all that was freed at once.
fn fragment(driver: &Driver, most: u64, pause: Duration) -> Result<Answer, Error> {
    let block = most / BLOCKS / GRANULE * GRANULE;
    if block == 0 {
        return Err(Error::Small { free: most, needed: BLOCKS * GRANULE });
    }
    let mut blocks = Vec::new();
    for _ in 0..BLOCKS {
        blocks.push(driver.allocate(block)?);
        thread::sleep(pause / 10);
    }
    thread::sleep(pause * 4);
    let (mut kept, mut freed) = (Vec::new(), 0);
    for (at, memory) in blocks.into_iter().enumerate() {
        if at % 2 == 0 {
            kept.push(memory);
        } else {
            driver.free(memory)?;
            freed += 1;
            thread::sleep(pause / 10);
        }
    }
    thread::sleep(pause * 4);
    let (from, to) = (0, freed * block);
    let start = Instant::now();
    let asked = driver.allocate(to);
    let nanoseconds = start.elapsed().as_nanos() as u64;
    let failed = asked.as_ref().err().map(ToString::to_string);
    if let Ok(memory) = asked {
        // It can be used at both ends.
        for (offset, was) in [(0, 7), (to - 4, 8)] {
            driver.fill(&memory, offset, was, 1)?;
            let is = driver.read(&memory, offset)?;
            if is != was {
                return Err(Error::Contents { is, was });
            }
        }
        thread::sleep(pause * 4);
        driver.free(memory)?;
    } else {
        thread::sleep(pause * 4);
    }
    kept.into_iter().try_for_each(|memory| driver.free(memory))?;
    let steps = vec![Step { from, to, nanoseconds, failed }];
    Ok(Answer { device: driver.device_name()?, freed, block, steps })
}

impl Demo {
    /// Runs the program twice, prints what took how long, and draws both.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        plot::format(&self.output)?;
        let folder = tempfile::tempdir()?;
        let timeout = Duration::from_secs(self.timeout);
        let runner = Runner { library: self.library.as_deref(), folder: folder.path(), timeout };
        let which =
            self.which.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let mut arguments = vec!["demo-program".to_owned(), which.clone()];
        arguments.extend(["--device".into(), self.program.device.to_string()]);
        arguments.extend(["--pause".into(), self.program.pause.to_string()]);
        arguments.extend(self.program.most.iter().flat_map(|most| ["--most".into(), most.to_string()]));
        let arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        let run = |mode: Mode, name: &str| -> Result<(Answer, Trace), Error> {
            let log = folder.path().join(name);
            let answer = runner.ask(mode, Some(&log), &arguments)?;
            let mut trace = Trace::read(&log, None)?;
            trace.process.program.clone_from(&which);
            Ok((answer, trace))
        };
        let (driver, without) = run(Mode::Monitor, "monitor.log")?;
        let (hook, with) = run(Mode::Vmm, "vmm.log")?;
        output::say(&self.table(&driver, &hook))?;
        plot::picture(&[without, with], &self.output)?;
        Ok(output::say(&format!("\n{}", self.output.display()))?)
    }

    fn table(&self, driver: &Answer, hook: &Answer) -> String {
        let time = |step: &Step| match &step.failed {
            None => units::time(Duration::from_nanos(step.nanoseconds)),
            Some(failed) => failed.clone(),
        };
        let mut lines = Vec::new();
        match self.which {
            Which::Resize => {
                lines.push(format!("{}: allocate 1.5 times as much, copy, free", driver.device));
                lines.extend(
                    ["", "| from | to | driver's | hook's | ratio |", "| --- | --- | --- | --- | --- |"]
                        .map(Into::into),
                );
                let lacks = Step { failed: Some("not tried".into()), ..Step::default() };
                for at in 0..driver.steps.len().max(hook.steps.len()) {
                    let (one, other) =
                        (driver.steps.get(at).unwrap_or(&lacks), hook.steps.get(at).unwrap_or(&lacks));
                    let ratio = match (&one.failed, &other.failed) {
                        (None, None) => {
                            format!("{:.2}", other.nanoseconds as f64 / one.nanoseconds.max(1) as f64)
                        }
                        _ => String::new(),
                    };
                    let (from, to) = (one.from.max(other.from), one.to.max(other.to));
                    let (from, to) = (units::bytes(from), units::bytes(to));
                    lines.push(format!("| {from} | {to} | {} | {} | {ratio} |", time(one), time(other)));
                }
            }
            Which::Fragmentation => {
                lines.push(format!(
                    "{}: {} blocks of {}, every other one freed, then the sum in one allocation",
                    driver.device,
                    BLOCKS,
                    units::bytes(driver.block)
                ));
                lines.extend(
                    ["", "| | holes | asked for | answer |", "| --- | --- | --- | --- |"].map(Into::into),
                );
                for (name, answer) in [("driver's", driver), ("hook's", hook)] {
                    for step in &answer.steps {
                        let (freed, asked) = (answer.freed, units::bytes(step.to));
                        let took = if step.failed.is_some() { "" } else { "given, in " };
                        lines.push(format!("| {name} | {freed} | {asked} | {took}{} |", time(step)));
                    }
                }
            }
        }
        lines.join("\n")
    }
}
