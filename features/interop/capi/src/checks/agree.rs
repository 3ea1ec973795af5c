//! That a function computes the same on two devices, and writes nothing but its results.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{ARENA, Caller, WORKSPACE, words};
use crate::sys::by_name::{Entry, Parameter};
use crate::sys::vmk_status;

/// What became of a call: what the arenas of its pointers hold.
pub type Run = Vec<Vec<u8>>;

/// What an arena holds before: numbers between 0 and 1, indices of 0 and 1, seeds.
fn input(parameter: &Parameter, arena: usize) -> Arc<[u8]> {
    type Inputs = HashMap<(&'static str, usize), Arc<[u8]>>;
    static KNOWN: Mutex<Option<Inputs>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let kind = parameter.kind.trim_start_matches("const ").trim_end_matches(" *");
    let made = known.get_or_insert_default().entry((kind, arena)).or_insert_with(|| made(kind, arena).into());
    Arc::clone(made)
}

fn made(kind: &str, arena: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(arena as u64 + 1) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::with_capacity(ARENA);
    while bytes.len() < ARENA {
        // Multiples of 1/64, which every type has: from 1/64 to 63/64.
        let part = 1 + next() % 63;
        let number = part as f32 / 64.0;
        match kind {
            "bf16" => bytes.extend(((number.to_bits() >> 16) as u16).to_le_bytes()),
            "f16" => {
                // Of a number from 2^-6 up to 1: the exponent by another bias, and the mantissa's first bits.
                let bits = number.to_bits();
                let half = ((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ff);
                bytes.extend((half as u16).to_le_bytes());
            }
            "int32_t" => bytes.extend(((part & 1) as i32).to_le_bytes()),
            "int64_t" => bytes.extend(next().to_le_bytes()),
            _ => bytes.extend(number.to_le_bytes()),
        }
    }
    bytes
}

/// Calls a function with the arguments of a shape. None for one that asks for its form with `_ws`.
///
/// # Errors
/// That it failed, and how.
pub fn run(caller: &mut dyn Caller, entry: &Entry, shape: &[(&str, i64)]) -> Result<Option<Run>, String> {
    let pointers =
        || entry.parameters.iter().filter(|parameter| parameter.is_pointer() && !parameter.is_workspace());
    for (arena, parameter) in pointers().enumerate() {
        caller.write(arena, &input(parameter, arena))?;
    }
    caller.write(WORKSPACE, &vec![0xff; ARENA])?;
    let given = words(caller, entry, shape)?;
    let status = caller.call(entry.name, &given)?;
    if status != vmk_status::VMK_SUCCESS as i32 {
        let said = caller.last();
        let needs = said.contains("workspace is needed") && !entry.name.ends_with("_ws");
        return if needs { Ok(None) } else { Err(format!("{}: {status}: {said}", entry.name)) };
    }
    let mut found = Vec::new();
    for (arena, _) in pointers().enumerate() {
        let mut bytes = vec![0; ARENA];
        caller.read(arena, &mut bytes)?;
        found.push(bytes);
    }
    Ok(Some(found))
}

/// Bytes that are compared at once first.
const BLOCK: usize = 1024;

/// An element as a number.
fn number(kind: &str, bytes: &[u8]) -> f64 {
    match (kind, bytes) {
        ("bf16", [a, b]) => f32::from_bits(u32::from(u16::from_le_bytes([*a, *b])) << 16).into(),
        ("f16", [a, b]) => {
            let bits = u16::from_le_bytes([*a, *b]);
            let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
            let size = match exponent {
                0 => mantissa * 2f64.powi(-24),
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
            };
            if bits >> 15 == 0 { size } else { -size }
        }
        ("int32_t", [a, b, c, d]) => i32::from_le_bytes([*a, *b, *c, *d]).into(),
        (_, [a, b, c, d]) => f32::from_le_bytes([*a, *b, *c, *d]).into(),
        _ => f64::NAN,
    }
}

/// That two runs of a function came to the same, as far as its types tell.
///
/// # Errors
/// Where they differ.
pub fn agree(entry: &Entry, one: &Run, other: &Run) -> Result<(), String> {
    let pointers =
        entry.parameters.iter().filter(|parameter| parameter.is_pointer() && !parameter.is_workspace());
    let coarse = entry.name.contains("bf16");
    for ((parameter, one), other) in pointers.zip(one).zip(other) {
        let kind = parameter.kind.trim_start_matches("const ").trim_end_matches(" *");
        let tolerance = match kind {
            "int32_t" | "int64_t" => 0.0,
            "bf16" => 2e-2,
            "f16" => 4e-3,
            // A sum of products of such elements.
            _ if coarse => 1e-2,
            _ => 1e-3,
        };
        let width = parameter.element() as usize;
        // The sums of gradients of attention cancel each other here, as the logarithms that are given are no sums of the scores.
        let is_gradient = entry.name.contains("flash_attention_backward");
        let finite = |bytes: &[u8]| Some(number(kind, bytes).abs()).filter(|size| size.is_finite());
        let greatest =
            if is_gradient { other.chunks(width).filter_map(finite).fold(0.0, f64::max) } else { 0.0 };
        // As a rule most is the same.
        let blocks =
            one.chunks(BLOCK).zip(other.chunks(BLOCK)).enumerate().filter(|(_, (one, other))| one != other);
        let elements = blocks.flat_map(|(block, (one, other))| {
            let elements = one.chunks(width).zip(other.chunks(width)).enumerate();
            elements.map(move |(at, pair)| (block * BLOCK / width + at, pair))
        });
        for (at, (one, other)) in elements {
            if one == other {
                continue;
            }
            let (one, other) = (number(kind, one), number(kind, other));
            let close = (one - other).abs() <= tolerance * other.abs().max(1.0)
                || one.is_nan() && other.is_nan()
                || is_gradient && (one - other).abs() <= tolerance * greatest;
            if !parameter.is_written() || !close {
                return Err(format!("{}: {} at {at}: {one}, not {other}", entry.name, parameter.name));
            }
        }
    }
    Ok(())
}
