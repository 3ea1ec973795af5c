//! An emulator of AMD's instructions, which is not ours: `emulate.py` says which, and how it is asked.

use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use vm_ir::interp::{Argument, Launch};
use vm_jit::{Entry, Slot};

/// A process that runs one launch after the other.
pub(crate) struct Emulator {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Bytes behind the parameters that a driver fills in: first the blocks of the grid.
const IMPLICIT: usize = 256;
/// Before and behind each buffer.
const MARGIN: usize = 256;
const CANARY: u8 = 0xc5;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()).collect()
}

impl Emulator {
    /// Starts it.
    ///
    /// # Errors
    /// That there is none.
    pub(crate) fn start() -> Result<Emulator, String> {
        let place =
            std::env::var_os("TINYGRAD").ok_or("no emulator: TINYGRAD names no checkout of tinygrad")?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/amdgcn/emulate.py");
        let mut child = Command::new("python3")
            .arg(script)
            .env("TINYGRAD", place)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("no emulator: python3: {error}"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = input.zip(output).ok_or("no emulator: no pipes")?;
        Ok(Emulator { child, input, output: BufReader::new(output) })
    }

    /// Launches a kernel of a code object, and puts what views hold then into the launch; gives what is in the cancel flag.
    ///
    /// # Errors
    /// What the emulator says; that something was written beside the views.
    pub(crate) fn run(
        &mut self,
        chip: &str,
        object: &Path,
        entry: &Entry,
        launch: &mut Launch,
        fuel: u64,
    ) -> Result<u32, String> {
        let mut kernarg = vec![0; (entry.params.bytes as usize).next_multiple_of(8) + IMPLICIT];
        let mut put = |at: u32, bytes: &[u8]| kernarg[at as usize..][..bytes.len()].copy_from_slice(bytes);
        let (mut pointers, mut buffers) = (Vec::new(), vec![vec![0; 4]]);
        for (argument, slot) in launch.arguments.iter().zip(&entry.params.slots) {
            match (argument, *slot) {
                (Argument::Tensor(tensor), Slot::View { offset, rank }) => {
                    pointers.push(json!([offset, buffers.len(), MARGIN]));
                    buffers.push([&[CANARY; MARGIN], &tensor.bytes[..], &[CANARY; MARGIN]].concat());
                    let width = u64::from(tensor.element.bytes());
                    for dimension in 0..rank {
                        let extent = tensor.extents[dimension as usize];
                        put(offset + 8 + 8 * dimension, &extent.to_le_bytes());
                        let inner: u64 = tensor.extents[dimension as usize + 1..].iter().product();
                        if dimension + 1 < rank {
                            put(offset + 8 * (rank + 1 + dimension), &(inner * width).to_le_bytes());
                        }
                    }
                }
                (Argument::Bits(bits), Slot::Scalar { offset, bytes }) => {
                    put(offset, &bits.to_le_bytes()[..bytes as usize]);
                }
                _ => return Err("an argument does not fit its parameter".into()),
            }
        }
        if let Some(guard) = entry.params.guard {
            pointers.push(json!([guard.stop, 0, 0]));
            put(guard.fuel, &fuel.to_le_bytes());
        }
        for (at, blocks) in (entry.params.bytes.next_multiple_of(8)..).step_by(4).zip(launch.grid) {
            put(at, &blocks.to_le_bytes());
        }
        let request = json!({
            "arch": chip, "object": object, "symbol": entry.symbol, "kernarg": hex(&kernarg), "pointers": pointers,
            "buffers": buffers.iter().map(|bytes| hex(bytes)).collect::<Vec<_>>(),
            "grid": launch.grid, "block": entry.block,
        });
        let mut answer = String::new();
        writeln!(self.input, "{request}").map_err(|error| error.to_string())?;
        self.output.read_line(&mut answer).map_err(|error| error.to_string())?;
        let answer: Value = serde_json::from_str(&answer).map_err(|error| format!("it ended: {error}"))?;
        if let Some(error) = answer["error"].as_str() {
            return Err(error.to_owned());
        }
        let all = answer["buffers"].as_array().into_iter().flatten();
        let all: Option<Vec<_>> = all.map(|text| unhex(text.as_str()?)).collect();
        let mut all = all.filter(|all| all.len() == buffers.len()).ok_or("no buffers")?.into_iter();
        let stop = all.next().and_then(|flag| flag.try_into().ok()).map_or(0, u32::from_le_bytes);
        for tensor in launch.arguments.iter_mut().filter_map(|argument| match argument {
            Argument::Tensor(tensor) => Some(tensor),
            Argument::Bits(_) => None,
        }) {
            let bytes = all.next().ok_or("a buffer is missing")?;
            let (before, rest) = bytes.split_at(MARGIN);
            let (inside, behind) = rest.split_at(tensor.bytes.len());
            if before.iter().chain(behind).any(|byte| *byte != CANARY) {
                return Err("it wrote beside a view".into());
            }
            tensor.bytes.copy_from_slice(inside);
        }
        Ok(stop)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
