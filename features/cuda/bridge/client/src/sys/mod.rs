//! The C side: the driver's exported names, and the memory that their callers pass.
#![allow(unsafe_code)]

pub(crate) mod call;
pub(crate) mod caller;
pub(crate) mod exit;
mod export;
pub(crate) mod fork;
pub(crate) mod print;
pub(crate) mod tables;
pub(crate) mod there;
pub(crate) mod window;

pub(crate) use export::symbols;
pub(crate) use there::PAGE;
