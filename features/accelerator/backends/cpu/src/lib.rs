//! The host's own processor as an accelerator: what there is where there is no GPU.
//!
//! [`CpuAccelerator`] is an [`Accelerator`](vm_accel::Accelerator). Kernels come as ELF objects of machine code without
//! relocations, whose functions run blocks:
//!
//! ```c
//! void kernel(const uint8_t *params, const uint32_t grid[3], uint64_t first, uint64_t end, uint8_t *scratch);
//! ```
//!
//! | part | does |
//! | --- | --- |
//! | `image` | finds the code in an object, or says why it is none to run |
//! | `sys` | code memory, writable first and executable then, never both; calls into it |
//! | `fault` | calls of kernels whose memory may have missing pages |
//! | `kernel` | a loaded kernel |
//! | `pool` | the threads that run blocks; the queues of a device share them |
//! | `stream` | a queue's thread: one command after the other |
//! | `queue` | what vm-accel sees of it; all kinds of memory are the host's |
//! | `host` | what `/proc` says of memory and load |
//!
//! # What is trusted
//! The code: an [`Artifact`](vm_accel::Artifact) is made with the promise that it keeps to its views, which a compiler that
//! checks every access can give. A fault in it is a fault of this process; run what guests send in a process of its own.

mod accelerator;
mod external;
mod fault;
mod heap;
mod host;
mod image;
mod kernel;
mod pool;
mod queue;
mod stream;
mod sys;

pub use accelerator::CpuAccelerator;
pub use kernel::CpuKernel;
pub use queue::{CpuEvent, CpuGraph, CpuQueue};
