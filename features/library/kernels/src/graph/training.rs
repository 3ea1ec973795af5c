//! Steps of optimizers, norms and clipping of gradients, filling: over all tensors in one graph.

use vm_graph::{Reduction, Value};

use super::{Draft, Drawn, NoGraph, element};
use crate::call::Function as _;
use crate::flat::{AdamW, Fill, GradClip, GradNorm, Sgd};

/// What the buffers of a tensor are called, and whether it has elements: those without are left out.
struct Tensors<'a> {
    sizes: &'a [u64],
}

impl Tensors<'_> {
    /// The numbers of those with elements.
    fn with_elements(&self) -> impl Iterator<Item = usize> {
        (0..self.sizes.len()).filter(|at| self.sizes[*at] > 0)
    }

    fn name(&self, port: &str, at: usize) -> String {
        if self.sizes.len() == 1 { port.to_owned() } else { format!("{port}_{at}") }
    }
}

/// Steps of AdamW.
pub(crate) fn adamw(of: &AdamW) -> Drawn {
    let mut g = Draft::of("adamw", of.buffers())?;
    if of.step == 0 {
        return Err(g.no("step 0; the first is 1, as its corrections divide by 1 − β^step"));
    }
    let [keep, beta1, rest1, beta2, rest2, rate, correction, epsilon] = of.numbers().map(f64::from);
    let tensors = Tensors { sizes: &of.sizes };
    let scale = g.float_if(of.scaled, "scale")?;
    for at in tensors.with_elements() {
        let [parameter, master, gradient, m, v] =
            ["parameter", "master", "gradient", "m", "v"].map(|port| tensors.name(port, at));
        let p = g.float(if of.master { &master } else { &parameter })?;
        let gradient = scaled(&mut g, &gradient, scale)?;
        let (of_m, of_v) = (g.float(&m)?, g.float(&v)?);
        let of_m = mixed(&mut g, [of_m, gradient], [beta1, rest1])?;
        let square = g.mul(gradient, gradient)?;
        let of_v = mixed(&mut g, [of_v, square], [beta2, rest2])?;
        let root = g.sqrt(of_v)?;
        let root = g.times(root, correction)?;
        let divisor = g.plus(root, epsilon)?;
        let step = g.times(of_m, rate)?;
        let step = g.div(step, divisor)?;
        let kept = g.times(p, keep)?;
        let p = g.sub(kept, step)?;
        g.put(&parameter, p)?;
        if of.master {
            g.put(&master, p)?;
        }
        g.put(&m, of_m)?;
        g.put(&v, of_v)?;
    }
    g.finish()
}

/// Steps of gradient descent.
pub(crate) fn sgd(of: &Sgd) -> Drawn {
    let mut g = Draft::of("sgd", of.buffers())?;
    let [rate, decay, factor, undamped] =
        [of.lr, of.weight_decay, of.momentum, 1.0 - of.dampening].map(|number| f64::from(number as f32));
    let tensors = Tensors { sizes: &of.sizes };
    let scale = g.float_if(of.scaled, "scale")?;
    for at in tensors.with_elements() {
        let [parameter, master, gradient, momentum] =
            ["parameter", "master", "gradient", "momentum"].map(|port| tensors.name(port, at));
        let p = g.float(if of.master { &master } else { &parameter })?;
        let gradient = scaled(&mut g, &gradient, scale)?;
        let gradient = mixed(&mut g, [gradient, p], [1.0, decay])?;
        let mut step = gradient;
        if of.momentum != 0.0 {
            let before = g.float(&momentum)?;
            step = mixed(&mut g, [before, gradient], [factor, undamped])?;
            g.put(&momentum, step)?;
            if of.nesterov {
                step = mixed(&mut g, [gradient, step], [1.0, factor])?;
            }
        }
        let p = mixed(&mut g, [p, step], [1.0, -rate])?;
        g.put(&parameter, p)?;
        if of.master {
            g.put(&master, p)?;
        }
    }
    g.finish()
}

/// A gradient, times a number if there is one.
fn scaled(g: &mut Draft, name: &str, scale: Option<Value>) -> Result<Value, NoGraph> {
    let gradient = g.float(name)?;
    Ok(scale.map_or(Ok(gradient), |scale| g.mul(gradient, scale))?)
}

/// Two values, each times a number, added.
fn mixed(g: &mut Draft, [a, b]: [Value; 2], [of_a, of_b]: [f64; 2]) -> Result<Value, NoGraph> {
    let (a, b) = (g.times(a, of_a)?, g.times(b, of_b)?);
    Ok(g.add(a, b)?)
}

/// The norm of all gradients, `[1]`.
fn norm(g: &mut Draft, tensors: &Tensors<'_>) -> Result<Value, NoGraph> {
    let mut all: Option<Value> = None;
    for at in tensors.with_elements() {
        let x = g.float(&tensors.name("gradient", at))?;
        let squares = g.mul(x, x)?;
        let sum = g.reduce(Reduction::Sum, squares, &[0])?;
        all = Some(all.map_or(Ok(sum), |all| g.add(all, sum))?);
    }
    let all = all.ok_or_else(|| g.no("no gradient has elements"))?;
    Ok(g.sqrt(all)?)
}

/// min(1, clip / (norm + 1e-6)).
fn clipping(g: &mut Draft, norm: Value, clip: f32) -> Result<Value, NoGraph> {
    let divisor = g.plus(norm, 1e-6)?;
    let clip = g.number(clip.into())?;
    let ratio = g.div(clip, divisor)?;
    let one = g.number(1.0)?;
    Ok(g.min(ratio, one)?)
}

/// The norm, and what clips it.
pub(crate) fn grad_norm(of: &GradNorm) -> Drawn {
    let mut g = Draft::of("grad_norm", of.buffers())?;
    let norm = norm(&mut g, &Tensors { sizes: &of.sizes })?;
    g.put("norm", norm)?;
    if let Some(clip) = of.clip {
        let scale = clipping(&mut g, norm, clip)?;
        g.put("scale", scale)?;
    }
    g.finish()
}

/// Gradients clipped by their norm.
pub(crate) fn grad_clip(of: &GradClip) -> Drawn {
    let mut g = Draft::of("grad_clip", of.buffers())?;
    let tensors = Tensors { sizes: &of.sizes };
    let norm = norm(&mut g, &tensors)?;
    let scale = clipping(&mut g, norm, of.clip)?;
    for at in tensors.with_elements() {
        let name = tensors.name("gradient", at);
        let clipped = scaled(&mut g, &name, Some(scale))?;
        g.put(&name, clipped)?;
    }
    g.put("norm", norm)?;
    g.finish()
}

/// A number everywhere.
pub(crate) fn fill(of: &Fill) -> Drawn {
    let mut g = Draft::of("fill", of.buffers())?;
    let tensors = Tensors { sizes: &of.sizes };
    for at in tensors.with_elements() {
        let all = g.filled(element(of.element), of.value.into(), &[of.sizes[at]])?;
        g.put(&tensors.name("x", at), all)?;
    }
    g.finish()
}
