//! The far side: a session per program, over a driver that is opened by its path.

mod callbacks;
mod capture;
mod deadline;
mod effects;
mod exports;
mod facts;
pub mod fuzz;
mod hand;
mod handles;
mod ipc;
mod lane;
mod nodes;
mod nvml;
mod objects;
mod options;
mod pack;
mod pointers;
mod pot;
mod prints;
mod quota;
mod ranges;
mod session;
mod slice;
mod special;
mod staged;
mod strided;
pub mod sys;
mod turn;

pub use exports::{Exports, Permit};
pub use lane::{Lane, serve};
pub use pot::{Pot, SLOT};
pub use prints::Prints;
pub use session::{Session, SessionError};
pub use slice::{BYTES as SLICE, Slice};
pub use sys::{Driver, OpenError};
