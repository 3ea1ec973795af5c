//! A module as it is written.

use crate::error::Error;
use std::collections::HashMap;
use std::ops::Range;
use vm_ir::Scalar;

/// What a suffix such as `.s32` says of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Bits,
    Unsigned,
    Signed,
    Float,
    Bfloat,
    Predicate,
}

/// A fundamental type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ty {
    pub(crate) class: Class,
    /// Of one lane.
    pub(crate) bits: u32,
    /// 2 of `.f16x2` and its kin.
    pub(crate) lanes: u8,
}

impl Ty {
    pub(crate) const fn new(class: Class, bits: u32) -> Ty {
        Ty { class, bits, lanes: 1 }
    }

    /// Of a suffix without its dot.
    pub(crate) fn parse(word: &str) -> Option<Ty> {
        let packed = |class| Some(Ty { class, bits: 16, lanes: 2 });
        match word {
            "pred" => return Some(Ty::new(Class::Predicate, 1)),
            "f16x2" => return packed(Class::Float),
            "bf16x2" => return packed(Class::Bfloat),
            "u16x2" => return packed(Class::Unsigned),
            "s16x2" => return packed(Class::Signed),
            "bf16" => return Some(Ty::new(Class::Bfloat, 16)),
            _ => {}
        }
        let (class, least) = match word.as_bytes().first()? {
            b'b' => (Class::Bits, 8),
            b'u' => (Class::Unsigned, 8),
            b's' => (Class::Signed, 8),
            b'f' => (Class::Float, 16),
            _ => return None,
        };
        let bits = match &word[1..] {
            "8" => 8,
            "16" => 16,
            "32" => 32,
            "64" => 64,
            "128" if class == Class::Bits => 128,
            _ => return None,
        };
        (bits >= least).then_some(Ty::new(class, bits))
    }

    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.bits.div_ceil(8)) * u64::from(self.lanes)
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self.class, Class::Float | Class::Bfloat)
    }

    pub(crate) fn is_signed(self) -> bool {
        self.class == Class::Signed
    }

    /// What one lane is in the IR; `None` for 128 bits.
    pub(crate) fn scalar(self) -> Option<Scalar> {
        Some(match (self.class, self.bits) {
            (Class::Predicate, _) => Scalar::Bool,
            (Class::Float, 16) => Scalar::F16,
            (Class::Float, 32) => Scalar::F32,
            (Class::Float, 64) => Scalar::F64,
            (Class::Bfloat, _) => Scalar::Bf16,
            (_, bits) => return int(bits),
        })
    }

    /// What a register of the type is in the IR: floats of 16 bits and packed ones are integers.
    pub(crate) fn register(self) -> Option<Scalar> {
        match self.bits * u32::from(self.lanes) {
            32 if self.lanes == 2 => Some(Scalar::I32),
            16 => Some(Scalar::I16),
            _ => self.scalar(),
        }
    }
}

/// The integer of so many bits.
pub(crate) fn int(bits: u32) -> Option<Scalar> {
    match bits {
        8 => Some(Scalar::I8),
        16 => Some(Scalar::I16),
        32 => Some(Scalar::I32),
        64 => Some(Scalar::I64),
        _ => None,
    }
}

/// Where a variable is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Space {
    /// Memory of the device.
    Global,
    /// Memory of the device that kernels don't write.
    Const,
    /// Memory of a block.
    Shared,
    /// Memory of a thread.
    Local,
    /// A parameter.
    Param,
}

/// A value of a variable that is an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pointer {
    /// Where in the variable.
    pub(crate) offset: u64,
    pub(crate) target: Box<str>,
    pub(crate) addend: i64,
}

/// A variable, or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    pub(crate) name: Box<str>,
    pub(crate) space: Space,
    pub(crate) ty: Ty,
    pub(crate) size: u64,
    pub(crate) align: u64,
    /// Without a size: shared memory whose size the launch says.
    pub(crate) unsized_array: bool,
    /// Whether it has the attribute `.managed`.
    pub(crate) managed: bool,
    /// A parameter in a register.
    pub(crate) register: Option<u32>,
    /// The first bytes; the others are zero.
    pub(crate) bytes: Vec<u8>,
    pub(crate) pointers: Vec<Pointer>,
    pub(crate) line: u32,
}

/// A predicate and what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guard {
    pub(crate) register: u32,
    pub(crate) negated: bool,
}

/// What an operand or an address begins with, if not with a register: a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Symbol {
    pub(crate) space: Space,
    pub(crate) offset: u64,
}

/// An operand.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Register(u32),
    /// `!%p`.
    Not(u32),
    Int(u64),
    F32(u32),
    F64(u64),
    /// A special register, without the sign.
    Special(Box<str>),
    /// A variable or a parameter of the function.
    Variable(u32),
    /// What is called so elsewhere: a variable of the module, a function, a label.
    Name(Box<str>),
    /// A variable whose place is known.
    Symbol(Symbol),
    /// A parameter of a call, from an offset on.
    Argument(u32, i64),
    /// A label that is resolved.
    Label(u32),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `(a, b)`.
    List(Vec<Operand>),
    /// `p|q`.
    Pair(Box<[Operand; 2]>),
    /// `[a + 4]`.
    Address(Box<Operand>, i64),
    /// `a + 4` of a variable.
    Sum(Box<Operand>, i64),
    /// `_`.
    Sink,
}

impl Operand {
    /// Itself and those in it.
    pub(crate) fn count(&self) -> usize {
        match self {
            Operand::Vector(list) | Operand::List(list) => 1 + list.iter().map(Operand::count).sum::<usize>(),
            Operand::Pair(pair) => 1 + pair.iter().map(Operand::count).sum::<usize>(),
            Operand::Address(base, _) | Operand::Sum(base, _) => 1 + base.count(),
            _ => 1,
        }
    }

    /// Calls `visit` for each variable of the function in it.
    pub(crate) fn variables(&self, visit: &mut impl FnMut(u32)) {
        match self {
            Operand::Variable(at) => visit(*at),
            Operand::Vector(list) | Operand::List(list) => list.iter().for_each(|one| one.variables(visit)),
            Operand::Pair(pair) => pair.iter().for_each(|one| one.variables(visit)),
            Operand::Address(base, _) | Operand::Sum(base, _) => base.variables(visit),
            _ => {}
        }
    }
}

/// An instruction.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Instr {
    pub(crate) line: u32,
    /// Where in the text.
    pub(crate) span: (u32, u32),
    pub(crate) guard: Option<Guard>,
    /// With its modifiers: `add.s32`.
    pub(crate) code: Box<str>,
    pub(crate) operands: Vec<Operand>,
}

impl Instr {
    /// The code without modifiers.
    pub(crate) fn opcode(&self) -> &str {
        self.code.split('.').next().unwrap_or("")
    }

    /// Does it load a parameter of the kernel?
    pub(crate) fn reads_parameter(&self) -> bool {
        self.opcode() == "ld" && self.modifiers().any(|modifier| modifier.starts_with("param"))
    }

    pub(crate) fn reads_carry(&self) -> bool {
        matches!(self.opcode(), "addc" | "subc" | "madc")
    }

    pub(crate) fn writes_carry(&self) -> bool {
        matches!(self.opcode(), "add" | "addc" | "sub" | "subc" | "mad" | "madc")
            && self.modifiers().any(|modifier| modifier == "cc")
    }

    /// Must all threads of the block or the warp come to it?
    pub(crate) fn converges(&self) -> bool {
        self.is_barrier()
            || matches!(self.opcode(), "shfl" | "vote" | "match" | "redux" | "elect" | "activemask")
    }

    pub(crate) fn is_barrier(&self) -> bool {
        matches!(self.opcode(), "bar" | "barrier")
    }

    pub(crate) fn is_warp_barrier(&self) -> bool {
        self.is_barrier() && self.guard.is_none() && self.modifiers().next() == Some("warp")
    }

    /// Does it take full warps?
    pub(crate) fn is_of_warps(&self) -> bool {
        self.converges() && !(self.is_barrier() && self.modifiers().next() != Some("warp"))
    }

    pub(crate) fn modifiers(&self) -> impl Iterator<Item = &str> {
        self.code.split('.').skip(1)
    }
}

/// What a function's body consists of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    Label(Box<str>, u32),
    /// A list of labels for `brx.idx`, with its name.
    Targets(Box<str>, Vec<Box<str>>),
    Instr(Instr),
}

/// A register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Register {
    pub(crate) ty: Ty,
}

/// A function.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Function {
    pub(crate) name: Box<str>,
    /// Is it a kernel?
    pub(crate) entry: bool,
    pub(crate) line: u32,
    /// The first of the variables: what it returns, then what it takes.
    pub(crate) returns: usize,
    pub(crate) params: usize,
    pub(crate) variables: Vec<Variable>,
    pub(crate) registers: Vec<Register>,
    /// Without one it is defined elsewhere.
    pub(crate) body: Option<Vec<Item>>,
    /// Threads of a block that it was compiled for, if that is said.
    pub(crate) required: Option<[u32; 3]>,
    /// The most threads of a block, if that is said.
    pub(crate) max_threads: Option<u32>,
    /// The most registers of a thread, if that is said.
    pub(crate) max_registers: Option<u32>,
    /// The first directive of its head that is not supported.
    pub(crate) unsupported: Option<Error>,
}

impl Function {
    /// Where its parameters are among the variables.
    pub(crate) fn param_range(&self) -> Range<usize> {
        self.returns..self.returns + self.params
    }
}

/// A module.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ast {
    /// `(9, 5)` of `.version 9.5`.
    pub(crate) version: (u32, u32),
    /// `sm_75`.
    pub(crate) target: Box<str>,
    pub(crate) variables: Vec<Variable>,
    pub(crate) functions: Vec<Declared>,
    /// Functions by their names.
    pub(crate) names: HashMap<Box<str>, usize>,
    /// Every declaration at module scope, in order.
    pub(crate) declarations: Vec<Declaration>,
    /// References to names of module scope outside of function bodies.
    pub(crate) mentions: Vec<Range<usize>>,
}

/// Which modules a name is visible in, from weakest to strongest definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Linkage {
    /// Defined by another module.
    Extern,
    /// Visible in its own module only.
    Local,
    Common,
    Weak,
    Visible,
}

/// The kind of a declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Entry,
    /// The sizes of what the function returns, then of its parameters.
    Function(Vec<u64>, Vec<u64>),
    Variable(u64),
}

/// A function or a variable of module scope, and its text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Declaration {
    pub(crate) name: Box<str>,
    pub(crate) kind: Kind,
    pub(crate) linkage: Linkage,
    pub(crate) line: u32,
    /// Where its name is.
    pub(crate) name_at: Range<usize>,
    /// Linkage, and the head of the function or the type of the variable.
    pub(crate) head: Range<usize>,
    /// The body of the function, or name and value of the variable; empty for a prototype.
    pub(crate) rest: Range<usize>,
    /// Whether `rest` is an `.alias` directive.
    pub(crate) is_alias: bool,
}

impl Declaration {
    pub(crate) fn is_defined(&self) -> bool {
        self.linkage != Linkage::Extern && !self.rest.is_empty()
    }
}

/// A function of a module, of which only the head was read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Declared {
    /// Without a body.
    pub(crate) head: Function,
    /// Where in the text its head begins; without one it is defined elsewhere.
    pub(crate) at: Option<usize>,
}

impl Ast {
    /// The function of a name or an alias.
    pub(crate) fn function(&self, name: &str) -> Option<&Declared> {
        self.functions.get(*self.names.get(name)?)
    }
}
