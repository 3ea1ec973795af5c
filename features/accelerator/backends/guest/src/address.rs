//! Addresses of buffers that only the host reaches: the buffer's number, and an offset in it.

use std::collections::HashSet;

/// Bits of an offset.
pub(crate) const OFFSET_BITS: u32 = 40;
/// The first number of a buffer: below its addresses lie those of processes, which have up to 48 bits.
const FIRST: u32 = 1 << (48 - OFFSET_BITS);
/// The number behind the last, so that the sum of two offsets and an address never overflows.
const END: u32 = 1 << (63 - OFFSET_BITS);

/// The most bytes of a buffer, whose end has an address too.
pub(crate) const MAX_BYTES: u64 = (1 << OFFSET_BITS) - 1;

/// The address of a buffer's first byte.
pub(crate) fn of(buffer: u32) -> u64 {
    u64::from(buffer) << OFFSET_BITS
}

/// The buffer that an address lies in, and where; `None` if the address is of this process.
pub(crate) fn buffer(address: u64) -> Option<(u32, u64)> {
    let number = u32::try_from(address >> OFFSET_BITS).ok().filter(|number| *number >= FIRST)?;
    Some((number, address & MAX_BYTES))
}

/// The numbers of buffers in use. One that was given back is not soon taken again.
#[derive(Debug)]
pub(crate) struct Numbers {
    next: u32,
    taken: HashSet<u32>,
}

impl Default for Numbers {
    fn default() -> Self {
        Self { next: FIRST, taken: HashSet::new() }
    }
}

impl Numbers {
    /// A number that no buffer has. The host has room for far fewer buffers than there are numbers.
    pub(crate) fn take(&mut self) -> u32 {
        loop {
            let number = self.next;
            self.next = if number + 1 < END { number + 1 } else { FIRST };
            if self.taken.insert(number) {
                return number;
            }
        }
    }

    /// Gives a number back.
    pub(crate) fn give(&mut self, number: u32) {
        self.taken.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_back_to_buffers() {
        let check =
            |address: u64, expect: Option<(u32, u64)>| assert_eq!(buffer(address), expect, "{address:#x}");
        check(0, None);
        check((1 << 48) - 1, None);
        check(of(FIRST), Some((FIRST, 0)));
        check(of(FIRST) + MAX_BYTES, Some((FIRST, MAX_BYTES)));
        check(of(END - 1) + MAX_BYTES, Some((END - 1, MAX_BYTES)));
        assert!(of(END - 1).checked_add(2 * MAX_BYTES).is_some());
    }

    #[test]
    fn numbers_come_again_only_when_they_are_free() {
        let mut numbers = Numbers { next: END - 2, taken: HashSet::from([FIRST]) };
        assert_eq!([(); 4].map(|()| numbers.take()), [END - 2, END - 1, FIRST + 1, FIRST + 2]);
        numbers.give(FIRST);
        numbers.next = FIRST;
        assert_eq!([(); 2].map(|()| numbers.take()), [FIRST, FIRST + 3]);
    }
}
