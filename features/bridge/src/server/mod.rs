//! The far side: a session per program, over a driver that is opened by its path.

mod callbacks;
mod capture;
mod facts;
mod hand;
mod handles;
mod lane;
mod objects;
mod pack;
mod pointers;
mod pot;
mod quota;
mod ranges;
mod session;
mod strided;
pub mod sys;
mod turn;

pub use lane::{Lane, serve};
pub use pot::{Pot, SLOT};
pub use session::{Session, SessionError};
pub use sys::{Driver, OpenError};
