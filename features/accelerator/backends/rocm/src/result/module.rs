//! Modules and their kernels.

use std::ffi::CString;
use std::ptr;

use vm_accel::{Artifact, Error, Result};
use vm_assemble::elf;

use super::{Device, OUT_OF_MEMORY, or_bad};
use crate::descriptor::{Descriptor, Wanted};
use crate::sys;

/// A loaded module. It is unloaded by [`Module::unload`], or with the process.
pub(crate) struct Module {
    handle: sys::Module,
    /// The library may look at the image for as long as the module is there.
    _artifact: Artifact,
}

// SAFETY: the handle is the library's, which locks for itself.
unsafe impl Send for Module {}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    handle: sys::Function,
    block: [u32; 3],
    shared_bytes: u32,
}

// SAFETY: the handle is the library's, which locks for itself; only a queue passes it to it.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// That an image is a code object, whole.
fn check(image: &[u8]) -> Result<(), String> {
    /// `EM_AMDGPU`, at `e_machine`.
    const AMDGPU: [u8; 2] = [224, 0];
    if image.starts_with(b"target triple") {
        return Err(
            "the image is LLVM IR: assemble it to a code object first (llc and ld.lld of LLVM)".into()
        );
    }
    if !image.starts_with(elf::MAGIC) {
        return Err("the image is no code object, which is an ELF file".into());
    }
    elf::check(image)?;
    if image.len() < 64 {
        return Err("the ELF file is cut off".into());
    }
    match image.get(18..20) {
        Some(machine) if machine == AMDGPU => Ok(()),
        _ => Err("the ELF file is for another machine than AMD's GPUs".into()),
    }
}

impl Module {
    /// Loads an artifact's image onto a device.
    pub(crate) fn load(device: Device, artifact: &Artifact, target: &str) -> Result<Self> {
        /// `hipErrorNoBinaryForGpu`.
        const OTHER: i64 = 209;
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        check(artifact.image()).map_err(bad)?;
        let (_entered, mut handle) = (device.enter()?, ptr::null_mut());
        // SAFETY: the image is an ELF file whose parts lie within it, and is kept with the module.
        let loaded =
            unsafe { device.hip.hipModuleLoadData(&raw mut handle, artifact.image().as_ptr().cast()) };
        match loaded {
            Ok(()) => Ok(Self { handle, _artifact: artifact.clone() }),
            Err(error @ Error::Driver { code: OUT_OF_MEMORY, .. }) => Err(error),
            Err(error @ Error::Driver { code: OTHER, .. }) => {
                Err(bad(format!("it is for another GPU than {target}; compile it for this one ({error})")))
            }
            Err(error) => Err(or_bad(error, bad)),
        }
    }

    /// Unloads it.
    ///
    /// # Safety
    /// No command uses its kernels any more, and nobody gives them to one.
    pub(crate) unsafe fn unload(self, device: Device) -> Result<()> {
        // It is known by its handle, too, where the device is lost.
        let _entered = device.enter();
        // SAFETY: the module is live until here; the caller promises the rest.
        unsafe { device.hip.hipModuleUnload(self.handle) }
    }
}

impl Function {
    /// Finds an artifact's kernel in its module, on a device that has so much shared memory for a block, and waves of so many threads.
    pub(crate) fn find(
        device: Device,
        module: &Module,
        artifact: &Artifact,
        (most_shared, wavefront): (u32, u32),
    ) -> Result<Self> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let wanted = Wanted {
            parameter_bytes: artifact.parameter_bytes(),
            shared_bytes: artifact.signature().shared_bytes,
            most_shared,
            wavefront,
        };
        let descriptor = Descriptor::in_image(artifact.image(), artifact.entry());
        descriptor.and_then(|descriptor| descriptor.check(&wanted)).map_err(bad)?;
        let name = CString::new(artifact.entry()).map_err(|error| bad(error.to_string()))?;
        let (_entered, mut handle) = (device.enter()?, ptr::null_mut());
        // SAFETY: the module is live, the name ends with a zero byte.
        unsafe { device.hip.hipModuleGetFunction(&raw mut handle, module.handle, name.as_ptr()) }
            .map_err(|error| or_bad(error, bad))?;
        let signature = artifact.signature();
        let mut most = 0;
        // SAFETY: the function is live, the pointer is to a local.
        unsafe { device.hip.hipFuncGetAttribute(&raw mut most, sys::FUNCTION_BLOCK_THREADS, handle) }?;
        let threads = signature.block.iter().fold(1u64, |all, &size| all.saturating_mul(u64::from(size)));
        if threads > u64::from(most.max(0) as u32) {
            return Err(bad(format!("its blocks have {threads} threads, its code is for {most}")));
        }
        Ok(Self { handle, block: signature.block, shared_bytes: signature.shared_bytes })
    }

    pub(super) fn handle(&self) -> sys::Function {
        self.handle
    }

    pub(crate) fn block(&self) -> [u32; 3] {
        self.block
    }

    pub(super) fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_code_object_is_refused() {
        let elf = |machine: u8| {
            let mut image = [0; 64];
            image[..6].copy_from_slice(b"\x7fELF\x02\x01");
            image[18] = machine;
            image
        };
        let told = |image: &[u8], what: &str| match check(image) {
            Ok(()) => assert!(what.is_empty(), "not {what}"),
            Err(reason) => assert!(!what.is_empty() && reason.contains(what), "{reason}"),
        };
        told(&elf(224), "");
        told(&elf(224)[..63], "cut off");
        told(&elf(190), "another machine");
        told(b"target triple = \"amdgcn-amd-amdhsa\"\n", "LLVM IR");
        told(b"", "no code object");
    }
}
