//! Self-attention of what one product has computed of queries, keys and values, and its gradients, as functions of the library.

use super::{Attention, Backward, BackwardPass, Forward};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Region, Workspace};
use crate::family::{Kind, Problem, Resources};
use crate::graph::{self, NoGraph};
use crate::strided::check_aligned;
use vm_graph::ValidGraph;
use vm_ir::Scalar;
use vm_ir::view::Access;

/// O = softmax(scale · Q · Kᵀ) · V for each head of each token of sequences that are all as long.
///
/// Its buffers: `qkv`, `[batch, tokens, heads + 2 · shared, dim]`: for each token its heads of queries, of keys and of values, one behind the other;
/// `o`, `[batch, tokens, heads, dim]`; `log_sums`, f32, `[batch, heads, tokens]`, which the gradients need. All are aligned to 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfAttention {
    /// What Q, K, V and O hold: f16 or bf16; f32 too where there are no gradients.
    pub element: Scalar,
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Heads of queries, and of keys and values, of which those are a multiple.
    pub heads: [u64; 2],
    /// Elements of each query, key and value: 64, 128 or 256; of gradients 64 or 128.
    pub dim: u32,
    /// Does a query see only keys up to its own place? Else all.
    pub causal: bool,
    /// What Q · Kᵀ is multiplied by, above 0.
    pub scale: f32,
}

/// The gradients of [`SelfAttention`] from that of O.
///
/// Its buffers: `qkv`, `o` and `log_sums` as there; `do`, the gradient of O, and `dqkv`, that of `qkv`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfAttentionBackward(
    /// Of what they are the gradients.
    pub SelfAttention,
);

impl SelfAttention {
    /// Elements of a token's queries, keys and values.
    fn token(&self) -> u64 {
        (self.heads[0] + 2 * self.heads[1]) * u64::from(self.dim)
    }

    fn check(&self, function: &'static str, dims: &[u32], elements: &[Scalar]) -> Result<(), CallError> {
        let unsupported = |what: String| Err(CallError::Unsupported { function, what });
        let SelfAttention { element, batch, tokens, heads: [heads, shared], dim, scale, .. } = *self;
        if !dims.contains(&dim) {
            return unsupported(format!("heads have {dim} elements; possible are {dims:?}"));
        }
        if !elements.contains(&element) {
            return unsupported(format!("elements of {element}; possible are {elements:?}"));
        }
        if shared == 0 || !heads.is_multiple_of(shared) {
            return unsupported(format!("{heads} heads can't share {shared} heads of keys evenly"));
        }
        if !(scale > 0.0 && scale.is_finite()) {
            return unsupported(format!("scale is {scale}; it must be above 0"));
        }
        if tokens >= 1 << 30 {
            return unsupported(format!("{tokens} tokens; fewer than 2^30 are possible"));
        }
        if batch.saturating_mul(tokens).saturating_mul(heads) >= 1 << 31 {
            return unsupported(format!(
                "{batch} sequences of {tokens} tokens with {heads} heads; fewer than 2^31 queries are possible"
            ));
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        [self.batch, self.tokens, self.heads[0]].contains(&0)
    }

    /// Queries (0), keys (1) or values (2) of a buffer of all of them.
    fn part(&self, buffer: usize, which: u64) -> Operand {
        let SelfAttention { element, batch, tokens, heads: [heads, shared], .. } = *self;
        let (dim, token) = (u64::from(self.dim), self.token());
        let (first, own) = match which {
            0 => (0, heads),
            which => (heads + (which - 1) * shared, shared),
        };
        let region = Region {
            element,
            offset: first * dim * u64::from(element.bytes()),
            extents: vec![batch, own, tokens, dim],
            strides: vec![tokens * token, dim, token, 1],
        };
        Operand::Buffer(buffer, region)
    }

    /// A buffer as O is.
    fn output(&self, buffer: usize) -> Operand {
        let SelfAttention { element, batch, tokens, heads: [heads, _], .. } = *self;
        let dim = u64::from(self.dim);
        let region = Region {
            element,
            offset: 0,
            extents: vec![batch, heads, tokens, dim],
            strides: vec![tokens * heads * dim, dim, heads * dim, 1],
        };
        Operand::Buffer(buffer, region)
    }

    /// Buffers as `qkv`, as `o` and as `log_sums`.
    fn like_qkv(&self, name: &'static str, access: Access) -> Buffer {
        let SelfAttention { element, batch, tokens, heads: [heads, shared], dim, .. } = *self;
        let all = heads.saturating_add(shared.saturating_mul(2));
        Buffer::new(name, element, &[batch, tokens, all, dim.into()], access)
    }

    fn like_o(&self, name: &'static str, access: Access) -> Buffer {
        Buffer::new(name, self.element, &[self.batch, self.tokens, self.heads[0], self.dim.into()], access)
    }

    fn rows(&self) -> [u64; 3] {
        [self.batch, self.heads[0], self.tokens]
    }

    /// Blocks of a tile kernel: on a GPU no more than it has multiprocessors.
    fn blocks(&self, heads: u64, tile: u32, resources: &Resources) -> [u32; 3] {
        let tiles = self.tokens.div_ceil(tile.max(1).into()).saturating_mul(heads).saturating_mul(self.batch);
        let most = match resources.kind {
            Kind::Cpu => u64::from(u32::MAX >> 1),
            Kind::Gpu => resources.compute_units.max(1).into(),
        };
        [tiles.clamp(1, most) as u32, 1, 1]
    }

    fn forward(&self, resources: &Resources) -> Option<Attention> {
        let SelfAttention { element, batch, tokens, heads, dim, causal, .. } = *self;
        let forward = Forward::of(batch, 1, tokens, dim, causal);
        let forward = Forward { element, heads, log_sums: true, ..forward };
        if resources.kind == Kind::Cpu {
            let tiles = Attention { element, log_sums: true, ..Attention::cpu(dim, causal) };
            return Some(Attention { tile: [64, 64], ..tiles });
        }
        forward.variants(resources).into_iter().next()
    }

    /// The largest tiles that there is room for.
    fn backward(&self, resources: &Resources) -> Option<Backward> {
        let large = Backward { element: self.element, ..Backward::of(self.dim, self.causal) };
        let small = Backward { tile: [64, 64], groups: 1, ..large };
        let all = if resources.kind == Kind::Cpu { vec![small] } else { vec![large, small] };
        all.into_iter().find(|variant| variant.shared_bytes() <= u64::from(resources.shared_bytes))
    }
}

impl Function for SelfAttention {
    fn buffers(&self) -> Vec<Buffer> {
        vec![
            self.like_qkv("qkv", Access::Read),
            self.like_o("o", Access::Write),
            Buffer::new("log_sums", Scalar::F32, &self.rows(), Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::attention::self_attention(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "self_attention";
        self.check(NAME, &[64, 128, 256], &[Scalar::F16, Scalar::Bf16, Scalar::F32])?;
        if self.is_empty() {
            return Ok(Call::default());
        }
        let room = CallError::NoRoom { function: NAME, shared_bytes: resources.shared_bytes };
        let variant = self.forward(resources).ok_or(room)?;
        let mut operands: Vec<_> = (0..3).map(|which| self.part(0, which)).collect();
        operands.extend([self.output(1), Operand::whole(2, Scalar::F32, &self.rows())]);
        operands.push(Operand::f32(self.scale));
        let grid = self.blocks(self.heads[0], variant.tile[0], resources);
        Ok(Call { launches: vec![Launch { entry: Entry::Attention(variant), grid, operands }], workspace: 0 })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        check_aligned(&buffers[..2])?;
        self.call(resources)
    }
}

impl Function for SelfAttentionBackward {
    fn buffers(&self) -> Vec<Buffer> {
        let of = &self.0;
        vec![
            of.like_qkv("qkv", Access::Read),
            of.like_o("o", Access::Read),
            Buffer::new("log_sums", Scalar::F32, &of.rows(), Access::Read),
            of.like_o("do", Access::Read),
            of.like_qkv("dqkv", Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::attention::self_attention_backward(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "self_attention_backward";
        let of = &self.0;
        of.check(NAME, &[64, 128], &[Scalar::F16, Scalar::Bf16])?;
        if of.is_empty() {
            return Ok(Call::default());
        }
        let room = CallError::NoRoom { function: NAME, shared_bytes: resources.shared_bytes };
        let variant = of.backward(resources).ok_or(room)?;
        let [batch, heads, tokens] = of.rows();
        let dim = u64::from(of.dim);
        let of_sums = match variant.turned() {
            true => [batch, heads, tokens.div_ceil(64) * dim, 64],
            false => [batch, heads, tokens, dim],
        };
        let mut workspace = Workspace::default();
        let delta = workspace.take(Scalar::F32, &of.rows());
        let sums = workspace.take(Scalar::F32, &of_sums);
        let [q, k, v] = [0, 1, 2].map(|which| of.part(0, which));
        let [dq, dk, dv] = [0, 1, 2].map(|which| of.part(4, which));
        let [o, d_o] = [1, 3].map(|buffer| of.output(buffer));
        let log_sums = Operand::whole(2, Scalar::F32, &of.rows());
        let scale = Operand::f32(of.scale);
        let entry = |pass| Entry::AttentionBackward(variant, pass);
        let by_rows = |pass, operands: Vec<Operand>| {
            let operands: Vec<_> =
                operands.into_iter().map(|operand| (operand, [Some(1), Some(0)])).collect();
            Launch::folded(entry(pass), tokens.div_ceil(64) as u32, [heads, batch], &operands)
        };
        let first = vec![o, d_o.clone(), delta.clone(), sums.clone()];
        let operands = vec![q, k, v, d_o, log_sums, delta, sums.clone(), dk, dv, scale.clone()];
        let grid = of.blocks(of.heads[1], variant.tile[1], resources);
        let mut launches = by_rows(BackwardPass::Prepare, first);
        launches.push(Launch { entry: entry(BackwardPass::Main), grid, operands });
        launches.extend(by_rows(BackwardPass::Finish, vec![sums, dq, scale]));
        Ok(Call { launches, workspace: workspace.bytes() })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let [qkv, o, _, d_o, dqkv] = buffers else { return self.call(resources) };
        [qkv, o, d_o, dqkv].into_iter().try_for_each(|buffer| check_aligned(std::slice::from_ref(buffer)))?;
        self.call(resources)
    }
}
