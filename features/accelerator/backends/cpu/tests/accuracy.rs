//! How far results of ops that are not exact are from the true ones, on this machine and on the interpreter, as the fast
//! and as the precise class: never farther than the op's row in `docs/ir.md` says. f16 and bf16 are asked for every
//! number in range, f32 and f64 for many of all sizes.

mod common;
#[path = "accuracy/reference.rs"]
mod reference;

use common::Machine;
use reference::Twice;
use vm_ir::format::to_f64;
use vm_ir::interp::{Argument, Launch, Tensor};
use vm_ir::op::{Opcode, TABLE};
use vm_ir::semantics::eval;
use vm_ir::{Scalar, Trust, text, validate};

/// Numbers for each op: f32, and what takes a reference of twice the bits.
const MANY: usize = 1 << 17;
const SOME: usize = 1 << 12;

/// An op, and the magnitudes at which it is asked; also for negative numbers?
const RANGES: [(Opcode, f64, f64, bool); 13] = [
    (Opcode::Div, 1e-3, 1e3, true),
    (Opcode::Sqrt, 1e-30, 1e30, false),
    (Opcode::Rsqrt, 1e-30, 1e30, false),
    (Opcode::Rcp, 1e-30, 1e30, true),
    (Opcode::Exp, 1e-9, 87.0, true),
    (Opcode::Exp2, 1e-9, 126.0, true),
    (Opcode::Log, 1e-30, 1e30, false),
    (Opcode::Log2, 1e-30, 1e30, false),
    (Opcode::Sin, 1e-9, 100.0, true),
    (Opcode::Cos, 1e-9, 100.0, true),
    (Opcode::Tanh, 1e-3, 18.0, true),
    (Opcode::Erf, 1e-9, 4.0, true),
    (Opcode::Pow, 1e-2, 1e2, false),
];

/// Bits of the significand with the hidden one, and the least exponent of a normal number.
fn format(scalar: Scalar) -> (i32, i32) {
    match scalar {
        Scalar::F16 => (11, -14),
        Scalar::Bf16 => (8, -126),
        Scalar::F32 => (24, -126),
        _ => (53, -1022),
    }
}

/// The distance between numbers of a type around `x`.
fn ulp(scalar: Scalar, x: f64) -> f64 {
    let (bits, least) = format(scalar);
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least);
    2f64.powi(exponent - bits + 1)
}

/// Numbers of a type, of all sizes of a range: as bits.
fn samples(scalar: Scalar, low: f64, high: f64, signed: bool, count: usize) -> Vec<u64> {
    let [first, last] = [low, high].map(|x| vm_ir::format::from_f64(scalar, x));
    let (span, sign) = (last - first, scalar.mask() ^ (scalar.mask() >> 1));
    let step = (span / count as u64).max(1) | 1;
    let numbers = (0..).map(|i| first + i * step).take_while(|bits| *bits < last);
    numbers.flat_map(|bits| [Some(bits), signed.then_some(bits | sign)]).flatten().collect()
}

fn truth(code: Opcode, scalar: Scalar, a: f64, b: f64) -> Twice {
    let (x, y) = (Twice::from(a), Twice::from(b));
    let plain = |result: f64| Twice::from(result);
    match code {
        Opcode::Div => x / y,
        Opcode::Sqrt => x.sqrt(),
        Opcode::Rsqrt => Twice::from(1.0) / x.sqrt(),
        Opcode::Rcp => Twice::from(1.0) / x,
        // Of the narrower types, f64 is as good as the truth.
        Opcode::Exp if scalar != Scalar::F64 => plain(a.exp()),
        Opcode::Exp2 if scalar != Scalar::F64 => plain(a.exp2()),
        Opcode::Log if scalar != Scalar::F64 => plain(a.ln()),
        Opcode::Log2 if scalar != Scalar::F64 => plain(a.log2()),
        Opcode::Sin if scalar != Scalar::F64 => plain(a.sin()),
        Opcode::Cos if scalar != Scalar::F64 => plain(a.cos()),
        Opcode::Tanh if scalar != Scalar::F64 => plain(a.tanh()),
        Opcode::Pow if scalar != Scalar::F64 => plain(a.powf(b)),
        Opcode::Erf if scalar != Scalar::F64 => {
            plain(f64::from_bits(eval(code, Scalar::F64, Scalar::F64, &[a.to_bits()]).unwrap()))
        }
        Opcode::Exp => x.exp(),
        Opcode::Exp2 => x.exp2(),
        Opcode::Log => x.ln(),
        Opcode::Log2 => x.log2(),
        Opcode::Sin => x.sine(0),
        Opcode::Cos => x.sine(1),
        Opcode::Tanh => x.tanh(),
        Opcode::Erf => x.erf(),
        _ => x.pow(y),
    }
}

/// What the fast class of an op may be off, as the table says it; without the result's own rounding.
fn fast_bound(code: Opcode, bits: u32, a: f64, truth: f64) -> f64 {
    let relative = 2f64.powi(-(bits as i32));
    relative
        * match code {
            Opcode::Exp => truth.abs() * a.abs().max(1.0),
            Opcode::Log | Opcode::Log2 if (0.5..=2.0).contains(&a) => 1.0,
            Opcode::Sin | Opcode::Cos => 1.0,
            _ => truth.abs(),
        }
}

fn kernel(name: &str, scalar: Scalar, operands: usize) -> String {
    let second = if operands == 2 { ", %y" } else { "" };
    format!(
        "vir 1
         kernel @k(@a: view<{scalar}, [?], read>, @b: view<{scalar}, [?], read>, @out: view<{scalar}, [?], write>) at 0x0 block(64) {{
           %i = global_id.x : i64
           %x = load @a[%i] : {scalar}
           %y = load @b[%i] : {scalar}
           %r = {name} %x{second} : {scalar}
           store @out[%i], %r
         }}"
    )
}

#[test]
fn worst_errors() {
    let machine = Machine::new();
    let mut failures = String::new();
    println!(
        "| op | type | numbers | precise, ulps | fast, ulps | interpreter, ulps |\n| --- | --- | --- | --- | --- | --- |"
    );
    let inexact = TABLE.iter().filter(|row| row.error.is_some()).count();
    assert_eq!(inexact, RANGES.len(), "ops that are not exact");
    for (code, low, high, signed) in RANGES {
        let row = code.info();
        let Some(bound) = row.error else { panic!("{} is exact", row.mnemonic) };
        let operands = row.shape.operands().unwrap_or(1);
        for scalar in [Scalar::F32, Scalar::F16, Scalar::Bf16, Scalar::F64] {
            let count = if scalar == Scalar::F64 { SOME } else { MANY };
            let (low, high) =
                if scalar == Scalar::F16 { (low.max(1e-4), high.min(1e4)) } else { (low, high) };
            let a = samples(scalar, low, high, signed, count);
            // The second operand goes through the same numbers in another order.
            let b: Vec<u64> = (0..a.len()).map(|i| a[(i * 7919 + 13) % a.len()]).collect();
            let truths: Vec<Twice> = a
                .iter()
                .zip(&b)
                .map(|(a, b)| truth(code, scalar, to_f64(scalar, *a), to_f64(scalar, *b)))
                .collect();
            let largest = to_f64(scalar, vm_ir::format::from_f64(scalar, f64::INFINITY) - 1);
            let least = 2f64.powi(format(scalar).1);
            let ours = |name: &str| {
                let module = text::parse(&kernel(name, scalar, operands)).unwrap();
                let valid = validate(module, Trust::Guest).unwrap();
                let extents = [a.len() as u64];
                let tensor = |bits: &[u64]| {
                    Argument::Tensor(Tensor::from_bits(scalar, &extents, bits.iter().copied()))
                };
                let arguments = vec![tensor(&a), tensor(&b), tensor(&vec![0; a.len()])];
                let grid = [(a.len() as u32).div_ceil(64), 1, 1];
                let mut launch = Launch { kernel: "k".into(), grid, arguments };
                assert_eq!(machine.run(&valid, &mut launch, 1), Ok(0));
                let out = launch.arguments[2].tensor().unwrap();
                (0..a.len()).map(|i| out.bits(i)).collect::<Vec<u64>>()
            };
            let interpreted: Vec<u64> = a
                .iter()
                .zip(&b)
                .map(|(a, b)| eval(code, scalar, scalar, &[*a, *b][..operands]).unwrap())
                .collect();
            let fast = format!("{}.fast", row.mnemonic);
            let mut worst = [0f64; 3];
            for (way, results) in [ours(row.mnemonic), ours(&fast), interpreted].into_iter().enumerate() {
                for (i, bits) in results.iter().enumerate() {
                    let (x, true_value) = (to_f64(scalar, a[i]), truths[i]);
                    let size = true_value.0.abs();
                    if size > largest || size < least {
                        continue;
                    }
                    let one = ulp(scalar, true_value.0);
                    let error = ((to_f64(scalar, *bits) - true_value.0) - true_value.1).abs();
                    worst[way] = worst[way].max(error / one);
                    // Correctly rounded is half an ulp; f64 as the truth is off by a little itself.
                    let precise = f64::from(bound.precise_ulps).max(0.5) * one * (1.0 + 1e-6);
                    let allowed = match way {
                        1 => precise.max(fast_bound(code, bound.fast_bits, x, size) + 0.5 * one),
                        _ => precise,
                    };
                    if error.is_nan() || error > allowed {
                        let way = ["precise", "fast", "interpreter"][way];
                        failures += &format!(
                            "{} {scalar}, {way}: {} of {x} and {} is off by {:.3} ulps\n",
                            row.mnemonic,
                            to_f64(scalar, *bits),
                            to_f64(scalar, b[i]),
                            error / one
                        );
                        break;
                    }
                }
            }
            let [precise, fast, interpreter] = worst;
            println!(
                "| {} | {scalar} | {} | {precise:.3} | {fast:.3} | {interpreter:.3} |",
                row.mnemonic,
                a.len()
            );
        }
    }
    assert!(failures.is_empty(), "{failures}");
}
