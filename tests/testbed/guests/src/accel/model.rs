//! A model on an NPU, over this program's own memory, compared with what this program computes itself.

use vm_paravirt_guest::protocol::{Argument, Info, LogReader, Range, Span, Status};

use super::machine::Machine;
use super::{MODULE, Numbers, Outcome, Session, WRONG, tell, tell_log};
use crate::serial::println;
use crate::sys;

/// `y = x · w` in its binary form, as `kernels/model.rs` has it.
const MODEL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/model.bin"));
const ROWS: u64 = 4;
const DEPTH: u64 = 32;
const COLUMNS: u64 = 16;

/// Numbers of the module and buffers.
const PRODUCT: u32 = 1;
const CODE: u32 = 2;
const X: u32 = 10;
const Y: u32 = 11;

/// Runs all checks.
pub(super) fn run(machine: Machine) -> bool {
    let mut session = match Session::open(machine) {
        Ok(session) => session,
        Err(error) => return tell("open", Err(error)),
    };
    let (x, y) = (Numbers::new(ROWS * DEPTH), Numbers::new(ROWS * COLUMNS));
    let code = sys::arena_slice(MODEL.len());
    code.copy_from_slice(MODEL);
    let code = Range { address: code.as_ptr() as u64, bytes: MODEL.len() as u64 };
    let mut passed = tell("query", query(&mut session));
    passed &= tell("kernels-are-refused", refused(&mut session, MODULE, "an NPU runs models alone"));
    let half = &MODEL[..MODEL.len() / 2];
    passed &= tell("half-a-model", refused(&mut session, half, "these bytes are no graph"));
    passed &= tell("model-on-guest-memory", product(&mut session, code, &x, &y));
    if !passed {
        tell_log(&mut session);
    }
    passed &=
        tell("after-a-reset", session.reopen().and_then(|mut session| product(&mut session, code, &x, &y)));
    passed
}

fn query(session: &mut Session) -> Outcome {
    session.look(
        |batch| batch.query(),
        |reply| {
            let (_, answer) = reply.results().next().ok_or(WRONG)??;
            let info = Info::decode(answer)?;
            println!("bare: the accelerator is {}, models are for {}", info.name, info.target);
            if info.target.starts_with("onnx:") { Ok(()) } else { Err(WRONG) }
        },
    )?
}

/// What is no model of the guest's is refused, and the log says why.
fn refused(session: &mut Session, code: &[u8], why: &str) -> Outcome {
    session.fails(|batch| batch.create_module(PRODUCT, code), 0, Status::Module)?;
    session.look(
        |batch| batch.log(),
        |reply| {
            let (_, answer) = reply.results().next().ok_or(WRONG)??;
            let entry = LogReader::new(answer).next().ok_or(WRONG)??;
            println!("bare: log: {}", entry.text);
            if entry.text.contains(why) { Ok(()) } else { Err(WRONG) }
        },
    )?
}

/// The model's code, what it reads and what it writes lie in this program's own memory.
fn product(session: &mut Session, code: Range, x: &Numbers, y: &Numbers) -> Outcome {
    let element = |m: u64, k: u64| (3 * m + k) as i32 % 7 - 3;
    x.fill(|i| (element(i / DEPTH, i % DEPTH) as f32).to_bits());
    y.fill(|_| f32::NAN.to_bits());
    session.run(|batch| {
        batch.import_buffer(CODE, &[code])?;
        batch.create_module_from(PRODUCT, Span { buffer: CODE, offset: 0, bytes: code.bytes })?;
        batch.import_buffer(X, &[x.range()])?;
        batch.import_buffer(Y, &[y.range()])?;
        batch.launch(PRODUCT, 0, [1; 3], &[Argument::view(X, 0, &[ROWS, DEPTH])?, y.view(Y)?])?;
        batch.fence()
    })?;
    let is_near = |i: u64| {
        let (m, n) = (i / COLUMNS, i % COLUMNS);
        let sum: i32 = (0..DEPTH).map(|k| element(m, k) * ((k + n) as i32 % 5 - 2)).sum();
        // An NPU may compute in f16.
        let off = f32::from_bits(sys::read32(y.address + 4 * i)) - sum as f32;
        (-0.5..=0.5).contains(&off)
    };
    if (0..y.count).all(is_near) { Ok(()) } else { Err(WRONG) }
}
