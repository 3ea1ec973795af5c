//! What the compiler made, as the accelerator takes it.
#![allow(unsafe_code)]

use std::sync::Arc;

use anyhow::Context;
use vm_accel::{Artifact, Extent, Guard, Parameter, ParameterKind, Signature};
use vm_ir::Kernel;
use vm_ir::module::ParamKind;
use vm_ir::view::Dim;
use vm_jit::Slot;

/// The artifact of one kernel that was compiled, with `image` as its code: the compiler's, or what was made of it.
pub(crate) fn artifact(
    kernel: &Kernel,
    compiled: &vm_jit::Artifact,
    image: impl Into<Arc<[u8]>>,
) -> anyhow::Result<Artifact> {
    let entry =
        compiled.entry(kernel.name()).with_context(|| format!("@{} was not compiled", kernel.name()))?;
    let parameters = kernel.params().iter().zip(&entry.params.slots).map(|(parameter, slot)| {
        let kind = match (&parameter.kind, *slot) {
            (ParamKind::View(view), Slot::View { offset, .. }) => ParameterKind::View {
                offset,
                extents: view
                    .dims
                    .iter()
                    .map(|dim| match *dim {
                        Dim::Any { multiple: 1 } => Extent::Any,
                        Dim::Any { multiple } => Extent::Multiple(multiple),
                        Dim::Fixed(extent) => Extent::Fixed(extent),
                    })
                    .collect(),
                element: view.element.bytes(),
                align: view.align,
                writes: view.access.writes(),
            },
            (ParamKind::Scalar { range, .. }, Slot::Scalar { offset, ty }) => {
                ParameterKind::Scalar { offset, bytes: ty.bytes(), range: *range }
            }
            _ => anyhow::bail!("@{} has other parameters than its kernel", kernel.name()),
        };
        Ok(Parameter { name: parameter.name.to_string(), kind })
    });
    let signature = Signature {
        entry: entry.symbol.clone(),
        block: entry.block,
        shared_bytes: entry.dynamic_shared,
        parameters: parameters.collect::<anyhow::Result<_>>()?,
        guard: entry.params.guard.map(|guard| Guard { stop: guard.stop, rounds: guard.rounds }),
    };
    // SAFETY: the compiler made the code of a valid module, with this layout, and it reaches nothing but its views.
    Ok(unsafe { Artifact::new(image, signature) }?)
}
