//! USB4 domains and routers of a simulated host, as Linux shows them in sysfs.

use std::fs;
use std::io;
use std::path::Path;

use super::SimHost;
use crate::PciAddress;
use crate::usb4::Route;

const BUS: &str = "sys/bus/thunderbolt/devices";

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
