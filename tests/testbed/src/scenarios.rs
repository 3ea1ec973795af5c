//! The scenarios, one file each.

mod host_ready;

use crate::scenario::Scenario;

/// Those that `cargo testbed` runs when none is named.
pub const ALL: &[Scenario] = &[host_ready::SCENARIO];

/// Those that measure, run only when named.
pub const BENCHMARKS: &[Scenario] = &[];
