//! Sizes in guest files: `512M`, `4G`.

/// Units, as powers of 1,024, largest first.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// Parses a whole number with a unit, `K`, `M`, `G` or `T` (powers of 1,024), into bytes.
///
/// # Errors
/// What is wrong with the text, to be read after "`TEXT` ".
pub fn parse_size(text: &str) -> Result<u64, &'static str> {
    let Some((&(_, shift), digits)) =
        UNITS.iter().find_map(|unit| text.strip_suffix(unit.0).map(|digits| (unit, digits)))
    else {
        return Err("does not end in K, M, G or T");
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("is not a whole number before its unit");
    }
    let number: u64 = digits.parse().map_err(|_| "is too large")?;
    number.checked_mul(1 << shift).ok_or("is too large")
}

/// `bytes` with the largest unit that keeps it a whole number, as in `512M`; plain bytes when there is none.
pub fn format_size(bytes: u64) -> String {
    UNITS
        .iter()
        .find(|(_, shift)| bytes != 0 && bytes.is_multiple_of(1 << shift))
        .map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sizes() {
        fn check(text: &str, expect: Result<u64, &str>) {
            assert_eq!(parse_size(text), expect, "{text}");
            if let Ok(bytes) = expect {
                assert_eq!(parse_size(&format_size(bytes)).unwrap_or(0), bytes, "{text}");
            }
        }
        check("512M", Ok(512 << 20));
        check("4G", Ok(4 << 30));
        check("1T", Ok(1 << 40));
        check("2048K", Ok(2 << 20));
        check("0M", Ok(0));
        check("16777215T", Ok(16_777_215 << 40));
        check("16777216T", Err("is too large"));
        check("99999999999999999999G", Err("is too large"));
        check("", Err("does not end in K, M, G or T"));
        check("512", Err("does not end in K, M, G or T"));
        check("512m", Err("does not end in K, M, G or T"));
        check("512MB", Err("does not end in K, M, G or T"));
        check("M", Err("is not a whole number before its unit"));
        check("1.5G", Err("is not a whole number before its unit"));
        check("-1G", Err("is not a whole number before its unit"));
        check("+1G", Err("is not a whole number before its unit"));
        check("4 G", Err("is not a whole number before its unit"));
        check("٤G", Err("is not a whole number before its unit"));
    }
}
