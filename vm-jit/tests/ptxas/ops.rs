//! Every op on every type that a target does not reject.

use crate::assembler::{TARGETS, assemble_for_all, with_ptxas};
use crate::sweep::taken;
use std::fmt::Write;
use vm_ir::op::{Opcode, Shape, TABLE};
use vm_ir::types::Class;
use vm_ir::{Scalar, Trust, ValidModule, text, validate};
use vm_jit::Target;
use vm_jit::legal::{Support, support, types_of};

/// Of the targets, those with clusters.
const CLUSTERS: [&str; 3] = ["sm_90a", "sm_100", "sm_120"];

/// The body of a kernel that does the op once on `from`; values are numbered from `n`.
struct Body {
    text: String,
    n: u32,
}

impl Body {
    fn def(&mut self, what: &str, ty: impl std::fmt::Display) -> String {
        let name = format!("%t{}", self.n);
        self.n += 1;
        let _ = writeln!(self.text, "  {name} = {what} : {ty}");
        name
    }

    /// Some value of a type; a vector if `lanes` are more than one.
    fn value(&mut self, ty: Scalar, lanes: u8) -> String {
        let full = vm_ir::Type::vector(ty, lanes).unwrap();
        if ty == Scalar::Bool {
            let ints = vm_ir::Type::vector(Scalar::I32, lanes).unwrap();
            let a = self.def("load @i32[%i]", ints);
            let b = self.def("load @i32[%n]", ints);
            return self.def(&format!("lt.s {a}, {b}"), full);
        }
        // An index of its own, so that no two values are the same.
        let step = self.def(&format!("const {}", self.n), Scalar::I64);
        let at = self.def(&format!("add %i, {step}"), Scalar::I64);
        self.def(&format!("load @{ty}[{at}]"), full)
    }

    fn store(&mut self, value: &str, ty: Scalar, lanes: u8) {
        let mut value = value.to_owned();
        let mut ty = ty;
        if ty == Scalar::Bool {
            value = self.def(&format!("zext {value}"), vm_ir::Type::vector(Scalar::I8, lanes).unwrap());
            ty = Scalar::I8;
        }
        let _ = writeln!(self.text, "  store @{ty}[%i], {value}");
    }
}

fn body(op: Opcode, from: Scalar, to: Scalar, body: &mut Body) -> bool {
    let name = op.mnemonic();
    for fast in ["", ".fast"] {
        if !fast.is_empty() && op.info().error.is_none() {
            continue;
        }
        match op.shape() {
            Shape::Unary(_)
            | Shape::Convert(..)
            | Shape::Binary(_)
            | Shape::Ternary(_)
            | Shape::Compare(_) => {
                for lanes in [1, 4] {
                    let count = op.shape().operands().unwrap();
                    let args: Vec<String> = (0..count).map(|_| body.value(from, lanes)).collect();
                    let result = if matches!(op.shape(), Shape::Compare(_)) { Scalar::Bool } else { to };
                    let ty = vm_ir::Type::vector(result, lanes).unwrap();
                    let value = body.def(&format!("{name}{fast} {}", args.join(", ")), ty);
                    body.store(&value, result, lanes);
                }
            }
            Shape::Select => {
                let (c, a, b) = (body.value(Scalar::Bool, 1), body.value(from, 1), body.value(from, 1));
                let value = body.def(&format!("select {c}, {a}, {b}"), from);
                body.store(&value, from, 1);
            }
            Shape::Load | Shape::Store => {
                for lanes in [1, 2, 4, 8, 16] {
                    let value = body.value(from, lanes);
                    let _ = writeln!(body.text, "  store.keep @{from}[%i], {value}");
                    let full = vm_ir::Type::vector(from, lanes).unwrap();
                    let value = body.def(&format!("load.stream @read_{from}[%i]"), full);
                    let _ = writeln!(body.text, "  store.stream @{from}[%aligned], {value}");
                    let _ = writeln!(body.text, "  store @shared_{from}[%i, %i], {value}");
                    let value = body.def(&format!("load @shared_{from}[%n32, %aligned]"), full);
                    let _ = writeln!(body.text, "  store @{from}[%n], {value}");
                }
            }
            Shape::LoadUniform => {
                let value = body.def(&format!("load_uniform @shared_{from}[%n32, %n32]"), from);
                body.store(&value, from, 1);
            }
            Shape::Bitcast => {
                for other in Class::DATA.scalars() {
                    for (a, b) in
                        [(4u32, 4u32), (2, 4), (4, 2), (2, 8), (8, 2), (1, 8), (8, 1), (2, 16), (16, 2)]
                    {
                        if from.bits() * a == other.bits() * b {
                            let value = body.value(from, a as u8);
                            let ty = vm_ir::Type::vector(other, b as u8).unwrap();
                            let value = body.def(&format!("bitcast {value}"), ty);
                            body.store(&value, other, b as u8);
                        }
                    }
                }
            }
            Shape::AtomicRmw(_) | Shape::AtomicCas | Shape::AtomicLoad | Shape::AtomicStore => {
                for place in [format!("@{from}[%i]"), format!("@shared_{from}[%n32, %i]")] {
                    for attrs in [".block", ".device", ".acquire.block", ".release.device", ".acqrel.system"]
                    {
                        let bad = match op.shape() {
                            Shape::AtomicLoad => attrs.contains("rel"),
                            Shape::AtomicStore => attrs.contains("acq"),
                            _ => false,
                        };
                        if bad {
                            continue;
                        }
                        let mut list = place.clone();
                        for _ in 0..op.shape().operands().unwrap() {
                            let value = body.value(from, 1);
                            let _ = write!(list, ", {value}");
                        }
                        if op.shape() == Shape::AtomicStore {
                            let _ = writeln!(body.text, "  {name}{attrs} {list}");
                        } else {
                            let value = body.def(&format!("{name}{attrs} {list}"), from);
                            body.store(&value, from, 1);
                        }
                    }
                }
            }
            Shape::Shuffle => {
                let (a, lane) = (body.value(from, 2), body.value(Scalar::I32, 1));
                let value = body.def(&format!("{name} {a}, {lane}"), vm_ir::Type::vector(from, 2).unwrap());
                body.store(&value, from, 2);
            }
            Shape::Vote | Shape::Reduce(_) => {
                let a = body.value(from, 1);
                let value = body.def(&format!("{name} {a}"), from);
                body.store(&value, from, 1);
            }
            Shape::Gather => {
                for lanes in [1, 4, 16] {
                    let full = vm_ir::Type::vector(from, lanes).unwrap();
                    let value = body.def(&format!("load @read_{from}[%n]"), full);
                    let _ = writeln!(body.text, "  {name} @gathered_{from}_{lanes}, {value}");
                }
            }
            Shape::Ballot => {
                let a = body.value(from, 1);
                let value = body.def(&format!("{name} {a}"), Scalar::I32);
                body.store(&value, Scalar::I32, 1);
            }
            _ => return false,
        }
    }
    true
}

/// A kernel for each op that works on values or memory, with every type.
fn module(arch: &str, trust: Trust) -> ValidModule {
    let target: Target = format!("ptx:{arch}").parse().unwrap();
    let mut module = String::from("vir 1\n");
    let mut kernels = 0;
    for row in TABLE {
        let mut all = Body { text: String::new(), n: 0 };
        let mut any = false;
        for (from, to) in types_of(row.opcode) {
            if let Support::Rejected(_) = support(&target, row.opcode, from, to) {
                continue;
            }
            any |= body(row.opcode, from, to, &mut all);
        }
        if !any {
            continue;
        }
        let views: String = Class::DATA
            .scalars()
            .map(|s| format!("@{s}: view<{s}, [?], readwrite>, @read_{s}: view<{s}, [?], read, align 16>, "))
            .collect();
        let clusters: &[u32] = match row.shape {
            Shape::Gather if CLUSTERS.contains(&arch) => &[1, 8],
            _ => &[1],
        };
        for cluster in clusters {
            let mut shared: String =
                Class::DATA.scalars().map(|s| format!("  shared @shared_{s}: {s}[3, 48]\n")).collect();
            if row.shape == Shape::Gather {
                for (s, lanes) in Class::DATA.scalars().flat_map(|s| [1, 4, 16].map(|lanes| (s, lanes))) {
                    let _ = writeln!(shared, "  shared @gathered_{s}_{lanes}: {s}[{}, {lanes}]", 4 * cluster);
                }
            }
            let head = if *cluster > 1 { format!(" cluster({cluster})") } else { String::new() };
            let _ = write!(
                module,
                "kernel @k_{}_{cluster}({views}%n: i64) at 0x1000 block(32, 4){head} {{\n{shared}  \
                 %i = global_id.x : i64\n  %sixteen = const 16 : i64\n  %aligned = mul %i, %sixteen : i64\n  \
                 %n32 = trunc %n : i32\n{}}}\n",
                row.mnemonic.replace('.', "_"),
                all.text
            );
            kernels += 1;
        }
    }
    assert!(kernels > 100, "{kernels}");
    let module = text::parse(&module).unwrap_or_else(|e| panic!("{e}\n{module}"));
    validate(module, trust).unwrap_or_else(|e| panic!("{e}"))
}

/// Each architecture once, half of them as a guest's: an assembler takes seconds for so much code.
fn check(trust: Trust, parity: usize) {
    with_ptxas(|folder| {
        let targets = taken(&format!("{trust:?}"), TARGETS.into_iter().skip(parity).step_by(2));
        let modules: Vec<_> =
            targets.into_iter().map(|(arch, release)| (arch, release, module(arch, trust))).collect();
        let all: Vec<_> = modules.iter().map(|(arch, release, module)| (*arch, *release, module)).collect();
        assemble_for_all(folder, "1", &all);
    });
}

#[test]
fn every_op_as_a_guest() {
    check(Trust::Guest, 1);
}

#[test]
fn every_op_trusted() {
    check(Trust::Trusted, 0);
}
