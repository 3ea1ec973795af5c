//! Which enclosures are connected.

use super::*;
use crate::usb4::{Authorization, Domain, Lanes, LinkRates, Route, Router, Security};

/// Whether a router is authorised by a policy; none where it is, or the start of the reason.
fn check(
    change: impl FnOnce(&mut Policy, &mut Domain, &mut Router),
    known: bool,
    asked: bool,
    reason: Option<&str>,
) {
    let lanes = Lanes { speed: 20_000, count: 2 };
    let mut router = Router {
        route: Route { domain: 0, path: 1 },
        instance: None,
        unique_id: "d2030000-00a0-751e-a3f4-c0e5ae7b0d30".parse().ok(),
        vendor: None,
        device: None,
        vendor_name: None,
        device_name: None,
        generation: Some(4),
        authorization: Some(Authorization::No),
        boot: false,
        link: Some(LinkRates { receive: lanes, transmit: lanes }),
        nvm_version: None,
        ports: Vec::new(),
        retimers: Vec::new(),
    };
    let mut domain = Domain {
        number: 0,
        host_interface: None,
        security: Security::User,
        iommu_dma_protection: Some(true),
        deauthorization: true,
        routers: Vec::new(),
    };
    let mut policy = Policy::default();
    change(&mut policy, &mut domain, &mut router);
    let judged = policy.judge(&domain, &router, known, asked).map_err(|refusal| refusal.to_string());
    match (judged, reason) {
        (Ok(()), None) => {}
        (Err(refusal), Some(reason)) if refusal.contains(reason) => {}
        (judged, reason) => panic!("{judged:?}, and not {reason:?}"),
    }
}

#[test]
fn who_may_be_authorised() {
    let by =
        |authorise| move |policy: &mut Policy, _: &mut Domain, _: &mut Router| policy.authorise = authorise;
    for (authorise, known, asked, reason) in [
        (Authorise::Never, true, true, Some("no enclosure")),
        (Authorise::Ask, true, false, Some("egpu connect d2030000")),
        (Authorise::Ask, false, true, None),
        (Authorise::Known, false, false, Some("is not known")),
        (Authorise::Known, true, false, None),
        (Authorise::Known, false, true, None),
        (Authorise::Always, false, false, None),
    ] {
        check(by(authorise), known, asked, reason);
    }
}

#[test]
fn what_is_not_safe_or_not_enough_is_refused() {
    check(|_, domain, _| domain.iommu_dma_protection = Some(false), true, true, Some("no DMA protection"));
    check(|_, domain, _| domain.iommu_dma_protection = None, true, true, Some("no DMA protection"));
    let unprotected = |policy: &mut Policy, domain: &mut Domain, _: &mut Router| {
        (policy.dma_protection, domain.iommu_dma_protection) = (false, None);
    };
    check(unprotected, true, true, None);
    check(|_, _, router| router.unique_id = None, true, true, Some("no UUID"));
    for security in [Security::DpOnly, Security::UsbOnly, Security::NoPcie] {
        check(|_, domain, _| domain.security = security.clone(), true, true, Some("allows no PCIe"));
        // The firmware may have built the tunnel all the same.
        let by_firmware = |_: &mut Policy, domain: &mut Domain, router: &mut Router| {
            (domain.security, router.authorization) = (security.clone(), Some(Authorization::Yes));
        };
        check(by_firmware, true, true, None);
    }
    check(|policy, _, _| policy.minimum_rate = 40_000, true, true, None);
    check(
        |policy, _, _| policy.minimum_rate = 40_001,
        true,
        true,
        Some("40 Gb/s and the policy asks for 40.001 Gb/s"),
    );
    let one_lane = |policy: &mut Policy, _: &mut Domain, router: &mut Router| {
        policy.minimum_rate = 40_000;
        router.link =
            router.link.map(|link| LinkRates { transmit: Lanes { count: 1, ..link.transmit }, ..link });
    };
    check(one_lane, true, true, Some("runs on one lane"));
    let no_link = |policy: &mut Policy, _: &mut Domain, router: &mut Router| {
        (policy.minimum_rate, router.link) = (1, None)
    };
    check(no_link, true, true, Some("its link's rate is not known"));
}
