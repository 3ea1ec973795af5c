//! Finds an enclosure's router, and the functions behind it, without an access that could wait for any function or router.

use super::super::EgpuError;
use super::{HostEnclosure, Result, step};
use crate::PciAddress;
use crate::pci::{self, PciFunction};
use crate::usb4::{self, Domain, Route, Router, Via};

impl HostEnclosure {
    /// The routers that say that they are it, each with the domain that it is in.
    pub(super) fn routers(&self) -> Result<Vec<(Domain, Router)>> {
        let domains = usb4::scan_routers(&self.host)
            .map_err(|error| step("look at USB4", format!("{}: {error}", self.host.thunderbolt.display())))?;
        let is_it = |router: &&Router| router.route.depth() > 0 && router.unique_id == Some(self.id);
        let of = |domain: &Domain| {
            let routers = domain.routers.iter().filter(is_it);
            routers.map(|router| (domain.clone(), router.clone())).collect::<Vec<_>>()
        };
        Ok(domains.iter().flat_map(of).collect())
    }

    /// Its router, with the domain that it is in: of several the one where it was seen last.
    pub(super) fn router(&self) -> Result<Option<(Domain, Router)>> {
        let mut found = self.routers()?;
        if found.len() > 1
            && let Some(at) = found.iter().position(|(_, router)| Some(router.route) == self.route)
        {
            return Ok(Some(found.swap_remove(at)));
        }
        self.only(&found)?;
        Ok(found.pop())
    }

    /// Whether one router at most says that it is this enclosure.
    pub(super) fn only(&self, found: &[(Domain, Router)]) -> Result<()> {
        let [(_, one), (_, other), ..] = found else { return Ok(()) };
        let reason = format!(
            "the routers {} and {} both say that they are it; unplug one of them",
            one.route, other.route
        );
        Err(step(&format!("tell which enclosure {} is", self.id), reason))
    }

    pub(super) fn connected(&self) -> Result<(Domain, Router)> {
        self.router()?.ok_or_else(|| EgpuError::NotConnected(self.id.to_string()))
    }

    /// The functions behind its router, bridges too. Where several routers may be it, those that were there before
    /// its tunnel are not.
    fn behind(&self, route: Route) -> Result<Vec<PciFunction>> {
        let functions = pci::scan_attributes(&self.host).map_err(|error| step("scan the host", error))?;
        let domains = usb4::scan_routers(&self.host).map_err(|error| step("look at USB4", error))?;
        let tunnels = usb4::tunnels(&self.host, &functions, &domains);
        let is_its = |address: PciAddress| {
            tunnels.iter().filter(|tunnel| tunnel.function == address).any(|tunnel| match &tunnel.via {
                via if via.router() == Some(route) => true,
                Via::OneOf(routes) => routes.contains(&route) && !self.before.contains(&address),
                _ => false,
            })
        };
        Ok(functions.into_iter().filter(|function| is_its(function.address)).collect())
    }

    pub(super) fn endpoints(&self, route: Route) -> Result<Vec<PciFunction>> {
        let mut functions = self.behind(route)?;
        functions.retain(|function| !function.is_bridge());
        Ok(functions)
    }
}
