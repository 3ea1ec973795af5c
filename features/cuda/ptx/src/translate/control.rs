//! Regions.

use super::Cx;
use crate::ast::{Guard, Instr, Operand, Ty};
use crate::cfg::{Block, End};
use crate::error::{Error, Result};
use crate::limits::MAX_LOOKS;
use crate::live;
use crate::structure::{Kind, Tree};
use std::collections::BTreeSet;
use vm_ir::builder::Val;
use vm_ir::limits::{MAX_CARRIED, MAX_CASES};
use vm_ir::{Scalar, Type};

/// Where it goes on.
#[derive(Clone, Copy)]
pub(super) enum Next<'b> {
    /// At this block.
    Known(usize),
    /// At the first block where the bool is true, else at the second.
    Either(usize, usize, Val<'b>),
    /// At the block of this number, an i32.
    Number(Val<'b>),
}

/// Must an instruction not run where its predicate is false? Others run everywhere, and their results are selected.
fn must_be_skipped(instr: &Instr) -> bool {
    live::has_effect(instr) || instr.converges() || matches!(instr.opcode(), "ld" | "ldu")
}

impl<'b> Cx<'_, 'b> {
    /// The kernel.
    pub(super) fn body(&self, tree: &Tree) -> Result<()> {
        self.tree_after(tree, Next::Known(self.cfg.exit()));
        match self.state.borrow_mut().error.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// What stands in a region of its own.
    fn tree(&self, tree: &Tree) -> Next<'b> {
        let outside = (self.together.get(), self.converged.get());
        self.together.set(outside.0 && self.agree && self.any_block(tree, Block::has_barrier));
        self.converged.set(outside.1 && self.stay && self.any_block(tree, Block::converges));
        let next = self.tree_after(tree, Next::Known(self.cfg.exit()));
        self.together.set(outside.0);
        self.converged.set(outside.1);
        next
    }

    /// Does one of the blocks of a tree do that?
    pub(super) fn any_block(&self, tree: &Tree, does: fn(&Block) -> bool) -> bool {
        match &tree.kind {
            Kind::Block(at) => does(&self.cfg.blocks[*at]),
            Kind::Goto(_) => false,
            Kind::Seq(trees) | Kind::Choice(_, trees) => trees.iter().any(|tree| self.any_block(tree, does)),
            Kind::Guard(_, body) | Kind::Loop(_, body) => self.any_block(body, does),
        }
    }

    /// Does a tree go there?
    fn any_goto(&self, tree: &Tree, to: usize) -> bool {
        match &tree.kind {
            Kind::Block(at) => self.cfg.blocks[*at].end.targets().contains(&to),
            Kind::Goto(at) => *at == to,
            Kind::Seq(trees) | Kind::Choice(_, trees) => trees.iter().any(|tree| self.any_goto(tree, to)),
            Kind::Guard(_, body) | Kind::Loop(_, body) => self.any_goto(body, to),
        }
    }

    /// The register that says whether the thread has not ended.
    fn alive(&self) -> u32 {
        self.types.len() as u32 - 1
    }

    /// Whether the thread has not ended, where those that have come along.
    pub(super) fn living(&self) -> Option<Val<'b>> {
        if self.votes {
            return self.active.get();
        }
        let here = self.stay && self.converged.get();
        here.then(|| self.checked(self.register(self.alive()))).flatten()
    }

    /// What threads come to that have not ended: nothing in it needs the others.
    fn for_the_living(&self, living: Val<'b>, tree: &Tree, next: Next<'b>) -> Next<'b> {
        let (registers, exits) = (self.assigned([tree], &tree.exits), &tree.exits[..]);
        let some = Next::Known(exits.first().copied().unwrap_or(self.cfg.exit()));
        let yielded = self.k.if_else(
            living,
            || {
                self.region(&registers, exits, || {
                    self.converged.set(false);
                    let next = self.tree_after(tree, next);
                    self.converged.set(true);
                    next
                })
            },
            || self.region(&registers, exits, || some),
        );
        let next = self.take(&registers, exits, &yielded);
        // Those that ended in it come along from here.
        let end = self.cfg.exit();
        let others: Vec<usize> = exits.iter().copied().filter(|exit| *exit != end).collect();
        match others[..] {
            [only] if exits.len() == 2 && !self.no_way_out.get() => {
                self.checked(self.put(self.alive(), living & !self.goes_to(next, end)));
                Next::Known(only)
            }
            _ => next,
        }
    }

    /// Of two ways, of which threads end on the first: they come along on the other.
    fn stay(&self, ends: Val<'b>, ending: &Tree, other: &Tree) -> Next<'b> {
        let alive = self.alive();
        let Some(living) = self.checked(self.register(alive)) else { return Next::Known(0) };
        if !matches!(ending.kind, Kind::Goto(_)) {
            self.k.if_(living & ends, || {
                self.region(&[], &[], || self.tree(ending));
            });
        }
        self.checked(self.put(alive, living & !ends));
        self.tree_after(other, Next::Known(self.cfg.exit()))
    }

    /// A part of the tree, behind one that goes on at `next`.
    pub(super) fn tree_after(&self, tree: &Tree, next: Next<'b>) -> Next<'b> {
        if self.failed() {
            return next;
        }
        let structured = match (&tree.kind, next) {
            // What comes next is known: it is this, or it is not.
            (Kind::Guard(at, body), Next::Known(to)) => {
                return if to == *at { self.tree_after(body, next) } else { next };
            }
            (Kind::Choice(_, arms), _) => arms.iter().any(|arm| !matches!(arm.kind, Kind::Goto(_))),
            (Kind::Guard(..) | Kind::Loop(..), _) => true,
            _ => false,
        };
        if self.votes && structured {
            match (self.any_block(tree, Block::converges), self.active.get()) {
                (true, _) => return self.together(tree, next),
                (false, Some(active)) => return self.for_the_active(active, tree, next),
                (false, None) => {}
            }
        } else if let Some(living) = self.living().filter(|_| structured)
            && !self.any_block(tree, Block::converges)
            && self.ending(tree).is_none()
        {
            return self.for_the_living(living, tree, next);
        }
        match &tree.kind {
            Kind::Block(at) => {
                let block = &self.cfg.blocks[*at];
                block.instrs.iter().for_each(|instr| self.instr(instr));
                match block.end {
                    End::Jump(to) => Next::Known(to),
                    _ => next,
                }
            }
            Kind::Goto(to) => Next::Known(*to),
            Kind::Seq(parts) => parts.iter().fold(next, |next, part| self.tree_after(part, next)),
            Kind::Choice(at, arms) => self.choice(*at, arms, &tree.exits),
            Kind::Guard(at, body) => self.guard(*at, body, &tree.exits, next),
            Kind::Loop(head, body) => self.repeat(*head, body, &tree.exits),
        }
    }

    /// The registers that these assign and that are read at one of the blocks.
    pub(super) fn assigned<'t>(
        &self,
        trees: impl IntoIterator<Item = &'t Tree>,
        read_at: &[usize],
    ) -> Vec<u32> {
        let mut all = BTreeSet::new();
        let mut looks = 0;
        let mut left: Vec<&Tree> = trees.into_iter().collect();
        while let Some(tree) = left.pop() {
            match &tree.kind {
                Kind::Block(at) => {
                    looks += 1 + self.cfg.blocks[*at].instrs.len();
                    for instr in &self.cfg.blocks[*at].instrs {
                        live::registers(instr, true, &mut |register| {
                            if self.live.anywhere(register) {
                                all.insert(register);
                            }
                        });
                    }
                }
                Kind::Goto(_) => {}
                Kind::Seq(trees) | Kind::Choice(_, trees) => left.extend(trees),
                Kind::Guard(_, body) | Kind::Loop(_, body) => left.push(body),
            }
        }
        looks += all.len() * read_at.len();
        match self.looks.get().checked_sub(looks) {
            Some(left) => self.looks.set(left),
            None => {
                self.fail(Error::large(self.line.get(), "registers where regions begin and end", MAX_LOOKS))
            }
        }
        if self.failed() {
            return Vec::new();
        }
        let read = |register: &u32| read_at.iter().any(|block| self.live.at(*block, *register));
        let alive = self.stay.then(|| self.alive());
        all.into_iter().filter(read).chain(alive).collect()
    }

    /// Runs `fill`, and gives what the registers hold then and where it goes on, as a region yields them; the registers then hold
    /// what they did before.
    pub(super) fn region(
        &self,
        registers: &[u32],
        exits: &[usize],
        fill: impl FnOnce() -> Next<'b>,
    ) -> Vec<Val<'b>> {
        let mark = self.mark();
        let next = fill();
        let mut values: Vec<Val<'b>> = self.encode(next, exits).into_iter().collect();
        values.extend(registers.iter().filter_map(|register| self.checked(self.register(*register))));
        self.back_to(mark);
        self.pack(values)
    }

    /// The registers hold what a region yielded.
    pub(super) fn take(&self, registers: &[u32], exits: &[usize], yielded: &[Val<'b>]) -> Next<'b> {
        let values = self.unpack(yielded, &self.types_of(registers, exits));
        self.take_unpacked(registers, exits, &values)
    }

    /// The types of what a region yields.
    pub(super) fn types_of(&self, registers: &[u32], exits: &[usize]) -> Vec<Type> {
        let types = registers.iter().filter_map(|register| self.checked(self.register_type(*register)));
        selector(exits).into_iter().chain(types).collect()
    }

    pub(super) fn take_unpacked(&self, registers: &[u32], exits: &[usize], values: &[Val<'b>]) -> Next<'b> {
        let (first, rest) = values.split_at(usize::from(exits.len() > 1).min(values.len()));
        for (register, value) in registers.iter().zip(rest) {
            self.checked(self.put(*register, *value));
        }
        match (exits, first) {
            ([a, b], [value]) => Next::Either(*a, *b, *value),
            (_, [value]) => Next::Number(*value),
            ([only], _) => Next::Known(*only),
            _ => Next::Known(self.cfg.exit()),
        }
    }

    pub(super) fn checked<T>(&self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.fail(error.of(self.line.get(), ""))).ok()
    }

    /// Where it goes on as a value: nothing if it is one place anyway, a bool for two, else an i32.
    fn encode(&self, next: Next<'b>, exits: &[usize]) -> Option<Val<'b>> {
        let k = self.k;
        Some(match (exits, next) {
            ([] | [_], _) => return None,
            ([a, _], Next::Known(to)) => k.bool(to == *a),
            ([a, b], Next::Either(x, y, value)) if (x, y) == (*a, *b) => value,
            ([a, b], Next::Either(x, y, value)) if (x, y) == (*b, *a) => !value,
            // One of the two is none of the exits.
            ([a, b], Next::Either(x, y, _)) => k.bool(if [*a, *b].contains(&x) { x == *a } else { y == *a }),
            ([a, _], Next::Number(value)) => value.eq(*a as i32),
            (_, Next::Known(to)) => k.i32(to as i32),
            (_, Next::Either(x, y, value)) => value.select(k.i32(x as i32), k.i32(y as i32)),
            (_, Next::Number(value)) => value,
        })
    }

    /// Does it go on there?
    pub(super) fn goes_to(&self, next: Next<'b>, at: usize) -> Val<'b> {
        match next {
            Next::Known(to) => self.k.bool(to == at),
            Next::Either(a, _, value) if a == at => value,
            Next::Either(_, b, value) if b == at => !value,
            Next::Either(..) => self.k.bool(false),
            Next::Number(value) => value.eq(at as i32),
        }
    }

    fn choice(&self, at: usize, arms: &[Tree], exits: &[usize]) -> Next<'b> {
        let block = &self.cfg.blocks[at];
        let line = block.instrs.last().map_or(block.line, |instr| instr.line);
        self.k.at_line(line);
        self.line.set(line);
        let registers = self.assigned(arms, exits);
        match (&block.end, arms) {
            (End::Branch(guard, ..), [then, other]) => {
                let Some(value) = self.checked(self.register(guard.register)) else { return Next::Known(0) };
                let (first, second) = if guard.negated { (other, then) } else { (then, other) };
                if let (true, Some(at)) =
                    (self.stay && self.living().is_some(), self.ending_arm(first, second))
                {
                    return match at {
                        0 => self.stay(value, first, second),
                        _ => self.stay(!value, second, first),
                    };
                }
                if let (Kind::Goto(a), Kind::Goto(b)) = (&first.kind, &second.kind) {
                    return Next::Either(*a, *b, value);
                }
                // Each arm goes to one place: the predicate says which.
                let by_predicate = match (&first.exits[..], &second.exits[..]) {
                    ([a], [b]) if a != b => Some(Next::Either(*a, *b, value)),
                    _ => None,
                };
                let told = if by_predicate.is_some() { &exits[..1] } else { exits };
                let yielded = self.k.if_else(
                    value,
                    || self.region(&registers, told, || self.tree(first)),
                    || self.region(&registers, told, || self.tree(second)),
                );
                let next = self.take(&registers, told, &yielded);
                by_predicate.unwrap_or(next)
            }
            (End::Switch(index, _), arms) => {
                if arms.len() > MAX_CASES {
                    self.fail(Error::large(line, "labels in a list", MAX_CASES));
                    return Next::Known(0);
                }
                let Some(index) = self.checked(self.get(index, Ty::new(crate::ast::Class::Unsigned, 32)))
                else {
                    return Next::Known(0);
                };
                let Some((last, cases)) = arms.split_last() else { return Next::Known(0) };
                let mut switch = self.k.switch(index);
                for (case, arm) in cases.iter().enumerate() {
                    switch = switch.case(case as i64, || self.region(&registers, exits, || self.tree(arm)));
                }
                let yielded = switch.default(|| self.region(&registers, exits, || self.tree(last)));
                self.take(&registers, exits, &yielded)
            }
            _ => Next::Known(0),
        }
    }

    /// Which of two ways ends the thread, without others that it would have to wait for. There must be one that does not.
    fn ending_arm(&self, first: &Tree, second: &Tree) -> Option<usize> {
        let ends = |tree: &Tree| tree.exits == [self.cfg.exit()] && !self.any_block(tree, Block::converges);
        match (ends(first), ends(second)) {
            _ if self.no_way_out.get() => None,
            (true, false) => Some(0),
            (false, true) => Some(1),
            _ => None,
        }
    }

    /// The same of a part of the tree that chooses between two.
    fn ending(&self, tree: &Tree) -> Option<usize> {
        match &tree.kind {
            Kind::Choice(_, arms) => match &arms[..] {
                [first, second] => self.ending_arm(first, second),
                _ => None,
            },
            _ => None,
        }
    }

    fn guard(&self, at: usize, body: &Tree, exits: &[usize], next: Next<'b>) -> Next<'b> {
        let registers = self.assigned([body], exits);
        let here = self.goes_to(next, at);
        let past = match next {
            Next::Either(a, b, _) => Next::Known(if a == at { b } else { a }),
            other => other,
        };
        let yielded = self.k.if_else(
            here,
            || self.region(&registers, exits, || self.tree(body)),
            || self.region(&registers, exits, || past),
        );
        self.take(&registers, exits, &yielded)
    }

    fn repeat(&self, head: usize, body: &Tree, exits: &[usize]) -> Next<'b> {
        let k = self.k;
        k.at_line(self.cfg.blocks[head].line);
        self.line.set(self.cfg.blocks[head].line);
        let no_way_out = self.no_way_out.replace(exits.iter().all(|exit| *exit == self.cfg.exit()));
        let mut read_at = exits.to_vec();
        read_at.push(head);
        let registers = self.assigned([body], &read_at);
        let ends = !exits.is_empty();
        let selector = selector(exits).map(|ty| k.bits(ty, 0));
        let held = registers.iter().filter_map(|register| self.checked(self.register(*register)));
        let first: Vec<Val<'b>> = selector.into_iter().chain(held).collect();
        let mut initial: Vec<Val<'b>> = self.pack(first);
        if self.failed() {
            return Next::Known(0);
        }
        // Whether it goes round again comes first. Threads that ended would come along into a loop that none of the others reaches,
        // and nothing would end it.
        let living = if self.stay { self.living() } else { None };
        initial.insert(0, living.map_or(k.bool(true), |living| self.any(living, body)));
        let ends_inside = living.is_some() && self.any_goto(body, self.cfg.exit());
        let last = k.while_(
            initial,
            |carried| match ends {
                true => carried[0],
                false => k.bool(true),
            },
            |carried| {
                let mark = self.mark();
                self.take(&registers, exits, &carried[1..]);
                let mut again = None;
                let mut values = self.region(&registers, exits, || {
                    let next = self.tree(body);
                    let mut goes_on = self.goes_to(next, head);
                    if let Some(living) = self.living().filter(|_| ends_inside) {
                        goes_on = goes_on & self.any(living, body);
                    }
                    again = Some(goes_on);
                    next
                });
                self.back_to(mark);
                values.insert(0, again.unwrap_or(carried[0]));
                values
            },
        );
        self.no_way_out.set(no_way_out);
        self.take(&registers, exits, &last[1..])
    }

    /// As few values as regions can yield and loops carry: more go in vectors.
    pub(super) fn pack(&self, values: Vec<Val<'b>>) -> Vec<Val<'b>> {
        if values.len() < MAX_CARRIED {
            return values;
        }
        let types: Vec<Type> = values.iter().map(|v| v.ty()).collect();
        let groups = groups(&types);
        groups
            .iter()
            .map(|group| match group[..] {
                [one] => values[one],
                _ => {
                    let mut lanes: Vec<Val<'b>> = group.iter().map(|at| values[*at]).collect();
                    let last = lanes[lanes.len() - 1];
                    lanes.resize(lanes.len().next_power_of_two(), last);
                    self.k.vector(&lanes)
                }
            })
            .collect()
    }

    pub(super) fn unpack(&self, packed: &[Val<'b>], types: &[Type]) -> Vec<Val<'b>> {
        if types.len() < MAX_CARRIED {
            return packed.to_vec();
        }
        let mut values: Vec<Option<Val<'b>>> = vec![None; types.len()];
        for (group, value) in groups(types).iter().zip(packed) {
            for (lane, at) in group.iter().enumerate() {
                values[*at] = Some(if group.len() == 1 { *value } else { value.lane(lane as u8) });
            }
        }
        values.into_iter().flatten().collect()
    }

    /// An instruction that may have a predicate.
    pub(super) fn guarded(&self, instr: &Instr) -> Result<()> {
        let effect = must_be_skipped(instr);
        // What a thread that has ended may not do, though it comes along.
        let living = self
            .living()
            .filter(|_| effect && !instr.converges() && !instr.reads_parameter() && !self.agrees(instr));
        let guard = match instr.guard {
            Some(Guard { register, negated }) => {
                let value = self.register(register)?;
                Some(if negated { !value } else { value })
            }
            None => None,
        };
        if let (true, true, Some(guard)) = (self.votes, instr.converges(), guard) {
            return self.guarded_together(instr, guard);
        }
        let condition = match (guard, living) {
            (Some(guard), Some(living)) => guard & living,
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => return self.plain(instr),
        };
        let mut registers = Vec::new();
        live::registers(instr, true, &mut |register| registers.push(register));
        registers.dedup();
        if effect {
            let mut result = Ok(());
            let yielded = self.k.if_else(
                condition,
                || {
                    self.region(&registers, &[], || {
                        result = self.plain(instr);
                        Next::Known(0)
                    })
                },
                || self.region(&registers, &[], || Next::Known(0)),
            );
            self.take(&registers, &[], &yielded);
            return result;
        }
        let before = registers.iter().map(|r| self.register(*r)).collect::<Result<Vec<_>>>()?;
        self.plain(instr)?;
        for (register, old) in registers.iter().zip(before) {
            let new = self.register(*register)?;
            self.put(*register, condition.select(new, old))?;
        }
        Ok(())
    }

    pub(super) fn plain(&self, instr: &Instr) -> Result<()> {
        super::table::translate(self, instr)
    }

    /// The registers of an operand that may be a list.
    pub(super) fn list<'o>(&self, operand: &'o Operand) -> &'o [Operand] {
        match operand {
            Operand::Vector(list) => list,
            one => std::slice::from_ref(one),
        }
    }
}

/// The type of the value that says where it goes on.
pub(super) fn selector(exits: &[usize]) -> Option<Type> {
    match exits.len() {
        0 | 1 => None,
        2 => Some(Type::BOOL),
        _ => Some(Type::I32),
    }
}

/// Values of one type by up to 16, each by its number.
fn groups(types: &[Type]) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    for scalar in [Scalar::Bool, Scalar::I8, Scalar::I16, Scalar::I32, Scalar::I64, Scalar::F32, Scalar::F64]
    {
        let members: Vec<usize> = (0..types.len()).filter(|at| types[*at].scalar() == scalar).collect();
        all.extend(members.chunks(16).map(<[usize]>::to_vec));
    }
    all
}
