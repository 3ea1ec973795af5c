//! What the driver says of the device.

use std::collections::BTreeSet;
use std::thread;

use anyhow::{Context, ensure};
use vm_accel::programs::Program;
use vm_accel::{Accelerator, Error, arguments};
use vm_cuda::CudaAccelerator;

use crate::gpu::{Gpu, TIMEOUT};
use crate::skip::skip;
use crate::{Arguments, Report, Test, programs};

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![
        Test::new("every device is found by its PCI address", |_, report| {
            for device in vm_cuda::devices()? {
                let info = device.info();
                let address = info.address.clone().unwrap_or_default();
                let found = CudaAccelerator::at(&address.to_ascii_uppercase())?;
                ensure!(found.info() == info, "{address} is {:?}, not {info:?}", found.info());
                report
                    .note(format!("{} at {address}: {} SMs, {}", info.name, info.compute_units, info.driver));
            }
            let none = CudaAccelerator::at("ffff:ff:1f.7");
            ensure!(matches!(none, Err(vm_accel::Error::NoDevice { .. })), "{none:?}");
            Ok(())
        }),
        Test::new("several devices at once, each with its own memory", |_, report| several(report)),
        Test::new("its chip by its boot registers is the driver's", |gpu, report| {
            crate::chip::check(gpu, report)
        }),
        Test::new("what it tells of itself is sane, and what egpu status says", |gpu, report| {
            crate::telemetry::check(gpu, report)
        }),
        Test::new("what uses it", |gpu, report| {
            const HELD: u64 = 1 << 30;
            let info = gpu.accelerator.info();
            let worker = gpu.worker()?;
            let _held = worker.allocate_zeroed(HELD)?;
            let usage = match vm_cuda::nvml::usage(info.address.as_deref().unwrap_or_default()) {
                Err(error @ vm_accel::Error::Unavailable { .. }) => return skip(error.to_string()),
                usage => usage?,
            };
            report.note(format!("{usage:?}"));
            ensure!(usage.memory_bytes >= Some(info.memory_bytes), "{usage:?}");
            ensure!(usage.health.memory_used >= Some(HELD), "{usage:?}");
            ensure!(usage.health.temperature.is_some_and(|degrees| degrees < 120), "{usage:?}");
            // Their IDs are the host's, which in a container are others.
            ensure!(usage.processes.is_some(), "{usage:?}");
            Ok(())
        }),
    ]
}

fn several(report: &mut Report) -> anyhow::Result<()> {
    const WORDS: usize = 1 << 20;
    const ROUNDS: u32 = 200;
    const LARGE: u64 = 4 << 30;
    let count = vm_cuda::devices()?.len() as u32;
    if count < 2 {
        return skip("there is one device only");
    }
    let gpus = (0..count).map(Gpu::open).collect::<vm_accel::Result<Vec<_>>>()?;
    let addresses: BTreeSet<_> = gpus.iter().map(|gpu| gpu.accelerator.info().address.clone()).collect();
    ensure!(addresses.len() == gpus.len(), "{addresses:?}");
    let workers = gpus.iter().map(Gpu::worker).collect::<vm_accel::Result<Vec<_>>>()?;
    let kernels = gpus
        .iter()
        .zip(&workers)
        .map(|(gpu, worker)| Ok(worker.load(&programs::artifact(Program::Bump, gpu)?)?))
        .collect::<anyhow::Result<Vec<_>>>()?;

    // Each counts in its own memory, all at the same time.
    thread::scope(|scope| {
        let threads: Vec<_> = (1..)
            .zip(workers.iter().zip(&kernels))
            .map(|(step, (worker, kernel)): (u32, _)| {
                scope.spawn(move || -> anyhow::Result<()> {
                    let data = worker.allocate_zeroed(4 * WORDS as u64)?;
                    for _ in 0..ROUNDS {
                        worker.launch(kernel, 64, &arguments![&data, step])?;
                    }
                    let mut words = vec![0u32; WORDS];
                    worker.read(&data, &mut words)?;
                    let wrong = words.iter().position(|&word| word != step * ROUNDS);
                    ensure!(wrong.is_none(), "device {}: word {wrong:?} is wrong", step - 1);
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().ok().context("a thread panicked")?)
    })?;

    // A kernel of one device's worker is nothing to another's.
    let data = workers[1].allocate(256)?;
    let refused = workers[1].launch(&kernels[0], 1, &arguments![&data, 1u32]);
    ensure!(matches!(refused, Err(Error::WrongWorker { .. })), "{refused:?}");
    workers[1].free(data)?;

    // Memory is taken from the device that was asked.
    let free =
        || workers.iter().map(|worker| Ok(worker.memory()?.free)).collect::<vm_accel::Result<Vec<_>>>();
    let before = free()?;
    let large = workers[0].allocate_zeroed(LARGE)?;
    workers[0].synchronize(TIMEOUT)?;
    let after = free()?;
    workers[0].free(large)?;
    ensure!(before[0] >= after[0] + LARGE, "{before:?}, then {after:?}");
    ensure!(before[1] < after[1] + LARGE / 2, "{before:?}, then {after:?}");
    workers.iter().try_for_each(|worker| worker.stop(TIMEOUT))?;
    report
        .note(format!("{count} devices: {}", addresses.into_iter().flatten().collect::<Vec<_>>().join(", ")));
    Ok(())
}
