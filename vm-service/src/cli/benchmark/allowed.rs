//! What the link to a GPU allows, to compare copies with.

use vm_passthrough::pci::Link;
use vm_passthrough::usb4::{LinkRates, tunnelled_bytes};

use crate::api::BenchmarkLink;
use crate::text::describe;

/// The payload of a TLP that is reckoned with: the smallest that there is as a maximum (Max_Payload_Size).
const PAYLOAD: u64 = 128;

/// The most bytes that a link allows in a second.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Allowed {
    /// From the host to the GPU.
    pub(crate) to_device: f64,
    /// From the GPU to the host.
    pub(crate) from_device: f64,
    /// What was reckoned with.
    pub(crate) basis: String,
}

impl From<&Allowed> for BenchmarkLink {
    fn from(allowed: &Allowed) -> Self {
        Self { to_device: allowed.to_device, from_device: allowed.from_device, basis: allowed.basis.clone() }
    }
}

/// What is allowed by the rates of a tunnel's router, where it is one, else by a PCI Express link that is up.
pub(crate) fn allowed(tunnel: Option<Option<LinkRates>>, link: Option<Link>) -> Option<Allowed> {
    match tunnel {
        Some(rates) => {
            let is_up = |rates: &LinkRates| rates.transmit.rate() > 0 && rates.receive.rate() > 0;
            rates.filter(is_up).map(of_tunnel)
        }
        None => link.filter(|link| link.speed > 0 && link.width > 0).map(of_link),
    }
}

fn of_tunnel(rates: LinkRates) -> Allowed {
    let share = PAYLOAD as f64 / tunnelled_bytes(PAYLOAD) as f64;
    let bytes = |megabits: u32| f64::from(megabits) * 1e6 / 8.0 * share;
    Allowed {
        to_device: bytes(rates.transmit.rate()),
        from_device: bytes(rates.receive.rate()),
        basis: format!(
            "the enclosure's link of {}, of which {:.0} % is payload: {PAYLOAD} bytes of {} on the lanes (PCI Express Base 6.0, \
             2.2.1 and 3.6.1; USB4 2.0, chapter 5); the routers may reserve some of it",
            describe::link_rates(rates),
            share * 100.0,
            tunnelled_bytes(PAYLOAD)
        ),
    }
}

fn of_link(link: Link) -> Allowed {
    // PCI Express Base 6.0, 4.2: 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, then flits of 256 bytes with 236 of TLPs.
    let (of, all) = match link.speed {
        0..=5_000 => (8, 10),
        5_001..=32_000 => (128, 130),
        _ => (236, 256),
    };
    let bytes = f64::from(link.speed) * 1e6 * f64::from(link.width) / 8.0 * f64::from(of) / f64::from(all);
    Allowed {
        to_device: bytes,
        from_device: bytes,
        basis: format!(
            "PCI Express of {} GT/s and {} lanes, with {of} of {all} of its encoding and nothing for headers (PCI Express Base 6.0, 4.2)",
            f64::from(link.speed) / 1000.0,
            link.width
        ),
    }
}

#[cfg(test)]
mod tests {
    use vm_passthrough::usb4::Lanes;

    use super::*;

    #[test]
    fn a_link_allows_its_rate_less_what_carries_it() {
        let check = |tunnel, link, expect: Option<(f64, f64)>| {
            let got = allowed(tunnel, link).map(|allowed| {
                let gigabytes = |bytes: f64| (bytes / 1e7).round() / 100.0;
                (gigabytes(allowed.to_device), gigabytes(allowed.from_device))
            });
            assert_eq!(got, expect, "{tunnel:?} {link:?}");
        };
        let lanes = |count| Lanes { speed: 20_000, count };
        let pcie = |speed, width| Some(Link { speed, width, max_speed: 64_000, max_width: 16 });
        let rates = LinkRates { receive: lanes(2), transmit: lanes(2) };
        // 40 Gb/s, 128 of 156 bytes; what PCI Express says there is not asked.
        check(Some(Some(rates)), pcie(2_500, 1), Some((4.1, 4.1)));
        check(Some(Some(LinkRates { transmit: lanes(6), ..rates })), None, Some((12.31, 4.1)));
        check(Some(None), pcie(2_500, 1), None);
        check(Some(Some(LinkRates { receive: lanes(0), ..rates })), None, None);
        check(None, pcie(32_000, 16), Some((63.02, 63.02)));
        check(None, pcie(8_000, 4), Some((3.94, 3.94)));
        check(None, pcie(5_000, 1), Some((0.5, 0.5)));
        check(None, pcie(64_000, 16), Some((118.0, 118.0)));
        check(None, pcie(0, 0), None);
        check(None, None, None);
    }
}
