//! A user-space driver has a card by vfio-pci, and shares a token with who may have its virtual functions.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::linux_igb::{IGB, IGB_VF};
use crate::agent::{Function, Guest, GuestPlan, Holder, L1};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "vf-token",
    about: "a virtual function of a user-space driver's card is opened with its token, and with no other",
    // The other back end asks for no token, before Linux 6.18.
    variants: Variants::Only(Variant::Group),
    ports: 1,
    devices: &["-device", "igb,bus=port0"],
    disks: &[],
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
const TOKEN: &str = "2ab74924-c335-45f4-9b16-8569e5b08258";
const OTHER: &str = "00000000-c335-45f4-9b16-8569e5b08258";
const FAILED: i32 = 1;

fn l1(l1: &mut L1) -> Result<()> {
    let physical = Function::find(IGB.0, IGB.1)?;
    physical.bind(Some("vfio-pci"))?;
    fs::write("/sys/module/vfio_pci/parameters/enable_sriov", "1").context("vfio-pci has no enable_sriov")?;
    let holder = Holder::with_token(&physical, TOKEN)?;
    l1.vm_service(&["vfs", "create", &physical.address, "1"], TIMEOUT)?.succeeded()?;
    let function = Function::find(IGB_VF.0, IGB_VF.1)?;
    let before = function.driver();
    for (name, token) in [("without", None), ("wrong", Some(OTHER)), ("right", Some(TOKEN))] {
        let line = token.map_or_else(String::new, |token| format!("vf_token = \"{token}\"\n"));
        let file = format!("[[devices]]\naddress = \"{}\"\n{line}", function.address);
        let plan = GuestPlan { file: &file, devices: Vec::new(), ..GuestPlan::bare(name, "pci", &function) };
        let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?;
        let said = format!("{}{}", ended.process.stderr, ended.process.stdout);
        l1.prove(!said.contains("c335"), format!("{name}: nothing says a token"))?;
        if token == Some(TOKEN) {
            let ended = ended.succeeded(l1)?;
            l1.prove(
                ended.console.contains("8086:10ca"),
                "with the token the guest has the virtual function",
            )?;
        } else {
            l1.prove(
                ended.process.code == Some(FAILED)
                    && said.contains("has set a VF token")
                    && said.contains("vf_token"),
                format!("{name}: the Linux kernel refuses it, and `run` says what is missing"),
            )
            .with_context(|| said)?;
        }
        l1.prove(function.driver() == before, format!("{name}: it is on {before:?} again"))?;
    }
    l1.vm_service(&["vfs", "remove", &physical.address], TIMEOUT)?.succeeded()?;
    drop(holder);
    fs::write("/sys/module/vfio_pci/parameters/enable_sriov", "0")?;
    physical.bind(None)
}
