//! What `list`, `info` and `explain` say of real functions: the same as sysfs, and why two of them can't be passed.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::agent::{Function, L1, NvmeDisk};
use crate::scenario::{Contents, Disk, Scenario, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_ati::ATI;
use crate::scenarios::linux_e1000e::E1000E;
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "scan-explain",
    about: "list, info and explain agree with sysfs on types, groups and drivers, and name what blocks a device",
    variants: Variants::Both,
    ports: 5,
    devices: &[
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0",
        "-device",
        "e1000e,bus=port1",
        "-device",
        "edu,bus=port2,dma_mask=0xffffffffffffffff",
        "-device",
        "ati-vga,model=rv100,bus=port3,multifunction=on,addr=0.0",
        "-device",
        "ich9-intel-hda,bus=port3,addr=0.1",
        "-device",
        "pcie-pci-bridge,id=bridge0,bus=port4",
        "-device",
        "e1000e,bus=bridge0,addr=1.0",
        "-device",
        "pci-testdev,bus=bridge0,addr=2.0",
    ],
    disks: &[Disk { name: "disk", mib: 16 }],
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents::NONE,
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
const HDA: (u16, u16) = (0x8086, 0x293e);
const TESTDEV: (u16, u16) = (0x1b36, 0x0005);
/// `vm-service`'s exit status for a device that can't be passed.
const BLOCKED: i32 = 3;

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    NvmeDisk::of(&nvme)?;
    let list = l1.vm_service(&["list", "--all", "--json"], TIMEOUT)?.succeeded()?;
    l1.figure("list --all", list.took.as_secs_f64() * 1e3, "ms");
    let list = list.json()?;
    let listed = list.get("functions").and_then(Value::as_array).context("`list --json` has no functions")?;
    let addresses: BTreeSet<&str> =
        listed.iter().filter_map(|function| function.get("address")?.as_str()).collect();
    let all = Function::all()?;
    let expected: BTreeSet<&str> = all.iter().map(|function| function.address.as_str()).collect();
    l1.prove(addresses == expected, format!("list --all names all {} functions", expected.len()))?;
    for function in &all {
        let entry = find(listed, &function.address)?;
        let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
        ensure!(text("driver") == function.driver(), "{}: driver {:?}", function.address, text("driver"));
        let group = entry.get("iommu_group").and_then(Value::as_u64).map(|group| group.to_string());
        ensure!(
            group == function.group(),
            "{}: group {group:?}, not {:?}",
            function.address,
            function.group()
        );
        let ids = format!(
            "0x{} 0x{}",
            text("vendor_id").unwrap_or_default(),
            text("device_id").unwrap_or_default()
        );
        let expected = format!(
            "{} {}",
            function.attribute("vendor").unwrap_or_default(),
            function.attribute("device").unwrap_or_default()
        );
        ensure!(ids == expected, "{}: ids {ids}, not {expected}", function.address);
    }
    l1.proved("ids, driver and group of every function agree with sysfs");

    for ((vendor, device), kind) in [(NVME, "nvme"), (E1000E, "network"), (EDU, "other"), (ATI, "gpu-amd")] {
        for function in Function::find_all(vendor, device)? {
            let info = l1.vm_service(&["info", &function.address, "--json"], TIMEOUT)?.succeeded()?.json()?;
            let got = info.get("function").and_then(|function| function.get("type")).and_then(Value::as_str);
            l1.prove(got == Some(kind), format!("{vendor:04x}:{device:04x} is of type {kind} ({got:?})"))?;
        }
    }
    let accelerators = l1.vm_service(&["list", "--json"], TIMEOUT)?.succeeded()?.json()?;
    let accelerators = accelerators.get("functions").and_then(Value::as_array).context("no functions")?;
    l1.prove(
        find(accelerators, &Function::find(ATI.0, ATI.1)?.address).is_ok()
            && find(accelerators, &nvme.address).is_err(),
        "list names the GPU and no disk",
    )?;

    // The function's slot-mate, the audio of a GPU, is taken along and blocks nothing.
    let (gpu, audio) = (Function::find(ATI.0, ATI.1)?, Function::find(HDA.0, HDA.1)?);
    l1.prove(gpu.group() == audio.group(), "a GPU and its audio are in one group")?;
    for ready in [&nvme, &Function::find(EDU.0, EDU.1)?] {
        let explained = l1.vm_service(&["explain", &ready.address, "--json"], TIMEOUT)?;
        l1.prove(explained.code == Some(0), format!("{} can be passed", ready.address))
            .with_context(|| format!("explain said:\n{}{}", explained.stdout, explained.stderr))?;
    }
    let explained = l1.vm_service(&["explain", &gpu.address, "--json"], TIMEOUT)?;
    l1.prove(!codes(&explained.json()?).contains("group-not-viable"), "the GPU's audio does not block it")?;

    // Behind the conventional bridge a card with a driver blocks its neighbour without one, and not the other way
    // round.
    let testdev = Function::find(TESTDEV.0, TESTDEV.1)?;
    let card =
        Function::find_all(E1000E.0, E1000E.1)?.into_iter().find(|card| card.group() == testdev.group());
    let card = card.context("no card shares the group of the test device")?;
    let explained = l1.vm_service(&["explain", &testdev.address, "--json"], TIMEOUT)?;
    l1.prove(explained.code == Some(BLOCKED), format!("{} can't be passed", testdev.address))?;
    l1.prove(codes(&explained.json()?).contains("group-not-viable"), "because its group is not viable")?;
    l1.prove(
        explained.stdout.contains(&card.address) && explained.stdout.contains("e1000e"),
        format!("it names {} and its driver", card.address),
    )
}

fn find<'a>(functions: &'a [Value], address: &str) -> Result<&'a Value> {
    let found =
        functions.iter().find(|function| function.get("address").and_then(Value::as_str) == Some(address));
    found.with_context(|| format!("{address} is not in the list"))
}

/// All values of `code`, wherever they are in the document.
fn codes(document: &Value) -> BTreeSet<String> {
    match document {
        Value::Object(fields) => {
            let own = fields.get("code").and_then(Value::as_str).map(str::to_owned);
            own.into_iter().chain(fields.values().flat_map(codes)).collect()
        }
        Value::Array(items) => items.iter().flat_map(codes).collect(),
        _ => BTreeSet::new(),
    }
}
