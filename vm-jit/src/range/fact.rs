//! What is known of one integer.

use vm_ir::Scalar;

/// A value is at most an extent of a view plus an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Below {
    /// The parameter that is the view.
    pub view: u16,
    /// The dimension.
    pub dimension: u8,
    /// The offset.
    pub offset: i64,
}

impl Below {
    /// Of a value that a power of two divides, as it does the extent, so does it the offset.
    pub(super) fn round(&mut self, shift: u32) {
        let shift = shift.min(62);
        self.offset = self.offset >> shift << shift;
    }
}

/// What is known of an integer, taken as signed. Of anything else nothing is known, which is a fact too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// It is at least this.
    pub low: i128,
    /// It is at most this.
    pub high: i128,
    /// It is a multiple of 2 to this.
    pub shift: u32,
    /// Extents that it is below.
    pub below: Vec<Below>,
}

/// More facts about extents than this are forgotten.
const MOST_BELOW: usize = 8;

impl Fact {
    /// All that is known of a value by its type.
    pub fn of_type(scalar: Scalar) -> Fact {
        let high = i128::from(scalar.mask() >> 1);
        Fact { low: -high - 1, high, shift: 0, below: Vec::new() }
    }

    /// From `low` to `high`.
    pub fn between(low: i128, high: i128) -> Fact {
        let shift = if low == high { (low as u64).trailing_zeros() } else { 0 };
        Fact { low, high, shift, below: Vec::new() }
    }

    /// Its value, if there is only one.
    pub fn constant(&self) -> Option<i128> {
        (self.low == self.high).then_some(self.low)
    }

    /// Draws the interval in to the multiples of what divides the value. One that holds none is left alone: it is
    /// of code that is never reached.
    pub(super) fn round(&mut self) {
        let shift = self.shift.min(62);
        let high = self.high >> shift << shift;
        let low = -(-self.low >> shift << shift);
        if low <= high {
            (self.low, self.high) = (low, high);
        }
    }

    /// What is known of a value that is one of two.
    pub(super) fn join(&self, other: &Fact) -> Fact {
        let below = self
            .below
            .iter()
            .filter_map(|a| {
                let b = other.below.iter().find(|b| b.view == a.view && b.dimension == a.dimension)?;
                Some(Below { offset: a.offset.max(b.offset), ..*a })
            })
            .collect();
        Fact {
            low: self.low.min(other.low),
            high: self.high.max(other.high),
            shift: self.shift.min(other.shift),
            below,
        }
    }

    /// Adds that it is below an extent.
    pub(super) fn add_below(&mut self, new: Below) {
        let same = |b: &&mut Below| b.view == new.view && b.dimension == new.dimension;
        if let Some(known) = self.below.iter_mut().find(same) {
            known.offset = known.offset.min(new.offset);
        } else if self.below.len() < MOST_BELOW {
            self.below.push(new);
        }
    }

    /// The extents, with another offset; those whose offset overflows are forgotten.
    pub(super) fn shifted(below: &[Below], by: i128) -> Vec<Below> {
        below
            .iter()
            .filter_map(|b| {
                let offset = i64::try_from(i128::from(b.offset) + by).ok()?;
                Some(Below { offset, ..*b })
            })
            .collect()
    }
}
