//! Accelerators for C: what `vmaccel.h` declares, over the workers and the compiler that Rust programs use.
//!
//! | part | does |
//! | --- | --- |
//! | `accelerator.txt` | what there is; the header and the ABI are made of it |
//! | `registry` | handles, which are numbers that are never given twice |
//! | `objects` | what handles are of |
//! | `functions` | what each function does |
//! | `pending` | jobs that are waited for more than once |
//! | `graphics` | what the functions of timelines, links and resources do |
//! | `resource` | resources of graphics, and the state that each is in |
//! | `timeline` | timelines of the library's own and of its callers |
//!
//! Kernels are compiled as a guest's: they check their accesses and can be stopped, so nothing here has to trust them.

mod error;
pub(crate) mod functions;
mod graphics;
pub(crate) mod objects;
mod pending;
mod registry;
pub(crate) mod resource;
pub(crate) mod timeline;

pub(crate) use error::Failure;
pub(crate) use registry::{HANDLES, Handled};
