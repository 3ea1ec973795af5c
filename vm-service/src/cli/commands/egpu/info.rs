//! `egpu info`: what is connected by USB4 and Thunderbolt.

use std::fmt::Write as _;

use vm_passthrough::pci::PciFunction;
use vm_passthrough::usb4::{
    self, Authorization, Basis, Domain, Port, PortLink, Retimer, Router, Tunnel, Via,
};

use crate::api::{Body, TunnelledFunction, Usb4Domain};
use crate::cli::commands::Scan;
use crate::cli::context::Context;
use crate::failure::Failure;
use crate::text::describe;

/// Shows what is connected, how fast, and which PCI functions are behind it.
///
/// # Errors
/// When the host can't be scanned or the output can't be written.
pub(super) fn run(context: &mut Context<'_>) -> Result<(), Failure> {
    let host = context.host.clone();
    let bus = host.thunderbolt.join("devices");
    let domains = usb4::scan(&host)
        .map_err(|error| Failure::failed(format_args!("can't read {}: {error}", bus.display())))?;
    let scan = Scan::of(&host)?;
    let tunnels = usb4::tunnels(&host, scan.functions(), &domains);
    let json = || Body::EgpuInfo {
        domains: domains.iter().map(Usb4Domain::from).collect(),
        functions: tunnels.iter().map(TunnelledFunction::from).collect(),
    };
    context.print(json, || text(&domains, &tunnels, scan.functions()))
}

fn text(domains: &[Domain], tunnels: &[Tunnel], functions: &[PciFunction]) -> String {
    let mut text = String::new();
    if domains.is_empty() {
        text += "no USB4 or Thunderbolt controller found, or its module thunderbolt is not loaded\n";
    }
    let show = |text: &mut String, tunnel: &Tunnel, depth: usize| {
        let Some(function) = functions.iter().find(|function| function.address == tunnel.function) else {
            return;
        };
        if function.is_bridge() {
            return;
        }
        let known = match tunnel.basis {
            Basis::Linux => "",
            Basis::Inferred => ", behind a tunnel (inferred: this Linux does not say what is)",
        };
        let via = match &tunnel.via {
            Via::Only(_) | Via::Depth(_) => ", in this router (inferred)".into(),
            Via::OneOf(routes) => {
                let routes: Vec<String> = routes.iter().map(ToString::to_string).collect();
                format!(", in one of the routers {} (inferred)", routes.join(", "))
            }
            Via::Unknown => String::new(),
        };
        let indent = "  ".repeat(depth);
        let (kind, name) = (describe::device_type(function), describe::name(function));
        let _ = writeln!(text, "{indent}{} {kind} {name}{known}{via}", function.address);
    };
    for domain in domains {
        let interface = domain.host_interface.map(|address| format!(" at {address}")).unwrap_or_default();
        let protection = match domain.iommu_dma_protection {
            Some(true) => "the IOMMU protects the host's memory",
            Some(false) => "the host's memory is NOT protected by the IOMMU",
            None => "whether the IOMMU protects the host's memory is not said",
        };
        let security = &domain.security;
        let takes_down = match domain.deauthorization {
            true => "tunnels can be taken down",
            false => "tunnels can't be taken down but by pulling the cable",
        };
        let _ = writeln!(
            text,
            "domain{}{interface}: security {security}, {protection}, {takes_down}",
            domain.number
        );
        for router in &domain.routers {
            let depth = router.route.depth() as usize + 1;
            let _ = writeln!(text, "{}{}", "  ".repeat(depth), router_text(router));
            let indent = "  ".repeat(depth + 1);
            for port in &router.ports {
                let _ = writeln!(text, "{indent}{}", port_text(port));
            }
            for retimer in &router.retimers {
                let _ = writeln!(text, "{indent}{}", retimer_text(retimer));
            }
            for tunnel in tunnels.iter().filter(|tunnel| tunnel.via.router() == Some(router.route)) {
                show(&mut text, tunnel, depth + 1);
            }
        }
    }
    let mut others = tunnels.iter().filter(|tunnel| tunnel.via.router().is_none()).peekable();
    if others.peek().is_some() {
        text += "behind a tunnel, in which router is not known\n";
        others.for_each(|tunnel| show(&mut text, tunnel, 1));
    }
    text
}

fn router_text(router: &Router) -> String {
    let mut words = vec![router.route.to_string()];
    words.extend(router.name());
    if router.route.depth() == 0 {
        words.push("(this host)".into());
    }
    words.extend(router.generation.map(|generation| match generation {
        4.. => "USB4".into(),
        _ => format!("Thunderbolt {generation}"),
    }));
    let mut text = words.join(" ");
    if let Some(link) = router.link {
        let _ = write!(text, ", {}", describe::link_lanes(link));
    }
    text += match router.authorization {
        Some(Authorization::No) => ", not authorised: no PCIe",
        Some(Authorization::Yes) if router.boot => ", authorised by the firmware",
        Some(Authorization::Yes) => ", authorised",
        Some(Authorization::Challenged) => ", authorised by its key",
        None => "",
    };
    if let Some(version) = &router.nvm_version {
        let _ = write!(text, ", firmware {version}");
    }
    if let Some(id) = router.unique_id.filter(|_| router.route.depth() > 0) {
        let _ = write!(text, ", {id}");
    }
    text
}

fn port_text(port: &Port) -> String {
    let link = match port.link {
        PortLink::None => "nothing is connected",
        PortLink::Usb4 => "link USB4",
        PortLink::Tbt => "link Thunderbolt 3",
        PortLink::Unknown => "link unknown",
    };
    let connector = port.connector.as_ref().map(|name| format!(", connector {name}")).unwrap_or_default();
    format!("port {}: {link}{connector}", port.number)
}

fn retimer_text(retimer: &Retimer) -> String {
    let mut text = format!("retimer {} of port {}", retimer.index, retimer.port);
    // A String takes any write.
    if let (Some(vendor), Some(device)) = (retimer.vendor, retimer.device) {
        let _ = write!(text, ": {vendor:04x}:{device:04x}");
    }
    if let Some(version) = &retimer.nvm_version {
        let _ = write!(text, ", firmware {version}");
    }
    text
}
