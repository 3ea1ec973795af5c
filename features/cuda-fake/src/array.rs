//! Arrays, with mipmaps and without: what they take is counted, and nothing is copied to them.

use crate::{
    error::{Error, Result},
    ffi::ArrayDescriptor3d,
    memory::UNIT,
    state::{self, State},
};

const LAYERED: u32 = 1;
const CUBEMAP: u32 = 4;
/// Without memory until that is mapped.
const SPARSE: u32 = 0x40;
const DEFERRED: u32 = 0x80;
/// Layers, surfaces, cubes, gathering, depth, colour and the two above.
const FLAGS: u32 = 0xff;

pub(crate) struct Array {
    device: usize,
    context: u64,
    len: u64,
    is_mipmapped: bool,
}

/// Bytes of a channel: those of integers and floats alone are known here.
fn channel(format: u32) -> Result<u64> {
    match format {
        0x01 | 0x08 => Ok(1),
        0x02 | 0x09 | 0x10 => Ok(2),
        0x03 | 0x0a | 0x20 => Ok(4),
        _ => Err(Error::InvalidValue),
    }
}

/// Bytes of an array of so many levels, if its sides are those of one.
fn bytes(descriptor: &ArrayDescriptor3d, levels: u32) -> Result<u64> {
    let ArrayDescriptor3d { sides: [width, height, depth], format, channels, flags, .. } = *descriptor;
    let is_cube = flags & CUBEMAP != 0;
    let (layers, depth) = if flags & (LAYERED | CUBEMAP) != 0 { (depth, 1) } else { (1, depth) };
    let faces = if flags & LAYERED != 0 { layers.is_multiple_of(6) } else { layers == 6 };
    if width == 0
        || layers == 0
        || ![1, 2, 4].contains(&channels)
        || flags & !FLAGS != 0
        || (height == 0 && depth > 1)
        || (is_cube && (width != height || !faces))
    {
        return Err(Error::InvalidValue);
    }
    let element = channel(format)? * u64::from(channels);
    let longest = width.max(height).max(depth);
    let mut all = 0u64;
    for level in 0..levels.clamp(1, longest.ilog2() + 1) {
        let sides = [width, height, depth].map(|side| (side >> level).max(1) as u64);
        let len = sides.into_iter().chain([layers as u64]).try_fold(element, u64::checked_mul);
        all = len.and_then(|len| all.checked_add(len)).ok_or(Error::OutOfMemory)?;
    }
    all.checked_next_multiple_of(UNIT).ok_or(Error::OutOfMemory)
}

impl State {
    fn release_array(&mut self, id: u64) {
        if let Some(array) = self.arrays.remove(&id) {
            self.devices[array.device].used -= array.len;
        }
    }

    /// Frees the arrays of a context.
    pub(crate) fn release_arrays(&mut self, context: u64) {
        let own = |(id, array): (&u64, &Array)| (array.context == context).then_some(*id);
        let own: Vec<u64> = self.arrays.iter().filter_map(own).collect();
        own.into_iter().for_each(|id| self.release_array(id));
    }
}

/// `cuArrayCreate`, `cuArray3DCreate`, and with levels `cuMipmappedArrayCreate`.
pub(crate) fn create(descriptor: &ArrayDescriptor3d, levels: Option<u32>) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    let mut len = bytes(descriptor, levels.unwrap_or(1))?;
    state.refuse_in_capture()?;
    if descriptor.flags & (SPARSE | DEFERRED) != 0 {
        len = 0;
    }
    let device = state.contexts[&context].device;
    state.claim(device, len)?;
    let id = state.id();
    state.arrays.insert(id, Array { device, context, len, is_mipmapped: levels.is_some() });
    Ok(id)
}

/// `cuArrayDestroy`, `cuMipmappedArrayDestroy`: waits for all work of the device.
pub(crate) fn destroy(id: u64, is_mipmapped: bool) -> Result {
    let state = state::lock();
    state.current()?;
    let array = state.arrays.get(&id).filter(|array| array.is_mipmapped == is_mipmapped);
    let device = array.ok_or(Error::InvalidHandle)?.device;
    let mut state = crate::memory::drain_device(state, device)?;
    state.release_array(id);
    Ok(())
}
