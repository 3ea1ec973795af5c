//! Threads that go different ways to what all must come to.
//!
//! Where a barrier, a shuffle or a vote is in a part of a kernel that not all threads provably come to, all come to it as long as one has to:
//! an arm of a branch is what the block or the warp runs if any of its threads takes it, and a loop goes round as long as any of them does. Who
//! comes along does nothing to memory, answers no vote, and keeps what its registers held. So it is on a device whose threads of
//! a warp go together, and a barrier counts those that have ended as having come.

use super::Cx;
use super::control::{Next, selector};
use crate::ast::{Class, Instr, Ty};
use crate::cfg::{Block, End};
use crate::error::{Error, Result};
use crate::live;
use crate::structure::{Kind, Tree};
use vm_ir::Type;
use vm_ir::builder::Val;
use vm_ir::limits::MAX_CASES;

impl<'b> Cx<'_, 'b> {
    /// Does one of those that come to this part of the tree have that? The same for all that must come to it together.
    pub(super) fn any(&self, value: Val<'b>, tree: &Tree) -> Val<'b> {
        if !self.any_block(tree, Block::converges) {
            return value;
        }
        let (true, Some(exchange)) = (self.any_block(tree, Block::has_barrier), self.exchange) else {
            return value.any();
        };
        let element = || exchange.at([self.k.i32(0)]);
        self.k.if_(self.k.local_index().eq(0), || element().store(self.k.i32(0)));
        self.k.barrier();
        self.k.if_(value, || {
            element().atomic_add(self.k.i32(1));
        });
        element().load_uniform().ne(0)
    }

    /// A part of the tree that all come to, with something in it that they must come to together.
    pub(super) fn together(&self, tree: &Tree, next: Next<'b>) -> Next<'b> {
        let exits = &tree.exits[..];
        match &tree.kind {
            Kind::Guard(at, body) => {
                let here = self.goes_to(next, *at);
                let past = match next {
                    Next::Either(a, b, _) => Next::Known(if a == *at { b } else { a }),
                    other => other,
                };
                let registers = self.assigned([&**body], exits);
                let then = self.arm(here, body, &registers, exits);
                let other = self.region_apart(&registers, exits, || past);
                self.choose(&registers, exits, vec![(here, then)], other)
            }
            Kind::Loop(head, body) => self.repeat_together(*head, body, exits),
            Kind::Choice(at, arms) => {
                let block = &self.cfg.blocks[*at];
                let line = block.instrs.last().map_or(block.line, |instr| instr.line);
                self.k.at_line(line);
                self.line.set(line);
                let Some(conditions) = self.checked(self.conditions(&block.end, arms.len())) else {
                    return Next::Known(0);
                };
                let registers = self.assigned(arms, exits);
                let mut done = arms
                    .iter()
                    .zip(&conditions)
                    .map(|(arm, condition)| (*condition, self.arm(*condition, arm, &registers, exits)))
                    .collect::<Vec<_>>();
                let Some((_, last)) = done.pop() else { return Next::Known(0) };
                self.choose(&registers, exits, done, last)
            }
            _ => self.tree_after(tree, next),
        }
    }

    /// Which of the ways from the end of a block a thread takes.
    fn conditions(&self, end: &End, arms: usize) -> Result<Vec<Val<'b>>> {
        match end {
            End::Jump(_) => Ok(vec![self.k.bool(true)]),
            End::Branch(guard, ..) => {
                let value = self.register(guard.register)?;
                let (then, other) = if guard.negated { (!value, value) } else { (value, !value) };
                Ok(vec![then, other])
            }
            End::Switch(index, _) => {
                if arms > MAX_CASES {
                    return Err(Error::large(0, "labels in a list", MAX_CASES));
                }
                let index = self.get(index, Ty::new(Class::Unsigned, 32))?;
                let last = arms.saturating_sub(1);
                let mut all: Vec<Val<'b>> = (0..last).map(|case| index.eq(case as i32)).collect();
                all.push(index.ge_u(self.k.i32(last as i32)));
                Ok(all)
            }
        }
    }

    /// The values of a region that is none.
    fn region_apart(
        &self,
        registers: &[u32],
        exits: &[usize],
        fill: impl FnOnce() -> Next<'b>,
    ) -> Vec<Val<'b>> {
        let packed = self.region(registers, exits, fill);
        self.unpack(&packed, &self.types_of(registers, exits))
    }

    /// What those of a condition do; what it gives for the others is anything.
    fn arm(&self, condition: Val<'b>, tree: &Tree, registers: &[u32], exits: &[usize]) -> Vec<Val<'b>> {
        let end = Next::Known(self.cfg.exit());
        if let Kind::Goto(_) = tree.kind {
            return self.region_apart(registers, exits, || self.tree_after(tree, end));
        }
        let outside = self.active.get();
        let active = outside.map_or(condition, |outside| outside & condition);
        let some = self.any(active, tree);
        self.active.set(self.any_block(tree, Block::converges).then_some(active));
        let nobody = Next::Known(exits.first().copied().unwrap_or(self.cfg.exit()));
        let yielded = self.k.if_else(
            some,
            || self.region(registers, exits, || self.tree_after(tree, end)),
            || self.region(registers, exits, || nobody),
        );
        self.active.set(outside);
        self.unpack(&yielded, &self.types_of(registers, exits))
    }

    /// The registers hold what the arm of one's condition gave, or the last.
    fn choose(
        &self,
        registers: &[u32],
        exits: &[usize],
        arms: Vec<(Val<'b>, Vec<Val<'b>>)>,
        last: Vec<Val<'b>>,
    ) -> Next<'b> {
        let chosen = arms.into_iter().rev().fold(last, |others, (condition, values)| {
            values.iter().zip(&others).map(|(value, other)| condition.select(*value, *other)).collect()
        });
        self.take_unpacked(registers, exits, &chosen)
    }

    /// What nobody in it has to wait for, for those who don't just come along.
    pub(super) fn for_the_active(&self, active: Val<'b>, tree: &Tree, next: Next<'b>) -> Next<'b> {
        let (registers, exits) = (self.assigned([tree], &tree.exits), &tree.exits[..]);
        let nobody = Next::Known(exits.first().copied().unwrap_or(self.cfg.exit()));
        self.active.set(None);
        let yielded = self.k.if_else(
            active,
            || self.region(&registers, exits, || self.tree_after(tree, next)),
            || self.region(&registers, exits, || nobody),
        );
        self.active.set(Some(active));
        self.take(&registers, exits, &yielded)
    }

    /// A loop that goes round as long as one thread does.
    fn repeat_together(&self, head: usize, body: &Tree, exits: &[usize]) -> Next<'b> {
        let k = self.k;
        k.at_line(self.cfg.blocks[head].line);
        self.line.set(self.cfg.blocks[head].line);
        let mut read_at = exits.to_vec();
        read_at.push(head);
        let registers = self.assigned([body], &read_at);
        let mut types = vec![Type::BOOL];
        types.extend(self.types_of(&registers, exits));
        let outside = self.active.get();
        // Who goes round, where it leaves to, and what registers hold.
        let mut first = vec![outside.unwrap_or(k.bool(true))];
        first.extend(selector(exits).map(|ty| k.bits(ty, 0)));
        first.extend(registers.iter().filter_map(|register| self.checked(self.register(*register))));
        if self.failed() {
            return Next::Known(0);
        }
        // Whether any does comes first.
        let mut initial = vec![k.bool(true)];
        initial.extend(self.pack(first));
        let last = k.while_(
            initial,
            |carried| carried[0],
            |carried| {
                let mark = self.mark();
                let old = self.unpack(&carried[1..], &types);
                let Some((active, held)) = old.split_first() else { return carried };
                self.take_unpacked(&registers, exits, held);
                self.active.set(Some(*active));
                let mut again = *active;
                let new = self.region_apart(&registers, exits, || {
                    let next = self.tree_after(body, Next::Known(self.cfg.exit()));
                    again = *active & self.goes_to(next, head);
                    next
                });
                self.back_to(mark);
                let mut values = vec![again];
                values.extend(new.iter().zip(held).map(|(new, old)| active.select(*new, *old)));
                let mut carried = vec![self.any(again, body)];
                carried.extend(self.pack(values));
                carried
            },
        );
        self.active.set(outside);
        let values = self.unpack(&last[1..], &types);
        self.take_unpacked(&registers, exits, values.get(1..).unwrap_or(&[]))
    }

    /// An instruction that all come to, which does something for those alone whose predicate holds.
    pub(super) fn guarded_together(&self, instr: &Instr, condition: Val<'b>) -> Result<()> {
        let mut registers = Vec::new();
        live::registers(instr, true, &mut |register| registers.push(register));
        registers.dedup();
        let before = registers.iter().map(|r| self.register(*r)).collect::<Result<Vec<_>>>()?;
        let outside = self.active.get();
        self.active.set(Some(outside.map_or(condition, |outside| outside & condition)));
        let done = self.plain(instr);
        self.active.set(outside);
        done?;
        for (register, old) in registers.iter().zip(before) {
            let new = self.register(*register)?;
            self.put(*register, condition.select(new, old))?;
        }
        Ok(())
    }
}
