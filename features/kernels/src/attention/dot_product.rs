//! Attention as a function of the library.

use super::{Attention, Mask, Order};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Region};
use crate::family::{Kind, Resources};
use vm_ir::Scalar;
use vm_ir::view::Access;

/// O = softmax(scale · Q · Kᵀ + bias) · V for each head. Its buffers are `q`, `[batch, queries, heads, dim]`, `k` and `v`,
/// `[batch, keys, heads of keys, dim]`, `o`, as `q`, and with [`bias`](Self::bias) `bias`, `[queries, keys]` of f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DotProductAttention {
    /// What Q, K, V and O hold: f16, bf16 or f32.
    pub element: Scalar,
    /// Sequences.
    pub batch: u64,
    /// Heads of queries, and of keys and values, of which those are a multiple.
    pub heads: [u64; 2],
    /// Queries and keys of each sequence.
    pub lengths: [u64; 2],
    /// Elements of each query, key and value: 1 to 256.
    pub dim: u64,
    /// Which keys a query sees: [`Mask::Full`] or [`Mask::Causal`].
    pub mask: Mask,
    /// Is a bias added, the same for all heads? −∞ masks a key, and a query all of whose keys are masked gets zeros.
    pub bias: bool,
    /// What Q · Kᵀ is multiplied by, above 0.
    pub scale: f32,
    /// As [`Attention::align`], of the memory that it is called with.
    pub align: u32,
}

/// The name in errors.
const NAME: &str = "attention";
/// What barriers and alignment take of shared memory.
const OVERHEAD: u64 = 2048;

impl DotProductAttention {
    /// The variants for its class, the best guess first.
    fn variants(&self, resources: &Resources) -> Vec<Attention> {
        let dim = match self.dim {
            ..=64 => 64,
            65..=128 => 128,
            _ => 256,
        };
        let causal = self.mask == Mask::Causal;
        let of = |tile: [u32; 2], groups, stages| {
            let order = if causal { Order::Balanced } else { Order::Heads };
            let any = Attention { tile, groups, stages, order, ..Attention::of(dim, causal) };
            Attention {
                element: self.element,
                bias: self.bias,
                padded: self.dim != u64::from(dim),
                align: self.align,
                ..any
            }
        };
        if resources.kind == Kind::Cpu {
            return vec![of([128, 128], 1, 1), of([64, 64], 1, 1)];
        }
        let best = Attention::of_length(dim, causal, self.lengths[1]);
        // A bias takes as many registers as scores, and f32 twice those of the others.
        let mut all = Vec::new();
        if self.element != Scalar::F32 && !self.bias {
            all.push(of(best.tile, best.groups, best.stages));
            all.extend([of([128, 64], 2, 2), of([64, 64], 1, 2)]);
        }
        all.extend((dim < 256).then(|| of([64, 64], 1, 1)));
        all.extend([of([64, 32], 1, 1), of([64, 16], 1, 1)]);
        all
    }

    /// Bytes of shared memory of a block, about.
    fn shared_bytes(&self, variant: &Attention) -> u64 {
        let [queries, keys] = variant.tile.map(u64::from);
        let [dim, values] = variant.dims.map(u64::from);
        let bytes = u64::from(self.element.bytes());
        OVERHEAD + bytes * (queries * dim + u64::from(variant.stages) * keys * (dim + values))
    }
}

impl Function for DotProductAttention {
    fn buffers(&self) -> Vec<Buffer> {
        let DotProductAttention {
            element, batch, heads: [heads, shared], lengths: [queries, keys], dim, ..
        } = *self;
        let of_q = [batch, queries, heads, dim];
        let of_k = [batch, keys, shared, dim];
        let mut all = vec![
            Buffer::new("q", element, &of_q, Access::Read),
            Buffer::new("k", element, &of_k, Access::Read),
            Buffer::new("v", element, &of_k, Access::Read),
            Buffer::new("o", element, &of_q, Access::Write),
        ];
        all.extend(self.bias.then(|| Buffer::new("bias", Scalar::F32, &[queries, keys], Access::Read)));
        all
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let unsupported = |what: String| CallError::Unsupported { function: NAME, what };
        let DotProductAttention { batch, heads: [heads, shared], lengths: [queries, keys], dim, .. } = *self;
        if [batch, heads, queries, dim].contains(&0) {
            return Ok(Call::default());
        }
        if dim > 256 {
            return Err(unsupported(format!("heads have {dim} elements; 1 to 256 are possible")));
        }
        if shared == 0 || !heads.is_multiple_of(shared) {
            return Err(unsupported(format!("{heads} heads can't share {shared} heads of keys evenly")));
        }
        if self.mask == Mask::Window {
            return Err(unsupported("a window; all keys or those up to a query's place can be seen".into()));
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(unsupported(format!("scale is {}; it must be above 0", self.scale)));
        }
        let room = CallError::NoRoom { function: NAME, shared_bytes: resources.shared_bytes };
        let fits = |variant: &Attention| self.shared_bytes(variant) <= u64::from(resources.shared_bytes);
        let variant = self.variants(resources).into_iter().find(fits).ok_or(room)?;
        let tiles = queries.div_ceil(variant.tile[0].into()).saturating_mul(heads).saturating_mul(batch);
        if tiles >= 1 << 31 || queries.max(keys) >= 1 << 30 {
            return Err(unsupported(format!(
                "{batch} sequences of {queries} queries: fewer than 2^31 tiles"
            )));
        }
        let mut operands: Vec<Operand> = (0..)
            .zip(self.buffers())
            .map(|(index, Buffer { element, extents, .. })| match extents[..] {
                // Heads lie side by side, and are the second dimension of the kernel's views.
                [batch, tokens, heads, dim] => Operand::Buffer(
                    index,
                    Region {
                        element,
                        offset: 0,
                        extents: vec![batch, heads, tokens, dim],
                        strides: vec![tokens * heads * dim, dim, heads * dim, 1],
                    },
                ),
                _ => Operand::whole(index, element, &extents),
            })
            .collect();
        // The scale stands behind the views of the heads.
        operands.insert(4, Operand::f32(self.scale));
        let bias = self.bias.then(|| operands.remove(5));
        operands.extend(bias);
        let units = if resources.kind == Kind::Cpu { tiles } else { resources.compute_units.max(1).into() };
        let blocks = u32::try_from(tiles.min(units)).unwrap_or(u32::MAX >> 1);
        Ok(Call {
            launches: vec![Launch { entry: Entry::Attention(variant), grid: [blocks, 1, 1], operands }],
            workspace: 0,
        })
    }
}
