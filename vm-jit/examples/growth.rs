//! How the time to compile a guest's kernel grows with it: seconds of this thread's processor, by shape and phase, at
//! doubling sizes.
//!
//! ```text
//! cargo run --release -p vm-jit --example growth -- [SIZES [SHAPE [TARGETS]]]
//! ```

use rustix::time::{ClockId, clock_gettime};
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::shapes::SHAPES;
use vm_ir::{Trust, text, validate};
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

fn main() {
    let mut args = std::env::args().skip(1);
    let sizes = args.next().unwrap_or_else(|| "512,1024,2048,4096".to_owned());
    let only = args.next().unwrap_or_default();
    let phases = args.next().unwrap_or_else(|| "ptx,cpu".to_owned());
    let ptx: Target = "ptx:sm_90a".parse().unwrap();
    let cpu: Target = "cpu:x86-64-v3".parse().unwrap();
    println!(
        "{:42} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "shape", "size", "bytes", "decode", "validate", "range", "legal", "ptx", "cpu"
    );
    for (name, make) in SHAPES.iter().filter(|(name, _)| name.contains(&only)) {
        for size in sizes.split(',').map(|size| size.parse::<usize>().unwrap()) {
            let bytes =
                encode(&text::parse(&make(size)).unwrap_or_else(|e| panic!("{name}: {e}")), Lines::Strip);
            let (decoding, module) = seconds(|| decode(&bytes).unwrap());
            let (validating, module) =
                seconds(|| validate(module, Trust::Guest).unwrap_or_else(|e| panic!("{name}: {e}")));
            let (ranging, _) = seconds(|| module.kernels().iter().map(Ranges::of).collect::<Vec<_>>());
            let (legal, _) =
                seconds(|| legal::rejects(&module, &ptx).len() + legal::rejects(&module, &cpu).len());
            let made = [("ptx", &ptx), ("cpu", &cpu)].map(|(phase, target)| {
                if !phases.contains(phase) {
                    return "-".to_owned();
                }
                match seconds(|| compile(&module, target)) {
                    (time, Ok(_)) => format!("{time:.3}"),
                    (time, Err(error)) => format!("{time:.3} {}", error.0[0].kind.code()),
                }
            });
            println!(
                "{name:42} {size:6} {:8} {decoding:8.3} {validating:8.3} {ranging:8.3} {legal:8.3} {:>8} {:>8}",
                bytes.len(),
                made[0],
                made[1]
            );
        }
    }
}
