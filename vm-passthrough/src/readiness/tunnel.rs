//! What is special about a function behind a USB4 tunnel: it may be pulled out, its link is not what PCIe says, its BARs are what
//! hot-plug left it, and its driver may not let go of it.

use super::holders::users;
use super::{BlockerCode, Case, Severity, iommu_setup, size_text};
use crate::deadlines::DRIVERS as DEADLINE;
use crate::pci::{self, PciFunction, PciIds};
use crate::usb4::{self, Basis, Domain, Router, Tunnel, Via};
use crate::{Host, PciAddress, files};

/// How many holders are named.
const MOST_SHOWN: usize = 5;

/// The host's USB4 domains, and the functions behind their tunnels.
#[derive(Debug)]
pub(super) struct Tunnels {
    domains: Vec<Domain>,
    tunnels: Vec<Tunnel>,
}

impl Tunnels {
    /// # Errors
    /// What can't be read, and why.
    pub(super) fn read(host: &Host) -> Result<Self, String> {
        let domains = usb4::scan(host).map_err(|error| format!("USB4 can't be looked at: {error}"))?;
        let functions = pci::scan(host).map_err(|error| error.to_string())?;
        let tunnels = usb4::tunnels(host, &functions, &domains);
        Ok(Self { domains, tunnels })
    }

    fn of(&self, function: PciAddress) -> Option<&Tunnel> {
        self.tunnels.iter().find(|tunnel| tunnel.function == function)
    }

    /// The router that a tunnel leads to, with its domain.
    fn router(&self, tunnel: &Tunnel) -> Option<(&Domain, &Router)> {
        let route = tunnel.via.router()?;
        let domain = self.domains.iter().find(|domain| domain.number == route.domain)?;
        Some((domain, domain.routers.iter().find(|router| router.route == route)?))
    }
}

pub(super) fn judge(case: &mut Case<'_>) {
    for function in case.taken() {
        // Few are, and the rest need no scan.
        if !usb4::is_removable(case.host, function.address) {
            continue;
        }
        match case.facts.tunnels(case.host) {
            Err(reason) => case.unchecked(function.address, reason.clone(), "run this as root"),
            Ok(all) => {
                if let Some(tunnel) = all.of(function.address) {
                    tunnelled(case, all, tunnel, &function);
                }
            }
        }
    }
}

fn tunnelled(case: &mut Case<'_>, all: &Tunnels, tunnel: &Tunnel, function: &PciFunction) {
    let address = function.address;
    let protect = iommu_setup::protect_tunnels(case);
    let mut add = |code, evidence, remedy: &str| case.add(code, Severity::Warning, address, evidence, remedy);
    let known = match tunnel.basis {
        Basis::Linux => "Linux says so",
        Basis::Inferred => "inferred, as this Linux does not say it",
    };
    let router = all.router(tunnel);
    let at = match (&tunnel.via, router) {
        (_, Some((_, router))) => {
            let name = router.name().map(|name| format!(" {name}")).unwrap_or_default();
            let link = router.link.map(|link| format!(", whose link has {}", link.slower()));
            format!("in the router {}{name} (inferred){}", router.route, link.unwrap_or_default())
        }
        (Via::OneOf(routes), _) => format!("in one of {} routers", routes.len()),
        _ => "in a router that Linux does not show".to_owned(),
    };
    add(
        BlockerCode::Tunnelled,
        format!(
            "it is behind a tunnel ({known}), {at}; the link that PCI Express reports is the tunnel's own"
        ),
        "leave it connected while a guest has it, which loses it when it is pulled out; `vm-service egpu info` shows its link",
    );
    if let Some((domain, _)) = router.filter(|(domain, _)| domain.iommu_dma_protection == Some(false)) {
        add(
            BlockerCode::DmaUnprotected,
            format!("iommu_dma_protection of domain{} is 0", domain.number),
            &format!("{protect}, and authorise known devices alone"),
        );
    }
    for bar in &function.bars {
        let most = function.bar_sizes(bar.index).last().copied().unwrap_or(0);
        if bar.size < most {
            add(
                BlockerCode::BarNotResized,
                format!(
                    "its BAR {} has {}, and could have {}: a port that was hot-plugged has no room for more",
                    bar.index,
                    size_text(bar.size),
                    size_text(most)
                ),
                "connect it before the host boots, with thunderbolt.host_reset=0 on the command line of the host's Linux, which \
                 else ends the firmware's tunnels and builds its own, as if it was hot-plugged",
            );
        }
    }
    if function.driver.as_deref() == Some("nvidia") {
        unbind_may_hang(case, function);
    }
}

/// NVIDIA's driver may wait in unbind for ever: how long it is waited for, its holders now, and which driver to load instead.
fn unbind_may_hang(case: &mut Case<'_>, function: &PciFunction) {
    let holders = if case.options.check_open_files { users(case.host, function.address) } else { Vec::new() };
    let holders: Vec<String> = holders.iter().take(MOST_SHOWN).map(ToString::to_string).collect();
    let held = match (case.options.check_open_files, &*holders) {
        (false, _) => String::new(),
        (true, []) => "; no process of the host holds it now".to_owned(),
        (true, holders) => format!("; now {}", holders.join(", ")),
    };
    let PciIds { vendor, device, .. } = function.ids;
    let all = files::names(&case.host.sys.join("bus/pci/devices")).unwrap_or_default();
    let others = all.iter().filter_map(|name| name.parse().ok()).filter(|other| *other != function.address);
    let identical = others
        .filter_map(|other| pci::read_function(case.host, other).ok())
        .find(|other| (other.ids.vendor, other.ids.device) == (vendor, device));
    let identical = identical.map(|other| other.address);
    case.add(
        BlockerCode::UnbindMayHang,
        Severity::Warning,
        function.address,
        format!(
            "the driver nvidia has it, which takes the GPU of an enclosure that it does not know for a built-in one, and then waits \
             in unbind until nobody holds it (issue 894 of NVIDIA/open-gpu-kernel-modules); that is waited for {} s{held}",
            DEADLINE.as_secs()
        ),
        match identical {
            None =>         format!(
            "end what holds it first, as nvidia-persistenced or a display server; or load vfio-pci for it instead: `options vfio-pci \
             ids={vendor:04x}:{device:04x}` and `softdep nvidia pre: vfio-pci` in /etc/modprobe.d, then reboot or connect the \
             enclosure once `modprobe -r nvidia` succeeded; where vfio-pci is built in, vfio-pci.ids={vendor:04x}:{device:04x} on the \
             command line of the host's Linux"
        ),
            // An ID is that of both, and the host keeps the other.
            Some(other) => format!(
                "end what holds it first, as nvidia-persistenced or a display server; {other} has the same ID {vendor:04x}:{device:04x}, \
                 so do not bind vfio-pci by ID: unload the driver (`modprobe -r nvidia`) before the enclosure is connected, and claim \
                 {0}, which sets driver_override of this function alone",
                function.address
            ),
        },
    );
}
