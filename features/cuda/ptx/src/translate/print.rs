//! `printf`, `assert` and traps: records of what is to be printed, in a [ring](crate::print) of memory that the host reads.

use super::Cx;
use super::table::{Modifiers, operands};
use super::value::Fact;
use crate::ast::{Class, Instr, Operand, Ty};
use crate::error::Result;
use crate::print::{ASSERTION, HEAD, MAX_ARGUMENTS, arguments};
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

/// Appends a record to the ring: a format, and words of arguments.
fn record<'b>(
    cx: &Cx<'_, 'b>,
    format: Val<'b>,
    arguments: u64,
    argument: impl Fn(u64) -> Result<Val<'b>>,
) -> Result<()> {
    let k = cx.k;
    let words = 2 + arguments;
    let ring = cx.ring();
    let place = cx.memory.at([ring]).typed(Scalar::I64).atomic_add(k.i64(8 * words as i64));
    let put = |word: u64, value: Val<'_>| {
        let at = (place + k.i64(8 * word as i64)) & cx.ring_mask();
        // Records that are written over are no race.
        cx.memory.at([ring + k.i64(HEAD as i64) + at]).typed(Scalar::I64).atomic_store(value);
    };
    put(1, format);
    for word in 0..arguments {
        put(word + 2, argument(word)?);
    }
    // Last, what makes it a record.
    put(0, (place.shr_u(3i64) << 16i64) | k.i64(words as i64));
    Ok(())
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
    record(cx, cx.get(format, B64)?, bytes.div_ceil(8), |word| {
        let half = |at: u64| -> Result<Val<'_>> {
            let loaded = match at < bytes {
                true => cx.load_word(given, at as i64)?,
                false => cx.k.i32(0),
            };
            Ok(loaded.to_u(Scalar::I64))
        };
        Ok(half(8 * word)? | half(8 * word + 4)? << 32i64)
    })?;
    let number = cx.fit(cx.constant(Type::I32, number), Type::I32);
    match result {
        Operand::Vector(parts) => cx.set(whole(cx, &Operand::Vector(parts.clone()))?, number, false),
        other => cx.set(other, cx.fit(number, super::value::ir(B32)?), false),
    }
}

/// `__assertfail`: records the parameters of the call and the indices of the thread, then traps.
pub(super) fn assertion(cx: &Cx<'_, '_>, instr: &Instr, modifiers: &mut Modifiers<'_>) -> Result<()> {
    let [message, file, line, function, _] = operands(instr)?;
    let mut words = Vec::new();
    for operand in [message, file, function] {
        words.push(cx.get(whole(cx, operand)?, B64)?);
    }
    let indices = ["ctaid.x", "ctaid.y", "ctaid.z", "tid.x", "tid.y", "tid.z"]
        .map(|name| Operand::Special(name.into()));
    for operand in [whole(cx, line)?].into_iter().chain(&indices) {
        words.push(cx.get(operand, B32)?.to_u(Scalar::I64));
    }
    record(cx, cx.k.i64(ASSERTION as i64), words.len() as u64, |word| Ok(words[word as usize]))?;
    trap(cx, instr, modifiers)
}

/// Ends the thread: an access to an address that the launch passes, by which a driver ends the launch. Where the address is memory, an endless loop
/// follows, and the limits of the launch end it.
pub(super) fn trap(cx: &Cx<'_, '_>, _: &Instr, _: &mut Modifiers<'_>) -> Result<()> {
    let trap = cx.trap.ok_or_else(|| cx.unsupported("a trap in a kernel without one"))?;
    cx.memory.at([trap]).typed(Scalar::I64).atomic_store(cx.k.i64(1));
    cx.k.while_((), |()| cx.k.bool(true), |()| ());
    Ok(())
}
