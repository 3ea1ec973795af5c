//! The worker's side: a process that does what one guest asks of one accelerator.
//!
//! | thread | does |
//! | --- | --- |
//! | main | takes the VMM's orders, answers its pings, and watches that the others keep their deadlines |
//! | `queue` | takes batches from the virtqueue, checks them, hands their operations to the accelerator, and answers those that are done soon |
//! | `fences` | waits for what takes longer, and answers the batches that asked for that |
//! | the accelerator's own | run the operations |

mod backend;
mod budget;
mod control;
mod cost;
mod fences;
mod link;
mod log;
mod npu;
mod pace;
mod poll;
mod queue;
mod ram;
mod server;
mod session;
mod status;
mod stream;
#[cfg(test)]
mod tests;
mod usage;
mod watch;

pub(crate) use control::main;
