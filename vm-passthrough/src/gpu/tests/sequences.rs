//! Power states and bringing up, with each step made to fail.

use std::sync::Arc;
use std::time::Duration;

use super::super::{
    Clock as _, RegionRegisters, Registers as _, Step, bring_up, power_state, set_power_state,
};
use super::gpu;
use crate::deadlines::{GPU_BOOT, WAKE};
use crate::pci::{PowerState, regs};
use crate::sim::{Fault, GpuFault, SimConfig, SimDeviceBuilder, SimGpu, SimLog, SimSpace};
use crate::vfio::{DeviceFile as _, ResetEvidence};

fn command(gpu: &SimGpu) -> u16 {
    let config = gpu.device().config();
    u16::from_le_bytes([config[4], config[5]]) & (regs::COMMAND_MEMORY | regs::COMMAND_MASTER)
}

#[test]
fn a_gpu_is_brought_up() {
    let (gpu, clock) = gpu();
    gpu.set_boot_time(Duration::from_millis(250));
    let registers = RegionRegisters::new(gpu.clone(), 0).unwrap();
    // Before, nothing decodes.
    registers.read32(0).unwrap_err();
    let up = bring_up(&*gpu, &registers, &*clock).unwrap();
    assert_eq!(up.chip.to_string(), "GH100 (Hopper) revision A1");
    assert!(up.chip.confirmed);
    assert_eq!(up.reset.evidence, ResetEvidence::LinuxReport);
    assert_eq!(up.power.unwrap().from, PowerState::D0);
    assert!(up.boot >= Duration::from_millis(250) && up.boot < Duration::from_millis(300), "{:?}", up.boot);
    assert_eq!(gpu.device().resets(), 1);
    assert_eq!(command(&gpu), regs::COMMAND_MEMORY | regs::COMMAND_MASTER);
    assert_eq!(registers.read32(0x40_0000).unwrap(), 0xbadf_1100, "no such register");
}

#[test]
fn each_step_of_bringing_up_can_fail_and_says_so() {
    let check = |fail: &dyn Fn(&SimGpu), step: Step, expect: &str| {
        let (gpu, clock) = gpu();
        fail(&gpu);
        let registers = RegionRegisters::new(gpu.clone(), 0).unwrap();
        let error = bring_up(&*gpu, &registers, &*clock).unwrap_err();
        assert_eq!(error.step, step, "{error}");
        let text = error.to_string();
        assert!(text.starts_with("0000:65:00.0: could not ") && text.contains(expect), "{text}");
        assert!(clock.now() <= WAKE + GPU_BOOT + Duration::from_secs(1), "{:?}", clock.now());
        // It is left decoding nothing and doing no DMA, or that is said.
        assert_eq!(command(&gpu) != 0, error.left.is_some(), "{text}");
        text
    };
    check(&|gpu| gpu.device().fail(Fault::Reset), Step::Reset, "VFIO_DEVICE_RESET");
    check(&|gpu| gpu.device().fail(Fault::ResetRefuted), Step::Reset, "nothing was reset");
    check(&|gpu| gpu.device().want_back(), Step::Reset, "VFIO_DEVICE_RESET");
    check(&|gpu| gpu.device().vanish(), Step::Reset, "Inappropriate ioctl");
    let memory = GpuFault::StuckCommand(regs::COMMAND_MEMORY);
    check(&|gpu| gpu.fail(memory), Step::EnableMemory, "Command reads 0x0000 after 0x0002 was written");
    let boot = |value| move |gpu: &SimGpu| gpu.fail(GpuFault::Boot(value));
    let late = |text: String| assert!(text.contains("after 5"), "{text}");
    late(check(&boot(u32::MAX), Step::Boot, "NV_PMC_BOOT_0 reads all ones"));
    late(check(&boot(0), Step::Boot, "NV_PMC_BOOT_0 reads zero"));
    late(check(&boot(0xbadf_1001), Step::Boot, "NV_PMC_BOOT_0 reads 0xbadf1001"));
    // What will not pass is not waited for.
    let soon = |text: String| assert!(text.contains("after 0ns"), "{text}");
    soon(check(&boot(0x1c00_00a1), Step::Boot, "chip 0x1c0, which is not in the table"));
    soon(check(&boot(0x1920_00a1), Step::Boot, "which are two chips"));
    late(check(&|gpu| gpu.fail(GpuFault::Registers(u32::MAX)), Step::Boot, "all ones"));
    late(check(&|gpu| gpu.set_boot_time(Duration::from_secs(60)), Step::Boot, "all ones"));
    let master = GpuFault::StuckCommand(regs::COMMAND_MASTER);
    check(&|gpu| gpu.fail(master), Step::EnableMaster, "Command reads 0x0002 after 0x0006 was written");
}

#[test]
fn what_could_not_be_switched_off_again_is_said() {
    let (gpu, clock) = gpu();
    let registers = RegionRegisters::new(gpu.clone(), 0).unwrap();
    bring_up(&*gpu, &registers, &*clock).unwrap();
    // Linux restores Command after a reset, so memory is on again, and stays on.
    gpu.fail(GpuFault::StuckCommand(regs::COMMAND_MEMORY));
    gpu.fail(GpuFault::Boot(0x1c00_00a1));
    let error = bring_up(&*gpu, &registers, &*clock).unwrap_err();
    assert_eq!(error.step, Step::Boot);
    assert!(error.left.is_some());
    assert!(error.to_string().contains("it could not be switched off again: "), "{error}");
}

#[test]
fn power_states_change_and_are_read_back() {
    let (gpu, clock) = gpu();
    let change = |to| set_power_state(&*gpu, &*clock, to);
    assert_eq!(power_state(&*gpu).unwrap(), PowerState::D0);
    let begun = clock.now();
    assert!(!change(PowerState::D0).unwrap().lost_context);
    assert_eq!(clock.now(), begun, "there is nothing to wait for");
    let slept = change(PowerState::D3Hot).unwrap();
    assert_eq!((slept.from, slept.to, slept.lost_context), (PowerState::D0, PowerState::D3Hot, false));
    assert_eq!(power_state(&*gpu).unwrap(), PowerState::D3Hot);
    assert!(clock.now() - begun >= Duration::from_millis(10), "the specification's delay");
    let woke = change(PowerState::D0).unwrap();
    assert_eq!((woke.from, woke.lost_context), (PowerState::D3Hot, false));
    // Without No_Soft_Reset the way back is a reset.
    gpu.set_soft_reset(true);
    change(PowerState::D3Hot).unwrap();
    assert!(change(PowerState::D0).unwrap().lost_context);
    // A BAR is not read meanwhile.
    let registers = RegionRegisters::new(gpu.clone(), 0).unwrap();
    bring_up(&*gpu, &registers, &*clock).unwrap();
    change(PowerState::D3Hot).unwrap();
    registers.read32(0).unwrap_err();
    // And bringing up wakes it, as the reset does.
    bring_up(&*gpu, &registers, &*clock).unwrap();
}

#[test]
fn power_states_that_do_not_change_are_an_error() {
    let check = |fail: &dyn Fn(&SimGpu), to, step: Step, expect: &str| {
        let (gpu, clock) = gpu();
        fail(&gpu);
        let error = set_power_state(&*gpu, &*clock, to).unwrap_err();
        assert_eq!(error.step, step, "{error}");
        assert!(error.to_string().contains(expect), "{error}");
        assert!(clock.now() <= WAKE + Duration::from_secs(1), "{:?}", clock.now());
    };
    let stuck = |gpu: &SimGpu| gpu.fail(GpuFault::StuckPower);
    check(&stuck, PowerState::D3Hot, Step::ChangePower, "Power Management Control reads 0x0008 after 0x000b");
    for state in [PowerState::D1, PowerState::D2, PowerState::D3Cold, PowerState::Unknown] {
        check(&|_| (), state, Step::ChangePower, "can't be asked for; D0 and D3hot can");
    }
    let gone = |gpu: &SimGpu| gpu.device().vanish();
    check(&gone, PowerState::D0, Step::ReadPower, "Power Management Control reads all ones");
    let ones = |gpu: &SimGpu| gpu.device().set_config(0, &[0xff; 256]);
    check(&ones, PowerState::D0, Step::ReadPower, "reads all ones");
    let control = |gpu: &SimGpu| gpu.device().set_config(0x64, &[0xff; 2]);
    check(&control, PowerState::D0, Step::ReadPower, "Power Management Control reads all ones");
}

/// It is always in D0.
#[test]
fn a_function_without_power_management_is_brought_up_too() {
    let (gpu, clock) = gpu();
    let config = SimConfig::new(0x10de, 0x2330, 0x03_0200).bytes();
    let space = SimSpace::new(Vec::new(), &SimLog::default());
    let device = SimDeviceBuilder::new(config).bar(0, 0x1000, &[]).build(gpu.address(), space).unwrap();
    let registers = Arc::new(RegionRegisters::new(device.clone(), 0).unwrap());
    registers.write32(0, 0x1800_00a1).unwrap();
    let up = bring_up(&*device, &*registers, &*clock).unwrap();
    assert_eq!(up.power, None);
    assert!(!up.chip.confirmed);
}

#[test]
fn the_thermometer_and_the_heartbeat_are_registers() {
    let (gpu, clock) = gpu();
    let registers = RegionRegisters::new(gpu.clone(), 0).unwrap();
    bring_up(&*gpu, &registers, &*clock).unwrap();
    let temperature = || registers.read32(SimGpu::TEMPERATURE).unwrap() as i32;
    assert_eq!(temperature(), 40_000);
    for millidegrees in [91_500, -10_000] {
        gpu.set_temperature(millidegrees);
        assert_eq!(temperature(), millidegrees);
    }
    let beat = || registers.read32(SimGpu::HEARTBEAT).unwrap();
    let before = beat();
    clock.sleep(Duration::from_millis(1));
    assert_eq!(beat().wrapping_sub(before), 1_000_000);
    gpu.fail(GpuFault::Frozen);
    let before = beat();
    clock.sleep(Duration::from_millis(1));
    assert_eq!(beat(), before);
    registers.write32(SimGpu::THROTTLE, 30).unwrap();
    assert_eq!((gpu.throttle(), registers.read32(SimGpu::THROTTLE).unwrap()), (30, 30));
    registers.write32(SimGpu::THROTTLE, 1000).unwrap();
    assert_eq!(gpu.throttle(), 100);
    gpu.reset_and_prove().unwrap();
    assert_eq!(gpu.throttle(), 0);
}
