//! The first rungs of the ladder, through the resets of the Linux kernel. Whether they helped is read back afterwards.

use super::super::EgpuError;
use super::step;
use crate::{Host, PciAddress, claim, deadlines, files};

/// Resets each function by itself.
///
/// # Errors
/// When one has no reset of its own, or the Linux kernel refuses.
pub(super) fn soft(host: &Host, functions: &[PciAddress]) -> Result<(), EgpuError> {
    let is_own = |method: &&str| !matches!(*method, "bus" | "cxl_bus");
    functions.iter().try_for_each(|&function| {
        let methods = methods(host, function);
        let own = methods.iter().map(String::as_str).find(is_own);
        let own = own.ok_or_else(|| step(&format!("reset {function}"), "it has no reset of its own"))?;
        by(host, function, own)
    })
}

/// Resets the bus that they are on.
///
/// # Errors
/// When Linux can't, or refuses.
pub(super) fn hard(host: &Host, functions: &[PciAddress]) -> Result<(), EgpuError> {
    let first = *functions.first().ok_or_else(|| step("reset its bus", "it has no functions"))?;
    // Of the bridge above, where Linux has it: also of functions that share the bus.
    let bridge = std::fs::canonicalize(host.pci_device(first)).ok();
    let reset = bridge.and_then(|function| Some(function.parent()?.join("reset_subordinate")));
    if let Some(reset) = reset.filter(|reset| reset.exists()) {
        return claim::write_locked(host, first, &reset, "1", deadlines::RESET)
            .map_err(|error| step(&format!("reset the bus of {first}"), error));
    }
    if methods(host, first).iter().any(|method| method == "bus") {
        return by(host, first, "bus");
    }
    Err(step(
        &format!("reset the bus of {first}"),
        "Linux has no bus reset for it; a new tunnel resets it as well (`vm-service egpu reset --reconnect`)",
    ))
}

fn methods(host: &Host, function: PciAddress) -> Vec<String> {
    let text = files::read_trimmed(&host.pci_device(function).join("reset_method")).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Resets a function by one method, and gives it its list of methods back.
fn by(host: &Host, function: PciAddress, method: &str) -> Result<(), EgpuError> {
    let dir = host.pci_device(function);
    let path = dir.join("reset_method");
    let before = methods(host, function).join(" ");
    let write = |value: &str| claim::write_locked(host, function, &path, value, deadlines::RESET_METHOD);
    write(method).map_err(|error| step(&format!("choose the reset {method} of {function}"), error))?;
    let reset = claim::write_locked(host, function, &dir.join("reset"), "1", deadlines::RESET);
    if let Err(error) = write(&before).or_else(|_| write("default")) {
        tracing::warn!("{} keeps `{method}` alone: {error}; write `default` to it", path.display());
    }
    reset.map_err(|error| step(&format!("reset {function} ({method})"), error))
}
