//! What PCI Express in a tunnel costs beside its payload.

/// What a TLP has beside its payload: a header of four double words, sequence number, LCRC and framing (PCI Express Base 6.0,
/// 2.2.1 and 3.6.1).
const TLP: u64 = 16 + 2 + 4 + 2;
/// A tunnel's packet: its header, and the most that follows (USB4 2.0, chapter 5).
const PACKET: (u64, u64) = (4, 256);

/// Bytes on the lanes for a TLP with this payload.
pub const fn tunnelled_bytes(payload: u64) -> u64 {
    let tlp = payload + TLP;
    tlp + tlp.div_ceil(PACKET.1) * PACKET.0
}
