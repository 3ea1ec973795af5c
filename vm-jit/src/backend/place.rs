//! What the ops of tile kernels work on, by its number.

use vm_ir::module::Place;

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
