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

#[cfg(test)]
mod tests {
    use super::super::{Context, FunctionBuilderContext, Isa, Options, SAFETY, emit::Generators, written};
    use super::*;
    use crate::safety::SafetyPlan;
    use cranelift_codegen::dominator_tree::DominatorTree;
    use vm_ir::{Trust, text, validate};

    /// Values that are held at the begin of each block, added up, in the order in which the generator lays blocks out: what the
    /// allocator that takes one pass goes through.
    fn held(source: &str) -> usize {
        let valid = validate(text::parse(source).unwrap(), Trust::Guest).unwrap();
        let (kernel, facts) = valid.kernels_with_facts().next().unwrap();
        let safety = SafetyPlan::of(kernel, valid.trust(), &SAFETY).unwrap();
        let generators = Generators::new(Isa::X86V3).unwrap();
        let mut contexts = (Context::new(), FunctionBuilderContext::new());
        written(facts, &safety, &Options::new(Isa::X86V3), &generators, &mut contexts, true).unwrap();
        let func = &contexts.0.func;
        let tree = DominatorTree::with_function(func, &ControlFlowGraph::with_function(func));
        let mut spans = vec![None; func.dfg.num_values()];
        for (at, block) in tree.cfg_rpo().enumerate() {
            let mut touch = |value: Value| {
                let (_, last) = spans[value.as_u32() as usize].get_or_insert((at, at));
                *last = at;
            };
            func.dfg.block_params(*block).iter().for_each(|value| touch(*value));
            for inst in func.layout.block_insts(*block) {
                if !is_constant(func.dfg.insts[inst].opcode()) {
                    func.dfg.inst_values(inst).for_each(|value| touch(func.dfg.resolve_aliases(value)));
                    func.dfg.inst_results(inst).iter().for_each(|value| touch(*value));
                }
            }
        }
        spans.into_iter().flatten().map(|(first, last): (usize, usize)| last - first).sum()
    }

    #[test]
    fn what_is_held_grows_with_the_kernel() {
        let check = |head: &str, again: &str| {
            let of = |count| {
                held(&format!(
                    "vir 1\nkernel @k{head}{}}}\n",
                    (0..count).map(|i| again.replace('#', &i.to_string())).collect::<String>()
                ))
            };
            let [few, many] = [64, 256].map(of);
            assert!(many < 5 * few, "{few}, four times as many: {many}: {again}");
        };
        let tile =
            "(@c: view<f32, [?, ?], write>) at 0x0 tile(1) {\nfragment @s: f32[16, 16]\n%z = const 0 : i64\n";
        check(tile, "put @c[%z, %z], @s\n");
        check(&tile.replace("write", "readwrite"), "put.add @c[%z, %z], @s\n");
        let threads = "(@c: view<i32, [?], readwrite>, %n: i32) at 0x0 block(64) {
            %i = global_id.x : i64\n%d = load @c[%i] : i32\n%z = const 0 : i32\n%one = const 1 : i32\n";
        // Of all threads together, and of each by itself.
        for bound in ["n", "d"] {
            let body =
                "%end# = while carry(%k#: i32 = %z) {\n%more# = lt.s %k#, %BOUND : bool\nyield %more#\n} do {
                store @c[%i], %k#\n%next# = add %k#, %one : i32\nyield %next#\n}\n";
            check(threads, &body.replace("BOUND", bound));
        }
    }
}
