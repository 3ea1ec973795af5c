//! Measures the accelerator from within the guest.
//!
//! Each measurement prints a line `bare: figure NAME VALUE UNIT`, or `bare: samples NAME NANOSECONDS…`.

use vm_paravirt_guest::protocol::{Argument, BatchWriter, NoRoom, Range};

use vm_paravirt_guest::{Error, Frame, Transport as _};

use super::machine::Machine;
use super::{ADD, MODULE, Numbers, Options, Outcome, RAMP, SILU, Session, WRONG, tell};
use crate::serial::{print, println};
use crate::sys;

const KERNELS: u32 = 1;
const SMALL: u32 = 2;
const LARGE: u32 = 3;
const RESULT: u32 = 4;
const DEVICE: u32 = 5;
/// Bytes of a batch of many launches, and of the reply to it.
const BATCH: usize = 512 << 10;
const BATCH_REPLY: usize = 64 << 10;
/// Such batches that are under way at a time.
const UNDER_WAY: u64 = 3;
/// Answers to them that are timed.
const WINDOWS: u64 = 16;
/// Where memory begins that the program does not use.
const FREE: u64 = 16 << 20;
const TURNS: u64 = 10;
/// Single launches that are timed, and those before, which are not.
const LAUNCHES: usize = 200;
const WARM: usize = 20;
/// Milliseconds between launches, in which both sides go to sleep.
const PAUSE: u64 = 2;

/// Runs all measurements.
pub(super) fn run(machine: Machine, options: &Options) -> bool {
    let outcome = Session::open(machine).and_then(|mut session| {
        session.run(|batch| batch.create_module(KERNELS, MODULE))?;
        silu(&mut session, options.mib << 20)?;
        latency(&mut session)?;
        throughput(&mut session, options.launches)
    });
    tell("bench", outcome)
}

fn figure(name: &str, value: u64, unit: &str) {
    println!("bare: figure {name} {value} {unit}");
}

/// Cycles from when a batch, which must succeed, is handed over until its answer is there. What it takes to write the batch
/// is not counted: it is this processor's, which may be an emulated one.
pub(super) fn timed(
    session: &mut Session,
    fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
) -> Outcome<u64> {
    let mut frame = session.frame()?;
    let mut batch = frame.batch()?;
    fill(&mut batch)?;
    let bytes = batch.finish();
    let begin = sys::cycles();
    let frame = session.accelerator.call(frame, bytes)?;
    let took = sys::cycles() - begin;
    let checked = frame.reply().map(|reply| reply.check());
    session.frame = Some(frame);
    checked?.map_err(|(operation, status)| Error::Status { operation, status })?;
    Ok(took)
}

/// silu from memory of the guest to memory of the guest, in place on the host.
fn silu(session: &mut Session, bytes: u64) -> Outcome {
    let count = bytes / 4;
    let (x, y) = (Range { address: FREE, bytes }, Range { address: FREE + bytes, bytes });
    let grid = |per_block: u64| [count.div_ceil(per_block) as u32, 1, 1];
    let begin = sys::cycles();
    session.run(|batch| {
        batch.import_buffer(LARGE, &[x])?;
        batch.import_buffer(RESULT, &[y])
    })?;
    let machine = session.accelerator.platform().clone();
    figure("import", machine.nanoseconds(sys::cycles() - begin) / 1000, "us");
    session.run(|batch| {
        batch.launch(KERNELS, RAMP, grid(256), &[Argument::view(LARGE, 0, &[count])?])?;
        batch.fence()
    })?;
    let mut best = u64::MAX;
    for _ in 0..TURNS {
        let took = timed(session, |batch| {
            let (x, y) = (Argument::view(LARGE, 0, &[count])?, Argument::view(RESULT, 0, &[count])?);
            batch.launch(KERNELS, SILU, grid(1024), &[x, y])?;
            batch.fence()
        })?;
        best = best.min(took);
    }
    figure("silu", machine.nanoseconds(best), "ns");
    // x / (1 + e^-x) of what `ramp` wrote, at a few places: 0, and 4 where e^-4 is 0.0183156.
    for i in [0, 512, 1024, count - 512] {
        let (x, y) =
            (f32::from_bits(sys::read32(FREE + 4 * i)), f32::from_bits(sys::read32(FREE + bytes + 4 * i)));
        let expect = if i % 1024 == 512 { 4.0 / 1.018_315_6 } else { 0.0 };
        if x != (i % 1024) as f32 / 128.0 || !(y - expect < 1e-4 && expect - y < 1e-4) {
            return Err(WRONG);
        }
    }
    Ok(())
}

/// One batch and the wait for it, at a time: a query, which the accelerator has no part in; a launch; a launch after a
/// pause; and a launch in kernel mode, which not every KVM runs on the processor.
fn latency(session: &mut Session) -> Outcome {
    let numbers = Numbers::new(256);
    session.run(|batch| batch.import_buffer(SMALL, &[numbers.range()]))?;
    let machine = session.accelerator.platform().clone();
    let pause = PAUSE * machine.hz() / 1000;
    let mut measure = |name, pause: u64, user: bool, launch: bool| -> Outcome {
        let mut took = [0; LAUNCHES];
        let mut run = || -> Outcome {
            for number in 0..WARM + LAUNCHES {
                let until = sys::cycles() + pause;
                while sys::cycles() < until {
                    sys::pause();
                }
                let cycles = timed(session, |batch| {
                    if !launch {
                        return batch.query();
                    }
                    let (x, y) = (Argument::view(SMALL, 0, &[64])?, Argument::view(SMALL, 512, &[64])?);
                    batch.launch(KERNELS, ADD, [1; 3], &[x, y, Argument::i32(number as i32)])?;
                    batch.fence()
                })?;
                if let Some(took) = number.checked_sub(WARM).and_then(|place| took.get_mut(place)) {
                    *took = cycles;
                }
            }
            Ok(())
        };
        if user { sys::in_user_mode(run) } else { run() }?;
        print!("bare: samples {name}");
        took.iter().for_each(|cycles| print!(" {}", machine.nanoseconds(*cycles)));
        println!();
        Ok(())
    };
    measure("query", 0, true, false)?;
    measure("launch-and-wait", 0, true, true)?;
    measure("launch-and-wait-apart", pause, true, true)?;
    measure("launch-and-wait-kernel-mode", 0, false, true)
}

/// Batches of many small launches, again and again, several under way at a time: the time from answer to answer. No two
/// launches that follow each other have the same arguments.
fn throughput(session: &mut Session, launches: u64) -> Outcome {
    session.run(|batch| batch.create_buffer(DEVICE, 1024))?;
    let machine = session.accelerator.platform().clone();
    let mut first = Frame::new(sys::arena_slice(BATCH), sys::arena_slice(BATCH_REPLY));
    let mut batch = first.batch()?;
    for number in 0..launches {
        let (x, y) = (Argument::view(DEVICE, 0, &[64])?, Argument::view(DEVICE, 512, &[64])?);
        batch.launch(KERNELS, ADD, [1; 3], &[x, y, Argument::i32(number as i32)])?;
    }
    batch.fence()?;
    // It is written once: this slow processor's time for that is not the accelerator's.
    let bytes = batch.finish();
    for _ in 1..UNDER_WAY {
        let mut frame = Frame::new(sys::arena_slice(BATCH), sys::arena_slice(BATCH_REPLY));
        frame.request()[..bytes].copy_from_slice(&first.request()[..bytes]);
        session.accelerator.submit(frame, bytes).map_err(|(error, _)| error)?;
    }
    session.accelerator.submit(first, bytes).map_err(|(error, _)| error)?;
    let mut answered = [0; 1 + WINDOWS as usize];
    let mut last = [const { None }; UNDER_WAY as usize];
    for answer in 0..=WINDOWS {
        let (_, frame) = session.accelerator.wait()?;
        answered[answer as usize] = sys::cycles();
        if answer + UNDER_WAY <= WINDOWS {
            session.accelerator.submit(frame, bytes).map_err(|(error, _)| error)?;
        } else {
            last[(answer % UNDER_WAY) as usize] = Some(frame);
        }
    }
    // To read thousands of results takes this processor longer than the accelerator takes for the launches.
    for frame in last.into_iter().flatten() {
        frame.reply()?.check().map_err(|(operation, status)| Error::Status { operation, status })?;
    }
    for (number, pair) in answered.windows(2).enumerate() {
        let each = 1000 * machine.nanoseconds(pair[1] - pair[0]) / launches.max(1);
        println!("bare: figure batched-launch-{number} {each} ps");
    }
    Ok(())
}
