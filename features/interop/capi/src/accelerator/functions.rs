//! What each function of `accelerator.txt` does, with arguments that were looked at.

use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_accel::{
    Accelerator as _, Argument, Element, Error, Extent, Launch, Limits, MemoryKind, ParameterKind,
    PoolOptions, Queue as _, QueueOptions, Scalar, View, WorkerOptions, deadline,
};
use vm_ir::{Trust, binary, text, validate};
use vm_runtime::{AnyAccelerator, AnyQueue, Buffer};

use super::error::Failure;
use super::objects::{Device, Event, Holds, Job, Kernel, Lent, Memory, Module, Worker, devices};
use super::pending::Pending;
use super::registry::HANDLES;
use crate::sys::accelerator::*;

pub(crate) use super::graphics::*;

type Done = Result<(), Failure>;

/// The most bytes of a module.
const MODULE: u64 = 256 << 20;
/// The most commands that may wait for a worker.
const CAPACITY: u32 = 1 << 16;
/// What copies between two workers go through.
const CHUNK: u64 = 4 << 20;

pub(crate) fn handle_count(count: Output<'_, u64>) -> Done {
    count.put(HANDLES.count() as u64);
    Ok(())
}

pub(crate) fn device_count(count: Output<'_, u32>) -> Done {
    count.put(devices(|devices| devices.len()) as u32);
    Ok(())
}

pub(crate) fn device_at(index: u32, device: Output<'_, vma_device>) -> Done {
    let found = devices(|devices| devices.get(index as usize).cloned().ok_or(devices.len()));
    let found = found.map_err(|count| {
        Failure::invalid("index", format!("is {index}: there are {count} devices, counted from 0"))
    })?;
    device.put(HANDLES.insert(found));
    Ok(())
}

pub(crate) fn device_open(spec: &str, device: Output<'_, vma_device>) -> Done {
    let found = devices(|devices| {
        let known = |devices: &[Arc<Device>], spec: &str| {
            devices.iter().find(|device| device.accelerator().spec() == spec).cloned()
        };
        if let Some(known) = if spec == "auto" { devices.first().cloned() } else { known(devices, spec) } {
            return Ok(known);
        }
        let opened = AnyAccelerator::open(spec)?;
        Ok::<_, Failure>(known(devices, &opened.spec()).unwrap_or_else(|| {
            let added = Device::of(opened);
            devices.push(Arc::clone(&added));
            added
        }))
    })?;
    device.put(HANDLES.insert(found));
    Ok(())
}

pub(crate) fn device_get_info(device: &Device, info: Output<'_, vma_device_info>) -> Done {
    let of = device.accelerator().info();
    let address = of.address.as_deref().unwrap_or_default();
    info.put(vma_device_info {
        name: name(&of.name),
        backend: name(of.backend),
        target: name(&of.target),
        address: name(address),
        driver: name(&of.driver),
        memory_bytes: of.memory_bytes,
        compute_units: of.compute_units,
        warp_size: of.warp_size,
        block_threads: of.block_threads,
        block: of.block,
        grid: of.grid,
        shared_bytes: of.shared_bytes,
        parameter_bytes: of.parameter_bytes,
        unified: of.unified.into(),
    });
    Ok(())
}

pub(crate) fn device_close(device: vma_device) -> Done {
    HANDLES.take::<Device>("device", device).map(drop)
}

pub(crate) fn worker_start(
    device: &Arc<Device>,
    options: Option<&vma_worker_options>,
    worker: Output<'_, vma_worker>,
) -> Done {
    let given = options.copied().unwrap_or_default();
    if given.capacity > CAPACITY {
        return Err(Failure::invalid(
            "capacity",
            format!("is {}: at most {CAPACITY} is possible", given.capacity),
        ));
    }
    let usual = WorkerOptions::default();
    let or = |given: u64, usual: u64| if given == 0 { usual } else { given };
    let time = |given: u64, usual: Duration| if given == 0 { usual } else { Duration::from_nanos(given) };
    let timeout = time(given.timeout_ns, usual.queue.timeout);
    let options = WorkerOptions {
        name: "vma-worker".into(),
        capacity: or(given.capacity.into(), usual.capacity as u64) as usize,
        queue: QueueOptions { timeout, ..usual.queue },
        pool: PoolOptions { limit: or(given.memory_bytes, usual.pool.limit), zero: given.zero != 0 },
        limits: Limits {
            fuel: or(given.fuel, usual.limits.fuel),
            time: time(given.time_ns, usual.limits.time),
        },
        ..usual
    };
    let started = vm_accel::Worker::start(Arc::clone(device.accelerator()), options)?;
    // What a driver has loaded is to end behind the workers.
    end_at_exit();
    let device = Arc::clone(device);
    worker.put(HANDLES.insert(Arc::new(Worker { worker: started, device, timeout })));
    Ok(())
}

pub(crate) fn synchronize(worker: &Worker, timeout_ns: u64) -> Done {
    Ok(worker.worker.synchronize(Duration::from_nanos(timeout_ns))?)
}

pub(crate) fn get_memory_info(worker: &Worker, info: Output<'_, vma_memory_info>) -> Done {
    let (device, own) = (worker.worker.memory()?, worker.worker.statistics());
    info.put(vma_memory_info {
        free_bytes: device.free,
        total_bytes: device.total,
        used_bytes: own.in_use,
        kept_bytes: own.cached,
    });
    Ok(())
}

pub(crate) fn trim(worker: &Worker) -> Done {
    Ok(worker.worker.trim()?)
}

/// Ends a worker.
fn end(worker: &Worker, timeout: Duration) -> Done {
    Ok(worker.worker.stop(timeout)?)
}

/// That the thread is not the worker's.
fn not_in_its_job(worker: &Worker) -> Done {
    if in_job_of(worker) {
        return Err(Failure::invalid(
            "worker",
            "is that of the job which calls: stop it from another thread",
        ));
    }
    Ok(())
}

/// What tells a worker from others for [`in_job_of`].
fn number(worker: &Worker) -> usize {
    std::ptr::from_ref(worker).addr()
}

fn in_job_of(worker: &Worker) -> bool {
    running_job() == number(worker)
}

pub(crate) fn stop(worker: &Worker, timeout_ns: u64) -> Done {
    not_in_its_job(worker)?;
    end(worker, Duration::from_nanos(timeout_ns))
}

pub(crate) fn worker_free(worker: vma_worker) -> Done {
    not_in_its_job(&*HANDLES.find::<Worker>("worker", worker)?)?;
    let worker = HANDLES.take::<Worker>("worker", worker)?;
    end(&worker, worker.timeout)
}

/// Stops all workers at process exit and waits for them until `until`.
///
/// No worker gets new commands while another one is waited for, and one that does not end takes no time from the others.
pub(crate) fn stop_all(until: Instant) {
    let workers = HANDLES.workers();
    for worker in &workers {
        let _ = worker.worker.stop(Duration::ZERO);
    }
    for worker in &workers {
        let _ = worker.worker.stop(until.saturating_duration_since(Instant::now()));
    }
}

pub(crate) fn memory_allocate(
    worker: &Arc<Worker>,
    kind: vma_memory_kind,
    bytes: u64,
    memory: Output<'_, vma_memory>,
) -> Done {
    let kind = match kind {
        VMA_DEVICE_MEMORY => MemoryKind::Device,
        VMA_PINNED_MEMORY => MemoryKind::Pinned,
        VMA_UNIFIED_MEMORY => MemoryKind::Unified,
        other => {
            let what = format!(
                "is {other}: VMA_DEVICE_MEMORY, VMA_PINNED_MEMORY and VMA_UNIFIED_MEMORY are possible"
            );
            return Err(Failure::invalid("kind", what));
        }
    };
    if bytes == 0 {
        return Err(Failure::invalid("bytes", "is 0: memory has at least one byte"));
    }
    let buffer = worker.worker.allocate_kind(kind, bytes)?;
    memory.put(HANDLES.insert(Arc::new(Memory { holds: Holds::Own(buffer), of: Arc::clone(worker) })));
    Ok(())
}

pub(crate) fn memory_get_size(memory: &Memory, bytes: Output<'_, u64>) -> Done {
    bytes.put(match &memory.holds {
        Holds::Own(buffer) => buffer.bytes(),
        Holds::Resource(resource) => resource.bytes(),
    });
    Ok(())
}

pub(crate) fn memory_get_kind(memory: &Memory, kind: Output<'_, vma_memory_kind>) -> Done {
    let Holds::Own(buffer) = &memory.holds else {
        kind.put(VMA_DEVICE_MEMORY);
        return Ok(());
    };
    kind.put(match buffer.kind() {
        MemoryKind::Device | MemoryKind::External | MemoryKind::Surface => VMA_DEVICE_MEMORY,
        MemoryKind::Pinned | MemoryKind::Registered => VMA_PINNED_MEMORY,
        MemoryKind::Unified => VMA_UNIFIED_MEMORY,
    });
    Ok(())
}

pub(crate) fn memory_get_host_pointer(memory: &Memory, pointer: Output<'_, *mut c_void>) -> Done {
    let buffer = memory.buffer("memory")?;
    let address = buffer.host_address().ok_or(Error::NotHostVisible { kind: buffer.kind().name() })?;
    pointer.put(std::ptr::with_exposed_provenance_mut(address as usize));
    Ok(())
}

pub(crate) fn memory_free(memory: vma_memory) -> Done {
    if let Holds::Resource(resource) = &HANDLES.find::<Memory>("memory", memory)?.holds {
        return Err(resource.refused("memory", "vma_resource_unregister ends it"));
    }
    HANDLES.take::<Memory>("memory", memory).map(drop)
}

pub(crate) fn write(memory: &Memory, offset: u64, data: Array<'_, u8>) -> Done {
    let buffer = memory.buffer("memory")?;
    let view = buffer.view(offset, data.count())?;
    Ok(memory.of.worker.write(view, data.get(view.bytes())?)?)
}

pub(crate) fn read(memory: &Memory, offset: u64, data: ArrayMut<'_, u8>) -> Done {
    let buffer = memory.buffer("memory")?;
    let view = buffer.view(offset, data.count())?;
    Ok(memory.of.worker.read(view, data.get(view.bytes())?)?)
}

pub(crate) fn copy(
    target: &Memory,
    target_offset: u64,
    source: &Memory,
    source_offset: u64,
    bytes: u64,
) -> Done {
    let (target_buffer, source_buffer) = (target.buffer("target")?, source.buffer("source")?);
    let to = target_buffer.view(target_offset, bytes)?;
    let from = source_buffer.view(source_offset, bytes)?;
    if Arc::ptr_eq(&target.of, &source.of) {
        return Ok(target.of.worker.copy(to, from)?);
    }
    let mut chunk = vec![0u8; bytes.min(CHUNK) as usize];
    let mut at = 0;
    while at < bytes {
        let count = CHUNK.min(bytes - at);
        let part = &mut chunk[..count as usize];
        source.of.worker.read(source_buffer.view(source_offset + at, count)?, part)?;
        target.of.worker.write(target_buffer.view(target_offset + at, count)?, part)?;
        at += count;
    }
    Ok(())
}

pub(crate) fn fill(memory: &Memory, offset: u64, bytes: u64, value: u8) -> Done {
    let buffer = memory.buffer("memory")?;
    Ok(memory.of.worker.fill(buffer.view(offset, bytes)?, value)?)
}

/// Does something with a worker's queue, on its thread.
fn on_queue<R: Send>(
    worker: &Worker,
    f: impl FnOnce(&AnyQueue) -> vm_accel::Result<R> + Send,
) -> Result<R, Failure> {
    Ok(worker.worker.submit_and_wait(deadline(worker.timeout), |session| f(session.queue()))?)
}

pub(crate) fn event_record(worker: &Arc<Worker>, event: Output<'_, vma_event>) -> Done {
    let made = on_queue(worker, |queue| {
        let event = queue.event(true)?;
        queue.record(&event)?;
        Ok(Arc::new(event))
    })?;
    event.put(HANDLES.insert(Arc::new(Event { event: made, of: Arc::clone(worker) })));
    Ok(())
}

pub(crate) fn event_wait(worker: &Worker, event: &Event) -> Done {
    on_queue(worker, |queue| queue.wait_event(&event.event))
}

/// Whether an event has been reached.
fn reached(event: &Event) -> Result<bool, Failure> {
    on_queue(&event.of, |queue| queue.done(&event.event))
}

pub(crate) fn event_query(event: &Event, reached: Output<'_, i32>) -> Done {
    reached.put(self::reached(event)?.into());
    Ok(())
}

pub(crate) fn event_synchronize(event: &Event, timeout_ns: u64) -> Done {
    let until = deadline(Duration::from_nanos(timeout_ns));
    let mut rest = Duration::from_micros(10);
    while !reached(event)? {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Deadline { what: "the event".into() }.into());
        }
        std::thread::sleep(rest.min(left));
        rest = (2 * rest).min(Duration::from_millis(1));
    }
    Ok(())
}

pub(crate) fn event_elapsed(from: &Event, to: &Event, nanoseconds: Output<'_, u64>) -> Done {
    if !Arc::ptr_eq(&from.of, &to.of) {
        return Err(Failure::invalid("to", "is an event of another worker than from: each has its own time"));
    }
    for (name, event) in [("from", from), ("to", to)] {
        if !reached(event)? {
            return Err(Failure::invalid(name, "was not reached yet: call vma_event_synchronize first"));
        }
    }
    let time = on_queue(&from.of, |queue| queue.elapsed(&from.event, &to.event))?;
    nanoseconds.put(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    Ok(())
}

pub(crate) fn event_free(event: vma_event) -> Done {
    HANDLES.take::<Event>("event", event).map(drop)
}

pub(crate) fn module_load(worker: &Arc<Worker>, code: Array<'_, u8>, module: Output<'_, vma_module>) -> Done {
    load(worker, code.get(MODULE)?, module)
}

pub(crate) fn module_load_file(worker: &Arc<Worker>, path: &str, module: Output<'_, vma_module>) -> Done {
    let code = vm_files::regular::read(Path::new(path), MODULE)
        .map_err(|error| Failure::invalid("path", format!("is {path:?}, which cannot be read: {error}")))?;
    load(worker, &code, module)
}

fn load(worker: &Arc<Worker>, code: &[u8], module: Output<'_, vma_module>) -> Done {
    let parsed = match code {
        [0, ..] => binary::decode(code).map_err(|error| Failure::Source(error.to_string()))?,
        code => {
            let source = str::from_utf8(code).map_err(|error| {
                Failure::Source(format!("the module is neither binary nor text in UTF-8: {error}"))
            })?;
            text::parse(source).map_err(|error| Failure::Source(error.render(source)))?
        }
    };
    let valid = validate(parsed, Trust::Guest).map_err(|errors| Failure::Source(errors.to_string()))?;
    let compiled = worker.device.0.compile_module(&valid)?;
    let kernels = compiled.iter().map(|kernel| {
        Ok(Arc::new(Kernel {
            kernel: worker.worker.load(kernel.artifact())?,
            name: kernel.name().to_owned(),
            signature: kernel.artifact().signature().clone(),
            of: Arc::clone(worker),
        }))
    });
    let kernels = kernels.collect::<Result<Vec<_>, Failure>>()?;
    end_at_exit();
    let handled = |kernel: Arc<Kernel>| (Arc::clone(&kernel), HANDLES.insert(kernel));
    module.put(HANDLES.insert(Arc::new(Module(kernels.into_iter().map(handled).collect()))));
    Ok(())
}

pub(crate) fn module_get_kernel_count(module: &Module, count: Output<'_, u32>) -> Done {
    count.put(module.0.len() as u32);
    Ok(())
}

pub(crate) fn module_get_kernel(module: &Module, index: u32, kernel: Output<'_, vma_kernel>) -> Done {
    let found = module.0.get(index as usize).ok_or_else(|| {
        let count = module.0.len();
        Failure::invalid("index", format!("is {index}: the module has {count} kernels, counted from 0"))
    })?;
    kernel.put(found.1);
    Ok(())
}

pub(crate) fn module_find_kernel(module: &Module, name: &str, kernel: Output<'_, vma_kernel>) -> Done {
    let found = module.0.iter().find(|(kernel, _)| kernel.name == name).ok_or_else(|| {
        let names: Vec<&str> = module.0.iter().map(|(kernel, _)| kernel.name.as_str()).take(16).collect();
        Failure::invalid("name", format!("is {name:?}: the module has {}", names.join(", ")))
    })?;
    kernel.put(found.1);
    Ok(())
}

pub(crate) fn module_free(module: vma_module) -> Done {
    let module = HANDLES.take::<Module>("module", module)?;
    for (_, handle) in &module.0 {
        HANDLES.take::<Kernel>("kernel", *handle)?;
    }
    Ok(())
}

pub(crate) fn kernel_get_info(kernel: &Kernel, info: Output<'_, vma_kernel_info>) -> Done {
    let signature = &kernel.signature;
    info.put(vma_kernel_info {
        name: name(&kernel.name),
        parameters: signature.parameters.len() as u32,
        block: signature.block,
        cluster: signature.cluster,
    });
    Ok(())
}

pub(crate) fn kernel_get_parameter(
    kernel: &Kernel,
    index: u32,
    parameter: Output<'_, vma_parameter>,
) -> Done {
    let all = &kernel.signature.parameters;
    let found = all.get(index as usize).ok_or_else(|| {
        let what = format!("is {index}: {} has {} parameters, counted from 0", kernel.name, all.len());
        Failure::invalid("index", what)
    })?;
    let mut told = vma_parameter { name: name(&found.name), ..Default::default() };
    match &found.kind {
        ParameterKind::View { extents, element, align, writes } => {
            (told.kind, told.type_, told.bytes) = (VMA_VIEW, type_of(*element), element.bytes());
            (told.rank, told.align, told.writes) = (extents.len() as u32, *align, (*writes).into());
            for (to, extent) in told.extents.iter_mut().zip(extents) {
                *to = if let Extent::Fixed(fixed) = extent { *fixed } else { 0 };
            }
        }
        ParameterKind::Scalar { bytes, .. } => (told.kind, told.bytes) = (VMA_SCALAR, *bytes),
        ParameterKind::Surface { .. } => {
            return Err(Failure::invalid("index", "is that of a surface, which nothing here gives"));
        }
    }
    parameter.put(told);
    Ok(())
}

pub(crate) fn launch(
    kernel: &Kernel,
    x: u32,
    y: u32,
    z: u32,
    arguments: Array<'_, vma_argument>,
    limits: Option<&vma_limits>,
) -> Done {
    let wanted = kernel.signature.parameters.len() as u64;
    if arguments.count() != wanted {
        let what = format!("is {}: {} has {wanted} parameters", arguments.count(), kernel.name);
        return Err(Failure::invalid("count", what));
    }
    let given = arguments.get(wanted)?;
    let memory = |(at, argument): (usize, &vma_argument)| match argument.kind {
        VMA_VIEW => HANDLES.find::<Memory>(&format!("arguments[{at}].memory"), argument.memory).map(Some),
        VMA_SCALAR => Ok(None),
        other => {
            let what = format!("is {other}: VMA_VIEW and VMA_SCALAR are possible");
            Err(Failure::invalid(format!("arguments[{at}].kind"), what))
        }
    };
    let memory = given.iter().enumerate().map(memory).collect::<Result<Vec<_>, _>>()?;
    let memory = memory.iter().enumerate().map(lent).collect::<Result<Vec<_>, _>>()?;
    let packed = given.iter().zip(&memory).enumerate().map(|(at, (argument, memory))| {
        let element = element_of(argument.type_).ok_or_else(|| {
            Failure::invalid(
                format!("arguments[{at}].type"),
                format!("is {}, which no type is", argument.type_),
            )
        })?;
        match (memory, element) {
            (Some(memory), element) => view(at, argument, memory, element),
            (None, Some(element)) => Ok(Argument::Scalar(Scalar::from_bits(argument.bits, element.bytes()))),
            (None, None) => Err(Failure::invalid(
                format!("arguments[{at}].type"),
                "is VMA_ANY: say what the number is, as in VMA_F32",
            )),
        }
    });
    let packed = packed.collect::<Result<Vec<_>, _>>()?;
    let launch = Launch::over([x, y, z]);
    let launch = match limits {
        Some(limits) => {
            launch.within(Limits { fuel: limits.fuel, time: Duration::from_nanos(limits.time_ns) })
        }
        None => launch,
    };
    Ok(kernel.of.worker.launch(&kernel.kernel, launch, &packed)?)
}

/// The buffer of an argument that has one.
fn lent<'a>((at, memory): (usize, &'a Option<Arc<Memory>>)) -> Result<Option<Lent<'a>>, Failure> {
    memory.as_ref().map(|memory| memory.buffer(format_args!("arguments[{at}].memory"))).transpose()
}

/// A view as an argument says.
fn view<'a>(
    at: usize,
    argument: &vma_argument,
    memory: &'a Buffer<AnyAccelerator>,
    element: Option<Element>,
) -> Result<Argument<'a, AnyAccelerator>, Failure> {
    let vma_argument { offset, bytes, rank, extents, strides, strided, .. } = argument;
    let rest = memory.bytes().saturating_sub(*offset);
    let view: View<'_, _> = memory.view(*offset, if *bytes == 0 { rest } else { *bytes })?;
    let view = element.map_or(view, |element| view.of(element));
    Ok(match (*rank as usize, strided) {
        (0, _) => view.into(),
        (rank @ 1..=4, 0) => view.shaped(&extents[..rank])?.into(),
        (rank @ 1..=4, _) => view.strided(&extents[..rank], &strides[..rank - 1])?.into(),
        (rank, _) => {
            let what = format!("is {rank}: a view has up to 4 dimensions");
            return Err(Failure::invalid(format!("arguments[{at}].rank"), what));
        }
    })
}

pub(crate) fn submit_and_wait(
    worker: &Arc<Worker>,
    function: Function,
    data: *mut c_void,
    timeout_ns: u64,
    result: Option<Output<'_, i32>>,
) -> Done {
    let (call, number) = (Call::new(function, data), number(worker));
    let until = deadline(Duration::from_nanos(timeout_ns));
    let returned = worker.worker.submit_and_wait(until, |_| Ok(call.run(number)))?;
    if let Some(result) = result {
        result.put(returned);
    }
    Ok(())
}

/// Submits a function, as soon as there is room in the queue.
fn submitted(
    worker: &Arc<Worker>,
    function: Function,
    data: *mut c_void,
    until: Instant,
) -> vm_accel::Result<vm_accel::Job<i32>> {
    loop {
        let (call, of) = (Call::new(function, data), Arc::clone(worker));
        match worker.worker.submit(move |_| Ok(call.run(number(&of)))) {
            Err(Error::QueueFull { .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_micros(50));
            }
            submitted => return submitted,
        }
    }
}

pub(crate) fn submit_within(
    worker: &Arc<Worker>,
    function: Function,
    data: *mut c_void,
    timeout_ns: u64,
    result: Option<Output<'_, i32>>,
    job: Output<'_, vma_job>,
) -> Done {
    if in_job_of(worker) {
        submit_and_wait(worker, function, data, timeout_ns, result)?;
        job.put(0);
        return Ok(());
    }
    let until = deadline(Duration::from_nanos(timeout_ns));
    let late = || Failure::from(Error::Deadline { what: "the job".into() });
    let submitted = match submitted(worker, function, data, until) {
        Err(error) => {
            job.put(0);
            return Err(if let Error::QueueFull { .. } = error { late() } else { error.into() });
        }
        Ok(submitted) => submitted,
    };
    if !submitted.ends_by(until) {
        let runs = !submitted.cancel();
        // What has just ended is as what runs: who waits for it has its result at once.
        job.put(if runs { HANDLES.insert(Arc::new(Job(Pending::new(submitted)))) } else { 0 });
        return Err(late());
    }
    job.put(0);
    let returned = submitted.wait(until)?;
    if let Some(result) = result {
        result.put(returned);
    }
    Ok(())
}

pub(crate) fn submit(
    worker: &Arc<Worker>,
    function: Function,
    data: *mut c_void,
    job: Option<Output<'_, vma_job>>,
) -> Done {
    let submitted = submitted(worker, function, data, deadline(worker.timeout))?;
    if let Some(job) = job {
        job.put(HANDLES.insert(Arc::new(Job(Pending::new(submitted)))));
    }
    Ok(())
}

pub(crate) fn job_wait(job: &Job, timeout_ns: u64, result: Option<Output<'_, i32>>) -> Done {
    let returned = job.0.wait(deadline(Duration::from_nanos(timeout_ns)))?;
    if let Some(result) = result {
        result.put(returned);
    }
    Ok(())
}

pub(crate) fn job_query(job: &Job, ended: Output<'_, i32>) -> Done {
    ended.put(job.0.ended().is_some().into());
    Ok(())
}

pub(crate) fn job_cancel(job: &Job, cancelled: Output<'_, i32>) -> Done {
    cancelled.put(job.0.cancel().into());
    Ok(())
}

pub(crate) fn job_free(job: vma_job) -> Done {
    HANDLES.take::<Job>("job", job).map(drop)
}

fn type_of(element: Element) -> vma_type {
    match element {
        Element::U8 => VMA_U8,
        Element::U16 => VMA_U16,
        Element::U32 => VMA_U32,
        Element::U64 => VMA_U64,
        Element::F16 => VMA_F16,
        Element::Bf16 => VMA_BF16,
        Element::F32 | Element::Tf32 => VMA_F32,
        Element::F64 => VMA_F64,
    }
}

/// What a type is; none for what is not said. `None` for what no type is.
fn element_of(given: vma_type) -> Option<Option<Element>> {
    Some(match given {
        VMA_ANY => None,
        VMA_U8 => Some(Element::U8),
        VMA_U16 => Some(Element::U16),
        VMA_U32 => Some(Element::U32),
        VMA_U64 => Some(Element::U64),
        VMA_F16 => Some(Element::F16),
        VMA_BF16 => Some(Element::Bf16),
        VMA_F32 => Some(Element::F32),
        VMA_F64 => Some(Element::F64),
        _ => return None,
    })
}

/// A name in a field, cut to it, with a zero at the end.
fn name<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    let end = text.floor_char_boundary(N - 1);
    for (to, byte) in field.iter_mut().zip(text[..end].bytes()) {
        *to = byte as c_char;
    }
    field
}
