//! Libraries: images that are modules of each context they are used in, and kernels, which are functions there.

use std::{collections::BTreeMap, ffi::c_char, sync::Arc};

use crate::{
    error::{Error, Result},
    module::{self, Kernel, Program, Refusal},
    state::{self, State},
    sys,
};

/// All libraries, and the kernels that programs asked for.
#[derive(Default)]
pub(crate) struct Libraries {
    libraries: BTreeMap<u64, Library>,
    kernels: BTreeMap<u64, (u64, Arc<dyn Kernel>)>,
}

struct Library {
    program: Arc<dyn Program>,
    /// Its modules by contexts.
    modules: BTreeMap<u64, u64>,
    /// Whether NVIDIA's runtime loaded it, for kernels that the program launches by their host functions.
    is_runtimes: bool,
    /// The address of its variables if some are managed. Managed variables exist without a context, so all modules of the library share one copy.
    data: Option<u64>,
}

impl Libraries {
    /// The program of the library that has its variables there.
    pub(crate) fn program_at(&self, data: u64) -> Option<&Arc<dyn Program>> {
        let library = self.libraries.values().find(|library| library.data == Some(data));
        library.map(|library| &library.program)
    }
}

impl State {
    /// The kernel that a handle of a function or of a kernel means.
    pub(crate) fn kernel(&self, handle: u64) -> Result<Arc<dyn Kernel>> {
        let function = self.functions.get(&handle).map(|function| &function.kernel);
        let kernel = function.or_else(|| Some(&self.libraries.kernels.get(&handle)?.1));
        kernel.cloned().ok_or(Error::InvalidHandle)
    }

    /// Whether a handle is of a kernel that NVIDIA's runtime launches.
    pub(crate) fn is_runtimes(&self, kernel: u64) -> bool {
        let library =
            self.libraries.kernels.get(&kernel).and_then(|(of, _)| self.libraries.libraries.get(of));
        library.is_some_and(|library| library.is_runtimes)
    }

    /// Whether a handle is of a kernel of a library, which is no function yet.
    pub(crate) fn is_of_library(&self, handle: u64) -> bool {
        self.libraries.kernels.contains_key(&handle)
    }

    fn program(&self, library: u64) -> Result<Arc<dyn Program>> {
        self.libraries
            .libraries
            .get(&library)
            .map(|library| Arc::clone(&library.program))
            .ok_or(Error::InvalidHandle)
    }
}

/// `cuLibraryLoadData`.
pub(crate) fn load(image: Vec<u8>, is_runtimes: bool, max_registers: Option<u32>) -> Result<u64, Refusal> {
    let program = module::read(image, max_registers)?;
    let mut state = state::lock();
    let id = state.id();
    state
        .libraries
        .libraries
        .insert(id, Library { program, modules: BTreeMap::new(), is_runtimes, data: None });
    Ok(id)
}

/// `cuLibraryUnload`.
pub(crate) fn unload(library: u64) -> Result {
    let mut state = state::lock();
    let library_ = state.libraries.libraries.remove(&library).ok_or(Error::InvalidHandle)?;
    let kernels = state.libraries.kernels.extract_if(.., |_, (of, _)| *of == library);
    let ended: Vec<u64> = kernels.map(|(kernel, _)| kernel).chain([library]).collect();
    state.free_ids(ended);
    for (context, module) in library_.modules {
        // Those of a context that was destroyed went with it.
        let Some(device) = state.contexts.get(&context).map(|context| context.device) else { continue };
        state = crate::memory::drain_device(state, device)?;
        if state.modules.contains_key(&module) {
            state.remove_module(module)?;
        }
    }
    library_.data.map_or(Ok(()), |data| state.release(data))
}

/// `cuLibraryGetKernel`.
pub(crate) fn kernel(library: u64, name: *const c_char) -> Result<u64> {
    let name = sys::text(name, 4096).ok_or(Error::InvalidValue)?;
    let mut state = state::lock();
    let kernel = state.program(library)?.kernel(&name).ok_or(Error::NotFound)?;
    Ok(state.handle_of(library, kernel))
}

/// `cuLibraryGetManaged`: address and size.
pub(crate) fn managed(library: u64, name: *const c_char) -> Result<(u64, usize)> {
    let name = sys::text(name, 4096).ok_or(Error::InvalidValue)?;
    let mut state = state::lock();
    if !state.initialized {
        return Err(Error::NotInitialized);
    }
    let program = state.program(library)?;
    let found = program.variable(&name).filter(|(offset, _)| program.is_managed(*offset));
    let (offset, size) = found.ok_or(Error::NotFound)?;
    let data = state.managed_data(library, &*program)?.ok_or(Error::NotFound)?;
    Ok((data + offset, size as usize))
}

impl State {
    /// Where the variables of a library are, if some are managed.
    fn managed_data(&mut self, library: u64, program: &dyn Program) -> Result<Option<u64>> {
        let known = self.libraries.libraries.get(&library).ok_or(Error::InvalidHandle)?.data;
        if known.is_some() || !program.has_managed() {
            return Ok(known);
        }
        let data = self.allocate_variables(0, 0, program)?;
        if let Some(library) = self.libraries.libraries.get_mut(&library) {
            library.data = Some(data);
        }
        Ok(Some(data))
    }

    fn handle_of(&mut self, library: u64, kernel: Arc<dyn Kernel>) -> u64 {
        let same = |(of, known): &(u64, Arc<dyn Kernel>)| *of == library && known.name() == kernel.name();
        if let Some((&id, _)) = self.libraries.kernels.iter().find(|(_, known)| same(known)) {
            return id;
        }
        let id = self.id();
        self.libraries.kernels.insert(id, (library, kernel));
        id
    }
}

/// `cuLibraryGetKernelCount` and `cuLibraryEnumerateKernels`: all of a library.
pub(crate) fn kernels(library: u64) -> Result<Vec<u64>> {
    let mut state = state::lock();
    let program = state.program(library)?;
    let kernels = program.kernels().into_iter().filter_map(|name| program.kernel(&name));
    Ok(kernels.map(|kernel| state.handle_of(library, kernel)).collect())
}

/// `cuLibraryGetModule`: the one of the current context.
pub(crate) fn module(library: u64) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    let known = state.libraries.libraries.get(&library).ok_or(Error::InvalidHandle)?;
    // That of a context that was destroyed went with it.
    if let Some(&module) = known.modules.get(&context).filter(|module| state.modules.contains_key(*module)) {
        return Ok(module);
    }
    let is_new_again =
        !known.modules.is_empty() && known.modules.values().all(|id| !state.modules.contains_key(id));
    let program = state.program(library)?;
    let data = state.managed_data(library, &*program)?;
    // The context that used the variables was destroyed, for example by a reset: initialize them again.
    if let (Some(data), true) = (data, is_new_again) {
        state.initialize_variables(data, &*program)?;
    }
    let id = state.add_module(context, program, data)?;
    if let Some(library) = state.libraries.libraries.get_mut(&library) {
        library.modules.insert(context, id);
    }
    Ok(id)
}

/// `cuKernelGetFunction`: the one of the current context.
pub(crate) fn function(kernel: u64) -> Result<u64> {
    let (library, kernel) =
        state::lock().libraries.kernels.get(&kernel).cloned().ok_or(Error::InvalidHandle)?;
    Ok(module::function_of(module(library)?, kernel))
}

/// `cuKernelGetLibrary`.
pub(crate) fn library_of(kernel: u64) -> Result<u64> {
    state::lock().libraries.kernels.get(&kernel).map(|&(library, _)| library).ok_or(Error::InvalidHandle)
}
