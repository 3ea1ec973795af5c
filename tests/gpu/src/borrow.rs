//! Kernels on what another program owns: its context, its stream, its memory. The other program is here too, in calls of the
//! driver as PyTorch makes them: the primary context, a stream, `cuMemAlloc`.
#![allow(unsafe_code)]

pub(crate) mod sys;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use vm_accel::programs::Program;
use vm_accel::sys::BorrowedMemory;
use vm_accel::{
    Buffer, Element, Error, Launch, Limits, Session, Swizzle, View, Worker, WorkerOptions, arguments,
    conformance,
};
use vm_cuda::CudaAccelerator;

use crate::gpu::{Gpu, TIMEOUT};
use crate::skip::skip;
use crate::{Arguments, Test, programs, tensor};
use sys::Owner;

type Own = Session<CudaAccelerator>;

pub(crate) const COUNT: usize = 1 << 20;
const BYTES: u64 = 4 * COUNT as u64;

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let device = arguments.device;
    vec![
        Test::new("in order with the owner's commands, beside a worker", move |gpu, _| {
            in_order(gpu, &Owner::primary(device, true)?)
        }),
        Test::new("on the default stream", move |gpu, _| in_order(gpu, &Owner::primary(device, false)?)),
        Test::new("in a context of the owner's own", move |gpu, _| {
            in_order(gpu, &Owner::own_context(device)?)
        }),
        Test::new("launches wait for nothing", move |gpu, _| no_wait(gpu, device)),
        Test::new("what does not fit is refused", move |gpu, _| refused(gpu, device)),
        Test::new("boxes by tensor maps of borrowed memory", move |gpu, _| boxes(gpu, device)),
        Test::new("guarded kernels are stopped", move |gpu, _| guarded(gpu, device)),
        Test::new("events between two streams of the owner", move |gpu, _| two_streams(gpu, device)),
        Test::new("further streams of a session", move |gpu, _| scope(gpu, device)),
        Test::new("the owner captures a launch", move |gpu, _| captured(gpu, device)),
        Test::new("events between two devices", |_, _| match &vm_cuda::devices()?[..] {
            [_, _, ..] => {
                let mut all = vm_cuda::devices()?.into_iter().map(Arc::new);
                if let (Some(first), Some(second)) = (all.next(), all.next()) {
                    conformance::events_between(&first, &second);
                }
                Ok(())
            }
            _ => skip("there is one device"),
        }),
    ]
}

/// A session on the owner's stream.
fn session(gpu: &Gpu, owner: &Owner) -> vm_accel::Result<Own> {
    let options = WorkerOptions::default();
    let (context, stream) = owner.lend();
    let queue = gpu.accelerator.borrow(context, stream, &options.queue)?;
    Session::over(Arc::clone(&gpu.accelerator), queue, options)
}

/// The owner's memory as a buffer.
fn borrow(session: &Own, address: u64, bytes: u64) -> Buffer<CudaAccelerator> {
    // SAFETY: each owner outlives the sessions on its stream, and uses its memory in the order of the stream, or not at all.
    session.borrow(unsafe { BorrowedMemory::new(address, bytes) })
}

fn soon() -> Instant {
    Instant::now() + TIMEOUT
}

/// Runs `f` while a worker of the same device is busy.
fn beside_a_worker<R>(gpu: &Gpu, f: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
    let worker: Worker<_> = gpu.worker()?;
    let bump = worker.load(&programs::artifact(Program::Bump, gpu)?)?;
    let x = worker.allocate_zeroed(BYTES)?;
    let over = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            let mut launches = 0;
            while !over.load(Ordering::Acquire) {
                worker.launch(&bump, 256, &arguments![&x, 1u32])?;
                launches += 1;
                if launches % 64 == 0 {
                    worker.synchronize(TIMEOUT)?;
                }
            }
            anyhow::Ok(launches)
        });
        let done = f();
        over.store(true, Ordering::Release);
        (done, busy.join())
    });
    let (done, Ok(launches)) = done else { anyhow::bail!("the worker's side panicked") };
    let launches: u32 = launches?;
    let mut sums = vec![0u32; COUNT];
    worker.read(&x, &mut sums)?;
    ensure!(sums.iter().all(|sum| *sum == launches), "the worker lost launches");
    drop((x, bump));
    worker.stop(TIMEOUT)?;
    done
}

/// The owner's fills and copies, and kernels between them, with one wait at the end.
fn in_order(gpu: &Gpu, owner: &Owner) -> anyhow::Result<()> {
    let (add, bump) = (programs::artifact(Program::Add, gpu)?, programs::artifact(Program::Bump, gpu)?);
    let copy2 = programs::artifact(Program::Copy2, gpu)?;
    let before = owner.current()?;
    let result = beside_a_worker(gpu, || {
        let session = session(gpu, owner)?;
        let (add, bump, copy2) = (session.load(&add)?, session.load(&bump)?, session.load(&copy2)?);
        let [x, y, z] = [owner.allocate(BYTES)?, owner.allocate(BYTES)?, owner.allocate(BYTES)?];
        let [from, sum, copy] = [x, y, z].map(|address| borrow(&session, address, BYTES));
        for turn in 0..20u8 {
            owner.fill(x, turn, BYTES)?;
            session.launch(&add, 512, &arguments![&from, &sum, 5u32])?;
            owner.copy(z, y, BYTES)?;
            session.launch(&bump, 512, &arguments![&copy, u32::from(turn)])?;
            owner.fill(y, 0xee, BYTES)?;
            // The first 256 of each row of 1024.
            let rows = |buffer| View::from(buffer).of(Element::U32).strided(&[1024, 256], &[4096]);
            session.launch(&copy2, 512, &arguments![rows(&copy)?, rows(&sum)?])?;
            let found = owner.read(y)?;
            let wanted = u32::from_ne_bytes([turn; 4]) + 5 + u32::from(turn);
            let right =
                |(at, value): (usize, &u32)| *value == if at % 1024 < 256 { wanted } else { 0xeeee_eeee };
            ensure!(found.iter().enumerate().all(right), "turn {turn}: {:x?}", &found[..4]);
            ensure!(owner.current()? == before, "the current context is another than before");
        }
        drop((from, sum, copy, add, bump, copy2));
        session.close()?;
        // The owner goes on.
        owner.fill(x, 1, BYTES)?;
        ensure!(owner.read(x)?.iter().all(|value| *value == 0x0101_0101), "the memory is not the owner's");
        Ok(())
    });
    ensure!(owner.current()? == before, "the current context is another than before");
    result
}

fn no_wait(gpu: &Gpu, device: u32) -> anyhow::Result<()> {
    let (spinning, owner) = (Owner::primary(device, true)?, Owner::primary(device, true)?);
    let (first, second) = (session(gpu, &spinning)?, session(gpu, &owner)?);
    let spin = first.load(&programs::artifact(Program::Spin, gpu)?)?;
    let bump = second.load(&programs::artifact(Program::Bump, gpu)?)?;
    let (flag, x) = (spinning.allocate(4)?, owner.allocate(BYTES)?);
    let (flag, data) = (borrow(&first, flag, 4), borrow(&second, x, BYTES));
    owner.fill(x, 0, BYTES)?;
    owner.wait()?;
    // It loops until it is told to stop.
    let limits = Limits { fuel: 1 << 62, time: Duration::from_secs(2) };
    first.launch(&spin, Launch::over(1).within(limits), &arguments![&flag, u64::MAX])?;
    let spun = first.record()?;
    second.wait_event(&spun)?;
    for _ in 0..100 {
        second.launch(&bump, 512, &arguments![&data, 1u32])?;
    }
    let late = second.synchronize(Instant::now() + Duration::from_millis(20));
    ensure!(matches!(late, Err(Error::Deadline { .. })), "what was launched waited for nothing: {late:?}");
    let ended = first.synchronize(soon());
    ensure!(matches!(ended, Err(Error::DeadlineExceeded { .. })), "{ended:?}");
    ensure!(owner.read(x)?.iter().all(|sum| *sum == 100), "launches behind the event were lost");
    drop((flag, data, spin, bump));
    Ok(first.close().and(second.close())?)
}

fn refused(gpu: &Gpu, device: u32) -> anyhow::Result<()> {
    let owner = Owner::primary(device, true)?;
    let session = session(gpu, &owner)?;
    let add = session.load(&programs::artifact(Program::Add, gpu)?)?;
    let x = owner.allocate(4096)?;
    let [low, high] = [borrow(&session, x, 2048), borrow(&session, x + 2048, 2048)];
    let check = |done: vm_accel::Result<()>, want: &str| {
        let error = done.err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(error.contains(want), "{error:?}: {want}");
        Ok(())
    };
    let (whole, odd) = (borrow(&session, x, 4096), borrow(&session, x + 2050, 1024));
    check(session.launch(&add, 1, &arguments![&low, &whole, 1u32]), "overlaps")?;
    check(session.launch(&add, 1, &arguments![&low, &odd, 1u32]), "not aligned")?;
    let float = View::from(&high).of(Element::F32);
    check(
        session.launch(&add, 1, &arguments![&low, float, 1u32]),
        "elements of u32 are wanted, f32 were given",
    )?;
    check(session.launch(&add, 1, &arguments![&low, high.shaped(&[1024])?, 1u32]), "its extents reach over")?;
    check(session.launch(&add, 1, &arguments![&low, &high, 1u64]), "of 8 bytes was given")?;
    drop((low, high, whole, odd, add));
    Ok(session.close()?)
}

fn boxes(gpu: &Gpu, device: u32) -> anyhow::Result<()> {
    tensor::needs_tma(gpu)?;
    let owner = Owner::primary(device, true)?;
    let session = session(gpu, &owner)?;
    let kernel = session.load(&tensor::artifact(Swizzle::Bytes128)?)?;
    const ROWS: u32 = 24;
    const COLUMNS: u32 = 40;
    let (x, y) = (owner.allocate(1 << 16)?, owner.allocate(4 * tensor::ELEMENTS as u64)?);
    let numbers: Vec<u32> = (1..=ROWS * COLUMNS).collect();
    let (from, to) = (borrow(&session, x, 1 << 16), borrow(&session, y, 4 * tensor::ELEMENTS as u64));
    let shape = |from| View::from(from).of(Element::U32).shaped(&[ROWS.into(), COLUMNS.into()]);
    for [row, column] in [[0, 0], [8, 4], [-2, -4], [20, 36]] {
        owner.write(x, &numbers)?;
        owner.fill(y, 0xff, 4 * tensor::ELEMENTS as u64)?;
        session.launch(&kernel, 1, &arguments![shape(&from)?, &to, column, row])?;
        let found = owner.read_some(y, tensor::ELEMENTS)?;
        let wanted = tensor::wanted(ROWS, COLUMNS, [row, column], Swizzle::Bytes128);
        ensure!(found == wanted, "at {row}, {column}: {found:?}");
    }
    let odd = borrow(&session, x + 4, 1 << 15);
    let refused = session.launch(&kernel, 1, &arguments![shape(&odd)?, &to, 0i32, 0i32]);
    ensure!(matches!(&refused, Err(Error::Arguments { parameter, .. }) if parameter == "x"), "{refused:?}");
    drop((from, to, odd, kernel));
    Ok(session.close()?)
}

fn guarded(gpu: &Gpu, device: u32) -> anyhow::Result<()> {
    let owner = Owner::primary(device, true)?;
    let session = session(gpu, &owner)?;
    let spin = session.load(&programs::artifact(Program::Spin, gpu)?)?;
    let x = owner.allocate(BYTES)?;
    let flag = borrow(&session, x, 4);
    let run = |turns: u64, fuel, time| {
        owner.fill(x, 0, BYTES)?;
        session.launch(&spin, Launch::over(1).within(Limits { fuel, time }), &arguments![&flag, turns])?;
        let ended = session.synchronize(soon());
        anyhow::Ok((ended, owner.read(x)?[0]))
    };
    let (long, short) = (Duration::from_secs(100), Duration::from_millis(50));
    let ended = run(1000, 1 << 40, long)?;
    ensure!(matches!(ended, (Ok(()), 1)), "{ended:?}");
    let ended = run(1000, 10, long)?;
    ensure!(matches!(ended, (Err(Error::OutOfFuel { .. }), 0)), "{ended:?}");
    let ended = run(u64::MAX, 1 << 62, short)?;
    ensure!(matches!(ended, (Err(Error::DeadlineExceeded { .. }), 0)), "{ended:?}");
    drop((flag, spin));
    Ok(session.close()?)
}

fn two_streams(gpu: &Gpu, device: u32) -> anyhow::Result<()> {
    let (left, right) = (Owner::primary(device, true)?, Owner::primary(device, true)?);
    let (first, second) = (session(gpu, &left)?, session(gpu, &right)?);
    let bump = programs::artifact(Program::Bump, gpu)?;
    let (bump, other) = (first.load(&bump)?, second.load(&bump)?);
    let x = left.allocate(BYTES)?;
    let (data, same) = (borrow(&first, x, BYTES), borrow(&second, x, BYTES));
    left.fill(x, 0, BYTES)?;
    let mut wanted = 0u32;
    for turn in 0..100u32 {
        first.launch(&bump, 512, &arguments![&data, turn])?;
        second.wait_event(&first.record()?)?;
        second.launch(&other, 512, &arguments![&same, 3u32])?;
        if turn == 50 {
            right.fill(x, 0, BYTES)?;
            wanted = 0;
        } else {
            wanted += turn + 3;
        }
        first.wait_event(&second.record()?)?;
    }
    ensure!(left.read(x)?.iter().all(|sum| *sum == wanted), "two streams did not take turns");
    drop((data, same, bump, other));
    Ok(first.close().and(second.close())?)
}

fn scope(gpu: &Gpu, device: u32) -> anyhow::Result<()> {
    let owner = Owner::primary(device, true)?;
    let session = session(gpu, &owner)?;
    let bump = session.load(&programs::artifact(Program::Bump, gpu)?)?;
    let x = owner.allocate(BYTES)?;
    let data = borrow(&session, x, BYTES);
    let copies = [session.allocate_typed::<u32>(COUNT)?, session.allocate_typed::<u32>(COUNT)?];
    for turn in 1..=20u32 {
        owner.fill(x, 0, BYTES)?;
        session.scope(|scope| {
            let streams = [scope.stream()?, scope.stream()?];
            for by in 0..10 {
                let (this, next) = (&streams[by % 2], &streams[1 - by % 2]);
                this.launch(&bump, 512, &arguments![&data, turn])?;
                next.wait(&this.record()?)?;
            }
            streams.iter().zip(&copies).try_for_each(|(stream, copy)| stream.copy(copy, &data))
        })?;
        owner.fill(x, 0xff, BYTES)?;
        for copy in &copies {
            let sums = session.download(copy)?;
            ensure!(sums.iter().all(|sum| *sum == 10 * turn), "turn {turn}: {:?}", &sums[..4]);
        }
    }
    drop((data, copies, bump));
    Ok(session.close()?)
}

fn captured(gpu: &Gpu, device: u32) -> anyhow::Result<()> {
    let owner = Owner::primary(device, true)?;
    let session = session(gpu, &owner)?;
    let bump = session.load(&programs::artifact(Program::Bump, gpu)?)?;
    let spin = session.load(&programs::artifact(Program::Spin, gpu)?)?;
    let x = owner.allocate(BYTES)?;
    let data = borrow(&session, x, BYTES);
    owner.fill(x, 0, BYTES)?;
    let graph = owner.capture(|| {
        session.launch(&bump, 512, &arguments![&data, 7u32])?;
        let refused = session.launch(&spin, 1, &arguments![data.view(0, 4)?, 1u64]);
        ensure!(matches!(refused, Err(Error::Capturing { .. })), "{refused:?}");
        owner.copy(x, x + BYTES / 2, BYTES / 2)
    })?;
    ensure!(owner.read(x)?.iter().all(|sum| *sum == 0), "what is captured does not run");
    graph.launch()?;
    graph.launch()?;
    ensure!(owner.read(x)?.iter().all(|sum| *sum == 14), "the owner's graph lost the launch");
    drop((graph, data, bump, spin));
    Ok(session.close()?)
}
