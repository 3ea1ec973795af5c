//! Attention of a few queries to a cache against its definition, in the interpreter and on processors.

mod common;

use common::{compare_at, random, run_everywhere, valid};
use vm_ir::interp::{Argument, Tensor};
use vm_ir::{GuestAddr, Scalar, Trust};
use vm_kernels::attention::Decode;

/// What is attended to.
#[derive(Clone, Copy)]
struct Problem<'a> {
    /// Heads of keys, heads of queries for each, and queries of a sequence.
    heads: u64,
    sharing: u64,
    queries: u64,
    lengths: &'a [u64],
    /// Tokens of a page; 0 of a cache that is not paged.
    page: u64,
    splits: u32,
}

const ONE: Problem<'_> = Problem { heads: 1, sharing: 1, queries: 1, lengths: &[100], page: 0, splits: 1 };

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

fn check(variant: Decode, problem: Problem<'_>) {
    let Problem { heads, sharing, queries, lengths, page, splits } = problem;
    let Decode { element, dim, paged, rows, .. } = variant;
    assert_eq!(paged, page > 0);
    let (batch, of_head) = (lengths.len() as u64, sharing * queries);
    let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
    // Pages in no order, and some that are nobody's.
    let pages = if paged { longest.div_ceil(page) } else { 0 };
    let page_of = |sequence: u64, number: u64| (sequence * pages + number) * 7 % (batch * pages * 7 + 3);
    let extents = match paged {
        true => [batch * pages * 7 + 3, heads, page, dim.into()],
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
    let wanted = definition(problem, dim as usize, scale, &of[0], token, [&of[1], &of[2]]);
    let i32s = |extents: &[u64], numbers: Vec<u64>| {
        Argument::Tensor(Tensor::from_f64s(Scalar::I32, extents, numbers.into_iter().map(|n| n as f64)))
    };
    let mut arguments: Vec<Argument> = [q.clone(), k, v].map(Argument::Tensor).to_vec();
    if paged {
        let all = (0..batch).flat_map(|sequence| (0..pages).map(move |number| (sequence, number)));
        arguments.push(i32s(&[batch, pages], all.map(|(s, n)| page_of(s, n)).collect()));
    }
    arguments.push(i32s(&[batch], lengths.to_vec()));
    let found = arguments.len();
    let of_parts = [u64::from(splits), batch * heads, of_head, dim.into()];
    arguments.push(Argument::Tensor(random(7, Scalar::F32, &of_parts)));
    arguments.push(Argument::Tensor(random(8, Scalar::F32, &of_parts[..3])));
    arguments.push(Argument::Bits((scale as f32).to_bits().into()));
    arguments.push(Argument::Bits(queries));
    let first = valid(variant.kernel(GuestAddr(0x1000)).unwrap(), Trust::Guest);
    let second = valid(variant.join(GuestAddr(0x1000)).unwrap(), Trust::Guest);
    let tiles = of_head.div_ceil(rows.into()) * heads;
    for (_, launch) in run_everywhere(&first, [splits, tiles as u32, batch as u32], arguments) {
        let o = Argument::Tensor(random(9, element, &q.extents));
        let joined = vec![launch[found].clone(), launch[found + 1].clone(), o];
        let grid = [of_head.div_ceil(8) as u32, heads as u32, batch as u32];
        compare_at(&second, grid, 2, joined, &wanted, 1e-2);
    }
}

#[test]
fn lengths_of_sequences() {
    let lengths = &[0, 1, 5, 63, 64, 65, 150];
    for variant in [Decode::of(64, 0), Decode::cpu(64, 0)] {
        for splits in [1, 3, 9] {
            check(variant, Problem { lengths, splits, ..ONE });
            check(variant, Problem { lengths, splits, sharing: 3, queries: 2, ..ONE });
        }
    }
}

#[test]
fn heads_share_keys() {
    for (sharing, queries) in [(1, 16), (3, 1), (8, 1), (8, 3), (8, 16)] {
        let problem = Problem { heads: 2, sharing, queries, lengths: &[70, 9], splits: 2, ..ONE };
        check(Decode::of(64, 0), problem);
        check(Decode { rows: 16, element: Scalar::F16, ..Decode::of(64, 0) }, problem);
    }
}

#[test]
fn pages_of_any_size() {
    for page in [16, 32, 48, 64, 80, 128] {
        let problem = Problem { heads: 2, sharing: 4, lengths: &[130, 0, 17, 64], page, splits: 2, ..ONE };
        check(Decode::of(64, page as u32), problem);
        check(Decode::cpu(64, page as u32), Problem { queries: 3, ..problem });
    }
}

#[test]
fn sizes_of_heads() {
    for dim in [128, 192, 256] {
        for page in [0, 16] {
            check(Decode::of(dim, page), Problem { page: page.into(), lengths: &[90], sharing: 4, ..ONE });
        }
    }
}

#[test]
fn splits_are_as_many_as_have_work() {
    let variant = Decode::of(128, 0);
    for (units, blocks, longest, wanted) in
        [(132, 8, 65536, 33), (132, 512, 65536, 1), (132, 1, 1024, 4), (132, 0, 0, 1), (0, 1, 9999, 1)]
    {
        assert_eq!(variant.splits(units, blocks, longest), wanted, "{units} {blocks} {longest}");
    }
}
