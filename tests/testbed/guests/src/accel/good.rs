//! A guest that uses the accelerator as it is meant.

use vm_paravirt_guest::protocol::{Argument, Info, LogReader, Span, Status};

use super::machine::Machine;
use super::{ADD, MODULE, Numbers, Options, Outcome, SPIN, STRAY, Session, WRONG, tell, tell_log};
use crate::serial::println;
use crate::sys;

/// Numbers of the modules and buffers.
const KERNELS: u32 = 1;
const INPUT: u32 = 10;
const OUTPUT: u32 = 11;
const DEVICE: u32 = 12;
const COUNT: u64 = 1500;
const GRID: [u32; 3] = [COUNT.div_ceil(256) as u32, 1, 1];

/// Runs all checks.
pub(super) fn run(machine: Machine) -> bool {
    // It halts for each answer, so that no interrupt must be lost.
    let mut session = match Session::open(machine.halting()) {
        Ok(session) => session,
        Err(error) => return tell("open", Err(error)),
    };
    let (input, output) = (Numbers::new(COUNT), Numbers::new(COUNT));
    let mut passed = tell("open", Ok(()));
    passed &= tell("query", query(&mut session));
    passed &= tell("kernel-on-guest-memory", prepare(&mut session, &input, &output));
    passed &= tell("copies", copies(&mut session, &input, &output));
    passed &= tell("batch-of-launches", batch(&mut session, &input, &output));
    if !passed {
        tell_log(&mut session);
    }
    passed &= tell("interrupts", if sys::interrupts() > 0 { Ok(()) } else { Err(WRONG) });
    passed &= tell("out-of-bounds", stray(&mut session, &output));
    passed &= tell("endless-kernel", endless(&mut session, &input, &output));
    passed &= tell(
        "after-a-reset",
        session.reopen().and_then(|mut session| prepare(&mut session, &input, &output)),
    );
    passed
}

fn query(session: &mut Session) -> Outcome {
    session.look(
        |batch| batch.query(),
        |reply| {
            let (status, answer) = reply.results().next().ok_or(WRONG)??;
            let info = Info::decode(answer)?;
            println!("bare: the accelerator is {}, code is for {}", info.name, info.target);
            if status == Status::Ok && info.memory_free == info.memory_bytes { Ok(()) } else { Err(WRONG) }
        },
    )?
}

/// One batch does it all: module, buffers over this program's own memory, the launch, and the wait for it.
pub(super) fn prepare(session: &mut Session, input: &Numbers, output: &Numbers) -> Outcome {
    input.fill(|i| 3 * i as u32);
    output.fill(|_| 0);
    session.run(|batch| {
        batch.create_module(KERNELS, MODULE)?;
        batch.import_buffer(INPUT, &[input.range()])?;
        batch.import_buffer(OUTPUT, &[output.range()])?;
        batch.launch(KERNELS, ADD, GRID, &[input.view(INPUT)?, output.view(OUTPUT)?, Argument::i32(7)])?;
        batch.fence()
    })?;
    output.check(|i| 3 * i as u32 + 7)
}

/// By way of the device's memory, which begins as zeros.
fn copies(session: &mut Session, input: &Numbers, output: &Numbers) -> Outcome {
    let bytes = 4 * COUNT;
    session.run(|batch| {
        batch.create_buffer(DEVICE, bytes)?;
        batch.copy((OUTPUT, 0), (DEVICE, 0), bytes)?;
        batch.fence()
    })?;
    output.check(|_| 0)?;
    session.run(|batch| {
        batch.copy((DEVICE, 0), (INPUT, 0), bytes)?;
        batch.fill(Span { buffer: DEVICE, offset: 40, bytes: 4 }, 0xee)?;
        batch.copy((OUTPUT, 4), (DEVICE, 4), bytes - 4)?;
        batch.fence()?;
        batch.destroy_buffer(DEVICE)
    })?;
    let _ = input;
    output.check(|i| match i {
        0 => 0,
        10 => 0xeeee_eeee,
        i => 3 * i as u32,
    })
}

/// Many launches for one notification, each on what the one before wrote.
fn batch(session: &mut Session, input: &Numbers, output: &Numbers) -> Outcome {
    const TURNS: u32 = 20;
    session.run(|batch| {
        let (x, y) = (input.view(INPUT)?, output.view(OUTPUT)?);
        for _ in 0..TURNS {
            batch.launch(KERNELS, ADD, GRID, &[x, y, Argument::i32(1)])?;
            batch.launch(KERNELS, ADD, GRID, &[y, x, Argument::i32(1)])?;
        }
        batch.fence()
    })?;
    input.check(|i| 3 * i as u32 + 2 * TURNS)?;
    output.check(|i| 3 * i as u32 + 2 * TURNS - 1)
}

/// A kernel that strays far beyond its view changes nothing but the element that is its own.
fn stray(session: &mut Session, output: &Numbers) -> Outcome {
    output.fill(|_| 0x40);
    // Times a thread's number, each is 0 or no index.
    for far in [COUNT as i64, 1 << 33, i64::MIN] {
        session.run(|batch| {
            batch.launch(KERNELS, STRAY, [64, 1, 1], &[output.view(OUTPUT)?, Argument::i64(far)])?;
            batch.fence()
        })?;
    }
    output.check(|i| if i == 0 { 0x41 } else { 0x40 })
}

/// A kernel that never ends is stopped, the log says so, and the accelerator goes on.
pub(super) fn endless(session: &mut Session, input: &Numbers, output: &Numbers) -> Outcome {
    let start = sys::cycles();
    session.fails(
        |batch| {
            let one = Argument::view(OUTPUT, 0, &[1])?;
            batch.launch(KERNELS, SPIN, [1, 1, 1], &[one, Argument::i32(1)])?;
            batch.fence()
        },
        1,
        Status::Deadline,
    )?;
    let took = session.accelerator.platform().nanoseconds(sys::cycles() - start);
    println!("bare: an endless kernel was stopped after {} us", took / 1000);
    session.look(
        |batch| batch.log(),
        |reply| {
            let (_, answer) = reply.results().next().ok_or(WRONG)??;
            for entry in LogReader::new(answer) {
                let entry = entry?;
                if entry.status == Status::Deadline {
                    println!("bare: log: {}", entry.text);
                    return Ok(());
                }
            }
            Err(WRONG)
        },
    )??;
    input.fill(|i| i as u32);
    session.run(|batch| {
        batch.launch(KERNELS, ADD, GRID, &[input.view(INPUT)?, output.view(OUTPUT)?, Argument::i32(-1)])?;
        batch.fence()
    })?;
    output.check(|i| (i as u32).wrapping_sub(1))
}

/// Launches kernels that stray and kernels that never end for some time; each of the latter is stopped.
pub(super) fn looping(machine: Machine, options: &Options) -> bool {
    let (input, output) = (Numbers::new(COUNT), Numbers::new(COUNT));
    let mut stopped = 0;
    let outcome = Session::open(machine.clone()).and_then(|mut session| {
        prepare(&mut session, &input, &output)?;
        println!("bare: looping");
        let start = sys::cycles();
        while machine.nanoseconds(sys::cycles() - start) < options.seconds * 1_000_000_000 {
            stray(&mut session, &output)?;
            session.fails(
                |batch| {
                    let one = Argument::view(OUTPUT, 0, &[1])?;
                    batch.launch(KERNELS, SPIN, [64, 1, 1], &[one, Argument::i32(1)])?;
                    batch.fence()
                },
                1,
                Status::Deadline,
            )?;
            stopped += 1;
        }
        Ok(())
    });
    println!("bare: {stopped} endless kernels were stopped");
    tell("endless-kernels", outcome.and(if stopped > 0 { Ok(()) } else { Err(WRONG) }))
}

/// Launches for some time and checks every result.
pub(super) fn steady(machine: Machine, options: &Options) -> bool {
    let (input, output) = (Numbers::new(COUNT), Numbers::new(COUNT));
    let mut rounds = 0u64;
    let (mut slowest, mut sum) = (0, 0);
    let outcome = Session::open(machine.clone()).and_then(|mut session| {
        prepare(&mut session, &input, &output)?;
        let start = sys::cycles();
        println!("bare: steady");
        while machine.nanoseconds(sys::cycles() - start) < options.seconds * 1_000_000_000 {
            let addend = rounds as u32;
            let begin = sys::cycles();
            session.run(|batch| {
                let arguments = [input.view(INPUT)?, output.view(OUTPUT)?, Argument::i32(addend as i32)];
                batch.launch(KERNELS, ADD, GRID, &arguments)?;
                batch.fence()
            })?;
            let took = sys::cycles() - begin;
            (slowest, sum) = (slowest.max(took), sum + took);
            output.check(|i| (3 * i as u32).wrapping_add(addend))?;
            rounds += 1;
        }
        Ok(())
    });
    println!(
        "bare: {rounds} results, all right; a launch took {} us, at most {} us",
        machine.nanoseconds(sum / rounds.max(1)) / 1000,
        machine.nanoseconds(slowest) / 1000
    );
    tell("steady-results", outcome.and(if rounds > 0 { Ok(()) } else { Err(WRONG) }))
}
