//! Calls of functions with strided rows: what other cases compute, of other places in memory.

use super::Case;
use crate::call::{Buffer, Call, CallError, Function};
use crate::family::{Kind, Resources};
use crate::graph::NoGraph;
use crate::strided::Strided;
use std::rc::Rc;
use vm_graph::ValidGraph;
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
pub(super) fn cases(dense: &[Case]) -> Vec<Case> {
    const WAYS: [Lie; 3] = [Lie::Odd, Lie::Wide, Lie::Mixed];
    let small = dense.iter().filter(|case| case.buffers.iter().map(Tensor::len).sum::<usize>() <= MOST);
    let cases = small.enumerate().filter_map(|(number, case)| {
        let mut ways = (number..number + WAYS.len()).map(|way| WAYS[way % WAYS.len()]);
        let (strided, lie) = ways.find_map(|lie| Some((strided(&case.function, lie)?, lie)))?;
        Some(Case {
            name: format!("{}, strided rows: {lie:?}", case.name),
            function: Rc::new(strided),
            buffers: case.buffers.clone(),
            expected: case.expected.clone(),
        })
    });
    cases.collect()
}

/// A function with rows that lie so, but for buffers that it takes in one piece; none if there are no others.
fn strided(function: &Rc<dyn Function>, lie: Lie) -> Option<Strided> {
    let buffers = function.buffers();
    let several: Vec<_> = buffers.iter().filter(|buffer| buffer.rows() > 1 && buffer.row() > 0).collect();
    let several: Vec<_> = several.into_iter().filter(|buffer| buffer.counted > 0).collect();
    let count = several.len() as u64;
    let mut strided = Strided::new(Box::new(function.clone()));
    for (number, buffer) in (0..).zip(several) {
        strided = strided.rows(buffer.name, lie.stride(buffer.row(), number, count));
    }
    loop {
        if !strided.buffers().iter().any(Buffer::is_strided) {
            return None;
        }
        match strided.call(&GPU) {
            Err(CallError::Stride { buffer, .. }) => strided.strides.retain(|(name, _)| *name != buffer),
            _ => return Some(strided),
        }
    }
}

/// A function that a case has dense, and another with strided rows.
impl Function for Rc<dyn Function> {
    fn buffers(&self) -> Vec<Buffer> {
        (**self).buffers()
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        (**self).graph()
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        (**self).call(resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        (**self).call_strided(buffers, resources)
    }
}
