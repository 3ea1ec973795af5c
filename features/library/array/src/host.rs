//! What is computed by the host's processor, as no kernel does it: elements there and back.

use rustfft::num_complex::Complex;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::node::Array;

/// An element as Rust has it.
pub(crate) trait Element: Copy + 'static {
    /// Of its bytes in an array.
    fn of(bytes: &[u8]) -> Self;
    /// Appends its bytes.
    fn put(self, bytes: &mut Vec<u8>);
}

macro_rules! elements {
    ($($float:ident)+) => {$(
        impl Element for $float {
            fn of(bytes: &[u8]) -> Self {
                $float::from_le_bytes(bytes.try_into().unwrap_or_default())
            }

            fn put(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    )+};
}

elements! { f32 f64 }

impl<T: Element> Element for Complex<T> {
    fn of(bytes: &[u8]) -> Self {
        let (re, im) = bytes.split_at(bytes.len() / 2);
        Complex::new(T::of(re), T::of(im))
    }

    fn put(self, bytes: &mut Vec<u8>) {
        self.re.put(bytes);
        self.im.put(bytes);
    }
}

/// All elements of an array of this type, in order.
///
/// # Errors
/// What computing them fails with.
pub(crate) fn elements<T: Element>(array: &Array) -> Result<Vec<T>> {
    Ok(array.to_bytes()?.chunks_exact(size_of::<T>()).map(T::of).collect())
}

/// An array of elements in order.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub(crate) fn array<T: Element>(
    device: &Device,
    dtype: DType,
    shape: &[u64],
    elements: impl IntoIterator<Item = T>,
) -> Result<Array> {
    let mut bytes = Vec::new();
    elements.into_iter().for_each(|element| element.put(&mut bytes));
    Array::from_bytes(device, dtype, shape, &bytes)
}
