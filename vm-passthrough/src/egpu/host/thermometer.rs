//! Asks drivers how hot their functions are, without waiting for one that never answers.

use crate::pci::{self, PciIds};
use crate::telemetry::{Answer, Reader, Watch};
use crate::{Host, PciAddress, deadlines};

/// The threads that ask, one for each function.
#[derive(Debug, Default)]
pub(super) struct Thermometer {
    asked: Vec<(PciAddress, PciIds)>,
    watch: Watch,
}

impl Thermometer {
    /// The temperature of the hottest of these functions in thousandths of a degree Celsius; `None` where no driver tells.
    pub(super) fn hottest(&mut self, host: &Host, functions: &[(PciAddress, PciIds)]) -> Option<i32> {
        if self.asked != functions {
            let there = functions.iter().filter_map(|(address, _)| pci::read_function(host, *address).ok());
            let readers: Vec<Reader> = there.map(|function| Reader::new(host, &function, None)).collect();
            if let Err(error) = self.watch.watch(readers) {
                tracing::warn!("not every temperature is known: {error}");
            }
            self.asked = functions.to_vec();
        }
        let answers = self.watch.read(deadlines::HEARTBEAT).into_values();
        let celsius = answers.filter_map(|answer| match answer {
            Answer::Told(_, told) => told.temperature.or(told.hot_spot),
            Answer::Gone | Answer::Waiting(_) => None,
        });
        celsius.map(|celsius| (celsius * 1000.0).round() as i32).max()
    }
}
