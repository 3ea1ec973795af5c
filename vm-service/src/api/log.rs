//! Records of the log files: what a line of `vm-service.log` is, and a document of `egpu log`.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{EnumIter, EnumString, IntoStaticStr};

/// What a record is about, whichever module logged it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, EnumIter, EnumString, IntoStaticStr,
)]
#[serde(rename_all = "UPPERCASE")]
#[strum(serialize_all = "UPPERCASE")]
pub enum LogCategory {
    /// Drivers that functions are taken from and given back to, and the ledger of that.
    Driver,
    /// External GPUs.
    Egpu,
    /// RAM of guests: what is mapped for DMA, and where it comes from.
    Memory,
    /// PCI Express functions: config space, BARs, interrupts, resets, VFIO.
    Pcie,
    /// USB4 and Thunderbolt: domains, routers, tunnels.
    Usb4,
    /// NVIDIA's CUDA.
    Cuda,
    /// The command line: what was asked for, and how it ended.
    Cli,
    /// The Python binding.
    Python,
    /// All else, and what a newer version knows.
    #[serde(other)]
    General,
}

/// How much a record matters, the least first.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    EnumString,
    IntoStaticStr,
)]
#[serde(rename_all = "UPPERCASE")]
#[strum(serialize_all = "UPPERCASE")]
pub enum LogLevel {
    /// Every step.
    Trace,
    /// Steps that explain a failure.
    Debug,
    /// What happens.
    Info,
    /// What somebody should look at.
    Warn,
    /// What failed.
    Error,
}

/// A record of the log files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LogRecord {
    /// When it was logged, as RFC 3339 has it, in UTC, with microseconds.
    pub time: String,
    /// How much it matters.
    pub level: LogLevel,
    /// What it is about.
    pub category: LogCategory,
    /// The module that logged it.
    pub target: String,
    /// The process that logged it.
    pub pid: u32,
    /// The thread that logged it: its name, or its number in its process.
    pub thread: String,
    /// What is said.
    pub message: String,
    /// More of it, by names; `fatal` is true where a command ended with this, or a thread panicked, and `simulated` where it is of a
    /// simulated host.
    #[serde(default)]
    pub fields: BTreeMap<String, Value>,
}

impl LogCategory {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl LogLevel {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl LogRecord {
    /// Whether a command ended with this, or a thread panicked.
    pub fn is_fatal(&self) -> bool {
        self.level == LogLevel::Error && self.fields.get("fatal") == Some(&Value::Bool(true))
    }
}

/// As a person reads it, in one line if none of its texts has more; whoever prints it replaces control characters.
impl fmt::Display for LogRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = if self.is_fatal() { "FATAL" } else { self.level.as_str() };
        let Self { time, category, pid, message, .. } = self;
        write!(f, "{time} {level:5} {:7} [{pid}] {message}", category.as_str())?;
        for (name, value) in self.fields.iter().filter(|(name, _)| !(self.is_fatal() && *name == "fatal")) {
            match value {
                Value::String(text) => write!(f, " {name}={text}")?,
                value => write!(f, " {name}={value}")?,
            }
        }
        Ok(())
    }
}
