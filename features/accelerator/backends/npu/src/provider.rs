//! ONNX Runtime's execution providers, which compile models for devices and run them there.

use std::fmt;

use ort::ep::{
    self, ArbitrarilyConfigurableExecutionProvider as _, ExecutionProvider as _, ExecutionProviderDispatch,
};

/// An execution provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Provider {
    /// Qualcomm's AI Engine Direct, for Hexagon NPUs; on x86-64 the library emulates one.
    Qnn,
    /// Intel's OpenVINO.
    OpenVino,
    /// AMD's Vitis AI, for XDNA.
    VitisAi,
    /// Huawei's CANN, for Ascend.
    Cann,
    /// Apple's Core ML.
    CoreMl,
    /// Android's NNAPI.
    Nnapi,
    /// ONNX Runtime's own kernels on the host's processor: no NPU, but what NPUs are compared with.
    Cpu,
}

/// Which context's work goes first where a device has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Behind others'.
    Low,
    /// As others'.
    #[default]
    Normal,
    /// Before others'.
    High,
}

/// What a device spends on it: quality of service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Performance {
    /// Little power.
    PowerSaver,
    /// What the device does by itself.
    #[default]
    Balanced,
    /// The highest clocks.
    Burst,
}

impl Provider {
    /// Every one.
    pub const ALL: [Provider; 7] = [
        Provider::Qnn,
        Provider::OpenVino,
        Provider::VitisAi,
        Provider::Cann,
        Provider::CoreMl,
        Provider::Nnapi,
        Provider::Cpu,
    ];

    /// The name by which ONNX Runtime knows it, and which begins its options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qnn => "QNNExecutionProvider",
            Self::OpenVino => "OpenVINOExecutionProvider",
            Self::VitisAi => "VitisAIExecutionProvider",
            Self::Cann => "CANNExecutionProvider",
            Self::CoreMl => "CoreMLExecutionProvider",
            Self::Nnapi => "NnapiExecutionProvider",
            Self::Cpu => "CPUExecutionProvider",
        }
    }

    /// The library that has it as a plugin, where there is one; the others are part of a build of ONNX Runtime.
    pub(crate) fn plugin(self) -> Option<&'static str> {
        match self {
            Self::Qnn => Some("libonnxruntime_providers_qnn.so"),
            Self::OpenVino => Some("libonnxruntime_providers_openvino_plugin.so"),
            Self::VitisAi => Some("libonnxruntime_vitisai_ep.so"),
            _ => None,
        }
    }

    /// Does ONNX Runtime run models by a library of this name, which lies beside it, where the provider is part of it? It can't do without
    /// on Linux; other systems have theirs.
    pub(crate) fn is_library(self, name: &str) -> bool {
        let start = match self {
            Self::Qnn => "libQnnHtp.so",
            Self::OpenVino => "libonnxruntime_providers_openvino.",
            Self::VitisAi => "libonnxruntime_providers_vitisai.",
            Self::Cann => "libonnxruntime_providers_cann.",
            Self::CoreMl | Self::Nnapi => return !cfg!(target_os = "linux"),
            Self::Cpu => return false,
        };
        name.starts_with(start)
    }

    /// Is it part of the build of ONNX Runtime that was loaded?
    pub(crate) fn is_built_in(self) -> bool {
        let is_available = match self {
            Self::Qnn => ep::QNN::is_available(),
            Self::OpenVino => ep::OpenVINO::is_available(),
            Self::VitisAi => ep::Vitis::is_available(),
            Self::Cann => ep::CANN::is_available(),
            Self::CoreMl => ep::CoreML::is_available(),
            Self::Nnapi => ep::NNAPI::is_available(),
            Self::Cpu => return true,
        };
        is_available.unwrap_or(false)
    }

    /// Its options, without its name. An emulated device has no kind of its own: it is told which to be.
    pub(crate) fn options(
        self,
        priority: Priority,
        performance: Performance,
        is_emulated: bool,
    ) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::Qnn => {
                let mut options = vec![("backend_type", "htp")];
                options.push(match priority {
                    Priority::Low => ("qnn_context_priority", "low"),
                    Priority::Normal => ("qnn_context_priority", "normal"),
                    Priority::High => ("qnn_context_priority", "high"),
                });
                options.push(match performance {
                    Performance::PowerSaver => ("htp_performance_mode", "power_saver"),
                    Performance::Balanced => ("htp_performance_mode", "balanced"),
                    Performance::Burst => ("htp_performance_mode", "burst"),
                });
                if is_emulated {
                    // Snapdragon X Elite, the oldest whose Hexagon has floats of 16 bits in every operation.
                    options.push(("soc_model", "60"));
                }
                options
            }
            Self::OpenVino => {
                let priority = match priority {
                    Priority::Low => "LOW",
                    Priority::Normal => "MEDIUM",
                    Priority::High => "HIGH",
                };
                vec![("device_type", "NPU"), ("model_priority", priority)]
            }
            Self::CoreMl => vec![("MLComputeUnits", "CPUAndNeuralEngine"), ("RequireStaticInputShapes", "1")],
            Self::VitisAi | Self::Cann | Self::Nnapi | Self::Cpu => Vec::new(),
        }
    }

    /// It, with options, where it is part of ONNX Runtime.
    pub(crate) fn dispatch(self, options: &[(&'static str, &'static str)]) -> ExecutionProviderDispatch {
        macro_rules! with {
            ($provider:expr) => {
                options
                    .iter()
                    .fold($provider, |ep, (key, value)| ep.with_arbitrary_config(key, value))
                    .build()
            };
        }
        match self {
            Self::Qnn => with!(ep::QNN::default()),
            Self::OpenVino => with!(ep::OpenVINO::default()),
            Self::VitisAi => with!(ep::Vitis::default()),
            Self::Cann => with!(ep::CANN::default()),
            Self::CoreMl => with!(ep::CoreML::default()),
            Self::Nnapi => ep::NNAPI::default().with_fp16(true).with_disable_cpu(true).build(),
            Self::Cpu => ep::CPU::default().build(),
        }
        .error_on_failure()
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qnn => "QNN",
            Self::OpenVino => "OpenVINO",
            Self::VitisAi => "Vitis AI",
            Self::Cann => "CANN",
            Self::CoreMl => "Core ML",
            Self::Nnapi => "NNAPI",
            Self::Cpu => "ONNX Runtime on the CPU",
        })
    }
}
