//! Buffers of elements.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;
use half::{bf16, f16};
use vm_abi::Element;

use super::Worker;
use super::buffer::{Argument, Buffer, Shaped, View};
use super::session::Session;
use crate::accelerator::Accelerator;
use crate::error::{Error, Result};

/// A number that lies in memory as an element of a kernel's view does.
pub trait ElementType: Pod + sealed::Sealed {
    /// What it is there. Kernels don't tell signed integers from unsigned ones.
    const ELEMENT: Element;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($number:ty => $element:ident),* $(,)?) => {
        $(impl sealed::Sealed for $number {}
        impl ElementType for $number {
            const ELEMENT: Element = Element::$element;
        })*
    };
}

elements! {
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
    i8 => U8, i16 => U16, i32 => U32, i64 => U64,
    f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64,
}

/// A [`Buffer`] of elements. A launch with one whose elements are not the parameter's is refused.
///
/// ```
/// # use std::{sync::Arc, time::Duration};
/// # use vm_accel::{arguments, fake::FakeAccelerator, programs::Program, Error, Worker, WorkerOptions};
/// # fn main() -> Result<(), Error> {
/// # let worker = Worker::start(Arc::new(FakeAccelerator::new()), WorkerOptions::default())?;
/// let kernel = worker.load(&FakeAccelerator::artifact(Program::Add))?;
/// let x = worker.upload(&[1u32, 2, 3])?;
/// let y = worker.allocate_typed::<u32>(3)?;
/// worker.launch(&kernel, 1, &arguments![&x, &y, 10u32])?;
/// assert_eq!(worker.download(&y)?, [11, 12, 13]);
///
/// let wrong = worker.allocate_typed::<f32>(3)?;
/// let refused = worker.launch(&kernel, 1, &arguments![&x, &wrong, 10u32]).unwrap_err();
/// assert!(refused.to_string().contains("elements of u32 are wanted, f32 were given"));
/// # drop((x, y, wrong, kernel));
/// # worker.stop(Duration::from_secs(10))
/// # }
/// ```
pub struct TypedBuffer<T: ElementType, A: Accelerator> {
    bytes: Buffer<A>,
    elements: PhantomData<T>,
}

/// Bytes of a number of elements.
fn bytes<T>(count: usize) -> Result<u64> {
    count.checked_mul(size_of::<T>()).map(|bytes| bytes as u64).ok_or_else(|| Error::Extents {
        reason: format!("{count} elements of {} bytes are more than can be addressed", size_of::<T>()),
    })
}

impl<T: ElementType, A: Accelerator> TypedBuffer<T, A> {
    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.bytes.bytes() as usize / size_of::<T>()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffer as bytes.
    pub fn as_bytes(&self) -> &Buffer<A> {
        &self.bytes
    }

    /// The buffer as bytes.
    pub fn into_bytes(self) -> Buffer<A> {
        self.bytes
    }

    /// Some of its elements.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], in bytes; [`Error::Extents`].
    pub fn view(&self, elements: Range<usize>) -> Result<View<'_, A>> {
        let (first, count) = (elements.start, elements.end.saturating_sub(elements.start));
        Ok(self.bytes.view(bytes::<T>(first)?, bytes::<T>(count)?)?.of(T::ELEMENT))
    }

    /// All of it with extents in elements, slowest dimension first, one row behind the other.
    ///
    /// # Errors
    /// [`Error::Extents`].
    pub fn shaped(&self, extents: &[u64]) -> Result<Shaped<'_, A>> {
        View::from(self).shaped(extents)
    }

    /// All of it with extents in elements, and for each dimension but the last the bytes from one of its elements to the next.
    ///
    /// # Errors
    /// [`Error::Extents`].
    pub fn strided(&self, extents: &[u64], strides: &[u64]) -> Result<Shaped<'_, A>> {
        View::from(self).strided(extents, strides)
    }
}

impl<A: Accelerator> Buffer<A> {
    /// The buffer as one of elements.
    ///
    /// # Errors
    /// [`Error::Extents`] if its bytes are no whole number of them, or its address is not aligned to them.
    pub fn typed<T: ElementType>(self) -> Result<TypedBuffer<T, A>> {
        let (size, bytes, address) = (size_of::<T>() as u64, self.bytes(), self.address());
        if !bytes.is_multiple_of(size) || !address.is_multiple_of(size) {
            let element = T::ELEMENT;
            let reason = format!("{bytes} bytes at {address:#x} are no whole number of {element}");
            return Err(Error::Extents { reason });
        }
        Ok(TypedBuffer { bytes: self, elements: PhantomData })
    }
}

impl<'a, T: ElementType, A: Accelerator> From<&'a TypedBuffer<T, A>> for View<'a, A> {
    fn from(buffer: &'a TypedBuffer<T, A>) -> Self {
        View::from(&buffer.bytes).of(T::ELEMENT)
    }
}

impl<'a, T: ElementType, A: Accelerator> From<&'a TypedBuffer<T, A>> for Argument<'a, A> {
    fn from(buffer: &'a TypedBuffer<T, A>) -> Self {
        View::from(buffer).into()
    }
}

impl<T: ElementType, A: Accelerator> fmt::Debug for TypedBuffer<T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedBuffer").field("element", &T::ELEMENT).field("bytes", &self.bytes).finish()
    }
}

/// What workers and sessions do with typed buffers.
macro_rules! typed {
    ($owner:ident) => {
        impl<A: Accelerator> $owner<A> {
            /// Allocates device memory for a number of elements.
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($owner), "::allocate`]; [`Error::Extents`].")]
            pub fn allocate_typed<T: ElementType>(&self, count: usize) -> Result<TypedBuffer<T, A>> {
                self.allocate(bytes::<T>(count)?)?.typed()
            }

            /// Device memory with a copy of these values.
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($owner), "::allocate`] and [`", stringify!($owner), "::write`].")]
            pub fn upload<T: ElementType>(&self, values: &[T]) -> Result<TypedBuffer<T, A>> {
                let buffer = self.allocate_typed(values.len())?;
                self.write(&buffer, values)?;
                Ok(buffer)
            }

            /// The values of a buffer, after the work so far.
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($owner), "::read`].")]
            pub fn download<T: ElementType>(&self, buffer: &TypedBuffer<T, A>) -> Result<Vec<T>> {
                let mut values = vec![T::zeroed(); buffer.len()];
                self.read(buffer, &mut values)?;
                Ok(values)
            }
        }
    };
}

typed!(Worker);
typed!(Session);
