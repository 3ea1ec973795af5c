//! A device as its guest sees it, and what a VMM gives so that it can.

mod interface;

pub use interface::{DeviceError, MapId, MsiMessage, PassthroughDevice, RamRegion, RouteId, Vmm, VmmError};
