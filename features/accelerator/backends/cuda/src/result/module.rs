//! Modules and their kernels.

use std::ffi::CString;
use std::ptr;

use vm_accel::{Artifact, Error, NOTHING, NOTHING_BYTES, Result, Tensor};

use super::OUT_OF_MEMORY;
use super::log::Log;
use crate::image;
use crate::sys::{CUfunction, CUfunction_attribute, CUmodule, Driver};

/// Shared memory that a block may have without asking.
const SHARED_BYTES: u32 = 48 << 10;

/// A loaded module. It is unloaded by [`Module::unload`], or with the context.
pub(crate) struct Module(CUmodule);

// SAFETY: the handle is the driver's, which locks for itself.
unsafe impl Send for Module {}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    handle: CUfunction,
    block: [u32; 3],
    shared_bytes: u32,
    /// Is its block of parameters one parameter? The driver aligns one with tensor maps by itself.
    single: bool,
    /// Where its module has [`NOTHING`], if it has.
    nothing: Option<u64>,
}

/// The error as it is if the context is lost, else as one of loading.
fn or_bad(error: Error, bad: impl FnOnce(String) -> Error) -> Error {
    if error.is_lost() { error } else { bad(error.to_string()) }
}

// SAFETY: the handle is the driver's, which locks for itself; only a queue passes it to it.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads an artifact's image into the current context.
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
            return Err(if error.is_lost() || status == OUT_OF_MEMORY {
                error
            } else {
                bad(log.behind(&error))
            });
        }
        Ok(Self(handle))
    }

    /// Where it has [`NOTHING`], if it has.
    fn nothing(&self, driver: &Driver) -> Option<u64> {
        let name = CString::new(NOTHING).ok()?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the module is live, the name ends with a zero byte, the pointers are to locals.
        unsafe { driver.cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, self.0, name.as_ptr()) }
            .ok()?;
        (bytes >= NOTHING_BYTES as usize).then_some(address)
    }

    /// Unloads it.
    ///
    /// # Safety
    /// No command uses its kernels any more, and nobody gives them to one.
    pub(crate) unsafe fn unload(self, driver: &Driver) -> Result<()> {
        // SAFETY: the module is live until here; the caller promises the rest.
        unsafe { driver.cuModuleUnload(self.0) }
    }
}

impl Function {
    /// What a tensor map is made of for a view: itself, or of one without elements what its module has in their place.
    ///
    /// # Errors
    /// The view has no elements, and its module nothing in their place.
    pub(crate) fn there(&self, tensor: &Tensor, artifact: &Artifact) -> Result<Tensor> {
        match self.nothing {
            _ if !tensor.is_empty() => Ok(*tensor),
            Some(nothing) => Ok(tensor.there(nothing)),
            None => {
                let parameters = &artifact.signature().parameters;
                let parameter = parameters.get(tensor.tile().parameter as usize);
                Err(Error::Arguments {
                    kernel: artifact.entry().to_owned(),
                    parameter: parameter.map_or_else(String::new, |parameter| parameter.name.clone()),
                    reason: format!(
                        "it has no elements, is copied by a tensor map, and the module has no {NOTHING}"
                    ),
                })
            }
        }
    }

    /// Finds an artifact's kernel in its module.
    pub(crate) fn find(driver: &Driver, module: &Module, artifact: &Artifact) -> Result<Self> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let name = CString::new(artifact.entry()).map_err(|error| bad(error.to_string()))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the module is live, the name ends with a zero byte.
        unsafe { driver.cuModuleGetFunction(&raw mut handle, module.0, name.as_ptr()) }
            .map_err(|error| or_bad(error, bad))?;
        let signature = artifact.signature();
        let single = !artifact.params().maps.is_empty();
        let nothing = if single { module.nothing(driver) } else { None };
        let this =
            Self { handle, block: signature.block, shared_bytes: signature.shared_bytes, single, nothing };
        if let Some(load) = driver.cuFuncLoad {
            // Else its first launch loads it, and waits for whatever runs then.
            // SAFETY: the function is live.
            driver.check("cuFuncLoad", unsafe { load(handle) }).map_err(|error| or_bad(error, bad))?;
        }
        this.check_parameters(driver, artifact).map_err(bad)?;
        let most = this.attribute(driver, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        let threads = this.block.iter().fold(1u64, |threads, &size| threads.saturating_mul(u64::from(size)));
        if threads > u64::from(most) {
            return Err(bad(format!(
                "its blocks have {threads} threads, its registers leave room for {most}"
            )));
        }
        let declared = this.attribute(driver, CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        if this.shared_bytes > SHARED_BYTES.saturating_sub(declared) && this.shared_bytes > 0 {
            let opt_in = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = i32::try_from(this.shared_bytes).unwrap_or(i32::MAX);
            // SAFETY: the function is live.
            unsafe { driver.cuFuncSetAttribute(handle, opt_in, bytes) }.map_err(|error| {
                let wanted = this.shared_bytes;
                or_bad(error, |error| bad(format!("{wanted} bytes of shared memory for a block: {error}")))
            })?;
        }
        Ok(this)
    }

    fn attribute(&self, driver: &Driver, attribute: CUfunction_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the function is live, the pointer is to a local.
        unsafe { driver.cuFuncGetAttribute(&raw mut value, attribute, self.handle) }?;
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
            if unsafe { info(self.handle, known.len(), &raw mut offset, &raw mut bytes) } != 0 {
                break;
            }
            known.push(offset..offset + bytes);
            if self.single {
                // Where it begins is for the driver to know.
                known[0] = 0..bytes;
                break;
            }
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

    pub(super) fn handle(&self) -> CUfunction {
        self.handle
    }

    pub(super) fn block(&self) -> [u32; 3] {
        self.block
    }

    pub(super) fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    pub(super) fn is_single(&self) -> bool {
        self.single
    }
}
