//! The C side: the driver's functions, those that stand in their place, and what the dynamic linker asks.
#![allow(unsafe_code)]

mod copies;
mod entry;
mod find;
mod real;

pub(crate) use copies::Copy;
