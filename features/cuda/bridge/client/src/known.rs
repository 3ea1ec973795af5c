//! A cache of the driver's answers and of attributes that were set, by object. Entries end with their object.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The offset and the size of each parameter of a kernel.
pub(crate) type Layout = Arc<[(usize, usize)]>;

/// The most answers that are kept. When a program asks for more, all are dropped.
const MOST: usize = 1 << 16;

/// The cache, by handle. The server never reuses a handle.
#[derive(Default)]
pub(crate) struct Known {
    objects: HashMap<u64, Object>,
    /// The number of answers that are kept.
    count: usize,
}

#[derive(Default)]
struct Object {
    layout: Option<Layout>,
    /// The answers, by question.
    answers: HashMap<Vec<u8>, Arc<[u8]>>,
    /// The last value of each attribute, by the call that sets it and the call's other arguments.
    set: HashMap<(usize, Vec<usize>), usize>,
    /// The objects that it owns.
    owned: HashSet<u64>,
}

impl Known {
    /// Makes one object the owner of another.
    pub(crate) fn own(&mut self, owner: u64, owned: u64) {
        if owner != owned {
            self.objects.entry(owner).or_default().owned.insert(owned);
        }
    }

    pub(crate) fn layout(&self, function: u64) -> Option<Layout> {
        self.objects.get(&function)?.layout.clone()
    }

    pub(crate) fn lay_out(&mut self, function: u64, layout: Layout) {
        self.objects.entry(function).or_default().layout = Some(layout);
    }

    /// Returns the answer to a question about an object.
    pub(crate) fn answer(&self, object: u64, question: &[u8]) -> Option<Arc<[u8]>> {
        self.objects.get(&object)?.answers.get(question).cloned()
    }

    pub(crate) fn keep(&mut self, object: u64, question: Vec<u8>, answer: Arc<[u8]>) {
        if self.count >= MOST {
            self.forget_answers();
        }
        let answers = &mut self.objects.entry(object).or_default().answers;
        self.count += usize::from(answers.insert(question, answer).is_none());
    }

    /// Drops all answers: the driver may give others from now on.
    pub(crate) fn forget_answers(&mut self) {
        self.objects.values_mut().for_each(|object| object.answers.clear());
        self.count = 0;
    }

    /// Returns whether the last call with these arguments set the same value.
    pub(crate) fn is_set(&self, object: u64, call: &(usize, Vec<usize>), value: usize) -> bool {
        self.objects.get(&object).is_some_and(|object| object.set.get(call) == Some(&value))
    }

    /// Drops what other calls have set of an object: this call may change it.
    pub(crate) fn unset(&mut self, object: u64, call: &(usize, Vec<usize>)) {
        if let Some(object) = self.objects.get_mut(&object) {
            object.set.retain(|(number, of), _| *number == call.0 && *of != call.1);
        }
    }

    pub(crate) fn set(&mut self, object: u64, call: (usize, Vec<usize>), value: usize) {
        self.objects.entry(object).or_default().set.insert(call, value);
    }

    /// Ends an object and all that it owns, and returns them.
    pub(crate) fn end(&mut self, object: u64) -> HashSet<u64> {
        let (mut ended, mut left) = (HashSet::new(), vec![object]);
        while let Some(object) = left.pop() {
            if ended.insert(object)
                && let Some(of) = self.objects.remove(&object)
            {
                self.count -= of.answers.len();
                left.extend(of.owned);
            }
        }
        ended
    }
}

/// Memory of a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Memory {
    /// Its length in bytes.
    pub(crate) len: u64,
    /// The objects with which it ends; 0 is none.
    pub(crate) owners: [u64; 2],
    /// The context that it was allocated in on its own device, whose kernels reach it at its address; 0 if there is none.
    pub(crate) home: u64,
}

/// Drivers round allocations up to a multiple of at least so many bytes.
const ROUNDED: u64 = 512;

/// Memory of devices, by address.
#[derive(Default)]
pub(crate) struct Devices(BTreeMap<u64, Memory>);

impl Devices {
    /// Adds memory. Entries that overlap it are of memory that has ended, and are removed.
    pub(crate) fn insert(&mut self, at: u64, memory: Memory) {
        let end = at.saturating_add(memory.len);
        while let Some(start) = self.0.range(..end).next_back().map(|(start, _)| *start) {
            if start < at && self.0[&start].len <= at - start {
                break;
            }
            self.0.remove(&start);
        }
        if at != 0 {
            self.0.insert(at, memory);
        }
    }

    pub(crate) fn remove(&mut self, at: u64) -> Option<Memory> {
        self.0.remove(&at)
    }

    pub(crate) fn has(&self, at: u64) -> bool {
        self.0.range(..=at).next_back().is_some_and(|(start, memory)| at - start < memory.len)
    }

    /// Returns whether kernels of a context reach what is at an address by that address. `false` if only the driver knows.
    pub(crate) fn is_at_home(&self, at: u64, context: u64) -> bool {
        let found = self.0.range(..=at).next_back();
        found.is_some_and(|(start, memory)| at - start < memory.len && memory.home == context && context != 0)
    }

    /// Returns whether the memory at an address is known and ends before `len` bytes of it.
    pub(crate) fn ends_before(&self, at: u64, len: u64) -> bool {
        let mut next = at;
        // A copy may cross adjacent reservations.
        while let Some((start, memory)) = self.0.range(..=next).next_back()
            && next - start < memory.len
        {
            let rounded = memory.len.checked_next_multiple_of(ROUNDED).unwrap_or(memory.len);
            next = start.saturating_add(rounded);
            if next - at >= len {
                return false;
            }
        }
        next != at
    }

    /// Removes the memory of objects that have ended.
    pub(crate) fn end(&mut self, ended: &HashSet<u64>) {
        self.0.retain(|_, memory| !memory.owners.iter().any(|owner| ended.contains(owner)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_ends_with_the_owner() {
        let (context, module, function) = (1, 2, 3);
        let mut known = Known::default();
        known.own(context, module);
        known.own(module, function);
        known.lay_out(function, Layout::from([(0, 8)]));
        known.keep(function, vec![7], Arc::from([1]));
        known.keep(context, vec![7], Arc::from([2]));
        known.set(function, (5, vec![1]), 9);
        assert!(known.is_set(function, &(5, vec![1]), 9));
        assert_eq!(known.end(module), HashSet::from([module, function]));
        assert_eq!(known.layout(function), None);
        assert_eq!(known.answer(function, &[7]), None);
        assert!(!known.is_set(function, &(5, vec![1]), 9));
        assert_eq!(known.answer(context, &[7]).as_deref(), Some(&[2][..]));
        assert_eq!(known.count, 1);
        assert_eq!(known.end(context), HashSet::from([context, module]));
        assert_eq!((known.count, known.objects.len()), (0, 0));
    }

    #[test]
    fn answers_are_bounded() {
        let mut known = Known::default();
        for question in 0..2 * MOST as u64 + 1 {
            known.keep(question % 3, question.to_ne_bytes().to_vec(), Arc::from([]));
            assert!(known.count <= MOST);
        }
        assert_eq!(known.count, 1);
    }

    #[test]
    fn memory_takes_the_place_of_what_was_there() {
        let mut devices = Devices::default();
        let memory = |len, owner| Memory { len, owners: [owner, 0], home: owner };
        devices.insert(0x1000, memory(0x100, 1));
        devices.insert(0x2000, memory(0x1000, 2));
        devices.insert(0x3000, memory(0x10, 1));
        // The variable of a module that was unloaded.
        devices.insert(0x800, memory(0x1000, 3));
        assert!([0x800, 0x10ff, 0x17ff, 0x2000].into_iter().all(|at| devices.has(at)));
        assert!(![0x1800, 0x7ff].into_iter().any(|at| devices.has(at)));
        assert!(
            devices.is_at_home(0x2fff, 2) && !devices.is_at_home(0x2fff, 1) && !devices.is_at_home(0x1800, 3)
        );
        let ends_before = |devices: &Devices, at, len| devices.ends_before(at, len);
        // Two behind one another, the last of which is rounded up.
        assert!([0x1000, 0x1010, 0x1200].iter().all(|len| !ends_before(&devices, 0x2000, *len)));
        assert!([0x1201, u64::MAX].iter().all(|len| ends_before(&devices, 0x2000, *len)));
        assert!(!ends_before(&devices, 0x5000, u64::MAX), "unknown memory");
        devices.end(&HashSet::from([1, 3]));
        assert!(![0x800, 0x3000].into_iter().any(|at| devices.has(at)));
        assert_eq!(devices.remove(0x2000), Some(memory(0x1000, 2)));
    }
}
