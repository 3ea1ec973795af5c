//! What the daemon says of the state of guests' devices, beside what Linux in L1 says of them.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::agent::{Function, L1, wait_until};

const TIMEOUT: Duration = Duration::from_secs(600);
const SOCKET: &str = "/run/vm-passthrough/daemon.sock";

/// Compares links, power states, interrupts, errors and memory of two guests, each of which has a device, in the daemon's answers and
/// its metrics. The second device has AER.
pub(super) fn compare(l1: &mut L1, devices: [(&str, &Function); 2], memory: u64) -> Result<()> {
    for (guest, device) in devices {
        let health = wait_for_health(l1, guest, |health| !health["link"].is_null())?;
        let attribute =
            |name| device.attribute(name).with_context(|| format!("{} has no {name}", device.address));
        let width: u64 = attribute("current_link_width")?.parse()?;
        let gigatransfers = attribute("current_link_speed")?;
        let speed: f64 = gigatransfers.split(' ').next().unwrap_or_default().parse()?;
        l1.prove(
            health["link"]["width"] == width && health["link"]["speed"] == (speed * 1000.0) as u64,
            format!("{guest}: the link of {} has {width} lanes of {gigatransfers}", device.address),
        )?;
        let power = attribute("power_state")?.to_lowercase();
        l1.prove(health["power_state"] == *power, format!("{guest}: its power state is {power}"))?;
    }
    let (guest, disk) = devices[0];
    // The guest does nothing any more, but its driver may do something now and then.
    wait_until("the interrupts that Linux has counted", TIMEOUT, || {
        let health = health(l1, guest).ok()?;
        let (vectors, total) = interrupts(disk).ok()?;
        let same = health["interrupts"]["vectors"] == vectors && health["interrupts"]["total"] == total;
        let metric = metric("vm_service_device_interrupts_total", guest, disk, "").ok()?;
        (same && total > 0 && metric == total).then_some((vectors, total))
    })
    .map(|(vectors, total)| {
        l1.proved(format!("{guest}: {total} interrupts on {vectors} vectors, as in /proc/interrupts"))
    })
    .with_context(|| format!("{:?}, and Linux has {:?}", health(l1, guest), interrupts(disk)))?;
    let pinned = status(l1, guest)?["dma_bytes"].as_u64().unwrap_or_default();
    l1.prove(
        (memory..2 * memory).contains(&pinned),
        format!("{guest}: {} MiB are pinned for its devices", pinned >> 20),
    )?;

    let (guest, card) = devices[1];
    let state = wait_for_health(l1, guest, |health| !health["errors"].is_null())?;
    for (severity, total) in [("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")] {
        let text = card.attribute(&format!("aer_dev_{severity}")).context("it has no AER")?;
        let name = format!("TOTAL_ERR_{total} ");
        let counted = text.lines().find_map(|line| line.strip_prefix(&name)).context("no total")?;
        let counted: u64 = counted.trim().parse()?;
        l1.prove(
            state["errors"][severity]["total"] == counted,
            format!("{guest}: {counted} {severity} errors, as Linux counts them"),
        )?;
        let label = format!(",severity=\"{severity}\"");
        l1.prove(
            metric("vm_service_device_errors_total", guest, card, &label)? == counted,
            "so does the metric",
        )?;
    }
    let disk = health(l1, devices[0].0)?;
    l1.prove(disk["errors"].is_null(), "of a device without AER there are no counts")
}

fn status(l1: &mut L1, guest: &str) -> Result<Value> {
    l1.vm_service(&["status", guest, "--json"], TIMEOUT)?.succeeded()?.json()
}

/// The state of a guest's only device.
fn health(l1: &mut L1, guest: &str) -> Result<Value> {
    Ok(status(l1, guest)?["devices"][0]["health"].clone())
}

/// The same, once it is as it is to be.
fn wait_for_health(l1: &mut L1, guest: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    let waited = wait_until("the state of a device", TIMEOUT, || health(l1, guest).ok().filter(&is_so));
    waited.with_context(|| format!("{:?}", health(l1, guest)))
}

/// The vectors that VFIO has set up for a device, and how many interrupts Linux has counted of them.
fn interrupts(device: &Function) -> Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/interrupts")?;
    let lines: Vec<_> =
        text.lines().filter(|line| line.contains("vfio-") && line.contains(&device.address)).collect();
    let count = |line: &str| -> u64 {
        line.split_ascii_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum()
    };
    Ok((lines.len() as u64, lines.iter().map(|line| count(line)).sum()))
}

/// The value of a metric of a device.
fn metric(name: &str, guest: &str, device: &Function, more: &str) -> Result<u64> {
    let mut daemon = UnixStream::connect(SOCKET)?;
    daemon.set_read_timeout(Some(TIMEOUT))?;
    daemon.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
    let mut text = String::new();
    daemon.read_to_string(&mut text)?;
    let of = format!("{name}{{guest=\"{guest}\",address=\"{}\"{more}}} ", device.address);
    let value = text.lines().find_map(|line| line.strip_prefix(&of));
    Ok(value.with_context(|| format!("there is no {of} in\n{text}"))?.trim().parse()?)
}
