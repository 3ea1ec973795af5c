//! Is a result close enough?

use crate::format::{signed, to_f64, write_literal};
use crate::interp::Tensor;
use crate::types::Scalar;

/// How far a result may be from what is expected. NaN is expected as any NaN; infinities and integers must be
/// exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// The same bits, but any NaN for a NaN.
    Exact,
    /// As many steps between neighbouring numbers of the type.
    Ulps(u64),
    /// This times the greater of 1 and the expected magnitude.
    Relative(f64),
}

/// An element that is not close enough.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("element {index} is {got}, expected {wanted} ({wrong} of {elements} elements are wrong)")]
pub struct Mismatch {
    /// The first wrong element, counted row by row.
    pub index: usize,
    /// What came out.
    pub got: String,
    /// What was expected.
    pub wanted: String,
    /// How many are wrong.
    pub wrong: usize,
    /// How many there are.
    pub elements: usize,
}

/// Compares two tensors element by element.
///
/// # Errors
///
/// The first element that is not close enough.
pub fn compare(got: &Tensor, wanted: &Tensor, tolerance: Tolerance) -> Result<(), Mismatch> {
    let elements = got.len().max(wanted.len());
    let same_form = got.element == wanted.element && got.extents == wanted.extents;
    let wrong: Vec<usize> = (0..elements)
        .filter(|i| !same_form || !close(got.element, got.bits(*i), wanted.bits(*i), tolerance))
        .collect();
    match wrong.first() {
        None if same_form => Ok(()),
        first => {
            let index = first.copied().unwrap_or(0);
            Err(Mismatch {
                index,
                got: write_literal(got.element, got.bits(index)),
                wanted: write_literal(wanted.element, wanted.bits(index)),
                wrong: wrong.len(),
                elements,
            })
        }
    }
}

fn close(scalar: Scalar, got: u64, wanted: u64, tolerance: Tolerance) -> bool {
    if got == wanted {
        return true;
    }
    if scalar.is_int() {
        return false;
    }
    let (g, w) = (to_f64(scalar, got), to_f64(scalar, wanted));
    if g.is_nan() || w.is_nan() {
        return g.is_nan() && w.is_nan();
    }
    match tolerance {
        Tolerance::Exact => false,
        _ if g.is_infinite() || w.is_infinite() => false,
        Tolerance::Ulps(ulps) => ordinal(scalar, got).abs_diff(ordinal(scalar, wanted)) <= ulps,
        Tolerance::Relative(bound) => (g - w).abs() <= bound * w.abs().max(1.0),
    }
}

/// The float's place in the order of all floats of its type; both zeros have the same.
fn ordinal(scalar: Scalar, bits: u64) -> i64 {
    let magnitude = (bits & (scalar.mask() >> 1)) as i64;
    if signed(scalar, bits) < 0 { -magnitude } else { magnitude }
}
