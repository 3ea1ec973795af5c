//! Where elements are: index arithmetic, bounds, and the bytes behind a place.

use super::launch::Tensor;
use super::race::Shadow;
use crate::valid::Trust;

/// Memory behind a view, a shared or a local array.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) tensor: Tensor,
    pub(super) shadow: Shadow,
    /// Is it a shared or a local array?
    pub(super) shared: bool,
}

impl Memory {
    pub(super) fn new(tensor: Tensor, shared: bool, track: bool) -> Memory {
        let shadow = Shadow::new(if track { tensor.len() } else { 0 });
        Memory { tensor, shadow, shared }
    }

    /// The number of the element at `indices`, `lane` further in the last dimension; `None` out of bounds.
    /// A guest's index into a shared array is clamped instead: each to the last one that leaves room for
    /// `lanes`, a negative one as if it were huge.
    pub(super) fn element(&self, indices: &[i64], lane: u8, lanes: u8, trust: Trust) -> Option<u64> {
        let last = indices.len().checked_sub(1)?;
        let mut element = 0u64;
        for (dimension, (index, extent)) in indices.iter().zip(&self.tensor.extents).enumerate() {
            let in_row = dimension == last;
            let index = if self.shared && trust == Trust::Guest {
                let room = if in_row { u64::from(lanes) } else { 1 };
                let first = (*index as u64).min(extent.saturating_sub(room));
                first + if in_row { u64::from(lane) } else { 0 }
            } else {
                index.checked_add(if in_row { i64::from(lane) } else { 0 })? as u64
            };
            if index >= *extent {
                return None;
            }
            element = element * extent + index;
        }
        Some(element)
    }
}

/// Where an access by bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bytes {
    /// From this byte on.
    At(usize),
    /// Not wholly within the place.
    Outside,
    /// Not at a multiple of its size.
    Misaligned,
}

impl Memory {
    /// Where a value of `size` bytes is, a power of two. A guest's index into a shared array is clamped: to the last multiple
    /// at which the value fits, a negative one as if it were huge.
    pub(super) fn bytes(&self, index: i64, size: u64, trust: Trust) -> Bytes {
        let length = self.tensor.bytes.len() as u64;
        let Some(last) = length.checked_sub(size) else { return Bytes::Outside };
        if self.shared && trust == Trust::Guest {
            return Bytes::At(((index as u64).min(last) & !(size - 1)) as usize);
        }
        match index as u64 {
            index if index > last => Bytes::Outside,
            index if index.is_multiple_of(size) => Bytes::At(index as usize),
            _ => Bytes::Misaligned,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Scalar;

    #[test]
    fn bytes() {
        let [view, shared] =
            [false, true].map(|shared| Memory::new(Tensor::zeros(Scalar::I8, &[14]), shared, false));
        let check = |memory: &Memory, index, size, trust, expect| {
            assert_eq!(memory.bytes(index, size, trust), expect, "{index}, {size} bytes");
        };
        check(&view, 8, 4, Trust::Guest, Bytes::At(8));
        check(&view, 12, 4, Trust::Guest, Bytes::Outside);
        check(&view, 12, 2, Trust::Guest, Bytes::At(12));
        check(&view, 9, 4, Trust::Guest, Bytes::Misaligned);
        check(&view, -4, 4, Trust::Guest, Bytes::Outside);
        check(&view, 0, 16, Trust::Guest, Bytes::Outside);
        check(&shared, 9, 4, Trust::Guest, Bytes::At(8));
        check(&shared, 12, 4, Trust::Guest, Bytes::At(8));
        check(&shared, -1, 2, Trust::Guest, Bytes::At(12));
        check(&shared, 9, 4, Trust::Trusted, Bytes::Misaligned);
        check(&shared, 12, 4, Trust::Trusted, Bytes::Outside);
    }

    #[test]
    fn bounds() {
        let view = Memory::new(Tensor::zeros(Scalar::F32, &[3, 5]), false, false);
        let shared = Memory::new(Tensor::zeros(Scalar::F32, &[3, 5]), true, false);
        let check = |memory: &Memory, indices: [i64; 2], lane, trust, expect| {
            assert_eq!(memory.element(&indices, lane, 4, trust), expect, "{indices:?} + {lane}");
        };
        check(&view, [2, 1], 3, Trust::Guest, Some(14));
        check(&view, [2, 1], 4, Trust::Guest, None);
        check(&view, [2, -2], 1, Trust::Guest, None);
        check(&view, [2, -2], 2, Trust::Guest, Some(10));
        check(&view, [-1, 0], 0, Trust::Guest, None);
        check(&view, [2, i64::MAX], 1, Trust::Guest, None);
        check(&shared, [9, 9], 0, Trust::Guest, Some(11));
        check(&shared, [-1, -1], 3, Trust::Guest, Some(14));
        check(&shared, [9, 9], 0, Trust::Trusted, None);
    }
}
