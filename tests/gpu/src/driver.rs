//! What only the CUDA accelerator has: several queues on a thread, the driver's log, much shared memory, unified memory
//! that is not over-committed, and PTX assembled in processes.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vm_accel::programs::Program;
use vm_accel::{
    Accelerator, Arguments as Packed, Error, Extents, Grid, MemoryKind, Queue, QueueArgument, QueueOptions,
    arguments,
};
use vm_cuda::assemble::{AssembleError, Assembler, Limits};
use vm_ir::{Trust, ValidModule, text, validate};

use crate::gpu::{Gpu, TIMEOUT, named};
use crate::skip::skip;
use crate::{Arguments, Test, programs, tensor};

/// The argument with which this program is the driver's linker.
pub(crate) const ASSEMBLE: &str = "--assemble";

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![
        Test::new("queues of one thread end one by one", |_, _| queues()),
        Test::new("a kernel of another queue is refused", |gpu, _| foreign(gpu)),
        Test::new("unified memory is not over-committed", |gpu, _| unified(gpu)),
        Test::new("PTX that is wrong is refused with the driver's log", |gpu, report| {
            let worker = gpu.worker()?;
            let error = worker.load(&programs::artifact(Program::Broken, gpu)?).err().context("it loads")?;
            report.note(error.to_string().replace('\n', " | "));
            ensure!(matches!(&error, Error::Load { .. }), "{error}");
            ensure!(error.to_string().contains("line 4"), "{error}");
            Ok(worker.stop(TIMEOUT)?)
        }),
        Test::new("more than 48 KiB of shared memory", |gpu, _| large_shared(gpu)),
        Test::new("kernels of a module share its image", |gpu, _| shared_image(gpu)),
        Test::new("boxes by tensor maps", |gpu, _| tensor::boxes(gpu)),
        Test::new("a cubin by ptxas", |gpu, report| match Assembler::find() {
            Ok(assembler) => {
                report.note(assembler.program().display().to_string());
                assembled(gpu, &assembler)
            }
            Err(error @ AssembleError::Missing { .. }) => skip(error.to_string()),
            Err(error) => Err(error.into()),
        }),
        Test::new("a cubin by the driver's linker, in a process", |gpu, _| {
            let program = std::env::current_exe().context("finding this program")?;
            let linker = Assembler::driver(program, [OsString::from(ASSEMBLE)]);
            assembled(gpu, &linker)?;
            let architecture = &gpu.accelerator.info().target;
            let broken = linker.assemble(b".version 7.0\nnonsense\n", architecture);
            ensure!(
                matches!(&broken, Err(AssembleError::Refused { messages, .. }) if messages.contains("line 2")),
                "{broken:?}"
            );
            let absent = linker.assemble(b"", "sm_999");
            ensure!(
                matches!(&absent, Err(AssembleError::Refused { messages, .. }) if messages.contains("sm_999")),
                "{absent:?}"
            );
            let hasty = Limits { time: Duration::from_millis(1), ..Limits::default() };
            let late = linker.clone().limits(hasty).assemble(b"", architecture);
            ensure!(matches!(late, Err(AssembleError::Late { .. })), "{late:?}");
            let small = Limits { memory: 8 << 20, ..Limits::default() };
            let small = linker.clone().limits(small).assemble(b"", architecture);
            ensure!(small.is_err(), "the limit on memory did not hold");
            Ok(())
        }),
    ]
}

fn queues() -> anyhow::Result<()> {
    let options = QueueOptions::default();
    let all: Vec<_> = vm_cuda::devices()?;
    let mut queues = Vec::new();
    for device in all.iter().chain(&all) {
        queues.push(device.open(&options)?);
    }
    while let Some(queue) = queues.pop() {
        for queue in queues.iter().chain([&queue]) {
            let memory = queue.allocate(MemoryKind::Pinned, 4096)?;
            let device = queue.allocate(MemoryKind::Device, 4096)?;
            queue.fill(device.region(), 7)?;
            queue.copy(memory.region(), device.region())?;
            let event = queue.event(false)?;
            queue.record(&event)?;
            queue.wait(&event, std::time::Instant::now() + TIMEOUT)?;
            let mut bytes = [0; 4096];
            memory.region().read_host(&mut bytes)?;
            ensure!(bytes == [7; 4096], "a copy on one of several queues");
            queue.free(memory)?;
            queue.free(device)?;
        }
    }
    Ok(())
}

fn foreign(gpu: &Gpu) -> anyhow::Result<()> {
    let artifact = programs::artifact(Program::Add, gpu)?;
    let options = QueueOptions::default();
    let queue = gpu.accelerator.open(&options)?;
    let kernel = {
        let other = gpu.accelerator.open(&options)?;
        let kernel = other.load(&artifact)?;
        let memory = queue.allocate(MemoryKind::Device, 512)?;
        let (low, high) = (memory.region().slice(0, 256)?, memory.region().slice(256, 256)?);
        let given = [
            QueueArgument::View(low, Extents::WHOLE),
            QueueArgument::View(high, Extents::WHOLE),
            QueueArgument::Scalar(1u32.into()),
        ];
        let packed = Packed::new(&artifact, given)?;
        // SAFETY: this one is refused; the memory is freed when the other has ended.
        let refused = unsafe { queue.launch(&kernel, Grid::from(1), &packed) };
        ensure!(matches!(refused, Err(Error::WrongWorker { what: "kernel" })), "{refused:?}");
        let done = other.event(false)?;
        // SAFETY: as above.
        unsafe { other.launch(&kernel, Grid::from(1), &packed) }?;
        other.record(&done)?;
        other.wait(&done, Instant::now() + TIMEOUT)?;
        queue.free(memory)?;
        kernel
    };
    // Its module went with its queue.
    let refused = queue.unload(kernel);
    ensure!(matches!(refused, Err(Error::WrongWorker { what: "kernel" })), "{refused:?}");
    Ok(())
}

fn unified(gpu: &Gpu) -> anyhow::Result<()> {
    if !gpu.accelerator.info().unified {
        return skip("the device has no unified memory that host and device use at once");
    }
    let queue = gpu.accelerator.open(&QueueOptions::default())?;
    let free = queue.memory()?.free;
    let half = queue.allocate(MemoryKind::Unified, free / 2)?;
    let more = queue.allocate(MemoryKind::Unified, free / 2 + (1 << 30));
    ensure!(matches!(more, Err(Error::OutOfMemory { kind: "unified", .. })), "{more:?}");
    queue.free(half)?;
    let again = queue.allocate(MemoryKind::Unified, free / 2 + (1 << 30))?;
    Ok(queue.free(again)?)
}

fn large_shared_module() -> anyhow::Result<ValidModule> {
    let source = "vir 1
kernel @large(@x: view<i32, [?], read>, @y: view<i32, [?], write>) at 0x1000 block(1024) {
  shared @tile: i32[24576]
  %t = thread_id.x : i32
  %end = const 24576 : i32
  %last = const 24575 : i32
  %step = const 1024 : i32
  for %i: i32 = %t to %end step %step {
    %value = load @x[%i] : i32
    store @tile[%i], %value
  }
  barrier.block
  for %j: i32 = %t to %end step %step {
    %other = sub %last, %j : i32
    %reversed = load @tile[%other] : i32
    store @y[%j], %reversed
  }
}
";
    Ok(validate(text::parse(source)?, Trust::Guest)?)
}

fn large_shared(gpu: &Gpu) -> anyhow::Result<()> {
    let kernels = gpu.compile(&large_shared_module()?)?;
    let artifact = named(&kernels, "large")?.artifact();
    ensure!(artifact.signature().shared_bytes == 96 << 10, "{:?}", artifact.signature());
    let worker = gpu.worker()?;
    let kernel = worker.load(artifact)?;
    let numbers: Vec<u32> = (0..24576).map(|n: u32| n.wrapping_mul(2_654_435_761)).collect();
    let (x, y) = (worker.allocate(4 * 24576)?, worker.allocate(4 * 24576)?);
    worker.write(&x, &numbers)?;
    worker.launch(&kernel, 3, &arguments![&x, &y])?;
    let mut back = vec![0u32; 24576];
    worker.read(&y, &mut back)?;
    ensure!(back.iter().rev().eq(&numbers), "96 KiB of shared memory hold something else");
    drop((x, y, kernel));
    Ok(worker.stop(TIMEOUT)?)
}

/// That a kernel runs on when another of its module was unloaded, and is loaded again when all were.
fn shared_image(gpu: &Gpu) -> anyhow::Result<()> {
    let module = validate(
        text::parse(
            "vir 1
kernel @twice(@x: view<i32, [64], readwrite>) at 0x1000 block(64) {
  %i = global_id.x : i64
  %a = load @x[%i] : i32
  %b = add %a, %a : i32
  store @x[%i], %b
}
kernel @square(@x: view<i32, [64], readwrite>) at 0x2000 block(64) {
  %i = global_id.x : i64
  %a = load @x[%i] : i32
  %b = mul %a, %a : i32
  store @x[%i], %b
}
",
        )?,
        Trust::Guest,
    )?;
    let kernels = gpu.compile(&module)?;
    let worker = gpu.worker()?;
    let load = |name: &str| anyhow::Ok(worker.load(named(&kernels, name)?.artifact())?);
    let x = worker.allocate(256)?;
    worker.write(&x, &[3u32; 64])?;
    let (twice, square) = (load("twice")?, load("square")?);
    worker.launch(&twice, 1, &arguments![&x])?;
    drop(twice);
    worker.synchronize(TIMEOUT)?;
    worker.launch(&square, 1, &arguments![&x])?;
    drop(square);
    worker.synchronize(TIMEOUT)?;
    let twice = load("twice")?;
    worker.launch(&twice, 1, &arguments![&x])?;
    let mut back = [0u32; 64];
    worker.read(&x, &mut back)?;
    ensure!(back == [72; 64], "the kernels compute {:?}", &back[..4]);
    drop((x, twice));
    Ok(worker.stop(TIMEOUT)?)
}

/// That what an assembler makes of a kernel runs.
fn assembled(gpu: &Gpu, assembler: &Assembler) -> anyhow::Result<()> {
    let compiler = gpu.compiler(Trust::Guest);
    let assembler = vm_passthrough::accelerator::CudaAssembler(assembler.clone());
    let compiler = compiler.assembler(Some(std::sync::Arc::new(assembler)));
    let module = validate(
        text::parse(
            "vir 1
kernel @twice(@x: view<i32, [?], readwrite>) at 0x1000 block(64) {
  %i = global_id.x : i64
  %a = load @x[%i] : i32
  %b = add %a, %a : i32
  store @x[%i], %b
}
",
        )?,
        Trust::Guest,
    )?;
    let kernels = compiler.compile_module(&module)?;
    let artifact = named(&kernels, "twice")?.artifact();
    ensure!(artifact.image().starts_with(b"\x7fELF"), "no cubin");
    let worker = gpu.worker()?;
    let kernel = worker.load(artifact)?;
    let x = worker.allocate(256)?;
    worker.write(&x, &[21u32; 64])?;
    worker.launch(&kernel, 2, &arguments![&x])?;
    let mut back = [0u32; 64];
    worker.read(&x, &mut back)?;
    ensure!(back == [42; 64], "the cubin computes {:?}", &back[..4]);
    drop((x, kernel));
    Ok(worker.stop(TIMEOUT)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_large_kernel_is_valid() {
        let module = super::large_shared_module().unwrap();
        let compiled = vm_jit::compile(&module, &"ptx:sm_90a".parse().unwrap()).unwrap();
        assert_eq!(compiled.entries[0].dynamic_shared, 96 << 10);
    }
}
