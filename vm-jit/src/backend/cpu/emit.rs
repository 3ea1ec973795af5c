//! From a function as it was written to machine code: what `Context::compile` does, with the order of instructions between
//! its parts, the counts of [`limits`] around them, and the verifier's word on what goes in and on what is made code of.
//!
//! A small function gets all that the generator can do. A large one, or one that this made large, gets what takes time linear
//! in it.

use super::isa::{Effort, Isa, UnknownIsa};
use super::live::Live;
use super::spoil::{self, Stage, spoil};
use super::{limits, routine, schedule};
use crate::reject::RejectKind;
use cranelift_codegen::isa::{OwnedTargetIsa, TargetIsa};
use cranelift_codegen::verifier::VerifierErrors;
use cranelift_codegen::{CodegenError, Context, control::ControlPlane};

/// The code generator for a machine, by how much it does.
pub(super) struct Generators {
    machine: Isa,
    pub(super) thorough: OwnedTargetIsa,
    linear: OwnedTargetIsa,
}

impl Generators {
    pub(super) fn new(machine: Isa) -> Result<Generators, UnknownIsa> {
        let [thorough, linear] = [machine.generator(Effort::Thorough)?, machine.generator(Effort::Linear)?];
        Ok(Generators { machine, thorough, linear })
    }
}

/// The code of the context's function.
///
/// # Errors
///
/// The function is too large, or it is not what the generator takes.
pub(super) fn emit(context: &mut Context, generators: &Generators) -> Result<(Vec<u8>, u32), RejectKind> {
    let isa = &*generators.linear;
    spoil(&mut context.func, Stage::Written);
    limits::whole(&context.func)?;
    let written = (context.func.dfg.num_insts(), context.func.dfg.num_values());
    context.verify(isa).map_err(wrong)?;
    context.flowgraph();
    context.eliminate_unreachable_code(isa).map_err(problem)?;
    context.remove_constant_phis(isa).map_err(problem)?;
    context.func.dfg.resolve_all_aliases();
    let live = limits::live(&context.func, &context.cfg)?;
    let live = optimise(context, &*generators.thorough)?.unwrap_or(live);
    let small = !spoil::is_large()
        && context.func.dfg.num_insts() <= limits::THOROUGH
        && live.steps <= limits::THOROUGH_LIVE;
    let (isa, effort) = match small {
        true => (&*generators.thorough, Effort::Thorough),
        false => (isa, Effort::Linear),
    };
    if effort == Effort::Thorough {
        let registers = generators.machine.architecture().vector_registers();
        schedule::schedule(&mut context.func, registers, live.through);
    }
    spoil(&mut context.func, Stage::Scheduled);
    limits::whole(&context.func)?;
    context.verify(isa).map_err(wrong)?;
    let mut registers = regalloc2::Ctx::default();
    let stencil = isa
        .compile_function(
            &context.func,
            &context.domtree,
            &mut registers,
            false,
            &mut ControlPlane::default(),
        )
        .map_err(problem)?;
    let compiled = stencil.apply_params(&context.func.params);
    let buffer = &compiled.buffer;
    let frame = buffer.frame_layout().map_or(0, |layout| layout.frame_to_fp_offset);
    tracing::debug!(
        insts = written.0,
        values = written.1,
        ?effort,
        optimised_insts = context.func.dfg.num_insts(),
        optimised_values = context.func.dfg.num_values(),
        blocks = context.func.dfg.num_blocks(),
        frame,
        code = buffer.data().len(),
        "a kernel was compiled"
    );
    limits::emitted(buffer.data().len(), frame as usize)?;
    let code = routine::link(buffer, &context.func.params, generators.machine).map_err(gave_up)?;
    Ok((code, frame))
}

/// Optimises the context's function and tells what lives in it then; unless it is large or becomes so, which leaves it as it is.
fn optimise(context: &mut Context, isa: &dyn TargetIsa) -> Result<Option<Live>, RejectKind> {
    if context.func.dfg.num_insts() > limits::OPTIMISED {
        return Ok(None);
    }
    let before = context.func.clone();
    context.egraph_pass(isa, &mut ControlPlane::default()).map_err(problem)?;
    spoil(&mut context.func, Stage::Optimised);
    context.compute_cfg();
    if limits::optimised(&context.func).is_ok()
        && let Some(live) = Live::of(&context.func, &context.cfg, limits::THOROUGH_LIVE)
    {
        return Ok(Some(live));
    }
    context.func = before;
    context.compute_cfg();
    context.compute_domtree();
    Ok(None)
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

#[cfg(test)]
mod tests {
    use cranelift_codegen::ir::Value;
    use regalloc2::{RegClass, VReg};

    /// Numbers that don't fit, which the generator sees in debug builds only: those of tests, and the fuzzer's.
    #[test]
    fn the_generators_own_checks_are_on() {
        if std::env::current_exe().unwrap().components().any(|part| part.as_os_str() == "release") {
            return println!("skipped: it is a release build");
        }
        let checks: [(_, fn() -> usize); 2] = [
            ("cranelift-codegen", || Value::from_u32(u32::MAX).as_u32() as usize),
            ("regalloc2", || VReg::new(VReg::MAX + 1, RegClass::Int).vreg()),
        ];
        for (name, wrong) in checks {
            assert!(std::panic::catch_unwind(wrong).is_err(), "{name} is built without debug assertions");
        }
    }
}
