//! The same work in PyTorch, eager and compiled: `peers.py` runs once, in a Python of its own.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::work::Work;
use crate::peer;

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
    peer::run(SCRIPT, &sizes)
}
