//! Jumps to regions.
//!
//! This is Ramsey's translation by the dominator tree ("Beyond Relooper: Recursive Translation of Unstructured Control Flow to
//! Structured Control Flow", ICFP 2022), for regions without `break`: loops are taken out innermost first (each strongly
//! connected component becomes one node), so what is left has no cycles. Code that several jumps lead to follows behind what
//! dominates it, earliest first, instead of in each of them. Where a part of the tree may be left to more than one place, which
//! one it is becomes a value, and what follows looks at it.

use crate::cfg::{Cfg, End};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{MAX_DEPTH, MAX_EXITS};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};

/// A part of the structured kernel, and the blocks at which it may go on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tree {
    pub(crate) kind: Kind,
    /// Sorted.
    pub(crate) exits: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// The instructions of a block.
    Block(usize),
    /// Nothing; it goes on there.
    Goto(usize),
    /// One behind the other; all but the last have one exit, or what follows is a `Guard`.
    Seq(Vec<Tree>),
    /// What the end of a block chooses: as many as it has targets.
    Choice(usize, Vec<Tree>),
    /// If what came before goes on at this block, this is what is there; else nothing.
    Guard(usize, Box<Tree>),
    /// Again as long as it goes on at this block, where it begins.
    Loop(usize, Box<Tree>),
}

/// Puts a kernel into regions, conditions in conditions up to a number in each loop; further ones follow each other, which takes more
/// tests. With `tails`, loops contain the ends of threads that leave them.
pub(crate) fn structure(cfg: &Cfg, nesting: usize, tails: bool) -> Result<Tree> {
    let all: Vec<usize> = (0..cfg.blocks.len()).collect();
    let budget = Budget { left: Cell::new(MAX_EXITS), nesting, tails };
    Region::of(cfg, &all, 0, None, 1, &budget)?.tree(0, 1)
}

/// Blocks without cycles among them: those of a loop are one node.
struct Region<'a> {
    cfg: &'a Cfg,
    nodes: Vec<Node>,
    /// The node of each block that a node begins with.
    heads: HashMap<usize, usize>,
    /// By node: what dominates it.
    parents: Vec<Option<usize>>,
    budget: &'a Budget,
}

/// What all regions of a kernel share.
struct Budget {
    /// How many more exits there may be.
    left: Cell<usize>,
    /// How deep conditions may be nested.
    nesting: usize,
    /// Do loops contain the ends of threads that leave them?
    tails: bool,
}

struct Node {
    head: usize,
    /// If it is a loop: what one iteration does.
    body: Option<Tree>,
    /// Children in the dominator tree that several jumps lead to, in the order in which they can be reached.
    merges: Vec<usize>,
    /// Do several jumps lead to it?
    merged: bool,
}

impl<'a> Region<'a> {
    /// Of these blocks, entered at `entry`; jumps to `back` leave it.
    fn of(
        cfg: &'a Cfg,
        blocks: &[usize],
        entry: usize,
        back: Option<usize>,
        depth: usize,
        budget: &'a Budget,
    ) -> Result<Region<'a>> {
        if depth > MAX_DEPTH {
            let line = cfg.blocks[entry].line;
            return Err(Error::large(line, "loops in loops", MAX_DEPTH));
        }
        let local: HashMap<usize, usize> = blocks.iter().enumerate().map(|(i, b)| (*b, i)).collect();
        let succs: Vec<Vec<usize>> = blocks
            .iter()
            .map(|block| {
                let targets = cfg.blocks[*block].end.targets().into_iter().filter(|to| Some(*to) != back);
                targets.filter_map(|to| local.get(&to).copied()).collect()
            })
            .collect();
        let mut components = components(&succs);
        let mut component_of = vec![0; blocks.len()];
        for (number, members) in components.iter().enumerate() {
            members.iter().for_each(|m| component_of[*m] = number);
        }
        if budget.tails {
            // What ends the thread is in the loop from which it alone is come to.
            let mut jumps = vec![0; blocks.len()];
            succs.iter().flatten().for_each(|to| jumps[*to] += 1);
            for (from, targets) in succs.iter().enumerate() {
                let of_loop = component_of[from];
                let repeats = components[of_loop].len() > 1 || targets.contains(&from);
                for to in targets
                    .iter()
                    .copied()
                    .filter(|to| repeats && jumps[*to] == 1 && cfg.is_tail(blocks[*to]))
                {
                    components[component_of[to]].clear();
                    components[of_loop].push(to);
                    component_of[to] = of_loop;
                }
            }
        }
        // Jumps from component to component.
        let mut heads_of: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); components.len()];
        heads_of[component_of[local[&entry]]].insert(entry);
        for (from, targets) in succs.iter().enumerate() {
            for to in targets {
                if component_of[from] != component_of[*to] {
                    heads_of[component_of[*to]].insert(blocks[*to]);
                }
            }
        }
        let mut region =
            Region { cfg, nodes: Vec::new(), heads: HashMap::new(), parents: Vec::new(), budget };
        let mut nodes_succs = Vec::new();
        // Components come last first.
        for (number, members) in components.iter().enumerate().rev() {
            if members.is_empty() {
                continue;
            }
            let heads: Vec<usize> = heads_of[number].iter().copied().collect();
            let head = heads[0];
            if let Some(second) = heads.get(1) {
                let (first, second) = (cfg.blocks[head].line, cfg.blocks[*second].line);
                return Err(Error::at(first, ErrorKind::Irreducible { first, second }));
            }
            let repeats = members.len() > 1 || succs[members[0]].contains(&members[0]);
            let body = match repeats {
                false => None,
                true => {
                    let inside: Vec<usize> = members.iter().map(|m| blocks[*m]).collect();
                    let body = Region::of(cfg, &inside, head, Some(head), depth + 1, budget)?;
                    Some(body.tree(head, 1)?)
                }
            };
            let targets = match &body {
                Some(body) => body.exits.iter().copied().filter(|to| *to != head).collect(),
                None => cfg.blocks[head].end.targets(),
            };
            region.heads.insert(head, region.nodes.len());
            region.nodes.push(Node { head, body, merges: Vec::new(), merged: false });
            nodes_succs.push(targets);
        }
        region.dominate(&nodes_succs, back);
        Ok(region)
    }

    /// Finds what dominates each node; nodes are in an order in which jumps go forwards.
    fn dominate(&mut self, succs: &[Vec<usize>], back: Option<usize>) {
        let count = self.nodes.len();
        let mut parent: Vec<Option<usize>> = vec![None; count];
        let mut entries = vec![0; count];
        for (from, succs) in succs.iter().enumerate().take(count) {
            for to in succs.iter().filter(|to| Some(**to) != back) {
                let Some(to) = self.heads.get(to).copied() else { continue };
                entries[to] += 1;
                parent[to] = Some(match parent[to] {
                    None => from,
                    Some(mut known) => {
                        let mut other = from;
                        while known != other {
                            // Parents have lower numbers; the first node has none, and is above all.
                            let lower = if known > other { &mut known } else { &mut other };
                            *lower = parent[*lower].unwrap_or(0);
                        }
                        known
                    }
                });
            }
        }
        self.parents = parent.clone();
        for node in 1..count {
            if entries[node] > 1 {
                self.nodes[node].merged = true;
                if let Some(parent) = parent[node] {
                    self.nodes[parent].merges.push(node);
                }
            }
        }
    }

    /// What begins at a block, up to where it is left.
    fn tree(&self, first: usize, depth: usize) -> Result<Tree> {
        if depth > self.budget.nesting {
            return self.flat(first);
        }
        let mut parts = Vec::new();
        let mut exits = BTreeSet::new();
        // Merges that are still to come, the next one last.
        let mut pending: Vec<usize> = Vec::new();
        let mut at = Some(self.heads[&first]);
        while let Some(number) = at.take() {
            let node = &self.nodes[number];
            pending.extend(node.merges.iter().rev());
            match &node.body {
                Some(body) => {
                    let outside: Vec<usize> =
                        body.exits.iter().copied().filter(|to| *to != node.head).collect();
                    parts.push(Tree {
                        kind: Kind::Loop(node.head, Box::new(body.clone())),
                        exits: outside.clone(),
                    });
                    // Where the loop is left to one place alone, that is next.
                    match outside[..] {
                        [only] if self.follows(only) => {
                            at = self.heads.get(&only).copied();
                            continue;
                        }
                        _ => {}
                    }
                    let follow = outside.iter().filter(|to| self.follows(**to));
                    exits.extend(outside.iter().copied());
                    for to in follow {
                        let body = self.tree(*to, depth + 1)?;
                        exits.remove(to);
                        exits.extend(&body.exits);
                        self.spend(exits.len(), *to)?;
                        let exits = exits.iter().copied().collect();
                        parts.push(Tree { kind: Kind::Guard(*to, Box::new(body)), exits });
                    }
                }
                None => {
                    parts.push(Tree { kind: Kind::Block(node.head), exits: vec![node.head] });
                    let end = &self.cfg.blocks[node.head].end;
                    if let End::Jump(to) = end {
                        if self.follows(*to) {
                            at = self.heads.get(to).copied();
                            continue;
                        }
                        exits.insert(*to);
                    } else {
                        let mut arms = Vec::new();
                        let mut of_choice = BTreeSet::new();
                        for to in end.targets() {
                            let arm = match self.follows(to) {
                                true => self.tree(to, depth + 1)?,
                                false => Tree { kind: Kind::Goto(to), exits: vec![to] },
                            };
                            of_choice.extend(&arm.exits);
                            arms.push(arm);
                        }
                        let of_choice: Vec<usize> = of_choice.into_iter().collect();
                        exits.extend(&of_choice);
                        parts.push(Tree { kind: Kind::Choice(node.head, arms), exits: of_choice });
                    }
                }
            }
            while let Some(merge) = pending.pop() {
                let head = self.nodes[merge].head;
                if exits.len() == 1 && exits.contains(&head) {
                    exits.clear();
                    at = Some(merge);
                    break;
                }
                if exits.remove(&head) {
                    let body = self.tree(head, depth + 1)?;
                    exits.extend(&body.exits);
                    self.spend(exits.len(), head)?;
                    let exits = exits.iter().copied().collect();
                    parts.push(Tree { kind: Kind::Guard(head, Box::new(body)), exits });
                }
            }
        }
        self.spend(exits.len(), first)?;
        let exits = exits.into_iter().collect();
        Ok(Tree { kind: Kind::Seq(parts), exits })
    }

    /// Counts exits, of what is at a block.
    fn spend(&self, exits: usize, at: usize) -> Result<()> {
        let left = self.budget.left.get().checked_sub(exits);
        let line = self.cfg.blocks.get(at).map_or(0, |block| block.line);
        self.budget.left.set(left.ok_or_else(|| Error::large(line, "jumps across regions", MAX_EXITS))?);
        Ok(())
    }

    /// The same, with no more nesting than a test of each node whether it is the next.
    fn flat(&self, first: usize) -> Result<Tree> {
        let first = self.heads[&first];
        let mut parts = Vec::new();
        let mut exits = BTreeSet::from([self.nodes[first].head]);
        let mut below = vec![false; self.nodes.len()];
        below[first] = true;
        for (at, node) in self.nodes.iter().enumerate().skip(first) {
            below[at] |= self.parents[at].is_some_and(|parent| below[parent]);
            if !below[at] || !exits.contains(&node.head) {
                continue;
            }
            let known = exits.len() == 1;
            exits.remove(&node.head);
            let mut own = Vec::new();
            match &node.body {
                Some(body) => {
                    let outside: Vec<usize> =
                        body.exits.iter().copied().filter(|to| *to != node.head).collect();
                    exits.extend(&outside);
                    own.push(Tree { kind: Kind::Loop(node.head, Box::new(body.clone())), exits: outside });
                }
                None => {
                    own.push(Tree { kind: Kind::Block(node.head), exits: vec![node.head] });
                    let targets = self.cfg.blocks[node.head].end.targets();
                    exits.extend(&targets);
                    if targets.len() > 1 {
                        let arms = targets.iter().map(|to| Tree { kind: Kind::Goto(*to), exits: vec![*to] });
                        let kind = Kind::Choice(node.head, arms.collect());
                        own.push(Tree { kind, exits: BTreeSet::from_iter(targets).into_iter().collect() });
                    }
                }
            }
            self.spend(exits.len() + self.nodes.len() / 64, node.head)?;
            if known {
                parts.append(&mut own);
            } else {
                let of_own = own.last().map(|tree| tree.exits.clone()).unwrap_or_default();
                let of_own = match self.cfg.blocks[node.head].end {
                    End::Jump(to) if node.body.is_none() => vec![to],
                    _ => of_own,
                };
                let body = Tree { kind: Kind::Seq(own), exits: of_own };
                let exits = exits.iter().copied().collect();
                parts.push(Tree { kind: Kind::Guard(node.head, Box::new(body)), exits });
            }
        }
        let exits = exits.into_iter().collect();
        Ok(Tree { kind: Kind::Seq(parts), exits })
    }

    /// Is it a node of this region to which one jump alone leads, so that it stands where that jump is?
    fn follows(&self, block: usize) -> bool {
        self.heads.get(&block).is_some_and(|node| *node != 0 && !self.nodes[*node].merged)
    }
}

/// Strongly connected components (Tarjan's algorithm), in an order in which jumps go backwards.
fn components(succs: &[Vec<usize>]) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let count = succs.len();
    let (mut index, mut low) = (vec![NEW; count], vec![0; count]);
    let (mut on_stack, mut stack) = (vec![false; count], Vec::new());
    let (mut found, mut next) = (Vec::new(), 0);
    for root in 0..count {
        if index[root] != NEW {
            continue;
        }
        let mut work = vec![(root, 0)];
        while let Some((node, edge)) = work.pop() {
            if edge == 0 {
                index[node] = next;
                low[node] = next;
                next += 1;
                stack.push(node);
                on_stack[node] = true;
            }
            if let Some(to) = succs[node].get(edge).copied() {
                work.push((node, edge + 1));
                if index[to] == NEW {
                    work.push((to, 0));
                } else if on_stack[to] {
                    low[node] = low[node].min(index[to]);
                }
                continue;
            }
            if let Some((parent, _)) = work.last() {
                low[*parent] = low[*parent].min(low[node]);
            }
            if low[node] == index[node] {
                let mut members = Vec::new();
                while let Some(member) = stack.pop() {
                    on_stack[member] = false;
                    members.push(member);
                    if member == node {
                        break;
                    }
                }
                found.push(members);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ast::{Guard, Instr, Operand};
    use crate::cfg::Block;

    /// Where a walk ends that does not end by itself.
    const STEPS: usize = 200;

    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) as usize) % bound
        }
    }

    /// Which way the walk turns at its nth step.
    fn turn(seed: u64, step: usize, ways: usize) -> usize {
        Random(seed ^ (step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).below(ways)
    }

    fn cfg(succs: &[Vec<usize>]) -> Cfg {
        let end = |targets: &[usize]| match *targets {
            [] => End::Jump(succs.len()),
            [to] => End::Jump(to),
            [then, other] => End::Branch(Guard { register: 0, negated: false }, then, other),
            _ => End::Switch(Operand::Register(0), targets.to_vec()),
        };
        // Some blocks do nothing, so that who jumps there may go on.
        let nop =
            || Instr { line: 1, span: (0, 0), guard: None, code: "membar.cta".into(), operands: Vec::new() };
        let instrs = |at: usize| if at % 4 == 3 { Vec::new() } else { vec![nop()] };
        let blocks = succs.iter().enumerate();
        Cfg {
            blocks: blocks
                .map(|(at, targets)| Block { instrs: instrs(at), end: end(targets), line: 1 })
                .collect(),
        }
    }

    fn walk(cfg: &Cfg, seed: u64) -> Vec<usize> {
        let (mut at, mut trace) = (0, Vec::new());
        while at != cfg.exit() && trace.len() < STEPS {
            trace.push(at);
            let targets = cfg.blocks[at].end.targets();
            at = targets[turn(seed, trace.len(), targets.len())];
        }
        trace
    }

    /// The same through regions; gives where it goes on.
    fn run(cfg: &Cfg, tree: &Tree, seed: u64, next: usize, trace: &mut Vec<usize>) -> usize {
        if trace.len() >= STEPS {
            return next;
        }
        let next = match &tree.kind {
            Kind::Block(at) => {
                trace.push(*at);
                match cfg.blocks[*at].end {
                    End::Jump(to) => return to,
                    _ => return next,
                }
            }
            Kind::Goto(to) => *to,
            Kind::Seq(parts) => parts.iter().fold(next, |next, part| run(cfg, part, seed, next, trace)),
            Kind::Choice(_, arms) => run(cfg, &arms[turn(seed, trace.len(), arms.len())], seed, next, trace),
            Kind::Guard(at, body) if next == *at => run(cfg, body, seed, next, trace),
            Kind::Guard(..) => next,
            Kind::Loop(head, body) => {
                let mut next = *head;
                while next == *head && trace.len() < STEPS {
                    next = run(cfg, body, seed, next, trace);
                }
                next
            }
        };
        assert!(trace.len() >= STEPS || tree.exits.contains(&next), "{next} is none of {tree:?}");
        next
    }

    fn check(succs: &[Vec<usize>]) -> bool {
        [(usize::MAX, false), (3, false), (0, false), (9, true)]
            .iter()
            .all(|(nesting, tails)| check_nested(succs, *nesting, *tails))
    }

    fn check_nested(succs: &[Vec<usize>], nesting: usize, tails: bool) -> bool {
        let cfg = if tails { cfg(succs).with_tails() } else { cfg(succs) };
        let tree = match structure(&cfg, nesting, tails) {
            Ok(tree) => tree,
            Err(error) => {
                assert!(
                    matches!(error.kind, ErrorKind::Irreducible { .. } | ErrorKind::TooLarge { .. }),
                    "{error}"
                );
                return false;
            }
        };
        for seed in 0..8 {
            let mut trace = Vec::new();
            run(&cfg, &tree, seed, 0, &mut trace);
            assert_eq!(trace, walk(&cfg, seed), "{succs:?}\n{tree:#?}");
        }
        true
    }

    /// A graph that is reducible, as it is grown by the reverse of what reduces it: nodes get loops to themselves, and are split.
    fn reducible(random: &mut Random, size: usize) -> Vec<Vec<usize>> {
        let mut succs: Vec<Vec<usize>> = vec![Vec::new()];
        while succs.len() < size {
            let node = random.below(succs.len());
            if random.below(4) == 0 && succs[node].len() < 3 && !succs[node].contains(&node) {
                succs[node].push(node);
                continue;
            }
            let new = succs.len();
            let (mut first, mut second) = (vec![new], Vec::new());
            for to in std::mem::take(&mut succs[node]) {
                match random.below(3) {
                    0 => first.push(to),
                    1 => second.push(to),
                    _ => {
                        first.push(to);
                        second.push(to);
                    }
                }
            }
            if random.below(2) == 0 {
                first.rotate_left(1);
            }
            succs[node] = first;
            succs.push(second);
        }
        succs
    }

    #[test]
    fn the_same_way() {
        let mut random = Random(7);
        let mut structured = 0;
        for round in 0..3000 {
            let succs = reducible(&mut random, 2 + round % 30);
            structured += usize::from(check(&Cfg::reachable(cfg(&succs)).succs()));
        }
        assert_eq!(structured, 3000);
    }

    #[test]
    fn any_graph() {
        let mut random = Random(11);
        let (mut structured, mut refused) = (0, 0);
        for _ in 0..3000 {
            let size = 2 + random.below(8);
            let succs: Vec<Vec<usize>> = (0..size)
                .map(|_| (0..random.below(3)).map(|_| 1 + random.below(size - 1)).collect::<BTreeSet<_>>())
                .map(|targets| targets.into_iter().collect())
                .collect();
            match check(&Cfg::reachable(cfg(&succs)).succs()) {
                true => structured += 1,
                false => refused += 1,
            }
        }
        assert!(structured > 1000 && refused > 20, "{structured} {refused}");
    }

    #[test]
    fn two_entries() {
        assert!(!check(&[vec![1, 2], vec![2, 3], vec![1], vec![]]));
    }
}
