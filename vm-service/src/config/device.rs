//! The functions of the host that a guest owns, and what its file says of each.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vm_passthrough::PciAddress;
use vm_passthrough::vfio::VfToken;

use super::read::{Entry, Reader, Section, printable, shorten};
use super::{GuestConfig, MAX_DEVICES, parse_size};

/// The key of a secret: its line is not shown, whatever is wrong with it.
pub(super) const VF_TOKEN: &str = "vf_token";

/// What a guest file says of a device beside its address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSettings {
    /// What is in the place of its expansion ROM; `None` for its own.
    pub rom: Option<RomSetting>,
    /// Sizes in bytes that its BARs get before the guest starts, by index.
    pub bars: BTreeMap<u8, u64>,
    /// What it is opened with, if it is a virtual function of a user-space driver's physical one. It goes nowhere but to the Linux
    /// kernel.
    #[serde(skip)]
    pub vf_token: Option<VfToken>,
}

/// What a guest finds in the place of a device's expansion ROM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RomSetting {
    /// Nothing.
    Hidden,
    /// What is in this file.
    File(PathBuf),
}

impl GuestConfig {
    /// The sizes that BARs of its devices get.
    pub(crate) fn bar_sizes(&self) -> BTreeMap<PciAddress, BTreeMap<u8, u64>> {
        let sized = self.settings.iter().filter(|(_, settings)| !settings.bars.is_empty());
        sized.map(|(&address, settings)| (address, settings.bars.clone())).collect()
    }

    /// What virtual functions among its devices are opened with.
    pub(crate) fn vf_tokens(&self) -> BTreeMap<PciAddress, VfToken> {
        let token = |(&address, settings): (&PciAddress, &DeviceSettings)| {
            Some((address, settings.vf_token.clone()?))
        };
        self.settings.iter().filter_map(token).collect()
    }
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
            self.known(&section, &["address", "rom", "bars", VF_TOKEN]);
            let vf_token = self.optional(&section, VF_TOKEN).and_then(|entry| self.vf_token(&entry));
            let settings = DeviceSettings { rom: self.rom(&section), bars: self.bars(&section), vf_token };
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

    fn vf_token(&mut self, entry: &Entry<'_, '_>) -> Option<VfToken> {
        const RULE: &str = "write a UUID, as in \"2ab74924-c335-45f4-9b16-8569e5b08258\"";
        let text = self.string(entry, RULE)?;
        text.parse().ok().or_else(|| self.wrong(entry, "is none", RULE))
    }

    fn bars(&mut self, section: &Section<'_, '_>) -> BTreeMap<u8, u64> {
        const RULE: &str = "write a table of BARs and their sizes, as in { 0 = \"256M\" }";
        const SIZE: &str = "write a power of two from 1M on, as in \"256M\" or \"16G\"";
        let mut bars = BTreeMap::new();
        let table = self.optional(section, "bars").and_then(|entry| self.section(&entry, RULE));
        let Some(table) = table else { return bars };
        self.known(&table, &["0", "1", "2", "3", "4", "5"]);
        for index in 0..6 {
            let Some(entry) = self.optional(&table, &index.to_string()) else { continue };
            let Some(text) = self.string(&entry, SIZE) else { continue };
            match parse_size(text) {
                Ok(size) if size.is_power_of_two() && size >= 1 << 20 => drop(bars.insert(index, size)),
                _ => drop(self.wrong::<()>(&entry, &format!("is \"{}\"", shorten(text)), SIZE)),
            }
        }
        bars
    }

    fn rom(&mut self, section: &Section<'_, '_>) -> Option<RomSetting> {
        let entry: Entry<'_, '_> = self.optional(section, "rom")?;
        match self.string(&entry, "write the path of a ROM, or \"none\"")? {
            "none" => Some(RomSetting::Hidden),
            _ => self.path(&entry).map(RomSetting::File),
        }
    }
}
