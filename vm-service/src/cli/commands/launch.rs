//! `launch`: runs a kernel of a file on this machine, and shows or writes what it wrote.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vm_ir::filetest::{Tolerance, compare};
use vm_ir::format::{signed, to_f64};
use vm_ir::interp::{Argument, Launch, OutOfBounds, Tensor};
use vm_ir::module::ParamKind;
use vm_ir::text::{self, Mark};
use vm_ir::{Kernel, Scalar, Trust};

use super::compile::sizes;
use super::model;
use crate::api::{self, Body};
use crate::cli::context::Context;
use crate::cli::kernel::args::{self, DeviceArg, GridArg, LaunchArgs};
use crate::cli::kernel::engine::{self, Ran, Spread, Task};
use crate::cli::kernel::file::Loaded;
use crate::cli::kernel::{argument, file, npy, wait};
use crate::failure::Failure;
use crate::text::table::Table;

/// How many elements of an output are shown.
const SHOWN: usize = 8;
/// How long a device is waited for beyond the kernel's deadline, which it keeps by itself.
pub(super) const GRACE: Duration = Duration::from_secs(10);

/// Runs a kernel.
///
/// # Errors
/// When the file or the arguments are wrong, the device is not there, the kernel does not end well, or `--check` finds a
/// difference.
pub(crate) fn run(context: &mut Context<'_>, arguments: &LaunchArgs) -> Result<(), Failure> {
    if file::is_graph(&arguments.file)? {
        return model::run(context, arguments);
    }
    let Some(GridArg(grid)) = arguments.grid else {
        return Err(Failure::usage("a kernel needs a grid: how many blocks there are, as in --grid 64"));
    };
    if let DeviceArg::Npu(_) = arguments.device {
        return Err(Failure::usage(
            "an NPU runs models, not kernels of threads; name the file of a model, or another --device",
        ));
    }
    let trust = args::trust(arguments.trusted);
    check_options(arguments, trust)?;
    let Loaded { module, source } = file::load(&arguments.file, trust)?;
    arguments.outs.iter().try_for_each(|out| file::spare(&arguments.file, &out.path))?;
    let kernel = file::choose(&arguments.file, &module, arguments.kernel.as_deref())?.clone();
    let launch = Launch {
        kernel: kernel.name().to_owned(),
        grid,
        arguments: argument::bind(&kernel, &arguments.args, &arguments.outs)?,
    };
    launch.check(&kernel).map_err(Failure::usage)?;
    let task = Task {
        module,
        source: Arc::clone(&source),
        launch,
        deadline: arguments.deadline,
        fuel: arguments.fuel,
        cache: context.cache.clone(),
        repeat: arguments.repeat,
    };

    let mut wanted = None;
    let what = Launched { name: kernel.name(), grid, block: kernel.block() };
    let mut ran = {
        let (task, host, device) = (task.clone(), context.host.clone(), arguments.device);
        wait::run(
            &format!("kernel @{}", kernel.name()),
            arguments.deadline.saturating_add(GRACE),
            move || engine::run(task, device, &host),
        )?
    };
    if arguments.check {
        let what = format!("kernel @{} on the interpreter", kernel.name());
        let deadline = arguments.deadline.saturating_add(GRACE);
        let task = Task { repeat: None, ..task };
        let interpreted = wait::run(&what, deadline, move || engine::interpret(task))?;
        wanted = Some(interpreted.arguments);
        ran.out_of_bounds = interpreted.out_of_bounds;
    }
    let outputs = outputs(arguments, &kernel, &ran.arguments, wanted.as_deref())?;
    for Output { tensor, file, .. } in &outputs {
        if let Some(path) = file {
            npy::write(path, tensor).map_err(Failure::failed)?;
        }
    }
    context.print(
        || Body::Launch(document(arguments, &what, &ran, &outputs)),
        || summary(&what, &ran, &outputs),
    )?;
    let mut wrong = differing(&outputs);
    if arguments.check && !arguments.allow_out_of_bounds {
        wrong.extend(out_of_bounds(arguments, &source, ran.out_of_bounds.as_deref().unwrap_or_default()));
    }
    if wrong.is_empty() { Ok(()) } else { Err(Failure::failed(wrong.join("\nerror: "))) }
}

/// What was launched: a kernel, or a model, which has neither blocks nor threads.
pub(super) struct Launched<'a> {
    pub(super) name: &'a str,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
}

/// What `--check` says of outputs.
pub(super) fn differing(outputs: &[Output<'_>]) -> Vec<String> {
    let differing = outputs.iter().filter_map(|output| {
        let mismatch = output.check.as_ref()?.mismatch.as_ref()?;
        Some(format!("@{} differs from the interpreter's: {mismatch}", output.name))
    });
    differing.collect()
}

/// What `--check` says of accesses out of bounds, each with its line, and what to do about them.
fn out_of_bounds(arguments: &LaunchArgs, source: &str, found: &[OutOfBounds]) -> Option<String> {
    const REMEDY: &str = "such a load gives 0 and such a store does nothing; compare the indices with the extents, give equal \
                          extents one name, as in view<f32, [m, k], read>, or allow it with --allow-out-of-bounds";
    let shown = found.iter().map(|found| {
        let message = found.to_string();
        text::render(
            source,
            &Mark { line: found.line, op: Some(found.op), message: &message, ..Mark::default() },
        )
    });
    (!found.is_empty()).then(|| format!("{}\n{REMEDY}", file::behind(&arguments.file, shown)))
}

fn check_options(arguments: &LaunchArgs, trust: Trust) -> Result<(), Failure> {
    if arguments.fuel.is_some() && trust == Trust::Trusted {
        return Err(Failure::usage(
            "--fuel is for a guest's kernel: the host's own is not cancellable; leave out one of --fuel and --trusted",
        ));
    }
    if arguments.fuel.is_some() && arguments.device == DeviceArg::Interpreter {
        return Err(Failure::usage("the interpreter counts no fuel here; use --deadline instead of --fuel"));
    }
    if arguments.check && arguments.device == DeviceArg::Interpreter {
        return Err(Failure::usage(
            "--check compares with the interpreter, and this is the interpreter; leave it out",
        ));
    }
    Ok(())
}

/// A view that the kernel may have written.
pub(super) struct Output<'a> {
    pub(super) name: &'a str,
    pub(super) tensor: &'a Tensor,
    pub(super) file: Option<&'a Path>,
    pub(super) check: Option<Check>,
}

pub(super) struct Check {
    tolerance: f64,
    mismatch: Option<String>,
}

fn outputs<'a>(
    arguments: &'a LaunchArgs,
    kernel: &'a Kernel,
    given: &'a [Argument],
    wanted: Option<&[Argument]>,
) -> Result<Vec<Output<'a>>, Failure> {
    let mut outputs = Vec::new();
    for (index, (param, argument)) in kernel.params().iter().zip(given).enumerate() {
        let (ParamKind::View(view), Some(tensor)) = (&param.kind, argument.tensor()) else { continue };
        let out = arguments.outs.iter().find(|out| *out.name == *param.name);
        if !view.access.writes() && out.is_none() {
            continue;
        }
        let wanted = wanted.and_then(|wanted| wanted.get(index)?.tensor());
        outputs.push(Output {
            name: &param.name,
            tensor,
            file: out.map(|out| out.path.as_path()),
            check: wanted.map(|wanted| check(tensor, wanted, arguments.tolerance)),
        });
    }
    Ok(outputs)
}

pub(super) fn check(got: &Tensor, wanted: &Tensor, tolerance: Option<f64>) -> Check {
    let tolerance = match got.element {
        element if element.is_int() => 0.0,
        Scalar::F32 | Scalar::F64 => tolerance.unwrap_or(1e-5),
        _ => tolerance.unwrap_or(1e-2),
    };
    let mismatch = compare(got, wanted, Tolerance::Relative(tolerance)).err();
    Check { tolerance, mismatch: mismatch.map(|mismatch| mismatch.to_string()) }
}

pub(super) fn summary(what: &Launched<'_>, ran: &Ran, outputs: &[Output<'_>]) -> String {
    let Launched { name, grid, block } = what;
    let mut text = format!("@{name} on {}: grid {}, block {}, ", ran.device, sizes(*grid), sizes(*block));
    // Writing to a string does not fail, here and below.
    if let (Some(target), Some(compile)) = (&ran.target, ran.compile) {
        let _ = write!(text, "compiled for {target} in {:.2} ms, ", api::milliseconds(compile));
    }
    let ms = api::milliseconds;
    let _ = match ran.repeated {
        None => writeln!(text, "ran {:.2} ms", ms(ran.run)),
        Some(Spread { launches, median, min, max }) => {
            let (median, min, max) = (ms(median), ms(min), ms(max));
            writeln!(text, "ran {median:.3} ms, the median of {launches} launches of {min:.3} to {max:.3} ms")
        }
    };
    let mut table = Table::new(["OUTPUT", "TYPE", "FILE", "CHECK", "FIRST ELEMENTS"]);
    for output in outputs {
        let dash = || "-".to_owned();
        let first: Vec<_> =
            elements(output.tensor).map(|element| element.to_string().replace('"', "")).collect();
        let more = if output.tensor.len() > SHOWN { " …" } else { "" };
        table.push([
            format!("@{}", output.name),
            argument::shape(output.tensor),
            output.file.map_or_else(dash, |path| path.display().to_string()),
            output.check.as_ref().map_or_else(dash, |check| match check.mismatch {
                None => "agrees".into(),
                Some(_) => "differs".into(),
            }),
            first.join(" ") + more,
        ]);
    }
    if !outputs.is_empty() {
        let _ = write!(text, "{table}");
    }
    let beyond = ran.out_of_bounds.as_deref().unwrap_or_default();
    if !beyond.is_empty() {
        let mut table = Table::new(["OUT OF BOUNDS", "LINE", "OP", "EXTENTS", "FIRST", "ACCESSES"]);
        for OutOfBounds { op, line, place, extents, first, count, .. } in beyond {
            table.push([
                format!("@{place}"),
                line.to_string(),
                (*op).to_owned(),
                format!("{extents:?}"),
                format!("{first:?}"),
                count.to_string(),
            ]);
        }
        let _ = write!(text, "{table}");
    }
    text
}

fn beyond(found: &OutOfBounds) -> api::OutOfBounds {
    api::OutOfBounds {
        op: found.op.to_owned(),
        line: found.line,
        place: found.place.clone(),
        extents: found.extents.clone(),
        first: found.first.clone(),
        lanes: found.lanes,
        accesses: found.count,
    }
}

/// The first elements as JSON values: numbers, or words for what JSON has no number for.
fn elements(tensor: &Tensor) -> impl Iterator<Item = serde_json::Value> {
    (0..tensor.len().min(SHOWN)).map(|index| {
        let (element, bits) = (tensor.element, tensor.bits(index));
        if element.is_int() {
            return signed(element, bits).into();
        }
        let value = to_f64(element, bits);
        // The shortest decimal that is this f32, or smaller float; as f64 it would have digits that mean nothing.
        let shortest = match element {
            Scalar::F64 => value,
            _ => (value as f32).to_string().parse().unwrap_or(value),
        };
        match serde_json::Number::from_f64(shortest) {
            Some(number) => number.into(),
            None if value.is_nan() => "nan".into(),
            None if value > 0.0 => "inf".into(),
            None => "-inf".into(),
        }
    })
}

pub(super) fn document(
    arguments: &LaunchArgs,
    what: &Launched<'_>,
    ran: &Ran,
    outputs: &[Output<'_>],
) -> api::Launched {
    api::Launched {
        kernel: what.name.to_owned(),
        device: match arguments.device {
            DeviceArg::Interpreter => "interpreter".into(),
            DeviceArg::Cpu => "cpu".into(),
            DeviceArg::Pci(address) => address.to_string(),
            DeviceArg::Rocm(number) => format!("rocm:{number}"),
            DeviceArg::Npu(number) => format!("npu:{number}"),
        },
        device_name: ran.device.clone(),
        target: ran.target.clone(),
        grid: what.grid,
        block: what.block,
        compile_ms: ran.compile.map(api::milliseconds),
        run_ms: api::milliseconds(ran.run),
        repeated: ran.repeated.map(|spread| api::Repeated {
            launches: spread.launches,
            median_ms: api::milliseconds(spread.median),
            min_ms: api::milliseconds(spread.min),
            max_ms: api::milliseconds(spread.max),
        }),
        out_of_bounds: ran.out_of_bounds.as_ref().map(|found| found.iter().map(beyond).collect()),
        outputs: outputs
            .iter()
            .map(|output| api::Output {
                name: output.name.to_owned(),
                element: output.tensor.element.to_string(),
                shape: output.tensor.extents.clone(),
                file: output.file.map(|path| path.display().to_string()),
                first: elements(output.tensor).collect(),
                check: output.check.as_ref().map(|check| api::Check {
                    agrees: check.mismatch.is_none(),
                    tolerance: check.tolerance,
                    mismatch: check.mismatch.clone(),
                }),
            })
            .collect(),
    }
}
