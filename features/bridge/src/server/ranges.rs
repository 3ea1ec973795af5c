//! Which addresses are memory of a device that the program has.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use vm_cuda_api::{FUNCTIONS, names::base, number};

/// What a call that succeeds does to them: parameters by their places.
#[derive(Clone, Copy, Debug)]
enum Effect {
    /// A range that begins where one says, as long as another says, times a third.
    Gives(usize, usize, Option<usize>),
    /// The range that begins there is gone.
    Takes(usize),
}

const EFFECTS: [(&str, Effect); 10] = [
    ("cuMemAlloc_v2", Effect::Gives(0, 1, None)),
    ("cuMemAllocPitch_v2", Effect::Gives(0, 1, Some(3))),
    ("cuMemAllocAsync", Effect::Gives(0, 1, None)),
    ("cuMemAllocFromPoolAsync", Effect::Gives(0, 1, None)),
    ("cuMemAddressReserve", Effect::Gives(0, 1, None)),
    ("cuModuleGetGlobal_v2", Effect::Gives(0, 1, None)),
    ("cuLibraryGetGlobal", Effect::Gives(0, 1, None)),
    ("cuMemFree_v2", Effect::Takes(0)),
    ("cuMemFreeAsync", Effect::Takes(0)),
    ("cuMemAddressFree", Effect::Takes(0)),
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

static COPIES: LazyLock<Vec<bool>> = LazyLock::new(|| {
    let copies = |name: &str| ["cuMemcpy", "cuMemset"].iter().any(|begin| base(name).starts_with(begin));
    FUNCTIONS.iter().map(|function| copies(&function.name)).collect()
});

/// Does a function copy, or fill, memory?
pub(super) fn copies(number: usize) -> bool {
    COPIES.get(number).copied().unwrap_or(false)
}

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
#[derive(Debug, Default)]
pub(super) struct Ranges {
    known: BTreeMap<u64, u64>,
    /// Those that are another program's, by how often they were opened.
    opened: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Is it an address in one?
    pub(super) fn has(&self, at: u64) -> bool {
        self.known.range(..=at).next_back().is_some_and(|(start, len)| at - start < *len)
    }

    /// Memory was allocated.
    pub(super) fn add(&mut self, at: u64, len: u64) {
        self.known.insert(at, len);
    }

    /// Memory of another program was opened.
    pub(super) fn open(&mut self, at: u64, len: u64) {
        self.known.insert(at, len);
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

    /// Learns from a call that succeeded: what its parameters were, and what it returned in their places.
    pub(super) fn learn(&mut self, number: usize, value: impl Fn(usize) -> u64) {
        match BY_NUMBER[number] {
            Some(Effect::Gives(at, len, times)) => {
                let len = value(len).saturating_mul(times.map_or(1, &value));
                self.known.insert(value(at), len);
            }
            Some(Effect::Takes(at)) => {
                self.known.remove(&value(at));
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_there_until_it_is_freed() {
        let mut ranges = Ranges::default();
        let call = |name: &str| number(name).unwrap();
        ranges.learn(call("cuMemAllocPitch_v2"), |at| [0x1000, 64, 0, 3][at]);
        ranges.learn(call("cuMemAllocAsync_ptsz"), |at| [0x2000, 16][at]);
        assert!(ranges.has(0x1000) && ranges.has(0x10bf) && !ranges.has(0x10c0) && ranges.has(0x200f));
        ranges.open(0x3000, 16);
        ranges.open(0x3000, 16);
        ranges.close(0x3000);
        assert!(ranges.has(0x300f) && ranges.is_open(0x3000) && !ranges.is_open(0x1000));
        ranges.close(0x3000);
        ranges.close(0x3000);
        assert!(!ranges.has(0x3000) && !ranges.is_open(0x3000));
        ranges.learn(call("cuMemFree_v2"), |_| 0x1000);
        assert!(!ranges.has(0x1000) && !ranges.has(0));
        assert!(copies(call("cuMemsetD8_v2_ptds")) && !copies(call("cuMemFree_v2")));
    }
}
