//! Kernels of the library's kind against PyTorch and a device copy.

use crate::{Arguments, Test};

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    Vec::new()
}
