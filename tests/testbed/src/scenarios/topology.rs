//! A guest's bus beside the host's: functions of one device are so in the guest too, behind one port of a root bus, which other
//! devices don't share, and that port has the link of the device.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::agent::{Function, L2};

/// Its parameter of a guest.
const TREE: &str = "tree";

/// What the guest is to find, for its command line.
pub(super) fn parameter(functions: &[&Function]) -> Result<String> {
    Ok(format!("{TREE}={}", describe(functions)?))
}

/// The guest's side.
pub(super) fn compare(l2: &mut L2, functions: &[&Function]) -> Result<()> {
    let (host, guest) = (l2.parameter(TREE)?, describe(functions)?);
    l2.prove(guest == host, format!("functions, classes and links are the host's: {guest} (host {host})"))?;
    let mut ports: Vec<(&str, Function)> = Vec::new();
    for function in functions {
        let (slot, _) = function.address.split_once('.').context("it has no function number")?;
        let port = function.above()?;
        match ports.iter().find(|(other, _)| *other == slot) {
            Some((_, same)) => ensure!(*same == port, "{} is behind {}", function.address, port.address),
            None => {
                let is_shared = ports.iter().any(|(_, other)| *other == port);
                ensure!(!is_shared, "{} is behind {} with another", function.address, port.address);
                check_link(l2, function, &port)?;
                ports.push((slot, port));
            }
        }
    }
    Ok(())
}

fn check_link(l2: &mut L2, function: &Function, port: &Function) -> Result<()> {
    let (device, above) = (link(function), link(port));
    let path = fs::canonicalize(port.path())?;
    let bus = path.parent().and_then(|bus| bus.file_name()).map(|bus| bus.to_string_lossy());
    let is_root = bus.is_some_and(|bus| bus.starts_with("pci"));
    let [speed, width, max_speed, max_width] = device;
    // A virtual function has its link in its physical one, and a conventional device none.
    let same = width == 0.0 || [speed, width] == above[..2];
    let enough = max_speed <= above[2] && max_width <= above[3];
    l2.prove(
        is_root && same && enough,
        format!("{}, above {}, is of a root bus, with its link: {above:?}", port.address, function.address),
    )
    .with_context(|| format!("that of the device is {device:?}"))
}

/// Each function by its number, with class and link.
fn describe(functions: &[&Function]) -> Result<String> {
    let describe = |function: &&Function| {
        let (_, number) = function.address.split_once('.').context("it has no function number")?;
        let class = function.attribute("class").context("it has no class")?;
        let link = link(function).map(|value| value.to_string()).join("/");
        Ok(format!("{number}:{class}:{link}"))
    };
    let described: Result<Vec<String>> = functions.iter().map(describe).collect();
    Ok(described?.join(","))
}

/// GT/s and lanes now and at most; 0 for what is not there.
fn link(function: &Function) -> [f64; 4] {
    ["current_link_speed", "current_link_width", "max_link_speed", "max_link_width"].map(|name| {
        let value = function.attribute(name).unwrap_or_default();
        value.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or_default()
    })
}
