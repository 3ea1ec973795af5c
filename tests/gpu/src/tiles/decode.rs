//! Decoding with a paged cache at sizes that matter, beside FlashAttention-3 and FlashInfer with a paged cache, if their modules are there,
//! and PyTorch's attention to a cache that is not paged.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vm_accel::Accelerator as _;
use vm_ir::{Scalar, Trust};
use vm_kernels::append::Layout;
use vm_kernels::attention::DecodeAttention;
use vm_kernels::call::Function as _;
use vm_passthrough::accelerator::resources;

use super::figures::random;
use crate::Test;
use crate::gpu::{Gpu, TIMEOUT};
use crate::library::measure::{Loaded, Place, compile, launches};
use crate::peer::Answer;
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
/// Peers, as they are asked for.
const PEERS: [(&str, &str); 3] = [
    ("paged", "FlashAttention-3, paged"),
    ("flashinfer", "FlashInfer, paged"),
    ("decode", "PyTorch, not paged"),
];

pub(super) fn tests() -> Vec<Test> {
    let name = |[batch, tokens]: [u64; 2]| format!("decoding of bf16, {batch} sequences of {tokens} tokens");
    let of = |work: &'static [u64; 2]| {
        Test::new(name(*work), move |gpu, report| run(gpu, *work, name(*work), report))
    };
    WORK.iter().map(of).collect()
}

fn key(kind: &str, [batch, tokens]: [u64; 2]) -> String {
    format!("{kind} {batch} {} {} {tokens} {DIM} 0", HEADS[0], HEADS[1])
}

fn run(gpu: &Gpu, [batch, tokens]: [u64; 2], name: String, report: &mut Report) -> anyhow::Result<()> {
    let worker = gpu.worker()?;
    let pages = tokens.div_ceil(PAGE);
    let function = DecodeAttention {
        element: Scalar::Bf16,
        batch,
        heads: HEADS,
        dim: DIM as u32,
        layout: Layout::Paged { pages: batch * pages, page: PAGE as u32, of_sequence: pages },
        packed: false,
        scale: 1.0 / (DIM as f32).sqrt(),
    };
    let call = function.call(&resources(gpu.accelerator.info()))?;
    let specified = (1..).zip(function.buffers());
    let buffers = specified.map(|(seed, buffer)| {
        let count = buffer.len().context("a buffer's length")?;
        // Pages lie in no order: 7 has no divisor in common with a power of two.
        let numbers = match buffer.name {
            "table" => (0..count).map(|page| (page * 7 % count) as u32).collect(),
            "lengths" => vec![tokens as u32; batch as usize],
            _ => return random(&worker, seed, count),
        };
        let buffer = worker.allocate(4 * count)?;
        worker.write(&buffer, &numbers)?;
        Ok(buffer)
    });
    let mut buffers = buffers.collect::<anyhow::Result<Vec<_>>>()?;
    buffers.push(worker.allocate(call.workspace)?);
    let places: Vec<_> = buffers.iter().map(|of| Place { of, at: 0 }).collect();
    let entries: Vec<_> = call.launches.iter().map(|launch| launch.entry).collect();
    let mut kernels = [Loaded::new(), Loaded::new()];
    for (entry, trust, compiled) in compile(gpu, &entries)? {
        kernels[usize::from(trust == Trust::Trusted)].insert(entry, worker.load(compiled.artifact())?);
    }
    let [guest, trusted] = [0, 1].map(|trust| launches(&call, &kernels[trust], &places));
    let (guest, trusted) = (guest?, trusted?);
    // Keys and values, each read once.
    let bytes = (2 * 2 * batch * HEADS[1] * tokens * DIM) as f64;
    let deadline = || Instant::now() + Duration::from_secs(60);
    let [guests, own] = worker.submit_and_wait(deadline(), |session| {
        let mut rates = [const { Vec::new() }; 2];
        for round in 0..=ROUNDS {
            for (rates, call) in rates.iter_mut().zip([&guest, &trusted]) {
                let launches = |count| {
                    (0..count).try_for_each(|_| {
                        call.iter().try_for_each(|(kernel, grid, arguments)| {
                            session.launch(kernel, *grid, arguments)
                        })
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
    drop((guest, trusted));
    drop((kernels, buffers));
    worker.stop(TIMEOUT)?;
    let figure = |name: String, ours: Sample, peer: (String, Sample), aim: f64| {
        let aim = Some(Aim::RatioAtLeast(aim));
        Figure { name, unit: "TB/s".into(), ours, peer: Some(peer), aim }
    };
    let trusted = ("the host's own".into(), own.clone());
    report.figure(figure(format!("{name}, as a guest's"), Sample::of(guests), trusted, 0.97));
    match peers() {
        Ok(peers) => {
            let of = |kind| peers.get(&key(kind, [batch, tokens]));
            let found = PEERS.iter().filter_map(|(kind, peer)| Some((peer, of(kind)?))).collect::<Vec<_>>();
            ensure!(!found.is_empty(), "the peer measured other work");
            for (peer, answer) in found {
                let seconds = match answer {
                    Ok(seconds) => seconds,
                    Err(reason) => {
                        report.note(format!("without {peer}: {reason}"));
                        continue;
                    }
                };
                let rates = seconds.iter().map(|seconds| bytes / seconds / 1e12).collect();
                let peer = ((*peer).to_owned(), Sample::of(rates));
                report.figure(figure(name.clone(), own.clone(), peer, 1.0));
            }
        }
        Err(reason) => report.note(format!("without PyTorch: {reason}")),
    }
    Ok(())
}

/// What peers take, by what is measured. They run once, in a process of their own.
fn peers() -> &'static Result<HashMap<String, Answer>, String> {
    static FOUND: OnceLock<Result<HashMap<String, Answer>, String>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let of = |work: &[u64; 2]| PEERS.map(|(kind, _)| key(kind, *work));
        let keys: Vec<String> = WORK.iter().flat_map(of).collect();
        crate::peer::run(include_str!("peers.py"), &keys)
    })
}
