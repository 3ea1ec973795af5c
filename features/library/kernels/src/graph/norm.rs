//! RMS norm and layer norm, and their gradients.

use vm_graph::{Element, Reduction, Value};

use super::{Built, Draft, Drawn, element};
use crate::call::Function as _;
use crate::norm::{Norm, NormBackward, NormForward};

/// 1 / √(x + ε).
fn inverse_root(g: &mut Draft, x: Value, epsilon: f64) -> Built {
    let sum = g.plus(x, epsilon)?;
    let root = g.sqrt(sum)?;
    g.reciprocal(root)
}

/// The mean of each row's squares.
fn mean_square(g: &mut Draft, x: Value) -> Built {
    let squares = g.mul(x, x)?;
    g.mean(squares, &[1])
}

/// Each row normalised.
pub(crate) fn forward(of: &NormForward) -> Drawn {
    let NormForward { norm, columns, input, .. } = *of;
    let epsilon = f64::from(of.epsilon);
    let mut g = Draft::of(norm.name(), of.buffers())?;
    let mut h = g.float("x")?;
    if let Some(residual) = g.float_if(of.residual, "residual")? {
        // What is normalised is what is written.
        let sum = g.add(h, residual)?;
        let sum = g.cast(sum, element(input))?;
        g.put("sum", sum)?;
        h = g.cast(sum, Element::F32)?;
    }
    let weight = g.float("weight")?;
    let bias = g.float_if(of.bias, "bias")?;
    match norm {
        Norm::Layer => {
            let bias = bias.map_or_else(|| g.filled(Element::F32, 0.0, &[columns]), Ok)?;
            let y = g.layer_norm(h, weight, bias, epsilon)?;
            g.put("y", y)?;
            if of.statistics {
                let mean = g.mean(h, &[1])?;
                g.put("mean", mean)?;
                let centred = g.sub(h, mean)?;
                let variance = mean_square(&mut g, centred)?;
                let rstd = inverse_root(&mut g, variance, epsilon)?;
                g.put("rstd", rstd)?;
            }
        }
        Norm::Rms => {
            let square = mean_square(&mut g, h)?;
            let rstd = inverse_root(&mut g, square, epsilon)?;
            let hat = g.mul(h, rstd)?;
            let mut y = g.mul(hat, weight)?;
            if let Some(bias) = bias {
                y = g.add(y, bias)?;
            }
            g.put("y", y)?;
            if of.statistics {
                g.put("rstd", rstd)?;
            }
        }
    }
    g.finish()
}

/// Its gradients.
pub(crate) fn backward(of: &NormBackward) -> Drawn {
    let NormBackward { norm, rows, .. } = *of;
    let name = match norm {
        Norm::Rms => "rmsnorm_backward",
        Norm::Layer => "layernorm_backward",
    };
    let mut g = Draft::of(name, of.buffers())?;
    let (h, weight, dy) = (g.float("h")?, g.float("weight")?, g.float("dy")?);
    let mut centred = h;
    if let Some(mean) = g.float_if(norm == Norm::Layer, "mean")? {
        let mean = g.reshape(mean, &[rows, 1])?;
        centred = g.sub(h, mean)?;
    }
    let rstd = g.float("rstd")?;
    let rstd = g.reshape(rstd, &[rows, 1])?;
    let hat = g.mul(centred, rstd)?;
    let product = g.mul(dy, weight)?;
    let across = g.mul(product, hat)?;
    let across = g.mean(across, &[1])?;
    let less = g.mul(hat, across)?;
    let mut dx = g.sub(product, less)?;
    if norm == Norm::Layer {
        let along = g.mean(product, &[1])?;
        dx = g.sub(dx, along)?;
    }
    dx = g.mul(dx, rstd)?;
    if let Some(dsum) = g.float_if(of.residual, "dsum")? {
        dx = g.add(dx, dsum)?;
    }
    g.put("dx", dx)?;
    let of_weight = g.mul(dy, hat)?;
    let of_weight = g.reduce_away(Reduction::Sum, of_weight, &[0])?;
    g.put("dweight", of_weight)?;
    if of.bias {
        let of_bias = g.reduce_away(Reduction::Sum, dy, &[0])?;
        g.put("dbias", of_bias)?;
    }
    g.finish()
}
