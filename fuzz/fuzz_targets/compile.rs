//! Large and deep kernels through the compiler for this machine: equal to the interpreter, refused, or too long to compare.
#![cfg_attr(feature = "libfuzzer", no_main)]

#[path = "../../features/accelerator/backends/cpu/tests/common/mod.rs"]
mod common;

fuzz::target!(|input: (u64, u16)| {
    let (seed, statements) = input;
    common::large::check(&common::Machine::new(), seed, statements.into()).unwrap();
});
