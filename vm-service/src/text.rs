//! What a person reads: words for values, and tables.

pub(crate) mod describe;
pub(crate) mod table;
