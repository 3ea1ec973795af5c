//! [`KvmVmm`]: what devices need of a VMM, on kvm-ioctls and vm-memory.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::{Cap, DeviceFd, VmFd};
use vm_memory::{Address as _, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _, MmapRegion};

use super::routes::Routes;
use super::sys::Slot;
use super::{BarMap, DecodedBar, MapId, MsiMessage, RamRegion, RouteId, SharedMemory, Vmm, VmmError};
use crate::PciAddress;
use crate::vfio::Mapping;

/// A KVM guest whose RAM is a [`GuestMemoryMmap`].
///
/// It owns the guest's memory slots and its interrupt routing table; a VMM with interrupts of its own (for virtio)
/// makes them through [`Vmm::add_route`] too. Its interrupt lines are the pins of KVM's I/O APIC. Dropping it takes all memory from the guest, so keep it until no
/// vCPU runs.
pub struct KvmVmm {
    vm: Arc<VmFd>,
    memory: GuestMemoryMmap,
    /// With the mapping of each.
    ram: Mutex<Vec<(RamRegion, MapId)>>,
    bars: Arc<BarMap>,
    slots: Mutex<Slots>,
    routes: Mutex<Routes>,
    vfio: Mutex<VfioFiles>,
}

/// The most bytes of one slot. KVM takes 2^31 - 1 pages, a little less than 8 TiB; this keeps the next slot aligned as the
/// one before.
pub(super) const SLOT_BYTES: u64 = 4 << 40;

/// Memory slots in use.
struct Slots {
    /// Those of each mapping, by the first.
    used: BTreeMap<u32, Vec<Slot>>,
    free: Vec<u32>,
    next: u32,
    capacity: u32,
    /// The most bytes of one.
    most: u64,
}

/// The VFIO files that KVM knows, each with the number of devices that added it.
#[derive(Default)]
struct VfioFiles {
    device: Option<DeviceFd>,
    files: BTreeMap<RawFd, u32>,
}

impl KvmVmm {
    /// Gives the guest `vm` its RAM. The interrupt controllers must exist already (`KVM_CREATE_IRQCHIP`), and no
    /// memory slots.
    ///
    /// # Errors
    /// When KVM refuses the memory; the guest has none then.
    pub fn new(vm: Arc<VmFd>, memory: GuestMemoryMmap) -> Result<Arc<Self>, VmmError> {
        Self::with_slots(vm, memory, SLOT_BYTES)
    }

    /// As [`new`](Self::new), with slots of at most N bytes.
    pub(super) fn with_slots(
        vm: Arc<VmFd>,
        memory: GuestMemoryMmap,
        most: u64,
    ) -> Result<Arc<Self>, VmmError> {
        let ram: Vec<RamRegion> = memory
            .iter()
            .map(|region| RamRegion {
                guest: region.start_addr().raw_value(),
                memory: Arc::new(SharedMemory::new(region.get_mmap())),
            })
            .collect();
        let slots = Slots::new(limit(vm.check_extension_int(Cap::NrMemslots), 32), most);
        let routes = Routes::new(limit(vm.check_extension_int(Cap::IrqRouting), 1024));
        let vmm = Arc::new(Self {
            vm,
            memory,
            ram: Mutex::default(),
            bars: Arc::default(),
            slots: Mutex::new(slots),
            routes: Mutex::new(routes),
            vfio: Mutex::default(),
        });
        for region in ram {
            vmm.add_ram(region)?;
        }
        Ok(vmm)
    }

    /// Gives the guest more RAM. Devices that are attached learn of it from the caller
    /// ([`PassthroughDevice::ram_added`](super::PassthroughDevice::ram_added)), before the guest is.
    ///
    /// # Errors
    /// When KVM refuses: there is no slot left, or something else is there.
    pub fn add_ram(&self, region: RamRegion) -> Result<(), VmmError> {
        let id = self.map(region.guest, region.memory.clone())?;
        let mut ram = lock(&self.ram);
        ram.push((region, id));
        ram.sort_by_key(|(region, _)| region.guest);
        Ok(())
    }

    /// Takes RAM from the guest, the region that starts at `guest`. Devices that are attached learn of it before
    /// ([`PassthroughDevice::ram_removed`](super::PassthroughDevice::ram_removed)).
    ///
    /// # Errors
    /// When no region starts there, or KVM refuses; the guest keeps it then.
    pub fn remove_ram(&self, guest: u64) -> Result<(), VmmError> {
        let mut ram = lock(&self.ram);
        let at = ram.iter().position(|(region, _)| region.guest == guest).ok_or_else(|| {
            VmmError::new("take RAM from the guest", format!("no region of it starts at {guest:#x}"))
        })?;
        self.unmap(ram[at].1)?;
        ram.remove(at);
        Ok(())
    }

    /// Where the BARs of its devices decode.
    pub fn bars(&self) -> &Arc<BarMap> {
        &self.bars
    }

    /// The guest.
    pub fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// Puts further memory of this process at a guest-physical address, until it is [unmapped](Vmm::unmap).
    ///
    /// # Errors
    /// When KVM refuses: there is no slot left, or something else is there.
    pub fn map_region(&self, guest: u64, region: Arc<MmapRegion>) -> Result<MapId, VmmError> {
        self.map(guest, Arc::new(SharedMemory::new(region)))
    }

    /// The RAM that it was made with.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    fn set_vfio_file(&self, device: &DeviceFd, attribute: u32, file: RawFd) -> Result<(), kvm_ioctls::Error> {
        device.set_device_attr(&kvm_device_attr {
            flags: 0,
            group: KVM_DEV_VFIO_FILE,
            attr: u64::from(attribute),
            addr: std::ptr::from_ref(&file) as u64,
        })
    }
}

impl Vmm for KvmVmm {
    fn ram(&self) -> Vec<RamRegion> {
        lock(&self.ram).iter().map(|(region, _)| region.clone()).collect()
    }

    fn bars_changed(&self, device: PciAddress, bars: &[DecodedBar]) {
        self.bars.set(device, bars);
    }

    fn map(&self, guest: u64, memory: Arc<dyn Mapping>) -> Result<MapId, VmmError> {
        let what = "map memory into the guest";
        let len = memory.len();
        if len == 0 || guest.checked_add(len).is_none() {
            return Err(VmmError::new(
                what,
                format!("{len:#x} bytes at {guest:#x} are no range of addresses"),
            ));
        }
        lock(&self.slots).map(&self.vm, guest, memory).map_err(|reason| VmmError::new(what, reason))
    }

    fn unmap(&self, id: MapId) -> Result<(), VmmError> {
        let what = "unmap memory from the guest";
        lock(&self.slots).unmap(id.0).map_err(|reason| VmmError::new(what, reason))
    }

    fn add_route(&self, trigger: BorrowedFd<'_>) -> Result<RouteId, VmmError> {
        lock(&self.routes).add(trigger)
    }

    fn set_route(&self, route: RouteId, message: Option<MsiMessage>) -> Result<(), VmmError> {
        lock(&self.routes).set(&self.vm, route, message)
    }

    fn add_line(
        &self,
        line: u32,
        trigger: BorrowedFd<'_>,
        resample: BorrowedFd<'_>,
    ) -> Result<RouteId, VmmError> {
        lock(&self.routes).add_line(&self.vm, line, trigger, resample)
    }

    fn remove_route(&self, route: RouteId) -> Result<(), VmmError> {
        lock(&self.routes).remove(&self.vm, route)
    }

    fn add_vfio_file(&self, file: BorrowedFd<'_>) -> Result<(), VmmError> {
        let mut vfio = lock(&self.vfio);
        let fd = file.as_raw_fd();
        if let Some(users) = vfio.files.get_mut(&fd) {
            *users += 1;
            return Ok(());
        }
        if vfio.device.is_none() {
            let mut create = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
            vfio.device = if_supported(self.vm.create_device(&mut create))?;
        }
        if let Some(device) = &vfio.device {
            self.set_vfio_file(device, KVM_DEV_VFIO_FILE_ADD, fd)
                .map_err(|error| VmmError::new("tell KVM of a VFIO file", error))?;
            vfio.files.insert(fd, 1);
        }
        Ok(())
    }

    fn remove_vfio_file(&self, file: BorrowedFd<'_>) -> Result<(), VmmError> {
        let mut vfio = lock(&self.vfio);
        let fd = file.as_raw_fd();
        match vfio.files.get_mut(&fd) {
            None => return Ok(()),
            Some(users) if *users > 1 => {
                *users -= 1;
                return Ok(());
            }
            Some(_) => {}
        }
        if let Some(device) = &vfio.device {
            self.set_vfio_file(device, KVM_DEV_VFIO_FILE_DEL, fd)
                .map_err(|error| VmmError::new("tell KVM to forget a VFIO file", error))?;
        }
        vfio.files.remove(&fd);
        Ok(())
    }
}

impl Slots {
    fn new(capacity: u32, most: u64) -> Self {
        Self { used: BTreeMap::new(), free: Vec::new(), next: 0, capacity, most }
    }

    /// Maps memory by as many slots as it takes; answers with the first, which is its name. On an error there are none.
    fn map(&mut self, vm: &Arc<VmFd>, guest: u64, memory: Arc<dyn Mapping>) -> Result<MapId, String> {
        let len = memory.len();
        let mut mapped = Vec::new();
        for start in (0..len).step_by(usize::try_from(self.most).unwrap_or(usize::MAX)) {
            let range = start..len.min(start + self.most);
            let at = guest + start;
            let slot = self.take().and_then(|number| {
                Slot::new(vm, number, at, memory.clone(), range.clone()).map_err(|error| {
                    self.free.push(number);
                    format!("KVM refused {:#x} bytes at {at:#x}: {error}", range.end - range.start)
                })
            });
            match slot {
                Ok(slot) => mapped.push(slot),
                Err(reason) => {
                    if let Err(error) = self.clear(&mut mapped)
                        && let Some(first) = mapped.first().map(Slot::number)
                    {
                        tracing::error!(error, "a part of what could not be mapped stays in the guest");
                        self.used.insert(first, mapped);
                    }
                    return Err(reason);
                }
            }
        }
        let id = mapped.first().map(Slot::number).ok_or("there is nothing to map")?;
        self.used.insert(id, mapped);
        Ok(MapId(id))
    }

    fn unmap(&mut self, id: u32) -> Result<(), String> {
        let mut mapped = self.used.remove(&id).ok_or_else(|| format!("there is no mapping {id}"))?;
        let cleared = self.clear(&mut mapped);
        if cleared.is_err() {
            self.used.insert(id, mapped);
        }
        cleared
    }

    /// Clears the slots of a mapping, the last first; those that KVM keeps are left in it.
    fn clear(&mut self, mapped: &mut Vec<Slot>) -> Result<(), String> {
        while let Some(slot) = mapped.last_mut() {
            slot.clear().map_err(|error| format!("KVM refused at {:#x}: {error}", slot.guest()))?;
            self.free.push(slot.number());
            mapped.pop();
        }
        Ok(())
    }

    /// A slot that nothing uses.
    fn take(&mut self) -> Result<u32, String> {
        if let Some(slot) = self.free.pop() {
            return Ok(slot);
        }
        if self.next == self.capacity {
            return Err(format!("all {} memory slots of KVM are used", self.capacity));
        }
        self.next += 1;
        Ok(self.next - 1)
    }
}

impl fmt::Debug for KvmVmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmVmm").field("ram", &self.ram).finish_non_exhaustive()
    }
}

/// A limit that KVM returned for a capability, or `default` if it does not know the capability.
fn limit(returned: i32, default: u32) -> u32 {
    u32::try_from(returned).ok().filter(|&limit| limit > 0).unwrap_or(default)
}

/// KVM's VFIO device; `None` where the Linux kernel has none.
fn if_supported(created: Result<DeviceFd, kvm_ioctls::Error>) -> Result<Option<DeviceFd>, VmmError> {
    match created {
        Ok(device) => Ok(Some(device)),
        Err(error) if error.errno() == libc::ENODEV => {
            tracing::warn!(
                "this Linux kernel's KVM knows no VFIO devices (CONFIG_KVM_VFIO): DMA is taken to be cache-coherent"
            );
            Ok(None)
        }
        Err(error) => Err(VmmError::new("create KVM's VFIO device", error)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use kvm_ioctls::Kvm;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// A guest without RAM, where /dev/kvm opens.
    fn guest() -> Option<Arc<KvmVmm>> {
        let kvm = Kvm::new().inspect_err(|error| eprintln!("skipped: /dev/kvm does not open: {error}"));
        let vm = Arc::new(kvm.ok()?.create_vm().unwrap());
        Some(KvmVmm::new(vm, GuestMemoryMmap::default()).unwrap())
    }

    #[test]
    fn a_limit_that_kvm_does_not_know_has_a_default() {
        for (returned, expect) in [(-1, 32), (0, 32), (1, 1), (509, 509)] {
            assert_eq!(limit(returned, 32), expect, "{returned}");
        }
    }

    #[test]
    fn slots_are_numbered_from_zero_up_to_the_capacity() {
        let mut slots = Slots::new(3, SLOT_BYTES);
        let taken = [(); 4].map(|()| slots.take());
        let none = Err("all 3 memory slots of KVM are used".to_owned());
        assert_eq!(taken, [Ok(0), Ok(1), Ok(2), none]);
        slots.free.push(1);
        assert_eq!(slots.take(), Ok(1));
    }

    #[test]
    fn only_a_kernel_without_vfio_devices_does_without() {
        let created = |errno| if_supported(Err(kvm_ioctls::Error::new(errno)));
        assert!(matches!(created(libc::ENODEV), Ok(None)));
        for errno in [libc::EBUSY, libc::EMFILE, libc::EPERM] {
            let error = created(errno).unwrap_err().to_string();
            assert!(error.contains("create KVM's VFIO device"), "{error}");
        }
    }

    #[test]
    fn a_vfio_file_is_kept_until_the_last_device_removes_it() {
        let Some(vmm) = guest() else { return };
        let file = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let fd = file.as_raw_fd();
        let users = || lock(&vmm.vfio).files.get(&fd).copied();
        // KVM takes no other files than VFIO's, so the first device's is added here.
        lock(&vmm.vfio).files.insert(fd, 1);
        for expect in [2, 3] {
            vmm.add_vfio_file(file.as_fd()).unwrap();
            assert_eq!(users(), Some(expect));
        }
        for expect in [Some(2), Some(1), None, None] {
            vmm.remove_vfio_file(file.as_fd()).unwrap();
            assert_eq!(users(), expect);
        }
    }

    #[test]
    fn a_file_that_kvm_refuses_is_not_counted() {
        let Some(vmm) = guest() else { return };
        let file = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let added = vmm.add_vfio_file(file.as_fd());
        if lock(&vmm.vfio).device.is_none() {
            eprintln!("skipped: this Linux kernel's KVM has no VFIO device");
            return;
        }
        let error = added.unwrap_err().to_string();
        assert!(error.contains("tell KVM of a VFIO file"), "{error}");
        assert!(lock(&vmm.vfio).files.is_empty());
    }
}
