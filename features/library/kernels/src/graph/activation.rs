//! Activations and their derivatives.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use vm_graph::Value;

use super::{Built, Draft, Drawn};
use crate::call::Function as _;
use crate::flat::{Activation, ActivationGradient};

/// x · σ(x).
pub(super) fn silu(g: &mut Draft, x: Value) -> Built {
    let sigmoid = g.sigmoid(x)?;
    g.mul(x, sigmoid)
}

/// The derivative of an activation of one number: of [`Activation::Swiglu`], that of its gate.
pub(super) fn slope(g: &mut Draft, activation: Activation, x: Value) -> Built {
    match activation {
        // σ(x) · (1 + x · (1 − σ(x))).
        Activation::Silu | Activation::Swiglu => {
            let sigma = g.sigmoid(x)?;
            let rest = g.neg(sigma)?;
            let rest = g.plus(rest, 1.0)?;
            let turn = g.mul(x, rest)?;
            let turn = g.plus(turn, 1.0)?;
            g.mul(sigma, turn)
        }
        // Φ(x) + x · φ(x).
        Activation::Gelu => {
            let below = g.times(x, FRAC_1_SQRT_2)?;
            let below = g.erf(below)?;
            let below = g.plus(below, 1.0)?;
            let below = g.times(below, 0.5)?;
            let square = g.mul(x, x)?;
            let bell = g.times(square, -0.5)?;
            let bell = g.exp(bell)?;
            let density = g.times(bell, 1.0 / (2.0 * PI).sqrt())?;
            let rise = g.mul(x, density)?;
            g.add(below, rise)
        }
        // With t = tanh(u): ½ · (1 + t + x · (1 − t²) · u′).
        Activation::GeluTanh => {
            let root = (2.0 / PI).sqrt();
            let square = g.mul(x, x)?;
            let inner = g.times(square, root * 0.044_715)?;
            let inner = g.plus(inner, root)?;
            let inner = g.mul(x, inner)?;
            let t = g.tanh(inner)?;
            let steep = g.mul(t, t)?;
            let steep = g.neg(steep)?;
            let steep = g.plus(steep, 1.0)?;
            let of_inner = g.times(square, 3.0 * root * 0.044_715)?;
            let of_inner = g.plus(of_inner, root)?;
            let rise = g.mul(steep, of_inner)?;
            let rise = g.mul(x, rise)?;
            let sum = g.add(t, rise)?;
            let sum = g.plus(sum, 1.0)?;
            g.times(sum, 0.5)
        }
        Activation::Relu => {
            let zero = g.number(0.0)?;
            let is_flat = g.less_or_equal(x, zero)?;
            let one = g.number(1.0)?;
            g.select(is_flat, zero, one)
        }
    }
}

/// The gradient of an activation.
pub(crate) fn gradient(of: &ActivationGradient) -> Drawn {
    let mut g = Draft::of(ActivationGradient::NAME, of.buffers())?;
    let dy = g.float("dy")?;
    if of.activation != Activation::Swiglu {
        let x = g.float("x")?;
        let slope = slope(&mut g, of.activation, x)?;
        let dx = g.mul(dy, slope)?;
        g.put("dx", dx)?;
        return g.finish();
    }
    let (gate, up) = (g.float("gate")?, g.float("up")?);
    let slope = slope(&mut g, of.activation, gate)?;
    let of_up = g.mul(dy, up)?;
    let dgate = g.mul(of_up, slope)?;
    g.put("dgate", dgate)?;
    let silu = silu(&mut g, gate)?;
    let dup = g.mul(dy, silu)?;
    g.put("dup", dup)?;
    g.finish()
}
