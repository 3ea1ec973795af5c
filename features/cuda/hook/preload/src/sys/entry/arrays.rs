//! Arrays and those with mipmaps. How they lie in memory is the driver's own affair: what their descriptors ask for is counted, which is a lower
//! bound. Sparse and deferred ones are given memory by other calls.

use super::*;

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Descriptor3d<T> {
    sides: [T; 3],
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Descriptor<T> {
    sides: [T; 2],
    format: c_uint,
    channels: c_uint,
}

/// A descriptor of an array, whichever it is.
#[derive(Clone, Copy)]
struct Asked {
    sides: [u64; 3],
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

impl<T: TryInto<u64>> From<Descriptor3d<T>> for Asked {
    fn from(Descriptor3d { sides, format, channels, flags }: Descriptor3d<T>) -> Self {
        Asked { sides: sides.map(|side| side.try_into().unwrap_or(0)), format, channels, flags }
    }
}

impl<T: TryInto<u64>> From<Descriptor<T>> for Asked {
    fn from(Descriptor { sides: [width, height], format, channels }: Descriptor<T>) -> Self {
        let sides = [width, height].map(|side| side.try_into().unwrap_or(0));
        Asked { sides: [sides[0], sides[1], 0], format, channels, flags: 0 }
    }
}

impl Asked {
    /// Bytes of it with so many levels.
    fn bytes(self, levels: c_uint) -> u64 {
        /// `CUDA_ARRAY3D_LAYERED`, `CUDA_ARRAY3D_CUBEMAP`: the last side counts layers.
        const LAYERED: c_uint = 1 | 4;
        let longest = self.sides.into_iter().max().unwrap_or(0).max(1);
        let level = |level: u32| {
            let [width, height, depth] = self.sides;
            let depth = if self.flags & LAYERED != 0 { depth.max(1) } else { depth.max(1) >> level };
            let [width, height, depth] = [width >> level, height >> level, depth].map(|side| side.max(1));
            let across = |block: u64| width.div_ceil(block).saturating_mul(height.div_ceil(block));
            let bytes = match element(self.format) {
                Element::Channels(bytes) => {
                    across(1).saturating_mul(bytes).saturating_mul(self.channels.max(1).into())
                }
                Element::Whole(bytes) => across(1).saturating_mul(bytes),
                Element::Block(bytes) => across(4).saturating_mul(bytes),
            };
            bytes.saturating_mul(depth)
        };
        (0..levels.clamp(1, longest.ilog2() + 1)).map(level).fold(0, u64::saturating_add)
    }

    /// Does it get memory when it is made? Not with `CUDA_ARRAY3D_SPARSE` or `CUDA_ARRAY3D_DEFERRED_MAPPING`.
    fn has_memory(self) -> bool {
        self.flags & (0x40 | 0x80) == 0
    }
}

/// Bytes of a format.
enum Element {
    /// Of each channel.
    Channels(u64),
    /// Of all channels.
    Whole(u64),
    /// Of four by four elements.
    Block(u64),
}

/// Bytes of a `CUarray_format`; of those of several planes, which are of video, what the first has.
fn element(format: c_uint) -> Element {
    match format {
        // Integers and floats.
        0x01 | 0x08 => Element::Channels(1),
        0x02 | 0x09 | 0x10 => Element::Channels(2),
        0x03 | 0x0a | 0x20 => Element::Channels(4),
        // Integers that read as fractions, with and without sign, of one, two and four channels, and three in a word.
        0xc0 | 0xc6 => Element::Whole(1),
        0xc1 | 0xc7 | 0xc3 | 0xc9 => Element::Whole(2),
        0xc2 | 0xc8 | 0xc4 | 0xca | 0x50 => Element::Whole(4),
        0xc5 | 0xcb => Element::Whole(8),
        // BC1 and BC4, and the other compressed ones.
        0x91 | 0x92 | 0x97 | 0x98 => Element::Block(8),
        0x93..=0x96 | 0x99..=0x9e => Element::Block(16),
        _ => Element::Whole(1),
    }
}

/// Makes an array.
///
/// # Safety
/// `array` is null or the place of a handle, `descriptor` null or a descriptor.
unsafe fn made<T: Clone + Into<Asked>>(
    array: *mut u64,
    descriptor: *const T,
    levels: c_uint,
    own: impl FnOnce() -> u32,
) -> u32 {
    if let Err(Failure(code)) = before() {
        return code;
    }
    // SAFETY: the caller's promise.
    let asked: Option<Asked> = unsafe { descriptor.as_ref() }.map(|descriptor| descriptor.clone().into());
    match asked.filter(|asked| asked.has_memory() && !array.is_null() && hook::is_here()) {
        None => own(),
        Some(asked) => {
            let bytes = asked.bytes(levels);
            // SAFETY: the driver has written it.
            natively(Kind::Array, bytes, own, || (unsafe { *array }, bytes))
        }
    }
}

macro_rules! arrays {
    ($($function:ident $name:literal $descriptor:ty;)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(array: *mut u64, descriptor: *const $descriptor) -> u32 {
            let _pass = hook::enter(false);
            let own = || real!($name (*mut u64, *const $descriptor) (array, descriptor));
            // SAFETY: both are what the driver takes.
            unsafe { made(array, descriptor, 1, own) }
        }
    )*};
}

arrays! {
    cuArrayCreate c"cuArrayCreate" Descriptor<c_uint>;
    cuArrayCreate_v2 c"cuArrayCreate_v2" Descriptor<usize>;
    cuArray3DCreate c"cuArray3DCreate" Descriptor3d<c_uint>;
    cuArray3DCreate_v2 c"cuArray3DCreate_v2" Descriptor3d<usize>;
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMipmappedArrayCreate(
    array: *mut u64,
    descriptor: *const Descriptor3d<usize>,
    levels: c_uint,
) -> u32 {
    let _pass = hook::enter(false);
    let own = || real!(c"cuMipmappedArrayCreate" (*mut u64, *const Descriptor3d<usize>, c_uint) (array, descriptor, levels));
    // SAFETY: both are what the driver takes.
    unsafe { made(array, descriptor, levels, own) }
}

macro_rules! destroys {
    ($($function:ident $name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(array: u64) -> u32 {
            let _pass = hook::enter(true);
            if let Err(Failure(code)) = before() {
                return code;
            }
            natively_freed(Id::Array(array), || real!($name (u64) (array)))
        }
    )*};
}

destroys! {
    cuArrayDestroy c"cuArrayDestroy";
    cuMipmappedArrayDestroy c"cuMipmappedArrayDestroy";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_descriptor() {
        let check = |sides: [u64; 3], format, channels, flags, levels, bytes| {
            let asked = Asked { sides, format, channels, flags };
            assert_eq!(asked.bytes(levels), bytes, "{sides:?} {format:#x} {channels} {flags} {levels}");
        };
        check([1000, 0, 0], 0x20, 4, 0, 1, 16_000);
        check([64, 32, 0], 0x10, 2, 0, 1, 64 * 32 * 4);
        check([64, 32, 8], 0x01, 1, 0, 1, 64 * 32 * 8);
        // Without a height, and in layers.
        check([64, 0, 8], 0x01, 1, 1, 1, 64 * 8);
        check([8, 8, 8], 0x01, 1, 0, 4, 512 + 64 + 8 + 1);
        check([8, 8, 6], 0x01, 1, 4, 99, 6 * (64 + 16 + 4 + 1));
        check([8, 8, 0], 0x01, 1, 0, 0, 64);
        // Fractions, compressed, of video, and unknown.
        check([10, 10, 0], 0xc5, 4, 0, 1, 800);
        check([10, 10, 0], 0x91, 4, 0, 1, 9 * 8);
        check([10, 10, 0], 0xb0, 3, 0, 1, 100);
        check([u64::MAX, u64::MAX, 2], 0x20, 4, 0, 1, u64::MAX);
    }
}
