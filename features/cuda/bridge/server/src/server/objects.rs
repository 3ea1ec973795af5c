//! Textures and surfaces, whose description may have an array in it; objects of the program that graphs keep; and the linker, whose output is memory
//! of the driver's.

use vm_cuda_api::Object;

use super::hand::Parts;
use super::host::ENTRY;
use super::lane::Call;
use super::options::Options;
use super::pack::Refused;
use super::reach::reach;
use super::sys::{self, Word};
use crate::wire::{CHUNK, IMAGE, Malformed, NOTHING, code, control, put, put_bytes};

/// Words of a `CUDA_RESOURCE_DESC`, a `CUDA_TEXTURE_DESC` and a `CUDA_RESOURCE_VIEW_DESC`.
const RESOURCE: usize = 18;
const TEXTURE: usize = 13;
const VIEW: usize = 14;

/// Bytes that rows of texels of a format reach, by width, height and pitch.
fn rows(format: u64, [width, height, pitch]: [u64; 3]) -> Option<u64> {
    let texel = match format as u32 {
        1 | 8 => 1,
        2 | 9 | 0x10 => 2,
        _ => 4,
    };
    let row = width.checked_mul(texel)?.checked_mul(format >> 32)?;
    height.saturating_sub(1).checked_mul(pitch)?.checked_add(row)
}

/// A description, of which the first word is what it is of.
fn resource(call: &Call<'_>, parts: &mut Parts<'_>) -> Result<Vec<u64>, Refused> {
    let mut words: Vec<u64> = (0..RESOURCE).map(|_| parts.reader.word()).collect::<Result<_, _>>()?;
    let handles = call.session.handles();
    match words[0] as u32 {
        0 => words[1] = handles.real(Object::Array, words[1])?,
        1 => words[1] = handles.real(Object::Mipmap, words[1])?,
        // An address, a format, and a size; or a format, a width, a height and a pitch.
        2 => reach(call.session, words[1], Some(words[3]))?,
        3 => reach(call.session, words[1], rows(words[2], [words[3], words[4], words[5]]))?,
        _ => return Err(code::INVALID_VALUE.into()),
    }
    Ok(words)
}

/// A resource, a texture, and a view or nothing.
pub(super) fn texture(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let mut memory = resource(call, &mut parts)?;
    for _ in 0..TEXTURE {
        memory.push(parts.reader.word()?);
    }
    let view = memory.len();
    let has_view = !parts.reader.0.is_empty();
    for _ in 0..if has_view { VIEW } else { 0 } {
        memory.push(parts.reader.word()?);
    }
    let out = memory.len();
    memory.push(0);
    let view = if has_view { Word::At(view) } else { Word::Is(0) };
    give(call, parts, Object::Texture, memory, out, &[Word::At(out), Word::At(0), Word::At(RESOURCE), view])
}

/// A resource.
pub(super) fn surface(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let mut memory = resource(call, &mut parts)?;
    let out = memory.len();
    memory.push(0);
    give(call, parts, Object::Surface, memory, out, &[Word::At(out), Word::At(0)])
}

/// Makes a call, and gives the handle that it returned.
fn give(
    call: &Call<'_>,
    parts: Parts<'_>,
    object: Object,
    mut memory: Vec<u64>,
    out: usize,
    words: &[Word],
) -> Result<u32, Refused> {
    let result = call.make(words, &mut memory)?;
    let id = if result == 0 { call.session.give(object, memory[out], None, true)? } else { 0 };
    put(parts.reply, id);
    Ok(result)
}

/// A function and its argument, which are called when nobody keeps the object any more; how often it is kept; flags.
pub(super) fn user(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let (function, argument) = (parts.reader.word()?, parts.reader.word()?);
    let (count, flags) = (parts.reader.word()?, parts.reader.word()?);
    if function == 0 {
        return Err(code::INVALID_VALUE.into());
    }
    let words = [control::FUNCTION, function, argument, 0, 0];
    let charge = call.session.host().charge(ENTRY);
    let callback =
        sys::Callback { callbacks: call.session.callbacks(), words, stays: false, _charge: charge };
    let mut made = [0];
    let result = sys::user_object(call.session.driver(), call.number, callback, [count, flags], &mut made);
    let id = if result == 0 { call.session.give(Object::UserObject, made[0], None, true)? } else { 0 };
    put(parts.reply, id);
    Ok(result)
}

/// Options. What is answered of the linker has its logs behind it.
pub(super) fn link(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let mut options = Options::read(&mut parts.reader)?;
    let [count, kinds, values] = options.words();
    let words = [count, kinds, values, options.out()];
    let real = match options.make(call, &words) {
        Ok(real) => real,
        Err(code) => return Ok(code),
    };
    put(parts.reply, call.session.give(Object::Link, real, None, true)?);
    // The driver reads and writes them until the linker ends: they stay where they are.
    call.session.keep(real, options);
    Ok(0)
}

/// The linker, what the image is, options, and its name; the image came before.
pub(super) fn link_data(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let id = parts.reader.word()?;
    let link = call.session.handles().real(Object::Link, id)?;
    let kind = parts.reader.word()?;
    let mut options = Options::read(&mut parts.reader)?;
    let len = parts.reader.word()?;
    let mut image = parts.lane.image.take();
    let name = if len == NOTHING {
        Word::Is(0)
    } else {
        let len = usize::try_from(len).ok().and_then(|len| len.checked_add(1)).ok_or(Malformed)?;
        let bytes = parts.reader.bytes(len)?;
        if !sys::is_text(bytes) {
            return Err(Refused::Malformed);
        }
        Word::Is(sys::place(bytes))
    };
    let size = Word::Is(image.bytes.len() as u64);
    image.bytes.extend_from_slice(&[0; 16]);
    let [count, kinds, values] = options.words();
    let data = Word::Is(sys::place(&image.bytes));
    let words = [Word::Is(link), Word::Is(kind), data, size, name, count, kinds, values];
    let result = options.make(call, &words).err().unwrap_or(0);
    // The linker may keep a copy.
    call.session.handles().hold(Object::Link, id, image.charge);
    put(parts.reply, result.into());
    call.session.put_logs(link, parts.reply);
    Ok(0)
}

/// The linker: what it made is kept by the lane, and how long it is is returned.
pub(super) fn link_complete(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let link = call.session.handles().real(Object::Link, parts.reader.word()?)?;
    let mut memory = [0; 2];
    let words = [Word::Is(link), Word::At(0), Word::At(1)];
    let result = call.make(&words, &mut memory)?;
    let len = usize::try_from(memory[1]).ok().filter(|len| *len <= IMAGE).ok_or(code::OUT_OF_MEMORY)?;
    let len = if result == 0 { len } else { 0 };
    parts.lane.made.set(len, || sys::bytes(memory[0], len))?;
    put(parts.reply, result.into());
    put(parts.reply, parts.lane.made.bytes.len() as u64);
    call.session.put_logs(link, parts.reply);
    Ok(0)
}

/// The linker ends, and its options.
pub(super) fn link_destroy(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let link = call.session.handles().real(Object::Link, parts.reader.clone().word()?)?;
    let result = super::pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if result == 0 {
        call.session.forget(link);
    }
    Ok(result)
}

/// A part of that: place and length.
pub(super) fn linked(_: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let (at, len) = (parts.reader.word()?, parts.reader.word()?);
    let end = at.checked_add(len).filter(|_| len <= CHUNK as u64).ok_or(Malformed)?;
    let part = parts.lane.made.bytes.get(at as usize..end as usize).ok_or(code::INVALID_VALUE)?;
    put_bytes(parts.reply, part);
    Ok(0)
}
