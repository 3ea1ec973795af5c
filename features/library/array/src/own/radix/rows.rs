//! Short rows: a block sorts all digits of some of them.

use vm_ir::builder::{Builder, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use super::block::Block;
use super::key::Key;
use crate::emit::THREADS;
use crate::error::Result;

/// The kernel for blocks of so many elements of each thread. Parameters: the elements in order, where they were in their row if that is asked for, the elements;
/// how long a row is, how many elements a block has, how many digits there are, what flips them, and how many passes are made: one more than there are digits where
/// a block has several rows, which then come apart again.
pub(super) fn kernel(key: Key, items: u32, with_places: bool) -> Result<Kernel> {
    let block = IRBlock::new(GuestAddr(0));
    write(block.builder(), key, items, with_places);
    Ok(block.kernel()?)
}

fn write<'b>(k: Builder<'b>, key: Key, items: u32, with_places: bool) {
    k.name("sort_rows");
    let view = |name, scalar, access| {
        let ty = ViewType::new(scalar, 1, access).with_dims(&[Dim::ANY]);
        k.view_of(name, ty.named(&["elements"]))
    };
    let y = view("y", key.stored(), Access::Write);
    let to = with_places.then(|| view("to", Scalar::I64, Access::Write));
    let x = view("x", key.stored(), Access::Read);
    let most = i64::from(items * THREADS);
    let n = k.scalar_in("n", Type::I32, 1, most);
    let of_block = k.scalar_in("of_block", Type::I32, 1, most);
    let passes = k.scalar_in("passes", Type::I32, 1, 9);
    let flip = k.scalar_in("flip", Type::I32, 0, 255);
    let threads = Block::new(k, items);
    k.resident_blocks(if key.register() == Scalar::I64 { 2 } else { 3 });
    let exchange = k.shared("exchange", key.register(), &[most as u32]);
    let first = k.block_id(Axis::X).to(Scalar::I64) * of_block.to(Scalar::I64);
    let count = (x.extent(0) - first).min(of_block.to(Scalar::I64)).to(Scalar::I32);
    let places = threads.places();
    let load = |at| x.at([at]).load().to_u(key.register());
    let begun = (threads.places_from(first).into_iter().map(load).collect::<Vec<_>>(), places.clone());
    let (elements, from) = k.range(k.i32(0), passes).fold(begun, |pass, (elements, from)| {
        let of_key = || elements.iter().map(|bits| key.digit(*bits, pass * 8, flip)).collect::<Vec<_>>();
        let of_row = || from.iter().map(|from| from.div_u(n)).collect();
        let digits = k.if_else(pass.lt(key.0.bytes() as i32), of_key, of_row);
        // What is behind the last element stays there.
        let digit = |(place, digit): (&Val<'b>, Val<'b>)| place.lt(count).select(digit & 255, k.i32(255));
        let digits: Vec<_> = places.iter().zip(digits).map(digit).collect();
        let ranked = threads.ranked(&digits);
        let exchanged = |values: &[Val<'b>]| -> Vec<Val<'b>> {
            for (to, value) in ranked.to.iter().zip(values) {
                exchange.at([*to]).store(value.to_u(key.register()));
            }
            k.barrier();
            let all: Vec<_> = places.iter().map(|place| exchange.at([*place]).load()).collect();
            k.barrier();
            all.iter().zip(values).map(|(new, old)| new.to(old.ty().scalar())).collect()
        };
        (exchanged(&elements), exchanged(&from))
    });
    let goals = threads.places_from(first).into_iter().zip(&places);
    // What is behind the last element goes nowhere.
    let goals = goals.map(|(at, place)| place.lt(count).select(at, k.i64(-1)));
    for ((goal, bits), from) in goals.zip(elements).zip(from) {
        y.at([goal]).store(bits.to(key.stored()));
        if let Some(to) = to {
            to.at([goal]).store(from.rem_u(n).to(Scalar::I64));
        }
    }
}
