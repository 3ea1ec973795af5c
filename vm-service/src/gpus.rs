//! The host's GPUs, and for those behind a tunnel the enclosure that each is in.

use std::collections::BTreeMap;

use vm_passthrough::pci::PciFunction;
use vm_passthrough::telemetry::Reader;
use vm_passthrough::usb4::{self, Router, Tunnel};
use vm_passthrough::{DeviceType, Host, PassthroughManager, PciAddress, claim, ledger};

use crate::describe;
use crate::failure::Failure;

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
    /// This one.
    One(PciAddress),
    /// Those behind a tunnel.
    Tunnelled,
    /// All.
    All,
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
        let names: Vec<_> =
            [&router.vendor_name, &router.device_name].into_iter().flatten().cloned().collect();
        Some(if names.is_empty() { router.route.to_string() } else { names.join(" ") })
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
    if let Which::One(address) = which {
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
    let is_meant = |function: &&PciFunction| match which {
        Which::One(address) => function.address == address,
        Which::Tunnelled => is_gpu(function) && tunnel_of(function.address).is_some(),
        Which::All => is_gpu(function),
    };
    let gpu = |function: &PciFunction| {
        let tunnel = tunnel_of(function.address).cloned();
        let route = tunnel.as_ref().and_then(|tunnel| tunnel.via.router());
        let mut routers = domains.iter().flat_map(|domain| &domain.routers);
        Gpu {
            function: function.clone(),
            enclosure: routers.find(|router| Some(router.route) == route).cloned(),
            guest: guests.get(&function.address).cloned(),
            tunnel,
        }
    };
    let mut gpus: Vec<Gpu> = functions.iter().filter(is_meant).map(gpu).collect();
    gpus.sort_by_key(|gpu| (gpu.tunnel.is_none(), gpu.address()));
    Ok(gpus)
}

fn is_gpu(function: &PciFunction) -> bool {
    use DeviceType::{GpuAmd, GpuIntel, GpuNvidia};
    matches!(function.device_type, GpuNvidia | GpuAmd | GpuIntel)
}

/// The guests that have functions. A ledger that can't be read tells of none, and is told of by `claims`.
fn guests(host: &Host) -> BTreeMap<PciAddress, String> {
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
