//! CRC-32 of IEEE 802.3, and what a device must do so that host and device come to the same.
//!
//! The host takes the crate `crc32fast`. A device has many threads, each with words of its own, whose remainders are then
//! put together: a remainder is linear, and to append `n` bytes multiplies it by x^(8 n) modulo the polynomial. [`multiply`] and
//! [`power`] are zlib's `multmodp` and `x2nmodp` (`crc32.c` of zlib 1.2.12 and later, by Mark Adler), which
//! has the same in `crc32_combine`. Bits are reflected, as everywhere with this polynomial: the highest bit is x^0.
//!
//! # The kernel
//! It is launched over [`blocks`] of [`ITEMS`] threads, with five views:
//!
//! - `words [u32; ?]`: what is summed, but for bytes before its first word and behind its last;
//! - `head [u8; ?]` and `tail [u8; ?]`: those bytes, at most three each;
//! - `powers [u32; 512]`: [`powers`];
//! - `sums [u32; ?]`: [`sums`] of them, which it writes. Over the first, of which each block has one, the exclusive or
//!   is the remainder of `words`, without the ones that CRC-32 begins and ends with. Then come the bytes of `head` and those of `tail`, each a
//!   word and zero where there is none, in three words each.

use crate::error::Result;
use crate::memory::Region;

/// The polynomial, reflected.
pub const POLYNOMIAL: u32 = 0xedb8_8320;
/// Threads of a block.
pub const ITEMS: u32 = 256;
/// Words that a thread takes, each [`ITEMS`] behind the one before.
pub const ITEM_WORDS: u32 = 16;
/// Words that a block takes. They end where the words end, so that the first block may have less.
pub const BLOCK_WORDS: u32 = ITEMS * ITEM_WORDS;
/// The most blocks.
pub const BLOCKS: u32 = 256;
/// The most bytes that one launch takes.
pub const BYTES: u64 = BLOCKS as u64 * BLOCK_WORDS as u64 * 4;
/// Words that `sums` has beside one of each block: the bytes of `head` and of `tail`.
pub const EDGES: u32 = 6;

/// x^0.
const ONE: u32 = 1 << 31;

/// x^(2^k) for each k.
const SQUARES: [u32; 32] = {
    let mut squares = [ONE >> 1; 32];
    let mut at = 1;
    while at < squares.len() {
        squares[at] = multiply(squares[at - 1], squares[at - 1]);
        at += 1;
    }
    squares
};

/// The product of two remainders.
pub const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = ONE;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 == 0 { b >> 1 } else { b >> 1 ^ POLYNOMIAL };
        bit >>= 1;
    }
    product
}

/// The remainder of x^`bits`.
pub const fn power(bits: u64) -> u32 {
    let mut power = ONE;
    let mut at = 0;
    while at < u64::BITS && bits >> at != 0 {
        // x^(2^32) is x: the order of x divides 2^32 - 1.
        if bits >> at & 1 != 0 {
            power = multiply(power, SQUARES[(at % 32) as usize]);
        }
        at += 1;
    }
    power
}

/// The CRC-32 of two parts together, of which the second has `bytes` bytes.
pub fn combine(first: u32, second: u32, bytes: u64) -> u32 {
    multiply(power(8 * bytes), first) ^ second
}

/// The CRC-32 of bytes whose remainder, without the ones at beginning and end, is `remainder`.
fn finished(remainder: u32, bytes: u64) -> u32 {
    !(remainder ^ multiply(power(8 * bytes), u32::MAX))
}

/// What the kernel multiplies with: for each thread x to the bits from its last word to the end of the block, that word
/// with them; then for each block, the last one first, x to the bits behind it.
pub fn powers() -> Vec<u32> {
    let items = (0..ITEMS).map(|item| power(32 * u64::from(ITEMS - item)));
    let blocks = (0..BLOCKS).map(|behind| power(32 * u64::from(BLOCK_WORDS) * u64::from(behind)));
    items.chain(blocks).collect()
}

/// The blocks that a launch over this many words has.
pub fn blocks(words: u64) -> u32 {
    u32::try_from(words.div_ceil(u64::from(BLOCK_WORDS)).max(1)).unwrap_or(u32::MAX)
}

/// The words of `sums` for as many blocks.
pub fn sums(blocks: u32) -> u64 {
    u64::from(blocks) + u64::from(EDGES)
}

/// A region as the kernel gets it: the bytes before the first word, words, the bytes behind the last.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// At most three bytes.
    pub head: Region<'a>,
    /// Whole words, the first at a multiple of four.
    pub words: Region<'a>,
    /// At most three bytes.
    pub tail: Region<'a>,
}

impl<'a> Parts<'a> {
    /// Those of a region.
    ///
    /// # Errors
    /// None: parts lie within.
    pub fn of(region: Region<'a>) -> Result<Self> {
        let before = region.address().wrapping_neg() % 4;
        let before = before.min(region.bytes());
        let words = (region.bytes() - before) & !3;
        Ok(Self {
            head: region.slice(0, before)?,
            words: region.slice(before, words)?,
            tail: region.slice(before + words, region.bytes() - before - words)?,
        })
    }

    /// The blocks that a launch over them has.
    pub fn blocks(&self) -> u32 {
        blocks(self.words.bytes() / 4)
    }

    /// The CRC-32 of all, from what the kernel wrote.
    pub fn crc32(&self, sums: &[u32]) -> u32 {
        let (blocks, edges) = sums.split_at(sums.len().saturating_sub(EDGES as usize));
        let edge = |at: usize, part: &Region<'_>| {
            let bytes = edges.iter().skip(at).take(part.bytes() as usize);
            crc32fast::hash(&bytes.map(|&byte| byte as u8).collect::<Vec<_>>())
        };
        let words = finished(blocks.iter().fold(0, |all, sum| all ^ sum), self.words.bytes());
        let begun = combine(edge(0, &self.head), words, self.words.bytes());
        combine(begun, edge(3, &self.tail), self.tail.bytes())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn powers_and_products() {
        let check = |bits: u64| {
            let slow = (0..bits).fold(ONE, |power, _| multiply(power, ONE >> 1));
            assert_eq!(power(bits), slow, "{bits}");
        };
        (0..70).chain([255, 256, 8191, 131_072]).for_each(check);
        assert_eq!(power(u64::from(u32::MAX)), ONE);
        assert_eq!(power(1 << 32), power(1));
        assert_eq!(multiply(ONE, 0x1234_5678), 0x1234_5678);
    }

    #[test]
    fn parts_are_combined() {
        let bytes: Vec<u8> = (0..1000u32).map(|at| ((at * at) >> 3) as u8).collect();
        for at in [0, 1, 500, 999, 1000] {
            let (first, second) = bytes.split_at(at);
            let both = combine(crc32fast::hash(first), crc32fast::hash(second), second.len() as u64);
            assert_eq!(both, crc32fast::hash(&bytes), "{at}");
        }
        let zeros = [0; 100];
        assert_eq!(finished(0, 100), crc32fast::hash(&zeros));
    }
}
