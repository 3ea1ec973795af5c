//! What a kernel costs before any compiler sees it: text, bytes, validation. One small kernel and one of 1,000 ops.

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::builder::IRBlock;
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Module, Scalar, Trust, text, validate};

/// A thread's element through a chain of `length` additions and products.
fn chain(length: u32) -> Module {
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder().name("chain").block_size([256, 1, 1]);
    let x = k.view("x", Scalar::F32, 1, Access::Read);
    let y = k.view("y", Scalar::F32, 1, Access::Write);
    let i = k.global_id(Axis::X);
    k.if_(i.lt(y.extent(0)), || {
        let start = x.at([i]).load();
        let end = (0..length).fold(start, |v, n| if n % 2 == 0 { v + start } else { v * start });
        y.at([i]).store(end);
    });
    block.kernel().expect("the chain is a kernel").into()
}

fn front(c: &mut Criterion) {
    for (name, length) in [("small", 1), ("1000 ops", 1000)] {
        let module = chain(length);
        let (source, bytes) = (text::print(&module), encode(&module, Lines::Keep));
        let mut group = c.benchmark_group(name);
        group.bench_function("build", |b| b.iter(|| chain(black_box(length))));
        group.bench_function("print", |b| b.iter(|| text::print(black_box(&module))));
        group.bench_function("parse", |b| b.iter(|| text::parse(black_box(&source))));
        group.bench_function("encode", |b| b.iter(|| encode(black_box(&module), Lines::Keep)));
        group.bench_function("decode", |b| b.iter(|| decode(black_box(&bytes))));
        group.bench_function("validate", |b| b.iter(|| validate(black_box(module.clone()), Trust::Guest)));
        group.finish();
    }
}

criterion_group!(benches, front);
criterion_main!(benches);
