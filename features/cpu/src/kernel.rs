//! A kernel that can be run: code memory, and what a run of it needs.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use vm_accel::{Arguments, Artifact, Error, Grid, Result};

use crate::image;
use crate::sys::{Code, Scratch};

/// What is done at most between two looks at a launch's stop word, where blocks are small: some hundredths of a second.
const RUN_WORK: u64 = 1 << 26;

/// A loaded kernel.
#[derive(Debug)]
pub struct CpuKernel {
    name: String,
    code: Code,
    scratch: usize,
    bytes: u32,
    /// Which of the packed words is the stop word's address.
    stop: Option<usize>,
    /// The most that a block does before it ends or looks at the stop word.
    block_work: u64,
}

impl CpuKernel {
    /// Loads what an artifact holds.
    ///
    /// # Errors
    /// [`Error::Load`] for an image that is no object for this machine with that function, or has relocations; for a kernel
    /// with tensor maps.
    pub fn load(artifact: &Artifact) -> Result<CpuKernel> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let image = image::read(artifact.image(), artifact.entry()).map_err(bad)?;
        let signature = artifact.signature();
        if !signature.tiles.is_empty() {
            return Err(bad("it copies by tensor maps, which no CPU has; compile it for this one".into()));
        }
        let code = Code::new(image.code, image.entry)
            .map_err(|error| bad(format!("no memory for code: {error}")))?;
        Ok(CpuKernel {
            name: artifact.entry().to_owned(),
            code,
            scratch: signature.shared_bytes as usize,
            bytes: artifact.parameter_bytes(),
            // It is aligned to 8 bytes.
            stop: artifact.params().guard.map(|guard| guard.stop as usize / 8),
            block_work: signature
                .block
                .iter()
                .fold(signature.work, |work, size| work.saturating_mul(u64::from(*size))),
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

    /// How many blocks may run one behind the other before it is seen whether the launch was stopped.
    pub(crate) fn run_of(&self, most: u64) -> u64 {
        match self.stop {
            Some(_) => most.min(RUN_WORK / self.block_work.max(1)).max(1),
            None => most,
        }
    }

    /// Was the launch with these arguments stopped? Then what is left of it need not run.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    pub(crate) unsafe fn is_stopped(&self, params: &[u64]) -> bool {
        let Some(stop) = self.stop.and_then(|index| params.get(index)) else { return false };
        let word = *stop as *mut u32;
        // SAFETY: whoever packed the arguments put the address of the launch's stop word there, which is there as long as
        // the launch, has 4 bytes that are aligned, and is reached as an atomic only.
        !word.is_null() && unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Acquire) != 0
    }

    /// Do the arguments have this kernel's form?
    pub(crate) fn takes(&self, arguments: &Arguments) -> bool {
        arguments.bytes() == self.bytes
    }

    /// Runs the blocks from `first` up to `end` on this thread.
    ///
    /// # Safety
    /// `params` was packed for this kernel, and the memory that it names is there meanwhile. `scratch` has as many bytes as
    /// [`scratch`](Self::scratch) says. `end` is at most the number of the grid's blocks, and no number in `grid` is 0.
    pub(crate) unsafe fn run(&self, params: &[u64], grid: Grid, first: u64, end: u64, scratch: &mut Scratch) {
        // SAFETY: an artifact is made only with the promise that its code has this interface and keeps to its views; the caller
        // promises the rest.
        unsafe { self.code.call(params, &grid.0, first, end, scratch) };
    }
}
