//! An emulator of AMD's instructions, which is not ours: `emulate.py` says which, and how it is asked.

use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use vm_ir::interp::{Argument, Launch, Tensor};
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
/// What lies beside elements, by bytes at even and odd places: of floats no number.
const CANARY: [u8; 2] = [0x81, 0xff];

/// Canaries for so many bytes from a place on.
fn canaries(from: usize, count: usize) -> Vec<u8> {
    (from..from + count).map(|at| CANARY[at % 2]).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// Where the elements of a tensor lie in its memory, by byte, in their order.
fn places(tensor: &Tensor, strides: &[u64]) -> impl Iterator<Item = usize> {
    let width = u64::from(tensor.element.bytes());
    (0..tensor.len() as u64).map(move |mut index| {
        let mut at = 0;
        for (extent, stride) in tensor.extents.iter().zip(strides).rev() {
            at += index % extent * stride;
            index /= extent;
        }
        (at * width) as usize
    })
}

/// The strides of a tensor, in elements: those that are given, else of elements one behind the other.
fn strides_of(tensor: &Tensor, given: Option<&Vec<u64>>) -> Vec<u64> {
    let packed = || (0..tensor.extents.len()).map(|at| tensor.extents[at + 1..].iter().product()).collect();
    given.filter(|given| !given.is_empty()).cloned().unwrap_or_else(packed)
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

    /// Whether its process has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Launches a kernel of a code object, and puts what views hold then into the launch; gives what is in the cancel flag.
    /// `strides` are, by argument, the elements from one of each dimension to the next; with none they lie one behind the other.
    ///
    /// # Errors
    /// What the emulator says; that something was written beside the elements of the views.
    pub(crate) fn run(
        &mut self,
        chip: &str,
        object: &Path,
        entry: &Entry,
        launch: &mut Launch,
        strides: &[Vec<u64>],
        fuel: u64,
    ) -> Result<u32, String> {
        let mut kernarg = vec![0; (entry.params.bytes as usize).next_multiple_of(8) + IMPLICIT];
        let mut put = |at: u32, bytes: &[u8]| kernarg[at as usize..][..bytes.len()].copy_from_slice(bytes);
        let (mut pointers, mut buffers) = (Vec::new(), vec![vec![0; 4]]);
        for (number, (argument, slot)) in launch.arguments.iter().zip(&entry.params.slots).enumerate() {
            match (argument, *slot) {
                (Argument::Tensor(tensor), Slot::View { offset, rank }) => {
                    pointers.push(json!([offset, buffers.len(), MARGIN]));
                    let strides = strides_of(tensor, strides.get(number));
                    let width = tensor.element.bytes() as usize;
                    let end = places(tensor, &strides).max().map_or(0, |last| last + width);
                    let mut memory = canaries(0, end + 2 * MARGIN);
                    for (at, bytes) in places(tensor, &strides).zip(tensor.bytes.chunks_exact(width)) {
                        memory[MARGIN + at..][..width].copy_from_slice(bytes);
                    }
                    buffers.push(memory);
                    for dimension in 0..rank {
                        let extent = tensor.extents[dimension as usize];
                        put(offset + 8 + 8 * dimension, &extent.to_le_bytes());
                        if dimension + 1 < rank {
                            let stride = strides[dimension as usize] * width as u64;
                            put(offset + 8 * (rank + 1 + dimension), &stride.to_le_bytes());
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
        let answer: Value = serde_json::from_str(&answer).map_err(|_| {
            let _ = self.child.wait();
            "the kernel reached where nothing is mapped, or the emulator ended otherwise"
        })?;
        if let Some(error) = answer["error"].as_str() {
            return Err(error.to_owned());
        }
        let all = answer["buffers"].as_array().into_iter().flatten();
        let all: Option<Vec<_>> = all.map(|text| unhex(text.as_str()?)).collect();
        let mut all = all.filter(|all| all.len() == buffers.len()).ok_or("no buffers")?.into_iter();
        let stop = all.next().and_then(|flag| flag.try_into().ok()).map_or(0, u32::from_le_bytes);
        for (number, argument) in launch.arguments.iter_mut().enumerate() {
            let Argument::Tensor(tensor) = argument else { continue };
            let mut memory = all.next().ok_or("a buffer is missing")?;
            let strides = strides_of(tensor, strides.get(number));
            let places: Vec<usize> = places(tensor, &strides).collect();
            let width = tensor.element.bytes() as usize;
            for (at, bytes) in places.into_iter().zip(tensor.bytes.chunks_exact_mut(width)) {
                let found = &mut memory[MARGIN + at..][..width];
                bytes.copy_from_slice(found);
                found.copy_from_slice(&canaries(MARGIN + at, width));
            }
            if memory != canaries(0, memory.len()) {
                return Err("it wrote beside a view".into());
            }
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
