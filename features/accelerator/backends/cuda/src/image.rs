//! Images for the driver, which is given no length: text must end with a zero byte, and an ELF file must be whole.

use std::borrow::Cow;

use vm_assemble::elf;

/// Whether it is a cubin, which is an ELF file, and not text.
pub(crate) fn is_elf(image: &[u8]) -> bool {
    image.starts_with(elf::MAGIC)
}

/// The image as it may be given to the driver.
///
/// # Errors
/// Why it may not.
pub(crate) fn checked(image: &[u8]) -> Result<Cow<'_, [u8]>, String> {
    if is_elf(image) {
        elf::check(image)?;
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(checked(b"x").unwrap().last(), Some(&0));
    }
}
