//! Direct3D's objects, each call's result a `Result`. They count by how many they are held, and any thread may hold them.
#![allow(unsafe_code)]

use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use vm_accel::sys::BorrowedResource;
use vm_accel::{Error, OsHandle, Result};
use windows::Win32::Foundation::{GENERIC_ALL, HANDLE, WAIT_ABANDONED, WAIT_OBJECT_0, WAIT_TIMEOUT};
use windows::Win32::Graphics::Direct3D::D3D_FEATURE_LEVEL_11_0;
use windows::Win32::Graphics::Direct3D11::{
    D3D11_BIND_RENDER_TARGET, D3D11_BIND_SHADER_RESOURCE, D3D11_BIND_UNORDERED_ACCESS, D3D11_BUFFER_DESC,
    D3D11_CREATE_DEVICE_SINGLETHREADED, D3D11_FENCE_FLAG_SHARED, D3D11_RESOURCE_MISC_BUFFER_ALLOW_RAW_VIEWS,
    D3D11_TEXTURE2D_DESC, D3D11_USAGE_DEFAULT, ID3D11Buffer, ID3D11Device, ID3D11Device5,
    ID3D11DeviceContext, ID3D11DeviceContext4, ID3D11Fence, ID3D11Multithread, ID3D11Resource,
    ID3D11Texture2D,
};
use windows::Win32::Graphics::Direct3D12::{D3D12CreateDevice, ID3D12Device, ID3D12Fence};
use windows::Win32::Graphics::Dxgi::Common::{
    DXGI_FORMAT, DXGI_FORMAT_B8G8R8A8_UNORM, DXGI_FORMAT_R8_UNORM, DXGI_FORMAT_R8G8B8A8_UNORM,
    DXGI_FORMAT_R16G16B16A16_FLOAT, DXGI_FORMAT_R32_FLOAT, DXGI_FORMAT_R32G32B32A32_FLOAT, DXGI_SAMPLE_DESC,
};
use windows::Win32::Graphics::Dxgi::{
    DXGI_ERROR_DEVICE_HUNG, DXGI_ERROR_DEVICE_REMOVED, DXGI_ERROR_DEVICE_RESET,
    DXGI_ERROR_DRIVER_INTERNAL_ERROR, DXGI_SHARED_RESOURCE_READ, DXGI_SHARED_RESOURCE_WRITE, IDXGIAdapter,
    IDXGIDevice, IDXGIKeyedMutex, IDXGIResource, IDXGIResource1,
};
use windows::Win32::System::Threading::{CreateEventW, WaitForSingleObject};
use windows::core::{Interface, PCWSTR};

use crate::format::Format;

/// The error of a call.
fn failed(call: &'static str) -> impl Fn(windows::core::Error) -> Error {
    move |error| {
        let (code, message) = (error.code(), error.message());
        match code {
            DXGI_ERROR_DEVICE_HUNG
            | DXGI_ERROR_DEVICE_REMOVED
            | DXGI_ERROR_DEVICE_RESET
            | DXGI_ERROR_DRIVER_INTERNAL_ERROR => {
                Error::Lost { cause: format!("{call}: {code:?}, {message}") }
            }
            _ => Error::Driver { call, code: code.0.into(), name: format!("{code:?}"), message },
        }
    }
}

/// What a call stored.
fn given<T>(call: &'static str, stored: Option<T>) -> Result<T> {
    let nothing = || Error::Host { what: "asking Direct3D", cause: format!("{call} gave nothing") };
    stored.ok_or_else(nothing)
}

/// Milliseconds until a deadline, but not for ever.
fn left(deadline: Instant) -> u32 {
    let left = deadline.saturating_duration_since(Instant::now());
    left.as_millis().min(u128::from(u32::MAX - 1)) as u32
}

/// Takes a new handle of the system's.
fn owned(handle: HANDLE) -> OwnedHandle {
    // SAFETY: the call before gave it to the caller.
    unsafe { OwnedHandle::from_raw_handle(handle.0) }
}

/// What a format is to Direct3D.
pub(super) fn dxgi(format: Format) -> DXGI_FORMAT {
    match format {
        Format::Rgba8Unorm => DXGI_FORMAT_R8G8B8A8_UNORM,
        Format::Bgra8Unorm => DXGI_FORMAT_B8G8R8A8_UNORM,
        Format::R8Unorm => DXGI_FORMAT_R8_UNORM,
        Format::Rgba16Float => DXGI_FORMAT_R16G16B16A16_FLOAT,
        Format::R32Float => DXGI_FORMAT_R32_FLOAT,
        Format::Rgba32Float => DXGI_FORMAT_R32G32B32A32_FLOAT,
    }
}

/// Somebody's device, with what is asked of it.
pub(super) struct Device {
    handle: ID3D11Device,
    pub(super) context: ID3D11DeviceContext,
    /// The same with fences, of Windows 10 (1703) and newer.
    fences: Option<(ID3D11Device5, ID3D11DeviceContext4)>,
    adapter: IDXGIAdapter,
    /// Made for the first fence, which only it signals from the host.
    twin: OnceLock<ID3D12Device>,
    pub(super) name: String,
    pub(super) luid: [u8; 8],
    pub(super) timeout: Duration,
}

impl Device {
    pub(super) fn new(handle: ID3D11Device, timeout: Duration) -> Result<Self> {
        let dxgi: IDXGIDevice = handle.cast().map_err(failed("QueryInterface(IDXGIDevice)"))?;
        // SAFETY: the device is live.
        let adapter = unsafe { dxgi.GetAdapter() }.map_err(failed("IDXGIDevice::GetAdapter"))?;
        // SAFETY: the adapter is live.
        let told = unsafe { adapter.GetDesc() }.map_err(failed("IDXGIAdapter::GetDesc"))?;
        let name = String::from_utf16_lossy(&told.Description).trim_end_matches('\0').to_owned();
        // SAFETY: the device is live.
        let flags = unsafe { handle.GetCreationFlags() };
        if flags & D3D11_CREATE_DEVICE_SINGLETHREADED.0 != 0 {
            let what = "turns of a device that was made with D3D11_CREATE_DEVICE_SINGLETHREADED";
            return Err(Error::Unsupported { what: what.into(), device: name });
        }
        // SAFETY: the device is live.
        let context = unsafe { handle.GetImmediateContext() };
        let context = context.map_err(failed("ID3D11Device::GetImmediateContext"))?;
        // The accelerator's driver uses it on the worker's thread.
        let threads: ID3D11Multithread =
            context.cast().map_err(failed("QueryInterface(ID3D11Multithread)"))?;
        // SAFETY: the context is live; nothing is left unlocked by it.
        let _before = unsafe { threads.SetMultithreadProtected(true) };
        let fences = handle.cast().ok().zip(context.cast().ok());
        let (low, high) = (told.AdapterLuid.LowPart.to_le_bytes(), told.AdapterLuid.HighPart.to_le_bytes());
        let mut luid = [0; 8];
        luid.iter_mut().zip(low.into_iter().chain(high)).for_each(|(to, from)| *to = from);
        Ok(Self { handle, context, fences, adapter, twin: OnceLock::new(), name, luid, timeout })
    }

    pub(super) fn has_fences(&self) -> bool {
        self.fences.is_some()
    }

    pub(super) fn deadline(&self) -> Instant {
        vm_accel::deadline(self.timeout)
    }

    pub(super) fn unsupported(&self, what: impl Into<String>) -> Error {
        Error::Unsupported { what: what.into(), device: self.name.clone() }
    }

    /// That a resource is one of this device.
    pub(super) fn owns(&self, resource: &ID3D11Resource) -> Result<()> {
        // SAFETY: the resource is live.
        let device = unsafe { resource.GetDevice() }.map_err(failed("ID3D11DeviceChild::GetDevice"))?;
        match device == self.handle {
            true => Ok(()),
            false => Err(self.unsupported("a resource of another Direct3D device")),
        }
    }

    pub(super) fn buffer(&self, bytes: u32, misc: u32) -> Result<ID3D11Buffer> {
        let description = D3D11_BUFFER_DESC {
            ByteWidth: bytes,
            Usage: D3D11_USAGE_DEFAULT,
            BindFlags: (D3D11_BIND_SHADER_RESOURCE.0 | D3D11_BIND_UNORDERED_ACCESS.0) as u32,
            CPUAccessFlags: 0,
            MiscFlags: misc | D3D11_RESOURCE_MISC_BUFFER_ALLOW_RAW_VIEWS.0 as u32,
            StructureByteStride: 0,
        };
        let mut made = None;
        // SAFETY: the pointers are to locals.
        unsafe { self.handle.CreateBuffer(&raw const description, None, Some(&raw mut made)) }
            .map_err(failed("ID3D11Device::CreateBuffer"))?;
        given("ID3D11Device::CreateBuffer", made)
    }

    pub(super) fn texture(
        &self,
        format: Format,
        [width, height]: [u32; 2],
        [levels, layers]: [u32; 2],
        misc: u32,
    ) -> Result<ID3D11Texture2D> {
        let description = D3D11_TEXTURE2D_DESC {
            Width: width,
            Height: height,
            MipLevels: levels,
            ArraySize: layers,
            Format: dxgi(format),
            SampleDesc: DXGI_SAMPLE_DESC { Count: 1, Quality: 0 },
            Usage: D3D11_USAGE_DEFAULT,
            BindFlags: (D3D11_BIND_SHADER_RESOURCE.0 | D3D11_BIND_RENDER_TARGET.0) as u32,
            CPUAccessFlags: 0,
            MiscFlags: misc,
        };
        let mut made = None;
        // SAFETY: the pointers are to locals.
        unsafe { self.handle.CreateTexture2D(&raw const description, None, Some(&raw mut made)) }
            .map_err(failed("ID3D11Device::CreateTexture2D"))?;
        given("ID3D11Device::CreateTexture2D", made)
    }

    /// Has the device begin what it was given.
    pub(super) fn flush(&self) {
        // SAFETY: the context is live.
        unsafe { self.context.Flush() };
    }

    fn fences(&self) -> Result<&(ID3D11Device5, ID3D11DeviceContext4)> {
        let lacks = || {
            self.unsupported(
                "fences (ID3D11Device5, of Windows 10 version 1703 and newer); map by the driver instead,",
            )
        };
        self.fences.as_ref().ok_or_else(lacks)
    }

    fn twin(&self) -> Result<&ID3D12Device> {
        if let Some(twin) = self.twin.get() {
            return Ok(twin);
        }
        let mut made = None;
        // SAFETY: the adapter is live; the pointer is to a local.
        unsafe { D3D12CreateDevice(&self.adapter, D3D_FEATURE_LEVEL_11_0, &raw mut made) }
            .map_err(failed("D3D12CreateDevice"))?;
        let made = given("D3D12CreateDevice", made)?;
        Ok(self.twin.get_or_init(|| made))
    }
}

/// What a buffer says of itself.
pub(super) fn about_buffer(buffer: &ID3D11Buffer) -> D3D11_BUFFER_DESC {
    let mut told = D3D11_BUFFER_DESC::default();
    // SAFETY: the buffer is live; the pointer is to a local.
    unsafe { buffer.GetDesc(&raw mut told) };
    told
}

/// What a texture says of itself.
pub(super) fn about_texture(texture: &ID3D11Texture2D) -> D3D11_TEXTURE2D_DESC {
    let mut told = D3D11_TEXTURE2D_DESC::default();
    // SAFETY: the texture is live; the pointer is to a local.
    unsafe { texture.GetDesc(&raw mut told) };
    told
}

/// A handle of a resource that was made to be shared: an NT handle, or the graphics kernel's.
pub(super) fn share(resource: &ID3D11Resource, nt: bool) -> Result<OsHandle> {
    if !nt {
        let resource: IDXGIResource = resource.cast().map_err(failed("QueryInterface(IDXGIResource)"))?;
        // SAFETY: the resource is live.
        let handle =
            unsafe { resource.GetSharedHandle() }.map_err(failed("IDXGIResource::GetSharedHandle"))?;
        return Ok(OsHandle::Kmt(handle.0.addr()));
    }
    let resource: IDXGIResource1 = resource.cast().map_err(failed("QueryInterface(IDXGIResource1)"))?;
    let access = DXGI_SHARED_RESOURCE_READ.0 | DXGI_SHARED_RESOURCE_WRITE.0;
    // SAFETY: the resource is live, and the handle has no name.
    let handle = unsafe { resource.CreateSharedHandle(None, access, PCWSTR::null()) };
    Ok(OsHandle::Nt(owned(handle.map_err(failed("IDXGIResource1::CreateSharedHandle"))?)))
}

/// A resource for the accelerator's driver.
pub(super) fn lend(resource: &ID3D11Resource) -> BorrowedResource {
    // SAFETY: it is a resource of Direct3D 11, whose device is protected for other threads, and is held.
    unsafe { BorrowedResource::new(resource.as_raw(), resource.clone()) }
}

/// A fence, which the device waits for and signals, and so does the host.
pub(super) struct Fence {
    handle: ID3D11Fence,
    /// The same to Direct3D 12, which alone lets the host signal it.
    host: ID3D12Fence,
    pub(super) device: Arc<Device>,
}

impl Fence {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let (device5, _) = device.fences()?;
        let mut handle: Option<ID3D11Fence> = None;
        // SAFETY: the pointer is to a local.
        unsafe { device5.CreateFence(0, D3D11_FENCE_FLAG_SHARED, &raw mut handle) }
            .map_err(failed("ID3D11Device5::CreateFence"))?;
        let handle = given("ID3D11Device5::CreateFence", handle)?;
        let (shared, mut host) = (share_fence(&handle)?, None);
        // SAFETY: the handle is open; the pointer is to a local.
        unsafe { device.twin()?.OpenSharedHandle(HANDLE(shared.as_raw_handle()), &raw mut host) }
            .map_err(failed("ID3D12Device::OpenSharedHandle"))?;
        Ok(Self { handle, host: given("ID3D12Device::OpenSharedHandle", host)?, device: Arc::clone(device) })
    }

    pub(super) fn export(&self) -> Result<OsHandle> {
        share_fence(&self.handle).map(OsHandle::Nt)
    }

    pub(super) fn value(&self) -> Result<u64> {
        // SAFETY: the fence is live.
        match unsafe { self.handle.GetCompletedValue() } {
            u64::MAX => {
                Err(Error::Lost { cause: "ID3D11Fence::GetCompletedValue: the device was removed".into() })
            }
            value => Ok(value),
        }
    }

    /// Waits for a value; false if it did not come by the deadline.
    pub(super) fn wait(&self, value: u64, deadline: Instant) -> Result<bool> {
        if self.value()? >= value {
            return Ok(true);
        }
        // SAFETY: a new event without a name.
        let event = unsafe { CreateEventW(None, true, false, PCWSTR::null()) };
        let event = owned(event.map_err(failed("CreateEvent"))?);
        let raw = HANDLE(event.as_raw_handle());
        // SAFETY: fence and event are live; the system holds the event as long as the fence is to set it.
        unsafe { self.handle.SetEventOnCompletion(value, raw) }
            .map_err(failed("ID3D11Fence::SetEventOnCompletion"))?;
        // SAFETY: the event is live.
        match unsafe { WaitForSingleObject(raw, left(deadline)) } {
            WAIT_OBJECT_0 => self.value().map(|_| true),
            WAIT_TIMEOUT => Ok(false),
            _ => Err(failed("WaitForSingleObject")(windows::core::Error::from_thread())),
        }
    }

    /// Sets it to a value from the host, unless it has got so far.
    pub(super) fn signal(&self, value: u64) -> Result<()> {
        if self.value()? >= value {
            return Ok(());
        }
        // SAFETY: the fence is live, and whoever else signals it has ended.
        unsafe { self.host.Signal(value) }.map_err(failed("ID3D12Fence::Signal"))
    }

    /// Has the device wait for a value before what it is given next.
    pub(super) fn wait_on_device(&self, value: u64) -> Result<()> {
        let (_, context) = self.device.fences()?;
        // SAFETY: context and fence are live.
        unsafe { context.Wait(&self.handle, value) }.map_err(failed("ID3D11DeviceContext4::Wait"))
    }

    /// Has the device set it to a value behind what it was given.
    pub(super) fn signal_on_device(&self, value: u64) -> Result<()> {
        let (_, context) = self.device.fences()?;
        // SAFETY: context and fence are live.
        unsafe { context.Signal(&self.handle, value) }.map_err(failed("ID3D11DeviceContext4::Signal"))?;
        self.device.flush();
        Ok(())
    }
}

fn share_fence(fence: &ID3D11Fence) -> Result<OwnedHandle> {
    // SAFETY: the fence is live and was made to be shared, and the handle has no name.
    let handle = unsafe { fence.CreateSharedHandle(None, GENERIC_ALL.0, PCWSTR::null()) };
    Ok(owned(handle.map_err(failed("ID3D11Fence::CreateSharedHandle"))?))
}

/// A resource's keyed mutex.
pub(super) struct Mutex(IDXGIKeyedMutex);

impl Mutex {
    pub(super) fn of(resource: &ID3D11Resource) -> Result<Self> {
        resource.cast().map(Self).map_err(failed("QueryInterface(IDXGIKeyedMutex)"))
    }

    /// Acquires it once it was released with a key; false if that did not happen by the deadline.
    pub(super) fn acquire(&self, key: u64, deadline: Instant) -> Result<bool> {
        const CALL: &str = "IDXGIKeyedMutex::AcquireSync";
        // The binding takes a timeout for success, as its code is none of a failure.
        // SAFETY: the mutex is live.
        let code = unsafe { (self.0.vtable().AcquireSync)(self.0.as_raw(), key, left(deadline)) };
        match code.0 as u32 {
            code if code == WAIT_TIMEOUT.0 => Ok(false),
            code if code == WAIT_ABANDONED.0 => {
                Err(Error::Lost { cause: format!("{CALL}: the device that had it is gone") })
            }
            _ => code.ok().map(|()| true).map_err(failed(CALL)),
        }
    }

    pub(super) fn release(&self, key: u64) -> Result<()> {
        // SAFETY: the mutex is live; one that is not held is refused.
        unsafe { self.0.ReleaseSync(key) }.map_err(failed("IDXGIKeyedMutex::ReleaseSync"))
    }
}
