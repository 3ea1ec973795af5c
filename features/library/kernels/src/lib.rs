//! Kernels that are written once, in the IR, for every accelerator.
//!
//! Each module has one *family*: a kernel in variants, which differ in what is fixed when they are built (tile sizes, stages,
//! types) and compute the same.
//!
//! | family | computes |
//! | --- | --- |
//! | [`gemm`] | a matrix product |
//! | [`attention`] | softmax(Q · Kᵀ) · V, for each head of a batch, full, causal or in a window, of packed sequences too; its gradients; and that of a few queries to a cache, in pages or not |
//! | [`elementwise`] | chains of elementwise steps in one kernel |
//! | [`quantise`] | arrays in FP8, with the scales that products and attention take |
//! | [`softmax`] | softmax of rows, its logarithm, and their gradients |
//! | [`norm`] | RMS norm and layer norm of rows, fused with a residual, and their gradients |
//! | [`loss`] | cross-entropy and its gradient |
//! | [`flat`] | steps of AdamW and SGD, norms and clipping of gradients, gradients of activations, over many tensors in a launch |
//! | [`gather`], [`scatter`] | embeddings and their gradients |
//! | [`columns`], [`transpose`] | sums of columns, transposes |
//! | [`rope`], [`append`] | rotary embedding, caches of keys and values that grow |
//! | [`experts`] | the loss that balances experts |
//! | [`sample`] | argmax, top-k, and draws from logits |
//!
//! They are guest-safe: any guest may send them as they are. [`family`] is what they are to who chooses among variants, [`call`]
//! what a function of the library is: launches of their kernels, [`functions`] has those with a name in other languages, [`graph`] what it is where there are no kernels, [`strided`] how it is called with strided rows, [`row`] how the
//! rows of a matrix are divided among threads.

pub mod append;
pub mod attention;
pub mod call;
#[cfg(feature = "cases")]
pub mod cases;
pub mod columns;
pub mod elementwise;
pub mod experts;
pub mod family;
pub mod flat;
pub mod functions;
pub mod gather;
pub mod gemm;
pub mod graph;
pub mod loss;
pub mod norm;
pub mod pieces;
pub mod quantise;
pub mod rope;
pub mod row;
pub mod sample;
pub mod scatter;
pub mod softmax;
pub mod strided;
pub mod transpose;
