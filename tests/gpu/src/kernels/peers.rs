//! The same work in PyTorch, eager and compiled: `peers.py` runs once, in a Python of its own.

use std::collections::HashMap;
use std::process::Command;
use std::sync::OnceLock;

use serde::de::DeserializeOwned;

use super::work::Work;

const SCRIPT: &str = include_str!("peers.py");

/// By op, rows and columns: the names of peers, and the seconds of a call by measurement.
type Peers = HashMap<String, Vec<(String, Vec<f64>)>>;

/// The peers of some work.
///
/// # Errors
/// Why there are none.
pub(super) fn of(work: Work) -> Result<&'static [(String, Vec<f64>)], &'static str> {
    static PEERS: OnceLock<Result<Peers, String>> = OnceLock::new();
    let peers = PEERS.get_or_init(measure).as_ref().map_err(String::as_str)?;
    let key = format!("{} {} {}", work.op.name(), work.rows, work.columns);
    peers.get(&key).map(Vec::as_slice).ok_or("it measured other work")
}

fn measure() -> Result<Peers, String> {
    let sizes =
        Work::all().iter().map(|w| format!("{} {} {}", w.op.name(), w.rows, w.columns)).collect::<Vec<_>>();
    run(SCRIPT, &sizes)
}

/// Runs a script with arguments in a Python of its own, and reads the JSON that it prints last.
///
/// # Errors
/// What the script says, or why there is no Python.
pub(crate) fn run<T: DeserializeOwned>(script: &str, arguments: &[String]) -> Result<T, String> {
    let output = Command::new("python3")
        .args(["-c", script])
        .args(arguments)
        .output()
        .map_err(|error| format!("python3: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(said.trim().lines().last().unwrap_or("python3 failed").to_owned());
    }
    // What a part of the script could not do.
    eprint!("{said}");
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.trim().lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|error| format!("peers.py: {error}"))
}
