//! `start`: has the daemon start a guest.

use std::fs;
use std::sync::mpsc::{Receiver, channel};

use clap::Args;
use hyper::Method;
use serde_json::{Map, Value, json};

use super::asking::{Asking, path};
use super::boot::BootArgs;
use super::guests;
use super::serve::DaemonArgs;
use super::stop;
use crate::api::{
    Body, EventKind, GuestEvent, GuestStatus, RefusalCode, StartOptions, StoppedGuest, StoppedHow,
};
use crate::cli::context::Context;
use crate::config::{self, GuestConfig};
use crate::daemon::ApiError;
use crate::deadlines::{CONTROL_ANSWER, GUEST_KILL, STOP_ANSWER, guest_start};
use crate::failure::Failure;

/// Arguments of `start`.
#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    #[command(flatten)]
    pub(crate) boot: BootArgs,
    /// Wait until the guest has ended, too: exit status 1 when it crashed, failed or was killed. A signal ends the wait alone
    #[arg(long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Starts a guest, and waits until it runs with its devices, or has ended.
///
/// # Errors
/// When its file is wrong, the daemon can't be asked, or the guest does not start; with `--wait`, when it did not end well.
pub(crate) fn run(context: &mut Context<'_>, args: &StartArgs) -> Result<(), Failure> {
    let (config, file) = file(&args.boot)?;
    let asking = Asking::of(context, &args.daemon)?;
    let path = path(&config.name, "")?;
    let end = args.wait.then(|| end_of(Asking::of(context, &args.daemon)?, &config.name)).transpose()?;
    // One that does not start is ended.
    let deadline = guest_start(&config).saturating_add(STOP_ANSWER);
    let started: Result<GuestStatus, _> =
        asking.call(Method::PUT, &path, &StartOptions::from(&args.boot.options), Some(&file), deadline);
    if let Err(ApiError::Refused(refusal)) = &started
        && refusal.code == RefusalCode::Blocked
    {
        // As `run` does.
        context.print(|| Body::Explain { functions: refusal.blockers.clone() }, String::new)?;
    }
    let how = match (started, end) {
        // One that ends at once may have ended before the daemon saw it run.
        (Err(ApiError::Refused(refusal)), Some(end)) if refusal.code == RefusalCode::Failed => {
            let ended = end.recv_timeout(GUEST_KILL.saturating_add(CONTROL_ANSWER)).ok().and_then(Result::ok);
            ended.ok_or(ApiError::Refused(refusal))?
        }
        (started, end) => {
            let guest = started?;
            let text = guests::text(&guest);
            let Some(end) = end else { return context.print(|| Body::Start(guest), || text) };
            if !context.json {
                context.out.write_all(text.as_bytes())?;
                context.out.flush()?;
            }
            end.recv().map_err(Failure::failed)??
        }
    };
    let stopped = StoppedGuest { guest: config.name, how };
    let text = stop::text(&stopped);
    let is_well = matches!(how, StoppedHow::Orderly | StoppedHow::Cut | StoppedHow::Reset);
    let said = if is_well { text.clone() } else { String::new() };
    context.print(|| Body::Stop(stopped), || said)?;
    if is_well { Ok(()) } else { Err(Failure::failed(text.trim_end())) }
}

/// Listens for the end of a guest that is about to start.
///
/// # Errors
/// When the daemon can't be asked.
fn end_of(asking: Asking, name: &str) -> Result<Receiver<Result<StoppedHow, Failure>>, Failure> {
    let (listens, begins) = channel();
    let (tell, end) = channel();
    let name = name.to_owned();
    let listen = move || {
        // An earlier guest of this name may just have ended.
        let (mut is_found, mut is_started, mut ended) = (false, false, None);
        let take = |event: GuestEvent| {
            match event.event {
                _ if event.guest != name => {}
                EventKind::Found => is_found = true,
                EventKind::Started => is_started = true,
                EventKind::Ended if is_started => ended = Some(event.how.unwrap_or(StoppedHow::Other)),
                // Only now is its name free.
                EventKind::Gone if is_found => {
                    let unknown =
                        format!("how the guest {name} ended is not known; see `vm-service logs {name}`");
                    return Err(Failure::failed(unknown));
                }
                _ => {}
            }
            Ok(())
        };
        if let Err(error) = asking.0.events(|| listens.send(()).unwrap_or_default(), take) {
            // It fails when nobody waits any more.
            let _ = tell.send(ended.ok_or_else(|| error.into()));
        }
    };
    std::thread::Builder::new().name("events".into()).spawn(listen).map_err(Failure::failed)?;
    match begins.recv() {
        Ok(()) => Ok(end),
        // It ended before it began, with an error.
        Err(_) => {
            Err(end.recv().map_err(Failure::failed)?.err().unwrap_or_else(|| Failure::failed("no events")))
        }
    }
}

/// The guest, and its file as the command line changes it.
fn file(args: &BootArgs) -> Result<(GuestConfig, Map<String, Value>), Failure> {
    let config = args.config()?;
    let unread =
        |error: &dyn std::fmt::Display| Failure::usage(format_args!("{}: {error}", args.guest.display()));
    let path = std::path::absolute(&args.guest).map_err(|error| unread(&error))?;
    let text = fs::read_to_string(&path).map_err(|error| unread(&error))?;
    let text = GuestConfig::with_absolute_paths(&text, &path).map_err(Failure::usage)?;
    let mut file: Map<String, Value> = toml::from_str(&text).map_err(|error| unread(&error))?;
    if let Some(vcpus) = args.vcpus {
        file.insert("vcpus".into(), vcpus.into());
    }
    if let Some(memory) = args.memory {
        file.insert("memory".into(), config::format_size(memory).into());
    }
    // Those of the file come first.
    let mut extend = |key: &str, all: Vec<Map<String, Value>>| {
        if let Value::Array(own) = file.entry(key).or_insert_with(|| json!([])) {
            own.extend(all.into_iter().skip(own.len()).map(Value::from));
        }
    };
    let devices =
        config.devices.iter().map(|device| Map::from_iter([("address".into(), device.to_string().into())]));
    extend("devices", devices.collect());
    let nets = config.nets.iter().map(|net| {
        let mac = net.mac.map(|mac| ("mac".into(), mac.to_string().into()));
        let vhost = net.vhost.map(|vhost| ("vhost".into(), vhost.into()));
        [("tap".into(), net.tap.as_str().into())].into_iter().chain(mac).chain(vhost).collect()
    });
    extend("net", nets.collect());
    Ok((config, file))
}
