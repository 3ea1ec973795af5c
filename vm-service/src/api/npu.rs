//! NPUs.

use schemars::JsonSchema;
use serde::Serialize;

/// A device that runs models.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Npu {
    /// Its number, as in `--device npu:0`.
    pub number: usize,
    /// What it is, as in `Intel NPU`.
    pub kind: String,
    /// The driver of the Linux kernel that serves it; null where only a library knows it.
    pub driver: Option<String>,
    /// PCI address; null for one that is no PCI function.
    pub address: Option<String>,
    /// Device node; null where only a library knows it.
    pub node: Option<String>,
    /// The execution provider of ONNX Runtime that runs models on it; null where there is none.
    pub provider: Option<String>,
    /// Whether it is emulated.
    pub emulated: bool,
}
