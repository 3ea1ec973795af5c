//! A kernel that can be run: code memory, and what a run of it needs.
#![allow(unsafe_code)]

use vm_accel::{Arguments, Artifact, Error, Grid, Result};

use crate::image;
use crate::sys::{Code, Scratch};

/// A loaded kernel.
#[derive(Debug)]
pub struct CpuKernel {
    name: String,
    code: Code,
    scratch: usize,
    bytes: u32,
}

impl CpuKernel {
    /// Loads what an artifact holds.
    ///
    /// # Errors
    /// [`Error::Load`] for an image that is no object for this machine with that function, or has relocations.
    pub fn load(artifact: &Artifact) -> Result<CpuKernel> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let image = image::read(artifact.image(), artifact.entry()).map_err(bad)?;
        let code = Code::new(image.code, image.entry)
            .map_err(|error| bad(format!("no memory for code: {error}")))?;
        Ok(CpuKernel {
            name: artifact.entry().to_owned(),
            code,
            scratch: artifact.signature().shared_bytes as usize,
            bytes: artifact.parameter_bytes(),
        })
    }

    /// Its symbol.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of scratch memory that each thread needs.
    pub(crate) fn scratch(&self) -> usize {
        self.scratch
    }

    /// Do the arguments have this kernel's form?
    pub(crate) fn takes(&self, arguments: &Arguments) -> bool {
        arguments.bytes() == self.bytes
    }

    /// Runs the blocks from `first` up to `end` on this thread. `scratch` has what the kernel needs, `params` is what was
    /// packed for it.
    pub(crate) fn run(&self, params: &[u64], grid: Grid, first: u64, end: u64, scratch: &mut Scratch) {
        // SAFETY: an artifact is made only with the promise that its code has this interface and keeps to its views, whose
        // memory is there as long as the command; the scratch was made as large as the artifact says, and the grid
        // was checked.
        unsafe { self.code.call(params, &grid.0, first, end, scratch) };
    }
}
