//! Uses an accelerator that the host shares, as a good guest and as a bad one.

mod bench;
mod good;
mod hostile;
mod machine;
mod model;
mod tiles;

use vm_paravirt_guest::protocol::{Argument, BatchWriter, LogReader, NoRoom, PCI_ID, Reply, Status};
use vm_paravirt_guest::{Error, Frame, QueueMemory, Transport as _, Virtqueue};

use crate::acpi::Ecam;
use crate::serial::println;
use crate::{boot, pci, report, sys};
use machine::Machine;

/// The kernels in their binary form, and their places in the module.
const MODULE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/accel.bin"));
const ADD: u32 = 0;
const SPIN: u32 = 1;
const STRAY: u32 = 2;
const RAMP: u32 = 3;
const SILU: u32 = 4;

static QUEUE: QueueMemory = QueueMemory::new();

/// What the rest of the command line says.
struct Options {
    /// Cycles of the time stamp counter in a second. Without it, a number that no processor's is above.
    hz: u64,
    seconds: u64,
    mib: u64,
    launches: u64,
    seed: u64,
}

/// Runs the program `name`.
pub fn run<'a>(name: &[u8], ecam: Ecam, words: impl Iterator<Item = &'a [u8]>) -> bool {
    let mut options = Options { hz: 5_000_000_000, seconds: 10, mib: 1, launches: 100, seed: 1 };
    for word in words {
        for (key, place) in [
            (&b"hz"[..], &mut options.hz),
            (b"seconds", &mut options.seconds),
            (b"mib", &mut options.mib),
            (b"launches", &mut options.launches),
            (b"seed", &mut options.seed),
        ] {
            if let Some(number) = boot::number(word, key) {
                *place = number;
            }
        }
    }
    let id = u32::from(PCI_ID.0) | u32::from(PCI_ID.1) << 16;
    let Some(function) = pci::find(ecam, id) else {
        return report("accelerator", Err("there is no paravirtual accelerator"));
    };
    let machine = Machine::new(function, options.hz);
    match name {
        b"accel-hostile" => hostile::run(machine, &options),
        b"accel-steady" => good::steady(machine, &options),
        b"accel-loop" => good::looping(machine, &options),
        b"accel-bench" => bench::run(machine, &options),
        b"accel-tiles" => tiles::run(machine, &options),
        b"accel-model" => model::run(machine),
        _ => good::run(machine),
    }
}

/// The accelerator with a frame.
struct Session {
    accelerator: Virtqueue<Machine>,
    frame: Option<Frame>,
}

/// How an exchange with the device ended.
type Outcome<T = ()> = Result<T, Error>;

impl Session {
    fn open(machine: Machine) -> Outcome<Self> {
        let accelerator = Virtqueue::open(machine, &QUEUE)?;
        let frame = Frame::new(sys::arena_slice(64 << 10), sys::arena_slice(16 << 10));
        Ok(Self { accelerator, frame: Some(frame) })
    }

    /// Resets the device and opens it again.
    fn reopen(self) -> Outcome<Self> {
        let (machine, frame) = (self.accelerator.platform().clone(), self.frame);
        drop(self.accelerator);
        let accelerator = Virtqueue::open(machine, &QUEUE)?;
        let frame =
            frame.unwrap_or_else(|| Frame::new(sys::arena_slice(64 << 10), sys::arena_slice(16 << 10)));
        Ok(Self { accelerator, frame: Some(frame) })
    }

    fn frame(&mut self) -> Outcome<Frame> {
        self.frame.take().ok_or(Error::NeedsReset)
    }

    /// Does a batch, and hands its reply to `look`.
    fn look<T>(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
        look: impl FnOnce(Reply<'_>) -> T,
    ) -> Outcome<T> {
        let mut frame = self.frame()?;
        let mut batch = frame.batch()?;
        fill(&mut batch)?;
        let bytes = batch.finish();
        let frame = self.accelerator.call(frame, bytes)?;
        let looked = frame.reply().map(look);
        self.frame = Some(frame);
        looked
    }

    /// Does a batch, all of which must succeed.
    fn run(&mut self, fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>) -> Outcome {
        self.look(fill, |reply| reply.check())?
            .map_err(|(operation, status)| Error::Status { operation, status })
    }

    /// Does a batch whose operation `operation` must end with `status`.
    fn fails(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
        operation: usize,
        status: Status,
    ) -> Outcome {
        match self.look(fill, |reply| reply.check())? {
            Err(ended) if ended == (operation, status) => Ok(()),
            Err((operation, status)) => Err(Error::Status { operation, status }),
            Ok(()) => Err(Error::Status { operation, status: Status::Ok }),
        }
    }
}

/// Prints what the log says, for a check that did not hold.
fn tell_log(session: &mut Session) {
    let _ = session.look(
        |batch| batch.log(),
        |reply| {
            for answer in reply.results().flatten() {
                LogReader::new(answer.1).flatten().for_each(|entry| println!("bare: log: {}", entry.text));
            }
        },
    );
}

/// Prints how a check ended, and returns whether it held.
fn tell(name: &str, outcome: Outcome) -> bool {
    match outcome {
        Ok(()) => report(name, Ok(())),
        Err(error) => {
            println!("bare: {name} FAILED: {error}");
            false
        }
    }
}

/// The check did not see what it should have.
const WRONG: Error = Error::Transport("what came back is not what should have");

/// Numbers in memory of the guest, at an address that a buffer can be made over.
struct Numbers {
    address: u64,
    count: u64,
}

impl Numbers {
    fn new(count: u64) -> Self {
        Self { address: sys::arena(4 * count as usize), count }
    }

    fn fill(&self, value: impl Fn(u64) -> u32) {
        (0..self.count).for_each(|i| sys::write32(self.address + 4 * i, value(i)));
    }

    fn check(&self, value: impl Fn(u64) -> u32) -> Outcome {
        let right = (0..self.count).all(|i| sys::read32(self.address + 4 * i) == value(i));
        if right { Ok(()) } else { Err(WRONG) }
    }

    fn view(&self, buffer: u32) -> Result<Argument, NoRoom> {
        Argument::view(buffer, 0, &[self.count])
    }

    fn range(&self) -> vm_paravirt_guest::protocol::Range {
        vm_paravirt_guest::protocol::Range { address: self.address, bytes: 4 * self.count }
    }
}
