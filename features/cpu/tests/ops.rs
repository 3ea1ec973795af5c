//! Every op on values on every type, on corner cases and random numbers, against the interpreter: exactly, or within what
//! the op's row allows; as single numbers of neighbouring threads, and as vectors.

mod common;

use common::Machine;
use std::fmt::Write;
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::format::{from_f64, to_f64};
use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ir::op::{OpInfo, Shape, TABLE};
use vm_ir::{Scalar, Trust, text, validate};
use vm_jit::legal::types_of;

/// Elements of each operand.
const COUNT: usize = 1024;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn bits(&mut self, scalar: Scalar) -> u64 {
        let any = self.next();
        let float = !scalar.is_int();
        let bits = match self.next() % 8 {
            0 | 1 => any,
            2 if float => {
                let corners =
                    [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0, 0.5, 2.0, 1e-310];
                from_f64(scalar, corners[(any % 10) as usize])
            }
            2 => [0, 1, 2, scalar.mask(), scalar.mask() >> 1, (scalar.mask() >> 1) + 1][(any % 6) as usize],
            // A small subnormal, a number around 1, a moderate and a large one.
            3 if float => any & 0xff,
            4 if float => from_f64(scalar, 1.0 + (any as i32 as f64) * 1e-10),
            5 if float => from_f64(scalar, (any as i32 as f64) * 1e-8),
            6 if float => from_f64(scalar, (any as i32 as f64) * 1e-5),
            // An integer of any size.
            3 => any >> (64 - scalar.bits()) >> (self.next() % u64::from(scalar.bits())),
            7 if float => from_f64(scalar, (any as i32 as f64) * 3e-2),
            _ => (any % 64).wrapping_sub(32),
        };
        bits & scalar.mask()
    }
}

/// A kernel that loads, does the op, and stores.
fn kernel(row: &OpInfo, from: Scalar, to: Scalar, lanes: usize) -> String {
    let count = row.shape.operands().unwrap_or(1);
    let memory = |s: Scalar| if s == Scalar::Bool { Scalar::I8 } else { s };
    let ty = |s: Scalar| if lanes == 1 { s.to_string() } else { format!("vec{lanes}<{s}>") };
    let result = match row.shape {
        Shape::Compare(_) => Scalar::Bool,
        _ => to,
    };
    let operand = |i: usize| match row.shape {
        Shape::Select if i == 0 => Scalar::Bool,
        _ => from,
    };
    let mut out = String::from("vir 1\nkernel @k(");
    for i in 0..count {
        let _ = write!(out, "@in{i}: view<{}, [{COUNT}], read>, ", memory(operand(i)));
    }
    let _ = writeln!(out, "@out: view<{}, [{COUNT}], write>) at 0x0 block(64) {{", memory(result));
    out += "  %g = global_id.x : i64\n";
    let _ = writeln!(out, "  %lanes = const {lanes} : i64\n  %i = mul %g, %lanes : i64");
    let mut names = Vec::new();
    for i in 0..count {
        let s = operand(i);
        let _ = writeln!(out, "  %l{i} = load @in{i}[%i] : {}", ty(memory(s)));
        if s == Scalar::Bool {
            let _ = writeln!(
                out,
                "  %one{i} = const 1 : {0}\n  %m{i} = and %l{i}, %one{i} : {0}",
                ty(Scalar::I8)
            );
            let _ = writeln!(out, "  %a{i} = eq %m{i}, %one{i} : {}", ty(Scalar::Bool));
        } else {
            let _ = writeln!(out, "  %z{i} = const 0 : {}", ty(Scalar::I8));
        }
        names.push(if s == Scalar::Bool { format!("%a{i}") } else { format!("%l{i}") });
    }
    let _ = writeln!(out, "  %r = {} {} : {}", row.mnemonic, names.join(", "), ty(result));
    if result == Scalar::Bool {
        let _ = writeln!(out, "  %w = zext %r : {}\n  store @out[%i], %w", ty(Scalar::I8));
    } else {
        out += "  store @out[%i], %r\n";
    }
    out + "}\n"
}

/// Inputs for which libm and a correct function both may be far from each other: none is left out, but f64 functions are
/// held to one more ulp, which libm itself may take.
fn tolerance(row: &OpInfo, ty: Scalar) -> Tolerance {
    match row.error {
        None => Tolerance::Exact,
        Some(bound) if bound.precise_ulps == 0 => Tolerance::Exact,
        Some(bound) if ty == Scalar::F64 => Tolerance::Ulps(u64::from(bound.precise_ulps) + 1),
        Some(bound) => Tolerance::Ulps(u64::from(bound.precise_ulps)),
    }
}

#[test]
fn ops_on_values() {
    let machine = Machine::new();
    let mut random = Random(7);
    let (mut ran, mut failures) = (0, String::new());
    let only = std::env::var("VM_CPU_OP").ok();
    for row in TABLE {
        let on_values = matches!(
            row.shape,
            Shape::Unary(_)
                | Shape::Binary(_)
                | Shape::Ternary(_)
                | Shape::Compare(_)
                | Shape::Select
                | Shape::Convert(..)
        );
        if !on_values || only.as_ref().is_some_and(|only| only != row.mnemonic) {
            continue;
        }
        for (from, to) in types_of(row.opcode) {
            for lanes in [1, 4, 16] {
                let source = kernel(row, from, to, lanes);
                let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
                let valid =
                    validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("{errors}\n{source}"));
                let mut arguments = Vec::new();
                for param in valid.kernels()[0].params() {
                    let vm_ir::module::ParamKind::View(view) = &param.kind else { unreachable!() };
                    let bits: Vec<u64> = (0..COUNT)
                        .map(|_| if &*param.name == "out" { 0 } else { random.bits(view.element) })
                        .collect();
                    arguments.push(Argument::Tensor(Tensor::from_bits(view.element, &[COUNT as u64], bits)));
                }
                let grid = [(COUNT / 64 / lanes) as u32, 1, 1];
                let launch = Launch { kernel: "k".into(), grid, arguments };
                let (mut ours, mut theirs) = (launch.clone(), launch.clone());
                run(&valid, &mut theirs, &Limits::default()).unwrap();
                let place = format!("{} {from} {to} in {lanes}", row.mnemonic);
                match machine.run(&valid, &mut ours, 1) {
                    Ok(0) => {}
                    Ok(stop) => failures += &format!("{place}: stopped with {stop}\n"),
                    Err(error) => failures += &format!("{place}: {error}\n"),
                }
                let last = ours.arguments.len() - 1;
                let (got, wanted) =
                    (ours.arguments[last].tensor().unwrap(), theirs.arguments[last].tensor().unwrap());
                let tolerance = tolerance(row, from);
                if let Err(mismatch) = compare(got, wanted, tolerance) {
                    let inputs: Vec<String> = launch.arguments[..last]
                        .iter()
                        .map(|a| a.tensor().unwrap())
                        .map(|t| {
                            format!(
                                "{:#x} = {}",
                                t.bits(mismatch.index),
                                to_f64(t.element, t.bits(mismatch.index))
                            )
                        })
                        .collect();
                    failures += &format!("{place}: {mismatch} for {inputs:?}\n");
                }
                ran += 1;
            }
        }
    }
    println!("{ran} kernels");
    assert!(failures.is_empty(), "{failures}");
    assert!(only.is_some() || ran > 900, "{ran}");
}
