//! Attention of a model that generates, to a contiguous cache, as a function of the library.

use super::{Decode, Generate};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Region, Workspace};
use crate::family::{Kind, Problem, Resources};
use crate::strided::check_aligned;
use vm_ir::Scalar;
use vm_ir::view::Access;

/// Attention of the newest token of each sequence to all that are in a cache, itself too.
///
/// Its buffers: `qkv`, `[batch, heads + 2 · shared, dim]`, of which the queries are read, the first `heads`; `k_cache` and `v_cache`, `[batch,
/// capacity, shared, dim]`; `lengths`, i32, `[batch]`, tokens of each sequence with the newest; `o`, `[batch, heads, dim]`. All but the lengths are
/// aligned to 16 bytes. A sequence without tokens gets zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeAttention {
    /// What the buffers hold: f16, bf16 or f32.
    pub element: Scalar,
    /// Sequences.
    pub batch: u64,
    /// Heads of queries, and of keys and values, of which those are a multiple.
    pub heads: [u64; 2],
    /// Elements of a head: a multiple of 64 up to 256.
    pub dim: u32,
    /// Tokens that a sequence has room for.
    pub capacity: u64,
    /// What Q · Kᵀ is multiplied by, above 0.
    pub scale: f32,
}

/// Rows of a block of the kernel that joins.
const JOINED: u64 = 8;

impl Function for DecodeAttention {
    fn buffers(&self) -> Vec<Buffer> {
        let DecodeAttention { element, batch, heads: [heads, shared], capacity, .. } = *self;
        let dim = u64::from(self.dim);
        let all = heads.saturating_add(shared.saturating_mul(2));
        let cache = |name| Buffer::new(name, element, &[batch, capacity, shared, dim], Access::Read);
        vec![
            Buffer::new("qkv", element, &[batch, all, dim], Access::Read).counting(1),
            cache("k_cache"),
            cache("v_cache"),
            Buffer::new("lengths", Scalar::I32, &[batch], Access::Read),
            Buffer::new("o", element, &[batch, heads, dim], Access::Write).counting(1),
        ]
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "decode_attention";
        let unsupported = |what: String| Err(CallError::Unsupported { function: NAME, what });
        let DecodeAttention { element, batch, heads: [heads, shared], capacity, scale, .. } = *self;
        let dim = u64::from(self.dim);
        if !matches!(self.dim, 64 | 128 | 192 | 256) {
            return unsupported(format!("heads have {dim} elements; possible are 64, 128, 192 and 256"));
        }
        if !matches!(element, Scalar::F16 | Scalar::Bf16 | Scalar::F32) {
            return unsupported(format!("elements of {element}; possible are f16, bf16 and f32"));
        }
        if shared == 0 || !heads.is_multiple_of(shared) {
            return unsupported(format!("{heads} heads can't share {shared} heads of keys evenly"));
        }
        if !(scale > 0.0 && scale.is_finite()) {
            return unsupported(format!("scale is {scale}; it must be above 0"));
        }
        if batch >= 1 << 16 || heads >= 1 << 16 || capacity >= 1 << 30 {
            return unsupported(format!(
                "{batch} sequences of {heads} heads with room for {capacity} tokens; fewer than 2^16, 2^16 and 2^30 are possible"
            ));
        }
        if batch == 0 || heads == 0 {
            return Ok(Call::default());
        }
        let generate = Generate {
            element,
            dim: self.dim,
            page: 0,
            batch,
            heads: self.heads,
            queries: 1,
            tokens: capacity,
        };
        let variant = match (resources.kind, element) {
            (Kind::Cpu, _) => Some(Decode { element, ..Decode::cpu(self.dim, 0) }),
            (_, Scalar::F32) => Some(Decode { rows: 64, ..Decode::cpu(self.dim, 0) }),
            _ => generate.variants(resources).into_iter().next(),
        };
        let room = CallError::NoRoom { function: NAME, shared_bytes: resources.shared_bytes };
        let variant =
            variant.filter(|variant| variant.shared_bytes() <= resources.shared_bytes).ok_or(room)?;
        let grid = generate.grid(&variant, resources);
        let (rows, all) = (heads / shared, (heads + 2 * shared) * dim);
        let view = |buffer, extents: [u64; 4], strides: [u64; 4]| {
            let (extents, strides) = (extents.to_vec(), strides.to_vec());
            Operand::Buffer(buffer, Region { element, offset: 0, extents, strides })
        };
        let of_q = [batch, shared, rows, dim];
        let q = view(0, of_q, [all, rows * dim, dim, 1]);
        let o = view(4, of_q, [heads * dim, rows * dim, dim, 1]);
        let of_cache = [batch, shared, capacity, dim];
        let cache = |buffer| view(buffer, of_cache, [capacity * shared * dim, dim, shared * dim, 1]);
        let lengths = Operand::whole(3, Scalar::I32, &[batch]);
        let mut workspace = Workspace::default();
        let parts = [u64::from(grid[0]), batch * shared, rows, dim];
        let [sums, parts] = [&parts[..3], &parts[..]].map(|extents| workspace.take(Scalar::F32, extents));
        let operands = vec![
            q,
            cache(1),
            cache(2),
            lengths,
            parts.clone(),
            sums.clone(),
            Operand::f32(scale),
            Operand::i32(1),
        ];
        let first = Launch { entry: Entry::Decode(variant), grid, operands };
        let grid = [rows.div_ceil(JOINED) as u32, shared as u32, batch as u32];
        let second = Launch { entry: Entry::DecodeJoin(variant), grid, operands: vec![parts, sums, o] };
        Ok(Call { launches: vec![first, second], workspace: workspace.bytes() })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        check_aligned(buffers)?;
        self.call(resources)
    }
}
