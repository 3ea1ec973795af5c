//! The reset ladder, on devices of the fake.

use rustix::io::Errno;

use super::*;
use crate::pci::ResetMethod;

const PROVED: ResetEvidence = ResetEvidence::Register("MSI-X Function Mask");

fn report(method: ResetStep) -> ResetReport {
    ResetReport { method: Some(method), evidence: PROVED }
}

fn prove(device: &VfioDevice) -> Result<ResetReport> {
    DeviceFile::reset_and_prove(device)
}

#[test]
fn steps_are_named() {
    assert_eq!(ResetStep::Hot.to_string(), "hot reset");
    assert_eq!(ResetStep::Function(ResetMethod::Flr).to_string(), "flr");
}

#[test]
fn a_locked_function_is_tried_again() {
    for backend in BACKENDS {
        let (kernel, gpu, device) = opened(backend);
        device.reset().unwrap();
        assert_eq!(kernel.state().device(gpu).reset_count, 1);
        kernel.state().fail(number::RESET, Errno::AGAIN, 2);
        kernel.state().log.clear();
        device.reset().unwrap();
        assert_eq!(kernel.state().count(number::RESET), 3);
        // No other failure is tried again.
        kernel.state().fail(number::RESET, Errno::NOTTY, 3);
        kernel.state().log.clear();
        refused(device.reset(), "VFIO_DEVICE_RESET on 0000:65:00.0");
        assert_eq!(kernel.state().count(number::RESET), 1);
        // A removed function, or one that the host wants back, is not tried again.
        kernel.state().fail(number::RESET, Errno::AGAIN, 2);
        kernel.state().device(gpu).write(7, 0x0b, &[0xff]);
        refused(device.reset(), "VFIO_DEVICE_RESET");
        kernel.state().device(gpu).write(7, 0x0b, &[0x03]);
        kernel.state().fail(number::RESET, Errno::AGAIN, 2);
        kernel.state().device(gpu).fire(REQ_IRQ, 0);
        kernel.state().log.clear();
        refused(device.reset(), "VFIO_DEVICE_RESET");
        assert_eq!(kernel.state().count(number::RESET), 1);
    }
}

#[test]
fn the_first_method_that_works_ends_the_ladder() {
    let (kernel, gpu, device) = opened(Backend::Group);
    let flr = ResetStep::Function(ResetMethod::Flr);
    let bus = ResetStep::Function(ResetMethod::Bus);
    assert_eq!(prove(&device).unwrap(), report(flr));
    kernel.sysfs(gpu, "reset_method", "flr bus\n");
    assert_eq!(prove(&device).unwrap(), report(flr));
    assert!(kernel.state().writes.is_empty(), "the first method needs no change to the list");
    // The first does nothing, the second works: the list is put back.
    kernel.state().device(gpu).resets = [Effect::Nothing, Effect::Resets].into();
    assert_eq!(prove(&device).unwrap(), report(bus));
    let writes: Vec<_> =
        kernel.state().writes.iter().map(|(name, value, _)| format!("{name} {value}")).collect();
    assert_eq!(writes, ["reset_method bus", "reset_method flr bus"]);
    // It comes out of it in D3hot, and is woken.
    kernel.sysfs(gpu, "reset_method", "pm\n");
    kernel.state().device(gpu).after_reset = vec![(0x64, 3)];
    assert_eq!(prove(&device).unwrap(), report(ResetStep::Function(ResetMethod::Pm)));
    assert_eq!(kernel.state().device(gpu).read(7, 0x64, 1), [0]);

    // None works, and there is no hot reset.
    kernel.sysfs(gpu, "reset_method", "flr bus\n");
    kernel.state().device(gpu).resets = [Effect::Nothing, Effect::Fails(Errno::IO)].into();
    let message = prove(&device).unwrap_err().to_string();
    for part in ["flr: the Linux kernel reports success, but", "; bus: VFIO_DEVICE_RESET", "; hot reset: "] {
        assert!(message.contains(part), "{message}");
    }
    std::fs::remove_file(kernel.host.pci_device(gpu).join("reset_method")).unwrap();
    refused(prove(&device), "the Linux kernel's choice: VFIO_DEVICE_RESET");
}

#[test]
fn the_reset_that_opening_makes_counts_until_the_device_is_used() {
    let opened_fresh = || opened_as(Backend::Iommufd, |device| device.open_resets = true);
    let by_open = ResetReport { method: None, evidence: PROVED };
    type Use = fn(&VfioDevice);
    let uses: [(Use, bool); 6] = [
        (|_| {}, true),
        // Decoding and DMA off, and INTx.
        (|device| device.write(CONFIG_REGION, 4, &[0, 4]).unwrap(), true),
        (|device| device.read(0, 0, &mut [0]).unwrap(), true),
        (|device| device.write(CONFIG_REGION, 4, &[2, 0]).unwrap(), false),
        (|device| device.write(0, 0x10, &[0]).unwrap(), false),
        (|device| drop(device.map(0, 0, 0x1000).unwrap()), false),
    ];
    for (index, (act, counts)) in uses.into_iter().enumerate() {
        let (kernel, gpu, device) = opened_fresh();
        assert_eq!(kernel.state().device(gpu).reset_count, 1);
        act(&device);
        let expect = if counts { by_open.clone() } else { report(ResetStep::Function(ResetMethod::Flr)) };
        assert_eq!(prove(&device).unwrap(), expect, "{index}");
        assert_eq!(kernel.state().device(gpu).reset_count, if counts { 1 } else { 2 });
        // It counts once.
        assert_eq!(prove(&device).unwrap(), report(ResetStep::Function(ResetMethod::Flr)));
    }
}

/// Opens a GPU and its audio function, which have no function reset.
fn pair(backend: Backend) -> (Kernel, [PciAddress; 2], Arc<VfioDevice>, Arc<VfioDevice>) {
    let mut kernel = Kernel::new();
    let both = [kernel.add(GPU, 12, &config()), kernel.add(AUDIO, 13, &config())];
    for address in both {
        let mut state = kernel.state();
        let device = state.device(address);
        (device.has_reset, device.hot_set) = (false, both.to_vec());
    }
    let space = space(&kernel, backend);
    let [gpu, audio] = both.map(|address| open_in(&kernel, address, &space).unwrap());
    (kernel, both, gpu, audio)
}

#[test]
fn a_hot_reset_waits_until_the_others_are_at_rest() {
    for backend in BACKENDS {
        let (kernel, [first, second], gpu, audio) = pair(backend);
        refused(prove(&gpu), "it would also reset 0000:65:00.1, which is in use");
        assert_eq!(kernel.state().device(first).reset_count, 0);
        let keeper: &dyn Keeper = &*audio;
        keeper.set_at_rest(true);
        assert_eq!(prove(&gpu).unwrap(), report(ResetStep::Hot));
        assert_eq!(kernel.state().device(second).reset_count, 1);
        // The audio function was reset with it, which counts once.
        assert_eq!(prove(&audio).unwrap(), report(ResetStep::Hot));
        assert_eq!(kernel.state().device(second).reset_count, 1);
        refused(prove(&audio), "0000:65:00.0, which is in use");
        keeper.set_at_rest(false);
        refused(prove(&gpu), "in use");
        gpu.put_at_rest().unwrap();
        assert_eq!(prove(&audio).unwrap(), report(ResetStep::Hot));
        assert_eq!(kernel.state().device(first).reset_count, 2);
        assert_eq!(prove(&gpu).unwrap(), report(ResetStep::Hot));
        assert_eq!(kernel.state().device(first).reset_count, 2, "it was reset with the audio function");
        // A hot reset without effect is refuted; a failed one is reported.
        keeper.set_at_rest(true);
        kernel.state().device(first).hot_reset = Effect::Nothing;
        refused(prove(&gpu), "hot reset: the Linux kernel reports success, but MSI-X Function Mask kept");
        kernel.state().device(first).hot_reset = Effect::Fails(Errno::IO);
        refused(prove(&gpu), "hot reset: VFIO_DEVICE_PCI_HOT_RESET on 0000:65:00.0");
        audio.close().unwrap();
        if backend == Backend::Group {
            refused(prove(&gpu), "it would also reset group 13, which this guest does not have");
        } else {
            kernel.state().device(first).hot_owned = false;
            refused(prove(&gpu), "it would also reset 0000:65:00.1, which the guest does not have");
        }
    }
}

#[test]
fn sets_of_a_hot_reset_are_checked() {
    let functions = |count: u32| -> Vec<PciAddress> {
        (0..count)
            .map(|number| PciAddress::new(0, 0x65, number as u8 >> 3, number as u8 & 7).unwrap())
            .collect()
    };
    let (kernel, gpu, device) = opened_as(Backend::Iommufd, |device| device.has_reset = false);
    for (count, calls) in [(1, 1), (8, 1), (9, 2), (256, 2)] {
        kernel.state().device(gpu).hot_set = functions(count);
        kernel.state().log.clear();
        assert_eq!(prove(&device).unwrap(), report(ResetStep::Hot), "{count}");
        assert_eq!(kernel.state().count(number::HOT_RESET_INFO), calls);
    }
    kernel.state().device(gpu).hot_set = [functions(256), functions(1)].concat();
    refused(prove(&device), "VFIO_DEVICE_GET_PCI_HOT_RESET_INFO with a set of 257 functions");
    kernel.state().device(gpu).hot_set = functions(9).split_off(1);
    refused(prove(&device), "does not have the function itself");
    kernel.state().device(gpu).hot_set.clear();
    refused(prove(&device), "no port above it");
    // ENOSPC with a count that had room, or with too high a count. The fake ends a loop after ten calls.
    for claimed in [0, 3, 8, 300] {
        let mut calls = 0;
        kernel.state().device(gpu).hot_set = functions(1);
        kernel.state().twist(number::HOT_RESET_INFO, move |bytes, _| {
            calls += 1;
            kernel::put32(bytes, 8, claimed);
            Err(if calls < 10 { Errno::NOSPC } else { Errno::NODEV }.into())
        });
        refused(prove(&device), &format!("a set of {claimed} functions"));
    }
}
