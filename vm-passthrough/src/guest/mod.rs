//! A device as its guest sees it, and what a VMM gives so that it can.

mod bars;
mod config;
mod device;
mod dma;
#[cfg(feature = "sim")]
mod fuzz;
mod gate;
mod interface;
mod interrupts;
mod kvm;
mod msix;
pub mod placement;
mod routes;
mod state;
pub(crate) mod sys;

pub use device::{DeviceOptions, VfioPciDevice};
#[cfg(feature = "sim")]
pub use fuzz::fuzz_config_space;
pub use interface::{DeviceError, MapId, MsiMessage, PassthroughDevice, RamRegion, RouteId, Vmm, VmmError};
pub use kvm::KvmVmm;
pub use msix::MsixTable;

#[cfg(test)]
mod tests;
