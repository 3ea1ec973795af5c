//! Images of each format, as kernels see them, and the conversions of what their bytes stand for.

mod common;

use std::sync::Arc;

use common::{Outcome, Rig, check, same};
use vm_accel::{Element, Kernel, arguments};
use vm_graphics::Format;
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Scalar};
use vm_runtime::{AnyAccelerator, JitCompiler};

fn load(rig: &Rig, block: &IRBlock) -> Outcome<Kernel<AnyAccelerator>> {
    let compiled = JitCompiler::new(Arc::clone(rig.worker.accelerator())).compile(block)?;
    Ok(rig.worker.load(compiled.artifact())?)
}

/// Takes each number of each pixel from 1.
fn from_one(element: Element) -> IRBlock {
    let scalar = match element {
        Element::U8 => Scalar::I8,
        Element::F16 => Scalar::F16,
        _ => Scalar::F32,
    };
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("from_one").block_size([64, 1, 1]);
    let image = k.view("image", scalar, 3, Access::ReadWrite);
    let (x, y, lane) = (k.global_id(Axis::X), k.global_id(Axis::Y), k.global_id(Axis::Z));
    k.if_(x.lt(image.extent(1)), || {
        let number = image.at([y, x, lane]).load();
        image.at([y, x, lane]).store(match element {
            Element::U8 => (-number.from_unorm() + 1.0f32).to_unorm(scalar),
            _ => (-number.to(Scalar::F32) + 1.0f32).to(scalar),
        });
    });
    block
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
            let kernel = load(&rig, &from_one(format.element()))?;
            let name = format.to_string();
            let image = rig.interop.register(rig.gpu().image(&name, format, SIZE)?)?;
            let mut frame = rig.gpu().frame()?;
            let target = frame.acquire(&image);
            frame.clear(target, color);
            let rendered = rig.interop.submit(frame)?;
            let mapped = image.map(rig.interop.link(), rendered)?;
            let grid = [SIZE[0].div_ceil(64), SIZE[1], format.lanes()];
            rig.worker.launch(&kernel, grid, &arguments![mapped.layout().lanes(mapped.buffer())?])?;
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
