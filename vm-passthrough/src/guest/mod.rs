//! A device as its guest sees it, and what a VMM gives so that it can.

mod interface;
mod kvm;
pub mod placement;
mod routes;
pub(crate) mod sys;

pub use interface::{DeviceError, MapId, MsiMessage, PassthroughDevice, RamRegion, RouteId, Vmm, VmmError};
pub use kvm::KvmVmm;
