//! A driver that was built without what runs PTX.

use crate::{
    error::Error,
    link::Input,
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

fn refused() -> Refusal {
    let reason = "this driver has only kernels of its own: build it with the feature `cpu`".to_owned();
    Refusal { error: Error::InvalidImage, reason }
}

/// Refuses every image.
pub(crate) fn read(_image: &[u8], _max_registers: Option<u32>) -> Result<Arc<dyn Program>, Refusal> {
    Err(refused())
}

/// Refuses every input of a link.
pub(crate) fn inputs(_kind: i32, _name: &str, _image: Vec<u8>) -> Result<Vec<Input>, Refusal> {
    Err(refused())
}

/// Refuses every link.
pub(crate) fn link(_inputs: &[Input], _max_registers: Option<u32>) -> Result<String, Refusal> {
    Err(refused())
}
