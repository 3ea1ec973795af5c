//! PCI functions as sysfs shows them, read by hand: the judge must not use the code that it judges.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// A PCI function of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its address, as in `0000:01:00.0`.
    pub address: String,
}

impl Function {
    /// All functions with these ids, by address.
    ///
    /// # Errors
    /// When sysfs can't be read.
    pub fn find_all(vendor: u16, device: u16) -> Result<Vec<Self>> {
        let entries = fs::read_dir("/sys/bus/pci/devices").context("can't read /sys/bus/pci/devices")?;
        let mut found: Vec<Self> = entries
            .flatten()
            .map(|entry| Self { address: entry.file_name().to_string_lossy().into_owned() })
            .filter(|function| {
                function.attribute("vendor") == Some(format!("{vendor:#06x}"))
                    && function.attribute("device") == Some(format!("{device:#06x}"))
            })
            .collect();
        found.sort_by(|a, b| a.address.cmp(&b.address));
        Ok(found)
    }

    /// The only function with these ids.
    ///
    /// # Errors
    /// When there is none, or more than one.
    pub fn find(vendor: u16, device: u16) -> Result<Self> {
        let mut found = Self::find_all(vendor, device)?;
        anyhow::ensure!(found.len() == 1, "{} functions are {vendor:04x}:{device:04x}, not one", found.len());
        Ok(found.remove(0))
    }

    /// Its directory in sysfs.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/sys/bus/pci/devices").join(&self.address)
    }

    /// An attribute, trimmed.
    pub fn attribute(&self, name: &str) -> Option<String> {
        Some(fs::read_to_string(self.path().join(name)).ok()?.trim().to_owned())
    }

    fn link(&self, name: &str) -> Option<String> {
        let target = fs::read_link(self.path().join(name)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// The driver that it is bound to.
    pub fn driver(&self) -> Option<String> {
        self.link("driver")
    }

    /// Its IOMMU group.
    pub fn group(&self) -> Option<String> {
        self.link("iommu_group")
    }
}
