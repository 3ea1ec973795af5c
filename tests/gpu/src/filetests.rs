//! The kernels of vm-ir's filetests, against what their files expect, as the interpreter computes it too.

use anyhow::{Context, bail, ensure};
use vm_accel::{Launch, Limits};
use vm_ir::filetest::{Case, Ending, cases};
use vm_ir::{Trust, ValidModule, text, validate};
use vm_passthrough::accelerator::CompiledKernel;

use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, named};
use crate::skip::skip;
use crate::table::Report;
use crate::{Arguments, Test};

/// The files, by name.
pub(crate) const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/filetests.rs"));

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    FILES.iter().map(|&(name, source)| Test::new(name, move |gpu, report| run(gpu, source, report))).collect()
}

/// Those of tile kernels, for other architectures than the device's too.
pub(crate) fn of_tiles() -> Vec<Test> {
    let tiles = FILES.iter().filter(|(_, source)| source.contains(" tile("));
    tiles
        .map(|&(name, source)| {
            Test::new(format!("filetest {name}"), move |gpu, report| run(gpu, source, report))
        })
        .collect()
}

fn run(gpu: &Gpu, source: &str, report: &mut Report) -> anyhow::Result<()> {
    let module = text::parse(source)?;
    let cases = cases(source, &module)?;
    let worker = gpu.worker()?;
    let (mut ran, mut left) = (0, 0);
    for trust in [Trust::Guest, Trust::Trusted] {
        let cases: Vec<&Case> = cases.iter().filter(|case| case.trust == trust && runs(case)).collect();
        left += cases_of(source, trust)?.saturating_sub(cases.len());
        if cases.is_empty() {
            continue;
        }
        let rejects = vm_jit::legal::rejects(&module, &gpu.target()?);
        if let Some(reject) = rejects.iter().find(|reject| reject.kind.code() == "unsupported-tile") {
            return skip(format!("{}", reject.kind));
        }
        let valid = validate(module.clone(), trust)?;
        let compiled = gpu.compile(&valid)?;
        for case in cases {
            run_case(&worker, &valid, &compiled, case).with_context(|| format!("line {}", case.line))?;
            ran += 1;
        }
    }
    worker.stop(crate::gpu::TIMEOUT)?;
    if ran == 0 {
        return skip("its cases are for the interpreter only");
    }
    report.note(format!("{ran} cases, {left} for the interpreter only"));
    Ok(())
}

fn cases_of(source: &str, trust: Trust) -> anyhow::Result<usize> {
    let module = text::parse(source)?;
    Ok(cases(source, &module)?.iter().filter(|case| case.trust == trust).count())
}

/// Whether a case is for a device too. Running out of fuel is tried by kernels of its own, which are stopped.
fn runs(case: &Case) -> bool {
    matches!(case.ending(), Some(Ending::Well | Ending::Refused))
}

fn run_case(
    worker: &vm_accel::Worker<vm_cuda::CudaAccelerator>,
    valid: &ValidModule,
    compiled: &[CompiledKernel],
    case: &Case,
) -> anyhow::Result<()> {
    let (kernel, _) = valid.find(&case.launch.kernel).context("the kernel")?;
    let loaded = worker.load(named(compiled, kernel.name())?.artifact())?;
    for rows in [Rows::Packed, Rows::Apart] {
        let launch = Launch::over(case.launch.grid).within(Limits::default());
        let result = Arena::new(&case.launch.arguments, rows).run(worker, &loaded, kernel, launch);
        match (&case.error, result) {
            (None, result) => case.check(&result?).with_context(|| format!("rows {rows:?}"))?,
            (Some(error), Ok(_)) => bail!("it was launched; an error with {error:?} was expected"),
            (Some(_), Err(error)) => {
                let refused = error.downcast_ref::<vm_accel::Error>();
                ensure!(matches!(refused, Some(vm_accel::Error::Arguments { .. })), "{error:#}");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_cases_are_for_a_device() {
        let (mut all, mut run) = (0, 0);
        for (name, source) in FILES {
            let cases = cases(source, &text::parse(source).unwrap()).unwrap();
            assert!(!cases.is_empty(), "{name}");
            all += cases.len();
            run += cases.iter().filter(|case| runs(case)).count();
        }
        assert!(run >= 50 && run * 10 > all * 8, "{run} of {all}");
    }
}
