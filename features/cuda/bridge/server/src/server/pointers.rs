//! What the driver knows of an address: several attributes at a time, of which some are handles.

use vm_cuda_api::Object;

use super::lane::Call;
use super::pack::Refused;
use super::sys::Word;
use crate::wire::{Reader, put};

/// Attributes whose values are handles.
const HANDLES: [(u64, Object); 2] = [(1, Object::Context), (17, Object::Pool)];
/// Words of the largest value, with room for one that is larger yet.
const VALUE: usize = 8;

/// An address, then attributes: of each the result and two words.
pub(super) fn attributes(
    call: &mut Call<'_>,
    mut reader: Reader<'_>,
    reply: &mut Vec<u8>,
) -> Result<u32, Refused> {
    /// There are fewer than thirty.
    const MOST: usize = 64;
    let at = reader.word()?;
    for _ in 0..MOST {
        let Ok(attribute) = reader.word() else { break };
        let mut memory = [0; VALUE];
        let words = [Word::At(0), Word::Is(attribute & 0xffff_ffff), Word::Is(at)];
        let result = call.session.driver().named("cuPointerGetAttribute", &words, &mut memory);
        if let Some((_, object)) = HANDLES.iter().find(|(known, _)| *known == attribute && result == 0) {
            memory[0] = call.session.handles().give(*object, memory[0])?;
        }
        put(reply, result.into());
        memory[..2].iter().for_each(|word| put(reply, *word));
    }
    Ok(0)
}
