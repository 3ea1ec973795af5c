//! A kernel that can be run: code memory, and what a run of it needs.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use vm_accel::{Arguments, Artifact, Error, Grid, Result};

use crate::image;
use crate::sys::{Code, Scratch};

/// What is done at most between two polls of a launch's cancel flag, where blocks are small: some hundredths of a second.
const RUN_WORK: u64 = 1 << 26;

/// Blocks of which the time is kept, as a power of two.
const PACE: u32 = 8;
/// How many times as long the compiler says that something takes as it does, as a rule.
const MEASURED: u64 = 4;

/// Code that is loaded, once for all kernels of an image: by the address of the code in the image, which is its own as
/// long as one of them is there.
pub(crate) type Codes = HashMap<usize, Weak<Code>>;

/// A loaded kernel.
#[derive(Debug)]
pub struct CpuKernel {
    artifact: Artifact,
    code: Arc<Code>,
    /// Where in the code it begins.
    entry: usize,
    scratch: usize,
    /// Bytes of stack.
    stack: u64,
    /// Which of the packed words is the cancel flag's address.
    stop: Option<usize>,
    /// The most that a block does before it ends or polls the cancel flag.
    block_work: u64,
    /// Nanoseconds that 256 blocks took when some ran last; the most there are before.
    pace: AtomicU64,
}

impl CpuKernel {
    /// Loads what an artifact holds.
    ///
    /// # Errors
    /// [`Error::Load`] for an image that is no object for this machine with that function, or has relocations; for a kernel
    /// with tensor maps.
    pub(crate) fn load(artifact: &Artifact, codes: &mut Codes) -> Result<CpuKernel> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let image = image::read(artifact.image(), artifact.entry()).map_err(bad)?;
        let signature = artifact.signature();
        if !signature.tiles.is_empty() {
            return Err(bad("it copies by tensor maps, which no CPU has; compile it for this one".into()));
        }
        codes.retain(|_, code| code.strong_count() > 0);
        let key = image.code.as_ptr().addr();
        let code = match codes.get(&key).and_then(Weak::upgrade) {
            Some(code) => code,
            None => {
                let made =
                    Code::new(image.code).map_err(|error| bad(format!("no memory for code: {error}")))?;
                let made = Arc::new(made);
                codes.insert(key, Arc::downgrade(&made));
                made
            }
        };
        Ok(CpuKernel {
            artifact: artifact.clone(),
            code,
            entry: image.entry,
            scratch: signature.shared_bytes as usize,
            stack: image.stack.unwrap_or(u64::MAX),
            // It is aligned to 8 bytes.
            stop: artifact.params().guard.map(|guard| guard.stop as usize / 8),
            block_work: signature
                .block
                .iter()
                .fold(signature.cost_bound, |work, size| work.saturating_mul(u64::from(*size))),
            pace: AtomicU64::new(u64::MAX),
        })
    }

    /// Its symbol.
    pub fn name(&self) -> &str {
        self.artifact.entry()
    }

    /// Bytes of scratch memory that each thread needs.
    pub(crate) fn scratch(&self) -> usize {
        self.scratch
    }

    /// Bytes of stack that a thread needs beside what it has in use.
    pub(crate) fn stack(&self) -> u64 {
        self.stack
    }

    /// What a launch of so many blocks does in nanoseconds: at most, as the compiler counts it, or as long as blocks took last, which may have
    /// been of other extents.
    pub(crate) fn work(&self, blocks: u64) -> u64 {
        let known = self.pace.load(Ordering::Relaxed).saturating_mul(blocks) >> PACE;
        self.block_work.saturating_mul(blocks).min(known.saturating_mul(MEASURED))
    }

    /// Some blocks took so long.
    pub(crate) fn took(&self, blocks: u64, time: Duration) {
        if blocks > 0 {
            let nanoseconds =
                u64::try_from(time.as_nanos()).unwrap_or(u64::MAX >> PACE).min(u64::MAX >> PACE);
            self.pace.store((nanoseconds << PACE).div_ceil(blocks), Ordering::Relaxed);
        }
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
        // SAFETY: whoever packed the arguments put the address of the launch's cancel flag there, which is there as long as
        // the launch, has 4 bytes that are aligned, and is reached as an atomic only.
        !word.is_null() && unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Acquire) != 0
    }

    /// Checks that the arguments were packed for a kernel of this form, and that the grid is within the limits of compilers.
    ///
    /// # Errors
    /// [`Error::Grid`], [`Error::Arguments`].
    pub(crate) fn check(&self, grid: Grid, arguments: &Arguments) -> Result<()> {
        grid.check_compiled(self.artifact.signature())?;
        if arguments.bytes() == self.artifact.parameter_bytes() {
            return Ok(());
        }
        let reason = "they were packed for another kernel".into();
        Err(Error::Arguments { kernel: self.name().to_owned(), parameter: "all".into(), reason })
    }

    /// Stops the launch with these arguments, if it can be.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    pub(crate) unsafe fn stop(&self, params: &[u64]) {
        let word =
            self.stop.and_then(|index| params.get(index)).map_or(std::ptr::null_mut(), |at| *at as *mut u32);
        if !word.is_null() {
            // SAFETY: as in `is_stopped`.
            unsafe { AtomicU32::from_ptr(word) }.store(vm_abi::Guard::STOP, Ordering::Release);
        }
    }

    /// Runs the blocks from `first` up to `end` on this thread: where they touched what of `memory` may not be accessed, if they did.
    ///
    /// # Safety
    /// `params` was packed for this kernel, and the memory that it names is there meanwhile, but that pages of `memory` may be
    /// missing, of which the handler of faults knows. `scratch` has as many bytes as [`scratch`](Self::scratch) says. `end` is at most
    /// the number of the grid's blocks, and no number in `grid` is 0.
    pub(crate) unsafe fn run(
        &self,
        params: &[u64],
        grid: Grid,
        first: u64,
        end: u64,
        scratch: &mut Scratch,
        memory: Option<&Range<u64>>,
    ) -> Option<u64> {
        // SAFETY: an artifact is made only with the promise that its code has this interface and keeps to its views; the caller
        // promises the rest.
        unsafe { self.code.call(self.entry, params, &grid.0, first, end, scratch, memory) }
    }
}

#[cfg(test)]
mod tests {
    use vm_accel::{Element, Parameter, ParameterKind, Signature, Swizzle, Tile};

    use super::*;

    /// Artifacts of the kernels of one module.
    fn artifacts() -> Vec<Artifact> {
        let text = "vir 1\nkernel @a() at 0x0 block(1) {\n}\nkernel @b() at 0x0 block(1) {\n}\n";
        let module = vm_ir::validate(vm_ir::text::parse(text).unwrap(), vm_ir::Trust::Trusted).unwrap();
        let compiled = vm_jit::compile(&module, &"cpu".parse().unwrap()).unwrap();
        let image: Arc<[u8]> = compiled.code.into();
        let of = |entry: &vm_jit::Entry| {
            let signature = Signature {
                entry: entry.symbol.clone(),
                block: entry.block,
                cluster: entry.cluster,
                shared_bytes: entry.dynamic_shared,
                parameters: vec![],
                tiles: vec![],
                guarded: false,
                cost_bound: entry.work,
            };
            // SAFETY: the compiler made it, and it is not run.
            unsafe { Artifact::new(Arc::clone(&image), signature) }.unwrap()
        };
        compiled.entries.iter().map(of).collect()
    }

    #[test]
    fn the_kernels_of_an_image_share_its_code() {
        let mut codes = Codes::default();
        let mut load = |artifact: &Artifact| CpuKernel::load(artifact, &mut codes).unwrap();
        let [one, other] = [artifacts(), artifacts()];
        let (a, b, c) = (load(&one[0]), load(&one[1]), load(&other[0]));
        assert!(Arc::ptr_eq(&a.code, &b.code) && a.entry != b.entry);
        assert!(!Arc::ptr_eq(&a.code, &c.code), "another image of the same bytes");
        let code = Arc::downgrade(&a.code);
        drop(a);
        assert!(Arc::ptr_eq(&b.code, &load(&one[0]).code));
        drop(b);
        assert_eq!(code.strong_count(), 0, "unloaded with the last");
    }

    #[test]
    fn tensor_maps_are_refused() {
        let known = artifacts().swap_remove(0);
        let kind = ParameterKind::View {
            extents: vec![vm_accel::Extent::Any],
            element: Element::F16,
            align: 16,
            writes: false,
        };
        let tile = Tile {
            parameter: 0,
            shape: [1, 8],
            swizzle: Swizzle::None,
            element: Element::F16,
            writes: false,
        };
        let signature = Signature {
            parameters: vec![Parameter { name: "x".into(), kind }],
            tiles: vec![tile],
            ..known.signature().clone()
        };
        // SAFETY: it is not run.
        let artifact = unsafe { Artifact::new(known.image(), signature) }.unwrap();
        let refused = CpuKernel::load(&artifact, &mut Codes::default()).unwrap_err().to_string();
        assert!(refused.contains("tensor maps, which no CPU has"), "{refused}");
    }
}
