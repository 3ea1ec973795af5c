//! Kernels that are written once, in the IR, for every accelerator.
//!
//! Each module has one *family*: a kernel in variants, which differ in what is fixed when they are built (tile sizes, stages,
//! types) and compute the same.
//!
//! | family | computes |
//! | --- | --- |
//! | [`gemm`] | a matrix product |
//! | [`attention`] | softmax(Q · Kᵀ) · V, for each head of a batch, full, causal or in a window, of packed sequences too; its gradients; and that of a few queries to a cache, in pages or not |
//!
//! They are guest-safe: any guest may send them as they are. [`family`] is what they are to who chooses among variants.

pub mod attention;
pub mod family;
pub mod gemm;
