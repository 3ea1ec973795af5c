//! A guest that does to the device what no driver should. Whatever it does, it gets errors, and can start afresh.

use vm_paravirt_guest::protocol::{Argument, BatchWriter, NoRoom, Range, Status};
use vm_paravirt_guest::{Error, Frame, Platform as _, Transport as _};

use super::machine::Machine;
use super::{ADD, MODULE, Numbers, Options, Outcome, QUEUE, SPIN, Session, WRONG, good, tell};
use crate::sys;

/// Where the queue's parts lie in its page.
const TABLE: u64 = 0;
const AVAILABLE: u64 = 2048;
const USED: u64 = 3072;
/// Entries of the queue.
const SIZE: u16 = 64;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const GARBAGE: u32 = 300;
const CHANGES: u32 = 60;
/// How long the device may take to give a chain back.
const PATIENCE_NS: u64 = 20_000_000_000;

/// A generator of numbers (xorshift64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Runs all attacks; each ends with the device working, after a reset where it needs one.
pub(super) fn run(machine: Machine, options: &Options) -> bool {
    let mut random = Random(options.seed | 1);
    let (input, output) = (Numbers::new(1500), Numbers::new(1500));
    let mut session = match Session::open(machine) {
        Ok(session) => session,
        Err(error) => return tell("open", Err(error)),
    };
    let mut passed = tell("garbage-frames", garbage(&mut session, &mut random));
    passed &= tell("ranges-outside-memory", ranges(&mut session));
    passed &= tell("what-is-not-there", absent(&mut session));
    passed &= tell("frames-that-change", changes(&mut session, &mut random));
    passed &= tell("short-replies", short(&mut session));
    passed &= tell("still-works", good::prepare(&mut session, &input, &output));
    passed &= tell("endless-kernel", good::endless(&mut session, &input, &output));
    for (name, chain) in chains() {
        passed &= tell(name, raw(&session, &chain));
        session = match session.reopen() {
            Ok(session) => session,
            Err(error) => return tell("reset", Err(error)),
        };
    }
    passed &= tell("ring-index-jumps", jump(&session));
    session = match session.reopen() {
        Ok(session) => session,
        Err(error) => return tell("reset", Err(error)),
    };
    passed &= tell("reset-under-load", reset_under_load(&mut session));
    session = match session.reopen() {
        Ok(session) => session,
        Err(error) => return tell("reset", Err(error)),
    };
    passed & tell("works-in-the-end", good::prepare(&mut session, &input, &output))
}

/// Frames of random bytes, and good ones with random bytes in them.
fn garbage(session: &mut Session, random: &mut Random) -> Outcome {
    for turn in 0..GARBAGE {
        let mut frame = session.frame()?;
        let mut batch = frame.batch()?;
        batch.query()?;
        batch.create_module(1, &MODULE[..64])?;
        batch.import_buffer(2, &[Range { address: 0x1000, bytes: 0x1000 }])?;
        batch.launch(1, ADD, [1; 3], &[Argument::view(2, 0, &[4])?, Argument::i64(1)])?;
        let mut bytes = batch.finish();
        let request = frame.request();
        if turn % 3 == 0 {
            bytes = random.next() as usize % 512;
            request[..bytes].iter_mut().for_each(|byte| *byte = random.next() as u8);
        } else {
            for _ in 0..turn % 3 {
                let at = random.next() as usize % bytes;
                request[at] = random.next() as u8;
            }
        }
        let frame = session.accelerator.call(frame, bytes)?;
        let answered = frame.reply().map(|reply| reply.status());
        session.frame = Some(frame);
        answered?;
        // What a good part of it may have made.
        for number in [1, 2] {
            session.look(|batch| batch.destroy_buffer(number), |_| ())?;
            session.look(|batch| batch.destroy_module(number), |_| ())?;
        }
    }
    Ok(())
}

fn ranges(session: &mut Session) -> Outcome {
    for range in [
        Range { address: 1 << 40, bytes: 4096 },
        Range { address: u64::MAX - 4095, bytes: 4096 },
        Range { address: u64::MAX, bytes: 2 },
        Range { address: 0xc000_0000, bytes: 4096 },
        Range { address: 0xfee0_0000, bytes: 4096 },
        Range { address: 0x1000, bytes: 0 },
    ] {
        session.fails(|batch| batch.import_buffer(5, &[range]), 0, Status::Range)?;
    }
    session.fails(
        |batch| batch.import_buffer(5, &[Range { address: 0x1000, bytes: u64::MAX }]),
        0,
        Status::Quota,
    )?;
    session.fails(|batch| batch.create_buffer(5, u64::MAX), 0, Status::Quota)
}

fn absent(session: &mut Session) -> Outcome {
    type Fill = fn(&mut BatchWriter<'_>) -> Result<(), NoRoom>;
    let fills: [Fill; 4] = [
        |batch| batch.destroy_module(77),
        |batch| batch.destroy_buffer(77),
        |batch| batch.copy((77, 0), (78, 0), 1),
        |batch| batch.launch(77, 0, [1; 3], &[]),
    ];
    for fill in fills {
        session.fails(fill, 0, Status::NoSuch)?;
    }
    session.fails(|batch| batch.create_module(1, b"not a module at all"), 0, Status::Module)
}

/// Changes a batch while the device reads it.
fn changes(session: &mut Session, random: &mut Random) -> Outcome {
    for _ in 0..CHANGES {
        let mut frame = session.frame()?;
        let mut batch = frame.batch()?;
        for number in 0..50 {
            batch.create_buffer(100 + number, 64)?;
            batch.destroy_buffer(100 + number)?;
        }
        let bytes = batch.finish();
        let address = frame.request().as_ptr() as u64;
        let (_, frame) = {
            session.accelerator.submit(frame, bytes).map_err(|(error, _)| error)?;
            loop {
                if let Some(done) = session.accelerator.completed()? {
                    break done;
                }
                for _ in 0..20 {
                    sys::write8(address + random.next() % bytes as u64, random.next() as u8);
                }
            }
        };
        let answered = frame.reply().map(|reply| reply.status());
        session.frame = Some(frame);
        answered?;
        for number in 0..50 {
            session.look(|batch| batch.destroy_buffer(100 + number), |_| ())?;
        }
    }
    Ok(())
}

/// Gives too little room for the answer, or none.
fn short(session: &mut Session) -> Outcome {
    for room in [1, 8, 16, 24] {
        let mut frame = Frame::new(sys::arena_slice(4096), &mut sys::arena_slice(4096)[..room]);
        let mut batch = frame.batch()?;
        batch.query()?;
        batch.fence()?;
        let bytes = batch.finish();
        let frame = session.accelerator.call(frame, bytes)?;
        match frame.reply() {
            Ok(reply) if reply.status() == Status::ReplyRoom => {}
            Err(_) if room < 16 => {}
            _ => return Err(WRONG),
        }
    }
    Ok(())
}

/// A descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);

/// Chains that no driver makes, from descriptor 40 on.
fn chains() -> [(&'static str, [Descriptor; 2]); 7] {
    let here = sys::arena(4096);
    // An indirect table whose only descriptor points to itself.
    let table = sys::arena(4096);
    for (at, value) in [(0, table as u32), (4, (table >> 32) as u32), (8, 16), (12, u32::from(NEXT))] {
        sys::write32(table + at, value);
    }
    [
        ("chain-that-loops", [(here, 16, NEXT, 41), (here, 16, NEXT, 40)]),
        ("chain-to-itself", [(here, 16, NEXT, 40), (here, 0, 0, 0)]),
        ("chain-outside-memory", [(1 << 45, 4096, NEXT, 41), (u64::MAX - 8, 4096, WRITE, 0)]),
        ("chain-of-4-gib", [(here, u32::MAX, NEXT, 41), (here, u32::MAX, WRITE, 0)]),
        ("chain-that-leads-nowhere", [(here, 16, NEXT, 60_000), (here, 0, 0, 0)]),
        ("indirect-to-itself", [(table, 16, INDIRECT, 0), (here, 0, 0, 0)]),
        ("indirect-outside-memory", [(1 << 45, 1 << 20, INDIRECT | NEXT, 40), (here, 0, 0, 0)]),
    ]
}

fn queue() -> u64 {
    &raw const QUEUE as u64
}

/// Offers a chain past the client. The device must give it back, or ask for a reset.
fn raw(session: &Session, chain: &[Descriptor; 2]) -> Outcome {
    let queue = queue();
    for (index, &(address, len, flags, next)) in (40u64..).zip(chain) {
        let at = queue + TABLE + 16 * index;
        sys::write32(at, address as u32);
        sys::write32(at + 4, (address >> 32) as u32);
        sys::write32(at + 8, len);
        sys::write32(at + 12, u32::from(flags) | u32::from(next) << 16);
    }
    let (available, used) = (sys::read16(queue + AVAILABLE + 2), sys::read16(queue + USED + 2));
    sys::write16(queue + AVAILABLE + 4 + 2 * u64::from(available % SIZE), 40);
    sys::write16(queue + AVAILABLE + 2, available.wrapping_add(1));
    ring(session)?;
    until(session, || sys::read16(queue + USED + 2) != used || session.accelerator.needs_reset())
}

/// Notifies the device past the client, which knows of nothing new: writes the first queue's number to its notification
/// register (section 4.1.4.4).
fn ring(session: &Session) -> Outcome {
    let machine = session.accelerator.platform();
    let mut offset = machine.config_read(0x34) as u16 & 0xfc;
    for _ in 0..48 {
        let head = machine.config_read(offset);
        if (head as u8, (head >> 24) as u8) == (9, 2) {
            let bar = 0x10 + 4 * (machine.config_read(offset + 4) as u16 & 7);
            let low = machine.config_read(bar);
            let high = if low & 6 == 4 { machine.config_read(bar + 4) } else { 0 };
            let base = u64::from(high) << 32 | u64::from(low & !0xf);
            sys::write16(base + u64::from(machine.config_read(offset + 8)), 0);
            return Ok(());
        }
        offset = (head >> 8) as u16 & 0xfc;
    }
    Err(WRONG)
}

/// Says that there are more chains than the queue has room for.
fn jump(session: &Session) -> Outcome {
    let index = queue() + AVAILABLE + 2;
    sys::write16(index, sys::read16(index).wrapping_add(SIZE + 100));
    ring(session)?;
    until(session, || session.accelerator.needs_reset())
}

/// Resets the device while a kernel of it runs for ever.
fn reset_under_load(session: &mut Session) -> Outcome {
    let mut frame = session.frame()?;
    let mut batch = frame.batch()?;
    batch.create_module(1, MODULE)?;
    batch.create_buffer(1, 4096)?;
    for _ in 0..8 {
        batch.launch(1, SPIN, [8, 1, 1], &[Argument::view(1, 0, &[1])?, Argument::i32(1)])?;
    }
    batch.fence()?;
    let bytes = batch.finish();
    session.accelerator.submit(frame, bytes).map_err(|(error, _)| error)?;
    let start = session.accelerator.platform().now();
    while (session.accelerator.platform().now() - start).as_millis() < 100 {
        sys::pause();
    }
    if session.accelerator.completed()?.is_none() { Ok(()) } else { Err(WRONG) }
}

fn until(session: &Session, mut done: impl FnMut() -> bool) -> Outcome {
    let machine = session.accelerator.platform();
    let start = sys::cycles();
    while !done() {
        if machine.nanoseconds(sys::cycles() - start) > PATIENCE_NS {
            return Err(Error::Late);
        }
        sys::pause();
    }
    Ok(())
}
