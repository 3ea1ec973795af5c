//! The token that a virtual function is opened with, where its physical function is a user-space driver's.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The secret that a user-space driver of a physical function, by vfio-pci, shares with who may open its virtual functions: a
/// UUID (`VFIO_DEVICE_FEATURE_PCI_VF_TOKEN`). Nothing prints it.
#[derive(Clone, PartialEq, Eq)]
pub struct VfToken([u8; 16]);

/// A text that is no token. It does not say which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a VF token is a UUID: 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12 with `-` between")]
pub struct ParseVfTokenError;

impl VfToken {
    /// As the Linux kernel takes it with a UUID's text (`uuid_t`): in the order of its digits.
    pub(super) fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// What the group back end opens a function by.
    pub(super) fn name(address: crate::PciAddress, token: Option<&Self>) -> String {
        let Some(Self(bytes)) = token else { return address.to_string() };
        let mut name = format!("{address} vf_token=");
        for (index, byte) in bytes.iter().enumerate() {
            let separator = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            name += &format!("{separator}{byte:02x}");
        }
        name
    }
}

impl fmt::Debug for VfToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VfToken(…)")
    }
}

impl FromStr for VfToken {
    type Err = ParseVfTokenError;

    fn from_str(text: &str) -> Result<Self, ParseVfTokenError> {
        let groups: Vec<&str> = text.split('-').collect();
        let is_uuid = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]);
        let digits = groups.concat();
        if !is_uuid || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(ParseVfTokenError);
        }
        let number = u128::from_str_radix(&digits, 16).map_err(|_| ParseVfTokenError)?;
        Ok(Self(number.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_a_uuid_that_nothing_prints() {
        const TEXT: &str = "2AB74924-c335-45f4-9b16-8569e5b08258";
        let token: VfToken = TEXT.parse().unwrap();
        let address = "0000:01:10.0".parse().unwrap();
        assert_eq!(token.bytes()[..6], [0x2a, 0xb7, 0x49, 0x24, 0xc3, 0x35]);
        assert_eq!(VfToken::name(address, None), "0000:01:10.0");
        let name = format!("0000:01:10.0 vf_token={}", TEXT.to_lowercase());
        assert_eq!(VfToken::name(address, Some(&token)), name);
        assert_eq!(format!("{token:?}"), "VfToken(…)");
        for wrong in [
            "",
            "2ab74924c33545f49b168569e5b08258",
            "2ab74924-c335-45f4-9b16-8569e5b0825",
            "2ab74924-c335-45f4-9b16-8569e5b0825g",
            "2ab74924-c335-45f4-9b16-8569e5b08258-",
            "+ab74924-c335-45f4-9b16-8569e5b08258",
            "2ab74924-c335-45f4-9b168569-e5b08258",
            "ü2b74924-c335-45f4-9b16-8569e5b0825",
        ] {
            let error = wrong.parse::<VfToken>().unwrap_err().to_string();
            assert!(wrong.is_empty() || !error.contains(wrong), "{wrong}");
        }
    }
}
