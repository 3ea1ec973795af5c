//! What a target supports: for each op and type, whether it is native, expanded or rejected. It can be asked
//! before anything is compiled. What is compiled goes by it: an expanded op is either made of others before there is code,
//! or written by the back end as several instructions.
//!
//! ```
//! use vm_ir::{Scalar, op::Opcode};
//! use vm_jit::{Target, legal::{Support, support}};
//!
//! let turing: Target = "ptx:sm_75".parse()?;
//! let hopper: Target = "ptx:sm_90a".parse()?;
//! assert_eq!(support(&hopper, Opcode::Add, Scalar::Bf16, Scalar::Bf16), Support::Native);
//! assert!(matches!(support(&turing, Opcode::Add, Scalar::Bf16, Scalar::Bf16), Support::Expanded(_)));
//! # Ok::<(), vm_jit::UnknownTarget>(())
//! ```

use crate::backend::Target;
use crate::reject::{Reject, RejectKind};
use std::collections::HashMap;
use std::fmt;
use vm_ir::op::{Accuracy, Opcode, Shape};
use vm_ir::types::Class;
use vm_ir::{Kernel, Module, Scalar};

/// How a target does an op on a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// By an instruction, or by none.
    Native,
    /// By several; the text says how.
    Expanded(&'static str),
    /// Not at all; the text is the reject's code.
    Rejected(&'static str),
}

impl fmt::Display for Support {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Support::Native => f.write_str("native"),
            Support::Expanded(how) => write!(f, "expanded: {how}"),
            Support::Rejected(code) => write!(f, "rejected: {code}"),
        }
    }
}

/// How a back end has an op on a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By an instruction, or by none.
    Native,
    /// By several, which it writes itself; the text says how.
    Lowered(&'static str),
    /// Not at all: [`legalise`](crate::legalise) makes it of others.
    Expanded(Expansion),
    /// Not at all; the text is the reject's code.
    Rejected(&'static str),
}

/// What is made of an op that a target lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expansion {
    /// A few others.
    Sequence,
    /// A conversion by way of f16.
    InF16,
    /// The same in f32, rounded once more.
    InF32,
    /// The same in f64, rounded once more.
    InF64,
    /// An integer that f64 holds, rounded once more.
    Sticky,
    /// A fused multiply-add.
    Fma,
    /// A multiplication and an addition in f64, joined to the odd one, then rounded.
    JoinedFma,
    /// The same on the bits.
    Bits,
    /// Shuffles.
    Shuffles,
    /// Range reduction and a polynomial.
    Function,
}

impl Expansion {
    const fn describe(self) -> &'static str {
        match self {
            Expansion::Sequence => "from other instructions",
            Expansion::InF16 => "by way of f16",
            Expansion::InF32 => "in f32, rounded once more",
            Expansion::InF64 => "in f64, rounded once more",
            Expansion::Sticky => "in f64, the last bits joined to one, rounded once more",
            Expansion::Fma => "as one fused multiply-add",
            Expansion::JoinedFma => "in f64, joined so that rounding once more is exact",
            Expansion::Bits => "on the bits, as integers",
            Expansion::Shuffles => "six shuffles",
            Expansion::Function => "range reduction and a polynomial",
        }
    }
}

impl From<Way> for Support {
    fn from(way: Way) -> Support {
        match way {
            Way::Native => Support::Native,
            Way::Lowered(how) => Support::Expanded(how),
            Way::Expanded(expansion) => Support::Expanded(expansion.describe()),
            Way::Rejected(code) => Support::Rejected(code),
        }
    }
}

/// How `target` does `op` on values of type `ty`. For a conversion, `ty` is what it converts from and `to`
/// what to; elsewhere `to` is ignored. For an op on memory, `ty` is the element.
pub fn support(target: &Target, op: Opcode, ty: Scalar, to: Scalar) -> Support {
    way(target, op, Accuracy::Precise, ty, to).into()
}

/// How the back end of `target` has `op`, by its accuracy class too.
pub(crate) fn way(target: &Target, op: Opcode, accuracy: Accuracy, ty: Scalar, to: Scalar) -> Way {
    match target {
        Target::Ptx(options) => crate::backend::ptx::way(options, op, accuracy, ty, to),
        Target::Amdgcn(_) => crate::backend::amdgcn::way(op, accuracy, ty, to),
        #[cfg(feature = "cpu")]
        Target::Cpu(options) => crate::backend::cpu::way(options.isa, op, ty, to),
        Target::Ir => Way::Native,
    }
}

/// What an element of it costs on `target`, in weighted operations; `shared` is whether memory that it works on is. These
/// add up to [`Entry::work`](crate::Entry::work). 0 for the IR itself, whose host knows.
pub fn cost(target: &Target, op: Opcode, ty: Scalar, to: Scalar, shared: bool) -> u64 {
    let costs = match target {
        Target::Ptx(options) => crate::backend::ptx::safety(options).costs,
        Target::Amdgcn(options) => crate::backend::amdgcn::safety(options).costs,
        #[cfg(feature = "cpu")]
        Target::Cpu(_) => crate::backend::cpu::SAFETY.costs,
        Target::Ir => return 0,
    };
    crate::safety::cost::element(costs, op, ty, to, shared)
}

/// The types that an op may be asked about: pairs of what it works on and, for a conversion, what it gives.
pub fn types_of(op: Opcode) -> Vec<(Scalar, Scalar)> {
    let same = |class: Class| class.scalars().map(|s| (s, s)).collect::<Vec<_>>();
    match op.shape() {
        Shape::Unary(c) | Shape::Binary(c) | Shape::Ternary(c) | Shape::Compare(c) | Shape::Reduce(c) => {
            same(c)
        }
        Shape::AtomicRmw(c) => same(c),
        Shape::AtomicCas => same(Class::WORD),
        Shape::AtomicLoad | Shape::AtomicStore => same(Class::WORD_ARITH),
        Shape::Const | Shape::Select | Shape::Splat | Shape::Make | Shape::Extract | Shape::Insert => {
            same(Class::REGISTER)
        }
        Shape::Bitcast | Shape::Load | Shape::Store | Shape::LoadUniform | Shape::Shuffle | Shape::Gather => {
            same(Class::DATA)
        }
        Shape::Convert(from, to, width) => from
            .scalars()
            .flat_map(|f| to.scalars().map(move |t| (f, t)))
            .filter(|(f, t)| {
                f != t
                    && match width {
                        vm_ir::op::Width::Any => true,
                        vm_ir::op::Width::Wider => t.bits() > f.bits(),
                        vm_ir::op::Width::Narrower => t.bits() < f.bits(),
                    }
            })
            .collect(),
        Shape::Vote | Shape::Ballot | Shape::If => same(Class::BOOL),
        Shape::Id32 => vec![(Scalar::I32, Scalar::I32)],
        Shape::Id64 | Shape::Extent => vec![(Scalar::I64, Scalar::I64)],
        Shape::For => same(Class::WORD),
        Shape::Switch => same(Class::INT),
        Shape::Sync | Shape::While | Shape::Release | Shape::Map => Vec::new(),
        Shape::Fetch | Shape::Put | Shape::PutRows | Shape::Get | Shape::Send | Shape::Fill => {
            same(Class::DATA)
        }
        Shape::Mma => {
            let sums = [Scalar::F32, Scalar::I32].into_iter();
            sums.flat_map(|sum| Scalar::ALL.iter().map(move |factor| (*factor, sum)))
                .filter(|(factor, sum)| vm_ir::tile::multiplies(*factor, *factor, *sum))
                .collect()
        }
        Shape::Rows => same(Class::WIDE_FLOAT),
        Shape::Share => [Scalar::F32, Scalar::I32].map(|scalar| (scalar, scalar)).to_vec(),
    }
}

/// The scalars by which an op of a valid kernel is looked up: what it works on, and what it gives.
pub(crate) fn key(kernel: &Kernel, op: &vm_ir::module::Op) -> (Scalar, Scalar) {
    let to = op.result().map(|v| kernel.type_of(v).scalar());
    let from = match op.place.filter(|_| op.code.shape().place() != vm_ir::op::PlaceRule::WholeView) {
        Some(place) => {
            let by_bytes = kernel.by_bytes(op).map(|ty| ty.scalar());
            by_bytes.or_else(|| kernel.place(place).map(|(_, element)| element))
        }
        None if matches!(op.code.shape(), Shape::Shuffle) => {
            op.operands.first().map(|v| kernel.type_of(*v).scalar())
        }
        None => op.operands.last().map(|v| kernel.type_of(*v).scalar()),
    };
    let from = from.or(to).unwrap_or(Scalar::I32);
    (from, to.unwrap_or(from))
}

/// An op of a module on a type, and how a target does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// The op.
    pub op: Opcode,
    /// What it works on; for a conversion, what it converts from.
    pub ty: Scalar,
    /// What a conversion gives; the same as `ty` elsewhere.
    pub to: Scalar,
    /// How often the text has it.
    pub count: u32,
    /// The line where it stands first; 0 if unknown.
    pub line: u32,
    /// How the target does it.
    pub support: Support,
}

/// Every op on values, memory and threads that a module uses, on its type, in the order of the text, with how `target`
/// does it. Control flow, which every target does, is left out.
pub fn survey(module: &Module, target: &Target) -> Vec<Use> {
    let mut uses: Vec<Use> = Vec::new();
    let mut places = HashMap::new();
    for kernel in module.kernels() {
        kernel.for_each_op(&mut |op| {
            if matches!(op.code.shape(), Shape::If | Shape::For | Shape::While | Shape::Switch) {
                return;
            }
            let (ty, to) = key(kernel, op);
            let to = if matches!(op.code.shape(), Shape::Convert(..)) { to } else { ty };
            let place = *places.entry((op.code, ty, to)).or_insert(uses.len());
            match uses.get_mut(place) {
                Some(known) => known.count += 1,
                None => {
                    let support = support(target, op.code, ty, to);
                    uses.push(Use { op: op.code, ty, to, count: 1, line: op.line.0, support });
                }
            }
        });
    }
    uses
}

/// Everything in a module for which `target` would reject it, without compiling it. Empty if it compiles.
pub fn rejects(module: &Module, target: &Target) -> Vec<Reject> {
    module.kernels().iter().flat_map(|kernel| kernel_rejects(kernel, target)).collect()
}

pub(crate) fn kernel_rejects(kernel: &Kernel, target: &Target) -> Vec<Reject> {
    let at_head = |kinds: Vec<RejectKind>| kinds.into_iter().map(|kind| (kernel.line().0, kind)).collect();
    let of_kernel: Vec<_> = match target {
        Target::Ptx(options) => crate::backend::ptx::rejects(options, kernel),
        Target::Amdgcn(options) => {
            let mut all: Vec<_> = at_head(crate::backend::amdgcn::head_rejects(options, kernel));
            all.extend(crate::backend::amdgcn::tile_rejects(options, kernel));
            all
        }
        #[cfg(feature = "cpu")]
        Target::Cpu(options) => at_head(crate::backend::cpu::head_rejects(options, kernel)),
        Target::Ir => Vec::new(),
    };
    let mut found: Vec<_> =
        of_kernel.into_iter().map(|(line, kind)| Reject::new(kernel, line, kind)).collect();
    kernel.for_each_op(&mut |op| {
        let (ty, to) = key(kernel, op);
        if !op.code.shape().is_tile()
            && let Support::Rejected(_) = support(target, op.code, ty, to)
        {
            let kind = RejectKind::Op { target: target.to_string(), op: op.code.mnemonic(), ty };
            found.push(Reject::new(kernel, op.line.0, kind));
        }
    });
    found
}
