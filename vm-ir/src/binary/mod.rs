//! The binary form: what travels from a guest, and what caches are keyed by.
//!
//! ```text
//! module   = 00 'v' 'i' 'r'  version:u16le  flags:u16le  count  kernel*
//! kernel   = name  guest  line?  block{3}  cluster?  resident?  count param*  count shared*  locals?  tile?  region
//! param    = name  (00 | 02) element access align count dim*  |  name  01 type range
//! dim      = 00 multiple | 01 extent | 02 multiple name
//! range    = 00 | 01 least greatest
//! shared   = name  element  count extent*  line?
//! locals   = count local*
//! local    = name  extent  line?
//! region   = count value-def*  count op*  count value*  line?
//! tile     = 00 | 01 groups  count channel*  count fragment*
//! channel  = name  element  rows  columns  stages  multicast  line?
//! fragment = name  element  rows  columns-of  line?
//! columns-of = 00 | 01 columns
//! op       = code  attribute*  place  others?  count value*  count immediate*  count region*  count value-def*  line?
//! place    = 00 | 01 view | 02 array | 03 channel | 04 fragment | 05 local array
//! others   = count place*
//! value-def= type  name
//! ```
//!
//! Numbers are LEB128, signed ones zig-zagged, each in its one shortest form; a name is its length and its
//! ASCII. Values are numbered in the order of their definition, so a definition carries no number and a use
//! carries that of a value already read. There is exactly one encoding of a module with a given choice of
//! lines: what decodes, encodes to the same bytes.
//!
//! Op codes have room for what comes: 0x001–0x3ff for SIMT ops, 0x400–0x7ff for tile ops, 0x800 and up for ops of
//! trusted modules. A decoder refuses what it does not know; a new op or type raises the version.

mod decode;
mod encode;

use crate::module::{Kernel, ParamKind};

pub use decode::{DecodeError, DecodeErrorKind, decode};
pub use encode::{Lines, encode};

pub(crate) const MAGIC: [u8; 4] = *b"\0vir";
/// Flag: lines are there.
pub(crate) const WITH_LINES: u16 = 1;
/// Flag: the blocks of a cluster are there. It is set if and only if some kernel has more than one.
pub(crate) const WITH_CLUSTERS: u16 = 2;
/// Flag: tiles, and what ops work on beside one place, are there. It is set if and only if some kernel has either.
pub(crate) const WITH_TILES: u16 = 4;

/// Flag: extents have names. It is set if and only if one has.
pub(crate) const WITH_NAMES: u16 = 8;

/// Flag: resident blocks are there. It is set if and only if some kernel asks for them.
pub(crate) const WITH_RESIDENT: u16 = 16;

/// Flag: local arrays are there. It is set if and only if some kernel has any.
pub(crate) const WITH_LOCALS: u16 = 32;

/// Is there in a kernel what [`WITH_NAMES`] tells of?
pub(crate) fn has_names(kernel: &Kernel) -> bool {
    kernel.params.iter().any(|param| match &param.kind {
        ParamKind::View(view) => view.names.iter().take(view.rank()).any(Option::is_some),
        ParamKind::Scalar { .. } => false,
    })
}

/// Is there in a kernel what [`WITH_TILES`] tells of?
pub(crate) fn has_tiles(kernel: &Kernel) -> bool {
    let mut found = kernel.tile.is_some();
    kernel.for_each_op(&mut |op| found |= !op.others.is_empty());
    found
}
