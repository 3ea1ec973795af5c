//! Faults of the enclosures of a simulated host: each lies in the host's directory, so that one process meets what another has
//! injected.
//!
//! `sim/usb4/ROUTE/faults` has a line for each fault that is in effect: the Unix time in milliseconds at which it began, and
//! its words in a [`SimScript`](super::SimScript).

use std::fs;
use std::io;
use std::mem::discriminant;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use thiserror::Error;

use super::SimHost;
use super::egpu::{Coming, Cure, Ending, SimEgpuFault, SimLink, SimStep, Times};
use crate::PciAddress;
use crate::egpu::Rung;
use crate::usb4::{self, Route};

/// The most lines: a file that has more is not one of ours.
const LINES: usize = 1000;
/// The device ID of another GPU.
const OTHER: u16 = 0x73bf;
/// By what name the config space of a function that hangs is kept.
const HUNG: &str = "hung";

/// Why a fault can't be injected.
#[derive(Debug, Error)]
pub enum InjectError {
    /// No such enclosure was ever connected.
    #[error("the simulated host has no enclosure at {0}; `vm-service egpu info` shows those that it has")]
    NoEnclosure(Route),
    /// It needs what a simulated host has not.
    #[error("`{fault}` can't be injected into a simulated host: {instead}")]
    NotHere {
        /// The fault.
        fault: SimEgpuFault,
        /// What to do instead.
        instead: &'static str,
    },
    /// The file system refuses.
    #[error("the simulated host can't be changed: {0}")]
    Io(#[from] io::Error),
}

/// The faults of one enclosure that are in effect.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Each with the time since when.
    lines: Vec<(Duration, SimEgpuFault)>,
}

impl Faults {
    fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let (since, words) = line.split_once(' ')?;
            Some((Duration::from_millis(since.parse().ok()?), words.parse().ok()?))
        };
        Self { lines: text.lines().take(LINES).filter_map(line).collect() }
    }

    fn text(&self) -> String {
        self.lines.iter().map(|(since, fault)| format!("{} {fault}\n", since.as_millis())).collect()
    }

    /// Adds one. What is said of the same thing comes after what was said before, or takes its place where that has no end.
    pub(super) fn push(&mut self, now: Duration, fault: SimEgpuFault) {
        let is_same = |other: &SimEgpuFault| match (other, &fault) {
            (SimEgpuFault::Fails(a, None), SimEgpuFault::Fails(b, _)) => a == b,
            (SimEgpuFault::Reset(a, _, None), SimEgpuFault::Reset(b, ..)) => a == b,
            (SimEgpuFault::Enumeration(_, None), SimEgpuFault::Enumeration(..)) => true,
            (SimEgpuFault::Fails(..) | SimEgpuFault::Reset(..) | SimEgpuFault::Enumeration(..), _) => false,
            (SimEgpuFault::Work(_) | SimEgpuFault::Hang(_), _) => false,
            (other, fault) => discriminant(other) == discriminant(fault),
        };
        self.lines.retain(|(_, other)| !is_same(other));
        let is_none = match fault {
            SimEgpuFault::BitErrors(chance) | SimEgpuFault::Corruption(chance) => chance == 0.0,
            SimEgpuFault::Fan(works) | SimEgpuFault::Sensor(works) => works,
            _ => false,
        };
        if !is_none && self.lines.len() < LINES {
            self.lines.push((now, fault));
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&SimEgpuFault) -> bool) {
        self.lines.retain(|(_, fault)| keep(fault));
    }

    /// The first that is one of these, with the time since when.
    pub(super) fn find<T>(&self, is: impl Fn(&SimEgpuFault) -> Option<T>) -> Option<(Duration, T)> {
        self.lines.iter().find_map(|(since, fault)| Some((*since, is(fault)?)))
    }

    /// All that are one of these, with the time since when.
    pub(super) fn all<T>(&self, is: impl Fn(&SimEgpuFault) -> Option<T>) -> Vec<(Duration, T)> {
        self.lines.iter().filter_map(|(since, fault)| Some((*since, is(fault)?))).collect()
    }

    /// What its GPU hangs until.
    pub(super) fn hang(&self) -> Option<Cure> {
        let hangs = self.all(|fault| match fault {
            SimEgpuFault::Hang(cure) => Some(*cure),
            _ => None,
        });
        hangs.into_iter().map(|(_, cure)| cure).max()
    }

    /// Until when a driver does not let go of it.
    fn stuck(&self) -> Option<Duration> {
        let (since, time) = self.find(|fault| match fault {
            SimEgpuFault::DriverSticks(time) => Some(*time),
            _ => None,
        })?;
        Some(since.saturating_add(time))
    }

    /// Counts down the first that is one of these, and answers how it ends.
    fn take<T>(&mut self, is: impl Fn(&mut SimEgpuFault) -> Option<(T, &mut Times)>) -> Option<T> {
        for at in 0..self.lines.len() {
            let Some((ending, times)) = self.lines.get_mut(at).and_then(|(_, fault)| is(fault)) else {
                continue;
            };
            *times = times.map(|times| times.saturating_sub(1));
            if *times == Some(0) {
                self.lines.remove(at);
            }
            return Some(ending);
        }
        None
    }

    /// Whether a step fails this time.
    pub(super) fn fails(&mut self, step: SimStep) -> bool {
        let fails = self.take(|fault| match fault {
            SimEgpuFault::Fails(which, times) if *which == step => Some(((), times)),
            _ => None,
        });
        fails.is_some()
    }

    /// How a reset ends this time.
    pub(super) fn ending(&mut self, rung: Rung) -> Ending {
        let ending = self.take(|fault| match fault {
            SimEgpuFault::Reset(which, ending, times) if *which == rung => Some((*ending, times)),
            _ => None,
        });
        ending.unwrap_or(Ending::Works)
    }

    /// What comes when its tunnel is built this time.
    pub(super) fn coming(&mut self) -> Coming {
        let coming = self.take(|fault| match fault {
            SimEgpuFault::Enumeration(coming, times) => Some((*coming, times)),
            _ => None,
        });
        coming.unwrap_or(Coming::Works)
    }

    /// Ends the hangs that a reset cures.
    pub(super) fn cure(&mut self, by: Rung) {
        let strength = match by {
            Rung::SoftReset => Cure::Soft,
            Rung::HardReset => Cure::Hard,
            Rung::Reconnect => Cure::Reconnect,
        };
        self.retain(|fault| !matches!(fault, SimEgpuFault::Hang(cure) if *cure <= strength));
    }
}

/// The time since 1970.
pub(super) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn folder(route: Route) -> String {
    format!("sim/usb4/{route}")
}

fn io_error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

impl SimHost {
    /// The places of its enclosures, also of those whose cable is pulled.
    ///
    /// # Errors
    /// When its directory can't be read.
    pub fn enclosures(&self) -> io::Result<Vec<Route>> {
        let names = match fs::read_dir(self.path("sim/usb4")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            names => names?,
        };
        let mut routes = Vec::new();
        for name in names {
            routes.extend(name?.file_name().to_str().and_then(|name| name.parse::<Route>().ok()));
        }
        routes.sort_unstable();
        Ok(routes)
    }

    /// The link of an enclosure in the model, with the errors that are injected: what PCI Express gets of the rates of its
    /// router.
    ///
    /// # Errors
    /// When its directory can't be read.
    pub fn link_of(&self, route: Route) -> io::Result<SimLink> {
        let faults = self.faults(route)?;
        let rates = usb4::router_at(&self.plain_host(), route).and_then(|router| router.link);
        let mut link = SimLink::default();
        if let Some(rates) = rates {
            // As the default has it: 32 Gb/s of 40.
            link.rate = rates.slower().0 / 5 * 4;
        }
        link.bit_errors = faults.chance(false);
        link.corruption = faults.chance(true);
        Ok(link)
    }

    /// Injects a fault into the enclosure at a place. It lasts until it is undone, whichever processes come and go.
    ///
    /// Any new tunnel counts as a reconnect: what is said of `reset reconnect` is met by the next one.
    ///
    /// # Errors
    /// When there is no such enclosure, the fault can't happen to a simulated host, or the file system refuses.
    pub fn inject(&self, route: Route, fault: SimEgpuFault) -> Result<(), InjectError> {
        let not_here = |instead| Err(InjectError::NotHere { fault, instead });
        match fault {
            SimEgpuFault::GuestTakes | SimEgpuFault::GuestLeaves => {
                return not_here("use `vm-service claim` and `vm-service release` with --sim");
            }
            SimEgpuFault::GuestRefuses(_)
            | SimEgpuFault::Fails(SimStep::Detach | SimStep::Settle | SimStep::Observe, _)
            | SimEgpuFault::Enumeration(Coming::Endless, _) => {
                return not_here(
                    "it has no guests and no time of its own; put it into a script for `vm-service egpu simulate`",
                );
            }
            _ => {}
        }
        if !self.enclosures()?.contains(&route) {
            return Err(InjectError::NoEnclosure(route));
        }
        self.advance()?;
        let lock = self.lock()?;
        let mut faults = self.faults(route)?;
        let is_up = self.has_tunnel(route);
        match fault {
            SimEgpuFault::Plug => self.plug(route, &mut faults)?,
            SimEgpuFault::Unplug => self.unplug(route, &mut faults)?,
            SimEgpuFault::TunnelDrops => self.drop_tunnel(route, &mut faults)?,
            SimEgpuFault::TunnelComes if !is_up && self.is_plugged(route) => {
                self.come(route, &mut faults)?;
                self.set_authorized(route, true)?;
            }
            SimEgpuFault::Suspend { drops: true } if is_up => self.take_down_tunnel(route)?,
            SimEgpuFault::Suspend { drops: false } if is_up => self.set_sleep(route, true)?,
            SimEgpuFault::Suspend { .. } | SimEgpuFault::TunnelComes => {}
            SimEgpuFault::Stall => {
                let jobs = faults.all(|fault| matches!(fault, SimEgpuFault::Work(_)).then_some(()));
                faults.retain(|fault| !matches!(fault, SimEgpuFault::Work(_)));
                jobs.into_iter().for_each(|(since, ())| faults.push(since, SimEgpuFault::Work(None)));
            }
            SimEgpuFault::Work(_) if !is_up || faults.hang().is_some() => {}
            SimEgpuFault::Heal => {
                let temperature = |fault: &SimEgpuFault| matches!(fault, SimEgpuFault::Temperature(_));
                faults.retain(|fault| temperature(fault) || matches!(fault, SimEgpuFault::Work(_)));
                self.restore(route)?;
                if is_up {
                    self.set_sleep(route, false)?;
                }
            }
            SimEgpuFault::Hang(_) if !self.is_plugged(route) => {}
            fault => faults.push(now(), fault),
        }
        if faults.hang().is_some() && self.has_tunnel(route) {
            self.silence(route)?;
        }
        self.keep_faults(route, &faults)?;
        drop(lock);
        Ok(self.advance()?)
    }

    /// Its `authorized`, written by somebody: the functions come or go with the tunnel.
    pub(super) fn authorize(&self, route: Route, wanted: bool) -> io::Result<()> {
        let _lock = self.lock()?;
        let mut faults = self.faults(route)?;
        let step = if wanted { SimStep::Authorise } else { SimStep::Deauthorise };
        let ending = if wanted { faults.ending(Rung::Reconnect) } else { Ending::Works };
        let fails = faults.fails(step) || ending == Ending::Fails;
        let hangs = faults.hang();
        let done = match (fails, wanted) {
            (true, _) => Err(io_error(libc::EIO)),
            (false, false) => self.drop_tunnel(route, &mut faults),
            (false, true) => {
                let done = self.come(route, &mut faults).and_then(|()| self.set_authorized(route, true));
                if let Some(cure) = hangs.filter(|cure| ending == Ending::Lies && *cure <= Cure::Reconnect) {
                    faults.push(now(), SimEgpuFault::Hang(cure));
                    self.silence(route)?;
                }
                done
            }
        };
        self.keep_faults(route, &faults)?;
        done
    }

    /// A reset of a function, or of its bus: where it is in an enclosure, as the faults say.
    pub(super) fn reset_enclosed(&self, address: PciAddress, rung: Rung) -> io::Result<()> {
        let _lock = self.lock()?;
        let Some(route) = self.enclosure_of(address)? else { return Ok(()) };
        let mut faults = self.faults(route)?;
        let ending = faults.ending(rung);
        if ending == Ending::Works {
            faults.cure(rung);
            if faults.hang().is_none() {
                self.speak(route)?;
            }
        }
        if ending != Ending::Fails {
            // Whatever ran on it is lost.
            faults.retain(|fault| !matches!(fault, SimEgpuFault::Work(_)));
            self.set_sleep(route, false)?;
            self.end_jobs(0)?;
        }
        self.keep_faults(route, &faults)?;
        if ending == Ending::Fails { Err(io_error(libc::ENOTTY)) } else { Ok(()) }
    }

    /// How long a driver does not let go of a function still.
    pub(super) fn stuck(&self, address: PciAddress) -> io::Result<Option<Duration>> {
        let Some(route) = self.enclosure_of(address)? else { return Ok(None) };
        Ok(self.faults(route)?.stuck().and_then(|until| until.checked_sub(now())))
    }

    /// The functions come as the faults say, from their first moment on.
    fn come(&self, route: Route, faults: &mut Faults) -> io::Result<()> {
        faults.cure(Rung::Reconnect);
        let coming = faults.coming();
        match coming {
            Coming::Other => {
                self.alter(route, "device", |_| format!("{OTHER:#06x}\n").into_bytes())?;
                self.alter(route, "config", |config| with_bytes(config, 2, &OTHER.to_le_bytes()))?;
                self.alter(route, "uevent", other_uevent)?;
            }
            Coming::NoRoom => {
                self.alter(route, "resource", without_room)?;
                self.alter(route, "config", |config| with_bytes(config, 0x10, &[0; 24]))?;
            }
            Coming::Works | Coming::Nothing | Coming::NoGpu | Coming::Endless => {}
        }
        if faults.hang().is_some() {
            self.silence(route)?;
        }
        match coming {
            Coming::Nothing => Ok(()),
            _ => self.build_tunnel(route, coming != Coming::NoGpu),
        }
    }

    fn drop_tunnel(&self, route: Route, faults: &mut Faults) -> io::Result<()> {
        faults.retain(|fault| !matches!(fault, SimEgpuFault::Work(_)));
        self.end_jobs(0)?;
        self.restore(route)?;
        self.take_down_tunnel(route)?;
        self.set_authorized(route, false)
    }

    fn unplug(&self, route: Route, faults: &mut Faults) -> io::Result<()> {
        if !self.is_plugged(route) {
            return Ok(());
        }
        self.drop_tunnel(route, faults)?;
        // Without power nothing hangs.
        faults.retain(|fault| !matches!(fault, SimEgpuFault::Hang(_)));
        self.remove_router(route)
    }

    fn plug(&self, route: Route, faults: &mut Faults) -> io::Result<()> {
        if self.is_plugged(route) {
            return Ok(());
        }
        faults.retain(|fault| !matches!(fault, SimEgpuFault::Hang(_)));
        self.return_router(route)
    }

    /// The enclosure that a function is in.
    fn enclosure_of(&self, address: PciAddress) -> io::Result<Option<Route>> {
        for route in self.enclosures()? {
            if self.enclosed_functions(route)?.iter().any(|(function, ..)| *function == address) {
                return Ok(Some(route));
            }
        }
        Ok(None)
    }

    /// Its functions that are no bridges and there now.
    pub(super) fn end_functions(&self, route: Route) -> io::Result<Vec<PciAddress>> {
        let there = |address: &PciAddress| self.device_dir(*address).is_ok();
        Ok(self.ends(route)?.into_iter().map(|(address, _)| address).filter(there).collect())
    }

    /// Its functions that are no bridges, with their directories, whether they are there now or not.
    fn ends(&self, route: Route) -> io::Result<Vec<(PciAddress, PathBuf)>> {
        let functions = self.enclosed_functions(route)?.into_iter();
        let found = functions.filter_map(|(address, ..)| Some((address, self.function_dir(route, address)?)));
        Ok(found.filter(|(_, dir)| !is_bridge(dir)).collect())
    }

    fn saved(&self, route: Route, address: PciAddress, name: &str) -> PathBuf {
        self.path(&folder(route)).join(format!("saved/{address}/{name}"))
    }

    /// Changes an attribute of its functions, until [`restore`](Self::restore).
    fn alter(&self, route: Route, name: &str, alter: impl Fn(Vec<u8>) -> Vec<u8>) -> io::Result<()> {
        self.alter_as(route, name, name, alter)
    }

    /// As [`alter`](Self::alter), with what it was before kept by another name.
    fn alter_as(
        &self,
        route: Route,
        name: &str,
        kept: &str,
        alter: impl Fn(Vec<u8>) -> Vec<u8>,
    ) -> io::Result<()> {
        for (address, dir) in self.ends(route)? {
            let (path, saved) = (dir.join(name), self.saved(route, address, kept));
            let text = fs::read(&path)?;
            if !saved.exists() {
                fs::create_dir_all(saved.parent().unwrap_or(&saved))?;
                fs::write(&saved, &text)?;
            }
            fs::write(path, alter(text))?;
        }
        Ok(())
    }

    /// Its functions answer nothing: their config space reads all ones.
    fn silence(&self, route: Route) -> io::Result<()> {
        self.alter_as(route, "config", HUNG, |config| vec![0xff; config.len()])
    }

    /// Their config space is again what it was.
    fn speak(&self, route: Route) -> io::Result<()> {
        for (address, dir) in self.ends(route)? {
            let saved = self.saved(route, address, HUNG);
            if saved.exists() {
                fs::rename(saved, dir.join("config"))?;
            }
        }
        Ok(())
    }

    /// What was altered is as it was before.
    fn restore(&self, route: Route) -> io::Result<()> {
        self.speak(route)?;
        for (address, dir) in self.ends(route)? {
            let Ok(names) = fs::read_dir(self.saved(route, address, "")) else { continue };
            for name in names {
                let name = name?.file_name();
                fs::rename(self.saved(route, address, &name.to_string_lossy()), dir.join(&name))?;
            }
        }
        match fs::remove_dir_all(self.path(&folder(route)).join("saved")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn set_sleep(&self, route: Route, sleeps: bool) -> io::Result<()> {
        let text = if sleeps { "suspended\n" } else { "active\n" };
        self.end_functions(route)?.into_iter().try_for_each(|gpu| self.set(gpu, "power/runtime_status", text))
    }

    /// The faults of an enclosure that are in effect.
    pub(super) fn faults(&self, route: Route) -> io::Result<Faults> {
        match fs::read_to_string(self.path(&folder(route)).join("faults")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Faults::default()),
            text => Ok(Faults::parse(&text?)),
        }
    }

    pub(super) fn keep_faults(&self, route: Route, faults: &Faults) -> io::Result<()> {
        // One behind which nothing is has none.
        let dir = self.path(&folder(route));
        if dir.exists() { replace(&dir.join("faults"), &faults.text()) } else { Ok(()) }
    }

    /// One process or thread at a time changes enclosures.
    pub(super) fn lock(&self) -> io::Result<fs::File> {
        let path = self.path("sim/lock");
        fs::create_dir_all(self.path("sim"))?;
        let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }
}

impl Faults {
    fn chance(&self, corrupts: bool) -> f64 {
        let chance = self.find(|fault| match fault {
            SimEgpuFault::BitErrors(chance) if !corrupts => Some(*chance),
            SimEgpuFault::Corruption(chance) if corrupts => Some(*chance),
            _ => None,
        });
        chance.map_or(0.0, |(_, chance)| chance)
    }

    /// The probability that a bit flips in its link.
    pub(super) fn bit_errors(&self) -> f64 {
        self.chance(false)
    }
}

/// Writes a file as a whole: its reader finds the old or the new text.
pub(super) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let new = PathBuf::from(format!("{}.new", path.display()));
    fs::write(&new, text)?;
    fs::rename(new, path)
}

/// A `uevent` that names the other GPU.
fn other_uevent(text: Vec<u8>) -> Vec<u8> {
    let line = |line: &str| match line.split_once(':') {
        Some((vendor, _)) if vendor.starts_with("PCI_ID=") => format!("{vendor}:{OTHER:04X}\n"),
        _ => format!("{line}\n"),
    };
    String::from_utf8_lossy(&text).lines().map(line).collect::<String>().into_bytes()
}

pub(super) fn is_bridge(dir: &Path) -> bool {
    fs::read_to_string(dir.join("class")).is_ok_and(|class| class.starts_with("0x06"))
}

fn with_bytes(mut config: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    for (place, byte) in config.iter_mut().skip(at).zip(bytes) {
        *place = *byte;
    }
    config
}

/// A `resource` whose regions have sizes and no places.
fn without_room(text: Vec<u8>) -> Vec<u8> {
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [start, end, flags] = words[..] else { return format!("{line}\n") };
        let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap_or(0);
        let size = number(end).saturating_sub(number(start));
        format!("{:#018x} {size:#018x} {flags}\n", 0)
    };
    text.lines().map(line).collect::<String>().into_bytes()
}
