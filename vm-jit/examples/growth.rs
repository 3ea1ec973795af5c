//! How the time and the memory to compile a guest's kernel grow with it, by shape, at doubling sizes: seconds of the processor
//! by phase, and for each target those of `compile` and the most memory in MiB that a process took for it.
//!
//! ```text
//! cargo run --release -p vm-jit --example growth -- [SIZES [SHAPE [TARGETS]]]
//! ```

use rustix::time::{ClockId, clock_gettime};
use std::process::Command;
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::shapes::{SHAPES, Shape};
use vm_ir::{Trust, ValidModule, text, validate};
use vm_jit::range::Ranges;
use vm_jit::{Target, compile, legal};

fn seconds<T>(run: impl FnOnce() -> T) -> (f64, T) {
    let now = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
    };
    let start = now();
    let result = run();
    (now() - start, result)
}

/// A shape's module in a size; the reason if that is too large for any target.
fn module((name, make): &Shape, size: usize) -> Result<ValidModule, String> {
    let module = text::parse(&make(size)).map_err(|error| format!("{name}: {error}"))?;
    validate(module, Trust::Guest).map_err(|errors| format!("{name}: {errors}"))
}

/// What this process compiles by itself, so that its memory is what that takes.
fn alone(shape: &Shape, size: usize, target: &str) {
    let (module, target) = (module(shape, size).unwrap(), target.parse::<Target>().unwrap());
    let (time, made) = seconds(|| compile(&module, &target));
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    let refused = made.map_or_else(|error| error.0[0].kind.to_string(), |_| String::new());
    println!("{time:.3} {} {refused}", peak >> 10);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [alone_, shape, size, target] = &args[..]
        && alone_ == "--alone"
    {
        let shape = SHAPES.iter().find(|(name, _)| name == shape).unwrap();
        return alone(shape, size.parse().unwrap(), target);
    }
    let arg = |at: usize, or: &str| args.get(at).cloned().unwrap_or_else(|| or.to_owned());
    let (sizes, only, targets) =
        (arg(0, "512,1024,2048,4096"), arg(1, ""), arg(2, "ptx:sm_90a,cpu:x86-64-v3"));
    println!(
        "{:42} {:>6} {:>8} {:>7} {:>8} {:>7} {:>7}   {targets}: s, MiB",
        "shape", "size", "bytes", "decode", "validate", "range", "legal"
    );
    for shape in SHAPES.iter().filter(|(name, _)| name.contains(&only)) {
        for size in sizes.split(',').map(|size| size.parse::<usize>().unwrap()) {
            let bytes = encode(&text::parse(&(shape.1)(size)).unwrap_or_default(), Lines::Strip);
            print!("{:42} {size:6} {:8} ", shape.0, bytes.len());
            let (decoding, decoded) = seconds(|| decode(&bytes).unwrap());
            let (validating, module) = match seconds(|| validate(decoded, Trust::Guest)) {
                (time, Ok(valid)) => (time, valid),
                (_, Err(error)) => {
                    println!("{}", error.to_string().lines().next().unwrap_or_default());
                    continue;
                }
            };
            let (ranging, _) = seconds(|| module.kernels().iter().map(Ranges::of).collect::<Vec<_>>());
            let parsed = targets.split(',').map(|target| target.parse::<Target>().unwrap());
            let (legal, _) =
                seconds(|| parsed.map(|target| legal::rejects(&module, &target).len()).sum::<usize>());
            print!("{decoding:7.3} {validating:8.3} {ranging:7.3} {legal:7.3}  ");
            for target in targets.split(',') {
                let size = size.to_string();
                let made = Command::new(std::env::current_exe().unwrap())
                    .args(["--alone", shape.0, &size, target])
                    .output()
                    .unwrap();
                print!(" {}", String::from_utf8_lossy(&made.stdout).trim());
            }
            println!();
        }
    }
}
