//! Graphics and a worker take turns with an image and a buffer: every frame of both sides shows in what comes out.

mod common;

use common::{SIZE, after, before, check, pixels, same, sums};

#[test]
fn one_frame() {
    check(|rig| {
        let scene = rig.frame(rig.scene(SIZE)?, 1)?;
        let (image, found) = rig.read(scene)?;
        same("image", &image, &pixels(SIZE, |x, y| after(x, y, 1)));
        same("sums", &found, &sums(SIZE, 1));
        Ok(rig)
    });
}

#[test]
fn before_and_after_the_kernel() {
    check(|rig| {
        let scene = rig.scene(SIZE)?;
        let mut frame = rig.gpu().frame()?;
        let image = frame.acquire(&scene.image);
        frame.draw(&rig.pattern, image, 9)?;
        let first = frame.read_image(image)?;
        let rendered = rig.interop.submit(frame)?;
        let image = scene.image.map(rig.interop.link(), rendered)?;
        let sums = scene.sums.map(rig.interop.link(), rendered)?;
        rig.launch(&image, &sums)?;
        let image = image.unmap()?.unregister()?;
        same("before", &first.bytes()?, &pixels(SIZE, |x, y| before(x, y, 9)));
        same("after", &rig.gpu().read_image(&image)?, &pixels(SIZE, |x, y| after(x, y, 9)));
        Ok(rig)
    });
}

#[test]
fn ten_thousand_frames() {
    const COUNT: u32 = 10_000;
    const SMALL: [u32; 2] = [61, 5];
    check(|rig| {
        let mut scene = rig.scene(SMALL)?;
        for number in 1..=COUNT {
            scene = rig.frame(scene, number)?;
        }
        let (image, found) = rig.read(scene)?;
        same("image", &image, &pixels(SMALL, |x, y| after(x, y, COUNT)));
        same("sums", &found, &sums(SMALL, COUNT));
        Ok(rig)
    });
}
