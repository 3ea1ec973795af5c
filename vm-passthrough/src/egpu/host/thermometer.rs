//! Reads by drivers how hot functions are, without waiting for one that never answers.

use crate::pci::{self, PciIds};
use crate::telemetry::{Answer, Reader, Source, Watch};
use crate::{Host, PciAddress, deadlines, files};

/// The threads that read, one for each function.
#[derive(Debug, Default)]
pub(super) struct Thermometer {
    asked: Vec<(PciAddress, PciIds)>,
    watch: Watch,
    /// Why no temperature is known, though one should be.
    pub(super) blind: Option<String>,
    /// What the last temperature was read from.
    pub(super) sensor: Option<String>,
}

impl Thermometer {
    /// The temperature of the hottest of these functions in thousandths of a degree Celsius; `None` where no driver knows it.
    pub(super) fn hottest(&mut self, host: &Host, functions: &[(PciAddress, PciIds)]) -> Option<i32> {
        if self.asked != functions {
            let there = functions.iter().filter_map(|(address, _)| pci::read_attributes(host, *address).ok());
            let readers: Vec<Reader> = there.map(|function| Reader::new(host, &function, None)).collect();
            if let Err(error) = self.watch.watch(readers) {
                tracing::warn!("not every temperature is known: {error}");
            }
            self.asked = functions.to_vec();
            self.blind = None;
        }
        let (mut hottest, mut why) = (None, Vec::new());
        for (address, answer) in self.watch.read(deadlines::HEARTBEAT) {
            let told = match answer {
                Answer::Told(_, told) => told,
                Answer::Waiting(_) => {
                    why.push(format!("{address}: its driver does not answer"));
                    continue;
                }
                Answer::Gone => continue,
            };
            match (told.temperature.or(told.hot_spot), told.source) {
                (Some(celsius), source) => {
                    let place = if told.temperature.is_some() { "" } else { ", its hot spot" };
                    let sensor = format!("{source} of {address}{place}");
                    hottest = hottest.max(Some(((celsius * 1000.0).round() as i32, sensor)));
                }
                (None, Source::None(reason)) => why.push(format!("{address}: {reason}")),
                (None, source) => why.push(format!("{address}: {source} has no temperature")),
            }
        }
        let (hottest, sensor) = hottest.unzip();
        self.sensor = sensor;
        let is_asleep = || functions.iter().any(|(address, _)| is_asleep(host, *address));
        let is_blind = hottest.is_none() && !why.is_empty() && !is_asleep();
        self.blind = is_blind.then(|| why.join("; "));
        hottest
    }
}

fn is_asleep(host: &Host, function: PciAddress) -> bool {
    let status = files::read_trimmed(&host.pci_device(function).join("power/runtime_status"));
    status.as_deref() == Some("suspended")
}
