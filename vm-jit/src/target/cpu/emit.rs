//! From a function as it was written to machine code: what `Context::compile` does, with the order of instructions between
//! its parts, the counts of [`limits`] around each, and the verifier's word on what goes in and on what is made code of.

use super::isa::Isa;
use super::{limits, schedule, wide};
use crate::reject::RejectKind;
use cranelift_codegen::isa::TargetIsa;
use cranelift_codegen::verifier::VerifierErrors;
use cranelift_codegen::{CodegenError, Context, control::ControlPlane};

/// The code of the context's function.
///
/// # Errors
///
/// The function is too large, before or behind the optimiser; or it is not what the generator takes.
pub(super) fn emit(context: &mut Context, machine: Isa, isa: &dyn TargetIsa) -> Result<Vec<u8>, RejectKind> {
    let mut control = ControlPlane::default();
    limits::whole(&context.func)?;
    let written = (context.func.dfg.num_insts(), context.func.dfg.num_values());
    context.verify(isa).map_err(wrong)?;
    context.flowgraph();
    context.eliminate_unreachable_code(isa).map_err(problem)?;
    context.remove_constant_phis(isa).map_err(problem)?;
    context.func.dfg.resolve_all_aliases();
    if written.0 <= limits::OPTIMISED {
        context.egraph_pass(isa, &mut control).map_err(problem)?;
        limits::whole(&context.func)?;
    }
    schedule::schedule(&mut context.func, machine.architecture().vector_registers());
    limits::whole(&context.func)?;
    context.verify(isa).map_err(wrong)?;
    let mut registers = regalloc2::Ctx::default();
    let stencil = isa
        .compile_function(&context.func, &context.domtree, &mut registers, false, &mut control)
        .map_err(problem)?;
    let compiled = stencil.apply_params(&context.func.params);
    let buffer = &compiled.buffer;
    let frame = buffer.frame_layout().map_or(0, |layout| layout.frame_to_fp_offset);
    tracing::debug!(
        insts = written.0,
        values = written.1,
        optimised_insts = context.func.dfg.num_insts(),
        optimised_values = context.func.dfg.num_values(),
        blocks = context.func.dfg.num_blocks(),
        frame,
        code = buffer.data().len(),
        "a kernel was compiled"
    );
    limits::emitted(buffer.data().len(), frame as usize)?;
    wide::link(buffer).map_err(gave_up)
}

fn problem(error: CodegenError) -> RejectKind {
    match error {
        CodegenError::Verifier(errors) => wrong(errors),
        other => gave_up(other.to_string()),
    }
}

/// What the verifier found first; there may be thousands.
fn wrong(errors: VerifierErrors) -> RejectKind {
    let first = errors.0.first().map(ToString::to_string).unwrap_or_default();
    gave_up(format!("{first} (of {} errors)", errors.0.len()))
}

fn gave_up(what: String) -> RejectKind {
    RejectKind::Generator { what }
}
