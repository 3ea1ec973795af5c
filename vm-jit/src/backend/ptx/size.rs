//! How many instructions an op comes to at most, about: what unrolling is bounded by.

use crate::safety::{Access, Last};
use vm_ir::module::Op;
use vm_ir::op::{Accuracy, Opcode, Shape};
use vm_ir::{Kernel, Scalar, Value};

/// What each copy of a loop's body takes beside it: its number and a poll point.
pub(super) const COPY: u64 = 20;

/// Those of an op without its regions; of a loop with one copy of its body, or one more behind the copies.
pub(super) fn instructions(kernel: &Kernel, op: &Op, access: Option<&Access>) -> u64 {
    let lanes = |value: &Value| u64::from(kernel.type_of(*value).lanes());
    let all = |values: &[Value]| values.iter().map(lanes).sum::<u64>();
    let widest = op.operands.iter().chain(&op.results).map(lanes).max().unwrap_or(1);
    let value = op.results.first().or(op.operands.last());
    let scalar = value.map_or(Scalar::I32, |value| kernel.type_of(*value).scalar());
    let from = op.operands.first().map_or(scalar, |value| kernel.type_of(*value).scalar());
    // An address, and checks of all indices.
    let place = 5 + op.place.and_then(|place| kernel.place(place)).map_or(0, |(rank, _)| 4 * rank as u64);
    match op.code.shape() {
        Shape::Const | Shape::Splat | Shape::Make | Shape::Extract | Shape::Insert => 1,
        Shape::Id32 | Shape::Id64 | Shape::Extent => 6,
        Shape::Load | Shape::LoadUniform | Shape::Store => {
            // Lanes of less than a word are cut out of one; and each may be checked by itself.
            let each = if scalar.bytes() < 4 { 5 } else { 2 };
            let checked = access.is_some_and(|access| access.last == Last::Lanes);
            place + widest * if checked { each + 4 } else { each }
        }
        Shape::AtomicLoad | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas => place,
        Shape::Gather => 32 + 5 * widest,
        Shape::Bitcast | Shape::Shuffle => 1 + 4 * widest,
        Shape::Vote | Shape::Ballot => 1,
        Shape::Reduce(_) => 5 * (4 + element(op, from)),
        // A barrier at which shared memory is zeroed.
        Shape::Sync => 16,
        Shape::If => 2 + 4 * all(&op.results),
        Shape::Switch => op.regions.len() as u64 * (3 + 2 * all(&op.results)),
        Shape::For => 2 * COPY + 6 * all(&op.operands[3..]),
        Shape::While => 2 * COPY + 6 * all(&op.operands),
        Shape::Fetch | Shape::Release => 64,
        Shape::Fill
        | Shape::Rows
        | Shape::Share
        | Shape::Put
        | Shape::PutRows
        | Shape::Get
        | Shape::Send
        | Shape::Mma
        | Shape::Map => super::tile::instructions(kernel, op),
        Shape::Unary(_)
        | Shape::Binary(_)
        | Shape::Ternary(_)
        | Shape::Compare(_)
        | Shape::Select
        | Shape::Convert(..) => widest * element(op, from),
    }
}

/// Those of one lane.
fn element(op: &Op, ty: Scalar) -> u64 {
    use Opcode::*;
    match op.code {
        Div | Sqrt | Rsqrt | Rcp => 1,
        _ if op.accuracy() == Accuracy::Fast && ty == Scalar::F32 => 3,
        Exp => 10,
        Exp2 => 1,
        Log | Log2 => 32,
        Sin | Cos => 72,
        Tanh => 24,
        Erf => 30,
        Pow => 90,
        DivS | DivU | RemS | RemU => 12,
        Shl | ShrS | ShrU | Rotl | AbsS | MinS | MaxS | FpToSi | FpToUi => 7,
        _ if ty.is_int() && ty.bits() < 32 => 5,
        Select | MulHiS | MulHiU => 4,
        _ => 3,
    }
}
