//! What a call takes over the driver's own launch, and what its questions to the driver take.

use std::ffi::c_void;
use std::mem::transmute;
use std::rc::Rc;
use std::time::Instant;

use anyhow::ensure;
use vm_accel::programs::Program;
use vmkernels::checks::{Caller, WORKSPACE};

use super::sys::{Library, OnGpu};
use crate::borrow::sys::Owner;
use crate::figures::raw::Raw;
use crate::gpu::Gpu;
use crate::programs;
use crate::table::{Aim, Figure, Report, Sample};

/// Calls in a row: fewer than the driver queues.
const ROW: usize = 200;
const ROUNDS: usize = 61;
const WARM: usize = 10;

/// Microseconds of each call of a row.
fn row(mut call: impl FnMut(usize) -> i32) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let failed = (0..ROW).map(&mut call).filter(|status| *status != 0).count();
    let taken = begin.elapsed();
    ensure!(failed == 0, "{failed} of {ROW} calls failed");
    Ok(taken.as_secs_f64() * 1e6 / ROW as f64)
}

pub(super) fn overhead(library: Rc<Library>, device: u32, report: &mut Report) -> anyhow::Result<()> {
    let gpu = OnGpu::new(&library, Owner::primary(device, true)?)?;
    let raw = Raw::open(device)?;
    let artifact = programs::artifact(Program::Add, &Gpu::open(device)?)?;
    let kernel = raw.load(artifact.image(), artifact.entry())?;
    let a: [u64; WORKSPACE + 1] = std::array::from_fn(|at| gpu.arena(at));
    let (mut first, mut second, mut count, mut number) = (a[0], a[1], 64u64, 5u32);
    let _ = (&mut first, &mut second, &mut count, &mut number);
    let mut block = [a[0], 64, a[1], 64, 5];
    let mut parameters = [block.as_mut_ptr().cast::<c_void>()];
    let aim = library.file().map(|_| Aim::MoreByAtMost(1.0));
    let mut measure =
        |name: &str, launches: usize, call: &mut dyn FnMut(usize) -> i32| -> anyhow::Result<()> {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS + WARM {
                let taken = row(&mut *call)?;
                gpu.owner().wait()?;
                let peer = row(|_| {
                    (0..launches).map(|_| i32::from(raw.launch(&kernel, 1, &mut parameters).is_err())).sum()
                })?;
                raw.synchronize()?;
                if round >= WARM {
                    ours.push(taken);
                    theirs.push(peer);
                }
            }
            report.figure(Figure {
                name: format!("a call of {name}"),
                unit: "µs".into(),
                ours: Sample::of(ours),
                peer: Some((format!("{launches} × cuLaunchKernel"), Sample::of(theirs))),
                aim,
            });
            Ok(())
        };
    let stream = gpu.stream() as usize as *mut c_void;
    let place = |at: usize| a[at] as usize as *mut c_void;
    type Silu = unsafe extern "C" fn(*mut c_void, *mut c_void, i64, *mut c_void) -> i32;
    type Rows = unsafe extern "C" fn(*mut c_void, *mut c_void, i32, i32, *mut c_void) -> i32;
    type Gemm = unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        *mut c_void,
        i32,
        i32,
        i32,
        f32,
        f32,
        *mut c_void,
    ) -> i32;
    type AdamW = unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        f32,
        f32,
        f32,
        f32,
        f32,
        i32,
        i64,
        *mut c_void,
    ) -> i32;
    type Flash = unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        i32,
        i32,
        i32,
        i32,
        f32,
        i32,
        *mut c_void,
    ) -> i32;
    // SAFETY: here and below: the signature is that of the header, and arenas have room for what is computed.
    let silu: Silu = unsafe { transmute(library.symbol("cuda_silu")?) };
    // SAFETY: as above.
    measure("cuda_silu", 1, &mut |_| unsafe { silu(place(0), place(1), 1024, stream) })?;
    measure("cuda_silu, each on other memory", 1, &mut |turn| {
        let [input, output] = [0, 1].map(|at| place(at).wrapping_byte_add(turn % 100 * 4096));
        // SAFETY: as above.
        unsafe { silu(input, output, 1024, stream) }
    })?;
    // SAFETY: as above.
    measure("cuda_silu, each of another length", 1, &mut |turn| unsafe {
        silu(place(0), place(1), 1024 + turn as i64, stream)
    })?;
    // SAFETY: as above.
    let softmax: Rows = unsafe { transmute(library.symbol("cuda_softmax_bf16")?) };
    // SAFETY: as above.
    measure("cuda_softmax_bf16", 1, &mut |_| unsafe { softmax(place(0), place(1), 4, 1024, stream) })?;
    // SAFETY: as above.
    let gemm: Gemm = unsafe { transmute(library.symbol("cuda_gemm_bf16")?) };
    // SAFETY: as above.
    measure("cuda_gemm_bf16", 1, &mut |_| unsafe {
        gemm(place(0), place(1), place(2), 128, 128, 128, 1.0, 0.0, stream)
    })?;
    // SAFETY: as above.
    let flash: Flash = unsafe { transmute(library.symbol("cuda_flash_attention_bf16")?) };
    // SAFETY: as above.
    measure("cuda_flash_attention_bf16", 1, &mut |_| unsafe {
        flash(place(0), place(1), place(2), place(3), 1, 128, 4, 64, 0.125, 1, stream)
    })?;
    // SAFETY: as above.
    let adamw: AdamW = unsafe { transmute(library.symbol("cuda_adamw_step")?) };
    let mut step = 0;
    // SAFETY: as above.
    measure("cuda_adamw_step, each another step", 1, &mut |_| unsafe {
        step += 1;
        adamw(place(0), place(1), place(2), place(3), 1e-3, 0.9, 0.99, 1e-8, 0.01, step, 1024, stream)
    })?;
    let questions = gpu.owner().questions();
    for (name, mut ask) in questions {
        let mut taken = Vec::new();
        for _ in 0..ROUNDS {
            taken.push(row(|turn| ask(a[turn % a.len()]))? * 1e3);
        }
        let ours = Sample::of(taken);
        report.figure(Figure { name, unit: "ns".into(), ours, peer: None, aim: None });
    }
    Ok(())
}
