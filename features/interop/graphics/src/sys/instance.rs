//! The loader, an instance of it, and the devices that it knows.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ash::{ext, vk};
use libloading::Library;
use vm_accel::{Error, Result};

use super::failed;

const LIBRARY: &str = "libvulkan.so.1";
const VALIDATION: &CStr = c"VK_LAYER_KHRONOS_validation";

/// There is no Vulkan here.
fn unavailable(cause: &str) -> Error {
    Error::Unavailable {
        library: LIBRARY.into(),
        cause: cause.lines().next().unwrap_or("no reason given").to_owned(),
        remedy: "install Vulkan's loader (Debian and Ubuntu: libvulkan1, Fedora: vulkan-loader) and a driver: that of the GPU, or \
                 mesa-vulkan-drivers"
            .into(),
    }
}

/// The loader, opened once for the process.
fn entry() -> Result<&'static ash::Entry> {
    static ENTRY: OnceLock<Result<(ash::Entry, Library)>> = OnceLock::new();
    let loaded = ENTRY.get_or_init(|| {
        let missing = |error: libloading::Error| {
            use std::error::Error as _;
            unavailable(&error.source().map_or_else(|| error.to_string(), ToString::to_string))
        };
        // SAFETY: the loader's constructors are made to be loaded so.
        let library = unsafe { Library::new(LIBRARY) }.map_err(missing)?;
        // SAFETY: the signature is that of Vulkan's header.
        let symbol = unsafe { library.get::<vk::PFN_vkGetInstanceProcAddr>(b"vkGetInstanceProcAddr\0") };
        let functions = ash::StaticFn { get_instance_proc_addr: *symbol.map_err(missing)? };
        // SAFETY: the function is the loader's, which stays loaded as long as the process.
        Ok((unsafe { ash::Entry::from_static_fn(functions) }, library))
    });
    loaded.as_ref().map(|(entry, _)| entry).map_err(Clone::clone)
}

/// What the validation layer said.
type Messages = Mutex<Vec<String>>;

unsafe extern "system" fn note(
    _: vk::DebugUtilsMessageSeverityFlagsEXT,
    _: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    messages: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer hands in its message.
    let data = unsafe { &*data };
    // SAFETY: as above.
    let message = unsafe { data.message_as_c_str() };
    // SAFETY: the pointer is that which the messenger was made with; it is destroyed before what it points to.
    let messages = unsafe { &*messages.cast::<Messages>() };
    let text = message.unwrap_or_default().to_string_lossy().into_owned();
    messages.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    vk::FALSE
}

/// An instance of the loader.
pub(crate) struct Instance {
    pub(crate) handle: ash::Instance,
    messenger: Option<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    messages: Box<Messages>,
}

impl Instance {
    /// An instance, with the validation layer if it is asked for and there.
    pub(crate) fn new(validate: bool) -> Result<Arc<Self>> {
        let entry = entry()?;
        // SAFETY: the loader is loaded.
        let layers = unsafe { entry.enumerate_instance_layer_properties() };
        let layers = layers.map_err(failed("vkEnumerateInstanceLayerProperties"))?;
        let validate = validate && layers.iter().any(|layer| layer.layer_name_as_c_str() == Ok(VALIDATION));
        let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
        let names = [VALIDATION.as_ptr()];
        let extensions = [ext::debug_utils::NAME.as_ptr()];
        let mut info = vk::InstanceCreateInfo::default().application_info(&application);
        if validate {
            info = info.enabled_layer_names(&names).enabled_extension_names(&extensions);
        }
        // SAFETY: what the structure names are locals.
        let handle = match unsafe { entry.create_instance(&info, None) } {
            Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => return Err(unavailable("it finds no driver")),
            made => made.map_err(failed("vkCreateInstance"))?,
        };
        let mut this = Self { handle, messenger: None, messages: Box::default() };
        if validate {
            let debug = ext::debug_utils::Instance::new(entry, &this.handle);
            let info = vk::DebugUtilsMessengerCreateInfoEXT::default()
                .message_severity(
                    vk::DebugUtilsMessageSeverityFlagsEXT::ERROR
                        | vk::DebugUtilsMessageSeverityFlagsEXT::WARNING,
                )
                .message_type(vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION)
                .pfn_user_callback(Some(note))
                .user_data((&raw const *this.messages).cast_mut().cast());
            // SAFETY: the messages are there until the messenger is destroyed.
            let messenger = unsafe { debug.create_debug_utils_messenger(&info, None) };
            this.messenger = Some((debug, messenger.map_err(failed("vkCreateDebugUtilsMessengerEXT"))?));
        }
        Ok(Arc::new(this))
    }

    /// What the validation layer has said so far; none where there is no such layer.
    pub(crate) fn messages(&self) -> Option<Vec<String>> {
        self.messenger.as_ref()?;
        Some(self.messages.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// The devices that can be used.
    pub(crate) fn devices(&self) -> Result<Vec<Physical>> {
        // SAFETY: the instance is live.
        let found = match unsafe { self.handle.enumerate_physical_devices() } {
            // A driver that has none says so.
            Err(vk::Result::ERROR_INITIALIZATION_FAILED) => Vec::new(),
            found => found.map_err(failed("vkEnumeratePhysicalDevices"))?,
        };
        Ok(found
            .into_iter()
            .filter_map(|handle| {
                let physical = self.physical(handle);
                physical.inspect_err(|error| tracing::warn!(%error, "a Vulkan device is left out")).ok()
            })
            .collect())
    }

    fn physical(&self, handle: vk::PhysicalDevice) -> Result<Physical> {
        let mut ids = vk::PhysicalDeviceIDProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut ids);
        // SAFETY: the device is one of the instance.
        unsafe { self.handle.get_physical_device_properties2(handle, &mut properties) };
        let base = properties.properties;
        // SAFETY: as above.
        let families = unsafe { self.handle.get_physical_device_queue_family_properties(handle) };
        let family = families.iter().position(|family| family.queue_flags.contains(vk::QueueFlags::GRAPHICS));
        // SAFETY: as above.
        let extensions = unsafe { self.handle.enumerate_device_extension_properties(handle) };
        let extensions = extensions.map_err(failed("vkEnumerateDeviceExtensionProperties"))?;
        Ok(Physical {
            handle,
            name: base.device_name_as_c_str().unwrap_or_default().to_string_lossy().into_owned(),
            uuid: ids.device_uuid,
            software: base.device_type == vk::PhysicalDeviceType::CPU,
            version: base.api_version,
            family: family.and_then(|family| u32::try_from(family).ok()),
            extensions: extensions
                .iter()
                .filter_map(|extension| extension.extension_name_as_c_str().ok())
                .map(|name| name.to_string_lossy().into_owned())
                .collect(),
        })
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some((debug, messenger)) = self.messenger.take() {
            // SAFETY: nobody uses it after this.
            unsafe { debug.destroy_debug_utils_messenger(messenger, None) };
        }
        // SAFETY: what was made of it holds it, and is gone.
        unsafe { self.handle.destroy_instance(None) };
    }
}

/// A device that an instance knows.
#[derive(Clone, Debug)]
pub(crate) struct Physical {
    pub(crate) handle: vk::PhysicalDevice,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    /// Whether it is the host's processor.
    pub(crate) software: bool,
    pub(crate) version: u32,
    /// Queues that render.
    pub(crate) family: Option<u32>,
    extensions: Vec<String>,
}

impl Physical {
    pub(crate) fn has(&self, extension: &CStr) -> bool {
        self.extensions.iter().any(|name| name.as_bytes() == extension.to_bytes())
    }
}
