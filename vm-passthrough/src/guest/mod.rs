//! A device as its guest sees it, and what a VMM gives so that it can.

mod bar_map;
mod bars;
mod config;
mod device;
mod dma;
mod gate;
mod interface;
mod interrupts;
mod intx;
#[cfg(feature = "kvm")]
mod kvm;
mod msix;
mod peers;
#[cfg(feature = "kvm")]
mod routes;
mod state;
mod sys;

pub use bar_map::{BarHit, BarMap};
pub use device::{DeviceOptions, Rom, VfioPciDevice};
pub use interface::{
    DecodedBar, DeviceError, MapId, MsiMessage, PassthroughDevice, RamRegion, RouteId, Vmm, VmmError,
};
#[cfg(feature = "kvm")]
pub use kvm::KvmVmm;
pub use msix::MsixTable;
pub use peers::{PeerDma, PeerReport};
#[cfg(feature = "vm-memory")]
pub use sys::SharedMemory;

#[cfg(test)]
mod tests;
