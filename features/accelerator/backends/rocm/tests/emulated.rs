//! The whole way of a kernel but the hardware: compiled, assembled by LLVM, loaded and launched by [`RocmAccelerator`] on the fake
//! HIP, which has the code object run on an emulator of AMD's instructions that is not ours. `TINYGRAD` names its checkout;
//! `vm-jit/tests/amdgcn/emulate.py` says which.
#![allow(unsafe_code)]

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use vm_accel::programs::Program;
use vm_accel::{Artifact, Error, Grid, Launch, Limits, Worker, WorkerOptions, arguments};
use vm_rocm::assemble::Assembler;
use vm_rocm::fake::{Fake, FakeOptions, Kernel, Range, Run, know_by};

const SOON: Duration = Duration::from_secs(300);
/// Bytes behind the parameters that HIP fills in: first the blocks of the grid.
const IMPLICIT: usize = 256;

/// A process that runs one launch after the other.
struct Emulator(Mutex<(Child, ChildStdin, BufReader<ChildStdout>)>);

impl Emulator {
    fn start() -> Result<Arc<Emulator>, String> {
        let place = std::env::var_os("TINYGRAD").ok_or("TINYGRAD names no checkout of tinygrad")?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../vm-jit/tests/amdgcn/emulate.py");
        let mut child = Command::new("python3")
            .arg(script)
            .env("TINYGRAD", place)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("python3: {error}"))?;
        let (input, output) = child.stdin.take().zip(child.stdout.take()).ok_or("no pipes")?;
        Ok(Arc::new(Emulator(Mutex::new((child, input, BufReader::new(output))))))
    }

    fn ask(&self, request: &Value) -> Result<Vec<Vec<u8>>, String> {
        let mut process = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, input, output) = &mut *process;
        let mut answer = String::new();
        writeln!(input, "{request}").map_err(|error| error.to_string())?;
        output.read_line(&mut answer).map_err(|error| error.to_string())?;
        let answer: Value = serde_json::from_str(&answer).map_err(|error| format!("it ended: {error}"))?;
        let buffers = answer["buffers"].as_array().ok_or_else(|| answer["error"].to_string())?;
        let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok();
        let bytes = |text: &Value| text.as_str()?.as_bytes().chunks(2).map(byte).collect();
        buffers.iter().map(bytes).collect::<Option<_>>().ok_or_else(|| "no bytes".into())
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let (child, ..) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Runs the kernels of one code object.
struct Object {
    emulator: Arc<Emulator>,
    chip: String,
    path: PathBuf,
}

impl Run for Object {
    fn run(
        &self,
        kernel: &Kernel,
        grid: [u32; 3],
        words: &[u64],
        ranges: &mut [Range],
    ) -> Result<(), String> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut kernarg: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        kernarg.resize(kernarg.len() + IMPLICIT, 0);
        let implicit = (kernel.params.bytes as usize).next_multiple_of(8);
        for (axis, blocks) in grid.iter().enumerate() {
            kernarg[implicit + 4 * axis..][..4].copy_from_slice(&blocks.to_le_bytes());
        }
        let pointers = ranges.iter().enumerate().map(|(number, range)| json!([range.offset, number, 0]));
        let request = json!({
            "arch": self.chip, "object": self.path, "symbol": kernel.symbol, "kernarg": hex(&kernarg),
            "pointers": pointers.collect::<Vec<_>>(),
            "buffers": ranges.iter().map(|range| hex(&range.bytes)).collect::<Vec<_>>(),
            "grid": grid, "block": kernel.cpu.signature().block,
        });
        let buffers = self.emulator.ask(&request)?;
        ranges.iter_mut().zip(buffers).for_each(|(range, bytes)| range.bytes = bytes);
        Ok(())
    }
}

#[test]
fn code_objects_run_on_the_emulator() {
    let ready =
        Assembler::find().map_err(|error| error.to_string()).and_then(|llvm| Ok((llvm, Emulator::start()?)));
    let (llvm, emulator) = match ready {
        Ok(ready) => ready,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().unwrap();
    for (chip, wavefront) in [("gfx942", 64), ("gfx1100", 32)] {
        let program = |program: Program| {
            let (code, signature, kernel) = common::compiled(chip, program);
            let image = llvm.assemble(&code, chip).unwrap();
            let path = folder.path().join(format!("{chip}-{}", program.name()));
            std::fs::write(&path, &image).unwrap();
            let object = Object { emulator: Arc::clone(&emulator), chip: chip.into(), path };
            know_by(&image, chip, vec![kernel], Arc::new(object));
            // SAFETY: vm-jit and LLVM made it of a valid module; the module is the suite's own.
            unsafe { Artifact::new(image, signature) }.unwrap()
        };
        let fake = Fake::new(FakeOptions { architecture: chip.into(), wavefront, ..FakeOptions::default() });
        programs(&Worker::start(Arc::new(fake.accelerator()), WorkerOptions::default()).unwrap(), &program);
        assert_eq!((fake.faults(), fake.left()), (vec![], vec![]), "{chip}");
    }
}

/// Programs of the suite, and what they compute.
fn programs(worker: &Worker<vm_rocm::RocmAccelerator>, program: &dyn Fn(Program) -> Artifact) {
    let load = |which| worker.load(&program(which)).unwrap();
    let numbers: Vec<u32> = (0..300u32).map(|n| n.wrapping_mul(2_654_435_761)).collect();
    let input = worker.upload(&numbers).unwrap();

    let output = worker.allocate_zeroed(1200).unwrap();
    worker.launch(&load(Program::Add), [2, 1, 1], &arguments![&input, &output, 7u32]).unwrap();
    let mut got = vec![0u32; 300];
    worker.read(&output, &mut got).unwrap();
    assert!(got.iter().zip(&numbers).all(|(got, number)| *got == number.wrapping_add(7)));

    // Rows that lie apart, to rows that do not.
    let source = input.strided(&[6, 40], &[4 * 50]).unwrap();
    let target = output.view(0, 960).unwrap().shaped(&[6, 40]).unwrap();
    worker.launch(&load(Program::Copy2), 2, &arguments![source, target]).unwrap();
    worker.read(&output, &mut got).unwrap();
    assert!((0..240).all(|at| got[at] == numbers[at / 40 * 50 + at % 40]));

    let words = worker.allocate_zeroed(32).unwrap();
    worker
        .launch(
            &load(Program::Scalars),
            1,
            &arguments![&words, 0x12u8, 0x3456u16, 0x789a_bcdeu32, u64::MAX - 1],
        )
        .unwrap();
    let mut four = [0u64; 4];
    worker.read(&words, &mut four).unwrap();
    assert_eq!(four, [0x12, 0x3456, 0x789a_bcde, u64::MAX - 1]);

    // Shared memory and barriers.
    let data = worker.upload(&numbers[..128]).unwrap();
    worker.launch(&load(Program::Reverse), 2, &arguments![&data]).unwrap();
    let mut back = [0u32; 128];
    worker.read(&data, &mut back).unwrap();
    assert!((0..128).all(|at| back[at] == numbers[at / 64 * 64 + 63 - at % 64]));

    // Blocks and threads in three dimensions.
    let grid = [3, 2, 2];
    let ids = worker.allocate_zeroed(4 * 12 * 16).unwrap();
    let view = ids.shaped(&[12, 16]).unwrap();
    worker.launch(&load(Program::Ids), grid, &arguments![view]).unwrap();
    let mut got = vec![0u32; 12 * 16];
    worker.read(&ids, &mut got).unwrap();
    for (at, got) in (0..).zip(got) {
        let (block, thread) = (at / 16, at % 16);
        // Each index in four bits, those of blocks first.
        let indices = [block % 3, block / 3 % 2, block / 6, thread % 4, thread / 4 % 2, thread / 8];
        let want = indices.iter().rev().fold(0, |all, index| all << 4 | index);
        assert_eq!(got, want, "block {block}, thread {thread}");
    }

    // One that ends, and one that runs out of fuel.
    let (spin, flag) = (load(Program::Spin), worker.allocate_zeroed(4).unwrap());
    let within = |fuel| Launch { grid: Grid::from(1), limits: Some(Limits { fuel, time: SOON }) };
    worker.launch_job(&spin, within(10_000), &arguments![&flag, 100u64]).unwrap().wait(soon()).unwrap();
    let mut word = [0u32];
    worker.read(&flag, &mut word).unwrap();
    assert_eq!(word, [1]);
    let stopped =
        worker.launch_job(&spin, within(100), &arguments![&flag, 1_000_000u64]).unwrap().wait(soon());
    assert!(matches!(stopped, Err(Error::OutOfFuel { fuel: 100, .. })), "{stopped:?}");
    let _ = worker.synchronize(SOON);
    drop((input, output, words, data, ids, flag, spin));
    worker.stop(SOON).unwrap();
}

fn soon() -> std::time::Instant {
    std::time::Instant::now() + SOON
}
