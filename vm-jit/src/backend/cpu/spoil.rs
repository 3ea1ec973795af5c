//! Spoils functions on their way through the code generator where a kernel's name asks for it, to test what is made of that.

#[cfg(feature = "faults")]
use crate::contain;
use cranelift_codegen::ir::Function;
#[cfg(feature = "faults")]
use cranelift_codegen::{
    cursor::{Cursor, FuncCursor},
    ir::{Inst, InstBuilder, types},
};

/// How far the function has come.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// It was written.
    Written,
    /// It comes from the optimiser.
    Optimised,
    /// It goes to instruction selection.
    Scheduled,
}

#[cfg(not(feature = "faults"))]
pub(super) fn spoil(_: &mut Function, _: Stage) {}

/// Spoils a function of a kernel with a name like `ill_typed_when_written`.
#[cfg(feature = "faults")]
pub(super) fn spoil(func: &mut Function, stage: Stage) {
    let name = contain::name();
    let Some(what) = name.strip_suffix(&format!("_when_{stage:?}").to_lowercase()) else { return };
    let mut at = FuncCursor::new(func);
    at.next_block();
    at.next_inst();
    match what {
        "ill_typed" => {
            let [wide, narrow] = [types::I64, types::I32].map(|ty| at.ins().iconst(ty, 1));
            at.ins().iadd(wide, narrow);
        }
        "outgrows" => (0..=super::limits::INSTS).for_each(|_| {
            at.ins().iconst(types::I64, 1);
        }),
        // The generator's own panic.
        "panics" => at.goto_inst(Inst::from_u32(u32::MAX - 1)),
        _ => {}
    }
}
