//! Functions with twice the bits of f64: a number is the sum of two f64, of which the second is half an ulp of the first
//! or less. Good for 2^-90 or so in the ranges that are asked.

use std::ops::{Add, Div, Mul, Sub};

/// The sum of two numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Twice(pub(crate) f64, pub(crate) f64);

const LN_2: Twice = Twice(std::f64::consts::LN_2, 2.319_046_813_846_299_6e-17);
const HALF_PI: Twice = Twice(std::f64::consts::FRAC_PI_2, 6.123_233_995_736_766e-17);
/// 2 / √π.
const TWO_OVER_ROOT_PI: Twice = Twice(std::f64::consts::FRAC_2_SQRT_PI, 1.533_545_961_316_588e-17);

/// The sum, the first not the lesser in magnitude.
fn joined(a: f64, b: f64) -> Twice {
    let sum = a + b;
    Twice(sum, b - (sum - a))
}

impl From<f64> for Twice {
    fn from(a: f64) -> Twice {
        Twice(a, 0.0)
    }
}

impl Add for Twice {
    type Output = Twice;
    fn add(self, other: Twice) -> Twice {
        let sum = self.0 + other.0;
        let part = sum - self.0;
        let error = (self.0 - (sum - part)) + (other.0 - part);
        joined(sum, error + self.1 + other.1)
    }
}

impl Sub for Twice {
    type Output = Twice;
    fn sub(self, other: Twice) -> Twice {
        self + Twice(-other.0, -other.1)
    }
}

impl Mul for Twice {
    type Output = Twice;
    fn mul(self, other: Twice) -> Twice {
        let product = self.0 * other.0;
        let error = self.0.mul_add(other.0, -product);
        joined(product, error + (self.0 * other.1 + self.1 * other.0))
    }
}

impl Div for Twice {
    type Output = Twice;
    fn div(self, other: Twice) -> Twice {
        let first = Twice::from(self.0 / other.0);
        let rest = self - first * other;
        let second = Twice::from(rest.0 / other.0);
        let rest = rest - second * other;
        first + second + Twice::from(rest.0 / other.0)
    }
}

impl Twice {
    fn scaled(self, exponent: i32) -> Twice {
        // Two steps: the power itself may be out of range.
        let [a, b] = [exponent / 2, exponent - exponent / 2].map(|e| 2f64.powi(e));
        Twice(self.0 * a * b, self.1 * a * b)
    }

    pub(crate) fn sqrt(self) -> Twice {
        let first = Twice::from(self.0.sqrt());
        let rest = self - first * first;
        first + Twice::from(rest.0 / (2.0 * first.0))
    }

    pub(crate) fn exp(self) -> Twice {
        let n = (self.0 / LN_2.0).round();
        let r = (self - LN_2 * n.into()).scaled(-6);
        let (mut sum, mut term) = (Twice::from(1.0), Twice::from(1.0));
        for i in 1..16 {
            term = term * r / f64::from(i).into();
            sum = sum + term;
        }
        (0..6).for_each(|_| sum = sum * sum);
        sum.scaled(n as i32)
    }

    pub(crate) fn exp2(self) -> Twice {
        (self * LN_2).exp()
    }

    pub(crate) fn ln(self) -> Twice {
        let first = Twice::from(self.0.ln());
        let rest = self * (Twice::from(0.0) - first).exp() - 1.0.into();
        first + rest - rest * rest * 0.5.into()
    }

    pub(crate) fn log2(self) -> Twice {
        self.ln() / LN_2
    }

    pub(crate) fn pow(self, by: Twice) -> Twice {
        (self.ln() * by).exp()
    }

    /// The sine of `quarters` right angles more.
    pub(crate) fn sine(self, quarters: i64) -> Twice {
        let n = (self.0 / HALF_PI.0).round();
        let r = self - HALF_PI * n.into();
        let which = (n as i64 + quarters).rem_euclid(4);
        let (mut term, from) = if which % 2 == 0 { (r, 1) } else { (1.0.into(), 0) };
        let mut sum = term;
        for i in 1..16 {
            let at = f64::from(2 * i + from);
            term = Twice::from(0.0) - term * r * r / (at * (at - 1.0)).into();
            sum = sum + term;
        }
        if which >= 2 { Twice::from(0.0) - sum } else { sum }
    }

    pub(crate) fn tanh(self) -> Twice {
        let power = (self + self).exp();
        (power - 1.0.into()) / (power + 1.0.into())
    }

    pub(crate) fn erf(self) -> Twice {
        let (mut term, mut sum) = (self, self);
        for i in 1..110 {
            term = Twice::from(0.0) - term * self * self / f64::from(i).into();
            sum = sum + term / f64::from(2 * i + 1).into();
        }
        sum * TWO_OVER_ROOT_PI
    }
}
