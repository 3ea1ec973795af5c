//! Kernels of ours beside the same in HIP by `clang`: how long it takes from source to code object, how large the code is, how many registers
//! it takes, and how many waves a SIMD has room for with those. Needs LLVM and `clang` of one release, no GPU and no ROCm.
//!
//! ```text
//! CLANG=clang-22 cargo bench -p vm-rocm --bench hip
//! ```
//!
//! Ours are the host's own, without the checks that a guest's kernel has, and go the whole way: text, validation, `vm-jit`, LLVM's two
//! programs in processes with limits. Each round has one of each; a ratio is HIP's figure over ours, of waves ours over HIP's, and an aim is
//! met from 1 / 1.05 on.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSymbol as _};
use vm_ir::{Trust, text, validate};
use vm_jit::{Target, compile};
use vm_rocm::assemble::Assembler;

const AIM: f64 = 1.0 / 1.05;
const ROUNDS: usize = 11;
const KERNELS: [&str; 4] = ["silu", "softmax", "rmsnorm", "matmul"];

/// What there is to be known of a kernel's code.
struct Code {
    bytes: u64,
    vector: u64,
    scalar: u64,
}

impl Code {
    fn of(image: &[u8], kernel: &str) -> Result<Self, Box<dyn Error>> {
        let file = ElfFile64::<Endianness>::parse(image)?;
        let symbol = file.dynamic_symbols().find(|symbol| symbol.name() == Ok(kernel));
        let bytes = symbol.ok_or_else(|| format!("there is no {kernel}"))?.size();
        // In the note of its only kernel, which is MessagePack.
        let count = |name: &str| -> Option<u64> {
            let at = image.windows(name.len()).position(|part| part == name.as_bytes())? + name.len();
            Some(match image.get(at..at + 3)? {
                [small @ 0..=0x7f, ..] => (*small).into(),
                [0xcc, byte, _] => (*byte).into(),
                [0xcd, high, low] => u64::from(*high) << 8 | u64::from(*low),
                _ => return None,
            })
        };
        let registers = |name| count(name).ok_or_else(|| format!("{kernel} has no {name}"));
        Ok(Self { bytes, vector: registers(".vgpr_count")?, scalar: registers(".sgpr_count")? })
    }

    /// Waves that a SIMD has room for, of a kernel without large arrays in LDS.
    fn waves(&self, chip: &str) -> u64 {
        let (all, granule, most) = if chip == "gfx1100" { (1536, 24, 16) } else { (512, 8, 8) };
        (all / self.vector.max(1).next_multiple_of(granule)).min(most)
    }
}

/// From the text of a kernel.
fn ours(assembler: &Assembler, source: &str, chip: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let module = validate(text::parse(source)?, Trust::Trusted)?;
    let artifact = compile(&module, &format!("amdgcn:{chip}").parse::<Target>()?)?;
    Ok(assembler.assemble(&artifact.code, chip)?)
}

fn theirs(clang: &str, kernel: &str, chip: &str, output: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/kernels.hip");
    let done = Command::new(clang)
        .args([
            "-x",
            "hip",
            "--cuda-device-only",
            "-nogpuinc",
            "-nogpulib",
            "-O3",
            "-c",
            "--no-gpu-bundle-output",
        ])
        .arg(format!("--offload-arch={chip}"))
        .arg(format!("-D{}", kernel.to_uppercase()))
        .args([source, "-o"])
        .arg(output)
        .output()?;
    if !done.status.success() {
        return Err(format!("{clang}: {}", String::from_utf8_lossy(&done.stderr)).into());
    }
    Ok(std::fs::read(output)?)
}

fn timed<T>(times: &mut Vec<f64>, make: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let made = make();
    times.push(start.elapsed().as_secs_f64() * 1e3);
    made
}

/// The median, and the 10th and 90th percentiles.
fn spread(mut times: Vec<f64>) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    [0.5, 0.1, 0.9].map(|part| times[((times.len() - 1) as f64 * part).round() as usize])
}

fn main() -> Result<(), Box<dyn Error>> {
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang-22".into());
    let assembler = match Assembler::find() {
        Ok(assembler) => assembler,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    if let Err(error) = Command::new(&clang).arg("--version").output() {
        println!("skipped: {clang}: {error}; install it (Debian: clang-22), or name another in CLANG");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let output = folder.path().join("kernel.co");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../vm-ir/filetests/run");
    let mut aims = [0; 2];
    println!(
        "| chip | kernel | | ours | HIP | ratio | aim |\n| --- | --- | --- | ---: | ---: | ---: | --- |"
    );
    for chip in ["gfx942", "gfx1100"] {
        for kernel in KERNELS {
            let source = std::fs::read_to_string(sources.join(format!("{kernel}.vir")))?;
            let mut row = |what: &str, mine: String, other: String, ratio: f64, beside: String| {
                let met = ratio >= AIM;
                aims[usize::from(met)] += 1;
                let aim = if met { "met" } else { "MISSED" };
                println!("| {chip} | {kernel} | {what} | {mine} | {other} | {ratio:.2}{beside} | {aim} |");
            };
            let [mut mine, mut other] = [Vec::new(), Vec::new()];
            let mut codes = None;
            for _ in 0..ROUNDS {
                let image = timed(&mut mine, || ours(&assembler, &source, chip))?;
                let hip = timed(&mut other, || theirs(&clang, kernel, chip, &output))?;
                codes = Some((Code::of(&image, &format!("vir_{kernel}"))?, Code::of(&hip, kernel)?));
            }
            let (own, hip) = codes.ok_or("no round")?;
            let [ratio, low, high] =
                spread(mine.iter().zip(&other).map(|(mine, other)| other / mine).collect());
            let [[mine, ..], [other, ..]] = [mine, other].map(spread);
            row(
                "compiled, ms",
                format!("{mine:.1}"),
                format!("{other:.1}"),
                ratio,
                format!(" ({low:.2}..{high:.2})"),
            );
            let figures = [
                ("code, bytes", own.bytes, hip.bytes),
                ("vector registers", own.vector, hip.vector),
                ("scalar registers", own.scalar, hip.scalar),
                // The more the better.
                ("waves a SIMD", own.waves(chip), hip.waves(chip)),
            ];
            for (what, own, other) in figures {
                let ratio = other as f64 / own.max(1) as f64;
                let ratio = if what == "waves a SIMD" { 1.0 / ratio } else { ratio };
                row(what, own.to_string(), other.to_string(), ratio, String::new());
            }
        }
    }
    println!("\naims: {} met, {} missed", aims[1], aims[0]);
    Ok(())
}
