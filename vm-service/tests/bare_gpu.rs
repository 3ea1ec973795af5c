//! A bare guest with the modelled GPU as a PCI function of its own, which a machine of `vm-service` gives it as any that VFIO
//! opened, on this machine's own `/dev/kvm`. Where that does not open, or the guest can't be built, these tests say so and pass.
//!
//! The guest's program (`tests/testbed/guests/src/gpu.rs`) shares no code with the model.

#[path = "shared/bare.rs"]
mod bare;

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vm_passthrough::gpu::HostClock;
use vm_passthrough::guest::VfioPciDevice;
use vm_passthrough::pci::{self, BarKind};
use vm_passthrough::sim::{GpuFault, SimFunction, SimGpu, SimHost, SimLog};
use vm_passthrough::{PassthroughDevice as _, PciAddress};
use vm_service::config::GuestConfig;
use vm_service::vmm::{Console, End, ExpectedFunction, Machine, MachineOptions, OnReboot, Stop};

/// How long a guest may take, where its processor is emulated and the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(240);

/// What the guest prints.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().map_err(|_| std::io::ErrorKind::Other)?.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a guest whose GPU has these faults. What it prints, and the GPU afterwards.
fn run(program: &Path, faults: &[GpuFault]) -> Result<(String, Arc<SimGpu>), Box<dyn Error>> {
    let address: PciAddress = "0000:65:00.0".parse()?;
    let gpu = SimGpu::new(address, Arc::new(HostClock::default()), &SimLog::default())?;
    faults.iter().for_each(|&fault| gpu.fail(fault));
    // A scan finds of such a function what the machine expects of it.
    let host = SimHost::new()?;
    let function = SimFunction::new(address, 0x10de, 0x2330, 0x03_0200);
    host.add(&function.bar(0, BarKind::Memory32, false, 0x8000_0000, 16 << 20))?;
    let function = pci::read_function(&host.plain_host(), address)?;

    let text = format!(
        "name = \"gpu\"\nmemory = \"32M\"\n[boot]\nkernel = \"{}\"\ncmdline = \"gpu\"\n",
        program.display()
    );
    let config = GuestConfig::parse(&text, Path::new("/gpu.toml"))?;
    let screen = Screen::default();
    let console = Console { output: Box::new(screen.clone()), input: None };
    let options = MachineOptions { console, on_reboot: OnReboot::End, ..MachineOptions::default() };
    let mut machine = Machine::new(&config, options)?;
    let device = VfioPciDevice::new(gpu.clone(), machine.vmm())?;
    device.attach()?;
    machine.expect(ExpectedFunction::of(&function))?;
    machine.handle().arrive(device.clone())?;
    let stop = Stop::new()?;
    let late = stop.clone();
    std::thread::spawn(move || {
        std::thread::sleep(TIMEOUT);
        late.request();
    });
    let end = machine.run(&stop)?.end;
    let text = String::from_utf8_lossy(&screen.0.lock().map_err(|error| error.to_string())?).into_owned();
    if end != End::Shutdown {
        return Err(format!("the guest ended by {end}: {text}").into());
    }
    device.detach()?;
    Ok((text, gpu))
}

/// The guest's program, if guests can run here.
fn program() -> Option<std::path::PathBuf> {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        println!("skipped: /dev/kvm does not open: {error}");
        return None;
    }
    bare::program().inspect_err(|reason| println!("skipped: {reason}")).ok()
}

#[test]
fn a_guest_drives_the_modelled_gpu_by_registers_ring_and_interrupts() {
    let Some(program) = program() else { return };
    let (text, gpu) = run(&program, &[]).expect("a guest");
    println!("{text}");
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let checks = [
        "dark",
        "identification",
        "clock",
        "power",
        "no-channel",
        "not-master",
        "fill",
        "copy",
        "wait",
        "wrap",
        "idle-doorbell",
        "errors",
        "reset",
        "after-reset",
    ];
    let expect: Vec<_> = checks.iter().map(|check| format!("bare: {check} ok")).collect();
    assert_eq!(lines, [expect, vec!["bare: PASS".into()]].concat());
    // The guest's own, and those when it got the function and lost it.
    assert_eq!(gpu.device().resets(), 3);
    assert!(gpu.dma().maps().is_empty(), "the GPU reaches the guest's memory after it was taken from it");
}

/// That the guest's checks can fail.
#[test]
fn a_guest_sees_what_is_wrong_with_the_gpu() {
    let Some(program) = program() else { return };
    let check = |fault, expect: &str| {
        let (text, _) = run(&program, &[fault]).expect("a guest");
        let failed = text.lines().find(|line| line.contains("FAILED")).unwrap_or_default().trim();
        assert_eq!(failed, format!("bare: {expect}"), "{fault:?}: {text}");
        assert!(text.contains("bare: FAIL"), "{fault:?}: {text}");
    };
    let faults = [
        (GpuFault::Registers(u32::MAX), "identification FAILED: its boot register reads all ones"),
        (
            GpuFault::Boot(0xbadf_1100),
            "identification FAILED: its boot register reads NVIDIA's pattern for errors",
        ),
        (
            GpuFault::Boot(0x1920_00a1),
            "identification FAILED: its boot register does not say GH100 revision A1",
        ),
        (GpuFault::StuckCommand(2), "identification FAILED: its boot register reads all ones"),
        (GpuFault::SilentGet, "not-master FAILED: GP_GET is not where GP_PUT is"),
        // The guest waits for these until it gives up.
        (GpuFault::Frozen, "clock FAILED: its counter of nanoseconds stands still"),
        (GpuFault::Hang, "not-master FAILED: the fence is not written"),
        (GpuFault::NoInterrupt, "not-master FAILED: the interrupt does not come"),
    ];
    std::thread::scope(|scope| {
        for (fault, expect) in faults {
            scope.spawn(move || check(fault, expect));
        }
    });
}
