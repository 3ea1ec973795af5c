//! Turns with another API: here it is the host, which reads and writes a file that the device imports.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use super::{Programs, TIMEOUT, soon, start, stop};
use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::external::{ExternalKind, ExternalMemory, ExternalSemaphore, HostTimeline, Timeline};
use crate::pool::PoolOptions;
use crate::programs::Program;
use crate::worker::{Link, Mapped, Registered, Shareable, Worker};
use crate::{View, arguments};

const NUMBERS: usize = 1024;
const BYTES: u64 = 4 * NUMBERS as u64;
/// Where the numbers begin in the file.
const OFFSET: u64 = 4096;

fn external(timeline: &Arc<HostTimeline>) -> ExternalSemaphore {
    ExternalSemaphore::of_host(Arc::clone(timeline) as _)
}

/// A file that is shared, which tells when it is dropped.
struct Numbers {
    file: Arc<File>,
    dropped: Sender<()>,
}

impl Numbers {
    fn new(file: &Arc<File>) -> (Self, Receiver<()>) {
        let (dropped, receiver) = channel();
        (Self { file: Arc::clone(file), dropped }, receiver)
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        let _ = self.dropped.send(());
    }
}

impl Shareable for Numbers {
    type Layout = u64;

    fn name(&self) -> &str {
        "numbers"
    }

    fn layout(&self) -> u64 {
        BYTES
    }

    fn export(&self) -> Result<ExternalMemory> {
        let fd = self.file.try_clone();
        let fd = fd.map_err(|error| Error::Host { what: "sharing a file", cause: error.to_string() })?;
        let (kind, allocation) = (ExternalKind::HostFd, OFFSET + BYTES);
        Ok(ExternalMemory { fd: fd.into(), kind, allocation, offset: OFFSET, bytes: BYTES, dedicated: false })
    }
}

fn put(file: &File, value: u32) {
    file.write_all_at(&value.to_ne_bytes().repeat(NUMBERS), OFFSET).expect("a write");
}

fn get(file: &File) -> Vec<u32> {
    let mut bytes = vec![0; BYTES as usize];
    file.read_exact_at(&mut bytes, OFFSET).expect("a read");
    bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes"))).collect()
}

/// A worker, linked to the host.
struct Both<A: Accelerator> {
    worker: Worker<A>,
    link: Link<A>,
    host: Arc<HostTimeline>,
    device: Arc<HostTimeline>,
    file: Arc<File>,
}

impl<A: Accelerator> Both<A> {
    fn new(accelerator: &Arc<A>, file: &Arc<File>) -> Self {
        let worker = start(accelerator, PoolOptions::default());
        let (host, device): (Arc<HostTimeline>, Arc<HostTimeline>) = Default::default();
        let link = worker.link(external(&host), external(&device)).expect("a link");
        Self { worker, link, host, device, file: Arc::clone(file) }
    }

    fn register(&self) -> (Registered<A, Numbers>, Receiver<()>) {
        let (numbers, dropped) = Numbers::new(&self.file);
        (self.worker.register_resource(numbers).expect("a registration"), dropped)
    }

    fn map(&self, value: u64) -> (Mapped<A, Numbers>, Receiver<()>) {
        let (registered, dropped) = self.register();
        (registered.map(&self.link, value).expect("it is mapped"), dropped)
    }

    fn synchronize(&self) {
        self.worker.synchronize(TIMEOUT).expect("a wait");
    }
}

/// Checks turns of an accelerator that imports host memory, with a new file of at least 8 KiB from `file` for each case: a memfd
/// that is sealed against shrinking, where the device asks for one.
///
/// # Panics
/// When the accelerator does not conform.
pub fn turns<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>, file: &dyn Fn() -> File) {
    type Case<A> = fn(&Both<A>, Programs<'_>);
    let cases: [(&str, Case<A>); 6] = [
        ("turns in order", in_order),
        ("a job that fails in its turn", failing_jobs),
        ("what is not taken comes back", refusals),
        ("turns in jobs", jobs),
        ("the end of a worker", the_end),
        ("a turn that never comes", no_turn),
    ];
    for (name, case) in cases {
        println!("conformance of {}: {name}", accelerator.info().backend);
        let file = Arc::new(file());
        case(&Both::new(accelerator, &file), programs);
    }
}

fn in_order<A: Accelerator>(both: &Both<A>, programs: Programs<'_>) {
    let bump = both.worker.load(&programs(Program::Bump)).expect("a load");
    let (mut registered, dropped) = both.register();
    assert_eq!((registered.ready(), registered.resource().name()), (0, "numbers"));
    for turn in 1..=20 {
        // It waits for what comes later.
        let mapped = registered.map(&both.link, turn).expect("it is mapped");
        assert_eq!((mapped.layout(), mapped.buffer().bytes()), (BYTES, BYTES));
        both.worker.launch(&bump, 4, &arguments![mapped.buffer(), 5u32]).expect("a launch");
        registered = mapped.unmap().expect("it is unmapped");
        assert_eq!(registered.ready(), turn);
        let ended = both.worker.fence().expect("a fence");
        assert_eq!((ended.is_done(), both.device.value()), (false, turn - 1), "it ran before its turn");
        put(&both.file, 1000 * turn as u32);
        both.host.signal(turn).expect("a signal");
        ended.wait(soon()).expect("it ends");
        assert!(both.device.wait(turn, soon()).expect("a wait"), "the other side has its turn");
        assert_eq!(get(&both.file), [1000 * turn as u32 + 5; NUMBERS]);
    }
    let numbers = registered.unregister().expect("it is unregistered");
    assert_eq!(dropped.try_recv(), Err(TryRecvError::Empty));
    put(&both.file, 7);
    drop((numbers, bump));
    stop(&both.worker);
    assert_eq!(get(&both.file), [7; NUMBERS], "nothing touches it any more");
}

fn failing_jobs<A: Accelerator>(both: &Both<A>, programs: Programs<'_>) {
    let bump = both.worker.load(&programs(Program::Bump)).expect("a load");
    put(&both.file, 1);
    both.host.signal(1).expect("a signal");
    for (turn, panics) in [(1, false), (2, true)] {
        let (mapped, dropped) = both.map(1);
        let (worker, bump) = (both.worker.clone(), bump.clone());
        let failed = both.worker.submit_and_wait(soon(), move |_| {
            worker.launch(&bump, 4, &arguments![mapped.buffer(), 1u32])?;
            assert!(!panics, "planted");
            Err::<(), _>(Error::OutOfOrder)
        });
        assert!(matches!(
            (panics, failed),
            (false, Err(Error::OutOfOrder)) | (true, Err(Error::Panicked { .. }))
        ));
        both.synchronize();
        assert!(both.device.wait(turn, soon()).expect("a wait"), "the other side has its turn");
        assert_eq!(get(&both.file), [1 + turn as u32; NUMBERS], "what the job had done counts");
        dropped.recv_timeout(TIMEOUT).expect("the resource is dropped");
    }
    let (mapped, _dropped) = both.map(1);
    assert_eq!(mapped.unmap().expect("the link works").ready(), 3);
    stop(&both.worker);
}

fn refusals<A: Accelerator>(both: &Both<A>, _: Programs<'_>) {
    let other = Both::new(both.worker.accelerator(), &both.file);
    let (registered, dropped) = both.register();
    let refused = registered.map(&other.link, 1).expect_err("a link of another worker");
    assert_eq!(
        refused.to_string(),
        format!("numbers stays registered: {}", Error::WrongWorker { what: "link" })
    );
    let (mapped, _) = (refused.resource.map(&both.link, 0).expect("it is mapped"), &dropped);
    let captured = both.worker.capture(|session| session.fill(mapped.buffer(), 0)).map(drop);
    assert_eq!(captured, Err(Error::Capturing { what: "the use of a resource of graphics" }));
    let view = View::from(mapped.buffer());
    assert_eq!(other.worker.fill(view, 0), Err(Error::WrongWorker { what: "buffer" }));
    both.worker.fill(view, 9).expect("a fill");
    let registered = mapped.unmap().expect("it is unmapped");
    stop(&other.worker);
    stop(&both.worker);
    assert_eq!(get(&both.file), [0x0909_0909; NUMBERS]);
    let refused = registered.map(&both.link, 1).expect_err("the worker has stopped");
    assert_eq!((&refused.error, refused.state), (&Error::Stopped, "registered"));
    drop(refused.resource.unregister().expect("it comes back from a worker that has stopped"));
    dropped.recv_timeout(TIMEOUT).expect("the resource is dropped");
    let (numbers, _dropped) = Numbers::new(&both.file);
    let refused = both.worker.register_resource(numbers).expect_err("the worker has stopped");
    assert_eq!((&refused.error, refused.state), (&Error::Stopped, "unregistered"));
}

fn jobs<A: Accelerator>(both: &Both<A>, programs: Programs<'_>) {
    let bump = both.worker.load(&programs(Program::Bump)).expect("a load");
    put(&both.file, 1);
    both.host.signal(1).expect("a signal");
    let (registered, _dropped) = both.register();
    let (worker, link, theirs) = (both.worker.clone(), both.link.clone(), bump.clone());
    let registered = both.worker.submit_and_wait(soon(), move |_| {
        let mapped = registered.map(&link, 1)?;
        worker.launch(&theirs, 4, &arguments![mapped.buffer(), 1u32])?;
        Ok(mapped.unmap()?)
    });
    let registered = registered.expect("a turn in a job");
    assert_eq!(registered.ready(), 1);
    // With a turn queued behind the job it comes too late for one of its own.
    let (begun, wait) = channel();
    let (go, gone) = channel::<()>();
    let (second, _second_dropped) = both.register();
    let link = both.link.clone();
    let late = both.worker.submit(move |_| {
        let _ = begun.send(());
        let _ = gone.recv_timeout(TIMEOUT);
        match registered.map(&link, 1) {
            Ok(_) => Ok(None),
            Err(refused) => Ok(Some((refused.error, refused.resource))),
        }
    });
    let late = late.expect("a job");
    wait.recv_timeout(TIMEOUT).expect("the job has begun");
    let mapped = second.map(&both.link, 1).expect("it is mapped");
    both.worker.launch(&bump, 4, &arguments![mapped.buffer(), 1u32]).expect("a launch");
    let second = mapped.unmap().expect("it is unmapped");
    go.send(()).expect("the job waits");
    let refused = late.wait(soon()).expect("the job ends");
    let (error, registered) = refused.expect("the turn was refused");
    assert_eq!((error, second.ready()), (Error::OutOfOrder, 2));
    both.synchronize();
    assert!(both.device.wait(2, soon()).expect("a wait"));
    assert_eq!(get(&both.file), [3; NUMBERS]);
    drop((registered, second, bump));
    stop(&both.worker);
}

fn the_end<A: Accelerator>(both: &Both<A>, _: Programs<'_>) {
    let (kept, kept_dropped) = both.register();
    let (gone, gone_dropped) = both.register();
    let (mapped, _mapped_dropped) = both.map(0);
    let turn = both.map(0).0.unmap().expect("it is unmapped").ready();
    drop(gone);
    stop(&both.worker);
    gone_dropped.recv_timeout(TIMEOUT).expect("what was dropped is gone");
    assert_eq!(kept_dropped.try_recv(), Err(TryRecvError::Empty), "what is held is there");
    assert_eq!((turn, both.device.value()), (1, 1));
    drop(kept.unregister().expect("it comes back"));
    kept_dropped.recv_timeout(TIMEOUT).expect("the resource is dropped");
    let registered = mapped.unmap().expect("a turn that needs no worker");
    assert_eq!((registered.ready(), both.device.value()), (2, 2));
}

fn no_turn<A: Accelerator>(both: &Both<A>, _: Programs<'_>) {
    let (mapped, _dropped) = both.map(1);
    both.worker.fill(mapped.buffer(), 1).expect("a fill");
    let registered = mapped.unmap().expect("it is unmapped");
    assert_eq!(
        both.worker
            .synchronize(std::time::Duration::from_millis(10))
            .map_err(|error| error.to_string().is_empty()),
        Err(false)
    );
    assert_eq!(both.device.value(), 0, "nothing is done before its turn");
    // The other side gives up its wait, and lets the worker go on.
    both.host.signal(1).expect("a signal");
    both.synchronize();
    assert!(both.device.wait(registered.ready(), soon()).expect("a wait"));
    stop(&both.worker);
}
