//! Tests of [`gpu`](super).

mod chips;
mod registers;
