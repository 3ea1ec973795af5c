//! Threads that are run together and do not agree.
//!
//! Neighbouring threads are run together, their values in vectors. While they all take one way, it is theirs. Where they
//! do not agree, each goes on by itself to the end of the `if`, `switch` or loop, and they meet again behind it. What they
//! then know is handed over in the scratch memory.

use super::isa::Architecture;
use super::lanes::{Repr, clif, own};
use super::plan::bytes_of;
use super::writer::Writer;
use crate::range::Loop;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{Block, BlockArg, InstBuilder, Value as Ssa, types};
use std::collections::HashSet;
use vm_ir::module::{Op, Region};
use vm_ir::op::{Effect, Shape};
use vm_ir::valid::Uniformity;
use vm_ir::{Scalar, Value};

/// How many threads may be run together: as many vectors as hide the time that one op waits for another.
const WIDTHS: [usize; 3] = [16, 8, 4];
/// The most where elements take whole registers, or half of a vector.
const WIDE: usize = 8;
/// Threads whose vectors have more bytes are run by themselves: they fill the registers.
const LONG: u32 = 32;

impl<'a, 'k> Writer<'a, 'k> {
    /// How many threads may be run together through these ops.
    pub(super) fn together(&self, ops: &[&'k Op], copies: &[(Value, Value)]) -> usize {
        if !self.vectorize {
            return 1;
        }
        let [x, ..] = self.kernel.block();
        let mut most = if ops.iter().all(|op| self.of_four_bytes(op)) { usize::MAX } else { WIDE };
        let mut values = Vec::new();
        ops.iter().for_each(|op| all_values(op, &mut values));
        values.extend(copies.iter().flat_map(|(from, to)| [*from, *to]));
        for value in values {
            let ty = self.kernel.type_of(value);
            if ty.is_vector() {
                most = most.min(if ty.bytes() <= LONG { 4 } else { 1 });
            }
        }
        let fits = |width: &usize| *width <= most && x.is_multiple_of(*width as u32);
        let Some(width) = WIDTHS.into_iter().find(fits) else { return 1 };
        if ops.iter().all(|op| self.fits_together(op)) { width } else { 1 }
    }

    /// How many neighbouring elements of these fragments may go through the region of a map together.
    pub(super) fn together_in_map(&self, body: &'k Region, elements: impl Iterator<Item = Scalar>) -> usize {
        let narrow = |scalar| matches!(scalar, Scalar::F32 | Scalar::I32);
        let mut most = if elements.into_iter().all(narrow) { WIDTHS[0] } else { WIDE };
        let mut values = Vec::new();
        body.ops.iter().for_each(|op| all_values(op, &mut values));
        for ty in values.into_iter().map(|value| self.kernel.type_of(value)).filter(|ty| ty.is_vector()) {
            most = most.min(if ty.bytes() <= LONG { 4 } else { 1 });
        }
        most
    }

    /// Is all that comes from memory, goes there or lives through regions of four bytes, or whole numbers that are mostly
    /// steps from thread to thread? What is computed from it in between may be wider: that is soon gone.
    fn of_four_bytes(&self, op: &Op) -> bool {
        let narrow = |v: &Value| {
            matches!(self.scalar(*v), Scalar::F32 | Scalar::Tf32 | Scalar::I32 | Scalar::I64 | Scalar::Bool)
        };
        let stays = op.code.effect() != Effect::Pure;
        let inside = |r: &Region| r.ops.iter().all(|op| self.of_four_bytes(op));
        !stays || op.results.iter().chain(&op.operands).all(narrow) && op.regions.iter().all(inside)
    }

    fn fits_together(&self, op: &Op) -> bool {
        let counts = match op.code.shape() {
            Shape::For => {
                let uniform = op.operands[..3].iter().all(|v| self.is_uniform(*v));
                uniform || self.safety.ranges().loop_of(op).is_some_and(may_overrun)
            }
            _ => true,
        };
        counts && op.regions.iter().all(|r| r.ops.iter().all(|op| self.fits_together(op)))
    }

    /// Whether the value is the same in all threads that are run together, which are of one warp.
    pub(super) fn is_uniform(&self, value: Value) -> bool {
        self.facts.uniformity(value) != Uniformity::Thread
    }

    /// May the value differ between the threads that are run together?
    pub(super) fn differs(&mut self, value: Value) -> bool {
        self.width > 1 && !matches!(self.repr(value), Repr::Splat(_))
    }

    fn masks(&mut self, value: Value) -> Vec<Ssa> {
        let repr = self.repr(value);
        self.masks_of(&repr, 4, self.width)
    }

    /// The same of a bool that differs.
    pub(super) fn vote_of(
        &mut self,
        condition: Value,
        all: (Block, &[BlockArg]),
        some: Block,
        none: (Block, &[BlockArg]),
    ) {
        let masks = self.masks(condition);
        self.vote_on(Some(condition), &masks, all, some, none);
    }

    /// To `all` if every one agrees on what is a condition's masks, to `none` with `args` if none does, else to `some`.
    fn vote_on(
        &mut self,
        condition: Option<Value>,
        masks: &[Ssa],
        all: (Block, &[BlockArg]),
        some: Block,
        none: (Block, &[BlockArg]),
    ) {
        let unsure = self.b.create_block();
        let known = condition.and_then(|value| self.votes.get(&value).copied());
        let (mut both, mut either) = (masks[0], masks[0]);
        for mask in &masks[1..] {
            both = self.b.ins().band(both, *mask);
            either = self.b.ins().bor(either, *mask);
        }
        let every = match known {
            Some(vote) => vote.all,
            None => self.all_lanes(both),
        };
        self.enter(every, all, (unsure, &[]));
        self.b.seal_block(unsure);
        self.b.switch_to_block(unsure);
        let any = match known {
            Some(vote) => vote.any,
            None => self.any_lane(either),
        };
        self.b.ins().brif(any, some, &[], none.0, none.1);
        self.b.seal_block(some);
        self.b.set_cold_block(some);
    }

    pub(super) fn if_apart(&mut self, op: &'k Op) {
        let masks = self.masks(op.operands[0]);
        let [then, other, divergent] = [0; 3].map(|_| self.b.create_block());
        let end = self.join(&op.results, None);
        self.vote_on(Some(op.operands[0]), &masks, (then, &[]), divergent, (other, &[]));
        for (index, block) in [then, other].into_iter().enumerate() {
            self.b.seal_block(block);
            self.b.switch_to_block(block);
            self.arm(op, index, None, end);
        }
        self.b.switch_to_block(divergent);
        // Nothing is to be done for the others.
        let alone = op.results.is_empty() && op.regions[1].ops.is_empty();
        match alone.then(|| self.lanes_of(&masks)).flatten() {
            Some(lanes) => self.apart_of(op, &[], end, Some(lanes), |w| w.region(&op.regions[0])),
            None => self.apart(op, &[], end, |w| w.control(op, None)),
        }
        self.arrive(end, &op.results, None);
    }

    pub(super) fn switch_apart(&mut self, op: &'k Op) {
        let all = self.each(op.operands[0]);
        let mut same = None;
        for other in &all[1..] {
            let equal = self.b.ins().icmp(IntCC::Equal, all[0], *other);
            same = Some(match same {
                None => equal,
                Some(same) => self.b.ins().band(same, equal),
            });
        }
        let Some(same) = same else { return };
        let (uniform, divergent) = (self.b.create_block(), self.b.create_block());
        let end = self.join(&op.results, None);
        self.b.ins().brif(same, uniform, &[], divergent, &[]);
        self.b.seal_block(uniform);
        self.b.seal_block(divergent);
        self.b.switch_to_block(uniform);
        self.cases(op, None, end);
        self.b.switch_to_block(divergent);
        self.apart(op, &[], end, |w| w.control(op, None));
        self.arrive(end, &op.results, None);
    }

    /// A `for` whose bounds differ between the threads.
    pub(super) fn for_apart(&mut self, op: &'k Op) {
        // The vectors below test neither the step nor overflows of the count.
        if !self.safety.ranges().loop_of(op).is_some_and(may_overrun) {
            let end = self.join(&op.results, None);
            self.apart(op, &[], end, |w| w.control(op, None));
            return self.arrive(end, &op.results, None);
        }
        let body = &op.regions[0];
        let (count, carried) = body.args.split_at(1);
        let width = self.width;
        let [low, high, step] = [0, 1, 2].map(|i| self.repr(op.operands[i]));
        let scalar = self.scalar(count[0]);
        let end = self.join(&op.results, None);

        // The count is one number and a step between the threads, if it begins so.
        let stride = match (&low, &step) {
            (Repr::Affine { stride, low, .. }, Repr::Splat(_)) if *low > i64::MIN => Some(*stride),
            (Repr::Splat(_), Repr::Splat(_)) => Some(0),
            _ => None,
        };
        let head = self.b.create_block();
        let first: Vec<Ssa> = match (stride, &low) {
            (Some(_), Repr::Affine { base, .. } | Repr::Splat(base)) => vec![*base],
            _ if Self::in_vectors(scalar, width) => self.chunks_of(&low, scalar, width),
            _ => self.each_of(&low, scalar, width),
        };
        let parts = first.len();
        for one in &first {
            let ty = self.type_of(*one);
            self.b.append_block_param(head, ty);
        }
        self.add_params(head, carried, None);
        let mut args: Vec<BlockArg> = first.into_iter().map(BlockArg::Value).collect();
        args.extend(self.pass(&op.operands[3..], carried, None));
        self.b.ins().jump(head, &args);
        self.b.switch_to_block(head);
        let at: Vec<Ssa> = self.b.block_params(head)[..parts].to_vec();
        let repr = match stride {
            Some(0) => Repr::Splat(at[0]),
            // Beyond where it began, its bounds are not followed.
            Some(stride) => Repr::Affine { base: at[0], stride, low: i64::MIN, high: i64::MAX },
            None => Repr::Chunks(at.clone()),
        };
        self.set(count[0], repr.clone());
        self.take(head, parts, carried, None);

        let (inside, divergent) = (self.b.create_block(), self.b.create_block());
        let results = self.pass(carried, &op.results, None);
        match (stride, &high) {
            // Few enough threads for the last one not to overflow.
            (Some(stride), Repr::Splat(high)) if (1..=4).contains(&stride) => {
                let unsure = self.b.create_block();
                let last = self.b.ins().iadd_imm_s(at[0], stride * (width as i64 - 1));
                let every = self.b.ins().icmp(IntCC::SignedLessThan, last, *high);
                self.b.ins().brif(every, inside, &[], unsure, &[]);
                self.b.seal_block(unsure);
                self.b.switch_to_block(unsure);
                let any = self.b.ins().icmp(IntCC::SignedLessThan, at[0], *high);
                self.b.ins().brif(any, divergent, &[], end, &results);
                self.b.seal_block(divergent);
                self.b.set_cold_block(divergent);
            }
            _ => {
                let a = self.chunks_of(&repr, scalar, width);
                let b = self.chunks_of(&high, scalar, width);
                let pairs = a.into_iter().zip(b);
                let masks = pairs.map(|(a, b)| self.b.ins().icmp(IntCC::SignedLessThan, a, b)).collect();
                let masks = self.masks_of(&Repr::Chunks(masks), 4, width);
                self.vote_on(None, &masks, (inside, &[]), divergent, (end, &results));
            }
        }
        self.b.seal_block(inside);
        self.b.switch_to_block(inside);
        let now: Vec<(Value, Repr)> = body.args.iter().map(|v| (*v, self.repr(*v))).collect();
        self.region(body);
        self.poll_point(op);
        let mut again: Vec<BlockArg> = match (&step, stride) {
            (Repr::Splat(step), Some(_)) => vec![self.b.ins().iadd(at[0], *step).into()],
            _ => {
                let step = self.chunks_of(&step, scalar, width);
                at.iter().zip(step).map(|(a, b)| self.b.ins().iadd(*a, b).into()).collect()
            }
        };
        again.extend(self.pass(&body.yields, carried, None));
        self.b.ins().jump(head, &again);
        self.b.seal_block(head);
        self.b.switch_to_block(divergent);
        self.apart(op, &now, end, |w| {
            let low = w.first(count[0]);
            let end = w.join(&op.results, None);
            w.for_from(op, None, low, carried, end);
            w.arrive(end, &op.results, None);
        });
        self.arrive(end, &op.results, None);
    }

    /// The end of a `while`'s condition: all go to `inside`, none does, or each by itself.
    pub(super) fn while_apart(
        &mut self,
        op: &'k Op,
        goes_on: Value,
        inside: Block,
        args: Vec<BlockArg>,
        end: Block,
    ) {
        let condition = &op.regions[0];
        let masks = self.masks(goes_on);
        let divergent = self.b.create_block();
        let results = self.pass(&condition.args, &op.results, None);
        self.vote_on(Some(goes_on), &masks, (inside, &args), divergent, (end, &results));
        self.b.switch_to_block(divergent);
        let mut now: Vec<(Value, Repr)> = condition.args.iter().map(|v| (*v, self.repr(*v))).collect();
        if !condition.args.contains(&goes_on) {
            now.push((goes_on, Repr::Chunks(masks)));
        }
        self.apart(op, &now, end, |w| {
            let end = w.join(&op.results, None);
            let head = w.join(&condition.args, None);
            let inside = w.join(&condition.args, None);
            let more = w.first(goes_on);
            let args = w.pass(&condition.args, &condition.args, None);
            let results = w.pass(&condition.args, &op.results, None);
            w.enter(more, (inside, &args), (end, &results));
            w.while_from(op, None, head, Some(inside), end);
            w.arrive(end, &op.results, None);
        });
    }

    /// Does `body` for each thread by itself, and goes to `end` with the results of `op`, which it defines. `now` are
    /// values that the op defines and that are at hand already.
    pub(super) fn apart(
        &mut self,
        op: &'k Op,
        now: &[(Value, Repr)],
        end: Block,
        body: impl FnOnce(&mut Self),
    ) {
        self.apart_of(op, now, end, None, body);
    }

    /// The same for the threads alone whose bits are set, of which there is one at least.
    fn apart_of(
        &mut self,
        op: &'k Op,
        now: &[(Value, Repr)],
        end: Block,
        lanes: Option<Ssa>,
        body: impl FnOnce(&mut Self),
    ) {
        let (spilled, width) = (self.spill_at, self.width);
        let mut inputs: Vec<(Value, Repr)> = now.to_vec();
        for value in live_ins(op) {
            if let Some(repr) = self.env[value.index()].clone()
                && !self.is_one_thread(value, &repr)
                && !now.iter().any(|(known, _)| *known == value)
            {
                inputs.push((value, repr));
            }
        }
        let mut places = Vec::with_capacity(inputs.len());
        for (value, repr) in &inputs {
            let scalar = self.scalar(*value);
            let at = self.room(*value);
            if !matches!(repr, Repr::Affine { .. } | Repr::Splat(_)) {
                let scratch = self.scratch;
                let elements = self.elements(*value);
                self.store_elements(own(), scratch, at, scalar, repr, elements);
            }
            places.push(at);
        }
        let outputs: Vec<i32> = op.results.iter().map(|v| self.room(*v)).collect();
        let threads = self.threads;
        let counters = self.counters();
        self.each_lane(lanes, |w, lane| {
            w.width = 1;
            w.set_counters(counters);
            if let Some(threads) = threads {
                let index = w.b.ins().iadd(threads.index, lane);
                w.threads = Some(w.place(index));
            }
            for ((value, repr), at) in inputs.iter().zip(&places) {
                let scalar = w.scalar(*value);
                let lanes = usize::from(w.kernel.type_of(*value).lanes());
                let one = match repr {
                    Repr::Splat(one) => Repr::Splat(*one),
                    Repr::Affine { base, stride, .. } => {
                        let by = w.b.ins().imul_imm_s(lane, *stride);
                        let by = match clif(scalar) {
                            types::I64 => by,
                            ty => w.b.ins().ireduce(ty, by),
                        };
                        Repr::Splat(w.b.ins().iadd(*base, by))
                    }
                    _ => {
                        let base = w.lane_base(lane, *value);
                        w.load_elements(own(), base, *at, scalar, lanes)
                    }
                };
                w.env[value.index()] = Some(one);
            }
            body(w);
            for (value, at) in op.results.iter().zip(&outputs) {
                let repr = w.repr(*value);
                let base = w.lane_base(lane, *value);
                let (scalar, lanes) = (w.scalar(*value), w.elements(*value));
                w.store_elements(own(), base, *at, scalar, &repr, lanes);
            }
        });
        self.width = width;
        self.threads = threads;
        for (value, repr) in inputs {
            self.env[value.index()] = Some(repr);
        }
        let mut args = Vec::new();
        for (value, at) in op.results.iter().zip(&outputs) {
            let scratch = self.scratch;
            let elements = self.elements(*value);
            let repr = self.load_elements(own(), scratch, *at, self.scalar(*value), elements);
            args.extend(self.flatten(&repr, *value).into_iter().map(BlockArg::Value));
        }
        self.spill_at = spilled;
        self.b.ins().jump(end, &args);
    }

    /// A bit for each thread, of masks of four bytes; `None` where the machine has no instruction for it.
    fn lanes_of(&mut self, masks: &[Ssa]) -> Option<Ssa> {
        if self.architecture != Architecture::X86_64 {
            return None;
        }
        let mut lanes: Option<Ssa> = None;
        for (at, mask) in masks.iter().enumerate() {
            let four = self.b.ins().vhigh_bits(types::I32, *mask);
            let four = self.b.ins().ishl_imm_s(four, 4 * at as i64);
            lanes = Some(lanes.map_or(four, |others| self.b.ins().bor(others, four)));
        }
        lanes
    }

    /// A loop over the threads that are run together, or those whose bits are set.
    fn each_lane(&mut self, lanes: Option<Ssa>, body: impl FnOnce(&mut Self, Ssa)) {
        let Some(lanes) = lanes else {
            let count = self.b.ins().iconst(types::I64, self.width as i64);
            return self.counted(count, 1, body);
        };
        let (head, done) = (self.b.create_block(), self.b.create_block());
        let left = self.b.append_block_param(head, types::I32);
        self.b.ins().jump(head, &[lanes.into()]);
        self.b.switch_to_block(head);
        let lane = self.b.ins().ctz(left);
        let lane = self.b.ins().uextend(types::I64, lane);
        body(self, lane);
        let less = self.b.ins().iadd_imm_s(left, -1);
        let rest = self.b.ins().band(left, less);
        self.b.ins().brif(rest, head, &[rest.into()], done, &[]);
        self.b.seal_block(head);
        self.b.seal_block(done);
        self.b.switch_to_block(done);
    }

    /// Is it at hand as one thread has it: one number, or a vector that is uniform?
    pub(super) fn is_one_thread(&self, value: Value, repr: &Repr) -> bool {
        let lanes = usize::from(self.kernel.type_of(value).lanes());
        match repr {
            Repr::Splat(_) => true,
            Repr::Affine { .. } => false,
            Repr::Each(all) => all.len() == lanes,
            Repr::Chunks(all) => self.elements_in(all) == lanes,
        }
    }

    /// Where a thread's elements are, without their place.
    fn lane_base(&mut self, lane: Ssa, value: Value) -> Ssa {
        let by = self.b.ins().imul_imm_s(lane, i64::from(bytes_of(self.kernel, value)));
        self.b.ins().iadd(self.scratch, by)
    }

    /// Scratch memory for what each thread has of a value.
    fn room(&mut self, value: Value) -> i32 {
        self.spill(self.width as u64 * u64::from(bytes_of(self.kernel, value)))
    }
}

/// Can a count go some threads and iterations beyond the end without overflowing?
fn may_overrun(known: &Loop) -> bool {
    known.steps_up && known.room > 64
}

/// What an op takes, gives, and has inside.
fn all_values(op: &Op, out: &mut Vec<Value>) {
    out.extend(op.operands.iter().chain(&op.results));
    for region in &op.regions {
        out.extend(region.args.iter().chain(&region.yields));
        region.ops.iter().for_each(|op| all_values(op, out));
    }
}

/// What an op uses and does not define.
pub(super) fn live_ins(op: &Op) -> Vec<Value> {
    fn region(r: &Region, defined: &mut HashSet<Value>, used: &mut Vec<Value>) {
        defined.extend(r.args.iter().copied());
        r.ops.iter().for_each(|op| walk(op, defined, used));
        used.extend(r.yields.iter().copied());
    }
    fn walk(op: &Op, defined: &mut HashSet<Value>, used: &mut Vec<Value>) {
        used.extend(op.operands.iter().copied());
        op.regions.iter().for_each(|r| region(r, defined, used));
        defined.extend(op.results.iter().copied());
    }
    let (mut defined, mut used) = (HashSet::new(), Vec::new());
    walk(op, &mut defined, &mut used);
    let mut seen = HashSet::new();
    used.retain(|v| !defined.contains(v) && seen.insert(*v));
    used
}
