//! The CUDA devices of this machine.

use vm_accel::{Accelerator, DeviceInfo, Error, MAX_PARAMETER_BYTES, PARAMETER_BYTES, QueueOptions, Result};

use crate::context::{Shared, Traits};
use crate::launcher::CudaLauncher;
use crate::queue::CudaQueue;
use crate::result::{Context, Device, Stream};
use crate::sys::{
    BorrowedAdapter, BorrowedContext, BorrowedStream, CUdevice_attribute as Attribute, Driver, driver,
};

/// One CUDA device.
#[derive(Debug)]
pub struct CudaAccelerator {
    device: Device,
    info: DeviceInfo,
}

/// Every CUDA device that can be used, in CUDA's order, which is not that of the PCI addresses. One that can't is left
/// out with a warning.
///
/// # Errors
/// [`Error::Unavailable`] where there is no driver, with what to install.
pub fn devices() -> Result<Vec<CudaAccelerator>> {
    let count = driver()?.device_count()?;
    Ok((0..count)
        .filter_map(|ordinal| {
            CudaAccelerator::new(ordinal)
                .inspect_err(|error| tracing::warn!(ordinal, %error, "a CUDA device is left out"))
                .ok()
        })
        .collect())
}

/// How many CUDA devices there are.
///
/// # Errors
/// [`Error::Unavailable`] where there is no driver, or no device, with what to do.
pub fn device_count() -> Result<u32> {
    driver()?.device_count()
}

impl CudaAccelerator {
    /// The device with a number in CUDA's order.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where there is no driver, with what to install; [`Error::NoDevice`];
    /// [`Error::Unsupported`] for a device without stream-ordered memory.
    pub fn new(ordinal: u32) -> Result<Self> {
        let driver = driver()?;
        let found = driver.device_count()?;
        if ordinal >= found {
            return Err(Error::NoDevice { wanted: ordinal.to_string(), found });
        }
        let device = driver.device(ordinal)?;
        Ok(Self { device, info: info(driver, device)? })
    }

    /// The device at a PCI address, as in `0000:65:00.0`.
    ///
    /// # Errors
    /// As [`CudaAccelerator::new`].
    pub fn at(address: &str) -> Result<Self> {
        let driver = driver()?;
        let found = driver.device_count()?;
        for ordinal in 0..found {
            let device = driver.device(ordinal)?;
            if device.address(driver)?.eq_ignore_ascii_case(address) {
                return Ok(Self { device, info: info(driver, device)? });
            }
        }
        Err(Error::NoDevice { wanted: format!("at {address}"), found })
    }

    /// The device that an adapter of Windows is.
    ///
    /// # Errors
    /// As [`CudaAccelerator::new`]; [`Error::Unavailable`] elsewhere.
    pub fn of_adapter(adapter: &BorrowedAdapter) -> Result<Self> {
        let driver = driver()?;
        let device = driver.device_of(adapter)?;
        Ok(Self { device, info: info(driver, device)? })
    }

    /// The device's number, as the driver counts those that it shows this process.
    pub fn ordinal(&self) -> u32 {
        self.device.0.cast_unsigned()
    }

    /// A queue on a stream that somebody else owns: what it is given comes in order with what its owner gives the stream, and
    /// launches, fills and copies wait for nothing and copy nothing beside. Without a `context` the stream is one of the
    /// device's primary context, as PyTorch's and the CUDA runtime's are. On whichever thread, the current context is
    /// afterwards what it was before.
    ///
    /// A [`Session`](vm_accel::Session) on it launches kernels with all checks; memory that others own it takes as
    /// [`BorrowedMemory`](vm_accel::sys::BorrowedMemory). Dropping the queue waits for the stream, as its kernels are unloaded then.
    ///
    /// # Errors
    /// [`Error::Host`] for a context of another device; the driver's.
    pub fn borrow(
        &self,
        context: Option<BorrowedContext>,
        stream: BorrowedStream,
        options: &QueueOptions,
    ) -> Result<CudaQueue> {
        self.borrow_by(driver()?, context, stream, options)
    }

    fn borrow_by(
        &self,
        driver: &'static Driver,
        context: Option<BorrowedContext>,
        stream: BorrowedStream,
        options: &QueueOptions,
    ) -> Result<CudaQueue> {
        let context = match context {
            Some(context) => Context::borrow(driver, self.device, &context)?,
            None => Context::retain(driver, self.device)?,
        };
        CudaQueue::new(self.shared(context, options), |shared| Ok(Stream::borrow(&shared.context, &stream)))
    }

    /// Kernels for the streams of a context that somebody else owns; of the device's primary context without one.
    ///
    /// # Errors
    /// [`Error::Host`] for a context of another device; the driver's.
    pub fn launcher(&self, context: Option<BorrowedContext>) -> Result<CudaLauncher> {
        self.launcher_by(driver()?, context)
    }

    fn launcher_by(&self, driver: &'static Driver, context: Option<BorrowedContext>) -> Result<CudaLauncher> {
        Ok(CudaLauncher::new(match context {
            Some(context) => Context::borrow(driver, self.device, &context)?,
            None => Context::retain(driver, self.device)?,
        }))
    }

    fn open_by(&self, driver: &'static Driver, options: &QueueOptions) -> Result<CudaQueue> {
        let context = Context::for_thread(driver, self.device)?;
        CudaQueue::new(self.shared(context, options), |shared| Stream::new(&shared.context))
    }

    fn shared(&self, context: Context, options: &QueueOptions) -> Shared {
        let traits = Traits {
            name: self.info.name.clone(),
            unified: self.info.unified,
            host_registration: self.info.host_registration,
        };
        Shared::new(self.device, traits, context, options)
    }
}

fn info(driver: &Driver, device: Device) -> Result<DeviceInfo> {
    let get = |attribute| device.attribute(driver, attribute);
    let [major, minor] = [
        get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ];
    let name = device.name(driver)?;
    if get(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
        return Err(Error::Unsupported { what: "stream-ordered memory pools".into(), device: name });
    }
    Ok(DeviceInfo {
        name,
        backend: "cuda",
        target: format!("sm_{major}{minor}"),
        address: Some(device.address(driver)?),
        driver: format!("CUDA {}", driver.version()?),
        memory_bytes: device.memory(driver)?,
        compute_units: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        warp_size: get(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        block_threads: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        block: [
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)?,
        ],
        grid: [
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
        ],
        shared_bytes: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        parameter_bytes: parameter_bytes(major, &driver.version()?),
        // Without concurrent access the host faults while any kernel runs.
        unified: get(Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)? != 0,
        host_registration: get(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)? != 0,
        guards: true,
    })
}

/// What a device of a compute capability passes with a driver that knows CUDA up to a version, written as in `13.0`.
fn parameter_bytes(major: u32, cuda: &str) -> u32 {
    let number = |text: &str| text.parse().unwrap_or(0);
    let cuda = cuda.split_once('.').map_or((0, 0), |(major, minor)| (number(major), number(minor)));
    if major >= 7 && cuda >= (12, 1) { MAX_PARAMETER_BYTES } else { PARAMETER_BYTES }
}

impl Accelerator for CudaAccelerator {
    type Queue = CudaQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn uuid(&self) -> Result<Option<[u8; 16]>> {
        self.device.uuid(driver()?).map(Some)
    }

    fn luid(&self) -> Result<Option<[u8; 8]>> {
        self.device.luid(driver()?)
    }

    fn open(&self, options: &QueueOptions) -> Result<CudaQueue> {
        self.open_by(driver()?, options)
    }
}

#[cfg(test)]
mod direct3d;

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::time::Instant;

    use vm_accel::{
        Element, ExternalKind, ExternalMemory, ExternalSemaphore, MemoryKind, Pixels, Queue, Semaphore,
        SemaphoreKind, Timeline,
    };

    use super::*;
    use crate::fake::{calls, context, driver as fake, set_current, stack};
    use crate::sys::CUcontext;

    /// A device of the fake driver.
    pub(super) fn device(driver: &'static Driver, ordinal: u32) -> CudaAccelerator {
        let info = DeviceInfo {
            name: "GPU".into(),
            backend: "cuda",
            target: "sm_90".into(),
            address: None,
            driver: "CUDA 13.0".into(),
            memory_bytes: 1 << 30,
            compute_units: 1,
            warp_size: 32,
            block_threads: 1024,
            block: [1024; 3],
            grid: [65_535; 3],
            shared_bytes: 1 << 16,
            parameter_bytes: 4096,
            unified: false,
            host_registration: true,
            guards: true,
        };
        CudaAccelerator { device: driver.device(ordinal).unwrap(), info }
    }

    #[test]
    #[allow(unsafe_code)]
    fn what_is_borrowed_is_left_as_it_was() {
        let driver = fake();
        let gpu = device(driver, 1);
        let options = QueueOptions::default();
        let (primary, own, foreign) = (context(1, 0), context(1, 1), context(0, 1));
        // SAFETY: the fake driver's handles are numbers.
        let lend = |context| unsafe { BorrowedContext::new(context) };
        // SAFETY: as above.
        let stream = || unsafe { BorrowedStream::new(7 as _) };
        let check = |before: &[CUcontext], borrowed: Option<CUcontext>, pushed: bool, released: bool| {
            set_current(before);
            calls();
            let queue = gpu.borrow_by(driver, borrowed.map(lend), stream(), &options).unwrap();
            assert_eq!(stack(), before);
            calls();
            let event = queue.event(false).unwrap();
            let around = |call: &str| match pushed {
                true => vec!["push".to_owned(), call.to_owned(), "pop".to_owned()],
                false => vec![call.to_owned()],
            };
            assert_eq!(calls(), around("cuEventCreate"), "{before:?}");
            queue.record(&event).unwrap();
            assert_eq!(calls(), around("record on 7"));
            queue.wait_event(&event).unwrap();
            assert_eq!(calls(), around("wait on 7"));
            queue.begin_capture().unwrap();
            assert_eq!(calls(), around("cuStreamBeginCapture_v2"));
            assert!(!queue.is_captured().unwrap());
            // SAFETY: nothing is freed by either.
            let side = unsafe { queue.stream() }.unwrap();
            let memory = queue.allocate(MemoryKind::Device, 256).unwrap();
            calls();
            side.fill(memory.region(), 1).unwrap();
            assert_eq!(calls(), around("fill on 100"));
            queue.free(memory).unwrap();
            drop((event, side));
            let ended = calls();
            assert_eq!(
                ended.iter().filter(|call| *call == "cuStreamDestroy_v2").count(),
                1,
                "its own: {ended:?}"
            );
            drop(queue);
            let ended = calls();
            assert!(!ended.contains(&"cuStreamDestroy_v2".into()), "{ended:?}");
            assert!(ended.contains(&"record on 7".into()), "it waits for what was started: {ended:?}");
            assert!(ended.contains(&"cuMemPoolDestroy".into()), "{ended:?}");
            let release = ended.contains(&"cuDevicePrimaryCtxRelease_v2".into());
            assert_eq!((release, stack()), (released, before.to_vec()), "{ended:?}");
        };
        check(&[], None, true, true);
        check(&[primary], None, false, true);
        check(&[foreign], None, true, true);
        check(&[], Some(own), true, false);
        check(&[primary, own], Some(own), false, false);
        check(&[own, primary], Some(own), true, false);

        set_current(&[primary]);
        let wrong = gpu.borrow_by(driver, Some(lend(foreign)), stream(), &options).map(drop);
        assert!(wrong.unwrap_err().to_string().contains("one of device 0, the accelerator is 1"));
        assert_eq!(stack(), [primary]);
    }

    #[test]
    fn a_queue_of_ones_own_makes_its_context_current_where_there_is_none() {
        let driver = fake();
        let (first, second) = (device(driver, 0), device(driver, 1));
        let options = QueueOptions::default();
        set_current(&[]);
        let left = first.open_by(driver, &options).unwrap();
        let right = second.open_by(driver, &options).unwrap();
        assert_eq!(stack(), [context(0, 0)]);
        let event = right.event(false).unwrap();
        right.record(&event).unwrap();
        left.wait_event(&event).unwrap();
        // Whichever thread has the event ends it in its context.
        let calls = std::thread::spawn(move || {
            drop(event);
            calls()
        });
        assert_eq!(calls.join().unwrap(), ["push", "cuEventDestroy_v2", "pop"]);
        drop(left);
        assert_eq!(stack(), []);
        right.fill(right.allocate(MemoryKind::Device, 1).unwrap().region(), 1).unwrap();
        drop(right);
        assert_eq!(stack(), []);
    }

    pub(super) struct Host;

    impl Timeline for Host {
        fn wait(&self, _: u64, _: Instant) -> Result<bool> {
            Ok(true)
        }

        fn signal(&self, _: u64) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_other_apis_share_is_imported_and_let_go_of_in_order() {
        let driver = fake();
        set_current(&[]);
        let queue = device(driver, 0).open_by(driver, &QueueOptions::default()).unwrap();
        let fd = || OwnedFd::from(tempfile::tempfile().unwrap());
        let semaphore = |fd| ExternalSemaphore { fd, kind: SemaphoreKind::Timeline, host: Arc::new(Host) };
        let memory = |kind, [allocation, offset, bytes]: [u64; 3], dedicated| {
            queue.import_memory(ExternalMemory { fd: fd(), kind, allocation, offset, bytes, dedicated })
        };
        calls();
        let first = memory(ExternalKind::OpaqueFd, [4096, 256, 1024], true).unwrap();
        assert_eq!((first.kind(), first.bytes()), (MemoryKind::External, 1024));
        assert_eq!(calls(), ["import 4096 bytes as 1, flags 1", "map 1024 bytes from 256"]);
        let second = memory(ExternalKind::DmaBuf, [64, 0, 64], true).unwrap();
        assert_eq!(calls(), ["import 64 bytes as 9, flags 0", "map 64 bytes from 0"]);
        let refused = [
            memory(ExternalKind::HostFd, [64, 0, 64], false).unwrap_err(),
            memory(ExternalKind::OpaqueFd, [64, 1, 64], false).unwrap_err(),
            queue.import_semaphore(semaphore(None)).unwrap_err(),
        ];
        let words = ["shared as host-fd", "bytes 1..1+64 do not lie in", "semaphores without a descriptor"];
        for (error, word) in refused.iter().zip(words) {
            assert!(error.to_string().contains(word), "{error}");
        }
        assert_eq!(calls(), [""; 0]);

        let pixels = Pixels {
            element: Element::U8,
            lanes: 4,
            size: [64, 16],
            layers: Some(3),
            levels: 2,
            pitch: None,
        };
        let image = |kind| {
            let (allocation, offset, bytes) = (8192, 0, 8192);
            queue.import_image(
                ExternalMemory { fd: fd(), kind, allocation, offset, bytes, dedicated: true },
                &pixels,
            )
        };
        assert!(image(ExternalKind::HostFd).unwrap_err().to_string().contains("shared as host-fd"));
        let levels = image(ExternalKind::OpaqueFd).unwrap();
        let [import, map, rest @ ..] = &calls()[..] else { panic!("nothing was imported") };
        assert_eq!(import, "import 8192 bytes as 1, flags 1");
        assert_eq!(map, "map 2 levels of [64, 16, 3] from 0, 4 of 1, flags 0x23");
        let [zero, first_surface, one, second_surface] = rest else { panic!("{rest:?}") };
        assert_eq!((&**zero, &**one), ("level 0", "level 1"));
        assert!(first_surface.starts_with("surface of ") && first_surface != second_surface, "{rest:?}");
        let described: Vec<_> = levels.iter().map(|level| (level.kind(), level.bytes())).collect();
        assert_eq!(described, [(MemoryKind::Surface, 0); 2]);
        for level in levels {
            queue.free(level).unwrap();
        }
        let let_go = calls();
        let let_go: Vec<_> =
            let_go.iter().filter(|call| call.contains("Destroy") && !call.contains("Event")).collect();
        let order = [
            "cuSurfObjectDestroy",
            "cuSurfObjectDestroy",
            "cuMipmappedArrayDestroy",
            "cuDestroyExternalMemory",
        ];
        assert_eq!(let_go, order);
        let kept = image(ExternalKind::OpaqueFd).unwrap();
        calls();

        let semaphore = queue.import_semaphore(semaphore(Some(fd()))).unwrap();
        queue.wait_semaphore(&semaphore, 7).unwrap();
        queue.signal_semaphore(&semaphore, u64::MAX).unwrap();
        let turns = ["wait for 7 of 1 on 100", "signal 18446744073709551615 of 1 on 100"];
        assert_eq!(calls(), [&["import a semaphore as 9"], &turns[..]].concat());
        let other = Semaphore::new(0);
        assert_eq!(queue.wait_semaphore(&other, 1), Err(Error::WrongWorker { what: "semaphore" }));

        queue.free(first).unwrap();
        let freed = calls();
        assert_eq!(freed[freed.len() - 2..], ["cuMemFree_v2", "cuDestroyExternalMemory"], "{freed:?}");
        assert_eq!(freed.iter().filter(|call| *call == "cuEventQuery").count(), 1, "it waits: {freed:?}");
        drop((semaphore, second, kept));
        assert_eq!(calls(), ["cuDestroyExternalSemaphore"]);
        drop(queue);
        let ended = calls();
        let place = |call: &str| ended.iter().position(|other| other == call);
        assert!(place("cuMemFree_v2") < place("cuDestroyExternalMemory"), "{ended:?}");
        assert!(place("cuDestroyExternalMemory") < place("cuStreamDestroy_v2"), "{ended:?}");
        assert!(place("cuMemFree_v2").is_some(), "{ended:?}");
        assert!(place("cuSurfObjectDestroy") < place("cuMipmappedArrayDestroy"), "{ended:?}");
        assert!(place("cuSurfObjectDestroy").is_some(), "{ended:?}");
    }

    #[test]
    fn how_many_bytes_of_parameters_pass() {
        let check = |major, cuda, bytes| assert_eq!(parameter_bytes(major, cuda), bytes, "{major} {cuda}");
        check(9, "13.0", 32_764);
        check(7, "12.1", 32_764);
        check(9, "12.0", 4096);
        check(6, "12.8", 4096);
        check(9, "nonsense", 4096);
    }
}
