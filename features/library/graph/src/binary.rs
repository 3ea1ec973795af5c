//! The binary form: what travels from a guest, and what caches are keyed by.
//!
//! ```text
//! graph = 00 'v' 'g' 'r'  version:u16le  (the graph in postcard's encoding)
//! ```
//!
//! postcard's numbers are LEB128, lists and texts begin with how many there are, and an operation begins with its
//! number in the order of [`Op`](crate::Op): what is added comes last, and raises the version.

use crate::limits::MAX_BYTES;
use crate::{Graph, GraphError};

/// What a graph in its binary form begins with.
pub const MAGIC: [u8; 4] = *b"\0vgr";
const VERSION: u16 = 1;

/// The bytes of a graph.
///
/// # Errors
/// [`GraphError::Binary`] beyond [`MAX_BYTES`].
pub fn encode(graph: &Graph) -> Result<Vec<u8>, GraphError> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    let bytes = postcard::to_extend(graph, bytes).map_err(|error| GraphError::Binary(error.to_string()))?;
    if bytes.len() > MAX_BYTES {
        return Err(too_long(bytes.len()));
    }
    Ok(bytes)
}

/// The graph of such bytes, which may be any.
///
/// # Errors
/// [`GraphError::Binary`].
pub fn decode(bytes: &[u8]) -> Result<Graph, GraphError> {
    let no = |what: &str| GraphError::Binary(what.to_owned());
    if bytes.len() > MAX_BYTES {
        return Err(too_long(bytes.len()));
    }
    let rest = bytes.strip_prefix(&MAGIC).ok_or_else(|| no("they do not begin with \\0vgr"))?;
    let (version, rest) = rest.split_first_chunk().ok_or_else(|| no("they end before their version"))?;
    if u16::from_le_bytes(*version) != VERSION {
        return Err(no("they are of another version of this library"));
    }
    let (graph, rest) =
        postcard::take_from_bytes(rest).map_err(|error| GraphError::Binary(error.to_string()))?;
    if !rest.is_empty() {
        return Err(no("there is something behind it"));
    }
    Ok(graph)
}

fn too_long(bytes: usize) -> GraphError {
    GraphError::Binary(format!("there are {bytes}; there can be {MAX_BYTES}"))
}
