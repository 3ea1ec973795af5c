//! What is refused, and ends that nobody prepared.

use std::process::ExitCode;
use std::rc::Rc;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vmkernels::checks::{ARENA, Caller, SHAPES, refused, run, words};
use vmkernels::sys::by_name::Entry;

use super::sys::{Library, OnGpu};
use super::{FEW, compare, few, on_the_cpu, said};
use crate::Arguments;
use crate::borrow::sys::Owner;
use crate::faults::{probe_with, told};
use crate::table::Report;

pub(super) fn refusals(library: Rc<Library>, device: u32, report: &mut Report) -> anyhow::Result<()> {
    let wanted = on_the_cpu(few())?;
    library.choose_gpu()?;
    let other = Owner::own_context(device)?;
    let foreign = other.allocate(ARENA as u64)?;
    let mut gpu = OnGpu::new(&library, Owner::primary(device, true)?)?;
    let freed = gpu.owner().allocate(64 << 20)?;
    gpu.owner().free(freed)?;
    let pageable = vec![0u8; ARENA];
    let host = pageable.as_ptr().expose_provenance() as u64 & !255;
    for (what, address) in
        [("pageable", host), ("freed", freed), ("foreign", foreign), ("pinned", gpu.owner().pinned())]
    {
        report.note(format!("{what} memory: {}", gpu.owner().describe(address)?));
    }
    let addresses = [
        ("memory of the host", host),
        ("memory that was freed", freed),
        ("memory of another context", foreign),
    ];
    let (mut count, mut wrong) = (0, Vec::new());
    for entry in Entry::all() {
        match refused(&mut gpu, entry, &addresses) {
            Ok(calls) => count += calls,
            Err(error) => wrong.push(error),
        }
    }
    report.note(format!("{count} calls were refused"));
    // A stream of another context.
    let silu = Entry::all().find(|entry| entry.name == FEW[0]).context("no silu")?;
    let mut given = words(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    if let Some(stream) = given.last_mut() {
        *stream = other.stream();
    }
    let status = gpu.call(silu.name, &given).map_err(said)?;
    report.note(format!("a stream of another context: {status}: {}", gpu.last()));
    if status != -2 {
        wrong.push(format!("a stream of another context came to {status}"));
    }
    // Memory that this thread gave before, and freed since.
    let before = gpu.owner().allocate(64 << 20)?;
    let mut given = words(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    given[0] = before;
    let first = gpu.call(silu.name, &given).map_err(said)?;
    gpu.owner().free(before)?;
    let status = gpu.call(silu.name, &given).map_err(said)?;
    if (first, status) != (0, -2) {
        wrong.push(format!("memory that was given, and freed since, came to {first}, {status}"));
    }
    // The owner's pinned memory will do.
    let mut given = words(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    given[1] = gpu.owner().pinned();
    let status = gpu.call(silu.name, &given).map_err(said)?;
    if status != 0 {
        wrong.push(format!("pinned memory came to {status}: {}", gpu.last()));
    }
    ensure!(wrong.is_empty(), "{} wrong: {}", wrong.len(), wrong[..wrong.len().min(12)].join("\n"));
    // Nothing broke by all that.
    compare(&mut gpu, &wanted)
}

/// A context that its owner destroyed, and kernels that were in it.
pub(super) fn destroyed_context(
    library: Rc<Library>,
    device: u32,
    report: &mut Report,
) -> anyhow::Result<()> {
    for name in ["capi-context", "capi-stream"] {
        let file = library.file().map(|file| file.display().to_string());
        let more: Vec<&str> = file.iter().flat_map(|file| ["--library", file]).collect();
        match probe_with(name, device, &more) {
            Ok(text) => report.note(format!("{name}: {text}")),
            // What the driver does with a handle of a stream that is no more is its own affair.
            Err(error) if name == "capi-stream" => report.note(format!("{name}: {error:#}")),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Processes that end while threads call, and that have unloaded the library before.
pub(super) fn processes(library: Rc<Library>, device: u32, report: &mut Report) -> anyhow::Result<()> {
    let file = library.file().map(|file| file.display().to_string());
    let more: Vec<&str> = file.iter().flat_map(|file| ["--library", file]).collect();
    for turn in 0..3 {
        let begin = Instant::now();
        let text = probe_with("capi-exit", device, &more)?;
        report.note(format!("turn {turn}: {text}, {:.1} s in all", begin.elapsed().as_secs_f64()));
    }
    Ok(())
}

/// One of this section's probes, in this process; none if the name is none of theirs.
pub(crate) fn probe(name: &str, arguments: &Arguments) -> Option<ExitCode> {
    let result = match name {
        "capi-context" => context(arguments),
        "capi-stream" => stream(arguments),
        "capi-exit" => exit(arguments),
        _ => return None,
    };
    Some(told(result))
}

fn context(arguments: &Arguments) -> anyhow::Result<String> {
    let library = Library::open(arguments.library.as_deref())?;
    let silu = Entry::all().find(|entry| entry.name == FEW[0]).context("no silu")?;
    let mut statuses = Vec::new();
    // Each has its context destroyed under it, while it is the thread's current one, once the call has been made.
    for _ in 0..3 {
        let mut gpu = OnGpu::new(&library, Owner::own_context(arguments.device)?)?;
        run(&mut gpu, silu, SHAPES[0]).map_err(said)?;
        let given = words(&mut gpu, silu, SHAPES[0]).map_err(said)?;
        let owner = gpu.owner();
        std::thread::scope(|scope| {
            let context = owner.handle();
            scope.spawn(move || Owner::destroy(context)).join().map_err(|_| anyhow::anyhow!("panicked"))?
        })?;
        let status = gpu.only(silu.name, &given)?;
        ensure!(status < 0, "a call in a context that was destroyed came to {status}");
        statuses.push(format!("{status}: {}", gpu.last()));
        owner_is_gone(gpu);
    }
    // And the next context works.
    let wanted = on_the_cpu(few())?;
    library.choose_gpu()?;
    compare(&mut OnGpu::new(&library, Owner::own_context(arguments.device)?)?, &wanted)?;
    Ok(statuses.join("; "))
}

/// What its driver released is not released again.
fn owner_is_gone(gpu: OnGpu) {
    std::mem::forget(gpu);
}

fn stream(arguments: &Arguments) -> anyhow::Result<String> {
    let library = Library::open(arguments.library.as_deref())?;
    let silu = Entry::all().find(|entry| entry.name == FEW[0]).context("no silu")?;
    let mut gpu = OnGpu::new(&library, Owner::primary(arguments.device, true)?)?;
    run(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    let ended = gpu.owner().ended_stream()?;
    let mut given = words(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    if let Some(stream) = given.last_mut() {
        *stream = ended;
    }
    let status = gpu.only(silu.name, &given)?;
    let text = format!("a stream that was destroyed came to {status}: {}", gpu.last());
    run(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    Ok(format!("{text}; calls work on"))
}

fn exit(arguments: &Arguments) -> anyhow::Result<String> {
    let device = arguments.device;
    let file = arguments.library.clone();
    let library = Library::open(file.as_deref())?;
    let silu = Entry::all().find(|entry| entry.name == FEW[0]).context("no silu")?;
    let mut gpu = OnGpu::new(&library, Owner::primary(device, true)?)?;
    run(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    // Closed here, and used on.
    gpu.close_library()?;
    run(&mut gpu, silu, SHAPES[0]).map_err(said)?;
    let ready = Arc::new(Barrier::new(5));
    for _ in 0..4 {
        let (file, ready) = (file.clone(), Arc::clone(&ready));
        std::thread::spawn(move || -> anyhow::Result<()> {
            let library = Library::open(file.as_deref())?;
            let mut gpu = OnGpu::new(&library, Owner::primary(device, true)?)?;
            let calls = few().map(|entry| Ok((entry.name, words(&mut gpu, entry, SHAPES[0]).map_err(said)?)));
            let calls: Vec<_> = calls.collect::<anyhow::Result<_>>()?;
            // From here on the driver is called by the library alone: it can't wait for calls of others. At the end it refuses its own.
            ready.wait();
            loop {
                for (name, words) in &calls {
                    gpu.only(name, words)?;
                }
            }
        });
    }
    ready.wait();
    std::thread::sleep(Duration::from_millis(300));
    println!("ends while four threads call");
    std::process::exit(0)
}
