//! The scenarios, one file each.

mod bare_edu;
mod bench;
mod host_ready;
mod linux_nvme;

use crate::scenario::Scenario;

/// Those that `cargo testbed` runs when none is named.
pub const ALL: &[Scenario] = &[host_ready::SCENARIO, bare_edu::SCENARIO, linux_nvme::SCENARIO];

/// Those that measure, run only when named.
pub const BENCHMARKS: &[Scenario] = &[bench::SCENARIO];
