//! Makes an exported function of each of the driver's, and how the library is linked: as the driver is.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use vm_bridge::calls::{MODES, Mode};
use vm_cuda_api::{FUNCTIONS, Kind, Parameter, names};

/// A parameter: a word, or a structure.
fn argument((at, parameter): (usize, &Parameter)) -> String {
    match parameter.kind {
        Kind::Value(bytes) => format!("(a{at} Value<{bytes}>)"),
        _ => format!("(a{at} usize)"),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut text, mut table) = (String::new(), String::new());
    for (at, (function, mode)) in FUNCTIONS.iter().zip(MODES.iter()).enumerate() {
        let name = &function.name;
        let plain = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")).unwrap_or(name);
        let handler = match mode {
            Mode::Unsupported => "forward::unsupported".to_owned(),
            Mode::Posted => "forward::post".to_owned(),
            Mode::Asked => "forward::ask".to_owned(),
            Mode::Waits => "forward::wait".to_owned(),
            Mode::Kept => "forward::keep".to_owned(),
            Mode::Hand | Mode::Here => format!("hand::{plain}"),
        };
        let arguments: String = function.parameters.iter().enumerate().map(argument).collect();
        writeln!(text, "export! {{ {at} {name} ({arguments}) {handler} }}")?;
        let since = names::since(name, function.since);
        writeln!(table, "    (\"{name}\", {since}, Code({name} as *const ())),")?;
    }
    let text = format!(
        "{text}/// All functions: name, version, address.\nstatic TABLE: [(&str, i32, Code); {}] = [\n{table}];\n",
        FUNCTIONS.len()
    );
    fs::write(Path::new(&env::var("OUT_DIR")?).join("exports.rs"), text)?;
    println!("cargo::rerun-if-changed=build.rs");
    // Who asks for libcuda.so.1 again gets this one.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Its own addresses, also where another library that is loaded before it has the same names: a hook.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Threads may run its code until the process ends.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    Ok(())
}
