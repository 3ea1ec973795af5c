//! What a program's handles mean: numbers that the server gave for what it has of the driver.

use rustc_hash::FxHashMap;
use vm_cuda_api::Object;

use super::host::{Charge, HostMemory, cost};
use crate::wire::code;

/// The most handles of a session.
const MOST: usize = 1 << 20;
/// The first number: above the handles that mean default streams.
const FIRST: u64 = 0x1000;
/// Handles that mean default streams, and that are the same on both sides.
const DEFAULT_STREAMS: std::ops::RangeInclusive<u64> = 1..=2;

#[derive(Debug)]
struct Entry {
    object: Object,
    real: u64,
    /// How often it was given: physical memory is released as often.
    count: u64,
    /// Where the parameters of a kernel are, once that was asked.
    layout: Option<Layout>,
    charge: Charge,
}

/// Where a kernel's parameters are: offset and size of each.
pub(super) type Layout = Box<[(u64, u64)]>;

/// Where a handle's entry is. Kernels are given textures, surfaces and conditions as the driver calls them: so are programs, and those have places of
/// their own.
const fn key(object: Object, id: u64) -> (u8, u64) {
    match object {
        Object::Texture => (1, id),
        Object::Surface => (2, id),
        Object::Conditional => (3, id),
        _ => (0, id),
    }
}

/// The handles of a session.
#[derive(Debug)]
pub(super) struct Handles {
    host: HostMemory,
    entries: FxHashMap<(u8, u64), Entry>,
    numbers: FxHashMap<(Object, u64), u64>,
    made: u64,
}

impl Handles {
    pub(super) fn new(host: HostMemory) -> Self {
        Self { host, entries: FxHashMap::default(), numbers: FxHashMap::default(), made: 0 }
    }

    /// Has an object hold this memory too, until it is ended.
    pub(super) fn hold(&mut self, object: Object, id: u64, charge: Charge) {
        if let Some(entry) = self.entries.get_mut(&key(object, id)) {
            entry.charge.merge(charge);
        }
    }

    /// Returns how much memory an object holds.
    pub(super) fn held(&self, object: Object, id: u64) -> u64 {
        self.entries.get(&key(object, id)).map_or(0, |entry| entry.charge.bytes())
    }

    /// What the driver calls it. Nothing is nothing.
    pub(super) fn real(&self, object: Object, id: u64) -> Result<u64, u32> {
        if id == 0 || (object == Object::Stream && DEFAULT_STREAMS.contains(&id)) {
            return Ok(id);
        }
        // A kernel stands for its function of the current context.
        let fits = |entry: &&Entry| {
            entry.object == object || (object == Object::Function && entry.object == Object::Kernel)
        };
        match self.entries.get(&key(object, id)).filter(fits) {
            Some(entry) => Ok(entry.real),
            None if object == Object::Context => Err(code::INVALID_CONTEXT),
            None => Err(code::INVALID_HANDLE),
        }
    }

    /// A function, or a kernel, and where its parameters are, where that is known.
    pub(super) fn function(&self, id: u64) -> Result<(u64, Option<&Layout>), u32> {
        match self.entries.get(&(0, id)) {
            Some(entry) if matches!(entry.object, Object::Function | Object::Kernel) => {
                Ok((entry.real, entry.layout.as_ref()))
            }
            _ => Err(code::INVALID_HANDLE),
        }
    }

    /// Where the parameters of a function, or a kernel, are.
    pub(super) fn lay_out(&mut self, id: u64, layout: Layout) {
        if let Some(entry) = self.entries.get_mut(&(0, id)) {
            entry.layout = Some(layout);
        }
    }

    /// Is it a kernel, of a library?
    pub(super) fn is_kernel(&self, id: u64) -> bool {
        self.entries.get(&(0, id)).is_some_and(|entry| entry.object == Object::Kernel)
    }

    /// The number of what the driver gave.
    pub(super) fn give(&mut self, object: Object, real: u64) -> Result<u64, u32> {
        if real == 0 || (object == Object::Stream && DEFAULT_STREAMS.contains(&real)) {
            return Ok(real);
        }
        if let Some(id) = self.numbers.get(&(object, real)) {
            if let Some(entry) = self.entries.get_mut(&key(object, *id)) {
                entry.count += 1;
            }
            return Ok(*id);
        }
        if self.entries.len() >= MOST {
            return Err(code::OUT_OF_MEMORY);
        }
        let id = if matches!(object, Object::Texture | Object::Surface | Object::Conditional) {
            real
        } else {
            self.made += 1;
            FIRST + 16 * (self.made - 1)
        };
        let charge = self.host.charge(cost(object));
        self.entries.insert(key(object, id), Entry { object, real, count: 1, layout: None, charge });
        self.numbers.insert((object, real), id);
        Ok(id)
    }

    /// Does the program have a handle of what the driver calls so?
    pub(super) fn knows(&self, object: Object, real: u64) -> bool {
        self.numbers.contains_key(&(object, real))
    }

    /// What the driver calls so was ended with something else.
    pub(super) fn end_real(&mut self, object: Object, real: u64) {
        if let Some(id) = self.numbers.get(&(object, real)).copied() {
            self.end(object, id);
        }
    }

    /// It was ended.
    pub(super) fn end(&mut self, object: Object, id: u64) {
        let place = key(object, id);
        let Some(entry) = self.entries.get_mut(&place).filter(|entry| entry.object == object) else { return };
        entry.count -= 1;
        if object != Object::Memory || entry.count == 0 {
            let real = entry.real;
            self.entries.remove(&place);
            self.numbers.remove(&(object, real));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_means_what_it_was_given_for() {
        let mut handles = Handles::new(HostMemory::new(u64::MAX));
        let event = handles.give(Object::Event, 0xabc0).unwrap();
        assert_eq!(handles.give(Object::Event, 0xabc0), Ok(event));
        assert_eq!(handles.real(Object::Event, event), Ok(0xabc0));
        assert_eq!(handles.real(Object::Stream, event), Err(code::INVALID_HANDLE));
        assert_eq!(handles.real(Object::Event, 0xabc0), Err(code::INVALID_HANDLE));
        assert_eq!(handles.real(Object::Context, 77), Err(code::INVALID_CONTEXT));
        assert_eq!(handles.real(Object::Stream, 2), Ok(2));
        assert_eq!(handles.real(Object::Event, 0), Ok(0));
        handles.end(Object::Event, event);
        assert_eq!(handles.real(Object::Event, event), Err(code::INVALID_HANDLE));
        assert!(handles.give(Object::Event, 0xabc0).unwrap() > event);
        // Kernels get these as they are, whatever else has such a number.
        let stream = handles.give(Object::Stream, 0xabc0).unwrap();
        for object in [Object::Texture, Object::Surface, Object::Conditional] {
            for real in [1, stream] {
                assert_eq!(handles.give(object, real), Ok(real));
                assert_eq!(handles.real(object, real), Ok(real));
            }
            assert_eq!(handles.real(Object::Stream, stream), Ok(0xabc0));
            handles.end(object, stream);
            assert_eq!(handles.real(object, stream), Err(code::INVALID_HANDLE));
        }
        assert_eq!(handles.real(Object::Stream, stream), Ok(0xabc0));
        let memory = handles.give(Object::Memory, 5).unwrap();
        handles.give(Object::Memory, 5).unwrap();
        handles.end(Object::Memory, memory);
        assert_eq!(handles.real(Object::Memory, memory), Ok(5));
        handles.end(Object::Memory, memory);
        assert_eq!(handles.real(Object::Memory, memory), Err(code::INVALID_HANDLE));
    }
}
