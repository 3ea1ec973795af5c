//! A device that runs models.

use crate::context::{ContextOptions, NpuContext};
use crate::{NpuDevice, NpuError, Provider, Roots, Runtime};

/// An NPU that runs models: by a [context](Self::context) of its own for each who uses it.
#[derive(Clone, Debug)]
pub struct NpuAccelerator {
    runtime: Runtime,
    device: NpuDevice,
    provider: Provider,
}

impl NpuAccelerator {
    /// The device with a number in the order of [`Runtime::devices`], of this machine.
    ///
    /// # Errors
    /// [`NpuError::NoRuntime`], [`NpuError::NoDevice`], and as [`open`](Self::open).
    pub fn new(ordinal: usize) -> Result<Self, NpuError> {
        let runtime = Runtime::system()?;
        let devices = runtime.devices(&Roots::system())?;
        let device =
            devices.get(ordinal).ok_or_else(|| NpuError::NoDevice { wanted: ordinal.to_string() })?;
        Self::open(&runtime, device)
    }

    /// The device at a PCI address, as in `0000:00:0b.0`, of a host below `roots`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn at(roots: &Roots, address: &str) -> Result<Self, NpuError> {
        let runtime = Runtime::system()?;
        let devices = runtime.devices(roots)?;
        let device = devices.iter().find(|device| device.address.as_deref() == Some(address));
        Self::open(&runtime, device.ok_or_else(|| NpuError::NoDevice { wanted: address.to_owned() })?)
    }

    /// One of the devices that the runtime lists.
    ///
    /// # Errors
    /// [`NpuError::NoProvider`] if nothing runs models on it.
    pub fn open(runtime: &Runtime, device: &NpuDevice) -> Result<Self, NpuError> {
        let provider = device.provider.ok_or_else(|| device.no_provider())?;
        Ok(Self { runtime: runtime.clone(), device: device.clone(), provider })
    }

    /// The device.
    pub fn device(&self) -> &NpuDevice {
        &self.device
    }

    /// What runs models on it.
    pub fn provider(&self) -> Provider {
        self.provider
    }

    /// What a compiled model depends on beside the model: the provider, its options and its libraries. Blobs of one identity are
    /// good for another context of the same.
    pub fn identity(&self, options: &ContextOptions) -> String {
        let libraries = self.runtime.libraries();
        let plugin = libraries.plugins.iter().find(|(provider, _)| *provider == self.provider);
        let file = plugin.map_or(&libraries.onnxruntime, |(_, path)| path);
        let of = |path: &std::path::Path| {
            let metadata = path.metadata().ok()?;
            let since = metadata.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
            Some(format!("{} {} {}", path.display(), metadata.len(), since.as_nanos()))
        };
        // With what the provider's own library loads from beside it.
        let beside = file.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
        let beside = beside.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains(".so"));
        let mut files: Vec<_> =
            beside.chain([libraries.onnxruntime.clone()]).filter_map(|path| of(&path)).collect();
        files.sort();
        let settings = self.settings(options);
        format!("{} {settings:?} {} {files:?} {}", self.provider.name(), options.fallback, ort::info())
    }

    /// A context: what it runs comes one after the other, beside what other contexts run.
    ///
    /// # Errors
    /// [`NpuError::Lost`] if its threads can't be started.
    pub fn context(&self, options: &ContextOptions) -> Result<NpuContext, NpuError> {
        NpuContext::start(self, options)
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn settings(&self, options: &ContextOptions) -> Vec<(&'static str, &'static str)> {
        self.provider.options(options.priority, options.performance, self.device.emulated.is_some())
    }
}
