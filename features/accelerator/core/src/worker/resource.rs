//! Resources of graphics that a worker uses in turns with it: registered, mapped for kernels, unmapped, unregistered.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use super::buffer::{Buffer, Shaped, View};
use super::link::{Link, Turns};
use super::session::Session;
use super::{Shared, Worker, current};
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::external::{DriverResource, ExternalMemory, Layout, Pixels};
use crate::memory::{Memory, Region};
use crate::sys::BorrowedResource;

/// What graphics can share with a worker: a buffer, or an image.
pub trait Shareable: Send + Sync + 'static {
    /// How its memory is laid out: the bytes of a buffer, the [`Pixels`] of an image.
    type Layout: Layout;

    /// What it is called in messages.
    fn name(&self) -> &str;

    /// How its memory is laid out.
    fn layout(&self) -> Self::Layout;

    /// Its memory, for the worker's device.
    ///
    /// # Errors
    /// The API's.
    fn export(&self) -> Result<ExternalMemory>;

    /// Itself, if its memory is not shared, but the device's driver maps it: then [`Registered::map_by_driver`] does.
    fn driver_maps(&self) -> Option<BorrowedResource> {
        None
    }
}

/// A step that was not taken: what was to take it stays as it was, and comes back.
#[derive(thiserror::Error)]
#[error("{name} stays {state}: {error}")]
pub struct Refused<T> {
    /// Why.
    #[source]
    pub error: Error,
    /// The resource's name.
    pub name: String,
    /// Unregistered, registered or mapped.
    pub state: &'static str,
    /// What was to take the step.
    pub resource: T,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<T> From<Box<Refused<T>>> for Error {
    fn from(refused: Box<Refused<T>>) -> Self {
        refused.error
    }
}

/// What is registered with a worker, by number: its name, and its state.
pub(super) type Held = HashMap<u64, (String, &'static str)>;

/// The import of a resource, which ends before the resource does.
struct Import<A: Accelerator, R: Shareable> {
    /// A buffer, or a surface for each level; nothing where the driver maps the resource, and has not.
    memory: Vec<Buffer<A>>,
    /// What the driver maps.
    driver: Option<Arc<DriverResource>>,
    resource: Option<R>,
    layout: R::Layout,
    number: u64,
    shared: Arc<Shared<A>>,
}

impl<A: Accelerator, R: Shareable> Import<A, R> {
    fn becomes(&self, state: &'static str) {
        if let Some((_, now)) = self.shared.held().get_mut(&self.number) {
            *now = state;
        }
    }

    fn name(&self) -> String {
        self.resource.as_ref().map_or_else(String::new, |resource| resource.name().to_owned())
    }

    /// Its memory, for commands, which come before that of its end.
    fn regions(&self) -> Vec<Region<'static>> {
        self.memory.iter().map(|buffer| View::from(buffer).region()).collect()
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported { what: what.into(), device: self.name() }
    }

    /// What the driver maps.
    fn by_driver(&self) -> Result<Arc<DriverResource>> {
        self.driver.clone().ok_or_else(|| self.unsupported("mapping shared memory by the driver"))
    }

    /// That its memory is shared.
    fn by_link(&self) -> Result<()> {
        if self.driver.is_none() { Ok(()) } else { Err(self.unsupported("turns of a link at it")) }
    }
}

fn adopt<A: Accelerator>(memory: Vec<Memory>, shared: &Arc<Shared<A>>) -> Vec<Buffer<A>> {
    let adopt = |memory: Memory| {
        let bytes = memory.bytes();
        shared.pool.adopt(bytes);
        Buffer::new(memory, bytes, 0, shared)
    };
    memory.into_iter().map(adopt).collect()
}

impl<A: Accelerator, R: Shareable> Drop for Import<A, R> {
    fn drop(&mut self) {
        self.shared.held().remove(&self.number);
        self.memory.clear();
        if let Some(driver) = self.driver.take() {
            self.shared.keep(driver);
        }
        if let Some(resource) = self.resource.take() {
            self.shared.keep(resource);
        }
    }
}

/// A resource that a worker has registered, and graphics uses now.
///
/// Kernels can't: it has neither buffer nor surface until it is mapped.
///
/// ```compile_fail,E0599
/// # use vm_accel::{Accelerator, Registered, Shareable};
/// fn early<A: Accelerator, R: Shareable<Layout = u64>>(resource: &Registered<A, R>) -> u64 {
///     resource.buffer().bytes()
/// }
/// ```
///
/// Dropping it unregisters it once the commands so far have run; the resource itself is dropped after that.
#[must_use = "dropping it unregisters the resource"]
pub struct Registered<A: Accelerator, R: Shareable> {
    import: Import<A, R>,
    ready: u64,
}

/// A resource that kernels of a worker use now.
///
/// Graphics can't: the resource is not to be had until it is unmapped.
///
/// ```compile_fail,E0382
/// # use vm_accel::{Accelerator, Error, Link, Registered, Shareable};
/// # fn main() {}
/// fn late<A: Accelerator, R: Shareable>(resource: Registered<A, R>, link: &Link<A>) -> Result<(), Error> {
///     let mapped = resource.map(link, 1)?;
///     println!("{}", resource.resource().name());
///     # drop(mapped);
///     Ok(())
/// }
/// ```
///
/// Nor can kernels, once it is unmapped:
///
/// ```compile_fail,E0505
/// # use vm_accel::{Accelerator, Error, Mapped, Shareable, Worker};
/// # fn main() {}
/// fn late<A: Accelerator, R: Shareable<Layout = u64>>(worker: &Worker<A>, mapped: Mapped<A, R>) -> Result<(), Error> {
///     let view = mapped.buffer().view(0, 4)?;
///     let _registered = mapped.unmap()?;
///     worker.fill(view, 0)
/// }
/// ```
///
/// When it is dropped, as by a job that failed, graphics is signalled all the same, and the resource unregistered.
#[must_use = "dropping it unmaps and unregisters the resource"]
pub struct Mapped<A: Accelerator, R: Shareable> {
    import: Option<Import<A, R>>,
    /// None where the driver maps it.
    turns: Option<Arc<Turns<A>>>,
}

impl<A: Accelerator> Shared<A> {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, name: &str) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.held().insert(number, (name.to_owned(), "registered"));
        number
    }
}

impl<A: Accelerator> Worker<A> {
    /// The resources that are registered: the name of each, and its state.
    pub fn resources(&self) -> Vec<(String, &'static str)> {
        let mut all: Vec<_> = self.0.shared.held().values().cloned().collect();
        all.sort();
        all
    }

    /// That no resource is registered.
    ///
    /// # Errors
    /// [`Error::Held`], with those that are.
    pub fn holds_none(&self) -> Result<()> {
        let held: Vec<_> =
            self.resources().into_iter().map(|(name, state)| format!("{name} ({state})")).collect();
        if held.is_empty() { Ok(()) } else { Err(Error::Held { resources: held.join(", ") }) }
    }

    /// Waits for the device and lets go of all that was dropped, in this order: resources and semaphores of graphics, then the free
    /// memory. The worker is then as it was when it started, but for buffers and kernels that are held.
    ///
    /// # Errors
    /// [`Error::Held`] as long as a resource is registered, with its name and state; [`Error::Deadline`], [`Error::Stopped`],
    /// [`Error::Lost`]; the device's. It can be called again.
    pub fn reset(&self) -> Result<()> {
        self.holds_none()?;
        let deadline = self.0.deadline();
        // What was dropped is unregistered when the device has done what came before.
        self.submit_and_wait(deadline, |session| {
            session.poll();
            session.synchronize(deadline)?;
            session.poll();
            session.trim()
        })
    }

    /// Registers a resource of graphics, which is the caller's again when it is unregistered.
    ///
    /// # Errors
    /// What [`Shareable::export`] fails with; [`Error::Unsupported`] for what the device can't import; [`Error::Capturing`],
    /// [`Error::Deadline`], [`Error::Stopped`], [`Error::Lost`]; the device's.
    pub fn register_resource<R: Shareable>(&self, resource: R) -> Result<Registered<A, R>, Box<Refused<R>>> {
        let layout = resource.layout();
        let imported = match resource.driver_maps() {
            Some(resource) => self.submit_and_wait(self.0.deadline(), move |session| {
                session.not_capturing("an import")?;
                let driver = session.queue().register_resource(resource, layout.pixels().as_ref());
                Ok((vec![], Some(Arc::new(session.note(driver)?))))
            }),
            None => resource.export().and_then(|memory| {
                self.submit_and_wait(self.0.deadline(), move |session| {
                    session.not_capturing("an import")?;
                    let memory = session.note(match layout.pixels() {
                        Some(pixels) if pixels.pitch.is_none() => {
                            session.queue().import_image(memory, &pixels)
                        }
                        _ => session.queue().import_memory(memory).map(|memory| vec![memory]),
                    })?;
                    Ok((memory, None))
                })
            }),
        };
        let shared = Arc::clone(&self.0.shared);
        match imported {
            Ok((memory, driver)) => {
                let memory = adopt(memory, &shared);
                let number = shared.hold(resource.name());
                let import = Import { memory, driver, resource: Some(resource), layout, number, shared };
                Ok(Registered { import, ready: 0 })
            }
            Err(error) => {
                let name = resource.name().to_owned();
                Err(Box::new(Refused { error, name, state: "unregistered", resource }))
            }
        }
    }
}

impl<A: Accelerator, R: Shareable> Registered<A, R> {
    /// The resource, for graphics. What it does there begins when the worker's timeline has reached [`Registered::ready`].
    pub fn resource(&self) -> &R {
        match &self.import.resource {
            Some(resource) => resource,
            None => unreachable!("an import has its resource until it is dropped"),
        }
    }

    /// The value of the worker's timeline from which the resource is graphics'.
    pub fn ready(&self) -> u64 {
        self.ready
    }

    /// Gives it to kernels: what the worker is given from here on begins when graphics' timeline has reached `value`. Nobody
    /// waits on the host. The time of a guarded launch runs while it waits.
    ///
    /// # Errors
    /// [`Error::WrongWorker`] for a link of another one, [`Error::OutOfOrder`] in a job with commands of the link behind it, and
    /// what a turn of the link failed with before; [`Error::QueueFull`], [`Error::Stopped`], [`Error::Lost`]; [`Error::Unsupported`]
    /// for what the [driver maps](Registered::map_by_driver).
    pub fn map(self, link: &Link<A>, value: u64) -> Result<Mapped<A, R>, Box<Refused<Self>>> {
        let turns = &link.0;
        let own = self.import.shared.own("link", &turns.shared);
        let waits =
            own.and_then(|_| self.import.by_link()).and_then(|()| turns.wait(value, self.import.regions()));
        self.becomes_mapped(waits, Some(Arc::clone(turns)))
    }

    /// The same for a resource that the driver maps: it orders what the worker is given from here on behind what graphics was
    /// given before. This waits for the worker's thread, and maybe for graphics.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for memory that is shared; as [`Worker::register_resource`].
    pub fn map_by_driver(mut self) -> Result<Mapped<A, R>, Box<Refused<Self>>> {
        let import = &self.import;
        let mapped = import.by_driver().and_then(|driver| {
            on_worker(&import.shared, move |session| {
                session.not_capturing("a wait for graphics")?;
                session.note(session.queue().map_resource(&driver))
            })
        });
        let mapped = mapped.map(|memory| self.import.memory = adopt(memory, &self.import.shared));
        self.becomes_mapped(mapped, None)
    }

    fn becomes_mapped(
        self,
        mapped: Result<()>,
        turns: Option<Arc<Turns<A>>>,
    ) -> Result<Mapped<A, R>, Box<Refused<Self>>> {
        match mapped {
            Ok(()) => {
                self.import.becomes("mapped");
                Ok(Mapped { import: Some(self.import), turns })
            }
            Err(error) => {
                let name = self.import.name();
                Err(Box::new(Refused { error, name, state: "registered", resource: self }))
            }
        }
    }

    /// Unregisters the resource, which is graphics' alone when this returns.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] in a job with commands behind it; [`Error::Capturing`], [`Error::Deadline`] and the device's. The
    /// resource is then dropped, once the device has let go of it.
    pub fn unregister(mut self) -> Result<R> {
        let shared = Arc::clone(&self.import.shared);
        let memory = std::mem::take(&mut self.import.memory);
        if !shared.ended() {
            on_worker(&shared, |session| memory.into_iter().try_for_each(|one| session.unregister(one)))?;
        }
        self.import.driver = None;
        self.import.resource.take().ok_or(Error::Stopped)
    }
}

/// Does something on the worker's thread behind all that it was given, and waits for that.
fn on_worker<A: Accelerator, T: Send>(
    shared: &Arc<Shared<A>>,
    job: impl FnOnce(&Session<A>) -> Result<T> + Send,
) -> Result<T> {
    if current::is(shared.id) {
        if !shared.executor.runs_the_last() {
            return Err(Error::OutOfOrder);
        }
        return current::with(shared, job).unwrap_or(Err(Error::Stopped));
    }
    shared.alive()?;
    let deadline = shared.options.queue.deadline();
    shared.executor.submit_and_wait(deadline, job)
}

impl<A: Accelerator, R: Shareable> Mapped<A, R> {
    fn import(&self) -> &Import<A, R> {
        match &self.import {
            Some(import) => import,
            None => unreachable!("what is mapped has its import until it is unmapped"),
        }
    }

    /// How its memory is laid out.
    pub fn layout(&self) -> R::Layout {
        self.import().layout
    }

    /// Gives it back to graphics, once the worker's timeline has reached [`Registered::ready`] of the result, behind all that the
    /// worker was given. Nobody waits on the host. What the driver maps is graphics' when this returns, which waits for the device.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] in a job, while another thread gives the link a command. After [`Error::QueueFull`],
    /// [`Error::Deadline`], [`Error::Stopped`] and the device's the resource is still mapped, and to drop it tells graphics, at the
    /// worker's end if not before.
    pub fn unmap(mut self) -> Result<Registered<A, R>, Box<Refused<Self>>> {
        let ended = match &self.turns {
            Some(turns) => turns.signal(self.import().regions()),
            None => self.unmap_by_driver().map(|()| 0),
        };
        match (ended, self.import.take()) {
            (Ok(ready), Some(import)) => {
                import.becomes("registered");
                Ok(Registered { import, ready })
            }
            (Err(error), import) => {
                let name = import.as_ref().map_or_else(String::new, Import::name);
                self.import = import;
                Err(Box::new(Refused { error, name, state: "mapped", resource: self }))
            }
            (Ok(_), None) => unreachable!("what is mapped has its import until it is unmapped"),
        }
    }

    fn unmap_by_driver(&mut self) -> Result<()> {
        let Some(import) = &mut self.import else { return Ok(()) };
        let shared = Arc::clone(&import.shared);
        if shared.ended() {
            return Ok(());
        }
        let deadline = shared.options.queue.deadline();
        let mut memory = std::mem::take(&mut import.memory);
        let ended = on_worker(&shared, |session| {
            session.synchronize(deadline)?;
            session.defer(memory.drain(..).try_for_each(|one| session.unregister(one)));
            Ok(())
        });
        if ended.is_err() {
            // Nothing of it was let go of.
            import.memory = memory;
        }
        ended
    }
}

impl<A: Accelerator, R: Shareable<Layout = u64>> Mapped<A, R> {
    /// Its memory.
    pub fn buffer(&self) -> &Buffer<A> {
        match self.import().memory.first() {
            Some(buffer) => buffer,
            None => unreachable!("an import has its buffer until it is dropped"),
        }
    }
}

impl<A: Accelerator, R: Shareable<Layout = Pixels>> Mapped<A, R> {
    /// A level of the image, for a parameter that is a surface: the pixels themselves, wherever they lie.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a level that it has not.
    pub fn surface(&self, level: u32) -> Result<Shaped<'_, A>> {
        let (pixels, memory) = (self.layout(), &self.import().memory);
        let Some(memory) = memory.get(level as usize) else {
            return Err(Error::OutOfRange { offset: level.into(), bytes: 1, size: memory.len() as u64 });
        };
        let view = View::from(memory).of(pixels.element);
        match pixels.pitch {
            Some(pitch) => {
                let pixel = u64::from(pixels.element.bytes() * pixels.lanes);
                view.strided(&pixels.extents(level), &[pitch, pixel])
            }
            None => view.shaped(&pixels.extents(level)),
        }
    }
}

impl<A: Accelerator, R: Shareable> Drop for Mapped<A, R> {
    fn drop(&mut self) {
        if let (Some(import), Some(turns)) = (&self.import, &self.turns)
            && let Err(error) = turns.signal(import.regions())
        {
            tracing::warn!(resource = import.name(), %error, "graphics is told later");
        }
    }
}

impl<A: Accelerator, R: Shareable> fmt::Debug for Registered<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered").field("name", &self.import.name()).field("ready", &self.ready).finish()
    }
}

impl<A: Accelerator, R: Shareable> fmt::Debug for Mapped<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.import.as_ref().map_or_else(String::new, Import::name);
        f.debug_struct("Mapped").field("name", &name).finish()
    }
}
