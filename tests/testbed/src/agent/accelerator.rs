//! A program of a Linux guest that uses an accelerator which the host shares.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use vm_paravirt_guest::linux::{Device, Part, Stream, Window};
use vm_paravirt_guest::protocol::{Argument, BatchWriter, Info, LogReader, NoRoom, Range, Reply, Status};
use vm_paravirt_guest::{Error, Transport as _};

use super::sys;

/// The kernels that the bare guest launches too.
const KERNELS: &str = include_str!("../../guests/kernels/accel.vir");
const ADD: u32 = 0;
const SPIN: u32 = 1;
const STRAY: u32 = 2;

/// Numbers of the module and the buffers, and where in the window they begin.
const MODULE: u32 = 1;
const INPUT: u32 = 1;
const OUTPUT: u32 = 2;
const COUNT: u64 = 3000;
const BYTES: u64 = 4 * COUNT;

/// The program.
#[derive(Debug)]
pub struct AcceleratorProgram {
    accelerator: Stream,
    window: Window,
    input: Part,
    output: Part,
}

/// How a batch ended: well, or the first operation that did not and how.
type Ended = Result<(), (usize, Status)>;

impl AcceleratorProgram {
    /// Connects, and makes module and buffers.
    ///
    /// # Errors
    /// When that fails.
    pub fn start() -> Result<Self> {
        let device = Device::find()?;
        let window = device.window()?;
        let (input, output) = (window.take(BYTES)?, window.take(BYTES)?);
        let mut this = Self { accelerator: device.connect()?, window, input, output };
        let module = vm_ir::text::parse(KERNELS).map_err(|error| anyhow!("{error}"))?;
        let module = vm_ir::binary::encode(&module, vm_ir::binary::Lines::Strip);
        let ranges = [this.input.range(0, BYTES)?, this.output.range(0, BYTES)?];
        let ended = this.run(|batch| {
            batch.create_module(MODULE, &module)?;
            batch.import_buffer(INPUT, &ranges[..1])?;
            batch.import_buffer(OUTPUT, &ranges[1..])
        })?;
        ensure!(ended.is_ok(), "module and buffers were refused: {ended:?}: {}", this.log()?);
        Ok(this)
    }

    /// The window's length in bytes.
    pub fn window_bytes(&self) -> u64 {
        self.window.bytes()
    }

    /// Does a batch, and looks at the reply.
    ///
    /// # Errors
    /// When the device gives none.
    pub fn look<T>(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
        look: impl FnOnce(Reply<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut frame = self.accelerator.frame();
        let mut batch = frame.batch()?;
        fill(&mut batch)?;
        let bytes = batch.finish();
        let frame = self.accelerator.call(frame, bytes)?;
        look(frame.reply()?)
    }

    /// Does a batch.
    ///
    /// # Errors
    /// When the device gives no reply.
    pub fn run(&mut self, fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>) -> Result<Ended> {
        self.look(fill, |reply| Ok(reply.check()))
    }

    /// Adds to all numbers in the window, and checks every result.
    ///
    /// # Errors
    /// When a result is wrong.
    pub fn add(&mut self, addend: i32) -> Result<()> {
        let numbers: Vec<u8> = (0..COUNT as i32).flat_map(|i| (3 * i).to_le_bytes()).collect();
        self.input.write(0, &numbers)?;
        self.output.write(0, &vec![0; BYTES as usize])?;
        let grid = [COUNT.div_ceil(256) as u32, 1, 1];
        let ended = self.run(|batch| {
            let view = |buffer| Argument::view(buffer, 0, &[COUNT]);
            batch.launch(MODULE, ADD, grid, &[view(INPUT)?, view(OUTPUT)?, Argument::i32(addend)])?;
            batch.fence()
        })?;
        ensure!(ended.is_ok(), "the launch ended with {ended:?}: {}", self.log()?);
        let mut got = vec![0; BYTES as usize];
        self.output.read(0, &mut got)?;
        let expect: Vec<u8> = (0..COUNT as i32).flat_map(|i| (3 * i + addend).to_le_bytes()).collect();
        ensure!(got == expect, "a sum is wrong");
        Ok(())
    }

    /// Launches a kernel that has no end. Answers with how it ended and after which time.
    ///
    /// # Errors
    /// When the device gives no reply.
    pub fn spin(&mut self) -> Result<(Ended, Duration)> {
        let begin = Instant::now();
        let ended = self.run(spin)?;
        Ok((ended, begin.elapsed()))
    }

    /// Launches a kernel that strays far beyond its view, and checks that it changed what is its own only. No other program
    /// has a part of the window meanwhile.
    ///
    /// # Errors
    /// When something else changed.
    pub fn stray(&mut self) -> Result<()> {
        let end = (self.output.offset() + BYTES).next_multiple_of(4096);
        let rest = self.window.take(self.window.bytes() - end)?;
        for part in [&self.input, &self.output, &rest] {
            part.write(0, &vec![0x40; part.bytes() as usize])?;
        }
        for far in [COUNT as i64, 1 << 33, i64::MIN] {
            let ended = self.run(|batch| {
                let view = Argument::view(OUTPUT, 0, &[COUNT])?;
                batch.launch(MODULE, STRAY, [8, 1, 1], &[view, Argument::i64(far)])?;
                batch.fence()
            })?;
            ensure!(ended.is_ok(), "the launch ended with {ended:?}");
        }
        for (part, own) in [(&self.input, 0), (&self.output, 4), (&rest, 0)] {
            let mut after = vec![0; part.bytes() as usize];
            part.read(0, &mut after)?;
            // The first thread's index is 0, whatever the factor.
            ensure!(after[own..].iter().all(|byte| *byte == 0x40), "a kernel changed what is not its own");
        }
        Ok(())
    }

    /// Imports a range, and lets go of it.
    ///
    /// # Errors
    /// When the device gives no reply.
    pub fn import(&mut self, address: u64, bytes: u64) -> Result<Ended> {
        self.run(|batch| {
            batch.import_buffer(9, &[Range { address, bytes }])?;
            batch.destroy_buffer(9)
        })
    }

    /// Bytes of the accelerator's memory, and those that are free.
    ///
    /// # Errors
    /// When the device does not tell.
    pub fn memory(&mut self) -> Result<(u64, u64)> {
        self.look(
            |batch| batch.query(),
            |reply| {
                let (_, answer) = reply.results().next().context("there is no result")??;
                let info = Info::decode(answer)?;
                Ok((info.memory_bytes, info.memory_free))
            },
        )
    }

    /// Takes the error log.
    ///
    /// # Errors
    /// When the device does not give it.
    pub fn log(&mut self) -> Result<String> {
        self.look(
            |batch| batch.log(),
            |reply| {
                let (_, answer) = reply.results().next().context("there is no result")??;
                let entries = LogReader::new(answer).map(|entry| Ok(entry?.text.to_owned()));
                Ok(entries.collect::<Result<Vec<_>>>()?.join("; "))
            },
        )
    }

    /// Works until the device goes away, and answers with how it was reported.
    ///
    /// # Errors
    /// When it does not go away within `timeout`, or a result is wrong before.
    pub fn until_gone(&mut self, timeout: Duration) -> Result<Error> {
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            if let Err(error) = self.add(1) {
                return error.downcast::<Error>();
            }
        }
        bail!("the device is still there after {} s", timeout.as_secs())
    }
}

fn spin(batch: &mut BatchWriter<'_>) -> Result<(), NoRoom> {
    batch.launch(MODULE, SPIN, [1, 1, 1], &[Argument::view(OUTPUT, 0, &[1])?, Argument::i32(1)])?;
    batch.fence()
}

/// Tries to take a context id of vsock, as another VMM of the host would, until it is `over`. How often it was another's.
///
/// # Errors
/// When it was free, or that can't be tried.
pub fn grab_context_id(cid: u64, over: &AtomicBool) -> Result<u64> {
    let mut refused = 0;
    while !over.load(Ordering::Acquire) {
        let vhost = File::options().read(true).write(true).open("/dev/vhost-vsock")?;
        match sys::take_context_id(&vhost, cid) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => refused += 1,
            Err(error) => return Err(error).context("/dev/vhost-vsock"),
            Ok(()) => bail!("the context id {cid} was free after {refused} tries"),
        }
    }
    Ok(refused)
}

const GREEDY: &str = "greedy-accelerator-program";
const HOLDS: &str = "holds";

/// A process that holds all memory that it may, and is in the middle of a kernel that has no end.
#[derive(Debug)]
pub struct GreedyProgram(Child);

impl GreedyProgram {
    /// Starts it, and waits until it has come so far.
    ///
    /// # Errors
    /// When it does not.
    pub fn start() -> Result<Self> {
        let mut process = Command::new("/init")
            .arg(GREEDY)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("can't start the greedy program")?;
        let mut line = String::new();
        let output = process.stdout.take().context("the greedy program has no output")?;
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line.trim() == HOLDS, "the greedy program failed");
        Ok(Self(process))
    }

    /// Kills it.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub fn kill(mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for GreedyProgram {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether these are the arguments of a greedy program.
pub(super) fn is_greedy(mut arguments: impl Iterator<Item = String>) -> bool {
    arguments.nth(1).is_some_and(|word| word == GREEDY)
}

/// Is one.
pub(super) fn be_greedy() -> ! {
    let work = || -> Result<()> {
        let mut program = AcceleratorProgram::start()?;
        let (_, free) = program.memory()?;
        let ended = program.run(|batch| batch.create_buffer(8, free))?;
        ensure!(ended.is_ok(), "its memory was refused: {ended:?}");
        let mut frame = program.accelerator.frame();
        let mut batch = frame.batch()?;
        spin(&mut batch)?;
        let bytes = batch.finish();
        program.accelerator.submit(frame, bytes).map_err(|(error, _)| error)?;
        println!("{HOLDS}");
        // The reader waits for this line only.
        let _ = std::io::stdout().flush();
        program.accelerator.wait()?;
        loop {
            let (ended, _) = program.spin()?;
            ensure!(ended == Err((1, Status::Deadline)), "a kernel without an end ended with {ended:?}");
        }
    };
    if let Err(error) = work() {
        eprintln!("testbed-agent: the greedy program: {error:#}");
    }
    std::process::exit(1);
}
