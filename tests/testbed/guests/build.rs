//! Links the program as an ELF file that a VMM can load: static, at a fixed address, with no C start-up code. Puts the
//! kernels that it sends to an accelerator into their binary form.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A target without an operating system has no C compiler to link with, and takes the linker's own words.
    let bare = std::env::var("CARGO_CFG_TARGET_OS")? == "none";
    let arguments: &[&str] = match bare {
        true => &["-static", "--no-pie", "--build-id=none", "-z", "norelro"],
        false => {
            &["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,norelro"]
        }
    };
    for argument in arguments {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");
    let text = std::fs::read_to_string("kernels/accel.vir")?;
    let module = vm_ir::text::parse(&text)?;
    let valid = vm_ir::validate(module.clone(), vm_ir::Trust::Guest).map_err(|errors| errors.to_string())?;
    drop(valid);
    let out: PathBuf = std::env::var_os("OUT_DIR").ok_or("no OUT_DIR")?.into();
    std::fs::write(out.join("accel.bin"), vm_ir::binary::encode(&module, vm_ir::binary::Lines::Keep))?;
    Ok(())
}
