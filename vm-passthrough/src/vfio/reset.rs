//! Resets a function and proves it.
//!
//! # The ladder
//! First the function's own methods, in the order that sysfs `reset_method` has them (the Linux kernel's default is
//! device-specific, ACPI, FLR, AF FLR, PM, bus); then, where the whole slot or bus is ours and nothing else on it is in
//! use (closed, or at rest: `open_devices`), a hot reset of all functions there. The first step that works and is not refuted ends it.
//!
//! # The proof
//! That a reset "succeeded" says only that the Linux kernel went through the motions: FLR is known to do nothing on some
//! devices. And the obvious places to look at show nothing: the Linux kernel saves the whole header of config space,
//! BARs and Command included, before a reset and restores it afterwards, with most of the PCI Express capability; and
//! vfio-pci answers BARs, Interrupt Line, and the MSI and MSI-X registers from a copy of its own. What is left are
//! registers in the hardware that the Linux kernel neither saves nor virtualises while interrupts are disabled. So a
//! marker is put into one of them, past vfio-pci, through the function's `config` file in sysfs, and it must be gone
//! afterwards:
//!
//! 1. MSI-X Function Mask, which a reset clears (PCI Express Base 6.0, 7.7.2.2).
//! 2. MSI Mask bit of vector 0, where vectors can be masked; a reset clears it (7.7.1.7).
//! 3. MSI Message Data. Its value after a reset is not specified. When the marker is gone, something reset the function;
//!    when it is still there, that refutes nothing.
//!
//! All three are without effect while MSI and MSI-X are disabled, which is checked, and the marker, and nothing else of the
//! register, is taken out again when it survives. A surviving marker of the first two kinds refutes the reset. A function that has none of these
//! registers (or a Linux kernel in lockdown mode, which forbids such writes, or a process without the rights) leaves
//! only the Linux kernel's word: [`ResetEvidence::LinuxReport`].
//!
//! # The reset that opening makes
//! The Linux kernel resets a function when it is opened, by the first of its methods, or when it leaves D3hot for that. A
//! marker that is put in before and gone afterwards proves that as well, and as long as nothing was done with the function
//! since, it counts: a second reset would only cost the 100 ms that an FLR takes, or the second that a bus reset takes.
//!
//! This proves that the reset reached the function's config logic, which is what an FLR, a transition through D3hot and a
//! bus reset have in common. It does not prove that firmware behind it, in a GPU's microcontrollers for instance, is in
//! its first state; only the device's driver can tell.
//!
//! # No reset
//! Whoever unplugs, removes or unbinds a function holds its lock until it is closed, and closing it makes no reset then
//! either. So none is tried: it is closed at once, and its next user's start resets it and proves that, if it is still there.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::failure::system;
use super::interface::{DeviceFile, ResetEvidence, ResetReport, ResetStep, Result, VfioError};
use super::{INTX_IRQ, MSI_IRQ, MSIX_IRQ, Presence, VfioDevice, power, sys};
use crate::claim::write_locked;
use crate::deadlines::{LOCKED, RESET_METHOD, RESET_STEPS};
use crate::pci::config::{CONFIG_SIZE, ConfigState, walk_capabilities};
use crate::pci::{self, Capability, ResetMethod, regs};
use crate::{Host, PciAddress};

/// How soon a reset is tried again while the function is locked.
const LOCKED_POLL: Duration = Duration::from_millis(20);

/// `VFIO_DEVICE_RESET`, again while the Linux kernel says that the device is locked.
pub(super) fn reset_once(device: &VfioDevice) -> Result<()> {
    reset_within(device, &mut LOCKED.clone())
}

/// As [`reset_once`], and no longer than `time_left` lasts.
fn reset_within(device: &VfioDevice, time_left: &mut Duration) -> Result<()> {
    let mut left = LOCKED.min(*time_left);
    loop {
        match sys::device::reset(device.file()) {
            // A function that the host takes away stays locked for as long as it is open.
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock
                    && !left.is_zero()
                    && !device.is_wanted_back()
                    && !matches!(device.presence(), Presence::Gone(_)) =>
            {
                sleep(LOCKED_POLL);
                left = left.saturating_sub(LOCKED_POLL);
                *time_left = time_left.saturating_sub(LOCKED_POLL);
            }
            answer => return answer.map_err(|error| system("VFIO_DEVICE_RESET", device.name(), error)),
        }
    }
}

/// What became of one step.
enum Outcome {
    /// It worked, as this shows.
    Reset(ResetEvidence),
    /// It did not, or it is refuted.
    Failed(String),
}

/// Whether the host leaves the function here.
fn is_left(device: &VfioDevice) -> Result<()> {
    let address = device.address();
    if device.is_wanted_back() { Err(VfioError::WantedBack { address }) } else { Ok(()) }
}

/// What comes before any reset: interrupts are disabled, of a function that the host leaves here.
pub(super) fn begin(device: &VfioDevice) -> Result<()> {
    is_left(device)?;
    [INTX_IRQ, MSI_IRQ, MSIX_IRQ].into_iter().try_for_each(|index| device.disable_irqs(index))
}

/// Resets a function by the first step of the ladder that works. `fresh` is what shows that it was reset along with another.
pub(super) fn ladder(host: &Host, device: &VfioDevice, fresh: Option<ResetEvidence>) -> Result<ResetReport> {
    let address = device.address();
    let mut failures = Vec::new();
    let mut time_left = RESET_STEPS;
    let methods = Methods::read(host, address);
    // Every method must be asked for by VFIO_DEVICE_RESET, which does not say which one it used: the first of the list.
    if device.info().reset {
        let steps = methods.steps();
        for (position, step) in steps.iter().enumerate() {
            // The first needs no change to the list; one further down is made the only one.
            if position > 0 {
                let Some(method) = *step else { continue };
                if let Err(error) = methods.restrict(host, method, &mut time_left) {
                    failures.push(format!("{}: {error}", name(*step)));
                    continue;
                }
            }
            match attempt(host, device, &[], &mut time_left, |time_left| reset_within(device, time_left)).0 {
                Outcome::Reset(evidence) => {
                    methods.restore(host);
                    return Ok(ResetReport { method: step.map(ResetStep::Function), evidence });
                }
                Outcome::Failed(why) => failures.push(format!("{}: {why}", name(*step))),
            }
            if device.is_wanted_back() {
                break;
            }
        }
        methods.restore(host);
    } else {
        failures.push("it has no reset of its own".into());
    }
    is_left(device)?;
    if let Some(evidence) = fresh {
        return Ok(ResetReport { method: Some(ResetStep::Hot), evidence });
    }
    match hot_reset(host, device, &mut time_left) {
        Ok(Outcome::Reset(evidence)) => Ok(ResetReport { method: Some(ResetStep::Hot), evidence }),
        Ok(Outcome::Failed(why)) | Err(why) => {
            is_left(device)?;
            failures.push(format!("hot reset: {why}"));
            let reason = format!(
                "{}; it may hold state of its last user: give it to no other guest before a power cycle",
                failures.join("; ")
            );
            Err(VfioError::Reset { address, reason })
        }
    }
}

/// Opens a function, and tells whether it is shown that this reset it.
pub(super) fn watch_open<T>(
    host: &Host,
    address: PciAddress,
    open: impl FnOnce() -> Result<T>,
) -> Result<(T, Option<ResetReport>)> {
    let marker = Marker::put(host, address);
    let opened = open();
    let report = marker.and_then(|marker| match (&opened, marker.is_gone()) {
        (Ok(_), Ok(true)) => {
            let evidence = ResetEvidence::Register(marker.register);
            // Which method it was can't be known.
            Some(ResetReport { method: None, evidence })
        }
        (_, Ok(false)) => {
            marker.undo();
            None
        }
        (Err(_), Ok(true)) | (_, Err(_)) => None,
    });
    Ok((opened?, report))
}

fn name(method: Option<ResetMethod>) -> String {
    method.map_or_else(|| "the Linux kernel's choice".into(), |method| method.to_string())
}

/// Resets all of the function's slot or bus; `Err` with the reason why that may not be done.
fn hot_reset(host: &Host, device: &VfioDevice, time_left: &mut Duration) -> Result<Outcome, String> {
    let info = device.hot_reset_info().map_err(|error| error.to_string())?;
    let set: Vec<_> = info.functions.iter().map(|&(function, _)| function).collect();
    if !set.contains(&device.address()) {
        return Err("the Linux kernel's set does not have the function itself".into());
    }
    let others: Vec<_> = set.iter().copied().filter(|&other| other != device.address()).collect();
    let groups = match info.owned {
        Some(true) => Vec::new(),
        Some(false) => {
            let others: Vec<_> = others.iter().map(ToString::to_string).collect();
            return Err(format!(
                "it would also reset {}, which the guest does not have, or not all of it",
                others.join(", ")
            ));
        }
        None => {
            let mut numbers: Vec<_> = info.functions.iter().map(|&(_, group)| group).collect();
            numbers.sort_unstable();
            numbers.dedup();
            device.space().group_fds(&numbers).map_err(|group| {
                format!("it would also reset group {group}, which this guest does not have")
            })?
        }
    };
    device
        .space()
        .with_set(device.address(), &set, || {
            attempt(host, device, &others, time_left, |_| device.hot_reset(&groups))
        })
        .map_err(|open| format!("it would also reset {open}, which is in use"))
}

/// Puts in markers, resets, and looks at the markers; of `others`, which the reset is to reach too, those that it is
/// shown or said to have reached come back.
fn attempt(
    host: &Host,
    device: &VfioDevice,
    others: &[PciAddress],
    time_left: &mut Duration,
    reset: impl FnOnce(&mut Duration) -> Result<()>,
) -> (Outcome, Vec<(PciAddress, ResetEvidence)>) {
    let marker = Marker::put(host, device.address());
    let other_markers: Vec<_> = others.iter().map(|&other| (other, Marker::put(host, other))).collect();
    let reported = reset(time_left);
    let start = Instant::now();
    let answers = power::wake_until(host, device, start + *time_left);
    *time_left = time_left.saturating_sub(start.elapsed());
    if let Err(error) = answers {
        marker
            .into_iter()
            .chain(other_markers.into_iter().filter_map(|(_, marker)| marker))
            .for_each(Marker::undo);
        let why =
            reported.err().map_or_else(|| error.to_string(), |reported| format!("{reported}; then {error}"));
        return (Outcome::Failed(why), Vec::new());
    }
    let reported = reported.map_err(|error| error.to_string());
    let fresh = other_markers
        .into_iter()
        .filter_map(|(other, marker)| judge(marker, reported.clone()).ok().map(|evidence| (other, evidence)))
        .collect();
    match judge(marker, reported) {
        Ok(evidence) => (Outcome::Reset(evidence), fresh),
        Err(why) => (Outcome::Failed(why), fresh),
    }
}

/// What a marker shows after a reset of which the Linux kernel reported this.
///
/// A marker that is gone outweighs a report of failure: behind a port that is slow to say that its link is up again, the
/// Linux kernel gives up on a bus reset that took place, and restores config space all the same.
fn judge(marker: Option<Marker>, reported: Result<(), String>) -> Result<ResetEvidence, String> {
    let Some(marker) = marker else { return reported.map(|()| ResetEvidence::LinuxReport) };
    let (register, decisive) = (marker.register, marker.decisive);
    match (marker.is_gone(), reported) {
        (Ok(true), reported) => {
            if let Err(error) = reported {
                tracing::warn!(register, %error, "a reset was reported as failed, but it took place");
            }
            Ok(ResetEvidence::Register(register))
        }
        (Ok(false), reported) => {
            marker.undo();
            match reported {
                Ok(()) if decisive => Err(format!(
                    "the Linux kernel reports success, but {register} kept its value, so nothing was reset"
                )),
                reported => reported.map(|()| ResetEvidence::LinuxReport),
            }
        }
        (Err(error), _) => Err(format!("{register} can't be read afterwards: {error}")),
    }
}

/// A value in a register that a reset must undo.
struct Marker {
    config: File,
    is_virtual: bool,
    register: &'static str,
    /// The capability that the register is in, as offset and ID.
    capability: u16,
    id: u8,
    /// Whether it is specified that a reset undoes it.
    decisive: bool,
    offset: u16,
    old: u16,
    /// The bits that were changed.
    changed: u16,
}

impl Marker {
    /// Puts a marker into the first register that takes one.
    fn put(host: &Host, address: PciAddress) -> Option<Self> {
        let path = host.pci_device(address).join("config");
        let config = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(config) => config,
            Err(error) => {
                tracing::debug!(%address, %error, "resets can't be proved without access to config space in sysfs");
                return None;
            }
        };
        let candidates = match candidates(&|offset| read_u16(&config, offset)) {
            Ok(candidates) => candidates,
            Err(error) => {
                tracing::debug!(%address, %error, "config space in sysfs can't be read");
                return None;
            }
        };
        let is_virtual = pci::is_virtual(host, address);
        for Candidate { register, capability, id, decisive, offset, changed } in candidates {
            let Ok(old) = read_u16(&config, offset) else { continue };
            if let Err(error) = write_u16(&config, offset, old ^ changed) {
                tracing::debug!(%address, register, %error, "a marker can't be written");
                continue;
            }
            // A register that does not take the whole marker is left as it was.
            let now = read_u16(&config, offset);
            if now.as_ref().is_ok_and(|&now| taken(old, now, changed) == changed) {
                return Some(Self {
                    config,
                    is_virtual,
                    register,
                    capability,
                    id,
                    decisive,
                    offset,
                    old,
                    changed,
                });
            }
            let undone = now.and_then(|now| match taken(old, now, changed) {
                0 => Ok(()),
                part => write_u16(&config, offset, now ^ part),
            });
            if let Err(error) = undone {
                tracing::warn!(%address, register, %error, "could not take a marker back");
            }
        }
        None
    }

    /// Whether a reset undid the marker. A function that dies or is still in reset reads as if it was undone, so the
    /// function has to answer before and after the read, and its capability has to be there.
    fn is_gone(&self) -> io::Result<bool> {
        self.check_answers()?;
        let now = read_u16(&self.config, self.offset)?;
        let [id, _] = read_u16(&self.config, self.capability)?.to_le_bytes();
        self.check_answers()?;
        if now == u16::MAX || id != self.id {
            return Err(io::Error::other(format!(
                "it reads {now:#06x}, and its capability has ID {id:#04x}"
            )));
        }
        Ok(taken(self.old, now, self.changed) != self.changed)
    }

    fn check_answers(&self) -> io::Result<()> {
        let mut header = [0; ConfigState::LEN];
        self.config.read_exact_at(&mut header, 0)?;
        match ConfigState::of(&header, self.is_virtual) {
            Some(ConfigState::Alive) => Ok(()),
            Some(state) => Err(io::Error::other(format!("its config space {state}"))),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Takes the marker out, if it is still there, and leaves the rest of the register alone: whoever has the function
    /// may have turned its interrupts on since.
    fn undo(self) {
        if let Err(error) = self.take_out() {
            tracing::warn!(register = self.register, %error, "could not take a marker back");
        }
    }

    fn take_out(&self) -> io::Result<()> {
        // A function that does not answer has no marker.
        if self.is_gone().unwrap_or(true) {
            return Ok(());
        }
        let now = read_u16(&self.config, self.offset)?;
        write_u16(&self.config, self.offset, now ^ self.changed)
    }
}

/// The bits of a marker, `changed`, that differ from the register's `old` value.
fn taken(old: u16, now: u16, changed: u16) -> u16 {
    (now ^ old) & changed
}

fn read_u16(config: &File, offset: u16) -> io::Result<u16> {
    let mut value = [0; 2];
    config.read_exact_at(&mut value, offset.into())?;
    Ok(u16::from_le_bytes(value))
}

fn write_u16(config: &File, offset: u16, value: u16) -> io::Result<()> {
    config.write_all_at(&value.to_le_bytes(), offset.into())
}

/// A register that may take a marker.
#[derive(Debug, PartialEq, Eq)]
struct Candidate {
    register: &'static str,
    /// The capability that the register is in, as offset and ID.
    capability: u16,
    id: u8,
    decisive: bool,
    offset: u16,
    changed: u16,
}

/// The registers of a function that may take a marker, best first.
fn candidates(read: &dyn Fn(u16) -> io::Result<u16>) -> io::Result<Vec<Candidate>> {
    let mut candidates = Vec::new();
    for Capability { id, offset } in walk_capabilities(read)? {
        let offset = u16::from(offset);
        match id {
            regs::CAP_ID_MSIX => candidates.extend(msix_candidate(offset, read)?),
            regs::CAP_ID_MSI => candidates.extend(msi_candidates(offset, read)?),
            _ => {}
        }
    }
    candidates.sort_by_key(|candidate| !candidate.decisive);
    Ok(candidates)
}

/// The register of an MSI-X capability at `offset`, if it may take a marker.
fn msix_candidate(capability: u16, read: &dyn Fn(u16) -> io::Result<u16>) -> io::Result<Option<Candidate>> {
    let offset = capability + regs::MSIX_FLAGS;
    let is_off = read(offset)? & (regs::MSIX_FLAGS_ENABLE | regs::MSIX_FLAGS_MASKALL) == 0;
    let changed = regs::MSIX_FLAGS_MASKALL;
    Ok(is_off.then_some(Candidate {
        register: "MSI-X Function Mask",
        capability,
        id: regs::CAP_ID_MSIX,
        decisive: true,
        offset,
        changed,
    }))
}

/// The registers of an MSI capability that may take a marker.
fn msi_candidates(capability: u16, read: &dyn Fn(u16) -> io::Result<u16>) -> io::Result<Vec<Candidate>> {
    let control = read(capability + regs::MSI_FLAGS)?;
    let is_wide = control & regs::MSI_FLAGS_64BIT != 0;
    let data = capability + if is_wide { regs::MSI_DATA_64 } else { regs::MSI_DATA_32 };
    // Mask bits come after the data.
    let mask = data + 4;
    if control & regs::MSI_FLAGS_ENABLE != 0 || usize::from(mask) + 2 > CONFIG_SIZE {
        return Ok(Vec::new());
    }
    let id = regs::CAP_ID_MSI;
    let mut candidates = Vec::new();
    if control & regs::MSI_FLAGS_MASKBIT != 0 && read(mask)? & 1 == 0 {
        candidates.push(Candidate {
            register: "MSI Mask",
            capability,
            id,
            decisive: true,
            offset: mask,
            changed: 1,
        });
    }
    let register = "MSI Message Data";
    candidates.push(Candidate { register, capability, id, decisive: false, offset: data, changed: 0x5aa5 });
    Ok(candidates)
}

/// The function's own reset methods, as sysfs has them.
struct Methods {
    address: PciAddress,
    path: std::path::PathBuf,
    /// The list as it was; `None` where the Linux kernel (before 5.15) does not show it.
    text: Option<String>,
    restricted: std::cell::Cell<bool>,
}

impl Methods {
    fn read(host: &Host, address: PciAddress) -> Self {
        let path = host.pci_device(address).join("reset_method");
        let text = std::fs::read_to_string(&path).ok().map(|text| text.trim().to_owned());
        Self { address, path, text, restricted: false.into() }
    }

    /// The methods in order; one unnamed where the Linux kernel does not tell.
    fn steps(&self) -> Vec<Option<ResetMethod>> {
        let steps: Vec<_> =
            self.text.iter().flat_map(|text| text.split_whitespace()).map(|name| name.parse().ok()).collect();
        if steps.is_empty() { vec![None] } else { steps }
    }

    /// Makes `method` the only one.
    fn restrict(&self, host: &Host, method: ResetMethod, time_left: &mut Duration) -> io::Result<()> {
        self.restricted.set(true);
        let start = Instant::now();
        let written = self.write(host, &method.to_string(), RESET_METHOD.min(*time_left));
        *time_left = time_left.saturating_sub(start.elapsed());
        written
    }

    fn write(&self, host: &Host, value: &str, deadline: Duration) -> io::Result<()> {
        write_locked(host, self.address, &self.path, value, deadline)
    }

    /// Puts the list back as it was.
    fn restore(&self, host: &Host) {
        if let Some(text) = self.text.as_deref().filter(|_| self.restricted.replace(false))
            && let Err(error) = self.write(host, text, RESET_METHOD)
        {
            tracing::error!(path = %self.path.display(), %error, "could not put the reset methods back");
        }
    }
}

#[cfg(test)]
mod tests;
