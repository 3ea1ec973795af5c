//! A `libcuda.so.1` for machines without a GPU: what programs ask of the driver, a server does where there is one.
//!
//! The library `libvm_bridge_guest.so` exports the driver's functions. It is linked as `libcuda.so.1` in a directory of `LD_LIBRARY_PATH`.
//! How each function crosses is in `features/cuda/bridge/server/calls.txt`; the others answer `CUDA_ERROR_NOT_SUPPORTED`, and say so once.
//!
//! | variable | says |
//! | --- | --- |
//! | `VM_BRIDGE` | where the server is: `unix:/path` or `vsock:PORT`; where it is not set, the accelerator of this guest, else `unix:/run/vm-bridge.sock` |
//! | `VM_BRIDGE_COUNTS` | a file that is told, when the program ends, how often each function was sent, and its answer waited for |
//! | `VM_BRIDGE_LOG` | a file for what is said, which else goes to standard error |

mod client;
mod connect;
mod connection;
mod counts;
mod current;
mod describe;
mod forward;
mod hand;
mod known;
mod mapped;
mod pack;
mod sys;
mod tls;

use vm_bridge::say;
