//! The blocks of a cluster at a moment, what may happen next, and what must never be.

use super::super::handover::Ringed;
use super::program::{Agent, Blocks, Program, Ring, Side, Stage, Step};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// An agent that ended its program, and left at no poll.
const ALL: u8 = u8::MAX;

/// What is wrong with a hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Nobody can go on, and somebody has not ended.
    Deadlock,
    /// What comes to a stage that somebody may still read.
    Overwritten,
    /// What is read has not come, or is of another time.
    NotThere,
    /// More arrive at a barrier than it waits for.
    TooMany,
    /// Something is under way to a block that has ended, or of it.
    AfterEnd,
    /// Agents of a cluster leave at different polls.
    Apart,
}

/// An `mbarrier`: which phase it is in, who has yet to arrive in it, and what has yet to come.
#[derive(Clone, Copy, Debug, Default)]
struct Barrier {
    phase: bool,
    arrivals: u8,
    parts: i8,
}

impl Hash for Barrier {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let Barrier { phase, arrivals, parts } = *self;
        hasher.write_u32(u32::from_le_bytes([phase.into(), arrivals, parts as u8, 0]));
    }
}

impl Barrier {
    /// Ends the phase if nothing is awaited in it any more.
    fn settle(&mut self, count: u8) {
        if (self.arrivals, self.parts) == (0, 0) {
            *self = Barrier { phase: !self.phase, arrivals: count, parts: 0 };
        }
    }
}

/// What is under way to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Message {
    to: u8,
    /// Who had it sent.
    by: u8,
    stage: Stage,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum What {
    /// An arrival.
    Arrival(Side),
    /// The cancel flag, and an arrival behind it.
    Flag(bool),
    /// A part of a stage, whose barrier is told that it came.
    Part(u8),
}

/// What happens next.
#[derive(Clone, Copy, Debug)]
enum Move {
    /// The agent does the step with this number.
    Step(u8, u8),
    /// The message comes.
    Lands(Message),
    /// The agent's oldest product ends.
    Multiplied(u8),
    /// The launch is cancelled.
    Cancel,
}

/// All that there is at a moment.
#[derive(Clone, Debug, Hash)]
struct State {
    /// By agent: its next step, the flag as it has read it, and the poll at which it left, or 0.
    next: Vec<u8>,
    flags: Vec<bool>,
    left: Vec<u8>,
    /// By barrier, and by part of a stage: for which time it is filled.
    barriers: Vec<Barrier>,
    parts: Vec<u8>,
    /// What signals say.
    words: Vec<bool>,
    /// Sorted.
    messages: Vec<Message>,
    /// Products under way: the agents and the steps that began them, sorted by agent.
    products: Vec<(u8, u8)>,
    /// Agents that have come to the cluster's barrier.
    gathered: u8,
    cancelled: bool,
}

/// What stays as it is.
pub(super) struct Machine {
    pub(super) blocks: u8,
    pub(super) agents: Vec<Agent>,
    pub(super) programs: Vec<Program>,
    pub(super) rings: Vec<Ring>,
    pub(super) cancellable: bool,
    /// By ring: the first of a block's barriers, of a block's parts, and of a block's words.
    places: Vec<[usize; 3]>,
    /// How many of each a block has.
    each: [usize; 3],
}

impl Machine {
    pub(super) fn new(
        blocks: u8,
        agents: Vec<Agent>,
        programs: Vec<Program>,
        rings: Vec<Ring>,
        cancellable: bool,
    ) -> Machine {
        let (mut places, mut each) = (Vec::new(), [0; 3]);
        for ring in &rings {
            let stages = ring.barriers.stages as usize;
            places.push(each);
            each[0] += 2 * stages;
            each[1] += stages * usize::from(ring.parts);
            each[2] += stages;
        }
        assert!(programs.iter().all(|program| program.steps.len() < usize::from(u8::MAX)));
        Machine { blocks, agents, programs, rings, cancellable, places, each }
    }

    fn ring(&self, stage: Stage) -> &Ring {
        &self.rings[usize::from(stage.ring)]
    }

    fn barrier(&self, block: u8, stage: Stage, side: Side) -> usize {
        let behind = if side == Side::Full { 0 } else { self.ring(stage).barriers.stages as usize };
        usize::from(block) * self.each[0]
            + self.places[usize::from(stage.ring)][0]
            + behind
            + usize::from(stage.stage)
    }

    fn part(&self, block: u8, stage: Stage, part: u8) -> usize {
        let of_stage = usize::from(stage.stage) * usize::from(self.ring(stage).parts);
        usize::from(block) * self.each[1]
            + self.places[usize::from(stage.ring)][1]
            + of_stage
            + usize::from(part)
    }

    fn word(&self, block: u8, stage: Stage) -> usize {
        usize::from(block) * self.each[2] + self.places[usize::from(stage.ring)][2] + usize::from(stage.stage)
    }

    fn count(&self, stage: Stage, side: Side) -> u8 {
        let barriers = self.ring(stage).barriers;
        (if side == Side::Full { barriers.full } else { barriers.empty }) as u8
    }

    fn begin(&self) -> State {
        let mut barriers = Vec::new();
        for _ in 0..self.blocks {
            for ring in &self.rings {
                for count in [ring.barriers.full, ring.barriers.empty] {
                    let barrier = Barrier { arrivals: count as u8, ..Barrier::default() };
                    barriers.extend((0..ring.barriers.stages).map(|_| barrier));
                }
            }
        }
        let blocks = usize::from(self.blocks);
        State {
            next: vec![0; self.agents.len()],
            flags: vec![false; self.agents.len()],
            left: vec![0; self.agents.len()],
            barriers,
            parts: vec![0; blocks * self.each[1]],
            words: vec![false; blocks * self.each[2]],
            messages: Vec::new(),
            products: Vec::new(),
            gathered: 0,
            cancelled: false,
        }
    }

    fn step<'m>(&'m self, state: &State, agent: usize) -> Option<&'m Step> {
        self.programs[agent].steps.get(usize::from(state.next[agent]))
    }

    fn ended(&self, state: &State, block: u8) -> bool {
        let mut own = (0..self.agents.len()).filter(|agent| self.agents[*agent].block == block);
        own.all(|agent| self.step(state, agent).is_none())
    }

    /// Which part of a stage comes from an agent. A warp has one of what is sent, and in each block one of what is given there.
    fn part_of(&self, agent: Agent, stage: Stage) -> u8 {
        let ring = self.ring(stage);
        match (ring.barriers.of, agent.warp) {
            (Ringed::Given, Some(warp)) => agent.block * (ring.parts / self.blocks) + warp,
            (Ringed::Tiles(_), Some(warp)) => warp,
            (Ringed::Tiles(_), None) if ring.multicast => agent.block,
            _ => 0,
        }
    }

    /// Does an agent that reads a stage read this part of it? Of sums it reads what the warps of its number gave.
    fn reads(&self, agent: Agent, stage: Stage, part: u8) -> bool {
        let ring = self.ring(stage);
        ring.barriers.of != Ringed::Given || Some(part % (ring.parts / self.blocks)) == agent.warp
    }

    /// Is all there that an agent reads of a stage?
    fn there(&self, state: &State, agent: Agent, stage: Stage) -> Result<(), Wrong> {
        let mut parts = (0..self.ring(stage).parts).filter(|part| self.reads(agent, stage, *part));
        match parts.all(|part| state.parts[self.part(agent.block, stage, part)] == stage.fill) {
            true => Ok(()),
            false => Err(Wrong::NotThere),
        }
    }

    /// May anyone in the block still read what was in a part of a stage before?
    fn kept(&self, state: &State, block: u8, stage: Stage, part: u8) -> Result<(), Wrong> {
        let older =
            |held: &Stage| (held.ring, held.stage) == (stage.ring, stage.stage) && held.fill != stage.fill;
        for (number, agent) in self.agents.iter().enumerate().filter(|(_, agent)| agent.block == block) {
            let next = usize::from(state.next[number]);
            let held = self.programs[number].holds.get(next).into_iter().flatten();
            let begun = state.products.iter().filter(|(of, _)| usize::from(*of) == number);
            let read = begun.filter_map(|(_, step)| match &self.programs[number].steps[usize::from(*step)] {
                Step::Multiply(stages) => Some(stages),
                _ => None,
            });
            if held.chain(read.flatten()).any(|held| older(held) && self.reads(*agent, stage, part)) {
                return Err(Wrong::Overwritten);
            }
        }
        Ok(())
    }

    fn arrive(&self, state: &mut State, block: u8, stage: Stage, side: Side) -> Result<(), Wrong> {
        let at = self.barrier(block, stage, side);
        let barrier = &mut state.barriers[at];
        barrier.arrivals = barrier.arrivals.checked_sub(1).ok_or(Wrong::TooMany)?;
        barrier.settle(self.count(stage, side));
        Ok(())
    }

    /// The agent's next step, if it can be done now.
    fn take(&self, before: &State, number: usize) -> Result<Option<State>, Wrong> {
        let (agent, by) = (self.agents[number], number as u8);
        let Some(step) = self.step(before, number) else { return Ok(None) };
        let products = before.products.iter().filter(|(of, _)| *of == by).count();
        let can = match step {
            Step::Wait(stage, side, parity) => {
                before.barriers[self.barrier(agent.block, *stage, *side)].phase != *parity
            }
            Step::Products(left) => products <= usize::from(*left),
            // It releases: what the agent did in other blocks has happened there.
            Step::Arrived => before.messages.iter().all(|m| m.by != by || matches!(m.what, What::Part(_))),
            Step::Gather => usize::from(before.gathered) == self.agents.len(),
            _ => true,
        };
        if !can {
            return Ok(None);
        }
        let mut after = before.clone();
        after.next[number] += 1;
        let mut send =
            |to: u8, stage: Stage, what: What| after.messages.push(Message { to, by, stage, what });
        match step {
            Step::Wait(..) | Step::Products(_) | Step::Gather => {}
            Step::Arrive(stage, side) => self.arrive(&mut after, agent.block, *stage, *side)?,
            Step::ArriveIn(stage, side, Blocks::First) => send(0, *stage, What::Arrival(*side)),
            Step::ArriveIn(stage, side, Blocks::All) => {
                (0..self.blocks).for_each(|to| send(to, *stage, What::Arrival(*side)));
            }
            Step::Expect(stage, parts) => {
                after.barriers[self.barrier(agent.block, *stage, Side::Full)].parts += *parts as i8;
                self.arrive(&mut after, agent.block, *stage, Side::Full)?;
            }
            Step::Copy(stage, false) => send(agent.block, *stage, What::Part(0)),
            Step::Copy(stage, true) | Step::Give(stage) => {
                let part = self.part_of(agent, *stage);
                (0..self.blocks).for_each(|to| send(to, *stage, What::Part(part)));
            }
            Step::Store(stage) => {
                let part = self.part_of(agent, *stage);
                self.kept(before, agent.block, *stage, part)?;
                after.parts[self.part(agent.block, *stage, part)] = stage.fill;
            }
            Step::Take(stage) => self.there(before, agent, *stage)?,
            Step::ReadFlag => after.flags[number] = before.cancelled,
            Step::Tell(stage) => {
                (0..self.blocks).for_each(|to| send(to, *stage, What::Flag(before.flags[number])));
            }
            Step::Note(stage) => {
                self.kept(before, agent.block, *stage, 0)?;
                after.parts[self.part(agent.block, *stage, 0)] = stage.fill;
                after.words[self.word(agent.block, *stage)] = before.flags[number];
            }
            Step::Read(stage) => {
                self.there(before, agent, *stage)?;
                if self.ring(*stage).barriers.of == Ringed::Signals {
                    after.flags[number] = before.words[self.word(agent.block, *stage)];
                }
            }
            Step::Poll(poll) => {
                if before.flags[number] {
                    after.next[number] = self.programs[number].leave as u8;
                    after.left[number] = *poll;
                }
            }
            Step::Multiply(stages) => {
                stages.iter().try_for_each(|stage| self.there(before, agent, *stage))?;
                let behind = after.products.partition_point(|(of, _)| *of <= by);
                after.products.insert(behind, (by, before.next[number]));
            }
            Step::Arrived => after.gathered += 1,
        }
        after.messages.sort_unstable();
        if after.left[number] == 0 && usize::from(after.next[number]) >= self.programs[number].leave {
            after.left[number] = ALL;
        }
        Ok(Some(after))
    }

    /// A message that has come.
    fn land(&self, before: &State, at: usize) -> Result<State, Wrong> {
        let mut after = before.clone();
        let Message { to, stage, what, .. } = after.messages.remove(at);
        match what {
            What::Arrival(side) => self.arrive(&mut after, to, stage, side)?,
            What::Flag(flag) => {
                after.parts[self.part(to, stage, 0)] = stage.fill;
                after.words[self.word(to, stage)] = flag;
                self.arrive(&mut after, to, stage, Side::Full)?;
            }
            What::Part(part) => {
                after.parts[self.part(to, stage, part)] = stage.fill;
                let full = self.barrier(to, stage, Side::Full);
                after.barriers[full].parts -= 1;
                after.barriers[full].settle(self.count(stage, Side::Full));
            }
        }
        Ok(after)
    }

    /// The agent's oldest product, which has read its factors by now.
    fn multiplied(&self, before: &State, at: usize) -> Result<State, Wrong> {
        let (by, step) = before.products[at];
        let number = usize::from(by);
        if let Step::Multiply(stages) = &self.programs[number].steps[usize::from(step)] {
            stages.iter().try_for_each(|stage| self.there(before, self.agents[number], *stage))?;
        }
        let mut after = before.clone();
        after.products.remove(at);
        Ok(after)
    }

    /// What must hold at each moment.
    fn check(&self, state: &State) -> Result<(), Wrong> {
        for message in &state.messages {
            let part = match message.what {
                What::Arrival(_) => None,
                What::Flag(_) => Some(0),
                What::Part(part) => Some(part),
            };
            if let Some(part) = part {
                self.kept(state, message.to, message.stage, part)?;
            }
            // Copies are their own block's; what is stored or told leaves with the instruction.
            let of = self.agents[usize::from(message.by)];
            let copied = of.warp.is_none() && matches!(message.what, What::Part(_));
            if self.ended(state, message.to) || copied && self.ended(state, of.block) {
                return Err(Wrong::AfterEnd);
            }
        }
        let of_ended = |(by, _): &(u8, u8)| self.step(state, usize::from(*by)).is_none();
        if state.products.iter().any(of_ended) {
            return Err(Wrong::AfterEnd);
        }
        let mut left = state.left.iter().filter(|left| **left > 0);
        match left.next().is_none_or(|first| left.all(|other| other == first)) {
            true => Ok(()),
            false => Err(Wrong::Apart),
        }
    }

    /// Each move that there is, and what comes of it. A step that changes nothing that others see, and that nothing else prevents, is
    /// the only one: it comes to the same when it is done.
    fn moves(&self, state: &State) -> Vec<(Move, Result<State, Wrong>)> {
        let mut found = Vec::new();
        for agent in 0..self.agents.len() {
            let Some(after) = self.take(state, agent).transpose() else { continue };
            let by = Move::Step(agent as u8, state.next[agent]);
            if matches!(self.step(state, agent), Some(Step::Products(_) | Step::Poll(_) | Step::Gather)) {
                return vec![(by, after)];
            }
            found.push((by, after));
        }
        for (at, message) in state.messages.iter().enumerate() {
            found.push((Move::Lands(*message), self.land(state, at)));
        }
        for (at, (agent, _)) in state.products.iter().enumerate() {
            if at == 0 || state.products[at - 1].0 != *agent {
                found.push((Move::Multiplied(*agent), self.multiplied(state, at)));
            }
        }
        if self.cancellable && !state.cancelled {
            found.push((Move::Cancel, Ok(State { cancelled: true, ..state.clone() })));
        }
        found
    }

    /// Goes all ways that there are, depth first; gives how many states there are, or what is wrong and the way there: the first
    /// that it finds, or the first of what is `wanted`.
    pub(super) fn explore(&self, wanted: Option<Wrong>) -> Result<usize, (Wrong, String)> {
        let seal = |state: &State| {
            let mut hasher = DefaultHasher::new();
            state.hash(&mut hasher);
            hasher.finish()
        };
        let first = self.begin();
        let mut seen = HashSet::from([seal(&first)]);
        // How each state was come to, and the states whose ways on are not gone.
        let mut ways: Vec<(usize, Option<Move>)> = vec![(0, None)];
        let mut left = vec![(0, first)];
        while let Some((way, state)) = left.pop() {
            let moves = self.moves(&state);
            let stuck = moves.iter().all(|(by, _)| matches!(by, Move::Cancel));
            if stuck
                && wanted.is_none_or(|wanted| wanted == Wrong::Deadlock)
                && (0..self.blocks).any(|block| !self.ended(&state, block))
            {
                return Err((Wrong::Deadlock, self.tell(&ways, way, None)));
            }
            for (by, after) in moves {
                let checked = after.and_then(|after| match by {
                    Move::Step(..) => self.check(&after).map(|()| after),
                    // Less is under way, and nobody has come further.
                    _ => Ok(after),
                });
                let after = match checked {
                    Ok(after) => after,
                    Err(wrong) if wanted.is_none_or(|wanted| wanted == wrong) => {
                        return Err((wrong, self.tell(&ways, way, Some(by))));
                    }
                    Err(_) => continue,
                };
                if seen.insert(seal(&after)) {
                    ways.push((way, Some(by)));
                    left.push((ways.len() - 1, after));
                }
            }
        }
        Ok(seen.len())
    }

    /// The moves to a state, and maybe one more, line by line.
    fn tell(&self, ways: &[(usize, Option<Move>)], way: usize, last: Option<Move>) -> String {
        let back = std::iter::successors(Some(way), |way| ways[*way].1.map(|_| ways[*way].0));
        let mut moves: Vec<Move> = back.filter_map(|way| ways[way].1).collect();
        moves.reverse();
        let line = |by: Move| match by {
            Move::Step(agent, step) => {
                let number = usize::from(agent);
                format!("{:?}: {:?}", self.agents[number], self.programs[number].steps[usize::from(step)])
            }
            Move::Lands(message) => format!("{message:?} comes"),
            Move::Multiplied(agent) => format!("{:?}: a product ends", self.agents[usize::from(agent)]),
            Move::Cancel => "the launch is cancelled".to_owned(),
        };
        let lines: Vec<String> = moves.into_iter().chain(last).map(line).collect();
        lines.join("\n")
    }
}
