//! The ops of tile kernels, each for the whole block.

use super::exec::{Machine, Result};
use crate::format::{from_f64, signed, to_f64};
use crate::module::{Op, Place};
use crate::op::{Left, Opcode, Right, Shape, Turn};
use crate::semantics::eval;
use crate::tile::{Fragment, Tile, column_step};
use crate::types::Scalar;
use crate::valid::Trust;
use std::collections::VecDeque;

/// The registers and rings of a block.
#[derive(Debug, Default)]
pub(super) struct Tiles {
    /// By channel: the tiles that are fetched and not released, the oldest first; elements row by row.
    channels: Vec<VecDeque<Vec<u64>>>,
    /// By fragment: its elements, row by row.
    fragments: Vec<Vec<u64>>,
}

impl Tiles {
    /// Those of a block that begins: fragments are zero, channels empty.
    pub(super) fn of(tile: &Tile) -> Tiles {
        Tiles {
            channels: tile.channels.iter().map(|_| VecDeque::new()).collect(),
            fragments: tile.fragments.iter().map(|f| vec![0; f.len() as usize]).collect(),
        }
    }

    /// Bytes that they take at most.
    pub(super) fn bytes(tile: &Tile) -> u64 {
        let stage = |c: &crate::tile::Channel| u64::from(c.dims[0]) * u64::from(c.dims[1]);
        let channels: u64 = tile.channels.iter().map(|c| stage(c) * u64::from(c.stages)).sum();
        let fragments: u64 = tile.fragments.iter().map(Fragment::len).sum();
        8 * (channels + fragments)
    }

    /// The elements of a fragment, or of the newest stage of a channel.
    fn newest(&self, place: Place) -> Option<&[u64]> {
        match place {
            Place::Channel(i) => self.channels.get(usize::from(i))?.back().map(Vec::as_slice),
            Place::Fragment(i) => self.fragments.get(usize::from(i)).map(Vec::as_slice),
            Place::View(_) | Place::Shared(_) | Place::Local(_) => None,
        }
    }

    fn set(&mut self, place: Place, elements: Vec<u64>) {
        if let Place::Fragment(i) = place
            && let Some(fragment) = self.fragments.get_mut(usize::from(i))
        {
            *fragment = elements;
        }
    }
}

impl<'m> Machine<'m> {
    /// An op of a tile kernel; the block's one thread has number 0.
    pub(super) fn tile_op(&mut self, op: &'m Op) -> Result<()> {
        let Some(place) = op.place else { return Ok(()) };
        match op.code.shape() {
            Shape::Fetch => self.fetch(op, place),
            Shape::Put | Shape::PutRows => self.put(op, place),
            Shape::Get => self.get_box(op, place),
            Shape::Send => {
                let elements = self.tiles.newest(place).map_or_else(Vec::new, <[u64]>::to_vec);
                self.spend(elements.len())?;
                if let Some(Place::Channel(i)) = op.others.first()
                    && let Some(channel) = self.tiles.channels.get_mut(usize::from(*i))
                {
                    channel.push_back(elements);
                }
                Ok(())
            }
            Shape::Mma => self.mma(op, place),
            Shape::Map => self.map(op, place),
            Shape::Rows => self.rows(op, place),
            Shape::Share => self.share(op, place),
            Shape::Release => {
                if let Place::Channel(i) = place
                    && let Some(channel) = self.tiles.channels.get_mut(usize::from(i))
                {
                    channel.pop_front();
                }
                Ok(())
            }
            _ => {
                let (Some(fragment), Some(value)) = (self.kernel.fragment(place), op.operands.first()) else {
                    return Ok(());
                };
                let elements = vec![self.get(*value, 0); fragment.len() as usize];
                self.spend(elements.len())?;
                self.tiles.set(place, elements);
                Ok(())
            }
        }
    }

    /// The indices where a box begins.
    fn box_indices(&self, op: &Op) -> Vec<i64> {
        op.operands.iter().map(|v| signed(self.ty(*v).scalar(), self.get(*v, 0))).collect()
    }

    /// The elements of a view, row by row, that a box of `rows` of its last dimension but one and `columns` of its last covers,
    /// which begins at these indices; `None` for those out of bounds.
    fn covered(
        &mut self,
        mut indices: Vec<i64>,
        view: Place,
        [rows, columns]: [u32; 2],
    ) -> Result<Vec<Option<usize>>> {
        self.spend((rows * columns) as usize)?;
        let Some(last) = indices.len().checked_sub(1) else { return Ok(Vec::new()) };
        let begin = indices.clone();
        let Some(memory) = self.memory(view, 0) else { return Ok(Vec::new()) };
        let mut covered = Vec::with_capacity((rows * columns) as usize);
        for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
            let row = match last.checked_sub(1) {
                Some(above) => begin[above].checked_add(i.into()).map(|row| indices[above] = row),
                None => Some(()),
            };
            let column = begin[last].checked_add(j.into()).map(|column| indices[last] = column);
            let inside = row.is_some() && column.is_some();
            let element = inside.then(|| memory.element(&indices, 0, 1, Trust::Guest)).flatten();
            covered.push(element.map(|element| element as usize));
        }
        Ok(covered)
    }

    /// Those that a copy of a matrix covers, whose column is at a multiple of 16 bytes.
    fn copied(&mut self, mut indices: Vec<i64>, view: Place, dims: [u32; 2]) -> Result<Vec<Option<usize>>> {
        let step = self.kernel.place(view).map_or(1, |(_, element)| column_step(element));
        if let Some(column) = indices.last_mut() {
            *column &= -i64::from(step);
        }
        self.covered(indices, view, dims)
    }

    fn fetch(&mut self, op: &Op, view: Place) -> Result<()> {
        let Some(&[place]) = op.others.first_chunk::<1>() else { return Ok(()) };
        let (Place::Channel(i), Some(channel)) = (place, self.kernel.channel(place)) else { return Ok(()) };
        let covered = self.copied(self.box_indices(op), view, channel.dims)?;
        let rounded = channel.element == Scalar::Tf32;
        let read = |at: Option<usize>| {
            let bits = at.map_or(Ok(0), |at| self.read(view, at, 0, false))?;
            Ok(if rounded { tf32(bits as u32).into() } else { bits })
        };
        let tile: Vec<u64> = covered.into_iter().map(read).collect::<Result<_>>()?;
        if let Some(channel) = self.tiles.channels.get_mut(usize::from(i)) {
            channel.push_back(tile);
        }
        Ok(())
    }

    fn put(&mut self, op: &Op, view: Place) -> Result<()> {
        let Some(&[place]) = op.others.first_chunk::<1>() else { return Ok(()) };
        let Some(fragment) = self.kernel.fragment(place) else { return Ok(()) };
        let (turned, columns) = (op.attr() == Some(Turn::Transposed), fragment.columns.unwrap_or(1));
        let mut begin = self.box_indices(op);
        let rows = match op.code.shape() {
            Shape::PutRows => begin.pop().unwrap_or(0).max(0) as usize,
            _ => usize::MAX,
        };
        let covered = match fragment.is_line() {
            true => self.covered(begin, view, [1, fragment.len() as u32])?,
            false if begin.iter().any(|index| *index < 0) => return self.spend(1),
            false if turned => self.copied(begin, view, [columns, fragment.rows])?,
            false => self.copied(begin, view, [fragment.rows, columns])?,
        };
        let width = if fragment.is_row() { 0 } else { fragment.columns.unwrap_or(1) as usize };
        let kept = if width == 0 && rows > 0 { usize::MAX } else { rows.saturating_mul(width) };
        let mut elements = self.tiles.newest(place).map_or_else(Vec::new, <[u64]>::to_vec);
        if turned {
            let (rows, columns) = (fragment.rows as usize, columns as usize);
            elements = (0..rows * columns).map(|at| elements[at % rows * columns + at / rows]).collect();
        }
        let (adds, element) = (op.code == Opcode::PutAdd, fragment.element);
        for (at, bits) in covered.into_iter().zip(elements).take(kept) {
            let Some(at) = at else { continue };
            let bits = match adds {
                true => {
                    let before = self.read(view, at, 0, true)?;
                    eval(Opcode::Add, element, element, &[before, bits]).unwrap_or(before)
                }
                false => bits,
            };
            self.write(view, at, bits, 0, adds)?;
        }
        Ok(())
    }

    fn get_box(&mut self, op: &Op, view: Place) -> Result<()> {
        let Some(&[place]) = op.others.first_chunk::<1>() else { return Ok(()) };
        let Some(fragment) = self.kernel.fragment(place) else { return Ok(()) };
        let begin = self.box_indices(op);
        let covered = match fragment.is_line() {
            true => self.covered(begin, view, [1, fragment.len() as u32])?,
            false => self.copied(begin, view, [fragment.rows, fragment.columns.unwrap_or(1)])?,
        };
        let read = |at: Option<usize>| at.map_or(Ok(0), |at| self.read(view, at, 0, false));
        let elements = covered.into_iter().map(read).collect::<Result<_>>()?;
        self.tiles.set(place, elements);
        Ok(())
    }

    /// Sums are exact up to f64's rounding, and rounded once more.
    fn mma(&mut self, op: &Op, sum: Place) -> Result<()> {
        let (&[a, b], Some(fragment)) = (&op.others[..], self.kernel.fragment(sum)) else { return Ok(()) };
        let (rows, columns) = (fragment.rows as usize, fragment.columns.unwrap_or(1) as usize);
        let number = |place: Place| -> Option<Vec<f64>> {
            let element = self.kernel.place(place)?.1;
            let value = |bits: &u64| match element.is_int() {
                true => signed(element, *bits) as f64,
                false => to_f64(element, *bits),
            };
            Some(self.tiles.newest(place)?.iter().map(value).collect())
        };
        let (Some(left), Some(right), Some(before)) = (number(a), number(b), number(sum)) else {
            return Ok(());
        };
        let inner = left.len() / rows;
        self.spend(rows * columns * inner / 16)?;
        let (left_turned, right_turned) =
            (op.attr() == Some(Left::Transposed), op.attr() == Some(Right::Transposed));
        let elements = (0..rows * columns).map(|at| {
            let (i, j) = (at / columns, at % columns);
            let products = (0..inner).map(|k| {
                let x = if left_turned { left[k * rows + i] } else { left[i * inner + k] };
                let y = if right_turned { right[j * inner + k] } else { right[k * columns + j] };
                x * y
            });
            let before = if op.code == Opcode::Product { 0.0 } else { before[at] };
            from_f64(fragment.element, before + products.sum::<f64>())
        });
        let elements = elements.collect();
        self.tiles.set(sum, elements);
        Ok(())
    }

    fn map(&mut self, op: &'m Op, first: Place) -> Result<()> {
        let Some(shape) = self.kernel.fragment(first) else { return Ok(()) };
        let (columns, count) = (shape.columns.unwrap_or(1) as usize, shape.len() as usize);
        let body = &op.regions[0];
        let computed = op.immediates.first().map_or(1, |n| *n as usize);
        let places: Vec<Place> = std::iter::once(first).chain(op.others.iter().copied()).collect();
        let (written, read) = places.split_at(computed.min(places.len()));
        // The distances of elements from row to row and from column to column.
        let sources: Vec<(Vec<u64>, [usize; 2])> = read
            .iter()
            .filter_map(|place| {
                let fragment = self.kernel.fragment(*place)?;
                let steps = match fragment.columns {
                    None => [1, 0],
                    Some(_) if fragment.is_row() => [0, 1],
                    Some(columns) => [columns as usize, 1],
                };
                Some((self.tiles.newest(*place)?.to_vec(), steps))
            })
            .collect();
        for arg in &body.args {
            self.room_for(*arg)?;
        }
        let mut results = vec![Vec::with_capacity(count); written.len()];
        for at in 0..count {
            let (row, column) = (at / columns, at % columns);
            let elements = sources.iter().map(|(all, [down, right])| all[row * down + column * right]);
            let bits = [row as u64, column as u64].into_iter().chain(elements);
            for (arg, bits) in body.args.iter().zip(bits.collect::<Vec<_>>()) {
                self.set(*arg, 0, &[bits]);
            }
            self.region(body, &[0])?;
            for (result, value) in results.iter_mut().zip(&body.yields) {
                result.push(self.get(*value, 0));
            }
        }
        for (place, elements) in written.iter().zip(results) {
            self.tiles.set(*place, elements);
        }
        Ok(())
    }

    fn share(&mut self, op: &Op, place: Place) -> Result<()> {
        let (Some(&[from]), Some(part)) = (op.others.first_chunk::<1>(), self.kernel.fragment(place)) else {
            return Ok(());
        };
        let (Some(sum), Some(of_sum)) = (self.tiles.newest(from), self.kernel.fragment(from)) else {
            return Ok(());
        };
        let [own, all] = [part, of_sum].map(|f| f.columns.unwrap_or(1) as usize);
        let first = if own == all { 0 } else { self.cluster_rank() as usize * own };
        let elements: Vec<u64> =
            sum.chunks(all.max(1)).flat_map(|row| row.iter().skip(first).take(own)).copied().collect();
        self.spend(elements.len())?;
        self.tiles.set(place, elements);
        Ok(())
    }

    fn rows(&mut self, op: &Op, place: Place) -> Result<()> {
        let (Some(&[matrix]), Some(column)) = (op.others.first_chunk::<1>(), self.kernel.fragment(place))
        else {
            return Ok(());
        };
        let code = match op.code {
            Opcode::RowMax => Opcode::Max,
            Opcode::RowMin => Opcode::Min,
            _ => Opcode::Add,
        };
        let (Some(sums), Some(elements)) = (self.tiles.newest(place), self.tiles.newest(matrix)) else {
            return Ok(());
        };
        let scalar = column.element;
        let columns = elements.len() / sums.len().max(1);
        let rows = elements.chunks(columns.max(1)).zip(sums);
        let joined = rows.map(|(row, first)| match code {
            // Sums are as exact as those of products.
            Opcode::Add => {
                let sum = row.iter().fold(to_f64(scalar, *first), |sum, bits| sum + to_f64(scalar, *bits));
                from_f64(scalar, sum)
            }
            _ => row.iter().fold(*first, |a, b| eval(code, scalar, scalar, &[a, *b]).unwrap_or(a)),
        });
        let joined = joined.collect();
        self.spend(columns)?;
        self.tiles.set(place, joined);
        Ok(())
    }
}

/// An f32 rounded to the nearest tf32, which has 10 bits of fraction; ties away from zero.
fn tf32(bits: u32) -> u32 {
    match f32::from_bits(bits).is_finite() {
        true => bits.wrapping_add(1 << 12) & !((1 << 13) - 1),
        false => bits,
    }
}
