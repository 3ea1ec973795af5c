//! Which addresses are memory of a device that the program has.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use vm_cuda_api::{FUNCTIONS, number};

use super::host::{Charge, ENTRY, HostMemory};

/// What a call that succeeds does to them: parameters by their places.
#[derive(Clone, Copy, Debug)]
enum Effect {
    /// A range that begins where one says, as long as another says, times a third.
    Gives(Kind, usize, usize, Option<usize>),
    /// The range that begins there is gone.
    Takes(usize),
    /// Maps memory at the address in a parameter.
    Maps(usize),
    /// Unmaps all mappings in a range: the parameters with its address and its length.
    Unmaps(usize, usize),
    /// Unloads a module with its variables.
    Unloads,
    /// Destroys a context with its memory.
    Ends,
    /// Releases the primary context of a device, which may still be retained.
    Releases(usize),
}

/// The object whose end frees a range.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// A context.
    Memory,
    /// A module.
    Variable,
    /// Nothing.
    Reserved,
}

const EFFECTS: [(&str, Effect); 19] = [
    ("cuMemAlloc_v2", Effect::Gives(Kind::Memory, 0, 1, None)),
    ("cuMemAllocPitch_v2", Effect::Gives(Kind::Memory, 0, 1, Some(3))),
    ("cuMemAllocAsync", Effect::Gives(Kind::Memory, 0, 1, None)),
    ("cuMemAllocFromPoolAsync", Effect::Gives(Kind::Memory, 0, 1, None)),
    ("cuMemAddressReserve", Effect::Gives(Kind::Reserved, 0, 1, None)),
    ("cuModuleGetGlobal_v2", Effect::Gives(Kind::Variable, 0, 1, None)),
    ("cuLibraryGetGlobal", Effect::Gives(Kind::Variable, 0, 1, None)),
    ("cuMemFree_v2", Effect::Takes(0)),
    ("cuMemFreeAsync", Effect::Takes(0)),
    ("cuMemAddressFree", Effect::Takes(0)),
    ("cuMemMap", Effect::Maps(0)),
    ("cuMemUnmap", Effect::Unmaps(0, 1)),
    ("cuModuleUnload", Effect::Unloads),
    ("cuLibraryUnload", Effect::Unloads),
    ("cuCtxDestroy_v2", Effect::Ends),
    ("cuDevicePrimaryCtxRelease", Effect::Releases(0)),
    ("cuDevicePrimaryCtxRelease_v2", Effect::Releases(0)),
    ("cuDevicePrimaryCtxReset", Effect::Ends),
    ("cuDevicePrimaryCtxReset_v2", Effect::Ends),
];

static BY_NUMBER: LazyLock<Vec<Option<Effect>>> = LazyLock::new(|| {
    let mut all = vec![None; FUNCTIONS.len()];
    for (name, effect) in EFFECTS {
        for name in [name.to_owned(), format!("{name}_ptsz")] {
            if let Some(at) = number(&name) {
                all[at] = Some(effect);
            }
        }
    }
    all
});

/// Functions with a parameter that points to a `CUmemLocation`, or to what has one: which, and the place in it, in words.
const LOCATIONS: [(&str, usize, usize); 4] = [
    ("cuMemCreate", 2, 1),
    ("cuMemPoolCreate", 1, 1),
    ("cuMemGetDefaultMemPool", 1, 0),
    ("cuMemGetMemPool", 1, 0),
];

static PLACES: LazyLock<Vec<Option<(usize, usize)>>> = LazyLock::new(|| {
    let place = |name: &str| LOCATIONS.iter().find(|(of, ..)| *of == name).map(|(_, at, word)| (*at, *word));
    FUNCTIONS.iter().map(|function| place(&function.name)).collect()
});

/// The parameter of a function that says where memory is to be, and which of its words does.
pub(super) fn location(number: usize) -> Option<(usize, usize)> {
    PLACES.get(number).copied().flatten()
}

/// The ranges of a session.
#[derive(Debug)]
pub(super) struct Ranges {
    host: HostMemory,
    known: BTreeMap<u64, (u64, Kind, Charge)>,
    /// Memory that is mapped.
    mapped: BTreeMap<u64, Charge>,
    /// Those that are another program's, by how often they were opened.
    opened: BTreeMap<u64, u64>,
}

impl Ranges {
    pub(super) fn new(host: HostMemory) -> Self {
        Self { host, known: BTreeMap::new(), mapped: BTreeMap::new(), opened: BTreeMap::new() }
    }

    fn insert(&mut self, at: u64, len: u64, kind: Kind) {
        // A call that was not asked for the address returns none.
        if at == 0 {
            return;
        }
        self.known.insert(at, (len, kind, self.host.charge(ENTRY)));
    }

    /// Returns whether one of them has all bytes of `at..at + len`.
    pub(super) fn has(&self, at: u64, len: u64) -> bool {
        let found = self.known.range(..=at).next_back();
        found.is_some_and(|(start, (size, ..))| size.checked_sub(at - start).is_some_and(|left| len <= left))
    }

    /// Memory was allocated.
    pub(super) fn add(&mut self, at: u64, len: u64) {
        self.insert(at, len, Kind::Memory);
    }

    /// Memory of another program was opened.
    pub(super) fn open(&mut self, at: u64, len: u64) {
        self.insert(at, len, Kind::Memory);
        *self.opened.entry(at).or_default() += 1;
    }

    /// Is memory of another program open there?
    pub(super) fn is_open(&self, at: u64) -> bool {
        self.opened.contains_key(&at)
    }

    /// It was closed, as often as it was opened at last.
    pub(super) fn close(&mut self, at: u64) {
        let Some(count) = self.opened.get_mut(&at) else { return };
        *count -= 1;
        if *count == 0 {
            self.opened.remove(&at);
            self.known.remove(&at);
        }
    }

    /// Does a function that succeeded change them?
    pub(super) fn learns(number: usize) -> bool {
        BY_NUMBER[number].is_some()
    }

    /// Updates the ranges after a call that succeeded. `value` returns a parameter, or what the call returned in its place; `has_primary` whether a
    /// device still has its primary context.
    ///
    /// A range may be dropped too early: the session then asks the driver.
    pub(super) fn learn(
        &mut self,
        number: usize,
        value: impl Fn(usize) -> u64,
        has_primary: impl Fn(u64) -> bool,
    ) {
        match BY_NUMBER[number] {
            Some(Effect::Gives(kind, at, len, times)) => {
                let len = value(len).saturating_mul(times.map_or(1, &value));
                self.insert(value(at), len, kind);
            }
            Some(Effect::Maps(at)) => {
                self.mapped.insert(value(at), self.host.charge(ENTRY));
            }
            Some(Effect::Unmaps(at, len)) => {
                let at = value(at);
                let gone = self.mapped.extract_if(at..at.saturating_add(value(len)), |_, _| true);
                gone.for_each(drop);
            }
            Some(Effect::Unloads) => self.known.retain(|_, (_, kind, _)| *kind != Kind::Variable),
            Some(Effect::Releases(device)) if has_primary(value(device)) => {}
            Some(Effect::Ends | Effect::Releases(_)) => {
                self.known.retain(|_, (_, kind, _)| *kind == Kind::Reserved);
            }
            Some(Effect::Takes(at)) => {
                self.known.remove(&value(at));
            }
            None => {}
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(name: &str) -> usize {
        number(name).unwrap()
    }

    #[test]
    fn a_range_is_there_until_it_is_freed() {
        let mut ranges = Ranges::new(HostMemory::new(u64::MAX));
        let mut learn = |name: &str, values: &[u64], primary| {
            ranges.learn(of(name), |at| values[at], |_| primary);
            let has = |at| ranges.has(at, 16);
            [0x1000, 0x1100, 0x2000, 0x3000, 0x4000].map(has)
        };
        assert_eq!(
            learn("cuMemAllocPitch_v2", &[0x1000, 64, 0, 3], true),
            [true, false, false, false, false]
        );
        assert_eq!(learn("cuMemAllocAsync_ptsz", &[0x2000, 16], true), [true, false, true, false, false]);
        learn("cuModuleGetGlobal_v2", &[0x3000, 16], true);
        assert_eq!(learn("cuMemAddressReserve", &[0x4000, 16], true), [true, false, true, true, true]);
        assert_eq!(learn("cuModuleUnload", &[1], true), [true, false, true, false, true]);
        assert_eq!(learn("cuMemFree_v2", &[0x1000], true), [false, false, true, false, true]);
        assert_eq!(learn("cuDevicePrimaryCtxRelease_v2", &[0], true), [false, false, true, false, true]);
        assert_eq!(learn("cuDevicePrimaryCtxRelease_v2", &[0], false), [false, false, false, false, true]);
        assert_eq!(learn("cuMemAddressFree", &[0x4000, 16], true), [false; 5]);
    }

    #[test]
    fn an_address_that_was_not_asked_for_is_no_range() {
        let mut ranges = Ranges::new(HostMemory::new(u64::MAX));
        ranges.learn(of("cuModuleGetGlobal_v2"), |at| [0, u64::MAX][at], |_| true);
        assert!(!ranges.has(0x800, 16));
    }

    #[test]
    fn opened_memory_is_there_until_it_is_closed_as_often() {
        let mut ranges = Ranges::new(HostMemory::new(u64::MAX));
        ranges.add(0x1000, 16);
        ranges.open(0x3000, 16);
        ranges.open(0x3000, 16);
        ranges.close(0x3000);
        assert!(ranges.has(0x300f, 1) && ranges.is_open(0x3000) && !ranges.is_open(0x1000));
        ranges.close(0x3000);
        ranges.close(0x3000);
        assert!(!ranges.has(0x3000, 1) && !ranges.is_open(0x3000) && ranges.has(0x1000, 16));
    }

    proptest! {
        #[test]
        fn a_range_has_what_is_in_it_alone(at in any::<u64>(), size in any::<u64>(), from in any::<i8>(), len in any::<u64>()) {
            let mut ranges = Ranges::new(HostMemory::new(u64::MAX));
            ranges.add(at, size);
            for start in [at.wrapping_add_signed(from.into()), at.wrapping_add(size).wrapping_add_signed(from.into())] {
                for len in [0, 1, len, size, size.wrapping_add_signed(from.into())] {
                    let [at, size, start, len] = [at, size, start, len].map(u128::from);
                    let expect = start >= at && start + len <= at + size;
                    prop_assert_eq!(ranges.has(start as u64, len as u64), expect);
                }
            }
        }
    }
}
