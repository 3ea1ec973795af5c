//! Calls of functions with strided rows: what other cases compute, of other places in memory.

use super::Case;
use crate::call::{Buffer, CallError, Function};
use crate::family::{Kind, Resources};
use crate::strided::Strided;
use vm_ir::interp::Tensor;

/// The most elements of a case.
const MOST: usize = 4000;

/// A device for which functions of rows have variants by their width.
const GPU: Resources = Resources { compute_units: 4, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };

/// How rows lie.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// At odd numbers of elements, by one in each buffer.
    Odd,
    /// At multiples of the widest access, as parts of a wider matrix or padded do.
    Wide,
    /// The first buffer's so, others at multiples of two or four, and the last one's one behind the other.
    Mixed,
}

impl Lie {
    /// From one row to the next: of the buffer of such a number among `count`.
    fn stride(self, row: u64, number: u64, count: u64) -> u64 {
        match self {
            Lie::Odd => (row + 1 + 2 * number) | 1,
            Lie::Wide => row.next_multiple_of(16) + 16 * (count - number),
            Lie::Mixed if number == 0 => row.next_multiple_of(16) + 16,
            Lie::Mixed if number + 1 == count => row,
            Lie::Mixed => row.next_multiple_of(4) + 2 * (number % 3),
        }
    }
}

/// Of cases the small ones with several rows, each in one of the ways that its function can take.
pub(super) fn cases(dense: Vec<Case>) -> Vec<Case> {
    const WAYS: [Lie; 3] = [Lie::Odd, Lie::Wide, Lie::Mixed];
    let small = dense.into_iter().filter(|case| case.buffers.iter().map(Tensor::len).sum::<usize>() <= MOST);
    let mut cases = Vec::new();
    for (number, Case { name, function, buffers, expected }) in small.enumerate() {
        let mut found = Err(function);
        for way in number..number + WAYS.len() {
            found = found.or_else(|function| strided(function, WAYS[way % WAYS.len()]));
        }
        cases.extend(found.ok().map(|(strided, lie)| Case {
            name: format!("{name}, strided rows: {lie:?}"),
            function: Box::new(strided),
            buffers,
            expected,
        }));
    }
    cases
}

/// A function with rows that lie so, but for buffers that it takes in one piece; itself if there are no others.
fn strided(function: Box<dyn Function>, lie: Lie) -> Result<(Strided, Lie), Box<dyn Function>> {
    let buffers = function.buffers();
    let several: Vec<_> = buffers.iter().filter(|buffer| buffer.rows() > 1 && buffer.row() > 0).collect();
    let several: Vec<_> = several.into_iter().filter(|buffer| buffer.counted > 0).collect();
    let count = several.len() as u64;
    let mut strided = Strided::new(function);
    for (number, buffer) in (0..).zip(several) {
        strided = strided.rows(buffer.name, lie.stride(buffer.row(), number, count));
    }
    loop {
        if !strided.buffers().iter().any(Buffer::is_strided) {
            return Err(strided.function);
        }
        match strided.call(&GPU) {
            Err(CallError::Stride { buffer, .. }) => strided.strides.retain(|(name, _)| *name != buffer),
            _ => return Ok((strided, lie)),
        }
    }
}
