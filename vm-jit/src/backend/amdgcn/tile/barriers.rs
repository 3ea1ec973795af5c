//! Where the waves of a block wait for each other, so that what is read in a stage has been written, and what is overwritten
//! has been read.
//!
//! For each channel it is known which of its stages some wave may have read or written since the last barrier: bits, the lowest that of the
//! newest stage, the next of the one before it. At a join of control flow either may have come.

use super::channel_number;
use std::collections::{HashMap, HashSet};
use vm_ir::Kernel;
use vm_ir::module::{Op, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::tile::Tile;

/// The ops before which there is a barrier.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    before: HashSet<usize>,
    /// What is known where an iteration of a loop begins.
    heads: HashMap<usize, State>,
    /// Was anything learnt in this pass?
    changed: bool,
}

/// What was done with a channel's stages since the last barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Touched {
    read: u32,
    written: u32,
}

type State = Vec<Touched>;

fn address(op: &Op) -> usize {
    std::ptr::from_ref(op).addr()
}

impl Barriers {
    /// Passes over the program until none learns more: what is known where loops begin only grows.
    pub(super) fn of(kernel: &Kernel, tile: &Tile) -> Barriers {
        let mut found = Barriers::default();
        let stages: Vec<u32> = tile.channels.iter().map(|channel| channel.stages).collect();
        loop {
            found.changed = false;
            found.region(kernel.body(), &stages, &mut vec![Touched::default(); stages.len()]);
            if !found.changed {
                return found;
            }
        }
    }

    pub(super) fn is_before(&self, op: &Op) -> bool {
        self.before.contains(&address(op))
    }

    fn region(&mut self, region: &Region, stages: &[u32], state: &mut State) {
        for op in &region.ops {
            match op.code {
                Opcode::For | Opcode::ForCluster | Opcode::While => {
                    let known = self.heads.remove(&address(op));
                    let before = known.clone();
                    let mut head = known.unwrap_or_else(|| state.clone());
                    join(&mut head, state);
                    *state = head.clone();
                    // A `while` ends behind its condition.
                    let mut end = None;
                    for region in &op.regions {
                        self.region(region, stages, state);
                        end.get_or_insert_with(|| state.clone());
                    }
                    join(&mut head, state);
                    self.changed |= before.as_ref() != Some(&head);
                    *state = end.filter(|_| op.code == Opcode::While).unwrap_or_else(|| head.clone());
                    self.heads.insert(address(op), head);
                }
                Opcode::If | Opcode::Switch => {
                    let ends: Vec<State> = op
                        .regions
                        .iter()
                        .map(|region| {
                            let mut end = state.clone();
                            self.region(region, stages, &mut end);
                            end
                        })
                        .collect();
                    *state = vec![Touched::default(); stages.len()];
                    ends.iter().for_each(|end| join(state, end));
                }
                _ => self.op(op, stages, state),
            }
        }
    }

    fn op(&mut self, op: &Op, stages: &[u32], state: &mut State) {
        if self.is_before(op) {
            state.fill(Touched::default());
        }
        let channels = op.others.iter().filter_map(|place| channel_number(*place));
        match op.code.shape() {
            Shape::Fetch | Shape::Send => {
                for number in channels {
                    // What is filled was the newest so many fetches ago.
                    let (count, oldest) = (stages[number], 1 << (stages[number] - 1));
                    let touched = state[number];
                    if (touched.read | touched.written) & oldest != 0 {
                        self.barrier(op, state);
                    }
                    let all = (1u32 << count) - 1;
                    let channel = &mut state[number];
                    channel.read = channel.read << 1 & all;
                    channel.written = channel.written << 1 & all | 1;
                }
            }
            Shape::Mma => {
                let read: Vec<usize> = channels.collect();
                if read.iter().any(|number| state[*number].written & 1 != 0) {
                    self.barrier(op, state);
                }
                read.iter().for_each(|number| state[*number].read |= 1);
            }
            _ => {}
        }
    }

    fn barrier(&mut self, op: &Op, state: &mut State) {
        self.changed |= self.before.insert(address(op));
        state.fill(Touched::default());
    }
}

fn join(state: &mut State, other: &State) {
    for (own, other) in state.iter_mut().zip(other) {
        own.read |= other.read;
        own.written |= other.written;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(stages: u32, body: &str, expected: usize) {
        let text = format!(
            "vir 1
             kernel @k(@a: view<bf16, [?, ?], read>) at 0 tile(1) {{
               channel @x: bf16[16, 16] stages {stages}
               channel @y: bf16[16, 16] stages {stages}
               fragment @s: f32[16, 16]
               %z = const 0 : i64
               %n = const 9 : i64
               %o = const 1 : i64
               {body}
             }}"
        );
        let module = vm_ir::text::parse(&text).unwrap();
        let kernel = &module.kernels()[0];
        assert_eq!(
            Barriers::of(kernel, kernel.tile().unwrap()).before.len(),
            expected,
            "{stages} stages: {body}"
        );
    }

    #[test]
    fn as_few_as_needed() {
        let step = "fetch @a[%z, %z], @x\n mma @s, @x, @x\n release @x\n";
        check(1, step, 1);
        check(2, &step.repeat(3), 3);
        check(1, &step.repeat(2), 3);
        let in_loop = format!("for %k: i64 = %z to %n step %o {{\n{step}}}");
        check(1, &in_loop, 2);
        check(2, &in_loop, 1);
        // What the product of the iteration before read is overwritten by the second fetch.
        let two = "fetch @a[%z, %z], @x\n fetch @a[%z, %z], @x\n mma @s, @x, @x\n release @x\n release @x\n";
        check(2, two, 1);
        check(2, &format!("for %k: i64 = %z to %n step %o {{\n{two}}}"), 2);
        // The condition's product may be the last that is computed: what it read is not to be overwritten behind the loop.
        let condition = format!("{step} %again = eq %z, %n : bool\n yield %again\n");
        let body = step.replace("@x", "@y");
        check(1, &format!("while {{\n{condition}}} do {{\n{body}}}\n{step}"), 4);
    }
}
