//! Claims that are made again after each boot: a file each, `claims/ADDRESS.toml` in [`Host::lasting`], until `release`.
//!
//! ```toml
//! address = "0000:65:00.0"
//! with_group = false
//! vfio_driver = "vfio-pci"            # only where one was asked for, and then with `version = 2`
//!
//! [functions]
//! "0000:65:00.0" = "10de:2684 1043:889a a1"
//! ```
//!
//! The files are the owner's alone, as the ledger is, and what others could have written is not believed. One
//! lock ([`SavedClaims`]) protects them. It is held only while files change, never while a driver is waited for. A claim is saved
//! before any other process can release it, and a release removes only files of claims that have ended, so that a claim and its
//! file begin and end together.
//!
//! An address may be another device's after a boot. So each function is there with its IDs (vendor, device, subsystem and
//! revision), and nothing else is claimed for it.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fchmod};
use serde::{Deserialize, Serialize};
use vm_passthrough::deadlines::LEDGER;
use vm_passthrough::iommu::VfioDriver;
use vm_passthrough::ledger::{self, LedgerError, NotesLock};
use vm_passthrough::pci::PciIds;
use vm_passthrough::{Host, PciAddress};

/// Most bytes of a file: all functions of a bus take a third of it.
const MAX_BYTES: u64 = 64 << 10;
/// Version of the format, which a file of a newer one says.
const VERSION: u32 = 2;
const HEADING: &str = "# Made by `vm-service claim --persist`; `vm-service release` removes it.\n";

/// A claim that is made again after each boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SavedClaim {
    /// The function that was asked for.
    pub(crate) target: PciAddress,
    /// Whether functions of other devices in its IOMMU group were claimed with it.
    pub(crate) with_group: bool,
    /// The VFIO driver that was asked for.
    pub(crate) driver: VfioDriver,
    /// All its functions, and which devices they are.
    pub(crate) functions: BTreeMap<PciAddress, PciIds>,
}

/// What a file of any version says.
#[derive(Deserialize)]
struct Version {
    version: Option<u32>,
}

/// What a file says.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    address: String,
    with_group: bool,
    /// Since version 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    vfio_driver: Option<String>,
    functions: BTreeMap<String, String>,
}

impl SavedClaim {
    fn text(&self) -> Result<String, String> {
        let functions = self.functions.iter().map(|(address, ids)| (address.to_string(), text_of(ids)));
        let vfio_driver = match &self.driver {
            VfioDriver::Best => None,
            VfioDriver::Named(name) => Some(name.clone()),
        };
        let text = Text {
            // What earlier versions of this program can read is left to them.
            version: vfio_driver.is_some().then_some(VERSION),
            address: self.target.to_string(),
            with_group: self.with_group,
            vfio_driver,
            functions: functions.collect(),
        };
        let text = toml::to_string(&text).map_err(|error| error.to_string())?;
        Ok(format!("{HEADING}{text}"))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let address = |text: &str| text.parse::<PciAddress>().map_err(|error| error.to_string());
        let unread = |error: toml::de::Error| error.message().to_owned();
        if let Version { version: Some(version) } = toml::from_str(text).map_err(unread)?
            && version > VERSION
        {
            return Err(format!("it is of version {version}, and a newer vm-service can read it"));
        }
        let text: Text = toml::from_str(text).map_err(unread)?;
        let functions = text.functions.iter().map(|(function, ids)| {
            Ok((address(function)?, ids_of(ids).ok_or_else(|| format!("`{ids}` are no IDs"))?))
        });
        let functions = functions.collect::<Result<BTreeMap<_, _>, String>>()?;
        let target = address(&text.address)?;
        if !functions.contains_key(&target) {
            return Err(format!("it does not name {target} among its functions"));
        }
        let driver = text.vfio_driver.map_or(VfioDriver::Best, VfioDriver::Named);
        Ok(Self { target, with_group: text.with_group, driver, functions })
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
/// When the folder can't be read, or others than this user could have written to it.
pub(crate) fn all(host: &Host) -> Result<Vec<Read>, String> {
    Ok(files(&folder(host))?.into_iter().map(|(_, saved)| saved).collect())
}

/// What a file says, or why it can't be used.
pub(crate) type Read = Result<SavedClaim, String>;

/// The files of saved claims, in order, and what they say.
fn files(folder: &Path) -> Result<Vec<(PathBuf, Read)>, String> {
    let unread = |error: io::Error| format!("{} can't be read: {error}", folder.display());
    let data = match folder.symlink_metadata() {
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        data => data.map_err(unread)?,
    };
    ledger::check_trusted(folder, &data, true).map_err(|error| error.to_string())?;
    let mut paths = Vec::new();
    for file in fs::read_dir(folder).map_err(unread)? {
        let path = file.map_err(unread)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths.into_iter().map(|path| (path.clone(), read(&path))).collect())
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn read(path: &Path) -> Read {
    let mut text = String::new();
    let opened = vm_files::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, 0)
        .and_then(|file| Ok((file.metadata()?, file)))
        .map_err(|error| error.to_string());
    let saved = opened
        .and_then(|(data, file)| {
            ledger::check_trusted(path, &data, false).map_err(|error| error.to_string())?;
            file.take(MAX_BYTES).read_to_string(&mut text).map_err(|error| error.to_string())
        })
        .and_then(|_| SavedClaim::parse(&text))
        .and_then(|saved| match path.file_stem() {
            Some(name) if name == saved.target.to_string().as_str() => Ok(saved),
            _ => Err(format!("it is of {}, and has another's name", saved.target)),
        });
    saved.map_err(|error| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let remedy = match name.parse::<PciAddress>() {
            Ok(_) => format!("`vm-service release {name}` removes it"),
            Err(_) => "remove it".to_owned(),
        };
        format!("{} can't be used: {error}; {remedy}", path.display())
    })
}

/// Removes what is saved of these functions, and returns all functions that the files named. Those of a claim that lives on stay:
/// it was made after the functions were released.
///
/// # Errors
/// As for [`all`], and when a file can't be removed or others have the lock.
pub(crate) fn forget(host: &Host, functions: &[PciAddress]) -> Result<Vec<PciAddress>, String> {
    let mut forgotten = Vec::new();
    if files(&folder(host))?.is_empty() {
        return Ok(forgotten);
    }
    // A claim is saved and kept under this lock, so what is saved under no claim is left over.
    let _lock = SavedClaims::lock(host).map_err(|error| error.to_string())?;
    let claims = ledger::claims(host, LEDGER).map_err(|error| error.to_string())?;
    let kept = || claims.iter().flatten().map(|claim| &claim.entry).filter(|entry| entry.is_waiting());
    for (path, saved) in files(&folder(host))? {
        let named = functions.iter().find(|&&address| path == path_of(host, address));
        let covered: Vec<_> = match (saved, named) {
            (Ok(saved), _) => saved.functions.into_keys().collect(),
            // One that can't be read has its name.
            (Err(_), Some(&address)) => vec![address],
            (Err(_), None) => continue,
        };
        let is_kept = |&address: &PciAddress| kept().any(|entry| entry.function(address).is_some());
        if !covered.iter().any(|address| functions.contains(address)) || covered.iter().any(is_kept) {
            continue;
        }
        fs::remove_file(&path).and_then(|()| File::open(folder(host))?.sync_all()).map_err(|error| {
            format!("{} can't be removed: {error}; it is claimed again after a boot", path.display())
        })?;
        forgotten.extend(covered);
    }
    Ok(forgotten)
}

/// The right to change saved claims, until it is dropped.
#[derive(Debug)]
pub(crate) struct SavedClaims {
    host: Host,
    folder: PathBuf,
    _lock: NotesLock,
}

impl SavedClaims {
    /// Waits for the right.
    ///
    /// # Errors
    /// When others do not end their work in time, or the lock can't be used.
    pub(crate) fn lock(host: &Host) -> Result<Self, LedgerError> {
        Ok(Self { host: host.clone(), folder: folder(host), _lock: NotesLock::take(host, LEDGER)? })
    }

    /// Whether exactly this claim is saved.
    pub(crate) fn has(&self, saved: &SavedClaim) -> bool {
        read(&path_of(&self.host, saved.target)).as_ref() == Ok(saved)
    }

    /// Saves these in place of all that have one of their functions, and then calls `then`.
    ///
    /// # Errors
    /// When a file can't be written, or `then` fails; the files are restored, or a warning says which are not.
    pub(crate) fn save(
        &self,
        claims: &[SavedClaim],
        then: impl FnOnce() -> Result<(), String>,
    ) -> Result<(), String> {
        let mut before = Vec::new();
        let saved = self.replace(claims, &mut before).and_then(|()| then());
        if saved.is_err() {
            for (path, text) in before.into_iter().rev() {
                let undone = match &text {
                    Some(text) => write(&path, text),
                    None => fs::remove_file(&path)
                        .or_else(|error| if is_absent(&error) { Ok(()) } else { Err(error) }),
                };
                if let Err(error) = undone {
                    tracing::warn!("{} can't be put back as it was: {error}", path.display());
                }
            }
        }
        saved
    }

    /// As [`save`](Self::save), and what was in each file that it changes.
    fn replace(
        &self,
        claims: &[SavedClaim],
        before: &mut Vec<(PathBuf, Option<Vec<u8>>)>,
    ) -> Result<(), String> {
        let failed = |path: &Path| {
            let path = path.display().to_string();
            move |error: io::Error| format!("{path} can't be written: {error}")
        };
        let paths: Vec<_> = claims.iter().map(|saved| path_of(&self.host, saved.target)).collect();
        for (saved, path) in claims.iter().zip(&paths) {
            make_folder(&self.folder).map_err(failed(path))?;
            before.push((path.clone(), fs::read(path).ok()));
            write(path, saved.text()?.as_bytes()).map_err(failed(path))?;
        }
        for (path, saved) in files(&self.folder)? {
            let is_older = |saved: SavedClaim| {
                claims.iter().any(|new| new.functions.keys().any(|of| saved.functions.contains_key(of)))
            };
            if !paths.contains(&path) && saved.is_ok_and(is_older) {
                before.push((path.clone(), fs::read(&path).ok()));
                fs::remove_file(&path).map_err(failed(&path))?;
            }
        }
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(failed(&self.folder))
    }
}

/// Only its owner may look at the folder, so that nobody else can have written to what is in it.
fn make_folder(folder: &Path) -> io::Result<()> {
    if let Some(lasting) = folder.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(lasting)?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    ledger::check_trusted(folder, &folder.symlink_metadata()?, true).map_err(io::Error::other)
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    vm_files::replace(path, |mut file| {
        fchmod(file, Mode::RUSR | Mode::WUSR)?;
        file.write_all(text)
    })
}

/// IDs as text, which [`ids_of`] reads.
pub(crate) fn text_of(ids: &PciIds) -> String {
    let PciIds { vendor, device, subsystem_vendor, subsystem_device, revision } = ids;
    format!("{vendor:04x}:{device:04x} {subsystem_vendor:04x}:{subsystem_device:04x} {revision:02x}")
}

/// The IDs that a text has; `None` where it is none.
pub(crate) fn ids_of(text: &str) -> Option<PciIds> {
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
        assert_eq!(good.driver, VfioDriver::Best);
        assert!(!good.text().expect("text").contains("version"));
        let named = SavedClaim { driver: VfioDriver::Named("vfio-pci".into()), ..good };
        assert_eq!(SavedClaim::parse(&named.text().expect("text")), Ok(named));
        check("version = 3", "it is of version 3");
        check("", "missing field");
        check(&GOOD.replace("2684", "26840"), "are no IDs");
        check(&GOOD.replace(" a1", ""), "are no IDs");
        check(&GOOD.replace(" a1", " 1a1"), "are no IDs");
        check(&GOOD.replace("\"0000:65:00.0\" =", "\"../65:00.0\" ="), "not a PCI address");
        check(&GOOD.replace("with", "more"), "unknown field");
    }
}
