//! Devices for a guest that runs.

use std::os::unix::fs::symlink;

use super::*;
use crate::pci::BarKind;
use crate::sim::{SimFunction, SimHost};

const PID: u32 = 4242;

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// What a guest with 1 GiB of RAM, whose VMM may lock this much, lacks for a device.
fn codes(sim: &SimHost, device: &str, change: impl FnOnce(&mut ExplainOptions)) -> Vec<&'static str> {
    let mut options = ExplainOptions::for_memory(1 << 30);
    options.vmm = Some(VmmProcess { pid: PID, memlock: None });
    change(&mut options);
    let readiness = explain(&sim.plain_host(), address(device), &options).unwrap();
    readiness.blockers.iter().map(|found| found.code.as_str()).collect()
}

#[test]
fn the_limit_of_its_vmm_counts_and_not_that_of_this_process() {
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::nvme(address("01:00.0")).group(1)).unwrap();
    let check = |memlock, is_pinned, expect: &[&str]| {
        let codes = codes(&sim, "01:00.0", |options| {
            options.vmm = Some(VmmProcess { pid: PID, memlock });
            options.ram_is_pinned = is_pinned;
        });
        assert_eq!(codes, expect, "{memlock:?}");
    };
    check(Some((1 << 30) - 1), false, &["memlock-too-low"]);
    check(Some((1 << 30) - 1), true, &[]);
    check(Some(1 << 30), false, &[]);
    // This process is not the one that locks the guest's RAM.
    sim.set_memlock(Some(8 << 20)).unwrap();
    sim.set_credentials(0, 0, 0).unwrap();
    check(None, false, &[]);
}

/// The VMM has the file of its devices' group open, and what it has already may be reset along with what it gets.
#[test]
fn what_the_guest_has_already_does_not_stand_in_the_way() {
    let sim = SimHost::new().unwrap();
    let (port, first, second) = (address("00:01.0"), address("01:00.0"), address("01:01.0"));
    sim.add(&SimFunction::root_port(port)).unwrap();
    for function in [first, second] {
        let function = SimFunction::nvme(function).below(port).group(7).resets("");
        sim.add(&function).unwrap();
    }
    sim.write(&format!("proc/{PID}/comm"), "guest-vmm\n").unwrap();
    std::fs::create_dir_all(sim.path(&format!("proc/{PID}/fd"))).unwrap();
    symlink(sim.path("dev/vfio/7"), sim.path(&format!("proc/{PID}/fd/3"))).unwrap();
    let own = codes(&sim, "01:01.0", |options| options.beside = vec![first]);
    assert!(!own.contains(&"in-use"), "{own:?}");
    let options = |options: &mut ExplainOptions| options.vmm = Some(VmmProcess { pid: 1, memlock: None });
    assert!(codes(&sim, "01:01.0", options).contains(&"in-use"));
    let readiness = |attached: &[PciAddress]| {
        let mut options = ExplainOptions::for_memory(1 << 30);
        (options.vmm, options.beside) = (Some(VmmProcess { pid: PID, memlock: None }), attached.to_vec());
        explain(&sim.plain_host(), second, &options).unwrap()
    };
    assert!(readiness(&[first]).is_ready(), "{}", readiness(&[first]));
    let alone = readiness(&[]);
    assert_eq!(alone.first_blocker().map(|found| found.code), Some(BlockerCode::NoReset), "{alone}");
}

/// A BAR is judged by the size that the claim gives it.
#[test]
fn bars_have_the_sizes_that_the_guest_gets() {
    let sim = SimHost::new().unwrap();
    let gpu = address("01:00.0");
    sim.add(&SimFunction::gpu(gpu).group(1)).unwrap();
    let found = pci::read_function(&sim.plain_host(), gpu).unwrap();
    let bar = found.bars.iter().find(|bar| bar.kind == BarKind::Memory64).unwrap().index;
    for (size, is_ready) in [(256 << 20, true), (1 << 60, false)] {
        let codes = codes(&sim, "01:00.0", |options| {
            options.bar_sizes = BTreeMap::from([(gpu, BTreeMap::from([(bar, size)]))]);
        });
        assert_eq!(!codes.contains(&"bars-too-large"), is_ready, "{codes:?}");
    }
}
