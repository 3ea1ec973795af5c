//! Cuts images of kernels out of a recording, which is then small enough for a test before a driver that needs none:
//!
//! ```sh
//! cargo run --package vm-bridge --example trim -- RECORDING TRIMMED 256
//! ```
//!
//! The last argument is how many bytes of each MiB of an image are kept: the driver reads its length there.

use std::error::Error;

use vm_bridge::recording::Recording;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [from, to, images] = &arguments[..] else { return Err("usage: trim RECORDING TRIMMED BYTES".into()) };
    let recording = Recording::read(&std::fs::read(from)?)?;
    std::fs::write(to, recording.to_bytes(images.parse()?))?;
    println!("{} calls, {} kernels", recording.calls.len(), recording.kernels().len());
    Ok(())
}
