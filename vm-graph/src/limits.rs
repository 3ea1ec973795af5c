//! Caps on every count and size. A graph above one is refused by whoever meets it first: the decoder, the builder or the
//! validator.

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
/// Bytes of a name.
pub const MAX_NAME: usize = 64;
/// Bytes of a graph in its binary form. An ONNX model of one, which is a message of protocol buffers, stays below their 2 GiB.
pub const MAX_BYTES: usize = 1 << 30;
