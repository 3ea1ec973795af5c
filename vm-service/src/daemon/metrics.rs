//! Metrics for Prometheus: what the daemon counts, and how guests are at the moment of asking.

use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::device_metrics::DeviceMetrics;
use super::guests::{Guests, memory_of};
use crate::api::{DeviceState, EventKind, GuestState, Refusal};

/// Names and values of what a metric is of.
pub(super) type Labels = Vec<(&'static str, String)>;

/// What is counted while the daemon runs.
pub(super) struct Metrics {
    registry: Mutex<Registry>,
    requests: Family<Labels, Counter>,
    durations: Family<Labels, Histogram, fn() -> Histogram>,
    events: Family<Labels, Counter>,
    recovered: Counter,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let (requests, events, recovered) = (Family::default(), Family::default(), Counter::default());
        // From 0.1 ms to 100 s.
        let durations: Family<_, _, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(1e-4, 10.0, 7)));
        let mut registry = Registry::with_prefix("vm_service");
        registry.register("requests", "Requests to the API, by method and status", Family::clone(&requests));
        registry.register(
            "request_duration_seconds",
            "How long requests to the API took, by method",
            Family::clone(&durations),
        );
        registry.register("events", "What happened to guests, by kind", Family::clone(&events));
        registry.register(
            "recovered_functions",
            "PCI functions that guests which died had claimed, and that were released",
            Counter::clone(&recovered),
        );
        Self { registry: Mutex::new(registry), requests, durations, events, recovered }
    }
}

impl Metrics {
    pub(super) fn count_request(&self, method: &Method, status: StatusCode, took: Duration) {
        // A method is anything that a client may write.
        let known = [Method::GET, Method::PUT, Method::POST, Method::DELETE];
        let method = if known.contains(method) { method.to_string() } else { "other".into() };
        let labels = vec![("method", method.clone()), ("status", status.as_u16().to_string())];
        self.requests.get_or_create(&labels).inc();
        self.durations.get_or_create(&vec![("method", method)]).observe(took.as_secs_f64());
    }

    pub(super) fn count_event(&self, kind: EventKind) {
        self.events.get_or_create(&vec![("kind", kind.as_str().to_owned())]).inc();
    }

    pub(super) fn count_recovered(&self) {
        self.recovered.inc();
    }

    /// All metrics, in the format of OpenMetrics.
    ///
    /// # Errors
    /// When the guests can't be listed.
    pub(super) fn text(&self, guests: &Guests) -> Result<String, Refusal> {
        let (resident, devices) = (Family::<Labels, Gauge>::default(), Family::<Labels, Gauge>::default());
        let (ram, vcpus) = (Family::<Labels, Gauge>::default(), Family::<Labels, Gauge>::default());
        let (responsive, pinned) = (Family::<Labels, Gauge>::default(), Family::<Labels, Gauge>::default());
        let (reached, unreached) = (Family::<Labels, Gauge>::default(), Family::<Labels, Gauge>::default());
        let of_devices = DeviceMetrics::default();
        for guest in guests.list()? {
            let labels = vec![("guest", guest.name.clone())];
            let answers = guest.state != GuestState::Unresponsive;
            responsive.get_or_create(&labels).set(answers.into());
            if !guest.is_known() {
                continue;
            }
            let attached = guest.devices.iter().filter(|device| device.state == DeviceState::Attached);
            devices.get_or_create(&labels).set(attached.count() as i64);
            ram.get_or_create(&labels).set(guest.memory as i64);
            vcpus.get_or_create(&labels).set(guest.vcpus.into());
            if let Some(memory) = memory_of(guests.host(), guest.pid) {
                resident.get_or_create(&labels).set(memory.resident as i64);
                pinned.get_or_create(&labels).set(memory.pinned as i64);
            }
            if let Some(peers) = &guest.peer_to_peer {
                reached.get_or_create(&labels).set(peers.mapped_bytes as i64);
                unreached.get_or_create(&labels).set(peers.refused_bytes as i64);
            }
            for device in &guest.devices {
                if let Some(health) = &device.health {
                    of_devices.note(&guest.name, &device.address, health);
                }
            }
        }
        let mut now = Registry::with_prefix("vm_service_guest");
        now.register("responsive", "Whether the guest's process and its VMM answer", responsive);
        now.register("devices", "Devices that the guest has", devices);
        now.register("ram_bytes", "RAM of the guest", ram);
        now.register("vcpus", "vCPUs of the guest", vcpus);
        now.register("resident_bytes", "Resident memory of the guest's processes", resident);
        now.register("dma_bytes", "Memory of the guest that is pinned for its devices", pinned);
        now.register("peer_mapped_bytes", "BARs that the guest's other devices reach by DMA", reached);
        now.register("peer_refused_bytes", "BARs that they do not reach, as they can't be mapped", unreached);
        let mut states = Registry::with_prefix("vm_service_device");
        of_devices.register(&mut states);
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        encode_registry(&mut text, &registry)
            .and_then(|()| encode_registry(&mut text, &now))
            .and_then(|()| encode_registry(&mut text, &states))
            .and_then(|()| encode_eof(&mut text))
            .map_err(Refusal::failed)?;
        Ok(text)
    }
}
