//! Moving functions between drivers, through `driver_override`, `unbind` and `bind`.
//!
//! What a step was to change is read back: `driver_override` itself and, after `bind`, the driver. After `unbind` it is
//! the next `bind`, or the look at the driver before it, that shows whether the function is free.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::BindError;
use super::lock::FunctionLock;
use crate::iommu::is_vfio_driver;
use crate::ledger::ClaimedFunction;
use crate::pci::config::{ConfigState, HEADER_SIZE};
use crate::readiness::{holders, size_text};
use crate::{Host, PciAddress, files, pci};

/// Moves functions between drivers; each access to sysfs has until the deadline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Binder<'a> {
    host: &'a Host,
    deadline: Duration,
}

impl<'a> Binder<'a> {
    pub(super) fn new(host: &'a Host, deadline: Duration) -> Self {
        Self { host, deadline }
    }

    /// The directory of a driver in sysfs.
    pub(super) fn driver_dir(&self, driver: &str) -> PathBuf {
        self.host.sys.join("bus/pci/drivers").join(driver)
    }

    /// The driver that the function is bound to. Linux takes the link away as soon as it begins to unbind.
    pub(super) fn driver(&self, address: PciAddress) -> Result<Option<String>, BindError> {
        let device = self.host.pci_device(address);
        let link = device.join("driver");
        match fs::read_link(&link) {
            Ok(target) => Ok(target.file_name().map(|name| name.to_string_lossy().into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if device.exists() {
                    Ok(None)
                } else {
                    Err(BindError::Vanished(address))
                }
            }
            Err(error) => Err(self.refused(address, "read its driver".into(), &link, error)),
        }
    }

    /// The function's `driver_override`.
    pub(super) fn driver_override(&self, address: PciAddress) -> Result<Option<String>, BindError> {
        pci::driver_override(self.host, address, self.deadline).map_err(|error| {
            let path = self.host.pci_device(address).join("driver_override");
            self.refused(address, "read its driver_override".into(), &path, error)
        })
    }

    /// The function's reset methods, in order, as Linux writes them; `None` when it has none.
    pub(super) fn resets(&self, address: PciAddress) -> Option<String> {
        files::read_trimmed(&self.host.pci_device(address).join("reset_method"))
            .filter(|text| !text.is_empty())
    }

    /// Puts the reset methods back, which a reset that was killed left narrowed. It does no harm where they can't be, so
    /// that it keeps nothing else from being released.
    fn restore_resets(&self, lock: &FunctionLock, function: &ClaimedFunction) {
        let Some(before) = &function.resets else { return };
        let now = self.resets(function.address);
        if now.as_ref() == Some(before) || !self.host.pci_device(function.address).exists() {
            return;
        }
        let path = self.host.pci_device(function.address).join("reset_method");
        let write = |value: &str| self.host.writer().write_locked(&path, value, self.deadline, lock.file());
        // Linux refuses a list with a method that no longer works; then its own choice is the best there is.
        let written = write(before).or_else(|error| match error.kind() {
            io::ErrorKind::TimedOut => Err(error),
            _ => write("default"),
        });
        if let Err(error) = written {
            let path = path.display();
            tracing::warn!("{path} can't be set to `{before}`, as it was: {error}; write `default` to it");
        }
    }

    fn set_driver_override(&self, lock: &FunctionLock, driver: Option<&str>) -> Result<(), BindError> {
        let address = lock.address();
        let path = self.host.pci_device(address).join("driver_override");
        let what = match driver {
            Some(driver) => format!("set its driver_override to {driver}"),
            None => "clear its driver_override".into(),
        };
        // An empty line clears it.
        self.write(lock, what, &path, &format!("{}\n", driver.unwrap_or_default()))?;
        let found = self.driver_override(address)?;
        if found.as_deref() == driver {
            return Ok(());
        }
        Err(BindError::WrongOverride { address, expected: driver.map(str::to_owned), found })
    }

    /// Takes the function from `driver`.
    pub(super) fn unbind(&self, lock: &FunctionLock, driver: &str) -> Result<(), BindError> {
        let path = self.driver_dir(driver).join("unbind");
        self.write(lock, format!("unbind it from {driver}"), &path, &lock.address().to_string())
    }

    fn bind(&self, lock: &FunctionLock, driver: &str) -> Result<(), BindError> {
        let path = self.driver_dir(driver).join("bind");
        self.write(lock, format!("bind it to {driver}"), &path, &lock.address().to_string())
    }

    /// Takes the function from `driver`, gives its BARs these sizes, and binds it to a VFIO driver.
    pub(super) fn take(
        &self,
        lock: &FunctionLock,
        driver: Option<&str>,
        vfio_driver: &str,
        bar_sizes: &BTreeMap<u8, u64>,
    ) -> Result<(), BindError> {
        self.set_driver_override(lock, Some(vfio_driver))?;
        if let Some(driver) = driver {
            self.unbind(lock, driver)?;
        }
        for (&index, &size) in bar_sizes {
            self.resize(lock, index, size)?;
        }
        self.bind_and_verify(lock, vfio_driver)
    }

    /// Those of these BARs that have other sizes now, with the sizes that they have.
    pub(super) fn other_sizes(&self, address: PciAddress, sizes: &BTreeMap<u8, u64>) -> Vec<(u8, u64)> {
        let other = |(&index, &size)| {
            let has = pci::bar_size(self.host, address, index).filter(|&has| has != size)?;
            Some((index, has))
        };
        sizes.iter().filter_map(other).collect()
    }

    /// Gives a BAR of a function that has no driver another size (PCI Express Base 6.0, 7.8.6).
    fn resize(&self, lock: &FunctionLock, index: u8, size: u64) -> Result<(), BindError> {
        let address = lock.address();
        if pci::bar_size(self.host, address, index) == Some(size) {
            return Ok(());
        }
        let path = self.host.pci_device(address).join(format!("resource{index}_resize"));
        let what = format!("give BAR {index} {}", size_text(size));
        // Linux takes the exponent of the size in MiB.
        let value = size.max(1 << 20).ilog2() - 20;
        self.write(lock, what.clone(), &path, &value.to_string())?;
        match pci::bar_size(self.host, address, index) {
            Some(has) if has == size => Ok(()),
            has => {
                let has = has.map_or_else(|| "none".into(), size_text);
                let error = io::Error::other(format!("it has {has} afterwards"));
                Err(self.refused(address, what, &path, error))
            }
        }
    }

    /// Gives BARs of a function that has no driver the sizes that they had. It does no harm where that can't be, so that it keeps
    /// nothing else from being released.
    fn restore_sizes(&self, lock: &FunctionLock, function: &ClaimedFunction) {
        for &(index, size) in function.bar_sizes.iter().rev() {
            if let Err(error) = self.resize(lock, index, size) {
                tracing::warn!("{error}; it keeps its size");
            }
        }
    }

    /// Returns the function to its driver, from whatever point [`take`](Self::take) or an earlier `restore` came to. A function
    /// that has gone has nothing to return, and one that someone else bound to another driver since keeps it.
    pub(super) fn restore(&self, lock: &FunctionLock, function: &ClaimedFunction) -> Result<(), BindError> {
        let address = function.address;
        let restored = self.try_restore(lock, function);
        if restored.is_ok() {
            self.restore_resets(lock, function);
        }
        match restored {
            Err(BindError::Vanished(_)) => Ok(()),
            Err(BindError::Refused { .. } | BindError::Lost { .. })
                if !self.host.pci_device(address).exists() =>
            {
                Ok(())
            }
            result => result,
        }
    }

    fn try_restore(&self, lock: &FunctionLock, function: &ClaimedFunction) -> Result<(), BindError> {
        let address = function.address;
        if function.kept {
            return Ok(());
        }
        let taken_by = Some(function.vfio_driver.as_str());
        let now = self.driver(address)?;
        if now.as_deref() == taken_by {
            self.unbind(lock, &function.vfio_driver)?;
        }
        if now.is_none() || now.as_deref() == taken_by {
            self.restore_sizes(lock, function);
        }
        self.set_driver_override(lock, function.driver_override.as_deref())?;
        let now = self.driver(address)?;
        match (function.driver.as_deref(), now.as_deref()) {
            (Some(driver), None) => {
                if !self.driver_dir(driver).exists() {
                    return Err(BindError::DriverGone { address, driver: driver.into() });
                }
                self.bind_and_verify(lock, driver)
            }
            (_, now_on) if now_on.is_some() && now_on == taken_by => Err(BindError::WrongDriver {
                address,
                expected: function.driver.clone().unwrap_or_else(|| "no driver".into()),
                found: now,
            }),
            (former, now) => {
                if let Some(now) = now.filter(|&now| Some(now) != former && !is_vfio_driver(now)) {
                    tracing::warn!(%address, driver = now, "was bound to another driver since, which keeps it");
                }
                Ok(())
            }
        }
    }

    fn bind_and_verify(&self, lock: &FunctionLock, driver: &str) -> Result<(), BindError> {
        let address = lock.address();
        let result = self.bind(lock, driver);
        if let Err(BindError::Stuck { .. }) = result {
            return result;
        }
        let found = self.driver(address)?;
        if found.as_deref() == Some(driver) {
            // Someone, udev perhaps, was faster: that it is bound is what counts.
            return Ok(());
        }
        result?;
        Err(BindError::WrongDriver { address, expected: driver.into(), found })
    }

    fn write(&self, lock: &FunctionLock, what: String, path: &Path, value: &str) -> Result<(), BindError> {
        tracing::debug!(path = %path.display(), value = value.trim_end(), "write");
        self.host
            .writer()
            .write_locked(path, value, self.deadline, lock.file())
            .map_err(|error| self.refused(lock.address(), what, path, error))
    }

    /// Whether Linux has the function in D3cold.
    pub(super) fn is_cold(&self, address: PciAddress) -> bool {
        let state = files::read_trimmed(&self.host.pci_device(address).join("power_state"));
        state.as_deref() == Some("D3cold")
    }

    /// Checks that a function answers, for which Linux wakes it. Its power state doesn't show that: where Linux finds nothing but
    /// ones, it takes the function to be in D3cold.
    pub(super) fn check_answers(&self, address: PciAddress) -> Result<(), BindError> {
        match self.silent(address) {
            Some(state) => Err(self.lost_error(address, "claim it".into(), state)),
            None => Ok(()),
        }
    }

    /// What shows that a function does not answer.
    fn silent(&self, address: PciAddress) -> Option<String> {
        let state = pci::config_state(self.host, address).filter(|&state| state != ConfigState::Alive)?;
        Some(format!("does not answer, its config space {state}"))
    }

    fn lost_error(&self, address: PciAddress, what: String, state: String) -> BindError {
        let remove = self.host.pci_device(address).join("remove");
        let rescan = self.host.sys.join("bus/pci/rescan");
        BindError::Lost { address, what, state, remove, rescan }
    }

    /// What shows that a function does not answer, or had no power since Linux set it up.
    fn lost(&self, address: PciAddress) -> Option<String> {
        if let Some(state) = self.silent(address) {
            return Some(state);
        }
        // The BARs of a virtual function read zero.
        let config =
            pci::read_config(self.host, address).ok().filter(|_| !pci::is_virtual(self.host, address))?;
        let lost = pci::lost_bar(config.get(..HEADER_SIZE)?, &pci::bars(self.host, address)).is_some();
        lost.then(|| "has other addresses in its BARs than it was given, as after a loss of power".into())
    }

    fn refused(&self, address: PciAddress, what: String, path: &Path, source: io::Error) -> BindError {
        use io::ErrorKind::{
            InvalidInput, NotFound, PermissionDenied, ReadOnlyFilesystem, ResourceBusy, StorageFull, TimedOut,
        };
        let remedy = match source.kind() {
            TimedOut => {
                let holders = holders(self.host, address);
                return BindError::Stuck { address, what, deadline: self.deadline, holders };
            }
            NotFound if !self.host.pci_device(address).exists() => return BindError::Vanished(address),
            PermissionDenied => "run as root",
            ReadOnlyFilesystem => {
                "sysfs is mounted read-only here, as in a container: run on the host, or mount it rw"
            }
            InvalidInput => {
                "the driver refused the function; vfio-pci does so when no IOMMU translates for it"
            }
            ResourceBusy => "another driver took it in the meantime; try again, and stop what binds drivers",
            StorageFull if what.starts_with("give BAR") => {
                "the bridges above it have no room for a BAR of that size: choose a smaller one, or give them more room \
                 (\"Above 4G decoding\" and \"Resizable BAR\" in the firmware, or pci=realloc)"
            }
            StorageFull => "the Linux kernel had no room for it; dmesg says more",
            NotFound => "the driver is not loaded, or this Linux lacks the attribute",
            _ if let Some(state) = self.lost(address) => {
                return self.lost_error(address, what, state);
            }
            _ => "dmesg says more",
        };
        BindError::Refused { address, what, path: path.into(), source, remedy }
    }
}
