//! The walk over blocks and ops.

use super::error::{RunError, RunErrorKind, Thread};
use super::launch::{Argument, Launch, LaunchError, Limits, Report, Tensor};
use super::memory::Memory;
use super::observe::{Observer, State};
use super::race::{Shadow, Stamp};
use super::tile::Tiles;
use crate::limits::WARP;
use crate::module::{Kernel, Op, ParamKind, Place, Region, Value};
use crate::op::{BarrierScope, Opcode, Shape};
use crate::semantics::eval;
use crate::types::{Scalar, Type};
use crate::valid::{Trust, ValidModule};
use std::time::Instant;

/// Steps between two looks at the clock.
const STEPS_PER_LOOK: u64 = 1 << 14;

pub(super) type Result<T> = std::result::Result<T, RunErrorKind>;

/// One cluster being run, often of one block; its memory is kept from cluster to cluster. The threads of its blocks are
/// numbered through.
pub(super) struct Machine<'m> {
    pub(super) kernel: &'m Kernel,
    pub(super) trust: Trust,
    pub(super) limits: &'m Limits,
    grid: [u32; 3],
    /// The first block of the cluster that runs.
    block: [u32; 3],
    block_number: u64,
    /// Blocks that run together.
    together: u32,
    /// Every value: all lanes of thread 0, then of thread 1, and so on. Empty until it is first defined.
    values: Vec<Vec<u64>>,
    value_bytes: usize,
    /// By parameter; `None` for scalars.
    pub(super) views: Vec<Option<Memory>>,
    /// The arrays of the first block, then of the next.
    pub(super) shared: Vec<Memory>,
    /// The arrays of the first thread of the cluster, then of the next.
    local: Vec<Memory>,
    /// What a tile kernel has in the place of shared arrays.
    pub(super) tiles: Tiles,
    cluster_epoch: u32,
    block_epoch: u32,
    warp_epochs: Vec<u32>,
    steps: u64,
    next_look: u64,
    op: Option<(&'static str, u32)>,
    pub(super) observer: Option<&'m mut dyn Observer>,
}

pub(super) fn run<'m>(
    module: &'m ValidModule,
    launch: &mut Launch,
    limits: &'m Limits,
    observer: Option<&'m mut dyn Observer>,
) -> std::result::Result<Report, RunError> {
    let Some((kernel, _)) = module.find(&launch.kernel) else {
        let kind = Box::new(LaunchError::NoKernel(launch.kernel.clone()).into());
        return Err(RunError { kernel: launch.kernel.clone(), guest: Default::default(), op: None, kind });
    };
    let error = |op, kind: RunErrorKind| RunError {
        kernel: kernel.name().to_owned(),
        guest: kernel.guest_address(),
        op,
        kind: Box::new(kind),
    };
    launch.check(kernel).map_err(|e| error(None, e.into()))?;
    let mut machine = Machine::new(kernel, module.trust(), launch, limits, observer);
    let result = machine.grid();
    machine.give_back(launch);
    match result {
        Ok(()) => Ok(Report { steps: machine.steps }),
        Err(kind) => Err(error(machine.op, kind)),
    }
}

impl<'m> Machine<'m> {
    /// A machine that holds the launch's tensors until [`Machine::give_back`].
    fn new(
        kernel: &'m Kernel,
        trust: Trust,
        launch: &mut Launch,
        limits: &'m Limits,
        observer: Option<&'m mut dyn Observer>,
    ) -> Machine<'m> {
        let views = launch.arguments.iter_mut().map(|argument| match argument {
            Argument::Tensor(tensor) => {
                let empty = Tensor { element: tensor.element, extents: Vec::new(), bytes: Vec::new() };
                Some(Memory::new(std::mem::replace(tensor, empty), false, limits.races))
            }
            Argument::Bits(_) => None,
        });
        // The blocks of a tile kernel's cluster have nothing to say to each other.
        let together = if kernel.tile().is_some() { 1 } else { kernel.cluster().max(1) };
        let threads = (kernel.threads() * together) as usize;
        let mut machine = Machine {
            kernel,
            trust,
            limits,
            grid: launch.grid,
            block: [0; 3],
            block_number: 0,
            together,
            views: views.collect(),
            values: vec![Vec::new(); kernel.values().len()],
            value_bytes: 0,
            shared: Vec::new(),
            local: Vec::new(),
            tiles: Tiles::default(),
            cluster_epoch: 0,
            block_epoch: 0,
            warp_epochs: vec![0; threads.div_ceil(WARP as usize)],
            steps: 0,
            next_look: 0,
            op: None,
            observer,
        };
        for (param, argument) in kernel.params().iter().zip(&launch.arguments) {
            if let (ParamKind::Scalar { value, .. }, Argument::Bits(bits)) = (&param.kind, argument) {
                machine.values[value.index()] = vec![*bits; threads];
            }
        }
        machine
    }

    fn give_back(&mut self, launch: &mut Launch) {
        for (argument, view) in launch.arguments.iter_mut().zip(&mut self.views) {
            if let (Argument::Tensor(tensor), Some(memory)) = (argument, view.take()) {
                *tensor = memory.tensor;
            }
        }
    }

    fn grid(&mut self) -> Result<()> {
        let cluster = self.together;
        let everyone: Vec<u32> = (0..self.kernel.threads() * cluster).collect();
        let shared_bytes: u64 = self.kernel.shared().iter().map(|array| array.bytes()).sum();
        let shared_bytes = shared_bytes * u64::from(cluster);
        let tile = self.kernel.tile();
        let tile_bytes = tile.map_or(0, Tiles::bytes);
        if tile_bytes > self.limits.memory as u64 {
            return Err(RunErrorKind::Memory(self.limits.memory));
        }
        let local_bytes = self.kernel.local_bytes() * everyone.len() as u64;
        // Nobody else sees a thread's own memory; what the host's own kernel has not written yet is noted.
        let noted = self.trust == Trust::Trusted;
        let noted_bytes = local_bytes * if noted { Shadow::BYTES } else { 0 };
        if local_bytes + noted_bytes > self.limits.memory as u64 {
            return Err(RunErrorKind::Memory(self.limits.memory));
        }
        for z in 0..self.grid[2] {
            for y in 0..self.grid[1] {
                for x in (0..self.grid[0]).step_by(cluster as usize) {
                    self.block = [x, y, z];
                    self.shared = (0..cluster)
                        .flat_map(|_| self.kernel.shared())
                        .map(|array| {
                            let extents: Vec<u64> = array.dims.iter().map(|d| u64::from(*d)).collect();
                            Memory::new(Tensor::zeros(array.element, &extents), true, true)
                        })
                        .collect();
                    self.local = everyone
                        .iter()
                        .flat_map(|_| self.kernel.local())
                        .map(|array| Memory::new(Tensor::zeros(Scalar::I8, &[array.len.into()]), true, noted))
                        .collect();
                    self.tiles = tile.map(Tiles::of).unwrap_or_default();
                    self.cluster_epoch = 0;
                    self.block_epoch = 0;
                    self.warp_epochs.fill(0);
                    self.spend(everyone.len() + ((shared_bytes + local_bytes + tile_bytes) / 8) as usize)?;
                    self.region(&self.kernel.body, &everyone)?;
                    self.block_number += u64::from(cluster);
                }
            }
        }
        Ok(())
    }

    /// Takes one step for each of the threads.
    pub(super) fn spend(&mut self, threads: usize) -> Result<()> {
        self.steps += threads as u64;
        if self.steps > self.limits.fuel {
            return Err(RunErrorKind::Fuel(self.limits.fuel));
        }
        if self.steps >= self.next_look {
            self.next_look = self.steps + STEPS_PER_LOOK;
            if self.limits.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(RunErrorKind::Deadline);
            }
        }
        Ok(())
    }

    pub(super) fn region(&mut self, region: &'m Region, active: &[u32]) -> Result<()> {
        for op in &region.ops {
            self.op = Some((op.code.mnemonic(), op.line.0));
            self.spend(active.len())?;
            if let Some(observer) = &mut self.observer {
                let (kernel, values, views) = (self.kernel, &self.values[..], &self.views[..]);
                let (shared, local) = (&self.shared[..], &self.local[..]);
                observer.op(op, active, &State { kernel, values, views, shared, local });
            }
            for result in &op.results {
                self.room_for(*result)?;
            }
            self.one_op(op, active)?;
        }
        Ok(())
    }

    /// Makes room for a value.
    pub(super) fn room_for(&mut self, value: Value) -> Result<()> {
        let size = (self.kernel.threads() * self.together) as usize * usize::from(self.ty(value).lanes());
        if self.values[value.index()].is_empty() {
            self.value_bytes += size * 8;
            if self.value_bytes > self.limits.memory {
                return Err(RunErrorKind::Memory(self.limits.memory));
            }
            self.values[value.index()] = vec![0; size];
        }
        Ok(())
    }

    pub(super) fn ty(&self, value: Value) -> Type {
        self.kernel.type_of(value)
    }

    /// The lanes of a value in a thread.
    pub(super) fn lanes(&self, value: Value, thread: u32) -> &[u64] {
        let lanes = usize::from(self.ty(value).lanes());
        &self.values[value.index()][thread as usize * lanes..][..lanes]
    }

    /// The one lane of a value that is no vector.
    pub(super) fn get(&self, value: Value, thread: u32) -> u64 {
        self.lanes(value, thread)[0]
    }

    pub(super) fn set(&mut self, value: Value, thread: u32, bits: &[u64]) {
        let start = thread as usize * bits.len();
        self.values[value.index()][start..start + bits.len()].copy_from_slice(bits);
    }

    /// The number of the thread's block in its cluster.
    pub(super) fn rank(&self, thread: u32) -> u32 {
        thread / self.kernel.threads()
    }

    /// The memory behind a place, which the validator knows to exist; of an array, that of this thread of the cluster or of
    /// its block.
    pub(super) fn memory(&mut self, place: Place, thread: u32) -> Option<&mut Memory> {
        match place {
            Place::View(i) => self.views.get_mut(usize::from(i))?.as_mut(),
            Place::Shared(i) => {
                let first = self.rank(thread) as usize * self.kernel.shared().len();
                self.shared.get_mut(first + usize::from(i))
            }
            Place::Local(i) => {
                let first = thread as usize * self.kernel.local().len();
                self.local.get_mut(first + usize::from(i))
            }
            Place::Channel(_) | Place::Fragment(_) => None,
        }
    }

    pub(super) fn stamp(&self, place: Place, thread: u32, atomic: bool) -> Stamp {
        let Thread { block, thread: own } = self.thread(thread);
        Stamp {
            cluster: self.block_number,
            cluster_epoch: if matches!(place, Place::Shared(_)) { self.cluster_epoch } else { 0 },
            block,
            thread: own,
            block_epoch: self.block_epoch,
            warp_epoch: self.warp_epochs[(thread / WARP) as usize],
            atomic,
        }
    }

    pub(super) fn thread(&self, thread: u32) -> Thread {
        let block = self.block_number + u64::from(self.rank(thread));
        Thread { block, thread: thread % self.kernel.threads() }
    }

    pub(super) fn block_barrier(&mut self) {
        self.block_epoch += 1;
    }

    /// Waits for all threads of the cluster.
    pub(super) fn cluster_barrier(&mut self) {
        self.cluster_epoch += 1;
        self.block_epoch += 1;
    }

    /// Tells the onlooker that threads have left a loop.
    pub(super) fn looped(&mut self, op: &Op, threads: impl Iterator<Item = u32>, iterations: u64) {
        if let Some(observer) = &mut self.observer {
            threads.for_each(|thread| observer.looped(op, thread, iterations));
        }
    }

    fn warp_barrier(&mut self, active: &[u32]) {
        let mut last = None;
        for warp in active.iter().map(|t| t / WARP) {
            if last != Some(warp) {
                self.warp_epochs[warp as usize] += 1;
                last = Some(warp);
            }
        }
    }

    fn one_op(&mut self, op: &'m Op, active: &[u32]) -> Result<()> {
        match op.code.shape() {
            Shape::Load | Shape::Store => self.access(op, active),
            Shape::LoadUniform => self.load_uniform(op, active),
            Shape::Gather => self.gather(op, active),
            Shape::AtomicLoad | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas => {
                self.atomic(op, active)
            }
            Shape::Shuffle | Shape::Vote | Shape::Ballot | Shape::Reduce(_) => {
                self.warp_op(op, active);
                Ok(())
            }
            Shape::Sync => {
                if op.code == Opcode::Barrier {
                    match op.barrier_scope() {
                        BarrierScope::Block => self.block_barrier(),
                        BarrierScope::Warp => self.warp_barrier(active),
                    }
                }
                Ok(())
            }
            Shape::If | Shape::Switch => self.choose(op, active),
            Shape::For => self.for_loop(op, active),
            Shape::While => self.while_loop(op, active),
            Shape::Id32 | Shape::Id64 | Shape::Extent => {
                let Some(result) = op.result() else { return Ok(()) };
                for thread in active {
                    let bits = self.id(op, *thread) & self.ty(result).scalar().mask();
                    self.set(result, *thread, &[bits]);
                }
                Ok(())
            }
            Shape::Fetch
            | Shape::Release
            | Shape::Fill
            | Shape::Mma
            | Shape::Map
            | Shape::Rows
            | Shape::Share
            | Shape::Put
            | Shape::PutRows
            | Shape::Get
            | Shape::Send => self.tile_op(op),
            _ => {
                self.on_values(op, active);
                Ok(())
            }
        }
    }

    /// The number in its cluster of the first block that runs.
    pub(super) fn cluster_rank(&self) -> u32 {
        self.block[0] % self.kernel.cluster().max(1)
    }

    fn id(&self, op: &Op, thread: u32) -> u64 {
        let axis = op.axis() as usize;
        let (rank, thread) = (self.rank(thread), thread % self.kernel.threads());
        let block = [self.block[0] + rank, self.block[1], self.block[2]];
        let [x, y, _] = self.kernel.block();
        let at = [thread % x, thread / x % y, thread / (x * y)][axis];
        match op.code {
            Opcode::ThreadId => u64::from(at),
            Opcode::BlockId => u64::from(block[axis]),
            Opcode::BlockDim => u64::from(self.kernel.block()[axis]),
            Opcode::GridDim => u64::from(self.grid[axis]),
            Opcode::GlobalId => u64::from(block[axis]) * u64::from(self.kernel.block()[axis]) + u64::from(at),
            Opcode::LocalIndex => u64::from(thread),
            Opcode::LaneId => u64::from(thread % WARP),
            Opcode::WarpId => u64::from(thread / WARP),
            Opcode::ClusterRank => u64::from(self.cluster_rank() + rank),
            Opcode::ClusterId => u64::from(self.block[0] / self.kernel.cluster().max(1)),
            Opcode::Clock => self.steps,
            // The one left is `extent`.
            _ => match (op.place, op.immediates.first()) {
                (Some(Place::View(i)), Some(dimension)) => self.views[usize::from(i)]
                    .as_ref()
                    .and_then(|m| m.tensor.extents.get(*dimension as usize).copied())
                    .unwrap_or(0),
                _ => 0,
            },
        }
    }

    /// Ops on values alone.
    fn on_values(&mut self, op: &Op, active: &[u32]) {
        let Some(result) = op.result() else { return };
        let to = self.ty(result);
        let from = op.operands.last().map_or(to, |v| self.ty(*v));
        let immediate = op.immediates.first().copied().unwrap_or(0);
        for &thread in active {
            let all: Vec<&[u64]> = op.operands.iter().map(|v| self.lanes(*v, thread)).collect();
            let bits: Vec<u64> = match op.code.shape() {
                Shape::Const => vec![immediate; usize::from(to.lanes())],
                Shape::Splat => vec![all[0][0]; usize::from(to.lanes())],
                Shape::Make => all.iter().map(|lanes| lanes[0]).collect(),
                Shape::Extract => vec![all[0][immediate as usize]],
                Shape::Insert => {
                    let mut lanes = all[0].to_vec();
                    lanes[immediate as usize] = all[1][0];
                    lanes
                }
                Shape::Bitcast => bitcast(all[0], from, to),
                _ => (0..usize::from(to.lanes()))
                    .map(|lane| {
                        // The bool of a select may be one for all lanes.
                        let mut args = [0; 3];
                        for (arg, lanes) in args.iter_mut().zip(&all) {
                            *arg = lanes[lane.min(lanes.len() - 1)];
                        }
                        eval(op.code, from.scalar(), to.scalar(), &args[..all.len()]).unwrap_or(0)
                    })
                    .collect(),
            };
            self.set(result, thread, &bits);
        }
    }
}

/// All lanes behind one another as a number of up to 1024 bits, divided into lanes again.
fn bitcast(lanes: &[u64], from: Type, to: Type) -> Vec<u64> {
    let width = |ty: Type| ty.scalar().bytes() as usize;
    let bytes: Vec<u8> = lanes.iter().flat_map(|l| l.to_le_bytes().into_iter().take(width(from))).collect();
    let read = |chunk: &[u8]| chunk.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    bytes.chunks(width(to)).map(read).collect()
}
