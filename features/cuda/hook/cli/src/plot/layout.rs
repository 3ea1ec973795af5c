//! Where addresses are in a picture: an address space is nearly empty, so gaps are drawn narrower than they are.

/// Where a part of the address space is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Where it is drawn, in units of which [`Layout::height`] has as many as all together.
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Parts of the address space one above the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    /// In order.
    pub(super) extents: Vec<Extent>,
    /// How high all are: about the bytes that they have.
    pub(super) height: f64,
}

impl Layout {
    /// That of ranges, each a start and an end, which may overlap.
    pub(super) fn of(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let mut parts: Vec<(u64, u64)> = Vec::new();
        for (start, end) in ranges {
            match parts.last_mut() {
                Some((_, last)) if *last >= start => *last = end.max(*last),
                _ => parts.push((start, end.max(start))),
            }
        }
        let all: f64 = parts.iter().map(|(start, end)| (end - start) as f64).sum();
        let each = all.max(1.0) / parts.len().max(1) as f64;
        // A gap is drawn as it is up to a part of what parts have on average; a part has a part of that, however small it is.
        let (widest, least) = (each / 6.0, each / 10.0);
        let (mut extents, mut at): (Vec<Extent>, f64) = (Vec::new(), 0.0);
        for (start, end) in parts {
            if let Some(last) = extents.last() {
                at += ((start - last.end) as f64).min(widest);
            }
            let low = at;
            at += (end - start) as f64 + least;
            extents.push(Extent { start, end, low, high: at });
        }
        Self { extents, height: at }
    }

    /// Where an address is drawn; the nearest place that is, if it is in none.
    pub(super) fn at(&self, address: u64) -> f64 {
        let next = self.extents.partition_point(|extent| extent.start <= address);
        let Some(extent) = next.checked_sub(1).and_then(|at| self.extents.get(at)) else { return 0.0 };
        let bytes = (extent.end - extent.start).max(1) as f64;
        let share = ((address - extent.start) as f64 / bytes).min(1.0);
        extent.low + share * (extent.high - extent.low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_narrow_and_order_is_kept() {
        let check = |ranges: &[(u64, u64)], extents: usize, used: f64| {
            let layout = Layout::of(ranges.to_vec());
            assert_eq!(layout.extents.len(), extents, "{layout:?}");
            let drawn: f64 = layout.extents.iter().map(|of| of.high - of.low).sum();
            assert!(drawn >= used * layout.height, "{layout:?}");
            let mut places: Vec<u64> = ranges.iter().flat_map(|(start, end)| [*start, *end]).collect();
            places.sort_unstable();
            let drawn: Vec<f64> = places.iter().map(|place| layout.at(*place)).collect();
            assert!(
                drawn.is_sorted() && drawn.iter().all(|at| (0.0..=layout.height).contains(at)),
                "{drawn:?}"
            );
        };
        check(&[], 0, 0.0);
        check(&[(5, 5)], 1, 1.0);
        check(&[(0, 10), (10, 20), (5, 12)], 1, 1.0);
        check(&[(1 << 46, (1 << 46) + 100), (0, 100)], 2, 0.8);
        check(&[(0, u64::MAX), (u64::MAX, u64::MAX)], 1, 1.0);
        // A tiny one beside a large one can be seen.
        let layout = Layout::of(vec![(0, 1 << 34), (1 << 40, (1 << 40) + 512)]);
        assert!(layout.extents[1].high - layout.extents[1].low > layout.height / 40.0);
        check(&(0..5000).map(|at| (at << 33, (at << 33) + (1 << 20))).collect::<Vec<_>>(), 5000, 0.8);
    }
}
