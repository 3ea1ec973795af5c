//! A compiled kernel as the accelerator gets it: the module's image, the entry symbol, and where its parameters lie.
#![allow(unsafe_code)]

use crate::error::{Error, Result};

/// What a parameter is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// A view of memory: its address, and the number of its elements if the kernel wants to know.
    View {
        /// Where the 8 bytes of the address lie.
        address: u32,
        /// Where the 8 bytes of the element count lie.
        count: Option<u32>,
        /// Bytes of an element: the view's length must be a multiple of it, its address too (up to 16).
        element: u32,
        /// Whether the kernel writes through it.
        writes: bool,
    },
    /// A number.
    Scalar {
        /// Where its bytes lie.
        offset: u32,
        /// How many there are: 1, 2, 4 or 8.
        bytes: u32,
    },
}

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, for errors.
    pub name: String,
    /// What it is bound to.
    pub kind: ParameterKind,
}

/// A module's image and its one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    image: Vec<u8>,
    entry: String,
    parameters: Vec<Parameter>,
    bytes: u32,
}

/// The most bytes of parameters that a kernel may have.
pub const PARAMETER_BYTES: u32 = 4096;

impl Artifact {
    /// An artifact: `image` in whatever form the accelerator takes (PTX or cubin for CUDA), `entry` the kernel's
    /// symbol, and `parameters` in the order in which arguments are given.
    ///
    /// # Errors
    /// [`Error::Load`] if the parameters overlap, are misaligned or too many, or the entry is no symbol.
    ///
    /// # Safety
    /// The kernel takes just these parameters and reaches no memory but that of its views, shared and local memory of
    /// its own, whatever the scalars are. What a compiler made from a validated module keeps to that.
    pub unsafe fn new(image: Vec<u8>, entry: &str, parameters: Vec<Parameter>) -> Result<Self> {
        let bad = |reason: String| Error::Load { kernel: entry.to_owned(), reason };
        if entry.is_empty() || entry.bytes().any(|byte| byte == 0) {
            return Err(bad("the entry symbol is empty or holds a zero byte".into()));
        }
        let mut fields = Vec::new();
        for Parameter { name, kind } in &parameters {
            match *kind {
                ParameterKind::View { address, count, element, .. } => {
                    if element == 0 {
                        return Err(bad(format!("parameter {name} has elements of no bytes")));
                    }
                    fields.push((address, 8));
                    fields.extend(count.map(|count| (count, 8)));
                }
                ParameterKind::Scalar { offset, bytes } => {
                    if !matches!(bytes, 1 | 2 | 4 | 8) {
                        return Err(bad(format!("parameter {name} is a scalar of {bytes} bytes")));
                    }
                    fields.push((offset, bytes));
                }
            }
        }
        fields.sort_unstable();
        let mut end = 0u32;
        for (offset, bytes) in fields {
            if offset < end || offset % bytes != 0 || offset > PARAMETER_BYTES - bytes {
                return Err(bad(format!(
                    "a parameter of {bytes} bytes at {offset} overlaps another, is misaligned or lies over \
                     {PARAMETER_BYTES}"
                )));
            }
            end = offset + bytes;
        }
        Ok(Self { image, entry: entry.to_owned(), parameters, bytes: end })
    }

    /// The module's image.
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// The kernel's symbol.
    pub fn entry(&self) -> &str {
        &self.entry
    }

    /// The parameters, in the order of the arguments.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Bytes of the parameters, packed.
    pub fn parameter_bytes(&self) -> u32 {
        self.bytes
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn scalar(offset: u32, bytes: u32) -> Parameter {
        Parameter { name: "n".into(), kind: ParameterKind::Scalar { offset, bytes } }
    }

    #[test]
    fn a_layout_that_no_kernel_has_is_refused() {
        let check = |entry: &str, parameters: Vec<Parameter>, bytes: Option<u32>| {
            // SAFETY: nothing is loaded.
            let artifact = unsafe { Artifact::new(Vec::new(), entry, parameters) };
            assert_eq!(artifact.ok().map(|artifact| artifact.parameter_bytes()), bytes);
        };
        check("k", vec![], Some(0));
        check("k", vec![scalar(0, 4), scalar(8, 8)], Some(16));
        check("", vec![], None);
        check("a\0b", vec![], None);
        check("k", vec![scalar(0, 3)], None);
        check("k", vec![scalar(2, 4)], None);
        check("k", vec![scalar(0, 8), scalar(4, 4)], None);
        check("k", vec![scalar(4092, 4)], Some(4096));
        check("k", vec![scalar(4096, 4)], None);
        check("k", vec![scalar(u32::MAX - 3, 4)], None);
    }
}
