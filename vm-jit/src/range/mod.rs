//! What is known of integers: an interval, a power of two that divides them, and how far below an extent of a
//! view they are. It decides which bounds checks of a guest's kernel are needed, how wide vectors can be
//! loaded, and which loops are short.
//!
//! One walk over the kernel in order. A value's fact is found from its operands' when it is defined. Inside
//! an `if` or a loop it is narrowed by the condition that leads there, and the old fact comes back behind it.
//! Pure ops that repeat an earlier one count as that one, so that what a condition says of `i + 4` holds for
//! the `i + 4` of the access. What a loop carries is not followed: nothing but its type is known of it.
//!
//! The work is linear in the kernel: each op is looked at once, a fact has a most of extents, and of a condition no more
//! than [`MAX_LEARNT`] values are narrowed. What is behind that stays as it was, which is always true.
//!
//! [`assumed`] lists what it assumes about a launch, and which code enforces that.

pub mod assumed;
mod fact;
#[cfg(test)]
mod facts;
#[cfg(test)]
mod proofs;
mod transfer;

pub use fact::{Below, Fact};

use std::collections::HashMap;
use vm_ir::module::{Op, ParamKind, Place, Region};
use vm_ir::op::{Effect, Opcode, PlaceRule, Shape};
use vm_ir::view::Dim;
use vm_ir::{Kernel, Value};

/// Which lanes of an access are known to be in bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// All of them.
    All,
    /// All or none: the first decides.
    Together,
    /// Each may be in or out by itself.
    Each,
    /// Of an access by bytes: all or none, and not both of these are known.
    Bytes {
        /// All are within the extent.
        within: bool,
        /// The index is a multiple of their number.
        aligned: bool,
    },
}

/// What is known of an access to a view or to a shared array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// For each index but the last: is it in bounds?
    pub outer: Vec<bool>,
    /// The same for the last, with all lanes.
    pub lanes: Lanes,
    /// The index in the last dimension is a multiple of 2 to this.
    pub shift: u32,
    /// It is this value plus this constant, without overflow.
    pub base: (Value, i64),
}

/// What is known of a `for`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The most iterations that it can take.
    pub iterations: u64,
    /// Exactly this many, if that is known.
    pub exact: Option<u64>,
    /// The step is known to be at least 1.
    pub steps_up: bool,
    /// The upper bound plus this many steps does not overflow the count's type.
    pub room: u64,
}

/// What the walk found. Ops are known by their addresses, so it borrows the kernel that it is of:
///
/// ```
/// # use vm_jit::range::Ranges;
/// let kernel = vm_ir::IRBlock::new(vm_ir::GuestAddr(0x1000)).kernel()?;
/// let ranges = Ranges::of(&kernel);
/// kernel.for_each_op(&mut |op| assert!(ranges.loop_of(op).is_none()));
/// # Ok::<(), vm_ir::builder::BuildError>(())
/// ```
///
/// and nothing is known of it once it has moved.
///
/// ```compile_fail,E0505
/// # use vm_jit::range::Ranges;
/// let kernel = vm_ir::IRBlock::new(vm_ir::GuestAddr(0x1000)).kernel()?;
/// let ranges = Ranges::of(&kernel);
/// let moved = vec![kernel];
/// moved[0].for_each_op(&mut |op| assert!(ranges.loop_of(op).is_none()));
/// # Ok::<(), vm_ir::builder::BuildError>(())
/// ```
#[derive(Debug)]
pub struct Ranges<'k> {
    kernel: &'k Kernel,
    accesses: HashMap<*const Op, Access>,
    loops: HashMap<*const Op, Loop>,
    facts: HashMap<*const Op, Vec<Fact>>,
    steps: u64,
}

impl<'k> Ranges<'k> {
    /// Looks at a kernel of a valid module.
    pub fn of(kernel: &'k Kernel) -> Ranges<'k> {
        Ranges::keeping(kernel, false)
    }

    /// Looks at a kernel; keeps what is known of the operands of all ops, or only of those that are asked for.
    fn keeping(kernel: &'k Kernel, all: bool) -> Ranges<'k> {
        let (accesses, loops, facts) = Default::default();
        let mut walk = Walk {
            kernel,
            ranges: Ranges { kernel, accesses, loops, facts, steps: 0 },
            facts: kernel.values().iter().map(|v| Fact::of_type(v.ty.scalar())).collect(),
            canon: (0..kernel.values().len() as u32).collect(),
            defs: vec![None; kernel.values().len()],
            numbers: HashMap::new(),
            undo: Vec::new(),
            learnt: 0,
            all,
            same: same_extents(kernel),
        };
        for (value, fact) in assumed::of_parameters(kernel) {
            walk.facts[value.index()] = fact;
        }
        walk.region(kernel.body());
        walk.ranges
    }

    /// The kernel that it is of.
    pub fn kernel(&self) -> &'k Kernel {
        self.kernel
    }

    /// What is known of the place of a load, store or atomic; nothing of any other op.
    pub fn access(&self, op: &Op) -> Option<&Access> {
        self.accesses.get(&std::ptr::from_ref(op))
    }

    /// What is known of a `for`.
    pub fn loop_of(&self, op: &Op) -> Option<&Loop> {
        self.loops.get(&std::ptr::from_ref(op))
    }

    /// How much was done to find it: ops, values whose facts were taken, joined or narrowed. It is the same on every
    /// machine.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What is known of the operands of a division or a shift where it stands.
    pub fn operand(&self, op: &Op, index: usize) -> Option<&Fact> {
        self.facts.get(&std::ptr::from_ref(op))?.get(index)
    }
}

/// An op that repeats an earlier one with the same of these gives the same.
type Number = (Opcode, [u8; 2], Option<Place>, Vec<u32>, Vec<u64>, vm_ir::Type);

/// How many constants that are added one after another are joined.
const MAX_SPLIT: usize = 8;

/// How many values, and conditions joined in it, a condition teaches something of.
const MAX_LEARNT: usize = 64;

enum Undo {
    Fact(u32, Fact),
    Number(Number),
}

struct Walk<'k> {
    kernel: &'k Kernel,
    ranges: Ranges<'k>,
    /// By canonical value.
    facts: Vec<Fact>,
    /// The first value that is always equal.
    canon: Vec<u32>,
    defs: Vec<Option<&'k Op>>,
    numbers: HashMap<Number, u32>,
    undo: Vec<Undo>,
    /// How many values the condition at hand taught something of.
    learnt: usize,
    /// Are the facts of all operands kept?
    all: bool,
    /// The extents that equal one before them, by view and dimension.
    same: HashMap<(u16, u8), (u16, u8)>,
}

/// The extents that have the name of one before them, and that one.
fn same_extents(kernel: &Kernel) -> HashMap<(u16, u8), (u16, u8)> {
    let views = (0..).zip(kernel.params()).filter_map(|(index, param)| match &param.kind {
        ParamKind::View(view) => Some((index, view.rank())),
        ParamKind::Scalar { .. } => None,
    });
    let extents = views.flat_map(|(view, rank)| (0..rank).map(move |dimension| (view, dimension)));
    let same = extents.map(|(view, dimension)| {
        let (first, at) = kernel.same_extent(view, dimension);
        ((view, dimension as u8), (first, at as u8))
    });
    same.filter(|(extent, first)| extent != first).collect()
}

impl<'k> Walk<'k> {
    fn fact(&self, value: Value) -> &Fact {
        &self.facts[self.canon[value.index()] as usize]
    }

    fn set(&mut self, value: Value, mut fact: Fact) {
        self.ranges.steps += 1;
        let at = self.canon[value.index()];
        self.round(&mut fact);
        let old = std::mem::replace(&mut self.facts[at as usize], fact);
        self.undo.push(Undo::Fact(at, old));
    }

    /// Draws a fact's bounds in to the next multiples of what divides the value.
    fn round(&self, fact: &mut Fact) {
        if fact.shift == 0 {
            return;
        }
        fact.round();
        for below in &mut fact.below {
            let dims = self.kernel.view(below.view).map(|view| &view.dims[usize::from(below.dimension)]);
            if let Some(Dim::Any { multiple }) = dims {
                below.round(fact.shift.min(multiple.trailing_zeros()));
            }
        }
    }

    fn scoped(&mut self, run: impl FnOnce(&mut Self)) {
        let start = self.undo.len();
        run(self);
        while self.undo.len() > start {
            match self.undo.pop() {
                Some(Undo::Fact(at, old)) => self.facts[at as usize] = old,
                Some(Undo::Number(number)) => {
                    self.numbers.remove(&number);
                }
                None => {}
            }
        }
    }

    fn region(&mut self, region: &'k Region) {
        for op in &region.ops {
            self.op(op);
        }
    }

    fn op(&mut self, op: &'k Op) {
        self.ranges.steps += 1 + op.operands.len() as u64;
        if self.all {
            let facts = self.facts_of(&op.operands);
            self.ranges.facts.insert(std::ptr::from_ref(op), facts);
        }
        match op.code.shape() {
            Shape::If => {
                let mut yields = Vec::new();
                for (region, holds) in op.regions.iter().zip([true, false]) {
                    self.scoped(|walk| {
                        walk.learn(op.operands[0], holds);
                        walk.region(region);
                        yields.push(walk.facts_of(&region.yields));
                    });
                }
                self.join(&op.results, &yields);
            }
            Shape::Switch => {
                let mut yields = Vec::new();
                for region in &op.regions {
                    self.scoped(|walk| {
                        walk.region(region);
                        yields.push(walk.facts_of(&region.yields));
                    });
                }
                self.join(&op.results, &yields);
            }
            Shape::For => self.for_loop(op),
            Shape::While => {
                let [condition, body] = &op.regions[..] else { return };
                self.scoped(|walk| {
                    walk.region(condition);
                    // What the condition computed is not the body's to see.
                    walk.scoped(|walk| {
                        if let Some(value) = condition.yields.first() {
                            walk.learn(*value, true);
                        }
                        walk.region(body);
                    });
                });
            }
            _ => self.plain(op),
        }
    }

    fn facts_of(&mut self, values: &[Value]) -> Vec<Fact> {
        self.ranges.steps += values.len() as u64;
        values.iter().map(|v| self.fact(*v).clone()).collect()
    }

    fn join(&mut self, results: &[Value], yields: &[Vec<Fact>]) {
        for (i, result) in results.iter().enumerate() {
            let mut facts = yields.iter().filter_map(|y| y.get(i));
            if let Some(first) = facts.next() {
                let joined = facts.fold(first.clone(), |a, b| a.join(b));
                self.set(*result, joined);
            }
        }
    }

    fn for_loop(&mut self, op: &'k Op) {
        let [low, high, step] = [0, 1, 2].map(|i| self.fact(op.operands[i]).clone());
        let limit = self.kernel.type_of(op.operands[0]).scalar().mask() as i128 >> 1;
        let least = step.low.max(1);
        let iterations = |low: i128, high: i128, step: i128| {
            if high > low { u64::try_from((high - low - 1) / step + 1).unwrap_or(u64::MAX) } else { 0 }
        };
        let most = if step.high < 1 { 0 } else { iterations(low.low, high.high, least) };
        let exact = match (low.constant(), high.constant(), step.constant()) {
            (Some(low), Some(high), Some(step)) => {
                Some(if step < 1 { 0 } else { iterations(low, high, step) })
            }
            _ => None,
        };
        let room = (limit - high.high.min(limit)) / step.high.max(1);
        let facts = Loop {
            iterations: most,
            exact,
            steps_up: step.low >= 1,
            room: u64::try_from(room).unwrap_or(u64::MAX),
        };
        self.ranges.loops.insert(std::ptr::from_ref(op), facts);
        let body = &op.regions[0];
        // Of what goes from iteration to iteration nothing is known in the body; so what it yields holds after each.
        let mut yields = vec![self.facts_of(&op.operands[3..])];
        self.scoped(|walk| {
            let mut last = (high.high - 1).max(low.low);
            if let (Some(first), Some(step)) = (low.constant(), step.constant().filter(|step| *step >= 1)) {
                last -= (last - first) % step;
            }
            let mut count = Fact::between(low.low, last);
            count.shift = low.shift.min(step.shift);
            count.below = Fact::shifted(&high.below, -1);
            walk.set(body.args[0], count);
            walk.region(body);
            yields.push(walk.facts_of(&body.yields));
        });
        self.join(&op.results, &yields);
    }

    fn plain(&mut self, op: &'k Op) {
        if matches!(op.code.shape().place(), PlaceRule::Any | PlaceRule::Shared) {
            self.access(op);
        }
        let Some(result) = op.result() else { return };
        self.defs[result.index()] = Some(op);
        let ty = self.kernel.type_of(result);
        if ty.is_vector() {
            return;
        }
        if op.code.effect() == Effect::Pure {
            let operands = op.operands.iter().map(|v| self.canon[v.index()]).collect();
            let (mut place, mut immediates) = (op.place, op.immediates.clone());
            // Extents of one name are one number.
            if let (Shape::Extent, Some(Place::View(view)), [dimension]) =
                (op.code.shape(), &mut place, &mut immediates[..])
            {
                let (first, at) = self.same_extent(*view, *dimension as u8);
                (*view, *dimension) = (first, at.into());
            }
            let number = (op.code, op.attrs, place, operands, immediates, ty);
            if let Some(earlier) = self.numbers.get(&number) {
                self.canon[result.index()] = *earlier;
            } else {
                self.numbers.insert(number.clone(), result.index() as u32);
                self.undo.push(Undo::Number(number));
            }
        }
        if self.canon[result.index()] as usize == result.index() {
            let fact = self.transfer(op, ty.scalar());
            self.set(result, fact);
        }
        let guarded = matches!(
            op.code,
            Opcode::DivS
                | Opcode::DivU
                | Opcode::RemS
                | Opcode::RemU
                | Opcode::Shl
                | Opcode::ShrS
                | Opcode::ShrU
                | Opcode::Rotl
        );
        if guarded {
            let facts = self.facts_of(&op.operands);
            self.ranges.facts.insert(std::ptr::from_ref(op), facts);
        }
    }

    /// The first extent that always equals this one.
    fn same_extent(&self, view: u16, dimension: u8) -> (u16, u8) {
        self.same.get(&(view, dimension)).copied().unwrap_or((view, dimension))
    }

    fn access(&mut self, op: &Op) {
        let Some(place) = op.place else { return };
        let Some((rank, _)) = self.kernel.place(place) else { return };
        let Some(value) = op.result().or(op.operands.last().copied()) else { return };
        let by_bytes = self.kernel.by_bytes(op);
        let lanes = by_bytes.map_or(self.kernel.type_of(value).lanes().into(), |ty| ty.bytes());
        let (lanes, lanes_shift) = (i128::from(lanes), lanes.trailing_zeros());
        let last = rank - 1;
        let within = |dimension: usize, lanes: i128| {
            let fact = self.fact(op.operands[dimension]);
            let fixed = match place {
                Place::View(view) => match self.kernel.view(view).map(|v| v.dims[dimension]) {
                    Some(Dim::Fixed(extent)) => Some(extent),
                    _ => None,
                },
                Place::Shared(array) => {
                    self.kernel.shared().get(usize::from(array)).map(|s| u64::from(s.dims[dimension]))
                }
                Place::Local(array) => {
                    self.kernel.local().get(usize::from(array)).map(|array| u64::from(array.len))
                }
                Place::Channel(_) | Place::Fragment(_) => None,
            };
            let below = match place {
                Place::View(view) => {
                    let extent = self.same_extent(view, dimension as u8);
                    let below = |b: &Below| (b.view, b.dimension) == extent && i128::from(b.offset) <= -lanes;
                    fact.below.iter().any(below)
                }
                Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => false,
            };
            fact.low >= 0 && (below || fixed.is_some_and(|extent| fact.high <= i128::from(extent) - lanes))
        };
        let outer = (0..last).map(|dimension| within(dimension, 1)).collect();
        let shift = self.fact(op.operands[last]).shift;
        let multiple = match place {
            Place::View(view) => match self.kernel.view(view).map(|v| v.dims[last]) {
                Some(Dim::Fixed(extent)) => extent.trailing_zeros(),
                Some(Dim::Any { multiple }) => multiple.trailing_zeros(),
                None => 0,
            },
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => 0,
        };
        let (within, aligned) = (within(last, lanes), shift >= lanes_shift);
        let lanes = if by_bytes.is_some() && !(within && aligned) {
            Lanes::Bytes { within, aligned }
        } else if within {
            Lanes::All
        } else if aligned && multiple >= lanes_shift {
            Lanes::Together
        } else {
            Lanes::Each
        };
        let base = self.split(op.operands[last]);
        self.ranges.accesses.insert(std::ptr::from_ref(op), Access { outer, lanes, shift, base });
    }

    /// A value as another one plus a constant, without overflow.
    fn split(&self, value: Value) -> (Value, i64) {
        let (mut base, mut offset) = (value, 0i64);
        for _ in 0..MAX_SPLIT {
            // Its own definition: what an equal value is made of may not be visible here.
            let Some(op) = self.defs[base.index()].filter(|op| op.code == Opcode::Add) else { break };
            let [a, b] = [op.operands[0], op.operands[1]];
            let (rest, constant) = match (self.fact(a).constant(), self.fact(b).constant()) {
                (None, Some(constant)) => (a, constant),
                (Some(constant), None) => (b, constant),
                _ => break,
            };
            let (fact, any) = (self.fact(rest), Fact::of_type(self.kernel.type_of(rest).scalar()));
            let fits = fact.low + constant >= any.low && fact.high + constant <= any.high;
            let sum = i64::try_from(constant).ok().and_then(|constant| offset.checked_add(constant));
            let (true, Some(sum)) = (fits, sum) else { break };
            (base, offset) = (rest, sum);
        }
        (base, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_linear() {
        crate::growth::check("ranges", 150, |module| {
            module.kernels().iter().map(|kernel| Ranges::of(kernel).steps()).sum()
        });
    }
}
