//! Modules: a text whose first line is `vm-cuda-fake`, behind `// ` where it is PTX as well, or a fat binary that has this somewhere in it, has these
//! kernels, whatever their grid:
//!
//! | kernel | parameters | does |
//! | --- | --- | --- |
//! | `fill` | address, `u64` n, `u32` value | sets n words |
//! | `add` | address dst, address a, address b, `u64` n | adds n words, wrapping |
//! | `copy` | address dst, address src, `u64` n | copies n words |
//! | `sum` | address out, address src, `u64` n | one word: the sum of n, wrapping |
//! | `poll` | address, `u32` expected, `u64` microseconds | spins until a word has the value, or the time is over |
//! | `store` | address, `u32` value | sets a word |
//! | `empty` | | nothing |
//!
//! A word is a `u32`, an address a `u64`. A kernel that touches what it may not has done nothing else.

use crate::{
    error::{Error, Result},
    memory::{By, READ_WRITE},
    state::{self, State},
    stream::Work,
    sys,
};
use std::{
    ffi::{c_char, c_void},
    sync::MutexGuard,
    thread,
    time::{Duration, Instant},
};

const MAGIC: &str = "vm-cuda-fake";
const COMMENT: &str = "// ";

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kernel {
    Fill,
    Add,
    Copy,
    Sum,
    Poll,
    Store,
    Empty,
}

impl Kernel {
    const ALL: [(&'static str, Self, &'static [usize]); 7] = [
        ("fill", Self::Fill, &[8, 8, 4]),
        ("add", Self::Add, &[8, 8, 8, 8]),
        ("copy", Self::Copy, &[8, 8, 8]),
        ("sum", Self::Sum, &[8, 8, 8]),
        ("poll", Self::Poll, &[8, 4, 8]),
        ("store", Self::Store, &[8, 4]),
        ("empty", Self::Empty, &[]),
    ];

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, ..)| *known == name).map(|&(_, kernel, _)| kernel)
    }

    fn sizes(self) -> &'static [usize] {
        Self::ALL.iter().find(|(_, kernel, _)| *kernel == self).map_or(&[], |&(.., sizes)| sizes)
    }

    /// Offset and size of a parameter.
    fn parameter(self, index: usize) -> Result<(usize, usize)> {
        let sizes = self.sizes();
        let size = *sizes.get(index).ok_or(Error::InvalidValue)?;
        Ok((
            sizes[..index]
                .iter()
                .fold(0usize, |at, size| at.next_multiple_of(*size) + size)
                .next_multiple_of(size),
            size,
        ))
    }
}

/// A kernel with its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    kernel: Kernel,
    parameters: [u64; 4],
}

impl Launch {
    /// Runs it: `poll` with the state unlocked in between.
    pub(crate) fn run(
        &self,
        mut state: MutexGuard<'static, State>,
        context: u64,
    ) -> (MutexGuard<'static, State>, Result) {
        if self.kernel != Kernel::Poll {
            let result = self.compute(&state, context);
            return (state, result);
        }
        let [at, expected, timeout, _] = self.parameters;
        let start = Instant::now();
        loop {
            let Some(word) = state.reach(at, 4, By::Kernel(context), 1, false) else {
                return (state, Err(Error::IllegalAddress));
            };
            let over = start.elapsed() >= Duration::from_micros(timeout) || !state.works(context);
            if word.load(0) == expected as u32 || over {
                return (state, Ok(()));
            }
            drop(state);
            thread::sleep(Duration::from_micros(20));
            state = state::lock();
        }
    }

    fn compute(&self, state: &State, context: u64) -> Result {
        let words = |at: u64, count: u64, need| {
            let len = usize::try_from(count)
                .ok()
                .and_then(|count| count.checked_mul(4))
                .filter(|len| *len < 1 << 40);
            len.and_then(|len| state.reach(at, len, By::Kernel(context), need, false))
                .ok_or(Error::IllegalAddress)
        };
        let [a, b, c, d] = self.parameters;
        match self.kernel {
            Kernel::Fill => words(a, b, READ_WRITE)?.fill(c as u32, 4),
            Kernel::Add => {
                let (dst, x, y) = (words(a, d, READ_WRITE)?, words(b, d, 1)?, words(c, d, 1)?);
                (0..d as usize).for_each(|i| dst.store(i, x.load(i).wrapping_add(y.load(i))));
            }
            Kernel::Copy => words(a, c, READ_WRITE)?.copy_from(words(b, c, 1)?),
            Kernel::Sum => {
                let (out, src) = (words(a, 1, READ_WRITE)?, words(b, c, 1)?);
                out.store(0, (0..c as usize).fold(0, |sum: u32, i| sum.wrapping_add(src.load(i))));
            }
            Kernel::Store => words(a, 1, READ_WRITE)?.store(0, b as u32),
            Kernel::Poll | Kernel::Empty => {}
        }
        Ok(())
    }
}

/// Whether an image is one of the fake's.
pub(crate) fn is_image(image: *const c_char) -> Result<bool> {
    if let Some(binary) = sys::fat_binary(image) {
        return Ok(binary.windows(MAGIC.len()).any(|bytes| bytes == MAGIC.as_bytes()));
    }
    let text = sys::text(image, COMMENT.len() + MAGIC.len() + 2).ok_or(Error::InvalidValue)?;
    let first = text.lines().next().unwrap_or_default();
    Ok(first.strip_prefix(COMMENT).unwrap_or(first) == MAGIC)
}

/// `cuModuleLoadData`.
pub(crate) fn load(image: *const c_char) -> Result<u64> {
    let is_image = is_image(image)?;
    let mut state = state::lock();
    let context = state.current()?;
    if !is_image {
        return Err(Error::InvalidImage);
    }
    let id = state.id();
    state.modules.insert(id, context);
    Ok(id)
}

/// `cuModuleLoad`.
pub(crate) fn load_file(path: *const c_char) -> Result<u64> {
    let path = sys::text(path, 4096).ok_or(Error::InvalidValue)?;
    state::lock().current()?;
    let text = std::fs::read(path).map_err(|_| Error::NotFound)?;
    let text = std::ffi::CString::new(text).map_err(|_| Error::InvalidImage)?;
    load(text.as_ptr())
}

/// `cuModuleUnload`.
pub(crate) fn unload(id: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    state.modules.remove(&id).ok_or(Error::InvalidHandle)?;
    state.functions.retain(|_, (module, _)| *module != id);
    Ok(())
}

/// `cuModuleGetFunction`.
pub(crate) fn function(module: u64, name: *const c_char) -> Result<u64> {
    let name = sys::text(name, 4096).ok_or(Error::InvalidValue)?;
    {
        let state = state::lock();
        state.current()?;
        if !state.modules.contains_key(&module) {
            return Err(Error::InvalidHandle);
        }
    }
    function_of(module, Kernel::named(&name).ok_or(Error::NotFound)?)
}

/// The function of a kernel in a module.
pub(crate) fn function_of(module: u64, kernel: Kernel) -> Result<u64> {
    let mut state = state::lock();
    let known = state.functions.iter().find(|(_, known)| **known == (module, kernel));
    if let Some((&id, _)) = known {
        return Ok(id);
    }
    let id = state.id();
    state.functions.insert(id, (module, kernel));
    Ok(id)
}

/// `cuModuleGetGlobal`: there is none.
pub(crate) fn global(module: u64) -> Result {
    let state = state::lock();
    state.current()?;
    if state.modules.contains_key(&module) { Err(Error::NotFound) } else { Err(Error::InvalidHandle) }
}

/// The module of a function.
pub(crate) fn module_of(function: u64) -> Result<u64> {
    state::lock().functions.get(&function).map(|&(module, _)| module).ok_or(Error::InvalidHandle)
}

/// `cuFuncGetParamInfo`: offset and size.
pub(crate) fn parameter(function: u64, index: usize) -> Result<(usize, usize)> {
    state::lock().kernel(function)?.parameter(index)
}

/// `cuFuncGetAttribute`.
pub(crate) fn attribute(function: u64, attribute: i32) -> Result<i32> {
    state::lock().kernel(function)?;
    match attribute {
        0 => Ok(1024),
        4 => Ok(16),
        5 | 6 => Ok(90),
        1..=15 => Ok(0),
        _ => Err(Error::InvalidValue),
    }
}

/// Launches a function; parameters are read before it returns.
pub(crate) fn launch(
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    handle: u64,
    parameters: *const *const u64,
    extra: *const c_void,
) -> Result {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    let kernel = state.kernel(function)?;
    let threads = block.iter().try_fold(1u32, |all, side| all.checked_mul(*side));
    if grid.contains(&0) || !threads.is_some_and(|threads| (1..=1024).contains(&threads)) {
        return Err(Error::InvalidValue);
    }
    if parameters.is_null() || !extra.is_null() {
        return Err(Error::InvalidValue);
    }
    let mut values = [0; 4];
    for (index, (value, size)) in values.iter_mut().zip(kernel.sizes()).enumerate() {
        let at = sys::read_at(parameters, index).ok_or(Error::InvalidValue)?;
        let read = if *size == 8 { sys::read(at) } else { sys::read(at.cast::<u32>()).map(u64::from) };
        *value = read.ok_or(Error::InvalidValue)?;
    }
    state.submit(stream, Work::Launch(Launch { kernel, parameters: values }), Vec::new()).map(drop)
}
