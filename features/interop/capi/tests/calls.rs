//! Calls on the CPU: values, what is refused and how, and threads.
#![allow(unsafe_code, clippy::approx_constant, clippy::multiple_unsafe_ops_per_block)]

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use vmkernels::sys::*;

/// The text of this thread's last error.
fn last() -> String {
    // SAFETY: it is a string until the next call.
    unsafe { CStr::from_ptr(vmk_last_error()) }.to_str().unwrap().to_owned()
}

fn on_cpu() {
    assert_eq!(vmk_use(vmk_device::VMK_CPU as i32), vmk_status::VMK_SUCCESS);
}

#[test]
fn products() {
    on_cpu();
    for [m, n, k] in [[1, 1, 1], [3, 5, 7], [70, 33, 40], [64, 64, 64], [2, 3, 0], [0, 3, 2]] {
        for (alpha, beta) in [(1.0, 0.0), (2.0, -0.5)] {
            // One element further in is aligned to that alone.
            for from in [0, 1] {
                let of = |count: usize, seed: usize| -> Vec<f32> {
                    (0..count + from).map(|at| ((at * 7 + seed) % 11) as f32 - 5.0).collect()
                };
                let (a, b, mut c) = (of(m * k, 1), of(k * n, 2), of(m * n, 3));
                let before = c.clone();
                // SAFETY: the matrices are as large as they are said to be.
                let status = unsafe {
                    cuda_gemm(
                        a[from..].as_ptr(),
                        b[from..].as_ptr(),
                        c[from..].as_mut_ptr(),
                        m as i32,
                        n as i32,
                        k as i32,
                        alpha,
                        beta,
                        null_mut(),
                    )
                };
                assert_eq!(status, vmk_status::VMK_SUCCESS, "{}", last());
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let sum: f32 = (0..k).map(|l| a[from + i * k + l] * b[from + l * n + j]).sum();
                    let wanted = alpha * sum + beta * before[from + i * n + j];
                    let found = c[from + i * n + j];
                    assert!(
                        (found - wanted).abs() < 1e-3,
                        "{m} x {n} x {k} at {i}, {j}: {found}, not {wanted}"
                    );
                }
            }
        }
    }
}

#[test]
fn attention_of_heads_of_any_size() {
    on_cpu();
    for dim in [1, 64, 65, 128, 129, 200, 255, 256] {
        // Two keys that are alike, so the mean of the values.
        let (q, v) = (vec![0.5f32; 2 * dim], (0..2 * dim).map(|at| (at / dim) as f32).collect::<Vec<_>>());
        let mut found = vec![9.0f32; 2 * dim];
        let (of_q, of_v, to) = (q.as_ptr(), v.as_ptr(), found.as_mut_ptr());
        // SAFETY: one sequence of two tokens of one head of `dim` elements.
        let status =
            unsafe { cuda_flash_attention(of_q, of_q, of_v, to, 1, 2, 1, dim as i32, 0.125, 0, null_mut()) };
        assert_eq!(status, vmk_status::VMK_SUCCESS, "{dim}: {}", last());
        assert!(found.iter().all(|value| (value - 0.5).abs() < 1e-5), "{dim}: {:?}", &found[..2]);
    }
}

#[test]
fn what_is_refused() {
    on_cpu();
    const INVALID: vmk_status = vmk_status::VMK_INVALID_VALUE;
    let mut memory = [0.0f32; 256];
    let at = memory.as_mut_ptr();
    let (a, b, c) = (at.cast_const(), at.wrapping_add(64).cast_const(), at.wrapping_add(128));
    let gemm = |a, b, c, m, n, k, stream: *mut c_void| {
        // SAFETY: what is not refused has no elements, or lies in `memory`.
        unsafe { cuda_gemm(a, b, c, m, n, k, 1.0, 0.0, stream) }
    };
    let odd = a.cast::<u8>().wrapping_add(2).cast::<f32>();
    let last_page = (usize::MAX - 15) as *mut f32;
    let check = |status: vmk_status, text: &str| {
        let said = last();
        assert!(status == INVALID && said.contains(text), "{status:?}: {said:?}, not {text:?}");
    };
    check(gemm(null(), b, c, 2, 2, 2, null_mut()), "cuda_gemm: A is NULL: 16 bytes");
    check(gemm(a, null(), c, 2, 2, 2, null_mut()), "cuda_gemm: B is NULL");
    check(gemm(a, b, null_mut(), 2, 2, 2, null_mut()), "cuda_gemm: C is NULL");
    check(gemm(odd, b, c, 2, 2, 2, null_mut()), "must be a multiple of 4");
    check(gemm(a, b, c, -1, 2, 2, null_mut()), "cuda_gemm: M is -1: it must not be negative");
    check(gemm(a, b, c, 2, i32::MIN, 2, null_mut()), "cuda_gemm: N is -2147483648");
    check(gemm(a, b, last_page, 2, 2, 2, null_mut()), "there are no 16 bytes behind that");
    check(gemm(a, b, at, 2, 2, 2, null_mut()), "cuda_gemm: C is 0x");
    check(gemm(a, b, at.wrapping_add(3), 2, 2, 2, null_mut()), "overlap those of A");
    check(gemm(a, b, c, 2, 2, 2, at.cast()), "cuda_gemm: stream is 0x");
    // SAFETY: nothing is that large.
    let huge =
        unsafe { cuda_gemm_batched(a, b, c, i32::MAX, i32::MAX, i32::MAX, i32::MAX, 1.0, 0.0, null_mut()) };
    check(huge, "more bytes than can be addressed");
    let attend = |dim, scale| {
        // SAFETY: it is refused, or all lies in `memory`.
        unsafe { cuda_mqa_attention(a, b, b, c, null(), 1, 1, 1, dim, scale, null_mut()) }
    };
    check(attend(257, 1.0), "head_dim is 257: it must be at most 256");
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        check(attend(8, scale), "cuda_mqa_attention: scale is");
    }
    check(vmk_use(7), "vmk_use: device is 7");
    let (mut at_k, seeds) = ([0i32; 8], [7i64, 8]);
    let draws = at_k.as_mut_ptr();
    let adamw = |step| {
        // SAFETY: it is refused.
        unsafe { cuda_adamw_step(at, a, c, c, 0.1, 0.9, 0.99, 1e-8, 0.0, step, 4, null_mut()) }
    };
    let topk = |k| {
        // SAFETY: it is refused.
        unsafe { cuda_topk(a, c, draws, 2, 4, k, null_mut()) }
    };
    let topk_sample = |k, temperature| {
        // SAFETY: two rows of four logits, and two draws.
        unsafe { cuda_topk_sample(a, draws, seeds.as_ptr(), 2, 4, k, temperature, null_mut()) }
    };
    let topp_sample = |p| {
        // SAFETY: as above.
        unsafe { cuda_topp_sample(a, draws, seeds.as_ptr(), 2, 4, p, 1.0, null_mut()) }
    };
    for step in [0, -1, i32::MIN] {
        check(adamw(step), &format!("cuda_adamw_step: step is {step}: it must be 1 or more"));
    }
    check(topk(5), "cuda_topk: k is 5: it must be at most dim, which is 4");
    check(topk_sample(-1, 1.0), "cuda_topk_sample: k is -1: it must not be negative");
    check(
        topk_sample(0, 1.0),
        "cuda_topk_sample: k is 0, and nothing is left to draw from: it must be 1 or more",
    );
    check(topk_sample(2, -1.0), "cuda_topk_sample: temperature is -1: it must be finite and 0 or more");
    check(topp_sample(1.5), "cuda_topp_sample: top_p is 1.5: it must be from 0 to 1");
    check(topp_sample(f32::NAN), "cuda_topp_sample: top_p is NaN");
    // A k of more than all is all.
    assert_eq!(topk_sample(5, 1.0), vmk_status::VMK_SUCCESS, "{}", last());
    // A function and its workspace size refuse the same.
    let mut bytes = 0;
    // SAFETY: no memory is looked at.
    let size = unsafe { cuda_topk_workspace_size(1, (1 << 23) + 1, 1, &raw mut bytes) };
    check(
        size,
        "cuda_topk_workspace_size: the call can't be made: 8388609 columns; at most 8388608 are taken",
    );
    // A text names what was called.
    // SAFETY: it is refused.
    let silu = unsafe { cuda_silu_bf16(null(), at.cast(), 4, null_mut()) };
    check(silu, "cuda_silu_bf16: input is NULL: 8 bytes are needed there");
    // SAFETY: it is refused.
    let drawn = unsafe {
        cuda_topp_sample_bf16_ws(a.cast(), draws, seeds.as_ptr(), 2, 4, 0.5, 1.0, c.cast(), 1, null_mut())
    };
    check(drawn, "cuda_topp_sample_bf16_ws: workspace has 1 bytes");
    check(drawn, "as cuda_topp_sample_bf16_workspace_size tells");
    // A row of no logits has no loss.
    // SAFETY: it is refused.
    let loss = unsafe { cuda_cross_entropy_forward(a, draws, c, null_mut(), 2, 0, null_mut()) };
    check(loss, "cuda_cross_entropy_forward: the call can't be made: rows of no columns");
    // Nothing to compute succeeds with any pointers; memory that is read may overlap.
    assert_eq!(gemm(null(), null(), null_mut(), 0, 5, 5, null_mut()), vmk_status::VMK_SUCCESS);
    assert_eq!(gemm(a, a, c, 2, 2, 2, null_mut()), vmk_status::VMK_SUCCESS, "{}", last());
    assert_eq!(attend(8, 0.5), vmk_status::VMK_SUCCESS, "{}", last());
    assert_eq!(vmk_device_in_use(), vmk_device::VMK_CPU as i32);
    assert_eq!(vmk_device_count() > 0, vmk_use(vmk_device::VMK_GPU as i32) == vmk_status::VMK_SUCCESS);
    on_cpu();
}

#[test]
fn errors_are_a_threads_own() {
    on_cpu();
    // SAFETY: it is refused.
    unsafe { cuda_gemm(null(), null(), null_mut(), 1, 1, 1, 1.0, 0.0, null_mut()) };
    let other = std::thread::spawn(last).join().unwrap();
    assert!(other.is_empty() && last().contains("A is NULL"), "{other:?}");
}

/// A program may round otherwise, or flush subnormals as one compiled with -Ofast does: that is neither kernels' nor lost.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_thread_keeps_its_float_modes() {
    on_cpu();
    let modes = || {
        let mut modes = 0u32;
        // SAFETY: it stores the register to this number.
        unsafe { std::arch::asm!("stmxcsr [{0}]", in(reg) &raw mut modes, options(nostack)) };
        modes
    };
    let set = |modes: u32| {
        // SAFETY: no reserved bit is set.
        unsafe { std::arch::asm!("ldmxcsr [{0}]", in(reg) &raw const modes, options(nostack)) };
    };
    let (before, small) = (modes(), [f32::from_bits(5); 4]);
    let mut to = [1.0f32; 4];
    // Toward zero, subnormals flushed.
    set(0xffc0);
    // SAFETY: both have four elements.
    let status = unsafe { cuda_scale(small.as_ptr(), to.as_mut_ptr(), 3.0, 4, null_mut()) };
    let after = modes();
    set(before);
    assert_eq!((status, after), (vmk_status::VMK_SUCCESS, 0xffc0), "{}", last());
    assert_eq!(to.map(f32::to_bits), [15; 4]);
}

/// Memory to work in, which begins on a multiple of 256.
#[repr(align(256))]
struct Aligned([u8; 1 << 16]);

#[test]
fn training() {
    on_cpu();
    let size = 1001;
    let (mut param, grad) = (vec![1.0f32; size], vec![0.5f32; size]);
    let (mut m, mut v) = (vec![0.0f32; size], vec![0.0f32; size]);
    // SAFETY: all are of this size.
    let status = unsafe {
        let (m, v) = (m.as_mut_ptr(), v.as_mut_ptr());
        cuda_adamw_step(
            param.as_mut_ptr(),
            grad.as_ptr(),
            m,
            v,
            0.1,
            0.9,
            0.99,
            1e-8,
            0.0,
            1,
            size as i64,
            null_mut(),
        )
    };
    assert_eq!(status, vmk_status::VMK_SUCCESS, "{}", last());
    // The first step is the learning rate's, whatever the gradient is.
    assert!(param.iter().all(|value| (value - 0.9).abs() < 1e-5), "{:?}", &param[..3]);
    assert!(m.iter().all(|value| (value - 0.05).abs() < 1e-6));

    let (mut grad, mut norm) = (vec![3.0f32; 16], 0.0f32);
    let mut bytes = 0;
    let mut work = Box::new(Aligned([0xff; 1 << 16]));
    // SAFETY: it is a number.
    assert_eq!(unsafe { cuda_grad_clip_workspace_size(1.0, 16, &raw mut bytes) }, vmk_status::VMK_SUCCESS);
    assert!(bytes > 0 && bytes <= work.0.len(), "{bytes}");
    // SAFETY: the memory to work in is large enough.
    let mut clip = |work: *mut f32| unsafe {
        cuda_grad_clip(grad.as_mut_ptr(), work, &raw mut norm, 6.0, 16, null_mut())
    };
    assert_eq!(clip(null_mut()), vmk_status::VMK_INVALID_VALUE);
    assert!(last().contains("cuda_grad_clip: partial_norms is 0x0"), "{}", last());
    assert_eq!(clip(work.0.as_mut_ptr().cast()), vmk_status::VMK_SUCCESS, "{}", last());
    assert!((norm - 12.0).abs() < 1e-5 && grad.iter().all(|value| (value - 1.5).abs() < 1e-5), "{norm}");

    // SAFETY: all lies in the vector.
    assert_eq!(unsafe { cuda_zero_grad(grad.as_mut_ptr(), 15, null_mut()) }, vmk_status::VMK_SUCCESS);
    assert_eq!((grad[14], grad[15] > 1.0), (0.0, true));

    let (input, indices, mut output) = ([1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [1, -1, 1], [0.0f32; 4]);
    // SAFETY: three rows of two, of a table of two.
    let status = unsafe {
        cuda_scatter_add(input.as_ptr(), indices.as_ptr(), output.as_mut_ptr(), 3, 2, 2, null_mut())
    };
    assert_eq!((status, output), (vmk_status::VMK_SUCCESS, [0.0, 0.0, 6.0, 8.0]), "{}", last());

    let (mut q, mut k, freqs) =
        ([1.0f32, 0.0, 1.0, 0.0], [0.0f32, 1.0, 0.0, 1.0], [std::f32::consts::FRAC_PI_2]);
    // SAFETY: two tokens of one head of two elements.
    let status = unsafe { cuda_rope(q.as_mut_ptr(), k.as_mut_ptr(), freqs.as_ptr(), 1, 2, 1, 2, null_mut()) };
    assert_eq!(status, vmk_status::VMK_SUCCESS, "{}", last());
    let close =
        |found: [f32; 4], wanted: [f32; 4]| found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(close(q, [1.0, 0.0, 0.0, 1.0]) && close(k, [0.0, 1.0, -1.0, 0.0]), "{q:?} {k:?}");

    let (probs, chosen) = ([0.25f32, 0.75, 0.5, 0.5], [1, 0]);
    let (mut loss, mut counts, mut means) = (0.0f32, [0.0f32; 2], [0.0f32; 2]);
    let (probs, chosen) = (probs.as_ptr(), chosen.as_ptr());
    let (to, of, mean) = (&raw mut loss, counts.as_mut_ptr(), means.as_mut_ptr());
    // SAFETY: two tokens of two experts.
    let status = unsafe { cuda_aux_loss_forward(probs, chosen, to, of, mean, 2, 2, 1, 0.5, null_mut()) };
    assert!(status == vmk_status::VMK_INVALID_VALUE && last().contains("workspace is needed"), "{}", last());
    // SAFETY: it is a number.
    let status = unsafe { cuda_aux_loss_forward_workspace_size(2, 2, 1, 0.5, &raw mut bytes) };
    assert!(status == vmk_status::VMK_SUCCESS && bytes > 0, "{}", last());
    for (given, wanted) in [(bytes - 1, vmk_status::VMK_INVALID_VALUE), (bytes, vmk_status::VMK_SUCCESS)] {
        let work = work.0.as_mut_ptr().cast();
        // SAFETY: as above; the memory to work in has more bytes than either.
        let status = unsafe {
            cuda_aux_loss_forward_ws(probs, chosen, to, of, mean, 2, 2, 1, 0.5, work, given, null_mut())
        };
        assert_eq!(status, wanted, "{}", last());
    }
    // Both experts have half of the tokens: alpha.
    assert!(
        (loss - 0.5).abs() < 1e-5 && counts == [1.0, 1.0] && means == [0.375, 0.625],
        "{loss} {counts:?} {means:?}"
    );
}

#[test]
fn rows_and_tokens() {
    on_cpu();
    let ok = |status: vmk_status| assert_eq!(status, vmk_status::VMK_SUCCESS, "{}", last());
    let close = |found: &[f32], wanted: &[f32]| {
        let near = found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(found.len() == wanted.len() && near, "{found:?}, not {wanted:?}");
    };
    let (x, y) = ([0.0f32, 1.0, -2.0, 4.0, 2.0, 2.0], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let mut to = [0.0f32; 6];
    let (a, b, out, none) = (x.as_ptr(), y.as_ptr(), to.as_mut_ptr(), null_mut());
    // SAFETY: all of these have six elements.
    unsafe {
        ok(cuda_add(a, b, out, 6, none));
        close(&to, &[1.0, 3.0, 1.0, 8.0, 7.0, 8.0]);
        ok(cuda_mul(a, b, out, 6, none));
        close(&to, &[0.0, 2.0, -6.0, 16.0, 10.0, 12.0]);
        ok(cuda_scale(a, out, -0.5, 6, none));
        close(&to, &[0.0, -0.5, 1.0, -2.0, -1.0, -1.0]);
        ok(cuda_silu(a, out, 6, none));
        close(&to[..3], &[0.0, 0.731_058, -0.238_406]);
        ok(cuda_softmax(a, out, 3, 2, none));
        close(&to, &[0.268_941, 0.731_058, 0.002_472, 0.997_527, 0.5, 0.5]);
        ok(cuda_rmsnorm(a, b, out, 3, 2, 0.0, none));
        close(&to, &[0.0, 2.828_427, -0.632_455, 2.529_822, 1.0, 2.0]);
    }
    let mut work = Box::new(Aligned([0xff; 1 << 16]));
    let (space, room) = (work.0.as_mut_ptr().cast::<c_void>(), work.0.len());
    let (mut at, seeds, targets) = ([-1i32; 6], [1i64, 2, 3], [1i32, -100, 0]);
    let (places, seed) = (at.as_mut_ptr(), seeds.as_ptr());
    // SAFETY: as above, of 3 rows of 2.
    unsafe {
        ok(cuda_argmax_ws(a, places, 3, 2, space, room, none));
        assert_eq!(at[..3], [1, 1, 0]);
        ok(cuda_topk_ws(a, out, places, 1, 6, 3, space, room, none));
        assert_eq!((&to[..3], &at[..3]), (&[4.0, 2.0, 2.0][..], &[3, 4, 5][..]));
        ok(cuda_softmax_topk_ws(a, out, places, 3, 2, 1, space, room, none));
        close(&to[..3], &[0.731_058, 0.997_527, 0.5]);
        ok(cuda_cross_entropy_forward_ws(a, targets.as_ptr(), out, null_mut(), 3, 2, space, room, none));
        close(&to[..3], &[0.313_262, 0.0, 0.693_147]);
        ok(cuda_sample_ws(a, places, seed, 3, 2, 0.0, space, room, none));
        assert_eq!(at[..3], [1, 1, 0]);
        ok(cuda_topk_sample_ws(a, places, seed, 3, 2, 1, 1.0, space, room, none));
        assert_eq!(at[..3], [1, 1, 0]);
        ok(cuda_topp_sample_ws(a, places, seed, 3, 2, 0.0, 1.0, space, room, none));
        assert_eq!(at[..3], [1, 1, 0]);
    }
}

#[test]
fn sizes_of_what_pointers_point_to() {
    let check = |name: &CStr, words: &[u64], wanted: Result<&[u64], &str>| {
        let mut bytes = [9; 16];
        let count = words.len() as i32;
        // SAFETY: there are as many words, and room for as many numbers.
        let status = unsafe { vmk_buffer_sizes(name.as_ptr(), words.as_ptr(), count, bytes.as_mut_ptr()) };
        match wanted {
            Ok(wanted) => {
                assert_eq!(
                    (status, &bytes[..words.len()]),
                    (vmk_status::VMK_SUCCESS, wanted),
                    "{name:?}: {}",
                    last()
                );
            }
            Err(part) => {
                let said = last();
                assert!(
                    status == vmk_status::VMK_INVALID_VALUE && said.contains(part),
                    "{name:?}: {status:?}: {said}"
                );
            }
        }
    };
    let one = u64::from(1.0f32.to_bits());
    check(c"cuda_gemm", &[1, 1, 1, 2, 3, 4, one, 0], Ok(&[32, 48, 24, 0, 0, 0, 0, 0]));
    check(c"cuda_gemm_bf16", &[1, 1, 1, 2, 3, 4, one, 0], Ok(&[16, 24, 12, 0, 0, 0, 0, 0]));
    // One that may be NULL, with and without.
    check(c"cuda_linear", &[1, 1, 1, 1, 2, 3, 4], Ok(&[24, 48, 32, 16, 0, 0, 0]));
    check(c"cuda_linear", &[1, 1, 1, 0, 2, 3, 4], Ok(&[24, 48, 32, 0, 0, 0, 0]));
    check(c"cuda_gemm", &[1, 1, 1, u64::MAX, 3, 4, one, 0], Err("cuda_gemm: M is -1"));
    check(
        c"cuda_gemm",
        &[1, 1, 1, 1 << 31, 1 << 31, 1 << 31, one, 0],
        Err("more bytes than can be addressed"),
    );
    check(c"cuda_gemm", &[1, 1], Err("count is 2: cuda_gemm has 8 parameters"));
    check(c"cuda_gemm_ws", &[1, 1], Err("name is \"cuda_gemm_ws\", which no function"));
    check(c"\xff", &[], Err("which no function"));
    // SAFETY: NULL is refused.
    let status = unsafe { vmk_buffer_sizes(null(), null(), 0, null_mut()) };
    assert!(status == vmk_status::VMK_INVALID_VALUE && last().contains("name is NULL"), "{}", last());
}
