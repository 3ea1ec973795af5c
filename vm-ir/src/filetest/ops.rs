//! A kernel for each op on values: it loads operands, does the op, and stores what comes out, as single numbers of
//! neighbouring threads or as vectors; and launches of it on corner cases and random numbers.

use super::Tolerance;
use crate::format::from_f64;
use crate::interp::{Argument, Launch, Tensor};
use crate::module::{Kernel, ParamKind};
use crate::op::{OpInfo, Shape};
use crate::types::Scalar;
use std::fmt::Write;

/// Elements of each operand of an op's kernel.
pub const COUNT: usize = 1024;

/// Numbers that are the same everywhere (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Any 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The bits of a number: often a corner case, often of moderate size.
    pub fn bits(&mut self, scalar: Scalar) -> u64 {
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

/// The text of a kernel that does an op from one scalar to another, on vectors of a number of lanes. Its blocks have 64
/// threads.
pub fn op_kernel(row: &OpInfo, from: Scalar, to: Scalar, lanes: usize) -> String {
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

/// How far from the interpreter a result of the precise class may be: f64 functions one ulp more than their row says, which
/// the interpreter's own may take.
pub fn op_tolerance(row: &OpInfo, ty: Scalar) -> Tolerance {
    match row.error {
        None => Tolerance::Exact,
        Some(bound) if bound.precise_ulps == 0 => Tolerance::Exact,
        Some(bound) if ty == Scalar::F64 => Tolerance::Ulps(u64::from(bound.precise_ulps) + 1),
        Some(bound) => Tolerance::Ulps(u64::from(bound.precise_ulps)),
    }
}

/// Is it an op on values alone, for which there is a kernel?
pub fn is_on_values(row: &OpInfo) -> bool {
    matches!(
        row.shape,
        Shape::Unary(_)
            | Shape::Binary(_)
            | Shape::Ternary(_)
            | Shape::Compare(_)
            | Shape::Select
            | Shape::Convert(..)
    )
}

/// A launch of an op's kernel on vectors of a number of lanes.
pub fn op_launch(kernel: &Kernel, lanes: usize, random: &mut Random) -> Launch {
    let tensor = |element: Scalar, random: &mut Random, output: bool| {
        let bits = (0..COUNT).map(|_| if output { 0 } else { random.bits(element) }).collect::<Vec<_>>();
        Argument::Tensor(Tensor::from_bits(element, &[COUNT as u64], bits))
    };
    let arguments = kernel.params().iter().map(|param| match &param.kind {
        ParamKind::View(view) => tensor(view.element, random, view.access.writes()),
        ParamKind::Scalar { .. } => Argument::Bits(0),
    });
    let arguments = arguments.collect();
    Launch { kernel: kernel.name().into(), grid: [(COUNT / 64 / lanes) as u32, 1, 1], arguments }
}
