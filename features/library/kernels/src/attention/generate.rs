//! Attention of a model that generates, to a cache in one piece or in pages, as a function of the library.

use super::{Decode, Generate};
use crate::append::Layout;
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Region, Workspace};
use crate::family::{Kind, Problem, Resources};
use crate::graph::{self, NoGraph};
use crate::strided::check_aligned;
use vm_graph::ValidGraph;
use vm_ir::Scalar;
use vm_ir::limits::MAX_GRID_YZ;
use vm_ir::view::Access;

/// Attention of the newest token of each sequence to all that are in a cache, itself too: o = softmax(scale · q · Kᵀ) · V for each head, where K and V are the
/// first `lengths[b]` tokens of sequence b.
///
/// Its buffers: `q`, `[batch, heads, dim]`, or, [`packed`](Self::packed), `qkv`, `[batch, heads + 2 · shared, dim]`, of which the queries are read, the first
/// `heads`; `k_cache` and `v_cache`, as [`KvAppend`](crate::append::KvAppend) writes them: `[batch, capacity, shared, dim]`, or `[pages, page, shared, dim]`;
/// `lengths`, i32, `[batch]`, tokens of each sequence with the newest; of pages `table`, i32, `[batch, of_sequence]`: token t of sequence b is token t mod
/// `page` of page table\[b, t / `page`\]; and `o`, `[batch, heads, dim]`. All but lengths and table are aligned to 16 bytes.
///
/// A sequence without tokens gets zeros. A length that is negative is 0, and one beyond the room is the room; a page that is none has keys and values
/// of zeros: nothing outside of the cache is read. What lies behind a sequence's last token in the cache must be finite.
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
    /// What the cache is of: a piece for each sequence, or pages of any number of tokens.
    pub layout: Layout,
    /// Do the queries stand beside keys and values, as one product has computed them?
    pub packed: bool,
    /// What Q · Kᵀ is multiplied by, above 0.
    pub scale: f32,
}

/// Rows of a block of the kernel that joins.
const JOINED: u64 = 8;

impl DecodeAttention {
    /// Elements of a row of queries.
    fn row(&self) -> u64 {
        let [heads, shared] = self.heads;
        let beside = if self.packed { shared.saturating_mul(2) } else { 0 };
        heads.saturating_add(beside)
    }
}

impl Function for DecodeAttention {
    fn buffers(&self) -> Vec<Buffer> {
        let DecodeAttention { element, batch, heads: [heads, shared], layout, packed, .. } = *self;
        let dim = u64::from(self.dim);
        let [slots, room] = match layout {
            Layout::Contiguous { capacity } => [batch, capacity],
            Layout::Paged { pages, page, .. } => [pages, page.into()],
        };
        let cache = |name| Buffer::new(name, element, &[slots, room, shared, dim], Access::Read);
        let q = if packed { "qkv" } else { "q" };
        let mut all = vec![
            Buffer::new(q, element, &[batch, self.row(), dim], Access::Read).counting(1),
            cache("k_cache"),
            cache("v_cache"),
            Buffer::new("lengths", Scalar::I32, &[batch], Access::Read),
        ];
        if let Layout::Paged { of_sequence, .. } = layout {
            all.push(Buffer::new("table", Scalar::I32, &[batch, of_sequence], Access::Read));
        }
        all.push(Buffer::new("o", element, &[batch, heads, dim], Access::Write).counting(1));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::attention::decode(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "decode_attention";
        let unsupported = |what: String| Err(CallError::Unsupported { function: NAME, what });
        let DecodeAttention { element, batch, heads: [heads, shared], layout, scale, .. } = *self;
        let dim = u64::from(self.dim);
        // What a sequence has room for, where each page takes whole copies of keys.
        let (page, slots, tokens, room) = match layout {
            Layout::Contiguous { capacity } => (0, batch, capacity, capacity),
            Layout::Paged { page: 0, .. } => {
                return unsupported("pages of 0 tokens; they have at least 1".into());
            }
            Layout::Paged { pages, page, of_sequence } => {
                (page, pages, page.into(), of_sequence.saturating_mul(page.next_multiple_of(16).into()))
            }
        };
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
        if heads >= 1 << 16 || room >= 1 << 30 || slots.max(batch) >= 1 << 31 {
            return unsupported(format!(
                "{batch} sequences of {heads} heads with room for {room} tokens in {slots} pieces; fewer than 2^31, 2^16, 2^30 and 2^31 are possible"
            ));
        }
        if batch == 0 || heads == 0 {
            return Ok(Call::default());
        }
        let generate =
            Generate { element, dim: self.dim, page, batch, heads: self.heads, queries: 1, tokens: room };
        let variant = match (resources.kind, element) {
            (Kind::Cpu, _) => Some(Decode { element, ..Decode::cpu(self.dim, page) }),
            (_, Scalar::F32) => Some(Decode { rows: 64, ..Decode::cpu(self.dim, page) }),
            _ => generate.variants(resources).into_iter().next(),
        };
        let room = CallError::NoRoom { function: NAME, shared_bytes: resources.shared_bytes };
        let variant =
            variant.filter(|variant| variant.shared_bytes() <= resources.shared_bytes).ok_or(room)?;
        let grid = generate.grid(&variant, resources);
        let (rows, all) = (heads / shared, self.row() * dim);
        let view = |buffer, extents: [u64; 4], strides: [u64; 4]| {
            let (extents, strides) = (extents.to_vec(), strides.to_vec());
            Operand::Buffer(buffer, Region { element, offset: 0, extents, strides })
        };
        let of_q = [batch, shared, rows, dim];
        let q = view(0, of_q, [all, rows * dim, dim, 1]);
        let of_cache = [slots, shared, tokens, dim];
        let cache = |buffer| view(buffer, of_cache, [tokens * shared * dim, dim, shared * dim, 1]);
        // By what a block along z has one of: sequences, which have pieces of a cache that is contiguous.
        let sequences = [None, Some(0)];
        let of_slot = if page == 0 { sequences } else { [None; 2] };
        let mut operands = vec![(q, sequences), (cache(1), of_slot), (cache(2), of_slot)];
        let mut last = 4;
        if let Layout::Paged { of_sequence, .. } = layout {
            operands.push((Operand::whole(4, Scalar::I32, &[batch, of_sequence]), sequences));
            last = 5;
        }
        operands.push((Operand::whole(3, Scalar::I32, &[batch]), sequences));
        let o = view(last, of_q, [heads * dim, rows * dim, dim, 1]);
        let mut workspace = Workspace::default();
        // Launches of more sequences than a grid has room for take turns with those that join, in the same workspace.
        let parts = [u64::from(grid[0]), batch.min(MAX_GRID_YZ.into()) * shared, rows, dim];
        // The greatest score of each split's rows, and the sum of exponentials below it.
        let sums = [2 * parts[0], parts[1], parts[2]];
        let [sums, parts] =
            [&sums[..], &parts[..]].map(|extents| (workspace.take(Scalar::F32, extents), [None; 2]));
        let [scale, one] = [Operand::f32(scale), Operand::i32(1)].map(|number| (number, [None; 2]));
        operands.extend([parts.clone(), sums.clone(), scale.clone(), one]);
        let splits = Launch::folded(Entry::Decode(variant), grid[0], [grid[1].into(), batch], &operands);
        let operands = [parts, sums, (o, sequences), scale];
        let joined = rows.div_ceil(JOINED) as u32;
        let joins = Launch::folded(Entry::DecodeJoin(variant), joined, [shared, batch], &operands);
        let launches = splits.into_iter().zip(joins).flat_map(|(split, join)| [split, join]).collect();
        Ok(Call { launches, workspace: workspace.bytes() })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        check_aligned(buffers)?;
        self.call(resources)
    }
}
