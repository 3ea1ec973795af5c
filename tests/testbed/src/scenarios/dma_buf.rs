//! Memory that the processor's accelerator imports as a dma-buf, which this machine's Linux kernel may not have.

use std::time::Duration;

use anyhow::Result;

use crate::agent::{DMA_BUF, L1};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dma-buf",
    about: "a worker on the processor and another program take turns at a dma-buf",
    // The stock kernel may be without /dev/udmabuf.
    variants: Variants::Only(Variant::Iommufd),
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 512,
    deadline: Duration::from_secs(600),
    contents: Contents { library_examples: true, ..Contents::NONE },
    l1,
    l2: None,
};

fn l1(l1: &mut L1) -> Result<()> {
    let ended = l1.program(DMA_BUF, &[], Duration::from_secs(120))?.succeeded()?;
    l1.prove(ended.stdout.contains("100 turns of 1048576 bytes each way are right"), "100 turns are right")
}
