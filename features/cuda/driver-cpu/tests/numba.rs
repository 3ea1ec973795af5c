//! Numba, as it comes from PyPI: its reductions, what lanes of a warp do together, and what its kernels print.

mod common;

#[test]
fn numba_computes_and_prints() {
    let Some(said) = common::python("numba", "tests/python/numba.py") else { return };
    let printed = "thread 0 has 1.500000\nthread 1 has -2.000000\nthread 2 has 0.250000\n";
    assert_eq!(said, format!("reductions right\nwarps right\nblocks right\n{printed}printing right\n"));
}
