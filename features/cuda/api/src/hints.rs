//! Hints about managed memory: `cuMemAdvise` and `cuMemPrefetchAsync` set them, and `cuMemRangeGetAttribute` returns them (CUDA driver API,
//! "Unified Addressing").

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Hints apply to whole pages of the host, in bytes.
const PAGE: u64 = 4096;

/// A `CUmemLocation`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Location {
    kind: u32,
    id: i32,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_INVALID`.
    const NONE: Self = Self { kind: 0, id: 0 };
    /// The host: `CU_MEM_LOCATION_TYPE_HOST`.
    pub const HOST: Self = Self { kind: 2, id: 0 };

    /// The location of a device ordinal, or of the host for −1 (`CU_DEVICE_CPU`), as functions before CUDA 12.2 pass it.
    #[must_use]
    pub fn of_device(device: i32) -> Self {
        if device == -1 { Self::HOST } else { Self { kind: 1, id: device } }
    }

    /// Reads a `CUmemLocation` that is passed by value: the lower half of the word is its type, the upper half its ID. `None` for an unknown type.
    #[must_use]
    pub fn parse(word: u64) -> Option<Self> {
        let kind = word as u32;
        (1..=4).contains(&kind).then_some(Self { kind, id: (word >> 32) as i32 })
    }

    /// The device. `None` for the host and its NUMA nodes.
    #[must_use]
    pub fn device(self) -> Option<i32> {
        (self.kind == 1).then_some(self.id)
    }

    /// The number that functions before CUDA 12.2 return: a device ordinal, −1 for the host (`CU_DEVICE_CPU`), or −2 for no location
    /// (`CU_DEVICE_INVALID`).
    fn number(self) -> i32 {
        match self.kind {
            0 => INVALID,
            1 => self.id,
            _ => -1,
        }
    }
}

/// `CU_DEVICE_INVALID`.
const INVALID: i32 = -2;

/// The hints of a page.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Hint {
    read_mostly: bool,
    preferred: Option<Location>,
    accessed_by: BTreeSet<i32>,
    prefetched: Option<Location>,
}

/// The hints of all managed memory.
#[derive(Clone, Debug, Default)]
pub struct Hints {
    /// The hint of each range, by the range's start. A range ends where the next one begins.
    from: BTreeMap<u64, Hint>,
}

impl Hints {
    /// Applies a `CUmem_advise` to a range. Returns whether the advice is known.
    pub fn advise(&mut self, range: Range<u64>, advice: i32, location: Location) -> bool {
        let by = location.number();
        match advice {
            1 | 2 => self.change(range, |hint| hint.read_mostly = advice == 1),
            3 => self.change(range, |hint| hint.preferred = Some(location)),
            4 => self.change(range, |hint| hint.preferred = None),
            5 => self.change(range, |hint| {
                hint.accessed_by.insert(by);
            }),
            6 => self.change(range, |hint| {
                hint.accessed_by.remove(&by);
            }),
            _ => return false,
        }
        true
    }

    /// Whether a `CUmem_advise` ignores its location.
    #[must_use]
    pub fn ignores_location(advice: i32) -> bool {
        matches!(advice, 1 | 2 | 4)
    }

    /// Records the location that a range was prefetched to.
    pub fn prefetch(&mut self, range: Range<u64>, to: Location) {
        self.change(range, |hint| hint.prefetched = Some(to));
    }

    /// Clears the hints of a range that is freed.
    pub fn forget(&mut self, range: Range<u64>) {
        self.change(range, |hint| *hint = Hint::default());
    }

    /// Returns the value of a `CUmem_range_attribute` that all pages of a range share, as `len` bytes of 32-bit numbers. `None` if the attribute
    /// is unknown or has another length.
    #[must_use]
    pub fn attribute(&self, range: Range<u64>, attribute: i32, len: usize) -> Option<Vec<i32>> {
        if len == 0 || !len.is_multiple_of(4) || attribute != 3 && len != 4 {
            return None;
        }
        let hints = self.of(range);
        let same = |of: fn(&Hint) -> Option<Location>| {
            let first = hints.first().and_then(&of);
            first.filter(|_| hints.iter().all(|hint| of(hint) == first)).unwrap_or(Location::NONE)
        };
        let preferred = same(|hint| hint.preferred);
        let prefetched = same(|hint| hint.prefetched);
        Some(match attribute {
            1 => vec![hints.iter().all(|hint| hint.read_mostly).into()],
            2 => vec![preferred.number()],
            3 => {
                let mut by = hints.first().map(|hint| hint.accessed_by.clone()).unwrap_or_default();
                by.retain(|device| hints.iter().all(|hint| hint.accessed_by.contains(device)));
                by.into_iter().chain(std::iter::repeat(INVALID)).take(len / 4).collect()
            }
            4 => vec![prefetched.number()],
            5 => vec![preferred.kind as i32],
            6 => vec![preferred.id],
            7 => vec![prefetched.kind as i32],
            8 => vec![prefetched.id],
            _ => return None,
        })
    }

    /// Returns the hints of the pages in a range.
    fn of(&self, range: Range<u64>) -> Vec<Hint> {
        let first =
            self.from.range(..=range.start).next_back().map(|(_, hint)| hint.clone()).unwrap_or_default();
        let rest = self.from.range(range).map(|(_, hint)| hint.clone());
        std::iter::once(first).chain(rest).collect()
    }

    /// Changes the hints of all pages that overlap a range.
    fn change(&mut self, range: Range<u64>, mut change: impl FnMut(&mut Hint)) {
        let start = range.start / PAGE * PAGE;
        let end = range.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        for at in [start, end] {
            let hint = self.at(at);
            self.from.entry(at).or_insert(hint);
        }
        self.from.range_mut(start..end).for_each(|(_, hint)| change(hint));
        // Merge ranges with equal hints.
        let mut before =
            self.from.range(..start).next_back().map(|(_, hint)| hint.clone()).unwrap_or_default();
        let touched: Vec<u64> = self.from.range(start..=end).map(|(at, _)| *at).collect();
        for at in touched {
            if self.from[&at] == before {
                self.from.remove(&at);
            } else {
                before = self.from[&at].clone();
            }
        }
    }

    fn at(&self, at: u64) -> Hint {
        self.from.range(..=at).next_back().map(|(_, hint)| hint.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Location = Location { kind: 1, id: 1 };

    #[test]
    fn an_attribute_is_what_all_pages_have() {
        let mut hints = Hints::default();
        let pages = |range: Range<u64>| range.start * PAGE..range.end * PAGE;
        assert!(hints.advise(pages(2..6), 3, DEVICE));
        assert!(hints.advise(PAGE * 3 + 7..PAGE * 3 + 8, 1, Location::HOST));
        hints.prefetch(pages(0..4), Location::HOST);
        let get = |hints: &Hints, range, attribute| hints.attribute(pages(range), attribute, 4).unwrap()[0];
        assert_eq!([2..6, 3..4, 1..6, 5..7].map(|range| get(&hints, range, 2)), [1, 1, -2, -2]);
        assert_eq!([3..4, 2..4, 0..1].map(|range| get(&hints, range, 1)), [1, 0, 0]);
        assert_eq!([0..4, 3..5].map(|range| get(&hints, range, 4)), [-1, -2]);
        assert_eq!([5, 6, 7, 8].map(|attribute| get(&hints, 2..4, attribute)), [1, 1, 2, 0]);
        hints.forget(0..u64::MAX);
        assert!(hints.from.is_empty());
        assert!(!hints.advise(0..1, 7, DEVICE));
    }

    #[test]
    fn devices_that_access_are_listed_as_far_as_there_is_room() {
        let mut hints = Hints::default();
        for device in [1, -1, 0] {
            assert!(hints.advise(0..PAGE, 5, Location::of_device(device)));
        }
        assert_eq!(hints.attribute(0..PAGE, 3, 8), Some(vec![-1, 0]));
        assert_eq!(hints.attribute(0..PAGE, 3, 16), Some(vec![-1, 0, 1, -2]));
        assert!(hints.advise(0..1, 6, Location::of_device(0)));
        assert_eq!(hints.attribute(0..PAGE, 3, 8), Some(vec![-1, 1]));
        assert_eq!(hints.attribute(0..2 * PAGE, 3, 8), Some(vec![-2, -2]));
        for (attribute, len) in [(3, 0), (3, 7), (1, 8), (0, 4), (9, 4)] {
            assert_eq!(hints.attribute(0..PAGE, attribute, len), None);
        }
    }
}
