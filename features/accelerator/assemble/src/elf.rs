//! ELF files, which drivers are given without a length: they must be whole.

/// What an ELF file begins with.
pub const MAGIC: &[u8] = b"\x7fELF";

/// Bytes of the file's head (`Elf64_Ehdr`).
const HEAD: usize = 64;

/// That it is a 64-bit little-endian ELF file, and every section and segment of it lies within it.
///
/// # Errors
/// What is wrong.
pub fn check(image: &[u8]) -> Result<(), String> {
    let cut = || "the ELF file is cut off or damaged".to_owned();
    let number = |offset: usize, bytes: usize| -> Result<u64, String> {
        let field = offset.checked_add(bytes).and_then(|end| image.get(offset..end)).ok_or_else(cut)?;
        Ok(field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    };
    if !image.starts_with(MAGIC) || image.get(4..6) != Some(&[2, 1]) {
        return Err("it is no ELF file of 64 bits, little-endian".into());
    }
    if image.len() < HEAD {
        return Err(cut());
    }
    let within =
        |offset: u64, bytes: u64| offset.checked_add(bytes).is_some_and(|end| end <= image.len() as u64);
    // ELF-64: e_phoff, e_phentsize, e_phnum; e_shoff, e_shentsize, e_shnum. Then p_offset and p_filesz; sh_offset,
    // sh_size and sh_type.
    for (table, entry, count, smallest, is_section) in [(32, 54, 56, 56, false), (40, 58, 60, 64, true)] {
        let (table, entry, count) = (number(table, 8)?, number(entry, 2)?, number(count, 2)?);
        // Those of more than 2^16 entries count elsewhere.
        if count == 0xffff || is_section && count == 0 && table != 0 {
            return Err(cut());
        }
        if count == 0 {
            continue;
        }
        if entry < smallest || !within(table, entry * count) {
            return Err(cut());
        }
        for index in 0..count {
            let at = (table + index * entry) as usize;
            let (offset, bytes) = if is_section {
                const NOBITS: u64 = 8;
                if number(at + 4, 4)? == NOBITS {
                    continue;
                }
                (number(at + 24, 8)?, number(at + 32, 8)?)
            } else {
                (number(at + 8, 8)?, number(at + 32, 8)?)
            };
            if !within(offset, bytes) {
                return Err(cut());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(sections: u16, offset: u64, bytes: u64) -> Vec<u8> {
        let mut image = vec![0; 64 + 64 * usize::from(sections)];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[40..48].copy_from_slice(&64u64.to_le_bytes());
        image[58..60].copy_from_slice(&64u16.to_le_bytes());
        image[60..62].copy_from_slice(&sections.to_le_bytes());
        for index in 0..usize::from(sections) {
            let at = 64 + 64 * index;
            image[at + 4] = 1;
            image[at + 24..at + 32].copy_from_slice(&offset.to_le_bytes());
            image[at + 32..at + 40].copy_from_slice(&bytes.to_le_bytes());
        }
        image
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let check = |image: &[u8], good: bool| assert_eq!(check(image).is_ok(), good, "{image:?}");
        check(b"", false);
        check(b".version 7.0", false);
        check(b"\x7fELF", false);
        check(b"\x7fELF\x01\x01", false);
        let mut none = elf(0, 0, 0);
        check(&none, false);
        none[40] = 0;
        check(&none, true);
        check(&elf(0xffff, 0, 0), false);
        check(&elf(0, 0, 0)[..63], false);
        check(&elf(2, 0, 64), true);
        check(&elf(2, 0, 192), true);
        check(&elf(2, 0, 193), false);
        check(&elf(1, u64::MAX, 2), false);
        check(&elf(2, 0, 64)[..190], false);
    }
}
