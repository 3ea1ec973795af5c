//! What accesses by bytes take, as programs of grids have them, beside the same with views of floats.
//!
//! `cargo bench -p vm-cpu --bench bytes`: the milliseconds of a launch over 2^24 elements in both ways, and the ratio. The sum of two vectors with a
//! thread for each element, neighbours in it, and a loop in which the grid's threads take the elements in turns.

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_accel::{Launch, Limits, Worker, WorkerOptions, arguments};
use vm_cpu::CpuAccelerator;
use vm_ir::{Trust, text, validate};
use vm_jit::Target;

const COUNT: u64 = 1 << 24;
const RUNS: usize = 9;

/// Each with its grid, and the body of its kernel, in which `LOAD x, %v, %i` and `STORE z, %i, %v` stand for accesses to an element.
const KERNELS: [(&str, u32, &str); 3] = [
    (
        "x + y",
        (COUNT / 256) as u32,
        "%in = lt.s %i, %n : bool\nif %in {\nLOAD x, %a, %i\nLOAD y, %b, %i\n%c = add %a, %b : f32\nSTORE z, %i, %c\n}",
    ),
    (
        "neighbours",
        (COUNT / 256) as u32,
        "%least = gt.s %i, 0 : bool\n%last = sub %n, 1 : i64\n%most = lt.s %i, %last : bool\n%in = and %least, %most : bool\n\
         if %in {\n%h = sub %i, 1 : i64\n%j = add %i, 1 : i64\nLOAD x, %a, %h\nLOAD x, %b, %i\nLOAD x, %c, %j\n\
         %d = add %a, %b : f32\n%e = add %d, %c : f32\nSTORE z, %i, %e\n}",
    ),
    (
        "a grid's loop",
        256,
        "%g = grid_dim.x : i32\n%g64 = sext %g : i64\n%by = mul %g64, 256 : i64\n\
         %end = while carry(%at: i64 = %i) {\n%in = lt.s %at, %n : bool\nyield %in\n} do {\n\
         LOAD x, %a, %at\nLOAD z, %b, %at\n%c = fma %a, 2.0, %b : f32\nSTORE z, %at, %c\n%next = add %at, %by : i64\nyield %next\n}",
    ),
];

/// A kernel with views of floats, or with one of all bytes and pointers into it.
fn kernel(body: &str, bytes: bool) -> String {
    let mut lines = String::new();
    for (number, line) in body.lines().enumerate() {
        let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let (access, view, index, value) = match words[..] {
            ["LOAD", view, value, index] => (format!("{value} = load"), view, index, String::new()),
            ["STORE", view, index, value] => ("store".to_owned(), view, index, format!(", {value}")),
            _ => {
                lines += &format!("{line}\n");
                continue;
            }
        };
        let ty = if value.is_empty() { " : f32" } else { "" };
        lines += &match bytes {
            false => format!("{access} @{view}[{index}]{value}{ty}\n"),
            true => format!(
                "%m{number} = mul {index}, 4 : i64\n%p{number} = add %{view}, %m{number} : i64\n\
                 %q{number} = sub %p{number}, %base : i64\n{access} @all[%q{number}]{value}{ty}\n"
            ),
        };
    }
    let parameters = match bytes {
        false => {
            "@x: view<f32, [?], read>, @y: view<f32, [?], read>, @z: view<f32, [?], readwrite>".to_owned()
        }
        true => "@all: view<i8, [?], readwrite, align 16>, %base: i64, %x: i64, %y: i64, %z: i64".to_owned(),
    };
    format!(
        "vir 1\nkernel @k({parameters}, %n: i64) at 0x0 block(256) {{\n%i = global_id.x : i64\n{lines}}}\n"
    )
}

fn main() {
    let worker = Worker::start(Arc::new(CpuAccelerator::new().unwrap()), WorkerOptions::default()).unwrap();
    let target: Target = "cpu".parse().unwrap();
    let views = [0; 3].map(|_| worker.allocate_zeroed(4 * COUNT).unwrap());
    let all = worker.allocate_zeroed(3 * 4 * COUNT).unwrap();
    println!("{:16} {:>10} {:>10} {:>8}", "kernel", "views, ms", "bytes, ms", "ratio");
    for (name, blocks, body) in KERNELS {
        let mut best = [f64::INFINITY; 2];
        for (bytes, best) in [false, true].into_iter().zip(&mut best) {
            let source = kernel(body, bytes);
            let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
            let module = validate(module, Trust::Guest).unwrap_or_else(|error| panic!("{error}\n{source}"));
            let loaded = worker.load(&common::artifact(&module, "k", &target).unwrap()).unwrap();
            for _ in 0..RUNS {
                let limits = Limits { time: Duration::from_secs(60), fuel: 1 << 60 };
                let (launch, n) = (Launch::over([blocks, 1, 1]).within(limits), COUNT as i64);
                let [x, y, z] = &views;
                // Any number may be where a program's memory begins.
                let (base, step) = (0x7f00_0000_0000i64, 4 * n);
                let begin = Instant::now();
                match bytes {
                    false => worker.launch(&loaded, launch, &arguments![x, y, z, n]),
                    true => {
                        let given = arguments![&all, base, base, base + step, base + 2 * step, n];
                        worker.launch(&loaded, launch, &given)
                    }
                }
                .unwrap();
                worker.synchronize(Duration::from_secs(60)).unwrap();
                *best = best.min(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
        println!("{name:16} {:10.2} {:10.2} {:8.2}", best[0], best[1], best[1] / best[0]);
    }
}
