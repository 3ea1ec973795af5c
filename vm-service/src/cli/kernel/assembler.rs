//! What makes a device's own code of the text that vm-jit writes, where the name of a file asks for that.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vm_jit::Target;
use vm_passthrough::accelerator::Assemble;

use crate::failure::Failure;

/// The assembler that a file of this name needs for the target; `None` where it is to have what vm-jit writes. It has
/// `time`.
///
/// # Errors
/// The name is one of another target's files, or there is no assembler.
pub(crate) fn wanted(
    output: &Path,
    target: &Target,
    time: Duration,
) -> Result<Option<Arc<dyn Assemble>>, Failure> {
    let extension = output.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let extension = extension.to_ascii_lowercase();
    // It ends, with its processes, before the command gives up.
    let time = time.mul_f64(0.9);
    let found = match (&*extension, target) {
        ("cubin", Target::Ptx(_)) => cubin(time),
        ("hsaco" | "co", Target::Amdgcn(_)) => code_object(time),
        ("cubin", _) => return Err(of_others(&extension, "ptx:ARCHITECTURE", target)),
        ("hsaco" | "co", _) => return Err(of_others(&extension, "amdgcn:CHIP", target)),
        _ => return Ok(None),
    };
    found.map(Some)
}

fn of_others(extension: &str, targets: &str, target: &Target) -> Failure {
    Failure::usage(format_args!(
        "a file .{extension} is for targets {targets}, and this one is {target}; give --output another name"
    ))
}

#[cfg(feature = "cuda")]
fn cubin(time: Duration) -> Result<Arc<dyn Assemble>, Failure> {
    use vm_passthrough::accelerator::CudaAssembler;
    use vm_passthrough::accelerator::assemble::{Assembler, Limits};

    let assembler = Assembler::find().map_err(Failure::failed)?;
    Ok(Arc::new(CudaAssembler(assembler.limits(Limits { time, ..Limits::default() }))))
}

#[cfg(not(feature = "cuda"))]
fn cubin(_: Duration) -> Result<Arc<dyn Assemble>, Failure> {
    Err(without("cuda"))
}

#[cfg(feature = "rocm")]
fn code_object(time: Duration) -> Result<Arc<dyn Assemble>, Failure> {
    use vm_passthrough::accelerator::RocmAssembler;
    use vm_passthrough::accelerator::rocm::assemble::{Assembler, Limits};

    let assembler = Assembler::find().map_err(Failure::failed)?;
    Ok(Arc::new(RocmAssembler(assembler.limits(Limits { time, ..Limits::default() }))))
}

#[cfg(not(feature = "rocm"))]
fn code_object(_: Duration) -> Result<Arc<dyn Assemble>, Failure> {
    Err(without("rocm"))
}

/// Ends all assemblers of this process with what they started, and has none start any more: work that was given up still waits for them.
pub(crate) fn end_all() {
    #[cfg(feature = "cuda")]
    vm_passthrough::accelerator::assemble::end_all();
    #[cfg(feature = "rocm")]
    vm_passthrough::accelerator::rocm::assemble::end_all();
}

#[cfg(not(all(feature = "cuda", feature = "rocm")))]
fn without(feature: &str) -> Failure {
    Failure::failed(format_args!(
        "this vm-service was built without the cargo feature `{feature}`, which assembles; build it with --features \
         {feature}, or give --output another name for the code as text"
    ))
}
