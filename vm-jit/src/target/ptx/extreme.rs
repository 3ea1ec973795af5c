//! The lesser and the greater of two f64, without the instructions for it.
//!
//! No architecture has `min.f64` and `max.f64` in hardware: `ptxas` makes a comparison of a kind of its own of them, and
//! (seen in 12.9 and 13.0) where it makes that once more, to save a register, it compares other numbers. The low half
//! of the result is then that of the wrong operand. It makes ordinary comparisons again as they are.

use super::asm::{Reg, def};
use super::writer::Writer;

impl Writer<'_> {
    /// The lesser or the greater f64; a number wins over a NaN, and −0 is less than +0.
    pub(super) fn extreme64(&mut self, greater: bool, a: Reg, b: Reg) -> Reg {
        let (test, zero) = if greater { ("setp.gt.f64", "and.b64") } else { ("setp.lt.f64", "or.b64") };
        let first = def!(self, Pred, test, a, b);
        let result = def!(self, B64, "selp.b64", a, b, first);
        // Equal numbers have the same bits, but for zeros.
        let equal = def!(self, Pred, "setp.eq.f64", a, b);
        let signed = def!(self, B64, zero, a, b);
        let result = def!(self, B64, "selp.b64", signed, result, equal);
        let no_number = def!(self, Pred, "setp.nan.f64", b, b);
        def!(self, B64, "selp.b64", a, result, no_number)
    }
}
