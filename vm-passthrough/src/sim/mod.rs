//! A simulated host: a sysfs tree, drivers that bind and unbind, and faults on demand.
//!
//! [`SimHost`] is a directory tree laid out as Linux lays out `/sys`, `/dev` and `/proc`, on which everything
//! of this crate runs as on a real host. A new one is *healthy*: it has an IOMMU with interrupt remapping,
//! vfio-pci is loaded, the device nodes are there and the process may do as it likes. Tests take away what they
//! are about.
//!
//! One that is kept in a directory ([`SimHost::open`]) has an enclosure with a GPU, whose faults ([`SimHost::inject`], in the words of
//! [`SimScript`]) lie in the directory too, so that every process meets them.
//!
//! ```
//! use vm_passthrough::pci;
//! use vm_passthrough::sim::{SimFunction, SimHost};
//!
//! let sim = SimHost::new()?;
//! sim.add(&SimFunction::nvme("0000:01:00.0".parse()?).driver("nvme"))?;
//! let functions = pci::scan(&sim.plain_host())?;
//! assert_eq!(functions[0].driver.as_deref(), Some("nvme"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod amdgpu;
mod clock;
mod config;
mod device;
mod drivers;
pub mod egpu;
mod example;
mod faults;
mod function;
mod fuzz;
mod fuzz_device;
mod gpu;
mod registers;
mod tree;
mod usb4;
mod vfio_config;
mod vmm;
mod work;

pub use clock::SimClock;
pub use config::SimConfig;
pub use device::{Fault, SimDevice, SimDeviceBuilder};
pub use drivers::SimDrivers;
pub use egpu::{SimEgpu, SimScript};
pub use faults::InjectError;
pub use function::SimFunction;
pub use fuzz::fuzz_sysfs;
pub use fuzz_device::fuzz_config_space;
pub use gpu::{GpuFault, SimGpu};
pub use tree::{FileWriter, SimHost};
pub use vmm::{SimLog, SimSpace, SimVmm};
pub use work::SimGoing;
