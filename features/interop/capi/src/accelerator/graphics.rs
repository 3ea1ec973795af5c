//! What each function of timelines, links and resources does, with arguments that were looked at.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use vm_accel::{Error, ExternalKind, ExternalMemory, deadline};

use super::error::Failure;
use super::objects::{Holds, Link, Memory, Worker};
use super::registry::HANDLES;
use super::resource::Resource;
use super::timeline::Timeline;
use crate::sys::accelerator::*;

type Done = Result<(), Failure>;

pub(crate) fn timeline_create(timeline: Output<'_, vma_timeline>) -> Done {
    timeline.put(HANDLES.insert(Timeline::own()));
    Ok(())
}

pub(crate) fn timeline_import(
    fd: i32,
    wait: WaitFunction,
    signal: SignalFunction,
    release: vma_release_function,
    data: *mut c_void,
    timeline: Output<'_, vma_timeline>,
) -> Done {
    let fd = if fd == -1 { None } else { Some(descriptor("fd", fd)?) };
    timeline.put(HANDLES.insert(Timeline::theirs(fd, Theirs::new(wait, signal, release, data))));
    Ok(())
}

pub(crate) fn timeline_wait(timeline: &Timeline, value: u64, timeout_ns: u64) -> Done {
    if timeline.host.wait(value, deadline(Duration::from_nanos(timeout_ns)))? {
        return Ok(());
    }
    Err(Error::Deadline { what: format!("the timeline's value {value}") }.into())
}

pub(crate) fn timeline_signal(timeline: &Timeline, value: u64) -> Done {
    timeline.not_computed("timeline")?;
    Ok(timeline.host.signal(value)?)
}

pub(crate) fn timeline_free(timeline: vma_timeline) -> Done {
    HANDLES.take::<Timeline>("timeline", timeline).map(drop)
}

pub(crate) fn link_create(
    worker: &Worker,
    graphics: &Timeline,
    computed: &Timeline,
    link: Output<'_, vma_link>,
) -> Done {
    let (first, second) = (graphics.external()?, computed.external()?);
    graphics.be_graphics("graphics")?;
    computed.be_computed("computed")?;
    link.put(HANDLES.insert(Arc::new(Link(worker.worker.link(first, second)?))));
    Ok(())
}

pub(crate) fn link_free(link: vma_link) -> Done {
    HANDLES.take::<Link>("link", link).map(drop)
}

pub(crate) fn resource_register(
    worker: &Arc<Worker>,
    name: &str,
    memory: &vma_external_memory,
    resource: Output<'_, vma_resource>,
) -> Done {
    let vma_external_memory { kind, fd, allocation_bytes: allocation, offset, bytes, dedicated } = *memory;
    let kind = match kind {
        VMA_OPAQUE_FD => ExternalKind::OpaqueFd,
        VMA_DMA_BUF => ExternalKind::DmaBuf,
        VMA_HOST_FD => ExternalKind::HostFd,
        other => {
            let what = format!("is {other}: VMA_OPAQUE_FD, VMA_DMA_BUF and VMA_HOST_FD are possible");
            return Err(Failure::invalid("memory->kind", what));
        }
    };
    let fd = descriptor("memory->fd", fd)?;
    let external = ExternalMemory { fd, kind, allocation, offset, bytes, dedicated: dedicated != 0 };
    external.check().map_err(|error| {
        let what = format!("{name} stays unregistered: {error}");
        Failure::Refused { what, error }
    })?;
    let registered = Arc::new(Resource::register(worker, name, external)?);
    let memory = Memory { holds: Holds::Resource(Arc::clone(&registered)), of: Arc::clone(worker) };
    let _ = registered.memory.set(HANDLES.insert(Arc::new(memory)));
    resource.put(HANDLES.insert(registered));
    Ok(())
}

pub(crate) fn resource_get_state(resource: &Resource, state: Output<'_, vma_resource_state>) -> Done {
    state.put(resource.state());
    Ok(())
}

pub(crate) fn resource_map(
    resource: &Resource,
    link: &Link,
    value: u64,
    memory: Output<'_, vma_memory>,
) -> Done {
    resource.map(link, value)?;
    memory.put(resource.memory.get().copied().unwrap_or_default());
    Ok(())
}

pub(crate) fn resource_unmap(resource: &Resource, value: Output<'_, u64>) -> Done {
    value.put(resource.unmap()?);
    Ok(())
}

pub(crate) fn resource_unregister(resource: vma_resource) -> Done {
    let found = HANDLES.find::<Resource>("resource", resource)?;
    let ended = found.unregister();
    if let Err(Failure::State { .. }) = ended {
        return ended;
    }
    HANDLES.take::<Resource>("resource", resource)?;
    if let Some(memory) = found.memory.get() {
        HANDLES.take::<Memory>("memory", *memory)?;
    }
    ended
}

pub(crate) fn reset(worker: &Worker) -> Done {
    Ok(worker.worker.reset()?)
}
