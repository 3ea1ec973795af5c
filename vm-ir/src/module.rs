//! What a module is made of: kernels, parameters, regions, ops, values.
//!
//! A kernel is made by the [builder](crate::builder), the [parser](crate::text) or the
//! [decoder](crate::binary), and by nothing else. All three number values in the order of their definition,
//! so a value's number is the same in every form.

use crate::limits::{Caps, WARP};
use crate::op::{
    Accuracy, AttrKind, Attribute, Axis, BarrierScope, Cache, Convergence, Opcode, Order, PlaceRule, Scope,
    Shape,
};
use crate::tile::{Channel, Fragment, Tile};
use crate::types::{Scalar, Type};
use crate::view::ViewType;
use std::fmt;

/// Where in a guest a kernel came from. It appears in errors and is part of what a kernel is; it is never
/// dereferenced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GuestAddr(pub u64);

impl fmt::Display for GuestAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The line that an op was written on: of the text, or of the Rust file that called the builder; 0 if
/// unknown. It helps messages and is no part of what a kernel is, so any two lines are equal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line(pub u32);

impl PartialEq for Line {
    fn eq(&self, _: &Line) -> bool {
        true
    }
}

impl Eq for Line {}

/// The number of a value within its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub(crate) u32);

impl Value {
    /// The number, from 0 without gaps.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is known of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueDef {
    /// Its type.
    pub ty: Type,
    /// Its name in text, if it has one.
    pub name: Option<Box<str>>,
}

/// Memory that an op works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The view that is this parameter of the kernel.
    View(u16),
    /// This shared array of the kernel.
    Shared(u16),
    /// This local array of the kernel.
    Local(u16),
    /// This channel of a tile kernel.
    Channel(u16),
    /// This fragment of a tile kernel.
    Fragment(u16),
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name, with neither `@` nor `%`.
    pub name: Box<str>,
    /// What it is.
    pub kind: ParamKind,
    /// The line it was written on. The binary form does not have it: the kernel's line stands for it then.
    pub line: Line,
}

/// What a parameter is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParamKind {
    /// Global memory.
    View(ViewType),
    /// A number, the same in every thread.
    Scalar {
        /// The value that holds it.
        value: Value,
        /// Its least and greatest value as a signed integer; the launch is refused outside of it.
        range: Option<(i64, i64)>,
    },
}

/// Memory that the threads of a block share. Every block has its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedArray {
    /// Its name, without `@`.
    pub name: Box<str>,
    /// What one element is; never `bool`.
    pub element: Scalar,
    /// The extents, slowest dimension first.
    pub dims: Vec<u32>,
    /// The line it was written on.
    pub line: Line,
}

impl SharedArray {
    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.dims.iter().fold(1u64, |n, d| n.saturating_mul(u64::from(*d)))
    }

    /// Is it without elements? The validator refuses such an array.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size in bytes, rounded up to 16: every array starts on a 16-byte boundary.
    pub fn bytes(&self) -> u64 {
        self.len().saturating_mul(u64::from(self.element.bytes())).saturating_add(15) & !15
    }
}

/// Memory of a thread's own: bytes, at which values of any type may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalArray {
    /// Its name, without `@`.
    pub name: Box<str>,
    /// How many bytes.
    pub len: u32,
    /// The line it was written on.
    pub line: Line,
}

impl LocalArray {
    /// Size in bytes, rounded up to 16: every array starts on a 16-byte boundary.
    pub fn bytes(&self) -> u64 {
        u64::from(self.len).next_multiple_of(16)
    }
}

/// Ops in order, with values that come in and values that go out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Values defined at its start: the count and the carried values of a loop.
    pub args: Vec<Value>,
    /// The ops.
    pub ops: Vec<Op>,
    /// What it yields to the op that contains it.
    pub yields: Vec<Value>,
    /// The line of the yield.
    pub yield_line: Line,
}

/// One op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// Which.
    pub code: Opcode,
    /// The indices of its attributes' words, in the order of the op's row; 0 where it has none.
    pub attrs: [u8; 2],
    /// The memory it works on.
    pub place: Option<Place>,
    /// What else it works on: channels and fragments.
    pub others: Vec<Place>,
    /// What it takes: first the indices into the place, then the rest.
    pub operands: Vec<Value>,
    /// Numbers fixed in the code: a constant's bits, a lane, a dimension, an unroll hint, the cases.
    pub immediates: Vec<u64>,
    /// What it defines.
    pub results: Vec<Value>,
    /// The regions it contains.
    pub regions: Vec<Region>,
    /// The line it was written on.
    pub line: Line,
}

impl Op {
    /// An op without attributes, operands or results.
    pub fn new(code: Opcode) -> Op {
        let attrs = default_attrs(code);
        Op {
            code,
            attrs,
            place: None,
            others: Vec::new(),
            operands: Vec::new(),
            immediates: Vec::new(),
            results: Vec::new(),
            regions: Vec::new(),
            line: Line(0),
        }
    }

    /// The attribute of type `A`, if the op's row has it.
    pub fn attr<A: Attribute>(&self) -> Option<A> {
        let at = self.code.info().attrs.iter().position(|kind| *kind == A::KIND)?;
        A::VALUES.get(usize::from(self.attrs[at])).copied()
    }

    /// Sets the attribute of type `A`, if the op's row has it.
    pub fn set_attr<A: Attribute>(&mut self, value: A) {
        if let Some(at) = self.code.info().attrs.iter().position(|kind| *kind == A::KIND) {
            self.attrs[at] = value.index();
        }
    }

    /// It, with the attribute of type `A` set, if the op's row has it.
    pub(crate) fn with<A: Attribute>(mut self, value: A) -> Op {
        self.set_attr(value);
        self
    }

    /// Its axis; x where the op has none.
    pub fn axis(&self) -> Axis {
        self.attr().unwrap_or(Axis::X)
    }

    /// Its accuracy class; precise where the op has none.
    pub fn accuracy(&self) -> Accuracy {
        self.attr().unwrap_or(Accuracy::Precise)
    }

    /// Its cache hint.
    pub fn cache(&self) -> Cache {
        self.attr().unwrap_or(Cache::Normal)
    }

    /// Its memory order.
    pub fn order(&self) -> Order {
        self.attr().unwrap_or(Order::Relaxed)
    }

    /// Its memory scope.
    pub fn scope(&self) -> Scope {
        self.attr().unwrap_or(Scope::Device)
    }

    /// The threads that a barrier joins.
    pub fn barrier_scope(&self) -> BarrierScope {
        self.attr().unwrap_or(BarrierScope::Block)
    }

    /// The threads that must reach it together, if any must.
    pub fn converges(&self) -> Option<BarrierScope> {
        match self.code.convergence() {
            Convergence::None => None,
            Convergence::Warp => Some(BarrierScope::Warp),
            Convergence::Block => Some(BarrierScope::Block),
            Convergence::Scope => Some(self.barrier_scope()),
        }
    }

    /// The one result of an op that has one.
    pub fn result(&self) -> Option<Value> {
        self.results.first().copied()
    }

    /// How often the compiler is asked to unroll a `for`; 0 leaves it to the compiler, 1 forbids it.
    pub fn unroll(&self) -> u64 {
        if self.code.shape() == Shape::For { self.immediates.first().copied().unwrap_or(0) } else { 0 }
    }
}

/// The attribute indices an op has before any is set.
pub(crate) fn default_attrs(code: Opcode) -> [u8; 2] {
    let mut attrs = [0; 2];
    for (slot, kind) in attrs.iter_mut().zip(code.info().attrs) {
        *slot = AttrKind::default(*kind).unwrap_or(0);
    }
    attrs
}

/// A GPU function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub(crate) name: Box<str>,
    pub(crate) guest: GuestAddr,
    pub(crate) block: [u32; 3],
    pub(crate) cluster: u32,
    pub(crate) resident: u32,
    pub(crate) params: Vec<Param>,
    pub(crate) shared: Vec<SharedArray>,
    pub(crate) local: Vec<LocalArray>,
    pub(crate) tile: Option<Box<Tile>>,
    pub(crate) values: Vec<ValueDef>,
    pub(crate) body: Region,
    pub(crate) line: Line,
}

impl Kernel {
    /// Its name, without `@`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where in the guest it came from.
    pub fn guest_address(&self) -> GuestAddr {
        self.guest
    }

    /// Threads of a block along x, y and z.
    pub fn block(&self) -> [u32; 3] {
        self.block
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().fold(1, |n, d| n.saturating_mul(*d))
    }

    /// Blocks of a cluster, which are neighbours along x; 1 where each is by itself. The grid along x is a multiple
    /// of it.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Blocks that a multiprocessor is to have room for at once, or 0: a hint, for which a compiler takes fewer registers, or more.
    pub fn resident(&self) -> u32 {
        self.resident
    }

    /// Threads of a cluster.
    pub fn cluster_threads(&self) -> u32 {
        self.threads().saturating_mul(self.cluster)
    }

    /// Warps of a cluster.
    pub fn cluster_warps(&self) -> u32 {
        self.threads().div_ceil(WARP).saturating_mul(self.cluster)
    }

    /// The parameters in the order of a launch's arguments.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The shared arrays.
    pub fn shared(&self) -> &[SharedArray] {
        &self.shared
    }

    /// The local arrays.
    pub fn local(&self) -> &[LocalArray] {
        &self.local
    }

    /// Bytes of a thread's local arrays, each rounded up to 16.
    pub fn local_bytes(&self) -> u64 {
        self.local.iter().fold(0, |sum, array| sum.saturating_add(array.bytes()))
    }

    /// What it has as a tile kernel; `None` for a kernel of threads.
    pub fn tile(&self) -> Option<&Tile> {
        self.tile.as_deref()
    }

    /// A channel of a tile kernel.
    pub fn channel(&self, place: Place) -> Option<&Channel> {
        match place {
            Place::Channel(i) => self.tile()?.channels.get(usize::from(i)),
            _ => None,
        }
    }

    /// A fragment of a tile kernel.
    pub fn fragment(&self, place: Place) -> Option<&Fragment> {
        match place {
            Place::Fragment(i) => self.tile()?.fragments.get(usize::from(i)),
            _ => None,
        }
    }

    /// All values, by number. The scalar parameters come first.
    pub fn values(&self) -> &[ValueDef] {
        &self.values
    }

    /// The type of a value of this kernel.
    pub fn type_of(&self, value: Value) -> Type {
        self.values[value.index()].ty
    }

    /// What the kernel does.
    pub fn body(&self) -> &Region {
        &self.body
    }

    /// The line its text starts on.
    pub fn line(&self) -> Line {
        self.line
    }

    /// The type of the view that is parameter `index`.
    pub fn view(&self, index: u16) -> Option<&ViewType> {
        match &self.params.get(usize::from(index))?.kind {
            ParamKind::View(view) => Some(view),
            ParamKind::Scalar { .. } => None,
        }
    }

    /// The view and the dimension, first in the order of the parameters, whose extent has the same name as this one, so
    /// that every launch has them equal; this one itself where it has no name.
    pub fn same_extent(&self, view: u16, dimension: usize) -> (u16, usize) {
        let own = (view, dimension);
        let Some(name) = self.view(view).and_then(|v| v.names.get(dimension)?.as_deref()) else { return own };
        let first = |(param, index): (&Param, u16)| match &param.kind {
            ParamKind::View(v) => Some((index, v.names.iter().position(|n| n.as_deref() == Some(name))?)),
            ParamKind::Scalar { .. } => None,
        };
        self.params.iter().zip(0..=view).find_map(first).unwrap_or(own)
    }

    /// The surface that is this place.
    pub fn surface(&self, place: Place) -> Option<&ViewType> {
        match place {
            Place::View(i) => self.view(i).filter(|view| view.surface),
            _ => None,
        }
    }

    /// The parameters that are surfaces.
    pub fn surfaces(&self) -> impl Iterator<Item = &Param> {
        self.params.iter().filter(|param| matches!(&param.kind, ParamKind::View(view) if view.surface))
    }

    /// Number of indices and the element of a place; `None` if the kernel has no such place.
    pub fn place(&self, place: Place) -> Option<(usize, Scalar)> {
        match place {
            Place::View(i) => self.view(i).map(|v| (v.indices(), v.element)),
            Place::Shared(i) => self.shared.get(usize::from(i)).map(|s| (s.dims.len(), s.element)),
            Place::Local(i) => self.local.get(usize::from(i)).map(|_| (1, Scalar::I8)),
            Place::Channel(_) => self.channel(place).map(|c| (2, c.element)),
            Place::Fragment(_) => {
                self.fragment(place).map(|f| (1 + usize::from(f.columns.is_some()), f.element))
            }
        }
    }

    /// The value of an access by bytes: of a load, a store or an atomic of another type than `i8` in a local array, or in a view
    /// or a shared array of one dimension of `i8`. `None` for any other op.
    ///
    /// Its index counts bytes and is a multiple of the value's size, as where the value begins is; so the access is wholly
    /// within or not at all.
    pub fn by_bytes(&self, op: &Op) -> Option<Type> {
        if op.code.shape().place() != PlaceRule::Any || self.place(op.place?)? != (1, Scalar::I8) {
            return None;
        }
        let value = op.result().or(op.operands.last().copied())?;
        Some(self.type_of(value)).filter(|ty| ty.scalar() != Scalar::I8)
    }

    /// The name of a place, without `@`.
    pub fn place_name(&self, place: Place) -> &str {
        match place {
            Place::View(i) => self.params.get(usize::from(i)).map_or("?", |p| &p.name),
            Place::Shared(i) => self.shared.get(usize::from(i)).map_or("?", |s| &s.name),
            Place::Local(i) => self.local.get(usize::from(i)).map_or("?", |l| &l.name),
            Place::Channel(_) => self.channel(place).map_or("?", |c| &c.name),
            Place::Fragment(_) => self.fragment(place).map_or("?", |f| &f.name),
        }
    }

    /// How a value is written: its name, or its number.
    pub fn value_name(&self, value: Value) -> String {
        match self.values.get(value.index()).and_then(|v| v.name.as_deref()) {
            Some(name) => format!("%{name}"),
            None => format!("%{}", value.0),
        }
    }

    /// Calls `visit` on every op, an op before those in its regions.
    pub fn for_each_op<'k>(&'k self, visit: &mut dyn FnMut(&'k Op)) {
        fn walk<'k>(region: &'k Region, visit: &mut dyn FnMut(&'k Op)) {
            for op in &region.ops {
                visit(op);
                op.regions.iter().for_each(|r| walk(r, visit));
            }
        }
        walk(&self.body, visit);
    }
}

/// Kernels that travel together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    pub(crate) kernels: Vec<Kernel>,
}

impl Module {
    /// The version of the IR that this crate reads and writes, in text and binary.
    pub const VERSION: u16 = 1;

    /// A module of these kernels.
    pub fn new(kernels: Vec<Kernel>) -> Module {
        Module { kernels }
    }

    /// The kernels in order.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The kernel with this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| &*k.name == name)
    }
}

impl From<Kernel> for Module {
    fn from(kernel: Kernel) -> Module {
        Module { kernels: vec![kernel] }
    }
}

/// May this be a name: a letter or `_`, then letters, digits and `_`, at most 64 bytes of ASCII?
pub fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    name.len() <= crate::limits::MAX_NAME
        && bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Numbers the values and counts the ops of a kernel that is being made.
#[derive(Debug, Default)]
pub(crate) struct Numbering {
    pub(crate) values: Vec<ValueDef>,
    pub(crate) ops: usize,
    pub(crate) caps: Caps,
}

/// A kernel has too many ops or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TooLarge {
    #[error("the kernel has more than {0} values; split it")]
    Values(usize),
    #[error("the kernel has more than {0} ops; split it")]
    Ops(usize),
}

impl Numbering {
    /// Numbers a new value.
    pub(crate) fn define(&mut self, ty: Type, name: Option<Box<str>>) -> Result<Value, TooLarge> {
        if self.values.len() >= self.caps.values {
            return Err(TooLarge::Values(self.caps.values));
        }
        self.values.push(ValueDef { ty, name });
        Ok(Value(self.values.len() as u32 - 1))
    }

    /// Counts one more op.
    pub(crate) fn count_op(&mut self) -> Result<(), TooLarge> {
        self.ops += 1;
        if self.ops > self.caps.ops { Err(TooLarge::Ops(self.caps.ops)) } else { Ok(()) }
    }
}

/// The number of indices an op takes before its other operands.
pub(crate) fn index_count(kernel: &Kernel, op: &Op) -> usize {
    match (op.code.shape().place(), op.place) {
        (PlaceRule::Any | PlaceRule::Shared | PlaceRule::Box, Some(place)) => {
            kernel.place(place).map_or(0, |(rank, _)| rank)
        }
        _ => 0,
    }
}
