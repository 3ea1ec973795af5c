//! The op table: one row for each op. The parser, the printer, the binary form, the validator and
//! `docs/ir.md` all read it. A new op is one row here and its meaning in [`crate::semantics`] (or, for an op
//! on memory, threads or regions, in [`crate::interp`]).

mod attr;
mod behaviour;
pub(crate) mod nearest;
mod shape;

pub use attr::{Accuracy, AttrKind, Attribute, Axis, BarrierScope, Cache, Left, Order, Right, Scope, Turn};
pub use behaviour::{Behaviour, Convergence, Effect, Varies};
pub use shape::{PlaceRule, Shape, Width};

use crate::types::Class;
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

/// The section of the op table that an op stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::VariantArray)]
pub enum Group {
    /// Constants and vectors.
    Values,
    /// Arithmetic.
    Arithmetic,
    /// Bits.
    Bits,
    /// Comparison and choice.
    Compare,
    /// Conversion.
    Convert,
    /// Mathematical functions.
    Math,
    /// Where a thread is.
    Ids,
    /// Memory.
    Memory,
    /// Atomics.
    Atomics,
    /// The threads of a warp and of a block together.
    Threads,
    /// Tiles of matrices.
    Tiles,
    /// Control flow.
    Control,
    /// Only in trusted modules.
    Trusted,
}

impl Group {
    /// Every group, in the table's order.
    pub const ALL: &[Group] = <Group as strum::VariantArray>::VARIANTS;

    /// Its heading in documents.
    pub const fn title(self) -> &'static str {
        match self {
            Group::Values => "Constants and vectors",
            Group::Arithmetic => "Arithmetic",
            Group::Bits => "Bits",
            Group::Compare => "Comparison and choice",
            Group::Convert => "Conversion",
            Group::Math => "Mathematical functions",
            Group::Ids => "Where a thread is",
            Group::Memory => "Memory",
            Group::Atomics => "Atomics",
            Group::Threads => "Threads together",
            Group::Tiles => "Tiles",
            Group::Control => "Control flow",
            Group::Trusted => "Trusted modules only",
        }
    }
}

/// How far a float op may be from the exact result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorBound {
    /// Of the precise class: units in the last place of the result's type; 0 is correctly rounded.
    pub precise_ulps: u32,
    /// Of the fast class: the relative error is at most 2 to the minus this.
    pub fast_bits: u32,
}

/// A row of the op table.
#[derive(Clone, Copy, Debug)]
pub struct OpInfo {
    /// The op.
    pub opcode: Opcode,
    /// Its code in the binary form. A code is never given to another op.
    pub code: u16,
    /// Its name in text.
    pub mnemonic: &'static str,
    /// Its section.
    pub group: Group,
    /// Its operands and results.
    pub shape: Shape,
    /// What it does beside its result, with what that varies, and which threads must reach it together.
    pub behaviour: Behaviour,
    /// Its attributes, in the order of the text.
    pub attrs: &'static [AttrKind],
    /// Its error bound where it has an accuracy class.
    pub error: Option<ErrorBound>,
    /// What it does.
    pub doc: &'static str,
}

macro_rules! ops {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident $code:literal $mnemonic:literal $group:ident $shape:expr, $behaviour:ident
        $(, [$($attr:ident),+])? $(, error $ulps:literal $bits:literal)? ;
    )+) => {
        /// An op. Its row is [`Opcode::info`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Opcode {
            $( $(#[doc = $doc])+ $name, )+
        }

        /// The op table.
        pub const TABLE: &[OpInfo] = &[$(
            OpInfo {
                opcode: Opcode::$name,
                code: $code,
                mnemonic: $mnemonic,
                group: Group::$group,
                shape: $shape,
                behaviour: behaviour::$behaviour,
                attrs: &[$($(AttrKind::$attr),+)?],
                error: ops!(@error $($ulps $bits)?),
                doc: concat!($($doc),+),
            },
        )+];
    };
    (@error) => { None };
    (@error $ulps:literal $bits:literal) => {
        Some(ErrorBound { precise_ulps: $ulps, fast_bits: $bits })
    };
}

ops! {
    /// The immediate, in every lane.
    Const 0x01 "const" Values Shape::Const, PURE;
    /// A vector with the scalar in every lane.
    Splat 0x02 "vec.splat" Values Shape::Splat, PURE;
    /// A vector of the scalars, lane 0 first.
    Make 0x03 "vec.make" Values Shape::Make, PURE;
    /// One lane of the vector.
    Extract 0x04 "vec.extract" Values Shape::Extract, PURE;
    /// The vector with one lane replaced.
    Insert 0x05 "vec.insert" Values Shape::Insert, PURE;

    /// a + b. Integers wrap.
    Add 0x10 "add" Arithmetic Shape::Binary(Class::ARITH), PURE;
    /// a − b. Integers wrap.
    Sub 0x11 "sub" Arithmetic Shape::Binary(Class::ARITH), PURE;
    /// a · b. Integers wrap.
    Mul 0x12 "mul" Arithmetic Shape::Binary(Class::ARITH), PURE;
    /// a / b of floats.
    Div 0x13 "div" Arithmetic Shape::Binary(Class::FLOAT), PURE, [Accuracy], error 0 20;
    /// a · b + c of floats, rounded once.
    Fma 0x14 "fma" Arithmetic Shape::Ternary(Class::FLOAT), PURE;
    /// −a. Integers wrap; a float's sign bit flips, also a NaN's.
    Neg 0x15 "neg" Arithmetic Shape::Unary(Class::ARITH), PURE;
    /// The magnitude of a float: its sign bit is cleared, also a NaN's.
    Abs 0x16 "abs" Arithmetic Shape::Unary(Class::FLOAT), PURE;
    /// The magnitude of a signed integer; that of the least one is itself.
    AbsS 0x17 "abs.s" Arithmetic Shape::Unary(Class::INT), PURE;
    /// The lesser float; a number wins over a NaN, and −0 is less than +0 (IEEE 754 minimumNumber).
    Min 0x18 "min" Arithmetic Shape::Binary(Class::FLOAT), PURE;
    /// The greater float; a number wins over a NaN, and −0 is less than +0 (IEEE 754 maximumNumber).
    Max 0x19 "max" Arithmetic Shape::Binary(Class::FLOAT), PURE;
    /// The lesser float, or NaN if either is one (IEEE 754 minimum).
    Minimum 0x1a "minimum" Arithmetic Shape::Binary(Class::FLOAT), PURE;
    /// The greater float, or NaN if either is one (IEEE 754 maximum).
    Maximum 0x1b "maximum" Arithmetic Shape::Binary(Class::FLOAT), PURE;
    /// The lesser signed integer.
    MinS 0x1c "min.s" Arithmetic Shape::Binary(Class::INT), PURE;
    /// The greater signed integer.
    MaxS 0x1d "max.s" Arithmetic Shape::Binary(Class::INT), PURE;
    /// The lesser unsigned integer.
    MinU 0x1e "min.u" Arithmetic Shape::Binary(Class::INT), PURE;
    /// The greater unsigned integer.
    MaxU 0x1f "max.u" Arithmetic Shape::Binary(Class::INT), PURE;
    /// a / b, signed, towards zero. By zero it gives 0; the least integer by −1 gives itself.
    DivS 0x20 "div.s" Arithmetic Shape::Binary(Class::INT), PURE;
    /// a / b, unsigned. By zero it gives 0.
    DivU 0x21 "div.u" Arithmetic Shape::Binary(Class::INT), PURE;
    /// a − (a / b) · b, signed; it has a's sign. By zero it gives a; by −1 it gives 0.
    RemS 0x22 "rem.s" Arithmetic Shape::Binary(Class::INT), PURE;
    /// a − (a / b) · b, unsigned. By zero it gives a.
    RemU 0x23 "rem.u" Arithmetic Shape::Binary(Class::INT), PURE;
    /// The upper half of the signed product, which is twice as wide.
    MulHiS 0x24 "mulhi.s" Arithmetic Shape::Binary(Class::INT), PURE;
    /// The upper half of the unsigned product, which is twice as wide.
    MulHiU 0x25 "mulhi.u" Arithmetic Shape::Binary(Class::INT), PURE;

    /// Bitwise and.
    And 0x30 "and" Bits Shape::Binary(Class::BITS), PURE;
    /// Bitwise or.
    Or 0x31 "or" Bits Shape::Binary(Class::BITS), PURE;
    /// Bitwise exclusive or.
    Xor 0x32 "xor" Bits Shape::Binary(Class::BITS), PURE;
    /// Every bit flipped.
    Not 0x33 "not" Bits Shape::Unary(Class::BITS), PURE;
    /// a shifted left; b counts modulo the width.
    Shl 0x34 "shl" Bits Shape::Binary(Class::INT), PURE;
    /// a shifted right with copies of its top bit; b counts modulo the width.
    ShrS 0x35 "shr.s" Bits Shape::Binary(Class::INT), PURE;
    /// a shifted right with zeros; b counts modulo the width.
    ShrU 0x36 "shr.u" Bits Shape::Binary(Class::INT), PURE;
    /// a rotated left; b counts modulo the width.
    Rotl 0x37 "rotl" Bits Shape::Binary(Class::INT), PURE;
    /// Number of zero bits above the highest one; the width for 0.
    Clz 0x38 "clz" Bits Shape::Unary(Class::INT), PURE;
    /// Number of zero bits below the lowest one; the width for 0.
    Ctz 0x39 "ctz" Bits Shape::Unary(Class::INT), PURE;
    /// Number of one bits.
    Popcount 0x3a "popcount" Bits Shape::Unary(Class::INT), PURE;
    /// The bits in reverse.
    BitReverse 0x3b "bitreverse" Bits Shape::Unary(Class::INT), PURE;

    /// a = b. Floats: false if either is NaN; −0 equals +0.
    Eq 0x40 "eq" Compare Shape::Compare(Class::DATA), PURE;
    /// a ≠ b. Floats: true if either is NaN.
    Ne 0x41 "ne" Compare Shape::Compare(Class::DATA), PURE;
    /// a < b of floats; false if either is NaN.
    Lt 0x42 "lt" Compare Shape::Compare(Class::FLOAT), PURE;
    /// a ≤ b of floats; false if either is NaN.
    Le 0x43 "le" Compare Shape::Compare(Class::FLOAT), PURE;
    /// a > b of floats; false if either is NaN.
    Gt 0x44 "gt" Compare Shape::Compare(Class::FLOAT), PURE;
    /// a ≥ b of floats; false if either is NaN.
    Ge 0x45 "ge" Compare Shape::Compare(Class::FLOAT), PURE;
    /// a < b, signed.
    LtS 0x46 "lt.s" Compare Shape::Compare(Class::INT), PURE;
    /// a ≤ b, signed.
    LeS 0x47 "le.s" Compare Shape::Compare(Class::INT), PURE;
    /// a > b, signed.
    GtS 0x48 "gt.s" Compare Shape::Compare(Class::INT), PURE;
    /// a ≥ b, signed.
    GeS 0x49 "ge.s" Compare Shape::Compare(Class::INT), PURE;
    /// a < b, unsigned.
    LtU 0x4a "lt.u" Compare Shape::Compare(Class::INT), PURE;
    /// a ≤ b, unsigned.
    LeU 0x4b "le.u" Compare Shape::Compare(Class::INT), PURE;
    /// a > b, unsigned.
    GtU 0x4c "gt.u" Compare Shape::Compare(Class::INT), PURE;
    /// a ≥ b, unsigned.
    GeU 0x4d "ge.u" Compare Shape::Compare(Class::INT), PURE;
    /// b where a is true, else c. One bool chooses whole vectors, a vector of bools lane by lane.
    Select 0x4e "select" Compare Shape::Select, PURE;

    /// The integer in more bits, filled with copies of its top bit.
    Sext 0x50 "sext" Convert Shape::Convert(Class::INT, Class::INT, Width::Wider), PURE;
    /// The integer or bool in more bits, filled with zeros.
    Zext 0x51 "zext" Convert Shape::Convert(Class::BITS, Class::INT, Width::Wider), PURE;
    /// The integer's low bits.
    Trunc 0x52 "trunc" Convert Shape::Convert(Class::INT, Class::INT, Width::Narrower), PURE;
    /// The float in another format, to nearest even. Too large: infinity, but the largest finite value in fp8.
    FpConv 0x53 "fpconv" Convert Shape::Convert(Class::ANY_FLOAT, Class::ANY_FLOAT, Width::Any), PURE;
    /// The signed integer as a float, to nearest even.
    SiToFp 0x54 "sitofp" Convert Shape::Convert(Class::INT, Class::FLOAT, Width::Any), PURE;
    /// The unsigned integer as a float, to nearest even.
    UiToFp 0x55 "uitofp" Convert Shape::Convert(Class::INT, Class::FLOAT, Width::Any), PURE;
    /// The float as a signed integer, towards zero; out of range: the nearest integer; NaN: 0.
    FpToSi 0x56 "fptosi" Convert Shape::Convert(Class::FLOAT, Class::INT, Width::Any), PURE;
    /// The float as an unsigned integer, towards zero; out of range: the nearest integer; NaN: 0.
    FpToUi 0x57 "fptoui" Convert Shape::Convert(Class::FLOAT, Class::INT, Width::Any), PURE;
    /// The same bits as another type; lane 0 is the lowest.
    Bitcast 0x58 "bitcast" Convert Shape::Bitcast, PURE;

    /// √a.
    Sqrt 0x60 "sqrt" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 0 20;
    /// 1 / √a.
    Rsqrt 0x61 "rsqrt" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 20;
    /// 1 / a.
    Rcp 0x62 "rcp" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 0 20;
    /// e to the a. The fast class: relative error times max(1, |a|).
    Exp 0x63 "exp" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 20;
    /// 2 to the a.
    Exp2 0x64 "exp2" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 20;
    /// The natural logarithm. The fast class: absolute error between 0.5 and 2.
    Log 0x65 "log" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 20;
    /// The logarithm to base 2. The fast class: absolute error between 0.5 and 2.
    Log2 0x66 "log2" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 20;
    /// The sine of a in radians. The fast class: absolute error, for |a| ≤ π.
    Sin 0x67 "sin" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 20;
    /// The cosine of a in radians. The fast class: absolute error, for |a| ≤ π.
    Cos 0x68 "cos" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 20;
    /// The hyperbolic tangent. The fast class: 2^-10 relative.
    Tanh 0x69 "tanh" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 2 10;
    /// The error function.
    Erf 0x6a "erf" Math Shape::Unary(Class::FLOAT), PURE, [Accuracy], error 4 20;
    /// a to the b, as C's pow. The fast class: exp2(b · log2 a), for a > 0.
    Pow 0x6b "pow" Math Shape::Binary(Class::FLOAT), PURE, [Accuracy], error 16 16;
    /// The next integer below or at a.
    Floor 0x6c "floor" Math Shape::Unary(Class::FLOAT), PURE;
    /// The next integer above or at a.
    Ceil 0x6d "ceil" Math Shape::Unary(Class::FLOAT), PURE;
    /// The nearest integer; a tie goes to the even one.
    Round 0x6e "round" Math Shape::Unary(Class::FLOAT), PURE;
    /// The next integer towards zero.
    Fix 0x6f "fix" Math Shape::Unary(Class::FLOAT), PURE;

    /// The thread's number in its block along an axis; below the block's size.
    ThreadId 0x80 "thread_id" Ids Shape::Id32, OF_THREAD, [Axis];
    /// The block's number in the grid along an axis; below the grid's size.
    BlockId 0x81 "block_id" Ids Shape::Id32, OF_BLOCK, [Axis];
    /// Threads of a block along an axis: the kernel's constant.
    BlockDim 0x82 "block_dim" Ids Shape::Id32, OF_BLOCK, [Axis];
    /// Blocks of the grid along an axis.
    GridDim 0x83 "grid_dim" Ids Shape::Id32, OF_BLOCK, [Axis];
    /// block_id · block_dim + thread_id along an axis; never overflows.
    GlobalId 0x84 "global_id" Ids Shape::Id64, OF_THREAD, [Axis];
    /// The thread's number in its block counted through x, then y, then z.
    LocalIndex 0x85 "local_index" Ids Shape::Id32, OF_THREAD;
    /// local_index modulo 32: the thread's place in its warp.
    LaneId 0x86 "lane_id" Ids Shape::Id32, OF_THREAD;
    /// local_index divided by 32: the warp's number in the block.
    WarpId 0x87 "warp_id" Ids Shape::Id32, OF_WARP;
    /// The block's number in its cluster; below the cluster's size.
    ClusterRank 0x88 "cluster_rank" Ids Shape::Id32, OF_BLOCK;
    /// The cluster's number along x: block_id.x divided by the cluster's size.
    ClusterId 0x89 "cluster_id" Ids Shape::Id32, OF_BLOCK;

    /// The view's extent in one dimension, in elements.
    Extent 0x90 "extent" Memory Shape::Extent, OF_BLOCK;
    /// The element at the indices, or as many in a row as T has lanes; of i8, also another T made of bytes.
    Load 0x91 "load" Memory Shape::Load, LOAD, [Cache];
    /// Puts a value at the indices, or a vector's lanes in a row; in i8, also the bytes of another T.
    Store 0x92 "store" Memory Shape::Store, STORE, [Cache];
    /// A block barrier, a load from shared memory by indices alike in all threads, and a block barrier: all threads get one value.
    LoadUniform 0x93 "load_uniform" Memory Shape::LoadUniform, BROADCAST;

    /// Loads atomically.
    AtomicLoad 0xa0 "atomic.load" Atomics Shape::AtomicLoad, ATOMIC_LOAD, [Order, Scope];
    /// Stores atomically.
    AtomicStore 0xa1 "atomic.store" Atomics Shape::AtomicStore, STORE, [Order, Scope];
    /// Adds; gives the old value. The order in which floats are added is not fixed.
    AtomicAdd 0xa2 "atomic.add" Atomics Shape::AtomicRmw(Class::WORD_ARITH), ATOMIC, [Order, Scope];
    /// Keeps the lesser signed integer; gives the old value.
    AtomicMinS 0xa3 "atomic.min.s" Atomics Shape::AtomicRmw(Class::WORD), ATOMIC, [Order, Scope];
    /// Keeps the greater signed integer; gives the old value.
    AtomicMaxS 0xa4 "atomic.max.s" Atomics Shape::AtomicRmw(Class::WORD), ATOMIC, [Order, Scope];
    /// Keeps the lesser unsigned integer; gives the old value.
    AtomicMinU 0xa5 "atomic.min.u" Atomics Shape::AtomicRmw(Class::WORD), ATOMIC, [Order, Scope];
    /// Keeps the greater unsigned integer; gives the old value.
    AtomicMaxU 0xa6 "atomic.max.u" Atomics Shape::AtomicRmw(Class::WORD), ATOMIC, [Order, Scope];
    /// Bitwise and; gives the old value.
    AtomicAnd 0xa7 "atomic.and" Atomics Shape::AtomicRmw(Class::WORD), ATOMIC, [Order, Scope];
    /// Bitwise or; gives the old value.
    AtomicOr 0xa8 "atomic.or" Atomics Shape::AtomicRmw(Class::WORD), ATOMIC, [Order, Scope];
    /// Bitwise exclusive or; gives the old value.
    AtomicXor 0xa9 "atomic.xor" Atomics Shape::AtomicRmw(Class::WORD), ATOMIC, [Order, Scope];
    /// Replaces; gives the old value.
    AtomicExchange 0xaa "atomic.exchange" Atomics Shape::AtomicRmw(Class::WORD_ARITH), ATOMIC, [Order, Scope];
    /// Replaces a by b if it is there; gives the old value.
    AtomicCas 0xab "atomic.cas" Atomics Shape::AtomicCas, ATOMIC, [Order, Scope];
    /// Orders this thread's earlier accesses before its later ones, for the threads in scope.
    Fence 0xac "fence" Atomics Shape::Sync, FENCE, [Order, Scope];

    /// The value of the thread whose lane is b modulo 32.
    Shuffle 0xb0 "shuffle" Threads Shape::Shuffle, SHUFFLE;
    /// The value of the thread whose lane is this one's xor b, modulo 32.
    ShuffleXor 0xb1 "shuffle.xor" Threads Shape::Shuffle, SHUFFLE;
    /// The value of the thread b lanes below; one's own if there is none. b counts modulo 32.
    ShuffleUp 0xb2 "shuffle.up" Threads Shape::Shuffle, SHUFFLE;
    /// The value of the thread b lanes above; one's own if there is none. b counts modulo 32.
    ShuffleDown 0xb3 "shuffle.down" Threads Shape::Shuffle, SHUFFLE;
    /// True if it is true in any thread of the warp.
    VoteAny 0xb4 "vote.any" Threads Shape::Vote, REDUCE;
    /// True if it is true in every thread of the warp.
    VoteAll 0xb5 "vote.all" Threads Shape::Vote, REDUCE;
    /// A bit for each thread of the warp, lane 0 lowest.
    Ballot 0xb6 "ballot" Threads Shape::Ballot, REDUCE;
    /// The warp's sum: each lane adds that of lane xor 16, then 8, 4, 2, 1.
    WarpAdd 0xb8 "warp.add" Threads Shape::Reduce(Class::ARITH), REDUCE;
    /// The warp's least float, as min.
    WarpMin 0xb9 "warp.min" Threads Shape::Reduce(Class::FLOAT), REDUCE;
    /// The warp's greatest float, as max.
    WarpMax 0xba "warp.max" Threads Shape::Reduce(Class::FLOAT), REDUCE;
    /// The warp's least signed integer.
    WarpMinS 0xbb "warp.min.s" Threads Shape::Reduce(Class::INT), REDUCE;
    /// The warp's greatest signed integer.
    WarpMaxS 0xbc "warp.max.s" Threads Shape::Reduce(Class::INT), REDUCE;
    /// The warp's least unsigned integer.
    WarpMinU 0xbd "warp.min.u" Threads Shape::Reduce(Class::INT), REDUCE;
    /// The warp's greatest unsigned integer.
    WarpMaxU 0xbe "warp.max.u" Threads Shape::Reduce(Class::INT), REDUCE;
    /// The warp's bitwise and.
    WarpAnd 0xbf "warp.and" Threads Shape::Reduce(Class::BITS), REDUCE;
    /// The warp's bitwise or.
    WarpOr 0xc0 "warp.or" Threads Shape::Reduce(Class::BITS), REDUCE;
    /// The warp's bitwise exclusive or.
    WarpXor 0xc1 "warp.xor" Threads Shape::Reduce(Class::BITS), REDUCE;
    /// Waits until all threads in scope are here; what each did before is seen by all after.
    Barrier 0xc2 "barrier" Threads Shape::Sync, BARRIER, [BarrierScope];
    /// Puts what each warp of the cluster has into the array of every block, in the order of blocks and warps, and waits until all threads of the cluster are here. A barrier of each block; of memory, it orders no more between blocks than the arrays.
    ClusterGather 0xc3 "cluster.gather" Threads Shape::Gather, BROADCAST;

    /// Runs the first region if the bool is true, else the second.
    If 0xd0 "if" Control Shape::If, REGIONS;
    /// Counts from the lower bound up to, not including, the upper one. A step below 1 runs nothing; the count never overflows.
    For 0xd1 "for" Control Shape::For, REGIONS;
    /// Runs the condition; while it yields true, runs the body, which yields the next carried values.
    While 0xd2 "while" Control Shape::While, REGIONS;
    /// Runs the region whose case equals the integer, else the default.
    Switch 0xd3 "switch" Control Shape::Switch, REGIONS;
    /// Counts from 0 up to the blocks of the cluster, by 1. What it means is what `for` means; but each block may run the iteration of its rank alone, since only products are added up there, and `share` alone looks at their sums.
    ForCluster 0xd4 "for.cluster" Control Shape::For, REGIONS;

    /// Brings a box of the view's last two dimensions, which begins at the indices, into the next stage of the channel. Its column is rounded down to a multiple of 16 bytes. What is out of bounds is zero. A channel of tf32 takes a view of f32, and rounds to the nearest.
    Fetch 0x400 "fetch" Tiles Shape::Fetch, TILE;
    /// Gives the oldest stage of the channel back.
    Release 0x401 "release" Tiles Shape::Release, TILE;
    /// Sets every element.
    Fill 0x402 "fill" Tiles Shape::Fill, TILE;
    /// Adds the product a · b, of a fragment or the newest stage of a channel and the newest stage of another, each transposed where that is said. Products are exact, but those of f32, which may be off by 2^-21; the order and the rounding of sums are the device's. Sums of i8 wrap.
    Mma 0x403 "mma" Tiles Shape::Mma, TILE, [Left, Right];
    /// The same, in the place of what was there.
    Product 0x409 "product" Tiles Shape::Mma, TILE, [Left, Right];
    /// Computes each element of the first N fragments: the region is given its row, its column and the elements of the other fragments there, of a column the one of that row, of a row the one of that column; all are read before any is written.
    Map 0x404 "map" Tiles Shape::Map, TILE;
    /// Adds the elements of each row to the column's.
    RowAdd 0x405 "row.add" Tiles Shape::Rows, TILE;
    /// Keeps the greatest of each row and the column's, as max.
    RowMax 0x406 "row.max" Tiles Shape::Rows, TILE;
    /// Keeps the least of each row and the column's, as min.
    RowMin 0x407 "row.min" Tiles Shape::Rows, TILE;
    /// Copies the block's share of the columns of the second fragment: of 1/N of them for each of N blocks of a cluster those of its rank, or all if the fragments have as many. This is where sums of `for.cluster` come together, those of each iteration added up in order.
    Share 0x40e "share" Tiles Shape::Share, TILE;
    /// Stores the fragment into a box of the view's last two dimensions, which begins at the indices. Its column is rounded down to a multiple of 16 bytes. What is out of bounds is left out, and all of a box that begins at a negative index. A column or a row is along the last dimension, from any index.
    Put 0x408 "put" Tiles Shape::Put, TILE, [Turn];
    /// The same, adding to what is there: each element atomically, relaxed, in no fixed order.
    PutAdd 0x40c "put.add" Tiles Shape::Put, TILE, [Turn];
    /// As put, with the first N rows of the fragment alone, of a column its first N elements; N is signed, and none are below 1.
    PutRows 0x40d "put.rows" Tiles Shape::PutRows, TILE;
    /// Loads a box of the view's last two dimensions, which begins at the indices, into the fragment. Its column is rounded down to a multiple of 16 bytes. A column or a row is along the last dimension, from any index. What is out of bounds is zero.
    Get 0x40a "get" Tiles Shape::Get, TILE;
    /// Copies the fragment into the next stage of the channel.
    Send 0x40b "send" Tiles Shape::Send, TILE;

    /// The device's cycle counter: any value, never falling within a thread. A clock lets one tenant watch another.
    Clock 0x800 "clock" Trusted Shape::Id64, VOLATILE;
}

impl Opcode {
    /// The op's row.
    pub const fn info(self) -> &'static OpInfo {
        &TABLE[self as usize]
    }

    /// Its name in text.
    pub const fn mnemonic(self) -> &'static str {
        self.info().mnemonic
    }

    /// Its operands and results.
    pub const fn shape(self) -> Shape {
        self.info().shape
    }

    /// The op with this name.
    pub fn from_mnemonic(mnemonic: &str) -> Option<Opcode> {
        static NAMES: OnceLock<HashMap<&'static str, Opcode>> = OnceLock::new();
        NAMES
            .get_or_init(|| TABLE.iter().map(|row| (row.mnemonic, row.opcode)).collect())
            .get(mnemonic)
            .copied()
    }

    /// The op with this binary code.
    pub fn from_code(code: u16) -> Option<Opcode> {
        static CODES: OnceLock<HashMap<u16, Opcode>> = OnceLock::new();
        CODES.get_or_init(|| TABLE.iter().map(|row| (row.code, row.opcode)).collect()).get(&code).copied()
    }

    /// May only trusted modules use it?
    pub fn trusted_only(self) -> bool {
        self.info().group == Group::Trusted
    }

    /// The op on two values that it combines with: what all lanes of a warp have, or what memory holds and what is given.
    /// `None` for an op that combines nothing.
    pub const fn combines(self) -> Option<Opcode> {
        use Opcode::*;
        Some(match self {
            WarpAdd | AtomicAdd => Add,
            WarpMin => Min,
            WarpMax => Max,
            WarpMinS | AtomicMinS => MinS,
            WarpMaxS | AtomicMaxS => MaxS,
            WarpMinU | AtomicMinU => MinU,
            WarpMaxU | AtomicMaxU => MaxU,
            WarpAnd | AtomicAnd => And,
            WarpOr | AtomicOr => Or,
            WarpXor | AtomicXor => Xor,
            _ => return None,
        })
    }

    /// What it does beside giving a result.
    pub const fn effect(self) -> Effect {
        self.info().behaviour.effect
    }

    /// With what its result varies.
    pub const fn varies(self) -> Varies {
        self.info().behaviour.varies
    }

    /// Which threads must reach it together.
    pub const fn convergence(self) -> Convergence {
        self.info().behaviour.convergence
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.mnemonic())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn reductions_and_atomics_combine() {
        for row in TABLE {
            let named = row.opcode.combines().map(|code| code.mnemonic());
            let behind = ["warp.", "atomic."].iter().find_map(|kind| row.mnemonic.strip_prefix(kind));
            let combines = match row.shape {
                Shape::Reduce(_) => true,
                Shape::AtomicRmw(_) => row.opcode != Opcode::AtomicExchange,
                _ => false,
            };
            assert_eq!(named, behind.filter(|_| combines), "{}", row.mnemonic);
        }
    }

    #[test]
    fn rows_are_in_order_and_distinct() {
        let (mut codes, mut names) = (HashSet::new(), HashSet::new());
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.opcode as usize, index);
            assert!(codes.insert(row.code), "{} reuses a code", row.mnemonic);
            assert!(names.insert(row.mnemonic), "{} reuses a name", row.mnemonic);
            assert_eq!(Opcode::from_code(row.code), Some(row.opcode));
            assert_eq!(Opcode::from_mnemonic(row.mnemonic), Some(row.opcode));
            assert!(row.attrs.len() <= 2);
            assert_eq!(row.error.is_some(), row.attrs.contains(&AttrKind::Accuracy), "{}", row.mnemonic);
            assert!(row.doc.trim_start().ends_with('.'), "{}", row.mnemonic);
            assert_eq!(row.code >= 0x800, row.opcode.trusted_only());
        }
    }

    #[test]
    fn no_name_reads_as_another_with_attributes() {
        for row in TABLE {
            for other in TABLE {
                if let Some(rest) =
                    row.mnemonic.strip_prefix(other.mnemonic).and_then(|r| r.strip_prefix('.'))
                {
                    let first = rest.split('.').next().unwrap_or(rest);
                    for kind in other.attrs {
                        assert!(!kind.words().contains(&first), "{} and {}", row.mnemonic, other.mnemonic);
                    }
                }
            }
        }
    }
}
