//! A driver that was built without what runs PTX.

use crate::{
    error::Error,
    module::{Program, Refusal},
};
use std::sync::Arc;

/// Nothing prints.
pub(crate) mod print {
    /// Ahead of a call.
    pub(crate) fn before(_call: &str) {}

    /// Behind a call.
    pub(crate) fn after(_call: &str) {}

    /// Prints what waits.
    pub(crate) fn flush() {}
}

/// Refuses every image.
pub(crate) fn read(_image: &[u8]) -> Result<Arc<dyn Program>, Refusal> {
    let reason = "this driver has only kernels of its own: build it with the feature `cpu`".to_owned();
    Err(Refusal { error: Error::InvalidImage, reason })
}
