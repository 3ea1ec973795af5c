//! Boxes of views, clipped in 64 bits: what is outside is never touched.

use super::stage::{PIECE, Stage};
use crate::backend::ptx::arch::Feature;
use crate::backend::ptx::asm::{Arg, Reg, def, ins, when};
use crate::backend::ptx::writer::{Extent, View, Writer};
use vm_ir::Value;
use vm_ir::module::{Op, Place};
use vm_ir::tile::column_step;

/// Above every extent of a tile: what lies that far from a box is out of it.
pub(super) const FAR: i64 = 1 << 20;
/// How a piece is copied that is aligned to its size.
const COPY_PIECE: &str = "cp.async.cg.shared.global";
/// Pieces that are loaded before the first is stored.
const BATCH: usize = 4;

/// A stretch of a box that lies in a view: from `skip` up to `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) skip: Reg,
    pub(super) end: Reg,
}

/// A box of a view.
#[derive(Clone, Copy, Debug)]
pub(super) struct Box2 {
    /// The address at which it begins, which may be outside of the view.
    pub(super) base: Reg,
    /// Bytes from a row to the next; none along the last dimension alone.
    pub(super) stride: Option<Reg>,
    pub(super) rows: Option<Range>,
    pub(super) columns: Range,
}

impl Writer<'_> {
    /// What lies in a dimension of `extent` of a box that begins at `first`.
    fn range(&mut self, first: Reg, extent: Extent) -> Range {
        let first = def!(self, B64, "max.s64", first, -FAR);
        let extent = match extent {
            Extent::Fixed(extent) => def!(self, B64, "mov.b64", extent),
            Extent::Reg(extent) => extent,
        };
        let narrow = |writer: &mut Self, wide: Reg| {
            let wide = def!(writer, B64, "max.s64", wide, 0);
            let wide = def!(writer, B64, "min.s64", wide, FAR);
            def!(writer, B32, "cvt.u32.u64", wide)
        };
        let end = def!(self, B64, "sub.s64", extent, first);
        let skip = def!(self, B64, "neg.s64", first);
        Range { skip: narrow(self, skip), end: narrow(self, end) }
    }

    /// The box of an op's view that begins at these indices. `copied`: is its column rounded down to a multiple of 16 bytes? `line`: does
    /// it lie along the last dimension alone?
    pub(super) fn clipped(&mut self, op: &Op, indices: &[Value], copied: bool, line: bool) -> Option<Box2> {
        let place = op.place?;
        let View { base, extents, strides } = self.view(place)?.clone();
        let (_, element) = self.kernel.place(place)?;
        let rank = extents.len();
        let last = rank.checked_sub(1)?;
        let above = if line { last } else { last.checked_sub(1)? };
        let mut base = base;
        let mut outside: Option<Reg> = None;
        let mut ranges = Vec::new();
        for (i, index) in indices.iter().enumerate() {
            let mut wide = self.wide(*index);
            if i == last && copied {
                wide = def!(self, B64, "and.b64", wide, -i64::from(column_step(element)));
            }
            base = match strides.get(i) {
                Some(stride) => def!(self, B64, "mad.lo.s64", wide, *stride, base),
                None => def!(self, B64, "mad.lo.s64", wide, i64::from(element.bytes()), base),
            };
            if i >= above {
                ranges.push(self.range(wide, extents[i]));
                continue;
            }
            // Below zero is far above.
            let out = def!(self, Pred, "setp.ge.u64", wide, extents[i]);
            outside = Some(match outside {
                None => out,
                Some(before) => def!(self, Pred, "or.pred", before, out),
            });
        }
        let mut columns = ranges.pop()?;
        if let Some(outside) = outside {
            columns.end = def!(self, B32, "selp.b32", 0, columns.end, outside);
        }
        let stride = strides.get(above).copied().filter(|_| !line);
        Some(Box2 { base, stride, rows: ranges.pop(), columns })
    }

    /// Copies the box of a view into a stage, by `threads` threads of which this is number `index`. What is outside becomes zero.
    /// `arrives`: the barrier to which each thread arrives when what it copied is there.
    pub(super) fn copy_box(
        &mut self,
        op: &Op,
        stage: Stage,
        to: Reg,
        (index, threads): (Reg, u32),
        arrives: Option<(Reg, i64)>,
    ) {
        let Some(&[channel]) = op.others.first_chunk::<1>() else { return };
        let Some(dims) = self.kernel.channel(channel).map(|channel| channel.dims) else { return };
        let Some(Place::View(view)) = op.place else { return };
        let promised = self.kernel.view(view).map_or(1, |view| view.align.min(PIECE));
        let Some(Box2 { base, stride: Some(stride), rows: Some(rows), columns }) =
            self.clipped(op, &op.operands, true, false)
        else {
            return;
        };
        // What the tile does not have lies outside, too.
        let rows = Range { skip: rows.skip, end: def!(self, B32, "min.u32", rows.end, i64::from(dims[0])) };
        let end = def!(self, B32, "min.u32", columns.end, i64::from(dims[1]));
        let size = i64::from(stage.size);
        let end = def!(self, B32, "mul.lo.u32", end, size);
        let skip = def!(self, B32, "mul.lo.u32", columns.skip, size);

        // A thread has the same piece of every row that it copies, or of every second one another.
        let pieces = stage.pieces;
        let step = threads / pieces;
        let row = def!(self, B32, "shr.u32", index, i64::from(pieces.trailing_zeros()));
        let piece = def!(self, B32, "and.b32", index, i64::from(pieces - 1));
        let byte = def!(self, B32, "shl.b32", piece, 4);
        let first = def!(self, B64, "cvt.u64.u32", row);
        let first = def!(self, B64, "mad.lo.s64", first, stride, base);
        let wide = def!(self, B64, "cvt.u64.u32", byte);
        let first = def!(self, B64, "add.s64", first, wide);
        let down = def!(self, B64, "mul.lo.s64", stride, i64::from(step));
        let place = self.offset_in(Stage { slabs: 1, ..stage }, row, byte);
        let place = def!(self, B32, "add.u32", place, to);
        // The rows that this thread has: counted from its own.
        let own = def!(self, B32, "sub.u32", row, rows.skip);
        let span = def!(self, B32, "sub.s32", rows.end, rows.skip);
        let span = def!(self, B32, "max.s32", span, 0);
        let asynchronous = self.has(Feature::CpAsync) && promised >= 4;
        let end_of_all = self.asm.new_label();
        if asynchronous && promised == PIECE && [stage.rows, stage.columns()] == dims {
            // Nothing is to be asked of each piece where all of the box is in the view.
            let some = def!(self, B32, "or.b32", rows.skip, columns.skip);
            let high = def!(self, Pred, "setp.eq.u32", rows.end, i64::from(dims[0]));
            let wide = def!(self, Pred, "setp.eq.and.u32", end, i64::from(dims[1] * stage.size), high);
            let whole = def!(self, Pred, "setp.eq.and.u32", some, 0, wide);
            let edge = self.asm.new_label();
            when!(self, whole, false, "bra", Arg::Label(edge));
            let mut from = first;
            for n in 0..stage.rows.div_ceil(step) {
                let down_by = n * step;
                let (by, more) = (stage.moved(down_by % 8), down_by * stage.pitch());
                let to = match by {
                    0 => place,
                    by => def!(self, B32, "xor.b32", place, i64::from(by)),
                };
                if n > 0 {
                    from = def!(self, B64, "add.s64", from, down);
                }
                let exists = (down_by + step > stage.rows)
                    .then(|| def!(self, Pred, "setp.lt.u32", row, i64::from(stage.rows - down_by)));
                for slab in 0..stage.slabs {
                    let to = Arg::At(to, i64::from(more + slab * stage.slab_bytes()));
                    let args = [to, Arg::At(from, i64::from(slab * stage.pitch())), Arg::Int(PIECE.into())];
                    self.asm.ins(exists.map(|exists| (exists, true)), COPY_PIECE, &args);
                }
            }
            ins!(self, "bra", Arg::Label(end_of_all));
            self.asm.place(edge);
        }
        for slab in 0..stage.slabs {
            let left = i64::from(slab * stage.pitch());
            let byte = def!(self, B32, "add.u32", byte, left);
            let inside = def!(self, B32, "sub.s32", end, byte);
            let inside = def!(self, B32, "max.s32", inside, 0);
            let inside = def!(self, B32, "min.s32", inside, i64::from(PIECE));
            let below = def!(self, Pred, "setp.lt.u32", byte, skip);
            let inside = def!(self, B32, "selp.b32", 0, inside, below);
            let from = def!(self, B64, "add.s64", first, left);
            let mut parts = Vec::new();
            for n in 0..stage.rows.div_ceil(step) {
                let down_by = n * step;
                let (by, more) =
                    (stage.moved(down_by % 8), down_by * stage.pitch() + slab * stage.slab_bytes());
                let to = match by {
                    0 => place,
                    by => def!(self, B32, "xor.b32", place, i64::from(by)),
                };
                let at = def!(self, B32, "add.u32", own, i64::from(down_by));
                let there = def!(self, Pred, "setp.lt.u32", at, span);
                // The last step may have more rows than the stage.
                let exists = (down_by + step > stage.rows)
                    .then(|| def!(self, Pred, "setp.lt.u32", row, i64::from(stage.rows - down_by)));
                parts.push(Part { to, more, there, exists });
            }
            match asynchronous {
                true => self.copy_later(&parts, from, down, inside, promised),
                false => self.copy_now(&parts, from, down, inside, promised.max(1), stage.size),
            }
        }
        self.asm.place(end_of_all);
        match arrives {
            Some((barrier, offset)) if asynchronous => {
                let arrive = "cp.async.mbarrier.arrive.noinc.shared.b64";
                ins!(self, arrive, Arg::At(barrier, offset));
            }
            Some((barrier, offset)) => {
                ins!(self, "mbarrier.arrive.shared.b64", "_", Arg::At(barrier, offset));
            }
            None => {}
        }
    }

    /// Copies the thread's pieces of a slab without waiting for them.
    fn copy_later(&mut self, parts: &[Part], from: Reg, down: Reg, inside: Reg, promised: u32) {
        let wide = promised == PIECE;
        let name = if wide { COPY_PIECE } else { "cp.async.ca.shared.global" };
        let mut at = from;
        for (n, part) in parts.iter().enumerate() {
            if n > 0 {
                at = def!(self, B64, "add.s64", at, down);
            }
            let bytes = def!(self, B32, "selp.b32", inside, 0, part.there);
            for i in 0..PIECE / promised {
                let bytes = match wide {
                    true => bytes,
                    false => {
                        let left = def!(self, B32, "sub.s32", bytes, i64::from(i * promised));
                        let left = def!(self, B32, "max.s32", left, 0);
                        def!(self, B32, "min.s32", left, i64::from(promised))
                    }
                };
                let offset = i64::from(i * promised);
                let to = Arg::At(part.to, i64::from(part.more) + offset);
                let args = [to, Arg::At(at, offset), Arg::Int(promised.into()), bytes.into()];
                self.asm.ins(part.exists.map(|exists| (exists, true)), name, &args);
            }
        }
    }

    /// Copies the thread's pieces of a slab by way of registers: those that are whole, then those that are not.
    fn copy_now(&mut self, parts: &[Part], from: Reg, down: Reg, inside: Reg, promised: u32, size: u32) {
        let whole = def!(self, Pred, "setp.eq.u32", inside, i64::from(PIECE));
        let none = def!(self, Pred, "setp.eq.u32", inside, 0);
        let simple = def!(self, Pred, "or.pred", whole, none);
        let (partly, end) = (self.asm.new_label(), self.asm.new_label());
        when!(self, simple, false, "bra", Arg::Label(partly));
        let mut at = from;
        for batch in parts.chunks(BATCH) {
            let mut loaded = Vec::new();
            for part in batch {
                let there = def!(self, Pred, "and.pred", part.there, whole);
                loaded.push(self.load_piece(at, promised, Some(there), PIECE));
                at = def!(self, B64, "add.s64", at, down);
            }
            for (part, words) in batch.iter().zip(loaded) {
                let args = [Arg::At(part.to, part.more.into()), Arg::List(&words)];
                self.asm.ins(part.exists.map(|exists| (exists, true)), "st.shared.v4.b32", &args);
            }
        }
        ins!(self, "bra", Arg::Label(end));
        self.asm.place(partly);
        let mut at = from;
        for part in parts {
            let words: [Reg; 4] = std::array::from_fn(|_| def!(self, B32, "mov.b32", 0));
            // Element by element, as far as they lie inside.
            for i in 0..PIECE / size {
                let there = def!(self, Pred, "setp.gt.and.s32", inside, i64::from(i * size), part.there);
                let element = def!(self, B32, "mov.b32", 0);
                let name = ["ld.global.u8", "ld.global.u16", "", "ld.global.b32"][size as usize - 1];
                when!(self, there, true, name, element, Arg::At(at, i64::from(i * size)));
                let word = words[(i * size / 4) as usize];
                let shift = i * size % 4 * 8;
                let moved = match shift {
                    0 => element,
                    shift => def!(self, B32, "shl.b32", element, i64::from(shift)),
                };
                ins!(self, "or.b32", word, word, moved);
            }
            let args = [Arg::At(part.to, part.more.into()), Arg::List(&words)];
            self.asm.ins(part.exists.map(|exists| (exists, true)), "st.shared.v4.b32", &args);
            at = def!(self, B64, "add.s64", at, down);
        }
        self.asm.place(end);
    }

    /// The words of so many bytes that lie at an address, as wide as promised; zero where the predicate does not hold.
    fn load_piece(&mut self, at: Reg, promised: u32, when: Option<Reg>, bytes: u32) -> Vec<Reg> {
        let words: Vec<Reg> = (0..bytes / 4).map(|_| def!(self, B32, "mov.b32", 0)).collect();
        let when = when.map(|when| (when, true));
        match promised {
            4.. => {
                let per = (promised / 4) as usize;
                for (i, words) in words.chunks(per).enumerate() {
                    let from = Arg::At(at, (i * per * 4) as i64);
                    match words {
                        [one] => self.asm.ins(when, "ld.global.b32", &[Arg::Reg(*one), from]),
                        two if per == 2 => self.asm.ins(when, "ld.global.v2.b32", &[Arg::List(two), from]),
                        four => self.asm.ins(when, "ld.global.v4.b32", &[Arg::List(four), from]),
                    }
                }
            }
            _ => {
                let name = if promised == 2 { "ld.global.u16" } else { "ld.global.u8" };
                for i in 0..bytes / promised {
                    let part = def!(self, B32, "mov.b32", 0);
                    self.asm.ins(when, name, &[Arg::Reg(part), Arg::At(at, i64::from(i * promised))]);
                    let word = words[(i * promised / 4) as usize];
                    let shift = i * promised % 4 * 8;
                    let moved = match shift {
                        0 => part,
                        shift => def!(self, B32, "shl.b32", part, i64::from(shift)),
                    };
                    ins!(self, "or.b32", word, word, moved);
                }
            }
        }
        words
    }
}

/// A piece that a thread copies.
struct Part {
    /// Where to, and how much further.
    to: Reg,
    more: u32,
    /// Is its row in the view?
    there: Reg,
    /// Is there such a row in the stage, if that is not sure?
    exists: Option<Reg>,
}
