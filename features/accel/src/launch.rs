//! How a kernel is launched: its grid, and its arguments packed as the kernel reads them.

use std::fmt;
use std::mem::MaybeUninit;

use crate::artifact::{Artifact, ParameterKind};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::memory::Region;

/// Blocks of a grid, work-items of a block, and dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Work-items of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of shared memory that each block gets beside what the kernel declares.
    pub shared_bytes: u32,
}

impl Shape {
    /// A grid of one dimension.
    pub fn linear(blocks: u32, items: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [items, 1, 1], shared_bytes: 0 }
    }

    /// Checks the shape against a device's limits.
    ///
    /// # Errors
    /// [`Error::Shape`], naming the limit that is passed.
    pub fn check(&self, kernel: &str, info: &DeviceInfo) -> Result<()> {
        let bad =
            |reason: String| Err(Error::Shape { kernel: kernel.to_owned(), shape: self.to_string(), reason });
        for (what, sizes, limits) in [("grid", self.grid, info.grid), ("block", self.block, info.block)] {
            for (axis, (size, limit)) in ["x", "y", "z"].iter().zip(sizes.into_iter().zip(limits)) {
                if size == 0 {
                    return bad(format!("{what} {axis} is 0"));
                }
                if size > limit {
                    return bad(format!("{what} {axis} is at most {limit} on {}", info.name));
                }
            }
        }
        let items = self.block.iter().map(|&size| u64::from(size)).product::<u64>();
        if items > u64::from(info.block_items) {
            return bad(format!("a block has at most {} work-items on {}", info.block_items, info.name));
        }
        if self.shared_bytes > info.shared_bytes {
            return bad(format!(
                "a block has at most {} bytes of shared memory on {}",
                info.shared_bytes, info.name
            ));
        }
        Ok(())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [gx, gy, gz] = self.grid;
        let [bx, by, bz] = self.block;
        write!(f, "grid {gx}×{gy}×{gz}, block {bx}×{by}×{bz}, {} bytes shared", self.shared_bytes)
    }
}

/// A number that is given to a kernel: the bits of 1, 2, 4 or 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scalar {
    bits: u64,
    bytes: u32,
}

impl Scalar {
    /// The low `bytes` bytes of `bits`.
    ///
    /// Lengths other than 1, 2, 4 and 8 fit no parameter.
    pub fn from_bits(bits: u64, bytes: u32) -> Self {
        Self { bits, bytes }
    }
}

macro_rules! scalar {
    ($($number:ty => $bits:expr),* $(,)?) => {
        $(impl From<$number> for Scalar {
            fn from(value: $number) -> Self {
                Self { bits: $bits(value), bytes: size_of::<$number>() as u32 }
            }
        })*
    };
}

scalar! {
    u8 => u64::from,
    u16 => u64::from,
    u32 => u64::from,
    u64 => u64::from,
    i8 => |value: i8| u64::from(value as u8),
    i16 => |value: i16| u64::from(value as u16),
    i32 => |value: i32| u64::from(value as u32),
    i64 => |value: i64| value as u64,
    f32 => |value: f32| u64::from(value.to_bits()),
    f64 => |value: f64| value.to_bits(),
}

/// One argument, before it is packed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value<'a> {
    Region(Region<'a>),
    Scalar(Scalar),
}

/// Words that an argument block holds without an allocation: 64 of 8 bytes.
const INLINE_WORDS: usize = 64;

/// A kernel's arguments as the kernel reads them.
pub struct Arguments {
    words: Words,
    bytes: u32,
}

enum Words {
    Inline([MaybeUninit<u64>; INLINE_WORDS]),
    Heap(Box<[u64]>),
}

impl Arguments {
    /// Packs arguments for a queue: `regions` and `scalars` in the order of the kernel's parameters.
    ///
    /// # Errors
    /// [`Error::Arguments`], naming the parameter that does not fit.
    pub fn new<'a>(
        artifact: &Artifact,
        arguments: impl IntoIterator<Item = QueueArgument<'a>>,
    ) -> Result<Self> {
        Self::pack(
            artifact,
            arguments.into_iter().map(|argument| {
                Ok(match argument {
                    QueueArgument::Region(region) => Value::Region(region),
                    QueueArgument::Scalar(scalar) => Value::Scalar(scalar),
                })
            }),
        )
    }

    pub(crate) fn pack<'a>(
        artifact: &Artifact,
        values: impl IntoIterator<Item = Result<Value<'a>>>,
    ) -> Result<Self> {
        let mut packed = Self::zeroed(artifact.parameter_bytes());
        let parameters = artifact.parameters();
        let mut given = 0;
        for value in values {
            let value = value?;
            let Some(parameter) = parameters.get(given) else {
                return Err(bad(
                    artifact,
                    given,
                    format!("the kernel has only {} parameters", parameters.len()),
                ));
            };
            match (&parameter.kind, value) {
                (&ParameterKind::View { address, count, element, .. }, Value::Region(region)) => {
                    let element = u64::from(element);
                    if region.bytes() % element != 0 {
                        let reason =
                            format!("{} bytes are no whole number of elements of {element}", region.bytes());
                        return Err(bad(artifact, given, reason));
                    }
                    let align = 1 << element.trailing_zeros().min(4);
                    if region.address() % align != 0 {
                        let reason = format!("address {:#x} is not aligned to {align}", region.address());
                        return Err(bad(artifact, given, reason));
                    }
                    packed.set(address, 8, region.address());
                    if let Some(count) = count {
                        packed.set(count, 8, region.bytes() / element);
                    }
                }
                (&ParameterKind::Scalar { offset, bytes }, Value::Scalar(scalar))
                    if bytes == scalar.bytes =>
                {
                    packed.set(offset, bytes, scalar.bits);
                }
                (kind, value) => return Err(mismatch(artifact, given, kind, value)),
            }
            given += 1;
        }
        if given < parameters.len() {
            return Err(bad(
                artifact,
                given,
                format!("{given} arguments given, {} wanted", parameters.len()),
            ));
        }
        Ok(packed)
    }

    fn zeroed(bytes: u32) -> Self {
        let count = bytes.div_ceil(8) as usize;
        let words = if count <= INLINE_WORDS {
            let mut words = [const { MaybeUninit::uninit() }; INLINE_WORDS];
            words[..count].fill(MaybeUninit::new(0));
            Words::Inline(words)
        } else {
            Words::Heap(vec![0; count].into())
        };
        Self { words, bytes }
    }

    /// Sets a field; the artifact's layout keeps it aligned and inside.
    fn set(&mut self, offset: u32, bytes: u32, bits: u64) {
        let word = offset as usize / 8;
        let shift = offset % 8 * 8;
        let mask = (u64::MAX >> (64 - bytes * 8)) << shift;
        let merge = |old: u64| old & !mask | bits << shift & mask;
        match &mut self.words {
            Words::Inline(_) => {
                let old = self.words()[word];
                if let Words::Inline(words) = &mut self.words {
                    words[word].write(merge(old));
                }
            }
            Words::Heap(words) => words[word] = merge(words[word]),
        }
    }

    /// The packed words: the bytes of the parameters in their order, in the host's byte order.
    #[allow(unsafe_code)]
    pub fn words(&self) -> &[u64] {
        let count = self.bytes.div_ceil(8) as usize;
        match &self.words {
            // SAFETY: `zeroed` initialised the first `count` words.
            Words::Inline(words) => unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), count) },
            Words::Heap(words) => words,
        }
    }

    /// Bytes of the parameters.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }
}

/// One argument for [`Arguments::new`].
#[derive(Clone, Copy, Debug)]
pub enum QueueArgument<'a> {
    /// For a view.
    Region(Region<'a>),
    /// For a scalar.
    Scalar(Scalar),
}

#[cold]
fn bad(artifact: &Artifact, index: usize, reason: String) -> Error {
    let parameter =
        artifact.parameters().get(index).map_or_else(|| index.to_string(), |known| known.name.clone());
    Error::Arguments { kernel: artifact.entry().to_owned(), parameter, reason }
}

#[cold]
fn mismatch(artifact: &Artifact, index: usize, kind: &ParameterKind, value: Value<'_>) -> Error {
    let wanted = match kind {
        ParameterKind::View { .. } => "a buffer is wanted".to_owned(),
        ParameterKind::Scalar { bytes, .. } => format!("a scalar of {bytes} bytes is wanted"),
    };
    let given = match value {
        Value::Region(_) => "a buffer was given".to_owned(),
        Value::Scalar(scalar) => format!("one of {} bytes was given", scalar.bytes),
    };
    bad(artifact, index, format!("{wanted}, {given}"))
}
