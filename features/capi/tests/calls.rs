//! Calls on the CPU: values, what is refused and how, and threads.
#![allow(unsafe_code)]

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
    check(gemm(a, b, c, -1, 2, 2, null_mut()), "cuda_gemm: M is -1: it must be 0 or more");
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
