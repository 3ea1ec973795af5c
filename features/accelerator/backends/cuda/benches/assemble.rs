//! From PTX to a cubin: `ptxas` started for each kernel, and `ptxas` that waited. Needs NVIDIA's `ptxas`, no GPU.

use criterion::{Criterion, criterion_group, criterion_main};
use vm_cuda::assemble::Assembler;

const PTX: &str = "
.version 8.0
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 by)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<2>;
    .reg .f32 %f<4>;
    ld.param.u64 %rd1, [x];
    ld.param.f32 %f1, [by];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%rd3], %f3;
    ret;
}
";

fn assemble(criterion: &mut Criterion) {
    let started = match Assembler::find() {
        Ok(assembler) => assembler,
        Err(error) => return println!("skipped: {error}"),
    };
    let waited = started.clone().standby(2);
    let mut group = criterion.benchmark_group("assemble");
    for (name, assembler) in [("started", &started), ("waited", &waited)] {
        group.bench_function(name, |b| {
            b.iter(|| assembler.assemble(PTX.as_bytes(), "sm_90a").expect("it is right"));
        });
    }
}

criterion_group!(benches, assemble);
criterion_main!(benches);
