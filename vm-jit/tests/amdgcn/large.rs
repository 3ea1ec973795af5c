//! Tile kernels with as many registers of fragments as are taken: LLVM takes them; one with more is rejected.

use vm_ir::{Trust, text, validate};
use vm_jit::backend::amdgcn::Chip;
use vm_jit::compile;

use super::{assembler, chips, sweep, target};

/// A product into a sum of so many rows and columns.
fn kernel(groups: u32, [rows, columns]: [u32; 2], element: &str) -> String {
    format!(
        "vir 1
         kernel @large(@a: view<{element}, [?, ?], read>, @b: view<{element}, [?, ?], read>, @c: view<f32, [?, ?], write>) at 0 tile({groups}) {{
           channel @x: {element}[{rows}, 16] stages 1
           channel @y: {element}[16, {columns}] stages 1
           fragment @sum: f32[{rows}, {columns}]
           %zero = const 0.0 : f32
           %none = const 0 : i64
           %step = const 16 : i64
           %inner = extent @a, 1 : i64
           fill @sum, %zero
           for %k: i64 = %none to %inner step %step {{
             fetch @a[%none, %k], @x
             fetch @b[%k, %none], @y
             mma @sum, @x, @y
             release @x
             release @y
           }}
           put @c[%none, %none], @sum
         }}"
    )
}

#[test]
fn llvm_takes_fragments_as_large_as_are_taken() {
    let Some(assembler) = assembler() else { return };
    // Of CDNA and of RDNA: the largest of so many groups, and one that is a little larger.
    let cdna = [(1, [256, 256], [256, 288]), (2, [512, 256], [512, 272]), (3, [384, 256], [384, 288])];
    let rdna = [(1, [128, 256], [128, 272]), (2, [256, 256], [256, 272]), (3, [384, 256], [384, 272])];
    for chip in chips(&Chip::ALL) {
        for (groups, taken, rejected) in if chip.wave() == 64 { cdna } else { rdna } {
            for element in sweep::taken("elements", ["bf16", "f32"]) {
                let compiled = |extents| {
                    let module = text::parse(&kernel(groups, extents, element)).unwrap();
                    compile(&validate(module, Trust::Guest).unwrap(), &target(chip))
                };
                let place = format!("{taken:?} of {element} in {groups} groups for {chip}");
                let artifact = compiled(taken).unwrap_or_else(|rejected| panic!("{place}: {rejected}"));
                let code = assembler.assemble(&artifact.code, chip.name());
                code.unwrap_or_else(|error| panic!("{place}: {error}"));
                let reason = compiled(rejected).unwrap_err().to_string();
                assert!(reason.contains("registers of 32 bits at a time"), "{place}: {reason}");
            }
        }
    }
}
