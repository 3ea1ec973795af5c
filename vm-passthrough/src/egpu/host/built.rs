//! Which tunnels were built by this crate: it distinguishes a tunnel that is gone unasked from one that was taken down, and what the
//! operator has connected from what firmware or others have.
//!
//! The file `STATE/ledger/enclosure-UUID.built` has the number of the router's directory in sysfs, which is another each time that it
//! is plugged in.

use std::path::PathBuf;

use crate::usb4::UniqueId;
use crate::{Host, files};

fn path(host: &Host, id: UniqueId) -> PathBuf {
    host.state.join("ledger").join(format!("enclosure-{id}.built"))
}

/// Notes that a tunnel was built. A lock of enclosures is held, so that the directory is there.
pub(super) fn note(host: &Host, id: UniqueId, instance: Option<u64>) {
    let Some(instance) = instance else { return };
    let path = path(host, id);
    if let Err(error) = std::fs::write(&path, format!("{instance}\n")) {
        tracing::warn!("{}: {error}; its tunnel passes for another's", path.display());
    }
}

/// Forgets a tunnel that is taken down.
pub(super) fn forget(host: &Host, id: UniqueId) {
    let path = path(host, id);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!("{}: {error}", path.display());
        }
        _ => {}
    }
}

/// Whether a tunnel was built, and not taken down since, to what has been plugged in as this instance.
pub(super) fn is_built(host: &Host, id: UniqueId, instance: Option<u64>) -> bool {
    let noted = files::read_trimmed(&path(host, id)).and_then(|text| text.parse().ok());
    noted.is_some() && noted == instance
}
