//! Brands: what makes one worker's buffers a type of their own.

use std::any::{TypeId, type_name};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// A type that names one worker. Buffers, kernels and graphs of that worker carry it.
///
/// Only one worker at a time has a given brand: until it and all its buffers, kernels and graphs are gone, another
/// [`Worker::start`](crate::Worker::start) with the same brand fails. So what has the brand is of that worker.
pub trait Brand: Send + Sync + 'static {
    /// Whether one worker has the brand for itself.
    const EXCLUSIVE: bool = true;
}

/// The brand of workers that are distinguished when the program runs: any number may have it, and using a buffer on
/// another worker is [`Error::WrongWorker`].
#[derive(Clone, Copy, Debug)]
pub struct AnyWorker;

impl Brand for AnyWorker {
    const EXCLUSIVE: bool = false;
}

static TAKEN: Mutex<BTreeSet<TypeId>> = Mutex::new(BTreeSet::new());

/// A brand that is taken until this is dropped.
pub(crate) struct Lease(Option<TypeId>);

impl Lease {
    pub(crate) fn take<B: Brand>() -> Result<Self> {
        if !B::EXCLUSIVE {
            return Ok(Self(None));
        }
        let brand = TypeId::of::<B>();
        if TAKEN.lock().unwrap_or_else(PoisonError::into_inner).insert(brand) {
            Ok(Self(Some(brand)))
        } else {
            Err(Error::BrandInUse { brand: type_name::<B>() })
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(brand) = self.0 {
            TAKEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&brand);
        }
    }
}
