//! Graphs that can be launched.

use std::ptr;
use std::rc::Rc;

use vm_accel::Result;

use super::{Context, Stream, ended};
use crate::sys::{CUgraph, CUgraphExec};

/// An executable graph.
pub(crate) struct Graph {
    handle: CUgraphExec,
    context: Rc<Context>,
}

impl Graph {
    /// Makes a captured graph executable, and ends it.
    pub(super) fn instantiate(context: &Rc<Context>, graph: CUgraph) -> Result<Self> {
        let driver = context.driver;
        let mut handle = ptr::null_mut();
        // SAFETY: the graph is live, the pointer is to a local.
        let status = unsafe { (driver.cuGraphInstantiateWithFlags)(&raw mut handle, graph, 0) };
        // SAFETY: nobody uses the graph after this; the executable one does not need it.
        ended(driver, "cuGraphDestroy", unsafe { (driver.cuGraphDestroy)(graph) });
        driver.check("cuGraphInstantiate", status)?;
        Ok(Self { handle, context: Rc::clone(context) })
    }

    pub(crate) fn launch(&self, stream: &Stream) -> Result<()> {
        let driver = self.context.driver;
        // SAFETY: both are live; the worker keeps the memory and kernels that the graph uses.
        driver.check("cuGraphLaunch", unsafe { (driver.cuGraphLaunch)(self.handle, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let driver = self.context.driver;
        let _ = self.context.enter();
        // SAFETY: nobody uses the handle after this.
        ended(driver, "cuGraphExecDestroy", unsafe { (driver.cuGraphExecDestroy)(self.handle) });
    }
}
