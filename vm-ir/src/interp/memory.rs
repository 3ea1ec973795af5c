//! Where elements are: index arithmetic, bounds, and the bytes behind a place.

use super::launch::Tensor;
use super::race::Shadow;
use crate::valid::Trust;

/// Memory behind a view or a shared array.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) tensor: Tensor,
    pub(super) shadow: Shadow,
    /// Is it a shared array?
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Scalar;

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
