//! ONNX Runtime as it was loaded into this process, and the devices of its execution providers.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ort::environment::Environment;
use ort::logging::LogLevel;
use ort::memory::DeviceType as Hardware;

use crate::{NpuDevice, NpuError, NpuKind, Provider, Roots, class, owner};

/// The most files and folders that are looked at.
const MOST_FILES: usize = 1 << 14;

/// Where the libraries are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Libraries {
    /// ONNX Runtime's, 1.24 or newer: a file, or a name that the loader finds.
    pub onnxruntime: PathBuf,
    /// Plugins of execution providers, which lie beside their own libraries.
    pub plugins: Vec<(Provider, PathBuf)>,
}

/// The variable that names a folder with the libraries, in it or in folders of it.
pub const FOLDER_VARIABLE: &str = "VM_ONNXRUNTIME";

impl Libraries {
    /// Those of this machine: below its [folder](Self::folder), or else the one that the loader finds.
    ///
    /// # Errors
    /// [`NpuError::NoRuntime`] if a folder was named and has none, and as [`folder`](Self::folder).
    pub fn find() -> Result<Libraries, NpuError> {
        let Some(folder) = Self::folder()? else {
            return Ok(Libraries { onnxruntime: "libonnxruntime.so.1".into(), plugins: Vec::new() });
        };
        Self::below(&folder).ok_or_else(|| NpuError::NoRuntime {
            what: format!("there is no libonnxruntime.so below {}", folder.display()),
        })
    }

    /// The folder below which this machine's are: the one that [`FOLDER_VARIABLE`] names, or else `vm-npu/onnxruntime` of the user's cache,
    /// if that has any. Root takes it from a cache only where nobody but root can have put it there: `sudo` may keep another user's HOME.
    ///
    /// # Errors
    /// [`NpuError::Untrusted`] for a cache of somebody else.
    pub fn folder() -> Result<Option<PathBuf>, NpuError> {
        if let Some(folder) = env::var_os(FOLDER_VARIABLE) {
            return Ok(Some(folder.into()));
        }
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
        let found = cache.map(|cache| cache.join("vm-npu/onnxruntime"));
        let Some(folder) = found.filter(|folder| folder.is_absolute() && Self::below(folder).is_some())
        else {
            return Ok(None);
        };
        if rustix::process::geteuid().is_root() {
            return owner::check(&folder, 0).map(Some);
        }
        Ok(Some(folder))
    }

    /// May one of these run models on an NPU of which Linux does not know? Not where they lie in a folder that has no provider's library: there
    /// is nothing to ask then. Of a file that only the loader finds it is not known.
    pub fn may_have_npus(&self) -> bool {
        let Some(folder) = self.onnxruntime.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
            return true;
        };
        let Ok(entries) = folder.read_dir() else { return true };
        let is_provider = |name: &str| Provider::ALL.into_iter().any(|provider| provider.is_library(name));
        let names = entries.flatten().map(|entry| entry.file_name());
        !self.plugins.is_empty() || names.into_iter().any(|name| name.to_str().is_some_and(is_provider))
    }

    /// Those below a folder, three deep at most.
    pub fn below(folder: &Path) -> Option<Libraries> {
        let mut files = collect(folder, 3);
        files.sort_unstable();
        let named = |start: &str| {
            let is_it = |path: &&PathBuf| {
                path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(start))
            };
            files.iter().find(is_it).cloned()
        };
        let plugins =
            Provider::ALL.into_iter().filter_map(|provider| Some((provider, named(provider.plugin()?)?)));
        Some(Libraries { onnxruntime: named("libonnxruntime.so")?, plugins: plugins.collect() })
    }
}

/// Files of a folder and of those in it, so deep, with an end to how many are looked at: folders may lead back to themselves.
pub(crate) fn collect(folder: &Path, depth: usize) -> Vec<PathBuf> {
    fn walk(folder: &Path, depth: usize, left: &mut usize, files: &mut Vec<PathBuf>) {
        let Ok(entries) = folder.read_dir() else { return };
        for entry in entries.flatten() {
            if *left == 0 {
                return;
            }
            *left -= 1;
            let path = entry.path();
            if path.is_dir() && depth > 0 {
                walk(&path, depth - 1, left, files);
            } else if path.is_file() {
                // A FIFO would be waited for.
                files.push(path);
            }
        }
    }

    let mut files = Vec::new();
    walk(folder, depth, &mut { MOST_FILES }, &mut files);
    files
}

/// ONNX Runtime in this process. It is loaded once, and stays.
#[derive(Clone, Debug)]
pub struct Runtime {
    pub(crate) environment: Environment,
    libraries: Arc<Libraries>,
}

static LOADED: Mutex<Option<Runtime>> = Mutex::new(None);

impl Runtime {
    /// Loads the libraries of this machine, if they are not loaded yet.
    ///
    /// # Errors
    /// [`NpuError::NoRuntime`].
    pub fn system() -> Result<Runtime, NpuError> {
        Self::load(&Libraries::find()?)
    }

    /// Loads these libraries. A plugin that can't be loaded is an error: its devices would be missing.
    ///
    /// # Errors
    /// [`NpuError::NoRuntime`]; others were loaded before.
    pub fn load(libraries: &Libraries) -> Result<Runtime, NpuError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*loaded {
            if *runtime.libraries == *libraries {
                return Ok(runtime.clone());
            }
            return Err(NpuError::NoRuntime {
                what: format!(
                    "{} is loaded already, and a process has one",
                    runtime.libraries.onnxruntime.display()
                ),
            });
        }
        let no = |what: String| NpuError::NoRuntime { what };
        let builder = ort::init_from(&libraries.onnxruntime).map_err(|error| no(error.to_string()))?;
        let environment = builder
            .with_name("vm-npu")
            .with_telemetry(false)
            .build()
            .map_err(|error| no(error.to_string()))?;
        // What it writes to standard error it answers as an error, too.
        environment.set_log_level(LogLevel::Fatal);
        for (provider, path) in &libraries.plugins {
            environment
                .register_ep_library(provider.name(), path)
                .map_err(|error| no(format!("{}: {error}", path.display())))?;
        }
        let runtime = Runtime { environment, libraries: Arc::new(libraries.clone()) };
        *loaded = Some(runtime.clone());
        Ok(runtime)
    }

    /// The libraries that are loaded.
    pub fn libraries(&self) -> &Libraries {
        &self.libraries
    }

    /// Every device, numbered: the accel subsystem's first, each with the provider that runs models on it, where one does; then
    /// those of which only a provider knows, an emulator among them.
    ///
    /// # Errors
    /// [`NpuError::Read`].
    pub fn devices(&self, roots: &Roots) -> Result<Vec<NpuDevice>, NpuError> {
        let mut devices = match class::devices(roots) {
            Ok(devices) => devices,
            Err(NpuError::NoDriver { .. }) => Vec::new(),
            Err(error) => return Err(error),
        };
        for (provider, is_npu, name) in self.offered() {
            let kind = NpuKind::of_provider(provider);
            let own = devices.iter_mut().find(|device| device.kind == kind && device.provider.is_none());
            match own {
                Some(device) if is_npu => device.provider = Some(provider),
                _ => devices.push(NpuDevice {
                    number: devices.len() as u32,
                    kind,
                    driver: None,
                    address: None,
                    ids: None,
                    node: None,
                    provider: Some(provider),
                    emulated: (!is_npu).then_some(name),
                }),
            }
        }
        Ok(devices)
    }

    /// The host's processor as a device, by ONNX Runtime's own kernels: what NPUs are compared with. It is no NPU, and listed nowhere.
    pub fn processor(&self) -> NpuDevice {
        NpuDevice {
            number: 0,
            kind: NpuKind::Other,
            driver: None,
            address: None,
            ids: None,
            node: None,
            provider: Some(Provider::Cpu),
            emulated: None,
        }
    }

    /// Devices of providers: the provider, whether it is an NPU, and what it is otherwise.
    fn offered(&self) -> Vec<(Provider, bool, &'static str)> {
        let mut offered = Vec::new();
        for (provider, _) in &self.libraries.plugins {
            let own = || {
                self.environment.devices().filter(|device| device.ep().is_ok_and(|ep| ep == provider.name()))
            };
            let npus = own().filter(|device| device.hardware_device().ty() == Hardware::NPU).count();
            offered.extend((0..npus).map(|_| (*provider, true, "")));
            // Qualcomm's library for x86-64 emulates a Hexagon on the processor.
            if npus == 0 && *provider == Provider::Qnn && own().next().is_some() {
                offered.push((*provider, false, "emulated"));
            }
        }
        let is_plugin =
            |provider: &Provider| self.libraries.plugins.iter().any(|(other, _)| other == provider);
        let built_in = Provider::ALL
            .into_iter()
            .filter(|provider| *provider != Provider::Cpu && !is_plugin(provider) && provider.is_built_in());
        offered.extend(built_in.map(|provider| (provider, true, "")));
        offered
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn folders_without_an_end_are_looked_at_for_a_while() {
        let root = tempfile::tempdir().unwrap();
        (0..100).for_each(|number| {
            std::os::unix::fs::symlink(root.path(), root.path().join(number.to_string())).unwrap();
        });
        assert_eq!(Libraries::below(root.path()), None);
        let found = collect(root.path(), 3).len();
        assert_eq!(found, 0, "of folders");
        let fifo = root.path().join("libonnxruntime.so.1");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(collect(root.path(), 0), Vec::<PathBuf>::new());
        fs::write(root.path().join("libonnxruntime.so"), "").unwrap();
        assert!(collect(root.path(), 0).contains(&root.path().join("libonnxruntime.so")));
    }

    #[test]
    fn only_where_a_provider_lies_is_there_something_to_ask() {
        let check = |files: &[&str], expect: bool| {
            let root = tempfile::tempdir().unwrap();
            for file in files {
                fs::create_dir_all(root.path().join(file).parent().unwrap()).unwrap();
                fs::write(root.path().join(file), "").unwrap();
            }
            let found = Libraries::below(root.path()).unwrap();
            assert_eq!(found.may_have_npus(), expect, "{files:?}");
        };
        check(&["libonnxruntime.so.1.24.0"], false);
        let of_gpus = "a/libonnxruntime_providers_cuda.so";
        check(&["a/libonnxruntime.so.1", "a/libonnxruntime_providers_shared.so", of_gpus], false);
        check(&["a/libonnxruntime.so", "a/libonnxruntime_providers_openvino.so"], true);
        check(&["a/libonnxruntime.so", "a/libonnxruntime_providers_cann.so"], true);
        check(&["a/libonnxruntime.so", "a/libonnxruntime_providers_vitisai.so"], true);
        check(&["a/libonnxruntime.so", "a/libQnnHtp.so"], true);
        check(&["a/libonnxruntime.so", "b/c/libonnxruntime_providers_qnn.so"], true);
        let by_the_loader = Libraries { onnxruntime: "libonnxruntime.so.1".into(), plugins: Vec::new() };
        assert!(by_the_loader.may_have_npus());
    }
}
