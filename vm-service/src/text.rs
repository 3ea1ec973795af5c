//! Words for values, and tables.

pub(crate) mod describe;
pub(crate) mod table;
