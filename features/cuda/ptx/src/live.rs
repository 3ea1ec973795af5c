//! Which registers are read later: what regions yield and loops carry.

use crate::ast::{Instr, Operand};
use crate::cfg::{Cfg, End};
use crate::error::{Error, Result};
use crate::limits::{MAX_LIVE_BITS, MAX_LIVE_VISITS};

/// Instructions that define nothing: their first operand is read.
const NO_RESULT: &[&str] = &[
    "st",
    "red",
    "bar",
    "barrier",
    "membar",
    "fence",
    "prefetch",
    "prefetchu",
    "nanosleep",
    "trap",
    "assert",
    "discard",
    "brkpt",
    "pmevent",
    "griddepcontrol",
    "applypriority",
    "stmatrix",
    "cp",
];

/// Calls `visit` for each register that an instruction reads, or for each that it defines.
pub(crate) fn registers(instr: &Instr, defined: bool, visit: &mut impl FnMut(u32)) {
    let results = usize::from(has_result(instr)).min(instr.operands.len());
    let (first, mut rest) = instr.operands.split_at(results);
    // The mask of threads, which all of the warp are in: nobody looks at it.
    if instr.opcode() == "shfl" || instr.modifiers().next() == Some("warp") {
        rest = rest.split_last().map_or(rest, |(_, others)| others);
    }
    if defined {
        first.iter().for_each(|operand| in_operand(operand, false, visit));
        return;
    }
    // What an address is made of is read, also where the operand is the result.
    first.iter().for_each(|operand| in_operand(operand, true, visit));
    rest.iter().for_each(|operand| {
        in_operand(operand, false, visit);
        in_operand(operand, true, visit);
    });
    if let Some(guard) = instr.guard {
        visit(guard.register);
        // Where the predicate does not hold, the old value stays.
        first.iter().for_each(|operand| in_operand(operand, false, visit));
    }
}

/// The registers of an operand: those in addresses or those outside.
pub(crate) fn in_operand(operand: &Operand, addresses: bool, visit: &mut impl FnMut(u32)) {
    match operand {
        Operand::Register(register) | Operand::Not(register) if !addresses => visit(*register),
        Operand::Address(base, _) if addresses => in_operand(base, false, visit),
        Operand::Vector(list) | Operand::List(list) => {
            list.iter().for_each(|o| in_operand(o, addresses, visit))
        }
        Operand::Pair(pair) => pair.iter().for_each(|o| in_operand(o, addresses, visit)),
        Operand::Sum(base, _) => in_operand(base, addresses, visit),
        _ => {}
    }
}

/// Is its first operand what it gives? So it is of barriers that reduce.
fn has_result(instr: &Instr) -> bool {
    !NO_RESULT.contains(&instr.opcode()) || instr.modifiers().any(|modifier| modifier == "red")
}

/// Does it do more than write its results?
pub(crate) fn has_effect(instr: &Instr) -> bool {
    let code = instr.opcode();
    NO_RESULT.contains(&code) || ["atom", "print"].contains(&code)
}

/// Takes out the instructions whose results decide nothing, not even together: a mask of threads that only other masks are made of
/// needs no votes.
pub(crate) fn prune(cfg: &mut Cfg, registers_count: usize) {
    // The registers that what defines a register reads.
    let mut reads: Vec<Vec<u32>> = vec![Vec::new(); registers_count];
    let (mut needed, mut list) = (vec![false; registers_count], Vec::new());
    for block in &cfg.blocks {
        for instr in &block.instrs {
            if has_effect(instr) {
                registers(instr, false, &mut |register| list.push(register));
                continue;
            }
            registers(instr, true, &mut |to| {
                registers(instr, false, &mut |from| reads[to as usize].push(from))
            });
        }
        read_by_end(&block.end, &mut |register| list.push(register));
    }
    while let Some(register) = list.pop() {
        if !std::mem::replace(&mut needed[register as usize], true) {
            list.append(&mut reads[register as usize]);
        }
    }
    for block in &mut cfg.blocks {
        block.instrs.retain(|instr| {
            let mut keeps = has_effect(instr);
            registers(instr, true, &mut |register| keeps |= needed[register as usize]);
            keeps
        });
    }
}

/// The live registers where each block begins.
#[derive(Debug)]
pub(crate) struct Live {
    /// The number among those that are live anywhere; `NONE` for others.
    numbers: Vec<u32>,
    words: usize,
    bits: Vec<u64>,
}

const NONE: u32 = u32::MAX;

impl Live {
    pub(crate) fn of(cfg: &Cfg, registers_count: usize) -> Result<Live> {
        // Only what some block reads before it defines it lives between blocks.
        let mut numbers = vec![NONE; registers_count];
        let mut count = 0;
        let mut defined_in = vec![usize::MAX; registers_count];
        for (at, block) in cfg.blocks.iter().enumerate() {
            let mut read = |register: u32, defined_in: &[usize]| {
                let number = &mut numbers[register as usize];
                if defined_in[register as usize] != at && *number == NONE {
                    *number = count;
                    count += 1;
                }
            };
            for instr in &block.instrs {
                registers(instr, false, &mut |register| read(register, &defined_in));
                registers(instr, true, &mut |register| defined_in[register as usize] = at);
            }
            read_by_end(&block.end, &mut |register| read(register, &defined_in));
        }
        let words = (count as usize).div_ceil(64);
        if words.saturating_mul(64).saturating_mul(cfg.blocks.len()) > MAX_LIVE_BITS {
            return Err(Error::large(0, "live registers in all of its blocks", MAX_LIVE_BITS));
        }
        let blocks = cfg.blocks.len();
        let mut live = Live { numbers, words, bits: vec![0; words * blocks] };
        let mut preds = vec![Vec::new(); blocks + 1];
        for (at, block) in cfg.blocks.iter().enumerate() {
            block.end.targets().into_iter().for_each(|to| preds[to].push(at));
        }
        let mut waiting = vec![true; blocks];
        let mut list: Vec<usize> = (0..blocks).collect();
        let mut set = vec![0u64; words];
        let mut visits = 0;
        while let Some(at) = list.pop() {
            waiting[at] = false;
            visits += 1;
            if visits > MAX_LIVE_VISITS * blocks {
                return Err(Error::large(0, "visits of its blocks", MAX_LIVE_VISITS * blocks));
            }
            set.fill(0);
            for to in cfg.blocks[at].end.targets() {
                if to < blocks {
                    let from = &live.bits[to * words..(to + 1) * words];
                    set.iter_mut().zip(from).for_each(|(a, b)| *a |= b);
                }
            }
            let number = |register: u32| {
                let number = live.numbers[register as usize] as usize;
                (number != NONE as usize).then_some((number / 64, 1u64 << (number % 64)))
            };
            let read = |set: &mut [u64], register| {
                if let Some((word, bit)) = number(register) {
                    set[word] |= bit;
                }
            };
            read_by_end(&cfg.blocks[at].end, &mut |register| read(&mut set, register));
            for instr in cfg.blocks[at].instrs.iter().rev() {
                registers(instr, true, &mut |register| {
                    if let Some((word, bit)) = number(register) {
                        set[word] &= !bit;
                    }
                });
                registers(instr, false, &mut |register| read(&mut set, register));
            }
            let old = &mut live.bits[at * words..(at + 1) * words];
            if old != set {
                old.copy_from_slice(&set);
                for from in &preds[at] {
                    if !std::mem::replace(&mut waiting[*from], true) {
                        list.push(*from);
                    }
                }
            }
        }
        Ok(live)
    }

    /// Is the register read before it is written, from this block on?
    pub(crate) fn at(&self, block: usize, register: u32) -> bool {
        let number = self.numbers[register as usize];
        let word = self.bits.get(block * self.words + number as usize / 64);
        number != NONE && word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// Returns the most that registers take at once, by the size of each.
    pub(crate) fn pressure(&self, cfg: &Cfg, sizes: &[u32]) -> u32 {
        let mut lasting: Vec<(u32, u32)> = self.numbers.iter().copied().zip(0..).collect();
        lasting.retain(|(number, _)| *number != NONE);
        lasting.sort_unstable();
        let (mut most, mut alive) = (0, vec![false; sizes.len()]);
        for block in &cfg.blocks {
            let mut set = vec![0u64; self.words];
            for to in block.end.targets().into_iter().filter(|to| *to < cfg.exit()) {
                let from = &self.bits[to * self.words..(to + 1) * self.words];
                set.iter_mut().zip(from).for_each(|(a, b)| *a |= b);
            }
            let (mut touched, mut now) = (Vec::new(), 0);
            let mut read = |register: u32, alive: &mut [bool], now: &mut u32| {
                if !std::mem::replace(&mut alive[register as usize], true) {
                    touched.push(register);
                    *now += sizes[register as usize];
                }
            };
            for (number, register) in &lasting {
                if set[*number as usize / 64] >> (number % 64) & 1 == 1 {
                    read(*register, &mut alive, &mut now);
                }
            }
            read_by_end(&block.end, &mut |register| read(register, &mut alive, &mut now));
            most = most.max(now);
            for instr in block.instrs.iter().rev() {
                registers(instr, true, &mut |register| {
                    if std::mem::take(&mut alive[register as usize]) {
                        now -= sizes[register as usize];
                    }
                });
                registers(instr, false, &mut |register| read(register, &mut alive, &mut now));
                most = most.max(now);
            }
            touched.into_iter().for_each(|register| alive[register as usize] = false);
        }
        most
    }

    /// Does the register live between blocks at all?
    pub(crate) fn anywhere(&self, register: u32) -> bool {
        self.numbers[register as usize] != NONE
    }
}

fn read_by_end(end: &End, visit: &mut impl FnMut(u32)) {
    match end {
        End::Jump(_) => {}
        End::Branch(guard, ..) => visit(guard.register),
        End::Switch(index, _) => in_operand(index, false, visit),
    }
}
