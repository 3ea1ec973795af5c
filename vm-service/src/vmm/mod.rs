//! The virtual machine: a KVM guest with memory, processors, ACPI, PCI Express, a serial console and virtio disks;
//! enough to give it PCI devices superbly, and no more.
//!
//! There is no firmware: the guest's program is loaded straight into RAM (see [`boot`]), and the machine places
//! BARs and bridge windows itself before the guest starts, which the guest keeps. The platform is chosen to make a
//! boot take few exits: hardware-reduced ACPI, no PIT, no CMOS clock, no keyboard, no VGA, and only as many PCI
//! buses as there are devices.
//!
//! ```no_run
//! # use std::path::Path;
//! # use vm_service::config::GuestConfig;
//! # use vm_service::vmm::{Machine, MachineOptions, Stop};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let config: GuestConfig = unimplemented!();
//! let mut machine = Machine::new(&config, MachineOptions::default())?;
//! // machine.expect(ExpectedFunction::of(&function))?;
//! let handle = machine.handle(); // `handle.arrive(device)` from any thread, also while the guest runs
//! let stop = Stop::new()?; // `stop.request()` from any thread ends the guest
//! let report = machine.run(&stop)?;
//! println!("{}", report.end);
//! # Ok(())
//! # }
//! ```
//!
//! [`boot`]: BootError

mod acpi;
mod boot;
mod cpu;
mod error;
mod exits;
mod explain;
mod io;
pub mod layout;
mod lifecycle;
mod loading;
mod machine;
pub(crate) mod memory;
mod numa;
mod pci;
mod power_button;
mod quiesced;
mod restarts;
mod serial;
mod stop;
pub(crate) mod sys;
#[cfg(test)]
mod testing;
#[cfg(test)]
pub(crate) mod tests;
mod vcpu;
mod virtio;

pub use crate::os::process::ChildProgram;
pub use boot::BootError;
pub use error::MachineError;
pub use exits::{ExitCounts, HotSpot};
pub(crate) use explain::explain_options;
pub use lifecycle::{End, OnReboot};
pub use machine::{Console, Machine, MachineHandle, MachineOptions, Opened, RunReport};
pub use numa::{GuestNuma, NumaError};
pub use pci::{ExpectedFunction, GuestAnswer};
pub use power_button::PowerButton;
pub use stop::Stop;
