//! Threads that are run together, of which the code says by itself how many take part.
//!
//! Numbers that go in steps from thread to thread are all below a bound if the last one is: one comparison instead of one
//! for each. And `if %lane < 8` of a whole warp names its threads: these are run together as if there were no others, those
//! of the other region likewise, and nothing is asked when the code runs.

use super::diverge::live_ins;
use super::lanes::{Repr, VECTOR, mask_type, vector};
use super::writer::{Threads, Writer};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, InstructionData, Type, Value as Ssa, ValueDef};
use vm_ir::module::{Op, Region};
use vm_ir::op::Opcode;
use vm_ir::{Scalar, Value};

/// Whether a bool holds for all threads that are run together, and whether for any.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vote {
    pub(super) all: Ssa,
    pub(super) any: Ssa,
}

/// Neighbours among the threads that are run together: the first one's number, and how many.
type Part = (usize, usize);

/// The most parts that an `if` is written for.
const PARTS: usize = 4;

/// The lanes that are set, in parts that are run together: powers of two in whole vectors, or one by itself.
fn parts(lanes: &[bool]) -> Vec<Part> {
    let (mut at, mut all) = (0, Vec::new());
    while at < lanes.len() {
        let fits = |count: &usize| {
            at.is_multiple_of(4) && lanes.get(at..at + count).is_some_and(|some| some.iter().all(|set| *set))
        };
        let count = [16, 8, 4].into_iter().find(fits).unwrap_or(1);
        if lanes[at] {
            all.push((at, count));
        }
        at += count;
    }
    all
}

impl<'k> Writer<'_, 'k> {
    /// How threads vote on numbers that go up by `steps` from the first to the last, compared with one.
    pub(super) fn vote_of_steps(
        &mut self,
        condition: IntCC,
        base: Ssa,
        steps: i64,
        other: Ssa,
    ) -> Option<Vote> {
        let last = self.b.ins().iadd_imm_s(base, steps);
        let (least, most) = match condition {
            IntCC::SignedLessThan | IntCC::SignedLessThanOrEqual => (last, base),
            IntCC::SignedGreaterThan | IntCC::SignedGreaterThanOrEqual => (base, last),
            _ => return None,
        };
        let [all, any] = [least, most].map(|one| self.b.ins().icmp(condition, one, other));
        Some(Vote { all, any })
    }

    /// How threads vote on what is made of a vote and of what they agree on.
    pub(super) fn vote_of_bools(&mut self, op: &Op, args: &[Repr]) -> Option<Vote> {
        let (vote, one) = match args {
            [Repr::Splat(one), _] => (op.operands[1], *one),
            [_, Repr::Splat(one)] => (op.operands[0], *one),
            _ => return None,
        };
        let Vote { all, any } = *self.votes.get(&vote)?;
        let [all, any] = match op.code {
            Opcode::And => [all, any].map(|vote| self.b.ins().band(vote, one)),
            Opcode::Or => [all, any].map(|vote| self.b.ins().bor(vote, one)),
            _ => return None,
        };
        Some(Vote { all, any })
    }

    /// For which of the threads that are run together a bool holds, where the code says so.
    fn known_lanes(&mut self, condition: Value) -> Option<Vec<bool>> {
        let Repr::Chunks(masks) = self.repr(condition) else { return None };
        let mut lanes = Vec::with_capacity(self.width);
        for mask in masks {
            let ValueDef::Result(inst, _) = self.b.func.dfg.value_def(mask) else { return None };
            let InstructionData::UnaryConst { constant_handle, .. } = self.b.func.dfg.insts[inst] else {
                return None;
            };
            let bytes = self.type_of(mask).lane_type().bytes() as usize;
            let data = self.b.func.dfg.constants.get(constant_handle).as_slice();
            lanes.extend(data.chunks(bytes).map(|lane| lane[0] != 0));
        }
        (lanes.len() == self.width).then_some(lanes)
    }

    /// An `if` whose condition the code knows for each of the threads that are run together; was it one?
    pub(super) fn if_by_lanes(&mut self, op: &'k Op) -> bool {
        let Some(lanes) = self.known_lanes(op.operands[0]) else { return false };
        if let Some(index) = [true, false].iter().position(|all| lanes.iter().all(|set| set == all)) {
            let region = &op.regions[index];
            self.region(region);
            let yields: Vec<Repr> = region.yields.iter().map(|value| self.repr(*value)).collect();
            op.results.iter().zip(yields).for_each(|(value, repr)| self.set(*value, repr));
            return true;
        }
        let others: Vec<bool> = lanes.iter().map(|set| !set).collect();
        let work = [&lanes, &others].map(|lanes| parts(lanes));
        let arms = op.regions.iter().zip(&work).filter(|(region, _)| !region.ops.is_empty());
        let in_vectors = |value: &Value| {
            let scalar = self.scalar(*value);
            let one = !self.kernel.type_of(*value).is_vector();
            one && (scalar == Scalar::Bool || Self::in_vectors(scalar, self.width))
        };
        if arms.map(|(_, parts)| parts.len()).sum::<usize>() > PARTS || !op.results.iter().all(in_vectors) {
            return false;
        }
        let counters = self.counters();
        let mut made = Vec::with_capacity(2);
        for (region, parts) in op.regions.iter().zip(&work) {
            made.push(match region.ops.is_empty() {
                true => self.whole_yields(op, region),
                false => {
                    let mut all = op.results.iter().map(|value| vec![None; self.chunks_in(*value)]).collect();
                    for part in parts {
                        self.set_counters(counters);
                        self.region_of(op, region, *part, &mut all);
                    }
                    all
                }
            });
        }
        let [then, other] = &made[..] else { return true };
        for ((value, then), other) in op.results.iter().zip(then).zip(other) {
            let per = self.width / then.len();
            let pairs = then.iter().zip(other).enumerate();
            let chunks = pairs.filter_map(|(at, pair)| match pair {
                (Some(a), Some(b)) => {
                    let mask = self.mask_of_lanes(&lanes[at * per..(at + 1) * per]);
                    Some(self.choose(mask, *a, *b))
                }
                (a, b) => (*a).or(*b),
            });
            let chunks = chunks.collect();
            self.set(*value, Repr::Chunks(chunks));
        }
        true
    }

    /// The vector type in which an `if` by lanes puts a result.
    fn result_type(&self, value: Value) -> Type {
        vector(self.scalar(value)).unwrap_or(mask_type(4))
    }

    fn chunks_in(&self, value: Value) -> usize {
        self.width * self.result_type(value).lane_bits() as usize / 8 / VECTOR
    }

    /// `of` a value in vectors.
    fn chunks_as(&mut self, repr: &Repr, of: Value, width: usize) -> Vec<Ssa> {
        match self.scalar(of) {
            Scalar::Bool => self.masks_of(repr, 4, width),
            scalar => self.chunks_of(repr, scalar, width),
        }
    }

    /// What a region without ops yields, of all threads.
    fn whole_yields(&mut self, op: &Op, region: &Region) -> Vec<Vec<Option<Ssa>>> {
        let pairs = region.yields.iter().zip(&op.results);
        let made = pairs.map(|(from, to)| {
            let repr = self.repr(*from);
            self.chunks_as(&repr, *to, self.width).into_iter().map(Some).collect()
        });
        made.collect()
    }

    /// A region for some of the threads; what it yields is put into `all`.
    fn region_of(&mut self, op: &'k Op, region: &'k Region, part: Part, all: &mut Vec<Vec<Option<Ssa>>>) {
        let (first, count) = part;
        let (width, threads) = (self.width, self.threads);
        let mut before = Vec::new();
        for value in live_ins(op) {
            if let Some(repr) = self.env[value.index()].clone()
                && !self.is_one_thread(value, &repr)
            {
                let some = self.part_of(&repr, value, part);
                self.env[value.index()] = Some(some);
                before.push((value, repr));
            }
        }
        let votes = std::mem::take(&mut self.votes);
        self.width = count;
        self.threads = threads.map(|Threads { index, at: [x, y, z] }| Threads {
            index: self.plus(index, first as i64),
            at: [self.plus(x, first as i64), y, z],
        });
        self.region(region);
        for ((from, to), all) in region.yields.iter().zip(&op.results).zip(all) {
            let (repr, ty) = (self.repr(*from), self.result_type(*to));
            let per = ty.lane_count() as usize;
            let at = first / per;
            if count > 1 {
                let chunks = self.chunks_as(&repr, *to, count);
                all.splice(at..at + chunks.len(), chunks.into_iter().map(Some));
                continue;
            }
            let scalar = self.scalar(*to);
            let mut one = self.each_of(&repr, scalar, 1)[0];
            if scalar == Scalar::Bool {
                let wide = self.b.ins().uextend(ty.lane_type(), one);
                one = self.b.ins().ineg(wide);
            }
            all[at] = Some(match all[at] {
                Some(chunk) => self.b.ins().insertlane(chunk, one, (first % per) as u8),
                None => self.b.ins().splat(ty, one),
            });
        }
        (self.width, self.threads, self.votes) = (width, threads, votes);
        before.into_iter().for_each(|(value, repr)| self.env[value.index()] = Some(repr));
    }

    /// What some of the threads have of a value.
    fn part_of(&mut self, repr: &Repr, value: Value, (first, count): Part) -> Repr {
        let (scalar, lanes) = (self.scalar(value), usize::from(self.kernel.type_of(value).lanes()));
        let (from, to) = (first * lanes, (first + count) * lanes);
        match repr {
            Repr::Splat(one) => Repr::Splat(*one),
            Repr::Affine { base, stride, low, high } => {
                let base = self.plus(*base, first as i64 * stride);
                match count {
                    1 => Repr::Splat(base),
                    _ => Repr::Affine { base, stride: *stride, low: *low, high: *high },
                }
            }
            Repr::Chunks(chunks) if count > 1 && self.divide_chunks(chunks, from, to) => {
                let per = self.width * lanes / chunks.len();
                Repr::Chunks(chunks[from / per..to / per].to_vec())
            }
            other => match &self.each_of(other, scalar, self.width * lanes)[from..to] {
                [one] => Repr::Splat(*one),
                some => Repr::Each(some.to_vec()),
            },
        }
    }

    /// Do the elements from one to another fill vectors?
    fn divide_chunks(&self, chunks: &[Ssa], from: usize, to: usize) -> bool {
        let per = self.type_of(chunks[0]).lane_count() as usize;
        from.is_multiple_of(per) && to.is_multiple_of(per)
    }

    /// A constant more; of a constant, a constant.
    fn plus(&mut self, one: Ssa, by: i64) -> Ssa {
        match self.constant(one) {
            _ if by == 0 => one,
            Some(known) => self.int(self.type_of(one), known.wrapping_add(by)),
            None => self.b.ins().iadd_imm_s(one, by),
        }
    }

    /// A mask of constants, of a vector's lanes.
    fn mask_of_lanes(&mut self, lanes: &[bool]) -> Ssa {
        let bytes = VECTOR / lanes.len();
        let data: Vec<u8> =
            lanes.iter().flat_map(|set| std::iter::repeat_n(if *set { 0xff } else { 0 }, bytes)).collect();
        let data = self.b.func.dfg.constants.insert(data.into());
        self.b.ins().vconst(mask_type(bytes as u32), data)
    }
}
