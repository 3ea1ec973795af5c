//! How fast a GPU is, as `egpu benchmark` measures it: copies over its link, plain and checked, and what it computes.

mod allowed;
#[cfg(any(feature = "cuda", feature = "rocm", all(test, feature = "cpu")))]
mod compute;
#[cfg(any(feature = "cuda", feature = "rocm", all(test, feature = "cpu")))]
mod device;
mod simulated;

pub(crate) use allowed::{Allowed, allowed};
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub(crate) use device::measure;
pub(crate) use simulated::simulate;

use crate::api::{BenchmarkChecks, BenchmarkLatency, BenchmarkSpread, BenchmarkTransfer};

/// Bytes of the copies that are measured.
pub(crate) const SIZES: [u64; 3] = [1 << 20, 16 << 20, 256 << 20];
/// Bytes of the smallest copy that a latency is measured with.
const SMALL: u64 = 4;

/// What came out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// What was measured, in the driver's words.
    pub(crate) device: String,
    /// Copies.
    pub(crate) transfers: Vec<BenchmarkTransfer>,
    /// How long a small copy takes.
    pub(crate) latencies: Vec<BenchmarkLatency>,
    /// Multiplications and additions of f32 in a second.
    pub(crate) f32_flops: Option<BenchmarkSpread>,
    /// Bytes of the device's memory that are read and written in a second.
    pub(crate) memory: Option<BenchmarkSpread>,
    /// What checked copies came to.
    pub(crate) checks: Option<BenchmarkChecks>,
}

/// How many steps a measurement tells of.
pub(crate) fn steps(checked: bool, sizes: usize) -> u64 {
    // Compiling; each direction by two ways, in each size, and once more if it is checked; latencies; arithmetic and memory.
    let copies = 4 * sizes as u64;
    1 + copies * if checked { 2 } else { 1 } + 2 + 2
}

/// Median, tenth and ninetieth percentile.
fn spread(mut values: Vec<f64>) -> BenchmarkSpread {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    let at = |part: f64| values.get((last * part).round() as usize).copied().unwrap_or_default();
    BenchmarkSpread { median: at(0.5), low: at(0.1), high: at(0.9), count: values.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_what_was_measured() {
        let check = |values: &[f64], expect: [f64; 3]| {
            let got = spread(values.to_vec());
            assert_eq!(([got.low, got.median, got.high], got.count), (expect, values.len()));
        };
        check(&[], [0.0; 3]);
        check(&[7.0], [7.0; 3]);
        let all: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        check(&all, [10.0, 50.0, 90.0]);
    }
}
