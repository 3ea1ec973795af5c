//! Interrupt vectors from the device to the guest: an eventfd each, which VFIO signals and the VMM's route takes to
//! the guest's interrupt controller.
//!
//! Eventfd and route are made when the guest first unmasks a vector, since a device may have 2048 vectors of which
//! a driver uses a few. While a vector is masked its route is, and the eventfd remembers what came.
//!
//! Where VFIO can add vectors one by one (Linux 6.5 for MSI-X), each costs one call. Elsewhere all must be disabled
//! to enable more: then the number doubles, so that n vectors cost O(n) in all, and every vector in use is signalled
//! once afterwards, because what came in between is lost. A driver takes an interrupt too many; one too few hangs it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{DeviceError, MsiMessage, RouteId, Vmm, VmmError};
use crate::vfio::{DeviceFile, IrqTrigger, VfioError};

/// The vectors of MSI or of MSI-X.
#[derive(Debug)]
pub(super) struct Vectors {
    file: Arc<dyn DeviceFile>,
    vmm: Arc<dyn Vmm>,
    /// VFIO's interrupt index.
    index: u32,
    /// Whether VFIO can enable more vectors while some are enabled.
    growable: bool,
    /// Vectors that VFIO has enabled; 0 while the interrupt is off.
    enabled: u32,
    /// One per vector that the device has.
    lines: Vec<Option<Line>>,
    /// Lines whose route the VMM could not remove.
    stale: Vec<Line>,
}

/// A vector in use.
#[derive(Debug)]
struct Line {
    trigger: OwnedFd,
    route: RouteId,
    message: Option<MsiMessage>,
}

impl Vectors {
    /// All off.
    pub(super) fn new(
        file: Arc<dyn DeviceFile>,
        vmm: Arc<dyn Vmm>,
        index: u32,
        count: u32,
        growable: bool,
    ) -> Self {
        let lines = (0..count).map(|_| None).collect();
        Self { file, vmm, index, growable, enabled: 0, lines, stale: Vec::new() }
    }

    /// Vectors that VFIO has enabled; 0 while the interrupt is off.
    pub(super) fn enabled(&self) -> u32 {
        self.enabled
    }

    /// Vectors that the device has.
    pub(super) fn count(&self) -> u32 {
        self.lines.len() as u32
    }

    /// Turns the interrupt on with the first vector enabled but dropped: devices look at their own enable bit, long
    /// before a guest unmasks a vector.
    pub(super) fn enable(&mut self) -> Result<(), DeviceError> {
        if self.enabled == 0 {
            self.file.set_triggers(self.index, 0, &[IrqTrigger::None])?;
            self.enabled = 1;
        }
        Ok(())
    }

    /// Turns the interrupt on with `count` vectors, or the largest power of two that the host has left; all are masked.
    /// Returns how many.
    pub(super) fn enable_all(&mut self, mut count: u32) -> Result<u32, DeviceError> {
        for vector in 0..count {
            self.make(vector)?;
        }
        while self.enabled == 0 {
            match self.file.set_triggers(self.index, 0, &self.triggers(count)) {
                Ok(()) => self.enabled = count,
                Err(VfioError::TooFewVectors { available, .. }) if (1..count).contains(&available) => {
                    count = 1 << available.ilog2();
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(count)
    }

    /// Gives a vector its message, or masks it.
    pub(super) fn set(&mut self, vector: u32, message: Option<MsiMessage>) -> Result<(), DeviceError> {
        let Some(line) = self.lines.get(vector as usize) else { return Ok(()) };
        match line {
            None if message.is_none() => return Ok(()),
            None => self.wire(vector)?,
            Some(line) if line.message == message => return Ok(()),
            Some(_) => {}
        }
        if let Some(Some(line)) = self.lines.get_mut(vector as usize) {
            self.vmm.set_route(line.route, message)?;
            line.message = message;
        }
        Ok(())
    }

    /// Which of the vectors `first..first + 64` came while they were masked.
    pub(super) fn pending(&self, first: u32) -> u64 {
        let masked: Vec<(usize, &Line)> = self
            .lines
            .iter()
            .skip(first as usize)
            .take(64)
            .enumerate()
            .filter_map(|(bit, line)| Some((bit, line.as_ref()?)))
            .filter(|(_, line)| line.message.is_none())
            .collect();
        if masked.is_empty() {
            return 0;
        }
        let mut fds: Vec<PollFd<'_>> =
            masked.iter().map(|(_, line)| PollFd::new(&line.trigger, PollFlags::IN)).collect();
        if let Err(error) = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            tracing::debug!(%error, "pending interrupts can't be asked for");
            return 0;
        }
        masked
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| fd.revents().contains(PollFlags::IN))
            .fold(0, |bits, ((bit, _), _)| bits | 1 << bit)
    }

    /// Turns the interrupt off and forgets all vectors. Does all of it even if a part fails, and returns the first
    /// failure; turning it off again does the rest.
    pub(super) fn disable(&mut self) -> Result<(), DeviceError> {
        let mut result = Ok(());
        if self.enabled != 0 {
            result = self.file.disable_irqs(self.index).map_err(DeviceError::from);
            if result.is_ok() {
                self.enabled = 0;
            }
        }
        let lines = std::mem::take(&mut self.stale);
        for line in lines.into_iter().chain(self.lines.iter_mut().filter_map(Option::take)) {
            if let Err(error) = self.vmm.remove_route(line.route) {
                result = result.and(Err(error.into()));
                self.stale.push(line);
            }
        }
        result
    }

    /// Makes a vector's eventfd and route; not yet known to VFIO.
    fn make(&mut self, vector: u32) -> Result<(), DeviceError> {
        let Some(line @ None) = self.lines.get_mut(vector as usize) else { return Ok(()) };
        let trigger = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| VmmError::new("make an interrupt's eventfd", error))?;
        let route = self.vmm.add_route(trigger.as_fd())?;
        *line = Some(Line { trigger, route, message: None });
        Ok(())
    }

    /// Makes a vector and has VFIO signal it.
    fn wire(&mut self, vector: u32) -> Result<(), DeviceError> {
        self.make(vector)?;
        let wired = if self.growable || vector < self.enabled {
            let line = self.lines.get(vector as usize).and_then(Option::as_ref);
            self.file.set_triggers(self.index, vector, &[trigger(line)]).map_err(DeviceError::from)
        } else {
            self.grow(vector + 1)
        };
        if wired.is_ok() {
            self.enabled = self.enabled.max(vector + 1);
        } else if let Some(line) = self.lines.get_mut(vector as usize).and_then(Option::take)
            && let Err(error) = self.vmm.remove_route(line.route)
        {
            self.stale.push(line);
            return Err(error.into());
        }
        wired
    }

    /// Has VFIO enable at least `need` vectors where it has to disable all first.
    fn grow(&mut self, need: u32) -> Result<(), DeviceError> {
        let before = self.enabled;
        let wish = need.max(before.saturating_mul(2)).min(self.count());
        let mut result = self.file.disable_irqs(self.index);
        let off = result.is_ok();
        // The host may not have as many to spare; then exactly what is needed, and at worst what there was.
        for count in [wish, need, before] {
            if count == 0 {
                break;
            }
            match self.file.set_triggers(self.index, 0, &self.triggers(count)) {
                Ok(()) => {
                    self.enabled = count;
                    if count >= need {
                        result = Ok(());
                    }
                    break;
                }
                Err(error) => {
                    self.enabled = if off { 0 } else { before };
                    result = Err(error);
                }
            }
        }
        for line in self.lines.iter().take(before as usize).flatten() {
            if let Err(error) = rustix::io::write(&line.trigger, &1u64.to_ne_bytes()) {
                tracing::debug!(%error, "an eventfd is full; its interrupt is pending anyway");
            }
        }
        Ok(result?)
    }

    /// What VFIO is to do for each of the first `count` vectors.
    fn triggers(&self, count: u32) -> Vec<IrqTrigger<'_>> {
        self.lines.iter().take(count as usize).map(|line| trigger(line.as_ref())).collect()
    }
}

/// What VFIO is to do for a vector.
fn trigger(line: Option<&Line>) -> IrqTrigger<'_> {
    line.map_or(IrqTrigger::None, |line| IrqTrigger::Eventfd(line.trigger.as_fd()))
}
