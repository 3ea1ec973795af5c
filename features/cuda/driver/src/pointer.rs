//! What is known of an address: `cuPointerGetAttribute` and its like.

use crate::{
    error::{Error, Result},
    memory::Kind,
    state::{self, State},
};

/// An attribute's value, in its C type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    Int(u32),
    Long(u64),
    Pair([u64; 2]),
}

const SYNC_MEMOPS: i32 = 6;

/// What an attribute is of an address that is not the driver's: its type matters to who gets it.
pub(crate) fn nothing(attribute: i32) -> Result<Value> {
    match attribute {
        9 => Ok(Value::Int(-2i32 as u32)),
        2 | 6 | 8 | 10 | 13 | 15 | 16 | 21 => Ok(Value::Int(0)),
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20 => Ok(Value::Long(0)),
        5 => Ok(Value::Pair([0; 2])),
        _ => Err(Error::InvalidValue),
    }
}

impl State {
    fn attribute(&self, attribute: i32, at: u64, device: usize) -> Result<Value> {
        nothing(attribute)?;
        let (int, long) = (|value: u32| Ok(Value::Int(value)), |value: u64| Ok(Value::Long(value)));
        if let Some((start, span)) = self.span(at) {
            let physical = self.backing(span);
            let (is_virtual, managed) = (physical.is_some(), self.is_managed(at));
            let pool = if let Kind::Pooled { pool, .. } = span.kind { pool } else { 0 };
            return match attribute {
                1 => long(span.context),
                2 => int(2),
                3 if is_virtual && span.access[device] == 0 => Err(Error::InvalidValue),
                3 => long(at),
                4 if managed => long(at),
                4 => Err(Error::InvalidValue),
                5 if is_virtual => Err(Error::InvalidValue),
                5 => Ok(Value::Pair([if managed { 0 } else { span.buffer }, 0])),
                6 => int((span.sync || managed).into()),
                7 | 20 => long(span.buffer),
                8 => int(managed.into()),
                9 => int(span.device as u32),
                10 => int(matches!(span.kind, Kind::Legacy { .. }).into()),
                11 | 19 => long(start),
                12 if is_virtual => long(self.reservation(at).unwrap_or(span.len)),
                12 | 18 => long(span.len),
                13 => int(1),
                14 => long(physical.map_or(0, |physical| physical.handle_types as u64)),
                16 if is_virtual => int(span.access[device].into()),
                16 => int(3),
                17 => long(pool),
                _ => int(0),
            };
        }
        let (start, allocation) = self.host_span(at).ok_or(Error::InvalidValue)?;
        match attribute {
            1 => long(allocation.context),
            2 => int(1),
            3 | 4 => long(at),
            7 | 20 => long(allocation.buffer),
            9 => int(allocation.device as u32),
            11 | 19 => long(start),
            12 | 18 => long(allocation.len),
            13 => int(1),
            16 => int(3),
            other => nothing(other),
        }
    }
}

/// `cuPointerGetAttribute`.
pub(crate) fn attribute(attribute: i32, at: u64) -> Result<Value> {
    let state = state::lock();
    let context = state.current()?;
    state.attribute(attribute, at, state.contexts[&context].device)
}

/// One of `cuPointerGetAttributes`: what an address has not is 0. No context needs to be current.
pub(crate) fn attribute_or_nothing(attribute: i32, at: u64) -> Result<Value> {
    let state = state::lock();
    let device = match state.current() {
        Err(Error::InvalidContext) => 0,
        context => state.contexts[&context?].device,
    };
    state.attribute(attribute, at, device).or_else(|_| nothing(attribute))
}

/// `cuPointerSetAttribute`: `SYNC_MEMOPS` of memory that is not virtual.
pub(crate) fn set(attribute: i32, at: u64, value: Option<u32>) -> Result {
    let mut state = state::lock();
    state.current()?;
    let value = value.filter(|value| attribute == SYNC_MEMOPS && *value <= 1).ok_or(Error::InvalidValue)?;
    let start = state.span(at).ok_or(Error::InvalidValue)?.0;
    let span = state.spans.get_mut(&start).ok_or(Error::InvalidValue)?;
    if let Kind::Virtual { .. } = span.kind {
        return Err(Error::NotSupported);
    }
    span.sync = value != 0;
    Ok(())
}
