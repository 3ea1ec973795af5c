//! The order of instructions within a block.
//!
//! The code generator writes an instruction where its result is wanted first, and before it all that leads to it: where the
//! same is done to several vectors, one is finished before the next begins. Such a chain is as slow as its instructions wait
//! for one another, and a machine looks only so far ahead. Here chains are put side by side: an instruction comes as soon as
//! its operands are ready, the first in the old order first, as long as the values at hand fit the registers.
//!
//! Where they and the constants do not, constants are rematerialised for each few instructions in a row that take them. The
//! register allocator would keep them in memory too, but put them there first, and load them for each instruction.
//!
//! Only pure instructions are moved, and only within their block. What touches memory, may trap or leaves the block stays in
//! order.

use cranelift_codegen::cursor::{Cursor, FuncCursor};
use cranelift_codegen::entity::SecondaryMap;
use cranelift_codegen::ir::{
    Block, Constant, Function, Inst, InstBuilder, InstructionData, Opcode, Type, Value, ValueDef,
};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Instructions that begin in a cycle.
const WIDTH: usize = 4;
/// How many instructions behind the first one that is left are looked at.
const WINDOW: u32 = 192;
/// How many that may begin are looked at.
const CHOICE: usize = 48;
/// Registers that are left to constants and to what lives through the block.
const SPARED: usize = 2;
/// Registers that a block has in any case.
const LEAST: usize = 6;
/// A constant is still at hand this many instructions behind the last that took it.
const NEAR: usize = 12;

/// Puts the instructions of every block in order, for a machine with `registers` registers for vectors; `through` is how many
/// vectors live through each block.
pub(super) fn schedule(func: &mut Function, registers: usize, through: SecondaryMap<Block, usize>) {
    let blocks: Vec<Block> = func.layout.blocks().collect();
    let count = func.dfg.num_values();
    let mut scheduler =
        Scheduler { func, registers, uses: vec![0; count], places: vec![None; count], through };
    for block in &blocks {
        for inst in scheduler.insts(*block) {
            scheduler.operands(inst).into_iter().for_each(|value| scheduler.uses[index(value)] += 1);
        }
    }
    blocks.into_iter().for_each(|block| scheduler.block(block));
}

struct Scheduler<'f> {
    func: &'f mut Function,
    registers: usize,
    /// By value: how often it is still used.
    uses: Vec<u32>,
    /// By value: the node of the block that makes it.
    places: Vec<Option<u32>>,
    /// By block: how many vectors live through it that it does not use.
    through: SecondaryMap<Block, usize>,
}

/// An instruction of the block.
struct Node {
    inst: Inst,
    /// What it takes, and the one before in the order of those that stay, as long as they are not done.
    waits: u32,
    /// The first cycle in which it may begin.
    ready: u64,
    latency: u64,
    /// Those that wait for it.
    after: Vec<u32>,
    done: bool,
}

/// The work on a block.
#[derive(Default)]
struct State {
    nodes: Vec<Node>,
    /// The first in the old order that is not done.
    first: u32,
    now: u64,
    /// What may begin, the first in the old order first.
    open: BinaryHeap<Reverse<u32>>,
    /// What may begin in a later cycle.
    later: BinaryHeap<Reverse<(u64, u32)>>,
    order: Vec<Inst>,
    /// Registers for vectors that are there for what the block makes.
    room: usize,
    /// Values in registers for vectors, and the most there were.
    live: usize,
    most: usize,
}

fn index(value: Value) -> usize {
    value.as_u32() as usize
}

/// Does it keep its place among others of its kind?
fn stays(code: Opcode) -> bool {
    code.can_load()
        || code.can_store()
        || code.can_trap()
        || code.other_side_effects()
        || code.is_terminator()
        || code.is_branch()
        || code.is_call()
}

/// Cycles until the result is there, roughly.
fn latency(code: Opcode, ty: Option<Type>) -> u64 {
    match code {
        Opcode::Load => 6,
        Opcode::Fma | Opcode::Fmul => 4,
        Opcode::Fadd | Opcode::Fsub | Opcode::Imul => 3,
        Opcode::Fdiv => 12,
        Opcode::Sqrt => 16,
        Opcode::Fcmp => 2,
        _ if ty.is_some_and(|ty| ty.lane_type().is_float()) => 2,
        _ => 1,
    }
}

impl Scheduler<'_> {
    fn insts(&self, block: Block) -> Vec<Inst> {
        self.func.layout.block_insts(block).collect()
    }

    fn operands(&self, inst: Inst) -> Vec<Value> {
        self.func.dfg.inst_values(inst).map(|value| self.func.dfg.resolve_aliases(value)).collect()
    }

    fn is_in_vector_register(&self, value: Value) -> bool {
        let ty = self.func.dfg.value_type(value);
        ty.is_vector() || ty.is_float()
    }

    /// The vector that a value is, if it is known.
    fn constant(&self, value: Value) -> Option<Constant> {
        let ValueDef::Result(inst, _) = self.func.dfg.value_def(value) else { return None };
        match self.func.dfg.insts[inst] {
            InstructionData::UnaryConst { opcode: Opcode::Vconst, constant_handle } => Some(constant_handle),
            _ => None,
        }
    }

    fn is_constant(&self, inst: Inst) -> bool {
        self.func.dfg.insts[inst].opcode() == Opcode::Vconst
    }

    fn block(&mut self, block: Block) {
        let insts = self.insts(block);
        let (constants, insts): (Vec<Inst>, Vec<Inst>) =
            insts.into_iter().partition(|inst| self.is_constant(*inst));
        let mut state = self.begin(&insts);
        state.room = self.registers.saturating_sub(SPARED + self.through[block]).max(LEAST);
        let last = state.nodes.len() as u32 - 1;
        while state.order.len() < insts.len() && self.cycle(&mut state, last) {}
        for inst in &insts {
            for value in self.func.dfg.inst_results(*inst) {
                self.places[index(*value)] = None;
            }
        }
        if state.order.len() == insts.len() {
            self.rewrite(block, &constants, &state);
        }
    }

    fn begin(&mut self, insts: &[Inst]) -> State {
        let mut state = State::default();
        let mut before: Option<u32> = None;
        for (at, inst) in insts.iter().enumerate() {
            let at = at as u32;
            let dfg = &self.func.dfg;
            let code = dfg.insts[*inst].opcode();
            let ty = dfg.inst_results(*inst).first().map(|value| dfg.value_type(*value));
            let mut from: Vec<u32> =
                self.operands(*inst).into_iter().filter_map(|value| self.places[index(value)]).collect();
            if stays(code) {
                from.extend(before.replace(at));
            }
            for one in &from {
                state.nodes[*one as usize].after.push(at);
            }
            for value in dfg.inst_results(*inst) {
                self.places[index(*value)] = Some(at);
            }
            let waits = from.len() as u32;
            let latency = latency(code, ty);
            state.nodes.push(Node { inst: *inst, waits, ready: 0, latency, after: Vec::new(), done: false });
            if waits == 0 {
                state.open.push(Reverse(at));
            }
        }
        state.order.reserve(insts.len());
        state
    }

    /// What begins in one cycle; false if nothing ever will. `last`, which leaves the block, waits for all others.
    fn cycle(&mut self, state: &mut State, last: u32) -> bool {
        while let Some(Reverse((ready, at))) = state.later.peek().copied()
            && ready <= state.now
        {
            state.later.pop();
            state.open.push(Reverse(at));
        }
        let mut begun = 0;
        while begun < WIDTH
            && let Some(at) = self.choose(state, last)
        {
            self.take(state, at);
            begun += 1;
        }
        state.now += 1;
        if begun > 0 {
            return true;
        }
        if let Some(Reverse((ready, _))) = state.later.peek() {
            state.now = state.now.max(*ready);
            return true;
        }
        // What is left needs more registers than there are.
        let all_but_last = state.order.len() == last as usize;
        let first = state.open.pop().map(|Reverse(at)| at).filter(|at| all_but_last || *at != last);
        if let Some(at) = first {
            self.take(state, at);
        }
        first.is_some()
    }

    /// The first that may begin and fits the registers.
    fn choose(&self, state: &mut State, last: u32) -> Option<u32> {
        while state.nodes.get(state.first as usize)?.done {
            state.first += 1;
        }
        let first = state.first;
        let mut passed = Vec::new();
        let mut chosen = None;
        while passed.len() < CHOICE
            && let Some(Reverse(at)) = state.open.pop()
        {
            let too_early = at == last && state.order.len() < last as usize;
            let too_far = at > first + WINDOW;
            if !too_early && !too_far && (at == first || self.fits(state, at)) {
                chosen = Some(at);
                break;
            }
            passed.push(Reverse(at));
            if too_far {
                break;
            }
        }
        state.open.extend(passed);
        chosen
    }

    fn fits(&self, state: &State, at: u32) -> bool {
        let inst = state.nodes[at as usize].inst;
        let results = self.func.dfg.inst_results(inst);
        let begins = results.iter().filter(|value| self.is_in_vector_register(**value)).count();
        if begins == 0 || state.live + begins <= state.room {
            return true;
        }
        let operands = self.operands(inst);
        let ends = |at: usize| {
            let value = operands[at];
            let own = operands.iter().filter(|other| **other == value).count();
            !operands[..at].contains(&value)
                && self.places[index(value)].is_some()
                && self.uses[index(value)] as usize == own
                && self.is_in_vector_register(value)
        };
        begins <= (0..operands.len()).filter(|at| ends(*at)).count()
    }

    fn take(&mut self, state: &mut State, at: u32) {
        let node = &mut state.nodes[at as usize];
        node.done = true;
        let (inst, ready, after) = (node.inst, state.now + node.latency, std::mem::take(&mut node.after));
        state.order.push(inst);
        for value in self.operands(inst) {
            self.uses[index(value)] -= 1;
            let over = self.uses[index(value)] == 0 && self.places[index(value)].is_some();
            state.live -= usize::from(over && self.is_in_vector_register(value));
        }
        let results = self.func.dfg.inst_results(inst);
        state.live += results.iter().filter(|value| self.is_in_vector_register(**value)).count();
        state.most = state.most.max(state.live);
        for next in after {
            let node = &mut state.nodes[next as usize];
            node.waits -= 1;
            node.ready = node.ready.max(ready);
            if node.waits == 0 {
                state.later.push(Reverse((node.ready, next)));
            }
        }
    }

    /// Puts the instructions into the block, with the constants where they are wanted.
    fn rewrite(&mut self, block: Block, constants: &[Inst], state: &State) {
        let mut wanted: Vec<Constant> = state
            .order
            .iter()
            .flat_map(|inst| self.operands(*inst))
            .filter_map(|value| self.constant(value))
            .collect();
        wanted.sort_unstable();
        wanted.dedup();
        let remat = state.most + self.through[block] + wanted.len() > self.registers;
        for inst in self.insts(block) {
            self.func.layout.remove_inst(inst);
        }
        // Those that other blocks use, or all.
        constants.iter().for_each(|inst| self.func.layout.append_inst(*inst, block));
        let mut at_hand: HashMap<(Constant, Type), (Value, usize)> = HashMap::new();
        for (at, inst) in state.order.iter().enumerate() {
            self.func.layout.append_inst(*inst, block);
            if !remat || self.func.dfg.insts[*inst].opcode().is_branch() {
                continue;
            }
            let operands = self.operands(*inst);
            let instead: Vec<Value> = operands
                .into_iter()
                .map(|value| {
                    let Some(constant) = self.constant(value) else { return value };
                    let ty = self.func.dfg.value_type(value);
                    let known = at_hand.get(&(constant, ty)).filter(|(_, used)| at - used <= NEAR);
                    let value = match known {
                        Some((value, _)) => *value,
                        None => FuncCursor::new(self.func).at_inst(*inst).ins().vconst(ty, constant),
                    };
                    at_hand.insert((constant, ty), (value, at));
                    value
                })
                .collect();
            self.func.dfg.overwrite_inst_values(*inst, instead.into_iter());
        }
    }
}
