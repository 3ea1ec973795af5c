//! Packs calls by the table of their parameters, and unpacks what they returned.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use vm_bridge::wire::{ITEMS, Malformed, NOTHING, Reader, code, put, put_bytes};
use vm_cuda_api::{Count, FUNCTIONS, Function, Kind, Way};

use crate::sys::caller;

/// How many values a parameter points to.
fn count(function: &Function, count: Count, words: &[usize]) -> Result<usize, u32> {
    let Count::Of(at, less) = count else { return Ok(1) };
    let said = match function.parameters[at].kind {
        Kind::Number(4) => words[at] as u32 as usize,
        Kind::Pointer { .. } => caller::word(words[at]) as usize,
        _ => words[at],
    };
    let said = said.saturating_sub(less);
    if said > ITEMS { Err(code::INVALID_VALUE) } else { Ok(said) }
}

/// A call as it is sent.
pub(crate) fn request(number: usize, words: &[usize], to: &mut Vec<u8>) -> Result<(), u32> {
    let function = &FUNCTIONS[number];
    for (parameter, word) in function.parameters.iter().zip(words) {
        let head = match parameter.kind {
            Kind::Number(bytes) if bytes < 8 => *word as u64 & ((1 << (8 * bytes)) - 1),
            Kind::Text => caller::text(*word).map_or(NOTHING, |text| text.len() as u64 - 1),
            Kind::Pointer { .. } | Kind::OutText => u64::from(*word != 0),
            Kind::Number(_) | Kind::Address(_) | Kind::Handle(_) | Kind::Drop(_) => *word as u64,
            Kind::Float | Kind::Value(_) | Kind::Other => 0,
        };
        put(to, head);
    }
    for (parameter, word) in function.parameters.iter().zip(words).filter(|(_, word)| **word != 0) {
        match parameter.kind {
            Kind::Text => put_bytes(to, caller::text(*word).unwrap_or_default()),
            Kind::Pointer { way: Way::In | Way::InOut, item, count: many } => {
                put_bytes(to, caller::bytes(*word, count(function, many, words)? * item.size()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Writes what was returned to where the caller wants it.
pub(crate) fn answer(number: usize, words: &[usize], reply: &[u8]) -> Result<(), u32> {
    let function = &FUNCTIONS[number];
    let mut reader = Reader(reply);
    // Counts as they were when the call was sent: what is written may change them.
    let counts: Vec<usize> = function
        .parameters
        .iter()
        .zip(words)
        .map(|(parameter, word)| match parameter.kind {
            Kind::Pointer { count: many, .. } if *word != 0 => count(function, many, words),
            _ => Ok(1),
        })
        .collect::<Result<_, u32>>()?;
    let bad = |_: Malformed| code::UNAVAILABLE;
    for ((parameter, word), count) in function.parameters.iter().zip(words).zip(counts) {
        match parameter.kind {
            Kind::Pointer { way: Way::Out | Way::InOut, item, .. } if *word != 0 => {
                caller::write_bytes(*word, reader.bytes(count * item.size()).map_err(bad)?);
            }
            Kind::OutText if *word != 0 => {
                let len = reader.word().map_err(bad)? as usize;
                caller::write(*word, kept(reader.bytes(len).map_err(bad)?) as u64);
            }
            _ => {}
        }
    }
    Ok(())
}

/// The address of a string that stays: each one once.
pub(crate) fn kept(text: &[u8]) -> usize {
    static TEXTS: Mutex<Option<HashMap<Vec<u8>, CString>>> = Mutex::new(None);
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let texts = texts.get_or_insert_default();
    let entry = texts.entry(text.to_owned()).or_insert_with(|| CString::new(text).unwrap_or_default());
    entry.as_ptr() as usize
}
