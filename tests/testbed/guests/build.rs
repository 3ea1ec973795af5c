//! Links the program as an ELF file that a VMM can load: static, at a fixed address, with no C start-up code. Puts the
//! kernels and the model that it sends to an accelerator into their binary form.

#[path = "kernels/model.rs"]
mod model;
#[path = "kernels/tiles.rs"]
mod tiles;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use vm_ir::{GuestAddr, Module, Trust, binary};
use vm_kernels::call::{Launch, Operand};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result {
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
    let out: PathBuf = std::env::var_os("OUT_DIR").ok_or("no OUT_DIR")?.into();
    let module = vm_ir::text::parse(&std::fs::read_to_string("kernels/accel.vir")?)?;
    encode(module, &out.join("accel.bin"))?;
    let mut code = String::new();
    for (name, launch) in tiles::tiles()? {
        let file = out.join(name).with_extension("bin");
        encode(Module::from(launch.entry.kernel(GuestAddr(0x1000))?), &file)?;
        describe(&mut code, name, &launch, &file)?;
    }
    std::fs::write(out.join("tiles.rs"), code)?;
    let model = model::product()?;
    std::fs::write(out.join("model.bin"), vm_graph::encode(&model)?)?;
    Ok(())
}

/// Puts a module into a file, if a guest may send it.
fn encode(module: Module, file: &Path) -> Result {
    vm_ir::validate(module.clone(), Trust::Guest).map_err(|errors| errors.to_string())?;
    std::fs::write(file, binary::encode(&module, binary::Lines::Keep))?;
    Ok(())
}

/// Writes a launch of the module in a file as a constant of the guest's `Tile`.
fn describe(code: &mut String, name: &str, launch: &Launch, file: &Path) -> Result {
    let Launch { grid, operands, .. } = launch;
    write!(code, "const {}: Tile = Tile {{ name: {name:?}, grid: {grid:?}, ", name.to_uppercase())?;
    write!(code, "module: include_bytes!({:?}), arguments: &[", file.to_str().ok_or("OUT_DIR is no text")?)?;
    for operand in operands {
        match operand {
            Operand::Buffer(_, region) => {
                let strides: Vec<u64> =
                    region.strides.iter().map(|stride| stride * u64::from(region.element.bytes())).collect();
                let strides = strides.split_last().ok_or("a view of no dimensions")?.1;
                write!(code, "Given::View {{ extents: &{:?}, strides: &{strides:?} }}, ", region.extents)?;
            }
            Operand::Number(bits, _) => write!(code, "Given::Number({bits}), ")?,
            Operand::Workspace(_) => return Err("a workspace, which the guest has not".into()),
        }
    }
    writeln!(code, "] }};")?;
    Ok(())
}
