//! Attention and its gradients: all variants at odd shapes, between canaries, against their definitions.

use std::cell::Cell;

use anyhow::ensure;
use vm_accel::{Launch, Limits};
use vm_ir::interp::Argument;
use vm_ir::{GuestAddr, Kernel, Scalar, Trust};
use vm_kernels::attention::{Attention, Backward, Decode, Gradient, Mask, Order, SplitBackward};

use super::reference::{Problem, decode};
use super::{Launches, is_too_large, valid};
use crate::Test;
use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};

/// Blocks of a launch: fewer than there are tiles, and more.
const BLOCKS: [u32; 2] = [3, 132];

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("attention of odd shapes", |gpu, report| {
            report.note(forward(gpu)?.to_string());
            Ok(())
        }),
        Test::new("gradients of attention of odd shapes", |gpu, report| {
            report.note(backward(gpu)?.to_string());
            Ok(())
        }),
        Test::new("gradients of attention by a kernel each, of odd shapes", |gpu, report| {
            report.note(split(gpu)?.to_string());
            Ok(())
        }),
        Test::new("decoding of odd shapes", |gpu, report| {
            report.note(decoding(gpu)?.to_string());
            Ok(())
        }),
    ]
}

/// Has `check` launch kernels as a guest's, with rows packed, and as the host's own, with rows apart. Gives the number of launches.
fn each_way(
    gpu: &Gpu,
    check: impl Fn(
        u32,
        &dyn Fn(&Kernel, [u32; 3], Vec<Argument>) -> anyhow::Result<Vec<Argument>>,
    ) -> anyhow::Result<()>,
) -> anyhow::Result<usize> {
    let worker = gpu.worker()?;
    let launches = Cell::new(0);
    // A definition takes long to compute, so that each is compared with twice.
    let ways = [(Trust::Guest, Rows::Packed), (Trust::Trusted, Rows::Apart)];
    for ((trust, rows), blocks) in ways.into_iter().zip(BLOCKS) {
        check(blocks, &|kernel, grid, arguments| {
            launches.set(launches.get() + 1);
            let compiled = gpu.compile(&valid(gpu, kernel.clone(), trust)?)?;
            let loaded = worker.load(named(&compiled, kernel.name())?.artifact())?;
            let launch = Launch::over(grid).within(Limits::default());
            Arena::new(&arguments, rows).run(&worker, &loaded, kernel, launch)
        })?;
    }
    worker.stop(TIMEOUT)?;
    Ok(launches.get())
}

fn masks() -> impl Iterator<Item = (Mask, [i64; 2])> {
    [(Mask::Full, [0, 0]), (Mask::Causal, [0, 0]), (Mask::Window, [100, 30])].into_iter()
}

fn forward(gpu: &Gpu) -> anyhow::Result<Launches> {
    let mut done = Launches::default();
    let mut check = |variant: Attention, heads: [u64; 2], sequences: &[[u64; 2]], window: [i64; 2]| {
        if is_too_large(gpu, &variant.kernel(GuestAddr(0))?)? {
            done.too_large += 1;
            return Ok(());
        }
        let problem = Problem { heads, sequences, mask: variant.mask, window };
        done.launches += each_way(gpu, |blocks, launch| problem.check(variant, blocks, launch))?;
        anyhow::Ok(())
    };
    for ((mask, window), dim) in masks().flat_map(|mask| [64, 128, 192, 256].map(|dim| (mask, dim))) {
        let large = Attention { mask, ..Attention::of(dim, mask == Mask::Causal) };
        let log_sums = Attention { log_sums: true, element: Scalar::F16, ..large };
        for lengths in [[1, 1], [128, 128], [70, 390], [260, 100]] {
            check(large, [2, 2], &[lengths], window)?;
        }
        check(large, [4, 2], &[[130, 150]; 2], window)?;
        check(log_sums, [3, 1], &[[200, 230]], window)?;
        let fp8 = Attention { mask, ..Attention::fp8(dim, mask == Mask::Causal, 1 << 13) };
        for lengths in [[1, 1], [70, 390], [260, 100]] {
            check(fp8, [2, 2], &[lengths], window)?;
        }
        check(Attention { log_sums: true, element: Scalar::F16, ..fp8 }, [4, 2], &[[130, 150]; 2], window)?;
        let packed = Attention { packed: true, ..log_sums };
        let sequences = [[70, 70], [0, 0], [1, 90], [130, 60], [64, 0], [256, 300]];
        check(packed, [2, 1], &sequences, window)?;
        let keys = if dim == 256 { 96 } else { fp8.tile[1] };
        let tile = [fp8.tile[0], keys];
        check(Attention { packed: true, log_sums: true, tile, ..fp8 }, [2, 1], &sequences, window)?;
        check(Attention { tile: [64, 64], groups: 1, stages: 2, ..fp8 }, [2, 1], &[[130, 150]; 2], window)?;
        // For little shared memory.
        let small = Attention { tile: [64, 64], groups: 1, ..packed };
        check(small, [2, 1], &sequences, window)?;
        check(Attention { packed: false, ..small }, [4, 2], &[[130, 150]; 2], window)?;
    }
    for order in [Order::Heads, Order::Balanced] {
        let variant = Attention { order, tile: [64, 64], groups: 1, ..Attention::of(64, true) };
        check(variant, [3, 3], &[[400, 400]], [0, 0])?;
        check(variant, [1, 1], &[[3100, 100]], [0, 0])?;
    }
    ensure!(done.launches > 0, "no variant fits");
    Ok(done)
}

/// A variant, heads of queries and of keys, and sequences.
type Shape<'a> = (Backward, [u64; 2], &'a [[u64; 2]]);

fn backward(gpu: &Gpu) -> anyhow::Result<Launches> {
    let mut done = Launches::default();
    for ((mask, window), dim) in masks().flat_map(|mask| [64, 128].map(|dim| (mask, dim))) {
        let large = Backward { mask, ..Backward::of(dim, mask == Mask::Causal) };
        let halves = Backward { element: Scalar::F16, ..large };
        let small = Backward { tile: [64, 64], groups: 1, ..large };
        let shapes: [Shape; 6] = [
            (large, [1, 1], &[[1, 1]]),
            (large, [2, 2], &[[128, 128]]),
            (halves, [2, 2], &[[70, 390]]),
            (large, [2, 2], &[[260, 100]]),
            (halves, [4, 2], &[[140, 150]; 2]),
            (small, [4, 2], &[[100, 130]; 2]),
        ];
        for (variant, heads, sequences) in shapes {
            if is_too_large(gpu, &variant.kernel(GuestAddr(0))?)? {
                done.too_large += 1;
                continue;
            }
            let problem = Problem { heads, sequences, mask, window };
            done.launches +=
                each_way(gpu, |blocks, launch| problem.check_gradients(variant, blocks, launch))?;
        }
    }
    ensure!(done.launches > 0, "no variant fits");
    Ok(done)
}

fn split(gpu: &Gpu) -> anyhow::Result<Launches> {
    let mut done = Launches::default();
    let packed = &[[70, 70], [0, 0], [1, 90], [130, 60], [64, 0], [0, 5], [130, 200]][..];
    for ((mask, window), dim) in masks().flat_map(|mask| [64, 128, 192, 256].map(|dim| (mask, dim))) {
        let large = SplitBackward { mask, ..SplitBackward::of(dim, mask == Mask::Causal) };
        let halves = SplitBackward { element: Scalar::F16, packed: true, ..large };
        let small = SplitBackward { mask, packed: true, ..SplitBackward::small(dim, mask == Mask::Causal) };
        type Shape<'a> = (SplitBackward, [u64; 2], &'a [[u64; 2]]);
        let shapes: [Shape<'_>; 5] = [
            (large, [1, 1], &[[1, 1]]),
            (large, [3, 1], &[[70, 230]]),
            (large, [2, 2], &[[150, 100]]),
            (halves, [2, 1], packed),
            (small, [2, 1], packed),
        ];
        for (variant, heads, sequences) in shapes {
            // The kernel of dK takes the most.
            if is_too_large(gpu, &variant.kernel(Gradient::Keys, GuestAddr(0))?)? {
                done.too_large += 1;
                continue;
            }
            let problem = Problem { heads, sequences, mask, window };
            done.launches += each_way(gpu, |blocks, launch| problem.check_split(variant, blocks, launch))?;
        }
    }
    ensure!(done.launches > 0, "no variant fits");
    Ok(done)
}

fn decoding(gpu: &Gpu) -> anyhow::Result<Launches> {
    let mut done = Launches::default();
    for (dim, page) in
        [64, 128, 256].into_iter().flat_map(|dim| [0, 16, 32, 48, 64, 128].map(|page| (dim, page)))
    {
        let of = Decode::of(dim, page);
        let halves = Decode { element: Scalar::F16, ..Decode::small(dim, page) };
        let lengths = &[0, 1, 63, 65, 300, 1000][..];
        let (page, splits) = (page.into(), 3);
        let problem = decode::Problem { heads: 2, sharing: 1, queries: 1, lengths, page, splits };
        for (variant, sharing, queries) in [(of, 1, 1), (of, 8, 1), (halves, 3, 5), (of, 8, 16)] {
            if is_too_large(gpu, &variant.kernel(GuestAddr(0))?)? {
                done.too_large += 1;
                continue;
            }
            let problem = decode::Problem { sharing, queries, ..problem };
            done.launches += each_way(gpu, |_, launch| problem.check(variant, launch))?;
        }
    }
    ensure!(done.launches > 0, "no variant fits");
    Ok(done)
}
