//! The build script of libraries that export the driver.

fn main() {
    // Who asks for libcuda.so.1 again gets this one.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Its own addresses, also where another library that is loaded before it has the same names: a hook.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Streams' threads run its code until the process ends.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=Cargo.toml");
}
