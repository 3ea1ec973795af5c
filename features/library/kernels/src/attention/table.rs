//! Which variants there are for attention of certain extents.

use super::{Attention, Decode, Mask, Order};
use crate::family::{Kind, Problem, Resources, Sample, Variant, rounded};
use vm_ir::builder::BuildError;
use vm_ir::interp::Tensor;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Tiles of the forward kernel, and their groups: for `wgmma` the large ones, for less shared memory the last.
type Row = ([u32; 2], u32);
const OF_64: &[Row] = &[([192, 128], 3), ([128, 128], 2), ([128, 64], 2), ([64, 64], 1)];
const OF_128: &[Row] = &[([128, 128], 2), ([128, 160], 2), ([128, 64], 2), ([64, 64], 1)];
const OF_192: &[Row] = &[([128, 112], 2), ([128, 64], 2), ([64, 64], 1)];
const OF_256: &[Row] = &[([128, 64], 2), ([64, 64], 1)];
/// The same of FP8, of heads of 64, and of larger ones.
const FP8_64: &[Row] = &[([192, 128], 3), ([192, 160], 3), ([128, 192], 2), ([128, 128], 2), ([64, 64], 1)];
const FP8: &[Row] = &[([128, 128], 2), ([128, 160], 2), ([128, 192], 2), ([128, 224], 2), ([64, 64], 1)];
const FP8_256: &[Row] = &[([128, 128], 2), ([128, 64], 2), ([64, 64], 1)];
/// Packed ones have registers for fewer keys.
const FP8_PACKED: &[Row] = &[([128, 128], 2), ([128, 160], 2), ([128, 192], 2), ([64, 64], 1)];
const FP8_256_PACKED: &[Row] = &[([128, 96], 2), ([128, 64], 2), ([64, 64], 1)];

/// What barriers and alignment take of shared memory.
pub(super) const OVERHEAD: u32 = 2048;
/// Bytes of a row of a box that is copied at once.
const BOX_ROW: u32 = 128;

/// Bytes of what a block stores, on its way: up to two boxes of whole rows.
pub(super) const fn staged(rows: u32, columns: u32, element: Scalar) -> u32 {
    let boxes = columns * element.bytes() / BOX_ROW;
    (if boxes < 2 { boxes } else { 2 }) * rows * BOX_ROW
}

/// How far queries see in a window, as a class has it.
pub(super) fn reach(mask: Mask, window: [u32; 2]) -> String {
    match mask {
        Mask::Window => window.map(|reach| format!("_{}", rounded(reach.into()))).concat(),
        _ => String::new(),
    }
}

/// Extents of the views of a launch that is measured.
pub(super) struct Extents {
    /// Of the views' first dimension.
    pub(super) batch: u64,
    /// Queries and keys.
    pub(super) tokens: [u64; 2],
    /// Where packed sequences of queries and keys begin, and the last ends.
    pub(super) starts: Option<[Tensor; 2]>,
}

/// The length of one of `batch` packed sequences that are measured: from about half of `most` for the first to all of it for the last.
fn length(number: u64, batch: u64, most: u64) -> u64 {
    let part =
        u128::from(most) * (u128::from(batch) + u128::from(number) + 1) / (2 * u128::from(batch.max(1)));
    (part as u64).clamp(1, most.max(1))
}

/// The extents of sequences: of packed ones of different lengths, one behind the other.
pub(super) fn of_sequences(packed: bool, batch: u64, tokens: [u64; 2]) -> Extents {
    if !packed {
        return Extents { batch, tokens, starts: None };
    }
    let starts = tokens.map(|most| {
        let ends = (0..batch).scan(0u64, |end, number| {
            *end = end.saturating_add(length(number, batch, most));
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect::<Vec<u64>>()
    });
    let totals = [0, 1].map(|which| starts[which].last().copied().unwrap_or(0));
    let starts = starts.map(|starts| {
        let extents = [starts.len() as u64];
        Tensor::from_f64s(Scalar::I32, &extents, starts.into_iter().map(|start| start as f64))
    });
    Extents { batch: 1, tokens: totals, starts: Some(starts) }
}

/// Pairs of a query and a key that it sees, of one head of all sequences.
pub(super) fn seen(mask: Mask, window: [u32; 2], packed: bool, batch: u64, tokens: [u64; 2]) -> f64 {
    let of_sequence = |[queries, keys]: [u64; 2]| {
        let [queries, keys] = [queries, keys].map(|tokens| tokens as f64);
        queries
            * match mask {
                Mask::Full => keys,
                Mask::Causal if keys < queries => keys * keys / queries / 2.0,
                Mask::Causal => keys - queries / 2.0,
                Mask::Window => keys.min(window.iter().map(|reach| f64::from(*reach)).sum::<f64>() + 1.0),
            }
    };
    match packed {
        true => (0..batch).map(|number| of_sequence(tokens.map(|most| length(number, batch, most)))).sum(),
        false => batch as f64 * of_sequence(tokens),
    }
}

/// Attention: softmax(scale · Q · Kᵀ) · V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// As in [`Attention`].
    pub element: Scalar,
    /// As in [`Attention`]; scales are those of heads.
    pub fp8: bool,
    /// Elements of a query: 64, 128, 192 (with values of 128) or 256.
    pub dim: u32,
    /// Which keys a query sees.
    pub mask: Mask,
    /// How far before and behind its place a query sees in a [`Mask::Window`].
    pub window: [u32; 2],
    /// Are sequences of different lengths packed, one behind the other along the tokens? Those that are measured have from half of
    /// [`tokens`](Self::tokens) to all of them.
    pub packed: bool,
    /// Are the logarithms of the sums stored?
    pub log_sums: bool,
    /// Sequences.
    pub batch: u64,
    /// Heads of queries and of keys, at least 1.
    pub heads: [u64; 2],
    /// Queries and keys of a sequence, of packed ones of the longest.
    pub tokens: [u64; 2],
}

impl Forward {
    /// Of bf16, with as many heads of keys as of queries.
    pub const fn of(batch: u64, heads: u64, tokens: u64, dim: u32, causal: bool) -> Forward {
        let mask = if causal { Mask::Causal } else { Mask::Full };
        let (element, heads, tokens) = (Scalar::Bf16, [heads; 2], [tokens; 2]);
        let (fp8, packed, log_sums) = (false, false, false);
        Forward { element, fp8, dim, mask, window: [0; 2], packed, log_sums, batch, heads, tokens }
    }

    fn tiles(&self, rows: u32) -> u64 {
        let of_head = self.tokens[0].div_ceil(rows.max(1).into());
        of_head.saturating_mul(self.heads[0]).saturating_mul(self.batch).max(1)
    }

    fn variant(&self, (tile, groups): Row, order: Order) -> Attention {
        let Forward { element, fp8, mask, packed, log_sums, .. } = *self;
        Attention {
            element,
            fp8,
            mask,
            packed,
            log_sums,
            tile,
            groups,
            order,
            ..Attention::of(self.dim, mask == Mask::Causal)
        }
    }
}

impl Attention {
    /// Bytes of shared memory that a block takes: its stages, what it stores, and some for barriers.
    pub fn shared_bytes(&self) -> u32 {
        let ([queries, keys], [dim, values]) = (self.tile, self.dims);
        let staged = staged(queries, values.min(128), self.element);
        if self.fp8 {
            // Rows lie in whole boxes.
            let [of_k, of_v] = [dim, keys].map(|elements| elements.next_multiple_of(BOX_ROW));
            return OVERHEAD + queries * of_k + self.stages * (keys * of_k + values * of_v) + staged;
        }
        let elements = queries * dim + self.stages * keys * (dim + values);
        OVERHEAD + elements * self.element.bytes() + staged
    }
}

impl Variant for Attention {
    fn name(&self) -> String {
        Attention::name(self)
    }

    fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        Attention::kernel(self, guest)
    }
}

impl Problem for Forward {
    type Variant = Attention;

    fn family(&self) -> &str {
        "attention"
    }

    fn class(&self) -> String {
        let Forward { element, fp8, dim, mask, batch, heads, tokens, .. } = *self;
        let fp8 = if fp8 { "_fp8" } else { "" };
        let reach = reach(mask, self.window);
        let packed = if self.packed { "_packed" } else { "" };
        let log_sums = if self.log_sums { "_lse" } else { "" };
        let all_heads = rounded(batch.saturating_mul(heads[0]));
        let [queries, keys] = tokens.map(rounded);
        let sharing = rounded(heads[0] / heads[1].max(1));
        format!(
            "{}{reach}{fp8}_{element}_d{dim}{packed}{log_sums}_{all_heads}by{sharing}_{queries}x{keys}",
            mask.name()
        )
    }

    fn variants(&self, resources: &Resources) -> Vec<Attention> {
        let causal = self.mask == Mask::Causal;
        if self.element == Scalar::F32 && !self.fp8 {
            // No `wgmma` multiplies them; tiles that stay in a processor's cache are the first guess.
            let order = Attention::cpu(self.dim, causal).order;
            let rows = [([128, 128], 1), ([64, 64], 1), ([64, 32], 1)];
            let all = rows.map(|row| Attention { stages: 1, ..self.variant(row, order) });
            let fits = |variant: &Attention| variant.shared_bytes() <= resources.shared_bytes;
            return all.into_iter().filter(fits).collect();
        }
        let guess = match self.fp8 {
            true => Attention::fp8(self.dim, causal, self.tokens[1]),
            false => Attention::of_length(self.dim, causal, self.tokens[1]),
        };
        let table = match self.dim {
            64 if self.fp8 => FP8_64,
            256 if self.fp8 && self.packed => FP8_256_PACKED,
            256 if self.fp8 => FP8_256,
            _ if self.fp8 && self.packed => FP8_PACKED,
            _ if self.fp8 => FP8,
            64 => OF_64,
            128 => OF_128,
            192 => OF_192,
            _ => OF_256,
        };
        let orders: &[Order] = if causal { &[Order::Balanced, Order::Heads] } else { &[guess.order] };
        let row = match self.dim {
            256 if self.fp8 && self.packed => FP8_256_PACKED[0],
            _ => (guess.tile, guess.groups),
        };
        let first = Attention { stages: guess.stages, ..self.variant(row, guess.order) };
        let others = orders.iter().flat_map(|order| table.iter().map(|row| self.variant(*row, *order)));
        let mut variants = vec![first];
        variants.extend(others.filter(|variant| *variant != first));
        variants.retain(|variant| variant.shared_bytes() <= resources.shared_bytes);
        if variants.is_empty() {
            // One stage takes the least.
            variants.push(Attention { stages: 1, ..self.variant(([64, 32], 1), guess.order) });
        }
        variants
    }

    fn grid(&self, variant: &Attention, resources: &Resources) -> [u32; 3] {
        let units = resources.compute_units.max(1);
        [u32::try_from(self.tiles(variant.tile[0])).unwrap_or(u32::MAX).min(units), 1, 1]
    }

    fn arguments(&self) -> Vec<Sample> {
        let Forward { element, dim, heads, .. } = *self;
        let Extents { batch, tokens, starts } = of_sequences(self.packed, self.batch, self.tokens);
        let values = u64::from(Attention::of(dim, false).dims[1]);
        let factor = if self.fp8 { Scalar::F8E4M3 } else { element };
        let view = |element, which: usize, matrix: [u64; 2]| Sample::Random {
            element,
            extents: vec![batch, heads[which], matrix[0], matrix[1]],
        };
        let of_v = match self.fp8 {
            // Rows begin at multiples of 16 bytes.
            true => [values, tokens[1].div_ceil(16).saturating_mul(16)],
            false => [tokens[1], values],
        };
        let mut all = vec![
            view(factor, 0, [tokens[0], dim.into()]),
            view(factor, 1, [tokens[1], dim.into()]),
            view(factor, 1, of_v),
            view(element, 0, [tokens[0], values]),
        ];
        let rows = Sample::Random { element: Scalar::F32, extents: vec![batch, heads[0], tokens[0]] };
        all.extend(self.log_sums.then_some(rows));
        if self.fp8 {
            let scales = [heads[0], heads[1], heads[1]];
            all.extend(
                scales.map(|heads| Sample::Random { element: Scalar::F32, extents: vec![self.batch, heads] }),
            );
        }
        let packed = starts.is_some();
        all.extend(starts.into_iter().flatten().map(Sample::Values));
        all.push(Sample::f32(1.0 / (dim as f32).sqrt()));
        if self.mask == Mask::Window {
            all.extend(self.window.map(|reach| Sample::Number(reach.into(), Type::I32)));
        }
        all.extend(packed.then(|| Sample::Number(self.tokens[0], Type::I32)));
        all
    }

    fn operations(&self) -> f64 {
        let pairs = seen(self.mask, self.window, self.packed, self.batch, self.tokens);
        let columns = Attention::of(self.dim, false).dims.iter().sum::<u32>();
        2.0 * f64::from(columns) * pairs * self.heads[0] as f64
    }
}

/// Attention of a few queries of each sequence to all that came before them: the first kernel of [`Decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generate {
    /// As in [`Decode`].
    pub element: Scalar,
    /// Elements of a query: a multiple of 64 up to 256.
    pub dim: u32,
    /// Tokens of a page; 0 of a cache that is not paged.
    pub page: u32,
    /// Sequences.
    pub batch: u64,
    /// Heads of queries and of keys, at least 1.
    pub heads: [u64; 2],
    /// Queries of a sequence, at least 1.
    pub queries: u64,
    /// Tokens of a sequence, those of the queries too.
    pub tokens: u64,
}

impl Generate {
    fn rows(&self) -> u64 {
        (self.heads[0] / self.heads[1].max(1)).max(1).saturating_mul(self.queries.max(1))
    }

    /// The most splits of a launch, fewer where there are many heads.
    fn most_splits(&self) -> u32 {
        (1024 / self.heads[1].saturating_mul(self.batch).clamp(1, 1024)).clamp(1, 64) as u32
    }

    /// Blocks of a variant without a split: along y, and along z.
    fn blocks(&self, variant: &Decode) -> [u64; 2] {
        let tiles = self.rows().div_ceil(variant.rows.max(1).into());
        [tiles.saturating_mul(self.heads[1]).max(1), self.batch.max(1)]
    }
}

impl Decode {
    /// Bytes of shared memory that a block takes: its stages, what it stores, and some for barriers.
    pub fn shared_bytes(&self) -> u32 {
        let elements = self.rows * self.dim + 2 * self.stages * self.keys * self.dim;
        OVERHEAD + elements * self.element.bytes() + staged(self.rows, self.dim, Scalar::F32)
    }

    /// Blocks that a compute unit has at a time: one, or two.
    fn resident(&self, resources: &Resources) -> u32 {
        match resources.kind {
            Kind::Cpu => 1,
            Kind::Gpu => (resources.shared_bytes / self.shared_bytes().max(1)).clamp(1, 2),
        }
    }
}

impl Variant for Decode {
    fn name(&self) -> String {
        Decode::name(self, "decode")
    }

    fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        Decode::kernel(self, guest)
    }
}

impl Problem for Generate {
    type Variant = Decode;

    fn family(&self) -> &str {
        "decode"
    }

    fn class(&self) -> String {
        let Generate { element, dim, page, batch, heads, tokens, .. } = *self;
        let (rows, all_heads) = (rounded(self.rows()), rounded(batch.saturating_mul(heads[1])));
        format!("{element}_d{dim}_p{page}_{all_heads}x{rows}x{}", rounded(tokens))
    }

    fn variants(&self, resources: &Resources) -> Vec<Decode> {
        let Generate { element, dim, page, .. } = *self;
        let of = Decode { element, ..Decode::of(dim, page) };
        let small = Decode { stages: Decode::small(dim, page).stages, ..of };
        // Twice as many keys in a step of softmax.
        let long = Decode { boxes: (2 * of.boxes).min(of.stages), ..of };
        let fewer = Decode { keys: of.keys / 2, boxes: 2 * of.boxes, stages: (2 * of.stages).min(16), ..of };
        let mut variants = vec![of, small, long];
        variants.extend((of.keys > 16).then_some(fewer));
        if small.resident(resources) > 1 {
            // One block's softmax runs while the other's keys are awaited.
            variants.swap(0, 1);
        }
        variants.retain(|variant| variant.shared_bytes() <= resources.shared_bytes);
        if variants.is_empty() {
            // One step's keys take the least.
            variants.push(Decode { keys: 16, boxes: 1, stages: 1, ..of });
        }
        let mut different: Vec<Decode> = Vec::new();
        for variant in variants {
            if !different.contains(&variant) {
                different.push(variant);
            }
        }
        different
    }

    fn grid(&self, variant: &Decode, resources: &Resources) -> [u32; 3] {
        let [across, sequences] = self.blocks(variant);
        let resident = u64::from(resources.compute_units) * u64::from(variant.resident(resources));
        let splits = variant.splits(resident, across.saturating_mul(sequences), self.tokens);
        let short = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        // What the arguments have room for.
        [splits.min(self.most_splits()), short(across), short(sequences)]
    }

    fn arguments(&self) -> Vec<Sample> {
        let Generate { element, dim, page, batch, heads, tokens, .. } = *self;
        let (dim, page, rows) = (u64::from(dim), u64::from(page), self.rows());
        let view = |element, extents: &[u64]| Sample::Random { element, extents: extents.to_vec() };
        let q = view(element, &[batch, heads[1], rows, dim]);
        let pages = if page > 0 { tokens.div_ceil(page).max(1) } else { 0 };
        let cache = match page {
            0 => view(element, &[batch, heads[1], tokens, dim]),
            page => view(element, &[batch.saturating_mul(pages), heads[1], page, dim]),
        };
        let values = |extents: &[u64], numbers: &mut dyn Iterator<Item = f64>| {
            Sample::Values(Tensor::from_f64s(Scalar::I32, extents, numbers))
        };
        let mut all = vec![q, cache.clone(), cache];
        if page > 0 {
            all.push(values(&[batch, pages], &mut (0..batch.saturating_mul(pages)).map(|page| page as f64)));
        }
        all.push(values(&[batch], &mut (0..batch).map(|_| tokens as f64)));
        let parts = [u64::from(self.most_splits()), batch.saturating_mul(heads[1]), rows, dim];
        all.extend([view(Scalar::F32, &parts), view(Scalar::F32, &parts[..3])]);
        all.push(Sample::f32(1.0 / (dim as f32).sqrt()));
        all.push(Sample::Number(self.queries.max(1), Type::I32));
        all
    }

    fn operations(&self) -> f64 {
        let rows = self.rows() as f64 * self.heads[1] as f64 * self.batch as f64;
        4.0 * rows * self.tokens as f64 * f64::from(self.dim)
    }
}
