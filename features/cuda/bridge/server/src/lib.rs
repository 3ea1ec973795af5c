//! The CUDA driver's API over a connection: a program's calls go to a server, which makes them of a driver where the GPU is.
//!
//! [`calls`] says how each function crosses, [`wire`] how what crosses is written, [`ring`] how two processes share memory for it, and
//! [`server`] is the far side. The near side is the library `vm-bridge-guest`, which programs load as `libcuda.so.1`.
//!
//! A program's calls are in one order over all its threads: each takes the next *ticket*, and the server makes them in that order. Each
//! thread of the program has a *lane*, which a thread of the server serves, so that what the driver keeps per thread is kept so. Handles are
//! numbers that the server gives and looks up: a program can't hand the driver a pointer that it does not have of it.
//!
//! The libraries that a program loads log by [`say`].

pub mod calls;
pub mod consumers;
pub mod orders;
pub mod recording;
pub mod ring;
pub mod say;
pub mod server;
mod sync;
pub mod wire;
