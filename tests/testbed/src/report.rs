//! What the agents tell the testbed: one JSON object a line, on a serial port of its own in L1, on the console after
//! a marker in L2.

use serde::{Deserialize, Serialize};

/// Starts a line of an L2 agent on its console, where the Linux kernel also writes.
pub const MARKER: &str = "@testbed ";

/// One report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "report")]
pub enum Report {
    /// The agent runs: its level and the release of the Linux kernel.
    Up {
        /// 1 or 2.
        level: u8,
        /// As `uname -r` prints it.
        kernel: String,
    },
    /// A step has begun.
    Step {
        /// What is done.
        what: String,
    },
    /// Something was checked and held.
    Proved {
        /// What held.
        what: String,
    },
    /// A measured figure.
    Figure {
        /// Its name.
        name: String,
        /// Its value.
        value: f64,
        /// Its unit.
        unit: String,
    },
    /// A figure that could not be measured.
    Unmeasured {
        /// Its name.
        name: String,
        /// Why.
        reason: String,
    },
    /// A value that the other side asked for.
    Value {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
    },
    /// L1's QEMU is to do something.
    Monitor {
        /// The command, as its monitor takes it.
        command: String,
    },
    /// The agent's side is done, and all of it held.
    Passed,
    /// The scenario can't run here.
    Skipped {
        /// Why.
        reason: String,
    },
    /// The agent's side failed.
    Failed {
        /// Why, outermost cause first.
        reason: String,
    },
}

impl Report {
    /// The report in a line, if the line is one.
    pub fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line.trim()).ok()
    }

    /// The report in a console line, if there is one: everything before [`MARKER`] is somebody else's.
    pub fn parse_console(line: &str) -> Option<Self> {
        Self::parse(&line[line.find(MARKER)? + MARKER.len()..])
    }

    /// The report as one line, without the line break.
    pub fn line(&self) -> String {
        // Strings and numbers always have a JSON form.
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_the_console() {
        for report in [
            Report::Up { level: 2, kernel: "6.12".into() },
            Report::Figure { name: "boot".into(), value: 1.5, unit: "s".into() },
            Report::Failed { reason: "a \"quoted\"\nreason".into() },
            Report::Passed,
        ] {
            assert_eq!(Report::parse(&report.line()).as_ref(), Some(&report));
            let console = format!("[    1.5] usb: hm{MARKER}{}\r\n", report.line());
            assert_eq!(Report::parse_console(&console), Some(report));
        }
        assert_eq!(Report::parse_console("[    0.1] Linux"), None);
        assert_eq!(Report::parse("{\"report\":\"nonsense\"}"), None);
    }
}
