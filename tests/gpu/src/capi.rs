//! The kernel library for C as its callers use it: the driver's own context, streams and memory, and every function by its symbol, of
//! `libvmkernels.so` where `--library` names one, else of this program.
#![allow(unsafe_code)]

mod hostile;
mod overhead;
mod sys;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;

use anyhow::{anyhow, ensure};
use vm_kernels::cases::all;
use vmkernels::checks::{Run, SHAPES, agree, check_case, run};
use vmkernels::sys::by_name::{Entry, OnCpu};

use crate::borrow::sys::Owner;
use crate::table::Report;
use crate::{Arguments, Test};
pub(crate) use hostile::probe;
use sys::{Library, OnGpu};

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let Arguments { device, library, .. } = arguments.clone();
    let file = move || library.clone();
    let with = |name: &str, test: fn(Rc<Library>, u32, &mut Report) -> anyhow::Result<()>| {
        let file = file.clone();
        Test::new(name, move |_, report| test(Library::open(file().as_deref())?, device, report))
    };
    vec![
        with("the library's cases against their definitions", definitions),
        with("on the default stream, in another context, and without one", places),
        with("threads with streams of their own", threads),
        with("the caller captures calls", captures),
        with("pinned memory, and what is refused", hostile::refusals),
        with("a context that was destroyed", hostile::destroyed_context),
        with("a process that unloads it, and ends while threads call", hostile::processes),
        with("what a call takes over the driver's launch", overhead::overhead),
        with("every function, of every type and form, as on the CPU", as_on_the_cpu),
    ]
}

/// An error's text as an error.
fn said(text: String) -> anyhow::Error {
    anyhow!(text)
}

fn definitions(library: Rc<Library>, device: u32, report: &mut Report) -> anyhow::Result<()> {
    let mut gpu = OnGpu::new(&library, Owner::primary(device, true)?)?;
    let (mut called, mut wrong, mut count) = (BTreeSet::new(), Vec::new(), 0);
    for case in all() {
        for aligned in [true, false] {
            match check_case(&mut gpu, &case, aligned) {
                Ok(Some(name)) => {
                    called.insert(name);
                    count += 1;
                }
                Ok(None) => {}
                Err(error) => wrong.push(error),
            }
        }
    }
    report.note(format!("{count} calls of {} functions, from {}", called.len(), library.from()));
    let of: BTreeSet<&str> =
        Entry::all().filter(|entry| called.contains(entry.name)).map(Entry::function).collect();
    ensure!(wrong.is_empty(), "{} wrong: {}", wrong.len(), wrong[..wrong.len().min(12)].join("\n"));
    ensure!(of.len() == 36, "functions with a case: {of:?}");
    Ok(())
}

/// What the CPU computes of functions, for arguments of every shape.
fn on_the_cpu<'a>(
    entries: impl Iterator<Item = &'a Entry>,
) -> anyhow::Result<Vec<(&'a Entry, usize, Option<Run>)>> {
    let mut cpu = OnCpu::new().map_err(said)?;
    let mut all = Vec::new();
    for entry in entries {
        for (at, shape) in SHAPES.into_iter().enumerate() {
            all.push((entry, at, run(&mut cpu, entry, shape).map_err(said)?));
        }
    }
    Ok(all)
}

fn as_on_the_cpu(library: Rc<Library>, device: u32, report: &mut Report) -> anyhow::Result<()> {
    let mut gpu = OnGpu::new(&library, Owner::primary(device, true)?)?;
    let (mut count, mut asked, mut wrong, mut reached) = (0, 0, Vec::new(), BTreeSet::new());
    for entry in Entry::all() {
        // One function at a time: what the CPU found takes much memory.
        let wanted = on_the_cpu([entry].into_iter())?;
        gpu.choose()?;
        for (entry, shape, wanted) in wanted {
            let compared = run(&mut gpu, entry, SHAPES[shape]).and_then(|found| match (found, wanted) {
                (Some(found), Some(wanted)) => agree(entry, &found, &wanted).map(|()| true),
                // What needs memory to work in depends on the device.
                _ => Ok(false),
            });
            match compared {
                Ok(true) => {
                    reached.insert(entry.name);
                    count += 1;
                }
                Ok(false) => asked += 1,
                Err(error) => wrong.push(format!("shape {shape}: {error}")),
            }
        }
    }
    report.note(format!(
        "{count} calls of {} functions compared; {asked} ask for memory to work in",
        reached.len()
    ));
    ensure!(wrong.is_empty(), "{} wrong: {}", wrong.len(), wrong[..wrong.len().min(12)].join("\n"));
    let functions: BTreeSet<&str> =
        Entry::all().filter(|e| reached.contains(e.name)).map(Entry::function).collect();
    ensure!(functions.len() == 36, "functions that were compared: {functions:?}");
    let forms = Entry::all().filter(|entry| entry.name.ends_with("_ws"));
    let missed: Vec<&str> = forms.map(|entry| entry.name).filter(|name| !reached.contains(name)).collect();
    ensure!(missed.is_empty(), "not compared: {missed:?}");
    Ok(())
}

/// Functions of which a test takes a few: of one launch and of several, with tensor maps and without.
const FEW: [&str; 6] = [
    "cuda_silu",
    "cuda_gemm_bf16",
    "cuda_rmsnorm_f16",
    "cuda_topk_ws",
    "cuda_grad_clip",
    "cuda_flash_attention_bf16",
];

fn few() -> impl Iterator<Item = &'static Entry> {
    Entry::all().filter(|entry| FEW.contains(&entry.name))
}

/// That some functions come to what they should.
fn compare(gpu: &mut OnGpu, wanted: &[(&Entry, usize, Option<Run>)]) -> anyhow::Result<()> {
    for (entry, shape, wanted) in wanted {
        let found = run(gpu, entry, SHAPES[*shape]).map_err(said)?;
        if let (Some(found), Some(wanted)) = (found, wanted) {
            agree(entry, &found, wanted).map_err(said)?;
        }
    }
    Ok(())
}

fn places(library: Rc<Library>, device: u32, _: &mut Report) -> anyhow::Result<()> {
    let wanted = on_the_cpu(few())?;
    library.choose_gpu()?;
    compare(&mut OnGpu::new(&library, Owner::primary(device, false)?)?, &wanted)?;
    // Kernels of the first context are not those of the second.
    for _ in 0..2 {
        let own = Owner::own_context(device)?;
        let before = own.current()?;
        compare(&mut OnGpu::new(&library, own)?, &wanted)?;
        ensure!(before != 0, "no context was current");
    }
    // A thread without a context calls the primary one of the first device.
    let mut gpu = OnGpu::new(&library, Owner::primary(0, false)?)?;
    gpu.without_context(true)?;
    compare(&mut gpu, &wanted)?;
    ensure!(gpu.owner().current()? == 0, "a context is current that was not before");
    Ok(())
}

fn threads(library: Rc<Library>, device: u32, report: &mut Report) -> anyhow::Result<()> {
    const THREADS: usize = 6;
    let wanted = on_the_cpu(few())?;
    library.choose_gpu()?;
    let file: Option<PathBuf> = library.file();
    let calls = std::thread::scope(|scope| {
        let work = |of: usize| {
            let (wanted, file) = (&wanted, file.clone());
            move || -> anyhow::Result<usize> {
                let library = Library::open(file.as_deref())?;
                let mut gpu = OnGpu::new(&library, Owner::primary(device, true)?)?;
                for turn in 0..8 {
                    // Each begins elsewhere, so that some wait for kernels that others compile.
                    let mut these: Vec<_> = wanted.iter().collect();
                    these.rotate_left((of * 3 + turn) % wanted.len());
                    for (entry, shape, wanted) in these {
                        let found = run(&mut gpu, entry, SHAPES[*shape]).map_err(said)?;
                        if let (Some(found), Some(wanted)) = (found, wanted) {
                            agree(entry, &found, wanted).map_err(said)?;
                        }
                    }
                }
                Ok(8 * wanted.len())
            }
        };
        let started: Vec<_> = (0..THREADS).map(|of| scope.spawn(work(of))).collect();
        started
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
            .sum::<anyhow::Result<usize>>()
    })?;
    report.note(format!("{calls} calls of {THREADS} threads"));
    Ok(())
}

fn captures(library: Rc<Library>, device: u32, report: &mut Report) -> anyhow::Result<()> {
    let wanted = on_the_cpu(few())?;
    library.choose_gpu()?;
    // Its kernels were not compiled in this context: the first calls are captured.
    for own in [true, false] {
        let owner = if own { Owner::own_context(device)? } else { Owner::primary(device, true)? };
        let mut gpu = OnGpu::new(&library, owner)?;
        for (entry, shape, wanted) in &wanted {
            let Some(wanted) = wanted else { continue };
            gpu.capture(true);
            let found = run(&mut gpu, entry, SHAPES[*shape]).map_err(said)?;
            gpu.capture(false);
            if let Some(found) = found {
                agree(entry, &found, wanted).map_err(said)?;
            }
        }
        report.note(format!("{} graphs of calls, own context: {own}", gpu.graphs()));
        // And the same calls without.
        compare(&mut gpu, &wanted)?;
    }
    Ok(())
}
