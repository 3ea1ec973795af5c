//! Kernels of blocks of one thread beside those of many, on the processor: the ones that it runs, and the ones that GPUs do.

use std::sync::Arc;

use crate::{Accelerator, Array, Binary, DType, Device, Number, Reduction, Slice, Unary};

fn devices() -> [Device; 2] {
    let accelerator = Arc::new(Accelerator::open("cpu").expect("the processor"));
    [true, false]
        .map(|sequential| Device::with_blocks(Arc::clone(&accelerator), sequential).expect("a device"))
}

/// All of them, or with a number in `SWEEP_SEED` every third, from another one on.
fn part<T>(all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let seed: Option<usize> =
        std::env::var("SWEEP_SEED").ok().map(|seed| seed.parse().expect("SWEEP_SEED is a number"));
    let taken = move |at: usize| seed.is_none_or(|seed| at % 3 == seed % 3);
    all.into_iter().enumerate().filter(move |(at, _)| taken(*at)).map(|(_, one)| one)
}

/// What both devices give for a function of an array of whole numbers is alike, bit by bit.
fn check(name: &str, dtype: DType, shape: &[u64], function: impl Fn(&Array) -> crate::Result<Array>) {
    let number = |n: u64| Number::Int(i128::from(n * 7919 % 13) - 6).bits(dtype);
    check_of(name, dtype, shape, number, function);
}

/// The same of an array of elements of these bits.
fn check_of(
    name: &str,
    dtype: DType,
    shape: &[u64],
    element: impl Fn(u64) -> [u64; 2],
    function: impl Fn(&Array) -> crate::Result<Array>,
) {
    let part = (dtype.bytes() / dtype.parts()) as usize;
    let parts = |at| element(at).into_iter().take(dtype.parts() as usize);
    let part = |bits: u64| bits.to_le_bytes().into_iter().take(part);
    let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(parts).flat_map(part).collect();
    let results = devices().map(|device| {
        let x = Array::from_bytes(&device, dtype, shape, &bytes).expect("an array");
        let y = function(&x).unwrap_or_else(|error| panic!("{name} of {dtype} {shape:?}: {error}"));
        (y.shape().to_vec(), y.to_bytes().expect("the elements"))
    });
    assert!(results[0] == results[1], "{name} of {dtype} {shape:?} differs");
}

#[test]
fn reductions_are_alike() {
    for (shape, axes) in part([
        (&[1u64][..], &[0i64][..]),
        (&[4096], &[0]),
        (&[100_003], &[0]),
        (&[300_000], &[0]),
        (&[7, 5000], &[1]),
        (&[5000, 7], &[0]),
        (&[5000, 64], &[0]),
        (&[3, 4, 5, 6], &[1, 3]),
        (&[2, 9000, 3], &[1]),
        (&[40, 33], &[0, 1]),
    ]) {
        for dtype in [DType::Float32, DType::Int64, DType::Int8, DType::Float16, DType::Complex64] {
            check("sum", dtype, shape, |x| x.reduce(Reduction::Sum, Some(axes), false, None));
            check("sum of squares", dtype, shape, |x| {
                x.unary(Unary::Square)?.reduce(Reduction::Sum, Some(axes), true, None)
            });
        }
        check("max", DType::Float64, shape, |x| x.reduce(Reduction::Max, Some(axes), false, None));
        check("any", DType::Bool, shape, |x| x.reduce(Reduction::Any, Some(axes), false, None));
    }
}

#[test]
fn functions_of_elements_are_alike() {
    for shape in [&[1u64][..], &[5], &[1024], &[4099], &[70, 33], &[3, 5, 64], &[2, 3, 4, 5]] {
        for dtype in
            [DType::Float32, DType::Float64, DType::BFloat16, DType::Int16, DType::UInt8, DType::Complex128]
        {
            check("x x + x", dtype, shape, |x| x.binary(Binary::Multiply, x)?.binary(Binary::Add, x));
            check("of a part, backwards", dtype, shape, |x| {
                let n = x.shape()[0];
                let part = Slice::of(None, None, Some(-2), n)?;
                x.slice(&[part])?.binary(Binary::Add, &x.slice(&[part])?)
            });
            check("turned", dtype, shape, |x| {
                let order: Vec<i64> = (0..x.ndim() as i64).rev().collect();
                x.permute(&order)?.unary(Unary::Negative)
            });
        }
    }
}

#[test]
fn sorts_scans_and_products_are_alike() {
    for shape in [&[1u64, 1][..], &[3, 1000], &[2, 1025], &[65, 17], &[130, 70]] {
        for dtype in part([DType::Float32, DType::Float64, DType::Int32, DType::Int8, DType::UInt64]) {
            check("sort", dtype, shape, |x| Ok(x.sort(1, false)?.0));
            check("order", dtype, shape, |x| Ok(x.sort(0, true)?.1));
            check("scan", dtype, shape, |x| x.scan(Reduction::Sum, 1, None));
            check("product", dtype, shape, |x| x.matmul(&x.permute(&[1, 0])?));
        }
        check("nonzero", DType::Int32, shape, |x| x.reshape(&[x.size()])?.nonzero());
        check("complex scan", DType::Complex64, shape, |x| x.scan(Reduction::Sum, 0, None));
    }
}

/// Bits of which many are those of zeros, infinities and NaN, and others of anything.
fn any_bits(dtype: DType) -> impl Fn(u64) -> [u64; 2] {
    let top = 1u64 << (dtype.bytes() / dtype.parts() * 8 - 1);
    let infinity = Number::Float(f64::INFINITY).bits(dtype)[0];
    move |at| {
        let random = (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let random = (random ^ random >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = match random >> 60 {
            0 => 0,
            1 => top,
            2 => infinity,
            3 => infinity | top,
            4 => infinity | random & (infinity - 1) | 1,
            _ => random ^ random >> 31,
        };
        [if dtype == DType::Bool { bits & 1 } else { bits }, 0]
    }
}

#[test]
fn sorts_of_any_bits_are_alike() {
    let check = |dtype: DType, shape: &[u64], axis: i64| {
        for descending in [false, true] {
            let check = |name: &str, function: &dyn Fn(&Array) -> crate::Result<Array>| {
                check_of(
                    &format!("{name}, descending: {descending},"),
                    dtype,
                    shape,
                    any_bits(dtype),
                    function,
                );
            };
            check("elements", &|x| Ok(x.sort(axis, descending)?.0));
            check("places", &|x| Ok(x.sort(axis, descending)?.1));
            check("elements alone", &|x| x.sorted(axis, descending));
        }
    };
    let real = DType::ALL.iter().filter(|dtype| !dtype.is_complex());
    for dtype in part(real) {
        check(*dtype, &[200], 0);
    }
    for dtype in [DType::Int8, DType::BFloat16, DType::Float64] {
        check(dtype, &[3, 4500], -1);
    }
    for n in part([0, 1, 2, 255, 256, 1000, 1024, 1025, 4095, 4096, 4097, 8191, 8192, 70_001]) {
        check(DType::Float32, &[n], 0);
    }
    for shape in part([[2, 5000], [4098, 3], [70, 33], [300, 3], [1, 5], [0, 4]]) {
        check(DType::Int16, &shape, 0);
        check(DType::Int16, &shape, 1);
    }
}

/// 1 and −1, none of whose products is 0 or large.
fn signs(dtype: DType) -> impl Fn(u64) -> [u64; 2] {
    move |at| Number::Int(1 - i128::from(at * 7919 % 3 / 2 * 2)).bits(dtype)
}

#[test]
fn scans_are_alike() {
    // Every type in all launches; every length in few types.
    for dtype in part(DType::ALL) {
        for shape in [&[9001u64][..], &[3, 33], &[2, 1024]] {
            check("sums", *dtype, shape, |x| x.scan(Reduction::Sum, -1, None));
        }
    }
    for shape in part([
        &[1u64][..],
        &[15],
        &[16],
        &[512],
        &[513],
        &[4096],
        &[4097],
        &[70_001],
        &[5, 4096],
        &[2, 8193],
        &[2000, 600],
    ]) {
        check("sums", DType::Float32, shape, |x| x.scan(Reduction::Sum, -1, None));
        check("sums in float32", DType::UInt8, shape, |x| x.scan(Reduction::Sum, -1, Some(DType::Float32)));
        check_of("products", DType::Int32, shape, signs(DType::Int32), |x| x.scan(Reduction::Prod, -1, None));
    }
    for (from, to) in part([
        (DType::Bool, DType::Int32),
        (DType::Int32, DType::Int8),
        (DType::Int64, DType::Complex128),
        (DType::Complex64, DType::Complex128),
    ]) {
        check(&format!("sums in {to}"), from, &[5000], |x| x.scan(Reduction::Sum, -1, Some(to)));
    }
    let of_signs = signs(DType::Complex64);
    check_of("products", DType::Complex64, &[5000], of_signs, |x| x.scan(Reduction::Prod, -1, None));
    for shape in part([[9000, 3], [9000, 20], [16, 5], [600, 1]]) {
        check("down columns", DType::Int32, &shape, |x| x.scan(Reduction::Sum, 0, None));
        check("down columns", DType::Complex64, &[2, shape[0], shape[1]], |x| {
            x.scan(Reduction::Sum, 1, None)
        });
    }
}
