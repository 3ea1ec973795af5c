//! Turns with another API on a device that fails: the other side is never left waiting.
#![cfg(not(loom))]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use vm_accel::fake::{FakeAccelerator, FakeCall, FakeResource};
use vm_accel::programs::Program;
use vm_accel::sys::BorrowedResource;
use vm_accel::{
    Element, Error, ExternalKind, ExternalMemory, ExternalSemaphore, Link, Mapped, Pixels, Result,
    SemaphoreKind, Shareable, Timeline, Worker, WorkerOptions, arguments,
};

const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Value(AtomicU64);

impl Timeline for Value {
    fn wait(&self, value: u64, _: Instant) -> Result<bool> {
        Ok(self.0.load(Ordering::Acquire) >= value)
    }

    fn signal(&self, value: u64) -> Result<()> {
        self.0.fetch_max(value, Ordering::AcqRel);
        Ok(())
    }
}

struct Bytes(File, mpsc::Sender<()>);

impl Drop for Bytes {
    fn drop(&mut self) {
        let _ = self.1.send(());
    }
}

impl Shareable for Bytes {
    type Layout = u64;

    fn name(&self) -> &str {
        "bytes"
    }

    fn layout(&self) -> u64 {
        64
    }

    fn export(&self) -> Result<ExternalMemory> {
        let fd: OwnedFd = self.0.try_clone().unwrap().into();
        Ok(ExternalMemory {
            fd,
            kind: ExternalKind::HostFd,
            allocation: 64,
            offset: 0,
            bytes: 64,
            dedicated: false,
        })
    }
}

/// An image of the device's own tiling.
struct Picture(Bytes);

impl Shareable for Picture {
    type Layout = Pixels;

    fn name(&self) -> &str {
        "picture"
    }

    fn layout(&self) -> Pixels {
        let (element, lanes) = (Element::U32, 4);
        Pixels { element, lanes, size: [5, 2], layers: Some(3), levels: 2, pitch: None }
    }

    fn export(&self) -> Result<ExternalMemory> {
        self.0.export()
    }
}

/// What the driver maps, and no link does.
struct Handed(Bytes);

impl Shareable for Handed {
    type Layout = u64;

    fn name(&self) -> &str {
        "handed"
    }

    fn layout(&self) -> u64 {
        64
    }

    fn export(&self) -> Result<ExternalMemory> {
        Err(planted())
    }

    #[allow(unsafe_code)]
    fn driver_maps(&self) -> Option<BorrowedResource> {
        let file = self.0.0.try_clone().unwrap();
        // SAFETY: the simulated driver takes the file, and nothing at the address.
        Some(unsafe { BorrowedResource::new(std::ptr::null_mut(), FakeResource { file, bytes: 64 }) })
    }
}

struct Rig {
    device: Arc<FakeAccelerator>,
    worker: Worker<FakeAccelerator>,
    link: Link<FakeAccelerator>,
    value: Arc<Value>,
}

impl Rig {
    fn new() -> Self {
        let device = Arc::new(FakeAccelerator::new());
        let worker = Worker::start(Arc::clone(&device), WorkerOptions::default()).unwrap();
        let value = Arc::new(Value::default());
        let external = |host: Arc<Value>| ExternalSemaphore::of_host(host);
        let link = worker.link(external(Arc::default()), external(Arc::clone(&value))).unwrap();
        Self { device, worker, link, value }
    }

    fn bytes() -> (Bytes, mpsc::Receiver<()>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64).unwrap();
        let (sender, receiver) = mpsc::channel();
        (Bytes(file, sender), receiver)
    }

    fn mapped(&self) -> (Mapped<FakeAccelerator, Bytes>, mpsc::Receiver<()>) {
        let (bytes, dropped) = Self::bytes();
        (self.worker.register_resource(bytes).unwrap().map(&self.link, 0).unwrap(), dropped)
    }

    fn value(&self) -> u64 {
        self.value.0.load(Ordering::Acquire)
    }
}

fn planted() -> Error {
    Error::Host { what: "a test", cause: "planted".into() }
}

#[test]
fn a_failed_import_gives_the_resource_back() {
    let rig = Rig::new();
    rig.device.fail_next(FakeCall::Import, planted());
    let (bytes, dropped) = Rig::bytes();
    let refused = rig.worker.register_resource(bytes).unwrap_err();
    assert_eq!(refused.to_string(), "bytes stays unregistered: a test failed: planted");
    let registered = rig.worker.register_resource(refused.resource).unwrap();
    assert_eq!((rig.device.imported(), dropped.try_recv()), (64, Err(mpsc::TryRecvError::Empty)));
    assert_eq!(rig.worker.resources(), [("bytes".to_owned(), "registered")]);
    let held = rig.worker.holds_none().unwrap_err().to_string();
    assert!(held.starts_with("still held: bytes (registered);"), "{held}");
    drop(registered.unregister().unwrap());
    assert_eq!(rig.worker.resources(), []);
    assert_eq!((rig.device.imported(), dropped.try_recv()), (0, Ok(())));
    rig.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn an_image_is_a_surface_of_each_level_while_it_is_mapped() {
    let rig = Rig::new();
    let kernel = rig.worker.load(&FakeAccelerator::artifact(Program::Add)).unwrap();
    let buffer = rig.worker.allocate_zeroed(64).unwrap();
    let (bytes, dropped) = Rig::bytes();
    let registered = rig.worker.register_resource(Picture(bytes)).unwrap();
    let mapped = registered.map(&rig.link, 0).unwrap();
    assert_eq!(mapped.layout().extents(1), [3, 1, 2, 4]);
    assert!(matches!(mapped.surface(2), Err(Error::OutOfRange { offset: 2, size: 2, .. })));
    let levels = [0, 1].map(|level| mapped.surface(level).unwrap());
    for level in levels {
        let refused = rig.worker.launch(&kernel, 1, &arguments![level, &buffer, 1u32]).unwrap_err();
        assert!(refused.to_string().contains("a buffer is wanted, a surface was given"), "{refused}");
    }
    drop(mapped.unmap().unwrap().unregister().unwrap());
    assert_eq!((rig.worker.resources(), dropped.try_recv()), (vec![], Ok(())));
    rig.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn a_wait_that_fails_breaks_the_link() {
    for call in [FakeCall::WaitSemaphore, FakeCall::Acquire] {
        let rig = Rig::new();
        rig.device.fail_next(call, planted());
        let (mapped, _dropped) = rig.mapped();
        assert_eq!(rig.worker.synchronize(TIMEOUT), Err(planted()), "{call:?}");
        let registered = mapped.unmap().unwrap();
        rig.worker.synchronize(TIMEOUT).unwrap();
        assert_eq!(rig.value(), registered.ready());
        let refused = registered.map(&rig.link, 1).unwrap_err();
        assert_eq!((&refused.error, refused.state), (&planted(), "registered"));
        drop(refused.resource.unregister().unwrap());
        rig.worker.stop(TIMEOUT).unwrap();
    }
}

#[test]
fn a_signal_that_fails_is_the_hosts() {
    for call in [FakeCall::SignalSemaphore, FakeCall::Release] {
        let rig = Rig::new();
        rig.device.fail_next(call, planted());
        let (mapped, _dropped) = rig.mapped();
        let registered = mapped.unmap().unwrap();
        assert_eq!(rig.worker.synchronize(TIMEOUT), Err(planted()), "{call:?}");
        assert_eq!(rig.value(), registered.ready());
        rig.worker.stop(TIMEOUT).unwrap();
    }
}

#[test]
fn a_lost_device_keeps_nobody_waiting() {
    let rig = Rig::new();
    let ((first, first_dropped), (second, _), (third, third_dropped)) =
        (rig.mapped(), rig.mapped(), rig.mapped());
    rig.worker.synchronize(TIMEOUT).unwrap();
    rig.device.pause();
    let first = first.unmap().unwrap();
    rig.worker.fill(second.buffer(), 1).unwrap();
    rig.device.lose();
    assert!(rig.worker.synchronize(TIMEOUT).unwrap_err().is_lost());
    let second = second.unmap().unwrap();
    assert_eq!((second.ready(), rig.value()), (2, 2), "the host signals what the device does not");
    drop(third);
    assert_eq!(rig.value(), 3);
    assert!(first.unregister().err().unwrap().is_lost());
    assert!(rig.worker.stop(TIMEOUT).unwrap_err().is_lost());
    for dropped in [first_dropped, third_dropped] {
        dropped.recv_timeout(TIMEOUT).unwrap();
    }
    // What is still held comes back.
    drop(second.unregister().unwrap());
}

#[test]
fn what_the_driver_maps_is_handed_to_and_fro() {
    let rig = Rig::new();
    let (bytes, dropped) = Rig::bytes();
    let file = bytes.0.try_clone().unwrap();
    let seen = || {
        let mut seen = [0; 64];
        file.read_exact_at(&mut seen, 0).unwrap();
        seen
    };
    rig.device.fail_next(FakeCall::Import, planted());
    let refused = rig.worker.register_resource(Handed(bytes)).unwrap_err();
    assert_eq!((&refused.error, refused.state), (&planted(), "unregistered"));
    let registered = rig.worker.register_resource(refused.resource).unwrap();

    // By the driver alone, whose refusals change nothing.
    let refused = registered.map(&rig.link, 1).unwrap_err();
    assert!(refused.to_string().contains("handed stays registered: "), "{refused}");
    rig.device.fail_next(FakeCall::Import, planted());
    let refused = refused.resource.map_by_driver().unwrap_err();
    assert_eq!((&refused.error, refused.state), (&planted(), "registered"));
    let mut registered = refused.resource;
    let (shared, _kept) = Rig::bytes();
    let shared = rig.worker.register_resource(shared).unwrap().map_by_driver().unwrap_err();
    assert!(matches!(shared.error, Error::Unsupported { .. }), "{shared}");
    drop(shared.resource.unregister().unwrap());

    for turn in 1..=3 {
        file.write_all_at(&[turn; 32], 0).unwrap();
        let mapped = registered.map_by_driver().unwrap();
        assert_eq!(rig.worker.resources(), [("handed".to_owned(), "mapped")]);
        let mut found = [0; 64];
        rig.worker.read(mapped.buffer(), &mut found).unwrap();
        assert_eq!((found[..32].to_vec(), found[32]), (vec![turn; 32], if turn == 1 { 0 } else { 0x70 }));
        rig.worker.fill(mapped.buffer(), 0x70).unwrap();
        registered = mapped.unmap().unwrap();
        assert_eq!((seen(), registered.ready()), ([0x70; 64], 0), "it is there when unmap returns");
    }

    // A device that does not end what it was given keeps it mapped, with its memory.
    let mapped = registered.map_by_driver().unwrap();
    rig.device.fail_next(FakeCall::Record, planted());
    let refused = mapped.unmap().unwrap_err();
    assert_eq!((&refused.error, refused.state), (&planted(), "mapped"));
    let mapped = refused.resource;
    rig.worker.fill(mapped.buffer(), 0x71).unwrap();
    drop(mapped);
    rig.worker.reset().unwrap();
    assert_eq!((seen(), rig.device.imported(), dropped.try_recv()), ([0x71; 64], 0, Ok(())));
    rig.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn a_mutex_is_acquired_with_one_key_and_released_with_another() {
    let rig = Rig::new();
    let (kind, host) = (SemaphoreKind::D3d11KeyedMutex, Arc::clone(&rig.value));
    let link = rig.worker.link_mutex(ExternalSemaphore { fd: None, kind, host }).unwrap();
    let (bytes, _dropped) = Rig::bytes();
    let mut registered = rig.worker.register_resource(bytes).unwrap();
    for (key, next) in [(0, 1), (1, 2), (2, 3)] {
        assert_eq!((link.promised(), rig.value()), (key, key));
        let mapped = registered.map(&link, key).unwrap();
        registered = mapped.unmap().unwrap();
        rig.worker.synchronize(TIMEOUT).unwrap();
        assert_eq!((registered.ready(), link.promised(), rig.value()), (next, next, next));
    }
    drop(registered.unregister().unwrap());
    rig.worker.stop(TIMEOUT).unwrap();
}
