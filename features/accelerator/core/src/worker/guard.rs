//! Launches that can be stopped: their cancel flags, and what became of them.
//!
//! A guarded launch takes a cancel flag, which host and device both reach, and releases it when the worker has seen its
//! end. A graph keeps the cancel flags of its launches until it is gone: they are 0 as long as none of its replays was
//! stopped, and set back when none is on the device any more.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use vm_abi::Guard;

use super::watch::{CancelFlag, CancelFlags, Words};
use crate::artifact::Layout;
use crate::error::{Error, Result};
use crate::launch::Limits;
use crate::memory::Memory;

/// How many cancel flags a worker has: more than launches wait on a device.
const COUNT: u32 = 4096;
/// Bytes of them.
pub(super) const BYTES: u64 = 4 * COUNT as u64;
/// Cancel flags that graphs leave to other launches.
const KEPT: usize = 1024;

/// The cancel flags of a worker.
pub(super) struct Guards {
    memory: Memory,
    free: Vec<u32>,
    pub(super) armed: Arc<CancelFlags>,
}

/// A launch that has a cancel flag, and what it may take.
pub(super) struct Guarded {
    slot: u32,
    layout: Arc<Layout>,
    limits: Limits,
}

impl Guarded {
    /// How often each thread may begin the body of a loop.
    pub(super) fn fuel(&self) -> u64 {
        self.limits.fuel
    }

    /// How long it may take.
    pub(super) fn time(&self) -> Duration {
        self.limits.time
    }
}

impl Guards {
    /// All cancel flags, at 0, in `memory` of [`BYTES`] bytes, which the host sees.
    pub(super) fn new(memory: Memory) -> Result<Self> {
        memory.region().write_host(&[0; BYTES as usize])?;
        Ok(Self { memory, free: (0..COUNT).rev().collect(), armed: CancelFlags::new()? })
    }

    /// A cancel flag for a launch; `None` when all are taken, for a graph's also when few are left.
    pub(super) fn take(&mut self, graph: bool, layout: &Arc<Layout>, limits: Limits) -> Option<Guarded> {
        if graph && self.free.len() <= KEPT {
            return None;
        }
        let slot = self.free.pop()?;
        Some(Guarded { slot, layout: Arc::clone(layout), limits })
    }

    /// Takes a cancel flag back.
    pub(super) fn give(&mut self, guarded: &Guarded) {
        self.host(guarded).clear();
        self.free.push(guarded.slot);
    }

    /// The device's address of a cancel flag.
    pub(super) fn address(&self, guarded: &Guarded) -> u64 {
        self.memory.address() + 4 * u64::from(guarded.slot)
    }

    fn host(&self, guarded: &Guarded) -> CancelFlag {
        // SAFETY: the memory has that many words and is aligned to 256; it is freed after `Drop` has closed what was
        // armed, and the host reaches it here only.
        unsafe { CancelFlag::new(self.memory.host_address() + 4 * u64::from(guarded.slot)) }
    }

    /// The cancel flag of one launch, to be armed.
    pub(super) fn word(&self, guarded: &Guarded) -> Words {
        Words::One(self.host(guarded))
    }

    /// The cancel flags of a graph, to be armed together.
    pub(super) fn words(&self, guarded: &[Guarded]) -> Words {
        Words::Many(guarded.iter().map(|guarded| self.host(guarded)).collect())
    }

    /// What became of a launch that has ended.
    pub(super) fn outcome(&self, guarded: &Guarded) -> Result<()> {
        let kernel = || guarded.layout.signature.entry.clone();
        match self.host(guarded).get() {
            0 => Ok(()),
            Guard::OUT_OF_FUEL => Err(Error::OutOfFuel { kernel: kernel(), fuel: guarded.limits.fuel }),
            _ => Err(Error::DeadlineExceeded { kernel: kernel(), limit: guarded.limits.time }),
        }
    }

    /// Sets the cancel flags of a graph back, none of whose replays is on the device.
    pub(super) fn reset(&self, guarded: &[Guarded]) {
        guarded.iter().for_each(|guarded| self.host(guarded).clear());
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        self.armed.close();
    }
}

/// The time that a graph of such launches may take.
pub(super) fn time(guarded: &[Guarded]) -> Duration {
    guarded.iter().fold(Duration::ZERO, |sum, guarded| sum.saturating_add(guarded.limits.time))
}
