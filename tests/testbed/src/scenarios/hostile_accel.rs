//! A guest does to a shared accelerator's device what no driver should, while another works on the same accelerator.

use std::time::Duration;

use anyhow::Result;

use super::bare_accel::{SHARED, TIMEOUT};
use crate::agent::{Guest, GuestPlan, L1};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "hostile-accel",
    about: "garbage frames, looping chains, ranges outside memory, endless kernels: errors for the guest, right results for its neighbour",
    // No device is passed, so the two would not differ.
    variants: Variants::Only(Variant::Group),
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { accelerators: true, bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

fn l1(l1: &mut L1) -> Result<()> {
    let hostile = Guest::start(l1, &GuestPlan::sharing("hostile", "accel-hostile seed=3", SHARED))?;
    let steady = Guest::start(l1, &GuestPlan::sharing("steady", "accel-steady seconds=20", SHARED))?;
    steady.end(TIMEOUT)?.succeeded(l1)?;
    let ended = hostile.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(
        ended.process.stderr.contains("the worker was ended"),
        "the VMM said that it ended the hostile guest's worker".to_owned(),
    )
}
