//! Copies of two and three dimensions. Memory of the program that is not this side's too goes packed: rows without gaps, one layer at a time.

use vm_cuda_api::Object;

use super::hand::Parts;
use super::lane::{Call, Source};
use super::pack::Refused;
use super::reach::reach;
use super::sys::{self, Word};
use crate::wire::strided::{ARRAY, DEVICE, Form, HOST};
use crate::wire::{CHUNK, code, put_bytes};

/// A copy's structure, with a stream behind it where the function has one.
pub(super) fn copy(call: &mut Call<'_>, parts: Parts<'_>, form: Form) -> Result<u32, Refused> {
    let Parts { lane, mut reader, reply } = parts;
    let mut words: Vec<u64> = (0..form.words()).map(|_| reader.word()).collect::<Result<_, _>>()?;
    let stream = reader.word()?;
    let has_stream = vm_cuda_api::FUNCTIONS[call.number].parameters.len() == 2;
    let stream = if has_stream { Some(call.session.handles().real(Object::Stream, stream)?) } else { None };
    let size = form.size(&words);
    let mut packed: Vec<u8> = Vec::new();
    let mut returns = false;
    let mut source = None;
    let mut records = false;
    for (is_target, end) in form.ends().into_iter().enumerate().map(|(at, end)| (at == 1, end)) {
        if let Some(context) = end.context {
            words[context] = call.session.handles().real(Object::Context, words[context])?;
        }
        match words[end.kind] & 0xffff_ffff {
            DEVICE => reach(call.session, words[end.device], form.extent(&words, is_target))?,
            ARRAY => {
                words[end.array] = call.session.handles().real(Object::Array, words[end.array])?;
            }
            HOST if words[end.host] != 0 => {
                let extent = form.extent(&words, is_target).ok_or(code::INVALID_VALUE)?;
                if !call.session.has(words[end.host], extent) {
                    return Err(code::INVALID_VALUE.into());
                }
            }
            HOST => {
                let len = size.iter().try_fold(1u64, |all, side| all.checked_mul(*side));
                let len = len.filter(|len| *len <= CHUNK as u64).ok_or(code::INVALID_VALUE)? as usize;
                if size[2] > 1 || returns || !packed.is_empty() {
                    return Err(code::INVALID_VALUE.into());
                }
                records = true;
                form.pack(&mut words, is_target);
                words[end.host] = if is_target {
                    packed = vec![0; len];
                    returns = true;
                    sys::place_mut(&mut packed)
                } else {
                    let place = match call.bulk {
                        Some((place, there)) if there >= len => place,
                        Some(_) => return Err(Refused::Malformed),
                        None => sys::place(reader.last(len)?),
                    };
                    source.insert(lane.source(call, (place, len), stream.is_some())).place
                };
            }
            _ => return Err(code::NOT_SUPPORTED.into()),
        }
    }
    if records && stream.is_some_and(|stream| super::hand::records(call, stream)) {
        return Err(code::NOT_SUPPORTED.into());
    }
    if stream.is_none() {
        call.pass();
    }
    let arguments: Vec<Word> = [Word::At(0)].into_iter().chain(stream.map(Word::Is)).collect();
    let mut result = call.make(&arguments, &mut words)?;
    let waits = result == 0 && (returns || source.is_some_and(|source: Source| source.waits));
    if let Some(stream) = stream.filter(|_| waits) {
        result = call.wait_for(stream);
    }
    if returns {
        put_bytes(reply, &packed);
    }
    Ok(result)
}
