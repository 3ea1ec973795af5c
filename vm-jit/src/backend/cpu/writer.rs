//! A kernel as one function: the loop over blocks or clusters, the loops over warps and threads, and its ops in order.

use super::Options;
use super::agree::Vote;
use super::blocks::State;
use super::control::Cancel;
use super::floats::{Extreme, Floats};
use super::isa::{Architecture, Isa};
use super::lanes::{Repr, clif, own};
use super::legal;
use super::limits;
use super::plan::{BLOCK, Plan, Scope, Step};
use super::spoil;
use super::tile::Tiles;
use super::wide;
use crate::legal::key;
use crate::reject::RejectKind;
use crate::safety::{SafetyPlan, ThreadsCharge};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{Block, BlockArg, FuncRef, InstBuilder, Value as Ssa, types};
use cranelift_codegen::isa::TargetFrontendConfig;
use cranelift_frontend::FunctionBuilder;
use std::collections::HashMap;
use vm_abi::{ParamLayout, Slot};
use vm_ir::limits::WARP;
use vm_ir::module::{Op, ParamKind, Region};
use vm_ir::op::{Effect, Opcode, Shape};
use vm_ir::valid::KernelFacts;
use vm_ir::view::Dim;
use vm_ir::{Kernel, Scalar, Value};

/// A view's numbers, read when the function begins.
#[derive(Clone)]
pub(super) struct View {
    pub(super) base: Ssa,
    pub(super) extents: Vec<Extent>,
    /// In bytes, of all dimensions but the last.
    pub(super) strides: Vec<Ssa>,
}

#[derive(Clone, Copy)]
pub(super) enum Extent {
    Fixed(u64),
    Given(Ssa),
}

/// The threads that are run now.
#[derive(Clone, Copy)]
pub(super) struct Threads {
    /// The first one's number in the block or the cluster, as i64.
    pub(super) index: Ssa,
    /// The first one's place along each axis, as i32.
    pub(super) at: [Ssa; 3],
}

pub(super) struct Writer<'a, 'k> {
    pub(super) b: FunctionBuilder<'a>,
    pub(super) kernel: &'k Kernel,
    pub(super) facts: &'k KernelFacts,
    pub(super) plan: &'a Plan<'k>,
    pub(super) floats: &'a Floats,
    pub(super) safety: &'a SafetyPlan<'k>,
    pub(super) architecture: Architecture,
    pub(super) env: Vec<Option<Repr>>,
    pub(super) scope: Scope,
    /// How many threads are run together.
    pub(super) width: usize,
    pub(super) scratch: Ssa,
    params: Ssa,
    pub(super) views: Vec<Option<View>>,
    pub(super) grid: [Ssa; 3],
    /// The block at hand; of a cluster, the first.
    pub(super) block: [Ssa; 3],
    pub(super) warp: Option<Ssa>,
    pub(super) threads: Option<Threads>,
    pub(super) cancel: Option<Cancel>,
    /// What is known of the lesser or greater that is written now.
    pub(super) extreme: Extreme,
    /// Is all in bounds that is written now, as was found ahead of a loop?
    pub(super) in_bounds: bool,
    /// How the threads that are run together vote on bools that differ between them, where that is known.
    pub(super) votes: HashMap<Value, Vote>,
    /// Where each of the threads that are run together begins by itself, as long as they have changed nothing.
    pub(super) alone: Option<Block>,
    /// Does anything go there?
    pub(super) parted: bool,
    /// Where to go when the launch is stopped.
    pub(super) leave: Block,
    pub(super) strays_fault: bool,
    /// Whether neighboring threads may be run together.
    pub(super) vectorize: bool,
    pub(super) state: State,
    /// Where in the scratch memory [`wide`](super::wide) puts what it computes, on machines that have it.
    pub(super) wide_at: Option<u32>,
    /// Routines that are called, by number.
    pub(super) routines: HashMap<u32, FuncRef>,
    /// What a tile kernel keeps, and where in the scratch memory.
    pub(super) tiles: &'a Tiles,
    pub(super) tiles_at: u32,
    /// Scratch that holds elements while threads go separate ways: where it begins, and the most that is needed.
    pub(super) spill_at: u32,
    pub(super) spill_end: u32,
    /// What the function has too much of. Nothing is written any more then.
    full: Option<RejectKind>,
}

/// What is known of a kernel.
pub(super) struct Known<'a, 'k> {
    pub(super) facts: &'k KernelFacts,
    pub(super) safety: &'a SafetyPlan<'k>,
    pub(super) plan: &'a Plan<'k>,
    pub(super) floats: &'a Floats,
    pub(super) tiles: &'a Tiles,
}

/// The function that is written.
pub(super) struct Build<'a> {
    pub(super) builder: FunctionBuilder<'a>,
    pub(super) config: TargetFrontendConfig,
    pub(super) options: &'a Options,
    /// Whether neighboring threads may be run together.
    pub(super) vectorize: bool,
}

/// Offsets of the parts of the scratch memory that follow shared arrays and values.
struct Scratch {
    /// Results of [`wide`] routines, on machines that have them.
    wide: Option<u32>,
    tiles: u32,
    spill: u32,
}

/// The most bytes of scratch memory of a kernel. Offsets into it are positive `i32`s.
const MOST_SCRATCH: u64 = 2 * legal::MAX_SCRATCH;

const _: () = assert!(MOST_SCRATCH < i32::MAX as u64);

impl Scratch {
    /// # Errors
    /// It would become too large.
    fn of(values: u64, tiles: u64, isa: Isa) -> Result<Scratch, RejectKind> {
        let needed = values.saturating_add(tiles);
        if needed > legal::MAX_SCRATCH {
            return Err(RejectKind::Scratch { needed, available: legal::MAX_SCRATCH });
        }
        let end = (values as u32 + spoil::narrow_layout()).next_multiple_of(wide::BYTES);
        let wide = wide::has(isa).then_some(end);
        let at = end + wide.map_or(0, |_| wide::BYTES);
        Ok(Scratch { wide, tiles: at, spill: at + tiles as u32 })
    }
}

/// Writes a kernel's body; gives the bytes of scratch memory that it needs.
///
/// # Errors
///
/// The function would become too large.
pub(super) fn write<'a, 'k>(
    function: Build<'a>,
    known: Known<'a, 'k>,
    layout: &ParamLayout,
) -> Result<u32, RejectKind> {
    let Build { builder: mut b, config, options, vectorize } = function;
    let isa = options.isa;
    let Known { facts, safety, plan, floats, tiles } = known;
    let kernel = safety.ranges().kernel();
    let entry = b.create_block();
    let leave = b.create_block();
    b.append_block_params_for_function_params(entry);
    b.switch_to_block(entry);
    b.seal_block(entry);
    let given: Vec<Ssa> = b.block_params(entry).to_vec();
    let [params, grid_at, first, end, scratch] = given[..] else { return Ok(0) };
    let grid = [0, 4, 8].map(|at| b.ins().load(types::I32, own().with_readonly(), grid_at, at));
    let room = Scratch::of(plan.bytes, tiles.bytes, isa)?;
    let state = State::of(&mut b);
    let mut writer = Writer {
        b,
        kernel,
        facts,
        plan,
        floats,
        safety,
        architecture: isa.architecture(),
        env: vec![None; kernel.values().len()],
        scope: BLOCK,
        width: 1,
        scratch,
        params,
        views: Vec::new(),
        grid,
        block: grid,
        warp: None,
        threads: None,
        cancel: None,
        extreme: Extreme::default(),
        in_bounds: false,
        votes: HashMap::new(),
        alone: None,
        parted: false,
        leave,
        strays_fault: options.strays_fault,
        vectorize,
        state,
        wide_at: room.wide,
        routines: HashMap::new(),
        tiles,
        tiles_at: room.tiles,
        spill_at: room.spill,
        spill_end: room.spill,
        full: None,
    };
    writer.zero_narrow_spare();
    writer.parameters(layout);
    if let Some(guard) = layout.guard {
        writer.prepare_polls(guard);
    }
    writer.blocks(first, end);
    writer.b.ins().jump(leave, &[]);
    writer.b.seal_block(leave);
    writer.b.switch_to_block(leave);
    writer.b.ins().return_(&[]);
    writer.b.finalize(config);
    match writer.full {
        Some(full) => Err(full),
        None => Ok(writer.spill_end),
    }
}

/// Does it change memory, or have regions, in which threads may part?
fn has_effects(op: &Op) -> bool {
    op.code.shape().has_regions() || !matches!(op.code.effect(), Effect::Pure | Effect::Read)
}

/// Is there, before anything is changed, what threads that are run together may turn out not to share?
fn may_part<'k>(kernel: &Kernel, ops: impl Iterator<Item = &'k Op>) -> bool {
    use Opcode::*;
    let mut before = ops.take_while(|op| !has_effects(op));
    before.any(|op| match op.code {
        DivU | DivS | RemU | RemS => true,
        Add | Sub => op.result().is_some_and(|sum| kernel.type_of(sum).scalar() == Scalar::I32),
        _ => false,
    })
}

impl<'a, 'k> Writer<'a, 'k> {
    pub(super) fn parameter(&mut self, ty: cranelift_codegen::ir::Type, offset: u32) -> Ssa {
        self.b.ins().load(ty, own().with_readonly(), self.params, offset as i32)
    }

    fn parameters(&mut self, layout: &ParamLayout) {
        for (param, slot) in self.kernel.params().iter().zip(&layout.slots) {
            let view = match (&param.kind, slot) {
                (ParamKind::View(view), Slot::View { offset, rank }) => {
                    let base = self.parameter(types::I64, *offset);
                    let extents = (0..*rank)
                        .map(|d| match view.dims[d as usize] {
                            Dim::Fixed(extent) => Extent::Fixed(extent),
                            Dim::Any { .. } => {
                                Extent::Given(self.parameter(types::I64, slot.extent_offset(d).unwrap_or(0)))
                            }
                        })
                        .collect();
                    let strides = (0..rank - 1)
                        .map(|d| self.parameter(types::I64, slot.stride_offset(d).unwrap_or(0)))
                        .collect();
                    Some(View { base, extents, strides })
                }
                (ParamKind::Scalar { value, .. }, Slot::Scalar { offset, .. }) => {
                    let ty = self.kernel.type_of(*value).scalar();
                    let mut one = self.parameter(clif(ty), *offset);
                    if ty == Scalar::Bool {
                        one = self.b.ins().band_imm_s(one, 1);
                    }
                    self.set(*value, Repr::Splat(one));
                    None
                }
                _ => None,
            };
            self.views.push(view);
        }
    }

    /// A loop from 0 to `end`, which is above 0, in steps.
    pub(super) fn counted(&mut self, end: Ssa, step: i64, body: impl FnOnce(&mut Self, Ssa)) {
        let (head, done) = (self.b.create_block(), self.b.create_block());
        let at = self.b.append_block_param(head, types::I64);
        let zero = self.b.ins().iconst(types::I64, 0);
        self.b.ins().jump(head, &[zero.into()]);
        self.b.switch_to_block(head);
        body(self, at);
        let next = self.b.ins().iadd_imm_s(at, step);
        let more = self.b.ins().icmp(IntCC::UnsignedLessThan, next, end);
        self.b.ins().brif(more, head, &[next.into()], done, &[]);
        self.b.seal_block(head);
        self.b.seal_block(done);
        self.b.switch_to_block(done);
    }

    /// Goes into the body of a loop if `more`, else to its end.
    ///
    /// The code generator puts what a branch names first behind everything that comes after the other. A body that stood there
    /// would be far from its loop, and values would live through all that lies between for the allocator that takes one pass:
    /// time in proportion to the square of the loops that follow each other.
    pub(super) fn enter(&mut self, more: Ssa, inside: (Block, &[BlockArg]), end: (Block, &[BlockArg])) {
        let ends = self.b.ins().icmp_imm_s(IntCC::Equal, more, 0);
        self.b.ins().brif(ends, end.0, end.1, inside.0, inside.1);
    }

    /// Steps of a block or a warp.
    pub(super) fn run(&mut self, steps: &'a [Step<'k>]) {
        for step in steps {
            match step {
                Step::Once(op) => self.op(op),
                Step::Control { op, .. } if self.is_full() => self.skip(op),
                Step::Control { op, regions } => {
                    self.charge_before(op);
                    self.control(op, Some(regions));
                }
                Step::Warps { scope, steps } => {
                    let count = i64::from(self.kernel.cluster_warps());
                    let end = self.b.ins().iconst(types::I64, count);
                    let outer = std::mem::replace(&mut self.scope, *scope);
                    let counters = self.counters();
                    let once = steps.iter().filter_map(|step| match step {
                        Step::Once(op) => Some(*op),
                        _ => None,
                    });
                    let once: Vec<&Op> = once.collect();
                    let threads = u64::from(self.kernel.cluster_threads());
                    let charge = self.safety.charge_of_threads(&once, threads, WARP.into());
                    self.counted(end, 1, |this, index| {
                        this.warp = Some(index);
                        this.refuel();
                        this.run(steps);
                        this.charge_each(charge);
                        this.warp = None;
                    });
                    self.charge_all(charge);
                    self.set_counters(counters);
                    self.scope = outer;
                }
                Step::Threads { scope, ops, copies } => self.threads_loop(*scope, ops, copies),
                Step::Lockstep { scope, op, copies } => self.lockstep(op, *scope, copies),
            }
        }
    }

    /// A loop over the threads of the block, or of the warp at hand.
    fn threads_loop(&mut self, scope: Scope, ops: &'a [&'k Op], copies: &'a [(Value, Value)]) {
        let together = match self.warp {
            Some(_) if self.plan.whole_warps => WARP as usize,
            _ => self.together(ops, copies),
        };
        let all = i64::from(self.cluster()) * i64::from(self.kernel.threads());
        let (start, count) = match self.warp {
            Some(warp) => (Some(self.b.ins().imul_imm_s(warp, i64::from(WARP))), all.min(i64::from(WARP))),
            None => (None, all),
        };
        let outer = std::mem::replace(&mut self.scope, scope);
        let counters = self.counters();
        self.width = together;
        let charge = self.safety.charge_of_threads(ops, count as u64, together as u64);
        let end = self.b.ins().iconst(types::I64, count);
        self.counted(end, together as i64, |this, at| {
            let index = match start {
                Some(start) => this.b.ins().iadd(start, at),
                None => at,
            };
            // What a warp shuffles in registers can't be done again by each.
            let first = this.plan.scopes[scope].remat.iter().chain(ops).copied();
            let may_part = together > 1 && together < WARP as usize && may_part(this.kernel, first);
            let alone = may_part.then(|| this.b.create_block());
            (this.alone, this.parted) = (alone, false);
            this.threads_at(index, ops, copies);
            if let Some(alone) = alone.filter(|_| this.parted) {
                let next = this.b.create_block();
                this.b.ins().jump(next, &[]);
                this.b.seal_block(alone);
                this.b.switch_to_block(alone);
                this.alone = None;
                this.width = 1;
                this.set_counters(counters);
                let count = this.b.ins().iconst(types::I64, together as i64);
                this.counted(count, 1, |this, lane| {
                    let index = this.b.ins().iadd(index, lane);
                    this.threads_at(index, ops, copies);
                });
                this.width = together;
                this.b.ins().jump(next, &[]);
                this.b.seal_block(next);
                this.b.switch_to_block(next);
            }
            this.charge_each(charge);
            this.threads = None;
        });
        self.charge_all(charge);
        self.width = 1;
        self.set_counters(counters);
        self.scope = outer;
    }

    /// The ops for the threads from a number on that are run together.
    fn threads_at(&mut self, index: Ssa, ops: &'a [&'k Op], copies: &'a [(Value, Value)]) {
        self.threads = Some(self.place(index));
        if ops.iter().any(|op| self.safety.polls(op)) {
            self.refuel();
        }
        self.load_and_rematerialise();
        for op in ops {
            if has_effects(op) {
                self.alone = None;
            }
            self.op(op);
        }
        self.alone = None;
        self.store_copies(copies);
    }

    /// Behind the threads that are run together in a loop.
    pub(super) fn charge_each(&mut self, charge: Option<ThreadsCharge>) {
        if let Some(ThreadsCharge::Each(cost)) = charge {
            self.charge(cost);
        }
    }

    /// Behind a loop over threads.
    fn charge_all(&mut self, charge: Option<ThreadsCharge>) {
        if let Some(ThreadsCharge::All(cost)) = charge {
            self.charge(cost);
        }
    }

    /// Takes from memory, or rematerialises, what the threads at hand take into their scope.
    pub(super) fn load_and_rematerialise(&mut self) {
        self.votes.clear();
        let scope = &self.plan.scopes[self.scope];
        for value in &scope.loads {
            let repr = self.load_slot(*value);
            self.env[value.index()] = Some(repr);
        }
        scope.remat.iter().for_each(|op| self.op(op));
    }

    /// Copies values in memory, all at once.
    pub(super) fn store_copies(&mut self, copies: &[(Value, Value)]) {
        let all: Vec<Repr> = copies.iter().map(|(from, _)| self.repr(*from)).collect();
        for ((_, to), repr) in copies.iter().zip(&all) {
            self.store_slot(*to, repr);
        }
    }

    /// Blocks that are run together, as one large one.
    pub(super) fn cluster(&self) -> u32 {
        // Those of a tile kernel's cluster share nothing but fetches.
        if self.kernel.tile().is_some() { 1 } else { self.kernel.cluster() }
    }

    pub(super) fn region(&mut self, region: &'k Region) {
        region.ops.iter().for_each(|op| self.op(op));
    }

    /// Is the function too large? Then it is closed and thrown away.
    fn is_full(&mut self) -> bool {
        if self.full.is_none() {
            self.full = limits::growing(self.b.func).err();
        }
        self.full.is_some()
    }

    /// Allocates scratch memory and returns its offset. The caller frees it by restoring `spill_at`.
    pub(super) fn spill(&mut self, bytes: u64) -> i32 {
        let (at, end) = (self.spill_at, u64::from(self.spill_at).saturating_add(bytes).next_multiple_of(16));
        if end > MOST_SCRATCH {
            self.refuse(RejectKind::Scratch { needed: end, available: MOST_SCRATCH });
        } else {
            self.spill_at = end as u32;
            self.spill_end = self.spill_end.max(self.spill_at);
        }
        self.offset(at.into())
    }

    /// Converts an offset into the scratch memory to the type that instructions take.
    pub(super) fn offset(&mut self, at: u64) -> i32 {
        i32::try_from(at).unwrap_or_else(|_| {
            self.refuse(RejectKind::Scratch { needed: at, available: MOST_SCRATCH });
            0
        })
    }

    /// Gives the function up.
    pub(super) fn refuse(&mut self, kind: RejectKind) {
        self.full.get_or_insert(kind);
    }

    /// What stands for the results of an op that is not written any more.
    fn skip(&mut self, op: &Op) {
        for result in &op.results {
            let zero = self.number(self.scalar(*result), 0);
            self.env[result.index()] = Some(Repr::Splat(zero));
        }
    }

    pub(super) fn op(&mut self, op: &'k Op) {
        if self.is_full() {
            return self.skip(op);
        }
        self.charge_before(op);
        match op.code.shape() {
            Shape::If | Shape::Switch | Shape::For | Shape::While => self.control(op, None),
            Shape::Load => self.load(op),
            Shape::LoadUniform => self.load(op),
            Shape::Store => self.store(op),
            Shape::Gather => self.cluster_gather(op),
            Shape::AtomicLoad | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas => {
                self.atomic(op)
            }
            Shape::Shuffle => self.shuffle(op),
            Shape::Vote | Shape::Ballot => self.vote(op),
            Shape::Reduce(_) => self.reduce(op),
            Shape::Sync => {
                if op.code == Opcode::Fence {
                    self.b.ins().fence();
                }
            }
            Shape::Id32 | Shape::Id64 | Shape::Extent => self.id(op),
            shape if shape.is_tile() => self.tile_op(op),
            _ => self.values(op),
        }
    }

    /// Ops on values alone.
    fn values(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let scalar = self.scalar(result);
        let immediate = op.immediates.first().copied().unwrap_or(0);
        let repr = match op.code.shape() {
            Shape::Const => Repr::Splat(self.number(scalar, immediate)),
            Shape::Splat | Shape::Make | Shape::Extract | Shape::Insert => self.arrange(op),
            Shape::Bitcast => self.bitcast(op.operands[0], result),
            _ => {
                let (from, to) = key(self.kernel, op);
                self.elementwise(op, from, to)
            }
        };
        self.set(result, repr);
    }
}
