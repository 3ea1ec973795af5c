//! Caches of keys and values that grow.

use vm_graph::{Element, Value};

use super::{Draft, Drawn, NoGraph};
use crate::append::{AdvanceLengths, KvAppend, Layout, QkvAppend};
use crate::call::Function as _;

/// Keys and values that are put into a cache.
pub(crate) fn append(of: &KvAppend) -> Drawn {
    let KvAppend { batch, tokens, layout, .. } = *of;
    let mut g = Draft::of("kv_append", of.buffers())?;
    let new = [g.given("k")?, g.given("v")?];
    let slots = slots(&mut g, [batch, tokens], layout)?;
    for (new, cache) in new.into_iter().zip(["k_cache", "v_cache"]) {
        put(&mut g, cache, slots, new)?;
    }
    g.finish()
}

/// The same of one product of queries, keys and values.
pub(crate) fn append_of_product(of: &QkvAppend) -> Drawn {
    let QkvAppend { batch, tokens, heads: [heads, shared], capacity, .. } = *of;
    let mut g = Draft::of("qkv_append", of.buffers())?;
    let qkv = g.given("qkv")?;
    let slots = slots(&mut g, [batch, tokens], Layout::Contiguous { capacity })?;
    for (number, cache) in [(0, "k_cache"), (1, "v_cache")] {
        let first = heads + number * shared;
        let new = g.slice(qkv, 2, first, first + shared)?;
        put(&mut g, cache, slots, new)?;
    }
    g.finish()
}

/// Lengths that grow by a number.
pub(crate) fn advance(of: &AdvanceLengths) -> Drawn {
    let mut g = Draft::of("advance_lengths", of.buffers())?;
    let lengths = g.given("lengths")?;
    let by = g.integer_like(lengths, of.by.into())?;
    let sum = g.add(lengths, by)?;
    g.put("lengths", sum)?;
    g.finish()
}

/// Where each token's row goes in a cache that is taken as rows; behind the last one if it has no place.
fn slots(g: &mut Draft, [batch, tokens]: [u64; 2], layout: Layout) -> Result<Value, NoGraph> {
    let lengths = g.given("lengths")?;
    let lengths = g.cast(lengths, Element::I64)?;
    let lengths = g.reshape(lengths, &[batch, 1])?;
    let places = g.count_from(0, Element::I64, &[tokens])?;
    let places = g.add(lengths, places)?;
    let (room, slots, none) = match layout {
        Layout::Contiguous { capacity } => {
            let first = g.count_from(0, Element::I64, &[batch, 1])?;
            let capacities = g.integer_like(first, capacity.cast_signed())?;
            let first = g.mul(first, capacities)?;
            (capacity, g.add(first, places)?, batch.saturating_mul(capacity))
        }
        Layout::Paged { pages, page, of_sequence } => {
            // The rows of a sequence's pages, of which each token takes one.
            let page = u64::from(page);
            let (room, none) = (of_sequence.saturating_mul(page), pages.saturating_mul(page));
            let table = g.given("table")?;
            let table = g.cast(table, Element::I64)?;
            let table = g.reshape(table, &[batch, of_sequence, 1])?;
            let is_page = g.below(table, pages)?;
            let size = g.integer_like(table, page.cast_signed())?;
            let first = g.mul(table, size)?;
            let within = g.count_from(0, Element::I64, &[page])?;
            let rows = g.add(first, within)?;
            let nowhere = g.integer_like(rows, none.cast_signed())?;
            let rows = g.select(is_page, rows, nowhere)?;
            let rows = g.reshape(rows, &[batch, room])?;
            (room, g.gather_elements(rows, places, 1)?, none)
        }
    };
    let is_place = g.below(places, room)?;
    let nowhere = g.integer_like(slots, none.cast_signed())?;
    let slots = g.select(is_place, slots, nowhere)?;
    Ok(g.reshape(slots, &[batch * tokens])?)
}

/// Rows that are put into a cache, with one behind it for those that have no place.
fn put(g: &mut Draft, name: &str, slots: Value, new: Value) -> Result<(), NoGraph> {
    let cache = g.given(name)?;
    let [pieces, room, heads, dim] = g.type_of(cache).extents[..] else {
        return Err(g.no(format!("{name} is no cache of heads")));
    };
    let (rows, columns) = (pieces * room, heads * dim);
    let count = g.type_of(slots).elements();
    let element = g.type_of(cache).element;
    let cache = g.reshape(cache, &[rows, columns])?;
    let new = g.reshape(new, &[count, columns])?;
    let spare = g.filled(element, 0.0, &[1, columns])?;
    let with_spare = g.concat(&[cache, spare], 0)?;
    let filled = g.scatter_rows(with_spare, slots, new, false)?;
    let filled = g.slice(filled, 0, 0, rows)?;
    g.put(name, filled)
}
