use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;

use super::BlockerCode as Code;
use super::Severity::{Blocker as Blocks, Warning as Warns};
use super::*;
use crate::claim::{self, ClaimOptions};
use crate::ledger;
use crate::pci::BarKind;
use crate::sim::{SimFunction, SimHost};

mod access;
mod device;
mod disks;
mod divided;
mod facts;
mod guest;
mod holders;
mod host_use;
mod iommu_setup;
mod isolation;
mod memory;
mod removal;
mod reports;
mod slot;
mod tunnel;
mod usable;

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// A healthy host with an NVMe disk at 0000:01:00.0 behind a root port, driven by nvme, to which `cause` happens.
struct Scene {
    sim: SimHost,
    options: ExplainOptions,
}

const PORT: &str = "0000:00:01.0";
const DISK: &str = "0000:01:00.0";

impl Scene {
    fn new() -> Self {
        let scene = Self::without_disk();
        scene.sim.add(&Self::disk()).unwrap();
        scene
    }

    fn without_disk() -> Self {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::root_port(address(PORT))).unwrap();
        Self { sim, options: ExplainOptions::default() }
    }

    fn disk() -> SimFunction {
        SimFunction::nvme(address(DISK)).below(address(PORT)).driver("nvme")
    }

    fn with(function: SimFunction) -> Self {
        let scene = Self::without_disk();
        scene.sim.add(&function).unwrap();
        scene
    }

    fn explain(&self) -> Readiness {
        explain(&self.sim.plain_host(), address(DISK), &self.options).unwrap()
    }

    /// Asserts that there is exactly this one finding, and that its texts have these parts.
    fn check(&self, code: Code, severity: Severity, evidence: &[&str], remedy: &[&str]) {
        let readiness = self.explain();
        let found: Vec<_> = readiness.blockers.iter().map(|b| (b.code, b.severity)).collect();
        assert_eq!(found, [(code, severity)], "{readiness}");
        let blocker = &readiness.blockers[0];
        for part in evidence {
            assert!(blocker.evidence.contains(part), "no `{part}` in {readiness}");
        }
        for part in remedy {
            assert!(blocker.remedy.contains(part), "no `{part}` in {readiness}");
        }
        assert_eq!(readiness.is_ready(), severity == Warns);
    }

    fn write(self, path: &str, text: &str) -> Self {
        self.sim.write(path, text).unwrap();
        self
    }

    fn delete(self, path: &str) -> Self {
        self.sim.delete(path).unwrap();
        self
    }
}

#[test]
fn a_healthy_function_has_no_blocker() {
    let readiness = Scene::new().explain();
    assert_eq!(readiness.blockers, [], "{readiness}");
    assert!(readiness.is_ready() && readiness.first_blocker().is_none());
    assert!(readiness.to_string().starts_with("0000:01:00.0 Samsung"), "{readiness}");
    assert!(readiness.to_string().contains(": ready\n  driver  vfio-pci, as no variant"), "{readiness}");
}

fn neighbour() -> SimFunction {
    SimFunction::network(address("0000:02:00.0"))
}

/// A fault, a host that has it, and what a virtual machine's remedy for it says.
type Fault = (&'static str, fn() -> Scene, &'static str);

/// Who has rented a virtual machine has no firmware setup, and moves no cards.
#[test]
fn remedies_in_a_virtual_machine() {
    let signs = [
        ("proc/cpuinfo", "vendor_id : GenuineIntel\nflags : fpu hypervisor vme\n"),
        ("sys/class/dmi/id/product_name", "Standard PC (Q35 + ICH9, 2009) QEMU\n"),
        ("sys/hypervisor/type", "xen\n"),
    ];
    let faults: [Fault; 8] = [
        (
            "no IOMMU",
            || {
                Scene::with(Scene::disk().no_group())
                    .delete("sys/class/iommu")
                    .delete("sys/kernel/iommu_groups")
            },
            "iommu model='intel'",
        ),
        ("not behind it", || Scene::with(Scene::disk().no_group()), "bypass_iommu"),
        (
            "no ACS",
            || {
                let scene = Scene::without_disk();
                scene.sim.remove(address(PORT)).unwrap();
                scene.sim.add(&SimFunction::root_port(address(PORT)).no_extended_capabilities()).unwrap();
                scene.sim.add(&Scene::disk()).unwrap();
                scene.sim.add(&neighbour().group(1)).unwrap();
                scene
            },
            "-device pcie-root-port",
        ),
        (
            "interrupts",
            || Scene::new().write("proc/interrupts", " 0: 42 IO-APIC 2-edge timer\n"),
            "intremap=on",
        ),
        (
            "reserved",
            || {
                Scene::new()
                    .write("sys/kernel/iommu_groups/1/reserved_regions", "0xbf000000 0xbf7fffff direct\n")
            },
            "without memory reserved",
        ),
        ("dead", || Scene::with(Scene::disk().config(vec![0xff; 4096])), "add it again"),
        ("BAR", || Scene::with(Scene::disk().bar(0, BarKind::Memory64, false, 0, 0x4000)), "pref64-reserve"),
        (
            "no reset",
            || {
                let scene = Scene::with(Scene::disk().resets(""));
                let other = SimFunction::nvme(address("0000:01:03.0")).group(9).below(address(PORT));
                scene.sim.add(&other).unwrap();
                scene
            },
            "root port of its own in this virtual machine",
        ),
    ];
    for (fault, scene, expect) in faults {
        for (sign, text) in signs {
            let scene = scene();
            assert!(!scene.explain().blockers[0].remedy.contains(expect), "{fault}");
            let readiness = scene.write(sign, text).explain();
            let remedy = &readiness.blockers[0].remedy;
            assert!(remedy.contains(expect), "{fault}, {sign}: no `{expect}` in {remedy}");
            for absent in ["firmware setup", "card", "slot"] {
                assert!(!remedy.contains(absent), "{fault}: `{absent}` in {remedy}");
            }
        }
    }
}

#[test]
fn unchecked() {
    for path in ["proc/self/mountinfo", "proc/net/route", "proc/self/limits", "proc/cpuinfo"] {
        Scene::new().delete(path).check(Code::Unchecked, Warns, &[path, "no such file"], &["as root"]);
    }
    // A Linux kernel that can't swap has no such file.
    assert_eq!(Scene::new().delete("proc/swaps").explain().blockers, []);
}

#[test]
fn all_at_once() {
    let gpu = SimFunction::gpu(address(DISK)).driver("nouveau").boot_display(true).resets("");
    let scene =
        Scene::with(gpu).delete("sys/bus/pci/drivers/vfio-pci").delete("dev/vfio").delete("dev/iommu");
    let audio = SimFunction::new(address("0000:01:00.1"), 0x10de, 0x22ba, 0x04_0300);
    scene.sim.add(&audio.group(1).power_state("D3cold").driver("snd_hda_intel")).unwrap();
    scene.sim.add(&neighbour().group(1).driver("e1000e")).unwrap();
    let readiness = scene.explain();
    let codes: Vec<_> = readiness.blockers.iter().map(|blocker| blocker.code.as_str()).collect();
    assert_eq!(
        codes,
        [
            "group-not-viable",
            "vfio-pci-unavailable",
            "vfio-node-missing",
            "boot-display",
            "no-reset",
            "d3cold"
        ],
        "{readiness}"
    );
    let text = readiness.to_string();
    for part in [
        ": not ready, 5 blockers, 1 warning\n  goes with 0000:01:00.1\n  driver  vfio-pci, as no variant",
        "\n  blocker boot-display: the host's console is on it\n    found   ",
        "\n  warning d3cold of 0000:01:00.1: it is switched off\n    found   ",
        "\n    remedy  ",
    ] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn text_is_of_as_many_lines_as_there_are_findings() {
    let blocker = Blocker {
        code: Code::InUse,
        severity: Blocks,
        function: address(DISK),
        evidence: "process 7 (\x1b[2J\n  ready) has it".into(),
        remedy: "kill 7".into(),
    };
    let line = "process 7 (\u{fffd}[2J\u{fffd}  ready) has it";
    assert_eq!(blocker.to_string(), format!("{DISK} in-use: {line}; kill 7"));
    let name = "a\tdisk".into();
    let readiness = Readiness {
        address: address(DISK),
        name,
        functions: vec![address(DISK)],
        drivers: vec![],
        blockers: vec![blocker],
    };
    assert_eq!(
        readiness.to_string(),
        format!(
            "{DISK} a\u{fffd}disk: not ready, 1 blocker\n  blocker in-use: processes have it open\n    \
             found   {line}\n    remedy  kill 7"
        )
    );
}

/// What a claim heeds without `force`; what only a guest minds is reported again when it gets one.
#[test]
fn what_keeps_from_a_claim() {
    let kept: Vec<_> =
        Code::ALL.iter().filter(|code| code.keeps_from_claim()).map(|code| code.as_str()).collect();
    assert_eq!(
        kept,
        [
            "not-an-endpoint",
            "not-responding",
            "no-iommu",
            "group-not-viable",
            "vfio-pci-unavailable",
            "permission",
            "boot-display",
            "mounted-disk",
            "default-route",
            "in-use",
            "in-use-shared",
            "claimed",
            "vfs-in-use",
            "vgpu-function",
            "vgpus-in-use",
            "mig-in-use",
        ]
    );
}

#[test]
fn codes_are_stable_names() {
    let names: BTreeSet<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(names.len(), Code::ALL.len());
    for name in names {
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'));
    }
}

#[test]
fn missing_functions_are_an_error() {
    let scene = Scene::new();
    let missing = address("0000:77:00.0");
    let error = explain(&scene.sim.plain_host(), missing, &scene.options).unwrap_err().to_string();
    assert!(error.contains("0000:77:00.0"), "{error}");
}

#[test]
fn this_machine() {
    let host = Host::system();
    for function in crate::pci::scan(&host).unwrap_or_default() {
        let readiness = Explainer::new(&host).explain_function(function, &ExplainOptions::default()).unwrap();
        assert!(readiness.blockers.iter().all(|b| !b.evidence.is_empty() && !b.remedy.is_empty()));
    }
}
