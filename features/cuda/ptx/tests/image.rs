//! Fat binaries of nvcc, as they are and damaged.

mod common;

use common::{Program, Random};
use std::path::Path;
use vm_ptx::{ErrorKind, image};

fn file(mode: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/kernels/small-{mode}.fatbin"));
    std::fs::read(path).unwrap()
}

#[test]
fn packed() {
    for mode in ["none", "speed", "size"] {
        let image = file(mode);
        assert_eq!(image::size(&image).unwrap(), image.len() as u64);
        for (architecture, target) in [(75, "sm_75"), (89, "sm_75"), (90, "sm_90"), (120, "sm_90")] {
            let text = image::ptx(&image, architecture).unwrap_or_else(|error| panic!("{mode}: {error}"));
            let program = Program::of(&text);
            assert_eq!(program.module.target(), target);
            assert_eq!(program.module.kernels().collect::<Vec<_>>(), ["vector_add"]);
        }
        let error = image::ptx(&image, 70).unwrap_err();
        assert!(error.to_string().contains("newer than sm_70"), "{error}");
    }
}

#[test]
fn text_and_machine_code() {
    assert_eq!(image::ptx(b".version 8.0\0\0rest", 75).unwrap(), ".version 8.0");
    let error = image::ptx(b"\x7fELF\x02\x01\x01", 75).unwrap_err();
    assert!(matches!(error.kind, ErrorKind::Image(_)), "{error}");
}

#[test]
fn damaged() {
    let mut random = Random::new(1);
    for mode in ["none", "speed", "size"] {
        let whole = file(mode);
        for cut in 0..whole.len() {
            let _ = image::ptx(&whole[..cut], 90);
        }
        for _ in 0..4000 {
            let mut image = whole.clone();
            for _ in 0..1 + random.below(4) {
                let at = random.below(image.len() as u64) as usize;
                image[at] = random.next() as u8;
            }
            let _ = image::ptx(&image, 90);
        }
    }
}
