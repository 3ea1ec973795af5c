//! Metrics of guests' devices, as they were seen last.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::metrics::Labels;
use crate::api::DeviceHealth;

/// What is known of all devices of all guests.
#[derive(Default)]
pub(super) struct DeviceMetrics {
    speed: Family<Labels, Gauge>,
    possible_speed: Family<Labels, Gauge>,
    width: Family<Labels, Gauge>,
    possible_width: Family<Labels, Gauge>,
    power: Family<Labels, Gauge>,
    errors: Family<Labels, Counter>,
    interrupts: Family<Labels, Counter>,
}

impl DeviceMetrics {
    /// Notes the state of a guest's device.
    pub(super) fn note(&self, guest: &str, address: &str, health: &DeviceHealth) {
        let labels = vec![("guest", guest.to_owned()), ("address", address.to_owned())];
        let with = |name, value: &str| [labels.clone(), vec![(name, value.to_owned())]].concat();
        if let Some(link) = health.link {
            let per_second = |megatransfers: u32| i64::from(megatransfers) * 1_000_000;
            self.speed.get_or_create(&labels).set(per_second(link.speed));
            self.possible_speed.get_or_create(&labels).set(per_second(link.possible_speed));
            self.width.get_or_create(&labels).set(link.width.into());
            self.possible_width.get_or_create(&labels).set(link.possible_width.into());
        }
        self.power.get_or_create(&with("state", health.power_state.into())).set(1);
        if let Some(errors) = &health.errors {
            let severities = [
                ("correctable", &errors.correctable),
                ("nonfatal", &errors.nonfatal),
                ("fatal", &errors.fatal),
            ];
            for (severity, count) in severities {
                self.errors.get_or_create(&with("severity", severity)).inc_by(count.total);
            }
        }
        if let Some(interrupts) = health.interrupts {
            self.interrupts.get_or_create(&labels).inc_by(interrupts.total);
        }
    }

    /// Adds them to what is told.
    pub(super) fn register(self, registry: &mut Registry) {
        registry.register(
            "link_transfers_per_second",
            "Speed of the device's PCI Express link, of each lane; 0 when it is down",
            self.speed,
        );
        registry.register(
            "link_possible_transfers_per_second",
            "Highest speed that the device and the port above it can do",
            self.possible_speed,
        );
        registry.register("link_lanes", "Lanes of the device's link; 0 when it is down", self.width);
        registry.register(
            "link_possible_lanes",
            "Most lanes that the device and the port above it can use",
            self.possible_width,
        );
        registry.register("power_state", "1 for the power state that the device has", self.power);
        registry.register(
            "errors",
            "Errors that the device has reported since Linux found it (AER), by severity",
            self.errors,
        );
        registry.register(
            "interrupts",
            "Interrupts of the device that the host has handled, since its vectors were set up",
            self.interrupts,
        );
    }
}
