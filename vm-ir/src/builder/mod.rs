//! The builder: kernels written in Rust, so that the Rust reads like the kernel.
//!
//! ```
//! use vm_ir::builder::IRBlock;
//! use vm_ir::op::Axis;
//! use vm_ir::view::Access;
//! use vm_ir::{GuestAddr, Scalar, Trust};
//!
//! let block = IRBlock::new(GuestAddr(0x1000));
//! let k = block.builder();
//! k.name("silu").block_size([256, 1, 1]);
//! let x = k.view("x", Scalar::F32, 1, Access::Read);
//! let y = k.view("y", Scalar::F32, 1, Access::Write);
//! let i = k.global_id(Axis::X);
//! k.if_(i.lt(y.extent(0)), || {
//!     let v = x.at([i]).load();
//!     y.at([i]).store(v / ((-v).exp() + 1.0));
//! });
//! let module = vm_ir::validate(block.kernel()?.into(), Trust::Guest)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Nothing here panics or returns a `Result` op by op: the first thing that cannot be written at all is kept
//! and returned by [`IRBlock::kernel`]; whether types fit is the [validator](crate::valid)'s matter, which
//! names the line of the Rust file.

mod control;
mod memory;
mod rewrite;
mod tile;
mod value;

pub use control::{Carry, Cases, Range};
pub use memory::{Element, PlaceRef};
pub use rewrite::Rewrite;
pub use tile::{ChannelRef, Factor, FragmentRef};
pub use value::{IntoVal, Val};

use crate::limits::{MAX_PARAMS, MAX_SHARED_ARRAYS};
use crate::module::{
    GuestAddr, Kernel, Line, LocalArray, Numbering, Op, Param, ParamKind, Place, Region, SharedArray,
    TooLarge, Value, is_name,
};
use crate::op::{Axis, BarrierScope, Opcode, Order, Scope};
use crate::tile::Tile;
use crate::types::{Scalar, Type};
use crate::view::{Access, ViewType};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::panic::Location;

/// Something that cannot be written as a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel @{kernel} at {guest}, line {line}: {kind}")]
pub struct BuildError {
    /// The kernel's name.
    pub kernel: String,
    /// Where in the guest it came from.
    pub guest: GuestAddr,
    /// The line of the Rust file that called the builder.
    pub line: u32,
    /// What cannot be written.
    pub kind: BuildErrorKind,
}

/// What cannot be written as a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildErrorKind {
    /// Not a name.
    #[error("{0:?} is no name: at most 64 letters, digits and _, not beginning with a digit")]
    Name(String),
    /// A name of a parameter or array that is taken.
    #[error("the name {0} is taken")]
    Duplicate(String),
    /// A cap is reached.
    #[error("{0}")]
    TooLarge(String),
    /// A value of another kernel.
    #[error("the value belongs to another kernel")]
    Foreign,
    /// A number that the type does not have.
    #[error("{0} is no {1}")]
    Literal(String, Type),
    /// A vector of a length that does not exist.
    #[error("a vector has 2, 4, 8 or 16 lanes, not {0}")]
    Lanes(usize),
    /// A scalar parameter after the first op: parameters are numbered first.
    #[error("parameters come before the first op")]
    LateParameter,
    /// The kernel was asked for inside a region.
    #[error("a region is still open")]
    OpenRegion,
}

/// A kernel being written: the root region, filled through its [`Builder`].
///
/// Until it is named it is called `kernel`, and its block has one thread.
#[derive(Debug)]
pub struct IRBlock {
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    name: String,
    guest: GuestAddr,
    block: [u32; 3],
    cluster: u32,
    resident: u32,
    params: Vec<Param>,
    shared: Vec<SharedArray>,
    local: Vec<LocalArray>,
    tile: Option<Tile>,
    numbering: Numbering,
    names: HashSet<String>,
    /// The open regions, the body first.
    open: Vec<Frame>,
    /// The line of all ops; without one, an op has that of its call.
    line: Option<Line>,
    error: Option<BuildError>,
}

/// An open region: its ops, and the constants that it already has.
#[derive(Debug, Default)]
struct Frame {
    ops: Vec<Op>,
    constants: HashMap<(Type, u64), Value>,
}

impl IRBlock {
    /// An empty kernel that came from `guest`.
    pub fn new(guest: GuestAddr) -> IRBlock {
        IRBlock {
            state: RefCell::new(State {
                name: "kernel".to_owned(),
                guest,
                block: [1, 1, 1],
                cluster: 1,
                resident: 0,
                params: Vec::new(),
                shared: Vec::new(),
                local: Vec::new(),
                tile: None,
                numbering: Numbering::default(),
                names: HashSet::new(),
                open: vec![Frame::default()],
                line: None,
                error: None,
            }),
        }
    }

    /// What fills it. It may be asked for as often as one likes; all fill the same kernel.
    pub fn builder(&self) -> Builder<'_> {
        Builder { block: self }
    }

    /// Where in the guest the kernel came from.
    pub fn guest_address(&self) -> GuestAddr {
        self.state.borrow().guest
    }

    /// The kernel as written so far. It is not validated yet.
    ///
    /// # Errors
    ///
    /// The first thing that could not be written.
    pub fn kernel(&self) -> Result<Kernel, BuildError> {
        let state = self.state.borrow();
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        let [body] = &state.open[..] else {
            let kind = BuildErrorKind::OpenRegion;
            return Err(BuildError { kernel: state.name.clone(), guest: state.guest, line: 0, kind });
        };
        Ok(Kernel {
            name: state.name.as_str().into(),
            guest: state.guest,
            block: state.block,
            cluster: state.cluster,
            resident: state.resident,
            params: state.params.clone(),
            shared: state.shared.clone(),
            local: state.local.clone(),
            tile: state.tile.clone().map(Box::new),
            values: state.numbering.values.clone(),
            body: Region { ops: body.ops.clone(), ..Region::default() },
            line: Line(0),
        })
    }
}

/// The ops that say which thread runs, each a method of the builder.
macro_rules! ids {
    ($( $(#[doc = $doc:literal])+ $name:ident($($axis:ident)?) = $code:ident $ty:ident; )+) => {$(
        $(#[doc = $doc])+
        #[track_caller]
        pub fn $name(self $(, $axis: Axis)?) -> Val<'b> {
            self.push_one(Op::new(Opcode::$code) $(.with($axis))?, Type::$ty)
        }
    )+};
}

/// Fills an [`IRBlock`].
#[derive(Clone, Copy, Debug)]
pub struct Builder<'b> {
    block: &'b IRBlock,
}

impl<'b> Builder<'b> {
    // --- the kernel's head ---

    /// Names the kernel.
    #[track_caller]
    pub fn name(self, name: &str) -> Self {
        if is_name(name) {
            self.block.state.borrow_mut().name = name.to_owned();
        } else {
            self.fail(BuildErrorKind::Name(name.to_owned()));
        }
        self
    }

    /// Sets the threads of a block along x, y and z.
    pub fn block_size(self, threads: [u32; 3]) -> Self {
        self.block.state.borrow_mut().block = threads;
        self
    }

    /// Makes clusters of `blocks` blocks, neighbours along x: they run at the same time and exchange values by
    /// [`PlaceRef::gather`].
    pub fn cluster_size(self, blocks: u32) -> Self {
        self.block.state.borrow_mut().cluster = blocks;
        self
    }

    /// Asks for registers by which a multiprocessor has room for `blocks` blocks at once; as few as one leave each thread the most.
    /// Not in a tile kernel, whose roles divide the registers of a block.
    pub fn resident_blocks(self, blocks: u32) -> Self {
        self.block.state.borrow_mut().resident = blocks;
        self
    }

    /// Returns whether the kernel is a tile kernel. The regions of its maps have no control flow.
    pub fn is_tile(self) -> bool {
        self.block.state.borrow().tile.is_some()
    }

    /// Says of which line of its source what is written from here on is; by default it is that of the Rust file.
    pub fn at_line(self, line: u32) {
        self.block.state.borrow_mut().line = Some(Line(line));
    }

    /// Adds a parameter for a view of `rank` dimensions of any extent.
    #[track_caller]
    pub fn view(self, name: &str, element: Scalar, rank: usize, access: Access) -> PlaceRef<'b> {
        self.view_of(name, ViewType::new(element, rank, access))
    }

    /// Adds a parameter for a view.
    #[track_caller]
    pub fn view_of(self, name: &str, ty: ViewType) -> PlaceRef<'b> {
        let element = ty.element;
        let index = self.param(name, ParamKind::View(ty));
        PlaceRef::new(self, Place::View(index), element)
    }

    /// Adds a parameter for a number.
    #[track_caller]
    pub fn scalar(self, name: &str, ty: Type) -> Val<'b> {
        self.scalar_param(name, ty, None)
    }

    /// Adds a parameter for an integer from `least` to `greatest`; other launches are refused.
    #[track_caller]
    pub fn scalar_in(self, name: &str, ty: Type, least: i64, greatest: i64) -> Val<'b> {
        self.scalar_param(name, ty, Some((least, greatest)))
    }

    #[track_caller]
    fn scalar_param(self, name: &str, ty: Type, range: Option<(i64, i64)>) -> Val<'b> {
        let early = {
            let state = self.block.state.borrow();
            let scalars = state.params.iter().filter(|p| matches!(p.kind, ParamKind::Scalar { .. })).count();
            state.numbering.values.len() == scalars
        };
        if !early {
            self.fail(BuildErrorKind::LateParameter);
        }
        let value = self.define(ty);
        self.param(name, ParamKind::Scalar { value, range });
        let mut state = self.block.state.borrow_mut();
        if state.names.insert(name.to_owned())
            && let Some(def) = state.numbering.values.get_mut(value.index())
        {
            def.name = Some(name.into());
        }
        drop(state);
        Val::new(self, value)
    }

    #[track_caller]
    fn param(self, name: &str, kind: ParamKind) -> u16 {
        self.new_place_name(name);
        let count = self.block.state.borrow().params.len();
        if count >= MAX_PARAMS {
            self.fail(BuildErrorKind::TooLarge(format!("more than {MAX_PARAMS} parameters")));
            return 0;
        }
        let line = self.line();
        self.block.state.borrow_mut().params.push(Param { name: name.into(), kind, line });
        count as u16
    }

    /// Adds an array that the threads of a block share.
    #[track_caller]
    pub fn shared(self, name: &str, element: Scalar, dims: &[u32]) -> PlaceRef<'b> {
        self.new_place_name(name);
        let count = self.block.state.borrow().shared.len();
        if count >= MAX_SHARED_ARRAYS {
            self.fail(BuildErrorKind::TooLarge(format!("more than {MAX_SHARED_ARRAYS} shared arrays")));
        } else {
            let array = SharedArray { name: name.into(), element, dims: dims.to_vec(), line: self.line() };
            self.block.state.borrow_mut().shared.push(array);
        }
        PlaceRef::new(self, Place::Shared(count.min(MAX_SHARED_ARRAYS - 1) as u16), element)
    }

    /// Adds an array of bytes that each thread has of its own.
    #[track_caller]
    pub fn local(self, name: &str, bytes: u32) -> PlaceRef<'b> {
        self.new_place_name(name);
        let count = self.block.state.borrow().local.len();
        if count >= MAX_SHARED_ARRAYS {
            self.fail(BuildErrorKind::TooLarge(format!("more than {MAX_SHARED_ARRAYS} local arrays")));
        } else {
            let array = LocalArray { name: name.into(), len: bytes, line: self.line() };
            self.block.state.borrow_mut().local.push(array);
        }
        PlaceRef::new(self, Place::Local(count.min(MAX_SHARED_ARRAYS - 1) as u16), Scalar::I8)
    }

    #[track_caller]
    fn new_place_name(self, name: &str) {
        if !is_name(name) {
            self.fail(BuildErrorKind::Name(name.to_owned()));
        }
        let state = self.block.state.borrow();
        let taken = state.params.iter().any(|p| &*p.name == name)
            || state.shared.iter().any(|s| &*s.name == name)
            || state.local.iter().any(|l| &*l.name == name);
        let of_tile = state.tile.iter().any(|tile| {
            let fragments = tile.fragments.iter().map(|f| &f.name);
            tile.channels.iter().map(|c| &c.name).chain(fragments).any(|taken| &**taken == name)
        });
        drop(state);
        if taken || of_tile {
            self.fail(BuildErrorKind::Duplicate(name.to_owned()));
        }
    }

    // --- what everything goes through ---

    #[track_caller]
    fn fail(self, kind: BuildErrorKind) {
        let line = self.line().0;
        let mut state = self.block.state.borrow_mut();
        if state.error.is_none() {
            state.error = Some(BuildError { kernel: state.name.clone(), guest: state.guest, line, kind });
        }
    }

    #[track_caller]
    fn fail_large(self, error: TooLarge) {
        self.fail(BuildErrorKind::TooLarge(error.to_string()));
    }

    fn type_of(self, value: Value) -> Type {
        self.block.state.borrow().numbering.values.get(value.index()).map_or(Type::F32, |def| def.ty)
    }

    #[track_caller]
    fn define(self, ty: Type) -> Value {
        self.define_named(ty, None)
    }

    #[track_caller]
    fn define_named(self, ty: Type, name: Option<Box<str>>) -> Value {
        let defined = self.block.state.borrow_mut().numbering.define(ty, name);
        defined.unwrap_or_else(|error| {
            self.fail_large(error);
            Value(0)
        })
    }

    /// Checks that a value is this kernel's.
    #[track_caller]
    fn own(self, val: Val<'b>) -> Value {
        if !std::ptr::eq(self.block, val.builder().block) {
            self.fail(BuildErrorKind::Foreign);
        }
        val.value()
    }

    /// Adds an op and defines its results.
    #[track_caller]
    fn push(self, mut op: Op, results: &[Type]) -> Vec<Val<'b>> {
        op.results = results.iter().map(|ty| self.define(*ty)).collect();
        let vals = op.results.iter().map(|v| Val::new(self, *v)).collect();
        self.push_op(op);
        vals
    }

    /// Adds an op whose results are defined.
    #[track_caller]
    fn push_op(self, mut op: Op) {
        op.line = self.line();
        let counted = self.block.state.borrow_mut().numbering.count_op();
        if let Err(error) = counted {
            self.fail_large(error);
        }
        if let Some(frame) = self.block.state.borrow_mut().open.last_mut() {
            frame.ops.push(op);
        }
    }

    /// Could something not be written?
    pub fn failed(self) -> bool {
        self.block.state.borrow().error.is_some()
    }

    /// The line of what is written now.
    #[track_caller]
    fn line(self) -> Line {
        match self.block.state.borrow().line {
            Some(line) => line,
            None => Line(Location::caller().line()),
        }
    }

    #[track_caller]
    pub(crate) fn emit(self, code: Opcode, operands: &[Val<'b>], ty: Type) -> Val<'b> {
        let mut op = Op::new(code);
        op.operands = operands.iter().map(|v| self.own(*v)).collect();
        self.push_one(op, ty)
    }

    #[track_caller]
    pub(crate) fn push_one(self, op: Op, ty: Type) -> Val<'b> {
        match self.push(op, &[ty]).first() {
            Some(val) => *val,
            None => Val::new(self, Value(0)),
        }
    }

    /// Runs `fill` with a new open region and closes it.
    #[track_caller]
    fn in_region<T>(self, args: Vec<Value>, fill: impl FnOnce() -> T) -> (Region, T) {
        let (depth, most) = {
            let mut state = self.block.state.borrow_mut();
            state.open.push(Frame::default());
            (state.open.len(), state.numbering.caps.depth)
        };
        if depth > most {
            self.fail(BuildErrorKind::TooLarge(format!("regions are nested more than {most} deep")));
        }
        let result = fill();
        let frame = self.block.state.borrow_mut().open.pop().unwrap_or_default();
        (Region { args, ops: frame.ops, yields: Vec::new(), yield_line: self.line() }, result)
    }

    // --- constants and ids ---

    /// A constant of these bits, in every lane of `ty`.
    #[track_caller]
    pub fn bits(self, ty: Type, bits: u64) -> Val<'b> {
        let bits = bits & ty.scalar().mask();
        let known = self.block.state.borrow().open.iter().find_map(|f| f.constants.get(&(ty, bits)).copied());
        if let Some(value) = known {
            return Val::new(self, value);
        }
        let mut op = Op::new(Opcode::Const);
        op.immediates = vec![bits];
        let val = self.push_one(op, ty);
        self.know_constant(val.value(), bits);
        val
    }

    /// Takes the value for these bits from here on to the end of the region.
    fn know_constant(self, value: Value, bits: u64) {
        let ty = self.type_of(value);
        if let Some(frame) = self.block.state.borrow_mut().open.last_mut() {
            frame.constants.entry((ty, bits)).or_insert(value);
        }
    }

    /// A constant of type `ty`.
    #[track_caller]
    pub fn constant(self, ty: Type, literal: impl IntoVal<'b>) -> Val<'b> {
        literal.into_val(self, ty)
    }

    /// An `f32` constant.
    #[track_caller]
    pub fn f32(self, value: f32) -> Val<'b> {
        self.bits(Type::F32, u64::from(value.to_bits()))
    }

    /// An `i32` constant.
    #[track_caller]
    pub fn i32(self, value: i32) -> Val<'b> {
        self.bits(Type::I32, value as u64)
    }

    /// An `i64` constant.
    #[track_caller]
    pub fn i64(self, value: i64) -> Val<'b> {
        self.bits(Type::I64, value as u64)
    }

    /// A `bool` constant.
    #[track_caller]
    pub fn bool(self, value: bool) -> Val<'b> {
        self.bits(Type::BOOL, u64::from(value))
    }

    ids! {
        /// The thread's number in its block.
        thread_id(axis) = ThreadId I32;
        /// The block's number in the grid.
        block_id(axis) = BlockId I32;
        /// Threads of a block.
        block_dim(axis) = BlockDim I32;
        /// Blocks of the grid.
        grid_dim(axis) = GridDim I32;
        /// The thread's number in the grid.
        global_id(axis) = GlobalId I64;
        /// The thread's number in its block through all axes.
        local_index() = LocalIndex I32;
        /// The thread's place in its warp.
        lane_id() = LaneId I32;
        /// The warp's number in the block.
        warp_id() = WarpId I32;
        /// The block's number in its cluster.
        cluster_rank() = ClusterRank I32;
        /// The cluster's number along x.
        cluster_id() = ClusterId I32;
        /// The device's cycle counter; only in trusted modules.
        clock() = Clock I64;
    }

    // --- threads together ---

    /// Waits for all threads of the block.
    #[track_caller]
    pub fn barrier(self) {
        self.barrier_of(BarrierScope::Block);
    }

    /// Waits for all threads of the block or of the warp.
    #[track_caller]
    pub fn barrier_of(self, scope: BarrierScope) {
        self.push(Op::new(Opcode::Barrier).with(scope), &[]);
    }

    /// Orders this thread's accesses.
    #[track_caller]
    pub fn fence(self, order: Order, scope: Scope) {
        self.push(Op::new(Opcode::Fence).with(order).with(scope), &[]);
    }

    /// A vector of these scalars.
    #[track_caller]
    pub fn vector(self, lanes: &[Val<'b>]) -> Val<'b> {
        let scalar = lanes.first().map_or(Scalar::F32, |v| v.ty().scalar());
        let ty = u8::try_from(lanes.len()).ok().and_then(|n| Type::vector(scalar, n));
        if ty.is_none() {
            self.fail(BuildErrorKind::Lanes(lanes.len()));
        }
        self.emit(Opcode::Make, lanes, ty.unwrap_or(Type::F32))
    }
}
