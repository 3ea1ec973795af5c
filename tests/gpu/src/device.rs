//! What the driver says of the device.

use anyhow::ensure;
use vm_accel::Accelerator;
use vm_cuda::CudaAccelerator;

use crate::skip::skip;
use crate::{Arguments, Test};

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![
        Test::new("every device is found by its PCI address", |_, report| {
            for device in vm_cuda::devices()? {
                let info = device.info();
                let address = info.address.clone().unwrap_or_default();
                let found = CudaAccelerator::at(&address.to_ascii_uppercase())?;
                ensure!(found.info() == info, "{address} is {:?}, not {info:?}", found.info());
                report.note(format!("{} at {address}: {} units, {}", info.name, info.units, info.driver));
            }
            let none = CudaAccelerator::at("ffff:ff:1f.7");
            ensure!(matches!(none, Err(vm_accel::Error::NoDevice { .. })), "{none:?}");
            Ok(())
        }),
        Test::new("health", |gpu, report| {
            let health = match gpu.accelerator.health() {
                Err(error @ vm_accel::Error::Unavailable { .. }) => return skip(error.to_string()),
                health => health?,
            };
            report.note(format!("{health:?}"));
            ensure!(health.temperature.is_some_and(|degrees| degrees < 120), "{health:?}");
            ensure!(health.memory_used.is_some(), "{health:?}");
            Ok(())
        }),
    ]
}
