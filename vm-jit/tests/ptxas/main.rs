//! What real assemblers say of the PTX: every kernel under vm-ir/filetests/run, and every op on every type, for
//! each architecture.

mod assembler;
mod kernels;
mod ops;
mod sampling;
mod tiles;
