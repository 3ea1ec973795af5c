//! Claims that are made again after each boot: a file each, `claims/ADDRESS.toml` in [`Host::lasting`], until `release`.
//!
//! ```toml
//! address = "0000:65:00.0"
//! with_group = false
//!
//! [functions]
//! "0000:65:00.0" = "10de:2684 1043:889a a1"
//! ```
//!
//! An address may be another device's after a boot. So each function is there with its IDs (vendor, device, subsystem and
//! revision), and nothing else is claimed for it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use vm_passthrough::pci::PciIds;
use vm_passthrough::{Host, PciAddress};

use crate::save;

/// Most bytes of a file: all functions of a bus take a third of it.
const MAX_BYTES: u64 = 64 << 10;
const HEADING: &str = "# Made by `vm-service claim --persist`; `vm-service release` removes it.\n";

/// A claim that is made again after each boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SavedClaim {
    /// The function that was asked for.
    pub(crate) target: PciAddress,
    /// Whether functions of other devices in its IOMMU group were claimed with it.
    pub(crate) with_group: bool,
    /// All its functions, and which devices they are.
    pub(crate) functions: BTreeMap<PciAddress, PciIds>,
}

/// What a file says.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    address: String,
    with_group: bool,
    functions: BTreeMap<String, String>,
}

impl SavedClaim {
    /// Puts it on disk.
    ///
    /// # Errors
    /// What can't be written.
    pub(crate) fn save(&self, host: &Host) -> Result<(), String> {
        let functions = self.functions.iter().map(|(address, ids)| (address.to_string(), text_of(ids)));
        let text = Text {
            address: self.target.to_string(),
            with_group: self.with_group,
            functions: functions.collect(),
        };
        let (folder, path) = (folder(host), path_of(host, self.target));
        let text = toml::to_string(&text).map_err(|error| error.to_string())?;
        fs::create_dir_all(&folder)
            .and_then(|()| {
                save::replace(&path, |mut file| file.write_all(format!("{HEADING}{text}").as_bytes()))
            })
            .and_then(|()| File::open(&folder)?.sync_all())
            .map_err(|error| format!("{} can't be written: {error}", path.display()))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let address = |text: &str| text.parse::<PciAddress>().map_err(|error| error.to_string());
        let text: Text = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        let functions = text.functions.iter().map(|(function, ids)| {
            Ok((address(function)?, ids_of(ids).ok_or_else(|| format!("`{ids}` are no IDs"))?))
        });
        let functions = functions.collect::<Result<_, String>>()?;
        Ok(Self { target: address(&text.address)?, with_group: text.with_group, functions })
    }
}

fn folder(host: &Host) -> PathBuf {
    host.lasting.join("claims")
}

fn path_of(host: &Host, target: PciAddress) -> PathBuf {
    folder(host).join(format!("{target}.toml"))
}

/// All saved claims, in order of their addresses. A file that can't be read is an error of its own.
///
/// # Errors
/// When the folder can't be read.
pub(crate) fn all(host: &Host) -> Result<Vec<Result<SavedClaim, String>>, String> {
    let folder = folder(host);
    let unread = |error: io::Error| format!("{} can't be read: {error}", folder.display());
    let files = match fs::read_dir(&folder) {
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        files => files.map_err(unread)?,
    };
    let mut paths = Vec::new();
    for file in files {
        let path = file.map_err(unread)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths.iter().map(|path| read(path)).collect())
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn read(path: &Path) -> Result<SavedClaim, String> {
    let mut text = String::new();
    let opened = save::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY);
    let saved = opened
        .and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text))
        .map_err(|error| error.to_string())
        .and_then(|_| SavedClaim::parse(&text))
        .and_then(|saved| match path.file_stem() {
            Some(name) if name == saved.target.to_string().as_str() => Ok(saved),
            _ => Err(format!("it is of {}, and has another's name", saved.target)),
        });
    saved.map_err(|error| format!("{} is no saved claim: {error}; remove it", path.display()))
}

/// Removes the saved claim that a function belongs to; `false` when there is none.
///
/// # Errors
/// When it can't be removed.
pub(crate) fn remove(host: &Host, address: PciAddress) -> Result<bool, String> {
    let saved = all(host)?.into_iter().flatten().find(|saved| saved.functions.contains_key(&address));
    // One that can't be read has its name.
    let path = path_of(host, saved.map_or(address, |saved| saved.target));
    match fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => {
            Err(format!("{} can't be removed: {error}; it is claimed again after a boot", path.display()))
        }
    }
}

fn text_of(ids: &PciIds) -> String {
    let PciIds { vendor, device, subsystem_vendor, subsystem_device, revision } = ids;
    format!("{vendor:04x}:{device:04x} {subsystem_vendor:04x}:{subsystem_device:04x} {revision:02x}")
}

fn ids_of(text: &str) -> Option<PciIds> {
    let numbers: Result<Vec<_>, _> =
        text.split([':', ' ']).map(|word| u16::from_str_radix(word, 16)).collect();
    let [vendor, device, subsystem_vendor, subsystem_device, revision] = numbers.ok()?[..] else {
        return None;
    };
    Some(PciIds { vendor, device, subsystem_vendor, subsystem_device, revision: revision.try_into().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_wrote_and_refuses_the_rest() {
        const GOOD: &str = "address = \"0000:65:00.0\"\nwith_group = true\n[functions]\n\"0000:65:00.0\" = \"10de:2684 1043:889a a1\"\n";
        fn check(text: &str, expect: &str) {
            let got = SavedClaim::parse(text);
            assert!(matches!(&got, Err(error) if error.contains(expect)), "{text}: {got:?}");
        }
        let good = SavedClaim::parse(GOOD).expect("it is right");
        let (&address, ids) = good.functions.iter().next().expect("a function");
        assert_eq!((address, text_of(ids).as_str()), (good.target, "10de:2684 1043:889a a1"));
        check("", "missing field");
        check(&GOOD.replace("2684", "26840"), "are no IDs");
        check(&GOOD.replace(" a1", ""), "are no IDs");
        check(&GOOD.replace(" a1", " 1a1"), "are no IDs");
        check(&GOOD.replace("\"0000:65:00.0\" =", "\"../65:00.0\" ="), "not a PCI address");
        check(&GOOD.replace("with", "more"), "unknown field");
    }
}
