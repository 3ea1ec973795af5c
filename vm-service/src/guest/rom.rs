//! Files in the place of devices' expansion ROMs: opened and checked by who starts the guest, and read by its VMM.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use vm_passthrough::PciAddress;
use vm_passthrough::pci::{PciFunction, Rom, RomImage};

use crate::config::{DeviceSettings, RomSetting, open_file};

/// What a guest is to find in the place of a device's ROM.
#[derive(Clone, Debug)]
pub(crate) enum RomFile {
    /// None.
    Hidden,
    /// What is in this file, with the size of its BAR.
    Open(Arc<File>, u64),
}

impl RomFile {
    /// Opens and checks those of a guest's functions. One that is another device's is only a warning: some are for several, and
    /// do not say so.
    ///
    /// # Errors
    /// The first file that is no ROM: its name, what is wrong, and where in it.
    pub(crate) fn open_all<'a>(
        functions: impl IntoIterator<Item = &'a PciFunction>,
        settings: &BTreeMap<PciAddress, DeviceSettings>,
    ) -> Result<BTreeMap<PciAddress, Self>, String> {
        let mut roms = BTreeMap::new();
        for function in functions {
            let rom = match settings.get(&function.address).and_then(|settings| settings.rom.as_ref()) {
                None => continue,
                Some(RomSetting::Hidden) => Self::Hidden,
                Some(RomSetting::File(path)) => Self::open(path, function).map_err(|reason| {
                    format!("the ROM {} for {} {reason}", path.display(), function.address)
                })?,
            };
            roms.insert(function.address, rom);
        }
        Ok(roms)
    }

    fn open(path: &Path, function: &PciFunction) -> Result<Self, String> {
        let not_opened = |error: std::io::Error| format!("can't be opened: {error}");
        let file = open_file(path, false).map_err(not_opened)?;
        if !file.metadata().map_err(not_opened)?.is_file() {
            return Err("is not a regular file; name the file itself".into());
        }
        let image = RomImage::read(&file).map_err(|error| error.to_string())?;
        if let Some((vendor, device)) = image.other_than(&function.ids) {
            tracing::warn!(
                "the ROM {} is for {vendor:04x}:{device:04x}, and {} is {:04x}:{:04x}; its guest gets it all the same",
                path.display(),
                function.address,
                function.ids.vendor,
                function.ids.device
            );
        }
        Ok(Self::Open(Arc::new(file), image.bar_size()))
    }

    /// The BAR that it takes.
    pub(super) fn bar(&self) -> Option<Rom> {
        match self {
            Self::Hidden => None,
            Self::Open(_, size) => Some(Rom { size: *size }),
        }
    }
}
