//! Which routers are connected, for the log.

use std::collections::BTreeMap;

use super::{Route, Router, UniqueId};

/// Routers as they were seen last; logs those that come and go.
#[derive(Debug, Default)]
pub struct SeenRouters(BTreeMap<Route, Seen>);

#[derive(Clone, Copy, Debug)]
struct Seen {
    instance: Option<u64>,
    id: Option<UniqueId>,
    is_authorised: bool,
}

impl SeenRouters {
    /// Takes all that are connected now. Each that was not connected, is not any more, was replugged meanwhile, or changed whether PCIe
    /// is tunnelled to it, is a record.
    pub fn note<'a>(&mut self, routers: impl IntoIterator<Item = &'a Router>) {
        let mut now = BTreeMap::new();
        for router in routers {
            let (route, id) = (router.route, text(router.unique_id));
            let seen = Seen {
                instance: router.instance,
                id: router.unique_id,
                is_authorised: router.is_authorised(),
            };
            let is_same = |before: &Seen| before.id == seen.id && before.instance == seen.instance;
            let before = self.0.remove(&route).and_then(|before| {
                if is_same(&before) {
                    return Some(before.is_authorised);
                }
                removed(route, before);
                None
            });
            match (before, seen.is_authorised) {
                (None, authorised) => {
                    let names = [router.vendor_name.as_deref(), router.device_name.as_deref()];
                    let name = names.into_iter().flatten().collect::<Vec<_>>().join(" ");
                    tracing::info!(router = %route, id, name, authorised, "router discovered");
                }
                (Some(false), true) => tracing::info!(router = %route, id, "PCIe tunnel built"),
                (Some(true), false) => tracing::info!(router = %route, id, "PCIe tunnel taken down"),
                _ => {}
            }
            now.insert(route, seen);
        }
        for (route, seen) in std::mem::replace(&mut self.0, now) {
            removed(route, seen);
        }
    }
}

fn removed(route: Route, seen: Seen) {
    tracing::info!(router = %route, id = text(seen.id), "router removed");
}

fn text(id: Option<UniqueId>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}
