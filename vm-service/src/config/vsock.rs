//! `[vsock]` of a guest file: the guest's address in the host's vsock.

use serde::{Deserialize, Serialize};
use toml::de::DeValue;

use super::read::{Reader, Section, shorten};

/// The guest's vsock device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vsock {
    /// Its context id, 3 to 4,294,967,294, which no other guest of the host has.
    pub cid: u32,
}

/// Below it are the host's own; the greatest number stands for any.
const CIDS: std::ops::Range<u32> = 3..u32::MAX;

impl Reader<'_> {
    pub(super) fn vsock(&mut self, root: &Section<'_, '_>) -> Option<Vsock> {
        const RULE: &str = "write a number from 3 to 4294967294";
        let entry = self.optional(root, "vsock")?;
        let section = self.section(&entry, "write it as a table: [vsock]")?;
        self.known(&section, &["cid"]);
        let entry =
            self.required(&section, "cid", "write cid = 3, or leave [vsock] out for one that is free")?;
        let DeValue::Integer(integer) = entry.value else { return self.wrong_type(&entry, RULE) };
        match u32::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(cid) if CIDS.contains(&cid) => Some(Vsock { cid }),
            _ => self.wrong(&entry, &format!("is {}", shorten(&integer.to_string())), RULE),
        }
    }
}
