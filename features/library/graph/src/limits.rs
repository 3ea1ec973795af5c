//! Caps on every count and size. A graph above one is refused by whoever meets it first: the decoder, the builder or the
//! validator.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

/// Operations of a graph.
pub const MAX_NODES: usize = 1 << 16;
/// Inputs of a graph, and outputs.
pub const MAX_PORTS: usize = 1024;
/// Values that an operation takes.
pub const MAX_OPERANDS: usize = 256;
/// Dimensions of an array.
pub const MAX_RANK: usize = 8;
/// Elements of an array.
pub const MAX_ELEMENTS: u64 = 1 << 31;
/// Elements along a dimension that a window of a convolution or a pool reaches over, with what its dilation leaves out.
pub const MAX_WINDOW: u64 = 1 << 15;
/// Bytes of a name.
pub const MAX_NAME: usize = 64;
/// Bytes of a graph in its binary form. An ONNX model of one, which is a message of protocol buffers, stays below their 2 GiB.
pub const MAX_BYTES: usize = 1 << 30;

/// A list of at most `MOST`: a few bytes may otherwise become much memory before there is anything to check.
pub(crate) fn capped<'de, D: Deserializer<'de>, T: Deserialize<'de>, const MOST: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    struct Capped<T, const MOST: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Capped<T, MOST> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MOST}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut all = Vec::new();
            while let Some(next) = list.next_element()? {
                if all.len() == MOST {
                    return Err(A::Error::invalid_length(MOST + 1, &self));
                }
                all.push(next);
            }
            Ok(all)
        }
    }

    deserializer.deserialize_seq(Capped::<T, MOST>(PhantomData))
}
