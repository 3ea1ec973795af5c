//! Code objects for the fake: what to run for each, by its bytes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSymbol as _};
use vm_abi::ParamLayout;
use vm_accel::{Arguments, Artifact, Grid};
use vm_cpu::{CpuAccelerator, CpuKernel};

use super::lock;
use super::stream::views;
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

/// Runs the kernels of a code object in the place of the processor, as an emulator of its instructions.
pub trait Run: Send + Sync {
    /// Runs a kernel over a grid, with a block of parameters, and leaves in the ranges what it wrote.
    ///
    /// # Errors
    /// Why it can't, which is a fault.
    fn run(&self, kernel: &Kernel, grid: [u32; 3], words: &[u64], ranges: &mut [Range])
    -> Result<(), String>;
}

/// Bytes that a launch reaches.
pub struct Range {
    /// Where in the block of parameters their address is.
    pub offset: u32,
    /// What they hold.
    pub bytes: Vec<u8>,
}

/// What is run for an image.
struct Known {
    architecture: String,
    kernels: Arc<[Kernel]>,
    run: Option<Arc<dyn Run>>,
}

/// What is known of images, by their bytes.
static KNOWN: Mutex<Option<HashMap<Vec<u8>, Known>>> = Mutex::new(None);
/// What is known of kernels in any image, by architecture and symbol.
static SYMBOLS: Mutex<Option<HashMap<(String, String), Kernel>>> = Mutex::new(None);
/// The number of the next code object of ours.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Bytes of an ELF file's header.
const HEADER: usize = 64;
/// Bytes of the header of a section, of a symbol, and of a kernel's descriptor.
const SECTION: usize = 64;
const SYMBOL: usize = 24;
const DESCRIPTOR: usize = 64;
/// Types of sections.
const PROGBITS: u32 = 1;
const STRTAB: u32 = 3;
const DYNSYM: u32 = 11;

/// Tells what to run for a code object, which is for an architecture, as in `gfx942`. Its headers of sections come last, as
/// `ld.lld` writes them.
pub fn know(image: &[u8], architecture: &str, kernels: Vec<Kernel>) {
    tell(image, architecture, kernels, None);
}

/// The same of a code object that is itself run, by `run`.
pub fn know_by(image: &[u8], architecture: &str, kernels: Vec<Kernel>, run: Arc<dyn Run>) {
    tell(image, architecture, kernels, Some(run));
}

/// Tells what to run for these kernels in code objects for an architecture that are not known by their bytes: what becomes of a module
/// when somebody else assembles it.
pub fn know_symbols(architecture: &str, kernels: Vec<Kernel>) {
    let mut symbols = lock(&SYMBOLS);
    let symbols = symbols.get_or_insert_default();
    symbols.extend(kernels.into_iter().map(|kernel| ((architecture.into(), kernel.symbol.clone()), kernel)));
}

/// The kernels of an image of which each is known by its symbol; nothing of one that has others.
fn by_symbols(file: &[u8], architecture: &str) -> Option<Arc<[Kernel]>> {
    let file = ElfFile64::<Endianness>::parse(file).ok()?;
    let names = file.dynamic_symbols().filter_map(|symbol| symbol.name().ok()?.strip_suffix(".kd"));
    let symbols = lock(&SYMBOLS);
    let known = |name: &str| symbols.as_ref()?.get(&(architecture.into(), name.into())).cloned();
    let kernels: Option<Vec<_>> = names.map(known).collect();
    kernels.filter(|kernels| !kernels.is_empty()).map(Into::into)
}

fn tell(image: &[u8], architecture: &str, kernels: Vec<Kernel>, run: Option<Arc<dyn Run>>) {
    let known = Known { architecture: architecture.into(), kernels: kernels.into(), run };
    lock(&KNOWN).get_or_insert_default().insert(image.to_vec(), known);
}

/// Adds a section: its bytes, and its header. One of type 11 (`SHT_DYNSYM`) has its names in the section before.
fn section(file: &mut Vec<u8>, headers: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    let mut header = [0; SECTION];
    let mut set = |at: usize, value: u64, bytes: usize| {
        header[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes])
    };
    let at = file.len() as u64;
    set(4, kind.into(), 4);
    set(16, at, 8);
    set(24, at, 8);
    set(32, bytes.len() as u64, 8);
    if kind == DYNSYM {
        set(40, (headers.len() / SECTION - 1) as u64, 4);
        set(44, 1, 4);
        set(56, SYMBOL as u64, 8);
    }
    headers.extend(header);
    file.extend(bytes);
    file.resize(file.len().next_multiple_of(8), 0);
}

/// A code object without code, of kernels for an architecture, for where nothing assembles one.
pub fn code_object(architecture: &str, kernels: Vec<Kernel>) -> Vec<u8> {
    let set = |file: &mut [u8], at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    // What tells it from others, then the kernels' descriptors; their names; their symbols, behind one that is none.
    let mut data = NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes().to_vec();
    let (mut names, mut symbols) = (vec![0], vec![0; SYMBOL]);
    for kernel in &kernels {
        let mut descriptor = [0; DESCRIPTOR];
        set(&mut descriptor, 8, &kernel.params.bytes.to_le_bytes());
        // `gfx10` and newer have waves of 32 threads.
        set(&mut descriptor, 56, &(u16::from(architecture.starts_with("gfx1")) << 10).to_le_bytes());
        let mut symbol = [0; SYMBOL];
        set(&mut symbol, 0, &(names.len() as u32).to_le_bytes());
        // Global, in the first section.
        set(&mut symbol, 4, &[0x11, 0, 1]);
        set(&mut symbol, 8, &((HEADER + data.len()) as u64).to_le_bytes());
        set(&mut symbol, 16, &(DESCRIPTOR as u64).to_le_bytes());
        symbols.extend(symbol);
        data.extend(descriptor);
        names.extend(kernel.symbol.bytes().chain(*b".kd\0"));
    }
    let (mut file, mut headers) = (vec![0; HEADER], vec![0; SECTION]);
    for (kind, bytes) in [(PROGBITS, data), (STRTAB, names), (DYNSYM, symbols)] {
        section(&mut file, &mut headers, kind, &bytes);
    }
    // 64 bits, little-endian, of the HSA's ABI; a shared object for AMD's GPUs; where the headers of sections are, and how many.
    let end = file.len() as u64;
    set(&mut file, 0, b"\x7fELF\x02\x01\x01\x40\x03");
    set(&mut file, 16, &[3, 0, 224, 0, 1]);
    set(&mut file, 40, &end.to_le_bytes());
    set(
        &mut file,
        52,
        &[HEADER as u8, 0, 56, 0, 0, 0, SECTION as u8, 0, (headers.len() / SECTION) as u8, 0, 2],
    );
    file.extend(headers);
    know(&file, architecture, kernels);
    file
}

/// A module's kernels, ready to run.
pub(super) struct Loaded(pub(super) Vec<Ready>);

/// A kernel that is ready to run.
pub(super) struct Ready {
    pub(super) kernel: Kernel,
    code: Arc<CpuKernel>,
    run: Option<Arc<dyn Run>>,
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
/// It is an ELF file of which no byte lies behind the headers of its sections, and is there for the call.
pub(super) unsafe fn load(image: *const u8, architecture: &str) -> Result<Loaded, Status> {
    const INVALID: Status = 200;
    const OTHER: Status = 209;
    // SAFETY: an ELF file has a header.
    let header = unsafe { std::slice::from_raw_parts(image, HEADER) };
    let number = |at: usize, bytes: usize| {
        header[at..at + bytes].iter().rev().fold(0, |all, &byte| all << 8 | usize::from(byte))
    };
    let bytes = number(40, 8) + number(58, 2) * number(60, 2);
    // SAFETY: the headers of sections lie within the file.
    let file = unsafe { std::slice::from_raw_parts(image, bytes) };
    let (kernels, run) = match lock(&KNOWN).get_or_insert_default().get(file) {
        Some(known) if known.architecture == architecture => (Arc::clone(&known.kernels), known.run.clone()),
        Some(_) => return Err(OTHER),
        None => (by_symbols(file, architecture).ok_or(INVALID)?, None),
    };
    let processor = processor().ok_or(INVALID)?;
    let ready = kernels.iter().map(|kernel| {
        let code = processor.load(&kernel.cpu).map_err(|_| INVALID)?;
        Ok(Ready { kernel: kernel.clone(), code, run: run.clone() })
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
        if let Some(run) = &self.run {
            // SAFETY: as the caller promises.
            return unsafe { self.run_by(&**run, grid, words) };
        }
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

    /// Has it run on copies of the memory that the block names.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn run_by(&self, run: &dyn Run, grid: Grid, words: &[u64]) -> Result<(), String> {
        let place = |at: u64| std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
        let views = views(&self.kernel, words);
        let copy = |&(offset, at, bytes): &(u32, u64, u64)| {
            let mut copy = vec![0; bytes as usize];
            // SAFETY: the caller promises that it is there.
            unsafe { place(at).copy_to(copy.as_mut_ptr(), copy.len()) };
            Range { offset, bytes: copy }
        };
        let mut ranges: Vec<_> = views.iter().map(copy).collect();
        let before: Vec<_> = ranges.iter().map(|range| range.bytes.clone()).collect();
        run.run(&self.kernel, grid.0, words, &mut ranges)?;
        for ((range, before), (_, at, bytes)) in ranges.iter().zip(&before).zip(views) {
            if range.bytes.len() as u64 != bytes {
                return Err("it gave back another number of bytes".into());
            }
            // What was only read may be in two of them, and the host may have set a cancel flag since.
            if range.bytes != *before {
                // SAFETY: as above.
                unsafe { place(at).copy_from(range.bytes.as_ptr(), range.bytes.len()) };
            }
        }
        Ok(())
    }
}
