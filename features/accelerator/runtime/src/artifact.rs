//! What vm-jit made, as an accelerator takes it.
//!
//! The compiler knows nothing of accelerators, and they nothing of it. Here the one's description of a kernel becomes
//! the other's, together with the promise that the code keeps to it.
#![allow(unsafe_code)]

use std::sync::Arc;

use vm_accel::{Artifact, Error, Extent, Parameter, ParameterKind, Signature};
use vm_ir::module::ParamKind;
use vm_ir::view::{Dim, ViewType};
use vm_ir::{Kernel, ValidModule};
use vm_jit::{Entry, Format};

/// The artifact of a kernel. `image` is the code that vm-jit made of `module` for `entry`, or what an assembler made of
/// that code, which is of a format.
///
/// # Errors
/// [`Error::Load`] when the entry is not one of this module's.
pub(super) fn of(
    module: &ValidModule,
    entry: &Entry,
    format: Format,
    image: &Arc<[u8]>,
) -> Result<Artifact, Error> {
    let bad = |reason: &str| Error::Load { kernel: entry.kernel.clone(), reason: reason.into() };
    let kernel = module.kernel(&entry.kernel).ok_or_else(|| bad("it is not of this module"))?;
    let parameters = (0..).zip(kernel.params()).map(|(index, param)| {
        let extents =
            |view: &ViewType| (0..).zip(&view.dims).map(|(at, dim)| extent(kernel, index, at, dim)).collect();
        let kind = match &param.kind {
            // Elsewhere its pixels lie in rows, as those of a view.
            ParamKind::View(view) if view.surface && format == Format::Ptx => ParameterKind::Surface {
                extents: extents(view),
                element: vm_jit::artifact::element(view.element),
                writes: view.access.writes(),
            },
            ParamKind::View(view) => ParameterKind::View {
                extents: extents(view),
                element: vm_jit::artifact::element(view.element),
                align: view.align,
                writes: view.access.writes(),
            },
            ParamKind::Scalar { value, range } => {
                ParameterKind::Scalar { bytes: kernel.type_of(*value).scalar().bytes(), range: *range }
            }
        };
        Parameter { name: param.name.to_string(), kind }
    });
    let signature = Signature {
        entry: entry.symbol.clone(),
        block: entry.block,
        cluster: entry.cluster,
        shared_bytes: entry.dynamic_shared,
        parameters: parameters.collect(),
        tiles: entry.params.maps.iter().map(|map| map.tile).collect(),
        guarded: entry.params.guard.is_some(),
        cost_bound: entry.work,
    };
    // SAFETY: the code was made by vm-jit from a module that passed the validator, so it takes these parameters, laid out
    // as the entry says. A guest's is checked in the code: with views that are really there, which the accelerator sees
    // to before every launch, it reaches nothing else. The host's own is not checked; whoever validates a module as the
    // host's own vouches for its indices.
    let artifact = unsafe { Artifact::new(Arc::clone(image), signature) }?;
    if *artifact.params() != entry.params
        // A tile kernel's block is the target's.
        || kernel.tile().is_none() && kernel.block() != entry.block
        || kernel.cluster() != entry.cluster
    {
        return Err(bad("it was compiled from another kernel of this name"));
    }
    Ok(artifact)
}

/// What the kernel wants of an extent. One that has the name of another before it is as that one.
fn extent(kernel: &Kernel, view: u16, dimension: usize, dim: &Dim) -> Extent {
    let (first, at) = kernel.same_extent(view, dimension);
    match *dim {
        _ if (first, at) != (view, dimension) => {
            Extent::Same { parameter: first.into(), dimension: at as u32 }
        }
        Dim::Any { multiple: 0 | 1 } => Extent::Any,
        Dim::Any { multiple } => Extent::Multiple(multiple),
        Dim::Fixed(extent) => Extent::Fixed(extent),
    }
}
