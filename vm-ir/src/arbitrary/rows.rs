//! Random kernels of rows. Neighbouring threads access neighbouring elements, which a compiler may merge into one access. An outer
//! index often puts the whole row out of bounds.
//!
//! Each thread writes only elements that no other thread accesses, so the kernels have no races. An index is out of bounds by a
//! scalar parameter, by a condition on the block, the warp or the thread, by an extent, or by a constant. A load out of bounds
//! must give zero. A store out of bounds must change neither a view nor the number of the next block, so each thread also stores
//! its position.

use super::Random;
use crate::builder::{Builder, IRBlock, PlaceRef, Val};
use crate::interp::{Argument, Launch, Tensor};
use crate::limits::WARP;
use crate::module::{GuestAddr, Module};
use crate::op::{Axis, Opcode};
use crate::types::{Scalar, Type};
use crate::view::{Access, Dim, ViewType};

/// The types and block sizes of a kernel of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowShapes {
    /// Scalars of four and eight bytes and shuffles by constants, in blocks of whole warps: a compiler may run all threads of a
    /// warp together.
    Warps,
    /// Scalars of all sizes, in blocks of any size.
    Scalars,
    /// The same, and vectors.
    Vectors,
}

impl RowShapes {
    /// Every one.
    pub const ALL: [RowShapes; 3] = [RowShapes::Warps, RowShapes::Scalars, RowShapes::Vectors];
}

/// Statements at the top level.
const STATEMENTS: usize = 14;
/// Values that each thread stores at the end, for each type.
const SAID: usize = 9;
/// Offsets that are added to the index of a row. All but 0 are out of bounds of every view.
const FAR: [i64; 9] = [0, 0, 1000, -1000, -500, i32::MAX as i64, i32::MIN as i64, 1 << 40, i64::MIN];

/// Returns the random kernel of rows of this seed, named `name`, and a launch for it.
pub fn row_kernel(name: &str, seed: u64, shapes: RowShapes) -> (Module, Launch) {
    let block = IRBlock::new(GuestAddr(seed));
    let mut random = Random(seed ^ 0x9fb2_1c65_1e98_df25);
    random.next();
    let threads = match shapes {
        RowShapes::Warps => random.pick(&[[32, 1, 1], [32, 1, 1], [64, 1, 1], [32, 2, 1], [96, 1, 1]]),
        _ => random.pick(&[[32, 1, 1], [16, 1, 1], [8, 2, 1], [4, 1, 1], [12, 1, 1], [64, 1, 1], [7, 3, 1]]),
    };
    // With 40 blocks, each thread of a CPU runs several.
    let grid = match random.below(8) {
        0 => [40, 1, 1],
        _ => [1 + random.below(3) as u32, 1 + random.below(3) as u32, 1 + random.below(2) as u32],
    };
    let k = block.builder().name(name).block_size(threads);
    let rows = grid.iter().product::<u32>() * threads[1];
    let mut arguments = Vec::new();
    let far = [(Scalar::I32, 7), (Scalar::I64, FAR.len())].map(|(scalar, count)| {
        let far = FAR[random.below(count)];
        arguments.push(Argument::Bits(far as u64 & scalar.mask()));
        k.scalar(&format!("far_{scalar}"), scalar.into())
    });
    let few = k.scalar_in("few", Type::I32, 0, 16);
    arguments.push(Argument::Bits(random.pick(&[0, 0, 1, 4, 8, 16])));

    let elements: &[Scalar] = match shapes {
        RowShapes::Warps => &[Scalar::I64, Scalar::I64, Scalar::I32, Scalar::F32],
        _ => &[Scalar::I64, Scalar::F64, Scalar::I32, Scalar::F32, Scalar::I16, Scalar::F16, Scalar::I8],
    };
    let lanes: &[u8] = if shapes == RowShapes::Vectors { &[1, 2, 4, 8, 16] } else { &[1] };
    let mut made = Views { k, random: &mut random, arguments: &mut arguments, rows, width: threads[0] };
    let mut views = Vec::new();
    for access in [Access::Read, Access::Read, Access::ReadWrite, Access::ReadWrite, Access::ReadWrite] {
        let element = made.random.pick(elements);
        let lanes = made.random.pick(lanes);
        views.push(made.rows(element, lanes, access));
    }
    let of_bytes: Vec<Scalar> = elements.iter().copied().filter(|scalar| scalar.bytes() > 1).collect();
    let mut bytes = Vec::new();
    for access in [Access::Read, Access::ReadWrite, Access::ReadWrite] {
        let scalar = made.random.pick(&of_bytes);
        bytes.push(made.bytes(scalar, access));
    }
    let counted = made.random.pick(&[Scalar::I32, Scalar::I64]);
    let counts = made.view("counts", ViewType::new(counted, 2, Access::ReadWrite), &[3, 8]);
    let said = [Scalar::I32, Scalar::I64].map(|scalar| {
        let extents = [SAID as u64, u64::from(rows * threads[0])];
        made.view(&format!("said_{scalar}"), ViewType::new(scalar, 2, Access::Write), &extents)
    });

    let [x, y, z] = [Axis::X, Axis::Y, Axis::Z].map(|axis| k.block_id(axis));
    let thread = k.thread_id(Axis::X);
    let number = (z * grid[1] as i32 + y) * grid[0] as i32 + x;
    let own = if threads[1] == 1 { number } else { number * threads[1] as i32 + k.thread_id(Axis::Y) };
    let add = random.pick(&[Opcode::AtomicAdd, Opcode::AtomicMinS, Opcode::AtomicMaxU, Opcode::AtomicXor]);
    let mut maker = Maker {
        k,
        random,
        shapes,
        views,
        bytes,
        counts: (counts, counted, add),
        far,
        few,
        thread,
        own,
        rows,
        width: threads[0],
        alike: [x, y, number],
        full: threads.iter().product::<u32>().is_multiple_of(WARP),
        values: vec![thread, own, x, y, far[1]],
    };
    if maker.full {
        maker.shuffle();
    }
    maker.statements(STATEMENTS, true, 0);

    let place = own * threads[0] as i32 + thread;
    for (scalar, view) in [Scalar::I32, Scalar::I64].into_iter().zip(said) {
        let latest = maker.values.iter().rev().filter(|value| value.ty() == scalar.into()).copied();
        let numbers: Vec<Val<'_>> = latest.take(SAID - 3).chain([x, y, z]).collect();
        for (row, value) in (0..).zip(numbers) {
            view.at([k.i32(row), place]).store(value.to(scalar));
        }
    }
    let launch = Launch { kernel: name.to_owned(), grid, arguments };
    (Module::new(block.kernel().into_iter().collect()), launch)
}

/// Declares views and generates their arguments.
struct Views<'a, 'b> {
    k: Builder<'b>,
    random: &'a mut Random,
    arguments: &'a mut Vec<Argument>,
    /// Rows of all threads together.
    rows: u32,
    /// Threads of a row.
    width: u32,
}

/// A view of rows.
#[derive(Clone, Copy)]
struct Rows<'b> {
    place: PlaceRef<'b>,
    ty: Type,
    rank: usize,
    writes: bool,
    /// Added to the thread's index in the row.
    right: i32,
    /// Indices have eight bytes.
    wide: bool,
}

/// A view of bytes, in which each thread owns one scalar.
#[derive(Clone, Copy)]
struct Bytes<'b> {
    place: PlaceRef<'b>,
    scalar: Scalar,
    writes: bool,
    offset: Offset,
}

/// Added to the index of a thread's scalar, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offset {
    None,
    /// A parameter from 0 to 16, which may misalign it.
    Few,
    /// A parameter without a range.
    Far,
    Fixed(i32),
}

impl<'b> Views<'_, 'b> {
    fn view(&mut self, name: &str, ty: ViewType, extents: &[u64]) -> PlaceRef<'b> {
        let (element, count) = (ty.element, extents.iter().product::<u64>());
        let bits: Vec<u64> = (0..count).map(|_| self.random.bits(element)).collect();
        self.arguments.push(Argument::Tensor(Tensor::from_bits(element, extents, bits)));
        self.k.view_of(name, ty)
    }

    fn rows(&mut self, element: Scalar, lanes: u8, access: Access) -> Rows<'b> {
        let rank = self.random.pick(&[2, 2, 3]);
        let long = u64::from(self.width) * u64::from(lanes);
        let right = self.random.pick(&[0, 0, 0, 0, 1, -1, 3]);
        // Range analysis mostly proves the last index in bounds if the extent is fixed.
        let (last, extent) = match self.random.below(4) {
            0 | 1 => (Dim::Fixed(long), long),
            2 => (Dim::Any { multiple: 1 }, long),
            _ => (Dim::Any { multiple: 1 }, (long + 2).saturating_sub(self.random.below(7) as u64)),
        };
        let mut extents = vec![u64::from(self.rows) + self.random.below(3) as u64, extent];
        let mut dims = vec![Dim::Any { multiple: 1 }, last];
        if rank == 3 {
            extents.insert(0, 2);
            dims.insert(0, self.random.pick(&[Dim::Any { multiple: 1 }, Dim::Fixed(2)]));
        }
        let name = format!("rows_{}", self.arguments.len());
        let place = self.view(&name, ViewType::new(element, rank, access).with_dims(&dims), &extents);
        let ty = Type::vector(element, lanes).unwrap_or(element.into());
        Rows { place, ty, rank, writes: access != Access::Read, right, wide: self.random.below(2) == 0 }
    }

    fn bytes(&mut self, scalar: Scalar, access: Access) -> Bytes<'b> {
        let size = u64::from(scalar.bytes());
        // Range analysis can prove that all threads are in bounds of it.
        let known = u64::from(self.rows.next_power_of_two() * self.width) * size + 32;
        let (dim, extent) = match self.random.below(3) {
            0 => (Dim::Fixed(known), known),
            1 => (Dim::Any { multiple: 1 }, known - 40),
            _ => (Dim::Any { multiple: 1 }, u64::from(self.rows * self.width) * size),
        };
        let offset =
            self.random.pick(&[Offset::None, Offset::Few, Offset::Few, Offset::Far, Offset::Fixed(8)]);
        let name = format!("bytes_{}", self.arguments.len());
        let ty = ViewType::new(Scalar::I8, 1, access).with_dims(&[dim]).aligned(16);
        let place = self.view(&name, ty, &[extent]);
        Bytes { place, scalar, writes: access != Access::Read, offset }
    }
}

struct Maker<'b> {
    k: Builder<'b>,
    random: Random,
    shapes: RowShapes,
    views: Vec<Rows<'b>>,
    bytes: Vec<Bytes<'b>>,
    /// The view that all threads update atomically: its element and the operation.
    counts: (PlaceRef<'b>, Scalar, Opcode),
    /// Scalar parameters.
    far: [Val<'b>; 2],
    few: Val<'b>,
    thread: Val<'b>,
    /// The row of the thread.
    own: Val<'b>,
    rows: u32,
    width: u32,
    /// Values that are uniform in the block.
    alike: [Val<'b>; 3],
    /// All warps are full, so their threads may shuffle.
    full: bool,
    /// Values that the next statement may use.
    values: Vec<Val<'b>>,
}

impl<'b> Maker<'b> {
    /// Emits statements. All threads of the block execute them if `together`.
    fn statements(&mut self, count: usize, together: bool, depth: u32) {
        for _ in 0..count {
            match self.random.below(20) {
                0..=4 => self.load(),
                5..=8 => self.store(),
                9 | 10 => self.load_bytes(),
                11 | 12 => self.store_bytes(),
                13 => self.count(),
                14 if together && self.full => self.shuffle(),
                15 if depth < 2 => self.choice(together, depth),
                16 if depth < 2 && together && self.full => self.repeated(depth),
                17 if together && depth == 0 => self.k.barrier(),
                _ => self.compute(),
            }
        }
    }

    fn some(&mut self, ty: Type) -> Val<'b> {
        let fitting: Vec<Val<'b>> = self.values.iter().copied().filter(|value| value.ty() == ty).collect();
        if fitting.is_empty() || self.random.below(6) == 0 {
            let bits = self.random.bits(ty.scalar());
            return self.k.bits(ty, bits);
        }
        self.random.pick(&fitting)
    }

    fn condition(&mut self, together: bool) -> Val<'b> {
        let few = self.random.below(4) as i32;
        match self.random.below(if together { 2 } else { 5 }) {
            0 | 1 => self.random.pick(&self.alike.clone()).lt(few),
            2 => self.k.lane_id().lt(few * 8 + 3),
            3 => self.k.warp_id().lt(1),
            _ => {
                let value = self.some(Type::I32);
                value.lt(few)
            }
        }
    }

    /// Returns the index of the thread's row or one that is out of bounds; of a view that is only read, any index.
    fn row(&mut self, place: PlaceRef<'b>, dimension: u8, writes: bool) -> Val<'b> {
        let (k, own) = (self.k, self.own);
        match self.random.below(if writes { 8 } else { 11 }) {
            0 | 1 => own + self.far[0],
            2 => own.to(Scalar::I64) + self.far[1],
            3 => own,
            4 => {
                let condition = self.condition(false);
                let other = self.random.pick(&[-1, i32::MIN, i32::MAX, 500]);
                condition.select(own, k.i32(other))
            }
            5 => own - self.rows as i32,
            6 => own.to(Scalar::I64) + place.extent(dimension),
            // The same row, with a known range.
            7 => own & (self.rows.next_power_of_two() as i32 - 1),
            8 => k.i32(self.random.below(5) as i32 - 1),
            9 => own & 1,
            _ => self.some(Type::I32),
        }
    }

    fn indices(&mut self, view: Rows<'b>) -> Vec<Val<'b>> {
        let first = (view.rank == 3).then(|| {
            let first = self.random.pick(&[0, 1, 1, 2, -1]);
            if self.random.below(3) == 0 { self.far[0] + first } else { self.k.i32(first) }
        });
        let row = self.row(view.place, view.rank as u8 - 2, view.writes);
        let mut last = self.thread;
        if view.ty.is_vector() {
            last = last * i32::from(view.ty.lanes());
        }
        if view.right != 0 {
            last = last + view.right;
        }
        let all = first.into_iter().chain([row, last]);
        all.map(|index| if view.wide { index.to(Scalar::I64) } else { index }).collect()
    }

    fn load(&mut self) {
        let view = self.random.pick(&self.views.clone());
        let element = match self.indices(view)[..] {
            [row, last] => view.place.at([row, last]),
            [first, row, last] => view.place.at([first, row, last]),
            _ => return,
        };
        let value = if view.ty.is_vector() { element.load_vector(view.ty.lanes()) } else { element.load() };
        self.take(value);
    }

    fn store(&mut self) {
        let written: Vec<Rows<'b>> = self.views.iter().copied().filter(|view| view.writes).collect();
        let view = self.random.pick(&written);
        let value = self.some(view.ty);
        match self.indices(view)[..] {
            [row, last] => view.place.at([row, last]).store(value),
            [first, row, last] => view.place.at([first, row, last]).store(value),
            _ => {}
        }
    }

    /// Adds a value, and its sign extension if it has less than four bytes.
    fn take(&mut self, value: Val<'b>) {
        self.values.push(value);
        let ty = value.ty();
        if ty.scalar().is_int() && !ty.is_vector() && ty.scalar().bytes() < 4 {
            self.values.push(value.to(Scalar::I32));
        }
    }

    fn byte_index(&mut self, bytes: Bytes<'b>) -> Val<'b> {
        let number = match bytes.writes {
            true => self.own & (self.rows.next_power_of_two() as i32 - 1),
            false => self.row(bytes.place, 0, false).to(Scalar::I32) & 15,
        };
        let first = (number * self.width as i32 + self.thread) * bytes.scalar.bytes() as i32;
        match bytes.offset {
            Offset::None => first,
            Offset::Few => first + self.few,
            Offset::Far => first.to(Scalar::I64) + self.far[1],
            Offset::Fixed(by) => first + by,
        }
    }

    fn load_bytes(&mut self) {
        let bytes = self.random.pick(&self.bytes.clone());
        let index = self.byte_index(bytes);
        let value = bytes.place.at([index]).typed(bytes.scalar).load();
        self.take(value);
    }

    fn store_bytes(&mut self) {
        let written: Vec<Bytes<'b>> = self.bytes.iter().copied().filter(|bytes| bytes.writes).collect();
        let bytes = self.random.pick(&written);
        // No kernel computes floats, so NaNs keep their bits.
        let value = self.some(bytes.scalar.into());
        let index = self.byte_index(bytes);
        bytes.place.at([index]).typed(bytes.scalar).store(value);
    }

    /// The result of an atomic depends on the order of the threads, so it is not used.
    fn count(&mut self) {
        let (place, scalar, code) = self.counts;
        let row = self.row(place, 0, false);
        let amount = self.some(scalar.into());
        let _ = place.at([row, self.thread & 7]).atomic(code, amount);
    }

    fn shuffle(&mut self) {
        let value = self.some(Type::I32);
        let by = self.random.pick(&[1, 2, 4, 7, 16, 31]);
        let code = self.random.pick(&[
            Opcode::ShuffleXor,
            Opcode::ShuffleXor,
            Opcode::ShuffleUp,
            Opcode::ShuffleDown,
            Opcode::Shuffle,
        ]);
        // A shuffle by a value goes through memory.
        let other = self.shapes != RowShapes::Warps || self.random.below(8) == 0;
        let by = if other && self.random.below(2) == 0 { self.some(Type::I32) } else { self.k.i32(by) };
        let shuffled = self.k.emit(code, &[value + self.thread, by], Type::I32);
        self.values.push(shuffled);
    }

    fn compute(&mut self) {
        let k = self.k;
        let wide = self.random.below(3) == 0;
        let ty = if wide { Type::I64 } else { Type::I32 };
        let (a, b) = (self.some(ty), self.some(ty));
        let value = match self.random.below(6) {
            0 => a + b,
            1 => a * 3 + b,
            2 => a ^ b,
            3 => a.lt(b).select(a, b),
            4 if wide => a.to(Scalar::I32),
            4 => a.to(Scalar::I64),
            _ => k.emit(Opcode::MinS, &[a, b], ty),
        };
        self.values.push(value);
    }

    /// Emits a nested region. Its values are not used after it.
    fn nested(&mut self, together: bool, depth: u32) -> Val<'b> {
        let known = self.values.len();
        let count = 1 + self.random.below(4);
        self.statements(count, together, depth + 1);
        let result = self.some(Type::I32);
        self.values.truncate(known);
        result
    }

    fn choice(&mut self, together: bool, depth: u32) {
        let k = self.k;
        let alike = together && self.random.below(2) == 0;
        let condition = self.condition(alike);
        let this = std::cell::RefCell::new(&mut *self);
        let result = k.if_else(
            condition,
            || this.borrow_mut().nested(alike, depth),
            || this.borrow_mut().nested(alike, depth),
        );
        self.values.push(result);
    }

    /// Emits a loop that all threads execute, with a shuffle.
    fn repeated(&mut self, depth: u32) {
        let k = self.k;
        let times = k.i32(self.random.below(3) as i32);
        let initial = self.some(Type::I32);
        let result = k.range(k.i32(0), times).fold(initial, |count, carried| {
            let known = self.values.len();
            self.values.extend([count, carried]);
            let next = self.nested(true, depth);
            self.values.truncate(known);
            next + k.emit(Opcode::ShuffleXor, &[carried, k.i32(1)], Type::I32)
        });
        self.values.push(result);
    }
}
