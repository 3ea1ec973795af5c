//! The text of a ledger file: one claim's journal.
//!
//! A journal is a sequence of lines, each the CRC-32 of its record in eight hexadecimal digits, a space and the
//! record. A record is words separated by single spaces; in a name, `%`, space, `-` at the start and all that is not
//! printable ASCII are written as `%` and two hexadecimal digits, and a name that is not there is `-`.
//!
//! ```text
//! ledger 1                                  version of the format
//! boot 0e8f0d9c-…                           boot that the claim belongs to
//! claim 0000:65:00.0 persistent             function asked for; or `process`
//! owner 4711 vm-service                     who claims: process ID and command
//! take 0000:65:00.1 snd_hda_intel - flr     about to be taken: former driver, driver_override and reset_method
//! keep 0000:65:00.2 vfio-pci flr%20bus      belongs to the claim, was on a VFIO driver already; its reset_method
//! claimed                                   everything is taken
//! user 4712 vm-service                      a process uses the persistent claim
//! release                                   about to be given back
//! restored 0000:65:00.1                     is given back
//! ```
//!
//! The reset_method is left out for a function that has none.
//!
//! A line without its newline, or a last line whose CRC is wrong, was being written when its writer died. It is
//! ignored: what a line announces is done only after the line is on disk. Anything else out of order makes the
//! journal corrupt.

use std::fmt::Write as _;

use crate::PciAddress;

/// Version of the format that is written, and the only one that is read.
const VERSION: &str = "1";

/// A process, for people to find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process ID. It may have been given to another process since.
    pub pid: u32,
    /// Name of the command.
    pub command: String,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.command)
    }
}

/// A function of a claim, and what it was before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedFunction {
    /// Which one.
    pub address: PciAddress,
    /// Driver that it was bound to before.
    pub driver: Option<String>,
    /// What its `driver_override` was before; not known, and not to be undone, for one that was kept.
    pub driver_override: Option<String>,
    /// What its `reset_method` was before, as Linux wrote it; `None` when it has none. A reset narrows it for a moment,
    /// and whoever is killed then leaves it so.
    pub resets: Option<String>,
    /// Whether it was on a VFIO driver already, so that it stays there.
    pub kept: bool,
    /// Whether it is given back already.
    pub restored: bool,
}

/// One record of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Ledger,
    Boot(String),
    Claim {
        target: PciAddress,
        persistent: bool,
    },
    Owner(Owner),
    Take {
        address: PciAddress,
        driver: Option<String>,
        driver_override: Option<String>,
        resets: Option<String>,
    },
    Keep {
        address: PciAddress,
        driver: String,
        resets: Option<String>,
    },
    Claimed,
    User(Owner),
    Release,
    Restored(PciAddress),
}

impl Record {
    /// The line, with its checksum and newline.
    pub(crate) fn line(&self) -> String {
        let body = match self {
            Self::Ledger => format!("ledger {VERSION}"),
            Self::Boot(id) => format!("boot {}", escape(Some(id))),
            Self::Claim { target, persistent } => {
                format!("claim {target} {}", if *persistent { "persistent" } else { "process" })
            }
            Self::Owner(owner) => format!("owner {} {}", owner.pid, escape(Some(&owner.command))),
            Self::Take { address, driver, driver_override, resets } => {
                let driver = escape(driver.as_deref());
                format!("take {address} {driver} {}{}", escape(driver_override.as_deref()), last(resets))
            }
            Self::Keep { address, driver, resets } => {
                format!("keep {address} {}{}", escape(Some(driver)), last(resets))
            }
            Self::Claimed => "claimed".into(),
            Self::User(owner) => format!("user {} {}", owner.pid, escape(Some(&owner.command))),
            Self::Release => "release".into(),
            Self::Restored(address) => format!("restored {address}"),
        };
        line_of(&body)
    }

    fn parse(body: &str) -> Option<Self> {
        let mut words = body.split(' ');
        let record = match words.next()? {
            "ledger" => (words.next()? == VERSION).then_some(Self::Ledger)?,
            "boot" => Self::Boot(unescape(words.next()?)??),
            "claim" => Self::Claim {
                target: words.next()?.parse().ok()?,
                persistent: match words.next()? {
                    "persistent" => true,
                    "process" => false,
                    _ => return None,
                },
            },
            "owner" => Self::Owner(owner(&mut words)?),
            "take" => Self::Take {
                address: words.next()?.parse().ok()?,
                driver: driver_name(words.next()?)?,
                driver_override: driver_name(words.next()?)?,
                resets: reset_methods(words.next())?,
            },
            "keep" => Self::Keep {
                address: words.next()?.parse().ok()?,
                driver: driver_name(words.next()?)??,
                resets: reset_methods(words.next())?,
            },
            "claimed" => Self::Claimed,
            "user" => Self::User(owner(&mut words)?),
            "release" => Self::Release,
            "restored" => Self::Restored(words.next()?.parse().ok()?),
            _ => return None,
        };
        words.next().is_none().then_some(record)
    }
}

fn owner<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Owner> {
    Some(Owner { pid: words.next()?.parse().ok()?, command: unescape(words.next()?)?? })
}

/// A driver's name. It becomes part of a path, so one that could lead elsewhere is no name.
fn driver_name(word: &str) -> Option<Option<String>> {
    let name = unescape(word)?;
    match name.as_deref() {
        Some(name) if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0', '\n']) => {
            None
        }
        _ => Some(name),
    }
}

/// Reset methods, where there are any: words of lower-case letters, digits and `_`.
fn reset_methods(word: Option<&str>) -> Option<Option<String>> {
    let Some(word) = word else { return Some(None) };
    let methods = unescape(word)??;
    let is_known =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b' ');
    (!methods.trim().is_empty() && methods.bytes().all(is_known)).then_some(Some(methods))
}

/// The last word of a line, where there is one.
fn last(word: &Option<String>) -> String {
    word.as_deref().map_or_else(String::new, |word| format!(" {}", escape(Some(word))))
}

/// What a journal says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The function that was asked for.
    pub target: PciAddress,
    /// Whether it outlives its owner.
    pub persistent: bool,
    /// Who claimed it.
    pub owner: Owner,
    /// Boot that it belongs to.
    pub boot: String,
    /// Who used it last, when it is persistent and was used.
    pub user: Option<Owner>,
    /// Its functions in the order in which they were taken.
    pub functions: Vec<ClaimedFunction>,
    /// Whether everything was taken.
    pub claimed: bool,
    /// Whether it is being given back.
    pub releasing: bool,
}

impl Entry {
    /// Takes up one more record; `false` when it can't follow what is there.
    pub(crate) fn apply(&mut self, record: &Record) -> bool {
        match record {
            Record::Take { address, .. } | Record::Keep { address, .. } => {
                if self.claimed || self.releasing || self.function(*address).is_some() {
                    return false;
                }
                let (driver, driver_override, resets, kept) = match record {
                    Record::Take { driver, driver_override, resets, .. } => {
                        (driver.clone(), driver_override.clone(), resets.clone(), false)
                    }
                    Record::Keep { driver, resets, .. } => (Some(driver.clone()), None, resets.clone(), true),
                    _ => return false,
                };
                let address = *address;
                self.functions.push(ClaimedFunction {
                    address,
                    driver,
                    driver_override,
                    resets,
                    kept,
                    restored: false,
                });
            }
            Record::Claimed if !self.claimed && !self.releasing => self.claimed = true,
            Record::User(user) if self.claimed && self.persistent => self.user = Some(user.clone()),
            Record::Release => self.releasing = true,
            Record::Restored(address) if self.releasing => {
                match self.functions.iter_mut().find(|function| function.address == *address) {
                    Some(function) => function.restored = true,
                    None => return false,
                }
            }
            _ => return false,
        }
        true
    }

    /// The function at `address`, if it is in this claim.
    pub fn function(&self, address: PciAddress) -> Option<&ClaimedFunction> {
        self.functions.iter().find(|function| function.address == address)
    }

    /// The records that open a journal.
    pub(crate) fn opening(&self) -> [Record; 4] {
        [
            Record::Ledger,
            Record::Boot(self.boot.clone()),
            Record::Claim { target: self.target, persistent: self.persistent },
            Record::Owner(self.owner.clone()),
        ]
    }
}

/// What was read from a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parsed {
    /// What it says; `None` when its writer died before the opening was complete, and so before anything was done.
    pub(crate) entry: Option<Entry>,
    /// Length of its complete lines in bytes.
    pub(crate) end: usize,
}

/// Reads a journal. On an error it is the number of the bad line, from 1, and what is wrong with it.
pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed, (usize, String)> {
    let mut opening = Vec::new();
    let mut entry: Option<Entry> = None;
    let mut end = 0;
    let mut rest = bytes;
    let mut number = 0;
    while let Some(length) = rest.iter().position(|&byte| byte == b'\n') {
        let (line, after) = rest.split_at(length + 1);
        rest = after;
        number += 1;
        let Some(body) = checked_line(line) else {
            if rest.is_empty() {
                break;
            }
            return Err((number, "the checksum is wrong".into()));
        };
        if number == 1 && body.starts_with("ledger ") && body != format!("ledger {VERSION}") {
            return Err((
                number,
                format!("`{body}` is not the format that this version reads, `ledger {VERSION}`"),
            ));
        }
        let record = Record::parse(body).ok_or_else(|| (number, format!("`{body}` is not a record")))?;
        match &mut entry {
            Some(entry) => {
                if !entry.apply(&record) {
                    return Err((number, format!("`{body}` cannot follow what comes before it")));
                }
            }
            None => {
                opening.push(record);
                if let [
                    Record::Ledger,
                    Record::Boot(boot),
                    Record::Claim { target, persistent },
                    Record::Owner(owner),
                ] = opening.as_slice()
                {
                    entry = Some(Entry {
                        target: *target,
                        persistent: *persistent,
                        owner: owner.clone(),
                        boot: boot.clone(),
                        user: None,
                        functions: Vec::new(),
                        claimed: false,
                        releasing: false,
                    });
                } else if opening.len() == 4 {
                    return Err((
                        number,
                        "the journal does not open with ledger, boot, claim and owner".into(),
                    ));
                }
            }
        }
        end += line.len();
    }
    Ok(Parsed { entry, end })
}

/// A record as a line: its checksum, itself, a newline.
pub(super) fn line_of(record: &str) -> String {
    format!("{:08x} {record}\n", crc32(record.as_bytes()))
}

/// The record of one whole line; `None` when it is torn or damaged.
pub(super) fn checked_line(line: &[u8]) -> Option<&str> {
    let (checksum, record) = std::str::from_utf8(line).ok()?.strip_suffix('\n')?.split_once(' ')?;
    (checksum.len() == 8 && u32::from_str_radix(checksum, 16) == Ok(crc32(record.as_bytes())))
        .then_some(record)
}

/// CRC-32 as in IEEE 802.3.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (crc & 1).wrapping_neg() & 0xedb8_8320)
    })
}

pub(super) fn escape(name: Option<&str>) -> String {
    let Some(name) = name else { return "-".into() };
    let mut text = String::new();
    for (index, byte) in name.bytes().enumerate() {
        if byte.is_ascii_graphic() && byte != b'%' && (index > 0 || byte != b'-') {
            text.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(text, "%{byte:02x}");
        }
    }
    text
}

/// The name of a word: `None` when it is malformed, `Some(None)` for no name.
pub(super) fn unescape(word: &str) -> Option<Option<String>> {
    if word == "-" {
        return Some(None);
    }
    let mut bytes = Vec::new();
    let mut rest = word.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok().map(Some)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(bodies: &[&str]) -> String {
        bodies.iter().map(|body| format!("{:08x} {body}\n", crc32(body.as_bytes()))).collect()
    }

    const OPENING: [&str; 4] = ["ledger 1", "boot b", "claim 0000:01:00.0 process", "owner 7 vm%20x"];

    #[test]
    fn crc_is_the_standard_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn reads_what_can_be_and_refuses_what_cannot() {
        fn check(bodies: &[&str], tail: &str, expect: Result<Option<(usize, bool, bool)>, &str>) {
            let text = lines(bodies) + tail;
            match (parse(text.as_bytes()), expect) {
                (Ok(parsed), Ok(expect)) => {
                    let got =
                        parsed.entry.map(|entry| (entry.functions.len(), entry.claimed, entry.releasing));
                    assert_eq!(got, expect, "{bodies:?}");
                    assert_eq!(parsed.end, text.len() - tail.len(), "{bodies:?}");
                }
                (Err((line, what)), Err(expect)) => {
                    assert!(what.contains(expect), "{bodies:?}: {line}: {what}")
                }
                (got, _) => panic!("{bodies:?}: {got:?}"),
            }
        }
        let with = |more: &[&'static str]| [&OPENING[..], more].concat();
        check(&[], "", Ok(None));
        check(&[], "0123", Ok(None));
        check(&OPENING[..3], "", Ok(None));
        check(&OPENING, "", Ok(Some((0, false, false))));
        check(&with(&["take 0000:01:00.0 nvme -"]), "1234", Ok(Some((1, false, false))));
        check(&with(&["take 0000:01:00.0 nvme -"]), "00000000 claimed\n", Ok(Some((1, false, false))));
        check(
            &with(&["take 0000:01:00.0 - -", "keep 0000:01:00.1 vfio-pci", "claimed"]),
            "",
            Ok(Some((2, true, false))),
        );
        check(
            &with(&["take 0000:01:00.0 - -", "claimed", "release", "restored 0000:01:00.0"]),
            "",
            Ok(Some((1, true, true))),
        );
        check(&["ledger 2"], "", Err("not the format"));
        check(&["boot b", "boot b", "boot b", "boot b"], "", Err("does not open with"));
        check(&with(&["nonsense"]), "", Err("not a record"));
        check(&with(&["take 0000:01:00.0 ../../x -"]), "", Err("not a record"));
        check(&with(&["take 0000:01:00.0 %2e%2e -"]), "", Err("not a record"));
        check(&with(&["take 0000:01:00.0 nvme - flr%20bus"]), "", Ok(Some((1, false, false))));
        check(&with(&["keep 0000:01:00.0 vfio-pci flr"]), "", Ok(Some((1, false, false))));
        check(&with(&["take 0000:01:00.0 nvme - flr more"]), "", Err("not a record"));
        check(&with(&["take 0000:01:00.0 nvme - FLR"]), "", Err("not a record"));
        check(&with(&["take 0000:01:00.0 nvme - -"]), "", Err("not a record"));
        check(&with(&["keep 0000:01:00.0 vfio-pci %20"]), "", Err("not a record"));
        check(&with(&["take 0000:01:00.0 %zz -"]), "", Err("not a record"));
        check(&with(&["take 0000:01:00.0 nvme -", "take 0000:01:00.0 nvme -"]), "", Err("cannot follow"));
        check(&with(&["restored 0000:01:00.0"]), "", Err("cannot follow"));
        check(&with(&["claimed", "take 0000:01:00.0 nvme -"]), "", Err("cannot follow"));
        check(&with(&["claimed", "user 1 x"]), "", Err("cannot follow"));
        check(&OPENING[..1], "00000000 boot b\n00000000 x\n", Err("checksum"));
        check(&OPENING[..1], "\u{fffd}\nx", Err("checksum"));
    }

    #[test]
    fn names_survive() {
        fn check(name: Option<&str>, text: &str) {
            assert_eq!(escape(name), text);
            assert_eq!(unescape(text).unwrap().as_deref(), name);
        }
        check(None, "-");
        check(Some("-"), "%2d");
        check(Some(""), "");
        check(Some("vfio-pci"), "vfio-pci");
        check(Some("a b%\n"), "a%20b%25%0a");
        check(Some("ü"), "%c3%bc");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_journal_cut_anywhere_is_one_of_its_prefixes(cut in 0usize..400, command in ".{0,16}") {
            let address: PciAddress = "0000:01:00.0".parse().unwrap();
            let records = [
                Record::Ledger,
                Record::Boot("b".into()),
                Record::Claim { target: address, persistent: true },
                Record::Owner(Owner { pid: 1, command }),
                Record::Take {
                    address,
                    driver: Some("nvme".into()),
                    driver_override: None,
                    resets: Some("flr bus".into()),
                },
                Record::Claimed,
                Record::Release,
                Record::Restored(address),
            ];
            let text: String = records.iter().map(Record::line).collect();
            let cut = cut.min(text.len());
            let parsed = parse(&text.as_bytes()[..cut]).unwrap();
            prop_assert!(parsed.end <= cut);
            prop_assert_eq!(parse(&text.as_bytes()[..parsed.end]).unwrap(), parsed.clone());
            // Nothing that is complete is lost.
            let whole = text.as_bytes()[..cut].iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
            prop_assert_eq!(parsed.end, whole);
        }
    }
}
