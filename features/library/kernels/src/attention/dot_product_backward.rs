//! The gradients of attention as a function of the library.

use super::dot_product::operands;
use super::{Backward, BackwardPass, DotProductAttention, Gradient, Mask, SplitBackward};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Workspace};
use crate::family::{Kind, Resources};
use crate::graph::{self, NoGraph};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::Scalar;
use vm_ir::view::Access;

/// The gradients of [`DotProductAttention`] from that of O: with P = softmax(scale · Q · Kᵀ), δ the sum of each row of dO ∘ O, and dS = P ∘ (dO · Vᵀ − δ),
/// dQ = scale · dS · K, dK = scale · dSᵀ · Q and dV = Pᵀ · dO. Heads that share keys add up. Not of FP8, nor with a bias.
///
/// Its buffers: `q`, `k`, `v`, `o` and `log_sums` as there, `do` as `o`, and `dq`, `dk` and `dv` as `q`, `k` and `v`.
///
/// Heads of 64 or 128 elements of f16 or bf16 in rows that begin at multiples of 16 bytes are computed in one pass, which adds up dQ in the workspace in
/// no order; all others with a kernel for each gradient, which gives the same bits each time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DotProductAttentionBackward(
    /// Of what they are the gradients.
    pub DotProductAttention,
);

/// The name in errors.
const NAME: &str = "attention_backward";
/// Queries of a block of the kernels that are no tile kernels.
const QUERIES: u64 = 64;

/// The views of a call, by their names.
struct Views {
    /// Q, K, V, O, dO, and the gradients of the first three.
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    d_o: Operand,
    gradients: [Operand; 3],
    log_sums: Operand,
}

impl DotProductAttentionBackward {
    /// The variant of one pass with the largest tiles that there is room for, if there is one.
    fn one_pass(&self, resources: &Resources) -> Option<Backward> {
        let DotProductAttention { element, dim, mask, align, lengths, .. } = self.0;
        if !matches!(dim, 64 | 128) || element == Scalar::F32 || align < 16 || lengths.contains(&0) {
            return None;
        }
        let large = Backward { element, mask, ..Backward::of(dim as u32, mask == Mask::Causal) };
        let small = Backward { tile: [64, 64], groups: 1, ..large };
        let all = if resources.kind == Kind::Cpu { vec![small] } else { vec![large, small] };
        all.into_iter().find(|variant| variant.shared_bytes() <= u64::from(resources.shared_bytes))
    }

    /// The same of those with a kernel for each gradient.
    fn split(&self, resources: &Resources) -> Option<SplitBackward> {
        let DotProductAttention { element, dim, mask, align, .. } = self.0;
        let most = (dim as u32).next_multiple_of(64);
        let padded = dim != u64::from(most);
        let causal = mask == Mask::Causal;
        let of = |variant| SplitBackward { element, dims: [most; 2], mask, padded, align, ..variant };
        let large = of(SplitBackward::of(most, causal));
        let small = of(SplitBackward::small(most, causal));
        let mut all = match (resources.kind, element) {
            (Kind::Cpu, _) => vec![SplitBackward { tile: [64, 64], ..small }],
            (_, Scalar::F32) => Vec::new(),
            _ => vec![large],
        };
        all.extend([small, SplitBackward { tile: [64, 16], ..small }]);
        all.into_iter().find(|variant| variant.shared_bytes() <= u64::from(resources.shared_bytes))
    }

    /// Blocks of a tile kernel of so many tokens of so many heads: on a GPU no more than it has multiprocessors.
    fn blocks(
        &self,
        [tokens, heads]: [u64; 2],
        tile: u32,
        resources: &Resources,
    ) -> Result<[u32; 3], CallError> {
        let tiles = tokens.div_ceil(tile.into()).saturating_mul(heads).saturating_mul(self.0.batch);
        if tiles >= 1 << 31 {
            let what = format!("{} sequences of {tokens} tokens: fewer than 2^31 tiles", self.0.batch);
            return Err(CallError::Unsupported { function: NAME, what });
        }
        let most = match resources.kind {
            Kind::Cpu => tiles,
            Kind::Gpu => resources.compute_units.max(1).into(),
        };
        Ok([tiles.min(most) as u32, 1, 1])
    }

    /// The launches of a kernel that has a block for each 64 queries of each head of each sequence.
    fn by_rows(&self, entry: Entry, operands: Vec<Operand>) -> Vec<Launch> {
        let DotProductAttention { batch, heads: [heads, _], lengths: [queries, _], .. } = self.0;
        let operands = operands.into_iter().map(|operand| (operand, [Some(1), Some(0)]));
        Launch::folded(entry, queries.div_ceil(QUERIES) as u32, [heads, batch], &operands.collect::<Vec<_>>())
    }

    fn call_in_one_pass(
        &self,
        variant: Backward,
        views: Views,
        resources: &Resources,
    ) -> Result<Call, CallError> {
        let DotProductAttention { batch, heads: [heads, shared], lengths: [queries, keys], dim, .. } = self.0;
        let Views { q, k, v, o, d_o, gradients: [dq, dk, dv], log_sums } = views;
        let mut workspace = Workspace::default();
        let delta = workspace.take(Scalar::F32, &[batch, heads, queries]);
        let sums = match variant.turned() {
            true => [batch, heads, queries.div_ceil(QUERIES) * dim, QUERIES],
            false => [batch, heads, queries, dim],
        };
        let sums = workspace.take(Scalar::F32, &sums);
        let entry = |pass| Entry::AttentionBackward(variant, pass);
        let scale = Operand::f32(self.0.scale);
        let first = vec![o, d_o.clone(), delta.clone(), sums.clone()];
        let mut operands = vec![q, k, v, d_o, log_sums, delta, sums.clone(), dk, dv, scale.clone()];
        operands.extend(self.0.reach());
        let grid = self.blocks([keys, shared], variant.tile[1], resources)?;
        let mut launches = self.by_rows(entry(BackwardPass::Prepare), first);
        launches.push(Launch { entry: entry(BackwardPass::Main), grid, operands });
        launches.extend(self.by_rows(entry(BackwardPass::Finish), vec![sums, dq, scale]));
        Ok(Call { launches, workspace: workspace.bytes() })
    }

    fn call_split(
        &self,
        variant: SplitBackward,
        views: Views,
        resources: &Resources,
    ) -> Result<Call, CallError> {
        let DotProductAttention { batch, heads: [heads, shared], lengths: [queries, keys], .. } = self.0;
        let Views { q, k, v, o, d_o, gradients, log_sums } = views;
        let mut workspace = Workspace::default();
        let delta = workspace.take(Scalar::F32, &[batch, heads, queries]);
        let mut launches = Vec::new();
        if queries > 0 {
            let operands = vec![o, d_o.clone(), delta.clone()];
            launches.extend(self.by_rows(Entry::AttentionDelta(variant), operands));
        }
        for (of, gradient) in Gradient::ALL.into_iter().zip(gradients) {
            let rows = if of == Gradient::Queries { [queries, heads] } else { [keys, shared] };
            if rows[0] == 0 {
                continue;
            }
            let slopes = of != Gradient::Values;
            let mut operands = vec![q.clone(), k.clone()];
            operands.extend(slopes.then(|| v.clone()));
            operands.extend([d_o.clone(), log_sums.clone()]);
            operands.extend(slopes.then(|| delta.clone()));
            operands.extend([gradient, Operand::f32(self.0.scale)]);
            operands.extend(self.0.reach());
            let grid = self.blocks(rows, variant.tile[0], resources)?;
            launches.push(Launch { entry: Entry::AttentionGradient(variant, of), grid, operands });
        }
        Ok(Call { launches, workspace: workspace.bytes() })
    }
}

impl Function for DotProductAttentionBackward {
    fn buffers(&self) -> Vec<Buffer> {
        let DotProductAttention {
            element, batch, heads: [heads, shared], lengths: [queries, keys], dim, ..
        } = self.0;
        let of_q = |name, access| Buffer::new(name, element, &[batch, queries, heads, dim], access);
        let of_k = |name, access| Buffer::new(name, element, &[batch, keys, shared, dim], access);
        vec![
            of_q("q", Access::Read),
            of_k("k", Access::Read),
            of_k("v", Access::Read),
            of_q("o", Access::Read),
            Buffer::new("log_sums", Scalar::F32, &[batch, heads, queries], Access::Read),
            of_q("do", Access::Read),
            of_q("dq", Access::Write),
            of_k("dk", Access::Write),
            of_k("dv", Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::attention::dot_product_backward(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let DotProductAttention { batch, heads: [heads, shared], lengths: [queries, keys], dim, .. } = self.0;
        let unsupported = |what: String| Err(CallError::Unsupported { function: NAME, what });
        if self.0.fp8.is_some() || self.0.bias {
            return unsupported("attention of FP8, or with a bias, has no gradients".into());
        }
        self.0.check(NAME)?;
        let rows = [batch, heads, queries.div_ceil(QUERIES)];
        if rows.iter().fold(1u64, |tiles, extent| tiles.saturating_mul(*extent)) >= 1 << 31 {
            return unsupported(format!(
                "{batch} sequences of {queries} queries with {heads} heads: fewer than 2^31 tiles of 64 queries"
            ));
        }
        if [batch, heads, shared, dim].contains(&0) || queries.max(keys) == 0 {
            return Ok(Call::default());
        }
        let Ok([q, k, v, o, log_sums, d_o, dq, dk, dv]) = <[Operand; 9]>::try_from(operands(&self.buffers()))
        else {
            return Ok(Call::default());
        };
        let views = Views { q, k, v, o, d_o, gradients: [dq, dk, dv], log_sums };
        if let Some(variant) = self.one_pass(resources) {
            return self.call_in_one_pass(variant, views, resources);
        }
        let room = CallError::NoRoom { function: NAME, shared_bytes: resources.shared_bytes };
        self.call_split(self.split(resources).ok_or(room)?, views, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        // Rows begin at multiples of 16 bytes, or anywhere.
        let rows: Vec<Buffer> = buffers.iter().filter(|buffer| buffer.name != "log_sums").cloned().collect();
        let align = if aligned(16, &rows) == 16 { self.0.align } else { 1 };
        DotProductAttentionBackward(DotProductAttention { align, ..self.0 }).call(resources)
    }
}
