//! What a program's handles mean: numbers that the server gave for what it has of the driver.

use rustc_hash::{FxHashMap, FxHashSet};
use vm_cuda_api::Object;

use super::host::{Charge, EDGE, ENTRY, HostMemory, REFERENCE, cost};
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
    /// Bytes of the charge that are for edges to this node.
    edges: u64,
    /// Bytes of the charge that are for parameters of graph nodes: by the node's driver handle in an executable graph, by 0 in a node, and by 0 for all
    /// nodes of a copied or captured graph.
    parameters: FxHashMap<u64, u64>,
    /// References of a graph to user objects: how many to each that the program had it retain, and how many in all came with copies of graphs.
    retained: FxHashMap<u64, u64>,
    copied: u64,
    /// Its owners, and the objects that it owns.
    owners: Vec<Key>,
    owned: FxHashSet<Key>,
}

/// Where a kernel's parameters are: offset and size of each.
pub(super) type Layout = Box<[(u64, u64)]>;

/// The key of an entry.
type Key = (u8, u64);

/// Where a handle's entry is. Kernels are given textures, surfaces and conditions as the driver calls them: so are programs, and those have places of
/// their own.
const fn key(object: Object, id: u64) -> Key {
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
    entries: FxHashMap<Key, Entry>,
    numbers: FxHashMap<(Object, u64), u64>,
    made: u64,
    /// Functions of unknown libraries. They end when any library is unloaded.
    strays: FxHashSet<Key>,
    /// The driver's handle of each device's primary context.
    primaries: FxHashMap<u64, u64>,
    /// References to user objects of unknown graphs: of those that were launched into captures, or set as a node's. Any graph may be a copy of those.
    stray_references: u64,
    /// Was there ever a reference?
    has_references: bool,
}

impl Handles {
    pub(super) fn new(host: HostMemory) -> Self {
        let (entries, numbers) = (FxHashMap::default(), FxHashMap::default());
        Self {
            host,
            entries,
            numbers,
            made: 0,
            strays: FxHashSet::default(),
            primaries: FxHashMap::default(),
            stray_references: 0,
            has_references: false,
        }
    }

    /// Has an object hold this memory too, until it is ended.
    pub(super) fn hold(&mut self, object: Object, id: u64, charge: Charge) {
        if let Some(entry) = self.entries.get_mut(&key(object, id)) {
            entry.charge.merge(charge);
        }
    }

    /// Charges edges to the node that they lead to.
    pub(super) fn add_edges(&mut self, node: u64, charge: Charge) {
        if let Some(entry) = self.entries.get_mut(&key(Object::Node, node)) {
            entry.edges += charge.bytes();
            entry.charge.merge(charge);
        }
    }

    /// Returns to the budget what a node has for more than this many edges.
    pub(super) fn keep_edges(&mut self, node: u64, count: u64) {
        if let Some(entry) = self.entries.get_mut(&key(Object::Node, node)) {
            let less = entry.edges.saturating_sub(EDGE.saturating_mul(count));
            entry.edges -= less;
            entry.charge.shrink(entry.charge.bytes() - less);
        }
    }

    /// Returns how many bytes to charge to an object so that the charge for parameters `of` a node covers so many.
    pub(super) fn growth(&self, object: Object, id: u64, of: u64, bytes: u64) -> u64 {
        let entry = self.entries.get(&key(object, id));
        match entry.and_then(|entry| entry.parameters.get(&of)) {
            Some(charged) => bytes.saturating_sub(*charged),
            None if bytes == 0 => 0,
            None => bytes.saturating_add(ENTRY),
        }
    }

    /// Adds a charge for parameters `of` a node to an object.
    pub(super) fn add_parameters(&mut self, object: Object, id: u64, of: u64, charge: Charge) {
        if let Some(entry) = self.entries.get_mut(&key(object, id)).filter(|_| charge.bytes() > 0) {
            let charged = entry.parameters.entry(of).or_default();
            // The first charge includes this entry.
            *charged += charge.bytes() - if *charged == 0 { ENTRY } else { 0 };
            entry.charge.merge(charge);
        }
    }

    /// Has a graph retain a user object; the charge is for one [`REFERENCE`].
    pub(super) fn retain_user_object(&mut self, graph: u64, object: u64, count: u64, charge: Charge) {
        let Some(entry) = self.entries.get_mut(&key(Object::Graph, graph)) else { return };
        self.has_references = true;
        let retained = entry.retained.entry(object).or_default();
        if *retained == 0 {
            entry.charge.merge(charge);
        }
        *retained = retained.saturating_add(count);
    }

    /// Has a graph release a user object that it retained so often.
    pub(super) fn release_user_object(&mut self, graph: u64, object: u64, count: u64) {
        let Some(entry) = self.entries.get_mut(&key(Object::Graph, graph)) else { return };
        let Some(retained) = entry.retained.get_mut(&object) else { return };
        *retained = retained.saturating_sub(count);
        if *retained == 0 {
            entry.retained.remove(&object);
            let left = entry.charge.bytes().saturating_sub(REFERENCE);
            entry.charge.shrink(left);
        }
    }

    /// Adds references to user objects that a graph has got as a copy of another, or with a graph within it.
    pub(super) fn copy_references(&mut self, object: Object, id: u64, count: u64) {
        if let Some(entry) = self.entries.get_mut(&key(object, id)) {
            entry.copied = entry.copied.saturating_add(count);
        }
    }

    /// A graph that runs was launched into a capture.
    pub(super) fn capture_references(&mut self, exec: u64) {
        let copied = self.entries.get(&key(Object::Exec, exec)).map_or(0, |entry| entry.copied);
        self.stray_references(copied);
    }

    /// Adds references to user objects that any graph may have got.
    pub(super) fn stray_references(&mut self, count: u64) {
        self.stray_references = self.stray_references.saturating_add(count);
    }

    pub(super) fn has_references(&self) -> bool {
        self.has_references
    }

    /// Returns an upper bound of a graph's references to user objects; `real` is what the driver calls it.
    pub(super) fn references(&self, real: u64) -> u64 {
        let entry = self.id(Object::Graph, real).and_then(|id| self.entries.get(&key(Object::Graph, id)));
        let own = entry.map_or(0, |entry| entry.copied.saturating_add(entry.retained.len() as u64));
        own.saturating_add(self.stray_references)
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

    /// Returns the number of a new object. An earlier entry with the same driver handle is of an object that has ended, and is removed.
    pub(super) fn make(&mut self, object: Object, real: u64) -> Result<u64, u32> {
        if !(object == Object::Stream && DEFAULT_STREAMS.contains(&real)) {
            self.end_real(object, real);
        }
        self.give(object, real)
    }

    /// Returns the number of a driver handle.
    pub(super) fn id(&self, object: Object, real: u64) -> Option<u64> {
        self.numbers.get(&(object, real)).copied()
    }

    /// Has a function end when any library is unloaded.
    pub(super) fn stray(&mut self, function: u64) {
        if self.entries.contains_key(&(0, function)) {
            self.strays.insert((0, function));
        }
    }

    /// Remembers the primary context of a device.
    pub(super) fn retain(&mut self, device: u64, context: u64) {
        self.primaries.insert(device, context);
    }

    /// Ends all objects of a device's primary context, and returns their driver handles.
    pub(super) fn end_primary(&mut self, device: u64) -> Vec<(Object, u64)> {
        let context = self.primaries.get(&device).and_then(|real| self.id(Object::Context, *real));
        context.map_or_else(Vec::new, |context| self.end_owned(Object::Context, context))
    }

    /// Makes one object the owner of another. Does nothing if either is unknown.
    pub(super) fn own(&mut self, owner: (Object, u64), owned: (Object, u64)) {
        let (owner, owned) = (key(owner.0, owner.1), key(owned.0, owned.1));
        if owner != owned
            && self.entries.contains_key(&owner)
            && let Some(entry) = self.entries.get_mut(&owned)
        {
            entry.owners.push(owner);
            if let Some(entry) = self.entries.get_mut(&owner) {
                entry.owned.insert(owned);
            }
        }
    }

    /// Returns the kind of an object.
    pub(super) fn object(&self, id: u64) -> Option<Object> {
        self.entries.get(&(0, id)).map(|entry| entry.object)
    }

    /// Returns the library of a function, if a library's kernel has it.
    pub(super) fn library_of(&self, function: u64) -> Option<u64> {
        let owner = |key: Key, object| {
            let owners = &self.entries.get(&key)?.owners;
            owners
                .iter()
                .copied()
                .find(|owner| self.entries.get(owner).is_some_and(|entry| entry.object == object))
        };
        Some(owner(owner((0, function), Object::Kernel)?, Object::Library)?.1)
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
        let (parameters, owners, owned) = (FxHashMap::default(), Vec::new(), FxHashSet::default());
        self.entries.insert(
            key(object, id),
            Entry {
                object,
                real,
                count: 1,
                layout: None,
                charge,
                edges: 0,
                parameters,
                retained: FxHashMap::default(),
                copied: 0,
                owners,
                owned,
            },
        );
        self.numbers.insert((object, real), id);
        Ok(id)
    }

    /// Does the program have a handle of what the driver calls so?
    pub(super) fn knows(&self, object: Object, real: u64) -> bool {
        self.numbers.contains_key(&(object, real))
    }

    /// Ends an object that the driver has destroyed together with another.
    pub(super) fn end_real(&mut self, object: Object, real: u64) -> Vec<(Object, u64)> {
        self.id(object, real).map_or_else(Vec::new, |id| self.end(object, id))
    }

    /// Ends an object and all that it owns, and returns their driver handles.
    pub(super) fn end(&mut self, object: Object, id: u64) -> Vec<(Object, u64)> {
        let place = key(object, id);
        let Some(entry) = self.entries.get_mut(&place).filter(|entry| entry.object == object) else {
            return Vec::new();
        };
        entry.count -= 1;
        if object == Object::Memory && entry.count > 0 { Vec::new() } else { self.end_all(vec![place]) }
    }

    /// Ends all that an object owns, but not the object: a primary context keeps its handle when it becomes active again.
    fn end_owned(&mut self, object: Object, id: u64) -> Vec<(Object, u64)> {
        let entry = self.entries.get_mut(&key(object, id));
        let owned = entry.map(|entry| std::mem::take(&mut entry.owned)).unwrap_or_default();
        self.end_all(owned.into_iter().collect())
    }

    fn end_all(&mut self, mut left: Vec<Key>) -> Vec<(Object, u64)> {
        let mut ended = Vec::new();
        while let Some(place) = left.pop() {
            let Some(entry) = self.entries.remove(&place) else { continue };
            self.numbers.remove(&(entry.object, entry.real));
            for owner in entry.owners {
                if let Some(owner) = self.entries.get_mut(&owner) {
                    owner.owned.remove(&place);
                }
            }
            left.extend(entry.owned);
            self.strays.remove(&place);
            if entry.object == Object::Library {
                left.extend(self.strays.drain());
            }
            ended.push((entry.object, entry.real));
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_object_owns_ends_with_it() {
        use Object::{Context, Function, Kernel, Library, Module};
        let mut handles = Handles::new(HostMemory::new(u64::MAX));
        let context = handles.give(Context, 0xc0).unwrap();
        let library = handles.give(Library, 0x10).unwrap();
        let kernel = handles.give(Kernel, 0x20).unwrap();
        let function = handles.give(Function, 0x30).unwrap();
        handles.own((Library, library), (Kernel, kernel));
        handles.own((Kernel, kernel), (Function, function));
        handles.own((Context, context), (Function, function));
        assert_eq!(handles.library_of(function), Some(library));
        // The device's primary context becomes inactive.
        assert_eq!(handles.end_owned(Context, context), [(Function, 0x30)]);
        assert_eq!(handles.real(Context, context), Ok(0xc0));
        let again = handles.give(Function, 0x30).unwrap();
        assert!(again > function);
        handles.own((Kernel, kernel), (Function, again));
        handles.own((Context, context), (Function, again));
        assert_eq!(handles.end(Library, library), [(Library, 0x10), (Kernel, 0x20), (Function, 0x30)]);
        assert_eq!(handles.real(Function, again), Err(code::INVALID_HANDLE));
        assert_eq!(handles.end_owned(Context, context), []);
        // The driver reuses the handle of a module whose end was not noticed.
        let module = handles.make(Module, 0x40).unwrap();
        let function = handles.give(Function, 0x50).unwrap();
        handles.own((Module, module), (Function, function));
        assert!(handles.make(Module, 0x40).unwrap() > module);
        assert_eq!(handles.real(Function, function), Err(code::INVALID_HANDLE));
    }

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
