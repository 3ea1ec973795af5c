//! How a kernel is launched: its grid, its limits, and its arguments packed as the kernel reads them.

use std::fmt;
use std::mem::MaybeUninit;
use std::time::Duration;

use vm_abi::{MAP_BYTES, MAX_GRID, Slot, TensorMap};

use crate::artifact::{Artifact, Layout, Parameter, ParameterKind, Signature};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::extents::{Extents, Place};
use crate::memory::{MemoryKind, Region};
use crate::tensor::Tensor;

/// Blocks of a grid in each dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid(pub [u32; 3]);

impl Grid {
    /// Checks the grid against a device's limits, and as [`check_compiled`](Self::check_compiled) does.
    ///
    /// # Errors
    /// [`Error::Grid`], naming the limit that is passed, or the multiple that it must be.
    pub fn check(&self, signature: &Signature, info: &DeviceInfo) -> Result<()> {
        self.check_compiled(signature)?;
        self.check_within(signature, info.grid, &info.name)
    }

    /// Checks the grid against the limits that compilers assume ([`vm_abi::MAX_GRID`]) and a kernel's clusters. Queues call it
    /// at each launch, since a device's limits may be higher.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_compiled(&self, signature: &Signature) -> Result<()> {
        self.check_within(signature, MAX_GRID, "a kernel")
    }

    fn check_within(&self, signature: &Signature, limits: [u32; 3], of: &str) -> Result<()> {
        let fits = |(size, limit): (u32, u32)| size != 0 && size <= limit;
        let whole = self.0[0].is_multiple_of(signature.cluster);
        if whole && self.0.into_iter().zip(limits).all(fits) {
            Ok(())
        } else {
            Err(self.refused(signature, limits, of))
        }
    }

    #[cold]
    fn refused(&self, signature: &Signature, limits: [u32; 3], of: &str) -> Error {
        let reason =
            ["x", "y", "z"].iter().zip(self.0.into_iter().zip(limits)).find_map(|(axis, (size, limit))| {
                match size {
                    0 => Some(format!("it has no blocks along {axis}")),
                    size if size > limit => Some(format!("{of} takes at most {limit} along {axis}")),
                    _ => None,
                }
            });
        let parts = || format!("its clusters need a multiple of {} along x", signature.cluster);
        Error::Grid { kernel: signature.entry.clone(), grid: *self, reason: reason.unwrap_or_else(parts) }
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.0;
        write!(f, "{x}×{y}×{z}")
    }
}

impl From<u32> for Grid {
    fn from(x: u32) -> Self {
        Self([x, 1, 1])
    }
}

impl From<[u32; 2]> for Grid {
    fn from([x, y]: [u32; 2]) -> Self {
        Self([x, y, 1])
    }
}

impl From<[u32; 3]> for Grid {
    fn from(blocks: [u32; 3]) -> Self {
        Self(blocks)
    }
}

/// What a launch of a kernel that can be stopped may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How often each thread may begin the body of a loop.
    pub fuel: u64,
    /// How long it may take, from when it was given to the device and the guarded launch before it had ended; what runs
    /// between the two counts.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { fuel: 1 << 40, time: Duration::from_secs(10) }
    }
}

/// The grid of a launch, and limits where they are not the worker's own: `64`, `[8, 8]`, `[8, 8, 2]`, or
/// `Launch::over(64).within(limits)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The blocks.
    pub grid: Grid,
    /// What it may take, if its kernel can be stopped; `None` is what the worker's options say.
    pub limits: Option<Limits>,
}

impl Launch {
    /// A launch of these blocks.
    pub fn over(grid: impl Into<Grid>) -> Self {
        Self { grid: grid.into(), limits: None }
    }

    /// The same, with limits.
    pub fn within(self, limits: Limits) -> Self {
        Self { limits: Some(limits), ..self }
    }
}

impl<G: Into<Grid>> From<G> for Launch {
    fn from(grid: G) -> Self {
        Self::over(grid)
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

    /// The number as a signed integer of its length.
    fn signed(self) -> i64 {
        let unused = 64 - self.bytes.clamp(1, 8) * 8;
        (self.bits << unused) as i64 >> unused
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
    bool => u64::from,
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
    half::f16 => |value: half::f16| u64::from(value.to_bits()),
    half::bf16 => |value: half::bf16| u64::from(value.to_bits()),
}

/// One argument for [`Arguments::new`].
#[derive(Clone, Copy, Debug)]
pub enum QueueArgument<'a> {
    /// For a view: the memory, and what of it the view is.
    View(Region<'a>, Extents),
    /// For a scalar.
    Scalar(Scalar),
}

/// What [`Arguments::update`] puts in the place of an argument.
#[derive(Clone, Copy, Debug)]
pub enum Other {
    /// Where a view begins instead; the rest of it stays.
    Address(u64),
    /// A number.
    Number(Scalar),
}

/// Words that an argument block holds without an allocation.
const INLINE_WORDS: usize = 64;

/// A kernel's arguments as the kernel reads them: the block of parameters that [`vm_abi`] describes.
///
/// That there is one means that the arguments are what the kernel was promised: every element of a view lies in its
/// region, extents and alignment are what the parameter says, scalars are in range, and no view that is written
/// overlaps itself or another. Its tensor maps are zeros: the queue makes them of the views when it launches.
#[derive(Clone)]
pub struct Arguments {
    words: Words,
    bytes: u32,
}

// A block that is made for each launch must not be on the heap.
#[allow(clippy::large_enum_variant)]
#[derive(Clone)]
enum Words {
    Inline([MaybeUninit<u64>; INLINE_WORDS]),
    Heap(Box<[u64]>),
}

impl Arguments {
    /// Packs arguments for a queue, in the order of the kernel's parameters.
    ///
    /// For a kernel that can be stopped, [`Arguments::guard`] must follow.
    ///
    /// # Errors
    /// [`Error::Arguments`], naming the parameter that does not fit.
    pub fn new<'a>(
        artifact: &Artifact,
        arguments: impl IntoIterator<Item = QueueArgument<'a>>,
    ) -> Result<Self> {
        Self::pack(artifact.layout(), arguments.into_iter().map(Ok))
    }

    pub(crate) fn pack<'a>(
        layout: &Layout,
        arguments: impl IntoIterator<Item = Result<QueueArgument<'a>>>,
    ) -> Result<Self> {
        let parameters = &layout.signature.parameters;
        let mut packed = Self::zeroed(layout.params.bytes);
        let mut given = 0;
        for argument in arguments {
            let argument = argument?;
            let (Some(parameter), Some(slot)) = (parameters.get(given), layout.params.slots.get(given))
            else {
                let reason = format!("the kernel has only {} parameters", parameters.len());
                return Err(refused(layout, &given.to_string(), reason));
            };
            packed
                .set_argument(parameter, *slot, argument)
                .map_err(|reason| refused(layout, &parameter.name, reason))?;
            given += 1;
        }
        if given < parameters.len() {
            let reason = format!("{given} arguments given, {} wanted", parameters.len());
            return Err(refused(layout, &parameters[given].name, reason));
        }
        packed.check_equal(layout)?;
        packed.check_overlaps(layout)?;
        for (map, tensor) in packed.tensors(layout) {
            tensor.check().map_err(|reason| {
                let parameter = parameters.get(map.tile.parameter as usize);
                refused(layout, parameter.map_or("", |parameter| &parameter.name), reason)
            })?;
        }
        Ok(packed)
    }

    fn set_argument(
        &mut self,
        parameter: &Parameter,
        slot: Slot,
        argument: QueueArgument<'_>,
    ) -> Result<(), String> {
        match (&parameter.kind, argument) {
            (ParameterKind::Surface { extents, element, .. }, QueueArgument::View(region, given))
                if region.kind() == MemoryKind::Surface =>
            {
                let place = given.resolve(extents, element.bytes(), element.bytes(), u64::MAX)?;
                self.set_place(slot, region.address(), &place);
                Ok(())
            }
            (ParameterKind::View { .. }, QueueArgument::View(region, _))
                if region.kind() == MemoryKind::Surface =>
            {
                Err("a buffer is wanted, a surface was given".into())
            }
            (ParameterKind::View { extents, element, align, writes }, QueueArgument::View(region, given)) => {
                if !region.address().is_multiple_of(u64::from(*align)) {
                    return Err(format!("address {:#x} is not aligned to {align}", region.address()));
                }
                let place = given.resolve(extents, element.bytes(), *align, region.bytes())?;
                if *writes && !place.distinct() {
                    return Err("its rows overlap, and the kernel writes it".into());
                }
                self.set_place(slot, region.address(), &place);
                Ok(())
            }
            (&ParameterKind::Scalar { bytes, range }, QueueArgument::Scalar(scalar))
                if bytes == scalar.bytes =>
            {
                let number = scalar.signed();
                if let Some((least, greatest)) = range
                    && !(least..=greatest).contains(&number)
                {
                    return Err(format!("{number} is not in {least}..={greatest}"));
                }
                self.set(slot.offset(), bytes, scalar.bits);
                Ok(())
            }
            (kind, argument) => Err(mismatch(kind, argument)),
        }
    }

    fn set_place(&mut self, slot: Slot, address: u64, place: &Place) {
        let first = slot.offset() as usize / 8;
        for (index, &value) in [address].iter().chain(place.extents()).chain(place.strides()).enumerate() {
            self.set_word(first + index, value);
        }
    }

    /// That no view that is written shares a byte with another, and that no surface that is written is another.
    fn check_overlaps(&self, layout: &Layout) -> Result<()> {
        let parameters = || layout.signature.parameters.iter().zip(&layout.params.slots).enumerate();
        let surfaces = || {
            parameters().filter_map(|(index, (parameter, slot))| match parameter.kind {
                ParameterKind::Surface { writes, .. } => {
                    Some((index, parameter, self.words()[slot.offset() as usize / 8], writes))
                }
                _ => None,
            })
        };
        for (index, written, handle, _) in surfaces().filter(|(.., writes)| *writes) {
            if let Some((_, other, ..)) = surfaces().find(|other| other.0 != index && other.2 == handle) {
                let reason = format!("it is written, and is the surface {} too", other.name);
                return Err(refused(layout, &written.name, reason));
            }
        }
        for (index, (written, slot)) in parameters() {
            let Some((place, at, true)) = self.place(written, *slot) else { continue };
            for (other_index, (other, slot)) in parameters() {
                let Some((other_place, other_at, writes)) = self.place(other, *slot) else { continue };
                // A pair that is written both ways is looked at once.
                if other_index == index || writes && other_index < index {
                    continue;
                }
                if !place.apart(at, &other_place, other_at) {
                    let reason = format!("it is written, and overlaps the view {}", other.name);
                    return Err(refused(layout, &written.name, reason));
                }
            }
        }
        Ok(())
    }

    /// What was packed for a view: its extents, its address, and whether the kernel writes it.
    fn place(&self, parameter: &Parameter, slot: Slot) -> Option<(Place, u64, bool)> {
        let ParameterKind::View { extents, element, writes, .. } = &parameter.kind else {
            return None;
        };
        let words = &self.words()[slot.offset() as usize / 8..][..2 * extents.len()];
        let (extents, strides) = words[1..].split_at(extents.len());
        Some((Place::new(element.bytes(), extents, strides), words[0], *writes))
    }

    /// The tensor maps of the kernel, and the views that were packed for them.
    fn tensors<'a>(&'a self, layout: &'a Layout) -> impl Iterator<Item = (TensorMap, Tensor)> + 'a {
        layout.params.maps.iter().filter_map(|map| Some((*map, self.tensor(layout, map)?)))
    }

    /// The view that was packed for a tensor map.
    fn tensor(&self, layout: &Layout, map: &TensorMap) -> Option<Tensor> {
        let index = map.tile.parameter as usize;
        let (parameter, slot) = (layout.signature.parameters.get(index)?, layout.params.slots.get(index)?);
        let (place, address, _) = self.place(parameter, *slot)?;
        Some(Tensor::new(address, place, map.tile))
    }

    fn set_map(&mut self, map: &TensorMap, encoded: &[u64; MAP_BYTES as usize / 8]) {
        self.words_mut()[map.offset as usize / 8..][..encoded.len()].copy_from_slice(encoded);
    }

    /// The same with its tensor maps, for a queue to launch: `encode` makes them. None for a kernel without.
    ///
    /// # Errors
    /// [`Error::Arguments`] if they were packed for a kernel with other parameters; those of `encode`.
    pub fn with_maps(
        &self,
        artifact: &Artifact,
        mut encode: impl FnMut(&Tensor) -> Result<[u64; MAP_BYTES as usize / 8]>,
    ) -> Result<Option<Self>> {
        if artifact.params().maps.is_empty() {
            return Ok(None);
        }
        if self.bytes != artifact.parameter_bytes() {
            let reason = format!("{} bytes given, {} wanted", self.bytes, artifact.parameter_bytes());
            return Err(refused(artifact.layout(), "all", reason));
        }
        let mut whole = Self::repacked(self.bytes, self.words());
        for (map, tensor) in self.tensors(artifact.layout()) {
            whole.set_map(&map, &encode(&tensor)?);
        }
        Ok(Some(whole))
    }

    /// Puts what `other` gives for a parameter by its index in the place of what there is, and makes the tensor maps of the views that
    /// move by `encode`.
    ///
    /// # Errors
    /// [`Error::Arguments`] for an address that is not aligned as its parameter asks, a number that is not in its range, and if they were
    /// packed for a kernel with other parameters; those of `encode`. What is left then is neither the arguments before nor those wanted.
    ///
    /// # Safety
    /// Behind each address is as much memory as there was behind the one before, and what is written overlaps no other view.
    #[allow(unsafe_code)]
    pub unsafe fn update(
        &mut self,
        artifact: &Artifact,
        other: impl Fn(usize) -> Option<Other>,
        mut encode: impl FnMut(&Tensor) -> Result<[u64; MAP_BYTES as usize / 8]>,
    ) -> Result<()> {
        let layout = artifact.layout();
        if self.bytes != layout.params.bytes {
            let reason = format!("{} bytes given, {} wanted", self.bytes, layout.params.bytes);
            return Err(refused(layout, "all", reason));
        }
        // The views that move, by their indices; those from 63 on are told by one bit.
        let (bit, mut moved) = (|index: usize| 1u64 << index.min(63), 0);
        for (index, (parameter, slot)) in
            layout.signature.parameters.iter().zip(&layout.params.slots).enumerate()
        {
            let done = match (other(index), &parameter.kind) {
                (None, _) => continue,
                (Some(Other::Address(address)), ParameterKind::View { align, .. }) => {
                    let word = &mut self.words_mut()[slot.offset() as usize / 8];
                    match address.is_multiple_of(u64::from(*align)) {
                        _ if *word == address => continue,
                        true => {
                            (*word, moved) = (address, moved | bit(index));
                            continue;
                        }
                        false => Err(format!("address {address:#x} is not aligned to {align}")),
                    }
                }
                (Some(Other::Number(number)), ParameterKind::Scalar { .. }) => {
                    self.set_argument(parameter, *slot, QueueArgument::Scalar(number))
                }
                (Some(_), _) => Err("it is of another kind".into()),
            };
            done.map_err(|reason| refused(layout, &parameter.name, reason))?;
        }
        for map in layout.params.maps.iter().filter(|_| moved != 0) {
            let index = map.tile.parameter as usize;
            let Some(tensor) = self.tensor(layout, map).filter(|_| moved & bit(index) != 0) else { continue };
            tensor
                .check()
                .map_err(|reason| refused(layout, &layout.signature.parameters[index].name, reason))?;
            self.set_map(map, &encode(&tensor)?);
        }
        Ok(())
    }

    /// Sets the cancel flag and the fuel of a kernel that can be stopped; nothing for another.
    ///
    /// The word must be 0 when the kernel begins, and there as long as it runs.
    ///
    /// # Errors
    /// [`Error::Lengths`] if the region has not 4 bytes.
    pub fn guard(&mut self, artifact: &Artifact, stop: Region<'_>, fuel: u64) -> Result<()> {
        if stop.bytes() != 4 {
            return Err(Error::Lengths { source_bytes: 4, destination_bytes: stop.bytes() });
        }
        self.set_guard(artifact.layout(), stop.address(), fuel);
        Ok(())
    }

    /// What [`words`](Self::words) gave elsewhere, for a kernel whose block has just these parameters.
    ///
    /// # Errors
    /// [`Error::Arguments`] for another number of words.
    ///
    /// # Safety
    /// They were packed for a kernel with the same signature, and the memory that they name is there for this one.
    #[allow(unsafe_code)]
    pub unsafe fn from_words(artifact: &Artifact, words: &[u64]) -> Result<Self> {
        let bytes = artifact.parameter_bytes();
        if words.len() != bytes.div_ceil(8) as usize {
            let reason = format!("{} words given, {bytes} bytes wanted", words.len());
            return Err(refused(artifact.layout(), "all", reason));
        }
        Ok(Self::repacked(bytes, words))
    }

    pub(crate) fn set_guard(&mut self, layout: &Layout, stop: u64, fuel: u64) {
        if let Some(guard) = layout.params.guard {
            self.set_word(guard.stop as usize / 8, stop);
            self.set_word(guard.fuel as usize / 8, fuel);
        }
    }

    /// What [`Arguments::words`] gave, again. Words that were packed for one kernel stay what it was promised.
    pub(crate) fn repacked(bytes: u32, words: &[u64]) -> Self {
        let mut packed = Self::zeroed(bytes);
        packed.words_mut().iter_mut().zip(words).for_each(|(to, word)| *to = *word);
        packed
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
        let old = self.words()[word];
        self.set_word(word, old & !mask | bits << shift & mask);
    }

    fn set_word(&mut self, word: usize, value: u64) {
        self.words_mut()[word] = value;
    }

    #[allow(unsafe_code)]
    fn words_mut(&mut self) -> &mut [u64] {
        let count = self.bytes.div_ceil(8) as usize;
        match &mut self.words {
            // SAFETY: `zeroed` initialised the first `count` words.
            Words::Inline(words) => unsafe {
                std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), count)
            },
            Words::Heap(words) => words,
        }
    }

    /// The packed words: the bytes of the block in their order, in the host's byte order.
    #[allow(unsafe_code)]
    pub fn words(&self) -> &[u64] {
        let count = self.bytes.div_ceil(8) as usize;
        match &self.words {
            // SAFETY: `zeroed` initialised the first `count` words.
            Words::Inline(words) => unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), count) },
            Words::Heap(words) => words,
        }
    }

    /// Bytes of the block.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }
}

#[cold]
pub(crate) fn refused(layout: &Layout, parameter: &str, reason: String) -> Error {
    Error::Arguments { kernel: layout.signature.entry.clone(), parameter: parameter.to_owned(), reason }
}

#[cold]
fn mismatch(kind: &ParameterKind, argument: QueueArgument<'_>) -> String {
    let wanted = match kind {
        ParameterKind::View { .. } => "a buffer is wanted".to_owned(),
        ParameterKind::Surface { .. } => "a surface is wanted".to_owned(),
        ParameterKind::Scalar { bytes, .. } => format!("a scalar of {bytes} bytes is wanted"),
    };
    let given = match argument {
        QueueArgument::View(..) => "a buffer was given".to_owned(),
        QueueArgument::Scalar(scalar) => format!("one of {} bytes was given", scalar.bytes),
    };
    format!("{wanted}, {given}")
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests;
