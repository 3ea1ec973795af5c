//! Launches through the worker against the driver's own.

use std::ffi::c_void;
use std::time::Instant;

use anyhow::ensure;
use vm_accel::arguments;
use vm_ir::{Trust, text, validate};

use super::compile::one_line_text;
use super::raw::Raw;
use super::time;
use crate::gpu::{TIMEOUT, named};
use crate::table::{Aim, Figure, Sample};
use crate::{Arguments, Test, allocations};

/// Launches in a burst; less than the worker's queue takes.
const BURST: usize = 256;
/// Launches in a row, which fill every queue.
const ROW: usize = 20_000;

pub(super) fn tests(arguments: &Arguments) -> Vec<Test> {
    let device = arguments.device;
    vec![Test::new("launching", move |gpu, report| {
        let module = validate(text::parse(&one_line_text(0))?, Trust::Trusted)?;
        let compiled = gpu.compile(&module)?;
        let artifact = named(&compiled, "k")?.artifact();

        let worker = gpu.worker()?;
        let loaded = worker.load(artifact)?;
        let (x, y) = (worker.allocate_zeroed(1024)?, worker.allocate_zeroed(1024)?);
        let given = arguments![&x, &y];

        let raw = Raw::open(device)?;
        let peer = raw.load(artifact.image(), artifact.entry())?;
        let (a, b) = (raw.allocate(1024)?, raw.allocate(1024)?);
        let mut block = [a, 256, b, 256];
        let mut parameters = [block.as_mut_ptr().cast::<c_void>()];

        // Turn by turn, so that what the machine does beside falls on both.
        let (mut ours, mut theirs, mut counted) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..220 {
            let before = allocations::count();
            let begin = Instant::now();
            for _ in 0..BURST {
                worker.launch(&loaded, 1, &given)?;
            }
            let taken = begin.elapsed();
            let allocated = allocations::count() - before;
            worker.synchronize(TIMEOUT)?;
            let begin = Instant::now();
            for _ in 0..BURST {
                raw.launch(&peer, 1, &mut parameters)?;
            }
            let peer_taken = begin.elapsed();
            raw.synchronize()?;
            if round >= 20 {
                ours.push(taken.as_secs_f64() * 1e6 / BURST as f64);
                theirs.push(peer_taken.as_secs_f64() * 1e6 / BURST as f64);
                counted.push(allocated as f64 / BURST as f64);
            }
        }
        let figure = |name: &str, unit: &str, ours, peer, aim| Figure {
            name: name.into(),
            unit: unit.into(),
            ours: Sample::of(ours),
            peer,
            aim,
        };
        let call = |peer| Some(("cuLaunchKernel".to_owned(), Sample::of(peer)));
        report.figure(figure(
            "launch, on the caller",
            "µs",
            ours,
            call(theirs),
            Some(Aim::MoreByAtMost(0.5)),
        ));
        report.figure(figure("allocations of a launch", "", counted, None, Some(Aim::AtMost(0.0))));

        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..11 {
            let begin = Instant::now();
            for _ in 0..ROW {
                worker.launch(&loaded, 1, &given)?;
            }
            worker.synchronize(TIMEOUT)?;
            let taken = begin.elapsed();
            let begin = Instant::now();
            for _ in 0..ROW {
                raw.launch(&peer, 1, &mut parameters)?;
            }
            raw.synchronize()?;
            let peer_taken = begin.elapsed();
            if round > 0 {
                ours.push(taken.as_secs_f64() * 1e6 / ROW as f64);
                theirs.push(peer_taken.as_secs_f64() * 1e6 / ROW as f64);
            }
        }
        report.figure(figure("launch, 20,000 in a row, each", "µs", ours, call(theirs), None));

        let ours = time(500, 50, 1e6, || {
            worker.launch(&loaded, 1, &given)?;
            Ok(worker.synchronize(TIMEOUT)?)
        })?;
        let theirs = time(500, 50, 1e6, || {
            raw.launch(&peer, 1, &mut parameters)?;
            raw.synchronize()
        })?;
        report.figure(Figure {
            name: "launch and wait".into(),
            unit: "µs".into(),
            ours,
            peer: Some(("cuLaunchKernel and cuStreamSynchronize".into(), theirs)),
            aim: None,
        });

        // That all this ran at all.
        worker.write(&x, &[2.0f32; 256])?;
        worker.launch(&loaded, 1, &given)?;
        let mut result = [0f32; 256];
        worker.read(&y, &mut result)?;
        ensure!(result == [1.0; 256], "the kernel gave {:?}", &result[..4]);
        raw.free(a)?;
        raw.free(b)?;
        raw.unload(peer)?;
        drop((x, y, loaded));
        Ok(worker.stop(TIMEOUT)?)
    })]
}
