//! From an expression to launches: what goes into one kernel, how its dimensions are merged, and what it is given.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use vm_runtime::{Argument, Buffer, Scalar, View};

use crate::Accelerator;
use crate::device::Device;
use crate::dtype::DType;
use crate::emit::{RUN, THREADS, WARP};
use crate::error::{Error, Result};
use crate::layout::{self, Affine, Map, Shape};
use crate::node::{Array, Expression, State, Storage};
use crate::op::Reduction;
use crate::program::{Along, Form, MAX_DIMS, Place, Program, Step, Value, vectors_of_a_thread};
use crate::sys::Held;

/// The most arguments of a launch: what a guest's may have.
const MAX_ARGUMENTS: usize = 60;
/// The most steps of a program.
const MAX_STEPS: usize = 256;
/// The most arrays of a program.
const MAX_LEAVES: usize = 12;
/// Results that are kept of one kernel beside the one that is asked for.
const MAX_KEPT: usize = 3;
/// Elements of a part of a dimension that is reduced in parts.
const PART: u64 = 1 << 15;

/// Where an array is; it is computed if it was not.
pub(crate) fn storage(array: &Array) -> Result<Storage> {
    let expression = match array.state() {
        State::Ready(storage) => return Ok(storage),
        State::Lazy(expression) => expression,
    };
    if let Expression::View(source, map) = &*expression {
        let viewed = view(array.shape(), &storage(source)?, map);
        array.set(viewed.clone());
        return Ok(viewed);
    }
    if let Expression::Elsewhere(source) = &*expression {
        let mut result = storage(source)?;
        result.buffer = Held::elsewhere(array.device(), source.device(), &result.buffer)?;
        array.set(result.clone());
        return Ok(result);
    }
    let device = array.device();
    let buffer = device.allocate(layout::elements(array.shape()).saturating_mul(array.dtype().bytes()))?;
    let result = Storage::dense(buffer, array.shape());
    if array.size() != 0 {
        run(array, Output { dtype: array.dtype(), shape: array.shape().to_vec(), storage: result.clone() })?;
    }
    array.set(result.clone());
    Ok(result)
}

/// Where a view of elements is that are there.
fn view(shape: &[u64], source: &Storage, map: &Map) -> Storage {
    let mut result =
        Storage { buffer: Arc::clone(&source.buffer), offset: source.offset, strides: vec![0; shape.len()] };
    for (axis, stride) in map.iter().zip(&source.strides) {
        result.offset += axis.start * stride;
        result.strides.iter_mut().zip(&axis.steps).for_each(|(to, step)| *to += step * stride);
    }
    result
}

/// The elements of an array one behind the other.
pub(crate) fn dense(array: &Array) -> Result<Storage> {
    let at = storage(array)?;
    let is = array.shape().iter().zip(at.strides.iter().zip(layout::dense(array.shape())));
    if at.offset == 0 && is.into_iter().all(|(extent, (has, wants))| *extent <= 1 || *has == wants) {
        return Ok(at);
    }
    let buffer = array.device().allocate(array.size() * array.dtype().bytes())?;
    let result = Storage::dense(buffer, array.shape());
    if array.size() != 0 {
        copy(array, Output { dtype: array.dtype(), shape: array.shape().to_vec(), storage: result.clone() })?;
    }
    Ok(result)
}

/// Stores an array's elements somewhere.
pub(crate) fn copy(array: &Array, to: Output) -> Result<()> {
    let mut builder = Builder::new(array.shape());
    let value = builder.value(array, &layout::identity(array.ndim()))?;
    builder.finish(value, to)
}

/// Where a result goes.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) storage: Storage,
}

/// Computes an array that is not computed yet.
fn run(array: &Array, to: Output) -> Result<()> {
    let mut builder = Builder::new(array.shape());
    let value = builder.value(array, &layout::identity(array.ndim()))?;
    builder.finish(value, to)
}

/// An array of a program, with its steps along the iteration's dimensions.
#[derive(Clone)]
struct Leaf {
    storage: Storage,
    dtype: DType,
    offset: i64,
    strides: Vec<i64>,
    /// A dense array that is gathered from, of so many elements.
    flat: Option<u64>,
}

/// A program that is being made.
struct Builder {
    /// The result's shape, and behind it the extents that are reduced.
    extents: Shape,
    rank: usize,
    program: Program,
    leaves: Vec<Leaf>,
    numbers: Vec<[u64; 2]>,
    indices: Vec<Affine>,
    /// What is reduced: which array's shape, over which axes.
    reduced: Option<(Shape, Vec<usize>)>,
    /// Steps of results, while those of elements come first.
    results: Vec<(Step, DType)>,
    elements: Vec<(Step, DType)>,
    known: FxHashMap<(usize, Map, bool), Value>,
    /// Arrays of results, how often the program's use them, and which value they are.
    visits: Vec<(Array, usize, Value)>,
    device: Option<Device>,
}

/// A value of results, and one of elements, are counted apart until the program is whole.
const OF_ELEMENTS: Value = 1 << 15;

impl Builder {
    fn new(shape: &[u64]) -> Self {
        Self {
            extents: shape.to_vec(),
            rank: shape.len(),
            program: Program::default(),
            leaves: Vec::new(),
            numbers: Vec::new(),
            indices: Vec::new(),
            reduced: None,
            results: Vec::new(),
            elements: Vec::new(),
            known: FxHashMap::default(),
            visits: Vec::new(),
            device: None,
        }
    }

    fn push(&mut self, step: Step, dtype: DType, inside: bool) -> Value {
        let steps = if inside { &mut self.elements } else { &mut self.results };
        steps.push((step, dtype));
        let value = (steps.len() - 1) as Value;
        if inside { value | OF_ELEMENTS } else { value }
    }

    /// The value of an array at the places of a map from the iteration's.
    fn value(&mut self, array: &Array, map: &Map) -> Result<Value> {
        self.value_of(array, map, false)
    }

    fn value_of(&mut self, array: &Array, map: &Map, inside: bool) -> Result<Value> {
        self.device.get_or_insert_with(|| array.device().clone());
        let key = (Arc::as_ptr(&array.0) as usize, map.clone(), inside);
        if let Some(value) = self.known.get(&key) {
            let value = *value;
            if let Some((_, uses, _)) =
                self.visits.iter_mut().find(|(other, ..)| Arc::ptr_eq(&other.0, &array.0))
            {
                *uses += 1;
            }
            return Ok(value);
        }
        let is_full = self.leaves.len() + 2 >= MAX_LEAVES
            || self.elements.len() + self.results.len() >= MAX_STEPS
            || self.arguments() + 16 > MAX_ARGUMENTS;
        let value = match array.state() {
            State::Lazy(expression) if !is_full => self.lazy(array, &expression, map, inside)?,
            _ => self.leaf(array, map, inside)?,
        };
        if !inside
            && value & OF_ELEMENTS == 0
            && is_identity(map, self.rank)
            && *array.shape() == self.extents[..self.rank]
        {
            self.visits.push((array.clone(), 1, value));
        }
        self.known.insert(key, value);
        Ok(value)
    }

    fn arguments(&self) -> usize {
        let of_index = self.extents.len().min(MAX_DIMS) + 1;
        self.leaves.len() + 2 * self.numbers.len() + of_index * self.indices.len()
    }

    fn leaf(&mut self, array: &Array, map: &Map, inside: bool) -> Result<Value> {
        let storage = storage(array)?;
        let (mut offset, mut strides) = (storage.offset, vec![0; self.extents.len()]);
        for (axis, stride) in map.iter().zip(&storage.strides) {
            offset += axis.start * stride;
            strides.iter_mut().zip(&axis.steps).for_each(|(to, step)| *to += step * stride);
        }
        let leaf = Leaf { storage, dtype: array.dtype(), offset, strides, flat: None };
        Ok(self.array(leaf, array.dtype(), inside))
    }

    fn array(&mut self, leaf: Leaf, dtype: DType, inside: bool) -> Value {
        self.leaves.push(leaf);
        self.push(Step::Leaf((self.leaves.len() - 1) as u8), dtype, inside)
    }

    fn lazy(&mut self, array: &Array, expression: &Expression, map: &Map, inside: bool) -> Result<Value> {
        let dtype = array.dtype();
        let operand = |this: &mut Self, operand: &Array| {
            let map = layout::repeated(map, operand.shape(), array.shape(), this.extents.len());
            this.value_of(operand, &map, inside)
        };
        let step = match expression {
            Expression::Number(bits) => {
                self.numbers.push(*bits);
                self.program.numbers.push(dtype);
                Step::Number((self.numbers.len() - 1) as u8)
            }
            Expression::Index(index) => {
                let through = layout::compose(&vec![index.clone()], map, self.extents.len()).swap_remove(0);
                self.indices.push(through);
                Step::Index((self.indices.len() - 1) as u8)
            }
            Expression::Cast(a) => Step::Cast(operand(self, a)?),
            Expression::Unary(op, a) => Step::Unary(*op, operand(self, a)?),
            Expression::Binary(op, a, b) => Step::Binary(*op, operand(self, a)?, operand(self, b)?),
            Expression::Select(a, b, c) => {
                Step::Select(operand(self, a)?, operand(self, b)?, operand(self, c)?)
            }
            Expression::Complex(a, b) => Step::Complex(operand(self, a)?, operand(self, b)?),
            Expression::Uniform(a, b) => Step::Uniform(operand(self, a)?, operand(self, b)?),
            Expression::Bits(a, b) => Step::Bits(operand(self, a)?, operand(self, b)?),
            Expression::View(source, inner) => {
                let map = layout::compose(inner, map, self.extents.len());
                return self.value_of(source, &map, inside);
            }
            Expression::Elsewhere(_) => return self.leaf(array, map, inside),
            Expression::Gather(source, index) => {
                let index = operand(self, index)?;
                let storage = dense(source)?;
                let strides = vec![0; self.extents.len()];
                self.leaves.push(Leaf { storage, dtype, offset: 0, strides, flat: Some(source.size()) });
                Step::Gather((self.leaves.len() - 1) as u8, index)
            }
            Expression::Reduce { op, source, axes } => {
                return self.reduce(array, *op, source, axes, map, inside);
            }
        };
        Ok(self.push(step, dtype, inside))
    }

    /// A reduction becomes part of the program if it is of the result's own shape, and any other is over the same elements.
    fn reduce(
        &mut self,
        array: &Array,
        op: Reduction,
        source: &Array,
        axes: &[usize],
        map: &Map,
        inside: bool,
    ) -> Result<Value> {
        let own = !inside && is_identity(map, self.rank) && *array.shape() == self.extents[..self.rank];
        let same = match &self.reduced {
            None => true,
            Some((shape, over)) => shape == source.shape() && over == axes,
        };
        if !own || !same || source.size() == 0 {
            return self.leaf(array, map, inside);
        }
        if self.reduced.is_none() {
            self.grow(source, axes);
            self.reduced = Some((source.shape().to_vec(), axes.to_vec()));
        }
        let rank = self.extents.len();
        // The result has the reduced dimensions with an extent of 1, or has none of them.
        let keeps = array.ndim() == source.ndim();
        let (mut kept, mut over) = (0, self.rank);
        let source_map: Map = (0..source.ndim())
            .map(|d| {
                let is_reduced = axes.contains(&d);
                let own = if is_reduced { over } else { kept };
                over += usize::from(is_reduced);
                kept += usize::from(!is_reduced || keeps);
                Affine { start: 0, steps: (0..rank).map(|e| i64::from(e == own)).collect() }
            })
            .collect();
        let value = self.value_of(source, &source_map, true)?;
        let accumulator = op.accumulator(array.dtype());
        self.program.reductions.push((op, value & !OF_ELEMENTS, accumulator));
        let number = (self.program.reductions.len() - 1) as u8;
        let result = self.push(Step::Reduced(number), accumulator, false);
        Ok(if accumulator == array.dtype() {
            result
        } else {
            self.push(Step::Cast(result), array.dtype(), false)
        })
    }

    /// Gives everything so far the dimensions that are reduced.
    fn grow(&mut self, source: &Array, axes: &[usize]) {
        self.extents.extend(axes.iter().map(|axis| source.shape()[*axis]));
        let rank = self.extents.len();
        self.leaves.iter_mut().for_each(|leaf| leaf.strides.resize(rank, 0));
        self.indices.iter_mut().for_each(|index| index.steps.resize(rank, 0));
        // Maps have more steps from here on.
        self.known.clear();
    }

    /// Launches it, for a value's result and for those of arrays that are somebody's beside it.
    fn finish(mut self, value: Value, to: Output) -> Result<()> {
        let Some(device) = self.device.clone() else { return Ok(()) };
        let count = self.elements.len() as Value;
        let real = |value: Value| if value & OF_ELEMENTS != 0 { value & !OF_ELEMENTS } else { value + count };
        let all = self.elements.iter().chain(&self.results);
        self.program.steps = all.map(|(step, dtype)| (renumbered(*step, real), *dtype)).collect();
        self.program.elements = self.elements.len();
        self.program.leaves = self.leaves.iter().map(|leaf| leaf.dtype).collect();
        self.program.indices = self.indices.len() as u8;

        let mut outputs = vec![(real(value), to)];
        let mut kept = Vec::new();
        let extents = self.extents[..self.rank].to_vec();
        if outputs[0].1.shape == extents {
            for (array, uses, value) in std::mem::take(&mut self.visits) {
                let owned = Arc::strong_count(&array.0) > uses + 1;
                let wanted = owned && array.depth() > 2 && kept.len() < MAX_KEPT;
                if !wanted
                    || array.dtype().is_complex()
                    || outputs.iter().any(|(other, _)| *other == real(value))
                {
                    continue;
                }
                let buffer = device.allocate(array.size() * array.dtype().bytes())?;
                let storage = Storage::dense(buffer, array.shape());
                let output =
                    Output { dtype: array.dtype(), shape: extents.clone(), storage: storage.clone() };
                outputs.push((real(value), output));
                kept.push((array, storage));
            }
        }
        self.program.outputs = outputs.iter().map(|(value, output)| (*value, output.dtype)).collect();
        let outputs: Vec<Output> = outputs.into_iter().map(|(_, output)| output).collect();
        launch(&device, &self, &outputs)?;
        kept.into_iter().for_each(|(array, storage)| array.set(storage));
        Ok(())
    }
}

fn is_identity(map: &Map, rank: usize) -> bool {
    map.len() == rank
        && map.iter().enumerate().all(|(d, axis)| {
            axis.start == 0 && axis.steps.iter().enumerate().all(|(e, step)| *step == i64::from(d == e))
        })
}

/// Something that has a stride in each dimension of the iteration.
#[derive(Clone, Debug)]
struct Operand {
    offset: i64,
    strides: Vec<i64>,
}

/// A dimension of the iteration, or several that were merged.
#[derive(Clone, Debug)]
struct Dimension {
    extent: u64,
    reduced: bool,
    /// The stride of each operand.
    strides: Vec<i64>,
}

/// Dimensions with what follows without a gap merged, and those of one element left out.
fn merged(dimensions: Vec<Dimension>) -> Vec<Dimension> {
    let mut result: Vec<Dimension> = Vec::new();
    for next in dimensions.into_iter().filter(|dimension| dimension.extent != 1) {
        if let Some(last) = result.last_mut().filter(|last| last.reduced == next.reduced) {
            let mut strides = last.strides.iter().zip(&next.strides);
            if strides.all(|(outer, inner)| *outer == inner.wrapping_mul(next.extent as i64)) {
                last.extent *= next.extent;
                last.strides = next.strides;
                continue;
            }
        }
        result.push(next);
    }
    result
}

fn launch(device: &Device, builder: &Builder, outputs: &[Output]) -> Result<()> {
    let rank = builder.extents.len();
    // Operands: the outputs, the leaves that are not flat, the indices.
    let mut operands: Vec<Operand> = outputs
        .iter()
        .map(|output| {
            let mut strides = output.storage.strides.clone();
            strides.resize(rank, 0);
            Operand { offset: output.storage.offset, strides }
        })
        .collect();
    operands.extend(
        builder.leaves.iter().map(|leaf| Operand { offset: leaf.offset, strides: leaf.strides.clone() }),
    );
    operands.extend(
        builder.indices.iter().map(|index| Operand { offset: index.start, strides: index.steps.clone() }),
    );
    let dimension = |(d, extent): (usize, &u64)| Dimension {
        extent: *extent,
        reduced: d >= builder.rank,
        strides: operands.iter().map(|operand| operand.strides[d]).collect(),
    };
    let dimensions = merged(builder.extents.iter().enumerate().map(dimension).collect());
    let offsets: Vec<i64> = operands.iter().map(|operand| operand.offset).collect();
    let plan = Plan { device, builder, outputs };
    match builder.reduced {
        None => plan.map(&dimensions, &offsets),
        Some(_) => plan.reduce(dimensions, &offsets),
    }
}

struct Plan<'a> {
    device: &'a Device,
    builder: &'a Builder,
    outputs: &'a [Output],
}

impl Plan<'_> {
    /// Is an operand an array that is not flat?
    fn placed(&self, operand: usize) -> bool {
        match operand.checked_sub(self.outputs.len()) {
            None => true,
            Some(leaf) => self.builder.leaves.get(leaf).is_some_and(|leaf| leaf.flat.is_none()),
        }
    }

    fn dtype(&self, operand: usize) -> DType {
        match operand.checked_sub(self.outputs.len()) {
            None => self.outputs[operand].dtype,
            Some(leaf) => self.builder.leaves.get(leaf).map_or(DType::Int64, |leaf| leaf.dtype),
        }
    }

    /// Does an array need a last dimension of its own, as its elements along the iteration's last are not neighbours?
    fn has_tail(&self, operand: usize, dimensions: &[Dimension]) -> bool {
        let last = dimensions.iter().rev().find(|dimension| dimension.strides[operand] != 0);
        self.dtype(operand).is_complex() || last.is_none_or(|last| last.strides[operand] != 1)
    }

    /// Fits every array into a view?
    fn fits(&self, dimensions: &[Dimension], more: usize) -> bool {
        let operands = self.outputs.len() + self.builder.leaves.len();
        dimensions.len() + more <= MAX_DIMS
            && (0..operands).filter(|operand| self.placed(*operand)).all(|operand| {
                let own = dimensions.iter().filter(|dimension| dimension.strides[operand] != 0).count();
                let more = if operand < self.outputs.len() { more } else { 0 };
                own + more + usize::from(self.has_tail(operand, dimensions)) <= MAX_DIMS
            })
    }

    fn map(&self, dimensions: &[Dimension], offsets: &[i64]) -> Result<()> {
        if !self.fits(dimensions, 0)
            && let [first, rest @ ..] = dimensions
        {
            for n in 0..first.extent as i64 {
                let offsets: Vec<_> =
                    offsets.iter().zip(&first.strides).map(|(offset, stride)| offset + n * stride).collect();
                self.map(rest, &offsets)?;
            }
            return Ok(());
        }
        let mut dimensions = dimensions.to_vec();
        if dimensions.is_empty() {
            dimensions.push(Dimension { extent: 1, reduced: false, strides: vec![0; offsets.len()] });
        }
        let lanes = self.lanes(&dimensions, offsets, true);
        let last = dimensions.len() - 1;
        let (inner, outer) =
            (dimensions[last].extent, dimensions[..last].iter().map(|d| d.extent).product::<u64>());
        let mut control = Vec::new();
        let grid = if self.device.is_sequential() {
            let rows = (RUN as u64 / inner).clamp(1, outer);
            control.push(rows);
            match last {
                0 => [blocks(inner, RUN as u64)?, 1, 1],
                _ => [blocks(outer, rows)?, blocks(inner, RUN as u64)?, 1],
            }
        } else {
            let of_block = THREADS * vectors_of_a_thread(dimensions.len(), lanes);
            [blocks(outer * (inner / u64::from(lanes)), of_block.into())?, 1, 1]
        };
        let outputs: Vec<&Output> = self.outputs.iter().collect();
        self.go(
            &self.builder.program,
            &outputs,
            &dimensions,
            offsets,
            Kind { lanes, reduced: None, parts: None },
            grid,
            &control,
        )
    }

    /// Elements along the last dimension that are taken at once.
    fn lanes(&self, dimensions: &[Dimension], offsets: &[i64], whole: bool) -> u8 {
        let Some(last) = dimensions.last() else { return 1 };
        let arrays = self.outputs.len() + self.builder.leaves.len();
        let mut widest = 1;
        for operand in 0..arrays {
            let dtype = self.dtype(operand);
            if dtype.is_complex() || !self.placed(operand) {
                return 1;
            }
            match last.strides[operand] {
                0 => {}
                1 => widest = widest.max(dtype.bytes()),
                _ => return 1,
            }
        }
        let is_cpu = self.device.is_sequential();
        let mut lanes = if is_cpu { (64 / widest).clamp(1, 16) } else { (16 / widest).clamp(1, 8) };
        while lanes > 1
            && !is_cpu
            && (whole && !last.extent.is_multiple_of(lanes) || !self.aligned(dimensions, offsets, lanes))
        {
            lanes /= 2;
        }
        lanes as u8
    }

    /// Do all rows begin at multiples of so many elements?
    fn aligned(&self, dimensions: &[Dimension], offsets: &[i64], lanes: u64) -> bool {
        let arrays = self.outputs.len() + self.builder.leaves.len();
        let last = dimensions.len() - 1;
        let lanes = lanes as i64;
        (0..arrays).filter(|operand| self.placed(*operand) && dimensions[last].strides[*operand] == 1).all(
            |operand| {
                offsets[operand] % lanes == 0
                    && dimensions[..last].iter().all(|d| d.strides[operand] % lanes == 0)
            },
        )
    }

    fn reduce(&self, dimensions: Vec<Dimension>, offsets: &[i64]) -> Result<()> {
        let reduced: Vec<&Dimension> = dimensions.iter().filter(|dimension| dimension.reduced).collect();
        let mut kept: Vec<Dimension> =
            dimensions.iter().filter(|dimension| !dimension.reduced).cloned().collect();
        // Numbers and indices alone don't tell a kernel how many of them there are.
        let arrays = self.outputs.len()..self.outputs.len() + self.builder.leaves.len();
        let told = reduced
            .iter()
            .all(|over| arrays.clone().any(|leaf| self.placed(leaf) && over.strides[leaf] != 0));
        if reduced.len() > 1 || !told || !self.fits(&dimensions, 1) {
            return self.copied();
        }
        let over = reduced.first().map_or_else(
            || Dimension { extent: 1, reduced: true, strides: vec![0; offsets.len()] },
            |dimension| (*dimension).clone(),
        );
        let first = self.outputs.len();
        let leaves = first..first + self.builder.leaves.len();
        let near =
            |dimension: &Dimension| leaves.clone().filter(|leaf| dimension.strides[*leaf] == 1).count();
        let columns = kept.last().is_some_and(|last| last.extent >= 8 && near(last) > near(&over));
        let at = if columns { kept.len() - 1 } else { kept.len() };
        let (n, results) = (over.extent, kept.iter().map(|d| d.extent).product::<u64>());
        kept.insert(at, over);
        let lanes = match columns {
            true => self.lanes_of_columns(&kept, offsets),
            false => self.lanes(&kept, offsets, false),
        };
        // Few results of many elements are made in parts.
        let units = match columns {
            true => results / u64::from(lanes),
            false => results,
        };
        let wanted = if self.device.is_sequential() {
            64
        } else {
            u64::from(self.device.resources().compute_units) * 31
        };
        let parts = if units >= wanted || n < 2 * PART.min(n.max(1)) && n < 4096 {
            1
        } else {
            (wanted / units.max(1)).clamp(1, n.div_ceil(2048)).min(4095)
        };
        let grid = |parts: u64, units: u64| -> Result<([u32; 3], Vec<u64>)> {
            let parts = u32::try_from(parts).unwrap_or(1);
            if self.device.is_sequential() {
                let rows = (RUN as u64 / n.max(1)).clamp(1, units.max(1));
                return Ok(([blocks(units, rows)?, parts, 1], vec![rows]));
            }
            let of_block = if columns { THREADS.into() } else { u64::from(THREADS / WARP) };
            Ok(([blocks(units.saturating_mul(parts.into()), of_block)?, 1, 1], Vec::new()))
        };
        let kind = Kind { lanes, reduced: Some(at), parts: None };
        if parts == 1 {
            let outputs: Vec<&Output> = self.outputs.iter().collect();
            let (grid, control) = grid(1, units)?;
            return self.go(&self.builder.program, &outputs, &kept, offsets, kind, grid, &control);
        }
        self.in_parts(&kept, offsets, kind, parts, n, |parts| grid(parts, units))
    }

    fn lanes_of_columns(&self, dimensions: &[Dimension], offsets: &[i64]) -> u8 {
        let Some(last) = dimensions.last() else { return 1 };
        let mut lanes = self.lanes(dimensions, offsets, true);
        while lanes > 1 && !last.extent.is_multiple_of(lanes.into()) {
            lanes /= 2;
        }
        lanes
    }

    /// Elements are computed and stored first, with what is reduced behind the rest; then they are reduced, and then what is computed of the results is.
    fn copied(&self) -> Result<()> {
        let builder = self.builder;
        let elements = builder.program.elements;
        let kept = &builder.extents[..builder.rank];
        let mut last = Builder::new(kept);
        last.take_over(builder);
        let mut reduced = Vec::new();
        for (op, value, accumulator) in &builder.program.reductions {
            let dtype = builder.program.steps[usize::from(*value)].1;
            let source = self.output(dtype, &builder.extents)?;
            let mut first = Builder::new(&builder.extents);
            first.take_over(builder);
            first.results = builder.program.steps[..elements].to_vec();
            first.finish(*value, source.clone())?;

            let result = self.output(*accumulator, kept)?;
            let mut second = Builder::new(kept);
            second.device = builder.device.clone();
            second.extents = builder.extents.clone();
            second.reduced = builder.reduced.clone();
            second.array(Leaf::of(&source, second.extents.len()), dtype, true);
            second.program.reductions.push((*op, 0, *accumulator));
            let value = second.push(Step::Reduced(0), *accumulator, false);
            second.finish(value, result.clone())?;
            last.leaves.push(Leaf::of(&result, builder.rank));
            reduced.push((last.leaves.len() - 1) as u8);
        }
        let step = |(step, dtype): &(Step, DType)| match *step {
            Step::Reduced(number) => (Step::Leaf(reduced[usize::from(number)]), *dtype),
            step => (renumbered(step, |value| value - elements as Value), *dtype),
        };
        last.results = builder.program.steps[elements..].iter().map(step).collect();
        for ((value, _), output) in builder.program.outputs.iter().zip(self.outputs) {
            last.again().finish(value - elements as Value, output.clone())?;
        }
        Ok(())
    }

    /// Memory for dense elements.
    fn output(&self, dtype: DType, shape: &[u64]) -> Result<Output> {
        let buffer = self.device.allocate(layout::elements(shape) * dtype.bytes())?;
        Ok(Output { dtype, shape: shape.to_vec(), storage: Storage::dense(buffer, shape) })
    }

    /// Parts first, each with results of its own, and then those.
    fn in_parts(
        &self,
        dimensions: &[Dimension],
        offsets: &[i64],
        kind: Kind,
        parts: u64,
        n: u64,
        grid: impl Fn(u64) -> Result<([u32; 3], Vec<u64>)>,
    ) -> Result<()> {
        let builder = self.builder;
        let part = n.div_ceil(parts).next_multiple_of(u64::from(kind.lanes.max(1)));
        let parts = n.div_ceil(part);
        let shape = &builder.extents[..builder.rank];
        let partial_shape: Shape = std::iter::once(parts).chain(shape.iter().copied()).collect();
        let mut program = builder.program.clone();
        program.steps.truncate(program.elements);
        program.outputs.clear();
        let mut outputs = Vec::new();
        for (_, value, dtype) in &builder.program.reductions {
            program.outputs.push((*value, *dtype));
            outputs.push(self.output(*dtype, &partial_shape)?);
        }
        // Outputs lie densely over the kept dimensions, behind that of parts.
        let old = self.outputs.len();
        let mut own: Vec<Dimension> = dimensions.to_vec();
        let mut stride = 1;
        for (d, dimension) in own.iter_mut().enumerate().rev() {
            let is_kept = Some(d) != kind.reduced;
            let of_output = if is_kept { stride } else { 0 };
            if is_kept {
                stride *= dimension.extent as i64;
            }
            let rest = dimension.strides.split_off(old);
            dimension.strides = vec![of_output; outputs.len()];
            dimension.strides.extend(rest);
        }
        let mut at: Vec<i64> = vec![0; outputs.len()];
        at.extend(&offsets[old..]);
        let (grid, mut control) = grid(parts)?;
        control.push(part);
        let borrowed: Vec<&Output> = outputs.iter().collect();
        self.go(&program, &borrowed, &own, &at, Kind { parts: Some(parts), ..kind }, grid, &control)?;

        // The second pass: results of the parts' results.
        let mut second = Builder::new(shape);
        second.take_over(builder);
        second.extents.push(parts);
        second.reduced = Some((partial_shape, vec![0]));
        second.leaves.iter_mut().for_each(|leaf| leaf.strides.push(0));
        second.indices.iter_mut().for_each(|index| index.steps.push(0));
        for (output, (op, _, dtype)) in outputs.iter().zip(&builder.program.reductions) {
            let mut leaf = Leaf::of(output, builder.rank + 1);
            leaf.strides.rotate_left(1);
            let value = second.array(leaf, *dtype, true);
            second.program.reductions.push((*op, value & !OF_ELEMENTS, *dtype));
        }
        let elements = builder.program.elements;
        let step =
            |(step, dtype): &(Step, DType)| (renumbered(*step, |value| value - elements as Value), *dtype);
        second.results = builder.program.steps[elements..].iter().map(step).collect();
        for ((value, _), output) in builder.program.outputs.iter().zip(self.outputs) {
            second.again().finish(value - elements as Value, output.clone())?;
        }
        Ok(())
    }

    /// Launches a program's kernel.
    #[allow(clippy::too_many_arguments)]
    fn go(
        &self,
        program: &Program,
        outputs: &[&Output],
        dimensions: &[Dimension],
        offsets: &[i64],
        kind: Kind,
        grid: [u32; 3],
        control: &[u64],
    ) -> Result<()> {
        let builder = self.builder;
        let mut views = Vec::new();
        let mut places = Vec::new();
        let arrays = outputs
            .iter()
            .map(|output| (&output.storage, output.dtype, None))
            .chain(builder.leaves.iter().map(|leaf| (&leaf.storage, leaf.dtype, leaf.flat)));
        for (operand, (storage, dtype, flat)) in arrays.enumerate() {
            let is_output = operand < outputs.len();
            let (bytes, parts) = (dtype.bytes(), dtype.parts());
            let mut place =
                Place { dims: [Along::Not; MAX_DIMS], tail: false, align: 1, flat: flat.is_some() };
            let mut extents = Vec::new();
            let mut strides = Vec::new();
            let mut first = offsets[operand];
            if let Some(elements) = flat {
                extents.push(elements);
                strides.push(1);
                first = storage.offset;
            } else {
                for (d, dimension) in dimensions.iter().enumerate() {
                    let stride = dimension.strides[operand];
                    let always = is_output && Some(d) != kind.reduced;
                    if stride == 0 && !(always && dimension.extent == 1) {
                        continue;
                    }
                    place.dims[d] = if stride < 0 { Along::Back } else { Along::Forward };
                    if stride < 0 {
                        first += stride * (dimension.extent as i64 - 1);
                    }
                    extents.push(dimension.extent);
                    strides.push(if stride == 0 { 1 } else { stride.unsigned_abs() });
                }
                if let Some(parts) = kind.parts.filter(|_| is_output) {
                    let results: u64 = dimensions
                        .iter()
                        .enumerate()
                        .filter(|(d, _)| Some(*d) != kind.reduced)
                        .map(|(_, d)| d.extent)
                        .product();
                    extents.insert(0, parts);
                    strides.insert(0, results);
                }
                place.tail = dtype.is_complex() || strides.last() != Some(&1);
            }
            if place.tail || dtype.is_complex() {
                extents.push(parts);
                strides.push(1);
            }
            let byte =
                u64::try_from(first).map_err(|_| internal("an array begins before its memory"))? * bytes;
            strides.pop();
            let strides: Vec<u64> = strides.iter().map(|stride| stride * bytes).collect();
            if kind.lanes > 1 && !self.device.is_sequential() {
                let whole = u64::from(kind.lanes) * bytes;
                let along = place.dims[dimensions.len() - 1] == Along::Forward;
                if along
                    && whole.is_power_of_two()
                    && byte.is_multiple_of(whole)
                    && strides.iter().all(|s| s.is_multiple_of(whole))
                {
                    place.align = whole.min(16) as u8;
                }
            }
            views.push((&storage.buffer, byte, extents, strides));
            places.push(place);
        }
        let leaves = places.split_off(outputs.len());
        let form = Form {
            rank: dimensions.len() as u8,
            reduced: kind.reduced.map(|d| d as u8),
            partial: kind.parts.is_some(),
            leaves,
            outputs: places,
            lanes: kind.lanes,
            cpu: self.device.is_sequential(),
        };
        let kernel = self.device.program(program, &form)?;
        let mut arguments: Vec<Argument<'_, Accelerator>> = Vec::with_capacity(views.len() + 16);
        for (buffer, byte, extents, strides) in &views {
            let buffer: &Buffer<Accelerator> = buffer;
            let view: View<'_, Accelerator> = buffer.view(*byte, buffer.bytes().saturating_sub(*byte))?;
            arguments.push(view.strided(extents, strides)?.into());
        }
        for (bits, dtype) in builder.numbers.iter().zip(&program.numbers) {
            let bytes = dtype.stored().bytes();
            let parts = bits.iter().take(dtype.parts() as usize);
            arguments.extend(parts.map(|bits| Argument::from(Scalar::from_bits(*bits, bytes))));
        }
        let before = outputs.len() + builder.leaves.len();
        for index in 0..builder.indices.len() {
            arguments.push(offsets[before + index].into());
            arguments.extend(dimensions.iter().map(|d| Argument::from(d.strides[before + index])));
        }
        arguments.extend(control.iter().map(|number| Argument::from(*number)));
        self.device.launch(&kernel, grid, &arguments)
    }
}

/// What a launch is beside its dimensions.
#[derive(Clone, Copy)]
struct Kind {
    lanes: u8,
    reduced: Option<usize>,
    parts: Option<u64>,
}

impl Leaf {
    /// Dense elements.
    fn of(output: &Output, rank: usize) -> Self {
        let mut strides = output.storage.strides.clone();
        strides.resize(rank, 0);
        Self { storage: output.storage.clone(), dtype: output.dtype, offset: 0, strides, flat: None }
    }
}

impl Builder {
    /// Has the arrays, numbers and indices of another, along its own dimensions.
    fn take_over(&mut self, other: &Builder) {
        let rank = self.extents.len();
        self.leaves = other.leaves.clone();
        self.leaves.iter_mut().for_each(|leaf| leaf.strides.truncate(rank));
        self.indices = other.indices.clone();
        self.indices.iter_mut().for_each(|index| index.steps.truncate(rank));
        self.numbers = other.numbers.clone();
        self.program.numbers = other.program.numbers.clone();
        self.device = other.device.clone();
    }

    /// The same program, to be launched for another of its results.
    fn again(&self) -> Self {
        Self {
            extents: self.extents.clone(),
            rank: self.rank,
            program: self.program.clone(),
            leaves: self.leaves.clone(),
            numbers: self.numbers.clone(),
            indices: self.indices.clone(),
            reduced: self.reduced.clone(),
            results: self.results.clone(),
            elements: self.elements.clone(),
            known: FxHashMap::default(),
            visits: Vec::new(),
            device: self.device.clone(),
        }
    }
}

/// A step with other numbers of what it takes.
fn renumbered(step: Step, number: impl Fn(Value) -> Value) -> Step {
    match step {
        Step::Cast(a) => Step::Cast(number(a)),
        Step::Unary(op, a) => Step::Unary(op, number(a)),
        Step::Binary(op, a, b) => Step::Binary(op, number(a), number(b)),
        Step::Select(a, b, c) => Step::Select(number(a), number(b), number(c)),
        Step::Complex(a, b) => Step::Complex(number(a), number(b)),
        Step::Gather(leaf, a) => Step::Gather(leaf, number(a)),
        Step::Uniform(a, b) => Step::Uniform(number(a), number(b)),
        Step::Bits(a, b) => Step::Bits(number(a), number(b)),
        other => other,
    }
}

fn blocks(units: u64, of_block: u64) -> Result<u32> {
    u32::try_from(units.div_ceil(of_block.max(1)).max(1))
        .ok()
        .filter(|blocks| *blocks < 1 << 31)
        .ok_or_else(|| internal("more blocks than a grid can have"))
}

fn internal(what: &str) -> Error {
    Error::Device(format!("{what}; please report this"))
}
