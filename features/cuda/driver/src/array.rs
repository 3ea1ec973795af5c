//! Arrays, with mipmaps and without: rows without gaps, one layer behind the other. Nothing reaches the smaller levels.

use crate::{
    error::{Error, Result},
    ffi::ArrayDescriptor3d,
    memory::{Kind, UNIT},
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
    /// Where its memory is; 0 where it has none.
    at: u64,
    /// Bytes of a row, and rows of a layer.
    row: usize,
    rows: usize,
    /// Bytes of all layers of the first level.
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
        let Some(array) = self.arrays.remove(&id) else { return };
        self.free_ids([id]);
        if array.at != 0 && self.spans.contains_key(&array.at) {
            // Pages that stay cost memory and nothing else.
            let _ = self.release(array.at);
        }
    }

    fn array(&self, id: u64) -> Result<&Array> {
        let array = self.arrays.get(&id).filter(|array| !array.is_mipmapped && array.at != 0);
        array.ok_or(Error::InvalidValue)
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
    let at = match len {
        0 => 0,
        _ => state.allocate(device, context, len, true, |offset| Kind::Data { offset })?,
    };
    let id = state.id();
    let [width, height, depth] = descriptor.sides;
    let row = width * (channel(descriptor.format)? * u64::from(descriptor.channels)) as usize;
    let rows = height.max(1);
    let len = (row * rows * depth.max(1)) as u64;
    state.arrays.insert(id, Array { device, context, at, row, rows, len, is_mipmapped: levels.is_some() });
    Ok(id)
}

/// So many bytes from an offset of an array on: their address.
pub(crate) fn bytes_of(id: u64, offset: usize, count: usize) -> Result<u64> {
    let state = state::lock();
    state.current()?;
    let array = state.array(id)?;
    let end = (offset as u64).checked_add(count as u64).filter(|end| *end <= array.len);
    end.map(|_| array.at + offset as u64).ok_or(Error::InvalidValue)
}

/// Where an array is, bytes of its rows, and how many rows a layer has.
pub(crate) fn place(id: u64) -> Result<(u64, usize, usize)> {
    let state = state::lock();
    let array = state.array(id)?;
    Ok((array.at, array.row, array.rows))
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
