//! What a call of the library takes on a GPU but for the driver: nanoseconds of each call, and of the same questions asked of the driver
//! alone. The driver is that of the tests, which computes nothing, so this needs no GPU: `cargo bench -p vm-capi --bench overhead`, with
//! words behind `--` for the calls whose names contain any of them. What a call takes over a real driver's launch `cargo gpu capi` shows.
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block)]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/driver.rs"]
mod fake;

use std::ffi::c_void;
use std::time::Instant;

use fake::{Driver, OnDriver, last, pointer};
use vmkernels::checks::{Caller, WORKSPACE};
use vmkernels::sys::*;

/// Calls of a turn, and turns: a million calls. A turn is shorter than a scheduler's slice of time.
const CALLS: u32 = 1000;
const TURNS: usize = 1000;

/// Nanoseconds of a call: the median of turns.
fn time(call: &mut dyn FnMut(u32)) -> f64 {
    let turn = |_| {
        let begin = Instant::now();
        (0..CALLS).for_each(&mut *call);
        begin.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
    };
    let mut turns: Vec<f64> = (0..TURNS).map(turn).collect();
    turns.sort_by(f64::total_cmp);
    turns[TURNS / 2]
}

/// Nanoseconds of what was asked, by its names.
fn time_asked(driver: &Driver, asked: &[String], address: u64, stream: u64) -> f64 {
    type Current = unsafe extern "C" fn(*mut u64) -> i32;
    type Id = unsafe extern "C" fn(u64, *mut u64) -> i32;
    type Attributes = unsafe extern "C" fn(u32, *const i32, *mut *mut u64, u64) -> i32;
    type Launch = unsafe extern "C" fn(
        u64,
        u32,
        u32,
        u32,
        u32,
        u32,
        u32,
        u32,
        u64,
        *mut *mut u64,
        *mut *mut u64,
    ) -> i32;
    let (current, id) =
        (*driver.function::<Current>("cuCtxGetCurrent"), *driver.function::<Id>("cuCtxGetId"));
    let attributes = *driver.function::<Attributes>("cuPointerGetAttributes");
    let launch = *driver.function::<Launch>("cuLaunchKernel");
    let mut context = 0;
    // SAFETY: the pointer is to a local.
    unsafe { current(&raw mut context) };
    let (mut number, mut values, mut extra) = (0, [0u64; 4], [std::ptr::null_mut(); 1]);
    let mut places = values.each_mut().map(|value| &raw mut *value);
    // The type, the beginning, the length, the context.
    let kinds = [2, 11, 12, 1];
    time(&mut |_| {
        for name in asked {
            // SAFETY: pointers are to locals, of as many places as attributes; the kernel's handle is not used.
            let status = unsafe {
                match name.as_bytes()[2] {
                    b'C' if name.ends_with("Id") => id(context, &raw mut number),
                    b'C' => current(&raw mut number),
                    b'P' => attributes(4, kinds.as_ptr(), places.as_mut_ptr(), address),
                    b'L' => launch(1, 1, 1, 1, 1, 1, 1, 0, stream, std::ptr::null_mut(), extra.as_mut_ptr()),
                    _ => panic!("{name}"),
                }
            };
            assert_eq!(status, 0, "{name}");
        }
    })
}

fn main() {
    if let Some(mut process) = fake::process() {
        assert!(process.args(std::env::args().skip(1)).status().unwrap().success());
        return;
    }
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let driver = Driver::open();
    driver.context();
    let caller = OnDriver::new(&driver);
    let (address, number) = (caller.arena(0), caller.stream());
    let stream = pointer::<c_void>(number);
    let [a, b, c, d] = [0, 1, 2, 3].map(|at| pointer::<f32>(caller.arena(at)));
    let [e, f, g, h] = [4, 5, 6, 7].map(|at| pointer::<f32>(caller.arena(at)));
    let (workspace, bytes) = (pointer::<c_void>(caller.arena(WORKSPACE)), vmkernels::checks::ARENA);
    let halves = |at| pointer::<u16>(caller.arena(at));
    let moved = |at: usize, turn: u32| pointer::<u16>(caller.arena(at) + u64::from(turn % 64) * 4096);
    println!("| call | ns | of these the driver's | asked |\n| --- | --- | --- | --- |");
    let measure = |name: &str, call: &mut dyn FnMut(u32) -> vmk_status| {
        if !words.is_empty() && !words.iter().any(|word| name.contains(word.as_str())) {
            return;
        }
        let mut checked = |turn| assert_eq!(call(turn), vmk_status::VMK_SUCCESS, "{name}: {}", last());
        // What is asked by a call that was made before.
        (0..256).for_each(&mut checked);
        let (_, asked) = driver.asked(|| checked(0));
        let whole = time(&mut checked);
        let theirs = time_asked(&driver, &asked, address, number);
        println!("| {name} | {whole:.0} | {theirs:.0} | {} |", asked.len());
    };
    macro_rules! measure {
        ($name:expr, |$turn:pat_param| $call:expr) => {
            // SAFETY: the memory has room for what is computed, which is nothing.
            measure($name, &mut |$turn| unsafe { $call })
        };
    }
    measure!("cuda_silu", |_| cuda_silu(a, b, 1024, stream));
    measure!("cuda_silu, each on other memory", |turn| {
        cuda_silu(moved(0, turn).cast(), moved(1, turn).cast(), 1024, stream)
    });
    measure!("cuda_silu, each of another length", |turn| {
        cuda_silu(a, b, 1024 + i64::from(turn % 200), stream)
    });
    measure!("cuda_add", |_| cuda_add(a, b, c, 1024, stream));
    measure!("cuda_softmax", |_| cuda_softmax(a, b, 4, 1024, stream));
    measure!("cuda_layernorm", |_| cuda_layernorm(a, b, c, d, e, f, 4, 1024, 1e-5, stream));
    measure!("cuda_gemm_bf16", |_| {
        cuda_gemm_bf16(halves(0), halves(1), halves(2), 128, 128, 128, 1.0, 0.0, stream)
    });
    measure!("cuda_gemm_bf16, each on other memory", |turn| {
        cuda_gemm_bf16(moved(0, turn), moved(1, turn), moved(2, turn), 128, 128, 128, 1.0, 0.0, stream)
    });
    let [q, k, v, o, dout, dq, dk, dv] = [0, 1, 2, 3, 5, 6, 7, 8].map(halves);
    measure!("cuda_flash_attention_bf16", |_| {
        cuda_flash_attention_bf16(q, k, v, o, 1, 128, 4, 64, 0.125, 1, stream)
    });
    measure!("cuda_flash_attention_backward_bf16_ws", |_| {
        cuda_flash_attention_backward_bf16_ws(
            q, k, v, o, e, dout, dq, dk, dv, 1, 128, 4, 64, 0.125, 1, workspace, bytes, stream,
        )
    });
    measure!("cuda_cross_entropy_backward", |_| {
        cuda_cross_entropy_backward(a, b.cast(), c, d, 4, 1024, stream)
    });
    measure!("cuda_topk_ws", |_| cuda_topk_ws(a, b, c.cast(), 4, 4096, 50, workspace, bytes, stream));
    let mut step = 0;
    measure!("cuda_adamw_step, each another step", |_| {
        step = step % 1000 + 1;
        cuda_adamw_step(g, h, a, b, 1e-3, 0.9, 0.99, 1e-8, 0.01, step, 1024, stream)
    });
}
