//! Argmax, top-k and sampling from logits.
//!
//! Logits are `[rows, columns]` of f32, bf16 or f16, up to 2^23 columns. Results are exact and the same, bit for bit, on every
//! backend, for every alignment and whatever the number of rows: keys are integers, and weights, which are e^((x − max) / temperature),
//! are rounded to whole numbers before they are added, so that sums have no order. A weight is relative to the greatest logit of the
//! row, or of its 1,024 columns where nothing is left out, in 2^-40, cut: what is less likely than the likeliest by that factor is never
//! drawn. It is computed of (x − max) · (log2 e / temperature) in f32.
//!
//! A row's 64-bit seed is the key of Philox 4x32-10, whose counter is the number of the attempt, from 0 on. −0 counts as 0. Where tokens
//! are drawn, or the greatest is taken at a temperature of 0, NaN counts as −∞, which is never drawn; −1 is drawn where there is nothing
//! else; and if there is +∞, only such are drawn, each as likely.
//!
//! Logits are read in one pass by all of the device ([`Parts`]), which leaves little of each 1,024 columns; a block for each row does the
//! rest, and reads again what it needs. Only of the most likely tokens ([`Candidates::Mass`]) all is read again, by that block.
//! A processor finds the greatest, or the k greatest, of each row by one thread ([`Serial`]).

mod best;
mod call;
mod chunk;
mod draw;
mod numbers;
mod parts;
mod router;
mod select;
mod serial;
mod shares;

pub use best::Best;
pub(crate) use call::scale_of;
pub use call::{Argmax, Logits, MAX_COLUMNS, Sample, SoftmaxTopK, TopK, TopKSample, TopPSample};
pub use chunk::{CHUNK, Reader};
pub use draw::{Candidates, Draw};
pub use numbers::Nan;
pub use parts::{Parts, What};
pub use router::Router;
pub use select::{Output, Select, Source};
pub use serial::{Serial, Serially};
pub use shares::Shares;
