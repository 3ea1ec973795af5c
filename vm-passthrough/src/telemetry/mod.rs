//! What a GPU tells of itself now: temperature, power, clocks, memory, its link, errors.
//!
//! ```text
//! Reader ─▶ asleep, or no driver?  ─▶ Source::None, and why
//!    │      nvidia                 ─▶ NVML
//!    │      amdgpu                 ─▶ its files in sysfs, and its hwmon's
//!    │      another                ─▶ its hwmon, where it has one
//!    ├────▶ the link: of the tunnel's router, or of PCI Express
//!    └────▶ errors that Linux counts (AER)
//! ```
//!
//! Reading wakes no GPU that runtime power management has put to sleep. It may wait for a driver all the same, as for one whose
//! GPU was pulled out, so that one who can't wait asks through a [`Watch`], which has a thread for each GPU.
//!
//! What the driver of a GPU does not tell is `None`, never a guess. What the VFIO driver has, only its guest can ask.

mod amdgpu;
mod hwmon;
#[cfg(feature = "cuda")]
mod nvidia;
mod throttle;
mod watch;
mod xid;

use std::path::Path;

use thiserror::Error;

pub use throttle::Throttle;
pub use watch::{Answer, Watch};
pub use xid::{Xid, advise, xids};

pub(crate) use hwmon::directory as sensors;

use crate::pci::{self, AerCounters, Link};
use crate::usb4::{self, Authorization, LinkRates, Route, Tunnel};
use crate::{DeviceType, Host, PciAddress, PciFunction, files};

/// What a GPU tells of itself at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Telemetry {
    /// Who was asked.
    pub source: Source,
    /// Degrees Celsius of the core, or of its edge.
    pub temperature: Option<f64>,
    /// Degrees Celsius where the core is hottest.
    pub hot_spot: Option<f64>,
    /// Degrees Celsius of the memory.
    pub memory_temperature: Option<f64>,
    /// Watts drawn.
    pub power: Option<f64>,
    /// Watts at which it throttles itself.
    pub power_limit: Option<f64>,
    /// Percent of its fan's highest speed.
    pub fan_percent: Option<u32>,
    /// Turns a minute of its fan.
    pub fan_speed: Option<u32>,
    /// The core's clock.
    pub core_clock: Clock,
    /// The memory's clock.
    pub memory_clock: Clock,
    /// Performance state by its driver's name: `P0` to `P15` of NVIDIA's, or amdgpu's forced level, as in `auto`.
    pub performance_state: Option<String>,
    /// Percent of the time that it was busy, over the driver's last interval.
    pub busy: Option<u32>,
    /// Bytes of its memory that are in use, by anybody.
    pub memory_used: Option<u64>,
    /// Bytes of its memory.
    pub memory_total: Option<u64>,
    /// Its link to the host.
    pub link: Option<GpuLink>,
    /// Errors that it has reported since Linux found it.
    pub errors: Option<AerCounters>,
    /// Packets that were sent again on PCI Express, since its driver has it.
    pub replays: Option<u64>,
    /// What holds its clocks down, nothing where it is empty.
    pub throttle: Option<Vec<Throttle>>,
}

/// Who tells of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// NVIDIA's management library.
    Nvml,
    /// Files of the driver amdgpu.
    Amdgpu,
    /// Sensors of this driver (hwmon).
    Hwmon(String),
    /// Nobody, and why.
    None(String),
}

impl Default for Source {
    fn default() -> Self {
        Self::None("it was not asked".into())
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nvml => f.write_str("nvml"),
            Self::Amdgpu => f.write_str("amdgpu"),
            Self::Hwmon(driver) => write!(f, "hwmon of {driver}"),
            Self::None(_) => f.write_str("none"),
        }
    }
}

/// MHz of a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// Now.
    pub now: Option<u32>,
    /// At most.
    pub max: Option<u32>,
}

/// The link between a GPU and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuLink {
    /// PCI Express, with no tunnel.
    Pcie(Link),
    /// A PCIe tunnel. What PCI Express says of the GPU's link is the virtual link of the tunnel's adapters then, and is not shown.
    Tunnel {
        /// The router that the GPU is in, where one alone can be it.
        router: Option<Route>,
        /// That router's link to the one above it, Mbit/s; `None` where it is not there, or not known which it is.
        rates: Option<LinkRates>,
        /// Whether PCIe is tunnelled to that router.
        authorization: Option<Authorization>,
    },
}

impl GpuLink {
    /// Whether it carries nothing: PCI Express is not trained, or the tunnel's router is gone or was deauthorised.
    pub fn is_down(&self) -> bool {
        match self {
            Self::Pcie(link) => link.speed == 0 || link.width == 0,
            Self::Tunnel { router, rates, authorization } => {
                router.is_some() && (rates.is_none() || *authorization == Some(Authorization::No))
            }
        }
    }
}

impl Telemetry {
    fn unknown(why: impl Into<String>) -> Self {
        Self { source: Source::None(why.into()), ..Self::default() }
    }
}

/// Reads one GPU, again and again.
#[derive(Clone, Debug)]
pub struct Reader {
    host: Host,
    address: PciAddress,
    kind: DeviceType,
    /// Its tunnel's router, where it is behind one.
    tunnel: Option<Option<Route>>,
}

impl Reader {
    /// A reader of `function`, which reaches the host through `tunnel` if there is one.
    pub fn new(host: &Host, function: &PciFunction, tunnel: Option<&Tunnel>) -> Self {
        Self {
            host: host.clone(),
            address: function.address,
            kind: function.device_type,
            tunnel: tunnel.map(|tunnel| tunnel.via.router()),
        }
    }

    /// Where it is.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// What the GPU tells now; `None` when it is gone. It may wait for the driver.
    pub fn read(&self) -> Option<Telemetry> {
        let dir = self.host.pci_device(self.address);
        if !dir.exists() {
            return None;
        }
        let interface = interface(&self.host, self.address, self.kind);
        let mut telemetry = match &interface {
            Ok(Interface::Nvml) => self.ask_nvml(),
            Ok(Interface::Amdgpu) => amdgpu::read(&dir),
            Ok(Interface::Hwmon(driver)) => hwmon::read(&dir, driver),
            Err(mute) => Telemetry::unknown(mute.to_string()),
        };
        // Config space of one that is asleep would wake it.
        telemetry.link = if interface == Err(Mute::Asleep) { None } else { self.link(&dir) };
        telemetry.errors = pci::aer_counters(&dir);
        // As the directory answers for one function only, all of this is of the one that is there still.
        dir.exists().then_some(telemetry)
    }

    #[cfg(feature = "cuda")]
    fn ask_nvml(&self) -> Telemetry {
        nvidia::read(self.address)
    }

    #[cfg(not(feature = "cuda"))]
    fn ask_nvml(&self) -> Telemetry {
        Telemetry::unknown(Mute::NoCuda.to_string())
    }

    fn link(&self, dir: &Path) -> Option<GpuLink> {
        let Some(router) = self.tunnel else { return Some(GpuLink::Pcie(pci::link(dir)?)) };
        let found = router.and_then(|route| usb4::router_at(&self.host, route));
        Some(GpuLink::Tunnel {
            router,
            rates: found.as_ref().and_then(|router| router.link),
            authorization: found.and_then(|router| router.authorization),
        })
    }
}

/// By what a GPU is asked and set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Interface {
    /// NVIDIA's management library.
    Nvml,
    /// Files of the driver amdgpu.
    Amdgpu,
    /// Sensors of another driver, if it has some.
    Hwmon(String),
}

/// Why nobody can be asked of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum Mute {
    /// Runtime power management has put it to sleep.
    #[error("it is asleep, and is not woken for this")]
    Asleep,
    /// No driver has it.
    #[error("no driver has it")]
    NoDriver,
    /// A VFIO driver has it.
    #[error("{0} has it: only its guest can ask")]
    Vfio(String),
    /// NVML answers for the machine that this process runs on.
    #[error("this host is only files, and NVML answers for this machine")]
    OnlyFiles,
    /// This program can't ask NVML.
    #[error(
        "this program was built without CUDA, and NVML would tell of it; build it with the cargo feature cuda"
    )]
    NoCuda,
}

/// By what a GPU of a kind is asked, as things are now.
pub(crate) fn interface(host: &Host, address: PciAddress, kind: DeviceType) -> Result<Interface, Mute> {
    let dir = host.pci_device(address);
    if files::read_trimmed(&dir.join("power/runtime_status")).as_deref() == Some("suspended") {
        return Err(Mute::Asleep);
    }
    match files::link_name(&dir.join("driver")) {
        None => Err(Mute::NoDriver),
        Some(driver) if crate::iommu::is_vfio_driver(&driver) => Err(Mute::Vfio(driver)),
        Some(driver) if driver == "nvidia" => match (cfg!(feature = "cuda"), host.disk_probe(), kind) {
            (false, _, _) => Err(Mute::NoCuda),
            (true, Some(_), DeviceType::GpuNvidia) => Ok(Interface::Nvml),
            (true, _, _) => Err(Mute::OnlyFiles),
        },
        Some(driver) if driver == "amdgpu" => Ok(Interface::Amdgpu),
        Some(driver) => Ok(Interface::Hwmon(driver)),
    }
}

/// A number in a file of sysfs.
fn number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    files::read_trimmed(path)?.parse().ok()
}

#[cfg(test)]
mod tests;
