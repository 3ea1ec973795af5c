//! What an agent does of a tile kernel, step by step: the kernel's ops, walked as the writer walks them.

use super::super::handover::{Barriers, Ringed, Team, barriers};
use super::super::layout::{self, Layout};
use super::super::waits::Waits;
use super::{Case, Fault};
use std::collections::{HashMap, VecDeque};
use vm_ir::module::{Op, ParamKind, Place, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::{Kernel, Value};

/// A stage of a ring, which is filled for the N-th time that the ring is, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Stage {
    pub(super) ring: u8,
    pub(super) stage: u8,
    pub(super) fill: u8,
}

/// Which of a stage's barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Side {
    Full,
    Empty,
}

/// The blocks of a cluster in which something happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum Blocks {
    First,
    All,
}

/// What an agent does at once.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Waits for a phase of a barrier of its own block.
    Wait(Stage, Side, bool),
    /// Arrives at a barrier of its own block.
    Arrive(Stage, Side),
    /// Has its arrival sent to other blocks.
    ArriveIn(Stage, Side, Blocks),
    /// Arrives at a full barrier, which waits for so many parts.
    Expect(Stage, u8),
    /// Has its block's part of a stage copied to itself, or to all blocks.
    Copy(Stage, bool),
    /// Stores its part of a stage.
    Store(Stage),
    /// Gives each block its part of a stage.
    Give(Stage),
    /// Reads the parts of a stage that it was given.
    Take(Stage),
    /// Reads the cancel flag.
    ReadFlag,
    /// Stores what it read of the flag in each block, and arrives there.
    Tell(Stage),
    /// Stores it in its own block alone.
    Note(Stage),
    /// Reads a word; of signals it is the flag.
    Read(Stage),
    /// Leaves, at the poll with this number, if the flag is set.
    Poll(u8),
    /// Begins a product of these stages.
    Multiply(Vec<Stage>),
    /// Waits until so many products are left.
    Products(u8),
    /// Arrives at the cluster's barrier.
    Arrived,
    /// Waits there for all agents of the cluster.
    Gather,
}

/// Who runs a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agent {
    pub(super) block: u8,
    /// The number of the warp among those that compute; `None` fetches.
    pub(super) warp: Option<u8>,
}

/// An agent's program.
#[derive(Debug, Default)]
pub(super) struct Program {
    pub(super) steps: Vec<Step>,
    /// By step: the stages that the agent may read until that is done.
    pub(super) holds: Vec<Vec<Stage>>,
    /// Where it goes at a poll that ends it.
    pub(super) leave: usize,
}

/// A ring as all agents know it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    pub(super) barriers: Barriers,
    /// Of how many parts a stage is.
    pub(super) parts: u8,
    /// Do all blocks of a cluster bring a part?
    pub(super) multicast: bool,
}

/// The rings of a kernel in a case.
pub(super) fn rings(kernel: &Kernel, case: &Case, fault: Option<Fault>) -> Vec<Ring> {
    let Some(tile) = kernel.tile() else { return Vec::new() };
    let layout = Layout::of(kernel, tile);
    let warps = tile.groups * case.warps;
    // A warp's threads as one.
    let found = barriers(kernel, tile, &layout, case.polls, Team { warps, threads: warps });
    let ring = |mut barriers: Barriers| {
        let (parts, multicast) = match barriers.of {
            Ringed::Tiles(i) if layout.sent[i] => (warps, false),
            Ringed::Tiles(i) => {
                let share = layout::share(kernel, &tile.channels[i]);
                (share, share > 1)
            }
            Ringed::Given => (warps * kernel.cluster(), true),
            Ringed::Signals | Ringed::Words | Ringed::Arrivals => (1, false),
        };
        match (barriers.of, fault) {
            // So few that they come round in a few iterations.
            (Ringed::Words, _) => barriers.stages = case.words,
            (Ringed::Tiles(_), Some(Fault::OwnRelease)) => barriers.empty = warps,
            (Ringed::Signals, Some(Fault::Listeners)) => barriers.empty = warps * kernel.cluster(),
            (Ringed::Given, Some(Fault::OneBuffer)) => barriers.stages = 1,
            _ => {}
        }
        Ring { barriers, parts: parts as u8, multicast }
    };
    found.into_iter().filter(|ring| ring.of != Ringed::Arrivals).map(ring).collect()
}

/// A ring as an agent sees it, in registers: compare `super::super::Ring`.
#[derive(Clone, Debug, Default)]
struct Cursor {
    next: u32,
    parity: bool,
    /// Tiles that were filled, and those that are not released.
    fills: u8,
    held: VecDeque<Stage>,
}

/// Writes an agent's program.
struct Author<'k> {
    kernel: &'k Kernel,
    case: &'k Case<'k>,
    waits: &'k Waits,
    rings: &'k [Ring],
    agent: Agent,
    fault: Option<Fault>,
    cursors: Vec<Cursor>,
    /// Beside the stages of channels, what is read just now.
    reads: Option<Stage>,
    values: HashMap<Value, i64>,
    polls: u8,
    program: Program,
}

/// What an agent does of a kernel.
pub(super) fn program(
    kernel: &Kernel,
    case: &Case,
    rings: &[Ring],
    agent: Agent,
    fault: Option<Fault>,
) -> Program {
    let waits = Waits::of(kernel);
    let fetches = agent.warp.is_none();
    let parity = match fault {
        Some(Fault::FullParity) if !fetches => true,
        Some(Fault::EmptyParity) if fetches => false,
        _ => fetches,
    };
    let cursor = Cursor { parity, ..Cursor::default() };
    let mut author = Author {
        kernel,
        case,
        waits: &waits,
        rings,
        agent,
        fault,
        cursors: vec![cursor; rings.len()],
        reads: None,
        values: HashMap::new(),
        polls: 0,
        program: Program::default(),
    };
    let given = kernel.params().iter().filter_map(|param| match param.kind {
        ParamKind::Scalar { value, .. } => Some((value, case.number)),
        ParamKind::View(_) => None,
    });
    author.values.extend(given);
    author.region(kernel.body());
    author.leave();
    author.program
}

impl Author<'_> {
    fn step(&mut self, step: Step) {
        let held = self.cursors.iter().flat_map(|cursor| &cursor.held).copied();
        self.program.holds.push(held.chain(self.reads).collect());
        self.program.steps.push(step);
    }

    fn computes(&self) -> bool {
        self.agent.warp.is_some()
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn cluster(&self) -> u8 {
        self.kernel.cluster() as u8
    }

    fn ring(&self, of: Ringed) -> usize {
        self.rings
            .iter()
            .position(|ring| ring.barriers.of == of)
            .unwrap_or_else(|| panic!("no ring of {of:?}"))
    }

    /// The next stage of a ring and the parity by which it is waited for. Compare `Writer::advance`.
    fn next(&mut self, ring: usize) -> (Stage, bool) {
        let stages = self.rings[ring].barriers.stages;
        let cursor = &mut self.cursors[ring];
        cursor.fills += 1;
        let stage = Stage { ring: ring as u8, stage: cursor.next as u8, fill: cursor.fills };
        let parity = cursor.parity;
        cursor.next += 1;
        if cursor.next == stages {
            (cursor.next, cursor.parity) = (0, !cursor.parity);
        }
        (stage, parity)
    }

    /// What comes behind the program, and how the kernel ends: `Writer::leave` and `Writer::tile_kernel`.
    fn leave(&mut self) {
        self.program.leave = self.program.steps.len();
        self.cursors.iter_mut().for_each(|cursor| cursor.held.clear());
        if self.computes() {
            self.step(Step::Products(0));
        }
        let multicast = self.kernel.tile().is_some_and(|tile| tile.channels.iter().any(|c| c.multicast));
        if self.cluster() > 1 && (self.case.polls || multicast) && !self.has(Fault::NoGather) {
            self.step(Step::Arrived);
            self.step(Step::Gather);
        }
    }

    fn region(&mut self, region: &Region) {
        region.ops.iter().for_each(|op| self.op(op));
        if let Some(left) = self.waits.at_end(region).filter(|_| self.computes()) {
            self.step(Step::Products(left as u8));
        }
    }

    fn value(&self, value: Value) -> i64 {
        self.values[&value]
    }

    fn op(&mut self, op: &Op) {
        let left = self.waits.before(op).filter(|_| self.computes() && !self.has(Fault::NoProductWaits));
        if let Some(left) = left {
            self.step(Step::Products(left as u8));
        }
        match op.code.shape() {
            Shape::Fetch => self.fetch(op),
            Shape::Release if self.computes() => self.release(op),
            Shape::Mma if self.computes() => {
                let newest = op.others.iter().filter_map(channel);
                let stages = newest.filter_map(|i| self.cursors[i].held.back().copied()).collect();
                self.step(Step::Multiply(stages));
            }
            Shape::Send if self.computes() => self.send(op),
            Shape::Share if self.computes() => self.share(),
            Shape::If => {
                let taken = usize::from(self.value(op.operands[0]) == 0);
                self.region(&op.regions[taken]);
                self.bind(&op.results, &op.regions[taken].yields);
            }
            Shape::For => self.looped(op),
            shape if shape.is_tile() => {}
            _ => self.scalar(op),
        }
    }

    fn bind(&mut self, to: &[Value], from: &[Value]) {
        let values: Vec<i64> = from.iter().map(|value| self.value(*value)).collect();
        self.values.extend(to.iter().copied().zip(values));
    }

    fn scalar(&mut self, op: &Op) {
        let of = |i: usize| self.value(op.operands[i]);
        let value = match op.code {
            Opcode::Const => op.immediates[0] as i64,
            Opcode::Add => of(0) + of(1),
            Opcode::Mul => of(0) * of(1),
            Opcode::Eq => i64::from(of(0) == of(1)),
            Opcode::Load => {
                self.load();
                self.case.number
            }
            Opcode::Extent => self.case.number,
            Opcode::ClusterRank => self.agent.block.into(),
            code => panic!("{code:?} in a case"),
        };
        self.values.extend(op.result().map(|result| (result, value)));
    }

    fn looped(&mut self, op: &Op) {
        let (body, initial) = (&op.regions[0], &op.operands[3..]);
        let (count, carried) = (body.args[0], &body.args[1..]);
        if op.code == Opcode::ForCluster {
            // The block's own iteration: `Writer::own_iteration`.
            self.values.insert(count, self.agent.block.into());
            return self.region(body);
        }
        let [low, high, step] = [0, 1, 2].map(|i| self.value(op.operands[i]));
        self.bind(carried, initial);
        for at in (low..high).step_by(step as usize) {
            self.values.insert(count, at);
            self.region(body);
            self.bind(carried, &body.yields);
            if self.case.polls {
                self.poll();
            }
        }
        self.bind(&op.results, carried);
    }

    /// `Writer::fetch`.
    fn fetch(&mut self, op: &Op) {
        let ring = op.others.first().and_then(channel).unwrap_or_else(|| panic!("fetch without a channel"));
        let Ring { parts, multicast, .. } = self.rings[ring];
        let before = self.cursors[ring].parity;
        let (stage, parity) = self.next(ring);
        if self.computes() {
            self.step(Step::Wait(stage, Side::Full, parity));
            return self.cursors[ring].held.push_back(stage);
        }
        let first = stage.stage == 0 && stage.fill > 1;
        let early = first && self.has(Fault::StageTooMany);
        self.step(Step::Wait(stage, Side::Empty, before ^ early));
        match self.has(Fault::NoBytes) {
            true => self.step(Step::Arrive(stage, Side::Full)),
            false => self.step(Step::Expect(stage, parts)),
        }
        self.step(Step::Copy(stage, multicast));
    }

    /// `Writer::release`.
    fn release(&mut self, op: &Op) {
        let ring = op.place.as_ref().and_then(channel).unwrap_or_else(|| panic!("release without a channel"));
        let Some(&stage) = self.cursors[ring].held.front() else { return };
        match self.rings[ring].multicast && !self.has(Fault::OwnRelease) {
            _ if self.has(Fault::NoRelease) && stage.fill == 1 => {}
            true => self.step(Step::ArriveIn(stage, Side::Empty, Blocks::All)),
            false => self.step(Step::Arrive(stage, Side::Empty)),
        }
        self.cursors[ring].held.pop_front();
    }

    /// `Writer::send`.
    fn send(&mut self, op: &Op) {
        let ring = op.others.first().and_then(channel).unwrap_or_else(|| panic!("send without a channel"));
        let (stage, parity) = self.next(ring);
        self.step(Step::Wait(stage, Side::Empty, !parity));
        self.step(Step::Store(stage));
        self.step(Step::Arrive(stage, Side::Full));
        if !self.has(Fault::SentUnseen) {
            self.step(Step::Wait(stage, Side::Full, parity));
        }
        self.cursors[ring].held.push_back(stage);
    }

    /// `Writer::share`.
    fn share(&mut self) {
        let ring = self.ring(Ringed::Given);
        let (stage, parity) = self.next(ring);
        if self.agent.warp == Some(0) {
            self.step(Step::Expect(stage, self.rings[ring].parts));
        }
        self.step(Step::Give(stage));
        self.step(Step::Wait(stage, Side::Full, parity));
        self.reads = Some(stage);
        self.step(Step::Take(stage));
        self.reads = None;
    }

    /// `Writer::tile_load`.
    fn load(&mut self) {
        let ring = self.ring(Ringed::Words);
        let (stage, parity) = self.next(ring);
        if !self.computes() {
            self.step(Step::Wait(stage, Side::Empty, parity));
            self.step(Step::Store(stage));
            return self.step(Step::Arrive(stage, Side::Full));
        }
        self.step(Step::Wait(stage, Side::Full, parity));
        self.reads = Some(stage);
        if self.has(Fault::EmptyBeforeRead) {
            self.step(Step::Arrive(stage, Side::Empty));
            self.step(Step::Read(stage));
        } else {
            self.step(Step::Read(stage));
            self.step(Step::Arrive(stage, Side::Empty));
        }
        self.reads = None;
    }

    /// `Writer::poll_together`.
    fn poll(&mut self) {
        let ring = self.ring(Ringed::Signals);
        self.polls += 1;
        if self.has(Fault::OwnPoll) {
            self.step(Step::ReadFlag);
            return self.step(Step::Poll(self.polls));
        }
        let (stage, parity) = self.next(ring);
        let cluster = self.cluster() > 1;
        match self.agent {
            Agent { warp: None, block: 0 } => {
                if !self.has(Fault::PollUnread) {
                    self.step(Step::Wait(stage, Side::Empty, parity));
                }
                self.step(Step::ReadFlag);
                match cluster {
                    true => self.step(Step::Tell(stage)),
                    false => {
                        self.step(Step::Note(stage));
                        self.step(Step::Arrive(stage, Side::Full));
                    }
                }
            }
            Agent { warp, .. } => {
                let full = if warp.is_none() { !parity } else { parity };
                self.step(Step::Wait(stage, Side::Full, full));
                self.reads = Some(stage);
                self.step(Step::Read(stage));
                match cluster {
                    true => self.step(Step::ArriveIn(stage, Side::Empty, Blocks::First)),
                    false => self.step(Step::Arrive(stage, Side::Empty)),
                }
                self.reads = None;
            }
        }
        self.step(Step::Poll(self.polls));
    }
}

/// The number of the channel that a place is; rings begin with those of channels.
fn channel(place: &Place) -> Option<usize> {
    super::super::channel_number(*place)
}
