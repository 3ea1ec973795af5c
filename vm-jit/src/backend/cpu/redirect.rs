//! Redirection of a guest's accesses that are out of bounds.
//!
//! The code selects the address without a branch, so the CPU does not speculate on it. An access out of bounds goes to an area
//! below the scratch memory, which [`vm_abi::SCRATCH_AREA`] describes. A load reads zeros from read-only memory. A store or an
//! atomic writes to a sink that no load reads. A guard separates the sink from the scratch memory.
//!
//! An access that is longer than an area would reach the next one. [`WIDEST_ROW`] is the longest row that any mode can produce.
//! [`Writer::redirect_out_of_bounds`] rejects a kernel with a longer access. If one were emitted all the same, a store would fault
//! in the guard. The code's own data is above the guard: values and tiles in the scratch memory, and the loop over blocks on the
//! stack ([`State`](super::blocks::State)).

use super::lanes::own;
use super::spoil;
use super::writer::Writer;
use crate::reject::RejectKind;
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use vm_ir::limits::WARP;
use vm_ir::{Scalar, Type};

/// Bytes of the longest row: a warp whose threads each access the longest vector of the widest scalar.
pub(super) const WIDEST_ROW: u32 = {
    let (mut lanes, mut bytes, mut at) = (0, 0, 0);
    while at < Type::LANES.len() {
        lanes = if Type::LANES[at] > lanes { Type::LANES[at] } else { lanes };
        at += 1;
    }
    at = 0;
    while at < Scalar::ALL.len() {
        bytes = if Scalar::ALL[at].bytes() > bytes { Scalar::ALL[at].bytes() } else { bytes };
        at += 1;
    }
    WARP * lanes as u32 * bytes
};

/// Bytes at address 0 that are never mapped, for accesses that are to fault.
const UNMAPPED: u32 = 4096;

const _: () = assert!(WIDEST_ROW <= vm_abi::SCRATCH_AREA && WIDEST_ROW <= UNMAPPED);

/// The direction of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Load,
    /// A store or an atomic.
    Store,
}

/// Checks that an access of `bytes` bytes fits into the area to which it is redirected.
///
/// # Errors
/// It is longer: a fault in this crate.
fn check_width(bytes: u64) -> Result<(), RejectKind> {
    if bytes <= u64::from(WIDEST_ROW) {
        return Ok(());
    }
    let what =
        format!("an access of {bytes} bytes is longer than the {WIDEST_ROW} to which it may be redirected");
    Err(RejectKind::Generator { what })
}

impl Writer<'_, '_> {
    /// Returns the address of an access of `bytes` bytes if `within` holds; otherwise an address where it has no effect, or
    /// one where it faults.
    pub(super) fn redirect_out_of_bounds(
        &mut self,
        address: Ssa,
        within: Ssa,
        direction: Direction,
        bytes: u64,
    ) -> Ssa {
        if let Err(error) = check_width(bytes)
            && spoil::narrow_spare().is_none()
        {
            self.refuse(error);
        }
        let elsewhere = match (self.strays_fault, direction, spoil::narrow_spare()) {
            (true, ..) => self.b.ins().iconst(types::I64, 0),
            (false, direction, Some(spare)) => {
                let at = self.plan.bytes as i64 + if direction == Direction::Store { spare } else { 0 };
                self.b.ins().iadd_imm_s(self.scratch, at)
            }
            (false, Direction::Load, None) => {
                self.b.ins().iadd_imm_s(self.scratch, -i64::from(vm_abi::SCRATCH_ZEROS))
            }
            (false, Direction::Store, None) => {
                self.b.ins().iadd_imm_s(self.scratch, -i64::from(vm_abi::SCRATCH_SINK))
            }
        };
        self.b.ins().select(within, address, elsewhere)
    }

    /// Zeroes the area of loads if the [fault](spoil::narrow_spare) is planted.
    pub(super) fn zero_narrow_spare(&mut self) {
        let Some(spare) = spoil::narrow_spare() else { return };
        let zero = self.b.ins().iconst(types::I64, 0);
        for by in (0..spare).step_by(8) {
            let at = self.b.ins().iadd_imm_s(self.scratch, self.plan.bytes as i64 + by);
            self.b.ins().store(own(), zero, at, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_access_is_longer_than_its_area() {
        assert_eq!(WIDEST_ROW, 32 * 16 * 8);
        assert_eq!(check_width(WIDEST_ROW.into()), Ok(()));
        let error = check_width(u64::from(WIDEST_ROW) + 1).unwrap_err().to_string();
        assert!(error.contains("an access of 4097 bytes is longer than the 4096"), "{error}");
    }
}
