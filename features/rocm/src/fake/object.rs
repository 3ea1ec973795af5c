//! Code objects for the fake: ELF files for AMD's GPUs with a note that names what to run.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use vm_abi::ParamLayout;
use vm_accel::{Arguments, Artifact, Grid};
use vm_cpu::{CpuAccelerator, CpuKernel};

use super::lock;
use crate::sys::Status;

/// A kernel of a code object.
#[derive(Clone)]
pub struct Kernel {
    /// Its symbol.
    pub symbol: String,
    /// Where its parameters lie in the GPU's code.
    pub params: ParamLayout,
    /// The same kernel for the host's processor.
    pub cpu: Artifact,
}

/// Sets of kernels, by the numbers that notes have.
static KERNELS: Mutex<Option<HashMap<u64, Arc<[Kernel]>>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Bytes of the file's header.
const HEADER: usize = 64;
/// The note's owner.
const OWNER: &[u8; 8] = b"vm-fake\0";

/// A code object of kernels for an architecture, as in `gfx942`.
pub fn code_object(architecture: &str, kernels: Vec<Kernel>) -> Vec<u8> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(&KERNELS).get_or_insert_default().insert(number, kernels.into());
    let mut note = Vec::new();
    let length = 8 + architecture.len() as u32;
    for word in [OWNER.len() as u32, length, 1] {
        note.extend(word.to_le_bytes());
    }
    note.extend(OWNER);
    note.extend(number.to_le_bytes());
    note.extend(architecture.bytes());
    let bytes = note.len();
    note.resize(bytes.next_multiple_of(8), 0);
    let mut file = vec![0; HEADER];
    let set = |file: &mut [u8], at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    // 64 bits, little-endian, of the HSA's ABI; a shared object for AMD's GPUs; where the headers of sections are, and how many.
    set(&mut file, 0, b"\x7fELF\x02\x01\x01\x40");
    set(&mut file, 16, &[3, 0, 224, 0, 1]);
    set(&mut file, 40, &((HEADER + note.len()) as u64).to_le_bytes());
    set(&mut file, 52, &[HEADER as u8, 0, 56, 0, 0, 0, 64, 0, 2]);
    file.extend(&note);
    let mut sections = [0; 128];
    set(&mut sections, 64 + 4, &[7]);
    set(&mut sections, 64 + 24, &(HEADER as u64).to_le_bytes());
    set(&mut sections, 64 + 32, &(bytes as u64).to_le_bytes());
    file.extend(sections);
    file
}

/// A module's kernels, ready to run.
pub(super) struct Loaded(pub(super) Vec<Ready>);

/// A kernel that is ready to run.
pub(super) struct Ready {
    pub(super) kernel: Kernel,
    code: Arc<CpuKernel>,
}

/// The processor.
fn processor() -> Option<&'static CpuAccelerator> {
    static PROCESSOR: OnceLock<Option<CpuAccelerator>> = OnceLock::new();
    PROCESSOR.get_or_init(|| CpuAccelerator::with_threads(std::num::NonZero::new(3)?).ok()).as_ref()
}

/// Loads an image for an architecture.
///
/// # Errors
/// HIP's codes.
///
/// # Safety
/// It is an ELF file, which is there for the call.
pub(super) unsafe fn load(image: *const u8, architecture: &str) -> Result<Loaded, Status> {
    const INVALID: Status = 200;
    const OTHER: Status = 209;
    // SAFETY: an ELF file has a header.
    let header = unsafe { std::slice::from_raw_parts(image, HEADER) };
    let word = |bytes: &[u8], at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    let end = word(header, 40).ok_or(INVALID)? + 64 * u64::from(header[60]);
    // SAFETY: the headers of sections are the last that a file of ours has, and all of another's that is read.
    let file = unsafe { std::slice::from_raw_parts(image, end as usize) };
    let read = || {
        let section = word(file, 40)? as usize + 64;
        let (at, bytes) = (word(file, section + 24)? as usize, word(file, section + 32)? as usize);
        let note = file.get(at..at.checked_add(bytes)?)?;
        let own = note.get(12..20)? == OWNER;
        own.then_some((word(note, 20)?, note.get(28..)?))
    };
    let (number, wanted) = read().ok_or(INVALID)?;
    if wanted != architecture.as_bytes() {
        return Err(OTHER);
    }
    let kernels = lock(&KERNELS).get_or_insert_default().get(&number).cloned().ok_or(INVALID)?;
    let processor = processor().ok_or(INVALID)?;
    let ready = kernels.iter().map(|kernel| {
        let code = processor.load(&kernel.cpu).map_err(|_| INVALID)?;
        Ok(Ready { kernel: kernel.clone(), code })
    });
    ready.collect::<Result<_, _>>().map(Loaded)
}

impl Ready {
    /// Runs it with a block of parameters of the GPU's code.
    ///
    /// # Errors
    /// Why it can't.
    ///
    /// # Safety
    /// The memory that the block names is there.
    pub(super) unsafe fn run(&self, grid: Grid, words: &[u64]) -> Result<(), String> {
        /// The cancel flag of a kernel that the GPU's code needs none for.
        static NEVER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let params = self.kernel.cpu.params();
        // The parameters lie in the same places in both; the guard, behind them, only one of the two may have.
        let mut block = words.to_vec();
        block.resize(params.bytes.div_ceil(8) as usize, 0);
        if let (Some(guard), None) = (params.guard, self.kernel.params.guard) {
            block[guard.stop as usize / 8] = NEVER.as_ptr().expose_provenance() as u64;
            block[guard.fuel as usize / 8] = 1 << 62;
        }
        // SAFETY: the block was packed for the same kernel; the caller promises that its memory is there.
        let arguments =
            unsafe { Arguments::from_words(&self.kernel.cpu, &block) }.map_err(|error| error.to_string())?;
        let processor = processor().ok_or("there is no processor")?;
        // SAFETY: as above; the cancel flag is set.
        unsafe { processor.run(&self.code, grid, &arguments) }.map_err(|error| error.to_string())
    }
}
