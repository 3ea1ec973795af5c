//! What a CUDA program hands to a driver: PTX, or a fat binary with some.
#![cfg_attr(feature = "libfuzzer", no_main)]

use vm_ptx::{Module, Options, image};

fuzz::target!(|data: &[u8]| {
    let module = image::ptx(data, 90).and_then(|text| Module::parse(&text));
    if let Ok(module) = module {
        for kernel in module.kernels().take(4) {
            let _ = module.translate(kernel, &Options { block: [64, 1, 1], dynamic_shared: 256, data: 64 });
        }
    }
});
