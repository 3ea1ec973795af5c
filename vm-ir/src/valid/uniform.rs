//! Convergence: which values are the same in which threads, and so which threads arrive where together.
//!
//! Every value has one of three levels, from alike in the block to possibly different in each thread. "The
//! same" is meant among the threads that compute the value together. The levels start at the bottom and are
//! only ever raised: what an op's operands are raised to, its result is raised to, and what a condition is
//! raised to, the results that it chooses or ends are raised to. Each value is raised at most twice and each
//! use is looked at once for each raise, so the time is linear in the uses.
//!
//! In a kernel with clusters, "block" stands for the cluster: what is alike in each block but not in the cluster is
//! alike in a warp, and what blocks must reach together, clusters must.
//!
//! A region is reached by whole blocks if every condition around it is alike in the block, and likewise for
//! warps.

use super::Trust;
use super::error::{Divergence, Rule, ValidationError};
use super::split::places_of_splits;
use crate::limits::{MAX_ERRORS, WARP};
use crate::module::{Kernel, Op, Place, Region, Value};
use crate::op::{Axis, BarrierScope, Opcode, Shape, Varies};
use crate::view::Access;
use std::collections::HashSet;

/// How a value relates between the threads that compute it together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Uniformity {
    /// The same in all threads of the block; in a kernel with clusters, of the cluster.
    Block,
    /// The same in all threads of a warp.
    Warp,
    /// It may differ from thread to thread.
    Thread,
}

/// How a raised operand raises the result.
#[derive(Clone, Copy, PartialEq)]
enum Transfer {
    /// As far.
    Join,
    /// At most to alike in the warp: the op gives a whole warp one result.
    OverWarp,
    /// Between lanes of a warp: the value, and the lane if that is one number and not a distance.
    Shuffle(Value, Option<Value>),
}

struct Analysis<'k> {
    kernel: &'k Kernel,
    /// Are loads from views taken to differ, since somebody may write those meanwhile?
    changing: bool,
    /// Is every iteration of a `for.cluster` taken to be every block's? If not, the count is the block's rank.
    shares: bool,
    levels: Vec<Uniformity>,
    transfers: Vec<Transfer>,
    /// Pairs of a value and one that depends on it.
    edges: Vec<(Value, Value)>,
}

/// The level of each value, and what is wrong with the places of barriers and ops on warps.
pub(super) struct Found {
    /// If nobody writes a view that the kernel only reads.
    pub(super) uniformity: Vec<Uniformity>,
    /// Whatever is written meanwhile.
    pub(super) steady: Vec<Uniformity>,
    pub(super) errors: Vec<ValidationError>,
}

pub(super) fn analyse(kernel: &Kernel, trust: Trust) -> Found {
    let analysis = Analysis::of(kernel, false, false);
    let steady = match trust {
        Trust::Guest => &Analysis::of(kernel, true, false),
        Trust::Trusted => &analysis,
    };
    let mut splits = false;
    kernel.for_each_op(&mut |op| splits |= op.code == Opcode::ForCluster);
    let shared = splits.then(|| Analysis::of(kernel, trust == Trust::Guest, true));
    let mut sums = HashSet::new();
    places_of_splits(&kernel.body, false, &mut sums);
    let mut reach = Reach {
        analysis: steady,
        given: &analysis,
        shared: shared.as_ref(),
        sums,
        inside_split: false,
        conditions: Vec::new(),
        errors: Vec::new(),
    };
    reach.region(&kernel.body);
    let errors = reach.errors;
    let steady = steady.levels.clone();
    Found { uniformity: analysis.levels, steady, errors }
}

impl<'k> Analysis<'k> {
    fn of(kernel: &'k Kernel, changing: bool, shares: bool) -> Analysis<'k> {
        let count = kernel.values.len();
        let mut analysis = Analysis {
            kernel,
            changing,
            shares,
            levels: vec![Uniformity::Block; count],
            transfers: vec![Transfer::Join; count],
            edges: Vec::new(),
        };
        analysis.region(&kernel.body);
        analysis.propagate();
        analysis
    }
}

impl Analysis<'_> {
    fn region(&mut self, region: &Region) {
        for op in &region.ops {
            self.op(op);
            op.regions.iter().for_each(|r| self.region(r));
        }
    }

    fn edge(&mut self, from: Value, to: Value) {
        self.edges.push((from, to));
    }

    fn edges(&mut self, from: &[Value], to: &[Value]) {
        self.edges.extend(from.iter().copied().zip(to.iter().copied()));
    }

    /// Every one of `from` raises every one of `to`.
    fn all_edges(&mut self, from: &[Value], to: &[Value]) {
        for result in to {
            from.iter().for_each(|value| self.edge(*value, *result));
        }
    }

    fn op(&mut self, op: &Op) {
        match op.code.shape() {
            Shape::If | Shape::Switch => {
                self.all_edges(&op.operands, &op.results);
                for region in &op.regions {
                    self.edges(&region.yields, &op.results);
                }
                return;
            }
            Shape::For => {
                let (bounds, initial) = op.operands.split_at(3);
                let body = &op.regions[0];
                let (count, carried) = body.args.split_at(1);
                if op.code == Opcode::ForCluster && !self.shares && self.kernel.cluster > 1 {
                    self.levels[count[0].index()] = Uniformity::Warp;
                }
                self.edge(bounds[0], count[0]);
                self.edge(bounds[2], count[0]);
                self.edges(initial, carried);
                self.edges(&body.yields, carried);
                self.edges(carried, &op.results);
                // Threads that leave after different numbers of rounds take different values with them.
                self.all_edges(bounds, &op.results);
                return;
            }
            Shape::While => {
                let [condition, body] = &op.regions[..] else { return };
                self.edges(&op.operands, &condition.args);
                self.edges(&body.yields, &condition.args);
                self.edges(&condition.args, &op.results);
                self.all_edges(&condition.yields, &op.results);
                return;
            }
            Shape::Map => {
                let args = op.regions.first().map_or(&[][..], |body| &body.args);
                args.iter().for_each(|arg| self.levels[arg.index()] = Uniformity::Thread);
                return;
            }
            _ => {}
        }
        let Some(result) = op.result() else { return };
        let at = result.index();
        match op.code.varies() {
            Varies::Block if self.kernel.cluster > 1 => {
                let own =
                    op.code == Opcode::ClusterRank || op.code == Opcode::BlockId && op.axis() == Axis::X;
                if own {
                    self.levels[at] = Uniformity::Warp;
                }
            }
            Varies::Block | Varies::Regions => {}
            Varies::Operands => {
                if let Shape::Shuffle = op.code.shape() {
                    let lane = (op.code == Opcode::Shuffle).then_some(op.operands[1]);
                    self.transfers[at] = Transfer::Shuffle(op.operands[0], lane);
                }
                self.all_edges(&op.operands, &[result]);
            }
            Varies::Warp if op.operands.is_empty() => self.levels[at] = self.id_level(op),
            Varies::Warp => {
                self.transfers[at] = Transfer::OverWarp;
                self.all_edges(&op.operands, &[result]);
            }
            Varies::Thread => self.levels[at] = self.id_level(op),
            // One role of a tile kernel loads it for all.
            Varies::Memory if self.kernel.tile.is_some() => {
                self.all_edges(&op.operands, &[result]);
                if self.kernel.cluster > 1 {
                    self.levels[at] = Uniformity::Warp;
                }
            }
            Varies::Memory => {
                let constant = match op.place {
                    Some(Place::View(i)) => self.kernel.view(i).is_some_and(|v| v.access == Access::Read),
                    _ => false,
                };
                if constant && !self.changing {
                    self.all_edges(&op.operands, &[result]);
                    // Should somebody write it all the same, the blocks of a cluster must not go separate ways: one that
                    // has ended can't be given anything.
                    if self.kernel.cluster > 1 {
                        self.levels[at] = Uniformity::Warp;
                    }
                } else {
                    self.levels[at] = Uniformity::Thread;
                }
            }
        }
    }

    /// The level of an op that differs by where the thread is; in a block that is one wide along its axis it
    /// does not.
    fn id_level(&self, op: &Op) -> Uniformity {
        let threads = self.kernel.threads();
        match op.code {
            Opcode::GlobalId if self.kernel.cluster > 1 && op.axis() == Axis::X => Uniformity::Thread,
            Opcode::ThreadId | Opcode::GlobalId if self.kernel.block[op.axis() as usize] == 1 => {
                Uniformity::Block
            }
            Opcode::LaneId | Opcode::LocalIndex if threads == 1 => Uniformity::Block,
            Opcode::WarpId if threads <= WARP => Uniformity::Block,
            Opcode::WarpId => Uniformity::Warp,
            _ => Uniformity::Thread,
        }
    }

    fn propagate(&mut self) {
        // Uses by value: `starts[v]..starts[v + 1]` of `uses`.
        let count = self.levels.len();
        let mut starts = vec![0usize; count + 1];
        for (from, _) in &self.edges {
            starts[from.index() + 1] += 1;
        }
        for i in 0..count {
            starts[i + 1] += starts[i];
        }
        let mut next = starts.clone();
        let mut uses = vec![Value(0); self.edges.len()];
        for (from, to) in &self.edges {
            uses[next[from.index()]] = *to;
            next[from.index()] += 1;
        }
        let mut raised: Vec<usize> = (0..count).filter(|i| self.levels[*i] != Uniformity::Block).collect();
        while let Some(from) = raised.pop() {
            for to in &uses[starts[from]..starts[from + 1]] {
                let level = match self.transfers[to.index()] {
                    Transfer::Join => self.levels[from],
                    Transfer::OverWarp => self.levels[from].min(Uniformity::Warp),
                    Transfer::Shuffle(value, lane) => {
                        let level = |v: Value| self.levels[v.index()];
                        match level(value) {
                            // What is alike in the warp is the same from whichever lane it comes.
                            Uniformity::Thread => match lane.map(level) {
                                Some(Uniformity::Block | Uniformity::Warp) => Uniformity::Warp,
                                _ => Uniformity::Thread,
                            },
                            alike => alike,
                        }
                    }
                };
                if level > self.levels[to.index()] {
                    self.levels[to.index()] = level;
                    raised.push(to.index());
                }
            }
        }
    }
}

/// The second walk: who reaches what.
struct Reach<'a, 'k> {
    /// What conditions are judged by.
    analysis: &'a Analysis<'k>,
    /// What a gathered value is judged by: blocks that get others' values compute nonsense and no more.
    given: &'a Analysis<'k>,
    /// What the indices in a `for.cluster` are judged by, if there is one; and whether the op at hand is in one.
    shared: Option<&'a Analysis<'k>>,
    /// What such loops work on.
    sums: HashSet<Place>,
    inside_split: bool,
    /// The conditions around the op at hand, outermost first.
    conditions: Vec<(Uniformity, Divergence)>,
    errors: Vec<ValidationError>,
}

impl Reach<'_, '_> {
    fn level(&self, values: &[Value]) -> Uniformity {
        values.iter().map(|v| self.analysis.levels[v.index()]).max().unwrap_or(Uniformity::Block)
    }

    fn gathered(&self, values: &[Value]) -> Uniformity {
        values.iter().map(|v| self.given.levels[v.index()]).max().unwrap_or(Uniformity::Block)
    }

    fn region(&mut self, region: &Region) {
        for op in &region.ops {
            self.op(op);
            let level = match op.code.shape() {
                Shape::If | Shape::Switch => self.level(&op.operands),
                Shape::For => self.level(&op.operands[..3]),
                Shape::While => self.level(&op.regions[0].yields),
                _ => continue,
            };
            self.conditions.push((level, Divergence { op: op.code.mnemonic(), line: op.line.0 }));
            let outer = self.inside_split;
            self.inside_split |= op.code == Opcode::ForCluster;
            self.loop_of_cluster(op);
            op.regions.iter().for_each(|r| self.region(r));
            self.inside_split = outer;
            self.conditions.pop();
        }
    }

    /// The blocks of a tile kernel's cluster poll together, so that they go through loops together, whatever is in them.
    fn loop_of_cluster(&mut self, op: &Op) {
        let kernel = self.analysis.kernel;
        let together = kernel.tile.is_some() && kernel.cluster > 1;
        let diverged =
            self.conditions.iter().find(|(level, _)| *level > Uniformity::Block).map(|found| found.1);
        if let (Shape::For | Shape::While, true, Some(divergence)) = (op.code.shape(), together, diverged) {
            self.error(op, Rule::NotClusterUniform(divergence));
        }
    }

    fn op(&mut self, op: &Op) {
        let diverged = |most: Uniformity| {
            self.conditions.iter().find(|(level, _)| *level > most).map(|(_, divergence)| *divergence)
        };
        match op.converges() {
            None => {}
            Some(BarrierScope::Block) => {
                if let Some(divergence) = diverged(Uniformity::Block) {
                    self.error(
                        op,
                        match self.analysis.kernel.cluster {
                            0 | 1 => Rule::NotBlockUniform(divergence),
                            _ => Rule::NotClusterUniform(divergence),
                        },
                    );
                }
            }
            Some(BarrierScope::Warp) => {
                if let Some(divergence) = diverged(Uniformity::Warp) {
                    self.error(op, Rule::NotWarpUniform(divergence));
                }
            }
        }
        if op.code == Opcode::ClusterGather && self.gathered(&op.operands) == Uniformity::Thread {
            self.error(op, Rule::OperandNotWarpUniform(1));
        }
        let multicast = |place: &Place| self.analysis.kernel.channel(*place).is_some_and(|c| c.multicast);
        if op.code == Opcode::Fetch
            && op.others.first().is_some_and(multicast)
            && let Some(i) = op.operands.iter().position(|v| self.level(&[*v]) != Uniformity::Block)
        {
            self.error(op, Rule::NotMulticast(i + 1));
        }
        if let (Opcode::Fetch, true, Some(shared)) = (op.code, self.inside_split, self.shared)
            && let Some(i) = op.operands.iter().position(|v| shared.levels[v.index()] != Uniformity::Block)
        {
            self.error(op, Rule::NotSplit(i + 1));
        }
        // A sum begins as that of the first block, to which the parts of the others are added.
        if op.code == Opcode::Fill
            && op.place.is_some_and(|place| self.sums.contains(&place))
            && self.level(&op.operands) != Uniformity::Block
        {
            self.error(op, Rule::NotSplitSum);
        }
        if op.code == Opcode::LoadUniform
            && let Some(i) = op.operands.iter().position(|v| self.level(&[*v]) != Uniformity::Block)
        {
            self.error(op, Rule::OperandNotUniform(i + 1));
        }
    }

    fn error(&mut self, op: &Op, kind: Rule) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(ValidationError {
                kernel: self.analysis.kernel.name.to_string(),
                guest: self.analysis.kernel.guest,
                line: op.line.0,
                op: Some(op.code.mnemonic()),
                kind,
            });
        }
    }
}
