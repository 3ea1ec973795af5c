//! The library's symbols, and who calls them with an [`Owner`]'s stream and memory.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, ensure};
use vmkernels::checks::{ARENA, ARENAS, Caller};
use vmkernels::sys::{by_name, vmk_last_error, vmk_use};

use crate::borrow::sys::Owner;

/// The library: a file's, or this program's.
pub(super) struct Library {
    loaded: Option<(libloading::Library, PathBuf)>,
    /// Where functions are of one that was closed.
    symbols: HashMap<&'static str, *const c_void>,
}

/// `VMK_CPU` and `VMK_GPU`.
const GPU: i32 = 2;

impl Library {
    /// The library in a file; without one that of this program. Calls go to the GPU.
    pub(super) fn open(file: Option<&Path>) -> anyhow::Result<Rc<Library>> {
        let load = |file: &Path| {
            // SAFETY: it is libvmkernels.so, whose constructors do nothing.
            let library = unsafe { libloading::Library::new(file) };
            anyhow::Ok((library.with_context(|| format!("loading {}", file.display()))?, file.to_owned()))
        };
        let this = Library { loaded: file.map(load).transpose()?, symbols: HashMap::new() };
        this.choose_gpu()?;
        Ok(Rc::new(this))
    }

    pub(super) fn file(&self) -> Option<PathBuf> {
        self.loaded.as_ref().map(|(_, file)| file.clone())
    }

    /// Where its functions are from.
    pub(super) fn from(&self) -> String {
        self.file().map_or("this program".into(), |file| file.display().to_string())
    }

    /// A function.
    pub(super) fn symbol(&self, name: &str) -> anyhow::Result<*const c_void> {
        match &self.loaded {
            None if self.symbols.contains_key(name) => Ok(self.symbols[name]),
            None => by_name::place(name).with_context(|| format!("no function {name}")),
            Some((library, _)) => {
                // SAFETY: here it is a pointer alone.
                let symbol = unsafe { library.get::<*const c_void>(name.as_bytes()) };
                let symbol = symbol.with_context(|| name.to_owned())?;
                // SAFETY: the library is never unloaded, as it is linked.
                Ok(unsafe { symbol.try_as_raw_ptr() }.context("no address")?)
            }
        }
    }

    /// Calls go to the GPU.
    pub(super) fn choose_gpu(&self) -> anyhow::Result<()> {
        let choose = match &self.loaded {
            None => vmk_use as extern "C" fn(i32) -> _,
            Some((library, _)) => {
                // SAFETY: the signature is that of the header.
                *unsafe { library.get::<extern "C" fn(i32) -> vmkernels::sys::vmk_status>(b"vmk_use") }?
            }
        };
        let status = choose(GPU) as i32;
        ensure!(status == 0, "vmk_use: {status}: {}", self.last()?);
        Ok(())
    }

    /// The text of this thread's last error.
    pub(super) fn last(&self) -> anyhow::Result<String> {
        let last = match &self.loaded {
            None => vmk_last_error as extern "C" fn() -> *const c_char,
            Some((library, _)) => {
                // SAFETY: the signature is that of the header.
                *unsafe { library.get::<extern "C" fn() -> *const c_char>(b"vmk_last_error") }?
            }
        };
        // SAFETY: it is a string until this thread's next call.
        Ok(unsafe { CStr::from_ptr(last()) }.to_string_lossy().into_owned())
    }
}

/// Calls with an owner's stream, and arenas of its memory.
pub(super) struct OnGpu {
    library: Rc<Library>,
    owner: Owner,
    arenas: Vec<u64>,
    /// Are calls captured, and the graph launched?
    capture: Cell<bool>,
    /// Are calls made without a current context?
    without: Cell<bool>,
    graphs: Cell<usize>,
}

impl OnGpu {
    pub(super) fn new(library: &Rc<Library>, owner: Owner) -> anyhow::Result<OnGpu> {
        library.choose_gpu()?;
        let arenas = (0..ARENAS).map(|_| owner.allocate(ARENA as u64)).collect::<Result<_, _>>()?;
        let (capture, without, graphs) = Default::default();
        Ok(OnGpu { library: Rc::clone(library), owner, arenas, capture, without, graphs })
    }

    pub(super) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Calls go to the GPU again.
    pub(super) fn choose(&self) -> anyhow::Result<()> {
        self.library.choose_gpu()
    }

    pub(super) fn capture(&mut self, capture: bool) {
        self.capture.set(capture);
    }

    pub(super) fn graphs(&self) -> usize {
        self.graphs.get()
    }

    pub(super) fn without_context(&mut self, without: bool) -> anyhow::Result<()> {
        self.without.set(without);
        if without {
            self.owner.leave()?
        } else {
            self.owner.enter()?
        }
        Ok(())
    }

    fn launched(&self, name: &str, words: &[u64]) -> anyhow::Result<i32> {
        let function = self.library.symbol(name)?;
        let call = || {
            // SAFETY: the function is that of the name; addresses are those of arenas, which have room for what is computed there, or the call
            // is refused.
            let status = unsafe { by_name::call(name, function, words) };
            status.with_context(|| format!("{name} has not {} parameters", words.len()))
        };
        if self.capture.get() && !name.ends_with("_workspace_size") {
            let mut status = 0;
            let graph = self.owner.capture(|| {
                status = call()?;
                Ok(())
            })?;
            graph.launch()?;
            self.graphs.set(self.graphs.get() + 1);
            return Ok(status);
        }
        call()
    }

    /// Calls a function, and waits for nothing.
    pub(super) fn only(&self, name: &str, words: &[u64]) -> anyhow::Result<i32> {
        self.launched(name, words)
    }

    /// Closes the library's file, whose functions are called on.
    pub(super) fn close_library(&mut self) -> anyhow::Result<()> {
        let symbols = by_name::TABLE.iter().map(|entry| Ok((entry.name, self.library.symbol(entry.name)?)));
        let symbols = symbols.collect::<anyhow::Result<_>>()?;
        self.library = Rc::new(Library { loaded: None, symbols });
        Ok(())
    }

    /// Does `f` with the owner's context.
    fn entered<R>(&self, f: impl FnOnce() -> anyhow::Result<R>) -> Result<R, String> {
        let without = self.without.get();
        let inside = || {
            if without {
                self.owner.enter()?;
            }
            let done = f();
            if without {
                self.owner.leave()?;
            }
            done
        };
        inside().map_err(|error| format!("{error:#}"))
    }
}

impl Caller for OnGpu {
    fn call(&mut self, name: &str, words: &[u64]) -> Result<i32, String> {
        let status = self.launched(name, words).map_err(|error| format!("{name}: {error:#}"))?;
        self.entered(|| Ok(self.owner.wait()?)).map_err(|error| format!("{name}: {error}"))?;
        Ok(status)
    }

    fn last(&mut self) -> String {
        self.library.last().unwrap_or_else(|error| error.to_string())
    }

    fn arena(&self, number: usize) -> u64 {
        self.arenas[number]
    }

    fn write(&mut self, number: usize, bytes: &[u8]) -> Result<(), String> {
        self.entered(|| {
            self.owner.copy(
                self.arenas[number],
                bytes.as_ptr().expose_provenance() as u64,
                bytes.len() as u64,
            )?;
            Ok(self.owner.wait()?)
        })
    }

    fn read(&mut self, number: usize, bytes: &mut [u8]) -> Result<(), String> {
        self.entered(|| {
            let to = bytes.as_mut_ptr().expose_provenance() as u64;
            self.owner.copy(to, self.arenas[number], bytes.len() as u64)?;
            Ok(self.owner.wait()?)
        })
    }

    fn stream(&self) -> u64 {
        self.owner.stream()
    }
}
