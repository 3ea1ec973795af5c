//! Basic blocks.

use crate::ast::{Guard, Instr, Operand};
use crate::error::{Error, Result};
use crate::inline::{Code, Step};
use crate::limits::{MAX_BLOCKS, MAX_HOPS, MAX_TAIL, MAX_TAILS};

/// How a block ends. Blocks have numbers; the end of the thread is [`Cfg::exit`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    Jump(usize),
    /// Where it goes if the predicate is as it must be, and where else.
    Branch(Guard, usize, usize),
    /// By the number in an operand; the last also beyond.
    Switch(Operand, Vec<usize>),
}

impl End {
    pub(crate) fn targets(&self) -> Vec<usize> {
        match self {
            End::Jump(to) => vec![*to],
            End::Branch(_, then, other) => vec![*then, *other],
            End::Switch(_, targets) => targets.clone(),
        }
    }

    fn map(&mut self, new: impl Fn(usize) -> usize) {
        match self {
            End::Jump(to) => *to = new(*to),
            End::Branch(_, then, other) => (*then, *other) = (new(*then), new(*other)),
            End::Switch(_, targets) => targets.iter_mut().for_each(|to| *to = new(*to)),
        }
    }
}

/// Instructions without a branch among them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) instrs: Vec<Instr>,
    pub(crate) end: End,
    /// Where it is in the text.
    pub(crate) line: u32,
}

impl Block {
    /// Does it wait for all threads of the block?
    pub(crate) fn has_barrier(&self) -> bool {
        self.instrs.iter().any(|instr| instr.is_barrier() && instr.modifiers().next() != Some("warp"))
    }

    /// Must all threads of the block or the warp come to it?
    pub(crate) fn converges(&self) -> bool {
        self.instrs.iter().any(Instr::converges)
    }
}

/// The blocks of a kernel that can be reached, the first of them first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cfg {
    pub(crate) blocks: Vec<Block>,
}

impl Cfg {
    /// The number that stands for the end.
    pub(crate) fn exit(&self) -> usize {
        self.blocks.len()
    }

    /// With barriers of warps that end a branch behind it: who does not take the branch waits there, too, so that all come to them
    /// whatever the branch is taken by.
    pub(crate) fn with_barriers_behind(mut self) -> Cfg {
        let exit = self.exit();
        let mut sources = vec![Vec::new(); exit + 1];
        for (from, block) in self.blocks.iter().enumerate() {
            block.end.targets().into_iter().for_each(|to| sources[to].push(from));
        }
        for branch in 0..exit {
            let (End::Jump(behind), [from]) = (&self.blocks[branch].end, &sources[branch][..]) else {
                continue;
            };
            let (behind, from) = (*behind, *from);
            let around = match self.blocks[from].end {
                End::Branch(_, then, other) => {
                    [then, other] == [branch, behind] || [then, other] == [behind, branch]
                }
                _ => false,
            };
            let met =
                sources[behind].len() == 2 && sources[behind].iter().all(|at| [branch, from].contains(at));
            if behind == exit || !around || !met {
                continue;
            }
            while let Some(last) = self.blocks[branch].instrs.pop_if(|last| last.is_warp_barrier()) {
                self.blocks[behind].instrs.insert(0, last);
            }
        }
        self
    }

    pub(crate) fn of(code: Code) -> Result<Cfg> {
        let none = usize::MAX;
        // The block that each label begins.
        let mut labels = vec![none; code.labels as usize];
        let mut blocks = vec![Block { instrs: Vec::new(), end: End::Jump(none), line: 0 }];
        let mut closed = false;
        for step in code.steps {
            let at = blocks.len() - 1;
            let fresh = blocks[at].instrs.is_empty() && at > 0 && !closed;
            match step {
                Step::Label(label) => {
                    if !fresh {
                        if !closed {
                            blocks[at].end = End::Jump(BLOCK + at + 1);
                        }
                        begin(&mut blocks, 0)?;
                        closed = false;
                    }
                    labels[label as usize] = blocks.len() - 1;
                }
                Step::Instr(instr) => {
                    if closed {
                        begin(&mut blocks, instr.line)?;
                        closed = false;
                    }
                    let at = blocks.len() - 1;
                    if blocks[at].line == 0 {
                        blocks[at].line = instr.line;
                    }
                    let wrong = || Error::syntax(instr.line, "a branch has a label");
                    let target = |operand: &Operand| match operand {
                        Operand::Label(label) => Ok(*label as usize),
                        _ => Err(wrong()),
                    };
                    let end = match instr.opcode() {
                        "bra" => match &instr.operands[..] {
                            [to] => End::Jump(target(to)?),
                            _ => return Err(wrong()),
                        },
                        "brx" => match &instr.operands[..] {
                            [index, Operand::List(list)] if !list.is_empty() && instr.guard.is_none() => {
                                End::Switch(index.clone(), list.iter().map(target).collect::<Result<_>>()?)
                            }
                            _ => return Err(wrong()),
                        },
                        "exit" => End::Jump(EXIT),
                        _ => {
                            blocks[at].instrs.push(instr);
                            continue;
                        }
                    };
                    blocks[at].end = match (end, instr.guard) {
                        (End::Jump(to), Some(guard)) => End::Branch(guard, to, BLOCK + at + 1),
                        (end, _) => end,
                    };
                    closed = true;
                }
            }
        }
        // What falls off the end ends there.
        let last = blocks.len() - 1;
        match blocks[last].end {
            End::Jump(to) if to == none => blocks[last].end = End::Jump(EXIT),
            End::Branch(..) => begin(&mut blocks, 0).map(|()| blocks[last + 1].end = End::Jump(EXIT))?,
            _ => {}
        }
        let count = blocks.len();
        for block in &mut blocks {
            block.end.map(|to| match to {
                EXIT => count,
                to if to >= BLOCK => to - BLOCK,
                label => labels[label],
            });
        }
        Ok(Cfg { blocks }.reachable())
    }

    /// Without the blocks that nothing leads to, and without branches that lead to one block anyway.
    /// Does a block end the thread, without others that it would have to wait for?
    pub(crate) fn is_tail(&self, block: usize) -> bool {
        self.blocks.get(block).is_some_and(|b| b.end == End::Jump(self.exit()) && !b.converges())
    }

    /// With short ends of threads, to which several jumps lead, at each of those jumps.
    pub(crate) fn with_tails(&self) -> Cfg {
        let exit = self.exit();
        let mut jumps = vec![0usize; exit + 1];
        self.blocks.iter().flat_map(|block| block.end.targets()).for_each(|to| jumps[to] += 1);
        let short = |block: &Block| {
            block.end == End::Jump(exit) && block.instrs.len() <= MAX_TAIL && !block.converges()
        };
        let (mut blocks, mut tails) = (self.blocks.clone(), Vec::new());
        for block in &mut blocks {
            let copied = std::cell::RefCell::new(&mut tails);
            block.end.map(|to| match self.blocks.get(to).filter(|block| jumps[to] > 1 && short(block)) {
                Some(tail) if copied.borrow().len() < MAX_TAILS => {
                    copied.borrow_mut().push(tail.clone());
                    BLOCK + copied.borrow().len() - 1
                }
                _ => to,
            });
        }
        let end = exit + tails.len();
        blocks.append(&mut tails);
        blocks.iter_mut().for_each(|block| {
            block.end.map(|to| match to {
                to if to == exit => end,
                to if to >= BLOCK => exit + (to - BLOCK),
                to => to,
            });
        });
        Cfg { blocks }.reachable()
    }

    pub(crate) fn reachable(mut self) -> Cfg {
        let exit = self.exit();
        // Who jumps to a block that only jumps on may as well go there; not round and round, though.
        let on = |first: usize| {
            let mut to = first;
            for _ in 0..MAX_HOPS {
                match self.blocks.get(to) {
                    Some(Block { instrs, end: End::Jump(next), .. }) if instrs.is_empty() => to = *next,
                    _ => return to,
                }
            }
            first
        };
        let targets: Vec<usize> = (0..=exit).map(on).collect();
        self.blocks.iter_mut().for_each(|block| block.end.map(|to| targets[to]));
        let mut new = vec![usize::MAX; exit];
        let (mut order, mut next) = (vec![0], 0);
        new[0] = 0;
        while let Some(at) = order.get(next).copied() {
            next += 1;
            for to in self.blocks[at].end.targets() {
                if to < exit && new[to] == usize::MAX {
                    new[to] = order.len();
                    order.push(to);
                }
            }
        }
        let count = order.len();
        let mut blocks = Vec::new();
        for at in order {
            let empty = Block { instrs: Vec::new(), end: End::Jump(0), line: 0 };
            let mut block = std::mem::replace(&mut self.blocks[at], empty);
            block.end.map(|to| if to == exit { count } else { new[to] });
            let targets = block.end.targets();
            if targets.iter().all(|to| *to == targets[0]) {
                block.end = End::Jump(targets[0]);
            }
            blocks.push(block);
        }
        Cfg { blocks }
    }
}

#[cfg(test)]
impl Cfg {
    /// Where each block leads, without the end.
    pub(crate) fn succs(&self) -> Vec<Vec<usize>> {
        let inside =
            |block: &Block| block.end.targets().into_iter().filter(|to| *to != self.exit()).collect();
        self.blocks.iter().map(inside).collect()
    }
}

/// Stands for the end while blocks are made; numbers from `BLOCK` on are blocks, lower ones labels.
const EXIT: usize = usize::MAX - 1;
const BLOCK: usize = 1 << 32;

fn begin(blocks: &mut Vec<Block>, line: u32) -> Result<()> {
    if blocks.len() >= MAX_BLOCKS {
        return Err(Error::large(line, "basic blocks in a kernel", MAX_BLOCKS));
    }
    blocks.push(Block { instrs: Vec::new(), end: End::Jump(usize::MAX), line });
    Ok(())
}
