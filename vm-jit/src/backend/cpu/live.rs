//! Which values live from one block into others, counted: what a register allocator has to hold on to at each block's begin.

use cranelift_codegen::entity::SecondaryMap;
use cranelift_codegen::flowgraph::ControlFlowGraph;
use cranelift_codegen::ir::{Block, Function, Opcode, Value};

/// How much lives across blocks.
#[derive(Default)]
pub(super) struct Live {
    /// By block: how many vectors come into it and leave it again.
    pub(super) through: SecondaryMap<Block, usize>,
    /// Steps from a block to one before it that it took to follow each value back to where it is made: at least as many as
    /// values come into blocks, added up over all of them.
    pub(super) steps: usize,
}

/// Is it rematerialised wherever it is wanted?
fn is_constant(code: Opcode) -> bool {
    matches!(code, Opcode::Iconst | Opcode::F32const | Opcode::F64const | Opcode::Vconst)
}

impl Live {
    /// Counts; `None` if that takes more than `steps` steps.
    pub(super) fn of(func: &Function, cfg: &ControlFlowGraph, most: usize) -> Option<Live> {
        let index = |value: Value| value.as_u32() as usize;
        let mut made_in: Vec<Option<Block>> = vec![None; func.dfg.num_values()];
        for block in func.layout.blocks() {
            func.dfg.block_params(block).iter().for_each(|value| made_in[index(*value)] = Some(block));
            for inst in func.layout.block_insts(block) {
                if !is_constant(func.dfg.insts[inst].opcode()) {
                    func.dfg.inst_results(inst).iter().for_each(|value| made_in[index(*value)] = Some(block));
                }
            }
        }
        // The blocks at whose begin each value is wanted.
        let mut wanted: Vec<(Value, Block)> = Vec::new();
        for block in func.layout.blocks() {
            for inst in func.layout.block_insts(block) {
                let values = func.dfg.inst_values(inst).map(|value| func.dfg.resolve_aliases(value));
                let others = values.filter(|value| made_in[index(*value)].is_some_and(|made| made != block));
                wanted.extend(others.map(|value| (value, block)));
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        let mut live = Live::default();
        let (mut seen, mut left) = (SecondaryMap::new(), SecondaryMap::new());
        let mut open: Vec<Block> = Vec::new();
        for (number, wanted) in wanted.chunk_by(|a, b| a.0 == b.0).enumerate() {
            let (value, number) = (wanted[0].0, number as u32 + 1);
            let (made, ty) = (made_in[index(value)], func.dfg.value_type(value));
            let is_vector = ty.is_vector() || ty.is_float();
            open.extend(wanted.iter().map(|(_, block)| *block));
            while let Some(block) = open.pop() {
                if std::mem::replace(&mut seen[block], number) == number {
                    continue;
                }
                live.steps += 1;
                for before in cfg.pred_iter(block) {
                    live.steps += 1;
                    if Some(before.block) == made {
                        continue;
                    }
                    // It leaves that block, so it comes into it too.
                    if std::mem::replace(&mut left[before.block], number) != number && is_vector {
                        live.through[before.block] += 1;
                    }
                    open.push(before.block);
                }
                if live.steps > most {
                    return None;
                }
            }
        }
        Some(live)
    }
}
