//! The directory tree of a simulated host.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use super::SimFunction;
use crate::host::SysfsWriter;
use crate::pci::BarKind;
use crate::{Host, PciAddress};

/// A host made of directories and files, which goes away with the last clone.
///
/// Nothing here acts by itself: binding a driver with [`set_driver`](Self::set_driver) just moves the links. The
/// writer that a [`Host`] is made with gives writes their effect.
#[derive(Clone, Debug)]
pub struct SimHost {
    root: PathBuf,
    /// What removes it, of whoever made it.
    _dir: Option<Arc<TempDir>>,
}

/// What the names of the trees begin with.
const PREFIX: &str = "sim-host-";

/// Writes values into the files of the tree and does nothing else.
#[derive(Debug)]
pub struct FileWriter;

impl SysfsWriter for FileWriter {
    fn write(&self, path: &Path, value: &str, _deadline: Duration) -> io::Result<()> {
        fs::OpenOptions::new().write(true).truncate(true).open(path).and_then(|mut file| {
            use io::Write as _;
            file.write_all(value.as_bytes())
        })
    }
}

impl SimHost {
    /// A healthy host without PCI functions: a VT-d IOMMU with interrupt remapping, vfio-pci loaded, iommufd and
    /// group device nodes, all permissions, nothing mounted, no routes.
    ///
    /// It lies in `/dev/shm` where that can be, as sysfs is no disk either, and else where temporary files do.
    ///
    /// # Errors
    /// When the temporary directory can't be filled.
    pub fn new() -> io::Result<Self> {
        let dir = TempDir::with_prefix_in(PREFIX, "/dev/shm").or_else(|_| TempDir::with_prefix(PREFIX))?;
        Self::fill(dir.path().into(), Some(dir))
    }

    /// As [`new`](Self::new), in a directory below `parent`.
    ///
    /// # Errors
    /// When the directory can't be made or filled.
    pub fn new_in(parent: &Path) -> io::Result<Self> {
        let dir = TempDir::with_prefix_in(PREFIX, parent)?;
        Self::fill(dir.path().into(), Some(dir))
    }

    /// Fills an empty directory, which goes away with the host if it is `dir`.
    pub(super) fn fill(root: PathBuf, dir: Option<TempDir>) -> io::Result<Self> {
        let sim = Self { root, _dir: dir.map(Arc::new) };
        for dir in ["sys/bus/pci/devices", "sys/class/block", "sys/class/net", "sys/devices", "run"] {
            fs::create_dir_all(sim.path(dir))?;
        }
        sim.add_driver("vfio-pci")?;
        sim.add_module("vfio")?;
        sim.add_module("vfio_iommu_type1")?;
        sim.write("sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "N\n")?;
        fs::create_dir_all(sim.path("sys/kernel/iommu_groups"))?;
        // VT-d 1.0, 39-bit guest address width (MGAW 38), interrupt remapping (ecap bit 3).
        let iommu = "sys/devices/virtual/iommu/dmar0";
        sim.write(&format!("{iommu}/intel-iommu/cap"), "d2008c40660462\n")?;
        sim.write(&format!("{iommu}/intel-iommu/ecap"), "f050da\n")?;
        sim.write(&format!("{iommu}/intel-iommu/version"), "1:0\n")?;
        sim.link("sys/class/iommu/dmar0", iommu)?;
        for node in ["dev/vfio/vfio", "dev/iommu"] {
            sim.write(node, "")?;
        }
        sim.write(
            "proc/cpuinfo",
            "vendor_id\t: GenuineIntel\naddress sizes\t: 46 bits physical, 48 bits virtual\n",
        )?;
        sim.write("proc/sys/kernel/osrelease", "6.12.0\n")?;
        sim.write(
            "proc/interrupts",
            "           CPU0\n  0:         42  IR-IO-APIC    2-edge      timer\n 24:          0  IR-PCI-MSI-0000:00:01.0    0-edge      PCIe PME\n",
        )?;
        sim.set_memlock(None)?;
        sim.set_credentials(0, 0, u64::MAX >> 23)?;
        sim.write("proc/self/mountinfo", "")?;
        sim.write("proc/swaps", "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")?;
        sim.write(
            "proc/net/route",
            "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n",
        )?;
        Ok(sim)
    }

    /// The simulated host below `root`, which another made and keeps.
    pub(super) fn at(root: &Path) -> Self {
        Self { root: root.into(), _dir: None }
    }

    /// The root of the tree, in which `sys`, `dev`, `proc` and `run` lie.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A path below the root, given without a leading `/`.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The host on which a write only changes a file.
    pub fn plain_host(&self) -> Host {
        self.host_with(Arc::new(FileWriter))
    }

    /// The host whose writes go to `writer`.
    pub fn host_with(&self, writer: Arc<dyn SysfsWriter>) -> Host {
        Host::at(self.root(), writer)
    }

    /// Writes a file, whose directories are made if need be.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let path = self.path(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(path, text)
    }

    /// Makes a symbolic link at `path` to `target`, both below the root, relative as in sysfs.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn link(&self, path: &str, target: &str) -> io::Result<()> {
        let (path, target) = (self.path(path), self.path(target));
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        symlink(relative(&path, &target), &path)
    }

    /// Removes a file, link or directory with all that is in it; nothing happens when there is none.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn delete(&self, path: &str) -> io::Result<()> {
        let path = self.path(path);
        let result = match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path),
            Ok(_) => fs::remove_file(&path),
            Err(error) => Err(error),
        };
        result.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
    }

    /// Adds a function, binds it and puts it into its group. Its directory is returned.
    ///
    /// # Errors
    /// When the file system refuses, or the bridge above or the physical function is missing.
    pub fn add(&self, function: &SimFunction) -> io::Result<PathBuf> {
        let address = function.address;
        let dir = match function.parent {
            // A bus of another domain begins at a host bridge of its own, as behind Intel's Volume Management Device.
            Some(controller) if controller.domain() != address.domain() => self
                .device_dir(controller)?
                .join(format!("pci{:04x}:{:02x}", address.domain(), address.bus()))
                .join(address.to_string()),
            Some(bridge) => self.device_dir(bridge)?.join(address.to_string()),
            None => self
                .path("sys/devices")
                .join(format!("pci{:04x}:{:02x}", address.domain(), address.bus()))
                .join(address.to_string()),
        };
        fs::create_dir_all(dir.join("power"))?;
        let put = |name: &str, text: String| fs::write(dir.join(name), text);
        let ids = &function.ids;
        put("vendor", format!("{:#06x}\n", ids.vendor))?;
        put("device", format!("{:#06x}\n", ids.device))?;
        put("subsystem_vendor", format!("{:#06x}\n", ids.subsystem_vendor))?;
        put("subsystem_device", format!("{:#06x}\n", ids.subsystem_device))?;
        put("revision", format!("{:#04x}\n", ids.revision))?;
        put("class", format!("{:#08x}\n", function.class))?;
        put("resource", function.resource())?;
        fs::write(dir.join("config"), function.config_space())?;
        put("uevent", uevent(function))?;
        put("driver_override", "(null)\n".into())?;
        put("numa_node", format!("{}\n", function.numa_node.map_or(-1, i32::from)))?;
        put("power_state", format!("{}\n", function.power_state))?;
        put("power/control", "auto\n".into())?;
        let suspended = matches!(function.power_state, "D3hot" | "D3cold");
        put("power/runtime_status", if suspended { "suspended\n" } else { "active\n" }.into())?;
        put("enable", "0\n".into())?;
        put("remove", String::new())?;
        if !function.resets.is_empty() {
            put("reset_method", format!("{}\n", function.resets))?;
            put("reset", String::new())?;
        }
        if let Some(link) = &function.link {
            put("current_link_speed", format!("{}\n", speed_text(link.speed)))?;
            put("current_link_width", format!("{}\n", link.width))?;
            put("max_link_speed", format!("{}\n", speed_text(link.max_speed)))?;
            put("max_link_width", format!("{}\n", link.max_width))?;
        }
        if function.class >> 8 == 0x0300 {
            put("boot_vga", format!("{}\n", u8::from(function.boot_display)))?;
        }
        if let Some(total) = function.total_vfs {
            put("sriov_totalvfs", format!("{total}\n"))?;
            put("sriov_numvfs", "0\n".into())?;
            put("sriov_drivers_autoprobe", "1\n".into())?;
        }
        for bar in &function.bars {
            if bar.kind != BarKind::Io {
                put(&format!("resource{}", bar.index), String::new())?;
            }
        }
        for (index, sizes) in &function.resizable {
            put(&format!("resource{index}_resize"), format!("{sizes:016x}\n"))?;
        }
        self.link_path(&self.path("sys/bus/pci/devices").join(address.to_string()), &dir)?;
        if let Some(physical) = function.physical {
            let physical_dir = self.device_dir(physical)?;
            let count = read_number(&physical_dir.join("sriov_numvfs"))?;
            self.link_path(&dir.join("physfn"), &physical_dir)?;
            self.link_path(&physical_dir.join(format!("virtfn{count}")), &dir)?;
            fs::write(physical_dir.join("sriov_numvfs"), format!("{}\n", count + 1))?;
        }
        if let Some(group) = function.group {
            self.join_group(address, group)?;
        }
        if let Some(driver) = &function.driver {
            self.add_driver(driver)?;
            self.set_driver(address, Some(driver))?;
        }
        Ok(dir)
    }

    /// Removes a function as unplugging it does: links first, then its directory.
    ///
    /// # Errors
    /// When there is none or the file system refuses.
    pub fn remove(&self, address: PciAddress) -> io::Result<()> {
        let dir = self.device_dir(address)?;
        self.unlink(address)?;
        fs::remove_dir_all(dir)
    }

    /// Removes all links to a function, and its own to its driver and its group.
    pub(crate) fn unlink(&self, address: PciAddress) -> io::Result<()> {
        let dir = self.device_dir(address)?;
        self.set_driver(address, None)?;
        fs::remove_file(self.path("sys/bus/pci/devices").join(address.to_string()))?;
        if let Ok(group) = fs::canonicalize(dir.join("iommu_group")) {
            fs::remove_file(group.join("devices").join(address.to_string()))?;
            fs::remove_file(dir.join("iommu_group"))?;
            fs::remove_file(dir.join("iommu"))?;
            if fs::read_dir(group.join("devices"))?.next().is_none() {
                fs::remove_dir_all(group)?;
            }
        }
        Ok(())
    }

    /// The directory of a function below `sys/devices`.
    ///
    /// # Errors
    /// When there is none.
    pub fn device_dir(&self, address: PciAddress) -> io::Result<PathBuf> {
        fs::canonicalize(self.path("sys/bus/pci/devices").join(address.to_string()))
    }

    /// Writes an attribute of a function.
    ///
    /// # Errors
    /// When there is no such function or the file system refuses.
    pub fn set(&self, address: PciAddress, attribute: &str, text: &str) -> io::Result<()> {
        fs::write(self.device_dir(address)?.join(attribute), text)
    }

    /// Registers a driver, and its module, when it is not yet.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn add_driver(&self, driver: &str) -> io::Result<()> {
        let dir = format!("sys/bus/pci/drivers/{driver}");
        if self.path(&dir).exists() {
            return Ok(());
        }
        for file in ["bind", "unbind", "new_id", "remove_id", "uevent"] {
            self.write(&format!("{dir}/{file}"), "")?;
        }
        if !self.path("sys/bus/pci/drivers_probe").exists() {
            self.write("sys/bus/pci/drivers_probe", "")?;
        }
        let module = driver.replace('-', "_");
        self.add_module(&module)?;
        let registered = format!("sys/module/{module}/drivers/pci:{driver}");
        // It may be left of a driver that was unloaded.
        self.delete(&registered)?;
        self.link(&registered, &dir)?;
        self.link(&format!("{dir}/module"), &format!("sys/module/{module}"))
    }

    /// Loads a module: `sys/module/NAME`.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn add_module(&self, module: &str) -> io::Result<()> {
        fs::create_dir_all(self.path("sys/module").join(module))
    }

    /// Moves the links that say which driver a function is bound to.
    ///
    /// # Errors
    /// When there is no such function or driver, or the file system refuses.
    pub fn set_driver(&self, address: PciAddress, driver: Option<&str>) -> io::Result<()> {
        let dir = self.device_dir(address)?;
        let link = dir.join("driver");
        if let Ok(old) = fs::canonicalize(&link) {
            fs::remove_file(old.join(address.to_string()))?;
            fs::remove_file(&link)?;
        }
        let Some(driver) = driver else { return Ok(()) };
        let driver = fs::canonicalize(self.path("sys/bus/pci/drivers").join(driver))?;
        self.link_path(&driver.join(address.to_string()), &dir)?;
        self.link_path(&link, &driver)
    }

    /// The driver that a function is bound to.
    pub fn driver_of(&self, address: PciAddress) -> Option<String> {
        let target = fs::read_link(self.device_dir(address).ok()?.join("driver")).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    pub(super) fn join_group(&self, address: PciAddress, group: u32) -> io::Result<()> {
        let name = format!("sys/kernel/iommu_groups/{group}");
        let dir = self.path(&name);
        if !dir.exists() {
            fs::create_dir_all(dir.join("devices"))?;
            self.write(&format!("{name}/reserved_regions"), "0x00000000fee00000 0x00000000feefffff msi\n")?;
            self.write(&format!("{name}/type"), "DMA-FQ\n")?;
        }
        let device = self.device_dir(address)?;
        self.link_path(&dir.join("devices").join(address.to_string()), &device)?;
        self.link_path(&device.join("iommu"), &self.path("sys/devices/virtual/iommu/dmar0"))?;
        self.link_path(&device.join("iommu_group"), &dir)
    }

    /// Adds something that a function's driver made, as in `("block", "nvme/nvme0/nvme0n1", [("dev", "259:0")])`:
    /// the directory below the function with its attributes, and the link in `sys/class`.
    ///
    /// # Errors
    /// When there is no such function or the file system refuses.
    pub fn add_child(
        &self,
        address: PciAddress,
        class: &str,
        path: &str,
        attributes: &[(&str, &str)],
    ) -> io::Result<()> {
        let dir = self.device_dir(address)?.join(path);
        self.add_class_device(class, &dir, attributes)
    }

    /// Adds something that belongs to no function, such as a bond or a device-mapper disk, below
    /// `sys/devices/virtual`.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn add_virtual(&self, class: &str, name: &str, attributes: &[(&str, &str)]) -> io::Result<()> {
        let dir = self.path("sys/devices/virtual").join(class).join(name);
        self.add_class_device(class, &dir, attributes)
    }

    fn add_class_device(&self, class: &str, dir: &Path, attributes: &[(&str, &str)]) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        for (name, text) in attributes {
            fs::write(dir.join(name), text)?;
        }
        if class == "block" {
            fs::create_dir_all(dir.join("holders"))?;
        }
        let name = dir.file_name().unwrap_or_default();
        self.link_path(&self.path("sys/class").join(class).join(name), dir)
    }

    /// `RLIMIT_MEMLOCK` in bytes, `None` for unlimited.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn set_memlock(&self, bytes: Option<u64>) -> io::Result<()> {
        let value = bytes.map_or("unlimited".into(), |bytes| bytes.to_string());
        self.write(
            "proc/self/limits",
            &format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max open files            1024                 524288               files     \n\
                 Max locked memory         {value:<20} {value:<20} bytes     \n"
            ),
        )
    }

    /// Who this process is: effective user and group, and effective capabilities (bit 14 is `CAP_IPC_LOCK`).
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn set_credentials(&self, uid: u32, gid: u32, capabilities: u64) -> io::Result<()> {
        self.write(
            "proc/self/status",
            &format!(
                "Name:\ttest\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{gid}\t{gid}\t{gid}\t{gid}\nGroups:\t{gid} \n\
                 VmLck:\t       0 kB\nCapEff:\t{capabilities:016x}\n"
            ),
        )
    }

    pub(super) fn link_path(&self, path: &Path, target: &Path) -> io::Result<()> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        // A target that was canonicalized may be spelled unlike the root (when the temporary directory is
        // itself behind a link).
        let root = fs::canonicalize(self.root())?;
        let inside = |path: &Path| match path.strip_prefix(self.root()).or_else(|_| path.strip_prefix(&root))
        {
            Ok(below) => root.join(below),
            Err(_) => path.to_owned(),
        };
        symlink(relative(&inside(path), &inside(target)), path)
    }
}

/// The way from the directory of `path` to `target`.
fn relative(path: &Path, target: &Path) -> PathBuf {
    let from: Vec<_> = path.parent().into_iter().flat_map(Path::components).collect();
    let to: Vec<_> = target.components().collect();
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n(std::path::Component::ParentDir, from.len() - common);
    up.chain(to[common..].iter().copied()).collect()
}

fn read_number(path: &Path) -> io::Result<u32> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, text))
}

fn uevent(function: &SimFunction) -> String {
    let ids = &function.ids;
    format!(
        "PCI_CLASS={:X}\nPCI_ID={:04X}:{:04X}\nPCI_SUBSYS_ID={:04X}:{:04X}\nPCI_SLOT_NAME={}\n",
        function.class, ids.vendor, ids.device, ids.subsystem_vendor, ids.subsystem_device, function.address
    )
}

/// A link speed as Linux prints it.
fn speed_text(speed: u32) -> String {
    match speed {
        0 => "Unknown".into(),
        _ => format!("{}.{} GT/s PCIe", speed / 1000, speed % 1000 / 100),
    }
}
