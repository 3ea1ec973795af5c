//! Graphs that can be launched.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use vm_accel::{Arguments, Error, Grid, Result};

use super::stream::Parameters;
use super::{Context, Event, Function, Stream, ended};
use crate::sys::{CUDA_KERNEL_NODE_PARAMS_v2, CUgraph, CUgraphExec, CUgraphNode};

/// An executable graph.
pub(crate) struct Graph {
    handle: CUgraphExec,
    /// What it was made of, if it can be updated.
    source: Option<Source>,
    context: Arc<Context>,
}

/// A graph of launches, one behind the other, and its nodes.
struct Source {
    graph: CUgraph,
    launches: Vec<CUgraphNode>,
    context: Arc<Context>,
}

/// The parameters of a launch's node.
fn node(
    kernel: &Function,
    grid: Grid,
    (params, extra): (*mut *mut c_void, *mut *mut c_void),
) -> CUDA_KERNEL_NODE_PARAMS_v2 {
    let (Grid([gx, gy, gz]), [bx, by, bz]) = (grid, kernel.block());
    CUDA_KERNEL_NODE_PARAMS_v2 {
        func: kernel.handle(),
        gridDimX: gx,
        gridDimY: gy,
        gridDimZ: gz,
        blockDimX: bx,
        blockDimY: by,
        blockDimZ: bz,
        sharedMemBytes: kernel.shared_bytes(),
        kernelParams: params,
        extra,
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

impl Source {
    /// A graph without launches.
    fn new(context: &Arc<Context>) -> Result<Self> {
        let mut graph = ptr::null_mut();
        let _entered = context.enter()?;
        // SAFETY: the pointer is to a local.
        unsafe { context.driver.cuGraphCreate(&raw mut graph, 0) }?;
        Ok(Self { graph, launches: Vec::new(), context: Arc::clone(context) })
    }

    /// Adds a launch behind a node; gives its own.
    fn launch(
        &mut self,
        before: Option<CUgraphNode>,
        kernel: &Function,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<CUgraphNode> {
        let driver = self.context.driver;
        let mut parameters = Parameters::of(kernel, arguments);
        let mut added = ptr::null_mut();
        let (before, count) = (before.as_slice().as_ptr(), before.as_slice().len());
        let launch = node(kernel, grid, parameters.lists());
        // SAFETY: the graph and the nodes in it are live; the driver copies the parameters before it returns. What the
        // kernel does was promised by `Artifact::new`.
        unsafe {
            driver.cuGraphAddKernelNode_v2(&raw mut added, self.graph, before, count, &raw const launch)
        }?;
        self.launches.push(added);
        Ok(added)
    }

    /// Adds an event behind a node; gives its own.
    fn event(&mut self, before: CUgraphNode, event: &Event) -> Result<CUgraphNode> {
        let driver = self.context.driver;
        let (mut added, event) = (ptr::null_mut(), event.handle());
        // SAFETY: all are live; who replays the graph keeps the event.
        unsafe { driver.cuGraphAddEventRecordNode(&raw mut added, self.graph, &raw const before, 1, event) }?;
        Ok(added)
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: nobody uses the graph after this.
        ended(unsafe { self.context.driver.cuGraphDestroy(self.graph) });
    }
}

impl Graph {
    fn executable(context: &Arc<Context>, graph: CUgraph) -> Result<CUgraphExec> {
        let driver = context.driver;
        let mut handle = ptr::null_mut();
        // SAFETY: the graph is live, the pointer is to a local.
        unsafe { driver.cuGraphInstantiateWithFlags(&raw mut handle, graph, 0) }?;
        Ok(handle)
    }

    /// Makes a captured graph executable, and ends it.
    ///
    /// # Safety
    /// The graph is a live one of the context, and nobody else ends or uses it.
    pub(super) unsafe fn instantiate(context: &Arc<Context>, graph: CUgraph) -> Result<Self> {
        // Dropped with this; the executable one does not need it.
        let captured = Source { graph, launches: Vec::new(), context: Arc::clone(context) };
        let handle = Self::executable(context, captured.graph)?;
        Ok(Self { handle, source: None, context: Arc::clone(context) })
    }

    /// An executable graph of launches, one behind the other, each with the event behind it.
    ///
    /// # Safety
    /// None of the kernels was unloaded, and the arguments are for them.
    pub(crate) unsafe fn of_launches<'a>(
        context: &Arc<Context>,
        launches: impl Iterator<Item = (&'a Function, Grid, &'a Arguments, Option<&'a Event>)>,
    ) -> Result<Self> {
        let _entered = context.enter()?;
        let mut source = Source::new(context)?;
        let mut last = None;
        for (kernel, grid, arguments, event) in launches {
            let launched = source.launch(last, kernel, grid, arguments)?;
            last = Some(event.map_or(Ok(launched), |event| source.event(launched, event))?);
        }
        let handle = Self::executable(context, source.graph)?;
        Ok(Self { handle, source: Some(source), context: Arc::clone(context) })
    }

    /// Gives the launch at a place of a graph of launches other arguments, for the launches of the graph that follow.
    ///
    /// # Safety
    /// The kernel was not unloaded, and the arguments are for it.
    pub(crate) unsafe fn update(
        &self,
        place: usize,
        kernel: &Function,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        let Some(&launch) = self.source.as_ref().and_then(|source| source.launches.get(place)) else {
            let (what, device) = ("updating a graph that was captured".into(), "CUDA".into());
            return Err(Error::Unsupported { what, device });
        };
        let _entered = self.context.enter()?;
        let mut parameters = Parameters::of(kernel, arguments);
        let node = node(kernel, grid, parameters.lists());
        // SAFETY: the executable graph was made of the node's, which is live; the driver copies the parameters before it
        // returns. What the kernel does was promised by `Artifact::new`.
        unsafe { self.context.driver.cuGraphExecKernelNodeSetParams_v2(self.handle, launch, &raw const node) }
    }

    /// Runs it.
    ///
    /// # Safety
    /// No kernel that it launches was unloaded. The memory and the events that it uses are there until it has run, but for frees
    /// by commands of the stream behind it.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: both are live; of what the graph uses the caller promises it.
        unsafe { self.context.driver.cuGraphLaunch(self.handle, stream.handle()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: nobody uses the handle after this.
        ended(unsafe { self.context.driver.cuGraphExecDestroy(self.handle) });
    }
}
