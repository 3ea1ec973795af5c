//! Attention as a function of the library.

use super::{Attention, Mask, Order};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Region};
use crate::family::{Kind, Resources};
use crate::gather::blocks;
use crate::graph::{self, NoGraph};
use crate::strided::aligned;
use crate::transpose::Transposed;
use vm_graph::ValidGraph;
use vm_ir::Scalar;
use vm_ir::view::Access;

/// What of Q, K and V of FP8 shares a scale, a number of f32 that all its elements are to be multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Scales {
    /// The whole tensor.
    Tensor,
    /// Each head of each sequence.
    Heads,
}

/// O = softmax(scale · Q · Kᵀ + bias) · V for each head. Its buffers are `q`, `[batch, queries, heads, dim]`, `k` and `v`,
/// `[batch, keys, heads of keys, dim]`, `o`, as `q`, with [`bias`](Self::bias) `bias`, `[queries, keys]` of f32, with
/// [`fp8`](Self::fp8) `q_scales`, `k_scales` and `v_scales` of f32, `[1, 1]`, or `[batch, heads]` and of keys `[batch, heads of keys]`, and with
/// [`log_sums`](Self::log_sums) `log_sums`, f32, `[batch, heads, queries]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DotProductAttention {
    /// What Q, K, V and O hold: f16, bf16 or f32.
    pub element: Scalar,
    /// Are Q, K and V of FP8 (E4M3), and O alone of [`element`](Self::element)? Then what shares their scales. V is transposed in the
    /// workspace first.
    pub fp8: Option<Fp8Scales>,
    /// Sequences.
    pub batch: u64,
    /// Heads of queries, and of keys and values, of which those are a multiple.
    pub heads: [u64; 2],
    /// Queries and keys of each sequence.
    pub lengths: [u64; 2],
    /// Elements of each query, key and value: 1 to 256.
    pub dim: u64,
    /// Which keys a query sees.
    pub mask: Mask,
    /// How far before and behind its place a query sees in a [`Mask::Window`].
    pub window: [u32; 2],
    /// Is a bias added, the same for all heads? −∞ masks a key, and a query all of whose keys are masked gets zeros.
    pub bias: bool,
    /// Are the logarithms of the sums of exponentials stored, which [the gradients](super::DotProductAttentionBackward) need? That of a query that sees
    /// no key is −∞.
    pub log_sums: bool,
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
                fp8: self.fp8.is_some(),
                bias: self.bias,
                log_sums: self.log_sums,
                mask: self.mask,
                padded: self.dim != u64::from(dim),
                align: self.align,
                ..any
            }
        };
        if resources.kind == Kind::Cpu {
            return vec![of([128, 128], 1, 1), of([64, 64], 1, 1)];
        }
        let best = match self.fp8 {
            Some(_) => Attention::fp8(dim, causal, self.lengths[1]),
            None => Attention::of_length(dim, causal, self.lengths[1]),
        };
        let narrow = self.fp8.is_some();
        // A bias takes as many registers as scores, and f32 twice those of the others.
        let mut all = Vec::new();
        if (self.element != Scalar::F32 || narrow) && !self.bias {
            all.push(of(best.tile, best.groups, best.stages));
            all.extend([of([128, 64], 2, 2), of([64, 64], 1, 2)]);
        }
        all.extend((dim < 256).then(|| of([64, 64], 1, 1)));
        all.push(of([64, 32], 1, 1));
        // A product of FP8 adds up 32.
        all.extend((!narrow).then(|| of([64, 16], 1, 1)));
        all
    }

    /// Whether there are kernels for its numbers.
    pub(super) fn check(&self, function: &'static str) -> Result<(), CallError> {
        let unsupported = |what: String| Err(CallError::Unsupported { function, what });
        let DotProductAttention { element, heads: [heads, shared], lengths: [queries, keys], dim, .. } =
            *self;
        if !matches!(element, Scalar::F16 | Scalar::Bf16 | Scalar::F32) {
            return unsupported(format!("elements of {element}; possible are f16, bf16 and f32"));
        }
        if dim > 256 {
            return unsupported(format!("heads have {dim} elements; 1 to 256 are possible"));
        }
        if heads > 0 && (shared == 0 || !heads.is_multiple_of(shared)) {
            return unsupported(format!("{heads} heads can't share {shared} heads of keys evenly"));
        }
        if self.mask == Mask::Window && self.window.iter().any(|reach| *reach >= 1 << 31) {
            return unsupported(format!("a window of {:?}; fewer than 2^31 are possible", self.window));
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return unsupported(format!("scale is {}; it must be above 0", self.scale));
        }
        if queries.max(keys) >= 1 << 30 {
            return unsupported(format!("{queries} queries and {keys} keys; fewer than 2^30 are possible"));
        }
        Ok(())
    }

    /// The arguments that say how far a query sees.
    pub(super) fn reach(&self) -> impl Iterator<Item = Operand> + use<> {
        let reach = (self.mask == Mask::Window).then_some(self.window);
        reach.into_iter().flatten().map(|reach| Operand::i32(reach.cast_signed()))
    }

    /// V as attention of FP8 takes it, `[batch, heads of keys, dim, keys]`, in the workspace, with zeros up to a multiple of 16 keys: the
    /// launch that makes it, its view, and how many bytes it takes.
    fn transposed_values(&self) -> Result<(Launch, Operand, u64), CallError> {
        let DotProductAttention { batch, heads: [_, shared], lengths: [_, keys], dim, .. } = *self;
        let (element, row) = (Scalar::F8E4M3, keys.next_multiple_of(16));
        let kernel = Transposed { element, pairs: false };
        let columns = shared * dim;
        let all = [batch, columns, row].iter().try_fold(1u64, |all, extent| all.checked_mul(*extent));
        let bytes = all.filter(|all| *all < 1 << 48).ok_or_else(|| CallError::Unsupported {
            function: NAME,
            what: format!("{batch} sequences of {keys} keys: V takes more than 2^48 bytes"),
        })?;
        let view = |extents: &[u64]| Operand::Workspace(Region::dense(element, 0, extents));
        let [down, along] = [keys, columns].map(|extent| extent.div_ceil(kernel.side()));
        let grid = [blocks(NAME, down.saturating_mul(along).saturating_mul(batch), 1)?, 1, 1];
        let operands = vec![
            Operand::whole(2, element, &[batch, keys, columns]),
            view(&[batch, columns, row]),
            Operand::i32(down as i32),
            Operand::i32(along as i32),
        ];
        let launch = Launch { entry: Entry::Transposed(kernel), grid, operands };
        Ok((launch, view(&[batch, shared, dim, row]), bytes))
    }

    /// Bytes of shared memory of a block, about.
    fn shared_bytes(&self, variant: &Attention) -> u64 {
        if self.fp8.is_some() {
            return variant.shared_bytes().into();
        }
        let [queries, keys] = variant.tile.map(u64::from);
        let [dim, values] = variant.dims.map(u64::from);
        let bytes = u64::from(self.element.bytes());
        OVERHEAD + bytes * (queries * dim + u64::from(variant.stages) * keys * (dim + values))
    }
}

/// Views of buffers as the kernels have them: heads, which lie side by side, are the second dimension.
pub(super) fn operands(buffers: &[Buffer]) -> Vec<Operand> {
    let view = |(index, Buffer { element, extents, .. }): (usize, &Buffer)| match extents[..] {
        [batch, tokens, heads, dim] => {
            let extents = vec![batch, heads, tokens, dim];
            let strides = vec![tokens * heads * dim, dim, heads * dim, 1];
            Operand::Buffer(index, Region { element: *element, offset: 0, extents, strides })
        }
        _ => Operand::whole(index, *element, extents),
    };
    buffers.iter().enumerate().map(view).collect()
}

impl Function for DotProductAttention {
    fn buffers(&self) -> Vec<Buffer> {
        let DotProductAttention {
            element, batch, heads: [heads, shared], lengths: [queries, keys], dim, ..
        } = *self;
        let of_q = [batch, queries, heads, dim];
        let of_k = [batch, keys, shared, dim];
        let factor = if self.fp8.is_some() { Scalar::F8E4M3 } else { element };
        let mut all = vec![
            Buffer::new("q", factor, &of_q, Access::Read),
            Buffer::new("k", factor, &of_k, Access::Read),
            Buffer::new("v", factor, &of_k, Access::Read),
            Buffer::new("o", element, &of_q, Access::Write),
        ];
        all.extend(self.bias.then(|| Buffer::new("bias", Scalar::F32, &[queries, keys], Access::Read)));
        for (name, heads) in [("q_scales", heads), ("k_scales", shared), ("v_scales", shared)] {
            let extents = match self.fp8 {
                None => break,
                Some(Fp8Scales::Tensor) => [1, 1],
                Some(Fp8Scales::Heads) => [batch, heads],
            };
            all.push(Buffer::new(name, Scalar::F32, &extents, Access::Read));
        }
        let rows = [batch, heads, queries];
        all.extend(self.log_sums.then(|| Buffer::new("log_sums", Scalar::F32, &rows, Access::Write)));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::attention::dot_product(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let DotProductAttention { batch, heads: [heads, _], lengths: [queries, _], dim, .. } = *self;
        self.check(NAME)?;
        if [batch, heads, queries, dim].contains(&0) {
            return Ok(Call::default());
        }
        let room = CallError::NoRoom { function: NAME, shared_bytes: resources.shared_bytes };
        let fits = |variant: &Attention| self.shared_bytes(variant) <= u64::from(resources.shared_bytes);
        let variant = self.variants(resources).into_iter().find(fits).ok_or(room)?;
        let tiles = queries.div_ceil(variant.tile[0].into()).saturating_mul(heads).saturating_mul(batch);
        if tiles >= 1 << 31 {
            return Err(CallError::Unsupported {
                function: NAME,
                what: format!("{batch} sequences of {queries} queries: fewer than 2^31 tiles"),
            });
        }
        let mut operands = self::operands(&self.buffers());
        // Behind the views of the heads stand those of log-sums and scales, the scale, the window, and the bias.
        let log_sums = if self.log_sums { operands.pop() } else { None };
        let bias = self.bias.then(|| operands.remove(4));
        operands.splice(4..4, log_sums);
        operands.push(Operand::f32(self.scale));
        operands.extend(self.reach());
        operands.extend(bias);
        let mut call = Call::default();
        if self.fp8.is_some() {
            let (launch, view, bytes) = self.transposed_values()?;
            (operands[2], call.workspace) = (view, bytes);
            call.launches.push(launch);
        }
        let units = if resources.kind == Kind::Cpu { tiles } else { resources.compute_units.max(1).into() };
        let blocks = u32::try_from(tiles.min(units)).unwrap_or(u32::MAX >> 1);
        call.launches.push(Launch { entry: Entry::Attention(variant), grid: [blocks, 1, 1], operands });
        Ok(call)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        // Rows begin at multiples of 16 bytes, or anywhere.
        let align = if aligned(16, &buffers[..4]) == 16 { self.align } else { 1 };
        DotProductAttention { align, ..*self }.call(resources)
    }
}
