//! The functions of the kernel library: every case of `vm-kernels` against its definition.

pub(crate) mod figures;
pub(crate) mod measure;
mod work;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Context, anyhow};
use vm_accel::{Accelerator as _, Launch, Limits};
use vm_ir::{GuestAddr, Module, Trust, validate};
use vm_kernels::call::Entry;
use vm_kernels::cases::{Case, all};
use vm_kernels::family::Resources;
use vm_passthrough::accelerator::{CompiledKernel, resources};

use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::table::Report;
use crate::{Arguments, Test};

/// The tests of this section, one for each case.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    let cases = all().into_iter();
    cases.map(|case| Test::new(case.name.clone(), move |gpu, report| check(gpu, &case, report))).collect()
}

/// The device, and one that is alike but has no clusters: what is laid out for clusters is tried without them as well.
fn devices(gpu: &Gpu) -> [Resources; 2] {
    let whole = resources(gpu.accelerator.info());
    [whole, Resources { cluster: 1, ..whole }]
}

/// Kernels by name, as a guest's and as the host's own, or why they are none.
type Kernels = HashMap<(String, Trust), Result<CompiledKernel, String>>;

/// The kernels of all cases, each compiled once, on all processors: the assembler takes longer than all else.
fn kernels(gpu: &Gpu) -> &'static Kernels {
    static KERNELS: OnceLock<Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let devices = devices(gpu);
        let calls = all().into_iter().flat_map(|case| devices.map(|device| case.function.call(&device)));
        let entries: HashSet<Entry> =
            calls.flatten().flat_map(|call| call.launches).map(|launch| launch.entry).collect();
        let wanted: Vec<(Entry, Trust)> = entries
            .into_iter()
            .flat_map(|entry| [Trust::Guest, Trust::Trusted].map(|trust| (entry, trust)))
            .collect();
        let (next, made) = (AtomicUsize::new(0), Mutex::new(Kernels::new()));
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some((entry, trust)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let compiled = compile(gpu, entry, *trust);
                        let (name, compiled) = match compiled {
                            Ok(kernel) => (kernel.name().to_owned(), Ok(kernel)),
                            Err((name, error)) => (name, Err(format!("{error:#}"))),
                        };
                        let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
                        made.insert((name, *trust), compiled);
                    }
                });
            }
        });
        made.into_inner().unwrap_or_else(PoisonError::into_inner)
    })
}

/// A kernel, or its name and why there is none.
fn compile(gpu: &Gpu, entry: &Entry, trust: Trust) -> Result<CompiledKernel, (String, anyhow::Error)> {
    let kernel = entry.kernel(GuestAddr(0)).map_err(|error| (format!("{entry:?}"), error.into()))?;
    let name = kernel.name().to_owned();
    let compile = || -> anyhow::Result<_> {
        let compiled = gpu.compile(&validate(Module::from(kernel), trust)?)?;
        Ok(named(&compiled, &name)?.clone())
    };
    compile().map_err(|error| (name.clone(), error))
}

/// A call as a guest's and as the host's own, rows as it has them and farther apart.
fn check(gpu: &Gpu, case: &Case, report: &mut Report) -> anyhow::Result<()> {
    let worker = gpu.worker()?;
    let kernels = kernels(gpu);
    let [whole, without] = devices(gpu);
    let mut devices = vec![whole];
    if case.function.call(&whole) != case.function.call(&without) {
        devices.push(without);
    }
    let mut launches = 0;
    for (resources, trust) in
        devices.iter().flat_map(|device| [(device, Trust::Guest), (device, Trust::Trusted)])
    {
        for apart in [false, true] {
            let checked = case.check(resources, trust, &mut |module, launch, strides| {
                let run = || -> anyhow::Result<_> {
                    let (kernel, _) = module.find(&launch.kernel).ok_or_else(|| anyhow!("no kernel"))?;
                    let compiled = kernels.get(&(kernel.name().to_owned(), module.trust()));
                    let compiled = compiled.context("it was not compiled")?.as_ref();
                    let loaded = worker.load(compiled.map_err(|error| anyhow!("{error}"))?.artifact())?;
                    let over = Launch::over(launch.grid).within(Limits::default());
                    // As the call says, and farther apart yet.
                    let rows = if apart { Rows::Apart } else { Rows::Strided(strides) };
                    Arena::new(&launch.arguments, rows).run(&worker, &loaded, kernel, over)
                };
                launch.arguments = run().map_err(|error| format!("{error:#}"))?;
                launches += 1;
                Ok(())
            });
            checked.map_err(|error| anyhow!("{trust:?}, rows farther apart: {apart}: {error}"))?;
        }
    }
    worker.stop(TIMEOUT)?;
    report.note(format!("{launches} launches, a guest's and the host's own"));
    Ok(())
}
