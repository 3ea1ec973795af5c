//! Libraries: images that are modules of each context they are used in, and kernels, which are functions there.

use std::{collections::BTreeMap, ffi::c_char};

use crate::{
    error::{Error, Result},
    module::{self, Kernel},
    state::{self, State},
    sys,
};

/// All libraries, and the kernels that programs asked for.
#[derive(Default)]
pub(crate) struct Libraries {
    /// Their modules by contexts.
    modules: BTreeMap<u64, BTreeMap<u64, u64>>,
    kernels: BTreeMap<u64, (u64, Kernel)>,
}

impl State {
    /// The kernel that a handle of a function or of a kernel means.
    pub(crate) fn kernel(&self, handle: u64) -> Result<Kernel> {
        let function = self.functions.get(&handle).map(|&(_, kernel)| kernel);
        function.or_else(|| Some(self.libraries.kernels.get(&handle)?.1)).ok_or(Error::InvalidHandle)
    }
}

/// `cuLibraryLoadData`.
pub(crate) fn load(image: *const c_char) -> Result<u64> {
    if !module::is_image(image)? {
        return Err(Error::InvalidImage);
    }
    let mut state = state::lock();
    let id = state.id();
    state.libraries.modules.insert(id, BTreeMap::new());
    Ok(id)
}

/// `cuLibraryUnload`.
pub(crate) fn unload(library: u64) -> Result {
    let mut state = state::lock();
    let modules = state.libraries.modules.remove(&library).ok_or(Error::InvalidHandle)?;
    state.libraries.kernels.retain(|_, (of, _)| *of != library);
    for module in modules.values() {
        state.modules.remove(module);
        state.functions.retain(|_, (of, _)| of != module);
    }
    Ok(())
}

/// `cuLibraryGetKernel`.
pub(crate) fn kernel(library: u64, name: *const c_char) -> Result<u64> {
    let name = sys::text(name, 4096).ok_or(Error::InvalidValue)?;
    let mut state = state::lock();
    if !state.libraries.modules.contains_key(&library) {
        return Err(Error::InvalidHandle);
    }
    let wanted = (library, Kernel::named(&name).ok_or(Error::NotFound)?);
    if let Some((&id, _)) = state.libraries.kernels.iter().find(|(_, known)| **known == wanted) {
        return Ok(id);
    }
    let id = state.id();
    state.libraries.kernels.insert(id, wanted);
    Ok(id)
}

/// `cuLibraryGetModule`: the one of the current context.
pub(crate) fn module(library: u64) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    let modules = state.libraries.modules.get(&library).ok_or(Error::InvalidHandle)?;
    // That of a context that was destroyed went with it.
    if let Some(&module) = modules.get(&context).filter(|module| state.modules.contains_key(*module)) {
        return Ok(module);
    }
    let id = state.id();
    state.modules.insert(id, context);
    if let Some(modules) = state.libraries.modules.get_mut(&library) {
        modules.insert(context, id);
    }
    Ok(id)
}

/// `cuKernelGetFunction`: the one of the current context.
pub(crate) fn function(kernel: u64) -> Result<u64> {
    let (library, kernel) = *state::lock().libraries.kernels.get(&kernel).ok_or(Error::InvalidHandle)?;
    module::function_of(module(library)?, kernel)
}

/// `cuKernelGetLibrary`.
pub(crate) fn library_of(kernel: u64) -> Result<u64> {
    state::lock().libraries.kernels.get(&kernel).map(|&(library, _)| library).ok_or(Error::InvalidHandle)
}
