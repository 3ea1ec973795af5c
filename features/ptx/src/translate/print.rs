//! `printf`: a record of what is to be printed, in a [ring](crate::print) of memory that the host reads.

use super::Cx;
use super::table::{Modifiers, operands};
use super::value::Fact;
use crate::ast::{Class, Instr, Operand, Ty};
use crate::error::Result;
use crate::print::{HEAD, MAX_ARGUMENTS, arguments};
use crate::space::LOCAL;
use vm_ir::builder::Val;
use vm_ir::{Scalar, Type};

const B32: Ty = Ty::new(Class::Bits, 32);
const B64: Ty = Ty::new(Class::Bits, 64);

/// The whole of a parameter of a call.
fn whole<'o>(cx: &Cx<'_, '_>, operand: &'o Operand) -> Result<&'o Operand> {
    match operand {
        Operand::Vector(parts) if parts.len() == 1 => Ok(&parts[0]),
        _ => Err(cx.unsupported("a parameter of vprintf in parts")),
    }
}

/// The operands are parameters of the call: what it gives, the format, and where its arguments are.
pub(super) fn print(cx: &Cx<'_, '_>, instr: &Instr, _: &mut Modifiers<'_>) -> Result<()> {
    let [result, format, given] = operands(instr)?;
    let (format, given) = (whole(cx, format)?, whole(cx, given)?);
    let known = match cx.get(format, B64).map(|format| cx.fact(format))? {
        Some(Fact::Memory(at)) => cx.text_at(at).map(arguments),
        _ => None,
    };
    let local = match given {
        Operand::Register(register) => cx.spaces[*register as usize] == LOCAL,
        _ => false,
    };
    let (bytes, number) = match known {
        Some((bytes, number)) if bytes <= MAX_ARGUMENTS => (bytes, number),
        // Whatever is there: an index beyond the end of local memory is none, and the format says what of it is printed.
        None if local => (cx.local_bytes.min(MAX_ARGUMENTS), 0),
        None => return Err(cx.unsupported("printf of a format that is known to none but the launch")),
        Some(_) => return Err(cx.unsupported("printf of so many arguments")),
    };
    let k = cx.k;
    let words = 2 + bytes.div_ceil(8);
    let ring = cx.ring();
    let place = cx.memory.at([ring]).typed(Scalar::I64).atomic_add(k.i64(8 * words as i64));
    let put = |word: u64, value: Val<'_>| {
        let at = (place + k.i64(8 * word as i64)) & cx.ring_mask();
        // Records that are written over are no race.
        cx.memory.at([ring + k.i64(HEAD as i64) + at]).typed(Scalar::I64).atomic_store(value);
    };
    put(1, cx.get(format, B64)?);
    for word in 0..bytes.div_ceil(8) {
        let half = |at: u64| -> Result<Val<'_>> {
            let loaded = match at < bytes {
                true => cx.load_word(given, at as i64)?,
                false => k.i32(0),
            };
            Ok(loaded.to_u(Scalar::I64))
        };
        put(word + 2, half(8 * word)? | half(8 * word + 4)? << 32i64);
    }
    // Last, what makes it a record.
    put(0, (place.shr_u(3i64) << 16i64) | k.i64(words as i64));
    let number = cx.fit(cx.constant(Type::I32, number), Type::I32);
    match result {
        Operand::Vector(parts) => cx.set(whole(cx, &Operand::Vector(parts.clone()))?, number, false),
        other => cx.set(other, cx.fit(number, super::value::ir(B32)?), false),
    }
}
