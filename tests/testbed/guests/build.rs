//! Links the program as an ELF file that a VMM can load: static, at a fixed address, with no C start-up code.

fn main() {
    for argument in
        ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,norelro"]
    {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
