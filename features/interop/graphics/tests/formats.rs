//! Images of each format, as kernels see them, and the conversions of what their bytes stand for.

mod common;

use std::sync::Arc;

use common::{Outcome, Rig, check, same};
use vm_accel::{Element, ExternalKind, Kernel, arguments};
use vm_graphics::{Format, ImageOptions};
use vm_ir::builder::Val;
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Scalar, Type};
use vm_runtime::{AnyAccelerator, JitCompiler};

fn load(rig: &Rig, block: &IRBlock) -> Outcome<Kernel<AnyAccelerator>> {
    let compiled = JitCompiler::new(Arc::clone(rig.worker.accelerator())).compile(block)?;
    Ok(rig.worker.load(compiled.artifact())?)
}

/// The scalar that an image's element is.
fn scalar_of(element: Element) -> Scalar {
    match element {
        Element::U8 => Scalar::I8,
        Element::F16 => Scalar::F16,
        _ => Scalar::F32,
    }
}

/// Takes each number of each pixel from 1, and stores all over the edges too, where nothing is.
fn from_one(format: Format) -> IRBlock {
    let (scalar, lanes) = (scalar_of(format.element()), format.lanes() as u8);
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("from_one").block_size([64, 1, 1]);
    let image = k.view_of("image", ViewType::surface(scalar, 2, lanes, Access::ReadWrite));
    let (x, y) = (k.global_id(Axis::X), k.global_id(Axis::Y) - 1i64);
    let at = || image.at([y, x]);
    if lanes == 1 {
        at().store(one_less(at().load(), scalar));
    } else {
        let pixel = at().load_vector(lanes);
        at().store(
            (0..lanes).fold(pixel, |all, lane| all.with_lane(lane, one_less(pixel.lane(lane), scalar))),
        );
    }
    block
}

/// 1 less a number of a pixel.
fn one_less(number: Val<'_>, scalar: Scalar) -> Val<'_> {
    match scalar {
        Scalar::I8 => (-number.from_unorm() + 1.0f32).to_unorm(scalar),
        Scalar::F16 => (-number.to(Scalar::F32) + 1.0f32).to(scalar),
        _ => -number + 1.0f32,
    }
}

/// Sets each byte of each pixel to a number of its place, through a surface of layers.
fn places() -> IRBlock {
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("places").block_size([64, 1, 1]);
    let image = k.view_of("image", ViewType::surface(Scalar::I8, 3, 4, Access::Write));
    let level = k.scalar("level", Type::I32);
    let (x, y, layer) = (k.global_id(Axis::X), k.global_id(Axis::Y), k.global_id(Axis::Z));
    let [x32, y32, layer32] = [x, y, layer].map(|one| one.to(Scalar::I32));
    let number = x32 + y32 * 256 + layer32 * 65_536 + level * 16_777_216;
    if let Some(bytes) = Type::vector(Scalar::I8, 4) {
        image.at([layer, y, x]).store(number.bitcast(bytes));
    }
    block
}

/// All levels and layers of an image of the GPU's own tiling are reached; a renderer that shares rows says that it has none.
#[test]
fn kernels_see_levels_and_layers() {
    const SIZE: [u32; 2] = [100, 52];
    check(|rig| {
        let options = ImageOptions { levels: 4, layers: Some(3) };
        let image = rig.gpu().image_with("layers", Format::Rgba8Unorm, SIZE, options);
        if rig.gpu().shares() == ExternalKind::HostFd {
            let error = image.map(drop).unwrap_err().to_string();
            assert!(error.contains("levels or layers"), "{error}");
            return Ok(rig);
        }
        let kernel = load(&rig, &places())?;
        let image = rig.interop.register(image?)?;
        let mut frame = rig.gpu().frame()?;
        let target = frame.acquire(&image);
        frame.clear(target, [1.0; 4]);
        let rendered = rig.interop.submit(frame)?;
        let mapped = image.map(rig.interop.link(), rendered)?;
        for level in 0..4u32 {
            // More blocks than there are pixels and layers: what is out of bounds is left alone.
            let given = arguments![mapped.surface(level)?, level];
            rig.worker.launch(&kernel, [2, 52, 4], &given)?;
        }
        assert!(mapped.surface(4).is_err());
        let image = mapped.unmap()?.unregister()?;
        let mut read = Vec::new();
        let mut frame = rig.gpu().frame()?;
        for (level, layer) in (0..4).flat_map(|level| (0..3).map(move |layer| (level, layer))) {
            read.push((level, layer, frame.read_part(&image, level, layer)?));
        }
        frame.submit()?;
        rig.gpu().finish()?;
        for (level, layer, found) in read {
            let [width, height] = SIZE.map(|side| side >> level);
            let at = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
            let wanted: Vec<u8> =
                at.flat_map(|(x, y)| [x as u8, y as u8, layer as u8, level as u8]).collect();
            same(&format!("level {level} of layer {layer}"), &found.bytes()?, &wanted);
        }
        Ok(rig)
    });
}

#[test]
fn kernels_see_each_format() {
    const SIZE: [u32; 2] = [61, 7];
    check(|rig| {
        let f16 = |bits: [u16; 4]| bits.map(u16::to_le_bytes).concat();
        let f32 = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|one| one.to_le_bytes()).collect() };
        for (format, color, pixel) in [
            (Format::Rgba8Unorm, [0.2, 0.4, 0.6, 1.0], vec![204, 153, 102, 0]),
            (Format::Bgra8Unorm, [0.2, 0.4, 0.6, 1.0], vec![102, 153, 204, 0]),
            (Format::R8Unorm, [0.2, 0.4, 0.6, 1.0], vec![204]),
            (Format::Rgba16Float, [0.25, 0.5, -1.0, 1.0], f16([0x3a00, 0x3800, 0x4000, 0])),
            (Format::R32Float, [0.1, 0.5, 0.75, 1.0], f32(&[1.0 - 0.1])),
            (Format::Rgba32Float, [0.25, 0.5, -8.0, 1e9], f32(&[0.75, 0.5, 9.0, 1.0 - 1e9])),
        ] {
            let kernel = load(&rig, &from_one(format))?;
            let name = format.to_string();
            let image = rig.interop.register(rig.gpu().image(&name, format, SIZE)?)?;
            let mut frame = rig.gpu().frame()?;
            let target = frame.acquire(&image);
            frame.clear(target, color);
            let rendered = rig.interop.submit(frame)?;
            let mapped = image.map(rig.interop.link(), rendered)?;
            let grid = [SIZE[0].div_ceil(64), SIZE[1] + 2, 1];
            rig.worker.launch(&kernel, grid, &arguments![mapped.surface(0)?])?;
            let image = mapped.unmap()?.unregister()?;
            same(&name, &rig.gpu().read_image(&image)?, &pixel.repeat((SIZE[0] * SIZE[1]) as usize));
        }
        Ok(rig)
    });
}

#[test]
fn unorm_stands_for_what_vulkan_says() {
    check(|rig| {
        for (scalar, most) in [(Scalar::I8, 255u32), (Scalar::I16, 65_535)] {
            let block = IRBlock::new(GuestAddr(0x1000));
            let k = block.builder();
            k.name("unorm").block_size([64, 1, 1]);
            let floats = k.view("floats", Scalar::F32, 1, Access::ReadWrite);
            let numbers = k.view("numbers", scalar, 1, Access::ReadWrite);
            let i = k.global_id(Axis::X);
            k.if_(i.lt(floats.extent(0)), || {
                let (float, number) = (floats.at([i]).load(), numbers.at([i]).load());
                floats.at([i]).store(number.from_unorm());
                numbers.at([i]).store(float.to_unorm(scalar));
            });
            let kernel = load(&rig, &block)?;

            let mut given =
                vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40, -3.0, 1.0, 1.000_1, 7e9];
            let half = |number: u32| (f64::from(number) + 0.5) / f64::from(most);
            given.extend((0..most).flat_map(|number| {
                [f64::from(number) / f64::from(most), half(number), half(number).next_down()]
                    .map(|one| one as f32)
            }));
            let wanted: Vec<u32> = given
                .iter()
                .map(|float| (float.clamp(0.0, 1.0) * most as f32).round_ties_even() as u32)
                .collect();
            let start: Vec<u32> = (0..given.len() as u32).map(|at| at % (most + 1)).collect();
            let width = scalar.bits() as usize / 8;
            let narrow = |numbers: &[u32]| -> Vec<u8> {
                numbers.iter().flat_map(|number| number.to_le_bytes()[..width].to_vec()).collect()
            };
            let worker = &rig.worker;
            let (floats, numbers) =
                (worker.allocate(4 * given.len() as u64)?, worker.allocate((width * given.len()) as u64)?);
            worker.write(&floats, &given)?;
            worker.write(&numbers, &narrow(&start))?;
            worker.launch(&kernel, given.len().div_ceil(64) as u32, &arguments![&floats, &numbers])?;
            let (mut found, mut told) = (narrow(&start), given.clone());
            worker.read(&numbers, &mut found)?;
            worker.read(&floats, &mut told)?;
            same("numbers", &found, &narrow(&wanted));
            for (float, number) in told.iter().zip(&start) {
                assert_eq!(*float, *number as f32 / most as f32, "{number} of {most}");
            }
        }
        Ok(rig)
    });
}
