//! The text of a ledger file: the record of one claim.
//!
//! A record is a sequence of lines, each the CRC-32 of its text in eight hexadecimal digits, a space and the text. A text
//! is words separated by single spaces; in a name, `%`, space, `-` at the start and all that is not printable ASCII are
//! written as `%` and two hexadecimal digits, and a name that is not there is `-`.
//!
//! ```text
//! ledger 2                                  version of the format
//! boot 0e8f0d9c-…                           boot that the claim belongs to
//! claim 0000:65:00.0 persistent             function asked for; or `process`
//! owner 4711 vm-service 1700000000 web1     who claims: process ID, command, when (in seconds after 1970 began), guest
//! take 0000:65:00.1 snd_hda_intel - flr     about to be taken: former driver, driver_override and reset_method; last, the VFIO
//!                                           driver that takes it, where that is not vfio-pci or sizes of BARs follow,
//!                                           which are those before they are changed: `1:268435456,3:33554432`
//! keep 0000:65:00.2 vfio-pci flr%20bus      belongs to the claim, was on a VFIO driver already; its reset_method
//! claimed                                   everything is taken
//! user 4712 vm-service                      a process uses the persistent claim
//! release                                   about to be released
//! restored 0000:65:00.1                     is released
//! end 10                                    lines before this one
//! ```
//!
//! The reset_method is left out for a function that has none (`-` where a word follows), the guest where it is for none, and the time where an earlier
//! version wrote the record. The CRC of the last line is that of the whole file up to its
//! own text, so that no line can be missing, doubled or another claim's.
//!
//! A file is replaced as a whole, so one that is not whole was damaged, and says nothing for certain: it is kept, and what
//! its sound lines say is only for people.

use std::fmt::Write as _;

use crate::PciAddress;
use crate::iommu::{VFIO_DRIVER, is_vfio_driver};

/// Version of the format.
const VERSION: u32 = 2;

/// A process, for people to find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process ID. It may have been given to another process since.
    pub pid: u32,
    /// Name of the command.
    pub command: String,
    /// When it became the owner, in seconds after 1970 began; `None` where that was not noted.
    pub since: Option<u64>,
    /// Name of the guest that it has the claim for.
    pub guest: Option<String>,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({}", self.pid, self.command)?;
        self.guest.as_ref().map_or(Ok(()), |guest| write!(f, ", guest {guest}"))?;
        f.write_str(")")
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
    /// The BARs that are given other sizes, by index, with the sizes in bytes that they had before.
    pub bar_sizes: Vec<(u8, u64)>,
    /// VFIO driver that takes it, or that it was on already.
    pub vfio_driver: String,
    /// Whether it was on a VFIO driver already, so that it stays there.
    pub kept: bool,
    /// Whether it is released already.
    pub restored: bool,
}

/// One record of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Ledger(u32),
    Boot(String),
    Claim {
        target: PciAddress,
        persistent: bool,
    },
    Owner(Owner),
    /// It is about to be taken, or kept.
    Function(ClaimedFunction),
    Claimed,
    User(Owner),
    Release,
    Restored(PciAddress),
}

impl Record {
    /// The line, with its checksum and newline.
    fn line(&self) -> String {
        let body = match self {
            Self::Ledger(version) => format!("ledger {version}"),
            Self::Boot(id) => format!("boot {}", escape(Some(id))),
            Self::Claim { target, persistent } => {
                format!("claim {target} {}", if *persistent { "persistent" } else { "process" })
            }
            Self::Owner(owner) => format!("owner {}", words_of(owner)),
            Self::Function(function) => {
                let ClaimedFunction { address, resets, vfio_driver, .. } = function;
                let driver = escape(function.driver.as_deref());
                let driver_override = escape(function.driver_override.as_deref());
                match function.kept {
                    true => format!("keep {address} {driver}{}", last(resets)),
                    false if vfio_driver == VFIO_DRIVER && function.bar_sizes.is_empty() => {
                        format!("take {address} {driver} {driver_override}{}", last(resets))
                    }
                    false => {
                        let (resets, by) = (escape(resets.as_deref()), escape(Some(vfio_driver)));
                        let sizes = sizes_word(&function.bar_sizes);
                        format!("take {address} {driver} {driver_override} {resets} {by}{sizes}")
                    }
                }
            }
            Self::Claimed => "claimed".into(),
            Self::User(owner) => format!("user {}", words_of(owner)),
            Self::Release => "release".into(),
            Self::Restored(address) => format!("restored {address}"),
        };
        line_of(&body)
    }

    fn parse(body: &str) -> Option<Self> {
        let mut words = body.split(' ');
        let record = match words.next()? {
            "ledger" => Self::Ledger(words.next()?.parse().ok()?),
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
            "take" => {
                let address = words.next()?.parse().ok()?;
                let (driver, driver_override) = (driver_name(words.next()?)?, driver_name(words.next()?)?);
                let (resets, by) = (words.next(), words.next());
                Self::Function(ClaimedFunction {
                    address,
                    driver,
                    driver_override,
                    resets: reset_methods(resets.filter(|&word| by.is_none() || word != "-"))?,
                    vfio_driver: by.map_or(Some(VFIO_DRIVER.into()), vfio_driver_name)?,
                    bar_sizes: words.next().map_or(Some(Vec::new()), bar_sizes)?,
                    kept: false,
                    restored: false,
                })
            }
            "keep" => {
                let (address, driver) = (words.next()?.parse().ok()?, driver_name(words.next()?)??);
                Self::Function(ClaimedFunction {
                    address,
                    driver: Some(driver.clone()),
                    driver_override: None,
                    resets: reset_methods(words.next())?,
                    vfio_driver: driver,
                    bar_sizes: Vec::new(),
                    kept: true,
                    restored: false,
                })
            }
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
    let (pid, command) = (words.next()?.parse().ok()?, unescape(words.next()?)??);
    let since = words.next().map(str::parse).transpose().ok()?;
    let guest = words.next().map_or(Some(None), unescape)?;
    Some(Owner { pid, command, since, guest })
}

/// As [`owner`] reads it. A guest is noted only with the time.
fn words_of(owner: &Owner) -> String {
    let words = format!("{} {}", owner.pid, escape(Some(&owner.command)));
    let Some(since) = owner.since else { return words };
    format!("{words} {since}{}", last(&owner.guest))
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

/// The name of a VFIO driver.
fn vfio_driver_name(word: &str) -> Option<String> {
    driver_name(word)?.filter(|name| is_vfio_driver(name))
}

/// Reset methods, where there are any: words of lower-case letters, digits and `_`.
fn reset_methods(word: Option<&str>) -> Option<Option<String>> {
    let Some(word) = word else { return Some(None) };
    let methods = unescape(word)??;
    let is_known =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b' ');
    (!methods.trim().is_empty() && methods.bytes().all(is_known)).then_some(Some(methods))
}

/// The last word of a line, as [`bar_sizes`] reads it, where there are any.
fn sizes_word(sizes: &[(u8, u64)]) -> String {
    let sizes: Vec<_> = sizes.iter().map(|(index, size)| format!("{index}:{size}")).collect();
    if sizes.is_empty() { String::new() } else { format!(" {}", sizes.join(",")) }
}

/// Sizes of BARs: each an index and a power of two, in order of the indexes.
fn bar_sizes(word: &str) -> Option<Vec<(u8, u64)>> {
    let size = |text: &str| {
        let (index, size) = text.split_once(':')?;
        let (index, size) = (index.parse().ok()?, size.parse::<u64>().ok()?);
        (index < 6 && size.is_power_of_two()).then_some((index, size))
    };
    let sizes = word.split(',').map(size).collect::<Option<Vec<_>>>()?;
    sizes.windows(2).all(|pair| pair[0].0 < pair[1].0).then_some(sizes)
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
    /// Whether it is being released.
    pub releasing: bool,
}

impl Entry {
    /// One of which nothing is taken yet.
    pub(super) fn new(target: PciAddress, persistent: bool, owner: Owner, boot: String) -> Self {
        let (user, functions, claimed, releasing) = (None, Vec::new(), false, false);
        Self { target, persistent, owner, boot, user, functions, claimed, releasing }
    }

    /// Takes up one more record; `false` when it can't follow what is there.
    pub(crate) fn apply(&mut self, record: &Record) -> bool {
        match record {
            Record::Function(function) => {
                if self.claimed || self.releasing || self.function(function.address).is_some() {
                    return false;
                }
                self.functions.push(function.clone());
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

    /// Whether it outlives its owner and its user, until it is released.
    pub fn is_waiting(&self) -> bool {
        self.persistent && self.claimed && !self.releasing
    }

    /// The file that says this.
    pub(crate) fn text(&self) -> String {
        let mut records = vec![
            Record::Ledger(VERSION),
            Record::Boot(self.boot.clone()),
            Record::Claim { target: self.target, persistent: self.persistent },
            Record::Owner(self.owner.clone()),
        ];
        records.extend(self.functions.iter().cloned().map(Record::Function));
        records.extend(self.claimed.then_some(Record::Claimed));
        records.extend(self.user.clone().map(Record::User));
        records.extend(self.releasing.then_some(Record::Release));
        let restored = self.functions.iter().filter(|function| function.restored);
        records.extend(restored.map(|function| Record::Restored(function.address)));
        ended(records.iter().map(Record::line).collect())
    }
}

/// These lines, and the one that ends a record.
pub(super) fn ended(mut text: String) -> String {
    let end = format!("end {}", text.lines().count());
    let checksum = crc32(&[text.as_bytes(), end.as_bytes()].concat());
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{checksum:08x} {end}");
    text
}

/// Why a file can't be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// It is not as it was written: what shows it.
    Damaged(String),
    /// A newer version wrote it.
    Newer(u32),
}

/// Reads a file.
pub(crate) fn parse(bytes: &[u8]) -> Result<Entry, Unread> {
    let damaged = |what: &str| Err(Unread::Damaged(what.to_owned()));
    let mut lines: Vec<_> = bytes.split_inclusive(|&byte| byte == b'\n').collect();
    let Some(first) = lines.first() else { return damaged("it is empty") };
    let version = match checked_line(first).map(Record::parse) {
        Some(Some(Record::Ledger(version))) => version,
        Some(_) => return damaged("line 1 does not say which version of the format it has"),
        None => return damaged("line 1: the checksum is wrong"),
    };
    let last = lines.pop().unwrap_or_default();
    match version {
        VERSION if !is_end(last) => damaged("the line that ends a record is missing, and so may be others"),
        VERSION => {
            let entry = entry_of(&lines)?;
            // It is what is written of such a claim, down to the checksum of the whole.
            if entry.text().as_bytes() == bytes {
                Ok(entry)
            } else {
                damaged("the checksum of the whole is wrong")
            }
        }
        version if version > VERSION => Err(Unread::Newer(version)),
        _ => damaged("line 1: there is no such version"),
    }
}

/// Whether it looks like the line that ends a record.
fn is_end(line: &[u8]) -> bool {
    let text = std::str::from_utf8(line).ok();
    text.and_then(|text| text.split_once(' ')).is_some_and(|(_, text)| text.starts_with("end "))
}

/// What lines say, without the one that ends a record.
fn entry_of(lines: &[&[u8]]) -> Result<Entry, Unread> {
    let mut opening = Vec::new();
    let mut entry: Option<Entry> = None;
    for (number, line) in (1..).zip(lines) {
        let damaged = |what: String| Unread::Damaged(format!("line {number}: {what}"));
        let body = checked_line(line).ok_or_else(|| damaged("the checksum is wrong".into()))?;
        let record = Record::parse(body).ok_or_else(|| damaged(format!("`{body}` is not a record")))?;
        match &mut entry {
            Some(entry) => {
                if !entry.apply(&record) {
                    return Err(damaged(format!("`{body}` cannot follow what comes before it")));
                }
            }
            None => {
                opening.push(record);
                entry = opened(&opening);
                if opening.len() == 4 && entry.is_none() {
                    return Err(damaged(
                        "the record does not open with ledger, boot, claim and owner".into(),
                    ));
                }
            }
        }
    }
    entry.ok_or_else(|| Unread::Damaged("it ends before it says whose claim it is".into()))
}

/// A claim of which nothing was taken yet, by the records that open it.
fn opened(records: &[Record]) -> Option<Entry> {
    let [Record::Ledger(_), Record::Boot(boot), Record::Claim { target, persistent }, Record::Owner(owner)] =
        records
    else {
        return None;
    };
    Some(Entry::new(*target, *persistent, owner.clone(), boot.clone()))
}

/// The functions of which sound lines of a damaged file tell, as they were before.
pub(crate) fn salvage(bytes: &[u8]) -> Vec<ClaimedFunction> {
    let lines = bytes.split_inclusive(|&byte| byte == b'\n').filter_map(checked_line);
    let function = |line| match Record::parse(line)? {
        Record::Function(function) => Some(function),
        _ => None,
    };
    let mut functions: Vec<_> = lines.filter_map(function).collect();
    functions.sort_by_key(|function| function.address);
    functions.dedup_by_key(|function| function.address);
    functions
}

/// A record as a line: its checksum, itself, a newline.
pub(crate) fn line_of(record: &str) -> String {
    format!("{:08x} {record}\n", crc32(record.as_bytes()))
}

/// The record of one whole line; `None` when it is torn or damaged.
pub(super) fn checked_line(line: &[u8]) -> Option<&str> {
    let (checksum, record) = std::str::from_utf8(line).ok()?.strip_suffix('\n')?.split_once(' ')?;
    (checksum == format!("{:08x}", crc32(record.as_bytes()))).then_some(record)
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
mod tests;
