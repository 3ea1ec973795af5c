//! Scans of rows on GPUs: what tiles of a row come to is computed and scanned, and blocks scan each tile from there on.
//!
//! No block waits for another: a launch gives what each tile but a row's last one comes to, a scan of those, which is one launch more unless they are very many,
//! gives where tiles begin, and a launch scans tiles. A warp has a part of a tile, in which each load takes a vector for each lane, one beside the other. Rows that
//! are no longer than a few of such loads are a warp's.

use vm_ir::builder::{Builder, Carry, Element, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar};
use vm_runtime::Argument;

use super::blocks;
use crate::Accelerator;
use crate::dtype::DType;
use crate::emit::{THREADS, V, WARP, binary, constant, zero};
use crate::error::Result;
use crate::evaluate;
use crate::node::Array;
use crate::op::{Binary, Reduction};

const WARPS: u32 = THREADS / WARP;
/// The longest row that a warp scans.
const OF_WARP: u64 = 512;
/// The same where there are enough rows to keep each unit busy with so many warps.
const OF_BUSY_WARP: u64 = 2048;
const BUSY: u64 = 32;

/// What a launch does.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// What each tile but the last one comes to.
    Sums,
    /// Each tile, from what those before it came to if there are any.
    Tiles { before: bool },
    /// Each row, by a warp, with so many vectors at once.
    Rows { vectors: u32 },
}

/// A variant of the kernel.
#[derive(Clone, Copy)]
struct Form {
    from: DType,
    to: DType,
    /// What is added up in.
    sum: DType,
    product: bool,
    part: Part,
    /// Is it one row?
    single: bool,
    /// A power of two that divides where rows begin, in elements.
    multiple: u64,
}

/// What elements are added up in: nothing narrower than a register.
fn accumulator(op: Reduction, to: DType) -> DType {
    match to {
        DType::Int8 | DType::Int16 | DType::UInt8 | DType::UInt16 => DType::Int32,
        _ => op.accumulator(to),
    }
}

/// The scans of rows, of which there are some and which have elements, in a type that is no bool.
///
/// # Errors
/// What computing and launching fail with.
pub(super) fn scanned(x: &Array, op: Reduction, to: DType, [rows, n]: [u64; 2]) -> Result<Array> {
    let (device, sum) = (x.device(), accumulator(op, to));
    let single = rows == 1;
    let mut form = Form {
        from: x.dtype(),
        to,
        sum,
        product: op == Reduction::Prod,
        part: Part::Sums,
        single,
        multiple: 1,
    };
    let lanes = u64::from(form.lanes());
    form.multiple = if single { lanes } else { lanes.min(1 << n.trailing_zeros()) };
    let (tile, elements) = (form.tile(), evaluate::dense(x)?);
    let row = |dtype: DType| match (single, dtype.is_complex()) {
        (true, false) => vec![n],
        (true, true) => vec![n, 2],
        (false, false) => vec![rows, n],
        (false, true) => vec![rows, n, 2],
    };
    let from = elements.buffer.shaped(&row(x.dtype()))?;
    let mut before = None;
    let is_busy = rows >= BUSY * u64::from(device.resources().compute_units);
    if n <= if is_busy { OF_BUSY_WARP } else { OF_WARP } {
        form.part = Part::Rows { vectors: if n <= u64::from(WARP) * lanes { 1 } else { 4 } };
    } else if n <= tile {
        form.part = Part::Tiles { before: false };
    } else {
        let tiles = n.div_ceil(tile) - 1;
        let sums = Array::empty(device, sum, &[rows, tiles])?;
        let to = evaluate::storage(&sums)?;
        let kernel = device.own("scan_tiles", form.key(), || form.kernel())?;
        let all = to.buffer.shaped(&[rows, tiles, sum.parts()])?;
        device.launch(&kernel, blocks(rows * tiles)?, &[all.into(), from.into()])?;
        before = Some(evaluate::dense(&scanned(&sums, op, sum, [rows, tiles])?)?);
        form.part = Part::Tiles { before: true };
    }
    let result = Array::empty(device, to, x.shape())?;
    let to = evaluate::storage(&result)?;
    let kernel = device.own("scan_tiles", form.key(), || form.kernel())?;
    let mut arguments: Vec<Argument<'_, Accelerator>> =
        vec![to.buffer.shaped(&row(result.dtype()))?.into(), from.into()];
    let tiles = n.div_ceil(tile);
    if let Some(before) = &before {
        arguments.push(before.buffer.shaped(&[rows, tiles - 1, sum.parts()])?.into());
    }
    let of_row = matches!(form.part, Part::Rows { .. });
    let grid = blocks(if of_row { rows.div_ceil(WARPS.into()) } else { rows * tiles })?;
    device.launch(&kernel, grid, &arguments)?;
    Ok(result)
}

impl Form {
    fn key(&self) -> Vec<u64> {
        let part = match self.part {
            Part::Sums => 0,
            Part::Tiles { before } => 1 + u64::from(before),
            Part::Rows { vectors } => 2 + u64::from(vectors),
        };
        let flags = [self.product, self.single].map(u64::from);
        vec![self.from as u64, self.to as u64, part, flags[0], flags[1], self.multiple]
    }

    /// Elements that are loaded at once.
    fn lanes(&self) -> u32 {
        match self.from.is_complex() || self.to.is_complex() {
            true => 1,
            false => (16 / self.from.bytes().max(self.sum.bytes()).max(self.to.bytes())) as u32,
        }
    }

    /// Vectors of a thread.
    fn vectors(&self) -> u32 {
        match self.part {
            Part::Rows { vectors } => vectors,
            _ => (if self.sum.bytes() > 8 { 8 } else { 16 }) / self.lanes(),
        }
    }

    fn tile(&self) -> u64 {
        u64::from(self.vectors() * self.lanes() * THREADS)
    }

    fn view<'b>(&self, k: Builder<'b>, name: &str, dtype: DType, access: Access) -> PlaceRef<'b> {
        let mut dims = vec![Dim::ANY, Dim::Any { multiple: self.multiple as u32 }, Dim::Fixed(2)];
        let mut names = vec!["rows", "n", ""];
        if self.single {
            (dims[1], names) = (Dim::ANY, names.split_off(1));
            dims.remove(0);
        }
        if !dtype.is_complex() {
            dims.pop();
        }
        let align = match dtype.is_complex() {
            true => dtype.bytes().min(16),
            false => (dtype.bytes() * self.multiple).min(16),
        };
        let ty = ViewType::new(dtype.stored(), dims.len(), access);
        k.view_of(name, ty.with_dims(&dims).named(&names).aligned(align as u32))
    }

    fn kernel(&self) -> Result<Kernel> {
        let block = IRBlock::new(GuestAddr(0));
        self.write(block.builder());
        Ok(block.kernel()?)
    }

    fn write<'b>(&self, k: Builder<'b>) {
        k.name("scan_tiles").block_size([THREADS, 1, 1]);
        let names = ["rows", "tiles"];
        let parts = [Dim::ANY, Dim::ANY, Dim::Fixed(self.sum.parts())];
        let of_tiles = |name, access| {
            k.view_of(name, ViewType::new(self.sum.stored(), 3, access).with_dims(&parts).named(&names))
        };
        let y = match self.part {
            Part::Sums => of_tiles("sums", Access::Write),
            _ => self.view(k, "y", self.to, Access::Write),
        };
        let x = self.view(k, "x", self.from, Access::Read);
        let number = k.block_id(Axis::X).to(Scalar::I64);
        let (lane, warp) = (k.lane_id(), k.warp_id());
        let scan = |row| Scan { k, of: *self, x, y, row, lane, warp };
        let of_block = |tiles: Val<'b>, number: Val<'b>| (number.div_u(tiles), number.rem_u(tiles));
        match self.part {
            Part::Sums => {
                let (row, tile) = of_block(y.extent(1).max(1), number);
                let scan = scan(row);
                let all = scan.elements(scan.first(tile));
                let sum = all.into_iter().flatten().reduce(|a, b| scan.add(a, b));
                let mut sum = sum.unwrap_or(scan.nothing());
                for distance in [1, 2, 4, 8, 16] {
                    sum = scan.add(sum, sum.map(|part| part.shuffle_xor(distance)));
                }
                let sums = scan.of_warps(sum);
                k.if_(k.thread_id(Axis::X).eq(0), || {
                    let all = sums.into_iter().reduce(|a, b| scan.add(a, b)).unwrap_or(scan.nothing());
                    y.at([row, tile, k.i64(0)]).store(scan.packed(all));
                });
            }
            Part::Tiles { before } => {
                let before = before.then(|| of_tiles("before", Access::Read));
                let begun = before.map(|before| {
                    // What was read last for the sums is read first, while a cache has it.
                    let number = (k.grid_dim(Axis::X).to(Scalar::I64) - 1 - number).max(0);
                    let (row, tile) = of_block(before.extent(1) + 1, number);
                    (row, tile, scan(row).unpacked(before.at([row, (tile - 1).max(0), k.i64(0)])))
                });
                let (row, tile, begun) = begun.unwrap_or((number, k.i64(0), scan(number).nothing()));
                let scan = scan(row);
                let begun = scan.choose(tile.gt(0), begun, scan.nothing());
                let first = scan.first(tile);
                let (own, total) = scan.warps_own(scan.elements(first));
                let begun =
                    scan.of_warps(total).into_iter().zip(0..).fold(begun, |begun, (sum, of)| {
                        scan.choose(warp.gt(of), scan.add(begun, sum), begun)
                    });
                scan.store(first, begun, own);
            }
            Part::Rows { .. } => {
                let scan = scan(number * i64::from(WARPS) + warp.to(Scalar::I64));
                let begun = scan.nothing();
                let step = i64::from(WARP * self.vectors() * self.lanes());
                k.range(k.i64(0), scan.n()).step(step).fold(scan.registers(begun), |first, begun| {
                    let begun = scan.of_registers(&begun);
                    let first = first + lane.to(Scalar::I64) * i64::from(self.lanes());
                    let (own, total) = scan.warps_own(scan.elements(first));
                    scan.store(first, begun, own);
                    scan.registers(scan.add(begun, total))
                });
            }
        }
    }
}

/// A kernel being written.
struct Scan<'b> {
    k: Builder<'b>,
    of: Form,
    x: PlaceRef<'b>,
    y: PlaceRef<'b>,
    row: Val<'b>,
    lane: Val<'b>,
    warp: Val<'b>,
}

impl<'b> Scan<'b> {
    fn add(&self, a: V<'b>, b: V<'b>) -> V<'b> {
        binary(if self.of.product { Binary::Multiply } else { Binary::Add }, a, b)
    }

    fn choose(&self, which: Val<'b>, a: V<'b>, b: V<'b>) -> V<'b> {
        V { re: which.select(a.re, b.re), im: a.im.zip(b.im).map(|(a, b)| which.select(a, b)), ..a }
    }

    /// What a scan begins with.
    fn nothing(&self) -> V<'b> {
        let zero = self.k.bits(self.of.sum.scalar().into(), 0);
        let re = constant(zero, f64::from(u8::from(self.of.product)));
        V { dtype: self.of.sum, re, im: self.of.sum.is_complex().then_some(zero) }
    }

    fn registers(&self, value: V<'b>) -> Vec<Val<'b>> {
        [Some(value.re), value.im].into_iter().flatten().collect()
    }

    fn of_registers(&self, parts: &[Val<'b>]) -> V<'b> {
        let re = parts.first().copied().unwrap_or(self.nothing().re);
        V { dtype: self.of.sum, re, im: parts.get(1).copied() }
    }

    /// Both parts of a complex number as memory has them.
    fn packed(&self, value: V<'b>) -> Val<'b> {
        value.im.map_or(value.re, |im| self.k.vector(&[value.re, im]))
    }

    fn unpacked(&self, from: Element<'b>) -> V<'b> {
        if !self.of.sum.is_complex() {
            return V::new(self.of.sum, from.load());
        }
        let both = from.load_vector(2);
        V::complex(self.of.sum, both.lane(0), both.lane(1))
    }

    fn n(&self) -> Val<'b> {
        self.x.extent(u8::from(!self.of.single))
    }

    /// The first element of a thread in a tile.
    fn first(&self, tile: Val<'b>) -> Val<'b> {
        let of = self.of;
        let of_lane = i64::from(of.lanes());
        let of_warp = of_lane * i64::from(of.vectors() * WARP);
        tile * of.tile() as i64 + self.warp.to(Scalar::I64) * of_warp + self.lane.to(Scalar::I64) * of_lane
    }

    /// Where a thread's vectors are.
    fn places(&self, first: Val<'b>) -> Vec<Val<'b>> {
        let step = i64::from(WARP * self.of.lanes());
        (0..i64::from(self.of.vectors())).map(|vector| first + vector * step).collect()
    }

    /// Runs `each` for where a thread's vectors are: in a branch of its own where all are in the row, in which they need no check.
    fn in_row<T: Carry<'b>>(&self, first: Val<'b>, each: impl Fn(Vec<Val<'b>>) -> T) -> T {
        let lanes = i64::from(self.of.lanes());
        let end = first + ((i64::from(self.of.vectors()) - 1) * i64::from(WARP) + 1) * lanes;
        let each = || each(self.places(first));
        self.k.if_else(end.le(self.n()), each, each)
    }

    fn element(&self, view: PlaceRef<'b>, dtype: DType, at: Val<'b>) -> Element<'b> {
        let part = self.k.i64(0);
        match (self.of.single, dtype.is_complex()) {
            (true, false) => view.at([at]),
            (true, true) => view.at([at, part]),
            (false, false) => view.at([self.row, at]),
            (false, true) => view.at([self.row, at, part]),
        }
    }

    /// A thread's vectors, each as its elements. Those behind the row's end are 0.
    fn elements(&self, first: Val<'b>) -> Vec<Vec<V<'b>>> {
        let of = self.of;
        let lanes = if of.from.is_complex() { 2 } else { of.lanes() as u8 };
        let all = self.in_row(first, |places| -> Vec<Val<'b>> {
            let element = |at| self.element(self.x, of.from, at);
            let load = |e: Element<'b>| if lanes > 1 { e.load_vector(lanes) } else { e.load() };
            places.into_iter().map(element).map(load).collect()
        });
        let value = |value: Val<'b>| match of.from {
            DType::Bool => V::bool(value.ne(zero(value))),
            _ => V::new(of.from, value),
        };
        all.into_iter()
            .map(|vector| match (of.from.is_complex(), lanes) {
                (true, _) => vec![V::complex(of.from, vector.lane(0), vector.lane(1)).to(of.sum)],
                (_, 1) => vec![value(vector).to(of.sum)],
                _ => (0..lanes).map(|lane| value(vector.lane(lane)).to(of.sum)).collect(),
            })
            .collect()
    }

    /// The scan of a warp's part, of what each vector begins with and its elements from there on, and what all of it comes to.
    fn warps_own(&self, mut vectors: Vec<Vec<V<'b>>>) -> (Vec<(V<'b>, Vec<V<'b>>)>, V<'b>) {
        for vector in &mut vectors {
            for at in 1..vector.len() {
                vector[at] = self.add(vector[at - 1], vector[at]);
            }
        }
        let mut so_far = self.nothing();
        let own = vectors.into_iter().map(|vector| {
            let mut up_to = vector.last().copied().unwrap_or(so_far);
            for distance in [1, 2, 4, 8, 16] {
                let below = up_to.map(|part| part.shuffle_up(distance));
                up_to = self.choose(self.lane.ge(distance), self.add(below, up_to), up_to);
            }
            let below = up_to.map(|part| part.shuffle_up(1));
            let begun = self.choose(self.lane.gt(0), self.add(so_far, below), so_far);
            so_far = self.add(so_far, up_to.map(|part| part.shuffle(31)));
            (begun, vector)
        });
        (own.collect(), so_far)
    }

    /// What all warps have, in order.
    fn of_warps(&self, value: V<'b>) -> Vec<V<'b>> {
        let (k, sum) = (self.k, self.of.sum);
        let shared = k.shared("of_warps", sum.stored(), &[WARPS, sum.parts() as u32]);
        let zero = k.i32(0);
        k.if_(self.lane.eq(0), || shared.at([self.warp, zero]).store(self.packed(value)));
        k.barrier();
        (0..WARPS).map(|warp| self.unpacked(shared.at([k.i32(warp as i32), zero]))).collect()
    }

    /// Stores a thread's vectors, from what they begin with on.
    fn store(&self, first: Val<'b>, begun: V<'b>, vectors: Vec<(V<'b>, Vec<V<'b>>)>) {
        let (k, of) = (self.k, self.of);
        let all: Vec<_> = vectors
            .into_iter()
            .map(|(own, elements)| {
                let begun = self.add(begun, own);
                let all: Vec<_> = elements.into_iter().map(|e| self.add(begun, e).to(of.to)).collect();
                match all[..] {
                    [one] => self.packed(one),
                    _ => k.vector(&all.iter().map(|element| element.re).collect::<Vec<_>>()),
                }
            })
            .collect();
        self.in_row(first, |places| {
            for (at, value) in places.into_iter().zip(&all) {
                self.element(self.y, of.to, at).store(*value);
            }
        });
    }
}
