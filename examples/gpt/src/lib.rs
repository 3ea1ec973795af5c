//! A GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) that is trained and generates text with
//! functions of the kernel library alone.
//!
//! | module | has |
//! | --- | --- |
//! | [`config`] | the sizes of a model, and the numbers of its training |
//! | [`parameters`] | which parameters it has, and where each lies among all |
//! | [`program`] | steps, each a function of the library over parts of named arrays |
//! | [`train`] | the steps of the loss, its gradients and AdamW |
//! | [`generate`] | the steps of a prompt, and of each token behind it |
//! | [`machine`] | what compiles the kernels of steps for a device, and runs them there |
//! | [`export`] | the steps of a prompt as one graph of array operations, which NPUs run |
//!
//! Weights and activations are of bf16 ([`Config::element`](config::Config::element)), with masters, gradients and moments of f32 beside the weights; norms take the masters. Positions are
//! learned, the embedding is the last layer's weight too, and the activation is GELU by erf.

pub mod config;
pub mod export;
pub mod generate;
pub mod machine;
pub mod parameters;
pub mod program;
pub mod train;
