//! What the ops of tile kernels work on.

use vm_ir::Value;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Opcode, Shape};

/// What is done with the elements of a box of a view.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum Access {
    Load,
    Store,
    Add,
}

impl Access {
    /// That of `get` and `put`.
    pub(in crate::backend) fn of(op: &Op) -> Access {
        match (op.code.shape(), op.code) {
            (Shape::Get, _) => Access::Load,
            (_, Opcode::PutAdd) => Access::Add,
            _ => Access::Store,
        }
    }
}

/// Where a box of `get` and `put` begins, and how many of its rows are put, if not all.
pub(in crate::backend) fn corner_and_rows(op: &Op) -> (&[Value], Option<Value>) {
    match (op.code.shape(), op.operands.split_last()) {
        (Shape::PutRows, Some((count, indices))) => (indices, Some(*count)),
        _ => (&op.operands, None),
    }
}

/// The number of a channel among the kernel's.
pub(in crate::backend) fn channel_number(place: Place) -> Option<usize> {
    match place {
        Place::Channel(i) => Some(usize::from(i)),
        _ => None,
    }
}

/// The number of a fragment among the kernel's.
pub(in crate::backend) fn fragment_number(place: Place) -> Option<usize> {
    match place {
        Place::Fragment(i) => Some(usize::from(i)),
        _ => None,
    }
}
