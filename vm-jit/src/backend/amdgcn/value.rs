//! Arithmetic, bits, comparison, conversion and choice of one lane.

use super::writer::{Val, Writer, float, int};
use vm_ir::Scalar;
use vm_ir::module::Op;
use vm_ir::op::{Opcode, Shape};

impl Writer<'_> {
    /// The op on one lane. `from` is what it works on, `to` what it gives.
    pub(super) fn value_op(&mut self, op: &Op, from: Scalar, to: Scalar, [a, b, c]: [Val; 3]) -> Val {
        if op.code == Opcode::Select {
            let ty = int(to);
            return self.def(format_args!("select i1 {a}, {ty} {b}, {ty} {c}"));
        }
        match op.code.shape() {
            Shape::Convert(..) => self.convert(op.code, from, to, a),
            _ if from == Scalar::Bool || from.is_int() => self.int_op(op.code, from, a, b),
            _ => self.float_op(op.code, from, [a, b, c]),
        }
    }

    fn int_op(&mut self, code: Opcode, scalar: Scalar, a: Val, b: Val) -> Val {
        use Opcode::*;
        let (ty, bits) = (int(scalar), scalar.bits());
        let two = |name: &str| format!("{name} {ty} {a}, {b}");
        let text = match code {
            Add => two("add"),
            Sub => two("sub"),
            Mul => two("mul"),
            And => two("and"),
            Or if scalar == Scalar::I64 && [a, b].iter().all(|value| matches!(value, Val::Reg(_))) => {
                // LLVM has it of halves in vector registers, and takes that of one for the result's where the other's is known late
                // to be all ones ("y = or x, -1" of `SIFoldOperands`). As this it is one instruction, too.
                let [a, b] = [a, b].map(|value| self.def(format_args!("xor {ty} {value}, -1")));
                let neither = self.def(format_args!("and {ty} {a}, {b}"));
                format!("xor {ty} {neither}, -1")
            }
            Or => two("or"),
            Xor => two("xor"),
            Not => format!("xor {ty} {a}, -1"),
            Neg => format!("sub {ty} 0, {a}"),
            MinS | MaxS | MinU | MaxU => {
                let name = [(MinS, "smin"), (MaxS, "smax"), (MinU, "umin"), (MaxU, "umax")];
                let name = name.iter().find(|(op, _)| *op == code).map_or("", |(_, name)| name);
                return self.call(ty, &format!("llvm.{name}.{ty}"), &[(ty, a), (ty, b)]);
            }
            AbsS => return self.call(ty, &format!("llvm.abs.{ty}"), &[(ty, a), ("i1", Val::Bits(0))]),
            Clz => return self.call(ty, &format!("llvm.ctlz.{ty}"), &[(ty, a), ("i1", Val::Bits(0))]),
            Ctz => return self.call(ty, &format!("llvm.cttz.{ty}"), &[(ty, a), ("i1", Val::Bits(0))]),
            Popcount => return self.call(ty, &format!("llvm.ctpop.{ty}"), &[(ty, a)]),
            BitReverse => return self.call(ty, &format!("llvm.bitreverse.{ty}"), &[(ty, a)]),
            Rotl => return self.call(ty, &format!("llvm.fshl.{ty}"), &[(ty, a), (ty, a), (ty, b)]),
            Shl | ShrS | ShrU => {
                let by = self.def(format_args!("and {ty} {b}, {}", bits - 1));
                let name = [(Shl, "shl"), (ShrS, "ashr"), (ShrU, "lshr")];
                let name = name.iter().find(|(op, _)| *op == code).map_or("", |(_, name)| name);
                format!("{name} {ty} {a}, {by}")
            }
            DivS | DivU | RemS | RemU => return self.divide(code, scalar, a, b),
            MulHiS | MulHiU => {
                let (extend, wide) = (if code == MulHiS { "sext" } else { "zext" }, format!("i{}", 2 * bits));
                let a = self.def(format_args!("{extend} {ty} {a} to {wide}"));
                let b = self.def(format_args!("{extend} {ty} {b} to {wide}"));
                let product = self.def(format_args!("mul {wide} {a}, {b}"));
                let high = self.def(format_args!("lshr {wide} {product}, {bits}"));
                format!("trunc {wide} {high} to {ty}")
            }
            _ => {
                let test = match code {
                    Eq => "eq",
                    Ne => "ne",
                    LtS => "slt",
                    LeS => "sle",
                    GtS => "sgt",
                    GeS => "sge",
                    LtU => "ult",
                    LeU => "ule",
                    GtU => "ugt",
                    _ => "uge",
                };
                two(&format!("icmp {test}"))
            }
        };
        self.def(text)
    }

    /// Division and remainder. LLVM leaves open what division by zero and of the least integer by −1 do.
    fn divide(&mut self, code: Opcode, scalar: Scalar, a: Val, b: Val) -> Val {
        let ty = int(scalar);
        let (name, signed, remainder) = match code {
            Opcode::DivS => ("sdiv", true, false),
            Opcode::DivU => ("udiv", false, false),
            Opcode::RemS => ("srem", true, true),
            _ => ("urem", false, true),
        };
        let zero = self.def(format_args!("icmp eq {ty} {b}, 0"));
        let mut divisor = self.def(format_args!("select i1 {zero}, {ty} 1, {ty} {b}"));
        let minus = signed.then(|| self.def(format_args!("icmp eq {ty} {b}, -1")));
        // The remainder by 1 is that by −1.
        if let Some(minus) = minus {
            divisor = self.def(format_args!("select i1 {minus}, {ty} 1, {ty} {divisor}"));
        }
        let mut result = self.def(format_args!("{name} {ty} {a}, {divisor}"));
        if let Some(minus) = minus.filter(|_| !remainder) {
            let negative = self.def(format_args!("sub {ty} 0, {a}"));
            result = self.def(format_args!("select i1 {minus}, {ty} {negative}, {ty} {result}"));
        }
        let open = if remainder { a } else { Val::Bits(0) };
        self.def(format_args!("select i1 {zero}, {ty} {open}, {ty} {result}"))
    }

    /// A lane of a float type as LLVM's float.
    fn as_float(&mut self, scalar: Scalar, a: Val) -> Val {
        self.def(format_args!("bitcast {} {a} to {}", int(scalar), float(scalar)))
    }

    pub(super) fn as_int(&mut self, scalar: Scalar, a: Val) -> Val {
        self.def(format_args!("bitcast {} {a} to {}", float(scalar), int(scalar)))
    }

    fn float_op(&mut self, code: Opcode, scalar: Scalar, args: [Val; 3]) -> Val {
        use Opcode::*;
        let (ty, ity) = (float(scalar), int(scalar));
        let sign = 1u64 << (scalar.bits() - 1);
        match code {
            Neg => return self.def(format_args!("xor {ity} {}, {}", args[0], Val::Bits(sign))),
            Abs => return self.def(format_args!("and {ity} {}, {}", args[0], Val::Bits(sign - 1))),
            _ => {}
        }
        let count = match code.shape() {
            Shape::Ternary(_) => 3,
            Shape::Unary(_) => 1,
            _ => 2,
        };
        let mut floats = args;
        floats[..count].iter_mut().for_each(|arg| *arg = self.as_float(scalar, *arg));
        let [a, b, c] = floats;
        let suffix = format!("f{}", scalar.bits());
        let function = match code {
            Fma => "fma",
            Sqrt => "sqrt",
            Floor => "floor",
            Ceil => "ceil",
            Round => "roundeven",
            Fix => "trunc",
            // The fast one alone comes here.
            Exp2 => "amdgcn.exp2",
            _ => "",
        };
        let result = if function.is_empty() {
            let text = match code {
                Add => format!("fadd {ty} {a}, {b}"),
                Sub => format!("fsub {ty} {a}, {b}"),
                Mul => format!("fmul {ty} {a}, {b}"),
                Div => format!("fdiv {ty} {a}, {b}"),
                Rcp => format!("fdiv {ty} 1.0, {a}"),
                Eq => format!("fcmp oeq {ty} {a}, {b}"),
                Ne => format!("fcmp une {ty} {a}, {b}"),
                Lt => format!("fcmp olt {ty} {a}, {b}"),
                Le => format!("fcmp ole {ty} {a}, {b}"),
                Gt => format!("fcmp ogt {ty} {a}, {b}"),
                _ => format!("fcmp oge {ty} {a}, {b}"),
            };
            self.def(text)
        } else {
            let args = [(ty, a), (ty, b), (ty, c)];
            let result = self.call(ty, &format!("llvm.{function}.{suffix}"), &args[..count]);
            match code {
                // Of less than a half it is a zero with the sign, which the manuals leave open.
                Round => self.call(ty, &format!("llvm.copysign.{suffix}"), &[(ty, result), (ty, a)]),
                _ => result,
            }
        };
        match code.shape() {
            Shape::Compare(_) => result,
            _ => self.as_int(scalar, result),
        }
    }

    fn convert(&mut self, code: Opcode, from: Scalar, to: Scalar, a: Val) -> Val {
        let (ty, result) = (int(from), int(to));
        match code {
            Opcode::Sext => self.def(format_args!("sext {ty} {a} to {result}")),
            Opcode::Zext => self.def(format_args!("zext {ty} {a} to {result}")),
            Opcode::Trunc => self.def(format_args!("trunc {ty} {a} to {result}")),
            Opcode::SiToFp | Opcode::UiToFp => {
                let name = if code == Opcode::SiToFp { "sitofp" } else { "uitofp" };
                let value = self.def(format_args!("{name} {ty} {a} to {}", float(to)));
                self.as_int(to, value)
            }
            Opcode::FpToSi | Opcode::FpToUi => {
                let name = if code == Opcode::FpToSi { "fptosi" } else { "fptoui" };
                let value = self.as_float(from, a);
                let name = format!("llvm.{name}.sat.{result}.f{}", from.bits());
                self.call(result, &name, &[(float(from), value)])
            }
            _ => {
                let name = if to.bits() > from.bits() { "fpext" } else { "fptrunc" };
                let value = self.as_float(from, a);
                let value = self.def(format_args!("{name} {} {value} to {}", float(from), float(to)));
                self.as_int(to, value)
            }
        }
    }
}
