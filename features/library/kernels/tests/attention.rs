//! Attention and its gradients against their definitions, in the interpreter and on this machine's processor: as each of the machines that it can
//! be, or with a number in `SWEEP_SEED` as one of them for each kernel.

#[path = "../../../accelerator/backends/cpu/tests/common/mod.rs"]
mod machine;
mod reference;
#[path = "../../../../vm-jit/tests/ptxas/sweep.rs"]
mod sweep;

use machine::Machine;

use reference::{Problem, decode};
use vm_ir::interp::{Argument, Launch, Limits, run};
use vm_ir::{Kernel, Module, Scalar, Trust, validate};
use vm_kernels::attention::{Attention, Backward, Decode, Mask, Order, SplitBackward};

/// Runs a kernel; gives the arguments as it leaves them.
fn launch(
    kernel: &Kernel,
    grid: [u32; 3],
    arguments: Vec<Argument>,
) -> Result<Vec<Argument>, Box<dyn std::error::Error>> {
    let module = validate(Module::from(kernel.clone()), Trust::Guest)?;
    let mut launch = Launch { kernel: kernel.name().to_owned(), grid, arguments };
    run(&module, &mut launch, &Limits::default())?;
    Ok(launch.arguments)
}

/// The same, compiled for this processor.
fn on_processor(
    kernel: &Kernel,
    grid: [u32; 3],
    arguments: Vec<Argument>,
) -> Result<Vec<Argument>, Box<dyn std::error::Error>> {
    let module = validate(Module::from(kernel.clone()), Trust::Guest)?;
    let mut launch = Launch { kernel: kernel.name().to_owned(), grid, arguments };
    for machine in sweep::taken(kernel.name(), Machine::all()) {
        match machine.run(&module, &mut launch, 1 << 40) {
            Ok(0) => {}
            other => return Err(format!("{} on {}: {other:?}", kernel.name(), machine.name()).into()),
        }
    }
    Ok(launch.arguments)
}

fn check(variant: Attention, problem: Problem<'_>, blocks: u32) {
    problem.check(variant, blocks, launch).unwrap_or_else(|error| panic!("{error}"));
}

fn check_backward(variant: Backward, problem: Problem<'_>, blocks: u32) {
    problem.check_gradients(variant, blocks, launch).unwrap_or_else(|error| panic!("{error}"));
}

const WHOLE: Problem<'_> =
    Problem { heads: [2, 2], sequences: &[[128, 128]], mask: Mask::Full, window: [0, 0] };

/// A small variant.
fn small(mask: Mask) -> Attention {
    Attention { mask, tile: [64, 64], groups: 1, ..Attention::of(64, mask == Mask::Causal) }
}

#[test]
fn lengths_and_masks() {
    for mask in [Mask::Full, Mask::Causal, Mask::Window] {
        for log_sums in [false, true] {
            let variant = Attention { log_sums, ..small(mask) };
            let problem = Problem { mask, window: [20, 7], ..WHOLE };
            check(variant, problem, 3);
            // Queries that see nothing, where they are more than keys.
            for lengths in [[70, 150], [100, 70], [1, 1], [64, 200]] {
                check(variant, Problem { sequences: &[lengths], ..problem }, 2);
            }
        }
        let wide = Attention { tile: [128, 64], groups: 2, ..small(mask) };
        check(wide, Problem { mask, window: [150, 0], sequences: &[[130, 200]], ..WHOLE }, 1);
        check(wide, Problem { mask, window: [0, 0], sequences: &[[130, 130]], ..WHOLE }, 9);
    }
}

#[test]
fn blocks_divide_tiles_in_every_order() {
    let problem = Problem { mask: Mask::Causal, heads: [3, 3], ..WHOLE };
    for order in [Order::Heads, Order::Balanced] {
        let variant = Attention { order, ..small(Mask::Causal) };
        for blocks in [1, 4, 7] {
            check(variant, Problem { sequences: &[[150, 150], [150, 150]], ..problem }, blocks);
        }
        // So many that the longest come first; most see no key.
        check(variant, Problem { sequences: &[[3100, 100]], ..problem }, 10);
    }
}

#[test]
fn heads_share_keys() {
    for heads in [[4, 2], [3, 1]] {
        let problem = Problem { heads, sequences: &[[70, 80]; 2], ..WHOLE };
        check(small(Mask::Full), problem, 5);
        check(small(Mask::Causal), Problem { mask: Mask::Causal, ..problem }, 5);
    }
}

#[test]
fn sizes_of_heads() {
    for (dim, element) in [(64, Scalar::F16), (128, Scalar::Bf16), (192, Scalar::Bf16), (256, Scalar::F16)] {
        let of = Attention::of(dim, false);
        let variant = Attention { element, groups: 1, tile: [64, of.tile[1]], ..of };
        check(variant, Problem { sequences: &[[70, 130]], heads: [1, 1], ..WHOLE }, 2);
    }
}

#[test]
fn one_stage_of_f32() {
    for causal in [false, true] {
        let variant = Attention { tile: [64, 64], ..Attention::cpu(64, causal) };
        let mask = variant.mask;
        check(variant, Problem { mask, ..WHOLE }, 3);
        check(variant, Problem { mask, sequences: &[[70, 150]], ..WHOLE }, 2);
        check(variant, Problem { mask, sequences: &[[100, 70]], ..WHOLE }, 2);
    }
}

#[test]
fn packed_sequences() {
    let sequences = &[[70, 70], [0, 0], [1, 90], [130, 60], [64, 0], [5, 64]];
    for mask in [Mask::Full, Mask::Causal, Mask::Window] {
        let variant = Attention { packed: true, log_sums: true, ..small(mask) };
        check(variant, Problem { mask, window: [30, 30], sequences, heads: [2, 1] }, 4);
    }
}

#[test]
fn fp8_with_scales_of_heads() {
    let check = |variant: Attention, problem: Problem<'_>, blocks| {
        check(variant, problem, blocks);
        problem.check(variant, blocks, on_processor).unwrap_or_else(|error| panic!("{error}"));
    };
    let packed = &[[7, 7], [0, 0], [1, 90], [70, 60], [64, 0], [5, 64]];
    for mask in [Mask::Full, Mask::Causal, Mask::Window] {
        let of = |dim| Attention { mask, ..Attention::fp8(dim, mask == Mask::Causal, 1 << 13) };
        let small = Attention { tile: [64, 64], groups: 1, stages: 2, ..of(64) };
        let problem = Problem { mask, window: [30, 20], heads: [1, 1], ..WHOLE };
        for (lengths, element) in [([70, 150], Scalar::Bf16), ([100, 70], Scalar::F16), ([1, 1], Scalar::F32)]
        {
            let variant = Attention { element, log_sums: element == Scalar::F16, ..small };
            check(variant, Problem { sequences: &[lengths], ..problem }, 2);
        }
        check(small, Problem { heads: [4, 2], sequences: &[[40, 50]; 2], ..problem }, 5);
        let (dim, lengths) = if mask == Mask::Full { (256, [40, 133]) } else { (128, [40, 200]) };
        check(of(dim), Problem { sequences: &[lengths], ..problem }, 1);
        let stages = if mask == Mask::Window { 1 } else { 2 };
        let variant = Attention { packed: true, log_sums: true, stages, ..small };
        check(variant, Problem { sequences: packed, ..problem }, 4);
    }
}

#[test]
fn gradients() {
    let small = |dim, mask| Backward {
        mask,
        element: if mask == Mask::Full { Scalar::Bf16 } else { Scalar::F16 },
        ..Backward::of(dim, mask == Mask::Causal)
    };
    for mask in [Mask::Full, Mask::Causal, Mask::Window] {
        let problem = Problem { mask, window: [50, 20], heads: [1, 1], ..WHOLE };
        let one = Backward { tile: [64, 64], groups: 1, ..small(64, mask) };
        for lengths in [[70, 70], [70, 150], [100, 40], [1, 1]] {
            check_backward(one, Problem { sequences: &[lengths], ..problem }, 2);
        }
        // Heads that share keys.
        check_backward(one, Problem { heads: [4, 2], sequences: &[[70, 90]; 2], ..problem }, 3);
        // The shapes that are fast.
        check_backward(small(64, mask), Problem { sequences: &[[140, 140]], ..problem }, 1);
        check_backward(small(128, mask), Problem { sequences: &[[70, 133]], ..problem }, 1);
    }
}

#[test]
fn gradients_by_a_kernel_each() {
    let check = |variant: SplitBackward, problem: Problem<'_>, blocks| {
        problem.check_split(variant, blocks, launch).unwrap_or_else(|error| panic!("{error}"));
        problem.check_split(variant, blocks, on_processor).unwrap_or_else(|error| panic!("{error}"));
    };
    let packed = &[[70, 70], [0, 0], [1, 90], [90, 60], [64, 0], [0, 5], [5, 64]];
    for mask in [Mask::Full, Mask::Causal, Mask::Window] {
        let small = SplitBackward { mask, tile: [64, 32], ..SplitBackward::small(64, mask == Mask::Causal) };
        let problem = Problem { mask, window: [30, 10], heads: [1, 1], ..WHOLE };
        for lengths in [[70, 70], [40, 100], [100, 40], [1, 1]] {
            check(small, Problem { sequences: &[lengths], ..problem }, 2);
        }
        check(small, Problem { heads: [3, 1], sequences: &[[70, 40]; 2], window: [0, 0], ..problem }, 3);
        let of_packed = SplitBackward { packed: true, element: Scalar::F16, ..small };
        check(of_packed, Problem { heads: [2, 1], sequences: packed, ..problem }, 3);
        check(
            SplitBackward { element: Scalar::F32, ..of_packed },
            Problem { sequences: packed, ..problem },
            3,
        );
    }
    for dim in [192, 256] {
        let problem = Problem { mask: Mask::Causal, heads: [2, 1], sequences: &[[40, 70]], ..WHOLE };
        check(SplitBackward::small(dim, true), problem, 2);
        let groups = SplitBackward { packed: true, ..SplitBackward::of(dim, true) };
        check(groups, Problem { sequences: &[[30, 30], [40, 50]], ..problem }, 2);
    }
}

const ONE: decode::Problem<'_> =
    decode::Problem { heads: 1, sharing: 1, queries: 1, lengths: &[100], page: 0, splits: 1 };

fn check_decode(variant: Decode, problem: decode::Problem<'_>) {
    problem.check(variant, launch).unwrap_or_else(|error| panic!("{error}"));
    problem.check(variant, on_processor).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn decoding_of_any_lengths() {
    let lengths = &[0, 1, 5, 63, 64, 65, 150];
    for variant in [Decode::of(64, 0), Decode::cpu(64, 0)] {
        for splits in [1, 3, 9] {
            check_decode(variant, decode::Problem { lengths, splits, ..ONE });
            check_decode(variant, decode::Problem { lengths, splits, sharing: 3, queries: 2, ..ONE });
        }
    }
}

#[test]
fn decoding_where_heads_share_keys() {
    for (sharing, queries) in [(1, 16), (3, 1), (8, 1), (8, 3), (8, 16)] {
        let problem = decode::Problem { heads: 2, sharing, queries, lengths: &[70, 9], splits: 2, ..ONE };
        check_decode(Decode::of(64, 0), problem);
        check_decode(Decode { rows: 16, element: Scalar::F16, ..Decode::of(64, 0) }, problem);
    }
}

#[test]
fn decoding_from_pages_of_any_size() {
    for page in [1, 7, 16, 24, 32, 48, 64, 80, 128] {
        let problem =
            decode::Problem { heads: 2, sharing: 4, lengths: &[130, 0, 17, 64], page, splits: 2, ..ONE };
        check_decode(Decode::of(64, page as u32), problem);
        check_decode(Decode::cpu(64, page as u32), decode::Problem { queries: 3, ..problem });
    }
}

#[test]
fn decoding_of_heads_of_any_size() {
    for dim in [128, 192, 256] {
        for page in [0, 16] {
            check_decode(
                Decode::of(dim, page),
                decode::Problem { page: page.into(), lengths: &[90], sharing: 4, ..ONE },
            );
        }
    }
}

#[test]
fn splits_are_as_many_as_have_work() {
    let variant = Decode::of(128, 0);
    for (resident, blocks, longest, wanted) in [
        (132, 8, 65536, 16),
        (264, 8, 65536, 32),
        (264, 128, 16384, 2),
        (132, 512, 65536, 1),
        (132, 1, 1024, 4),
        (132, 0, 0, 1),
        (0, 1, 9999, 1),
        (1 << 40, 1, u64::MAX, 64),
    ] {
        assert_eq!(variant.splits(resident, blocks, longest), wanted, "{resident} {blocks} {longest}");
    }
}
