//! What the driver is asked for Direct3D 11's sake, on a driver that notes it. No test has run on Windows.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vm_accel::{
    DriverResource, Element, ExternalKind, ExternalMemory, ExternalSemaphore, MemoryKind, Pixels, Queue,
    SemaphoreKind,
};

use super::tests::{Host, device};
use super::*;
use crate::fake::{adapter, calls, driver as fake, resource, set_current};

fn open() -> CudaQueue {
    let driver = fake();
    set_current(&[]);
    let options = QueueOptions { timeout: Duration::from_millis(1500), ..QueueOptions::default() };
    let queue = device(driver, 0).open_by(driver, &options).unwrap();
    calls();
    queue
}

fn fd() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

const PIXELS: Pixels =
    Pixels { element: Element::F16, lanes: 4, size: [64, 16], layers: None, levels: 2, pitch: None };

/// Dropped with what it keeps.
struct Keeper(Arc<AtomicBool>);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn registered(
    queue: &CudaQueue,
    address: usize,
    pixels: Option<Pixels>,
) -> (DriverResource, Arc<AtomicBool>) {
    let dropped = Arc::new(AtomicBool::new(false));
    let keeper = Keeper(Arc::clone(&dropped));
    (queue.register_resource(resource(address, keeper), pixels.as_ref()).unwrap(), dropped)
}

#[test]
fn a_shared_resource_is_one_of_its_own() {
    let queue = open();
    let memory = ExternalMemory {
        fd: fd(),
        kind: ExternalKind::D3d11Resource,
        allocation: 8192,
        offset: 0,
        bytes: 8192,
        dedicated: false,
    };
    let levels = queue.import_image(memory, &PIXELS).unwrap();
    let found = calls();
    assert_eq!(found[0], "import 8192 bytes as 6, flags 1", "{found:?}");
    assert_eq!(found[1], "map 2 levels of [64, 16, 0] from 0, 4 of 16, flags 0x22");
    assert_eq!(levels.len(), 2);
}

#[test]
fn a_fence_has_values_and_a_mutex_keys() {
    let queue = open();
    let import = |kind| {
        let external = ExternalSemaphore { fd: Some(fd()), kind, host: Arc::new(Host) };
        queue.import_semaphore(external).unwrap()
    };
    let fence = import(SemaphoreKind::D3d11Fence);
    queue.wait_semaphore(&fence, 7).unwrap();
    queue.signal_semaphore(&fence, 8).unwrap();
    assert_eq!(calls(), ["import a semaphore as 5", "wait for 7 of 1 on 100", "signal 8 of 1 on 100"]);

    let mutex = import(SemaphoreKind::D3d11KeyedMutex);
    queue.wait_semaphore(&mutex, 3).unwrap();
    queue.signal_semaphore(&mutex, 4).unwrap();
    assert_eq!(calls(), ["import a semaphore as 7", "acquire 3 within 1500 ms", "release 4"]);
    let late = queue.wait_semaphore(&mutex, u64::MAX).unwrap_err();
    assert!(matches!(&late, Error::Deadline { what } if what.contains("d3d11-keyed-mutex")), "{late}");
}

#[test]
fn what_the_driver_maps_is_unmapped_when_its_memory_is_freed() {
    let queue = open();
    let (buffer, dropped) = registered(&queue, 0x100, None);
    for _ in 0..2 {
        let memory = queue.map_resource(&buffer).unwrap().pop().unwrap();
        assert_eq!((memory.kind(), memory.bytes()), (MemoryKind::External, 4096));
        calls();
        queue.free(memory).unwrap();
        let freed = calls();
        assert_eq!(freed.last().map(|last| &**last), Some("unmap"), "{freed:?}");
        assert!(freed.contains(&"cuEventQuery".into()), "behind what used it: {freed:?}");
    }
    assert!(!dropped.load(Ordering::Acquire));
    drop(buffer);
    assert_eq!((calls(), dropped.load(Ordering::Acquire)), (vec!["unregister".to_owned()], true));

    for (layers, levels) in [
        (None, &["level 0 of layer 0", "level 1 of layer 0"][..]),
        (Some(3), &["all levels", "level 0", "all levels", "level 1"]),
    ] {
        let (image, _) = registered(&queue, 0x200, Some(Pixels { layers, ..PIXELS }));
        let surfaces = queue.map_resource(&image).unwrap();
        let found: Vec<_> = calls().into_iter().filter(|call| !call.starts_with("surface of")).collect();
        assert_eq!(found, [&["register 0x200, flags 4", "map on 100"], levels].concat());
        drop(image);
        assert!(!calls().contains(&"unregister".to_owned()), "it is mapped");
        surfaces.into_iter().for_each(|surface| queue.free(surface).unwrap());
        let freed = calls();
        let place = |call: &str| freed.iter().rposition(|other| other == call).unwrap();
        assert!(place("cuSurfObjectDestroy") < place("unmap") && place("unmap") < place("unregister"));
    }

    let (refused, _) = registered(&queue, 0xbad, None);
    calls();
    assert!(matches!(queue.map_resource(&refused), Err(Error::Driver { code: 208, .. })));
    assert!(!calls().contains(&"unmap".to_owned()), "nothing was mapped");
    let foreign = DriverResource::new(0);
    assert!(matches!(queue.map_resource(&foreign), Err(Error::WrongWorker { what: "resource" })));
}

#[test]
fn windows_numbers_and_adapters_name_a_device() {
    let driver = fake();
    assert_eq!(device(driver, 3).device.luid(driver), Ok(Some([3; 8])));
    let adapter = adapter(2);
    assert_eq!(driver.device_of(&adapter).unwrap().0, 2);
    let elsewhere = Driver::fake();
    assert_eq!(driver.device(0).unwrap().luid(&elsewhere), Ok(None));
    let lacks = elsewhere.device_of(&adapter).unwrap_err().to_string();
    assert!(lacks.contains("it has no cuD3D11GetDevice"), "{lacks}");
}
