//! Waiting with a deadline.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Asks `ready` until it gives a value.
///
/// # Errors
/// When `timeout` passed first; `what` names what did not come.
pub fn wait_until<T>(what: &str, timeout: Duration, mut ready: impl FnMut() -> Option<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return Ok(value);
        }
        if start.elapsed() > timeout {
            bail!("{what} did not come within {} s", timeout.as_secs_f64());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
