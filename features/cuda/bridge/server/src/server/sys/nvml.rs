//! NVIDIA's own NVML, which knows of devices what CUDA does not.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::wire::nvml::{FUNCTIONS, Question, Value, WORDS};

const NAME: &str = "libnvidia-ml.so.1";

type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> u32;

/// It is opened and initialised.
pub(in crate::server) struct Nvml {
    find: Find,
    library: Library,
}

/// A device as NVML names it.
#[derive(Clone, Copy, Debug)]
pub(in crate::server) struct Handle(usize);

/// Opened once, for the life of the process: as long as the driver is.
pub(in crate::server) fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    let open = || {
        // SAFETY: it is a library of the driver, whose initialisers run.
        let library = unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_LOCAL) };
        let library = library.inspect_err(|error| tracing::debug!(%error, "there is no NVML")).ok()?;
        // SAFETY: NVML's function is of this type.
        let start = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0") }.ok()?;
        // SAFETY: as above.
        let find = *unsafe { library.get::<Find>(b"nvmlDeviceGetHandleByUUID\0") }.ok()?;
        // SAFETY: it takes nothing.
        let started = unsafe { start() };
        tracing::debug!(started, "NVML is opened");
        (started == 0).then_some(Nvml { find, library })
    };
    NVML.get_or_init(open).as_ref()
}

/// Bytes as they are in words, which are where any type may be; never none.
fn in_words(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    };
    bytes.chunks(8).map(word).chain([0]).collect()
}

impl Nvml {
    /// The device with this name.
    pub(in crate::server) fn device(&self, uuid: &str) -> Option<Handle> {
        let name = CString::new(uuid).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: it reads a string, and writes a handle.
        let found = unsafe { (self.find)(name.as_ptr(), &raw mut device) } == 0;
        found.then_some(Handle(device as usize))
    }

    /// What is free of a device's memory.
    pub(in crate::server) fn free(&self, device: Handle) -> Option<u64> {
        type Memory = unsafe extern "C" fn(usize, *mut [u64; 3]) -> c_int;
        // SAFETY: NVML's function is of this type.
        let ask = unsafe { self.library.get::<Memory>(b"nvmlDeviceGetMemoryInfo\0") }.ok()?;
        let mut memory = [0; 3];
        // SAFETY: it takes a handle of its own, and writes total, free and used.
        (unsafe { ask(device.0, &raw mut memory) } == 0).then_some(memory[1])
    }

    /// Asks a question, whose memory has the answer then; what NVML says of it.
    pub(in crate::server) fn ask(
        &self,
        question: &mut Question,
        devices: impl Fn([u8; 16]) -> Option<Handle>,
    ) -> u32 {
        /// `NVML_ERROR_FUNCTION_NOT_FOUND`, and `…_GPU_IS_LOST`.
        const NO_FUNCTION: u32 = 13;
        const LOST: u32 = 15;
        let name = format!("{}\0", FUNCTIONS[question.function].name);
        // SAFETY: a function of NVML's that takes no more words than these, all of them integers and pointers: it does not look at the rest.
        let Ok(function) = (unsafe { self.library.get::<Function>(name.as_bytes()) }) else {
            return NO_FUNCTION;
        };
        let mut memories = Vec::new();
        let mut words = Vec::with_capacity(WORDS);
        for value in &question.values {
            match value {
                Value::Device(uuid) => match devices(*uuid) {
                    Some(Handle(handle)) => words.push(handle as u64),
                    None => return LOST,
                },
                Value::Number(number) => words.push(*number),
                Value::Nothing => words.push(0),
                Value::Memory(bytes) | Value::Sized(bytes) => {
                    let mut memory = in_words(bytes);
                    words.push(memory.as_mut_ptr() as u64);
                    memories.push(memory);
                }
            }
            if let Value::Sized(bytes) = value {
                words.push(bytes.len() as u64);
            }
        }
        words.resize(WORDS, 0);
        let [a, b, c, d, e, f] = words[..] else { return NO_FUNCTION };
        // SAFETY: `FUNCTIONS` says what it takes. Handles are its own, and memory is as long as it is to be, by its type, its version, or the number
        // that is passed with it.
        let result = unsafe { function(a, b, c, d, e, f) };
        let mut memories = memories.iter();
        for value in &mut question.values {
            if let Value::Memory(bytes) | Value::Sized(bytes) = value
                && let Some(memory) = memories.next()
            {
                let written = memory.iter().flat_map(|word| word.to_ne_bytes());
                bytes.iter_mut().zip(written).for_each(|(byte, written)| *byte = written);
            }
        }
        result
    }
}
