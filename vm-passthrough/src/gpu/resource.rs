//! Registers of a function that the host keeps, through `resourceN` in sysfs: to be read only, and only while that has no effect.
//!
//! # When it is not done
//! A read of a BAR has side effects where the function sleeps or does not decode it: the bridge above reports an error, which some
//! platforms take for a fatal one. So it is not read unless Linux has the function in D0, its config space says so too, and it
//! decodes memory. Nor is a function read that a VFIO driver has: a guest may be resetting it at that moment.
//!
//! What can't be excluded: between that look and the read, its driver may let it sleep. It then reads all ones, which is told
//! as such. And a driver that is bound in that moment may have Linux revoke the mapping (`CONFIG_IO_STRICT_DEVMEM`), and
//! the reader ends by SIGBUS: so a mapping is to be dropped soon.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use thiserror::Error;

use super::registers::{RegisterError, Registers, check};
use super::sys::ReadOnlyMap;
use crate::Host;
use crate::PciAddress;
use crate::pci::config::{CONFIG_SIZE, ConfigSource as _, capabilities};
use crate::pci::{PciFunction, PowerState, Sriov, regs};
use crate::vfio::load_u32;

/// Why a function's registers are not read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotReadable {
    /// It has no such BAR, or not one of memory.
    #[error("{address} has no BAR {bar} of memory")]
    NoBar {
        /// The function.
        address: PciAddress,
        /// Which BAR.
        bar: u8,
    },
    /// It does not run.
    #[error(
        "{address} is not in D0 (power state {state}), and is not woken for that; use it, or keep it on (power/control of it in \
         sysfs), and try again"
    )]
    Asleep {
        /// The function.
        address: PciAddress,
        /// Its power state.
        state: PowerState,
    },
    /// It does not decode memory.
    #[error(
        "{address} does not decode its BARs (Command reads {command:#06x}), as no driver has enabled it; bind its driver"
    )]
    NotDecoding {
        /// The function.
        address: PciAddress,
        /// What Command reads.
        command: u16,
    },
    /// It is a virtual function.
    #[error(
        "{address} is a virtual function, and whether it decodes its BARs is a matter of its physical function; ask that, {physical}"
    )]
    Virtual {
        /// The function.
        address: PciAddress,
        /// Its physical function.
        physical: PciAddress,
    },
    /// A VFIO driver has it.
    #[error(
        "{address} belongs to {driver}, so that a guest may be resetting it; release it first, or ask inside of the guest"
    )]
    Passed {
        /// The function.
        address: PciAddress,
        /// The driver.
        driver: String,
    },
    /// A file of it can't be used.
    #[error("{path} can't be {doing}: {source}; {remedy}")]
    File {
        /// What was to be done, as in `opened`.
        doing: &'static str,
        /// Which file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
}

/// The registers of a BAR of memory, mapped from sysfs. They are only read.
#[derive(Debug)]
pub struct ResourceRegisters {
    map: ReadOnlyMap,
    size: u64,
}

impl ResourceRegisters {
    /// Maps the first `len` bytes, or all, of BAR `bar` of a function, of which the scan is recent. Changes nothing.
    ///
    /// # Errors
    /// When that is not safe now, as [this module](super::ResourceRegisters) says, or not allowed.
    pub fn open(host: &Host, function: &PciFunction, bar: u8, len: u64) -> Result<Self, NotReadable> {
        let address = function.address;
        let size = match function.bars.iter().find(|found| found.index == bar) {
            Some(found) if found.kind != crate::pci::BarKind::Io => found.size.min(len),
            _ => return Err(NotReadable::NoBar { address, bar }),
        };
        if let Some(driver) = function.driver.as_ref().filter(|driver| driver.contains("vfio")) {
            return Err(NotReadable::Passed { address, driver: driver.clone() });
        }
        if let Some(Sriov::Virtual { physical }) = function.sriov {
            return Err(NotReadable::Virtual { address, physical });
        }
        let dir = host.pci_device(address);
        is_awake(&dir, address)?;
        let path = dir.join(format!("resource{bar}"));
        let failed = |doing, source: io::Error| {
            let remedy = remedy(&source);
            NotReadable::File { doing, path: path.clone(), source, remedy }
        };
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC)
            .open(&path)
            .map_err(|error| failed("opened", error))?;
        let metadata = file.metadata().map_err(|error| failed("read", error))?;
        // Behind the end of a file an access faults.
        if !metadata.is_file() || metadata.len() < size {
            return Err(failed("mapped", io::ErrorKind::UnexpectedEof.into()));
        }
        let invalid = || failed("mapped", io::ErrorKind::InvalidInput.into());
        let map = ReadOnlyMap::new(&file, usize::try_from(size).map_err(|_| invalid())?)
            .map_err(|error| failed("mapped", error))?;
        Ok(Self { map, size })
    }
}

impl Registers for ResourceRegisters {
    fn size(&self) -> u64 {
        self.size
    }

    fn read32(&self, offset: u64) -> Result<u32, RegisterError> {
        check(offset, self.size)?;
        load_u32(&self.map, offset).map_err(|source| RegisterError::Mapping { offset, source })
    }

    fn write32(&self, offset: u64, _: u32) -> Result<(), RegisterError> {
        check(offset, self.size)?;
        Err(RegisterError::ReadOnly { offset, reason: "the host has the function; claim it, and use VFIO" })
    }
}

/// Whether a function is in D0 and decodes memory. Config space, which wakes a function that sleeps, is read only after sysfs has
/// said that it does not.
fn is_awake(dir: &std::path::Path, address: PciAddress) -> Result<(), NotReadable> {
    let path = dir.join("power_state");
    let state = std::fs::read_to_string(&path)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(PowerState::Unknown);
    if state != PowerState::D0 {
        return Err(NotReadable::Asleep { address, state });
    }
    let path = dir.join("config");
    let mut config = [0; CONFIG_SIZE];
    let read = File::open(&path).and_then(|file| read_up_to(&file, &mut config));
    let read =
        read.map_err(|source| NotReadable::File { doing: "read", path, remedy: remedy(&source), source })?;
    let config = config.get(..read).unwrap_or_default();
    let command = config.read_u16(regs::COMMAND.into()).unwrap_or(0);
    if command & regs::COMMAND_MEMORY == 0 || command == u16::MAX {
        return Err(NotReadable::NotDecoding { address, command });
    }
    let pm = capabilities(config).into_iter().find(|capability| capability.id == regs::CAP_ID_PM);
    let control = pm.and_then(|pm| config.read_u16(usize::from(pm.offset) + usize::from(regs::PM_CTRL)));
    match control.unwrap_or(0) & regs::PM_CTRL_STATE_MASK {
        0 => Ok(()),
        1 => Err(NotReadable::Asleep { address, state: PowerState::D1 }),
        2 => Err(NotReadable::Asleep { address, state: PowerState::D2 }),
        _ => Err(NotReadable::Asleep { address, state: PowerState::D3Hot }),
    }
}

fn read_up_to(file: &File, data: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = data.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn remedy(error: &io::Error) -> &'static str {
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::PermissionDenied, _) => {
            "only root may, and in lockdown mode (/sys/kernel/security/lockdown) nobody"
        }
        (io::ErrorKind::NotFound, _) | (_, Some(libc::ENODEV | libc::ENXIO)) => "the function has gone",
        (_, Some(libc::EINVAL | libc::EBUSY)) => {
            "a Linux kernel with CONFIG_IO_STRICT_DEVMEM keeps a driver's BARs to the driver, unless it is booted with iomem=relaxed"
        }
        (io::ErrorKind::UnexpectedEof, _) => "it is shorter than the BAR",
        _ => "look at the Linux kernel's log (dmesg) for why",
    }
}
