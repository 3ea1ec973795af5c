//! What can go wrong.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::Provider;

/// Why NPUs can't be listed or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NpuError {
    /// The subsystem is not there.
    #[error(
        "there is no {}: no driver of an NPU is loaded, or the Linux kernel is older than 6.2; load the NPU's driver, \
         as in modprobe intel_vpu or modprobe amdxdna",
        path.display()
    )]
    NoDriver {
        /// Where its devices would be listed.
        path: PathBuf,
    },
    /// A directory can't be read.
    #[error("{} can't be read: {source}; run as root", path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// The device is not listed.
    #[error("there is no NPU {wanted}; vm-service list shows those that there are")]
    NoDevice {
        /// Its number or address.
        wanted: String,
    },
    /// ONNX Runtime can't be used.
    #[error(
        "ONNX Runtime can't be used: {what}; install 1.24 or newer (pip install onnxruntime), and name the folder that has it by \
         VM_ONNXRUNTIME"
    )]
    NoRuntime {
        /// Why.
        what: String,
    },
    /// Nothing runs models on the device.
    #[error("{device}: nothing here runs models on it; {remedy}")]
    NoProvider {
        /// The device.
        device: String,
        /// What to do.
        remedy: String,
    },
    /// The provider refuses a model.
    #[error("{provider} does not take the model: {what}")]
    Refused {
        /// The provider.
        provider: Provider,
        /// What it says, as one line.
        what: String,
    },
    /// The provider can't take all of a model, and the rest was not to go elsewhere.
    #[error(
        "{provider} can't take all of the model, and nothing is run on the processor instead; use other operations or types, or allow \
         it (fallback). {what}"
    )]
    Fallback {
        /// The provider.
        provider: Provider,
        /// What it says, as one line.
        what: String,
    },
    /// An inference failed.
    #[error("{provider}: the inference failed: {what}")]
    Run {
        /// The provider.
        provider: Provider,
        /// What it says, as one line.
        what: String,
    },
    /// The libraries of a cache, or what is above them, may be another user's work.
    #[error(
        "{} {what}: root loads no code that others may have written; set VM_ONNXRUNTIME={} if it is to be loaded", .path.display(),
        .folder.display()
    )]
    Untrusted {
        /// The file or folder.
        path: PathBuf,
        /// What it is about it.
        what: String,
        /// The cache.
        folder: PathBuf,
    },
    /// A buffer is not what the model has there.
    #[error("{name} is {expected}, and was given {given}")]
    Binding {
        /// The input or output.
        name: String,
        /// What it is.
        expected: String,
        /// What was given.
        given: String,
    },
    /// It took longer than it may.
    #[error("{what} took longer than {limit:?}; give it more time, or make it smaller")]
    Deadline {
        /// What.
        what: &'static str,
        /// How long it may take.
        limit: Duration,
    },
    /// The context does not answer, or its thread ended: nothing more can be run in it.
    #[error(
        "the context on {device} is lost: {what}; open another, in a new process if the device does not answer"
    )]
    Lost {
        /// The device.
        device: String,
        /// Why.
        what: String,
    },
}

/// What a library says, as one short line.
pub(crate) fn line(error: &impl fmt::Display) -> String {
    const MOST: usize = 400;
    let text = error.to_string();
    let clean: String = text.chars().take(MOST).map(|c| if c.is_control() { ' ' } else { c }).collect();
    clean.split_whitespace().collect::<Vec<_>>().join(" ")
}
