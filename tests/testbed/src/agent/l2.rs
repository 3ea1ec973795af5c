//! L2: a Linux guest, which owns the device.

use std::fs::{File, OpenOptions};
use std::io::Write;

use anyhow::{Context, Result, ensure};

use super::l1::kernel_release;
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
        // When the console is gone nobody can be told; L1's deadline covers it.
        let _ = self.console.write_all(format!("\n{MARKER}{}\n", report.line()).as_bytes());
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
