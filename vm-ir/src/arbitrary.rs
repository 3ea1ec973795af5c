//! Random valid kernels with a launch, for running one kernel in two ways and comparing.
//!
//! The same seed gives the same kernel everywhere. A kernel has one result: it has no races, its atomics
//! commute and what they return is not used, and no op shows which NaN a NaN is. Ops that are not correctly
//! rounded are left out unless asked for. Indices are often out of bounds, so it is a guest's module.

mod rows;
mod tile;

pub use rows::{RowShapes, row_kernel};
pub use tile::{TileShapes, tile_kernel};

use crate::builder::{Builder, IRBlock, PlaceRef, Val};
use crate::format::from_f64;
use crate::interp::{Argument, Launch, Tensor};
use crate::limits::MAX_ACCESS_BYTES;
use crate::module::{GuestAddr, Module};
use crate::op::{Axis, Opcode, Shape, TABLE, Width};
use crate::types::{Class, Scalar, Type};
use crate::view::{Access, Dim, ViewType};

/// What kernels to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Statements, roughly; each becomes one op or a few.
    pub statements: u32,
    /// Also ops whose precise class is not correctly rounded. Results then differ between backends by more
    /// than any bound, since small differences are compared and branched on.
    pub inexact: bool,
    /// Also ops between threads: warps, shared memory, barriers, atomics, clusters.
    pub together: bool,
    /// Also vectors. Without them a compiler may run neighbouring threads in the lanes of its own.
    pub vectors: bool,
    /// Also counted loops that are unrolled, and bounds of loops that are computed and yet known.
    pub loops: bool,
    /// Also views of several dimensions, fixed and divided ones among them, and indices into them that conditions and loops
    /// keep in bounds, or nearly so.
    pub indices: bool,
    /// Also accesses by bytes, at multiples of their size and elsewhere, in bounds and out.
    pub bytes: bool,
    /// Also loops in which neighbouring threads take neighbouring elements, by bytes, as programs of grids do.
    pub strides: bool,
    /// Also loops that are long, or that nobody knows to be short before they run, so that a guest's are polled.
    pub long: bool,
    /// For kernels that are large and deep, to see what becomes of them in a compiler.
    pub large: Option<Large>,
}

/// What large kernels are made of. Statements are counted in all regions together then, and take what was computed lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Large {
    /// How deep control flow may nest.
    pub depth: u32,
    /// Values of any type that an `if` may yield and a loop carry; at least one.
    pub carried: usize,
    /// One in N statements is such an `if` or loop.
    pub every: usize,
}

impl Default for Options {
    /// 40 statements, exact, without long loops, with all else, and not large.
    fn default() -> Options {
        Options {
            statements: 40,
            inexact: false,
            together: true,
            vectors: true,
            loops: true,
            indices: true,
            bytes: true,
            strides: true,
            long: false,
            large: None,
        }
    }
}

impl Options {
    /// A large kernel of N statements, of a random kind.
    pub fn large(seed: u64, statements: u32) -> Options {
        let mut random = Random(!seed);
        let large = Large {
            depth: random.pick(&[3, 8, 28]),
            carried: random.pick(&[1, 8, 32, 64]),
            every: random.pick(&[4, 16, 64, 256]),
        };
        Options {
            statements,
            together: random.below(2) == 0,
            vectors: random.below(3) > 0,
            large: Some(large),
            ..Options::default()
        }
    }
}

/// Elements that each thread has in each output.
const SLOTS: i64 = 16;
/// Elements of each input.
const INPUT: u64 = 50;
/// Bytes that are each thread's own, a multiple of the widest access.
const OWN: i64 = 64;
/// The deepest nesting of control flow, but for that of large kernels; and of loops with several iterations in any.
const DEPTH: u32 = 3;
/// Values that a large kernel's statement chooses from.
const RECENT: usize = 256;

/// The random kernel of this seed, named `random`, and a launch for it.
pub fn kernel(seed: u64, options: Options) -> (Module, Launch) {
    let block = IRBlock::new(GuestAddr(seed));
    let mut random = Random(seed ^ 0x5851_f42d_4c95_7f2d);
    random.next();
    let threads = 32 * (1 + random.below(2)) as u32;
    let cluster = if options.together { random.pick(&[1, 1, 2, 4]) } else { 1 };
    let grid = cluster * (1 + random.below(2) as u32);
    let k = block.builder().name("random").block_size([threads, 1, 1]).cluster_size(cluster);
    k.resident_blocks((seed % 3) as u32);
    let mut arguments = Vec::new();

    let mut inputs = Vec::new();
    for scalar in [Scalar::I32, Scalar::F32, Scalar::I8, Scalar::F16] {
        inputs.push(k.view(&format!("in_{scalar}"), scalar, 1, Access::Read));
        let bits = (0..INPUT).map(|_| random.bits(scalar)).collect::<Vec<_>>();
        arguments.push(Argument::Tensor(Tensor::from_bits(scalar, &[INPUT], bits)));
    }
    let mut outputs = Vec::new();
    for &scalar in Scalar::ALL.iter().filter(|s| s.in_memory()) {
        let access = if scalar == Scalar::I32 { Access::ReadWrite } else { Access::Write };
        outputs.push((scalar, k.view_of(&format!("out_{scalar}"), ViewType::new(scalar, 1, access))));
        let elements = u64::from(threads * grid) * SLOTS as u64;
        arguments.push(Argument::Tensor(Tensor::zeros(scalar, &[elements])));
    }
    let counts = k.view("counts", Scalar::I32, 1, Access::ReadWrite);
    arguments.push(Argument::Tensor(Tensor::from_bits(
        Scalar::I32,
        &[8],
        (0..8).map(|_| random.bits(Scalar::I32)),
    )));
    let exchange = k.shared("exchange", Scalar::I32, &[threads]);
    let warps = threads / 32 * cluster;
    let gathered = ["even", "odd"].map(|name| k.shared(name, Scalar::I32, &[warps]));
    let pairs = k.shared("pairs", Scalar::F32, &[warps, 2]);
    let mut shaped = Vec::new();
    for n in 0..if options.indices { 3 } else { 0 } {
        let (view, extents) = random.view([Scalar::I32, Scalar::I8, Scalar::I64][n]);
        let elements = extents.iter().product::<u64>();
        let bits: Vec<u64> = (0..elements).map(|_| random.bits(view.element)).collect();
        arguments.push(Argument::Tensor(Tensor::from_bits(view.element, &extents, bits)));
        let rank = view.rank();
        shaped.push(Shaped { place: k.view_of(&format!("shaped_{n}"), view), rank, extents: true });
    }
    if options.indices && options.together {
        let zeros = k.shared("zeros", Scalar::I32, &[3, 20]);
        shaped.push(Shaped { place: zeros, rank: 2, extents: false });
    }
    let bytes = options.bytes.then(|| {
        let mut view = |name: &str, access, extent: u64| {
            let bits: Vec<u64> = (0..extent).map(|_| random.bits(Scalar::I8)).collect();
            arguments.push(Argument::Tensor(Tensor::from_bits(Scalar::I8, &[extent], bits)));
            k.view_of(name, ViewType::new(Scalar::I8, 1, access).aligned(16))
        };
        let own = view("bytes_own", Access::ReadWrite, u64::from(threads * grid) * OWN as u64 - 9);
        let counted = view("bytes_counted", Access::ReadWrite, 45);
        let read = view("bytes_read", Access::Read, 203);
        let shared =
            options.together.then(|| k.shared("bytes_shared", Scalar::I8, &[threads * OWN as u32 + 9]));
        let local = k.local("bytes_local", 40 + (seed % 9) as u32);
        let all = threads * grid;
        let rows =
            options.strides.then(|| (view("bytes_rows", Access::ReadWrite, u64::from(all) * 16 - 9), all));
        Bytes { read, own, counted, shared, local, rows }
    });
    let mut values = Vec::new();
    if options.indices {
        values.push(k.scalar_in("few", Type::I64, -3, 40));
        arguments.push(Argument::Bits(random.below(41) as u64));
    }
    for scalar in [Scalar::I32, Scalar::I64, Scalar::F64] {
        values.push(k.scalar(&format!("n_{scalar}"), scalar.into()));
        arguments.push(Argument::Bits(random.bits(scalar)));
    }

    let atomic = random.pick(&[
        Opcode::AtomicAdd,
        Opcode::AtomicMinS,
        Opcode::AtomicMaxU,
        Opcode::AtomicAnd,
        Opcode::AtomicXor,
    ]);
    let many = options.long.then(|| k.scalar_in("many", Type::I32, 0, 1_000_000));
    arguments.extend(many.map(|_| Argument::Bits(random.below(12) as u64)));
    let number = k.block_id(Axis::X);
    let uniform = vec![values[values.len() - 3], if cluster > 1 { k.cluster_id() } else { number }];
    let thread = k.thread_id(Axis::X);
    values.extend([thread, k.lane_id(), number, uniform[1], k.cluster_rank(), k.global_id(Axis::X)]);
    let mut maker = Maker {
        k,
        random,
        options,
        inputs,
        counts,
        exchange,
        gathered,
        pairs,
        warps,
        cluster,
        thread,
        atomic,
        values,
        uniform,
        depth: 0,
        shaped,
        bytes,
        counts_far: false,
        // A loop that a guest may be stopped in is not for clusters.
        many: many.filter(|_| cluster == 1),
        left: options.statements,
    };
    maker.statements(options.statements, true);

    let first = k.global_id(Axis::X) * (SLOTS as i32);
    let mut used = vec![0i64; outputs.len()];
    for value in maker.values.iter().rev() {
        let value = if value.ty().scalar() == Scalar::Bool { value.to(Scalar::I8) } else { *value };
        let Some(i) = outputs.iter().position(|(s, _)| *s == value.ty().scalar()) else { continue };
        let lanes = i64::from(value.ty().lanes());
        if used[i] + lanes <= SLOTS {
            outputs[i].1.at([first + k.i64(used[i])]).store(value);
            used[i] += lanes;
        }
    }
    let launch = Launch { kernel: "random".to_owned(), grid: [grid, 1, 1], arguments };
    let kernels = block.kernel().into_iter().collect();
    (Module::new(kernels), launch)
}

struct Maker<'b> {
    k: Builder<'b>,
    random: Random,
    options: Options,
    inputs: Vec<PlaceRef<'b>>,
    counts: PlaceRef<'b>,
    exchange: PlaceRef<'b>,
    /// What is gathered, in turns.
    gathered: [PlaceRef<'b>; 2],
    pairs: PlaceRef<'b>,
    /// Warps of the cluster.
    warps: u32,
    cluster: u32,
    thread: Val<'b>,
    atomic: Opcode,
    /// What the next statement may use.
    values: Vec<Val<'b>>,
    /// Numbers that are alike in the block and in the cluster.
    uniform: Vec<Val<'b>>,
    depth: u32,
    /// Of several dimensions; nobody writes them.
    shaped: Vec<Shaped<'b>>,
    bytes: Option<Bytes<'b>>,
    /// Inside of a loop that counts up to an extent?
    counts_far: bool,
    /// A small number that may be large as far as its type says, where there may be long loops.
    many: Option<Val<'b>>,
    /// Statements that a large kernel may still have.
    left: u32,
}

/// A view or a shared array.
#[derive(Clone, Copy)]
struct Shaped<'b> {
    place: PlaceRef<'b>,
    rank: usize,
    /// Can its extents be asked for?
    extents: bool,
}

/// What is accessed by bytes.
#[derive(Clone, Copy)]
struct Bytes<'b> {
    /// Nobody writes it.
    read: PlaceRef<'b>,
    /// Each thread has some of it.
    own: PlaceRef<'b>,
    /// All add to it.
    counted: PlaceRef<'b>,
    /// As `own`, of the block's threads.
    shared: Option<PlaceRef<'b>>,
    /// Each thread's.
    local: PlaceRef<'b>,
    /// Rows of four bytes for each thread of the grid, which there are so many of.
    rows: Option<(PlaceRef<'b>, u32)>,
}

impl<'b> Maker<'b> {
    /// Makes statements; `together` if all threads of the block and of the cluster come here.
    fn statements(&mut self, count: u32, together: bool) {
        for _ in 0..count {
            if let Some(large) = self.options.large {
                let Some(left) = self.left.checked_sub(1) else { return };
                self.left = left;
                if self.depth < large.depth && self.random.below(large.every) == 0 {
                    self.carrying(large, together);
                    continue;
                }
            }
            let kinds = match &self.bytes {
                Some(bytes) => 18 + usize::from(bytes.rows.is_some()),
                None => 16,
            };
            match self.random.below(kinds) {
                0 if self.depth < DEPTH => self.choice(),
                1 if self.depth < DEPTH => self.counted(),
                // A loop that a guest may be stopped in is not for clusters.
                2 if self.depth < DEPTH && self.cluster == 1 => self.repeated(),
                3 => self.load(),
                4 | 5 if together && self.options.together => self.between_threads(),
                6 if self.options.together => self.count(),
                7 => self.constant(),
                8 | 9 if self.options.indices => self.indexed(),
                16 | 17 => self.by_bytes(),
                // As above.
                18 if self.depth < DEPTH && self.cluster == 1 => self.strided(),
                10 => match self.many {
                    Some(many) if self.depth < DEPTH && !self.counts_far => self.long(many),
                    _ => self.on_values(),
                },
                _ => self.on_values(),
            }
        }
    }

    /// A nested region: what it defines is forgotten behind it.
    fn nested(&mut self, together: bool) -> Val<'b> {
        let known = self.values.len();
        self.depth += 1;
        let count = 1 + self.random.below(6) as u32;
        self.statements(count, together);
        let result = self.some(Class::WORD).to(Scalar::I32);
        self.depth -= 1;
        self.values.truncate(known);
        result
    }

    /// A value whose scalar is in the class, a scalar itself; made if there is none.
    fn some(&mut self, class: Class) -> Val<'b> {
        self.find(|ty| class.contains(ty.scalar()) && !ty.is_vector()).unwrap_or_else(|| {
            let scalars: Vec<Scalar> = class.scalars().collect();
            let scalar = self.random.pick(&scalars);
            self.literal(scalar.into())
        })
    }

    /// A known value of a type that fits, one of the later ones more often.
    fn find(&mut self, fits: impl Fn(Type) -> bool) -> Option<Val<'b>> {
        let recent = self.options.large.map_or(0, |_| self.values.len().saturating_sub(RECENT));
        let fitting: Vec<Val<'b>> = self.values[recent..].iter().copied().filter(|v| fits(v.ty())).collect();
        let (a, b) = (self.random.below(fitting.len()), self.random.below(fitting.len()));
        fitting.get(a.max(b)).copied()
    }

    fn literal(&mut self, ty: Type) -> Val<'b> {
        let bits = self.random.bits(ty.scalar());
        self.k.bits(ty, bits)
    }

    fn of(&mut self, ty: Type) -> Val<'b> {
        if self.random.below(5) == 0 {
            return self.literal(ty);
        }
        self.find(|t| t == ty).unwrap_or_else(|| self.literal(ty))
    }

    fn bool(&mut self) -> Val<'b> {
        self.find(|ty| ty == Type::BOOL).unwrap_or_else(|| {
            let value = self.some(Class::WORD);
            value.lt(0)
        })
    }

    fn constant(&mut self) {
        let scalars: Vec<Scalar> = Class::REGISTER.scalars().collect();
        let (scalar, lanes) = (self.random.pick(&scalars), self.random.pick(&[1, 1, 1, 2, 4, 8, 16]));
        let ty = Type::vector(scalar, lanes).filter(|_| self.options.vectors).unwrap_or(scalar.into());
        let value = self.literal(ty);
        self.values.push(value);
    }

    fn on_values(&mut self) {
        let row = self.random.pick(TABLE);
        if row.error.is_some_and(|e| e.precise_ulps > 0) && !self.options.inexact {
            return;
        }
        let made = match row.shape {
            Shape::Unary(class) | Shape::Binary(class) | Shape::Ternary(class) | Shape::Compare(class) => {
                let Some(a) = self.find(|ty| class.contains(ty.scalar())) else { return };
                let count = row.shape.operands().unwrap_or(1);
                let mut operands = vec![a];
                operands.extend((1..count).map(|_| self.of(a.ty())).collect::<Vec<_>>());
                let compare = matches!(row.shape, Shape::Compare(_));
                let ty = if compare { a.ty().with_scalar(Scalar::Bool) } else { a.ty() };
                self.k.emit(row.opcode, &operands, ty)
            }
            Shape::Select => {
                let Some(a) = self.find(|_| true) else { return };
                let b = self.of(a.ty());
                self.bool().select(a, b)
            }
            Shape::Convert(from, to, width) => {
                let to = self.random.pick(&to.scalars().collect::<Vec<_>>());
                let fits = |s: Scalar| match width {
                    Width::Any => s != to,
                    Width::Wider => s.bits() < to.bits(),
                    Width::Narrower => s.bits() > to.bits(),
                };
                let Some(a) = self.find(|ty| from.contains(ty.scalar()) && fits(ty.scalar())) else { return };
                self.k.emit(row.opcode, &[a], a.ty().with_scalar(to))
            }
            Shape::Bitcast => {
                // From integers only: a float's bits could show which NaN it is.
                let Some(a) = self.find(|ty| Class::INT.contains(ty.scalar())) else { return };
                let types: Vec<Type> = Class::DATA
                    .scalars()
                    .flat_map(|s| Type::LANES.into_iter().filter_map(move |n| Type::vector(s, n)))
                    .filter(|ty| ty.bits() == a.ty().bits() && (self.options.vectors || !ty.is_vector()))
                    .collect();
                a.bitcast(self.random.pick(&types))
            }
            Shape::Splat | Shape::Make if !self.options.vectors => return,
            Shape::Splat => {
                let lanes = self.random.pick(&[2, 4, 8, 16]);
                self.some(Class::REGISTER).splat(lanes)
            }
            Shape::Make => {
                let first = self.some(Class::REGISTER);
                let lanes = self.random.pick(&[2usize, 4, 8]);
                let mut all = vec![first];
                all.extend((1..lanes).map(|_| self.of(first.ty())).collect::<Vec<_>>());
                self.k.vector(&all)
            }
            Shape::Extract | Shape::Insert => {
                let Some(vector) = self.find(Type::is_vector) else { return };
                let lane = self.random.below(usize::from(vector.ty().lanes())) as u8;
                if row.shape == Shape::Extract {
                    vector.lane(lane)
                } else {
                    let scalar = self.of(vector.ty().scalar().into());
                    vector.with_lane(lane, scalar)
                }
            }
            _ => return,
        };
        self.values.push(made);
    }

    fn load(&mut self) {
        let view = self.random.pick(&self.inputs.clone());
        let index = self.some(Class::WORD);
        // Most indices would be far outside; bring most of them near.
        let index = if self.random.below(4) == 0 { index } else { index & 63 };
        let lanes = self.random.pick(&[1, 1, 2, 4, 8]);
        let lanes = if self.options.vectors { lanes } else { 1 };
        let element = view.at([index]);
        self.values.push(if lanes == 1 { element.load() } else { element.load_vector(lanes) });
    }

    /// Accesses by an index that is compared with an extent, counts up to one, or is neither.
    fn indexed(&mut self) {
        let k = self.k;
        let shaped = self.random.pick(&self.shaped.clone());
        let dimension = self.random.below(shaped.rank);
        let extent = match shaped.extents {
            true => shaped.place.extent(dimension as u8),
            false => k.i64(if dimension == 0 { 3 } else { 20 }),
        };
        let result = match self.random.below(8) {
            0 => {
                let index = self.index(3);
                self.element(shaped, dimension, index)
            }
            1..=6 => {
                let index = self.index(3);
                let condition = self.bound(index, extent);
                let this = std::cell::RefCell::new(&mut *self);
                k.if_else(
                    condition,
                    || this.borrow_mut().elements(shaped, dimension, index),
                    || this.borrow_mut().elements(shaped, dimension, index),
                )
            }
            // A loop that a guest may be stopped in is not for clusters.
            _ if self.counts_far || self.cluster > 1 => return,
            _ => self.counted_to(shaped, dimension, extent),
        };
        self.values.push(result);
    }

    /// A loop to an extent, or about so far, with another one inside at times.
    fn counted_to(&mut self, shaped: Shaped<'b>, dimension: usize, extent: Val<'b>) -> Val<'b> {
        let k = self.k;
        self.counts_far = true;
        let low = match self.random.below(3) {
            0 => k.i64(self.random.below(9) as i64 - 4),
            1 => self.thread.to(Scalar::I64),
            _ => self.index(2) & 31,
        };
        let high = match self.random.below(4) {
            0 => extent - (self.random.below(9) as i64 - 2),
            1 => k.i64(self.random.pick(&[3, 20, 24])),
            _ => extent,
        };
        let step = k.i64(self.random.pick(&[1, 1, 2, 3, 4, 8, 32, 64, 0, -2]));
        let (inner, unroll) = (self.random.below(3), self.random.pick(&[0, 1, 2, 4, 256]));
        let result = k.range(low, high).step(step).unroll(unroll).fold(k.i32(0), |count, sum| {
            let known = self.values.len();
            self.values.push(count);
            let sum = match inner {
                0 => k.range(k.i64(0), k.i64(4)).unroll(4).fold(sum, |more, sum| {
                    let at = if self.random.below(2) == 0 { count + more } else { count * 4 + more };
                    sum + self.elements(shaped, dimension, at)
                }),
                _ => sum + self.elements(shaped, dimension, count),
            };
            self.values.truncate(known);
            sum
        });
        self.counts_far = false;
        result
    }

    /// Something to be an index, of N ops at most.
    fn index(&mut self, depth: u32) -> Val<'b> {
        let k = self.k;
        let few = self.random.below(9) as i64 - 2;
        if depth == 0 {
            return match self.random.below(5) {
                0 => self.thread.to(Scalar::I64),
                1 => k.global_id(Axis::X),
                2 => k.i64(few),
                3 => self.values[0],
                _ => self.some(Class::WORD).to(Scalar::I64),
            };
        }
        let from = self.index(depth - 1);
        let power = k.i64(self.random.pick(&[1, 2, 4, 8]));
        let mask = k.i64(self.random.pick(&[3, 7, 31, 63, -4, !0 << 40]));
        let other = |this: &mut Self| this.index(depth - 1);
        let emit = |code, a: Val<'b>, b: Val<'b>| k.emit(code, &[a, b], a.ty());
        use Opcode::*;
        match self.random.below(12) {
            0 | 1 => emit(Add, from, k.i64(few)),
            2 => emit(self.random.pick(&[Add, Sub, Mul, And, Or, Xor]), from, other(self)),
            3 => emit(self.random.pick(&[MinS, MaxS, MinU, MaxU]), from, other(self)),
            4 => emit(Mul, from, power),
            5 => emit(self.random.pick(&[Shl, ShrU, ShrS, Rotl]), from, k.i64(few)),
            6 => emit(And, from, mask),
            7 => emit(self.random.pick(&[RemS, RemU, DivS, DivU]), from, power + (few - 1)),
            8 => emit(Sub, k.i64(few), from),
            9 => {
                let narrow = from.to(Scalar::I32) + few as i32;
                if few > 2 { narrow.to(Scalar::I64) } else { narrow.to_u(Scalar::I64) }
            }
            10 => {
                let condition = self.bool();
                condition.select(from, k.i64(few))
            }
            _ => from,
        }
    }

    /// A condition on where an index is, of which an extent is known.
    fn bound(&mut self, index: Val<'b>, extent: Val<'b>) -> Val<'b> {
        use Opcode::*;
        let k = self.k;
        let code = self.random.pick(&[LtS, LtS, LtU, LtU, LeS, LeU, GtS, GeS, GtU, GeU, Eq, Ne]);
        let (near, short) = (self.random.below(9) as i64 - 1, self.random.below(3) as i64);
        let mut pair = [if near == 0 { index } else { index + near }, extent - short];
        if matches!(code, GtS | GeS | GtU | GeU) || self.random.below(8) == 0 {
            pair.reverse();
        }
        let condition = k.emit(code, &pair, Type::BOOL);
        let least = k.emit(GeS, &[index, k.i64(0)], Type::BOOL);
        match self.random.below(4) {
            0 => condition,
            1 => k.emit(Or, &[condition, least], Type::BOOL),
            _ => k.emit(And, &[least, condition], Type::BOOL),
        }
    }

    /// The sum of some elements near an index.
    fn elements(&mut self, shaped: Shaped<'b>, dimension: usize, index: Val<'b>) -> Val<'b> {
        let first = self.element(shaped, dimension, index);
        let near = self.random.below(7) as i64 - 2;
        let second = self.element(shaped, dimension, index + near);
        first + second
    }

    fn element(&mut self, shaped: Shaped<'b>, dimension: usize, index: Val<'b>) -> Val<'b> {
        let k = self.k;
        let lanes = self.random.pick(&[1, 1, 2, 4, 8]);
        let lanes = if self.options.vectors { lanes } else { 1 };
        let other = match self.random.below(3) {
            0 => self.thread.to(Scalar::I64) & 3,
            _ => k.i64(self.random.below(4) as i64 - 1),
        };
        let element = match (shaped.rank, dimension) {
            (1, _) => shaped.place.at([index]),
            (_, 0) => shaped.place.at([index, other]),
            _ => shaped.place.at([other, index]),
        };
        let value = if lanes == 1 { element.load() } else { element.load_vector(lanes).lane(lanes - 1) };
        value.to(Scalar::I32)
    }

    /// A load, a store or an atomic by bytes. What a thread writes is its own, so that none race.
    fn by_bytes(&mut self) {
        let (k, Some(bytes)) = (self.k, self.bytes) else { return };
        let size = |ty: Type| ty.bytes() <= MAX_ACCESS_BYTES && ty.scalar() != Scalar::I8;
        let vectors = self.options.vectors;
        let types: Vec<Type> = Class::DATA
            .scalars()
            .flat_map(|s| Type::LANES.into_iter().filter_map(move |n| Type::vector(s, n)))
            .filter(|ty| size(*ty) && (vectors || !ty.is_vector()))
            .collect();
        let ty = self.random.pick(&types);
        let any = if self.options.indices { self.index(3) } else { self.some(Class::WORD).to(Scalar::I64) };
        let multiple = match self.random.below(3) {
            0 => any,
            1 => any * i64::from(ty.bytes()),
            _ => any & -i64::from(ty.bytes()),
        };
        let (first, place) = match (self.random.below(8), bytes.shared) {
            (0 | 1, _) => (None, bytes.read),
            (6 | 7, _) => (None, bytes.local),
            (2, _) if self.options.together => {
                // What it gives depends on the order of the threads, and so do sums of different sizes.
                let amount = self.some(Class::WORD).to(Scalar::I32);
                let at = if self.random.below(4) == 0 { any } else { multiple & 63 };
                let _ = bytes.counted.at([at]).typed(Scalar::I32).atomic(self.atomic, amount);
                return;
            }
            (2 | 3, Some(shared)) => (Some(self.thread.to(Scalar::I64)), shared),
            _ => (Some(k.global_id(Axis::X)), bytes.own),
        };
        let writes = place.place() != bytes.read.place();
        let index = match first {
            None if writes && self.random.below(2) == 0 => multiple & 31,
            None if self.random.below(3) == 0 => multiple,
            None => multiple & 255,
            Some(thread) => thread * OWN + (multiple & (OWN - 1)),
        };
        let element = place.at([index]).typed(ty.scalar());
        // The bytes of a float could show which NaN it is.
        if writes && ty.scalar().is_int() && self.random.below(2) == 0 {
            let value = self.of(ty);
            return element.store(value);
        }
        self.values.push(match ty.lanes() {
            1 => element.load(),
            lanes => element.load_vector(lanes),
        });
    }

    /// A loop over neighbouring elements of neighbouring threads, each the same number of them further with each iteration.
    fn strided(&mut self) {
        let Some(Bytes { read, rows: Some((rows, all)), .. }) = self.bytes else { return };
        let k = self.k;
        let wide = self.random.below(2) == 0;
        let number = |value: i64| if wide { k.i64(value) } else { k.i32(value as i32) };
        let own = match wide {
            true => k.global_id(Axis::X),
            false => k.block_id(Axis::X) * k.block_dim(Axis::X) + self.thread,
        };
        // Some begin where their numbers end.
        let end = if wide { i64::MAX } else { i64::from(i32::MAX) };
        let far = self.random.below(4) == 0;
        let first = if far { own + number(end - self.random.below(90) as i64) } else { own };
        let bound = match self.random.below(3) {
            0 => number(end),
            1 => number(self.random.below(3 * all as usize) as i64),
            _ => self.some(Class::WORD).to(own.ty().scalar()),
        };
        let of_grid = self.random.below(4) > 0;
        let by = number(if of_grid { all.into() } else { self.random.below(50) as i64 + 1 });
        // What a program's pointer is: any number, which is taken away again.
        let pointer = self.some(Class::WORD).to(Scalar::I64);
        let offset = self.random.pick(&[0i64, 0, 4, -4, 8]);
        // So no other thread comes there.
        let writes = !far && of_grid && offset == 0;
        let rounds = 1 + self.random.below(4) as i32;
        let float = self.random.below(2) == 0;
        let initial = vec![first, k.i32(0), k.i32(1)];
        let result = k.while_(
            initial,
            |carried| carried[1].lt(rounds) & carried[0].lt(bound),
            |carried| {
                let at = (pointer + carried[0].to(Scalar::I64) * 4 + offset) - pointer;
                let place = if writes { rows } else { read };
                let found = place.at([at]).typed(Scalar::I32).load();
                let next = match float {
                    true => (carried[2].to(Scalar::F32) + found.to(Scalar::F32)).to(Scalar::I32),
                    false => carried[2] * 3 + found,
                };
                if writes {
                    place.at([at]).typed(Scalar::I32).store(next);
                }
                vec![carried[0] + by, carried[1] + 1, next]
            },
        );
        self.values.push(result[2]);
    }

    fn count(&mut self) {
        let (bin, amount) = (self.some(Class::WORD) & 15, self.some(Class::WORD).to(Scalar::I32));
        // What it gives depends on the order of the threads.
        let _ = self.counts.at([bin]).atomic(self.atomic, amount);
    }

    fn between_threads(&mut self) {
        if self.random.below(6) == 0 {
            let gathered = self.gather();
            self.values.push(gathered);
            return;
        }
        let row = self.random.pick(TABLE);
        let made = match row.shape {
            Shape::Shuffle => {
                let Some(a) = self.find(|ty| Class::DATA.contains(ty.scalar())) else { return };
                let by = self.some(Class::WORD).to(Scalar::I32);
                self.k.emit(row.opcode, &[a, by], a.ty())
            }
            Shape::Vote => {
                let a = self.bool();
                self.k.emit(row.opcode, &[a], Type::BOOL)
            }
            Shape::Ballot => self.bool().ballot(),
            Shape::Reduce(class) => {
                let a = self.some(class);
                self.k.emit(row.opcode, &[a], a.ty())
            }
            _ if row.opcode == Opcode::Barrier => {
                // Every thread leaves a word and takes another's.
                let mine = self.some(Class::WORD).to(Scalar::I32);
                let other = self.thread ^ (1 + self.random.below(31) as i32);
                self.exchange.at([self.thread]).store(mine);
                self.k.barrier();
                let theirs = self.exchange.at([other]).load();
                self.k.barrier();
                theirs
            }
            _ => return,
        };
        self.values.push(made);
    }

    /// Every warp gives a word, then a pair or another word, and every thread takes one of each. Whoever gives again has
    /// waited for those who read what was gathered before.
    fn gather(&mut self) -> Val<'b> {
        let last = self.warps as i32 - 1;
        let word = self.some(Class::WORD).to(Scalar::I32);
        let word = self.k.emit(Opcode::WarpXor, &[word], Type::I32);
        self.gathered[0].gather(word);
        let at = self.some(Class::WORD).to(Scalar::I32) & last;
        let first = self.gathered[0].at([at]).load();
        let at = self.some(Class::WORD).to(Scalar::I32) & last;
        if self.options.vectors {
            let word = word.bitcast(Type::F32);
            let pair = self.k.vector(&[word, self.k.f32(1.5)]);
            self.pairs.gather(pair);
            self.values.push(self.pairs.at([at, self.k.i32(0)]).load_vector(2));
        } else {
            self.gathered[1].gather(word);
            self.values.push(self.gathered[1].at([at]).load());
        }
        first
    }

    /// A condition, and whether it is alike in the block.
    fn condition(&mut self, together: bool) -> (Val<'b>, bool) {
        if together && self.random.below(2) == 0 {
            let number = self.random.pick(&self.uniform.clone());
            return (number.lt(self.random.below(3) as i32), true);
        }
        (self.bool(), false)
    }

    fn choice(&mut self) {
        let together = self.depth == 0;
        let k = self.k;
        if self.random.below(3) == 0 {
            let selector = self.some(Class::WORD).to(Scalar::I32) & 3;
            let result = k
                .switch(selector)
                .case(0, || self.nested(false))
                .case(2, || self.nested(false))
                .default(|| self.nested(false));
            self.values.push(result);
            return;
        }
        let (condition, alike) = self.condition(together);
        let this = std::cell::RefCell::new(&mut *self);
        let result =
            k.if_else(condition, || this.borrow_mut().nested(alike), || this.borrow_mut().nested(alike));
        self.values.push(result);
    }

    /// An `if`, or a loop of few iterations, through which many values go.
    fn carrying(&mut self, large: Large, together: bool) {
        let k = self.k;
        let count = 1 + self.random.below(large.carried);
        let initial: Vec<Val<'b>> = (0..count).filter_map(|_| self.find(|_| true)).collect();
        let types: Vec<Type> = initial.iter().map(|value| value.ty()).collect();
        let inside = |this: &mut Self, given: &[Val<'b>], alike: bool| {
            let known = this.values.len();
            this.depth += 1;
            this.values.extend(given);
            let statements = 1 + this.random.below(2 * large.every.min(32)) as u32;
            this.statements(statements, together && alike);
            let results = types.iter().map(|ty| this.of(*ty)).collect::<Vec<_>>();
            this.depth -= 1;
            this.values.truncate(known);
            results
        };
        let results = if self.random.below(2) == 0 {
            let (condition, alike) = self.condition(together && self.depth == 0);
            let this = std::cell::RefCell::new(&mut *self);
            k.if_else(
                condition,
                || inside(&mut this.borrow_mut(), &[], alike),
                || inside(&mut this.borrow_mut(), &[], alike),
            )
        } else {
            let most = if self.depth < DEPTH { 3 } else { 1 };
            let end = k.i32(self.random.below(most + 1) as i32);
            k.range(k.i32(0), end).fold(initial, |_, carried| inside(self, &carried, true))
        };
        self.values.extend(results);
    }

    /// A loop over bounds that are uniform, but that a back end may hold in vectors. A step below 1 goes far at once, so that a
    /// loop that wrongly runs ends.
    fn counted_alike(&mut self) {
        let k = self.k;
        let is_wide = self.random.below(2) == 0;
        let (number, far) =
            if is_wide { (Scalar::I64, i64::MIN / 2) } else { (Scalar::I32, i64::from(i32::MIN / 2)) };
        let constant = |value: i64| if is_wide { k.i64(value) } else { k.i32(value as i32) };
        let mut bound = || {
            let lane = k.i32(self.random.below(32) as i32);
            self.some(Class::WORD).to(number).shuffle(lane) & constant(3)
        };
        let (low, high) = (bound(), bound());
        let low = if self.random.below(2) == 0 { low } else { constant(0) };
        let step = constant(self.random.pick(&[1, 1, 2, far]));
        let initial = self.some(Class::WORD).to(Scalar::I32);
        let result = k.range(low, high).step(step).fold(initial, |count, carried| {
            let known = self.values.len();
            self.values.extend([count, carried]);
            // Warps may differ.
            let next = self.nested(false);
            self.values.truncate(known);
            next * 3 + count.to(Scalar::I32)
        });
        self.values.push(result);
    }

    fn counted(&mut self) {
        let together = self.depth == 0;
        if together && self.options.together && self.options.loops && self.random.below(4) == 0 {
            return self.counted_alike();
        }
        let k = self.k;
        let (high, alike) = match together && self.random.below(2) == 0 {
            true => (k.i32(self.random.below(5) as i32), true),
            false => (self.some(Class::WORD).to(Scalar::I32) & 3, false),
        };
        let low = k.i32(self.random.below(3) as i32 - 1);
        let step = 1 + self.random.below(2) as i32;
        let initial = self.some(Class::WORD).to(Scalar::I32);
        let (mut low, mut high, mut step, mut unroll) = (low, high, k.i32(step), 0);
        if self.options.loops {
            low = self.disguised(low);
            high = self.disguised(high);
            step = self.disguised(step);
            unroll = self.random.pick(&[0, 2, 3, 8]);
        }
        let result = k.range(low, high).step(step).unroll(unroll).fold(initial, |count, carried| {
            let known = self.values.len();
            self.values.extend([count, carried, count - low]);
            let next = self.nested(alike);
            self.values.truncate(known);
            next
        });
        self.values.push(result);
    }

    /// The same number, at times computed in a way that analysis may see through.
    fn disguised(&mut self, number: Val<'b>) -> Val<'b> {
        let k = self.k;
        match self.random.below(4) {
            0 => {
                let part = k.i32(self.random.below(9) as i32 - 4);
                (number - part) + part
            }
            1 => number + (self.random.pick(&self.uniform.clone()).to(Scalar::I32) & k.i32(0)),
            _ => number,
        }
    }

    /// A loop that takes a few iterations and may take very many; or, outside of others, one that takes thousands in two
    /// of the threads, alone or with another one inside.
    fn long(&mut self, many: Val<'b>) {
        let k = self.k;
        let initial = self.some(Class::WORD).to(Scalar::I32);
        let unroll = self.random.pick(&[0, 0, 4, 64]);
        let counted = |bound: Val<'b>| k.range(k.i32(0), bound).unroll(unroll);
        let result = if self.depth > 0 || self.random.below(3) == 0 {
            counted(many).fold(initial, |count, carried| {
                let known = self.values.len();
                self.values.extend([count, carried]);
                let next = self.nested(false);
                self.values.truncate(known);
                next
            })
        } else {
            let (times, more) = (self.random.pick(&[1, 1, 2, 4]), self.random.below(1000) as i32);
            let inner = if times == 1 { 4097 + more } else { 1000 + 3 * more };
            let rounds =
                |carried| k.range(k.i32(0), k.i32(inner)).fold(carried, |count, carried| carried * 5 + count);
            let nest = || match times {
                1 => rounds(initial),
                _ => counted(k.i32(times)).fold(initial, |_, carried| rounds(carried)),
            };
            k.if_else(self.thread.lt(2), nest, || initial)
        };
        self.values.push(result);
    }

    fn repeated(&mut self) {
        let k = self.k;
        let rounds = self.some(Class::WORD).to(Scalar::I32) & 3;
        let initial = (k.i32(0), self.some(Class::WORD).to(Scalar::I32));
        let (_, result) = k.while_(
            initial,
            |(count, _)| count.lt(rounds),
            |(count, carried)| {
                let known = self.values.len();
                self.values.extend([count, carried]);
                let next = self.nested(false);
                self.values.truncate(known);
                (count + 1, next)
            },
        );
        self.values.push(result);
    }
}

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

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A view of one dimension or two, and extents that fit it.
    fn view(&mut self, element: Scalar) -> (ViewType, Vec<u64>) {
        let rank = 1 + self.below(2);
        let (mut dims, mut extents, mut names) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rank {
            let multiple = self.pick(&[1, 1, 2, 4, 8, 12]);
            let extent = u64::from(multiple) * self.below(24 / multiple as usize + 1) as u64;
            let fixed = self.below(3) == 0;
            dims.push(if fixed { Dim::Fixed(extent) } else { Dim::Any { multiple } });
            // The name says all that must be alike.
            let named = !fixed && self.below(2) == 0;
            names.push(if named { format!("n{extent}of{multiple}") } else { String::new() });
            extents.push(extent);
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        (ViewType::new(element, rank, Access::Read).with_dims(&dims).named(&names), extents)
    }

    /// Bits for a number: a small one, a corner or any.
    fn bits(&mut self, scalar: Scalar) -> u64 {
        let any = self.next();
        let bits = match self.below(4) {
            0 => any,
            1 if scalar.is_int() => {
                [0, 1, scalar.mask(), scalar.mask() >> 1, (scalar.mask() >> 1) + 1][self.below(5)]
            }
            1 => from_f64(scalar, [0.0, -0.0, f64::INFINITY, f64::NAN, 1e-300, 1e300][self.below(6)]),
            _ => from_f64(scalar, (any % 41) as f64 - 20.0 + if scalar.is_float() { 0.25 } else { 0.0 }),
        };
        bits & scalar.mask()
    }
}
