//! What the user of a program is told by the libraries that it loads.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use rustix::fs::OFlags;

/// Says something, once in a process.
pub fn once(text: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.insert(text.to_owned()) {
        return;
    }
    let line = format!("vm-bridge: {text}\n");
    // Where nobody listens, nothing is lost but the word.
    let _ = match log() {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

/// Says something to the log alone, if there is one.
pub fn quietly(text: &str) {
    if let Some(mut file) = log() {
        // As above.
        let _ = file.write_all(format!("vm-bridge: {text}\n").as_bytes());
    }
}

fn log() -> Option<File> {
    let path = std::env::var_os("VM_BRIDGE_LOG")?;
    vm_files::open(path.as_ref(), OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND, 0o666).ok()
}
