//! Data to recognise again after it has gone through a device.

use anyhow::{Result, ensure};

use crate::provision::fnv1a;

/// `len` bytes that depend on `seed` alone (SplitMix64).
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend((word ^ word >> 31).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Checks that `bytes` are the pattern of `seed`, and gives their checksum.
///
/// # Errors
/// When they are not; the first difference is named.
pub fn check_pattern(what: &str, seed: u64, bytes: &[u8]) -> Result<u64> {
    let expected = pattern(seed, bytes.len());
    let differs = bytes.iter().zip(&expected).position(|(got, expected)| got != expected);
    ensure!(
        differs.is_none(),
        "{what} is not what was written: it differs from byte {} on (checksum {:016x}, expected {:016x})",
        differs.unwrap_or_default(),
        fnv1a(bytes),
        fnv1a(&expected)
    );
    Ok(fnv1a(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_recognised_and_a_change_is_found() {
        let mut bytes = pattern(7, 4099);
        assert_eq!(bytes.len(), 4099);
        assert_eq!(check_pattern("it", 7, &bytes).unwrap(), fnv1a(&bytes));
        assert!(check_pattern("it", 8, &bytes).is_err());
        bytes[4098] ^= 1;
        assert!(check_pattern("it", 7, &bytes).unwrap_err().to_string().contains("from byte 4098 on"));
    }
}
