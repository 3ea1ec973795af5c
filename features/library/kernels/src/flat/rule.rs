//! What is done to each element.

use vm_ir::Scalar;
use vm_ir::builder::Val;
use vm_ir::view::Access;

/// An activation that has a gradient of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x · σ(x).
    Silu,
    /// x · Φ(x), by the error function.
    Gelu,
    /// x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³))).
    GeluTanh,
    /// max(x, 0).
    Relu,
    /// silu(gate) · up.
    Swiglu,
}

impl Activation {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Relu => "relu",
            Activation::Swiglu => "swiglu",
        }
    }
}

/// What is done to each element, and in which types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// A step of AdamW.
    AdamW {
        /// What a parameter is.
        parameter: Scalar,
        /// What a gradient is.
        gradient: Scalar,
        /// Is there a copy of the parameters in f32, of which they are the rounded values?
        master: bool,
        /// Are gradients multiplied with a number in memory first?
        scaled: bool,
    },
    /// A step of stochastic gradient descent.
    Sgd {
        /// What a parameter is.
        parameter: Scalar,
        /// What a gradient is.
        gradient: Scalar,
        /// Is there a copy of the parameters in f32?
        master: bool,
        /// Is there a momentum?
        momentum: bool,
        /// Does the step look ahead by the momentum?
        nesterov: bool,
        /// Are gradients multiplied with a number in memory first?
        scaled: bool,
    },
    /// Each element times a number in memory; nothing is touched if that is 1.
    Scale {
        /// What an element is.
        element: Scalar,
    },
    /// Each element becomes a number.
    Fill {
        /// What an element is.
        element: Scalar,
    },
    /// The gradient of an activation.
    Gradient {
        /// Which one.
        activation: Activation,
        /// What an element is.
        element: Scalar,
    },
}

/// A view of each tensor.
pub struct Port {
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub element: Scalar,
    /// What happens to it.
    pub access: Access,
}

impl Port {
    const fn new(name: &'static str, element: Scalar, access: Access) -> Port {
        Port { name, element, access }
    }
}

impl Rule {
    /// Its name.
    pub fn name(self) -> String {
        let flags = |all: &[(bool, &'static str)]| -> String {
            all.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect()
        };
        match self {
            Rule::AdamW { parameter, gradient, master, scaled } => {
                let flags = flags(&[(master, "_master"), (scaled, "_scaled")]);
                format!("adamw_{parameter}_{gradient}{flags}")
            }
            Rule::Sgd { parameter, gradient, master, momentum, nesterov, scaled } => {
                let flags = flags(&[
                    (master, "_master"),
                    (momentum, "_momentum"),
                    (nesterov, "_nesterov"),
                    (scaled, "_scaled"),
                ]);
                format!("sgd_{parameter}_{gradient}{flags}")
            }
            Rule::Scale { element } => format!("scale_{element}"),
            Rule::Fill { element } => format!("fill_{element}"),
            Rule::Gradient { activation, element } => format!("{}_gradient_{element}", activation.name()),
        }
    }

    /// The views of each tensor, in order.
    pub fn ports(self) -> Vec<Port> {
        use Access::{Read, ReadWrite, Write};
        let parameters = |parameter, gradient, master: bool| {
            let access = if master { Write } else { ReadWrite };
            let mut ports = vec![Port::new("parameter", parameter, access)];
            ports.extend(master.then(|| Port::new("master", Scalar::F32, ReadWrite)));
            ports.push(Port::new("gradient", gradient, Read));
            ports
        };
        match self {
            Rule::AdamW { parameter, gradient, master, .. } => {
                let mut ports = parameters(parameter, gradient, master);
                ports.push(Port::new("m", Scalar::F32, ReadWrite));
                ports.push(Port::new("v", Scalar::F32, ReadWrite));
                ports
            }
            Rule::Sgd { parameter, gradient, master, momentum, .. } => {
                let mut ports = parameters(parameter, gradient, master);
                ports.extend(momentum.then(|| Port::new("momentum", Scalar::F32, ReadWrite)));
                ports
            }
            Rule::Scale { element } => vec![Port::new("x", element, ReadWrite)],
            Rule::Fill { element } => vec![Port::new("x", element, Write)],
            Rule::Gradient { activation: Activation::Swiglu, element } => {
                let names = [("dy", Read), ("gate", Read), ("up", Read), ("dgate", Write), ("dup", Write)];
                names.map(|(name, access)| Port::new(name, element, access)).into()
            }
            Rule::Gradient { element, .. } => {
                let names = [("dy", Read), ("x", Read), ("dx", Write)];
                names.map(|(name, access)| Port::new(name, element, access)).into()
            }
        }
    }

    /// Is a number of f32 in memory given with it?
    pub const fn is_scaled(self) -> bool {
        match self {
            Rule::AdamW { scaled, .. } | Rule::Sgd { scaled, .. } => scaled,
            Rule::Scale { .. } => true,
            Rule::Fill { .. } | Rule::Gradient { .. } => false,
        }
    }

    /// The names of its numbers, in order.
    pub const fn numbers(self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } => {
                &["keep", "beta1", "rest1", "beta2", "rest2", "rate", "correction", "epsilon"]
            }
            Rule::Sgd { .. } => &["rate", "decay", "momentum_factor", "undamped"],
            Rule::Scale { .. } | Rule::Gradient { .. } => &[],
            Rule::Fill { .. } => &["value"],
        }
    }

    /// What is stored to the views that are written, in order, of what is in those that are read and of the numbers, the scale behind
    /// them; all in f32.
    pub(super) fn compute<'b>(self, x: &[Val<'b>], numbers: &[Val<'b>]) -> Vec<Val<'b>> {
        match self {
            Rule::AdamW { master, scaled, .. } => {
                let (&[p, g, m, v], &[keep, beta1, rest1, beta2, rest2, rate, correction, epsilon, ..]) =
                    (x, numbers)
                else {
                    return Vec::new();
                };
                let g = if scaled { g * numbers[8] } else { g };
                let m = m.fma(beta1, rest1 * g);
                let v = v.fma(beta2, rest2 * g * g);
                let p = p * keep - rate * m / v.sqrt().fma(correction, epsilon);
                if master { vec![p, p, m, v] } else { vec![p, m, v] }
            }
            Rule::Sgd { master, momentum, nesterov, scaled, .. } => {
                let (&[p, g, ..], &[rate, decay, factor, undamped, ..]) = (x, numbers) else {
                    return Vec::new();
                };
                let g = if scaled { g * numbers[4] } else { g };
                let g = p.fma(decay, g);
                let buffer = momentum.then(|| x[2].fma(factor, undamped * g));
                let step = match buffer {
                    Some(buffer) if nesterov => buffer.fma(factor, g),
                    Some(buffer) => buffer,
                    None => g,
                };
                let p = p - rate * step;
                let mut all = if master { vec![p, p] } else { vec![p] };
                all.extend(buffer);
                all
            }
            Rule::Scale { .. } => vec![x[0] * numbers[0]],
            Rule::Fill { .. } => vec![numbers[0]],
            Rule::Gradient { activation: Activation::Swiglu, .. } => {
                let (dy, gate, up) = (x[0], x[1], x[2]);
                let sigma = sigmoid(gate);
                vec![dy * up * silu_slope(gate, sigma), dy * gate * sigma]
            }
            Rule::Gradient { activation, .. } => {
                let (dy, x) = (x[0], x[1]);
                vec![match activation {
                    Activation::Relu => {
                        let zero = dy.builder().constant(dy.ty(), 0.0);
                        x.le(0.0).select(zero, dy)
                    }
                    Activation::Gelu => {
                        let below = 0.5 * (1.0 + (x * std::f64::consts::FRAC_1_SQRT_2).erf());
                        let density = (x * x * -0.5).exp() * (1.0 / (2.0 * std::f64::consts::PI).sqrt());
                        dy * x.fma(density, below)
                    }
                    Activation::GeluTanh => {
                        let root = (2.0 / std::f64::consts::PI).sqrt();
                        let square = x * x;
                        let t = (x * square.fma(root * 0.044_715, root)).tanh();
                        let slope = square.fma(3.0 * 0.044_715 * root, root);
                        dy * 0.5 * (1.0 + t + x * (1.0 - t * t) * slope)
                    }
                    Activation::Silu | Activation::Swiglu => dy * silu_slope(x, sigmoid(x)),
                }]
            }
        }
    }
}

fn sigmoid<'b>(x: Val<'b>) -> Val<'b> {
    1.0 / (1.0 + (-x).exp())
}

/// σ(x) · (1 + x · (1 − σ(x))).
fn silu_slope<'b>(x: Val<'b>, sigma: Val<'b>) -> Val<'b> {
    sigma * x.fma(1.0 - sigma, 1.0)
}
