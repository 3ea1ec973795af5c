//! What operations do with elements.

use crate::Element;
use crate::op::{Binary, Comparison, Logic, Reduction, Unary};

/// An integer that wraps around in its type; a float as it is.
pub(super) fn wrapped(element: Element, value: f64) -> f64 {
    if element.range().is_none() {
        return value;
    }
    // All integers below 2^53 are exact, and products of them are no more than i128 has.
    element.to_f64(value as i128 as u64 & element.scalar().mask())
}

pub(super) fn cast(from: Element, to: Element, x: f64) -> f64 {
    match to {
        Element::Bool => f64::from(x != 0.0),
        Element::F8E4M3 | Element::F8E5M2 | Element::F16 | Element::Bf16 => to.round(x),
        _ if to.range().is_none() => x,
        _ if from.range().is_some() => wrapped(to, x),
        _ => to.round(x),
    }
}

pub(super) fn unary(unary: Unary, x: f64) -> f64 {
    let half_erfc = |x: f64| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    match unary {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sign if x == 0.0 || x.is_nan() => x,
        Unary::Sign => x.signum(),
        Unary::Round => x.round_ties_even(),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Sqrt => x.sqrt(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Erf => libm::erf(x),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Relu if x.is_nan() => x,
        Unary::Relu => x.max(0.0),
        Unary::Gelu => x * half_erfc(x),
        Unary::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Unary::Not => 1.0 - x,
    }
}

pub(super) fn binary(binary: Binary, element: Element, a: f64, b: f64) -> f64 {
    let is_nan = a.is_nan() || b.is_nan();
    let value = match binary {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul if element.range().is_some() => {
            let product = (a as i128).wrapping_mul(b as i128);
            return element.to_f64(product as u64 & element.scalar().mask());
        }
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Pow => a.powf(b),
        Binary::Min | Binary::Max if is_nan => f64::NAN,
        Binary::Min => a.min(b),
        Binary::Max => a.max(b),
    };
    wrapped(element, value)
}

pub(super) fn logic(logic: Logic, a: f64, b: f64) -> f64 {
    let (a, b) = (a != 0.0, b != 0.0);
    f64::from(match logic {
        Logic::And => a && b,
        Logic::Or => a || b,
        Logic::Xor => a != b,
    })
}

pub(super) fn compare(how: Comparison, a: f64, b: f64) -> f64 {
    f64::from(match how {
        Comparison::Equal => a == b,
        Comparison::Less => a < b,
        Comparison::LessOrEqual => a <= b,
        Comparison::Greater => a > b,
        Comparison::GreaterOrEqual => a >= b,
    })
}

pub(super) fn reduce(how: Reduction, element: Element, part: &[f64]) -> f64 {
    let sum = || part.iter().fold(0.0, |sum, x| wrapped(element, sum + x));
    let best = |how| part.iter().copied().reduce(|a, b| binary(how, element, a, b)).unwrap_or(0.0);
    match how {
        Reduction::Sum => sum(),
        Reduction::Mean => {
            let mean = part.iter().sum::<f64>() / part.len() as f64;
            if element.range().is_some() { mean.trunc() } else { mean }
        }
        Reduction::Max => best(Binary::Max),
        Reduction::Min => best(Binary::Min),
    }
}

/// Positions from the greatest to the least, NaN last, of equal ones the first first.
pub(super) fn order(part: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..part.len()).collect();
    let key = |at: usize| if part[at].is_nan() { f64::NEG_INFINITY } else { part[at] + 0.0 };
    order.sort_by(|a, b| {
        let nan = part[*a].is_nan().cmp(&part[*b].is_nan());
        nan.then(key(*b).total_cmp(&key(*a)))
    });
    order
}

pub(super) fn log_softmax(part: &[f64]) -> Vec<f64> {
    let greatest = reduce(Reduction::Max, Element::F64, part);
    let sum: f64 = part.iter().map(|x| (x - greatest).exp()).sum();
    part.iter().map(|x| x - greatest - sum.ln()).collect()
}
