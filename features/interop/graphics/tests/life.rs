//! The life of resources that graphics and a worker share: when jobs fail, when either side ends, and what is refused.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Outcome, SIZE, TIMEOUT, after, before, check, pixels, same, sums};
use vm_accel::fake::{FakeAccelerator, FakeQueue};
use vm_accel::{
    Accelerator, DeviceInfo, Error, ExternalKind, QueueOptions, Timeline as _, Worker, WorkerOptions,
    arguments,
};
use vm_graphics::{Format, Gpu, GpuOptions};

fn soon() -> Instant {
    Instant::now() + TIMEOUT
}

#[test]
fn a_job_that_fails_in_its_turn_keeps_nobody_waiting() {
    check(|rig| {
        for panics in [false, true] {
            let (graphics, computed) = rig.interop.timelines();
            let turns = (graphics.value()?, computed.value()?);
            let scene = rig.scene(SIZE)?;
            let rendered = rig.render(&scene, 1)?;
            let image = scene.image.map(rig.interop.link(), rendered)?;
            let sums = scene.sums.map(rig.interop.link(), rendered)?;
            let (worker, kernel) = (rig.worker.clone(), rig.kernel.clone());
            let failed = rig.worker.submit_and_wait(soon(), move |_| {
                let [width, height] = image.layout().size.map(u64::from);
                let pixels = image.surface(0)?;
                worker.launch(
                    &kernel,
                    [1, 1, 1],
                    &arguments![pixels, sums.buffer().shaped(&[height, width])?],
                )?;
                assert!(!panics, "planted");
                Err::<(), _>(Error::Cancelled)
            });
            assert!(matches!(failed, Err(Error::Cancelled | Error::Panicked { .. })), "{failed:?}");
            assert!(computed.wait(turns.1 + 2, soon())?, "graphics has both turns");
            // Both sides go on.
            let (image, _) = rig.read(rig.frame(rig.scene(SIZE)?, 2)?)?;
            same("image", &image, &pixels(SIZE, |x, y| after(x, y, 2)));
        }
        Ok(rig)
    });
}

#[test]
fn what_is_registered_when_the_worker_stops_is_graphics_again() {
    check(|rig| {
        let scene = rig.frame(rig.scene(SIZE)?, 1)?;
        let rendered = rig.render(&scene, 2)?;
        let mapped = scene.image.map(rig.interop.link(), rendered)?;
        let (_, dropped) = (rig.scene(SIZE)?, rig.scene([8, 8])?.image);
        drop(dropped);
        rig.worker.stop(TIMEOUT)?;
        let (_, computed) = rig.interop.timelines();
        let promised = computed.value()?;
        let image = mapped.unmap()?;
        assert!(image.ready() > promised, "the turn that was held");
        assert!(computed.wait(image.ready(), soon())?, "it needs no worker to be given back");
        let refused = image.map(rig.interop.link(), 1).map(drop).unwrap_err();
        assert!(refused.to_string().starts_with("image stays registered: "), "{refused}");
        let (image, found) = (refused.resource.unregister()?, scene.sums.unregister()?);
        same("image", &rig.gpu().read_image(&image)?, &pixels(SIZE, |x, y| before(x, y, 2)));
        let mut wanted = sums(SIZE, 1);
        wanted.rotate_left(4);
        same("sums", &rig.gpu().read_buffer(&found)?, &wanted);
        let refused = rig.interop.register(image).map(drop).unwrap_err();
        assert_eq!((&refused.error, refused.state), (&Error::Stopped, "unregistered"));
        Ok(rig)
    });
}

/// Whoever renders may end first, with frames on their way.
#[test]
fn resources_outlive_what_made_them() {
    check(|rig| {
        let gpu =
            Gpu::beside(&**rig.worker.accelerator(), GpuOptions { validate: true, ..rig.gpu().options() })?;
        let (image, buffer) = (gpu.image("image", Format::Rgba8Unorm, SIZE)?, gpu.buffer("buffer", 4096)?);
        for _ in 0..20 {
            let mut frame = gpu.frame()?;
            frame.clear(&image, [0.5; 4]);
            frame.fill(&buffer, 3);
            frame.submit()?;
        }
        let image = rig.worker.register_resource(image)?;
        let buffer = rig.worker.register_resource(buffer)?;
        let messages = gpu.messages();
        drop(gpu);
        drop((image.unregister()?, buffer));
        rig.worker.synchronize(TIMEOUT)?;
        assert_eq!(messages.unwrap_or_default(), [""; 0]);
        Ok(rig)
    });
}

#[test]
fn what_can_not_be_is_refused() {
    check(|rig| {
        let gpu = rig.gpu();
        let refused =
            |error: Error, what: &str| assert!(error.to_string().contains(what), "{error}, not {what}");
        refused(gpu.buffer("none", 0).map(drop).unwrap_err(), "0..0+0");
        refused(gpu.buffer("odd", 7).map(drop).unwrap_err(), "do not lie in");
        refused(gpu.image("none", Format::Rgba8Unorm, [0, 4]).map(drop).unwrap_err(), "0x4 pixels");
        let (small, large) = (gpu.buffer("small", 16)?, gpu.buffer("large", 4096)?);
        let mut frame = gpu.frame()?;
        refused(frame.copy((&small, 0), (&large, 0), 20).unwrap_err(), "16 bytes");
        refused(frame.copy((&large, 4092), (&small, 0), 8).unwrap_err(), "4096 bytes");
        refused(frame.copy((&large, u64::MAX), (&small, 0), 8).unwrap_err(), "4096 bytes");
        refused(frame.copy((&large, 0), (&small, 0), 0).unwrap_err(), "4096 bytes");
        refused(frame.write_buffer(&small, &[0; 15]).unwrap_err(), "same length");
        drop(frame);
        let private = gpu.private_buffer("private", 16)?;
        let unregistered = rig.interop.register(private).map(drop).unwrap_err();
        assert!(unregistered.to_string().starts_with("private stays unregistered: "), "{unregistered}");
        let shared = Gpu::beside(&**rig.worker.accelerator(), GpuOptions { dma_buf: true, ..gpu.options() });
        match shared {
            Ok(gpu) => assert_eq!(gpu.shares(), ExternalKind::DmaBuf),
            Err(error) => refused(error, "shared as dma-buf"),
        }
        // A frame that uses what a worker has had is none to be submitted without waiting for it.
        let scene = rig.frame(rig.scene(SIZE)?, 1)?;
        let mut frame = gpu.frame()?;
        let image = frame.acquire(&scene.image);
        frame.clear(image, [0.0; 4]);
        assert_eq!(frame.submit(), Err(Error::OutOfOrder));
        Ok(rig)
    });
}

#[test]
fn a_reset_lets_go_of_all_and_begins_anew() {
    check(|mut rig| {
        for stops in [false, false, true] {
            let scene = rig.frame(rig.scene(SIZE)?, 1)?;
            let rendered = rig.render(&scene, 2)?;
            let mapped = scene.image.map(rig.interop.link(), rendered)?;
            assert_eq!(
                rig.interop.reset().unwrap_err().to_string(),
                "still held: image (mapped), sums (registered); drop them, or unmap and unregister them, and try again"
            );
            assert_eq!(rig.worker.resources().len(), 2, "a reset that is refused changes nothing");
            drop((mapped, scene.sums, scene.private));
            let cached = rig.worker.allocate(1 << 20)?;
            drop(cached);
            if stops {
                rig.worker.stop(TIMEOUT)?;
            }
            rig.interop.reset()?;
            rig.interop.reset()?;
            assert_eq!(rig.interop.worker().statistics().cached, 0);
            let (graphics, computed) = rig.interop.timelines();
            assert_eq!((graphics.value()?, computed.value()?), (0, 0));
            rig.reload()?;
            let (image, _) = rig.read(rig.frame(rig.scene(SIZE)?, 3)?)?;
            same("image", &image, &pixels(SIZE, |x, y| after(x, y, 3)));
        }
        Ok(rig)
    });
}

/// A frame that waits for a worker's turn, which does not come, ends no wait of the host's but by its deadline.
#[test]
fn waits_have_deadlines() {
    check(|rig| {
        let options = GpuOptions { timeout: Duration::from_millis(50), ..rig.gpu().options() };
        let gpu = Gpu::beside(&**rig.worker.accelerator(), options)?;
        let timeline = gpu.timeline()?;
        assert!(!timeline.wait(1, Instant::now() + Duration::from_millis(10))?);
        let waiter = timeline.clone();
        let late = std::thread::spawn(move || waiter.wait(2, soon()));
        timeline.signal(2)?;
        assert!(late.join().unwrap()?);
        timeline.signal(1)?;
        assert_eq!(timeline.value()?, 2, "it only grows");
        Ok(rig)
    });
}

/// A device with a UUID that no Vulkan device has.
struct Elsewhere(FakeAccelerator);

impl Accelerator for Elsewhere {
    type Queue = FakeQueue;

    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    fn uuid(&self) -> vm_accel::Result<Option<[u8; 16]>> {
        Ok(Some(std::array::from_fn(|at| at as u8)))
    }

    fn open(&self, options: &QueueOptions) -> vm_accel::Result<FakeQueue> {
        self.0.open(options)
    }
}

#[test]
fn another_device_is_none_to_share_with() {
    let result = || -> Outcome<()> {
        let worker = Worker::start(Arc::new(Elsewhere(FakeAccelerator::new())), WorkerOptions::default())?;
        let error = vm_graphics::Interop::open(&worker, GpuOptions::default()).unwrap_err();
        match error {
            Error::Unavailable { library, remedy, .. } => {
                assert_eq!(library, "libvulkan.so.1");
                assert!(remedy.contains("libvulkan1"), "{remedy}");
            }
            error => {
                let text = error.to_string();
                assert!(text.contains("00010203-0405-0607-0809-0a0b0c0d0e0f"), "{text}");
                assert!(text.contains("found: "), "{text}");
            }
        }
        Ok(worker.stop(TIMEOUT)?)
    };
    result().unwrap();
}
