//! Arrays in FP8, with their scales.

use super::{Case, Expected, LONG, case, numbers, odd_shapes, random, shapes};
use crate::quantise::{Grain, Quantise};
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

pub(super) fn cases() -> Vec<Case> {
    use Scalar::{Bf16, F8E4M3, F8E5M2, F16, F32};
    let mut cases = Vec::new();
    for (number, (extents, input, _)) in shapes().into_iter().chain(odd_shapes()).enumerate() {
        cases.push(plain(Grain::Rows, extents, input, [F8E4M3, F8E5M2][number % 2], 16));
    }
    for (extents, input, output, align) in [
        ([1, 1], F32, F8E4M3, 16),
        ([3, 128], Bf16, F8E4M3, 16),
        ([9, 200], F16, F8E5M2, 16),
        ([130, 256], F32, F8E4M3, 16),
        ([17, 130], Bf16, F8E5M2, 2),
        ([128, 129], F32, F8E4M3, 4),
        ([257, 390], Bf16, F8E4M3, 16),
        ([0, 256], F32, F8E4M3, 16),
    ] {
        for grain in [Grain::Lines, Grain::Squares] {
            cases.push(plain(grain, extents, input, output, align));
        }
    }
    for (columns, input) in LONG {
        cases.push(plain(Grain::Rows, [1, columns], input, F8E4M3, 16));
    }
    cases.extend([Grain::Rows, Grain::Lines].map(special));
    cases
}

/// The greatest number of a type, its least normal one, and half of what its last bit is of a number.
fn limits(output: Scalar) -> [f64; 3] {
    match output {
        Scalar::F8E4M3 => [448.0, 2f64.powi(-6), 2f64.powi(-4)],
        _ => [57_344.0, 2f64.powi(-14), 2f64.powi(-3)],
    }
}

/// Where the scale of an element is.
fn place(grain: Grain, [rows, columns]: [u64; 2], at: u64) -> usize {
    let (row, column) = (at / columns, at % columns);
    (match grain {
        Grain::Rows => row,
        Grain::Lines => column / 128 * rows + row,
        Grain::Squares => column / 128 * rows.div_ceil(128) + row / 128,
    }) as usize
}

fn of_values(
    name: String,
    grain: Grain,
    extents: [u64; 2],
    [input, output]: [Scalar; 2],
    align: u32,
    values: Vec<f64>,
) -> Case {
    use crate::call::Function as _;
    let [rows, columns] = extents;
    let function = Quantise { rows, columns, input, output, grain, align };
    let x = Tensor::from_f64s(input, &extents, values);
    let values = x.to_f64s();
    let of_scales = function.buffers()[2].extents.clone();
    let mut scales = vec![0.0f64; of_scales.iter().product::<u64>() as usize];
    let [greatest, normal, half] = limits(output);
    let places = || (0..rows * columns).map(|at| place(grain, extents, at));
    for (place, value) in places().zip(&values) {
        let scale = &mut scales[place];
        *scale = if scale.is_nan() || value.is_nan() { f64::NAN } else { scale.max(value.abs()) };
    }
    let least = f64::from(f32::MIN_POSITIVE);
    let scales = scales.into_iter().map(|most| if most.is_nan() { most } else { least.max(most / greatest) });
    let scales: Vec<_> = scales.collect();
    let of_element = places().zip(&values).map(|(place, value)| value / scales[place]).collect();
    let mut of_scale = Expected::new(2, scales, 1e-6);
    of_scale.scale = 0.0;
    // The nearest is off by half of its last bit.
    let mut of_element = Expected::new(1, of_element, half * (1.0 + 1e-5));
    of_element.scale = normal;
    let buffers = vec![x, random(7, output, &extents), random(8, Scalar::F32, &of_scales)];
    case(name, function, buffers, vec![of_element, of_scale])
}

fn plain(grain: Grain, extents: [u64; 2], input: Scalar, output: Scalar, align: u32) -> Case {
    let [rows, columns] = extents;
    // Rows and blocks of other magnitudes.
    let values = numbers(51, rows * columns).into_iter().zip(0u64..);
    let values = values.map(|(x, at)| x * 3f64.powi((at / columns % 7 + at % columns / 128 * 3) as i32 % 9));
    let name = format!("quantised {grain:?} of {input} in {output}, {rows} x {columns}, align {align}");
    of_values(name, grain, extents, [input, output], align, values.collect())
}

/// Zeros, NaN, infinities, subnormals.
fn special(grain: Grain) -> Case {
    const INF: f64 = f64::INFINITY;
    let rows =
        [[0.0, -0.0, 0.0], [1.0, f64::NAN, 2.0], [1.0, -INF, 0.0], [1e-40, -1e-39, 0.0], [3e38, -3e38, 1e30]];
    let name = format!("quantised {grain:?} of special values");
    of_values(name, grain, [5, 3], [Scalar::F32, Scalar::F8E4M3], 16, rows.concat())
}
