//! Renders a frame by Vulkan, has a kernel work on it in place, and writes both as PNG:
//!
//! `cargo run -p vm-graphics --example frame -- DIRECTORY`
//!
//! The kernel runs on the processor, beside Mesa's renderer; with `VM_GRAPHICS_ACCELERATOR=cuda:0` both are on the first NVIDIA GPU.

#[path = "../tests/common/mod.rs"]
mod common;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use common::{Outcome, Rig, after, before, pixels};

const SIZE: [u32; 2] = [640, 360];

fn main() -> Outcome<()> {
    let directory = PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| ".".into()));
    let rig = Rig::new()?;
    println!("{} renders, {:?}", rig.gpu().name(), rig.gpu().shares());
    let scene = rig.scene(SIZE)?;
    println!("{:?}", scene.image.resource());

    let mut frame = rig.gpu().frame()?;
    let image = frame.acquire(&scene.image);
    frame.draw(&rig.pattern, image, 1)?;
    let first = frame.read_image(image)?;
    let rendered = rig.interop.submit(frame)?;
    let mapped = scene.image.map(rig.interop.link(), rendered)?;
    let sums = scene.sums.map(rig.interop.link(), rendered)?;
    rig.launch(&mapped, &sums)?;
    drop(sums);
    let image = mapped.unmap()?.unregister()?;
    let second = rig.gpu().read_image(&image)?;
    drop(image);
    let first = first.bytes()?;

    for (name, found, wanted) in [
        ("before.png", &first, pixels(SIZE, |x, y| before(x, y, 1))),
        ("after.png", &second, pixels(SIZE, |x, y| after(x, y, 1))),
    ] {
        let wrong = found.iter().zip(&wanted).filter(|(found, wanted)| found != wanted).count();
        let path = directory.join(name);
        write(&path, found)?;
        println!("{}: {wrong} of {} bytes are wrong", path.display(), wanted.len());
        if wrong > 0 {
            return Err("the picture is wrong".into());
        }
    }
    rig.stop()?;
    Ok(())
}

fn write(path: &Path, pixels: &[u8]) -> Outcome<()> {
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), SIZE[0], SIZE[1]);
    encoder.set_color(png::ColorType::Rgba);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(pixels)?;
    Ok(())
}
