//! The driver's own functions, called by the hook.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::copies::{Copy, Form};
use super::staging::{self, Saved};
use vm_hook::driver::{Context, Device, Driver, Failure, Handle, Place, Range, Result};
use vm_hook::log::{self, Level};

pub(crate) type Address = u64;
pub(crate) type Stream = u64;
/// The address of a driver's function.
pub(crate) type Function = usize;

/// Were default streams of threads used? Nobody else can ask for their work.
pub(super) static THREAD_STREAMS: AtomicBool = AtomicBool::new(false);

/// `CUDA_ERROR_NOT_FOUND`, of a function that this driver has not.
pub(crate) const NOT_FOUND: u32 = 500;

/// Finds a function once.
pub(super) fn found(slot: &AtomicPtr<c_void>, name: &CStr) -> Option<*mut c_void> {
    let known = slot.load(Ordering::Acquire);
    if !known.is_null() {
        return Some(known);
    }
    let found = super::find::real(name);
    slot.store(found, Ordering::Release);
    (!found.is_null()).then_some(found)
}

/// Calls a driver's function by its name and signature.
macro_rules! call {
    ($name:literal ( $($ty:ty),* ) ( $($argument:expr),* )) => {{
        static SLOT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
        match found(&SLOT, $name) {
            None => NOT_FOUND,
            Some(function) => {
                // SAFETY: the driver's documentation gives the function of this name this signature.
                let function = unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> u32>(function) };
                // SAFETY: pointers are of values that live longer than the call; the driver checks the rest.
                unsafe { function($($argument),*) }
            }
        }
    }};
}
pub(super) use call;

pub(super) fn done(code: u32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Failure(code)) }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Property {
    pub(super) kind: c_int,
    handles: c_int,
    pub(super) location: Location,
    windows: usize,
    flags: [u8; 8],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Location {
    pub(super) kind: c_int,
    number: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Access {
    location: Location,
    flags: c_int,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const ON_DEVICE: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
const ON_HOST: c_int = 3;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const VIRTUAL: c_int = 102;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
const RDMA: c_int = 110;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
const DESCRIPTORS: c_int = 103;

/// Whose something is: it ends with its context, and not with another that has the same handle later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Of {
    pub(crate) context: Context,
    /// Which it was of all such things, counted from 1.
    pub(crate) number: u64,
}

static COUNT: AtomicU64 = AtomicU64::new(0);

impl Of {
    /// Something new of a context.
    pub(crate) fn context(context: Context) -> Self {
        Of { context, number: COUNT.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// How many there have been.
    pub(crate) fn count() -> u64 {
        COUNT.load(Ordering::Relaxed)
    }

    /// Ended it with a context before which there were so many?
    pub(crate) fn ended(self, context: Context, until: u64) -> bool {
        self.context == context && self.number <= until
    }
}

/// The driver below.
#[derive(Default)]
pub(crate) struct Real {
    /// Streams that the program made, which may have work.
    pub(crate) streams: Mutex<BTreeMap<Stream, Of>>,
    /// Events behind the work of streams that were destroyed before it ended.
    left: Mutex<Vec<(u64, Of)>>,
    /// Streams that are captured.
    pub(crate) captures: Mutex<Vec<(Stream, Of)>>,
    /// Contexts that it made, and how often they are held.
    pub(crate) contexts: Mutex<BTreeMap<Context, (Of, u32)>>,
    /// Pools of devices' memory that it made.
    pub(crate) pools: Mutex<BTreeSet<u64>>,
    /// Devices that have contexts. Each reaches the memory of all: a copy between any two is right of the driver's own memory, and of virtual
    /// memory only where the device that copies has access.
    devices: Mutex<BTreeSet<Device>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn attribute(device: Device, attribute: c_int) -> bool {
    let mut value: c_int = 0;
    call!(c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int) (&mut value, attribute, device)) == 0
        && value != 0
}

/// Does something in a context.
pub(crate) fn within<R>(context: Context, f: impl FnOnce() -> Result<R>) -> Result<R> {
    done(call!(c"cuCtxPushCurrent_v2"(u64)(context)))?;
    let result = f();
    let mut popped: u64 = 0;
    let _ = call!(c"cuCtxPopCurrent_v2" (*mut u64) (&mut popped));
    result
}

/// Waits for all work of a context.
pub(crate) fn synchronize(context: Context) -> Result<()> {
    within(context, || done(call!(c"cuCtxSynchronize"()())))
}

/// The devices' own pools.
fn default_pools() -> &'static [u64] {
    static POOLS: OnceLock<Vec<u64>> = OnceLock::new();
    POOLS.get_or_init(|| {
        let mut count: c_int = 0;
        let _ = call!(c"cuDeviceGetCount" (*mut c_int) (&mut count));
        let pool = |device| {
            let mut pool = 0u64;
            (call!(c"cuDeviceGetDefaultMemPool" (*mut u64, c_int) (&mut pool, device)) == 0).then_some(pool)
        };
        (0..count).filter_map(pool).collect()
    })
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_int = 1;

/// A descriptor of physical memory, for another process.
pub(crate) fn export(handle: Handle) -> Result<OwnedFd> {
    let mut file: c_int = -1;
    done(
        call!(c"cuMemExportToShareableHandle" (*mut c_int, u64, c_int, u64) (&mut file, handle, DESCRIPTOR, 0)),
    )?;
    if file < 0 {
        return Err(Failure(NOT_FOUND));
    }
    // SAFETY: the driver has just opened it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Can each device reach the memory of all others?
fn all_are_peers() -> bool {
    static ARE: OnceLock<bool> = OnceLock::new();
    *ARE.get_or_init(|| {
        let mut count: c_int = 0;
        let _ = call!(c"cuDeviceGetCount" (*mut c_int) (&mut count));
        let reaches = |device: c_int, other: c_int| {
            let mut can: c_int = 0;
            device == other
                || call!(c"cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int) (&mut can, device, other)) == 0
                    && can != 0
        };
        let are = (0..count).all(|device| (0..count).all(|other| reaches(device, other)));
        if !are {
            let text = "devices can't reach each other's memory, as virtual memory needs it: the driver's own is used; \
                        with CUDA_VISIBLE_DEVICES the program sees one alone";
            log::line(Level::Error, "no-peers", &[("text", text.into())]);
        }
        are
    })
}

/// The physical memory of another process's descriptor.
pub(crate) fn import(file: &OwnedFd) -> Result<Handle> {
    let mut handle = 0u64;
    let number = file.as_raw_fd() as usize;
    done(
        call!(c"cuMemImportFromShareableHandle" (*mut u64, usize, c_int) (&mut handle, number, DESCRIPTOR)),
    )?;
    Ok(handle)
}

impl Real {
    /// The context of this thread and its device, if it can have virtual memory.
    pub(crate) fn current(&self) -> Option<(Context, Device)> {
        let (mut context, mut device): (u64, c_int) = (0, 0);
        let known = call!(c"cuCtxGetCurrent" (*mut u64) (&mut context)) == 0
            && context != 0
            && call!(c"cuCtxGetDevice" (*mut c_int) (&mut device)) == 0
            && attribute(device, VIRTUAL)
            && all_are_peers();
        known.then_some((context, device))
    }

    /// The context of this thread; 0 without one.
    pub(crate) fn context(&self) -> Context {
        let mut context = 0;
        let _ = call!(c"cuCtxGetCurrent" (*mut u64) (&mut context));
        context
    }

    /// The device's primary context, if it is active.
    pub(crate) fn primary(&self, device: Device) -> Option<Context> {
        let (mut flags, mut active, mut context): (u32, c_int, u64) = (0, 0, 0);
        let state = call!(c"cuDevicePrimaryCtxGetState" (c_int, *mut u32, *mut c_int) (device, &mut flags, &mut active));
        if state != 0 || active == 0 {
            return None;
        }
        if call!(c"cuDevicePrimaryCtxRetain" (*mut u64, c_int) (&mut context, device)) != 0 {
            return None;
        }
        let _ = call!(c"cuDevicePrimaryCtxRelease_v2"(c_int)(device));
        Some(context)
    }

    /// Is the device's primary context there?
    pub(crate) fn has_primary(&self, device: Device) -> bool {
        let (mut flags, mut active): (u32, c_int) = (0, 0);
        call!(c"cuDevicePrimaryCtxGetState" (c_int, *mut u32, *mut c_int) (device, &mut flags, &mut active))
            == 0
            && active != 0
    }

    /// Forgets a context that is gone, and its streams, which may not be asked any more, as far as they were there when so many were; so many
    /// captures ended with it.
    pub(crate) fn forget(&self, context: Context, until: u64) -> usize {
        lock(&self.contexts).retain(|_, (of, _)| !of.ended(context, until));
        lock(&self.streams).retain(|_, of| !of.ended(context, until));
        lock(&self.left).retain(|(_, of)| !of.ended(context, until));
        lock(&self.captures).extract_if(.., |(_, of)| of.ended(context, until)).count()
    }

    /// The context of a stream that the program made.
    pub(crate) fn context_of(&self, stream: Stream) -> Option<Context> {
        lock(&self.streams).get(&stream).map(|of| of.context)
    }

    /// Before a stream is destroyed, whose work goes on without it.
    pub(crate) fn leave(&self, stream: Stream, of: Of) {
        /// `CU_EVENT_DISABLE_TIMING`.
        const UNTIMED: u32 = 2;
        if !lock(&self.captures).is_empty() || call!(c"cuStreamQuery"(u64)(stream)) == 0 {
            return;
        }
        let event = within(of.context, || {
            let mut event = 0u64;
            done(call!(c"cuEventCreate" (*mut u64, u32) (&mut event, UNTIMED)))?;
            done(call!(c"cuEventRecord"(u64, u64)(event, stream)))?;
            Ok(event)
        });
        lock(&self.left).extend(event.ok().map(|event| (event, of)));
    }

    /// Has the work of streams ended that were destroyed?
    fn has_none_left(&self) -> bool {
        let mut left = lock(&self.left);
        left.retain(|(event, _)| {
            let runs = call!(c"cuEventQuery"(u64)(*event)) != 0;
            if !runs {
                let _ = call!(c"cuEventDestroy_v2"(u64)(*event));
            }
            runs
        });
        left.is_empty()
    }

    /// Is a stream captured, or was it, and the capture's end is due?
    pub(crate) fn is_captured(&self, stream: Stream) -> bool {
        let mut status: c_int = 0;
        call!(c"cuStreamIsCapturing" (u64, *mut c_int) (stream, &mut status)) == 0 && status != 0
    }

    /// Is a pool one of a device's memory, and not of the host's?
    pub(crate) fn is_pool_of_device(&self, pool: u64) -> bool {
        lock(&self.pools).contains(&pool) || default_pools().contains(&pool)
    }

    /// All contexts that may have work.
    pub(crate) fn contexts(&self) -> BTreeSet<Context> {
        let mut count: c_int = 0;
        let _ = call!(c"cuDeviceGetCount" (*mut c_int) (&mut count));
        let made: Vec<Context> = lock(&self.contexts).keys().copied().collect();
        (0..count).filter_map(|device| self.primary(device)).chain(made).collect()
    }

    /// A device has a context: true if it had none before.
    pub(crate) fn join(&self, device: Device) -> bool {
        lock(&self.devices).insert(device)
    }

    /// Lets a device reach memory that is mapped.
    pub(crate) fn give_access(&self, address: Address, bytes: u64, device: Device) -> Result<()> {
        let location = Location { kind: ON_DEVICE, number: device };
        let access = Access { location, flags: READ_WRITE };
        done(
            call!(c"cuMemSetAccess" (u64, usize, *const Access, usize) (address, bytes as usize, &access, 1)),
        )
    }
}

impl Driver for Real {
    type Copy = Copy;
    type Saved = Saved;

    fn reserve(&self, bytes: u64) -> Result<u64> {
        let mut address = 0u64;
        done(
            call!(c"cuMemAddressReserve" (*mut u64, usize, usize, u64, u64) (&mut address, bytes as usize, 0, 0, 0)),
        )?;
        Ok(address)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        done(call!(c"cuMemAddressFree"(u64, usize)(address, bytes as usize)))
    }

    fn create(&self, place: Place, bytes: u64) -> Result<Handle> {
        let mut property = Property { kind: PINNED, ..Property::default() };
        property.location = match place {
            Place::Device(number) => {
                // As memory that the driver allocates itself is.
                property.flags[1] = u8::from(attribute(number, RDMA));
                // Another process may be given it later.
                property.handles = if attribute(number, DESCRIPTORS) { DESCRIPTOR } else { 0 };
                Location { kind: ON_DEVICE, number }
            }
            Place::Host(_) => Location { kind: ON_HOST, number: 0 },
        };
        let mut handle = 0u64;
        done(
            call!(c"cuMemCreate" (*mut u64, usize, *const Property, u64) (&mut handle, bytes as usize, &property, 0)),
        )?;
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        done(call!(c"cuMemRelease"(u64)(handle)))
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle, device: Device) -> Result<()> {
        done(call!(c"cuMemMap"(u64, usize, usize, u64, u64)(address, bytes as usize, 0, handle, 0)))?;
        let others = lock(&self.devices).clone().into_iter().filter(|other| *other != device);
        let given =
            std::iter::once(device).chain(others).try_for_each(|to| self.give_access(address, bytes, to));
        if given.is_err() {
            self.unmap(address, bytes)?;
        }
        given
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        done(call!(c"cuMemUnmap"(u64, usize)(address, bytes as usize)))
    }

    fn copy(&self, copy: &Copy) -> Result<()> {
        within(copy.context, || {
            let Copy { function, to, from, bytes, .. } = *copy;
            done(match copy.form {
                Form::Default => {
                    // SAFETY: it is the driver's function of this form, and its signature this.
                    let function =
                        unsafe { transmute::<usize, unsafe extern "C" fn(u64, u64, usize) -> u32>(function) };
                    // SAFETY: the arguments are the program's; what they name is there, as it was freed by nobody since.
                    unsafe { function(to, from, bytes) }
                }
                Form::On(stream) => {
                    // SAFETY: as above.
                    let function = unsafe {
                        transmute::<usize, unsafe extern "C" fn(u64, u64, usize, u64) -> u32>(function)
                    };
                    // SAFETY: as above; a stream that is destroyed is waited for before.
                    unsafe { function(to, from, bytes, stream) }
                }
            })
        })
    }

    fn synchronize(&self, context: Context) -> Result<()> {
        synchronize(context)
    }

    fn is_idle(&self) -> bool {
        let has_ended = |stream: u64| call!(c"cuStreamQuery"(u64)(stream)) == 0;
        !THREAD_STREAMS.load(Ordering::Acquire)
            && has_ended(0)
            && self.has_none_left()
            && lock(&self.streams).keys().all(|stream| has_ended(*stream))
    }

    fn free_bytes(&self, context: Context) -> Result<u64> {
        within(context, || {
            let (mut free, mut all) = (0usize, 0usize);
            done(call!(c"cuMemGetInfo_v2" (*mut usize, *mut usize) (&mut free, &mut all)))?;
            Ok(free as u64)
        })
    }

    fn pools(&self, trims: bool) -> u64 {
        /// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
        const RESERVED: c_int = 5;
        let held = |pool: &u64| {
            let mut held = 0u64;
            if trims {
                let _ = call!(c"cuMemPoolTrimTo"(u64, usize)(*pool, 0));
            }
            let _ = call!(c"cuMemPoolGetAttribute" (u64, c_int, *mut u64) (*pool, RESERVED, &mut held));
            held
        };
        lock(&self.pools).iter().chain(default_pools()).map(held).sum()
    }

    fn save(&self, context: Context, ranges: &[Range]) -> Result<Saved> {
        within(context, || staging::save(context, ranges))
    }

    fn restore(
        &self,
        context: Context,
        saved: &Saved,
        ranges: impl Iterator<Item = Result<(u64, Range)>>,
    ) -> Result<()> {
        staging::restore(context, saved, ranges)
    }

    fn clear(&self, context: Context, range: Range) -> Result<()> {
        within(context, || {
            done(call!(c"cuMemsetD8_v2"(u64, u8, usize)(range.address, 0, range.bytes as usize)))?;
            done(call!(c"cuCtxSynchronize"()()))
        })
    }
}
