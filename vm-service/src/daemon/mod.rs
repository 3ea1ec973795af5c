//! The daemon: guests that outlive the shell, and a REST API to see and change them.
//!
//! ```text
//! clients ──HTTP/1.1 on a Unix socket──▶ api ─▶ guests ──control socket──▶ the process of each guest
//!                                                  └─▶ launch: makes such a process
//! ```
//!
//! It holds no device and no guest, and keeps nothing that it could not find again: which guests there are it sees in
//! `STATE/guests`, and asks each. So it may be killed and started again at any time, and guests that `run` started are its own as
//! well.
//!
//! All is served by one thread, in which nothing waits; what may wait for a guest or a device does so in threads of its own.

mod api;
mod asked;
mod cgroup;
mod client;
mod device_metrics;
mod events;
mod guests;
mod http;
mod launch;
mod metrics;
mod monitor;
mod openapi;
mod socket;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;

use vm_passthrough::Host;

pub(crate) use api::{LogOptions, ResetAnswer, StopOptions};
pub(crate) use client::{Api, ApiError};
use events::Events;
use guests::Guests;
use launch::Processes;
use watch::Watch;

use crate::failure::Failure;
use crate::os::signals::StopSignals;

/// Where the daemon listens.
pub(crate) fn socket_of(host: &Host, named: Option<&PathBuf>) -> PathBuf {
    named.cloned().unwrap_or_else(|| host.state.join("daemon.sock"))
}

/// The API's description, as OpenAPI.
#[doc(hidden)]
pub fn description() -> serde_json::Value {
    openapi::document(&api::operations())
}

/// Serves the API until a signal comes. Guests go on.
///
/// # Errors
/// When another daemon serves, or the socket can't be made.
pub(crate) fn serve(host: &Host, named: Option<&PathBuf>) -> Result<(), Failure> {
    let listener = socket::listen(host, named).map_err(Failure::failed)?;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let _signals = StopSignals::start(move |signal| {
        tracing::info!("{signal}: the daemon ends; guests go on");
        // It fails only when nothing is served any more.
        let _ = stop.send(true);
    })
    .map_err(|error| {
        Failure::failed(format_args!("signals can't be waited for: {error}; raise `ulimit -n`"))
    })?;
    let guests = Arc::new(Guests::new(host.clone(), Box::new(Processes), Events::default()));
    serve_on(listener, guests, watch::INTERVAL, stopped)
        .map_err(|error| Failure::failed(format_args!("the API can't be served: {error}")))
}

/// Serves the API on a socket that listens, until it is asked to stop.
fn serve_on(
    listener: socket::Listening,
    guests: Arc<Guests>,
    interval: std::time::Duration,
    stopped: tokio::sync::watch::Receiver<bool>,
) -> std::io::Result<()> {
    let _reading = monitor::Reading::every(interval, guests.watched().monitor().clone())?;
    let _watch = Watch::every(interval, guests.watched().clone())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(std::time::Duration::from_secs(10))
        .build()?;
    let served = runtime.block_on(http::serve(listener, api::router(guests), interval, stopped));
    // What still waits for a guest goes on there, whoever asked for it.
    runtime.shutdown_background();
    served
}

#[cfg(test)]
mod tests;
