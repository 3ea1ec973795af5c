use std::fs;

use proptest::prelude::*;

use super::*;
use crate::pci;
use crate::sim::{SimFunction, SimHost};

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

fn route(text: &str) -> Route {
    text.parse().unwrap()
}

/// The bus of a simulated host.
struct Bus(SimHost);

impl Bus {
    fn new() -> Self {
        Self(SimHost::new().unwrap())
    }

    fn domain(&self, number: u32, host_interface: Option<&str>, attributes: &[(&str, &str)]) {
        self.0.add_domain(number, host_interface.map(address), attributes).unwrap();
    }

    fn router(&self, name: &str, attributes: &[(&str, &str)]) {
        self.0.add_router(route(name), attributes).unwrap();
    }

    /// Adds a router to which PCIe is tunnelled.
    fn authorized(&self, name: &str) {
        self.router(name, &[("authorized", "1\n")]);
    }

    /// Adds what is neither.
    fn other(&self, name: &str, attributes: &[(&str, &str)]) {
        self.0.add_on_usb4(name, &self.0.path("sys/devices").join(name), attributes).unwrap();
    }

    fn scan(&self) -> Vec<Domain> {
        scan(&self.0.plain_host()).unwrap()
    }

    /// Adds a bridge or, below one, a GPU; `removable` as Linux says it.
    fn function(&self, at: &str, below: Option<&str>, removable: bool) {
        let is_port = !at.ends_with("00.1");
        let function =
            if is_port { SimFunction::root_port(address(at)) } else { SimFunction::gpu(address(at)) };
        let function = match below {
            Some(below) => function.below(address(below)),
            None => function,
        };
        self.0.add(&function).unwrap();
        if removable {
            self.0.set(address(at), "removable", "removable\n").unwrap();
        }
    }

    /// Links a port to the host interface whose tunnels begin there.
    fn linked(&self, port: &str, host_interface: &str) {
        let dir = self.0.device_dir(address(port)).unwrap();
        fs::create_dir(dir.join(format!("supplier:pci:{host_interface}"))).unwrap();
    }

    fn release(&self, release: &str) {
        self.0.write("proc/sys/kernel/osrelease", release).unwrap();
    }

    fn tunnels(&self) -> Vec<Tunnel> {
        let host = self.0.plain_host();
        tunnels(&host, &pci::scan(&host).unwrap(), &self.scan())
    }
}

#[test]
fn a_route_is_a_domain_and_a_port_at_each_router() {
    fn check(text: &str, depth: u32, port: Option<u8>, parent: Option<&str>) {
        let route = route(text);
        assert_eq!((route.depth(), route.port()), (depth, port), "{text}");
        assert_eq!(route.parent().map(|parent| parent.to_string()).as_deref(), parent, "{text}");
        assert_eq!(route.to_string(), text);
    }
    check("0-0", 0, None, None);
    check("0-1", 1, Some(1), Some("0-0"));
    check("1-301", 2, Some(3), Some("1-1"));
    check("0-50301", 3, Some(5), Some("0-301"));
    check("12-7060504030201", 7, Some(7), Some("12-60504030201"));
    for text in
        ["", "0", "-", "0-", "-1", "0-1-2", "x-1", "0-g", "0-+1", "0-10001", "0-807060504030201", "0- 1"]
    {
        assert_eq!(text.parse::<Route>(), Err(InvalidRoute), "{text:?}");
    }
}

#[test]
fn a_unique_id_is_a_uuid() {
    let text = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30";
    assert_eq!(text.parse::<UniqueId>().unwrap().to_string(), text);
    let other = "D2030000-00A0-751E-A3F4-C0E5AE7B0D30";
    assert_eq!(text.parse::<UniqueId>(), other.parse());
    for text in ["", "d203", "d2030000-00a0-751e-a3f4-c0e5ae7b0d3g", "d203000000a0-751e-a3f4-c0e5-ae7b0d30"] {
        assert_eq!(text.parse::<UniqueId>(), Err(InvalidUniqueId), "{text:?}");
    }
}

#[test]
fn a_host_without_usb4_has_no_domains() {
    assert_eq!(Bus::new().scan(), []);
}

#[test]
fn all_that_is_connected_is_found() {
    let bus = Bus::new();
    bus.0.add(&SimFunction::new(address("0000:00:0d.2"), 0x8086, 0x9a1b, 0x0c_0340)).unwrap();
    let domain = [("security", "user\n"), ("iommu_dma_protection", "1\n"), ("deauthorization", "1\n")];
    bus.domain(0, Some("0000:00:0d.2"), &domain);
    bus.router(
        "0-1",
        &[
            ("authorized", "1\n"),
            ("boot", "1\n"),
            ("unique_id", "d2030000-00a0-751e-a3f4-c0e5ae7b0d30\n"),
            ("vendor", "0x127\n"),
            ("device", "0x2\n"),
            ("vendor_name", "Razer\n"),
            ("device_name", "Core X\n"),
            ("generation", "3\n"),
            ("rx_speed", "20.0 Gb/s\n"),
            ("rx_lanes", "2\n"),
            ("tx_speed", "20.0 Gb/s\n"),
            ("tx_lanes", "1\n"),
            ("nvm_version", "27.1\n"),
            ("usb4_port3/link", "usb4\n"),
            ("usb4_port1/link", "none\n"),
        ],
    );
    bus.router("0-301", &[("authorized", "0\n"), ("rx_speed", "10.0 Gb/s\n")]);
    bus.other("0-0:1.1", &[("vendor", "0x8087\n"), ("device", "0x15ee\n")]);
    // Another host, which has most of what a router has.
    bus.router("0-3", &[("unique_id", "d2030000-00a0-751e-a3f4-c0e5ae7b0d31\n"), ("vendor", "0x8086\n")]);
    bus.other("0-3.0", &[("key", "network\n")]);

    let domains = bus.scan();
    let [domain] = &*domains else { panic!("{domains:?}") };
    assert_eq!(domain.host_interface, Some(address("0000:00:0d.2")));
    assert_eq!((&domain.security, domain.iommu_dma_protection), (&Security::User, Some(true)));
    assert!(domain.deauthorization);
    let routes: Vec<String> = domain.routers.iter().map(|router| router.route.to_string()).collect();
    assert_eq!(routes, ["0-0", "0-1", "0-301"]);
    let [host, first, second] = &*domain.routers else { panic!("{domains:?}") };
    assert_eq!((host.authorization, host.link, host.generation), (None, None, Some(4)));
    let retimer =
        Retimer { port: 1, index: 1, vendor: Some(0x8087), device: Some(0x15ee), nvm_version: None };
    assert_eq!(host.retimers, [retimer]);
    assert_eq!(first.authorization, Some(Authorization::Yes));
    assert_eq!(
        (first.vendor, first.device, first.generation, first.boot),
        (Some(0x127), Some(2), Some(3), true)
    );
    assert_eq!((first.vendor_name.as_deref(), first.device_name.as_deref()), (Some("Razer"), Some("Core X")));
    assert_eq!(first.unique_id.unwrap().to_string(), "d2030000-00a0-751e-a3f4-c0e5ae7b0d30");
    let link = first.link.unwrap();
    assert_eq!((link.receive.rate(), link.transmit.rate()), (40_000, 20_000));
    let ports: Vec<_> = first.ports.iter().map(|port| (port.number, port.link)).collect();
    assert_eq!(ports, [(1, PortLink::None), (3, PortLink::Usb4)]);
    assert_eq!((second.authorization, second.link), (Some(Authorization::No), None));
}

#[test]
fn what_makes_no_sense_reads_as_absent() {
    let bus = Bus::new();
    bus.domain(7, None, &[("security", "\u{1b}[2Jnonsense\n"), ("iommu_dma_protection", "maybe\n")]);
    let long = "x".repeat(4096);
    bus.router(
        "7-1",
        &[
            ("authorized", "9\n"),
            ("unique_id", "none\n"),
            ("vendor", "0x12345\n"),
            ("device_name", "evil\u{1b}[31m\u{7}name\n"),
            ("vendor_name", &long),
            ("generation", "-1\n"),
            ("rx_speed", "99999999999.0 Gb/s\n"),
            ("rx_lanes", "2\n"),
            ("tx_speed", "20.00 Gb/s\n"),
            ("tx_lanes", "2\n"),
            ("usb4_portx/link", "usb4\n"),
            ("usb4_port2/link", "surprise\n"),
        ],
    );
    // Of a domain that is not there, and no names of the bus.
    for name in ["9-1", "7-1:1", "7-1:a.b", "domainx", "7-10001", "domain"] {
        bus.other(name, &[("authorized", "1\n")]);
    }
    let domains = bus.scan();
    let [domain] = &*domains else { panic!("{domains:?}") };
    assert_eq!(domain.security, Security::Other("[2Jnonsense".into()));
    assert_eq!(
        (domain.host_interface, domain.iommu_dma_protection, domain.deauthorization),
        (None, None, false)
    );
    let [_, router] = &*domain.routers else { panic!("{domains:?}") };
    assert_eq!((router.authorization, router.unique_id, router.vendor), (None, None, None));
    assert_eq!((router.generation, router.link), (None, None));
    assert_eq!(router.device_name.as_deref(), Some("evil[31mname"));
    assert_eq!(router.vendor_name.as_ref().map(String::len), Some(64));
    assert_eq!(router.ports, [Port { number: 2, link: PortLink::Unknown, connector: None }]);
}

/// Ports of the root bus that belong to the processor's own host interface, with an enclosure behind the first, a dock and
/// another enclosure in a row behind it.
fn integrated() -> Bus {
    let bus = Bus::new();
    bus.0.add(&SimFunction::new(address("0000:00:0d.2"), 0x8086, 0x9a1b, 0x0c_0340)).unwrap();
    bus.domain(0, Some("0000:00:0d.2"), &[]);
    bus.function("0000:00:07.0", None, false);
    bus.linked("0000:00:07.0", "0000:00:0d.2");
    bus.function("0000:01:00.0", Some("0000:00:07.0"), true);
    bus.function("0000:02:00.0", Some("0000:01:00.0"), true);
    bus.function("0000:03:00.1", Some("0000:02:00.0"), true);
    bus.function("0000:02:01.0", Some("0000:01:00.0"), true);
    bus.function("0000:04:00.0", Some("0000:02:01.0"), true);
    bus.function("0000:05:00.0", Some("0000:04:00.0"), true);
    bus.function("0000:06:00.1", Some("0000:05:00.0"), true);
    // A slot of the board.
    bus.function("0000:00:01.0", None, false);
    bus.function("0000:10:00.1", Some("0000:00:01.0"), false);
    bus
}

#[test]
fn functions_behind_tunnels_are_known() {
    let check = |bus: &Bus, basis: Basis, expect: &[(&str, Via)]| {
        let found: Vec<(String, Via)> = bus
            .tunnels()
            .into_iter()
            .filter(|tunnel| {
                assert_eq!(tunnel.basis, basis);
                tunnel.function.function() == 1
            })
            .map(|tunnel| (tunnel.function.to_string(), tunnel.via))
            .collect();
        let expect: Vec<(String, Via)> =
            expect.iter().map(|(function, via)| ((*function).to_owned(), via.clone())).collect();
        assert_eq!(found, expect);
    };
    let (near, far) = ("0000:03:00.1", "0000:06:00.1");
    for (release, basis) in
        [("6.13.0-rc1", Basis::Linux), ("7.2.11", Basis::Linux), ("6.12.9", Basis::Inferred)]
    {
        let bus = integrated();
        bus.release(release);
        check(&bus, basis, &[(near, Via::Unknown), (far, Via::Unknown)]);
        bus.authorized("0-1");
        check(&bus, basis, &[(near, Via::Only(route("0-1"))), (far, Via::Only(route("0-1")))]);
        bus.authorized("0-301");
        check(&bus, basis, &[(near, Via::Depth(route("0-1"))), (far, Via::Depth(route("0-301")))]);
        // One that waits is no candidate, and one of another host interface neither.
        bus.router("0-3", &[("authorized", "0\n")]);
        bus.domain(1, None, &[]);
        bus.authorized("1-1");
        check(&bus, basis, &[(near, Via::Depth(route("0-1"))), (far, Via::Depth(route("0-301")))]);
        bus.authorized("0-5");
        let both = Via::OneOf(vec![route("0-1"), route("0-5"), route("0-301")]);
        check(&bus, basis, &[(near, both), (far, Via::Depth(route("0-301")))]);
    }
}

#[test]
fn a_controller_in_a_slot_is_not_behind_its_own_tunnels() {
    // Its switch, host interface and USB controller, and an enclosure with a switch.
    let bus = Bus::new();
    bus.release("6.12.9");
    bus.function("0000:00:1c.0", None, false);
    bus.function("0000:01:00.0", Some("0000:00:1c.0"), true);
    bus.function("0000:02:00.0", Some("0000:01:00.0"), true);
    bus.function("0000:02:01.0", Some("0000:01:00.0"), true);
    bus.function("0000:03:00.1", Some("0000:02:00.0"), true);
    bus.function("0000:04:00.0", Some("0000:02:01.0"), true);
    bus.function("0000:05:00.0", Some("0000:04:00.0"), true);
    bus.function("0000:06:00.1", Some("0000:05:00.0"), true);
    bus.domain(0, Some("0000:03:00.1"), &[]);
    bus.authorized("0-1");
    let functions: Vec<String> = bus.tunnels().iter().map(|tunnel| tunnel.function.to_string()).collect();
    assert_eq!(functions, ["0000:04:00.0", "0000:05:00.0", "0000:06:00.1"]);
    assert!(bus.tunnels().iter().all(|tunnel| tunnel.via == Via::Only(route("0-1"))));
    assert_eq!(bus.tunnels()[0].root_port, address("0000:00:1c.0"));
}

proptest! {
    #[test]
    fn routes_are_read_as_they_are_written(domain: u32, ports in prop::collection::vec(1u8..=255, 0..8)) {
        let path = ports.iter().rev().fold(0, |path, &port| path << 8 | u64::from(port));
        let route = Route { domain, path };
        prop_assert_eq!(route.to_string().parse(), Ok(route));
        prop_assert_eq!(route.depth() as usize, ports.len());
        prop_assert_eq!(route.port(), ports.last().copied());
    }

    #[test]
    fn any_text_is_a_route_or_not(
        text in "[0-9]{1,3}-[0-9a-fA-F]{1,15}|[0-9a-f]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-f]{12}|[0-9a-f-]{0,40}|.*",
    ) {
        // What is read is what was written, but for leading zeros and capital letters.
        let plain = |text: &str| text.to_lowercase().split('-').map(|part| {
            let part = part.trim_start_matches('0');
            if part.is_empty() { "0".to_owned() } else { part.to_owned() }
        }).collect::<Vec<_>>();
        if let Ok(route) = text.parse::<Route>() {
            prop_assert!(route.depth() <= 7);
            prop_assert_eq!(plain(&route.to_string()), plain(&text));
        }
        let is_id = text.len() == 36 && [8, 13, 18, 23].iter().all(|&at| text.as_bytes()[at] == b'-')
            && text.bytes().filter(u8::is_ascii_hexdigit).count() == 32;
        match text.parse::<UniqueId>() {
            Ok(id) => prop_assert_eq!(id.to_string(), text.to_lowercase()),
            Err(_) => prop_assert!(!is_id, "{text} is one"),
        }
    }
}
