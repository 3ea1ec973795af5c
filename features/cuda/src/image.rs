//! Images for the driver, which is given no length: text must end with a zero byte, and an ELF file must be whole.

use std::borrow::Cow;

/// Whether it is a cubin, which is an ELF file, and not text.
pub(crate) fn is_elf(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

/// The image as it may be given to the driver.
///
/// # Errors
/// Why it may not.
pub(crate) fn checked(image: &[u8]) -> Result<Cow<'_, [u8]>, String> {
    if is_elf(image) {
        check_elf(image)?;
        return Ok(Cow::Borrowed(image));
    }
    if image.contains(&0) && image.iter().position(|&byte| byte == 0) != Some(image.len() - 1) {
        return Err(
            "the image is neither PTX, which has no zero byte, nor a cubin, which is an ELF file".into()
        );
    }
    if image.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0) {
        return Err("the image is empty".into());
    }
    let mut text = image.to_vec();
    if text.last() != Some(&0) {
        text.push(0);
    }
    Ok(Cow::Owned(text))
}

/// That every section and segment of a 64-bit little-endian ELF file lies within it.
fn check_elf(image: &[u8]) -> Result<(), String> {
    let cut = || "the cubin is cut off or damaged".to_owned();
    let number = |offset: usize, bytes: usize| -> Result<u64, String> {
        let field = offset.checked_add(bytes).and_then(|end| image.get(offset..end)).ok_or_else(cut)?;
        Ok(field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    };
    if image.get(4..6) != Some(&[2, 1]) {
        return Err("the ELF file is not one of 64 bits, little-endian, as a cubin is".into());
    }
    let within =
        |offset: u64, bytes: u64| offset.checked_add(bytes).is_some_and(|end| end <= image.len() as u64);
    // ELF-64: e_phoff, e_phentsize, e_phnum; e_shoff, e_shentsize, e_shnum. Then p_offset and p_filesz; sh_offset,
    // sh_size and sh_type.
    for (table, entry, count, smallest, is_section) in [(32, 54, 56, 56, false), (40, 58, 60, 64, true)] {
        let (table, entry, count) = (number(table, 8)?, number(entry, 2)?, number(count, 2)?);
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
    fn what_the_driver_would_read_past_is_refused() {
        let check = |image: &[u8], good: bool| assert_eq!(checked(image).is_ok(), good, "{image:?}");
        check(b".version 7.0", true);
        check(b".version 7.0\0", true);
        check(b".version\0 7.0", false);
        check(b"", false);
        check(b"\0", false);
        check(b"\x7fELF", false);
        check(b"\x7fELF\x01\x01", false);
        check(&elf(0, 0, 0), true);
        check(&elf(2, 0, 64), true);
        check(&elf(2, 0, 192), true);
        check(&elf(2, 0, 193), false);
        check(&elf(1, u64::MAX, 2), false);
        check(&elf(2, 0, 64)[..190], false);
        assert_eq!(checked(b"x").unwrap().last(), Some(&0));
    }
}
