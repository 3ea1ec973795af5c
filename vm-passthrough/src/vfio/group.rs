//! The back end of a group and a container: `/dev/vfio/GROUP` and `/dev/vfio/vfio`.

use std::collections::BTreeMap;
use std::collections::btree_map;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use vfio_bindings::bindings::vfio as uapi;

use super::dma::DmaMappings;
use super::failure::{invalid_response, system};
use super::interface::{DmaPermission, Mapping, Result, VfioError};
use super::parse::{self, IommuInfo};
use super::sys;
use super::token::VfToken;
use crate::{Host, PciAddress, iommu};

/// A container. It translates only while a group is in it; with the last group the Linux kernel drops all mappings.
#[derive(Debug)]
pub(super) struct Container {
    fd: OwnedFd,
    path: String,
    groups: BTreeMap<u32, Group>,
}

#[derive(Debug)]
struct Group {
    fd: Arc<OwnedFd>,
    path: String,
    /// Open devices.
    devices: usize,
    /// Whether this process put it into the container, and takes it out.
    is_own: bool,
}

/// A device that was opened through its group.
pub(super) struct Opened {
    pub(super) file: OwnedFd,
    pub(super) group: u32,
    pub(super) group_fd: Arc<OwnedFd>,
}

pub(super) fn open_node(path: &Path) -> io::Result<OwnedFd> {
    // Opened close-on-exec, as std does.
    OpenOptions::new().read(true).write(true).open(path).map(|file: File| file.into())
}

impl Container {
    pub(super) fn open(host: &Host) -> Result<Self> {
        let node = host.dev.join("vfio/vfio");
        let path = node.display().to_string();
        let fd = open_node(&node).map_err(|error| system("open", &path, error))?;
        let version = sys::group::api_version(fd.as_fd())
            .map_err(|error| system("VFIO_GET_API_VERSION", &path, error))?;
        if version != uapi::VFIO_API_VERSION as i32 {
            return Err(invalid_response("VFIO_GET_API_VERSION", &path, format!("version {version}")));
        }
        let type1 = sys::group::has_extension(fd.as_fd(), uapi::VFIO_TYPE1v2_IOMMU)
            .map_err(|error| system("VFIO_CHECK_EXTENSION", &path, error))?;
        if !type1 {
            return Err(VfioError::System {
                operation: "VFIO_CHECK_EXTENSION",
                path,
                source: io::ErrorKind::Unsupported.into(),
                remedy: "load the module vfio_iommu_type1",
            });
        }
        Ok(Self { fd, path, groups: BTreeMap::new() })
    }

    /// One that another process opened.
    pub(super) fn received(fd: OwnedFd) -> Self {
        Self { fd, path: "the container".into(), groups: BTreeMap::new() }
    }

    /// What another process needs to use it.
    pub(super) fn share(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Whether the Linux kernel has an address space behind it now.
    fn translates(&self) -> bool {
        !self.groups.is_empty()
    }

    /// What the IOMMU can do; `None` while no group is in it.
    pub(super) fn info(&self) -> Result<Option<IommuInfo>> {
        const OPERATION: &str = "VFIO_IOMMU_GET_INFO";
        if !self.translates() {
            return Ok(None);
        }
        let answer = grown(|len| sys::group::iommu_info(self.fd.as_fd(), len), OPERATION, &self.path)?;
        let info = parse::iommu_info(&answer, sys::page_size());
        info.map(Some).map_err(|what| invalid_response(OPERATION, &self.path, what))
    }

    /// Maps in the Linux kernel, which has `locked` bytes locked for it already; does nothing while no group is in it, as the
    /// first to join maps all.
    pub(super) fn map(
        &self,
        iova: u64,
        memory: &dyn Mapping,
        permission: DmaPermission,
        locked: u64,
    ) -> Result<()> {
        const OPERATION: &str = "VFIO_IOMMU_MAP_DMA";
        if !self.translates() {
            return Ok(());
        }
        let writable = permission == DmaPermission::ReadWrite;
        sys::group::map_dma(self.fd.as_fd(), iova, memory, writable)
            .map_err(|error| super::failure::map(OPERATION, &self.path, memory.len(), locked, error))
    }

    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<()> {
        const OPERATION: &str = "VFIO_IOMMU_UNMAP_DMA";
        if !self.translates() {
            return Ok(());
        }
        let unmapped = sys::group::unmap_dma(self.fd.as_fd(), iova, len)
            .map_err(|error| system(OPERATION, &self.path, error))?;
        if unmapped != len {
            return Err(invalid_response(
                OPERATION,
                &self.path,
                format!("{unmapped:#x} bytes instead of {len:#x}"),
            ));
        }
        Ok(())
    }

    /// Opens a function through its group, which joins the container if it is not in it yet. The first group to
    /// join gets all that `mappings` holds mapped.
    pub(super) fn open_device(
        &mut self,
        host: &Host,
        address: PciAddress,
        number: u32,
        token: Option<&VfToken>,
        mappings: &DmaMappings,
    ) -> Result<Opened> {
        if !self.groups.contains_key(&number) {
            self.join(host, address, number, mappings)?;
        }
        let btree_map::Entry::Occupied(mut entry) = self.groups.entry(number) else {
            return Err(VfioError::Unavailable { address, reason: format!("group {number} did not join") });
        };
        let group = entry.get_mut();
        match sys::group::open_device(group.fd.as_fd(), &VfToken::name(address, token)) {
            Ok(file) => {
                group.devices += 1;
                Ok(Opened { file, group: number, group_fd: group.fd.clone() })
            }
            Err(error) => {
                let error = system("VFIO_GROUP_GET_DEVICE_FD", &address.to_string(), error);
                if group.devices == 0
                    && let Err(error) = self.remove(number)
                {
                    tracing::error!(group = number, %error, "could not undo joining a container");
                }
                Err(error)
            }
        }
    }

    /// Notes a device of a group that another process opened, and put into the container. As where that is done here, the first
    /// group gets all that `mappings` holds mapped.
    pub(super) fn receive(
        &mut self,
        number: u32,
        fd: OwnedFd,
        mappings: &DmaMappings,
    ) -> Result<Arc<OwnedFd>> {
        let first = !self.translates();
        let path = format!("group {number}");
        let group = Group { fd: Arc::new(fd), path, devices: 0, is_own: false };
        let group = self.groups.entry(number).or_insert(group);
        group.devices += 1;
        let fd = group.fd.clone();
        if first && let Err(error) = self.map_all(mappings) {
            self.groups.remove(&number);
            return Err(error);
        }
        Ok(fd)
    }

    fn join(&mut self, host: &Host, address: PciAddress, number: u32, mappings: &DmaMappings) -> Result<()> {
        let node = host.dev.join("vfio").join(number.to_string());
        let path = node.display().to_string();
        let fd = open_node(&node).map_err(|error| system("open", &path, error))?;
        let status = sys::group::group_status(fd.as_fd())
            .map_err(|error| system("VFIO_GROUP_GET_STATUS", &path, error))?;
        if status & uapi::VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(VfioError::Unavailable { address, reason: not_viable(host, number) });
        }
        if status & uapi::VFIO_GROUP_FLAGS_CONTAINER_SET != 0 {
            return Err(VfioError::Unavailable {
                address,
                reason: format!("group {number} is in another container; close that one first"),
            });
        }
        let first = !self.translates();
        sys::group::set_container(fd.as_fd(), self.fd.as_fd())
            .map_err(|error| system("VFIO_GROUP_SET_CONTAINER", &path, error))?;
        self.groups.insert(number, Group { fd: Arc::new(fd), path, devices: 0, is_own: true });
        if !first {
            return Ok(());
        }
        let ready = self.set_iommu().and_then(|()| self.map_all(mappings));
        if ready.is_err()
            && let Err(error) = self.remove(number)
        {
            tracing::error!(group = number, %error, "could not undo joining a container");
        }
        ready
    }

    fn set_iommu(&self) -> Result<()> {
        sys::group::set_iommu(self.fd.as_fd(), uapi::VFIO_TYPE1v2_IOMMU)
            .map_err(|error| system("VFIO_SET_IOMMU", &self.path, error))
    }

    /// Maps what was asked for while no group was in the container. On a failure the group leaves again, which
    /// unmaps all.
    fn map_all(&self, mappings: &DmaMappings) -> Result<()> {
        let mut locked = 0;
        for (iova, entry) in mappings.iter() {
            let info = self.info()?.unwrap_or_else(|| IommuInfo::unlimited(sys::page_size()));
            super::dma::check_range(iova, &*entry.memory, info.page, &info.ranges, info.entries_left)?;
            self.map(iova, &*entry.memory, entry.permission, locked)?;
            locked += entry.memory.len();
        }
        Ok(())
    }

    /// One device of a group was closed; with its last device the group leaves the container and can return
    /// to the host's drivers.
    pub(super) fn leave(&mut self, number: u32) -> Result<()> {
        let Some(group) = self.groups.get_mut(&number) else { return Ok(()) };
        group.devices = group.devices.saturating_sub(1);
        if group.devices > 0 { Ok(()) } else { self.remove(number) }
    }

    fn remove(&mut self, number: u32) -> Result<()> {
        let Some(group) = self.groups.remove(&number).filter(|group| group.is_own) else { return Ok(()) };
        match sys::group::unset_container(group.fd.as_fd()) {
            // It is in none any more: with the group's last function, which the host has taken away, the Linux kernel took it out.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            left => left.map_err(|error| system("VFIO_GROUP_UNSET_CONTAINER", &group.path, error)),
        }
    }

    /// The open groups with these numbers, for a hot reset; `Err` with the first that is not open here.
    pub(super) fn group_fds(&self, numbers: &[u32]) -> Result<Vec<Arc<OwnedFd>>, u32> {
        numbers
            .iter()
            .map(|number| self.groups.get(number).map(|group| group.fd.clone()).ok_or(*number))
            .collect()
    }
}

/// Asks with more and more room until the answer fits.
pub(super) fn grown(
    ask: impl Fn(usize) -> io::Result<Vec<u8>>,
    operation: &'static str,
    path: &str,
) -> Result<Vec<u8>> {
    let mut len = 0;
    for _ in 0..8 {
        let answer = ask(len).map_err(|error| system(operation, path, error))?;
        let wanted = parse::wanted_size(&answer).map_err(|what| invalid_response(operation, path, what))?;
        if wanted <= answer.len() {
            return Ok(answer);
        }
        len = wanted;
    }
    Err(invalid_response(operation, path, "a size that grows with every question".into()))
}

/// Which members of a group keep it from being used, and their drivers.
fn not_viable(host: &Host, number: u32) -> String {
    let occupants = iommu::group(host, number).map(|group| {
        let functions: Vec<_> = group.members.iter().map(ToString::to_string).collect();
        let members = functions.iter().chain(&group.others).map(String::as_str);
        iommu::occupants(host, &group, members)
    });
    let occupants: Vec<_> = occupants
        .unwrap_or_default()
        .into_iter()
        .map(|iommu::Occupant { name, driver, .. }| format!("{driver} has {name}"))
        .collect();
    if occupants.is_empty() {
        return format!(
            "group {number} is not viable: one of its functions is in use; look at the Linux kernel's log"
        );
    }
    format!(
        "group {number} is not viable, as the host's drivers use its devices: {}; explain lists the fixes",
        occupants.join(", ")
    )
}
