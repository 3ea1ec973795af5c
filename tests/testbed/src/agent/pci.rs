//! PCI functions as sysfs shows them, read by hand: the judge must not use the code that it judges.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::scenario::Variant;

/// A PCI function of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its address, as in `0000:01:00.0`.
    pub address: String,
}

impl Function {
    /// All functions, by address.
    ///
    /// # Errors
    /// When sysfs can't be read.
    pub fn all() -> Result<Vec<Self>> {
        let entries = fs::read_dir("/sys/bus/pci/devices").context("can't read /sys/bus/pci/devices")?;
        let mut found: Vec<Self> = entries
            .flatten()
            .map(|entry| Self { address: entry.file_name().to_string_lossy().into_owned() })
            .collect();
        found.sort_by(|a, b| a.address.cmp(&b.address));
        Ok(found)
    }

    /// All functions with these ids, by address.
    ///
    /// # Errors
    /// When sysfs can't be read.
    pub fn find_all(vendor: u16, device: u16) -> Result<Vec<Self>> {
        let mut found = Self::all()?;
        found.retain(|function| {
            function.attribute("vendor") == Some(format!("{vendor:#06x}"))
                && function.attribute("device") == Some(format!("{device:#06x}"))
        });
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

    /// Address and size of the memory BAR `index`, by sysfs `resource`.
    ///
    /// # Errors
    /// When it has none.
    pub fn memory_bar(&self, index: usize) -> Result<(u64, u64)> {
        let resources = self.attribute("resource").unwrap_or_default();
        let numbers = resources.lines().nth(index).into_iter().flat_map(str::split_whitespace);
        let numbers: Vec<u64> =
            numbers.filter_map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok()).collect();
        match numbers[..] {
            [start, end, _] if start != 0 => Ok((start, end - start + 1)),
            _ => anyhow::bail!("{} has no BAR {index}: {resources}", self.address),
        }
    }

    /// Reads the words at these offsets, multiples of 4, of BAR `index`, and writes others there where there are some.
    ///
    /// # Errors
    /// When the BAR can't be mapped.
    pub fn exchange_words(&self, index: usize, offsets: &[u64], words: Option<&[u32]>) -> Result<Vec<u32>> {
        fs::write(self.path().join("enable"), "1").context("it can't be enabled")?;
        let bar = self.path().join(format!("resource{index}"));
        let file = fs::OpenOptions::new().read(true).write(true).open(&bar)?;
        let exchange = |(number, &offset): (usize, &u64)| {
            let word = words.and_then(|words| words.get(number).copied());
            super::sys::exchange_word(&file, offset, word)
        };
        let words: std::io::Result<_> = offsets.iter().enumerate().map(exchange).collect();
        fs::write(self.path().join("enable"), "0")?;
        words.with_context(|| format!("can't map {}", bar.display()))
    }

    /// The bridge or port right above it.
    ///
    /// # Errors
    /// When sysfs can't be read, or it is on the root bus.
    pub fn above(&self) -> Result<Self> {
        let path = fs::canonicalize(self.path()).with_context(|| format!("{} is gone", self.address))?;
        let name = path.parent().and_then(|above| above.file_name()).context("it is below nothing")?;
        let above = Self { address: name.to_string_lossy().into_owned() };
        anyhow::ensure!(above.path().exists(), "{} is on the root bus", self.address);
        Ok(above)
    }

    fn link(&self, name: &str) -> Option<String> {
        let target = fs::read_link(self.path().join(name)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// The driver that it is bound to.
    pub fn driver(&self) -> Option<String> {
        self.link("driver")
    }

    /// How its interrupts are delivered, `msi` or `msix`, one entry per vector; empty when they are not messages.
    pub fn message_vectors(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path().join("msi_irqs")) else { return Vec::new() };
        entries
            .flatten()
            .filter_map(|entry| Some(fs::read_to_string(entry.path()).ok()?.trim().to_owned()))
            .collect()
    }

    /// Gives it to `driver` by hand, as operators do: `driver_override`, unbind, probe.
    ///
    /// # Errors
    /// When the Linux kernel refuses, or another driver has it afterwards.
    pub fn bind(&self, driver: Option<&str>) -> Result<()> {
        fs::write(self.path().join("driver_override"), driver.unwrap_or("\n"))
            .with_context(|| format!("can't set driver_override of {}", self.address))?;
        if self.driver().is_some() {
            fs::write(self.path().join("driver/unbind"), &self.address)
                .with_context(|| format!("can't unbind {}", self.address))?;
        }
        fs::write("/sys/bus/pci/drivers_probe", &self.address)
            .with_context(|| format!("can't probe drivers for {}", self.address))?;
        match driver {
            Some(driver) => anyhow::ensure!(
                self.driver().as_deref() == Some(driver),
                "{} is bound to {:?}, not to {driver}",
                self.address,
                self.driver()
            ),
            None => anyhow::ensure!(self.driver().is_some(), "no driver took {}", self.address),
        }
        Ok(())
    }

    /// Whether it is a bridge to another bus or the host's own, which nobody gives away.
    pub fn is_bridge(&self) -> bool {
        let header = fs::read(self.path().join("config")).ok().and_then(|config| config.get(0x0e).copied());
        let class = self.attribute("class").unwrap_or_default();
        header.is_none_or(|header| header & 0x7f != 0)
            || class.starts_with("0x0600")
            || class.starts_with("0x0601")
    }

    /// The node by which VFIO opens it, once vfio-pci has it.
    ///
    /// # Errors
    /// When it has none.
    pub fn vfio_node(&self, variant: Variant) -> Result<String> {
        Ok(match variant {
            Variant::Group => format!("/dev/vfio/{}", self.group().context("it is in no IOMMU group")?),
            Variant::Iommufd => {
                let directory = self.path().join("vfio-dev");
                let entry = fs::read_dir(&directory)
                    .with_context(|| format!("can't read {}", directory.display()))?
                    .flatten()
                    .next();
                let name = entry.context("vfio-pci has made no cdev")?.file_name();
                format!("/dev/vfio/devices/{}", name.to_string_lossy())
            }
        })
    }

    /// Its IOMMU group.
    pub fn group(&self) -> Option<String> {
        self.link("iommu_group")
    }
}
