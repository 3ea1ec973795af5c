//! A bare guest shares the host's CPU as an accelerator: it sends kernels, and they work on its own memory.

use std::time::Duration;

use anyhow::Result;

use crate::agent::{Guest, GuestPlan, L1};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bare-accel",
    about: "a bare guest launches kernels on its own memory through a shared accelerator; one that never ends is stopped; a matrix product and attention are right",
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

/// The accelerator of the guests in these scenarios.
pub(super) const SHARED: &str = "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"32M\"\ndeadline = \"1s\"\n";
/// The same with time for some ten million multiplications, which take seconds on an emulated processor.
const PATIENT: &str = "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"32M\"\ndeadline = \"30s\"\n";
pub(super) const TIMEOUT: Duration = Duration::from_secs(600);

fn l1(l1: &mut L1) -> Result<()> {
    let guest = Guest::start(l1, &GuestPlan::sharing("accel", "accel", SHARED))?;
    let ended = guest.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(ended.console.contains("log: "), "the guest's log says why its kernel was stopped".to_owned())?;
    let tiles = Guest::start(l1, &GuestPlan::sharing("tiles", "accel-tiles launches=1", PATIENT))?;
    tiles.end(TIMEOUT)?.succeeded(l1).map(drop)
}
