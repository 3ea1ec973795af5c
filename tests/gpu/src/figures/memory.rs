//! The worker's pool against the driver's allocators.

use std::time::Instant;

use super::raw::Raw;
use crate::gpu::TIMEOUT;
use crate::table::{Aim, Figure, Sample};
use crate::{Arguments, Test};

const BYTES: u64 = 2 << 20;
/// Allocations that are timed together.
const EACH: usize = 50;

pub(super) fn tests(arguments: &Arguments) -> Vec<Test> {
    let device = arguments.device;
    vec![Test::new("allocating", move |gpu, report| {
        let worker = gpu.worker()?;
        let raw = Raw::open(device)?;
        raw.keep_freed(device)?;
        let mut samples: [Vec<f64>; 3] = Default::default();
        for round in 0..120 {
            let mut keep = |index: usize, begin: Instant| {
                if round >= 20 {
                    samples[index].push(begin.elapsed().as_secs_f64() * 1e6 / EACH as f64);
                }
            };
            let begin = Instant::now();
            for _ in 0..EACH {
                drop(worker.allocate(BYTES)?);
            }
            keep(0, begin);
            let begin = Instant::now();
            for _ in 0..EACH {
                raw.allocate_and_free_async(BYTES as usize)?;
            }
            keep(1, begin);
            raw.synchronize()?;
            let begin = Instant::now();
            for _ in 0..EACH {
                raw.free(raw.allocate(BYTES as usize)?)?;
            }
            keep(2, begin);
        }
        let [ours, stream, plain] = samples.map(Sample::of);
        let figure = |peer: (&str, Sample), aim| Figure {
            name: "allocate and free 2 MiB".into(),
            unit: "µs".into(),
            ours: ours.clone(),
            peer: Some((peer.0.into(), peer.1)),
            aim: Some(aim),
        };
        report.figure(figure(("cuMemAlloc and cuMemFree", plain), Aim::RatioAtMost(1.0 / 40.0)));
        report.figure(figure(("cuMemAllocAsync and cuMemFreeAsync", stream), Aim::RatioAtMost(1.5)));
        Ok(worker.stop(TIMEOUT)?)
    })]
}
