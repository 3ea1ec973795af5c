//! Copies over a simulated enclosure's link, in virtual time. There is nothing behind it that computes.

use vm_passthrough::sim::egpu::{SimLink, SplitMix64};
use vm_passthrough::usb4::LinkRates;

use super::{Measured, SIZES, SMALL, spread};
use crate::failure::Failure;
use crate::json::{BenchmarkDirection, BenchmarkLatency, BenchmarkMemory, BenchmarkTransfer};

/// How often each copy is made.
const COUNT: usize = 5;

/// What the model of a tunnel makes of copies over a link with these rates.
///
/// # Errors
/// When the simulated link goes down.
pub(crate) fn simulate(name: &str, rates: LinkRates) -> Result<Measured, Failure> {
    let mut random = SplitMix64::new(1);
    let mut measured = Measured { device: format!("{name}, simulated"), ..Measured::default() };
    for direction in [BenchmarkDirection::ToDevice, BenchmarkDirection::FromDevice] {
        let rate = match direction {
            BenchmarkDirection::ToDevice => rates.transmit.rate(),
            BenchmarkDirection::FromDevice => rates.receive.rate(),
        };
        // As the model itself has it: 32 Gb/s of 40.
        let link = SimLink { rate: rate / 5 * 4, ..SimLink::default() };
        let mut seconds = |bytes: u64| -> Result<Vec<f64>, Failure> {
            let mut data = vec![0; bytes as usize];
            let mut one = || link.carry(&mut data, &mut random).map(|carried| carried.duration.as_secs_f64());
            (0..COUNT).map(|_| one().map_err(Failure::failed)).collect()
        };
        for bytes in SIZES {
            let rates = seconds(bytes)?.into_iter().map(|seconds| bytes as f64 / seconds).collect();
            measured.transfers.push(BenchmarkTransfer {
                memory: BenchmarkMemory::Pinned,
                direction,
                bytes,
                rate: spread(rates),
                percent_of_link: None,
                checked: None,
                checked_time_ratio: None,
            });
        }
        measured.latencies.push(BenchmarkLatency {
            direction,
            bytes: SMALL,
            seconds: spread(seconds(SMALL)?),
        });
    }
    Ok(measured)
}
