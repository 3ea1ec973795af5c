//! Arrays of f64, and what becomes of their places.

use crate::op::{Convolution, Pool};

#[derive(Clone, Debug)]
pub(super) struct Array {
    pub(super) extents: Vec<u64>,
    pub(super) elements: Vec<f64>,
}

impl Array {
    pub(super) fn new(extents: &[u64], elements: Vec<f64>) -> Array {
        debug_assert_eq!(extents.iter().product::<u64>(), elements.len() as u64);
        Array { extents: extents.to_vec(), elements }
    }

    pub(super) fn at(&self, at: &[u64]) -> f64 {
        let offset = self.extents.iter().zip(at).fold(0, |offset, (extent, at)| offset * extent + at);
        self.elements[offset as usize]
    }

    pub(super) fn map(&self, f: impl Fn(f64) -> f64) -> Array {
        Array::new(&self.extents, self.elements.iter().map(|x| f(*x)).collect())
    }

    /// An array whose elements are those of this one at the places that `from` tells.
    pub(super) fn pick(&self, extents: &[u64], from: impl Fn(&[u64]) -> Vec<u64>) -> Array {
        self.pick_some(extents, |at| Some(from(at)))
    }

    /// The same, with zeros where there are none.
    pub(super) fn pick_some(&self, extents: &[u64], from: impl Fn(&[u64]) -> Option<Vec<u64>>) -> Array {
        let mut elements = Vec::new();
        places(extents, |at| elements.push(from(at).map_or(0.0, |from| self.at(&from))));
        Array::new(extents, elements)
    }

    /// Repeated along dimensions of extent 1, or that are not there.
    pub(super) fn spread(&self, extents: &[u64]) -> Array {
        if self.extents == extents {
            return self.clone();
        }
        let missing = extents.len() - self.extents.len();
        self.pick(extents, |at| {
            let own = at[missing..].iter().zip(&self.extents);
            own.map(|(at, extent)| if *extent == 1 { 0 } else { *at }).collect()
        })
    }

    /// One for each position of a dimension, or a single number, spread to all of an array.
    pub(super) fn along_axis(&self, axis: Option<u32>, extents: &[u64]) -> Array {
        self.pick(extents, |at| axis.map_or(Vec::new(), |axis| vec![at[axis as usize]]))
    }

    pub(super) fn zip(&self, other: &Array, extents: &[u64], f: impl Fn(f64, f64) -> f64) -> Array {
        let (a, b) = (self.spread(extents), other.spread(extents));
        Array::new(extents, a.elements.iter().zip(&b.elements).map(|(a, b)| f(*a, *b)).collect())
    }

    pub(super) fn concat(parts: &[&Array], axis: usize, extents: &[u64]) -> Array {
        let mut elements = Vec::new();
        places(extents, |at| {
            let mut from = at.to_vec();
            let mut part = 0;
            while from[axis] >= parts[part].extents[axis] {
                from[axis] -= parts[part].extents[axis];
                part += 1;
            }
            elements.push(parts[part].at(&from));
        });
        Array::new(extents, elements)
    }

    /// What becomes of the elements along one dimension.
    pub(super) fn along(&self, axis: usize, extents: &[u64], f: impl Fn(&[f64]) -> Vec<f64>) -> Array {
        let inner: usize = self.extents[axis + 1..].iter().product::<u64>() as usize;
        let (from, to) = (self.extents[axis] as usize, extents[axis] as usize);
        let outer = self.elements.len() / (inner * from);
        let mut elements = vec![0.0; outer * to * inner];
        for before in 0..outer {
            for behind in 0..inner {
                let part: Vec<f64> =
                    (0..from).map(|at| self.elements[(before * from + at) * inner + behind]).collect();
                for (at, value) in f(&part).into_iter().enumerate() {
                    elements[(before * to + at) * inner + behind] = value;
                }
            }
        }
        Array::new(extents, elements)
    }

    pub(super) fn reduce(&self, axes: &[u32], extents: &[u64], f: impl Fn(&[f64]) -> f64) -> Array {
        let is_reduced = |axis: usize| axes.contains(&(axis as u32));
        let kept = (0..self.extents.len()).filter(|axis| !is_reduced(*axis));
        let outer: Vec<usize> = kept.collect();
        let outer_extents: Vec<u64> = outer.iter().map(|axis| self.extents[*axis]).collect();
        let inner_extents: Vec<u64> = axes.iter().map(|axis| self.extents[*axis as usize]).collect();
        let mut elements = Vec::new();
        places(&outer_extents, |kept| {
            let mut from = vec![0; self.extents.len()];
            outer.iter().zip(kept).for_each(|(axis, at)| from[*axis] = *at);
            let mut part = Vec::new();
            places(&inner_extents, |at| {
                axes.iter().zip(at).for_each(|(axis, at)| from[*axis as usize] = *at);
                part.push(self.at(&from));
            });
            elements.push(f(&part));
        });
        Array::new(extents, elements)
    }

    /// Products of matrices, where `add` adds a product of two elements to a sum.
    pub(super) fn mat_mul(
        &self,
        other: &Array,
        extents: &[u64],
        add: impl Fn(f64, f64, f64) -> f64,
    ) -> Array {
        let rank = extents.len();
        let (batch, [m, n]) = (&extents[..rank - 2], [extents[rank - 2], extents[rank - 1]]);
        let k = self.extents[self.extents.len() - 1];
        let whole = |array: &Array| {
            let mut extents = batch.to_vec();
            extents.extend(&array.extents[array.extents.len() - 2..]);
            array.spread(&extents)
        };
        let (a, b) = (whole(self), whole(other));
        let [m, n, k] = [m, n, k].map(|extent| extent as usize);
        let mut elements = Vec::new();
        for matrix in 0..batch.iter().product::<u64>() as usize {
            for row in 0..m {
                for column in 0..n {
                    let a = &a.elements[(matrix * m + row) * k..][..k];
                    let b = b.elements[matrix * k * n + column..].iter().step_by(n);
                    elements.push(a.iter().zip(b).fold(0.0, |sum, (a, b)| add(sum, *a, *b)));
                }
            }
        }
        Array::new(extents, elements)
    }

    pub(super) fn convolution(
        &self,
        weight: &Array,
        bias: Option<&Array>,
        how: &Convolution,
        extents: &[u64],
    ) -> Array {
        let [out, channels, rows, columns] = [0, 1, 2, 3].map(|axis| weight.extents[axis]);
        let mut elements = Vec::new();
        places(extents, |at| {
            let group = at[1] / (out / how.groups);
            let mut sum = bias.map_or(0.0, |bias| bias.elements[at[1] as usize]);
            places(&[channels, rows, columns], |of| {
                let y = self.inside(2, at[2] * how.strides[0] + of[1] * how.dilations[0], how.pads[0]);
                let x = self.inside(3, at[3] * how.strides[1] + of[2] * how.dilations[1], how.pads[1]);
                let from = y.zip(x).map_or(0.0, |(y, x)| self.at(&[at[0], group * channels + of[0], y, x]));
                sum += from * weight.at(&[at[1], of[0], of[1], of[2]]);
            });
            elements.push(sum);
        });
        Array::new(extents, elements)
    }

    pub(super) fn pool(&self, pool: &Pool, extents: &[u64], f: impl Fn(&[f64]) -> f64) -> Array {
        let mut elements = Vec::new();
        places(extents, |at| {
            let mut window = Vec::new();
            places(&pool.window, |of| {
                let y = self.inside(2, at[2] * pool.strides[0] + of[0], pool.pads[0]);
                let x = self.inside(3, at[3] * pool.strides[1] + of[1], pool.pads[1]);
                if let (Some(y), Some(x)) = (y, x) {
                    window.push(self.at(&[at[0], at[1], y, x]));
                }
            });
            elements.push(f(&window));
        });
        Array::new(extents, elements)
    }

    /// A place in a padded dimension, as one of the elements that are there.
    fn inside(&self, axis: usize, at: u64, pads: [u64; 2]) -> Option<u64> {
        at.checked_sub(pads[0]).filter(|at| *at < self.extents[axis])
    }
}

/// Every place of an array, in order.
fn places(extents: &[u64], mut f: impl FnMut(&[u64])) {
    let mut at = vec![0; extents.len()];
    loop {
        f(&at);
        let Some(axis) = (0..at.len()).rev().find(|axis| at[*axis] + 1 < extents[*axis]) else { return };
        at[axis] += 1;
        at[axis + 1..].fill(0);
    }
}
