//! The driver core of a simulated host: what writes to `driver_override`, `unbind`, `bind`, `drivers_probe`, `sriov_numvfs` and a router's
//! `authorized` do.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{SimFunction, SimHost, amdgpu};
use crate::egpu::Rung;
use crate::host::{Ending, ProcessControl, SysfsWriter, read_page};
use crate::iommu::is_vfio_driver;
use crate::usb4::Route;
use crate::{Host, PciAddress, files, pci};

/// The drivers of a [`SimHost`]: a writer that does on its tree what Linux does (`drivers/base/bus.c`,
/// `drivers/pci/pci-driver.c`), with faults on demand.
///
/// All that outlives a process is in the tree, so that one process can go on where another was killed. A driver binds
/// a function that `driver_override` names it for or, without an override, the one that it was last bound to.
///
/// ```
/// use vm_passthrough::PassthroughManager;
/// use vm_passthrough::claim::ClaimOptions;
/// use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};
///
/// let sim = SimHost::new()?;
/// let address = "0000:01:00.0".parse()?;
/// sim.add(&SimFunction::nvme(address).driver("nvme"))?;
/// let mut manager = PassthroughManager::with_host(SimDrivers::new(&sim).host())?;
/// let claimed = manager.claim(address, &ClaimOptions::default())?;
/// assert_eq!(sim.driver_of(address).as_deref(), Some("vfio-pci"));
/// manager.release(&claimed)?;
/// assert_eq!(sim.driver_of(address).as_deref(), Some("nvme"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct SimDrivers {
    root: PathBuf,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    writes: Vec<(PathBuf, String)>,
    faults: Vec<Fault>,
    /// Functions that are held open; the driver that an unbind waits to take from them.
    held: BTreeMap<PciAddress, Option<String>>,
    /// Functions whose config space is not answered.
    stalled: BTreeSet<PciAddress>,
    /// Processes that don't end when they are asked to.
    stubborn: BTreeSet<u32>,
    observer: Option<Box<dyn Fn() + Send>>,
}

struct Fault {
    path: String,
    value: String,
    times: usize,
    errno: i32,
}

impl fmt::Debug for SimDrivers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDrivers").field("root", &self.root).finish_non_exhaustive()
    }
}

impl SimDrivers {
    /// The drivers of `sim`.
    pub fn new(sim: &SimHost) -> Self {
        Self::at(sim.root())
    }

    /// The drivers of the simulated host below `root`, which another process may have made.
    pub fn at(root: &Path) -> Self {
        Self { root: root.into(), state: Arc::default() }
    }

    /// The host that is commanded through them.
    pub fn host(&self) -> Host {
        Host::at(&self.root, Arc::new(self.clone())).with_process_control(Arc::new(self.clone()))
    }

    /// Has a process of the tree's `proc` end by SIGKILL alone.
    pub fn ignore_sigterm(&self, pid: u32) {
        self.state().stubborn.insert(pid);
    }

    /// Makes the next `times` writes to a path that ends with `path`, of a value that contains `value`, fail with
    /// `errno`, and change nothing.
    pub fn fail(&self, path: &str, value: &str, times: usize, errno: i32) {
        self.state().faults.push(Fault { path: path.into(), value: value.into(), times, errno });
    }

    /// Holds a function open: unbinding it, and after that all that needs its lock, does not return before the
    /// deadline.
    pub fn hold(&self, address: PciAddress) {
        self.state().held.entry(address).or_default();
    }

    /// Has reads of a function's config space with a deadline run into it.
    pub fn stall(&self, address: PciAddress) {
        self.state().stalled.insert(address);
    }

    /// Lets go of a function: an unbinding that waits for it is completed.
    pub fn let_go(&self, address: PciAddress) {
        let waiting = self.state().held.remove(&address).flatten();
        if waiting.is_some_and(|driver| is_vfio_driver(&driver))
            && let Err(error) = self.remove_vfio_nodes(address)
        {
            tracing::warn!(%address, %error, "can't remove the VFIO nodes of a simulated function");
        }
    }

    /// Calls `observer` before and after each write takes effect.
    pub fn observe(&self, observer: impl Fn() + Send + 'static) {
        self.state().observer = Some(Box::new(observer));
    }

    /// All writes so far: path below the root, and value.
    pub fn writes(&self) -> Vec<(PathBuf, String)> {
        self.state().writes.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observed(&self) {
        if let Some(observer) = &self.state().observer {
            observer();
        }
    }

    fn is_inside(&self, real: &Path) -> bool {
        fs::canonicalize(&self.root).is_ok_and(|root| real.starts_with(root))
    }

    fn device(&self, address: PciAddress) -> io::Result<PathBuf> {
        fs::canonicalize(self.root.join("sys/bus/pci/devices").join(address.to_string()))
            .ok()
            .filter(|real| self.is_inside(real))
            .ok_or_else(|| errno(libc::ENODEV))
    }

    fn driver_dir(&self, driver: &str) -> PathBuf {
        self.root.join("sys/bus/pci/drivers").join(driver)
    }

    fn driver_of(&self, address: PciAddress) -> io::Result<Option<String>> {
        match fs::read_link(self.device(address)?.join("driver")) {
            Ok(target) => Ok(target.file_name().map(|name| name.to_string_lossy().into_owned())),
            Err(_) => Ok(None),
        }
    }

    fn override_of(&self, address: PciAddress) -> io::Result<Option<String>> {
        let text = fs::read_to_string(self.device(address)?.join("driver_override"))?;
        Some(text.trim_end()).filter(|text| *text != "(null)").map(|text| Ok(text.to_owned())).transpose()
    }

    /// Where it is kept which driver a function goes to without an override.
    fn native(&self, address: PciAddress) -> PathBuf {
        self.root.join("sim/native").join(address.to_string())
    }

    fn matches(&self, driver: &str, address: PciAddress) -> io::Result<bool> {
        Ok(match self.override_of(address)? {
            Some(name) => name == driver,
            None => fs::read_to_string(self.native(address)).is_ok_and(|native| native == driver),
        })
    }

    /// Waits as long as the function's lock is taken.
    fn wait_for_lock(&self, address: PciAddress, until: Instant) -> io::Result<()> {
        self.wait_while(until, |state| state.held.get(&address).is_some_and(Option::is_some))
    }

    fn wait_while(&self, until: Instant, is_so: impl Fn(&State) -> bool) -> io::Result<()> {
        while is_so(&self.state()) {
            wait(until)?;
        }
        Ok(())
    }

    fn set_override(&self, address: PciAddress, value: &str, until: Instant) -> io::Result<()> {
        self.wait_for_lock(address, until)?;
        let name = value.trim_end_matches('\n');
        let text = if name.is_empty() { "(null)" } else { name };
        fs::write(self.device(address)?.join("driver_override"), format!("{text}\n"))
    }

    fn unbind(&self, driver: &str, address: PciAddress, until: Instant) -> io::Result<()> {
        self.wait_for_lock(address, until)?;
        while SimHost::at(&self.root).stuck(address)?.is_some() {
            wait(until)?;
        }
        if self.driver_of(address)?.as_deref() != Some(driver) {
            return Err(errno(libc::ENODEV));
        }
        if !is_vfio_driver(driver) {
            let native = self.native(address);
            fs::create_dir_all(native.parent().unwrap_or(&self.root))?;
            fs::write(native, driver)?;
        }
        // The links go first, then the driver waits for its users.
        let device = self.device(address)?;
        fs::remove_file(device.join("driver"))?;
        fs::remove_file(self.driver_dir(driver).join(address.to_string()))?;
        if let Some(waiting) = self.state().held.get_mut(&address) {
            *waiting = Some(driver.to_owned());
        }
        self.wait_for_lock(address, until)?;
        if is_vfio_driver(driver) {
            self.remove_vfio_nodes(address)?;
        }
        self.remove_domain(&device)
    }

    /// Removes the PCI domain that a controller's driver created, as `vmd_remove` does (`drivers/pci/controller/vmd.c`).
    fn remove_domain(&self, controller: &Path) -> io::Result<()> {
        let is_host_bridge = |name: &str| name.starts_with("pci") && name.contains(':');
        let sim = SimHost::at(&self.root);
        for bridge in files::names(controller)?.into_iter().filter(|name| is_host_bridge(name)) {
            let bridge = controller.join(bridge);
            for name in files::names(&self.root.join("sys/bus/pci/devices"))? {
                let Ok(address) = name.parse::<PciAddress>() else { continue };
                if sim.device_dir(address)?.starts_with(&bridge) {
                    sim.unlink(address)?;
                }
            }
            fs::remove_dir_all(bridge)?;
        }
        Ok(())
    }

    fn bind(&self, driver: &str, address: PciAddress, until: Instant) -> io::Result<()> {
        self.wait_for_lock(address, until)?;
        let device = self.device(address)?;
        if !self.matches(driver, address)? {
            return Err(errno(libc::ENODEV));
        }
        if self.driver_of(address)?.is_some() {
            return Err(errno(libc::EBUSY));
        }
        if is_vfio_driver(driver) {
            // vfio-pci's probe fails without an IOMMU.
            if !device.join("iommu_group").exists() {
                return Err(errno(libc::EINVAL));
            }
            self.add_vfio_nodes(address)?;
        }
        symlink(&device, self.driver_dir(driver).join(address.to_string()))?;
        symlink(self.driver_dir(driver), device.join("driver"))
    }

    fn probe(&self, address: PciAddress, until: Instant) -> io::Result<()> {
        if self.driver_of(address)?.is_some() {
            return Ok(());
        }
        for driver in fs::read_dir(self.root.join("sys/bus/pci/drivers"))? {
            let driver = driver?.file_name().to_string_lossy().into_owned();
            if self.matches(&driver, address)? {
                return self.bind(&driver, address, until);
            }
        }
        Ok(())
    }

    /// What a write to `sriov_numvfs` does (`drivers/pci/iov.c`). The virtual functions are NVMe controllers, each in an IOMMU
    /// group of its own, and without a driver.
    fn set_vfs(&self, physical: PciAddress, value: &str, until: Instant) -> io::Result<()> {
        self.wait_for_lock(physical, until)?;
        let path = self.device(physical)?.join("sriov_numvfs");
        let number = |text: &str| text.trim_end().parse::<u16>().map_err(|_| errno(libc::EINVAL));
        let total = number(&fs::read_to_string(self.device(physical)?.join("sriov_totalvfs"))?)?;
        let (count, enabled) = (number(value)?, number(&fs::read_to_string(&path)?)?);
        if count > total {
            return Err(errno(libc::ERANGE));
        }
        if count == enabled {
            return Ok(());
        }
        if self.driver_of(physical)?.is_none() {
            return Err(errno(libc::ENOENT));
        }
        let (sim, host) = (SimHost::at(&self.root), self.host());
        if count == 0 {
            for (index, address) in pci::virtual_functions(&host, physical).into_iter().enumerate() {
                if let Some(driver) = self.driver_of(address)? {
                    self.unbind(&driver, address, until)?;
                }
                sim.remove(address)?;
                fs::remove_file(self.device(physical)?.join(format!("virtfn{index}")))?;
            }
            return fs::write(path, "0\n");
        }
        if enabled > 0 {
            return Err(errno(libc::EBUSY));
        }
        let first = u32::from(physical.bus()) << 8 | u32::from(physical.device() << 3 | physical.function());
        for function in first + 1..=first + u32::from(count) {
            let [bus, devfn] = [(function >> 8) as u8, function as u8];
            let address = PciAddress::new(physical.domain(), bus, devfn >> 3, devfn & 7);
            let address = address.ok_or_else(|| errno(libc::ENODEV))?;
            sim.add(&SimFunction::nvme(address).virtual_of(physical).group(0x1_0000 + function))?;
        }
        Ok(())
    }

    /// What a write to `resourceN_resize` does (`drivers/pci/pci-sysfs.c`): the BAR stays where it is, and grows or shrinks.
    fn resize(&self, address: PciAddress, attribute: &Path, value: &str, until: Instant) -> io::Result<()> {
        self.wait_for_lock(address, until)?;
        if self.driver_of(address)?.is_some() {
            return Err(errno(libc::EBUSY));
        }
        let invalid = || errno(libc::EINVAL);
        let name = attribute.file_name().and_then(|name| name.to_str()).ok_or_else(invalid)?;
        let index = name.trim_start_matches("resource").trim_end_matches("_resize").parse::<usize>();
        let exponent = value.trim_end().parse::<u32>().map_err(|_| invalid())?;
        let sizes =
            u64::from_str_radix(fs::read_to_string(attribute)?.trim_end(), 16).map_err(|_| invalid())?;
        if exponent > 43 || sizes >> exponent & 1 == 0 {
            return Err(invalid());
        }
        let path = self.device(address)?.join("resource");
        let text = fs::read_to_string(&path)?;
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        let line = index.ok().and_then(|index| lines.get_mut(index)).ok_or_else(invalid)?;
        let words: Vec<_> = line.split(' ').collect();
        let [start, _, flags] = words[..] else { return Err(invalid()) };
        let first = u64::from_str_radix(start.trim_start_matches("0x"), 16).map_err(|_| invalid())?;
        *line = format!("{start} {:#018x} {flags}", first + (1 << (exponent + 20)) - 1);
        fs::write(path, lines.join("\n") + "\n")
    }

    fn group_node(&self, address: PciAddress) -> io::Result<PathBuf> {
        let group = fs::read_link(self.device(address)?.join("iommu_group"))?;
        Ok(self.root.join("dev/vfio").join(group.file_name().unwrap_or_default()))
    }

    fn device_name(address: PciAddress) -> String {
        format!(
            "vfio{}",
            u32::from(address.bus()) << 8 | u32::from(address.device() << 3 | address.function())
        )
    }

    fn add_vfio_nodes(&self, address: PciAddress) -> io::Result<()> {
        let name = Self::device_name(address);
        fs::create_dir_all(self.device(address)?.join("vfio-dev").join(&name))?;
        fs::create_dir_all(self.root.join("dev/vfio/devices"))?;
        fs::write(self.root.join("dev/vfio/devices").join(name), "")?;
        fs::write(self.group_node(address)?, "")
    }

    fn remove_vfio_nodes(&self, address: PciAddress) -> io::Result<()> {
        gone(fs::remove_dir_all(self.device(address)?.join("vfio-dev")))?;
        gone(fs::remove_file(self.root.join("dev/vfio/devices").join(Self::device_name(address))))?;
        // The group's node goes with its last function.
        let members = fs::read_dir(self.device(address)?.join("iommu_group/devices"))?;
        for member in members {
            if fs::canonicalize(member?.path())?.join("vfio-dev").exists() {
                return Ok(());
            }
        }
        gone(fs::remove_file(self.group_node(address)?))
    }

    /// What a write to a router's `authorized` does (`drivers/thunderbolt/switch.c`).
    fn authorize(&self, route: &str, value: &str) -> io::Result<()> {
        let route: Route = route.parse().map_err(|_| errno(libc::ENOENT))?;
        let bus = self.root.join("sys/bus/thunderbolt/devices");
        let path = bus.join(route.to_string()).join("authorized");
        let wanted = match value.trim_end() {
            "0" => false,
            "1" => true,
            _ => return Err(errno(libc::EINVAL)),
        };
        let is_authorized = fs::read_to_string(&path).map_err(|_| errno(libc::ENOENT))? != "0\n";
        let can = |name: &str| {
            fs::read_to_string(bus.join(format!("domain{}", route.domain)).join(name))
                .is_ok_and(|text| text == "1\n")
        };
        if wanted == is_authorized || !wanted && !can("deauthorization") {
            return Err(errno(libc::EINVAL));
        }
        SimHost::at(&self.root).authorize(route, wanted)
    }

    /// A reset of a function or of its bus: what is behind it is well again, but for what is broken in its enclosure.
    fn reset(&self, address: PciAddress) -> io::Result<()> {
        let method = fs::read_to_string(self.device(address)?.join("reset_method"))?;
        let rung = match method.split_whitespace().next() {
            Some("bus" | "cxl_bus") => Rung::HardReset,
            _ => Rung::SoftReset,
        };
        SimHost::at(&self.root).reset_enclosed(address, rung)
    }

    fn command(&self, path: &Path, value: &str, until: Instant) -> io::Result<()> {
        // Whoever made the tree may have put links into it: none leads a write out of it, as to this machine's devices.
        if fs::canonicalize(path).is_ok_and(|real| !self.is_inside(&real)) {
            return Err(errno(libc::EACCES));
        }
        if let Ok(below) = path.strip_prefix(self.root.join("sys/bus/thunderbolt/devices"))
            && below.file_name().is_some_and(|name| name == "authorized")
            && let Some(route) = below.parent().and_then(Path::to_str)
        {
            return self.authorize(route, value);
        }
        let below = path.strip_prefix(self.root.join("sys/bus/pci")).map_err(|_| errno(libc::EACCES))?;
        let parts: Vec<_> = below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let address = |text: &str| text.trim_end().parse().map_err(|_| errno(libc::ENODEV));
        match parts.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["devices", device, "driver_override"] => {
                let address = device.parse().map_err(|_| errno(libc::ENOENT))?;
                self.device(address).map_err(|_| errno(libc::ENOENT))?;
                self.set_override(address, value, until)
            }
            ["devices", _, "reset_method"] if path.exists() => {
                fs::write(path, format!("{}\n", value.trim_end()))
            }
            ["devices", device, "sriov_numvfs"] if path.exists() => {
                self.set_vfs(address(device)?, value, until)
            }
            ["devices", device, "reset"] if path.exists() => self.reset(address(device)?),
            ["devices", _, "sriov_drivers_autoprobe"] if path.exists() => {
                fs::write(path, format!("{}\n", value.trim_end()))
            }
            ["devices", device, attribute] if attribute.ends_with("_resize") && path.exists() => {
                self.resize(address(device)?, path, value, until)
            }
            [
                "devices",
                _,
                "power_dpm_force_performance_level" | "pp_od_clk_voltage" | "pp_dpm_sclk" | "pp_dpm_mclk",
            ]
            | ["devices", _, "hwmon", _, "power1_cap" | "pwm1" | "pwm1_enable"]
                if path.exists() =>
            {
                let [_, device, file @ ..] = &parts[..] else { return Err(errno(libc::ENOENT)) };
                let address = address(device)?;
                self.wait_for_lock(address, until)?;
                let _lock = SimHost::at(&self.root).lock()?;
                amdgpu::write(&self.device(address)?, &file.join("/"), value)
            }
            ["drivers_probe"] => self.probe(address(value)?, until),
            ["drivers", driver, action @ ("bind" | "unbind")] => {
                if !self.driver_dir(driver).exists() {
                    return Err(errno(libc::ENOENT));
                }
                let address = address(value)?;
                if action == "bind" {
                    self.bind(driver, address, until)
                } else {
                    self.unbind(driver, address, until)
                }
            }
            _ if path.exists() => Err(errno(libc::EACCES)),
            _ => Err(errno(libc::ENOENT)),
        }
    }
}

impl SysfsWriter for SimDrivers {
    fn write(&self, path: &Path, value: &str, deadline: Duration) -> io::Result<()> {
        let until = Instant::now() + deadline;
        self.observed();
        let mut state = self.state();
        let text = path.to_string_lossy().into_owned();
        state.writes.push((path.strip_prefix(&self.root).unwrap_or(path).into(), value.into()));
        let fault = state
            .faults
            .iter_mut()
            .find(|fault| fault.times > 0 && text.ends_with(&fault.path) && value.contains(&fault.value));
        if let Some(fault) = fault {
            fault.times -= 1;
            return Err(errno(fault.errno));
        }
        drop(state);
        let result = self.command(path, value, until);
        self.observed();
        result
    }

    fn read_bytes(&self, path: &Path, deadline: Duration) -> io::Result<Vec<u8>> {
        let address = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()?.parse().ok());
        if let Some(address) = address {
            let until = Instant::now() + deadline;
            match path.ends_with("config") {
                true => self.wait_while(until, |state| state.stalled.contains(&address))?,
                false => self.wait_for_lock(address, until)?,
            }
        }
        read_page(path)
    }
}

impl ProcessControl for SimDrivers {
    fn end(&self, pid: u32, ending: Ending, is_it: &dyn Fn() -> bool) -> io::Result<()> {
        let ends = ending == Ending::Killed || !self.state().stubborn.contains(&pid);
        if ends && is_it() {
            gone(fs::remove_dir_all(self.root.join("proc").join(pid.to_string())))?;
        }
        Ok(())
    }
}

/// Sleeps a little, until the deadline at most.
fn wait(until: Instant) -> io::Result<()> {
    match until.checked_duration_since(Instant::now()) {
        Some(left) => std::thread::sleep(left.min(Duration::from_millis(2))),
        None => return Err(io::ErrorKind::TimedOut.into()),
    }
    Ok(())
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}
