//! What `vm-service explain` says of each function beside what VFIO does with it: a function that is ready is opened, and
//! one whose group is not viable is refused.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use serde_json::Value;

use super::{Function, L1, sys};
use crate::scenario::Variant;

const TIMEOUT: Duration = Duration::from_secs(240);
const NOT_VIABLE: &str = "group-not-viable";
/// With these the host has the function in use, or it is not there: it is not tried.
const UNTRIED: &[&str] = &[
    "claimed",
    "d3cold",
    "default-route",
    "in-use",
    "in-use-shared",
    "mounted-disk",
    "no-iommu",
    "not-responding",
    "permission",
    "vfio-node-missing",
    "vfio-pci-unavailable",
    "vfs-in-use",
];

/// What VFIO does with a function that vfio-pci has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Opened,
    NotViable,
}

/// Compares the verdict on each function that is no bridge with VFIO's answer, and leaves all as it was.
///
/// # Errors
/// When one differs, or the function can't be tried.
pub(super) fn compare_all(l1: &mut L1) -> Result<()> {
    for function in Function::all()? {
        if function.is_bridge() {
            continue;
        }
        compare(l1, &function).with_context(|| format!("what VFIO does with {}", function.address))?;
    }
    Ok(())
}

fn compare(l1: &mut L1, function: &Function) -> Result<()> {
    let explained = l1.vm_service(&["explain", &function.address, "--json"], TIMEOUT)?;
    let blockers = blockers(&explained.json()?);
    let verdict = if blockers.is_empty() { "ready".to_owned() } else { blockers.join(", ") };
    let ids = ["vendor", "device"].map(|name| function.attribute(name).unwrap_or_default());
    let name = format!(
        "{} {}:{}",
        function.address,
        ids[0].trim_start_matches("0x"),
        &ids[1].trim_start_matches("0x")
    );
    if blockers.iter().any(|code| UNTRIED.contains(&code.as_str())) {
        l1.step(format!("verdict: {name}: {verdict} | not tried"));
        return Ok(());
    }
    let answer = with_vfio_pci(function, || open(function, l1.variant))?;
    let expected =
        if blockers.iter().any(|code| code == NOT_VIABLE) { Answer::NotViable } else { Answer::Opened };
    l1.prove(answer == expected, format!("verdict: {name}: {verdict} | {answer:?}"))
        .with_context(|| format!("explain said:\n{}", explained.stdout))
}

/// The codes of the blockers that `explain` found.
fn blockers(document: &Value) -> Vec<String> {
    let functions = document.get("functions").and_then(Value::as_array);
    let found =
        functions.into_iter().flatten().filter_map(|function| function.get("blockers")?.as_array()).flatten();
    let blocks = |found: &&Value| found.get("severity").and_then(Value::as_str) == Some("blocker");
    found.filter(blocks).filter_map(|found| Some(found.get("code")?.as_str()?.to_owned())).collect()
}

/// Gives the function and those of its slot to vfio-pci for as long as `what` takes.
fn with_vfio_pci<T>(function: &Function, what: impl FnOnce() -> Result<T>) -> Result<T> {
    let slot = |function: &Function| function.address.split_once('.').map(|(slot, _)| slot.to_owned());
    let mut taken = Function::all()?;
    taken.retain(|other| {
        slot(other) == slot(function) && other.group() == function.group() && !other.is_bridge()
    });
    let before: Vec<_> = taken
        .into_iter()
        .filter(|function| function.driver().as_deref() != Some("vfio-pci"))
        .map(|function| (function.driver(), function.attribute("driver_override"), function))
        .collect();
    for (_, _, function) in &before {
        function.bind(Some("vfio-pci"))?;
    }
    let result = what();
    for (driver, restriction, function) in before {
        fs::write(function.path().join("driver/unbind"), &function.address)?;
        let restriction = restriction.filter(|restriction| restriction != "(null)").unwrap_or_default();
        fs::write(function.path().join("driver_override"), format!("{restriction}\n"))?;
        if let Some(driver) = driver {
            fs::write(Path::new("/sys/bus/pci/drivers").join(driver).join("bind"), &function.address)
                .with_context(|| format!("can't give {} back", function.address))?;
        }
    }
    result
}

/// Opens it as VFIO's users do.
fn open(function: &Function, variant: Variant) -> Result<Answer> {
    let open = |path: &str| {
        let file = OpenOptions::new().read(true).write(true).open(path);
        file.with_context(|| format!("can't open {path}"))
    };
    let node = open(&function.vfio_node(variant)?)?;
    match variant {
        Variant::Group => {
            if !sys::group_is_viable(&node)? {
                return Ok(Answer::NotViable);
            }
            let container = open("/dev/vfio/vfio")?;
            sys::open_group_device(&container, &node, &function.address)
                .context("VFIO refuses the device")?;
        }
        Variant::Iommufd => match sys::bind_to_iommufd(&node, &open("/dev/iommu")?) {
            Ok(()) => {}
            Err(error) => {
                let refused = error.raw_os_error() == Some(Errno::PERM.raw_os_error());
                ensure!(refused, "VFIO refuses the device: {error}");
                return Ok(Answer::NotViable);
            }
        },
    }
    Ok(Answer::Opened)
}
