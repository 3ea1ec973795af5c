//! The functions of the host that a guest owns, and what its file says of each.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vm_passthrough::PciAddress;

use super::MAX_DEVICES;
use super::read::{Entry, Reader, Section, printable};

/// What a guest file says of a device beside its address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSettings {
    /// What is in the place of its expansion ROM; `None` for its own.
    pub rom: Option<RomSetting>,
}

/// What a guest finds in the place of a device's expansion ROM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RomSetting {
    /// Nothing.
    Hidden,
    /// What is in this file.
    File(PathBuf),
}

impl Reader<'_> {
    /// The devices in their order, and what is said of those of which anything is.
    pub(super) fn devices(
        &mut self,
        root: &Section<'_, '_>,
    ) -> (Vec<PciAddress>, BTreeMap<PciAddress, DeviceSettings>) {
        const RULE: &str = "write [[devices]] with address = \"0000:65:00.0\" for each";
        let (mut devices, mut all) = (Vec::new(), BTreeMap::new());
        for entry in self.list(root, "devices", MAX_DEVICES, RULE) {
            let Some(section) = self.section(&entry, RULE) else { continue };
            self.known(&section, &["address", "rom"]);
            let settings = DeviceSettings { rom: self.rom(&section) };
            let Some(entry) = self.required(&section, "address", "write address = \"0000:65:00.0\"") else {
                continue;
            };
            let Some(text) = self.string(&entry, "write an address as in \"0000:65:00.0\"") else { continue };
            match text.parse::<PciAddress>() {
                Ok(address) if devices.contains(&address) => {
                    self.problem(
                        entry.at,
                        format!(
                            "`{}` is {address}, which is there already; name each device once",
                            entry.key
                        ),
                    );
                }
                Ok(address) => {
                    devices.push(address);
                    if settings != DeviceSettings::default() {
                        all.insert(address, settings);
                    }
                }
                Err(error) => {
                    self.problem(entry.at, format!("`{}`: {}", entry.key, printable(&error.to_string())))
                }
            }
        }
        (devices, all)
    }

    fn rom(&mut self, section: &Section<'_, '_>) -> Option<RomSetting> {
        let entry: Entry<'_, '_> = self.optional(section, "rom")?;
        match self.string(&entry, "write the path of a ROM, or \"none\"")? {
            "none" => Some(RomSetting::Hidden),
            _ => self.path(&entry).map(RomSetting::File),
        }
    }
}
