//! The kernels under `filetests/run`, written with the builder. Each must be the kernel in its file, value for
//! value; the file's directives then run it.
//!
//! `VIR_UPDATE=1 cargo test -p vm-ir --test kernels` writes the files' kernels again and keeps their directives.

mod elementwise;
mod integers;
mod matmul;
mod optimiser;
mod reduce;
mod resident;
mod rows;

use std::path::Path;
use vm_ir::builder::IRBlock;
use vm_ir::{GuestAddr, Module, Trust, text, validate};

/// Checks that `build` makes the kernel in the file of this name.
fn check(name: &str, build: impl FnOnce(vm_ir::Builder<'_>)) {
    let block = IRBlock::new(GuestAddr(0x1000));
    build(block.builder().name(name));
    let module = Module::from(block.kernel().unwrap());
    let printed = text::print(&module);
    validate(module.clone(), Trust::Guest).unwrap_or_else(|e| panic!("{e}\n{printed}"));

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/run").join(format!("{name}.vir"));
    let file = std::fs::read_to_string(&path).unwrap_or_default();
    if std::env::var_os("VIR_UPDATE").is_some() {
        let head = file.split_once("vir 1\n").map_or(file.as_str(), |(head, _)| head);
        std::fs::write(&path, format!("{head}{printed}")).unwrap();
        return;
    }
    let parsed = text::parse(&file).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(text::print(&parsed), printed, "{} is not what the builder makes", path.display());
    assert_eq!(parsed, module);
}
