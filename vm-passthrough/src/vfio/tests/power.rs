//! Waking a function, on a device of the fake.

use std::time::{Duration, Instant};

use super::*;
use crate::vfio::power::{is_cold, wake_until};

#[test]
fn a_function_is_woken_when_it_is_opened() {
    for backend in BACKENDS {
        let (kernel, gpu, device) = opened_as(backend, |device| {
            // D3hot, with power management events enabled, which stay so.
            device.write(7, 0x64, &[0x03, 0x01]);
        });
        assert_eq!(kernel.state().device(gpu).read(7, 0x64, 2), [0, 1]);
        let woken: &dyn Keeper = &*device;
        kernel.state().device(gpu).write(7, 0x64, &[0x01, 0x01]);
        woken.wake().unwrap();
        assert_eq!(kernel.state().device(gpu).read(7, 0x64, 2), [0, 1]);
    }
}

#[test]
fn a_function_that_stays_asleep_is_lost() {
    let (kernel, gpu, device) = opened(Backend::Group);
    kernel.state().device(gpu).write(7, 0x64, &[2]);
    let now = Instant::now();
    refused(wake_until(&kernel.host, &device, now), "it stays in D2 (power control reads 0x0002)");
    kernel.state().device(gpu).write(7, 0x64, &[0]);
    wake_until(&kernel.host, &device, now).unwrap();
    // All ones, and the Linux kernel's answer when the function is gone.
    kernel.state().device(gpu).write(7, 0, &[0xff; 256]);
    refused(wake_until(&kernel.host, &device, now), "its config space reads all ones");
    std::fs::remove_file(kernel.host.pci_device(gpu).join("driver")).unwrap();
    let wanted = wake_until(&kernel.host, &device, now);
    assert!(matches!(wanted, Err(VfioError::WantedBack { .. })), "{wanted:?}");
    kernel.state().device(gpu).file.set_len(0).unwrap();
    let dead = wake_until(&kernel.host, &device, now);
    assert!(matches!(dead, Err(VfioError::System { operation: "read", .. })), "{dead:?}");
}

#[test]
fn a_function_without_power_management_is_awake() {
    let mut kernel = Kernel::new();
    let mut config = config();
    config[0x41] = 0;
    let gpu = kernel.add(GPU, 12, &config);
    open_in(&kernel, gpu, &space(&kernel, Backend::Group)).unwrap();
}

#[test]
fn runtime_power_management_is_given_back() {
    for (before, writes) in [("auto\n", &["on", "auto"][..]), ("on\n", &["on"])] {
        let mut kernel = Kernel::new();
        let gpu = kernel.add(GPU, 12, &config());
        kernel.sysfs(gpu, "power_state", "D3cold\n");
        kernel.sysfs(gpu, "power/control", before);
        assert!(is_cold(&kernel.host, gpu));
        let device = open_in(&kernel, gpu, &space(&kernel, Backend::Iommufd)).unwrap();
        assert!(!is_cold(&kernel.host, gpu));
        let written: Vec<_> = kernel.state().writes.iter().map(|(_, value, _)| value.clone()).collect();
        assert_eq!(written, writes);
        // Each write has time: the first what is left to wake it, the other a second.
        let times: Vec<_> = kernel.state().writes.iter().map(|(_, _, time)| *time).collect();
        assert!(times[0] > Duration::from_secs(1), "{times:?}");
        assert!(times.iter().skip(1).all(|time| *time == Duration::from_secs(1)), "{times:?}");
        // One that does not wake.
        kernel.sysfs(gpu, "power_state", "D3cold\n");
        kernel.state().wakes = false;
        refused(wake_until(&kernel.host, &device, Instant::now()), "it stays in D3cold");
    }
}
