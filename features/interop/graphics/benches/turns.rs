//! What turns between graphics and a worker cost:
//!
//! `cargo bench -p vm-graphics --bench turns -- [WIDTH HEIGHT FRAMES]`
//!
//! On the processor beside Mesa's renderer; with `VM_GRAPHICS_ACCELERATOR=cuda:0` on the first NVIDIA GPU. The validation layer does
//! not watch. Frames that are counted are checked.

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Outcome, Rig, TIMEOUT, kernel, same, sums};
use vm_accel::{Accelerator as _, arguments};
use vm_graphics::Format;
use vm_runtime::JitCompiler;

/// How often each figure is taken.
const ROUNDS: u32 = 5;

struct Bench {
    rig: Rig,
    size: [u32; 2],
    frames: u32,
}

fn main() -> Outcome<()> {
    let numbers: Vec<u32> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let (size, frames) = match numbers[..] {
        [width, height, frames] => ([width, height], frames.max(1)),
        _ => ([256, 256], 100),
    };
    let bench = Bench { rig: Rig::with(common::options())?, size, frames };
    let (renders, computes) = (bench.rig.gpu().name(), &bench.rig.worker.accelerator().info().name);
    println!(
        "{renders} renders, {computes} computes: {}x{}, {frames} frames, median of {ROUNDS}",
        size[0], size[1]
    );
    let (alone, kernel) = (bench.alone()?, bench.kernel()?);
    let (both, copied, empty) = (bench.both()?, bench.copied()?, bench.empty()?);
    for (what, time) in [
        ("Vulkan alone", alone),
        ("the kernel alone", kernel),
        ("both, in place", both),
        ("both, copied through the host", copied),
    ] {
        println!("{what:<32} {:>10.1} us {:>10.0} frames/s", micros(time), 1.0 / time.as_secs_f64());
    }
    println!(
        "{:<32} {:>10.1} us",
        "in place, beyond both alone",
        micros(both) - micros(alone) - micros(kernel)
    );
    println!("{:<32} {:>10.1} us", "turns with nothing in them", micros(empty));
    bench.steps()?;
    bench.rig.stop()?;
    Ok(())
}

fn micros(time: Duration) -> f64 {
    1e6 * time.as_secs_f64()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

impl Bench {
    /// The time of a frame, of `round` for all frames, given the number of the first.
    fn time(&self, mut round: impl FnMut(u32) -> Outcome<()>) -> Outcome<Duration> {
        let mut times = Vec::new();
        for index in 0..ROUNDS {
            let start = Instant::now();
            round(index * self.frames + 1)?;
            times.push(start.elapsed() / self.frames);
        }
        Ok(median(times))
    }

    fn alone(&self) -> Outcome<Duration> {
        let (image, sums, private) = self.rig.resources(self.size)?;
        self.time(|first| {
            for number in first..first + self.frames {
                let mut frame = self.rig.gpu().frame()?;
                self.rig.record(&mut frame, (&image, &sums, &private), number)?;
                frame.submit()?;
            }
            Ok(self.rig.gpu().finish()?)
        })
    }

    fn kernel(&self) -> Outcome<Duration> {
        let (scene, link) = (self.rig.scene(self.size)?, self.rig.interop.link());
        let rendered = self.rig.render(&scene, 1)?;
        let (image, sums) = (scene.image.map(link, rendered)?, scene.sums.map(link, rendered)?);
        self.time(|_| {
            for _ in 0..self.frames {
                self.rig.launch(&image, &sums)?;
            }
            Ok(self.rig.worker.synchronize(TIMEOUT)?)
        })
    }

    fn both(&self) -> Outcome<Duration> {
        let mut scene = Some(self.rig.scene(self.size)?);
        let time = self.time(|first| {
            for number in first..first + self.frames {
                let Some(before) = scene.take() else { return Err("the scene is lost".into()) };
                scene = Some(self.rig.frame(before, number)?);
            }
            Ok(self.rig.worker.synchronize(TIMEOUT)?)
        })?;
        if let Some(scene) = scene {
            same("sums", &self.rig.read(scene)?.1, &sums(self.size, ROUNDS * self.frames));
        }
        Ok(time)
    }

    /// Turns in which neither side does anything: what it takes the device to go from one to the other and back.
    fn empty(&self) -> Outcome<Duration> {
        let mut sums = Some(self.rig.scene(self.size)?.sums);
        self.time(|_| {
            for _ in 0..self.frames {
                let Some(before) = sums.take() else { return Err("the buffer is lost".into()) };
                let mut frame = self.rig.gpu().frame()?;
                frame.acquire(&before);
                let rendered = self.rig.interop.submit(frame)?;
                sums = Some(before.map(self.rig.interop.link(), rendered)?.unmap()?);
            }
            Ok(self.rig.worker.synchronize(TIMEOUT)?)
        })
    }

    /// As it is without interop: what both use is copied to the host and from there, and each waits for the other.
    fn copied(&self) -> Outcome<Duration> {
        let [width, height] = self.size;
        let (extents, bytes) =
            ([u64::from(height), u64::from(width)], 4 * u64::from(width) * u64::from(height));
        let (worker, gpu) = (&self.rig.worker, self.rig.gpu());
        let compiled = JitCompiler::new(Arc::clone(worker.accelerator())).compile(&kernel(false))?;
        let kernel = worker.load(compiled.artifact())?;
        let (image, buffer, private) = self.rig.resources(self.size)?;
        let (pixels, counts) = (worker.allocate(bytes)?, worker.allocate(bytes)?);
        let mut found = vec![0u8; bytes as usize];
        let time = self.time(|first| {
            for number in first..first + self.frames {
                let mut frame = gpu.frame()?;
                self.rig.record(&mut frame, (&image, &buffer, &private), number)?;
                let (drawn, moved) = (frame.read_image(&image)?, frame.read_buffer(&buffer)?);
                frame.submit()?;
                gpu.finish()?;
                worker.write(&pixels, &drawn.bytes()?)?;
                worker.write(&counts, &moved.bytes()?)?;
                let given = arguments![pixels.shaped(&extents)?, counts.shaped(&extents)?];
                worker.launch(&kernel, [width.div_ceil(64), height, 1], &given)?;
                let mut frame = gpu.frame()?;
                worker.read(&pixels, &mut found)?;
                frame.write_image(&image, &found)?;
                worker.read(&counts, &mut found)?;
                frame.write_buffer(&buffer, &found)?;
                frame.submit()?;
            }
            Ok(gpu.finish()?)
        })?;
        same("sums", &gpu.read_buffer(&buffer)?, &sums(self.size, ROUNDS * self.frames));
        Ok(time)
    }

    /// What each step costs the thread that takes it.
    fn steps(&self) -> Outcome<()> {
        let (mut register, mut map, mut unmap, mut unregister) = (vec![], vec![], vec![], vec![]);
        let interop = &self.rig.interop;
        let mut image = self.rig.gpu().image("steps", Format::Rgba8Unorm, self.size)?;
        for _ in 0..self.frames.min(200) {
            let start = Instant::now();
            let registered = interop.register(image)?;
            register.push(start.elapsed());
            let mut frame = self.rig.gpu().frame()?;
            let target = frame.acquire(&registered);
            frame.clear(target, [0.0; 4]);
            let rendered = interop.submit(frame)?;
            let start = Instant::now();
            let mapped = registered.map(interop.link(), rendered)?;
            map.push(start.elapsed());
            let start = Instant::now();
            let registered = mapped.unmap()?;
            unmap.push(start.elapsed());
            self.rig.worker.synchronize(TIMEOUT)?;
            let start = Instant::now();
            image = registered.unregister()?;
            unregister.push(start.elapsed());
        }
        for (what, times) in
            [("register", register), ("map", map), ("unmap", unmap), ("unregister", unregister)]
        {
            println!("{what:<32} {:>10.1} us", micros(median(times)));
        }
        Ok(())
    }
}
