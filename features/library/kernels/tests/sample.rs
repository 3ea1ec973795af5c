//! Draws: that they are distributed as they should be, and the same however logits are read.

mod common;

use common::machine::Machine;
use vm_ir::interp::{Limits, Tensor, run};
use vm_ir::{Scalar, Trust};
use vm_kernels::call::Function;
use vm_kernels::cases::Case;
use vm_kernels::family::{Kind, Resources};
use vm_kernels::sample::{Argmax, Logits, Sample, TopK, TopKSample, TopPSample};

const RESOURCES: Resources =
    Resources { compute_units: 4, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };

/// What runs a launch.
#[derive(Clone, Copy)]
enum On<'m> {
    Interpreter,
    Processor(&'m Machine),
}

/// The bits of the buffers behind a call.
fn call(on: On<'_>, function: Box<dyn Function>, buffers: Vec<Tensor>) -> Vec<Vec<u64>> {
    let case =
        Case { name: format!("{function:?}"), function: function.into(), buffers, expected: Vec::new() };
    let mut launch = |module: &_, launch: &mut _, _: &[_]| match on {
        On::Interpreter => run(module, launch, &Limits::default()).map(|_| ()).map_err(|e| e.to_string()),
        On::Processor(machine) => machine.run(module, launch, 1 << 40).map(|_| ()),
    };
    let buffers = case.run(&RESOURCES, Trust::Guest, &mut launch).unwrap();
    buffers.iter().map(|buffer| (0..buffer.len()).map(|at| buffer.bits(at)).collect()).collect()
}

fn seeds(rows: u64) -> Tensor {
    let seeds = (0..rows).map(|row| row.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
    Tensor::from_bits(Scalar::I64, &[rows], seeds)
}

fn tokens(rows: u64) -> Tensor {
    Tensor::from_f64s(Scalar::I32, &[rows], vec![0.0; rows as usize])
}

/// Draws by every row of the same logits, and compares how often each token comes with its probability.
fn check(
    name: &str,
    function: impl Fn(Logits) -> Box<dyn Function>,
    logits: &[f64],
    probabilities: impl Fn(&[f64]) -> Vec<f64>,
) {
    const ROWS: u64 = 1000;
    let columns = logits.len() as u64;
    let powers: Vec<f64> = logits.iter().map(|x| x.exp()).collect();
    let sum: f64 = powers.iter().sum();
    let expected = probabilities(&powers.iter().map(|power| power / sum).collect::<Vec<_>>());
    let kept: f64 = expected.iter().sum();
    let all = (0..ROWS).flat_map(|_| logits.iter().copied());
    let matrix = Tensor::from_f64s(Scalar::F32, &[ROWS, columns], all);
    let function = function(Logits { element: Scalar::F32, rows: ROWS, columns, align: 16 });
    let machine = Machine::new();
    let drawn = &call(On::Processor(&machine), function, vec![matrix, tokens(ROWS), seeds(ROWS)])[1];
    let mut counts = vec![0.0; logits.len()];
    for token in drawn {
        counts[*token as usize] += 1.0;
    }
    // Tokens that are seldom expected are taken together.
    let (mut statistic, mut bins) = (0.0, 0.0);
    let (mut rest, mut rest_expected) = (0.0, 0.0);
    for (count, probability) in counts.iter().zip(&expected) {
        let expected = probability / kept * ROWS as f64;
        assert!(expected > 0.0 || *count == 0.0, "{name}: a token was drawn that can't be");
        if expected < 10.0 {
            (rest, rest_expected) = (rest + count, rest_expected + expected);
        } else {
            statistic += (count - expected) * (count - expected) / expected;
            bins += 1.0;
        }
    }
    if rest_expected > 1.0 {
        statistic += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
        bins += 1.0;
    }
    // Five standard deviations above what is expected of so many.
    let freedom: f64 = bins - 1.0;
    assert!(freedom > 5.0, "{name}: {bins} bins");
    assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "{name}: {statistic} of {freedom}");
}

/// The probabilities of the greatest, as many as `take` says of the sum before.
fn greatest(probabilities: &[f64], take: impl Fn(usize, f64) -> bool) -> Vec<f64> {
    let mut ranked: Vec<usize> = (0..probabilities.len()).collect();
    ranked.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]));
    let mut kept = vec![0.0; probabilities.len()];
    let mut before = 0.0;
    for (rank, at) in ranked.into_iter().enumerate() {
        if take(rank, before) {
            kept[at] = probabilities[at];
        }
        before += probabilities[at];
    }
    kept
}

#[test]
fn draws_follow_the_distribution() {
    // One chunk; and several, of which most columns are unlikely.
    let short: Vec<f64> = (0..40).map(|at| f64::from(at * 7 % 40) / 10.0).collect();
    let long: Vec<f64> =
        (0..1100).map(|at| if at % 50 == 3 { f64::from(at % 7) / 4.0 } else { -9.0 }).collect();
    for logits in [&short, &long] {
        let sample = |logits| Box::new(Sample { logits, temperature: 1.0 }) as Box<dyn Function>;
        check("sample", sample, logits, <[f64]>::to_vec);
        let top_k = |logits| Box::new(TopKSample { logits, k: 12, temperature: 1.0 }) as Box<dyn Function>;
        check("top 12", top_k, logits, |p| greatest(p, |rank, _| rank < 12));
        for wanted in [0.5, 0.8] {
            let top_p =
                |logits| Box::new(TopPSample { logits, p: wanted, temperature: 1.0 }) as Box<dyn Function>;
            check("top p", top_p, logits, |p| greatest(p, |_, before| before < f64::from(wanted)));
        }
    }
}

#[test]
fn results_do_not_depend_on_how_logits_are_read() {
    let machine = Machine::new();
    for columns in [76, 1032] {
        let rows = 4;
        let values = vm_kernels::cases::numbers(columns, rows * columns).into_iter().map(|x| x * 6.0);
        let matrix = Tensor::from_f64s(Scalar::Bf16, &[rows, columns], values);
        let functions: [&dyn Fn(Logits) -> Box<dyn Function>; 5] = [
            &|logits| Box::new(Argmax { logits }),
            &|logits| Box::new(Sample { logits, temperature: 0.9 }),
            &|logits| Box::new(TopKSample { logits, k: 40, temperature: 2.0 }),
            &|logits| Box::new(TopPSample { logits, p: 0.7, temperature: 3.0 }),
            &|logits| Box::new(TopK { logits, k: 40 }),
        ];
        for function in functions {
            let run = |on, align: u32, rows: std::ops::Range<u64>| {
                let count = rows.end - rows.start;
                let function = function(Logits { element: Scalar::Bf16, rows: count, columns, align });
                let bits = (rows.start * columns..rows.end * columns).map(|at| matrix.bits(at as usize));
                let mut buffers = vec![Tensor::from_bits(Scalar::Bf16, &[count, columns], bits)];
                for buffer in &function.buffers()[1..] {
                    let zeros = vec![0; buffer.len().unwrap() as usize];
                    buffers.push(Tensor::from_bits(buffer.element, &buffer.extents, zeros));
                    if buffer.name == "seeds" {
                        let all = seeds(rows.end);
                        let bits = rows.clone().map(|row| all.bits(row as usize));
                        *buffers.last_mut().unwrap() = Tensor::from_bits(Scalar::I64, &[count], bits);
                    }
                }
                call(on, function, buffers)[1..].to_vec()
            };
            let expected = run(On::Interpreter, 16, 0..rows);
            // Unaligned, and on other backends.
            assert_eq!(run(On::Processor(&machine), 16, 0..rows), expected);
            assert_eq!(run(On::Processor(&machine), 2, 0..rows), expected);
            assert_eq!(run(On::Interpreter, 2, 0..rows), expected);
            // A row by itself.
            let alone = run(On::Processor(&machine), 16, 3..4);
            for (alone, expected) in alone.iter().zip(&expected) {
                let of_row = expected.len() / rows as usize;
                assert_eq!(alone[..of_row], expected[3 * of_row..4 * of_row]);
            }
        }
    }
}
