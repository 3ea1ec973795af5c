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

/// Plants a fault in kernels whose names end with `_with_narrow_spare`: a layout that let a guest escape. Returns the bytes of
/// each of two areas in the scratch memory to which accesses out of bounds are redirected. Rows of whole warps overrun them, and
/// the state of the loop over blocks follows them.
#[cfg(feature = "faults")]
pub(super) fn narrow_spare() -> Option<i64> {
    contain::name().ends_with("_with_narrow_spare").then_some(128)
}

#[cfg(not(feature = "faults"))]
pub(super) const fn narrow_spare() -> Option<i64> {
    None
}

/// Returns whether a kernel is compiled as a large one is, whatever its size. Its name asks for that by `_as_a_large_one`.
pub(super) fn is_large() -> bool {
    #[cfg(feature = "faults")]
    return contain::name().contains("_as_a_large_one");
    #[cfg(not(feature = "faults"))]
    false
}

/// Returns the bytes that the planted layout adds to the scratch memory.
pub(super) fn narrow_layout() -> u32 {
    narrow_spare().map_or(0, |spare| 2 * spare as u32 + super::blocks::State::BYTES)
}

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
