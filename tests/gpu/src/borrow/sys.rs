//! The other program: calls of the driver.

use std::cell::RefCell;
use std::ffi::c_uint;
use std::ptr;

use anyhow::Context;
use vm_accel::Result;
use vm_cuda::sys::{
    BorrowedContext, BorrowedStream, CUcontext, CUgraph, CUgraphExec, CUpointer_attribute as Attribute,
    CUstream, Driver, driver,
};

/// Who has a context, a stream and memory.
pub(crate) struct Owner {
    driver: &'static Driver,
    device: i32,
    context: CUcontext,
    /// Whether it is the primary one.
    primary: bool,
    stream: CUstream,
    memory: RefCell<Vec<u64>>,
    /// Pinned memory of this process, to read by.
    host: *mut u32,
}

/// The library, for what vm-cuda has no need of.
fn library() -> anyhow::Result<libloading::Library> {
    // SAFETY: it is loaded already.
    unsafe { libloading::Library::new("libcuda.so.1") }.context("libcuda")
}

/// Asks the driver something of an address, and gives its status.
type Question = Box<dyn FnMut(u64) -> i32>;

/// Asks for the first attributes of an address: its type, range, context, whether it is managed, its device.
fn ask(driver: &Driver, address: u64, count: u32) -> (u32, [u64; 6]) {
    let mut values = [0u64; 6];
    let mut wanted = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ];
    let mut places = values.each_mut().map(|value| ptr::from_mut(value).cast());
    // SAFETY: as many attributes as places, none of more than 8 bytes.
    let status =
        unsafe { (driver.cuPointerGetAttributes)(count, wanted.as_mut_ptr(), places.as_mut_ptr(), address) };
    (status, values)
}

/// Elements that are read at once at most.
const COUNT: usize = crate::borrow::COUNT;

impl Owner {
    /// One with the primary context, and a stream of its own or the default one.
    pub(crate) fn primary(ordinal: u32, stream: bool) -> anyhow::Result<Self> {
        let driver = driver()?;
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the pointers are to locals.
        unsafe { driver.cuDeviceGet(&raw mut device, ordinal as i32) }?;
        // SAFETY: as above.
        unsafe { driver.cuDevicePrimaryCtxRetain(&raw mut context, device) }?;
        // SAFETY: the context is retained.
        unsafe { driver.cuCtxSetCurrent(context) }?;
        Self::with(driver, device, context, true, stream)
    }

    /// One with another context.
    pub(crate) fn own_context(ordinal: u32) -> anyhow::Result<Self> {
        let driver = driver()?;
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the pointer is to a local.
        unsafe { driver.cuDeviceGet(&raw mut device, ordinal as i32) }?;
        type Create = unsafe extern "C" fn(*mut CUcontext, c_uint, i32) -> u32;
        let library = library()?;
        // SAFETY: the signature is that of the driver's header.
        let create = unsafe { library.get::<Create>(b"cuCtxCreate_v2\0") }.context("cuCtxCreate")?;
        // SAFETY: the pointer is to a local.
        let status = unsafe { create(&raw mut context, 0, device) };
        anyhow::ensure!(status == 0, "cuCtxCreate: {status}");
        Self::with(driver, device, context, false, true)
    }

    fn with(
        driver: &'static Driver,
        device: i32,
        context: CUcontext,
        primary: bool,
        own_stream: bool,
    ) -> anyhow::Result<Self> {
        let (mut stream, mut host) = (ptr::null_mut(), ptr::null_mut());
        if own_stream {
            // SAFETY: the pointer is to a local.
            unsafe { driver.cuStreamCreate(&raw mut stream, 1) }?;
        }
        // SAFETY: the pointer is to a local.
        unsafe { driver.cuMemHostAlloc(&raw mut host, 4 * COUNT, 0) }?;
        Ok(Self { driver, device, context, primary, stream, memory: RefCell::default(), host: host.cast() })
    }

    /// What a queue needs.
    pub(crate) fn lend(&self) -> (Option<BorrowedContext>, BorrowedStream) {
        // SAFETY: each test ends its sessions before their owner.
        let context = (!self.primary).then(|| unsafe { BorrowedContext::new(self.context) });
        // SAFETY: as above.
        (context, unsafe { BorrowedStream::new(self.stream) })
    }

    /// Its stream's handle.
    pub(crate) fn stream(&self) -> u64 {
        self.stream.expose_provenance() as u64
    }

    /// Makes its context this thread's current one.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained, or its own.
        unsafe { self.driver.cuCtxSetCurrent(self.context) }
    }

    /// Leaves this thread without a current context.
    pub(crate) fn leave(&self) -> Result<()> {
        // SAFETY: no context is live as any other is.
        unsafe { self.driver.cuCtxSetCurrent(ptr::null_mut()) }
    }

    /// Its pinned memory.
    pub(crate) fn pinned(&self) -> u64 {
        self.host.expose_provenance() as u64
    }

    /// Frees memory of [`allocate`](Self::allocate).
    pub(crate) fn free(&self, address: u64) -> Result<()> {
        self.memory.borrow_mut().retain(|known| *known != address);
        // SAFETY: nothing uses it any more.
        unsafe { self.driver.cuMemFree_v2(address) }
    }

    /// Its context's handle, as a number.
    pub(crate) fn handle(&self) -> usize {
        self.context.expose_provenance()
    }

    /// Ends a context of somebody's own, whoever uses it.
    pub(crate) fn destroy(context: usize) -> anyhow::Result<()> {
        let library = library()?;
        // SAFETY: the signature is that of the driver's header.
        let destroy = unsafe { library.get::<unsafe extern "C" fn(CUcontext) -> u32>(b"cuCtxDestroy_v2\0") }?;
        // SAFETY: it is one that `own_context` made; who uses it is told so by the driver.
        let status = unsafe { destroy(ptr::with_exposed_provenance_mut(context)) };
        anyhow::ensure!(status == 0, "cuCtxDestroy: {status}");
        Ok(())
    }

    /// The handle of a stream of its context that was destroyed.
    pub(crate) fn ended_stream(&self) -> Result<u64> {
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { self.driver.cuStreamCreate(&raw mut stream, 1) }?;
        // SAFETY: nothing uses it.
        unsafe { self.driver.cuStreamDestroy_v2(stream) }?;
        Ok(stream.expose_provenance() as u64)
    }

    /// What the driver tells of an address: the status, and each attribute.
    pub(crate) fn describe(&self, address: u64) -> Result<String> {
        let (status, [kind, first, bytes, context, managed, device]) = ask(self.driver, address, 6);
        Ok(format!(
            "{address:#x}: status {status}, type {kind}, from {first:#x}, {bytes} bytes, context {context:#x} (this one is {:#x}), \
             managed {managed}, device {}",
            self.handle(),
            device as i32
        ))
    }

    /// Questions to the driver about an address, with what they are.
    pub(crate) fn questions(&self) -> Vec<(String, Question)> {
        let (driver, stream) = (self.driver, self.stream);
        let attributes = [1u32, 3, 6].map(|count| -> (String, Question) {
            let name = format!("cuPointerGetAttributes of {count}");
            (name, Box::new(move |address| ask(driver, address, count).0 as i32))
        });
        let mut all = Vec::from(attributes);
        let mut context = ptr::null_mut();
        // SAFETY: here and below: the pointers are to what is captured.
        let current = move |_| unsafe { (driver.cuCtxGetCurrent)(&raw mut context) } as i32;
        all.push(("cuCtxGetCurrent".into(), Box::new(current)));
        if let Some(get) = driver.cuCtxGetId {
            let (mut id, own) = (0, self.context);
            // SAFETY: as above.
            all.push(("cuCtxGetId".into(), Box::new(move |_| unsafe { get(own, &raw mut id) } as i32)));
        }
        let mut capturing = 0;
        // SAFETY: as above.
        let ask = move |_| unsafe { (driver.cuStreamIsCapturing)(stream, &raw mut capturing) } as i32;
        all.push(("cuStreamIsCapturing".into(), Box::new(ask)));
        all
    }

    /// The thread's current context, as a number.
    pub(crate) fn current(&self) -> Result<usize> {
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { self.driver.cuCtxGetCurrent(&raw mut context) }?;
        Ok(context.addr())
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.driver.cuMemAlloc_v2(&raw mut address, bytes as usize) }?;
        self.memory.borrow_mut().push(address);
        Ok(address)
    }

    /// `cuMemsetD8Async`.
    pub(crate) fn fill(&self, address: u64, value: u8, bytes: u64) -> anyhow::Result<()> {
        // SAFETY: the memory is this owner's, which the tests keep to.
        Ok(unsafe { self.driver.cuMemsetD8Async(address, value, bytes as usize, self.stream) }?)
    }

    /// `cuMemcpyAsync`.
    pub(crate) fn copy(&self, target: u64, source: u64, bytes: u64) -> anyhow::Result<()> {
        // SAFETY: as above.
        Ok(unsafe { self.driver.cuMemcpyAsync(target, source, bytes as usize, self.stream) }?)
    }

    /// Waits for the stream.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the stream is live.
        unsafe { self.driver.cuStreamSynchronize(self.stream) }
    }

    /// Elements of memory, after the stream's commands.
    pub(crate) fn read_some(&self, address: u64, count: usize) -> anyhow::Result<Vec<u32>> {
        self.copy(self.host as u64, address, 4 * count as u64)?;
        self.wait()?;
        // SAFETY: so many were copied there, and no command writes there any more.
        Ok(unsafe { std::slice::from_raw_parts(self.host, count) }.to_vec())
    }

    /// As many elements as the tests' memory has.
    pub(crate) fn read(&self, address: u64) -> anyhow::Result<Vec<u32>> {
        self.read_some(address, COUNT)
    }

    /// Writes elements, and waits.
    pub(crate) fn write(&self, address: u64, values: &[u32]) -> anyhow::Result<()> {
        self.copy(address, values.as_ptr() as u64, 4 * values.len() as u64)?;
        Ok(self.wait()?)
    }

    /// A graph of what `f` gives the stream.
    pub(crate) fn capture(&self, f: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<OwnersGraph<'_>> {
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is live.
        unsafe { self.driver.cuStreamBeginCapture_v2(self.stream, 0) }?;
        let done = f();
        // SAFETY: the stream is live, the pointer is to a local.
        unsafe { self.driver.cuStreamEndCapture(self.stream, &raw mut graph) }?;
        let graph = OwnersGraph { owner: self, graph, executable: ptr::null_mut() };
        done?;
        // SAFETY: the graph is live, the pointer is to a local.
        unsafe { self.driver.cuGraphInstantiateWithFlags(&raw mut executable, graph.graph, 0) }?;
        let mut graph = graph;
        graph.executable = executable;
        Ok(graph)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.enter();
        let _ = self.wait();
        for address in self.memory.borrow_mut().drain(..) {
            // SAFETY: nothing uses it any more.
            let _ = unsafe { self.driver.cuMemFree_v2(address) };
        }
        // SAFETY: as above.
        let _ = unsafe { self.driver.cuMemFreeHost(self.host.cast()) };
        if !self.stream.is_null() {
            // SAFETY: as above.
            let _ = unsafe { self.driver.cuStreamDestroy_v2(self.stream) };
        }
        // SAFETY: no context is current after this.
        let _ = unsafe { self.driver.cuCtxSetCurrent(ptr::null_mut()) };
        if self.primary {
            // SAFETY: it was retained once.
            let _ = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
        } else if let Ok(library) = library()
            // SAFETY: the signature is that of the driver's header.
            && let Ok(destroy) = unsafe {
                library.get::<unsafe extern "C" fn(CUcontext) -> u32>(b"cuCtxDestroy_v2\0")
            }
        {
            // SAFETY: nothing that was made in it is used any more.
            unsafe { destroy(self.context) };
        }
    }
}

/// A graph of an owner's, which launches it on its stream.
pub(crate) struct OwnersGraph<'a> {
    owner: &'a Owner,
    graph: CUgraph,
    executable: CUgraphExec,
}

impl OwnersGraph<'_> {
    pub(crate) fn launch(&self) -> Result<()> {
        // SAFETY: the graph is live, and so is what it uses.
        unsafe { self.owner.driver.cuGraphLaunch(self.executable, self.owner.stream) }
    }
}

impl Drop for OwnersGraph<'_> {
    fn drop(&mut self) {
        let _ = self.owner.wait();
        if !self.executable.is_null() {
            // SAFETY: it has ended.
            let _ = unsafe { self.owner.driver.cuGraphExecDestroy(self.executable) };
        }
        if !self.graph.is_null() {
            // SAFETY: nobody uses it any more.
            let _ = unsafe { self.owner.driver.cuGraphDestroy(self.graph) };
        }
    }
}
