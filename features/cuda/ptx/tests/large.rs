//! Kernels that are too large for the CPU back end where neighboring threads are run together.

mod common;

use common::{Arg, Machine, Program, Random};
use std::fmt::Write;

/// Elements that each thread sorts.
const COUNT: usize = 64;

/// An insertion sort of a local array whose loops are unrolled, as NVVM unrolls them: 63 conditions within each other.
fn insertion_sort() -> String {
    let mut text = format!(
        ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry sort(.param .u64 out) {{\n\
         .local .align 8 .b8 a[{}];\n.reg .f64 %d<{}>; .reg .b32 %r<4>; .reg .b64 %x<4>; .reg .pred %p<2>;\n\
         ld.param.u64 %x1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %x2, %r1, {}; add.s64 %x1, %x1, %x2;\n",
        8 * COUNT,
        COUNT + 3,
        8 * COUNT
    );
    for at in 0..COUNT {
        writeln!(text, "ld.global.f64 %d1, [%x1+{0}]; st.local.f64 [a+{0}], %d1;", 8 * at).unwrap();
    }
    for at in 1..COUNT {
        writeln!(text, "ld.local.f64 %d1, [a+{}];", 8 * at).unwrap();
        for to in (0..at).rev() {
            let (from, to) = (8 * to, 8 * to + 8);
            write!(text, "ld.local.f64 %d2, [a+{from}]; setp.leu.f64 %p1, %d2, %d1; @%p1 bra put_{at}_{to};")
                .unwrap();
            writeln!(text, " st.local.f64 [a+{to}], %d2;").unwrap();
        }
        writeln!(text, "st.local.f64 [a], %d1; bra next_{at};").unwrap();
        for to in (1..=at).map(|to| 8 * to) {
            writeln!(text, "put_{at}_{to}: st.local.f64 [a+{to}], %d1; bra next_{at};").unwrap();
        }
        writeln!(text, "next_{at}:").unwrap();
    }
    for at in 0..COUNT {
        writeln!(text, "ld.local.f64 %d1, [a+{0}]; st.global.f64 [%x1+{0}], %d1;", 8 * at).unwrap();
    }
    text + "ret;\n}\n"
}

#[test]
fn an_unrolled_sort_is_compiled() {
    let mut program = Program::on(&insertion_sort(), Machine::Cpu);
    let mut random = Random::new(5);
    let input: Vec<f64> = (0..32 * COUNT).map(|_| random.between(-9.0, 9.0)).collect();
    let at = program.put(&input);
    program.launch("sort", [1, 1, 1], [32, 1, 1], &[Arg::from(at)]);
    let mut wanted = input;
    wanted.chunks_mut(COUNT).for_each(|part| part.sort_by(f64::total_cmp));
    assert_eq!(program.get::<f64>(at, 32 * COUNT), wanted);
}
