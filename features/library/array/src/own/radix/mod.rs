//! Sorting rows on GPUs, by one digit of 8 bits after another, the last one first. What has the same digit stays in its order.
//!
//! Short rows are a block's, which has them in registers and shared memory for all digits ([`rows`]). Of long ones each digit takes three launches ([`pass`]), none of
//! whose blocks waits for another. Elements move as they are: their digits are those of integers in their order ([`key`]), by which both zeros are equal.

mod block;
mod key;
mod pass;
mod rows;

use vm_runtime::Argument;

use super::{blocks, tiles};
use crate::Accelerator;
use crate::dtype::DType;
use crate::emit::THREADS;
use crate::error::Result;
use crate::evaluate;
use crate::node::Array;
use crate::op::Reduction;
use key::{DIGITS, Key};
use pass::{Moved, Pass, TILE};

/// The longest rows that are a block's.
const OF_BLOCK: u64 = 4096;
/// Blocks that each unit of a GPU is to have, before they take more rows each.
const OF_UNIT: u64 = 4;

/// The elements of rows in order, along the last of their dimensions, and where they were if that is asked for, in integers of 32 or 64 bits.
///
/// # Errors
/// What computing and launching fail with.
pub(super) fn sorted(x: &Array, descending: bool, with_places: bool) -> Result<(Array, Option<Array>)> {
    let n = x.shape().last().copied().unwrap_or(1);
    if n <= OF_BLOCK {
        return by_rows(x, n, descending, with_places);
    }
    // As many chunks as blocks run at once, so that none are left for a few to do at the end.
    let wide = n > i32::MAX as u64;
    let blocks = pass::resident(Key(x.dtype()), wide) * x.device().resources().compute_units;
    by_digits(x, n, descending, with_places, Way { wide, blocks: blocks.into() })
}

/// What flips a digit.
fn flip(descending: bool) -> Argument<'static, Accelerator> {
    (if descending { DIGITS as i32 - 1 } else { 0 }).into()
}

fn by_rows(x: &Array, n: u64, descending: bool, with_places: bool) -> Result<(Array, Option<Array>)> {
    let (device, dtype, total) = (x.device(), x.dtype(), x.size());
    let key = Key(dtype);
    let tile = |items: u32| u64::from(items * THREADS);
    // The smallest that has room for a row, unless blocks with more to do are enough for all units.
    let busy =
        |items: u32| total.div_ceil(tile(items)) >= OF_UNIT * u64::from(device.resources().compute_units);
    let items = [16, 4].into_iter().find(|items| busy(*items)).unwrap_or(1);
    let items = [1, 4, 16].into_iter().find(|own| *own >= items && tile(*own) >= n).unwrap_or(16);
    // Which of them an element is of is a digit, too.
    let rows = (tile(items) / n).min(DIGITS.into());
    let kernel = device.own("sort_rows", vec![dtype as u64, items.into(), with_places.into()], || {
        rows::kernel(key, items, with_places)
    })?;
    let y = Array::empty(device, dtype, x.shape())?;
    let places = with_places.then(|| Array::empty(device, DType::Int64, x.shape())).transpose()?;
    let (from, to) = (evaluate::dense(x)?, evaluate::storage(&y)?);
    let places_to = places.as_ref().map(evaluate::storage).transpose()?;
    let mut arguments: Vec<Argument<'_, Accelerator>> = vec![to.buffer.shaped(&[total])?.into()];
    if let Some(places) = &places_to {
        arguments.push(places.buffer.shaped(&[total])?.into());
    }
    arguments.push(from.buffer.shaped(&[total])?.into());
    let passes = dtype.bytes() + u64::from(rows > 1);
    arguments.extend([n, rows * n, passes].map(|number| Argument::from(number as i32)));
    arguments.push(flip(descending));
    device.launch(&kernel, blocks(total.div_ceil(rows * n))?, &arguments)?;
    Ok((y, places))
}

/// How long rows are sorted.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// Do places have 64 bits?
    wide: bool,
    /// How many blocks there are to be, about.
    blocks: u64,
}

fn by_digits(
    x: &Array,
    n: u64,
    descending: bool,
    with_places: bool,
    way: Way,
) -> Result<(Array, Option<Array>)> {
    let (device, dtype) = (x.device(), x.dtype());
    let (key, rows) = (Key(dtype), x.size() / n);
    let multiple = Pass::lanes(key).min(1 << n.trailing_zeros());
    let pass = Pass { key, wide: way.wide, multiple };
    let of_places = if pass.wide { DType::Int64 } else { DType::Int32 };
    let tiles = n.div_ceil(TILE);
    let of_chunk = (rows * tiles).div_ceil(way.blocks).min(tiles).min(pass::MOST);
    let chunks = tiles.div_ceil(of_chunk);
    let numbers = vec![dtype as u64, pass.wide.into(), multiple];
    let count = device.own("sort_count", numbers.clone(), || pass.count())?;
    let empty = |dtype| Array::empty(device, dtype, x.shape());
    let moves = |of: Option<&Array>| match (with_places, of) {
        (false, _) => Moved::Alone,
        (true, None) => Moved::Places,
        (true, Some(_)) => Moved::Origins,
    };
    let shape = [rows, n];
    // What the next pass reads, and what it writes: what the one before has read, if that was not the argument.
    let (mut now, mut then) = ((x.clone(), None::<Array>), None::<(Array, Option<Array>)>);
    for digit in 0..dtype.bytes() {
        let counts = Array::empty(device, of_places, &[rows, DIGITS.into(), chunks])?;
        let (to, from) = (evaluate::storage(&counts)?, evaluate::dense(&now.0)?);
        let counted = to.buffer.shaped(counts.shape())?.into();
        let elements = from.buffer.shaped(&shape)?;
        let last = [((digit * 8) as i32).into(), flip(descending), of_chunk.into()];
        let all: Vec<Argument<'_, Accelerator>> =
            [counted, elements.into()].into_iter().chain(last).collect();
        device.launch(&count, blocks(rows * chunks)?, &all)?;
        let up_to = tiles::scanned(&counts, Reduction::Sum, of_places, [rows * u64::from(DIGITS), chunks])?;
        let next = match then.take() {
            Some(next) => next,
            None => (empty(dtype)?, with_places.then(|| empty(of_places)).transpose()?),
        };
        let moved = moves(now.1.as_ref());
        let mut variant = numbers.clone();
        variant.push(moved as u64);
        let scatter = device.own("sort_scatter", variant, || pass.scatter(moved))?;
        let storage = |array: &Option<Array>| array.as_ref().map(evaluate::storage).transpose();
        let (y, places) = (evaluate::storage(&next.0)?, storage(&next.1)?);
        let (up_to, origins) = (evaluate::storage(&up_to)?, storage(&now.1)?);
        let mut all: Vec<Argument<'_, Accelerator>> = vec![y.buffer.shaped(&shape)?.into()];
        if let Some(places) = &places {
            all.push(places.buffer.shaped(&shape)?.into());
        }
        all.push(up_to.buffer.shaped(counts.shape())?.into());
        all.push(elements.into());
        if let Some(origins) = &origins {
            all.push(origins.buffer.shaped(&shape)?.into());
        }
        all.extend(last);
        device.launch(&scatter, blocks(rows * chunks)?, &all)?;
        let before = std::mem::replace(&mut now, next);
        then = (digit > 0).then_some(before);
    }
    Ok(now)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Device;

    #[test]
    fn long_rows_are_sorted_in_chunks_of_any_length() {
        let accelerator = Arc::new(Accelerator::open("cpu").expect("the processor"));
        let device = Device::with_blocks(accelerator, false).expect("a device");
        let check = |dtype: DType, n: usize, way: Way| {
            // Few of them, so that many are equal.
            let of = |at: usize| (at.wrapping_mul(0x9e37_79b9) >> 7) % 1000;
            let size = dtype.bytes() as usize;
            let bytes: Vec<u8> =
                (0..2 * n).flat_map(|at| of(at).to_le_bytes().into_iter().take(size)).collect();
            let x = Array::from_bytes(&device, dtype, &[2, n as u64], &bytes).expect("an array");
            let (elements, places) = by_digits(&x, n as u64, false, true, way).expect("in order");
            let mut expected: Vec<(usize, usize, usize)> =
                (0..2 * n).map(|at| (at / n, of(at), at % n)).collect();
            expected.sort_unstable();
            let sorted =
                expected.iter().flat_map(|(_, element, _)| element.to_le_bytes().into_iter().take(size));
            assert!(
                elements.to_bytes().expect("bytes") == sorted.collect::<Vec<u8>>(),
                "{dtype} {n} {way:?}"
            );
            let places =
                places.expect("places").cast(DType::Int64).expect("places").to_bytes().expect("bytes");
            let origins = expected.iter().flat_map(|(_, _, place)| place.to_le_bytes());
            assert!(places == origins.collect::<Vec<u8>>(), "the places of {dtype} {n} {way:?}");
        };
        // Counters are added up before they overflow, in a chunk of many tiles.
        check(DType::UInt16, 8 * TILE as usize + 5, Way { wide: false, blocks: 1 });
        check(DType::UInt16, 8 * TILE as usize + 5, Way { wide: true, blocks: 1 });
        check(DType::UInt64, TILE as usize - 1, Way { wide: true, blocks: 100 });
        check(DType::Int32, 3 * TILE as usize, Way { wide: false, blocks: 5 });
    }
}
