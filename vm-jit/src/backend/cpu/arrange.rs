//! The lanes of IR vectors of threads that are run together: put together, taken apart, and filled.
//!
//! The elements of such a value lie thread after thread, each thread's lanes in a row, as in memory: rows of neighbouring
//! threads that touch are one access. A number for each thread has an element where a vector has several, so between
//! the two, elements move from vector to vector of the machine.

use super::lanes::{Repr, VECTOR, mask_type, vector};
use super::writer::Writer;
use cranelift_codegen::ir::{InstBuilder, Type, Value as Ssa, types};
use vm_ir::module::Op;
use vm_ir::op::Shape;
use vm_ir::{Scalar, Value};

impl Writer<'_, '_> {
    /// `vec.splat`, `vec.make`, `vec.extract` and `vec.insert`.
    pub(super) fn arrange(&mut self, op: &Op) -> Repr {
        if self.width == 1 {
            return self.arrange_one(op);
        }
        let [Some(result), Some(first)] = [op.result(), op.operands.first().copied()] else {
            return Repr::Each(Vec::new());
        };
        let scalar = self.scalar(result);
        let reprs: Vec<Repr> = op.operands.iter().map(|v| self.repr(*v)).collect();
        let whole = usize::from(self.kernel.type_of(result).lanes());
        let picked = op.immediates.first().map_or(0, |lane| *lane as usize);
        match (op.code.shape(), &reprs[..]) {
            (Shape::Splat | Shape::Extract, [Repr::Splat(one)]) => Repr::Splat(*one),
            (Shape::Splat, [repr]) => self.broadcast(repr, scalar, whole),
            (Shape::Make, all) if all.iter().all(|repr| matches!(repr, Repr::Splat(_))) => {
                let one: Vec<Ssa> = all.iter().flat_map(|repr| self.each_of(repr, scalar, 1)).collect();
                Repr::Each(one.iter().copied().cycle().take(whole * self.width).collect())
            }
            (Shape::Make, all) => {
                let from = |element: usize| (element % whole, element / whole);
                let counts = vec![self.width; all.len()];
                self.moved(all, &counts, scalar, whole * self.width, from)
            }
            (Shape::Extract, all) => {
                let lanes = usize::from(self.kernel.type_of(first).lanes());
                let from = |element: usize| (0, element * lanes + picked);
                self.moved(all, &[lanes * self.width], scalar, self.width, from)
            }
            (_, all) => {
                let from = |element: usize| match element % whole == picked {
                    true => (1, element / whole),
                    false => (0, element),
                };
                self.moved(all, &[whole * self.width, self.width], scalar, whole * self.width, from)
            }
        }
    }

    /// The same for one thread.
    fn arrange_one(&mut self, op: &Op) -> Repr {
        let picked = op.immediates.first().map_or(0, |lane| *lane as usize);
        match op.code.shape() {
            Shape::Splat => Repr::Splat(self.first(op.operands[0])),
            Shape::Make => Repr::Each(op.operands.iter().map(|v| self.first(*v)).collect()),
            Shape::Extract => Repr::Splat(self.each(op.operands[0])[picked]),
            _ => {
                let mut all = self.each(op.operands[0]);
                all[picked] = self.first(op.operands[1]);
                Repr::Each(all)
            }
        }
    }

    /// A number for each thread in all of a thread's `lanes`.
    pub(super) fn broadcast(&mut self, repr: &Repr, scalar: Scalar, lanes: usize) -> Repr {
        match repr {
            Repr::Splat(one) => Repr::Splat(*one),
            _ => {
                let (repr, width) = ([repr.clone()], self.width);
                self.moved(&repr, &[width], scalar, width * lanes, |element| (0, element / lanes))
            }
        }
    }

    /// A uniform vector, in the elements of each of them; what is not one thread's alone is left.
    pub(super) fn tiled(&self, repr: Repr, value: Value) -> Repr {
        let lanes = usize::from(self.kernel.type_of(value).lanes());
        if self.width == 1 || lanes == 1 {
            return repr;
        }
        let repeat = |all: Vec<Ssa>| all.repeat(self.width);
        match repr {
            Repr::Each(all) if all.len() == lanes => Repr::Each(repeat(all)),
            Repr::Chunks(all) if self.elements_in(&all) == lanes => Repr::Chunks(repeat(all)),
            other => other,
        }
    }

    /// How many elements vectors of the machine have together.
    pub(super) fn elements_in(&self, chunks: &[Ssa]) -> usize {
        chunks.iter().map(|chunk| self.type_of(*chunk).lane_count() as usize).sum()
    }

    /// `elements` of these values, which have `counts`: `from` says for each which value and which of its elements it is.
    pub(super) fn moved(
        &mut self,
        all: &[Repr],
        counts: &[usize],
        scalar: Scalar,
        elements: usize,
        from: impl Fn(usize) -> (usize, usize),
    ) -> Repr {
        let bytes = match scalar {
            // As wide as the masks that are there.
            Scalar::Bool => all.iter().find_map(|repr| match repr {
                Repr::Chunks(chunks) => Some(self.type_of(chunks[0]).lane_type().bytes()),
                _ => None,
            }),
            _ => vector(scalar).map(|_| scalar.bytes()),
        };
        let in_vectors = |bytes: &u32| {
            let fits = |count: &usize| count * *bytes as usize >= VECTOR;
            fits(&elements) && counts.iter().all(fits)
        };
        let Some(bytes) = bytes.filter(in_vectors) else {
            let each: Vec<Vec<Ssa>> =
                all.iter().zip(counts).map(|(repr, count)| self.each_of(repr, scalar, *count)).collect();
            let pick = |element| {
                let (value, at) = from(element);
                each[value][at]
            };
            return Repr::Each((0..elements).map(pick).collect());
        };
        let ty = match scalar {
            Scalar::Bool => mask_type(bytes),
            _ => vector(scalar).unwrap_or(mask_type(bytes)),
        };
        let chunks: Vec<Vec<Ssa>> = all
            .iter()
            .zip(counts)
            .map(|(repr, count)| match scalar {
                Scalar::Bool => self.masks_of(repr, bytes, *count),
                _ => self.chunks_of(repr, scalar, *count),
            })
            .collect();
        let per = VECTOR / bytes as usize;
        let made = (0..elements / per).map(|chunk| {
            let sources: Vec<(Ssa, usize)> = (chunk * per..(chunk + 1) * per)
                .map(|element| {
                    let (value, at) = from(element);
                    (chunks[value][at / per], at % per)
                })
                .collect();
            self.collect(ty, &sources)
        });
        Repr::Chunks(made.collect())
    }

    /// A vector of the machine whose lanes are these lanes of others.
    fn collect(&mut self, ty: Type, sources: &[(Ssa, usize)]) -> Ssa {
        let mut others: Vec<Ssa> = Vec::new();
        for (source, _) in sources {
            if !others.contains(source) {
                others.push(*source);
            }
        }
        let in_place = |source: Ssa| {
            let stays = |(lane, (from, at)): (usize, &(Ssa, usize))| *from == source && *at == lane;
            sources.iter().enumerate().filter(|one| stays(*one)).count()
        };
        if in_place(others[0]) == sources.len() {
            return others[0];
        }
        match others[..] {
            [a, ..] if others.len() == 2 && in_place(a) + 1 == sources.len() => {
                let moved = sources.iter().position(|(source, _)| *source != a).unwrap_or(0);
                let (source, at) = sources[moved];
                let one = self.b.ins().extractlane(source, at as u8);
                self.b.ins().insertlane(a, one, moved as u8)
            }
            [a] | [a, _] => {
                let b = others.last().copied().unwrap_or(a);
                self.shuffled(
                    ty,
                    a,
                    b,
                    sources.iter().map(|(s, at)| if *s == a { *at } else { at + sources.len() }),
                )
            }
            [a, b, c, d] if sources.len() == 4 && sources.iter().all(|(_, at)| *at == sources[0].1) => {
                // A column of four rows: halves of pairs, then halves of those.
                let at = sources[0].1;
                let pairs = if at < 2 { [0, 4, 1, 5] } else { [2, 6, 3, 7] };
                let [low, high] = [(a, b), (c, d)].map(|(a, b)| self.shuffled(ty, a, b, pairs.into_iter()));
                let halves = if at.is_multiple_of(2) { [0, 1, 4, 5] } else { [2, 3, 6, 7] };
                self.shuffled(ty, low, high, halves.into_iter())
            }
            _ => {
                let all: Vec<Ssa> =
                    sources.iter().map(|(source, at)| self.b.ins().extractlane(*source, *at as u8)).collect();
                self.gather(ty, &all)
            }
        }
    }

    /// Lanes of two vectors, those of the second counted on.
    pub(super) fn shuffled(&mut self, ty: Type, a: Ssa, b: Ssa, lanes: impl Iterator<Item = usize>) -> Ssa {
        let size = ty.lane_type().bytes() as usize;
        let picks: Vec<u8> =
            lanes.flat_map(|lane| lane * size..(lane + 1) * size).map(|at| at as u8).collect();
        let [a, b] = [a, b].map(|one| self.cast(types::I8X16, one));
        let mask = self.b.func.dfg.immediates.push(picks.into());
        let moved = self.b.ins().shuffle(a, b, mask);
        self.cast(ty, moved)
    }
}
