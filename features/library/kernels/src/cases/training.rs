//! Steps of optimizers, norms of gradients, gradients of activations.

use super::{Case, Expected, case, random};
use crate::call::Function;
use crate::flat::{Activation, ActivationGradient, AdamW, Fill, GradClip, GradNorm, Sgd};
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

/// Sizes of tensors: none, one, around a vector's, a block's of f32 and of bf16 with a rest.
const SIZES: [&[u64]; 4] =
    [&[1], &[0, 3, 2048, 0, 2051], &[4097], &[5, 8, 9, 1, 17, 2, 2049, 31, 1, 1, 6, 7, 40]];

/// How far an element of a type may be off.
fn tolerance(element: Scalar) -> f64 {
    match element {
        Scalar::F32 => 4e-6,
        Scalar::F16 => 1e-3,
        _ => 8e-3,
    }
}

/// Buffers of random numbers for a function; those of `v` are not negative.
fn fill(function: &dyn Function) -> Vec<Tensor> {
    let buffers = function.buffers();
    let each = buffers.iter().enumerate().map(|(at, buffer)| match buffer.name {
        "v" => {
            let numbers = random(at as u64 + 1, buffer.element, &buffer.extents).to_f64s();
            Tensor::from_f64s(buffer.element, &buffer.extents, numbers.into_iter().map(f64::abs))
        }
        "scale" => Tensor::from_f64s(buffer.element, &buffer.extents, [0.25]),
        _ => random(at as u64 + 1, buffer.element, &buffer.extents),
    });
    each.collect()
}

pub(super) fn cases() -> Vec<Case> {
    use Scalar::{Bf16, F16, F32};
    let mut cases = Vec::new();
    for (at, sizes) in SIZES.iter().enumerate() {
        let align = if at % 2 == 0 { 16 } else { 2 };
        for (parameter, gradient, master, scaled) in [
            (F32, F32, false, false),
            (Bf16, Bf16, true, true),
            (F32, Bf16, false, true),
            (F16, F32, false, false),
        ] {
            let sizes = sizes.to_vec();
            let adamw = AdamW {
                sizes: sizes.clone(),
                parameter,
                gradient,
                master,
                scaled,
                align,
                lr: 1e-2,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.1,
                step: [1, 7, 1000, 100_000][at],
            };
            cases.push(adamw_case(adamw));
            let momentum = if at == 0 { 0.0 } else { 0.9 };
            let (nesterov, dampening) = (at == 1, if at == 3 { 0.5 } else { 0.0 });
            let (lr, weight_decay) = (1e-2, 0.1);
            let sgd = Sgd {
                sizes,
                parameter,
                gradient,
                master,
                scaled,
                align,
                lr,
                momentum,
                dampening,
                nesterov,
                weight_decay,
            };
            cases.push(sgd_case(sgd));
        }
        let elements: &[Scalar] = if at == 1 { &[F32, Bf16, F16] } else { &[Bf16] };
        for element in elements.iter().copied() {
            let sizes = sizes.to_vec();
            let function = Fill { sizes: sizes.clone(), element, align, value: -1.5 };
            let expected = sizes.iter().enumerate();
            let expected =
                expected.map(|(at, size)| Expected::exact(at, vec![-1.5; *size as usize])).collect();
            let buffers = fill(&function);
            cases.push(case(format!("fill of {element}, {sizes:?}"), function, buffers, expected));
            // Once below the norm, where nothing changes, once above.
            for clip in [1e4, 0.5] {
                let (norm, clipping) = norms(&sizes, element, align, clip, |_| {});
                cases.extend([norm, clipping]);
            }
        }
    }
    // A block adds up several chunks; and several launches leave partial sums.
    for sizes in [vec![70_001], vec![9; 33]] {
        let (norm, clipping) = norms(&sizes, F32, 16, 1.0, |_| {});
        cases.extend([norm, clipping]);
    }
    for (name, value) in [("infinite", f64::INFINITY), ("not a number", f64::NAN)] {
        let (mut norm, mut clipping) = norms(&[300, 5], F32, 16, 1.0, |numbers| numbers[7] = value);
        norm.name = format!("{}, {name}", norm.name);
        clipping.name = format!("{}, {name}", clipping.name);
        cases.extend([norm, clipping]);
    }
    cases.extend(activations());
    cases
}

fn adamw_case(function: AdamW) -> Case {
    let AdamW { ref sizes, parameter, gradient, master, scaled, .. } = function;
    let buffers = fill(&function);
    let mut expected = Vec::new();
    let ports = 4 + usize::from(master);
    let scale = if scaled { 0.25 } else { 1.0 };
    let (c1, c2) = (1.0 - 0.9f64.powi(function.step as i32), 1.0 - 0.999f64.powi(function.step as i32));
    for tensor in 0..sizes.len() {
        let at = tensor * ports;
        let numbers = |port: usize| buffers[at + port].to_f64s();
        let (p, g, m, v) =
            (numbers(usize::from(master)), numbers(ports - 3), numbers(ports - 2), numbers(ports - 1));
        let (mut ps, mut ms, mut vs) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..p.len() {
            let g = g[i] * scale;
            let m = 0.9 * m[i] + (1.0 - 0.9) * g;
            let v = 0.999 * v[i] + (1.0 - 0.999) * g * g;
            ps.push(p[i] - 1e-2 * 0.1 * p[i] - 1e-2 * (m / c1) / ((v / c2).sqrt() + 1e-8));
            ms.push(m);
            vs.push(v);
        }
        expected.push(Expected::new(at, ps.clone(), tolerance(parameter)));
        expected.extend(master.then(|| Expected::new(at + 1, ps, tolerance(Scalar::F32))));
        expected.push(Expected::new(at + ports - 2, ms, tolerance(Scalar::F32)));
        expected.push(Expected::new(at + ports - 1, vs, tolerance(Scalar::F32)));
    }
    let name = format!("adamw of {parameter}, gradients of {gradient}, master {master}, {sizes:?}");
    case(name, function, buffers, expected)
}

fn sgd_case(function: Sgd) -> Case {
    let Sgd { ref sizes, parameter, gradient, master, scaled, momentum, dampening, nesterov, .. } = function;
    let buffers = fill(&function);
    let mut expected = Vec::new();
    let has = momentum != 0.0;
    let ports = 2 + usize::from(master) + usize::from(has);
    let scale = if scaled { 0.25 } else { 1.0 };
    for tensor in 0..sizes.len() {
        let at = tensor * ports;
        let numbers = |port: usize| buffers[at + port].to_f64s();
        let (p, g) = (numbers(usize::from(master)), numbers(1 + usize::from(master)));
        let before = if has { numbers(ports - 1) } else { vec![0.0; p.len()] };
        let (mut ps, mut bs) = (Vec::new(), Vec::new());
        for i in 0..p.len() {
            let g = g[i] * scale + 0.1 * p[i];
            let b = momentum * before[i] + (1.0 - dampening) * g;
            let step = match (has, nesterov) {
                (false, _) => g,
                (true, false) => b,
                (true, true) => g + momentum * b,
            };
            ps.push(p[i] - 1e-2 * step);
            bs.push(b);
        }
        expected.push(Expected::new(at, ps.clone(), tolerance(parameter)));
        expected.extend(master.then(|| Expected::new(at + 1, ps, tolerance(Scalar::F32))));
        expected.extend(has.then(|| Expected::new(at + ports - 1, bs, tolerance(Scalar::F32))));
    }
    let name = format!("sgd of {parameter}, gradients of {gradient}, momentum {momentum}, {sizes:?}");
    case(name, function, buffers, expected)
}

/// A norm, and gradients that are clipped by it.
fn norms(
    sizes: &[u64],
    element: Scalar,
    align: u32,
    clip: f32,
    change: impl Fn(&mut Vec<f64>),
) -> (Case, Case) {
    let gradients = (0..).zip(sizes).map(|(at, size)| {
        let mut numbers = random(at + 1, element, &[*size]).to_f64s();
        if at == 0 {
            change(&mut numbers);
        }
        Tensor::from_f64s(element, &[*size], numbers)
    });
    let gradients: Vec<_> = gradients.collect();
    let squares = gradients.iter().flat_map(Tensor::to_f64s).map(|x| x * x);
    let norm = squares.sum::<f64>().sqrt();
    let ratio = f64::from(clip) / (norm + 1e-6);
    let scale = if ratio > 1.0 { 1.0 } else { ratio };
    let one = || Tensor::from_f64s(Scalar::F32, &[1], [-1.0]);
    let count = sizes.len();
    let shown: Vec<_> = sizes.iter().take(4).collect();
    let of = |what: &str| format!("{what} of {element}, {count} tensors of {shown:?}, to {clip}");
    let mut buffers = gradients.clone();
    buffers.extend([one(), one()]);
    let function = GradNorm { sizes: sizes.to_vec(), element, align, clip: Some(clip) };
    let expected = vec![Expected::new(count, vec![norm], 1e-5), Expected::new(count + 1, vec![scale], 1e-5)];
    let first = case(of("norm"), function, buffers, expected);
    let function = GradClip { sizes: sizes.to_vec(), element, align, clip };
    let mut expected: Vec<_> = gradients
        .iter()
        .enumerate()
        .map(|(at, tensor)| {
            let scaled = tensor.to_f64s().into_iter().map(|x| x * scale).collect();
            let tolerance = if scale == 1.0 { 0.0 } else { tolerance(element).max(1e-5) };
            Expected::new(at, scaled, tolerance)
        })
        .collect();
    expected.push(Expected::new(count, vec![norm], 1e-5));
    let mut buffers = gradients;
    buffers.push(one());
    (first, case(of("gradients clipped"), function, buffers, expected))
}

pub(super) fn slope(activation: Activation, x: f64) -> f64 {
    let sigma = 1.0 / (1.0 + (-x).exp());
    let pi = std::f64::consts::PI;
    match activation {
        Activation::Silu | Activation::Swiglu => sigma + x * sigma * (1.0 - sigma),
        Activation::Relu => f64::from(x > 0.0),
        // By a difference quotient of the definition, with the integral of the density in small steps.
        Activation::Gelu => {
            let density = |x: f64| (-x * x / 2.0).exp() / (2.0 * pi).sqrt();
            let steps = 2000;
            let width = x / f64::from(steps);
            let parts = (0..steps).map(|at| density((f64::from(at) + 0.5) * width) * width);
            0.5 + parts.sum::<f64>() + x * density(x)
        }
        Activation::GeluTanh => {
            let value = |x: f64| 0.5 * x * (1.0 + ((2.0 / pi).sqrt() * (x + 0.044_715 * x * x * x)).tanh());
            (value(x + 1e-5) - value(x - 1e-5)) / 2e-5
        }
    }
}

fn activations() -> Vec<Case> {
    let mut cases = Vec::new();
    let all =
        [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Swiglu];
    for activation in all {
        for (element, rows, columns, align) in [
            (Scalar::F32, 1, 2053, 16),
            (Scalar::Bf16, 1, 4099, 16),
            (Scalar::F16, 1, 13, 2),
            (Scalar::F32, 1, 0, 16),
            (Scalar::Bf16, 7, 40, 16),
            (Scalar::F32, 5, 129, 16),
        ] {
            let function = ActivationGradient { activation, rows, columns, element, align };
            let mut buffers = fill(&function);
            // From where a slope is 0 to where it is 1, and its turns.
            let spread = buffers[1].to_f64s().into_iter().map(|x| x * 6.0);
            let mut spread: Vec<_> = spread.collect();
            if let Some(first) = spread.first_mut() {
                *first = 0.0;
            }
            buffers[1] = Tensor::from_f64s(element, &[rows, columns], spread);
            let [dy, x, up] = [0, 1, 2].map(|at| buffers[at].to_f64s());
            let tolerance = tolerance(element);
            let expected = if activation == Activation::Swiglu {
                let gates = (0..x.len()).map(|i| dy[i] * up[i] * slope(activation, x[i]));
                let ups = (0..x.len()).map(|i| dy[i] * x[i] / (1.0 + (-x[i]).exp()));
                vec![Expected::new(3, gates.collect(), tolerance), Expected::new(4, ups.collect(), tolerance)]
            } else {
                let values = (0..x.len()).map(|i| dy[i] * slope(activation, x[i]));
                vec![Expected::new(2, values.collect(), tolerance)]
            };
            let name = format!("gradient of {} of {element}, {rows} x {columns}", activation.name());
            cases.push(case(name, function, buffers, expected));
        }
    }
    cases
}
