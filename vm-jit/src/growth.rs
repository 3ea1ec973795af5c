//! Tests that what an analysis does grows with the kernel and no faster, whatever the kernel is like: in steps that it
//! counts, which are the same on every machine.

use vm_ir::shapes::SHAPES;
use vm_ir::{Trust, ValidModule, text, validate};

/// Ops of the smallest kernel; each further one has twice as many.
const SMALLEST: usize = 1 << 10;
const DOUBLINGS: usize = 2;

/// A guest's module of a shape and size.
pub(crate) fn module(shape: fn(usize) -> String, size: usize) -> ValidModule {
    let text = shape(size);
    validate(text::parse(&text).unwrap(), Trust::Guest).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Ops, and values that ops take and give.
fn parts(module: &ValidModule) -> u64 {
    let mut parts = 0;
    for kernel in module.kernels() {
        parts += kernel.values().len() as u64;
        kernel.for_each_op(&mut |op| {
            let yields = op.regions.iter().map(|region| region.yields.len()).sum::<usize>();
            parts += (1 + op.operands.len() + yields) as u64;
        });
    }
    parts
}

/// It takes at most `most` steps for each part of a module, and twice the module at most 2.2 times the steps.
pub(crate) fn check(what: &str, most: u64, steps: impl Fn(&ValidModule) -> u64) {
    for (name, shape) in SHAPES {
        let mut before = None;
        for doubling in 0..=DOUBLINGS {
            let module = module(*shape, SMALLEST << doubling);
            let (now, parts) = (steps(&module), parts(&module));
            assert!(now <= most * parts, "{what}, {name}: {now} steps for {parts} parts");
            if let Some(before) = before.replace(now) {
                assert!(
                    10 * now <= 22 * before,
                    "{what}, {name}: {before} steps, then {now} for twice as much"
                );
            }
        }
    }
}
