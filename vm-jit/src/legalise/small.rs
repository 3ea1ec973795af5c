//! f16, bf16 and fp8: what a target lacks of them is done in f32 or f64 and rounded once more, which is exact wherever an
//! op is correctly rounded: those have more than twice the bits, and two more. Where the way there rounds, it rounds to
//! odd: the last bit says that something was lost, so that rounding once more gives what rounding once would have given.

use super::value::{bits, choose, float};
use vm_ir::Scalar;
use vm_ir::builder::Val;
use vm_ir::module::Op;
use vm_ir::op::{Opcode, Shape};

/// A small float's format.
struct Small {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// The bits that too large a number becomes.
    too_large: i32,
    nan: i32,
}

fn format(scalar: Scalar) -> Small {
    let format =
        |exponent_bits, mantissa_bits, too_large, nan| Small { exponent_bits, mantissa_bits, too_large, nan };
    match scalar {
        Scalar::F16 => format(5, 10, 0x7c00, 0x7e00),
        Scalar::Bf16 => format(8, 7, 0x7f80, 0x7fc0),
        Scalar::F8E4M3 => format(4, 3, 0x7e, 0x7f),
        _ => format(5, 2, 0x7b, 0x7e),
    }
}

fn is_small(scalar: Scalar) -> bool {
    matches!(scalar, Scalar::F16 | Scalar::Bf16 | Scalar::F8E4M3 | Scalar::F8E5M2)
}

/// An op on small floats in a wider type, and what it gives rounded once more.
pub(super) fn widened<'b>(op: &Op, wide: Scalar, operands: &[Val<'b>], to: Scalar) -> Option<Val<'b>> {
    let k = operands.first()?.builder();
    let convert = |val: &Val<'b>| if is_small(val.ty().scalar()) { val.to(wide) } else { *val };
    let all: Vec<Val<'b>> = operands.iter().map(convert).collect();
    let ty = all.last()?.ty();
    let result = if is_small(to) { wide } else { to };
    let result = match op.code.shape() {
        Shape::Compare(_) => Scalar::Bool,
        _ => result,
    };
    let result = k.like(op, &all, ty.with_scalar(result));
    Some(if is_small(to) { result.to(to) } else { result })
}

/// Of numbers that have no instruction for it, as one fused multiply-add: a + b = a · 1 + b; a − b = b · −1 + a;
/// a · b = a · b − 0.
pub(super) fn fused<'b>(code: Opcode, a: Val<'b>, b: Val<'b>) -> Val<'b> {
    match code {
        Opcode::Add => a.fma(1.0, b),
        Opcode::Sub => b.fma(-1.0, a),
        _ => a.fma(b, -0.0),
    }
}

/// a · b + c, rounded once: the product is exact in f64, the sum goes to the odd neighbour on the side of the exact one,
/// which the last rounding then treats as it would treat that.
pub(super) fn fma<'b>(a: Val<'b>, b: Val<'b>, c: Val<'b>) -> Val<'b> {
    let to = a.ty().scalar();
    let [a, b, c] = [a, b, c].map(|x| x.to(Scalar::F64));
    let product = a * b;
    let sum = product + c;
    let back = sum - product;
    let error = (product - (sum - back)) + (c - back);
    let sum_bits = bits(sum);
    let keep = error.eq(0.0) | error.ne(error) | (sum_bits & 1).ne(0);
    // Away from zero if the error has the sum's sign.
    let by = ((sum_bits ^ bits(error)) >> 63) | 1;
    float(sum_bits + choose(keep, by, 0, by)).to(to)
}

/// f64 to f32, rounded to odd.
fn odd_f32(x: Val<'_>) -> Val<'_> {
    let near = x.to(Scalar::F32);
    let back = near.to(Scalar::F64);
    let near = bits(near);
    let moves = back.ne(x) & (near & 1).eq(0);
    let by = choose(x.abs().gt(back.abs()), near, 1, -1);
    float(moves.select(near + by, near))
}

/// A float in another format, of which one is small.
pub(super) fn convert<'b>(x: Val<'b>, to: Scalar) -> Val<'b> {
    match (x.ty().scalar(), to) {
        (Scalar::F64, _) => odd_f32(x).to(to),
        (Scalar::F32, _) => narrow(x, to),
        (_, Scalar::F32) => widen(x),
        // The upper half of it.
        (Scalar::F8E5M2, Scalar::F16) => {
            let upper = bits(x).to_u(Scalar::I16) << 8;
            upper.bitcast(x.ty().with_scalar(to))
        }
        _ => x.to(Scalar::F32).to(to),
    }
}

/// Exactly, as f32.
fn widen(x: Val<'_>) -> Val<'_> {
    let scalar = x.ty().scalar();
    let Small { exponent_bits, mantissa_bits, .. } = format(scalar);
    let width = scalar.bits();
    let all = bits(x).to_u(Scalar::I32);
    if scalar == Scalar::Bf16 {
        return float(all << 16);
    }
    let rest = all & ((1 << (width - 1)) - 1);
    // The exponent's bias is another; a product also sets subnormals right.
    let moved = rest << (23 - mantissa_bits);
    let bias = (1 << (exponent_bits - 1)) - 1;
    let value = bits(float(moved) * 2f64.powi(127 - bias));
    let special = match scalar {
        Scalar::F8E4M3 => rest.eq(0x7f),
        _ => rest.ge(((1 << exponent_bits) - 1) << mantissa_bits),
    };
    let value = special.select(moved | 0x7f80_0000, value);
    float(value | ((all << (32 - width)) & i32::MIN))
}

/// f32 rounded to nearest even.
fn narrow<'b>(x: Val<'b>, to: Scalar) -> Val<'b> {
    let Small { exponent_bits, mantissa_bits, too_large, nan } = format(to);
    let width = to.bits();
    let cut = 23 - mantissa_bits;
    let all = bits(x);
    let rounded = |bits: Val<'b>| (bits + ((bits.shr_u(cut) & 1) + ((1 << (cut - 1)) - 1))).shr_u(cut);
    let value = if to == Scalar::Bf16 {
        choose(x.ne(x), all, nan, rounded(all))
    } else {
        let size = all & i32::MAX;
        let bias = (1 << (exponent_bits - 1)) - 1;
        // A normal number: round the bits, cut them, move the exponent. A subnormal one: add the number whose last place is
        // the format's, and the sum's low bits count the steps.
        let normal = rounded(size) - ((127 - bias) << mantissa_bits);
        let step = 2f32.powi(1 - bias - mantissa_bits as i32 + 23);
        let steps = bits(float(size) + step) - step.to_bits();
        let value = size.lt((128 - bias) << 23).select(steps, normal).min_u(too_large);
        let value = choose(size.gt(0x7f80_0000), value, nan, value);
        value | (all.shr_u(32 - width) & (1 << (width - 1)))
    };
    let narrow = if width == 8 { Scalar::I8 } else { Scalar::I16 };
    value.to(narrow).bitcast(x.ty().with_scalar(to))
}

/// An integer that f64 or f32 may not hold. What is below 2^11 of a large one is joined to the bit there, so that f64 holds
/// it and it is rounded as the whole would be.
pub(super) fn from_int<'b>(x: Val<'b>, signed: bool, to: Scalar) -> Val<'b> {
    let most = match signed {
        true => (x + (1i64 << 53)).gt_u(1i64 << 54),
        false => x.gt_u(1i64 << 53),
    };
    let lost = (x & 0x7ff).ne(0).to_u(Scalar::I64) << 11;
    let cut = (x & !0x7ffi64) | lost;
    let whole = most.select(cut, x);
    let exact = if signed { whole.to(Scalar::F64) } else { whole.to_u(Scalar::F64) };
    exact.to(to)
}
