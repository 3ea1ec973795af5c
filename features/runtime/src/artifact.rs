//! What vm-jit made, as an accelerator takes it.
//!
//! The compiler knows nothing of accelerators, and they nothing of it. Here the one's description of a kernel becomes
//! the other's, together with the promise that the code keeps to it.
#![allow(unsafe_code)]

use std::sync::Arc;

use vm_accel::{Artifact, Error, Extent, Guard, Parameter, ParameterKind, Signature};
use vm_ir::module::ParamKind;
use vm_ir::view::Dim;
use vm_ir::{Kernel, ValidModule};
use vm_jit::{Entry, Slot};

/// The artifact of a kernel. `image` is the code that vm-jit made of `module` for `entry`, or what an assembler made of
/// that code.
///
/// # Errors
/// [`Error::Load`] when the entry is not one of this module's.
pub(super) fn of(module: &ValidModule, entry: &Entry, image: &Arc<[u8]>) -> Result<Artifact, Error> {
    let bad = |reason: &str| Error::Load { kernel: entry.kernel.clone(), reason: reason.into() };
    let kernel = module.kernel(&entry.kernel).ok_or_else(|| bad("it is not of this module"))?;
    if kernel.params().len() != entry.params.slots.len()
        || kernel.block() != entry.block
        || kernel.cluster() != entry.cluster
    {
        return Err(bad("it was compiled from another kernel of this name"));
    }
    let parameters = kernel
        .params()
        .iter()
        .zip(&entry.params.slots)
        .map(|(param, slot)| {
            let kind = kind(kernel, &param.kind, *slot);
            let kind = kind.ok_or_else(|| bad("it was compiled from another kernel of this name"))?;
            Ok(Parameter { name: param.name.to_string(), kind })
        })
        .collect::<Result<_, Error>>()?;
    let signature = Signature {
        entry: entry.symbol.clone(),
        block: entry.block,
        cluster: entry.cluster,
        shared_bytes: entry.dynamic_shared,
        parameters,
        guard: entry.params.guard.map(|guard| Guard { stop: guard.stop, fuel: guard.fuel }),
        work: entry.work,
    };
    // SAFETY: the code was made by vm-jit from a module that passed the validator, so it takes these parameters, laid out
    // as the entry says. A guest's is checked in the code: with views that are really there, which the accelerator sees
    // to before every launch, it reaches nothing else. The host's own is not checked; whoever validates a module as the
    // host's own vouches for its indices.
    unsafe { Artifact::new(Arc::clone(image), signature) }
}

/// A parameter's kind; `None` if the slot is another parameter's.
fn kind(kernel: &Kernel, param: &ParamKind, slot: Slot) -> Option<ParameterKind> {
    match (param, slot) {
        (ParamKind::View(view), Slot::View { offset, rank }) if view.rank() == rank as usize => {
            let extents = view.dims.iter().map(|dim| match *dim {
                Dim::Any { multiple: 0 | 1 } => Extent::Any,
                Dim::Any { multiple } => Extent::Multiple(multiple),
                Dim::Fixed(extent) => Extent::Fixed(extent),
            });
            Some(ParameterKind::View {
                offset,
                extents: extents.collect(),
                element: view.element.bytes(),
                align: view.align,
                writes: view.access.writes(),
            })
        }
        (ParamKind::Scalar { value, range }, Slot::Scalar { offset, ty })
            if kernel.type_of(*value).scalar() == ty =>
        {
            Some(ParameterKind::Scalar { offset, bytes: ty.bytes(), range: *range })
        }
        _ => None,
    }
}
