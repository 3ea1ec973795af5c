//! How long an image of code is: the driver is given its address alone.

/// `__fatBinC_Wrapper_t`: what programs point to where a fat binary is elsewhere.
pub const WRAPPER: u32 = 0x466243b1;
const FAT: u32 = 0xba55ed50;
const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");
/// Bytes of the head of an image that its length is in.
pub const HEAD: usize = 64;
/// Bytes of a fat binary's header, at least.
pub const FAT_HEAD: usize = 16;

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn half(bytes: &[u8], at: usize) -> Option<usize> {
    number(bytes, at).map(|bytes| u16::from_le_bytes(bytes).into())
}

fn long(bytes: &[u8], at: usize) -> Option<usize> {
    number(bytes, at).and_then(|bytes| u64::from_le_bytes(bytes).try_into().ok())
}

/// What an image begins with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Shape {
    /// A pointer to the image is in it.
    Wrapper,
    /// A fat binary.
    Fat,
    /// Machine code.
    Elf,
    /// A text, up to its zero.
    Text,
}

/// What the first four bytes say.
#[must_use]
pub fn shape(magic: [u8; 4]) -> Shape {
    match u32::from_le_bytes(magic) {
        WRAPPER => Shape::Wrapper,
        FAT => Shape::Fat,
        ELF => Shape::Elf,
        _ => Shape::Text,
    }
}

/// How many bytes of an image must be looked at to know its length: of machine code those up to the end of its headers.
#[must_use]
pub fn looked_at(head: &[u8]) -> Option<usize> {
    match shape(number(head, 0)?) {
        Shape::Fat => Some(FAT_HEAD),
        Shape::Elf => Some(elf_headers(head)?.max(HEAD)),
        Shape::Wrapper | Shape::Text => None,
    }
}

/// The end of the tables of sections and segments.
fn elf_headers(bytes: &[u8]) -> Option<usize> {
    let table = |at: usize, sizes: usize| {
        half(bytes, sizes)?.checked_mul(half(bytes, sizes + 2)?)?.checked_add(long(bytes, at)?)
    };
    Some(table(32, 54)?.max(table(40, 58)?))
}

/// The length of an image that begins with these bytes; `None` where they are none, or too few to tell.
#[must_use]
pub fn len(bytes: &[u8]) -> Option<usize> {
    match shape(number(bytes, 0).unwrap_or_default()) {
        Shape::Wrapper => None,
        Shape::Fat => half(bytes, 6).filter(|header| *header >= FAT_HEAD)?.checked_add(long(bytes, 8)?),
        Shape::Elf => {
            const NO_BITS: u32 = 8;
            let (from, size, count) = (long(bytes, 40)?, half(bytes, 58)?, half(bytes, 60)?);
            let sections = (0..count).map(|index| {
                let at = from.checked_add(index.checked_mul(size)?)?;
                let kind = u32::from_le_bytes(number(bytes, at.checked_add(4)?)?);
                let len = if kind == NO_BITS { 0 } else { long(bytes, at.checked_add(32)?)? };
                long(bytes, at.checked_add(24)?)?.checked_add(len)
            });
            sections.chain([elf_headers(bytes)]).try_fold(0, |end: usize, section| Some(end.max(section?)))
        }
        Shape::Text => bytes.iter().position(|byte| *byte == 0).map(|end| end + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_as_long_as_it_says() {
        let fat = |size: u64| [&FAT.to_le_bytes()[..], &[1, 0, 16, 0], &size.to_le_bytes()].concat();
        assert_eq!(len(&fat(100)), Some(116));
        assert_eq!(len(&fat(u64::MAX)), None);
        assert_eq!(len(&[&FAT.to_le_bytes()[..], &[1, 0, 15, 0], &100u64.to_le_bytes()].concat()), None);
        assert_eq!(len(b".version 8.0\0rest"), Some(13));
        assert_eq!(len(b".version 8.0"), None);
        let mut elf = [0u8; 256];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[40] = 64;
        (elf[54], elf[56], elf[58], elf[60]) = (56, 0, 64, 2);
        // The second section is at 200 and has 30 bytes.
        (elf[64 + 64 + 4], elf[64 + 64 + 24], elf[64 + 64 + 32]) = (1, 200, 30);
        assert_eq!(len(&elf), Some(230));
        elf[64 + 64 + 4] = 8;
        assert_eq!(len(&elf), Some(200));
        assert_eq!(len(&elf[..100]), None);
    }
}
