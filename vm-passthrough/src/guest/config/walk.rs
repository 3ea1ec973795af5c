//! Walks over a device's capability lists. The bytes may be hostile: no walk visits an offset twice, so each ends.

use super::{EXTENDED, SIZE};

/// A capability of either list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) id: u16,
    /// 0 in the list of plain capabilities.
    pub(super) version: u8,
    pub(super) offset: usize,
}

/// The capabilities in the first 256 bytes, in the order of their links, up to the first impossible link.
pub(super) fn capabilities(device: &[u8]) -> Vec<Found> {
    let byte = |at: usize| device.get(at).copied().unwrap_or(0);
    let mut found = Vec::new();
    if byte(0x06) & 0x10 == 0 {
        return found;
    }
    let mut seen = [false; EXTENDED];
    let mut offset = usize::from(byte(0x34) & !3);
    while offset >= 0x40 && !std::mem::replace(&mut seen[offset], true) {
        let id = byte(offset);
        if id == 0xff {
            break;
        }
        found.push(Found { id: id.into(), version: 0, offset });
        offset = usize::from(byte(offset + 1) & !3);
    }
    found
}

/// The capabilities from 256 bytes on, in the order of their links, up to the first impossible link.
pub(super) fn extended(device: &[u8]) -> Vec<Found> {
    let mut found = Vec::new();
    let mut seen = vec![false; SIZE];
    let mut offset = EXTENDED;
    while offset >= EXTENDED && !std::mem::replace(&mut seen[offset], true) {
        let Some(&[a, b, c, d]) = device.get(offset..offset + 4) else { break };
        let header = u32::from_le_bytes([a, b, c, d]);
        if header == 0 || header == u32::MAX {
            break;
        }
        found.push(Found { id: header as u16, version: (header >> 16 & 0xf) as u8, offset });
        offset = (header >> 20 & 0xffc) as usize;
    }
    found
}
