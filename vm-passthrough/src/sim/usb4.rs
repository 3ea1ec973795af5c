//! USB4 domains and routers of a simulated host, as Linux shows them in sysfs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::SimHost;
use crate::PciAddress;
use crate::usb4::Route;

const BUS: &str = "sys/bus/thunderbolt/devices";

/// A function behind a router, its IOMMU group, and the driver that it gets.
type Enclosed = (PciAddress, Option<u32>, Option<String>);

/// Where it is kept what is behind a router: a file of its functions, a link to where they go, and they themselves while they
/// are not there.
fn enclosed(route: Route, name: &str) -> String {
    format!("sim/usb4/{route}/{name}")
}

impl SimHost {
    /// Adds a domain below the function of its native host interface, or below none, and its host router. Attributes are
    /// names and texts, as in `("security", "user\n")`.
    ///
    /// # Errors
    /// When there is no such function, or the file system refuses.
    pub fn add_domain(
        &self,
        number: u32,
        host_interface: Option<PciAddress>,
        attributes: &[(&str, &str)],
    ) -> io::Result<()> {
        let below = match host_interface {
            Some(interface) => self.device_dir(interface)?,
            None => self.path("sys/devices/platform"),
        };
        let name = format!("domain{number}");
        self.add_on_usb4(&name, &below.join(&name), attributes)?;
        self.add_router(Route { domain: number, path: 0 }, &[("generation", "4\n")])
    }

    /// Adds a router below the one that it is connected to, or below its domain.
    ///
    /// # Errors
    /// When that is missing, or the file system refuses.
    pub fn add_router(&self, route: Route, attributes: &[(&str, &str)]) -> io::Result<()> {
        let parent = route.parent().map_or(format!("domain{}", route.domain), |parent| parent.to_string());
        let parent = fs::canonicalize(self.path(BUS).join(parent))?;
        let name = route.to_string();
        self.add_on_usb4(&name, &parent.join(&name), attributes)
    }

    /// Puts functions behind a router: the first is the bridge that all others are below. They are there while its `authorized`
    /// is 1, which a write through [`SimDrivers`](super::SimDrivers) changes, and begin as that says.
    ///
    /// # Errors
    /// When there is no such router or function, or the file system refuses.
    pub fn enclose(&self, route: Route, functions: &[PciAddress]) -> io::Result<()> {
        let mut text = String::new();
        for &function in functions {
            self.set(function, "removable", "removable\n")?;
            let group = fs::read_link(self.device_dir(function)?.join("iommu_group")).unwrap_or_default();
            let group = group.file_name().unwrap_or_default().to_string_lossy().into_owned();
            text += &format!("{function} {group} {}\n", self.driver_of(function).unwrap_or_default());
        }
        let place = self.device_dir(*functions.first().ok_or(io::ErrorKind::InvalidInput)?)?;
        self.write(&enclosed(route, "functions"), &text)?;
        self.link_path(&self.path(&enclosed(route, "place")), place.parent().unwrap_or(&place))?;
        let router = self.router_dir(route)?;
        self.link_path(&self.path(&enclosed(route, "parent")), router.parent().unwrap_or(&router))?;
        let authorized = fs::read_to_string(self.path(BUS).join(route.to_string()).join("authorized"))?;
        if authorized == "0\n" { self.take_down_tunnel(route) } else { Ok(()) }
    }

    /// The functions behind a router go, as with its tunnel; nothing happens where they are gone.
    pub(crate) fn take_down_tunnel(&self, route: Route) -> io::Result<()> {
        if !self.has_tunnel(route) {
            return Ok(());
        }
        let functions = self.enclosed_functions(route)?;
        // What is below goes first.
        for (address, ..) in functions.iter().rev() {
            match self.unlink(*address) {
                // It was lost before.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                unlinked => unlinked?,
            }
        }
        match functions.first() {
            Some((top, ..)) => {
                fs::rename(self.enclosed_place(route, *top)?, self.path(&enclosed(route, "hidden")))
            }
            None => Ok(()),
        }
    }

    /// The functions behind a router come, as with its tunnel, or its bridges alone; nothing happens where they are there.
    pub(crate) fn build_tunnel(&self, route: Route, whole: bool) -> io::Result<()> {
        let functions = self.enclosed_functions(route)?;
        let Some(&(top, ..)) = functions.first() else { return Ok(()) };
        if self.has_tunnel(route) {
            return Ok(());
        }
        let place = self.enclosed_place(route, top)?;
        fs::rename(self.path(&enclosed(route, "hidden")), &place)?;
        let mut dirs = vec![place];
        for (address, group, driver) in functions {
            let below = |dir: &PathBuf| Some(dir.join(address.to_string())).filter(|dir| dir.exists());
            dirs.extend(dirs.iter().find_map(below));
            let dir = dirs
                .last()
                .filter(|dir| dir.ends_with(address.to_string()))
                .ok_or(io::ErrorKind::NotFound)?;
            if !whole && !super::faults::is_bridge(dir) {
                continue;
            }
            self.link_path(&self.path("sys/bus/pci/devices").join(address.to_string()), dir)?;
            if let Some(group) = group {
                self.join_group(address, group)?;
            }
            if let Some(driver) = driver {
                self.set_driver(address, Some(&driver))?;
            }
        }
        Ok(())
    }

    /// Whether the functions behind a router are there.
    pub(super) fn has_tunnel(&self, route: Route) -> bool {
        !self.path(&enclosed(route, "hidden")).exists()
    }

    /// Whether the cable of a router is plugged in.
    pub(super) fn is_plugged(&self, route: Route) -> bool {
        !self.path(&enclosed(route, "router")).exists()
    }

    pub(super) fn router_dir(&self, route: Route) -> io::Result<PathBuf> {
        fs::canonicalize(self.path(BUS).join(route.to_string()))
    }

    /// A router goes, as with its cable; what is behind it must have gone before.
    pub(super) fn remove_router(&self, route: Route) -> io::Result<()> {
        let dir = self.router_dir(route)?;
        fs::remove_file(self.path(BUS).join(route.to_string()))?;
        fs::rename(dir, self.path(&enclosed(route, "router")))
    }

    /// A router comes again, in a directory that is another one than before, as in Linux.
    pub(super) fn return_router(&self, route: Route) -> io::Result<()> {
        let kept = self.path(&enclosed(route, "router"));
        let dir = fs::canonicalize(self.path(&enclosed(route, "parent")))?.join(route.to_string());
        fs::create_dir(&dir)?;
        for entry in fs::read_dir(&kept)? {
            let entry = entry?;
            fs::rename(entry.path(), dir.join(entry.file_name()))?;
        }
        fs::remove_dir(kept)?;
        self.link_path(&self.path(BUS).join(route.to_string()), &dir)
    }

    /// What the `authorized` of a router reads.
    pub(super) fn set_authorized(&self, route: Route, authorized: bool) -> io::Result<()> {
        fs::write(self.router_dir(route)?.join("authorized"), format!("{}\n", u8::from(authorized)))
    }

    /// The directory of a function behind a router, whether it is there now or not.
    pub(super) fn function_dir(&self, route: Route, address: PciAddress) -> Option<PathBuf> {
        let functions = self.enclosed_functions(route).ok()?;
        let top = match self.has_tunnel(route) {
            true => self.enclosed_place(route, functions.first()?.0).ok()?,
            false => self.path(&enclosed(route, "hidden")),
        };
        let mut dirs = vec![top];
        for (function, ..) in functions {
            let below = |dir: &PathBuf| Some(dir.join(function.to_string())).filter(|dir| dir.exists());
            dirs.extend(dirs.iter().find_map(below));
            if function == address {
                return dirs.pop();
            }
        }
        None
    }

    /// The functions behind a router.
    pub(super) fn enclosed_functions(&self, route: Route) -> io::Result<Vec<Enclosed>> {
        let text = match fs::read_to_string(self.path(&enclosed(route, "functions"))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            text => text?,
        };
        let function = |line: &str| {
            let mut words = line.split(' ');
            let address = words.next()?.parse().ok()?;
            let group = words.next().and_then(|group| group.parse().ok());
            Some((address, group, words.next().filter(|driver| !driver.is_empty()).map(str::to_owned)))
        };
        Ok(text.lines().filter_map(function).collect())
    }

    fn enclosed_place(&self, route: Route, top: PciAddress) -> io::Result<PathBuf> {
        Ok(fs::canonicalize(self.path(&enclosed(route, "place")))?.join(top.to_string()))
    }

    /// Adds anything to the bus: its name there, its directory, its attributes.
    pub(crate) fn add_on_usb4(&self, name: &str, dir: &Path, attributes: &[(&str, &str)]) -> io::Result<()> {
        for (attribute, text) in attributes {
            let path = dir.join(attribute);
            fs::create_dir_all(path.parent().unwrap_or(dir))?;
            fs::write(path, text)?;
        }
        fs::create_dir_all(dir)?;
        self.link_path(&self.path(BUS).join(name), dir)
    }
}
