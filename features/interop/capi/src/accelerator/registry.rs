//! Handles: what C holds is a number, which no other handle ever has. So one that was freed is known to be, and nothing is followed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustc_hash::FxBuildHasher;

use super::error::Failure;
use super::objects::{Device, Event, Job, Kernel, Link, Memory, Module, Worker};
use super::resource::Resource;
use super::timeline::Timeline;

/// Where a handle has its kind; below is its number.
const KIND: u32 = 56;

/// What a handle is of.
pub(crate) trait Handled: Sized {
    /// Its number in a handle.
    const KIND: u64;
    /// Its name in an error.
    const WHAT: &str;

    /// It, as the registry has it.
    fn object(this: Arc<Self>) -> Object;

    /// It, if it is of this kind.
    fn of(object: &Object) -> Option<&Arc<Self>>;
}

macro_rules! objects {
    ($($kind:ident $number:literal $what:literal $from:literal;)*) => {
        /// What a handle stands for.
        pub(crate) enum Object {
            $(
                #[doc = $what]
                $kind(Arc<$kind>),
            )*
        }

        $(impl Handled for $kind {
            const KIND: u64 = $number;
            const WHAT: &str = $what;

            fn object(this: Arc<Self>) -> Object {
                Object::$kind(this)
            }

            fn of(object: &Object) -> Option<&Arc<Self>> {
                if let Object::$kind(this) = object { Some(this) } else { None }
            }
        })*

        /// What the handles of a kind are of, and what gives them.
        fn named(kind: u64) -> Option<(&'static str, &'static str)> {
            match kind {
                $($number => Some(($what, $from)),)*
                _ => None,
            }
        }
    };
}

objects! {
    Device 1 "a device" "vma_device_open";
    Worker 2 "a worker" "vma_worker_start";
    Memory 3 "memory" "vma_memory_allocate";
    Module 4 "a module" "vma_module_load";
    Kernel 5 "a kernel" "vma_module_find_kernel";
    Event 6 "an event" "vma_event_record";
    Job 7 "a job" "vma_submit";
    Timeline 8 "a timeline" "vma_timeline_create";
    Link 9 "a link" "vma_link_create";
    Resource 10 "a resource" "vma_resource_register";
}

/// All handles of the process.
pub(crate) struct Registry {
    objects: RwLock<HashMap<u64, Object, FxBuildHasher>>,
    next: AtomicU64,
}

/// The process's.
pub(crate) static HANDLES: Registry =
    Registry { objects: RwLock::new(HashMap::with_hasher(FxBuildHasher)), next: AtomicU64::new(1) };

impl Registry {
    /// A handle of something.
    pub(crate) fn insert<T: Handled>(&self, this: Arc<T>) -> u64 {
        let handle = T::KIND << KIND | self.next.fetch_add(1, Ordering::Relaxed);
        self.objects.write().unwrap_or_else(PoisonError::into_inner).insert(handle, T::object(this));
        handle
    }

    /// What a handle is of.
    ///
    /// # Errors
    /// [`Failure::Handle`], with what the number is instead.
    pub(crate) fn find<T: Handled>(&self, parameter: &str, handle: u64) -> Result<Arc<T>, Failure> {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        let found = objects.get(&handle).and_then(T::of).cloned();
        found.ok_or_else(|| self.refused::<T>(parameter, handle))
    }

    /// What a handle is of, which is none from now on.
    ///
    /// # Errors
    /// As [`Registry::find`].
    pub(crate) fn take<T: Handled>(&self, parameter: &str, handle: u64) -> Result<Arc<T>, Failure> {
        let mut objects = self.objects.write().unwrap_or_else(PoisonError::into_inner);
        let found = objects.get(&handle).and_then(T::of).cloned();
        let found = found.ok_or_else(|| self.refused::<T>(parameter, handle))?;
        let object = objects.remove(&handle);
        drop(objects);
        // Without the lock: what ends may free memory.
        drop(object);
        Ok(found)
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.objects.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// All workers that there are.
    pub(crate) fn workers(&self) -> Vec<Arc<Worker>> {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.values().filter_map(Worker::of).cloned().collect()
    }

    #[cold]
    fn refused<T: Handled>(&self, parameter: &str, handle: u64) -> Failure {
        let (kind, number) = (handle >> KIND, handle & ((1 << KIND) - 1));
        let from = named(T::KIND).map_or("", |(_, from)| from);
        let what = match named(kind) {
            None if handle == 0 => format!("is 0: {} is needed, as {from} gives it", T::WHAT),
            Some((what, _)) if kind != T::KIND => format!("is {handle:#x}, {what}: {} is needed", T::WHAT),
            Some((what, _)) if (1..self.next.load(Ordering::Relaxed)).contains(&number) => {
                format!("is {handle:#x}, {what} that was freed")
            }
            _ => format!("is {handle:#x}, which no function gave: {} is needed, as {from} gives it", T::WHAT),
        };
        Failure::Handle { parameter: parameter.into(), what }
    }
}
