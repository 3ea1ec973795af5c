//! The functions of the kernel library: every case of `vm-kernels` against its definition.

pub(crate) mod figures;
mod measure;
mod work;

use anyhow::anyhow;
use vm_accel::{Accelerator as _, Launch, Limits};
use vm_ir::Trust;
use vm_kernels::cases::{Case, all};
use vm_kernels::family::Resources;
use vm_passthrough::accelerator::resources;

use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::table::Report;
use crate::{Arguments, Test};

/// The tests of this section, one for each case.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    let cases = all().into_iter();
    cases.map(|case| Test::new(case.name.clone(), move |gpu, report| check(gpu, &case, report))).collect()
}

/// A call as a guest's and as the host's own, rows packed and apart.
fn check(gpu: &Gpu, case: &Case, report: &mut Report) -> anyhow::Result<()> {
    let worker = gpu.worker()?;
    let whole = resources(gpu.accelerator.info());
    // What is laid out for clusters also as where there are none.
    let without = Resources { cluster: 1, ..whole };
    let mut devices = vec![whole];
    if case.function.call(&whole) != case.function.call(&without) {
        devices.push(without);
    }
    let mut launches = 0;
    for (resources, trust) in
        devices.iter().flat_map(|device| [(device, Trust::Guest), (device, Trust::Trusted)])
    {
        for rows in [Rows::Packed, Rows::Apart] {
            let checked = case.check(resources, trust, &mut |module, launch| {
                let run = || -> anyhow::Result<_> {
                    let compiled = gpu.compile(module)?;
                    let (kernel, _) = module.find(&launch.kernel).ok_or_else(|| anyhow!("no kernel"))?;
                    let loaded = worker.load(named(&compiled, kernel.name())?.artifact())?;
                    let over = Launch::over(launch.grid).within(Limits::default());
                    Arena::new(&launch.arguments, rows).run(&worker, &loaded, kernel, over)
                };
                launch.arguments = run().map_err(|error| format!("{error:#}"))?;
                launches += 1;
                Ok(())
            });
            checked.map_err(|error| anyhow!("{trust:?}, rows {rows:?}: {error}"))?;
        }
    }
    worker.stop(TIMEOUT)?;
    report.note(format!("{launches} launches, a guest's and the host's own"));
    Ok(())
}
