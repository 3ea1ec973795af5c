//! Graphics and a worker take turns with an image and a buffer: every frame of both sides shows in what comes out.

mod common;

use common::{SIZE, after, check, pixels, same, sums};

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
