//! What is done with a simulated eGPU. Each action has a bounded duration in virtual time, and reads back what it did.

use std::fmt;
use std::time::Duration;

use super::model::{Cut, ROUTE, name, reset};
use super::{Ending, SimEgpu, SimStep};
use crate::PciAddress;
use crate::deadlines;
use crate::egpu::{Action, EgpuError, Enclosure, Observation, QUIET, Rung};
use crate::pci::PciIds;

type Result<T, E = EgpuError> = std::result::Result<T, E>;

/// A look at sysfs.
const LOOK: Duration = Duration::from_millis(5);
/// A tunnel is built, or taken down.
const TUNNEL: Duration = Duration::from_millis(300);
/// A guest gives it back.
const GUEST: Duration = Duration::from_secs(1);
/// A reset of functions, and of a bus.
const RESET: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(1200));

fn step(what: &str, reason: impl fmt::Display) -> EgpuError {
    EgpuError::Step { what: what.into(), reason: format!("{reason} (simulated)") }
}

impl SimEgpu {
    /// The identity that a function answers. One that hangs takes the whole deadline.
    fn ask(&mut self, address: PciAddress) -> Result<PciIds> {
        let unsound = |what: String| EgpuError::Unsound { address, what };
        if self.is_tunnelled && self.is_hung() {
            self.advance(deadlines::HEARTBEAT);
            let waited = deadlines::HEARTBEAT.as_secs();
            return Err(unsound(format!("it did not answer within {waited} s (simulated)")));
        }
        let function = self.functions.iter().find(|function| function.address == address);
        let ids = function.filter(|_| self.answers(address)).map(|function| function.ids);
        // A request, and a completion with four bytes, which may arrive corrupted.
        let (vendor, device) = ids.map_or((0, 0), |ids| (ids.vendor, ids.device));
        let mut completion = u32::from(device) << 16 | u32::from(vendor);
        let mut bytes = completion.to_le_bytes();
        match self.link.exchange(&mut [0; 4], &mut bytes, &mut self.random) {
            Ok(carried) => {
                completion = u32::from_le_bytes(bytes);
                self.advance(carried.duration);
            }
            Err(down) => {
                self.advance(down.duration);
                return Err(unsound(format!("{down} (simulated)")));
            }
        }
        let ids = ids.filter(|_| self.answers(address));
        let ids =
            ids.map(|ids| PciIds { vendor: completion as u16, device: (completion >> 16) as u16, ..ids });
        ids.ok_or_else(|| unsound("its config space reads all ones: it is off the bus (simulated)".into()))
    }

    fn check(&mut self, address: PciAddress, ids: PciIds) -> Result<()> {
        match self.ask(address)? {
            said if said == ids => Ok(()),
            said => Err(EgpuError::Unsound {
                address,
                what: format!("it is {said} now, and was {ids} (simulated)"),
            }),
        }
    }

    /// Notes that its users lose it by this.
    fn cut(&mut self, action: Action) {
        let users = self.users();
        self.cuts.extend(users.into_iter().map(|user| Cut { action, user }));
    }

    fn authorise(&mut self) -> Result<()> {
        let what = "have PCIe tunnelled to it";
        if self.is_plugged && self.is_tunnelled {
            return Ok(());
        }
        self.advance(TUNNEL);
        if !self.is_plugged {
            return Err(EgpuError::NotConnected("(simulated)".into()));
        }
        if self.ending(name(SimStep::Authorise)) != Ending::Works {
            return Err(step(what, "the connection manager refuses"));
        }
        if !self.is_tunnelled && !self.functions.is_empty() {
            return Err(step(what, "a driver does not let go of the functions that it had"));
        }
        if !self.is_tunnelled {
            self.build_tunnel();
        }
        Ok(())
    }

    fn enumerate(&mut self) -> Result<()> {
        let is_gpu = |egpu: &Self| egpu.functions.iter().any(|function| Self::is_gpu(&function.ids));
        let is_over = |egpu: &Self| !egpu.is_tunnelled || is_gpu(egpu) && egpu.now >= egpu.changed + QUIET;
        let came = self.wait(deadlines::ENUMERATION, QUIET, is_over);
        if !self.is_tunnelled {
            return Err(step("wait for its functions", "its tunnel was taken down meanwhile"));
        }
        let found: Vec<_> = self.functions.iter().map(|function| (function.address, function.ids)).collect();
        if !came {
            let others = found.iter().map(|(address, _)| *address).collect();
            return Err(EgpuError::NoGpu { route: ROUTE, waited: deadlines::ENUMERATION, others });
        }
        if let Some((_, other)) = found.iter().find(|(_, ids)| Self::is_gpu(ids) && *ids != Self::gpu()) {
            return Err(EgpuError::AnotherGpu {
                enclosure: "(simulated)".into(),
                found: other.to_string(),
                known: Self::gpu().to_string(),
            });
        }
        self.expected = found;
        Ok(())
    }

    fn verify(&mut self) -> Result<()> {
        // Reading wakes it.
        self.is_asleep = false;
        if self.expected.is_empty() {
            return Err(step("verify it", "it has no functions"));
        }
        for (address, ids) in self.expected.clone() {
            self.check(address, ids)?;
            let function = self.functions.iter().find(|function| function.address == address);
            if !function.is_some_and(|function| function.has_bars) {
                let what = "Linux has no room for its BARs (simulated)".into();
                return Err(EgpuError::Unsound { address, what });
            }
        }
        Ok(())
    }

    fn stop_work(&mut self, force: bool) -> Result<()> {
        if force {
            self.advance(LOOK);
            let jobs: Vec<_> =
                self.jobs.iter().map(|job| format!("job {} (simulated)", job.number)).collect();
            if jobs.is_empty() {
                return Ok(());
            }
            if self.is_hung() {
                self.advance(2 * deadlines::SIGNAL);
                return Err(EgpuError::Used { what: "it".into(), users: jobs });
            }
            self.ended = Some(format!("{}: SIGTERM", jobs.join(", ")));
            self.jobs.clear();
            return Ok(());
        }
        if self.wait(deadlines::WORK, Duration::ZERO, |egpu| egpu.jobs.is_empty()) {
            return Ok(());
        }
        Err(EgpuError::Used { what: "it".into(), users: self.users() })
    }

    fn detach(&mut self, force: bool) -> Result<()> {
        if !self.has_guest {
            return Ok(());
        }
        self.advance(GUEST);
        if !self.has_guest {
            return Ok(());
        }
        if self.ending(name(SimStep::Detach)) != Ending::Works {
            return Err(step("take it from its guest", "the guest's VMM does not answer"));
        }
        if !force && self.ending("guest") != Ending::Works {
            return Err(EgpuError::Used { what: "it".into(), users: self.users() });
        }
        self.return_from_guest();
        Ok(())
    }

    /// A claim that nobody holds is none in this model: one ends with its guest.
    fn release(&mut self) -> Result<()> {
        self.advance(LOOK);
        if self.ending(name(SimStep::Release)) != Ending::Works {
            return Err(step("release its claims", "the ledger can't be written"));
        }
        if !self.has_guest {
            self.claims.clear();
        }
        Ok(())
    }

    fn unbind(&mut self, force: bool) -> Result<()> {
        let what = "take it from its driver";
        if !force && !self.users().is_empty() {
            return Err(EgpuError::Used { what: "it".into(), users: self.users() });
        }
        if self.has_guest {
            self.advance(deadlines::DRIVERS);
            return Err(step(what, "a guest has it still"));
        }
        if self.is_stuck() || self.is_hung() && !self.jobs.is_empty() {
            self.advance(deadlines::DRIVERS);
            return Err(step(what, "the driver does not let go of it"));
        }
        self.advance(LOOK);
        if !force && !self.users().is_empty() {
            return Err(EgpuError::Used { what: "it".into(), users: self.users() });
        }
        self.jobs.clear();
        self.functions.iter_mut().for_each(|function| function.driver = None);
        Ok(())
    }

    fn deauthorise(&mut self) -> Result<()> {
        let what = "take its tunnel down";
        if self.is_tunnelled {
            if self.ending(name(SimStep::Deauthorise)) != Ending::Works {
                self.advance(deadlines::TUNNEL);
                return Err(step(what, "its domain can't"));
            }
            self.cut(Action::Deauthorise);
            self.lose_tunnel();
            self.advance(TUNNEL);
        }
        let gone = self.wait(deadlines::ENUMERATION, Duration::ZERO, |egpu| egpu.functions.is_empty());
        if !gone {
            return Err(step(what, "its functions are there still: a driver does not let go of them"));
        }
        let settled = self.settle();
        if self.is_tunnelled {
            return Err(step(what, "somebody built it again"));
        }
        settled
    }

    /// Takes a tunnel down that was just built, if nobody uses it and nothing keeps it.
    fn give_up_tunnel(&mut self) {
        if self.unbind(false).is_ok() {
            // It stays where its domain can't.
            let _ = self.deauthorise();
        }
    }

    fn settle(&mut self) -> Result<()> {
        self.advance(LOOK);
        let what = "settle the ledger";
        if self.ending(name(SimStep::Settle)) != Ending::Works {
            return Err(step(what, "it can't be written"));
        }
        let (functions, has_guest) = (&self.functions, self.has_guest);
        let is_there = |address: &PciAddress| functions.iter().any(|function| function.address == *address);
        self.claims.retain(|address| has_guest || is_there(address));
        if !self.is_tunnelled && !self.functions.is_empty() {
            return Err(step(what, "its functions are there still"));
        }
        Ok(())
    }

    fn reset(&mut self, rung: Rung) -> Result<()> {
        let what = format!("reset it ({})", reset(rung));
        self.advance(match rung {
            Rung::SoftReset => RESET.0,
            Rung::HardReset => RESET.1,
            Rung::Reconnect => LOOK,
        });
        let ending = self.ending(reset(rung));
        if ending == Ending::Fails {
            return Err(step(&what, "Linux refuses"));
        }
        if rung == Rung::Reconnect {
            if ending == Ending::Lies {
                return Ok(());
            }
            if !self.is_plugged {
                return Err(EgpuError::NotConnected("(simulated)".into()));
            }
            match self.is_tunnelled {
                true => self.deauthorise()?,
                false => self.settle()?,
            }
            self.authorise()?;
            let expected = self.expected.clone();
            return self.enumerate().inspect_err(|_| {
                self.give_up_tunnel();
                self.expected = expected;
            });
        }
        let is_there = |(address, _): &(PciAddress, PciIds)| {
            self.functions.iter().any(|function| function.address == *address)
        };
        if self.expected.is_empty() || !self.is_tunnelled || !self.expected.iter().all(is_there) {
            return Err(step(&what, "its functions are not there"));
        }
        self.cut(Action::Reset(rung));
        self.jobs.clear();
        self.is_asleep = false;
        if ending == Ending::Works {
            self.cure(rung);
        }
        Ok(())
    }
}

impl Enclosure for SimEgpu {
    fn observe(&mut self) -> Result<Observation> {
        self.advance(LOOK);
        if self.ending(name(SimStep::Observe)) != Ending::Works {
            return Err(step("look at USB4", "sysfs can't be read"));
        }
        if !self.is_plugged {
            return Ok(Observation::default());
        }
        let functions = self.functions.iter().filter(|_| self.is_tunnelled);
        Ok(Observation {
            route: Some(ROUTE),
            instance: Some(self.plugs),
            authorised: self.is_tunnelled,
            functions: functions.map(|function| function.address).collect(),
            users: self.users(),
            dropped: None,
        })
    }

    fn act(&mut self, action: Action) -> Result<()> {
        self.actions += 1;
        self.ended = None;
        // Whoever begins to use it while something is done is not cut off by that.
        match action {
            Action::StopWork { force: true } => {
                let jobs = self.jobs.iter().map(|job| Cut { action, user: format!("job {}", job.number) });
                self.cuts.extend(jobs);
            }
            Action::Detach { force: true } | Action::Unbind { force: true } => self.cut(action),
            _ => {}
        }
        match action {
            Action::Authorise => self.authorise(),
            Action::Enumerate => self.enumerate(),
            Action::Verify => self.verify(),
            Action::StopWork { force } => self.stop_work(force),
            Action::Detach { force } => self.detach(force),
            Action::Release => self.release(),
            Action::Unbind { force } => self.unbind(force),
            Action::Deauthorise => self.deauthorise(),
            Action::Reset(rung) => self.reset(rung),
            Action::Settle => self.settle(),
        }
    }

    fn heartbeat(&mut self) -> Result<()> {
        // Reading would wake it.
        if self.is_asleep {
            return Ok(());
        }
        for (address, ids) in self.expected.clone() {
            self.check(address, ids)?;
        }
        Ok(())
    }

    fn temperature(&mut self) -> Option<i32> {
        // Of one that a guest has, the guest alone can read it.
        let can = self.has_sensor
            && !self.has_guest
            && self.functions.iter().any(|function| self.answers(function.address));
        can.then(|| self.heat.millidegrees())
    }

    fn sensor(&self) -> Option<String> {
        Some("the simulated sensor".into())
    }

    fn ended(&mut self) -> Option<String> {
        self.ended.take()
    }
}
