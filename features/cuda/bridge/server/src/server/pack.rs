//! Calls that the table unpacks.

use vm_cuda_api::{Count, FUNCTIONS, Function, Item, Kind, Object, Way};

use super::edges;
use super::effects::{self, Effect};
use super::ranges::{self, Ranges};
use super::reach::Checked;
use super::session::Session;
use super::sys::{self, WORDS, Word};
use crate::wire::{ITEMS, Malformed, NOTHING, Reader, code, put, put_bytes};

/// The most bytes of a string that is returned.
pub(super) const NAME: usize = 4096;
/// `CU_MEM_LOCATION_TYPE_DEVICE`, behind which are those of the host.
const DEVICE: u32 = 1;

/// Why a call was not made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Refused {
    /// It is no call.
    Malformed,
    /// The driver would have refused it.
    Code(u32),
}

impl From<Malformed> for Refused {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

impl From<u32> for Refused {
    fn from(code: u32) -> Self {
        Self::Code(code)
    }
}

/// Something to be returned.
struct Returned {
    at: usize,
    item: Item,
    count: usize,
    is_text: bool,
    /// Whether the call made these objects.
    is_new: bool,
}

/// How many values a parameter points to.
fn count(function: &Function, count: Count, heads: &[u64], inout: &[Option<u64>]) -> Result<usize, Refused> {
    let Count::Of(at, less) = count else { return Ok(1) };
    let said = match function.parameters.get(at).map(|parameter| parameter.kind) {
        Some(Kind::Number(_)) => heads[at],
        Some(Kind::Pointer { way: Way::InOut, .. }) => inout[at].unwrap_or(0),
        _ => return Err(Refused::Malformed),
    };
    let said = usize::try_from(said).map_err(|_| code::INVALID_VALUE)?.saturating_sub(less);
    if said > ITEMS { Err(Refused::Code(code::INVALID_VALUE)) } else { Ok(said) }
}

/// Unpacks a call, makes it, and packs what it returned.
pub(super) fn make(
    session: &Session,
    number: usize,
    payload: &[u8],
    reply: &mut Vec<u8>,
) -> Result<u32, Refused> {
    make_with(session, number, payload, reply, None)
}

/// The same with what is at the pointer that no table unpacks: it stays there until this returns.
pub(super) fn make_with(
    session: &Session,
    number: usize,
    payload: &[u8],
    reply: &mut Vec<u8>,
    other: Option<u64>,
) -> Result<u32, Refused> {
    let function = &FUNCTIONS[number];
    let parameters = &function.parameters;
    let mut reader = Reader(payload);
    let (mut heads, mut words, mut inout) = ([0; WORDS], [Word::Is(0); WORDS], [None; WORDS]);
    let heads = heads.get_mut(..parameters.len()).ok_or(code::NOT_SUPPORTED)?;
    for head in heads.iter_mut() {
        *head = reader.word()?;
    }
    let heads = &*heads;
    let mut memory: Vec<u64> = Vec::new();
    let mut returned = Vec::new();
    let mut pending = None;
    let mut drops: Option<(Object, u64)> = None;
    {
        let handles = session.handles();
        for (at, parameter) in parameters.iter().enumerate() {
            match parameter.kind {
                Kind::Number(_) | Kind::Address(_) => words[at] = Word::Is(heads[at]),
                Kind::Handle(object) => words[at] = Word::Is(handles.real(object, heads[at])?),
                Kind::Drop(object) => {
                    words[at] = Word::Is(handles.real(object, heads[at])?);
                    drops = Some((object, heads[at]));
                }
                Kind::Text if heads[at] != NOTHING => {
                    let len = usize::try_from(heads[at]).map_err(|_| Malformed)?;
                    let bytes = reader.bytes(len.checked_add(1).ok_or(Malformed)?)?;
                    if !sys::is_text(bytes) {
                        return Err(Refused::Malformed);
                    }
                    words[at] = Word::At(memory.len());
                    append(&mut memory, bytes);
                }
                Kind::Pointer { way: Way::In | Way::InOut, item, count: many } if heads[at] != 0 => {
                    let many = count(function, many, heads, &inout)?;
                    let from = memory.len();
                    words[at] = Word::At(from);
                    append(&mut memory, reader.bytes(many * item.size())?);
                    inout[at] = memory.get(from).copied();
                    if let Item::Handle(object) = item {
                        for word in &mut memory[from..] {
                            *word = handles.real(object, *word)?;
                        }
                        if edges::parameter(number) == Some(at) {
                            pending = edges::before(session, number, &memory[from..])?;
                        }
                    }
                }
                Kind::Text | Kind::Pointer { .. } | Kind::OutText => {}
                Kind::Other => words[at] = Word::Is(other.ok_or(code::NOT_SUPPORTED)?),
                Kind::Float | Kind::Value(_) => return Err(code::NOT_SUPPORTED.into()),
            }
        }
    }
    for (at, parameter) in parameters.iter().enumerate().filter(|(at, _)| heads[*at] != 0) {
        match parameter.kind {
            Kind::Pointer { way: Way::Out, item, count: many } => {
                let count = count(function, many, heads, &inout)?;
                let from = memory.len();
                words[at] = Word::At(from);
                memory.resize(from + (count * item.size()).div_ceil(8), 0);
                let is_new = function.makes == Some(at);
                returned.push(Returned { at: from, item, count, is_text: false, is_new });
            }
            Kind::Pointer { way: Way::InOut, item, count: many } => {
                let count = count(function, many, heads, &inout)?;
                let Word::At(from) = words[at] else { return Err(Refused::Malformed) };
                returned.push(Returned { at: from, item, count, is_text: false, is_new: false });
            }
            Kind::OutText => {
                words[at] = Word::At(memory.len());
                let (at, item) = (memory.len(), Item::Bytes(8));
                returned.push(Returned { at, item, count: 1, is_text: true, is_new: false });
                memory.push(0);
            }
            _ => {}
        }
    }
    if let Some((at, word)) = ranges::location(number)
        && let Word::At(from) = words[at]
        && memory.get(from + word).is_some_and(|location| *location as u32 > DEVICE)
    {
        // Memory of this host: the program doesn't reach it, and no quota counts it.
        return Err(code::NOT_SUPPORTED.into());
    }
    let checked = Checked::new(session, number, &words[..parameters.len()])?;
    let result = session.quota().make(session.driver(), checked, &mut memory);
    if result == 0 {
        let value = |at: usize| match words[at] {
            Word::Is(value) => value,
            Word::At(at) => memory.get(at).copied().unwrap_or(0),
        };
        let has_primary = |device| session.driver().has_primary(device) == Ok(true);
        if let Some((object, id)) = drops {
            let ended = session.handles().end(object, id);
            session.ended(&ended);
        }
        match effects::of(number) {
            Some((Effect::Retains, _)) => session.handles().retain(value(1), value(0)),
            Some((Effect::ReleasesPrimary, _)) if has_primary(value(0)) => {}
            Some((Effect::ReleasesPrimary | Effect::ResetsPrimary, _)) => {
                let ended = session.handles().end_primary(value(0));
                session.ended(&ended);
            }
            _ => {}
        }
        if Ranges::learns(number) {
            session.ranges().learn(number, value, has_primary);
        }
    }
    let owner = function.owner.map(|at| heads[at]);
    let replied = reply.len();
    for Returned { at, item, count, is_text, is_new } in returned {
        match item {
            _ if is_text => {
                let text = if result == 0 { sys::text(memory[at], NAME) } else { Vec::new() };
                put(reply, text.len() as u64);
                put_bytes(reply, &text);
            }
            Item::Handle(object) => {
                for word in &memory[at..at + count] {
                    let id = if result == 0 { session.give(object, *word, owner, is_new)? } else { 0 };
                    put(reply, id);
                }
            }
            Item::Bytes(bytes) => {
                let words = (bytes * count).div_ceil(8);
                memory[at..at + words].iter().for_each(|word| put(reply, *word));
            }
        }
    }
    if let (0, Some(pending)) = (result, pending) {
        pending.done(session, Reader(&reply[replied..]).word().unwrap_or(0));
    }
    Ok(result)
}

/// Appends bytes as words.
pub(super) fn append(memory: &mut Vec<u64>, bytes: &[u8]) {
    memory.extend(bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    }));
}
