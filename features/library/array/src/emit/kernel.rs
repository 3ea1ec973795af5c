//! The kernel of a program in a form.
//!
//! Parameters: the outputs, the leaves, the numbers (two of a complex one), of each index its value at the first element and its steps along the dimensions,
//! and then, on a processor, how many rows a block takes, and of a reduction in parts how long a part is.

use vm_ir::builder::{Builder, Element, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use super::math;
use super::value::{V, constant, splat, ty, zero};
use crate::dtype::DType;
use crate::error::Result;
use crate::op::{Binary, Reduction};
use crate::program::{Along, Form, Place, Program, Step, Value, vectors_of_a_thread};

/// Elements along the last dimension that a processor's block takes at once.
pub(crate) const RUN: i64 = 1 << 14;
/// Threads of a GPU's block.
pub(crate) const THREADS: u32 = 256;
/// Additions of a chain of floats.
const CHAIN: i64 = 16;
/// Threads of a warp, which share a row that is reduced.
pub(crate) const WARP: u32 = 32;

const NAMES: [&str; 4] = ["d0", "d1", "d2", "d3"];

struct Context<'a, 'b> {
    k: Builder<'b>,
    program: &'a Program,
    form: &'a Form,
    outputs: Vec<PlaceRef<'b>>,
    leaves: Vec<PlaceRef<'b>>,
    numbers: Vec<V<'b>>,
    indices: Vec<Vec<Val<'b>>>,
}

/// What the kernel of a program is.
pub(crate) fn kernel(program: &Program, form: &Form) -> Result<Kernel> {
    let block = IRBlock::new(GuestAddr(0));
    let k = block.builder();
    k.name("array");
    let rank = usize::from(form.rank);
    let view = |name: String, dtype: DType, place: &Place, access, partial| {
        k.view_of(&name, view_type(dtype, place, rank, access, partial))
    };
    let outputs = program.outputs.iter().zip(&form.outputs).enumerate();
    let outputs: Vec<_> = outputs
        .map(|(at, ((_, dtype), place))| view(format!("y{at}"), *dtype, place, Access::Write, form.partial))
        .collect();
    let leaves = program.leaves.iter().zip(&form.leaves).enumerate();
    let leaves: Vec<_> = leaves
        .map(|(at, (dtype, place))| view(format!("x{at}"), *dtype, place, Access::Read, false))
        .collect();
    let number = |(at, dtype): (usize, &DType)| {
        let part = |name: &str| k.scalar(&format!("n{at}{name}"), Type::scalar_of(dtype.stored()));
        let re = part("");
        match dtype.is_complex() {
            true => V::complex(*dtype, re, part("i")),
            false => V::new(*dtype, re),
        }
    };
    let numbers: Vec<_> = program.numbers.iter().enumerate().map(number).collect();
    let index = |at| (0..=rank).map(|d| k.scalar(&format!("i{at}_{d}"), Type::I64)).collect();
    let indices = (0..program.indices).map(index).collect();
    let rows = form.cpu.then(|| k.scalar_in("rows", Type::I64, 1, 1 << 40));
    let part = form.partial.then(|| k.scalar_in("part", Type::I64, 1, 1 << 40));
    let numbers = numbers.into_iter().map(loaded).collect();
    let cx = Context { k, program, form, outputs, leaves, numbers, indices };
    match form.reduced {
        None => cx.map(rows),
        Some(at) if usize::from(at) + 1 == rank => cx.reduce_rows(rows, part),
        Some(at) => cx.reduce_columns(usize::from(at), rows, part),
    }
    Ok(block.kernel()?)
}

/// A number as memory has it in the register's type.
fn loaded(number: V<'_>) -> V<'_> {
    match number.dtype {
        DType::Bool => V::bool(number.re.ne(zero(number.re))),
        _ => number,
    }
}

fn view_type(dtype: DType, place: &Place, rank: usize, access: Access, partial: bool) -> ViewType {
    let mut dims = Vec::new();
    let mut names = Vec::new();
    if place.flat {
        dims.push(Dim::ANY);
        names.push("");
    } else {
        if partial {
            dims.push(Dim::ANY);
            names.push("");
        }
        for d in (0..rank).filter(|d| place.dims[*d] != Along::Not) {
            dims.push(Dim::ANY);
            names.push(NAMES[d]);
        }
    }
    if place.tail || dtype.is_complex() {
        dims.push(Dim::Fixed(dtype.parts()));
        names.push("");
    }
    let bytes = dtype.stored().bytes();
    ViewType::new(dtype.stored(), dims.len(), access)
        .with_dims(&dims)
        .named(&names)
        .aligned(u32::from(place.align).max(bytes))
}

fn element<'b>(place: PlaceRef<'b>, indices: &[Val<'b>]) -> Element<'b> {
    match *indices {
        [a] => place.at([a]),
        [a, b] => place.at([a, b]),
        [a, b, c] => place.at([a, b, c]),
        [a, b, c, d, ..] => place.at([a, b, c, d]),
        [] => place.at([]),
    }
}

impl<'b> Context<'_, 'b> {
    fn rank(&self) -> usize {
        usize::from(self.form.rank)
    }

    fn last(&self) -> usize {
        self.rank() - 1
    }

    /// An extent of the iteration, by whoever has it.
    fn extent(&self, d: usize) -> Val<'b> {
        let of = |place: &Place, view: PlaceRef<'b>, partial: bool| {
            if place.flat || place.dims[d] == Along::Not {
                return None;
            }
            let before = place.dims[..d].iter().filter(|along| **along != Along::Not).count();
            Some(view.extent((before + usize::from(partial)) as u8))
        };
        let outputs = self.form.outputs.iter().zip(&self.outputs);
        let leaves = self.form.leaves.iter().zip(&self.leaves);
        outputs
            .filter_map(|(place, view)| of(place, *view, self.form.partial))
            .chain(leaves.filter_map(|(place, view)| of(place, *view, false)))
            .next()
            .unwrap_or_else(|| self.k.i64(1))
    }

    /// The indices of an element.
    fn indices(&self, place: &Place, view: PlaceRef<'b>, at: &[Val<'b>]) -> Vec<Val<'b>> {
        let mut indices = Vec::new();
        for (d, along) in place.dims[..self.rank()].iter().enumerate() {
            match along {
                Along::Not => {}
                Along::Forward => indices.push(at[d]),
                Along::Back => {
                    let dimension = indices.len() as u8;
                    indices.push(view.extent(dimension) - 1 - at[d]);
                }
            }
        }
        indices
    }

    fn load(&self, leaf: usize, at: &[Val<'b>], lanes: u8) -> V<'b> {
        let (place, view, dtype) = (&self.form.leaves[leaf], self.leaves[leaf], self.program.leaves[leaf]);
        let mut indices = self.indices(place, view, at);
        if place.tail || dtype.is_complex() {
            indices.push(self.k.i64(0));
        }
        if dtype.is_complex() {
            let both = element(view, &indices).load_vector(2);
            return V::complex(dtype, both.lane(0), both.lane(1));
        }
        let along = lanes > 1 && place.dims[self.last()] != Along::Not;
        let element = element(view, &indices);
        let value = if along { element.load_vector(lanes) } else { splat(element.load(), lanes) };
        loaded(V::new(dtype, value))
    }

    fn gather(&self, leaf: usize, index: Val<'b>, lanes: u8) -> V<'b> {
        let (view, dtype) = (self.leaves[leaf], self.program.leaves[leaf]);
        if dtype.is_complex() {
            let both = view.at([index, self.k.i64(0)]).load_vector(2);
            return V::complex(dtype, both.lane(0), both.lane(1));
        }
        let value = match lanes {
            1 => view.at([index]).load(),
            _ => {
                let all: Vec<_> = (0..lanes).map(|lane| view.at([index.lane(lane)]).load()).collect();
                self.k.vector(&all)
            }
        };
        loaded(V::new(dtype, value))
    }

    fn index(&self, index: usize, at: &[Val<'b>], lanes: u8) -> V<'b> {
        let coefficients = &self.indices[index];
        let mut sum = coefficients[0];
        for (coefficient, place) in coefficients[1..].iter().zip(at) {
            sum = sum + *coefficient * *place;
        }
        let value = match (lanes, coefficients.get(self.rank())) {
            (2.., Some(step)) => {
                let lanes: Vec<_> = (0..lanes).map(|lane| sum + *step * i64::from(lane)).collect();
                self.k.vector(&lanes)
            }
            _ => splat(sum, lanes),
        };
        V::new(DType::Int64, value)
    }

    /// Values of steps `from..to`, behind those that are known.
    fn compute(&self, values: &mut Vec<V<'b>>, to: usize, at: &[Val<'b>], lanes: u8, reduced: &[V<'b>]) {
        for (step, dtype) in &self.program.steps[values.len()..to] {
            let value = |value: Value| values[usize::from(value)];
            let next = match *step {
                Step::Leaf(leaf) => self.load(leaf.into(), at, lanes),
                Step::Number(number) => self.numbers[usize::from(number)].map(|part| splat(part, lanes)),
                Step::Index(index) => self.index(index.into(), at, lanes),
                Step::Cast(of) => value(of).to(*dtype),
                Step::Unary(op, of) => math::unary(op, value(of), *dtype),
                Step::Binary(op, a, b) => math::binary(op, value(a), value(b)),
                Step::Select(which, a, b) => {
                    let (which, a, b) = (value(which).re, value(a), value(b));
                    let im = a.im.zip(b.im).map(|(a, b)| which.select(a, b));
                    V { dtype: *dtype, re: which.select(a.re, b.re), im }
                }
                Step::Complex(re, im) => V::complex(*dtype, value(re).re, value(im).re),
                Step::Gather(leaf, index) => self.gather(leaf.into(), value(index).re, lanes),
                Step::Uniform(counter, key) => {
                    let words = math::philox(value(counter).re, value(key).re);
                    V::new(*dtype, uniform(*dtype, words))
                }
                Step::Bits(counter, key) => {
                    V::new(*dtype, wide(math::philox(value(counter).re, value(key).re)))
                }
                Step::Reduced(number) => reduced[usize::from(number)],
            };
            values.push(next);
        }
    }

    fn store(&self, output: usize, value: V<'b>, at: &[Val<'b>], part: Option<Val<'b>>) {
        let (place, view) = (&self.form.outputs[output], self.outputs[output]);
        let dtype = self.program.outputs[output].1;
        let value = value.to(dtype);
        let mut indices: Vec<_> = part.into_iter().collect();
        let own: Vec<_> = match part {
            None => self.indices(place, view, at),
            Some(_) => (0..self.rank()).filter(|d| place.dims[*d] != Along::Not).map(|d| at[d]).collect(),
        };
        indices.extend(own);
        if place.tail || dtype.is_complex() {
            indices.push(self.k.i64(0));
        }
        let element = element(view, &indices);
        match value.im {
            Some(im) => element.store(self.k.vector(&[value.re, im])),
            None if dtype == DType::Bool => element.store(value.re.to(Scalar::I8)),
            None => element.store(value.re),
        }
    }

    /// The place in dimensions of a number that counts through them.
    fn place_of(&self, number: Val<'b>, dims: &[usize], at: &mut [Val<'b>]) {
        let mut rest = number;
        for (n, d) in dims.iter().enumerate().rev() {
            if n == 0 {
                at[*d] = rest;
            } else {
                let extent = self.extent(*d);
                at[*d] = rest.rem_u(extent);
                rest = rest.div_u(extent);
            }
        }
    }

    fn count(&self, dims: &[usize]) -> Val<'b> {
        dims.iter().fold(self.k.i64(1), |product, d| product * self.extent(*d))
    }

    fn block(&self, axis: Axis) -> Val<'b> {
        self.k.block_id(axis).to(Scalar::I64)
    }

    /// Runs `body` for each row of a processor's block, or for that of a GPU's thread or warp.
    fn rows(
        &self,
        total: Val<'b>,
        rows: Option<Val<'b>>,
        of_warp: bool,
        body: impl FnOnce(Val<'b>, Val<'b>),
    ) {
        let k = self.k;
        match rows {
            Some(rows) => {
                let first = self.block(Axis::X) * rows;
                let yes = k.bool(true);
                k.range(first, (first + rows).min(total)).each(|row| body(row, yes));
            }
            None if of_warp => {
                k.block_size([THREADS, 1, 1]);
                let row = self.block(Axis::X) * i64::from(THREADS / WARP) + k.warp_id().to(Scalar::I64);
                // All threads of a warp go on together; what there is no row for does the last one's work, and stores nothing.
                body(row.min(total - 1), row.lt(total) & k.lane_id().eq(k.i32(0)));
            }
            None => {
                k.block_size([THREADS, 1, 1]);
                let row = k.global_id(Axis::X);
                let yes = k.bool(true);
                k.if_(row.lt(total), || body(row, yes));
            }
        }
    }

    /// All elements, each by itself.
    fn map(&self, rows: Option<Val<'b>>) {
        let (k, lanes, last) = (self.k, self.form.lanes, self.last());
        let outer: Vec<usize> = (0..last).collect();
        let n = self.extent(last);
        let body = |at: &[Val<'b>], lanes| {
            let mut values = Vec::new();
            self.compute(&mut values, self.program.steps.len(), at, lanes, &[]);
            for (output, (value, _)) in self.program.outputs.iter().enumerate() {
                self.store(output, values[usize::from(*value)], at, None);
            }
        };
        let along = |at: &mut Vec<Val<'b>>, first: Val<'b>, end: Val<'b>| {
            let whole = if lanes > 1 { end & -i64::from(lanes) } else { end };
            k.range(first, whole).step(i64::from(lanes)).each(|i| {
                at[last] = i;
                body(at, lanes);
            });
            if lanes > 1 {
                k.range(first.max(whole), end).each(|i| {
                    at[last] = i;
                    body(at, 1);
                });
            }
        };
        let mut at = vec![k.i64(0); self.rank()];
        if self.form.cpu {
            let axis = if outer.is_empty() { Axis::X } else { Axis::Y };
            let first = self.block(axis) * RUN;
            let end = (first + RUN).min(n);
            if outer.is_empty() {
                return along(&mut at, first, end);
            }
            return self.rows(self.count(&outer), rows, false, |row, _| {
                self.place_of(row, &outer, &mut at);
                along(&mut at, first, end);
            });
        }
        // A thread takes a vector, of a dense array several; rows are whole numbers of them.
        let vectors = n.div_u(constant(n, lanes.into()));
        let total = self.count(&outer) * vectors;
        let several = i64::from(vectors_of_a_thread(self.rank(), lanes));
        if several > 1 {
            k.block_size([THREADS, 1, 1]);
            let first =
                self.block(Axis::X) * (several * i64::from(THREADS)) + k.thread_id(Axis::X).to(Scalar::I64);
            let number = |n: i64| first + n * i64::from(THREADS);
            let place = |n: i64| vec![number(n) * i64::from(lanes)];
            let whole = || {
                // All are read before one is written.
                let all: Vec<_> = (0..several)
                    .map(|n| {
                        let (at, mut values) = (place(n), Vec::new());
                        self.compute(&mut values, self.program.steps.len(), &at, lanes, &[]);
                        (at, values)
                    })
                    .collect();
                for (at, values) in all {
                    for (output, (value, _)) in self.program.outputs.iter().enumerate() {
                        self.store(output, values[usize::from(*value)], &at, None);
                    }
                }
            };
            let single = || (0..several).for_each(|n| k.if_(number(n).lt(total), || body(&place(n), lanes)));
            return k.if_else(number(several - 1).lt(total), whole, single);
        }
        self.rows(total, None, false, |number, _| {
            let (row, vector) = match outer.is_empty() {
                true => (k.i64(0), number),
                false => (number.div_u(vectors), number.rem_u(vectors)),
            };
            self.place_of(row, &outer, &mut at);
            at[last] = vector * i64::from(lanes);
            body(&at, lanes);
        });
    }

    /// What a reduction begins with.
    fn identity(&self, op: Reduction, dtype: DType, lanes: u8) -> V<'b> {
        let (scalar, part) = (dtype.scalar(), ty(dtype.scalar(), lanes));
        let k = self.k;
        let re = match op {
            Reduction::Sum | Reduction::Any => k.bits(part, 0),
            Reduction::Prod | Reduction::All => constant(k.bits(part, 0), 1.0),
            Reduction::Max | Reduction::Min if scalar.is_float() => {
                let end = if op == Reduction::Max { f64::NEG_INFINITY } else { f64::INFINITY };
                k.constant(part, end)
            }
            Reduction::Max | Reduction::Min => {
                let top = 1u64 << (scalar.bits() - 1);
                let signed = matches!(dtype.kind(), crate::dtype::Kind::Signed);
                k.bits(
                    part,
                    match (op, signed) {
                        (Reduction::Max, true) => top,
                        (Reduction::Max, false) => 0,
                        (_, true) => top - 1,
                        (_, false) => scalar.mask(),
                    },
                )
            }
        };
        match dtype.is_complex() {
            true => V::complex(dtype, re, zero(re)),
            false => V::new(dtype, re),
        }
    }

    fn combine(op: Reduction, a: V<'b>, b: V<'b>) -> V<'b> {
        let op = match op {
            Reduction::Sum => Binary::Add,
            Reduction::Prod => Binary::Multiply,
            Reduction::Max => Binary::Maximum,
            Reduction::Min => Binary::Minimum,
            Reduction::Any => Binary::LogicalOr,
            Reduction::All => Binary::LogicalAnd,
        };
        math::binary(op, a, b)
    }

    /// What the reductions are with the elements at a place.
    fn take(&self, sums: Sums<'b>, at: &[Val<'b>], lanes: u8) -> Sums<'b> {
        let mut values = Vec::new();
        self.compute(&mut values, self.program.elements, at, lanes, &[]);
        let of = self.program.reductions.iter().zip(sums.0);
        Sums(
            of.map(|((op, value, dtype), sum)| {
                Self::combine(*op, sum, values[usize::from(*value)].to(*dtype))
            })
            .collect(),
        )
    }

    fn begin(&self, lanes: u8) -> Sums<'b> {
        Sums(self.program.reductions.iter().map(|(op, _, dtype)| self.identity(*op, *dtype, lanes)).collect())
    }

    fn combined(&self, a: &[V<'b>], b: &[V<'b>]) -> Vec<V<'b>> {
        let ops = self.program.reductions.iter();
        ops.zip(a.iter().zip(b)).map(|((op, ..), (a, b))| Self::combine(*op, *a, *b)).collect()
    }

    /// Stores results: those of a part as they are, others with what is computed of them.
    fn end(&self, sums: Vec<V<'b>>, at: &[Val<'b>], lanes: u8, part: Option<Val<'b>>) {
        if part.is_some() {
            sums.iter().enumerate().for_each(|(output, sum)| self.store(output, *sum, at, part));
            return;
        }
        // Steps of elements are no results' business: nothing behind uses one.
        let elements = self.program.elements;
        let mut values = vec![V::new(DType::Int64, self.k.i64(0)); elements];
        self.compute(&mut values, self.program.steps.len(), at, lanes, &sums);
        for (output, (value, _)) in self.program.outputs.iter().enumerate() {
            self.store(output, values[usize::from(*value)], at, None);
        }
    }

    /// Runs `body` for each result, and each part of the reduced dimension if there are any, with first and end of it and the part's number.
    fn results(
        &self,
        results: Val<'b>,
        n: Val<'b>,
        [rows, part]: [Option<Val<'b>>; 2],
        of_warp: bool,
        body: impl FnOnce(Val<'b>, Val<'b>, [Val<'b>; 2], Option<Val<'b>>),
    ) {
        let Some(part) = part else {
            return self.rows(results, rows, of_warp, |row, stores| {
                body(row, stores, [self.k.i64(0), n], None);
            });
        };
        let of = |number: Val<'b>| [(number * part).min(n), (number * part + part).min(n)];
        if self.form.cpu {
            let number = self.block(Axis::Y);
            return self
                .rows(results, rows, of_warp, |row, stores| body(row, stores, of(number), Some(number)));
        }
        // A GPU counts results of parts, so that few results don't leave a block's threads without work.
        let parts = self.outputs[0].extent(0);
        self.rows(results * parts, rows, of_warp, |at, stores| {
            let number = at.div_u(results);
            body(at.rem_u(results), stores, of(number), Some(number));
        });
    }

    /// Returns whether a reduction sums floats.
    fn sums_floats(&self) -> bool {
        let sums = |(op, _, dtype): &(Reduction, Value, DType)| *op == Reduction::Sum && dtype.is_inexact();
        self.program.reductions.iter().any(sums)
    }

    /// One set of reductions of several.
    fn joined(&self, sums: Sums<'b>) -> Sums<'b> {
        let mut sets = sums.0.chunks(self.program.reductions.len());
        let first = sets.next().unwrap_or_default().to_vec();
        Sums(sets.fold(first, |joined, set| self.combined(&joined, set)))
    }

    /// Folds `take` over `low..high` into sets of reductions like `begin`, and joins them.
    ///
    /// Floats are summed in chains of [`CHAIN`] additions, and the chains' sums with compensation (Kahan 1965), so the error hardly grows with
    /// the number of elements, and the chains don't wait for each other.
    fn chained(
        &self,
        [low, high]: [Val<'b>; 2],
        step: i64,
        begin: Sums<'b>,
        take: impl FnOnce(Val<'b>, Sums<'b>) -> Sums<'b>,
    ) -> Sums<'b> {
        let k = self.k;
        if !self.sums_floats() {
            return self.joined(k.range(low, high).step(step).fold(begin, take));
        }
        let reductions = &self.program.reductions;
        let identity = self.joined(begin.clone());
        let errors = identity.0.iter().map(|sum| sum.map(zero));
        let carried = Sums(identity.0.iter().copied().chain(errors).collect());
        let mut result = k.range(low, high).step(step * CHAIN).fold(carried, |first, carried| {
            let count = ((high - first + (step - 1)).div_u(k.i64(step))).min(CHAIN);
            let chain = k.range(k.i64(0), count).fold(begin, |n, sums| take(first + n * step, sums));
            let chain = self.joined(chain);
            let (sums, errors) = carried.0.split_at(reductions.len());
            let one = reductions.iter().zip(sums).zip(errors.iter().zip(chain.0));
            let (sums, errors): (Vec<_>, Vec<_>) = one
                .map(|(((op, _, dtype), sum), (error, chain))| {
                    match *op == Reduction::Sum && dtype.is_inexact() {
                        true => compensated(*sum, *error, chain),
                        false => (Self::combine(*op, *sum, chain), *error),
                    }
                })
                .unzip();
            Sums(sums.into_iter().chain(errors).collect())
        });
        result.0.truncate(reductions.len());
        result
    }

    /// The reductions along a dimension of the most whole groups of elements, `step` apart, which are read together; and where the next begins.
    fn several(
        &self,
        at: &mut [Val<'b>],
        along: usize,
        [first, own, end]: [Val<'b>; 3],
        step: i64,
        lanes: u8,
    ) -> (Val<'b>, Sums<'b>) {
        let several: usize = if self.form.cpu { 1 } else { 4 };
        let far = first + ((end - first) & -(step * several as i64));
        let of_one = self.program.reductions.len();
        let begun = Sums((0..several).flat_map(|_| self.begin(lanes).0).collect());
        let sums = self.chained([first + own, far], step * several as i64, begun, |i, sums| {
            let of = sums.0.chunks(of_one).zip(0..).flat_map(|(sums, n)| {
                at[along] = i + n * step;
                self.take(Sums(sums.to_vec()), at, lanes).0
            });
            Sums(of.collect())
        });
        (far, sums)
    }

    /// The last dimension is reduced: a processor's thread takes rows, a GPU's warp one.
    fn reduce_rows(&self, rows: Option<Val<'b>>, part: Option<Val<'b>>) {
        let (k, lanes, last) = (self.k, self.form.lanes, self.last());
        let outer: Vec<usize> = (0..last).collect();
        let mut at = vec![k.i64(0); self.rank()];
        self.results(
            self.count(&outer),
            self.extent(last),
            [rows, part],
            true,
            |row, stores, [first, end], part| {
                self.place_of(row, &outer, &mut at);
                let threads = if self.form.cpu { 1 } else { i64::from(WARP) };
                let own = if self.form.cpu { k.i64(0) } else { k.lane_id().to(Scalar::I64) };
                let mut sums = self.begin(1);
                let mut rest = first;
                if lanes > 1 {
                    let step = threads * i64::from(lanes);
                    let whole = first + ((end - first) & -step);
                    let (far, wide) =
                        self.several(&mut at, last, [first, own * i64::from(lanes), end], step, lanes);
                    // On a processor `several` leaves no whole vector.
                    let mut wide = match self.form.cpu {
                        true => wide.0,
                        false => {
                            let rest = k.range(far + own * i64::from(lanes), whole).step(step);
                            let taken = rest.fold(wide, |i, sums| {
                                at[last] = i;
                                self.take(sums, &at, lanes)
                            });
                            taken.0
                        }
                    };
                    let mut width = lanes;
                    // Lanes are added in a fixed order, halves first.
                    let mut parts: Vec<Vec<V<'b>>> = (0..width)
                        .map(|lane| wide.iter().map(|sum| sum.map(|part| part.lane(lane))).collect())
                        .collect();
                    while width > 1 {
                        width /= 2;
                        let half = usize::from(width);
                        for lane in 0..half {
                            parts[lane] = self.combined(&parts[lane], &parts[lane + half]);
                        }
                    }
                    wide = parts.swap_remove(0);
                    sums = Sums(wide);
                    rest = whole;
                }
                let take = |i, sums| {
                    at[last] = i;
                    self.take(sums, &at, 1)
                };
                let mut sums = match lanes {
                    1 => self.chained([rest + own, end], threads, sums, take).0,
                    _ => k.range(rest + own, end).step(threads).fold(sums, take).0,
                };
                if !self.form.cpu {
                    for distance in [16, 8, 4, 2, 1] {
                        let others: Vec<_> = sums.iter().map(|sum| shuffled(*sum, distance)).collect();
                        sums = self.combined(&sums, &others);
                    }
                }
                at[last] = k.i64(0);
                match self.form.cpu {
                    true => self.end(sums, &at, 1, part),
                    false => k.if_(stores, || self.end(sums, &at, 1, part)),
                }
            },
        );
    }

    /// Another dimension is reduced: each thread takes some elements of the last one, of a row on a processor several one behind the other.
    fn reduce_columns(&self, reduced: usize, rows: Option<Val<'b>>, part: Option<Val<'b>>) {
        let (k, lanes, last) = (self.k, self.form.lanes, self.last());
        let outer: Vec<usize> = (0..last).filter(|d| *d != reduced).collect();
        let vectors = self.extent(last).div_u(k.i64(lanes.into()));
        let mut at = vec![k.i64(0); self.rank()];
        let results = self.count(&outer) * vectors;
        self.results(results, self.extent(reduced), [rows, part], false, |number, _, [first, end], part| {
            self.place_of(number.div_u(vectors), &outer, &mut at);
            at[last] = number.rem_u(vectors) * i64::from(lanes);
            let (far, mut sums) = self.several(&mut at, reduced, [first, k.i64(0), end], 1, lanes);
            if !self.form.cpu {
                sums = k.range(far, end).fold(sums, |r, sums| {
                    at[reduced] = r;
                    self.take(sums, &at, lanes)
                });
            }
            at[reduced] = k.i64(0);
            self.end(sums.0, &at, lanes, part);
        });
    }
}

/// A sum with a chain's sum added, and the rounding error of that addition, by which the next one is corrected.
fn compensated<'b>(sum: V<'b>, error: V<'b>, chain: V<'b>) -> (V<'b>, V<'b>) {
    let part = |sum: Val<'b>, error: Val<'b>, chain: Val<'b>| {
        let added = chain - error;
        let next = sum + added;
        let error = (next - sum) - added;
        // An infinite sum has no error.
        let finite = error.abs().lt(constant(error, f64::INFINITY));
        (next, finite.select(error, zero(error)))
    };
    let (re, re_error) = part(sum.re, error.re, chain.re);
    let im = sum.im.zip(error.im).zip(chain.im).map(|((sum, error), chain)| part(sum, error, chain));
    (V { re, im: im.map(|im| im.0), ..sum }, V { re: re_error, im: im.map(|im| im.1), ..sum })
}

/// What a warp's neighbour has.
fn shuffled(sum: V<'_>, distance: i32) -> V<'_> {
    match sum.dtype {
        DType::Bool => V::bool(sum.re.to(Scalar::I32).shuffle_xor(distance).ne(zero(sum.re.to(Scalar::I32)))),
        _ => sum.map(|part| match part.ty().scalar() {
            scalar if scalar.bits() < 32 && scalar.is_int() => {
                part.to(Scalar::I32).shuffle_xor(distance).to(scalar)
            }
            Scalar::F16 | Scalar::Bf16 => part.to(Scalar::F32).shuffle_xor(distance).to(part.ty().scalar()),
            _ => part.shuffle_xor(distance),
        }),
    }
}

/// The sums of a program's reductions.
#[derive(Clone)]
struct Sums<'b>(Vec<V<'b>>);

impl<'b> vm_ir::builder::Carry<'b> for Sums<'b> {
    fn values(&self) -> Vec<Val<'b>> {
        self.0.iter().flat_map(|sum| [Some(sum.re), sum.im]).flatten().collect()
    }

    fn rebuild(&self, values: &[Val<'b>]) -> Self {
        let mut values = values.iter().copied();
        let sum = |sum: &V<'b>| {
            let re = values.next().unwrap_or(sum.re);
            V { re, im: sum.im.map(|im| values.next().unwrap_or(im)), ..*sum }
        };
        Sums(self.0.iter().map(sum).collect())
    }
}

/// Two words as one.
fn wide(words: [Val<'_>; 4]) -> Val<'_> {
    let high = words[1].to_u(Scalar::I64);
    let by = constant(high, 32.0);
    words[0].to_u(Scalar::I64) | (high << by)
}

/// A number in [0, 1) of as many bits as it has.
fn uniform(dtype: DType, words: [Val<'_>; 4]) -> Val<'_> {
    match dtype {
        DType::Float64 => {
            let bits = wide(words);
            let bits = bits.shr_u(constant(bits, 11.0)).to(Scalar::F64);
            bits * constant(bits, 2.0f64.powi(-53))
        }
        _ => {
            // As many bits as the type has, so that none is rounded up to 1.
            let digits = match dtype {
                DType::Float16 => 11,
                DType::BFloat16 => 8,
                _ => 24,
            };
            let bits = words[0].shr_u(constant(words[0], f64::from(32 - digits))).to(Scalar::F32);
            (bits * constant(bits, 2.0f64.powi(-digits))).to(dtype.scalar())
        }
    }
}
