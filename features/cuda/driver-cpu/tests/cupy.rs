//! CuPy, as it comes from PyPI: what it does with kernels of its own, CUB's and Thrust's is what numpy does.

mod common;

#[test]
fn cupy_computes_as_numpy_does() {
    let Some(said) = common::python("cupy", "tests/python/cupy.py") else { return };
    assert!(said.ends_with("\n36 right\n"), "{said}");
}
