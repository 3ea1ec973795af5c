//! `[[net]]` of a guest file, and `--net`: network interfaces of a guest, each at a tap of the host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::read::{Entry, Reader, Section, shorten};
use super::{GuestConfig, MAX_NETS};

/// A network interface of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// The tap of the host that carries its frames.
    pub tap: String,
    /// Its address, if it is chosen; [`MacAddress::of`] tells it otherwise.
    pub mac: Option<MacAddress>,
    /// Whether the Linux kernel's vhost-net carries its frames: `None` where that is to be had.
    pub vhost: Option<bool>,
}

/// An Ethernet address of one station.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// That of a guest's interface where none is chosen: locally administered, always the same for the same guest's name and
    /// number of the interface, and another for another number.
    pub fn of(guest: &str, index: usize) -> Self {
        // FNV-1a, of which each step is a bijection: the number, which comes last, changes the lower bytes.
        let bytes = guest.bytes().chain([0xff, index as u8]);
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let [.., a, b, c, d, e] = hash.to_be_bytes();
        Self([2, a, b, c, d, e])
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// What `mac` may be.
const MAC: &str = "write the address of one station, as in \"52:54:00:12:34:56\"";

impl FromStr for MacAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let digits =
                parts.next().filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()));
            *byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).ok_or(MAC)?;
        }
        // The lowest bit of the first byte marks a group of stations.
        let is_of_a_station = parts.next().is_none() && bytes[0] & 1 == 0 && bytes != [0; 6];
        is_of_a_station.then_some(Self(bytes)).ok_or(MAC)
    }
}

/// What `tap` may be.
const TAP: &str = "write the name of a tap, 1 to 15 characters, none of them white space, `/`, `:` or `%`";

fn tap(name: &str) -> Result<String, &'static str> {
    let allowed = |byte: u8| byte.is_ascii_graphic() && !b"/:%,".contains(&byte);
    let is_a_name =
        (1..=15).contains(&name.len()) && name.bytes().all(allowed) && name != "." && name != "..";
    if is_a_name { Ok(name.to_owned()) } else { Err(TAP) }
}

/// What `--net` may be.
const ARGUMENT: &str = "write tap=NAME, and behind it, if wanted, ,mac=ADDRESS and ,vhost=on or ,vhost=off";

/// As on the command line: `tap=NAME[,mac=ADDRESS][,vhost=on|off]`.
impl FromStr for Net {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut name, mut mac, mut vhost) = (None, None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("tap", value)) if name.is_none() => name = Some(tap(value)?),
                Some(("mac", value)) if mac.is_none() => mac = Some(value.parse()?),
                Some(("vhost", value @ ("on" | "off"))) if vhost.is_none() => vhost = Some(value == "on"),
                _ => return Err(ARGUMENT),
            }
        }
        Ok(Self { tap: name.ok_or(ARGUMENT)?, mac, vhost })
    }
}

impl GuestConfig {
    /// Adds the command line's network interfaces to those of the file.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(crate) fn add_nets(&mut self, nets: &[Net]) -> Result<(), String> {
        for net in nets {
            if let Some(key) = self.nets.iter().find_map(|other| net.conflict(other)) {
                return Err(format!("`--net tap={}` has the {key} of another; give each its own", net.tap));
            }
            self.nets.push(net.clone());
        }
        if self.nets.len() > MAX_NETS {
            let count = self.nets.len();
            return Err(format!(
                "the guest {} would get {count} network interfaces; it has at most {MAX_NETS}",
                self.name
            ));
        }
        Ok(())
    }
}

impl Net {
    /// What two interfaces of one guest must not share, if these do.
    pub(super) fn conflict(&self, other: &Self) -> Option<&'static str> {
        if self.tap == other.tap {
            Some("tap")
        } else if self.mac.is_some() && self.mac == other.mac {
            Some("mac")
        } else {
            None
        }
    }
}

impl Reader<'_> {
    pub(super) fn nets(&mut self, root: &Section<'_, '_>) -> Vec<Net> {
        const RULE: &str = "write [[net]] with tap = \"NAME\" for each";
        let mut nets: Vec<Net> = Vec::new();
        for entry in self.list(root, "net", MAX_NETS, RULE) {
            let Some(section) = self.section(&entry, RULE) else { continue };
            self.known(&section, &["tap", "mac", "vhost"]);
            let mut good = true;
            let vhost = self.optional(&section, "vhost").map(|entry| self.boolean(&entry));
            good &= vhost != Some(None);
            let mac = self.optional(&section, "mac").map(|entry| self.parsed(&entry, MAC, str::parse));
            good &= mac != Some(None);
            let Some(name) = self.required(&section, "tap", "write tap = \"NAME\" of a tap of the host")
            else {
                continue;
            };
            let Some(tap) = self.parsed(&name, TAP, tap) else { continue };
            if !good {
                continue;
            }
            let net = Net { tap, mac: mac.flatten(), vhost: vhost.flatten() };
            match nets.iter().find_map(|other| net.conflict(other)) {
                Some(key) => self.problem(
                    entry.at,
                    format!("`{}` has the `{key}` of another; give each its own", entry.key),
                ),
                None => nets.push(net),
            }
        }
        nets
    }

    /// A string that `parse` takes.
    fn parsed<T>(
        &mut self,
        entry: &Entry<'_, '_>,
        rule: &str,
        parse: impl FnOnce(&str) -> Result<T, &'static str>,
    ) -> Option<T> {
        let text = self.string(entry, rule)?;
        match parse(text) {
            Ok(value) => Some(value),
            Err(rule) => self.wrong(entry, &format!("is \"{}\"", shorten(text)), rule),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_not_chosen_is_the_guests_for_ever() {
        for (guest, index, expect) in [
            ("web1", 0, "02:39:5f:6b:bb:97"),
            ("web1", 1, "02:39:5f:6b:b9:e4"),
            ("web2", 0, "02:39:6d:93:59:96"),
            ("a", 7, "02:19:03:de:df:ea"),
        ] {
            assert_eq!(MacAddress::of(guest, index).to_string(), expect, "{guest} {index}");
        }
        let mut seen = std::collections::BTreeSet::new();
        for guest in 0..1000 {
            for index in 0..MAX_NETS {
                let mac = MacAddress::of(&format!("web{guest}"), index);
                assert_eq!(mac.0[0], 2, "locally administered, of one station");
                assert!(seen.insert(mac.0), "{mac} twice");
            }
        }
    }

    #[test]
    fn the_command_line_takes_what_the_file_does() {
        let net = |tap: &str, mac: Option<[u8; 6]>, vhost| {
            Ok(Net { tap: tap.into(), mac: mac.map(MacAddress), vhost })
        };
        let check = |text: &str, expect: Result<Net, &str>| assert_eq!(text.parse::<Net>(), expect, "{text}");
        check("tap=web1", net("web1", None, None));
        check("tap=a23456789012345", net("a23456789012345", None, None));
        check(
            "mac=52:54:00:AB:cd:ef,tap=t,vhost=off",
            net("t", Some([0x52, 0x54, 0, 0xab, 0xcd, 0xef]), Some(false)),
        );
        check("tap=t,vhost=on", net("t", None, Some(true)));
        for wrong in ["", "web1", "tap", "mac=52:54:00:12:34:56", "tap=a,tap=b", "tap=a,", "tap=a,vhost=yes"]
        {
            check(wrong, Err(ARGUMENT));
        }
        for wrong in ["", ".", "..", "a/b", "a b", "tap%d", "a:b", "\u{e9}", "a234567890123456"] {
            check(&format!("tap={wrong}"), Err(TAP));
        }
        for wrong in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "52-54-00-12-34-56",
            "5:54:00:12:34:56",
            "+2:54:00:12:34:56",
            "53:54:00:12:34:56",
            "ff:ff:ff:ff:ff:ff",
            "00:00:00:00:00:00",
        ] {
            check(&format!("tap=t,mac={wrong}"), Err(MAC));
        }
    }
}
