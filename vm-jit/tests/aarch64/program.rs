//! A program for Linux on 64-bit Arm that launches one kernel and writes what its memory then holds; and the emulator
//! that runs it.

use object::{Object, ObjectSection, ObjectSymbol};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use vm_ir::interp::{Argument, Launch};
use vm_jit::{Artifact, Entry, Slot};

/// Where the program's code and its memory are.
const CODE: u64 = 0x40_0000;
const DATA: u64 = 0x1000_0000;
/// Of headers, which the code follows.
const HEADERS: usize = 4096;
/// Of the kernel in the code, behind what starts it.
const KERNEL: usize = 256;
/// Around each tensor, and what it holds.
const MARGIN: usize = 256;
const CANARY: u8 = 0xc5;
/// The kernel may need so much.
const STACK: u64 = vm_jit::backend::cpu::STACK as u64 + (1 << 20);

/// `qemu-aarch64`, of Debian's package `qemu-user`.
pub(crate) struct Emulator {
    folder: tempfile::TempDir,
}

impl Emulator {
    pub(crate) fn find() -> Result<Emulator, String> {
        let found = Command::new("qemu-aarch64").arg("--version").stdout(Stdio::null()).status();
        match found {
            Ok(status) if status.success() => {
                Ok(Emulator { folder: tempfile::tempdir().map_err(|error| error.to_string())? })
            }
            Ok(status) => Err(format!("qemu-aarch64 ended with {status}")),
            Err(error) => Err(format!("no qemu-aarch64 (apt-get install qemu-user): {error}")),
        }
    }

    /// Runs a launch, whose tensors then hold what came out; gives the stop word.
    pub(crate) fn run(&self, artifact: &Artifact, launch: &mut Launch, fuel: u64) -> Result<u32, String> {
        let entry = artifact.entry(&launch.kernel).ok_or("no such kernel")?;
        let memory = Memory::of(entry, launch, fuel);
        let program = program(artifact, entry, launch, &memory)?;
        let path: PathBuf = self.folder.path().join(&launch.kernel);
        std::fs::write(&path, program).map_err(|error| error.to_string())?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let all = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(&path, all).map_err(|error| error.to_string())?;
        }
        // QEMU 10.0 computes wrongly on processors with AVX-512 where it translates several instructions together: seen
        // in f64 to f16, which is right with one at a time. Versions before 8.1 do not know the variable.
        let output = Command::new("qemu-aarch64").env("QEMU_ONE_INSN_PER_TB", "1").arg(&path).output();
        let output = output.map_err(|error| error.to_string())?;
        if !output.status.success() || output.stdout.len() != memory.bytes.len() {
            let told = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{}, {} bytes: {told}", output.status, output.stdout.len()));
        }
        let after = output.stdout;
        for (number, (argument, at)) in launch.arguments.iter_mut().zip(&memory.tensors).enumerate() {
            if let (Argument::Tensor(tensor), Some(at)) = (argument, *at) {
                let end = at + tensor.bytes.len();
                tensor.bytes.copy_from_slice(&after[at..end]);
                let around = after[at - MARGIN..at].iter().chain(&after[end..end + MARGIN]);
                if around.into_iter().any(|byte| *byte != CANARY) {
                    return Err(format!("argument {number}: a canary was touched"));
                }
            }
        }
        let word = &after[memory.stop..memory.stop + 4];
        Ok(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
    }
}

/// What the program's memory begins with; scratch and stack follow.
struct Memory {
    bytes: Vec<u8>,
    params: usize,
    grid: usize,
    stop: usize,
    /// By argument: where the tensor is.
    tensors: Vec<Option<usize>>,
}

impl Memory {
    fn of(entry: &Entry, launch: &Launch, fuel: u64) -> Memory {
        let (params, stop) = (0, entry.params.bytes.next_multiple_of(64) as usize);
        let grid = stop + 16;
        let mut bytes = vec![0; stop + 64];
        for (axis, blocks) in launch.grid.into_iter().enumerate() {
            bytes[grid + 4 * axis..][..4].copy_from_slice(&blocks.to_le_bytes());
        }
        let mut tensors = Vec::new();
        for (argument, slot) in launch.arguments.iter().zip(&entry.params.slots) {
            match (argument, *slot) {
                (Argument::Tensor(tensor), Slot::View { offset, rank }) => {
                    bytes.resize(bytes.len().next_multiple_of(64), 0);
                    bytes.resize(bytes.len() + MARGIN, CANARY);
                    let at = bytes.len();
                    tensors.push(Some(at));
                    bytes.extend(&tensor.bytes);
                    bytes.resize(bytes.len() + MARGIN, CANARY);
                    let mut put = |at: u32, value: u64| {
                        bytes[at as usize..][..8].copy_from_slice(&value.to_le_bytes());
                    };
                    put(offset, DATA + at as u64);
                    for (dimension, extent) in tensor.extents.iter().enumerate().take(rank as usize) {
                        let dimension = dimension as u32;
                        put(slot.extent_offset(dimension).unwrap(), *extent);
                        if let Some(to) = slot.stride_offset(dimension) {
                            let inner: u64 = tensor.extents[dimension as usize + 1..].iter().product();
                            put(to, inner * u64::from(tensor.element.bytes()));
                        }
                    }
                }
                (Argument::Bits(bits), Slot::Scalar { offset, bytes: size }) => {
                    tensors.push(None);
                    let size = size as usize;
                    bytes[offset as usize..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
                }
                _ => unreachable!("an argument of another kind"),
            }
        }
        if let Some(guard) = entry.params.guard {
            bytes[guard.stop as usize..][..8].copy_from_slice(&(DATA + stop as u64).to_le_bytes());
            bytes[guard.fuel as usize..][..8].copy_from_slice(&fuel.to_le_bytes());
        }
        Memory { bytes, params, grid, stop, tensors }
    }
}

/// Instructions that put a number into register `x<to>`.
fn number(to: u32, value: u64) -> Vec<u32> {
    let part = |i: u32| ((value >> (16 * i)) & 0xffff) as u32;
    let rest = (1..4).map(|i| 0xf280_0000 | i << 21 | part(i) << 5 | to);
    std::iter::once(0xd280_0000 | part(0) << 5 | to).chain(rest).collect()
}

/// The program as an executable: two segments, the kernel's code and the memory.
fn program(artifact: &Artifact, entry: &Entry, launch: &Launch, memory: &Memory) -> Result<Vec<u8>, String> {
    let image = object::File::parse(&*artifact.code).map_err(|error| error.to_string())?;
    if image.architecture() != object::Architecture::Aarch64 {
        return Err(format!("the code is for {:?}", image.architecture()));
    }
    let symbol = image.symbols().find(|symbol| symbol.name() == Ok(&entry.symbol)).ok_or("no symbol")?;
    let section = symbol.section_index().ok_or("no section")?;
    let section = image.section_by_index(section).map_err(|error| error.to_string())?;
    let kernel = section.data().map_err(|error| error.to_string())?;
    // The areas below it are zeros when the program starts.
    let scratch = DATA + memory.bytes.len().next_multiple_of(64) as u64 + u64::from(vm_abi::SCRATCH_ZEROS);
    let stack = (scratch + u64::from(entry.dynamic_shared)).next_multiple_of(4096) + STACK;
    let blocks: u64 = launch.grid.iter().map(|blocks| u64::from(*blocks)).product();
    let start = CODE + HEADERS as u64 + KERNEL as u64 + symbol.address();
    let steps = [
        number(9, stack),
        vec![0x9100_013f], // mov sp, x9
        number(0, DATA + memory.params as u64),
        number(1, DATA + memory.grid as u64),
        number(2, 0),
        number(3, blocks),
        number(4, scratch),
        number(16, start),
        vec![0xd63f_0200], // blr x16
        number(0, 1),
        number(1, DATA),
        number(2, memory.bytes.len() as u64),
        number(8, 64),     // write
        vec![0xd400_0001], // svc 0
        number(0, 0),
        number(8, 93), // exit
        vec![0xd400_0001],
    ];
    let code: Vec<u8> = steps.concat().into_iter().flat_map(u32::to_le_bytes).collect();
    assert!(code.len() <= KERNEL, "{} bytes", code.len());
    let mut out = Vec::new();
    out.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    let half = |out: &mut Vec<u8>, value: u16| out.extend(value.to_le_bytes());
    let word = |out: &mut Vec<u8>, value: u32| out.extend(value.to_le_bytes());
    let long = |out: &mut Vec<u8>, value: u64| out.extend(value.to_le_bytes());
    half(&mut out, 2); // an executable
    half(&mut out, 183); // for AArch64
    word(&mut out, 1);
    [CODE + HEADERS as u64, 64, 0].into_iter().for_each(|value| long(&mut out, value));
    word(&mut out, 0);
    [64, 56, 2, 64, 0, 0].into_iter().for_each(|value| half(&mut out, value));
    let text = (HEADERS + KERNEL + kernel.len()) as u64;
    let data = text.next_multiple_of(4096);
    let bytes = memory.bytes.len() as u64;
    for (flags, offset, address, size, room) in
        [(5, 0, CODE, text, text), (6, data, DATA, bytes, stack - DATA)]
    {
        word(&mut out, 1);
        word(&mut out, flags);
        [offset, address, address, size, room, 4096].into_iter().for_each(|value| long(&mut out, value));
    }
    out.resize(HEADERS, 0);
    out.extend(code);
    out.resize(HEADERS + KERNEL, 0);
    out.extend(kernel);
    out.resize(data as usize, 0);
    out.extend(&memory.bytes);
    Ok(out)
}
