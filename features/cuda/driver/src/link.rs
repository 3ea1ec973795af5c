//! `cuLink…`: modules of PTX become one, which the driver compiles when it is loaded.

use std::ffi::{c_char, c_void};

use crate::{
    error::{Error, Result},
    image,
    jit::Options,
    module::{self, Refusal},
    state, sys,
};

/// `CU_JIT_INPUT_PTX`.
const PTX: i32 = 1;
/// `CU_JIT_INPUT_FATBINARY`.
const FAT_BINARY: i32 = 2;
/// `CU_JIT_INPUT_OBJECT`.
pub(crate) const OBJECT: i32 = 3;
/// `CU_JIT_INPUT_LIBRARY`.
pub(crate) const LIBRARY: i32 = 4;
/// The most bytes of a name.
const NAME: usize = 4096;

/// PTX that is to be linked.
#[cfg_attr(not(feature = "cpu"), expect(dead_code, reason = "no PTX is read without the feature"))]
pub(crate) struct Input {
    pub(crate) name: String,
    pub(crate) text: String,
    /// Whether it is linked only if it defines a name that other inputs refer to.
    pub(crate) is_optional: bool,
}

/// A link, from `cuLinkCreate` to `cuLinkDestroy`.
#[derive(Default)]
pub(crate) struct Link {
    options: Options,
    inputs: Vec<Input>,
    /// An image whose kernels are the driver's own: it can only be alone.
    own: Option<Vec<u8>>,
    /// The result, at a stable address.
    linked: Option<Box<[u8]>>,
}

/// `cuLinkCreate`.
pub(crate) fn create(options: Options) -> Result<u64> {
    let mut state = state::lock();
    state.current()?;
    let id = state.id();
    state.links.insert(id, Link { options, ..Link::default() });
    Ok(id)
}

/// `cuLinkAddData`.
pub(crate) fn add(link: u64, kind: i32, data: *const c_void, size: usize, name: *const c_char) -> Result {
    let name = sys::text(name, NAME).unwrap_or_else(|| "<input>".to_owned());
    let bytes = sys::bytes(data, size).ok_or(Error::InvalidValue)?;
    add_image(link, kind, name, bytes)
}

/// `cuLinkAddFile`.
pub(crate) fn add_file(link: u64, kind: i32, path: *const c_char) -> Result {
    let path = sys::text(path, NAME).ok_or(Error::InvalidValue)?;
    let bytes = std::fs::read(&path).map_err(|_| Error::FileNotFound)?;
    add_image(link, kind, path, bytes)
}

fn add_image(link: u64, kind: i32, name: String, bytes: Vec<u8>) -> Result {
    let read = || -> Result<_, Refusal> {
        let image = match kind {
            PTX | FAT_BINARY => image::of(bytes)?,
            OBJECT | LIBRARY => bytes,
            0 => return Err(refusal("machine code of a GPU cannot be linked; link PTX instead")),
            5 => return Err(refusal("NVVM IR and LTO IR cannot be linked; link PTX instead")),
            _ => return Err(Error::InvalidValue.into()),
        };
        match module::is_own(&image) {
            true => Ok((Some(image), Vec::new())),
            false => Ok((None, crate::ptx::inputs(kind, &name, image)?)),
        }
    };
    let read = read();
    let mut state = state::lock();
    let link = state.links.get_mut(&link).ok_or(Error::InvalidHandle)?;
    let (own, inputs) = read.map_err(|refusal| {
        link.options.log_error(&format!("{name}: {}", refusal.reason));
        refusal.error
    })?;
    if link.own.is_some() || own.is_some() && !link.inputs.is_empty() {
        return Err(Error::NotSupported);
    }
    link.own = own;
    link.inputs.extend(inputs);
    Ok(())
}

fn refusal(reason: &str) -> Refusal {
    Refusal { error: Error::NoBinaryForGpu, reason: reason.to_owned() }
}

/// `cuLinkComplete`: address and size of the result.
pub(crate) fn complete(link: u64) -> Result<(u64, usize)> {
    let mut found = state::lock().links.remove(&link).ok_or(Error::InvalidHandle)?;
    // Without the lock: other calls do not wait for the linker.
    let completed = found.complete();
    state::lock().links.insert(link, found);
    completed
}

impl Link {
    fn complete(&mut self) -> Result<(u64, usize)> {
        let image = match &self.linked {
            Some(image) => image,
            None => {
                let mut image = self.link()?;
                image.push(0);
                self.linked.insert(image.into())
            }
        };
        Ok((image.as_ptr().expose_provenance() as u64, image.len()))
    }

    fn link(&mut self) -> Result<Vec<u8>> {
        if let Some(image) = &self.own {
            return Ok(image.clone());
        }
        if self.inputs.is_empty() {
            return Err(Error::InvalidValue);
        }
        let linked = crate::ptx::link(&self.inputs, self.options.max_registers);
        let linked = linked.map(String::into_bytes).map_err(|refusal| {
            self.options.log_error(&refusal.reason);
            refusal.error
        })?;
        if self.options.is_verbose {
            let program = module::read(linked.clone(), None).ok();
            for kernel in program
                .iter()
                .flat_map(|program| program.kernels().into_iter().filter_map(|name| program.kernel(&name)))
            {
                let [shared, local, registers] = [1, 3, 4].map(|attribute| kernel.attribute(attribute));
                self.options.log_info(&format!(
                    "{}: {registers} registers, {shared} bytes of shared memory, {local} bytes of local memory",
                    kernel.name()
                ));
            }
        }
        Ok(linked)
    }
}

/// `cuLinkDestroy`.
pub(crate) fn destroy(link: u64) -> Result {
    state::lock().links.remove(&link).map(drop).ok_or(Error::InvalidHandle)
}
