//! A kernel that is a few instructions.

/// An ELF file with one segment that holds `code`, which is entered at its first byte.
pub(crate) fn elf(code: &[u8]) -> Vec<u8> {
    const ENTRY: u64 = 0x10_0000;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    for word in [ENTRY, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0]);
    for word in [0x1000, ENTRY, ENTRY, code.len() as u64, code.len() as u64, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.resize(0x1000, 0);
    file.extend(code);
    file
}
