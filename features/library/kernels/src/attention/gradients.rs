//! Which variants there are for the gradients of attention of certain extents.

use super::table::{Extents, of_sequences, seen};
use super::{Attention, Backward, BackwardPass, Gradient, Mask, Order, SplitBackward};
use crate::family::{Kind, Problem, Resources, Sample, Step, Variant, rounded};
use vm_ir::builder::BuildError;
use vm_ir::limits::MAX_GRID_YZ;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Queries of a block of the kernels that are no tile kernels.
const QUERIES: u64 = 64;

/// The gradients of attention: of Q, K and V, from that of O.
///
/// Their kernels run one behind the other, so they are measured as one sequence, and chosen together: the three of
/// [`Backward`], or the four of [`SplitBackward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gradients {
    /// What Q, K, V, O and the gradients hold: f16, bf16 or f32.
    pub element: Scalar,
    /// Elements of a query: 64, 128, 192 (with values of 128) or 256.
    pub dim: u32,
    /// Which keys a query sees.
    pub mask: Mask,
    /// How far before and behind its place a query sees in a [`Mask::Window`].
    pub window: [u32; 2],
    /// As in [`Forward`](super::Forward).
    pub packed: bool,
    /// Sequences.
    pub batch: u64,
    /// Heads of queries and of keys, at least 1.
    pub heads: [u64; 2],
    /// Queries and keys of a sequence, of packed ones of the longest.
    pub tokens: [u64; 2],
}

/// A variant of the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientKernels {
    /// δ and zeros, all gradients at once, and the sums of dQ rounded.
    Together(Backward),
    /// δ, and a kernel for each gradient.
    Apart(SplitBackward),
}

impl Gradients {
    /// Of bf16, with as many heads of keys as of queries.
    pub const fn of(batch: u64, heads: u64, tokens: u64, dim: u32, causal: bool) -> Gradients {
        let mask = if causal { Mask::Causal } else { Mask::Full };
        let (element, window, packed) = (Scalar::Bf16, [0; 2], false);
        Gradients { element, dim, mask, window, packed, batch, heads: [heads; 2], tokens: [tokens; 2] }
    }

    /// Elements of a value.
    fn values(&self) -> u32 {
        Attention::of(self.dim, false).dims[1]
    }

    /// Does [`Backward`] take such heads?
    fn is_taken_together(&self) -> bool {
        matches!(self.dim, 64 | 128) && self.element.bytes() == 2 && !self.packed
    }

    /// Those of [`Backward`]: first the one that a call takes.
    fn together(&self, resources: &Resources) -> Vec<Backward> {
        let fits = |variant: &Backward| variant.shared_bytes() <= resources.shared_bytes.into();
        let first =
            Backward { element: self.element, mask: self.mask, ..Backward::of(self.dim, self.is_causal()) };
        let small = Backward { tile: [64, 64], groups: 1, ..first };
        if resources.kind == Kind::Cpu || !fits(&first) {
            return [small].into_iter().filter(fits).collect();
        }
        let mut all = vec![first, Backward { stages: 2, ..first }];
        // Of heads of 128 elements smaller tiles spill, and are for less shared memory.
        all.extend(
            (self.dim == 64).then_some([small, Backward { stages: 4, ..first }]).into_iter().flatten(),
        );
        all.extend(self.is_causal().then_some(Backward { order: Order::Heads, ..first }));
        all.retain(fits);
        all
    }

    /// Those of [`SplitBackward`], likewise.
    fn apart(&self, resources: &Resources) -> Vec<SplitBackward> {
        let Gradients { element, dim, mask, packed, .. } = *self;
        let fits = |variant: &SplitBackward| variant.shared_bytes() <= resources.shared_bytes.into();
        let of = |variant| SplitBackward { element, mask, packed, ..variant };
        let (large, small) =
            (of(SplitBackward::of(dim, self.is_causal())), of(SplitBackward::small(dim, self.is_causal())));
        let least = SplitBackward { tile: [64, 16], ..small };
        let mut all = match (resources.kind, element) {
            (Kind::Cpu, _) => vec![SplitBackward { tile: [64, 64], ..small }, small],
            (_, Scalar::F32) => vec![small, least],
            _ => {
                let mut all = vec![large, small];
                all.extend((large.stages > 1).then_some(SplitBackward { stages: 1, ..large }));
                all.extend((dim <= 128).then_some(SplitBackward { stages: 2, ..small }));
                all.extend(self.is_causal().then_some(SplitBackward { order: Order::Heads, ..large }));
                all
            }
        };
        all.retain(fits);
        if all.is_empty() {
            all.push(least);
            all.retain(fits);
        }
        all
    }

    fn is_causal(&self) -> bool {
        self.mask == Mask::Causal
    }

    fn extents(&self) -> Extents {
        of_sequences(self.packed, self.batch, self.tokens)
    }

    /// Blocks of a tile kernel of queries (0) or keys (1).
    fn blocks(&self, which: usize, rows: u32, resources: &Resources) -> [u32; 3] {
        let of_head = self.tokens[which].div_ceil(rows.max(1).into());
        let tiles = of_head.saturating_mul(self.heads[which]).saturating_mul(self.batch).max(1);
        let most = match resources.kind {
            Kind::Cpu => u32::MAX >> 1,
            Kind::Gpu => resources.compute_units.max(1),
        };
        [u32::try_from(tiles).unwrap_or(u32::MAX).min(most), 1, 1]
    }

    /// Blocks of a kernel of rows of queries: 64 of a head of a sequence. Of more heads or sequences than a grid has room for they are not all that there
    /// are, which takes several launches.
    fn by_rows(&self) -> [u32; 3] {
        let Extents { batch, tokens: [queries, _], .. } = self.extents();
        let short = |count: u64| u32::try_from(count.max(1)).unwrap_or(u32::MAX);
        let [heads, sequences] = [self.heads[0], batch].map(|count| short(count).min(MAX_GRID_YZ));
        [short(queries.div_ceil(QUERIES)), heads, sequences]
    }
}

impl Variant for GradientKernels {
    fn name(&self) -> String {
        match self {
            GradientKernels::Together(variant) => variant.name("backward"),
            GradientKernels::Apart(variant) => variant.name("gradients"),
        }
    }

    fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        match self {
            GradientKernels::Together(variant) => variant.kernel(guest),
            GradientKernels::Apart(variant) => variant.kernel(Gradient::Keys, guest),
        }
    }

    fn kernels(&self, guest: GuestAddr) -> Result<Vec<Kernel>, BuildError> {
        match self {
            GradientKernels::Together(variant) => {
                let passes = [BackwardPass::Prepare, BackwardPass::Main, BackwardPass::Finish];
                passes.into_iter().map(|pass| variant.pass(pass, guest)).collect()
            }
            GradientKernels::Apart(variant) => {
                let gradients = Gradient::ALL.into_iter().map(|of| variant.kernel(of, guest));
                std::iter::once(variant.prepare(guest)).chain(gradients).collect()
            }
        }
    }
}

impl GradientKernels {
    /// Bytes of shared memory that a block of any of the kernels takes, about.
    pub fn shared_bytes(&self) -> u64 {
        match self {
            GradientKernels::Together(variant) => variant.shared_bytes(),
            GradientKernels::Apart(variant) => variant.shared_bytes(),
        }
    }
}

impl Problem for Gradients {
    type Variant = GradientKernels;

    fn family(&self) -> &str {
        "attention_gradients"
    }

    fn class(&self) -> String {
        let Gradients { element, dim, mask, batch, heads, tokens, .. } = *self;
        let reach = super::table::reach(mask, self.window);
        let packed = if self.packed { "_packed" } else { "" };
        let all_heads = rounded(batch.saturating_mul(heads[0]));
        let [queries, keys] = tokens.map(rounded);
        let sharing = rounded(heads[0] / heads[1].max(1));
        format!("{}{reach}_{element}_d{dim}{packed}_{all_heads}by{sharing}_{queries}x{keys}", mask.name())
    }

    fn variants(&self, resources: &Resources) -> Vec<GradientKernels> {
        let together = if self.is_taken_together() { self.together(resources) } else { Vec::new() };
        let apart = self.apart(resources).into_iter().map(GradientKernels::Apart);
        let mut different = Vec::new();
        for variant in together.into_iter().map(GradientKernels::Together).chain(apart) {
            if !different.contains(&variant) {
                different.push(variant);
            }
        }
        different
    }

    fn grid(&self, variant: &GradientKernels, resources: &Resources) -> [u32; 3] {
        match variant {
            GradientKernels::Together(variant) => self.blocks(1, variant.tile[1], resources),
            GradientKernels::Apart(variant) => self.blocks(1, variant.tile[0], resources),
        }
    }

    fn steps(&self, variant: &GradientKernels, resources: &Resources) -> Vec<Step> {
        let [q, k, v, o, d_o, lse, delta, dq, dk, dv, scale] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        let behind = if self.mask == Mask::Window { vec![scale, 11, 12] } else { vec![scale] };
        let next = scale + behind.len();
        let step = |grid, arguments: &[&[usize]]| Step { grid, arguments: arguments.concat() };
        match variant {
            GradientKernels::Together(together) => {
                let sums = next + usize::from(together.turned());
                let grid = self.grid(variant, resources);
                vec![
                    step(self.by_rows(), &[&[o, d_o, delta, sums]]),
                    step(grid, &[&[q, k, v, d_o, lse, delta, sums, dk, dv], &behind]),
                    step(self.by_rows(), &[&[sums, dq, scale]]),
                ]
            }
            GradientKernels::Apart(apart) => {
                // Behind those of dense sequences, or of packed ones: where they begin, and the most queries and keys.
                let starts = if self.packed { vec![next, next + 1] } else { Vec::new() };
                let longest = |which: usize| if self.packed { vec![next + 2 + which] } else { Vec::new() };
                let grid = |which| self.blocks(which, apart.tile[0], resources);
                let factors = [q, k, v, d_o, lse, delta];
                vec![
                    step(self.by_rows(), &[&[o, d_o, delta]]),
                    step(grid(0), &[&factors, &[dq], &starts, &behind, &longest(0)]),
                    step(grid(1), &[&factors, &[dk], &starts, &behind, &longest(1)]),
                    step(grid(1), &[&[q, k, d_o, lse, dv], &starts, &behind, &longest(1)]),
                ]
            }
        }
    }

    fn arguments(&self) -> Vec<Sample> {
        let Gradients { element, dim, heads, .. } = *self;
        let Extents { batch, tokens: [queries, keys], starts } = self.extents();
        let (dim, values) = (u64::from(dim), u64::from(self.values()));
        let view = |element, extents: &[u64]| Sample::Random { element, extents: extents.to_vec() };
        let of_q = |columns| view(element, &[batch, heads[0], queries, columns]);
        let of_k = |columns| view(element, &[batch, heads[1], keys, columns]);
        let row = || view(Scalar::F32, &[batch, heads[0], queries]);
        let mut all = vec![of_q(dim), of_k(dim), of_k(values), of_q(values), of_q(values)];
        all.extend([row(), row(), of_q(dim), of_k(dim), of_k(values)]);
        all.push(Sample::f32(1.0 / (dim as f32).sqrt()));
        if self.mask == Mask::Window {
            all.extend(self.window.map(|reach| Sample::Number(reach.into(), Type::I32)));
        }
        if self.is_taken_together() {
            let tiles = queries.div_ceil(QUERIES).saturating_mul(dim);
            all.push(view(Scalar::F32, &[batch, heads[0], queries, dim]));
            all.push(view(Scalar::F32, &[batch, heads[0], tiles, QUERIES]));
        }
        if let Some(starts) = starts {
            all.extend(starts.map(Sample::Values));
            all.extend(self.tokens.map(|most| Sample::Number(most, Type::I32)));
        }
        all
    }

    fn operations(&self) -> f64 {
        // Three of the five products have D columns or add them up, two those of values.
        let [dim, values] = [self.dim, self.values()].map(f64::from);
        let pairs = seen(self.mask, self.window, self.packed, self.batch, self.tokens);
        2.0 * (3.0 * dim + 2.0 * values) * pairs * self.heads[0] as f64
    }
}
