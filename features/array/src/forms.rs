//! Kernels of blocks of one thread beside those of many, on the processor: the ones that it runs, and the ones that GPUs do.

use std::sync::Arc;

use crate::{Accelerator, Array, Binary, DType, Device, Number, Reduction, Slice, Unary};

fn devices() -> [Device; 2] {
    let accelerator = Arc::new(Accelerator::open("cpu").expect("the processor"));
    [true, false]
        .map(|sequential| Device::with_blocks(Arc::clone(&accelerator), sequential).expect("a device"))
}

/// What both devices give for a function of an array of whole numbers is alike, bit by bit.
fn check(name: &str, dtype: DType, shape: &[u64], function: impl Fn(&Array) -> crate::Result<Array>) {
    let n: u64 = shape.iter().product();
    let results = devices().map(|device| {
        let number = |n: u64| Number::Int(i128::from(n * 7919 % 13) - 6);
        let bytes: Vec<u8> = (0..n)
            .flat_map(|at| {
                let bits = number(at).bits(dtype);
                let part = (dtype.bytes() / dtype.parts()) as usize;
                let bytes = bits[..dtype.parts() as usize]
                    .iter()
                    .flat_map(move |bits| bits.to_le_bytes().into_iter().take(part));
                bytes.collect::<Vec<_>>()
            })
            .collect();
        let x = Array::from_bytes(&device, dtype, shape, &bytes).expect("an array");
        let y = function(&x).unwrap_or_else(|error| panic!("{name} of {dtype} {shape:?}: {error}"));
        (y.shape().to_vec(), y.to_bytes().expect("the elements"))
    });
    assert!(results[0] == results[1], "{name} of {dtype} {shape:?} differs");
}

#[test]
fn reductions_are_alike() {
    for (shape, axes) in [
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
    ] {
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
        for dtype in [DType::Float32, DType::Float64, DType::Int32, DType::Int8, DType::UInt64] {
            check("sort", dtype, shape, |x| Ok(x.sort(1, false)?.0));
            check("order", dtype, shape, |x| Ok(x.sort(0, true)?.1));
            check("scan", dtype, shape, |x| x.scan(Reduction::Sum, 1, None));
            check("product", dtype, shape, |x| x.matmul(&x.permute(&[1, 0])?));
        }
        check("nonzero", DType::Int32, shape, |x| x.reshape(&[x.size()])?.nonzero());
        check("complex scan", DType::Complex64, shape, |x| x.scan(Reduction::Sum, 0, None));
    }
}
