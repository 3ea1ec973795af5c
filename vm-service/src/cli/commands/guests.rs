//! `guests` and `status`: the guests that run, and one of them.

use std::fmt::Write as _;
use std::time::SystemTime;

use clap::Args;

use super::asking::Asking;
use super::serve::DaemonArgs;
use crate::api::{Body, DeviceState, GuestStatus, PeerState};
use crate::cli::context::Context;
use crate::failure::Failure;
use crate::text::describe;
use crate::text::table::{Table, printable};

/// Arguments of commands that are about one guest.
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// The guest's name
    #[arg(value_name = "NAME")]
    pub(crate) guest: String,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Lists the guests that run.
///
/// # Errors
/// When the daemon can't be asked or the output can't be written.
pub(crate) fn list(context: &mut Context<'_>, args: &DaemonArgs) -> Result<(), Failure> {
    let guests = Asking::of(context, args)?.guests()?;
    let width = context.width;
    let text = || match guests.is_empty() {
        true => "no guest runs\n".to_owned(),
        false => {
            let mut table = Table::new(["NAME", "STATE", "VCPUS", "MEMORY", "AGE", "PROCESS", "DEVICES"]);
            guests.iter().for_each(|guest| table.push(row(guest)));
            table.fit(width)
        }
    };
    let text = text();
    context.print(|| Body::Guests { guests }, || text)
}

fn row(guest: &GuestStatus) -> [String; 7] {
    if !guest.is_known() {
        let [unknown, name, state, process] =
            ["-", &guest.name, <&str>::from(guest.state), &guest.pid.to_string()];
        return [name, state, unknown, unknown, unknown, process, unknown].map(str::to_owned);
    }
    let devices: Vec<_> = guest.devices.iter().map(|device| device.address.as_str()).collect();
    [
        guest.name.clone(),
        <&str>::from(guest.state).into(),
        guest.vcpus.to_string(),
        describe::size(guest.memory),
        age(guest),
        guest.pid.to_string(),
        if devices.is_empty() { "-".into() } else { devices.join(" ") },
    ]
}

/// Tells how a guest is.
///
/// # Errors
/// As for [`list`], and when no such guest runs.
pub(crate) fn status(context: &mut Context<'_>, args: &GuestArgs) -> Result<(), Failure> {
    let guest = Asking::of(context, &args.daemon)?.guest(&args.guest)?;
    let text = text(&guest);
    context.print(|| Body::Status(guest), || text)
}

/// How a guest is, in lines.
pub(super) fn text(guest: &GuestStatus) -> String {
    let mut text = format!(
        "{}: {}, {} vCPU{}, {}, process {}, {}\n",
        printable(&guest.name),
        <&str>::from(guest.state),
        guest.vcpus,
        if guest.vcpus == 1 { "" } else { "s" },
        describe::size(guest.memory),
        guest.pid,
        age(guest),
    );
    // A String takes any write.
    for device in &guest.devices {
        let state = match device.state {
            DeviceState::Claimed => "claimed",
            DeviceState::Attached => "attached",
            DeviceState::Detached => "detached",
            DeviceState::Other => "in another state",
        };
        let _ = writeln!(text, "  {} {state}", printable(&device.address));
        if let Some(health) = &device.health {
            let _ = writeln!(text, "    {}", printable(&describe::health(health)));
        }
    }
    if let Some(bytes) = guest.dma_bytes.filter(|&bytes| bytes > 0) {
        let _ = writeln!(text, "  {} pinned for devices", describe::size(bytes));
    }
    if let Some(peers) = &guest.peer_to_peer {
        let _ = match (peers.state, peers.reason.as_deref().unwrap_or_default()) {
            (PeerState::Off, _) => writeln!(text, "  peer-to-peer DMA is off"),
            (PeerState::Mapping, _) => writeln!(text, "  peer-to-peer DMA is being mapped"),
            (PeerState::Mapped, _) => {
                writeln!(text, "  peer-to-peer DMA reaches {} of BARs", describe::size(peers.mapped_bytes))
            }
            (PeerState::Refused, why) => writeln!(
                text,
                "  peer-to-peer DMA does not reach {} of BARs: {}",
                describe::size(peers.refused_bytes),
                printable(why)
            ),
            (PeerState::Idle | PeerState::Other, _) => Ok(()),
        };
    }
    if let Some(console) = &guest.console {
        let _ = writeln!(text, "  console {}", printable(console));
    }
    for missing in guest.confinement.iter().flat_map(|confinement| &confinement.missing) {
        let _ = writeln!(text, "  its VMM is confined without {}", printable(missing));
    }
    text
}

fn age(guest: &GuestStatus) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    describe::age(now.saturating_sub(guest.since))
}
