//! Where elements lie: shapes, strides, and maps between the places of arrays.

use crate::error::{Error, Result};

/// Extents, slowest dimension first.
pub type Shape = Vec<u64>;

/// The most elements of an array.
pub(crate) const MAX_ELEMENTS: u64 = 1 << 40;

/// Elements of a shape.
pub(crate) fn elements(shape: &[u64]) -> u64 {
    shape.iter().fold(1u64, |product, extent| product.saturating_mul(*extent))
}

/// That an array can have this shape.
pub(crate) fn check(function: &'static str, shape: &[u64]) -> Result<()> {
    let largest = shape.iter().filter(|extent| **extent != 0).fold(1u64, |p, e| p.saturating_mul(*e));
    match largest <= MAX_ELEMENTS {
        true => Ok(()),
        false => Err(Error::Shape { function, what: format!("{shape:?} has over {MAX_ELEMENTS} elements") }),
    }
}

/// Strides in elements of a dense array.
pub(crate) fn dense(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1) as i64;
    }
    strides
}

/// The shape that both have with their extents of 1 repeated.
pub(crate) fn broadcast(function: &'static str, a: &[u64], b: &[u64]) -> Result<Shape> {
    let rank = a.len().max(b.len());
    let of = |shape: &[u64], d: usize| (d + shape.len()).checked_sub(rank).map_or(1, |d| shape[d]);
    (0..rank)
        .map(|d| match (of(a, d), of(b, d)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(Error::Shape {
                function,
                what: format!("operands could not be broadcast together with shapes {a:?} {b:?}"),
            }),
        })
        .collect()
}

/// One index of an array as a function of another array's indices: `start + Σ steps · index`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Affine {
    pub(crate) start: i64,
    pub(crate) steps: Vec<i64>,
}

/// All indices of an array.
pub(crate) type Map = Vec<Affine>;

/// Each index is itself.
pub(crate) fn identity(rank: usize) -> Map {
    (0..rank).map(|d| Affine { start: 0, steps: (0..rank).map(|e| i64::from(d == e)).collect() }).collect()
}

/// The map through two.
pub(crate) fn compose(outer: &Map, inner: &Map, rank: usize) -> Map {
    outer
        .iter()
        .map(|axis| {
            let mut result = Affine { start: axis.start, steps: vec![0; rank] };
            for (step, by) in axis.steps.iter().zip(inner) {
                result.start += step * by.start;
                result.steps.iter_mut().zip(&by.steps).for_each(|(to, from)| *to += step * from);
            }
            result
        })
        .collect()
}

/// The map of an operand of this shape that is repeated to a shape of more, whose map is `map`.
pub(crate) fn repeated(map: &Map, shape: &[u64], to: &[u64], rank: usize) -> Map {
    let skipped = to.len() - shape.len();
    let axis = |(d, extent): (usize, &u64)| match *extent == 1 && to[d + skipped] != 1 {
        true => Affine { start: 0, steps: vec![0; rank] },
        false => map[d + skipped].clone(),
    };
    shape.iter().enumerate().map(axis).collect()
}

/// The strides that an array gets where its shape becomes another of as many elements; none if it must be copied.
pub(crate) fn reshaped(shape: &[u64], strides: &[i64], to: &[u64]) -> Option<Vec<i64>> {
    if elements(shape) == 0 {
        return Some(dense(to));
    }
    let from: Vec<(u64, i64)> =
        shape.iter().copied().zip(strides.iter().copied()).filter(|(extent, _)| *extent != 1).collect();
    let mut result = vec![0; to.len()];
    let (mut at, mut d) = (0, 0);
    while at < from.len() {
        // The fewest dimensions of both that have as many elements.
        let (mut end, mut last) = (at + 1, d);
        let mut old = from[at].0;
        let mut new = 1;
        loop {
            if new < old {
                new *= *to.get(last)?;
                last += 1;
            } else if old < new {
                old *= from.get(end)?.0;
                end += 1;
            } else {
                break;
            }
        }
        let one_run = from[at..end].windows(2).all(|pair| pair[0].1 == pair[1].1 * pair[1].0 as i64);
        if !one_run {
            return None;
        }
        let mut stride = from[end - 1].1;
        for e in (d..last).rev() {
            result[e] = stride;
            stride *= to[e] as i64;
        }
        (at, d) = (end, last);
    }
    Some(result)
}

/// The axis that a number names, counted from behind where it is negative.
pub(crate) fn axis(function: &'static str, axis: i64, rank: usize) -> Result<usize> {
    let positive = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(positive).ok().filter(|axis| *axis < rank).ok_or_else(|| Error::Value {
        function,
        what: format!("axis {axis} is out of bounds for array of dimension {rank}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_are_views() {
        let check = |shape: &[u64], strides: &[i64], to: &[u64], expect: Option<&[i64]>| {
            assert_eq!(reshaped(shape, strides, to).as_deref(), expect, "{shape:?} {strides:?} {to:?}");
        };
        check(&[2, 3], &[3, 1], &[6], Some(&[1]));
        check(&[2, 3], &[1, 2], &[6], None);
        check(&[2, 3], &[1, 2], &[2, 1, 3], Some(&[1, 6, 2]));
        check(&[4, 6], &[12, 2], &[2, 2, 3, 2], Some(&[24, 12, 4, 2]));
        check(&[1], &[5], &[], Some(&[]));
        check(&[6], &[0], &[2, 3], Some(&[0, 0]));
        check(&[0, 3], &[3, 1], &[0], Some(&[1]));
        check(&[6], &[-1], &[2, 3], Some(&[-3, -1]));
    }

    #[test]
    fn shapes_that_are_repeated() {
        let check = |a: &[u64], b: &[u64], expect: Option<&[u64]>| {
            assert_eq!(broadcast("add", a, b).ok().as_deref(), expect, "{a:?} {b:?}");
        };
        check(&[2, 1], &[3], Some(&[2, 3]));
        check(&[], &[4], Some(&[4]));
        check(&[0], &[1], Some(&[0]));
        check(&[2], &[3], None);
        check(&[0], &[2], None);
    }
}
