//! What tests, the example and the figures share: a worker beside a renderer of the same device, one kernel, and what the host says
//! that comes of both.
#![allow(dead_code)]

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use vm_accel::{Kernel, Mapped, Registered, Shareable, Worker, WorkerOptions, arguments};
use vm_graphics::{Buffer, Format, Frame, Gpu, GpuOptions, Image, Interop, Pattern};
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Scalar, Type};
use vm_runtime::{AnyAccelerator, JitCompiler};

pub(crate) type Outcome<T> = Result<T, Box<dyn StdError>>;

/// How long the end of a worker may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// No power of two, and rows that are padded where rows are padded at all.
pub(crate) const SIZE: [u32; 2] = [333, 77];

/// Which accelerator: `cpu`, or what `VM_GRAPHICS_ACCELERATOR` names, as `cuda:0`.
pub(crate) fn spec() -> String {
    std::env::var("VM_GRAPHICS_ACCELERATOR").unwrap_or_else(|_| "cpu".into())
}

/// A worker and graphics, and the kernel.
pub(crate) struct Rig {
    pub(crate) interop: Interop<AnyAccelerator>,
    pub(crate) worker: Worker<AnyAccelerator>,
    pub(crate) kernel: Kernel<AnyAccelerator>,
    pub(crate) pattern: Pattern,
}

/// What both sides use.
pub(crate) struct Scene {
    pub(crate) image: Registered<AnyAccelerator, Image>,
    pub(crate) sums: Registered<AnyAccelerator, Buffer>,
    pub(crate) private: Buffer,
}

/// Inverts the colors of an image, and adds each pixel to a sum that depends on all before it. The image is a surface, or a copy of
/// its pixels.
pub(crate) fn kernel(surface: bool) -> IRBlock {
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("negative").block_size([64, 1, 1]);
    let image = match surface {
        true => k.view_of("image", ViewType::surface(Scalar::I8, 2, 4, Access::ReadWrite)),
        false => k.view("image", Scalar::I32, 2, Access::ReadWrite),
    };
    let sums = k.view("sums", Scalar::I32, 2, Access::ReadWrite);
    let (x, y) = (k.global_id(Axis::X), k.global_id(Axis::Y));
    k.if_(x.lt(image.extent(1)), || {
        let at = image.at([y, x]);
        let pixel = if surface { at.load_vector(4).bitcast(Type::I32) } else { at.load() };
        let sum = sums.at([y, x]).load();
        sums.at([y, x]).store(sum * 31 + pixel);
        let inverted = pixel ^ 0x00ff_ffff;
        let bytes = Type::vector(Scalar::I8, 4).filter(|_| surface);
        image.at([y, x]).store(bytes.map_or(inverted, |bytes| inverted.bitcast(bytes)));
    });
    block
}

impl Rig {
    /// With the validation layer, where it is installed.
    pub(crate) fn new() -> Outcome<Self> {
        Self::with(GpuOptions { validate: true, ..options() })
    }

    pub(crate) fn with(options: GpuOptions) -> Outcome<Self> {
        let accelerator = Arc::new(AnyAccelerator::open(&spec())?);
        let worker = Worker::start(Arc::clone(&accelerator), WorkerOptions::default())?;
        let interop = Interop::open(&worker, options)?;
        let compiled = JitCompiler::new(accelerator).compile(&kernel(true))?;
        let kernel = worker.load(compiled.artifact())?;
        let pattern = interop.gpu().pattern(Format::Rgba8Unorm)?;
        Ok(Self { interop, worker, kernel, pattern })
    }

    /// The kernel again, for a worker that is new.
    pub(crate) fn reload(&mut self) -> Outcome<()> {
        self.worker = self.interop.worker().clone();
        let compiled = JitCompiler::new(Arc::clone(self.worker.accelerator())).compile(&kernel(true))?;
        self.kernel = self.worker.load(compiled.artifact())?;
        self.pattern = self.interop.gpu().pattern(Format::Rgba8Unorm)?;
        Ok(())
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        self.interop.gpu()
    }

    /// An image and a buffer that both sides use, the sums all 0.
    pub(crate) fn scene(&self, [width, height]: [u32; 2]) -> Outcome<Scene> {
        let (image, sums, private) = self.resources([width, height])?;
        Ok(Scene { image: self.interop.register(image)?, sums: self.interop.register(sums)?, private })
    }

    /// The same, not registered.
    pub(crate) fn resources(&self, [width, height]: [u32; 2]) -> Outcome<(Image, Buffer, Buffer)> {
        let bytes = 4 * u64::from(width) * u64::from(height);
        let image = self.gpu().image("image", Format::Rgba8Unorm, [width, height])?;
        let (sums, private) =
            (self.gpu().buffer("sums", bytes)?, self.gpu().private_buffer("private", bytes)?);
        let mut frame = self.gpu().frame()?;
        frame.fill(&sums, 0);
        frame.submit()?;
        self.gpu().finish()?;
        Ok((image, sums, private))
    }

    /// Records the frame with a number, which moves each sum to the place before it.
    pub(crate) fn record<'a>(
        &'a self,
        frame: &mut Frame<'a>,
        (image, sums, private): (&'a Image, &'a Buffer, &'a Buffer),
        number: u32,
    ) -> Outcome<()> {
        let bytes = sums.bytes();
        frame.draw(&self.pattern, image, number)?;
        frame.copy((sums, 0), (private, 0), bytes)?;
        frame.copy((private, 4), (sums, 0), bytes - 4)?;
        frame.copy((private, 0), (sums, bytes - 4), 4)?;
        Ok(())
    }

    /// Submits the frame with a number.
    pub(crate) fn render(&self, scene: &Scene, number: u32) -> Outcome<u64> {
        let mut frame = self.gpu().frame()?;
        let (image, sums) = (frame.acquire(&scene.image), frame.acquire(&scene.sums));
        self.record(&mut frame, (image, sums, &scene.private), number)?;
        Ok(self.interop.submit(frame)?)
    }

    pub(crate) fn launch(
        &self,
        image: &Mapped<AnyAccelerator, Image>,
        sums: &Mapped<AnyAccelerator, Buffer>,
    ) -> Outcome<()> {
        let [width, height] = image.layout().size;
        let sums = sums.buffer().shaped(&[height.into(), width.into()])?;
        let given = arguments![image.surface(0)?, sums];
        Ok(self.worker.launch(&self.kernel, [width.div_ceil(64), height, 1], &given)?)
    }

    /// One frame of both sides.
    pub(crate) fn frame(&self, scene: Scene, number: u32) -> Outcome<Scene> {
        let rendered = self.render(&scene, number)?;
        let image = scene.image.map(self.interop.link(), rendered)?;
        let sums = scene.sums.map(self.interop.link(), rendered)?;
        self.launch(&image, &sums)?;
        Ok(Scene { image: image.unmap()?, sums: sums.unmap()?, private: scene.private })
    }

    /// What graphics sees of a scene, which is unregistered for it.
    pub(crate) fn read(&self, scene: Scene) -> Outcome<(Vec<u8>, Vec<u8>)> {
        let (image, sums) = (scene.image.unregister()?, scene.sums.unregister()?);
        Ok((self.gpu().read_image(&image)?, self.gpu().read_buffer(&sums)?))
    }

    /// Ends the worker and says what the validation layer said.
    pub(crate) fn stop(self) -> Outcome<Option<Vec<String>>> {
        let Self { interop, worker, kernel, pattern } = self;
        drop((kernel, pattern));
        worker.stop(TIMEOUT)?;
        interop.gpu().finish()?;
        Ok(interop.gpu().messages())
    }
}

/// A pixel as kernels see it, before and after the kernel.
pub(crate) fn before(x: u32, y: u32, number: u32) -> u32 {
    u32::from_le_bytes(Pattern::pixel(x, y, number))
}

pub(crate) fn after(x: u32, y: u32, number: u32) -> u32 {
    before(x, y, number) ^ 0x00ff_ffff
}

/// Bytes of all pixels.
pub(crate) fn pixels([width, height]: [u32; 2], pixel: impl Fn(u32, u32) -> u32) -> Vec<u8> {
    let at = |y| (0..width).map(move |x| (x, y));
    (0..height).flat_map(at).flat_map(|(x, y)| pixel(x, y).to_le_bytes()).collect()
}

/// The sums after the frames 1 to `count`.
pub(crate) fn sums([width, height]: [u32; 2], count: u32) -> Vec<u8> {
    let mut sums = vec![0u32; (width * height) as usize];
    for number in 1..=count {
        sums.rotate_left(1);
        let at = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
        for (sum, (x, y)) in sums.iter_mut().zip(at) {
            *sum = sum.wrapping_mul(31).wrapping_add(before(x, y, number));
        }
    }
    sums.iter().flat_map(|sum| sum.to_le_bytes()).collect()
}

/// Asserts that bytes are as wanted, and says where they are not.
pub(crate) fn same(what: &str, found: &[u8], wanted: &[u8]) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    if let Some(at) = (0..found.len()).find(|at| found[*at] != wanted[*at]) {
        let wrong = found.iter().zip(wanted).filter(|(found, wanted)| found != wanted).count();
        panic!(
            "{what}: byte {at} is {}, not {}; {wrong} of {} are wrong",
            found[at],
            wanted[at],
            found.len()
        );
    }
}

/// How tests open the device that renders.
pub(crate) fn options() -> GpuOptions {
    GpuOptions { timeout: TIMEOUT, ..GpuOptions::default() }
}

/// Runs a test, if there is what it needs, and checks that the validation layer had nothing to say.
pub(crate) fn check(test: impl Fn(Rig) -> Outcome<Rig>) {
    let named = std::env::var_os("VM_GRAPHICS_ACCELERATOR").is_some();
    let rig = match Rig::new() {
        Ok(rig) => rig,
        Err(error) if !named && is_missing(&*error) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let rig = test(rig).unwrap_or_else(|error| panic!("{error}"));
    match rig.stop().unwrap_or_else(|error| panic!("{error}")) {
        Some(messages) => assert!(messages.is_empty(), "{}", messages.join("\n")),
        None => println!("the validation layer is not installed"),
    }
}

/// Whether Vulkan is not installed here, or has no renderer on the processor.
fn is_missing(error: &(dyn StdError + 'static)) -> bool {
    matches!(
        error.downcast_ref(),
        Some(
            vm_accel::Error::Unavailable { .. }
                | vm_accel::Error::Host { what: "choosing a Vulkan device", .. }
        )
    )
}

/// That a resource is what it was.
pub(crate) fn named(resource: &impl Shareable, name: &str) {
    assert_eq!(resource.name(), name);
}
