//! Which routers are connected, for the log.

use std::collections::BTreeMap;

use super::{Route, Router, UniqueId};

/// Routers as they were seen last; logs those that come and go.
#[derive(Debug, Default)]
pub struct SeenRouters(BTreeMap<Route, (Option<UniqueId>, bool)>);

impl SeenRouters {
    /// Takes all that are connected now. Each that was not connected, is not any more, or changed whether PCIe is tunnelled to it, is
    /// a record.
    pub fn note<'a>(&mut self, routers: impl IntoIterator<Item = &'a Router>) {
        let mut now = BTreeMap::new();
        for router in routers {
            let route = router.route;
            let seen = (router.unique_id, router.is_authorised());
            let id = router.unique_id.map(|id| id.to_string()).unwrap_or_default();
            let before = self.0.remove(&route).filter(|(id, _)| *id == router.unique_id);
            match (before, seen.1) {
                (None, authorised) => {
                    let names = [router.vendor_name.as_deref(), router.device_name.as_deref()];
                    let name = names.into_iter().flatten().collect::<Vec<_>>().join(" ");
                    tracing::info!(router = %route, id, name, authorised, "router discovered");
                }
                (Some((_, false)), true) => tracing::info!(router = %route, id, "PCIe tunnel built"),
                (Some((_, true)), false) => tracing::info!(router = %route, id, "PCIe tunnel taken down"),
                _ => {}
            }
            now.insert(route, seen);
        }
        for (route, (id, _)) in std::mem::replace(&mut self.0, now) {
            let id = id.map(|id| id.to_string()).unwrap_or_default();
            tracing::info!(router = %route, id, "router removed");
        }
    }
}
