//! Modules with their one kernel.

use std::ffi::CString;
use std::ptr;

use vm_accel::{Artifact, Error, Result};

use super::ended;
use super::log::Log;
use crate::image;
use crate::sys::{CUfunction, CUfunction_attribute, CUmodule, Driver};

/// Shared memory that a block may have without asking.
const SHARED_BYTES: u32 = 48 << 10;

/// A loaded module and its kernel. It is unloaded by [`Module::unload`], or with the context.
#[derive(Debug)]
pub(crate) struct Module {
    handle: CUmodule,
    function: CUfunction,
    block: [u32; 3],
    shared_bytes: u32,
}

/// The error as it is if the context is lost, else as one of loading.
fn or_bad(error: Error, bad: impl FnOnce(String) -> Error) -> Error {
    if error.is_lost() { error } else { bad(error.to_string()) }
}

// SAFETY: the handles are the driver's, which locks for itself; only a queue passes them to it.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads an artifact into the current context.
    pub(crate) fn load(driver: &Driver, artifact: &Artifact) -> Result<Self> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let image = image::checked(artifact.image()).map_err(bad)?;
        let mut log = Log::new();
        let (count, options, values) = log.options();
        let mut handle = ptr::null_mut();
        // SAFETY: the image is text that ends with a zero byte, or an ELF file whose parts lie within it; the log and
        // the options outlive the call.
        let status = unsafe {
            (driver.cuModuleLoadDataEx)(&raw mut handle, image.as_ptr().cast(), count, options, values)
        };
        if let Err(error) = driver.check("cuModuleLoadDataEx", status) {
            return Err(if error.is_lost() { error } else { bad(log.behind(&error)) });
        }
        let signature = artifact.signature();
        let (block, shared_bytes) = (signature.block, signature.shared_bytes);
        let mut module = Self { handle, function: ptr::null_mut(), block, shared_bytes };
        match module.find(driver, artifact) {
            Ok(()) => Ok(module),
            Err(error) => {
                // SAFETY: it was loaded just now.
                ended(unsafe { driver.cuModuleUnload(handle) });
                Err(error)
            }
        }
    }

    fn find(&mut self, driver: &Driver, artifact: &Artifact) -> Result<()> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let name = CString::new(artifact.entry()).map_err(|error| bad(error.to_string()))?;
        // SAFETY: the module is live, the name ends with a zero byte.
        unsafe { driver.cuModuleGetFunction(&raw mut self.function, self.handle, name.as_ptr()) }
            .map_err(|error| or_bad(error, bad))?;
        if let Some(load) = driver.cuFuncLoad {
            // Else its first launch loads it, and waits for whatever runs then.
            // SAFETY: the function is live.
            driver.check("cuFuncLoad", unsafe { load(self.function) }).map_err(|error| or_bad(error, bad))?;
        }
        self.check_parameters(driver, artifact).map_err(bad)?;
        let most = self.attribute(driver, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        let items = self.block.iter().fold(1u64, |items, &size| items.saturating_mul(u64::from(size)));
        if items > u64::from(most) {
            return Err(bad(format!(
                "its blocks have {items} work-items, its registers leave room for {most}"
            )));
        }
        let declared = self.attribute(driver, CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        if self.shared_bytes > SHARED_BYTES.saturating_sub(declared) && self.shared_bytes > 0 {
            let opt_in = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = i32::try_from(self.shared_bytes).unwrap_or(i32::MAX);
            // SAFETY: the function is live.
            unsafe { driver.cuFuncSetAttribute(self.function, opt_in, bytes) }.map_err(|error| {
                let wanted = self.shared_bytes;
                or_bad(error, |error| bad(format!("{wanted} bytes of shared memory for a block: {error}")))
            })?;
        }
        Ok(())
    }

    fn attribute(&self, driver: &Driver, attribute: CUfunction_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the function is live, the pointer is to a local.
        unsafe { driver.cuFuncGetAttribute(&raw mut value, attribute, self.function) }?;
        Ok(value.max(0) as u32)
    }

    /// That the artifact's layout is the kernel's. Drivers before CUDA 12.4 do not tell theirs.
    fn check_parameters(&self, driver: &Driver, artifact: &Artifact) -> Result<(), String> {
        let Some(info) = driver.cuFuncGetParamInfo else { return Ok(()) };
        let wanted = artifact.parameter_bytes() as usize;
        let mut known: Vec<std::ops::Range<usize>> = Vec::new();
        // Not one more than there should be: what is refused is an error to those who watch the driver's calls.
        while known.iter().map(|range| range.end).max().unwrap_or(0) < wanted {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is live, the pointers are to locals; an index past the last is refused.
            if unsafe { info(self.function, known.len(), &raw mut offset, &raw mut bytes) } != 0 {
                break;
            }
            known.push(offset..offset + bytes);
        }
        let end = known.iter().map(|range| range.end).max().unwrap_or(0);
        if end != wanted {
            return Err(format!("its layout has {wanted} bytes of parameters, the module's kernel {end}"));
        }
        for (offset, bytes) in artifact.params().fields() {
            let field = offset as usize..(offset + bytes) as usize;
            if !known.iter().any(|range| range.start <= field.start && field.end <= range.end) {
                return Err(format!("the parameter at {field:?} is none of the module's kernel"));
            }
        }
        Ok(())
    }

    pub(super) fn function(&self) -> CUfunction {
        self.function
    }

    /// A number that no other loaded module has.
    pub(crate) fn id(&self) -> usize {
        self.handle.expose_provenance()
    }

    pub(super) fn block(&self) -> [u32; 3] {
        self.block
    }

    pub(super) fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// Unloads the module with this number.
    ///
    /// # Safety
    /// It is that of a module which [`load`](Self::load) gave and nobody unloaded. No command uses it any more, and nobody gives it
    /// to one.
    pub(crate) unsafe fn unload(driver: &Driver, id: usize) -> Result<()> {
        // SAFETY: it is a live handle, as the caller promises.
        unsafe { driver.cuModuleUnload(ptr::with_exposed_provenance_mut(id)) }
    }
}
