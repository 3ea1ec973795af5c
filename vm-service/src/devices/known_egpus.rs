//! What the operator allows of eGPUs, and which are known: the file `egpu.toml` in [`Host::lasting`].
//!
//! ```toml
//! version = 1
//! authorise = "known"        # never, ask, known or always
//! dma_protection = true
//! minimum_gigabits = 20
//! minimum_watts = 0
//!
//! [known.d2030000-00a0-751e-a3f4-c0e5ae7b0d30]
//! name = "Razer Core X"
//! accelerators = ["10de:2684 1043:889a a1"]
//! guest = "web1"             # gets it whenever it comes
//! ```
//!
//! It is its owner's alone, and what others could have written is not believed.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fchmod};
use serde::{Deserialize, Serialize};
use vm_passthrough::Host;
use vm_passthrough::egpu::{Authorise, KnownEgpu, Policy};
use vm_passthrough::ledger;
use vm_passthrough::usb4::UniqueId;

use crate::config::is_name;
use crate::devices::saved::{ids_of, text_of};

/// Most bytes of the file: thousands of enclosures.
const MAX_BYTES: u64 = 1 << 20;
const VERSION: u32 = 1;
const HEADING: &str = "# Made by `vm-service egpu`; `egpu policy` and `egpu forget` change it.\n";

/// What is allowed, and which are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EgpuStore {
    pub(crate) policy: Policy,
    /// By UUID.
    pub(crate) known: BTreeMap<UniqueId, Known>,
}

/// An enclosure that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// The name that it had.
    pub(crate) name: String,
    /// What it is told from others by.
    pub(crate) egpu: KnownEgpu,
    /// The guest that gets it whenever it comes.
    pub(crate) guest: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    version: u32,
    authorise: String,
    dma_protection: bool,
    minimum_gigabits: f64,
    minimum_watts: u32,
    #[serde(default)]
    known: BTreeMap<String, KnownText>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KnownText {
    name: String,
    accelerators: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guest: Option<String>,
}

#[derive(Deserialize)]
struct Version {
    version: Option<u32>,
}

impl EgpuStore {
    /// Reads it; where there is none, nothing is known and the policy is the default.
    ///
    /// # Errors
    /// When it can't be read, or others could have written it.
    pub(crate) fn read(host: &Host) -> Result<Self, String> {
        let path = path(host);
        let read = || -> Result<Option<String>, String> {
            let file = match vm_files::open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, 0) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                file => file.map_err(|error| error.to_string())?,
            };
            let data = file.metadata().map_err(|error| error.to_string())?;
            ledger::check_trusted(&path, &data, false).map_err(|error| error.to_string())?;
            let mut text = String::new();
            file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
            if text.len() as u64 > MAX_BYTES {
                return Err(format!("it is longer than {MAX_BYTES} bytes"));
            }
            Ok(Some(text))
        };
        let parsed = read().and_then(|text| text.map_or(Ok(Self::default()), |text| Self::parse(&text)));
        parsed.map_err(|error| format!("{} can't be used: {error}; mend or remove it", path.display()))
    }

    /// Writes it as a whole or not at all.
    ///
    /// # Errors
    /// When it can't be written; it is as it was then.
    pub(crate) fn write(&self, host: &Host) -> Result<(), String> {
        let path = path(host);
        let written = DirBuilder::new().recursive(true).mode(0o755).create(&host.lasting).and_then(|()| {
            let text = self.text().map_err(io::Error::other)?;
            vm_files::replace(&path, |mut file| {
                fchmod(file, Mode::RUSR | Mode::WUSR)?;
                file.write_all(text.as_bytes())
            })?;
            fs::File::open(&host.lasting)?.sync_all()
        });
        written.map_err(|error| format!("{} can't be written: {error}", path.display()))
    }

    fn text(&self) -> Result<String, String> {
        let known = self.known.iter().map(|(id, Known { name, egpu, guest })| {
            let accelerators = egpu.accelerators.iter().map(text_of).collect();
            (id.to_string(), KnownText { name: name.clone(), accelerators, guest: guest.clone() })
        });
        let text = Text {
            version: VERSION,
            authorise: self.policy.authorise.to_string(),
            dma_protection: self.policy.dma_protection,
            minimum_gigabits: f64::from(self.policy.minimum_rate) / 1000.0,
            minimum_watts: self.policy.minimum_power,
            known: known.collect(),
        };
        Ok(format!("{HEADING}{}", toml::to_string(&text).map_err(|error| error.to_string())?))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let unread = |error: toml::de::Error| error.message().to_owned();
        if let Version { version: Some(version) } = toml::from_str(text).map_err(unread)?
            && version > VERSION
        {
            return Err(format!("it is of version {version}, and a newer vm-service can read it"));
        }
        let text: Text = toml::from_str(text).map_err(unread)?;
        let known = text.known.into_iter().map(|(id, known)| {
            let id: UniqueId = id.parse().map_err(|error| format!("`{id}`: {error}"))?;
            let ids = |text: &String| ids_of(text).ok_or_else(|| format!("`{text}` are no IDs"));
            let accelerators = known.accelerators.iter().map(ids).collect::<Result<_, String>>()?;
            if let Some(guest) = known.guest.as_ref().filter(|guest| !is_name(guest)) {
                return Err(format!("`{guest}` is no guest's name"));
            }
            Ok((id, Known { name: known.name, egpu: KnownEgpu { id, accelerators }, guest: known.guest }))
        });
        let policy = Policy {
            authorise: authorise(&text.authorise)?,
            dma_protection: text.dma_protection,
            minimum_rate: megabits(text.minimum_gigabits)?,
            minimum_power: text.minimum_watts,
        };
        Ok(Self { policy, known: known.collect::<Result<_, String>>()? })
    }
}

/// A word of the policy.
pub(crate) fn authorise(word: &str) -> Result<Authorise, String> {
    word.parse().map_err(|_| format!("`{word}` is none of never, ask, known and always"))
}

/// Gb/s as Mb/s.
pub(crate) fn megabits(gigabits: f64) -> Result<u32, String> {
    let megabits = gigabits * 1000.0;
    if megabits > 0.0 && megabits < 1.0 {
        Err(format!("{gigabits} Gb/s is less than 0.001, the least rate but 0"))
    } else if (0.0..=1e9).contains(&megabits) {
        Ok(megabits.round() as u32)
    } else {
        Err(format!("{gigabits} Gb/s is no rate of a link"))
    }
}

/// Where it is.
pub(crate) fn path(host: &Host) -> PathBuf {
    Path::new(&host.lasting).join("egpu.toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "version = 1\nauthorise = \"known\"\ndma_protection = true\nminimum_gigabits = 20.5\nminimum_watts = 75\n\
        [known.d2030000-00a0-751e-a3f4-c0e5ae7b0d30]\nname = \"Razer \\\"Core\\\" X\"\naccelerators = [\"10de:2684 1043:889a a1\"]\n\
        guest = \"web1\"\n";

    #[test]
    fn reads_what_it_wrote_and_refuses_the_rest() {
        let store = EgpuStore::parse(GOOD).expect("it is right");
        assert_eq!((store.policy.minimum_rate, store.known.len()), (20_500, 1));
        assert_eq!(EgpuStore::parse(&store.text().expect("text")), Ok(store));
        let empty = EgpuStore::default();
        assert_eq!(EgpuStore::parse(&empty.text().expect("text")), Ok(empty));
        for (text, expect) in [
            (GOOD.replace("version = 1", "version = 2"), "of version 2"),
            (GOOD.replace("known\"", "knows\""), "none of never, ask, known and always"),
            (GOOD.replace("20.5", "-1.0"), "no rate"),
            (GOOD.replace("20.5", "nan"), "no rate"),
            (GOOD.replace("20.5", "0.0000001"), "less than 0.001"),
            (GOOD.replace("2684", "26840"), "are no IDs"),
            (GOOD.replace("known.d2", "known.x2"), "no UUID"),
            (GOOD.replace("name", "nome"), "unknown field"),
            (GOOD.replace("web1", "../web1"), "no guest's name"),
            (String::new(), "missing field"),
        ] {
            let got = EgpuStore::parse(&text);
            assert!(matches!(&got, Err(error) if error.contains(expect)), "{text}: {got:?}");
        }
    }
}
