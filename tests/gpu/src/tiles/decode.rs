//! Decoding with a paged cache at sizes that matter, beside PyTorch's attention to a cache that is not paged.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::Context;
use vm_accel::{Accelerator as _, Argument};
use vm_cuda::CudaAccelerator;
use vm_ir::{GuestAddr, Scalar, Trust};
use vm_kernels::attention::Generate;
use vm_kernels::family::Problem as _;
use vm_passthrough::accelerator::resources;

use super::figures::{constant, random};
use super::valid;
use crate::Test;
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::table::{Aim, Figure, Report, Sample};

/// Measurements, launches of each, and launches before that don't count.
const ROUNDS: usize = 9;
const LAUNCHES: usize = 8;
const WARM: usize = 2;

/// Sequences, and tokens of each; with 32 heads of queries, 8 of keys, of 128 elements.
const WORK: &[[u64; 2]] = &[[1, 4096], [1, 65536], [16, 4096], [16, 16384], [64, 4096]];
const HEADS: [u64; 2] = [32, 8];
const DIM: u64 = 128;
const PAGE: u64 = 64;

pub(super) fn tests() -> Vec<Test> {
    let name = |[batch, tokens]: [u64; 2]| format!("decoding of bf16, {batch} sequences of {tokens} tokens");
    let of = |work: &'static [u64; 2]| {
        Test::new(name(*work), move |gpu, report| run(gpu, *work, name(*work), report))
    };
    WORK.iter().map(of).collect()
}

fn key([batch, tokens]: [u64; 2]) -> String {
    format!("decode {batch} {} {} {tokens} {DIM} 0", HEADS[0], HEADS[1])
}

fn run(gpu: &Gpu, [batch, tokens]: [u64; 2], name: String, report: &mut Report) -> anyhow::Result<()> {
    let worker = gpu.worker()?;
    let problem = Generate {
        element: Scalar::Bf16,
        dim: DIM as u32,
        page: PAGE as u32,
        batch,
        heads: HEADS,
        queries: 1,
        tokens,
    };
    let resources = resources(gpu.accelerator.info());
    let variant = *problem.variants(&resources).first().context("no variant fits")?;
    let grid = problem.grid(&variant, &resources);
    let (rows, pages) = (HEADS[0] / HEADS[1], tokens.div_ceil(PAGE));
    let of_q = [batch, HEADS[1], rows, DIM];
    let of_cache = [batch * pages, HEADS[1], PAGE, DIM];
    let of_parts = [u64::from(grid[0]), batch * HEADS[1], rows, DIM];
    let count = |extents: &[u64]| extents.iter().product::<u64>();
    let [q, k, v, o] = [(1, of_q), (2, of_cache), (3, of_cache), (4, of_q)]
        .map(|(seed, extents)| random(&worker, seed, count(&extents)));
    let (q, k, v, o) = (q?, k?, v?, o?);
    let (parts, sums) = (constant(&worker, count(&of_parts))?, constant(&worker, count(&of_parts[..3]))?);
    let [table, lengths] = [batch * pages, batch].map(|count| worker.allocate(4 * count));
    let (table, lengths) = (table?, lengths?);
    // Pages lie in no order: 7 has no divisor in common with a power of two.
    let numbers: Vec<u32> = (0..batch * pages).map(|page| (page * 7 % (batch * pages)) as u32).collect();
    worker.write(&table, &numbers)?;
    worker.write(&lengths, &vec![tokens as u32; batch as usize])?;
    let load = |trust| -> anyhow::Result<_> {
        let kernels = [variant.kernel(GuestAddr(0))?, variant.join(GuestAddr(0))?].map(|kernel| {
            let compiled = gpu.compile(&valid(gpu, kernel.clone(), trust)?)?;
            anyhow::Ok(worker.load(named(&compiled, kernel.name())?.artifact())?)
        });
        let [first, second] = kernels;
        Ok([first?, second?])
    };
    let [guest, trusted] = [load(Trust::Guest)?, load(Trust::Trusted)?];
    let first: Vec<Argument<'_, CudaAccelerator>> = vec![
        q.shaped(&of_q)?.into(),
        k.shaped(&of_cache)?.into(),
        v.shaped(&of_cache)?.into(),
        table.shaped(&[batch, pages])?.into(),
        (&lengths).into(),
        parts.shaped(&of_parts)?.into(),
        sums.shaped(&of_parts[..3])?.into(),
        (1.0 / (DIM as f32).sqrt()).into(),
        1i32.into(),
    ];
    let second: Vec<Argument<'_, CudaAccelerator>> =
        vec![parts.shaped(&of_parts)?.into(), sums.shaped(&of_parts[..3])?.into(), o.shaped(&of_q)?.into()];
    let join = [rows.div_ceil(8) as u32, HEADS[1] as u32, batch as u32];
    // Keys and values, each read once.
    let bytes = (2 * 2 * batch * HEADS[1] * tokens * DIM) as f64;
    let deadline = || Instant::now() + Duration::from_secs(60);
    let [guests, own] = worker.submit_and_wait(deadline(), |session| {
        let mut rates = [const { Vec::new() }; 2];
        for round in 0..=ROUNDS {
            for (rates, kernels) in rates.iter_mut().zip([&guest, &trusted]) {
                let launches = |count| {
                    (0..count).try_for_each(|_| {
                        session.launch(&kernels[0], grid, &first)?;
                        session.launch(&kernels[1], join, &second)
                    })
                };
                launches(WARM)?;
                let taken = session.timed(deadline(), |_| launches(LAUNCHES))?;
                if round > 0 {
                    rates.push(bytes * LAUNCHES as f64 / taken.as_secs_f64() / 1e12);
                }
            }
        }
        Ok(rates)
    })?;
    let own = Sample::of(own);
    drop((first, second));
    drop((q, k, v, o, parts, sums, table, lengths, guest, trusted));
    worker.stop(TIMEOUT)?;
    let mut figure = |name: String, ours: Sample, peer: (String, Sample), aim: f64| {
        let aim = Some(Aim::RatioAtLeast(aim));
        report.figure(Figure { name, unit: "TB/s".into(), ours, peer: Some(peer), aim });
    };
    figure(format!("{name}, as a guest's"), Sample::of(guests), ("the host's own".into(), own.clone()), 0.97);
    match peers() {
        Ok(peers) => {
            let seconds = peers.get(&key([batch, tokens])).context("the peer measured other work")?;
            let rates = seconds.iter().map(|seconds| bytes / seconds / 1e12).collect();
            figure(name, own, ("PyTorch, not paged".to_owned(), Sample::of(rates)), 1.0);
        }
        Err(reason) => report.note(format!("without PyTorch: {reason}")),
    }
    Ok(())
}

/// Seconds of a call by measurement, by what is measured. PyTorch runs once, in a process of its own.
fn peers() -> &'static Result<HashMap<String, Vec<f64>>, String> {
    static PEERS: OnceLock<Result<HashMap<String, Vec<f64>>, String>> = OnceLock::new();
    PEERS.get_or_init(|| {
        let keys: Vec<String> = WORK.iter().map(|work| key(*work)).collect();
        crate::peer::run(include_str!("peers.py"), &keys)
    })
}
