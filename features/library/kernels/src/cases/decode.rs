//! Attention to a cache, in one piece or in pages.

use super::{Case, Expected, case, random};
use crate::append::Layout;
use crate::attention::DecodeAttention;
use crate::call::Function as _;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

pub(super) fn cases() -> Vec<Case> {
    use Scalar::{Bf16, F16, F32};
    let whole = |capacity| Layout::Contiguous { capacity };
    let paged = |pages, page, of_sequence| Layout::Paged { pages, page, of_sequence };
    // Sequences, heads of queries and of keys, elements of a head.
    let all = [
        ([3, 1, 1, 64], whole(40), Bf16, true),
        ([2, 6, 2, 64], whole(130), F16, true),
        ([2, 4, 4, 128], whole(9), F32, true),
        ([2, 2, 1, 64], whole(7), Bf16, true),
        ([3, 4, 2, 64], whole(33), F16, false),
        ([8, 4, 2, 64], paged(11, 16, 3), Bf16, false),
        ([8, 2, 2, 128], paged(5, 64, 3), F16, false),
        ([8, 6, 2, 64], paged(9, 48, 4), F32, true),
        ([8, 8, 1, 64], paged(7, 5, 9), Bf16, false),
        ([8, 2, 1, 256], paged(29, 1, 5), F32, false),
        ([8, 1, 1, 64], paged(1, 80, 1), Bf16, false),
    ];
    let large = [([3, 4, 2, 64], whole(700), F32, true), ([8, 2, 1, 64], paged(29, 16, 5), Bf16, false)];
    let cases = [(&all[..], false), (&large[..], true)];
    let of = |(cases, large): (&[_], bool)| {
        let case =
            |(extents, layout, element, packed): &_| decode(*extents, *layout, *element, *packed, large);
        cases.iter().map(case).collect::<Vec<Case>>()
    };
    cases.into_iter().flat_map(of).collect()
}

/// With `large` scores are of about 10^30, and many are equal.
fn decode(
    [batch, heads, shared, dim]: [u64; 4],
    layout: Layout,
    element: Scalar,
    packed: bool,
    large: bool,
) -> Case {
    let heads_of = [heads, shared];
    let function =
        DecodeAttention { element, batch, heads: heads_of, dim: dim as u32, layout, packed, scale: 0.2 };
    let size = dim as usize;
    let specified = function.buffers();
    let mut buffers: Vec<Tensor> =
        (1..).zip(&specified).map(|(seed, buffer)| random(seed, buffer.element, &buffer.extents)).collect();
    if large {
        let first = |rows: f64| move |at: u64| if at.is_multiple_of(dim) { rows } else { 0.0 };
        let key = |at: u64| first(if (at / dim).is_multiple_of(3) { 0.5 } else { 1.0 })(at);
        for (buffer, each) in buffers.iter_mut().zip([&first(1e30) as &dyn Fn(u64) -> f64, &key]) {
            let count = buffer.extents.iter().product();
            *buffer = Tensor::from_f64s(element, &buffer.extents, (0..count).map(each));
        }
    }
    let [q, k, v] = [0, 1, 2].map(|at: usize| buffers[at].to_f64s());
    let row = specified[0].extents[1];
    let i32s = |extents: &[u64], numbers: &[i64]| {
        Tensor::from_f64s(Scalar::I32, extents, numbers.iter().map(|number| *number as f64))
    };
    // None, about a page's, all, and what can't be.
    let (room, lengths) = match layout {
        Layout::Contiguous { capacity } => (capacity, vec![0, capacity as i64, capacity as i64 / 2 + 1]),
        Layout::Paged { page, of_sequence, .. } => {
            let (room, page) = (of_sequence * u64::from(page), i64::from(page));
            (room, vec![room as i64, 1, page - 1, page, page + 1, 0, room as i64 + 9, -3])
        }
    };
    let lengths: Vec<i64> = lengths.into_iter().cycle().take(batch as usize).collect();
    buffers[3] = i32s(&[batch], &lengths);
    // Pages in another order, of which some are two sequences', and some are none.
    let mut table = Vec::new();
    if let Layout::Paged { pages, of_sequence, .. } = layout {
        table.extend((0..(batch * of_sequence) as i64).map(|at| match at % 13 {
            6 => -1,
            9 => pages as i64,
            12 => 2_000_000_000,
            _ => (at * 5 + 2) % pages as i64,
        }));
        buffers[4] = i32s(&[batch, of_sequence], &table);
    }
    // Where a key and a value begin; those of a page that is none are zeros.
    let place = |sequence: u64, head: u64, key: u64| {
        let slot = match layout {
            Layout::Contiguous { capacity } => Some(sequence * capacity + key),
            Layout::Paged { pages, page, of_sequence } => {
                let page = u64::from(page);
                let number = table[(sequence * of_sequence + key / page) as usize];
                (0..pages as i64).contains(&number).then(|| number as u64 * page + key % page)
            }
        };
        slot.map(|slot| ((slot * shared + head) * dim) as usize)
    };
    let mut o = vec![0.0; (batch * heads * dim) as usize];
    for (at, out) in (0..).zip(o.chunks_mut(size)) {
        let (sequence, head): (u64, u64) = (at / heads, at % heads);
        let query = &q[((sequence * row + head) * dim) as usize..][..size];
        let seen = lengths[sequence as usize].clamp(0, room as i64) as u64;
        let places: Vec<_> = (0..seen).map(|key| place(sequence, head / (heads / shared), key)).collect();
        let score = |place: &Option<usize>| {
            let products = place.map(|at| query.iter().zip(&k[at..]).map(|(q, k)| q * k).sum::<f64>());
            0.2 * products.unwrap_or(0.0)
        };
        let scores: Vec<f64> = places.iter().map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let scores: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f64 = scores.iter().sum();
        for (place, score) in places.into_iter().zip(scores) {
            let Some(place) = place else { continue };
            out.iter_mut().zip(&v[place..]).for_each(|(out, value)| *out += score / sum * value);
        }
    }
    let last = buffers.len() - 1;
    let name = format!(
        "decode attention of {element}, {batch} x {heads}/{shared} x {dim}, {layout:?}, packed {packed}, large {large}"
    );
    case(name, function, buffers, vec![Expected::new(last, o, 2e-2)])
}
