//! L2: a Linux guest, which owns the device.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};

use super::l1::kernel_release;
use super::wait_until;
use crate::report::{MARKER, Report};

/// A Linux guest and its console.
#[derive(Debug)]
pub struct L2 {
    console: File,
}

impl L2 {
    pub(super) fn new() -> Result<Self> {
        let console =
            OpenOptions::new().write(true).open("/dev/console").context("can't open /dev/console")?;
        let mut l2 = Self { console };
        l2.report(&Report::Up { level: 2, kernel: kernel_release() });
        Ok(l2)
    }

    /// Sends a report to L1.
    pub fn report(&mut self, report: &Report) {
        // When the console is gone nobody can be informed; L1's deadline covers it.
        let _ = self.console.write_all(format!("\n{MARKER}{}\n", report.line()).as_bytes());
    }

    /// Starts the guest afresh.
    pub fn restart(&self) -> ! {
        super::init::restart()
    }

    /// Waits until somebody presses the guest's power button.
    ///
    /// # Errors
    /// When it has none, or nobody does.
    pub fn await_power_button(&mut self, timeout: Duration) -> Result<()> {
        const KEY_POWER: u16 = 116;
        let mut devices = Vec::new();
        for entry in fs::read_dir("/dev/input").context("there are no input devices")?.flatten() {
            let is_event = entry.file_name().to_string_lossy().starts_with("event");
            if is_event {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
                devices.push(rustix::fs::open(entry.path(), flags, Mode::empty())?);
            }
        }
        self.report(&Report::Value { name: "power-button".into(), value: "awaited".into() });
        wait_until("a press of the power button", timeout, || {
            devices.iter().find_map(|device| {
                // A time, a kind, a code, a value.
                let mut event = [0; 24];
                let read = rustix::io::read(device, &mut event).ok()?;
                let word = |at: usize| u16::from_ne_bytes([event[at], event[at + 1]]);
                (read == event.len() && (word(16), word(18)) == (1, KEY_POWER)).then_some(())
            })
        })
    }

    /// A parameter of the guest's command line.
    ///
    /// # Errors
    /// When it is not there.
    pub fn parameter(&self, name: &str) -> Result<String> {
        super::init::parameter(name).with_context(|| format!("the guest's command line lacks {name}"))
    }

    /// Checks `holds`, and tells that `what` was proved.
    ///
    /// # Errors
    /// When it does not hold.
    pub fn prove(&mut self, holds: bool, what: impl Into<String>) -> Result<()> {
        let what = what.into();
        ensure!(holds, "this does not hold in the guest: {what}");
        self.report(&Report::Proved { what });
        Ok(())
    }
}
