//! Tests of the real device, group and iommufd code against a fake of the Linux kernel.

use std::sync::Arc;

use super::*;
use crate::PciAddress;
use kernel::{Device, Effect, Kernel, number};

mod defaults;
mod device;
pub(super) mod kernel;
mod power;
mod resets;
mod spaces;

const GPU: &str = "0000:65:00.0";
const AUDIO: &str = "0000:65:00.1";
const NVME: &str = "0000:01:00.0";

/// Config space of a function with MSI-X, off, at 0x40, and power management at 0x60.
fn config() -> Vec<u8> {
    let mut config = vec![0; 256];
    config[..12].copy_from_slice(&[0xde, 0x10, 0x84, 0x26, 0, 0, 0x10, 0, 0xa1, 0, 0, 0x03]);
    config[0x2c..0x30].copy_from_slice(&[0x58, 0x14, 0x31, 0x40]);
    config[0x34] = 0x40;
    config[0x40..0x44].copy_from_slice(&[0x11, 0x60, 7, 0]);
    config[0x60..0x64].copy_from_slice(&[0x01, 0, 3, 0]);
    config
}

const BACKENDS: [Backend; 2] = [Backend::Group, Backend::Iommufd];

fn space(kernel: &Kernel, backend: Backend) -> Arc<Space> {
    open_space(&kernel.host, &[], Some(backend)).unwrap()
}

fn open_in(kernel: &Kernel, address: PciAddress, space: &Arc<Space>) -> Result<Arc<VfioDevice>> {
    open_device(&kernel.host, address, space, None, Arc::new(()))
}

/// A host with one function that is open in a space.
fn opened(backend: Backend) -> (Kernel, PciAddress, Arc<VfioDevice>) {
    opened_as(backend, |_| {})
}

/// As [`opened`], with a function that is changed first.
fn opened_as(backend: Backend, change: impl FnOnce(&mut Device)) -> (Kernel, PciAddress, Arc<VfioDevice>) {
    let mut kernel = Kernel::new();
    let gpu = kernel.add(GPU, 12, &config());
    change(kernel.state().device(gpu));
    let device = open_in(&kernel, gpu, &space(&kernel, backend)).unwrap();
    kernel.state().log.clear();
    (kernel, gpu, device)
}

/// Checks that a call failed, and that its message has a text.
fn refused<T>(answer: Result<T>, text: &str) {
    let message = answer.err().expect("a refusal").to_string();
    assert!(message.contains(text), "{message}, expected {text}");
}

fn memory(len: usize) -> Arc<HostMemory> {
    Arc::new(HostMemory::new(len).unwrap())
}
