//! Attention of a few queries to a cache by its definition, in f64, and whether kernels compute it.

use super::{Mismatch, close, float, random};
use vm_ir::interp::{Argument, Tensor};
use vm_ir::{GuestAddr, Kernel, Scalar};
use vm_kernels::attention::Decode;

/// What is attended to.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    /// Heads of keys, heads of queries for each, and queries of a sequence.
    pub(crate) heads: u64,
    pub(crate) sharing: u64,
    pub(crate) queries: u64,
    pub(crate) lengths: &'a [u64],
    /// Tokens of a page; 0 of a cache that is not paged.
    pub(crate) page: u64,
    pub(crate) splits: u32,
}

/// Attention by its definition: of rows `[batch, heads, rows, dim]`, with keys and values found by sequence, head and token.
fn definition(
    problem: Problem<'_>,
    dim: usize,
    scale: f64,
    q: &[f64],
    token: impl Fn(usize, usize, usize) -> usize,
    [k, v]: [&[f64]; 2],
) -> Vec<f64> {
    let rows = (problem.sharing * problem.queries) as usize;
    let mut wanted = vec![0.0; q.len()];
    for (at, out) in wanted.chunks_mut(dim).enumerate() {
        let (row, head) = (at % rows, at / rows % problem.heads as usize);
        let batch = at / rows / problem.heads as usize;
        let (length, query) = (problem.lengths[batch], row as u64 % problem.queries);
        let seen = (length + query + 1).saturating_sub(problem.queries).min(length);
        let row_of =
            |key: u64| token(batch, head, key as usize) * dim..(token(batch, head, key as usize) + 1) * dim;
        let scores: Vec<f64> = (0..seen)
            .map(|key| {
                q[at * dim..][..dim].iter().zip(&k[row_of(key)]).map(|(a, b)| a * b).sum::<f64>() * scale
            })
            .collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
        for (key, score) in (0..seen).zip(scores) {
            let weight = (score - most).exp() / sum;
            out.iter_mut().zip(&v[row_of(key)]).for_each(|(out, value)| *out += weight * value);
        }
    }
    wanted
}

impl Problem<'_> {
    /// Launches a variant's kernels, and compares.
    pub(crate) fn check<E: From<Mismatch>>(
        self,
        variant: Decode,
        mut launch: impl FnMut(&Kernel, [u32; 3], Vec<Argument>) -> Result<Vec<Argument>, E>,
    ) -> Result<(), E> {
        let Problem { heads, sharing, queries, lengths, page, splits } = self;
        let Decode { element, dim, paged, rows, .. } = variant;
        assert_eq!(paged, page > 0);
        let (batch, of_head) = (lengths.len() as u64, sharing * queries);
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        // Pages in no order, and some that are nobody's.
        let pages = if paged { longest.div_ceil(page) } else { 0 };
        let all_pages = batch * pages * 7 + 3;
        let page_of = |sequence: u64, number: u64| (sequence * pages + number) * 7 % all_pages;
        let extents = match paged {
            true => [all_pages, heads, page, dim.into()],
            false => [batch, heads, longest, dim.into()],
        };
        let q = random(4, element, &[batch, heads, of_head, dim.into()]);
        let (k, v) = (random(5, element, &extents), random(6, element, &extents));
        let scale = 1.0 / f64::from(dim).sqrt();
        let token = |sequence: usize, head: usize, key: usize| {
            let (sequence, head, key) = (sequence as u64, head as u64, key as u64);
            match paged {
                true => ((page_of(sequence, key / page) * heads + head) * page + key % page) as usize,
                false => ((sequence * heads + head) * longest + key) as usize,
            }
        };
        let of = [&q, &k, &v].map(Tensor::to_f64s);
        let wanted = definition(self, dim as usize, scale, &of[0], token, [&of[1], &of[2]]);
        let i32s = |extents: &[u64], numbers: Vec<u64>| {
            Argument::Tensor(Tensor::from_f64s(Scalar::I32, extents, numbers.into_iter().map(|n| n as f64)))
        };
        let o = Argument::Tensor(random(9, element, &q.extents));
        let mut arguments: Vec<Argument> = [q, k, v].map(Argument::Tensor).to_vec();
        if paged {
            let all = (0..batch).flat_map(|sequence| (0..pages).map(move |number| (sequence, number)));
            arguments.push(i32s(&[batch, pages], all.map(|(s, n)| page_of(s, n)).collect()));
        }
        arguments.push(i32s(&[batch], lengths.to_vec()));
        let found = arguments.len();
        let of_parts = [u64::from(splits), batch * heads, of_head, dim.into()];
        arguments.push(Argument::Tensor(random(7, Scalar::F32, &of_parts)));
        let of_sums = [2 * of_parts[0], of_parts[1], of_parts[2]];
        arguments.push(Argument::Tensor(random(8, Scalar::F32, &of_sums)));
        arguments.push(float(scale));
        arguments.push(Argument::Bits(queries));
        let tiles = of_head.div_ceil(rows.into()) * heads;
        let kernel = variant.kernel(GuestAddr(0x1000)).unwrap();
        let after = launch(&kernel, [splits, tiles as u32, batch as u32], arguments)?;
        let joined = vec![after[found].clone(), after[found + 1].clone(), o, float(scale)];
        let grid = [of_head.div_ceil(8) as u32, heads as u32, batch as u32];
        let after = launch(&variant.join(GuestAddr(0x1000)).unwrap(), grid, joined)?;
        Ok(close(kernel.name(), &after[2], &wanted, 1e-2)?)
    }
}
