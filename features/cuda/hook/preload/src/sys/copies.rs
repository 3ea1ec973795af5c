//! Copies that a program asked for, kept to be run later.

use super::real::{Address, Function, Stream};
use vm_hook::driver::Context;

/// Which function was called.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// `cuMemcpyDtoD`, `cuMemcpy`: of the default stream.
    Default,
    /// Their `Async` forms.
    On(Stream),
}

/// A copy between two places of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) function: Function,
    pub(crate) form: Form,
    pub(crate) context: Context,
    pub(crate) to: Address,
    pub(crate) from: Address,
    pub(crate) bytes: usize,
}
