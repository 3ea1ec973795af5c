//! Copies over a simulated enclosure's link, in virtual time. There is nothing behind it that computes but checksums.

use std::time::Duration;

use vm_accel::crc32;
use vm_passthrough::sim::egpu::{SimLink, SplitMix64};
use vm_passthrough::usb4::LinkRates;

use super::{Measured, SIZES, SMALL, spread};
use crate::api::{BenchmarkChecks, BenchmarkDirection, BenchmarkLatency, BenchmarkMemory, BenchmarkTransfer};
use crate::failure::Failure;

/// How often each copy is made.
const COUNT: usize = 5;
/// How often a chunk that arrives corrupted is sent again, as with real ones.
const RETRIES: u32 = 5;

/// What the model of a tunnel makes of copies over a link with these rates, and the errors of `link`.
///
/// # Errors
/// When the simulated link goes down, or a checked chunk stays corrupted.
pub(crate) fn simulate(
    name: &str,
    rates: LinkRates,
    link: &SimLink,
    checked: bool,
) -> Result<Measured, Failure> {
    let mut random = SplitMix64::new(1);
    let mut checks = BenchmarkChecks { chunks: 0, corrupted: 0, resent: 0 };
    let mut measured = Measured { device: format!("{name}, simulated"), ..Measured::default() };
    for direction in [BenchmarkDirection::ToDevice, BenchmarkDirection::FromDevice] {
        let rate = match direction {
            BenchmarkDirection::ToDevice => rates.transmit.rate(),
            BenchmarkDirection::FromDevice => rates.receive.rate(),
        };
        // As the model itself has it: 32 Gb/s of 40.
        let link = SimLink { rate: rate / 5 * 4, ..link.clone() };
        let mut seconds = |bytes: u64, checks: Option<&mut BenchmarkChecks>| -> Result<Vec<f64>, Failure> {
            let mut checks = checks;
            let mut copy = Copy { data: vec![0; bytes as usize], link: &link, random: &mut random };
            let mut one = || copy.run(checks.as_deref_mut()).map(|duration| duration.as_secs_f64());
            (0..COUNT).map(|_| one()).collect()
        };
        for bytes in SIZES {
            let rates = |seconds: Vec<f64>| {
                spread(seconds.into_iter().map(|seconds| bytes as f64 / seconds).collect())
            };
            let rate = rates(seconds(bytes, None)?);
            let safe = checked.then(|| seconds(bytes, Some(&mut checks))).transpose()?.map(rates);
            measured.transfers.push(BenchmarkTransfer {
                memory: BenchmarkMemory::Pinned,
                direction,
                bytes,
                percent_of_link: None,
                // Of times: the reciprocal of the ratio of rates.
                checked_time_ratio: safe.as_ref().map(|safe| rate.median / safe.median),
                checked: safe,
                rate,
            });
        }
        measured.latencies.push(BenchmarkLatency {
            direction,
            bytes: SMALL,
            seconds: spread(seconds(SMALL, None)?),
        });
    }
    measured.checks = checked.then_some(checks);
    Ok(measured)
}

/// A copy of zeros.
struct Copy<'a> {
    data: Vec<u8>,
    link: &'a SimLink,
    random: &'a mut SplitMix64,
}

impl Copy<'_> {
    /// Makes it, with checks in chunks, and answers how long that takes.
    fn run(&mut self, checks: Option<&mut BenchmarkChecks>) -> Result<Duration, Failure> {
        let Self { data, link, random } = self;
        let mut carry = |bytes: &mut [u8]| link.carry(bytes, random).map_err(Failure::failed);
        let Some(checks) = checks else { return Ok(carry(data)?.duration) };
        let mut time = Duration::ZERO;
        for (number, chunk) in data.chunks_mut(crc32::BYTES as usize).enumerate() {
            checks.chunks += 1;
            let mut left = RETRIES;
            loop {
                chunk.fill(0);
                let carried = carry(chunk)?;
                time += carried.duration;
                // What arrived as it was sent has the sum that it had.
                if carried.corrupted == 0 || crc32fast::hash(chunk) == crc32fast::hash(&vec![0; chunk.len()])
                {
                    break;
                }
                checks.corrupted += 1;
                left = left.checked_sub(1).ok_or_else(|| {
                    Failure::failed(format_args!(
                        "chunk {number} of a checked copy arrived corrupted {} times in a row (simulated); the link corrupts too \
                         much: `vm-service egpu inject corrupt 0` ends that",
                        RETRIES + 1
                    ))
                })?;
                checks.resent += 1;
            }
        }
        // The device's last sums come back after the last chunk.
        Ok(time + self.link.round_trip())
    }
}
