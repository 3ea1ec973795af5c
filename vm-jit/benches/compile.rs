//! IR to PTX, and to machine code of this processor: a kernel of one line, one of 1,000 ops, softmax, and a hit in the cache on disk.

use criterion::{Criterion, criterion_group, criterion_main};
use std::fmt::Write;
use std::hint::black_box;
use vm_ir::{Trust, ValidModule, text, validate};
use vm_jit::cache::{Cache, CacheOptions};
use vm_jit::{Target, compile};

fn parse(text: &str) -> ValidModule {
    validate(text::parse(text).unwrap(), Trust::Guest).unwrap()
}

fn one_line() -> ValidModule {
    parse(
        "vir 1\nkernel @k(@x: view<f32, [?], read>, @y: view<f32, [?], write>) at 0x1000 block(256) {\n  \
         %i = global_id.x : i64\n  %a = load @x[%i] : f32\n  %b = add %a, %a : f32\n  store @y[%i], %b\n}\n",
    )
}

fn thousand_ops() -> ValidModule {
    let mut text = String::from(
        "vir 1\nkernel @k(@x: view<f32, [?], read>, @y: view<f32, [?], write>) at 0x1000 block(256) {\n  \
         %i = global_id.x : i64\n  %v0 = load @x[%i] : f32\n",
    );
    for n in 1..1000 {
        let op = ["add", "mul", "sub", "max"][n % 4];
        let _ = writeln!(text, "  %v{n} = {op} %v{}, %v{} : f32", n - 1, n / 2);
    }
    text.push_str("  store @y[%i], %v999\n}\n");
    parse(&text)
}

fn benches(c: &mut Criterion) {
    let target: Target = "ptx:sm_90a".parse().unwrap();
    let softmax = parse(include_str!("../../vm-ir/filetests/run/softmax.vir"));
    for (name, module) in [("one line", one_line()), ("1,000 ops", thousand_ops()), ("softmax", softmax)] {
        c.bench_function(name, |b| b.iter(|| compile(black_box(&module), &target).unwrap()));
    }
    if let Ok(cpu) = "cpu".parse::<Target>() {
        let softmax = parse(include_str!("../../vm-ir/filetests/run/softmax.vir"));
        for (name, module) in [("one line", one_line()), ("1,000 ops", thousand_ops()), ("softmax", softmax)]
        {
            c.bench_function(&format!("{name}, cpu"), |b| {
                b.iter(|| compile(black_box(&module), &cpu).unwrap())
            });
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let options =
        CacheOptions { folder: Some(folder.path().to_owned()), memory_bytes: 0, ..CacheOptions::default() };
    let cache = Cache::open(&options).unwrap();
    let module = one_line();
    c.bench_function("one line, from disk", |b| {
        b.iter(|| cache.compile(black_box(&module), &target).unwrap())
    });
}

criterion_group!(compiling, benches);
criterion_main!(compiling);
