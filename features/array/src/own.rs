//! Functions with kernels of their own: sorting, scans, scatters, searches.

use vm_ir::builder::{Builder, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Scalar, Type};
use vm_runtime::Argument;

use crate::Accelerator;
use crate::device::{Device, same};
use crate::dtype::{DType, Kind};
use crate::emit::{RUN, THREADS};
use crate::error::{Error, Result};
use crate::evaluate;
use crate::layout;
use crate::node::Array;
use crate::op::{Binary, Reduction};

/// Runs `body` for each number below `total`: a GPU's thread takes one, a processor's block many.
fn each<'b>(k: Builder<'b>, cpu: bool, total: Val<'b>, body: impl FnOnce(Val<'b>)) {
    if cpu {
        let first = k.block_id(Axis::X).to(Scalar::I64) * RUN;
        k.range(first, (first + RUN).min(total)).each(body);
    } else {
        k.block_size([THREADS, 1, 1]);
        let at = k.global_id(Axis::X);
        k.if_(at.lt(total), || body(at));
    }
}

fn grid(device: &Device, total: u64) -> Result<[u32; 3]> {
    let of_block = if device.is_sequential() { RUN as u64 } else { THREADS.into() };
    let blocks = u32::try_from(total.div_ceil(of_block).max(1)).ok().filter(|blocks| *blocks < 1 << 31);
    blocks
        .map(|blocks| [blocks, 1, 1])
        .ok_or_else(|| Error::Device(format!("{total} elements are too many for a launch")))
}

fn view(dtype: DType, rank: usize, access: Access, names: &[&str]) -> ViewType {
    ViewType::new(dtype.stored(), rank, access).named(names)
}

/// Is one element before another? NaN comes last, or first of what descends.
fn before<'b>(dtype: DType, descending: bool, a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let (a, b) = if descending { (b, a) } else { (a, b) };
    match dtype.kind() {
        Kind::Float => a.lt(b) | (b.ne(b) & a.eq(a)),
        Kind::Signed => a.lt(b),
        _ => a.lt_u(b),
    }
}

/// The first place in `low..high` whose element `is` not, all before it are.
fn partition<'b>(k: Builder<'b>, low: Val<'b>, high: Val<'b>, is: impl Fn(Val<'b>) -> Val<'b>) -> Val<'b> {
    let halve = |(low, high): (Val<'b>, Val<'b>)| {
        let middle = (low + high) >> 1;
        let goes_on = is(middle);
        (goes_on.select(middle + 1, low), goes_on.select(high, middle))
    };
    k.while_((low, high), |(low, high)| low.lt(high), halve).0
}

impl Array {
    fn sortable(&self, function: &'static str) -> Result<()> {
        match self.dtype().is_complex() {
            true => Err(Error::Type { function, dtype: self.dtype(), what: "it takes real numbers" }),
            false => Ok(()),
        }
    }

    /// The elements along an axis in order, and where each was, an `Int64`; equal ones stay in theirs.
    ///
    /// # Errors
    /// [`Error::Type`] for complex numbers, [`Error::Value`] for an axis that there is not.
    pub fn sort(&self, axis: i64, descending: bool) -> Result<(Array, Array)> {
        self.sortable("sort")?;
        let axis = layout::axis("sort", axis, self.ndim())?;
        let n = self.shape()[axis];
        let mut order: Vec<i64> = (0..self.ndim() as i64).filter(|d| *d != axis as i64).collect();
        order.push(axis as i64);
        let mut back = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(from, to)| back[*from as usize] = to);
        let turned = self.permute(&order)?;
        if self.device().is_sequential() {
            let (keys, places) = sorted_by_host(&turned, descending)?;
            return Ok((keys.permute(&back)?, places.permute(&back)?));
        }
        let places = Array::indices(self.device(), turned.shape(), self.ndim() - 1, 0, 1)?;
        let rows = self.size().checked_div(n).unwrap_or(0);
        let dense = |array: &Array| {
            Ok::<_, Error>(Array::ready(
                array.device(),
                array.dtype(),
                array.shape().to_vec(),
                evaluate::dense(array)?,
            ))
        };
        let (mut keys, mut places) = (dense(&turned)?, dense(&places)?);
        let mut width = 1;
        while width < n && rows != 0 {
            (keys, places) = merge(&keys, &places, [rows, n], width, descending)?;
            width *= 2;
        }
        Ok((keys.permute(&back)?, places.permute(&back)?))
    }

    /// Sums or products of the elements up to each along an axis, in a type.
    ///
    /// # Errors
    /// [`Error::Type`], [`Error::Value`].
    pub fn scan(&self, op: Reduction, axis: i64, dtype: Option<DType>) -> Result<Array> {
        let axis = layout::axis("scan", axis, self.ndim())?;
        let to = dtype.map_or_else(|| op.of(self.dtype()), Ok)?;
        let x = self.cast(to)?;
        if x.size() == 0 {
            return Ok(x);
        }
        let shape = x.shape().to_vec();
        let three = [layout::elements(&shape[..axis]), shape[axis], layout::elements(&shape[axis + 1..])];
        scanned(&x.reshape(&three)?, op, three)?.reshape(&shape)
    }

    /// The array with `values` at places of its elements, counted one behind the other; what has a place beyond it is left out. Of several for one place any is
    /// stored.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Devices`].
    pub fn scatter(&self, places: &Array, values: &Array) -> Result<Array> {
        same("scatter", self.device(), places.device())?;
        same("scatter", self.device(), values.device())?;
        let values = values.cast(self.dtype())?.broadcast_to(places.shape())?;
        let places = places.cast(DType::Int64)?;
        let (device, dtype) = (self.device(), self.dtype());
        let result = Array::empty(device, dtype, self.shape())?;
        let to = evaluate::storage(&result)?;
        if self.size() == 0 {
            return Ok(result);
        }
        evaluate::copy(self, evaluate::Output { dtype, shape: self.shape().to_vec(), storage: to.clone() })?;
        if places.size() == 0 {
            return Ok(result);
        }
        let (parts, n) = (dtype.parts(), places.size());
        let cpu = device.is_sequential();
        let kernel = device.own("scatter", vec![dtype as u64], || {
            let block = IRBlock::new(GuestAddr(0));
            let k = block.builder();
            k.name("scatter");
            let y = k.view_of("y", view(dtype, 2, Access::Write, &["", "parts"]));
            let at = k.view_of("at", view(DType::Int64, 1, Access::Read, &["n"]));
            let x = k.view_of("x", view(dtype, 2, Access::Read, &["n", "parts"]));
            each(k, cpu, at.extent(0), |i| {
                let place = at.at([i]).load();
                k.if_(place.ge(k.i64(0)) & place.lt(y.extent(0)), || {
                    k.range(k.i64(0), y.extent(1)).each(|part| {
                        y.at([place, part]).store(x.at([i, part]).load());
                    });
                });
            });
            Ok(block.kernel()?)
        })?;
        let (at, x) = (evaluate::dense(&places)?, evaluate::dense(&values)?);
        let arguments: [Argument<'_, Accelerator>; 3] = [
            to.buffer.shaped(&[self.size(), parts])?.into(),
            at.buffer.shaped(&[n])?.into(),
            x.buffer.shaped(&[n, parts])?.into(),
        ];
        device.launch(&kernel, grid(device, n)?, &arguments)?;
        Ok(result)
    }

    /// Where each of `values` would go into this array of one dimension, which is in order, an `Int64`: before what is equal, or behind it.
    ///
    /// # Errors
    /// [`Error::Type`], [`Error::Shape`].
    pub fn search_sorted(&self, values: &Array, right: bool) -> Result<Array> {
        let function = "searchsorted";
        same(function, self.device(), values.device())?;
        if self.ndim() != 1 {
            return Err(Error::Shape { function, what: "what is searched has one dimension".into() });
        }
        let dtype = self.dtype().promote(values.dtype());
        let (sorted, values) = (self.cast(dtype)?, values.cast(dtype)?);
        sorted.sortable(function)?;
        let device = self.device();
        let result = Array::empty(device, DType::Int64, values.shape())?;
        if values.size() == 0 {
            return Ok(result);
        }
        if self.size() == 0 {
            return Array::full(device, DType::Int64, values.shape(), crate::Number::Int(0));
        }
        let cpu = device.is_sequential();
        let kernel = device.own(function, vec![dtype as u64, right.into()], || {
            let block = IRBlock::new(GuestAddr(0));
            let k = block.builder();
            k.name("search_sorted");
            let y = k.view_of("y", view(DType::Int64, 1, Access::Write, &["n"]));
            let sorted = k.view_of("sorted", view(dtype, 1, Access::Read, &[]));
            let x = k.view_of("x", view(dtype, 1, Access::Read, &["n"]));
            each(k, cpu, y.extent(0), |i| {
                let key = x.at([i]).load();
                let place = partition(k, k.i64(0), sorted.extent(0), |at| {
                    let other = sorted.at([at]).load();
                    if right { !before(dtype, false, key, other) } else { before(dtype, false, other, key) }
                });
                y.at([i]).store(place);
            });
            Ok(block.kernel()?)
        })?;
        let (s, x, y) = (evaluate::dense(&sorted)?, evaluate::dense(&values)?, evaluate::storage(&result)?);
        let n = [values.size()];
        let arguments: [Argument<'_, Accelerator>; 3] = [
            y.buffer.shaped(&n)?.into(),
            s.buffer.shaped(&[self.size()])?.into(),
            x.buffer.shaped(&n)?.into(),
        ];
        device.launch(&kernel, grid(device, n[0])?, &arguments)?;
        Ok(result)
    }

    /// The places of elements that are not 0, counted one behind the other, an `Int64`. It waits for how many there are.
    ///
    /// # Errors
    /// What computing them fails with.
    pub fn nonzero(&self) -> Result<Array> {
        let device = self.device();
        let n = self.size();
        if n == 0 {
            return Array::empty(device, DType::Int64, &[0]);
        }
        let is = self.cast(DType::Bool)?.reshape(&[n])?;
        let up_to = is.scan(Reduction::Sum, 0, Some(DType::Int64))?;
        let count = match up_to.slice(&[crate::Slice::At(-1)])?.item()? {
            crate::Number::Int(count) => count as u64,
            _ => 0,
        };
        let one = Array::full(device, DType::Int64, &[], crate::Number::Int(1))?;
        let none = Array::full(device, DType::Int64, &[], crate::Number::Int(-1))?;
        let to = is.select(&up_to.binary(Binary::Subtract, &one)?, &none)?;
        Array::empty(device, DType::Int64, &[count])?.scatter(&to, &Array::indices(device, &[n], 0, 0, 1)?)
    }
}

/// The rows of an array in order, sorted where their memory is the host's own.
fn sorted_by_host(rows: &Array, descending: bool) -> Result<(Array, Array)> {
    let (device, dtype) = (rows.device(), rows.dtype());
    let bytes = rows.to_bytes()?;
    let size = dtype.bytes() as usize;
    let n = rows.shape().last().map_or(1, |n| (*n as usize).max(1));
    let mut keys = Vec::with_capacity(bytes.len());
    let mut places = Vec::with_capacity(bytes.len() / size * 8);
    for row in bytes.chunks_exact(n * size) {
        let rank = |bytes: &[u8]| if descending { !rank(dtype, bytes) } else { rank(dtype, bytes) };
        let mut order: Vec<(u64, u64)> = row.chunks_exact(size).map(rank).zip(0..).collect();
        order.sort_unstable();
        for (_, place) in order {
            keys.extend_from_slice(&row[place as usize * size..][..size]);
            places.extend_from_slice(&place.to_le_bytes());
        }
    }
    let keys = Array::from_bytes(device, dtype, rows.shape(), &keys)?;
    Ok((keys, Array::from_bytes(device, DType::Int64, rows.shape(), &places)?))
}

/// An integer that is less where an element is; both zeros are equal, and NaN is above all.
fn rank(dtype: DType, bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[8 - bytes.len()..].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(word);
    let top = 1 << 63;
    match dtype.kind() {
        Kind::Signed => bits ^ top,
        Kind::Float => match crate::Number::from_bytes(dtype, bytes) {
            crate::Number::Float(value) if value.is_nan() => u64::MAX,
            crate::Number::Float(0.0) => top,
            _ if bits & top != 0 => !bits,
            _ => bits | top,
        },
        _ => bits,
    }
}

/// Merges neighbours of runs that are in order: each element finds its place by a search in the other run.
fn merge(
    keys: &Array,
    places: &Array,
    [rows, n]: [u64; 2],
    width: u64,
    descending: bool,
) -> Result<(Array, Array)> {
    let (device, dtype) = (keys.device(), keys.dtype());
    let cpu = device.is_sequential();
    let kernel = device.own("merge", vec![dtype as u64, descending.into()], || {
        let block = IRBlock::new(GuestAddr(0));
        let k = block.builder();
        k.name("merge");
        let names = ["rows", "n"];
        let y = k.view_of("y", view(dtype, 2, Access::Write, &names));
        let to = k.view_of("to", view(DType::Int64, 2, Access::Write, &names));
        let x = k.view_of("x", view(dtype, 2, Access::Read, &names));
        let from = k.view_of("from", view(DType::Int64, 2, Access::Read, &names));
        let width = k.scalar_in("width", Type::I64, 1, 1 << 40);
        let n = y.extent(1);
        each(k, cpu, y.extent(0) * n, |at| {
            let (row, i) = (at.div_u(n), at.rem_u(n));
            let base = i - i.rem_u(width * 2);
            let middle = (base + width).min(n);
            let end = (base + width * 2).min(n);
            let left = i.lt(middle);
            let key = x.at([row, i]).load();
            let (low, high) = (left.select(middle, base), left.select(end, middle));
            // On the left what is less goes before, on the right also what is equal.
            let found = partition(k, low, high, |place| {
                let other = x.at([row, place]).load();
                left.select(before(dtype, descending, other, key), !before(dtype, descending, key, other))
            });
            let place = i + found - middle;
            y.at([row, place]).store(key);
            to.at([row, place]).store(from.at([row, i]).load());
        });
        Ok(block.kernel()?)
    })?;
    let shape = [rows, n];
    let (y, to) =
        (Array::empty(device, dtype, keys.shape())?, Array::empty(device, DType::Int64, keys.shape())?);
    let all = [&y, &to, keys, places].map(evaluate::dense);
    let [a, b, c, d] = all;
    let (a, b, c, d) = (a?, b?, c?, d?);
    let arguments: [Argument<'_, Accelerator>; 5] = [
        a.buffer.shaped(&shape)?.into(),
        b.buffer.shaped(&shape)?.into(),
        c.buffer.shaped(&shape)?.into(),
        d.buffer.shaped(&shape)?.into(),
        width.into(),
    ];
    device.launch(&kernel, grid(device, rows * n)?, &arguments)?;
    Ok((y, to))
}

/// Elements of a part that one thread goes through.
const PART: u64 = 512;

/// The scan along the middle of three dimensions of a dense array: of parts, each of which begins with what those before came to.
fn scanned(x: &Array, op: Reduction, [outer, n, inner]: [u64; 3]) -> Result<Array> {
    let (device, dtype) = (x.device(), x.dtype());
    let parts = n.div_ceil(PART);
    let identity = match op {
        Reduction::Prod => crate::Number::Int(1),
        _ => crate::Number::Int(0),
    };
    let before = if parts == 1 {
        Array::full(device, dtype, &[outer, 1, inner], identity)?
    } else {
        // What each part comes to, with the last, shorter one filled up; and of these the same scan.
        let whole = parts * PART;
        let filled = if whole == n {
            x.clone()
        } else {
            let rest = Array::full(device, dtype, &[outer, whole - n, inner], identity)?;
            Array::concatenate(&[x.clone(), rest], 1)?
        };
        let sums =
            filled.reshape(&[outer, parts, PART, inner])?.reduce(op, Some(&[2]), false, Some(dtype))?;
        let up_to = scanned(&sums, op, [outer, parts, inner])?;
        let all = crate::Slice::of(None, None, None, outer)?;
        let but_last = up_to.slice(&[all, crate::Slice::Range { start: 0, step: 1, count: parts - 1 }])?;
        Array::concatenate(&[Array::full(device, dtype, &[outer, 1, inner], identity)?, but_last], 1)?
    };
    let (cpu, of) = (device.is_sequential(), dtype.parts());
    let product = op == Reduction::Prod;
    let kernel = device.own("scan", vec![dtype as u64, product.into()], || {
        let block = IRBlock::new(GuestAddr(0));
        let k = block.builder();
        k.name("scan");
        let y = k.view_of("y", view(dtype, 4, Access::Write, &["outer", "n", "inner", "parts"]));
        let x = k.view_of("x", view(dtype, 4, Access::Read, &["outer", "n", "inner", "parts"]));
        let before = k.view_of("before", view(dtype, 4, Access::Read, &["outer", "", "inner", "parts"]));
        let inner = y.extent(2);
        let parts = before.extent(1);
        each(k, cpu, y.extent(0) * parts * inner, |at| {
            let (rest, i) = (at.div_u(inner), at.rem_u(inner));
            let (o, part) = (rest.div_u(parts), rest.rem_u(parts));
            let first = part * PART as i64;
            let places = k.range(first, (first + PART as i64).min(y.extent(1)));
            let [re, im] = [0, 1].map(|part| k.i64(part));
            let begun = before.at([o, part, i, re]).load();
            if dtype.is_complex() {
                places.fold((begun, before.at([o, part, i, im]).load()), |j, (a, b)| {
                    let (c, d) = (x.at([o, j, i, re]).load(), x.at([o, j, i, im]).load());
                    let (a, b) = if product { (a * c - b * d, a * d + b * c) } else { (a + c, b + d) };
                    y.at([o, j, i, re]).store(a);
                    y.at([o, j, i, im]).store(b);
                    (a, b)
                });
            } else {
                places.fold(begun, |j, sum| {
                    let x = x.at([o, j, i, re]).load();
                    let sum = if product { sum * x } else { sum + x };
                    y.at([o, j, i, re]).store(sum);
                    sum
                });
            }
        });
        Ok(block.kernel()?)
    })?;
    let y = Array::empty(device, dtype, &[outer, n, inner])?;
    let (to, from, carry) = (evaluate::storage(&y)?, evaluate::dense(x)?, evaluate::dense(&before)?);
    let arguments: [Argument<'_, Accelerator>; 3] = [
        to.buffer.shaped(&[outer, n, inner, of])?.into(),
        from.buffer.shaped(&[outer, n, inner, of])?.into(),
        carry.buffer.shaped(&[outer, parts, inner, of])?.into(),
    ];
    device.launch(&kernel, grid(device, outer * parts * inner)?, &arguments)?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_in_the_elements_order() {
        let check = |dtype: DType, elements: &[f64]| {
            let ranks: Vec<u64> = elements
                .iter()
                .map(|value| {
                    let bits = crate::Number::Float(*value).bits(dtype)[0].to_le_bytes();
                    rank(dtype, &bits[..dtype.bytes() as usize])
                })
                .collect();
            for (pair, ranks) in elements.windows(2).zip(ranks.windows(2)) {
                let expected = if pair[0] == pair[1] { ranks[0] == ranks[1] } else { ranks[0] < ranks[1] };
                assert!(expected, "{dtype}: {pair:?} have the ranks {ranks:x?}");
            }
        };
        let floats = [f64::NEG_INFINITY, -2.5, -1.0, -0.0, 0.0, 0.5, 3.0, f64::INFINITY, f64::NAN];
        for dtype in [DType::Float16, DType::BFloat16, DType::Float32, DType::Float64] {
            check(dtype, &floats);
        }
        for dtype in [DType::Int8, DType::Int16, DType::Int32, DType::Int64] {
            check(dtype, &[-128.0, -1.0, 0.0, 1.0, 127.0]);
        }
        for dtype in [DType::Bool, DType::UInt8, DType::UInt16, DType::UInt32, DType::UInt64] {
            check(dtype, &[0.0, 1.0]);
        }
        check(DType::UInt8, &[1.0, 127.0, 128.0, 255.0]);
    }
}
