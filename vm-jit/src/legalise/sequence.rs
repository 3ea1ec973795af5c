//! Ops made of a few others.

use super::value::bits;
use vm_ir::builder::Val;
use vm_ir::module::Op;
use vm_ir::op::Opcode;

pub(super) fn of<'b>(code: Opcode, a: Val<'b>, b: Val<'b>) -> Option<Val<'b>> {
    Some(match code {
        Opcode::Rotl => (a << b) | a.shr_u(-b),
        Opcode::Rsqrt => a.sqrt().rcp(),
        Opcode::Min | Opcode::Max => extreme(code == Opcode::Max, a, b),
        Opcode::Minimum | Opcode::Maximum => {
            let number = if code == Opcode::Maximum { a.max(b) } else { a.min(b) };
            (a.ne(a) | b.ne(b)).select(a + b, number)
        }
        _ => return None,
    })
}

/// The lesser or the greater f64; a number wins over a NaN, and −0 is less than +0.
///
/// On PTX, no architecture has `min.f64` and `max.f64` in hardware: `ptxas` makes a comparison of a kind of its own of them,
/// and (seen in 12.9 and 13.0) where it makes that once more, to save a register, it compares other numbers. The low half
/// of the result is then that of the wrong operand. It makes ordinary comparisons again as they are.
fn extreme<'b>(greater: bool, a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let first = if greater { a.gt(b) } else { a.lt(b) };
    // Equal numbers have the same bits, but for zeros.
    let signed = if greater { bits(a) & bits(b) } else { bits(a) | bits(b) };
    let result = a.eq(b).select(signed.bitcast(a.ty()), first.select(a, b));
    b.ne(b).select(a, result)
}

/// `neg` and `abs` of a half.
pub(super) fn sign<'b>(code: Opcode, a: Val<'b>) -> Option<Val<'b>> {
    let signed = match code {
        Opcode::Neg => bits(a) ^ 0x8000,
        Opcode::Abs => bits(a) & 0x7fff,
        _ => return None,
    };
    Some(signed.bitcast(a.ty()))
}

/// Each lane of a warp combines its own with that of lane xor 16, then 8, 4, 2 and 1. What lane 0 then has, all have, which
/// a last shuffle says.
pub(super) fn reduce<'b>(op: &Op, a: Val<'b>) -> Option<Val<'b>> {
    let combine = Op::new(op.code.combines()?);
    let k = a.builder();
    let all = [16, 8, 4, 2, 1]
        .into_iter()
        .fold(a, |a, distance| k.like(&combine, &[a, a.shuffle_xor(distance)], a.ty()));
    Some(all.shuffle(0))
}
