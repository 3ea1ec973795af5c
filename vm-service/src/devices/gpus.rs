//! The host's GPUs, and for those behind a tunnel the enclosure that each is in.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use vm_passthrough::pci::PciFunction;
use vm_passthrough::telemetry::Reader;
use vm_passthrough::usb4::{self, Route, Router, Tunnel, UniqueId};
use vm_passthrough::{DeviceType, Host, PassthroughManager, PciAddress, claim, ledger};

use crate::failure::Failure;
use crate::text::describe;

/// A GPU of the host, and what is known of it without asking its driver.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    /// The function.
    pub(crate) function: PciFunction,
    /// How it reaches the host, where that is through a tunnel.
    pub(crate) tunnel: Option<Tunnel>,
    /// The router that it is in, where one alone can be it.
    pub(crate) enclosure: Option<Router>,
    /// The guest that has it.
    pub(crate) guest: Option<String>,
}

/// Which of the host's GPUs are meant.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Which {
    /// This one, or those in this enclosure.
    One(GpuName),
    /// Those behind a tunnel.
    Tunnelled,
    /// All.
    All,
}

/// What a GPU is named by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GpuName {
    /// Its address.
    Address(PciAddress),
    /// The UUID of its enclosure, which stays the same at any port.
    Enclosure(UniqueId),
    /// The router that it is in.
    Router(Route),
}

impl FromStr for GpuName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let address = || text.parse().ok().map(Self::Address);
        let enclosure = || text.parse().ok().map(Self::Enclosure);
        let router = || text.parse().ok().map(Self::Router);
        address().or_else(enclosure).or_else(router).ok_or(
            "name a GPU by its PCI address (0000:65:00.0 or 65:00.0), or by its enclosure's UUID or router (0-1)",
        )
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Enclosure(id) => id.fmt(f),
            Self::Router(route) => route.fmt(f),
        }
    }
}

impl GpuName {
    /// Whether a GPU of this function, in this enclosure, is meant.
    fn is_of(self, function: &PciFunction, enclosure: Option<&Router>) -> bool {
        match self {
            Self::Address(address) => function.address == address,
            Self::Enclosure(id) => enclosure.is_some_and(|router| router.unique_id == Some(id)),
            Self::Router(route) => enclosure.is_some_and(|router| router.route == route),
        }
    }
}

impl Gpu {
    /// Its address.
    pub(crate) fn address(&self) -> PciAddress {
        self.function.address
    }

    /// Its name, without that of its vendor where the database has both.
    pub(crate) fn name(&self) -> String {
        describe::name(&self.function)
    }

    /// Name of its enclosure: what the enclosure says, or the router's place.
    pub(crate) fn enclosure_name(&self) -> Option<String> {
        let router = self.enclosure.as_ref()?;
        Some(router.name().unwrap_or_else(|| router.route.to_string()))
    }

    /// As [`enclosure_name`](Self::enclosure_name), for people: Linux does not say which router a function is behind.
    pub(crate) fn enclosure_text(&self) -> Option<String> {
        Some(format!("{} (inferred)", self.enclosure_name()?))
    }

    /// What reads it.
    pub(crate) fn reader(&self, host: &Host) -> Reader {
        Reader::new(host, &self.function, self.tunnel.as_ref())
    }
}

/// The GPUs that are meant, those behind a tunnel first.
///
/// # Errors
/// When the host can't be scanned, or the one that is meant is not there or no GPU.
pub(crate) fn find(host: &Host, which: Which) -> Result<Vec<Gpu>, Failure> {
    let mut manager = PassthroughManager::with_host(host.clone()).map_err(Failure::failed)?;
    manager.scan_devices().map_err(Failure::failed)?;
    let functions = manager.devices();
    let bus = host.thunderbolt.join("devices");
    let domains = usb4::scan(host)
        .map_err(|error| Failure::failed(format_args!("can't read {}: {error}", bus.display())))?;
    let tunnels = usb4::tunnels(host, functions, &domains);
    let tunnel_of = |address| tunnels.iter().find(|tunnel| tunnel.function == address);
    if let Which::One(GpuName::Address(address)) = which {
        let function = functions.iter().find(|function| function.address == address);
        let function = function.ok_or_else(|| Failure::failed(describe::not_there(address)))?;
        if !is_gpu(function) {
            let name = describe::name(function);
            return Err(Failure::usage(format_args!(
                "{address} {name} is no GPU; `vm-service egpu status --all` lists those of this host"
            )));
        }
    }
    let guests = guests(host);
    let enclosure = |address| {
        let route = tunnel_of(address)?.via.router()?;
        domains.iter().flat_map(|domain| &domain.routers).find(|router| router.route == route)
    };
    let is_meant = |function: &&PciFunction| match which {
        Which::One(name) => is_gpu(function) && name.is_of(function, enclosure(function.address)),
        Which::Tunnelled => is_gpu(function) && tunnel_of(function.address).is_some(),
        Which::All => is_gpu(function),
    };
    let gpu = |function: &PciFunction| Gpu {
        function: function.clone(),
        enclosure: enclosure(function.address).cloned(),
        guest: guests.get(&function.address).cloned(),
        tunnel: tunnel_of(function.address).cloned(),
    };
    let mut gpus: Vec<Gpu> = functions.iter().filter(is_meant).map(gpu).collect();
    gpus.sort_by_key(|gpu| (gpu.tunnel.is_none(), gpu.address()));
    match which {
        Which::One(name) if gpus.is_empty() => Err(Failure::failed(format_args!(
            "no GPU is in the enclosure {name}; `vm-service egpu info` shows what is connected, and `vm-service egpu connect {name}` has its \
             GPU come"
        ))),
        _ => Ok(gpus),
    }
}

/// The one GPU that is meant; where none is named, the only one behind a tunnel. `how` says how to name it.
///
/// # Errors
/// When there is none, or several.
pub(crate) fn one(host: &Host, name: Option<GpuName>, how: &str) -> Result<Gpu, Failure> {
    let mut gpus = find(host, name.map_or(Which::Tunnelled, Which::One))?;
    match (gpus.pop(), &*gpus) {
        (Some(gpu), []) => Ok(gpu),
        (Some(last), _) => {
            gpus.push(last);
            let all: Vec<_> = gpus.iter().map(|gpu| format!("{} ({})", gpu.address(), gpu.name())).collect();
            Err(Failure::usage(format_args!("several GPUs match; {how}: {}", all.join(", "))))
        }
        (None, _) => Err(Failure::failed(format_args!(
            "no GPU is behind a tunnel; {how}, as `vm-service egpu status --all` lists them"
        ))),
    }
}

fn is_gpu(function: &PciFunction) -> bool {
    use DeviceType::{GpuAmd, GpuIntel, GpuNvidia};
    matches!(function.device_type, GpuNvidia | GpuAmd | GpuIntel)
}

/// The guests that have functions. A ledger that can't be read tells of none, and is told of by `claims`.
pub(crate) fn guests(host: &Host) -> BTreeMap<PciAddress, String> {
    let claims = ledger::claims(host, claim::DEADLINE).unwrap_or_else(|error| {
        tracing::warn!("which guest has a GPU is not known: {error}");
        Vec::new()
    });
    let mut guests = BTreeMap::new();
    for claim in claims.into_iter().flatten().filter(|claim| claim.alive) {
        let owner = claim.entry.user.as_ref().unwrap_or(&claim.entry.owner);
        if let Some(guest) = &owner.guest {
            guests.extend(claim.entry.functions.iter().map(|function| (function.address, guest.clone())));
        }
    }
    guests
}
