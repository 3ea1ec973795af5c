//! Resources of graphics: C has their states by name, where Rust has them by type.
//!
//! ```text
//! Registered ──map──▶ Mapped ──unmap──▶ Registered ──unregister──▶ Unregistered
//! ```
//!
//! A call takes the state out, changes it without the lock, and puts it back: one that comes meanwhile is refused, and waits for nobody.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use vm_accel::{Error, ExternalMemory, RefusedResource, Registered, Shareable};
use vm_runtime::AnyAccelerator;

use super::error::Failure;
use super::objects::{Link, Worker};
use crate::sys::accelerator::{VMA_MAPPED, VMA_REGISTERED, vma_resource_state};

/// Memory that C described.
pub(crate) struct Described {
    name: String,
    bytes: u64,
    /// Until it was imported.
    memory: Mutex<Option<ExternalMemory>>,
}

impl Shareable for Described {
    type Layout = u64;

    fn name(&self) -> &str {
        &self.name
    }

    fn layout(&self) -> u64 {
        self.bytes
    }

    fn export(&self) -> vm_accel::Result<ExternalMemory> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner).take();
        memory.ok_or(Error::NotShareable { cause: "it was imported already".into() })
    }
}

/// A resource that kernels use.
pub(crate) type Mapped = vm_accel::Mapped<AnyAccelerator, Described>;

enum State {
    Registered(Box<Registered<AnyAccelerator, Described>>),
    Mapped(Arc<Mapped>),
    Unregistered,
    /// A call changes what it was.
    Between(vma_resource_state),
}

impl State {
    /// What C calls it.
    fn code(&self) -> vma_resource_state {
        match self {
            Self::Registered(_) | Self::Unregistered => VMA_REGISTERED,
            Self::Mapped(_) => VMA_MAPPED,
            Self::Between(before) => *before,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Registered(_) => "registered",
            Self::Mapped(_) => "mapped",
            Self::Unregistered => "unregistered",
            Self::Between(_) => "being changed by a call of another thread",
        }
    }
}

/// A resource.
pub(crate) struct Resource {
    name: String,
    bytes: u64,
    state: Mutex<State>,
    /// The handle of its memory.
    pub(crate) memory: OnceLock<u64>,
}

impl Resource {
    /// Registers memory with a worker.
    ///
    /// # Errors
    /// The worker's.
    pub(crate) fn register(worker: &Worker, name: &str, memory: ExternalMemory) -> Result<Self, Failure> {
        let bytes = memory.bytes;
        let described = Described { name: name.to_owned(), bytes, memory: Mutex::new(Some(memory)) };
        let registered = worker.worker.register_resource(described).map_err(|refused| failed(*refused).0)?;
        Ok(Self {
            name: name.to_owned(),
            bytes,
            state: Mutex::new(State::Registered(Box::new(registered))),
            memory: OnceLock::new(),
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state for C.
    pub(crate) fn state(&self) -> vma_resource_state {
        self.lock().code()
    }

    /// The error of what can't be in a state.
    fn refused_in(&self, state: &State, parameter: impl fmt::Display, remedy: &str) -> Failure {
        Failure::state(
            parameter.to_string(),
            format!("is of the resource {:?}, which is {}: {remedy}", self.name, state.name()),
        )
    }

    /// The error of what can't be in the state that it is in.
    pub(crate) fn refused(&self, parameter: &str, remedy: &str) -> Failure {
        self.refused_in(&self.lock(), parameter, remedy)
    }

    /// What is mapped.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn mapped(&self, parameter: impl fmt::Display) -> Result<Arc<Mapped>, Failure> {
        match &*self.lock() {
            State::Mapped(mapped) => Ok(Arc::clone(mapped)),
            other => Err(self.refused_in(
                other,
                parameter,
                "kernels have it while it is mapped, by vma_resource_map",
            )),
        }
    }

    /// Takes a state out that `take` takes, and puts back what `step` makes of it.
    fn change<T, R>(
        &self,
        remedy: &str,
        take: impl FnOnce(State) -> Result<T, State>,
        step: impl FnOnce(T) -> (State, Result<R, Failure>),
    ) -> Result<R, Failure> {
        let mut state = self.lock();
        let before = state.code();
        let taken = match take(std::mem::replace(&mut *state, State::Between(before))) {
            Ok(taken) => taken,
            Err(other) => {
                let refused = self.refused_in(&other, "resource", remedy);
                *state = other;
                return Err(refused);
            }
        };
        drop(state);
        let (after, done) = step(taken);
        *self.lock() = after;
        done
    }

    /// Gives it to kernels.
    ///
    /// # Errors
    /// It is not registered; the worker's.
    pub(crate) fn map(&self, link: &Link, value: u64) -> Result<(), Failure> {
        self.change("unmap it first", registered, |registered| match registered.map(&link.0, value) {
            Ok(mapped) => (State::Mapped(Arc::new(mapped)), Ok(())),
            Err(refused) => {
                let (failure, registered) = failed(*refused);
                (State::Registered(Box::new(registered)), Err(failure))
            }
        })
    }

    /// Gives it back to graphics, at the result.
    ///
    /// # Errors
    /// It is not mapped, or another thread's call uses its memory; the worker's.
    pub(crate) fn unmap(&self) -> Result<u64, Failure> {
        let taken = |state| match state {
            State::Mapped(mapped) => Arc::try_unwrap(mapped).map_err(State::Mapped),
            other => Err(other),
        };
        let remedy = "only what is mapped can be unmapped, once no other thread's call uses its memory";
        self.change(remedy, taken, |mapped| match mapped.unmap() {
            Ok(registered) => {
                let ready = registered.ready();
                (State::Registered(Box::new(registered)), Ok(ready))
            }
            Err(refused) => {
                let (failure, mapped) = failed(*refused);
                (State::Mapped(Arc::new(mapped)), Err(failure))
            }
        })
    }

    /// Ends it.
    ///
    /// # Errors
    /// It is not registered; with [`Failure::Refused`] it has ended all the same.
    pub(crate) fn unregister(&self) -> Result<(), Failure> {
        self.change("unmap it first", registered, |registered| {
            let ended = registered.unregister().map(drop);
            let failed = |error: Error| Failure::Refused {
                what: format!("{} ends, but the device has not let go of it: {error}", self.name),
                error,
            };
            (State::Unregistered, ended.map_err(failed))
        })
    }
}

fn registered(state: State) -> Result<Registered<AnyAccelerator, Described>, State> {
    if let State::Registered(registered) = state { Ok(*registered) } else { Err(state) }
}

/// Why a step was not taken, and what was to take it.
fn failed<T>(refused: RefusedResource<T>) -> (Failure, T) {
    let what = refused.to_string();
    let RefusedResource { error, resource, .. } = refused;
    (Failure::Refused { what, error }, resource)
}
