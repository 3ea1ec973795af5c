//! Copies and memsets, of one to three dimensions.

use crate::{
    array,
    error::{Error, Result},
    ffi::{Copy2d, Copy3d},
    memory::{By, READ_WRITE},
    state::{self, State},
    stream::{self, Work},
    sys::{LOWEST, Range},
};
use std::sync::Arc;

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) at: u64,
    /// The caller's own memory, or an address of either kind.
    pub(crate) host: bool,
    pub(crate) pitch: usize,
    pub(crate) slice: usize,
    /// The context that accesses it: 0 is the stream's.
    pub(crate) context: u64,
}

impl End {
    /// A device's address.
    pub(crate) fn device(at: u64) -> Self {
        Self { at, host: false, pitch: 0, slice: 0, context: 0 }
    }

    /// Host memory, or an address of either kind.
    pub(crate) fn host(at: u64) -> Self {
        Self { host: true, ..Self::device(at) }
    }

    fn row(&self, y: usize, z: usize) -> Option<u64> {
        let offset = self.pitch.checked_mul(y)?.checked_add(self.slice.checked_mul(z)?)?;
        self.at.checked_add(offset as u64)
    }

    /// Returns whether the memory from the first to the last byte that a copy accesses at this end is allocated.
    fn is_allocated(&self, state: &State, copy: &Copy) -> bool {
        self.len(copy).is_some_and(|len| state.is_allocated(self.at, len, self.host))
    }

    /// Bytes from the first to the last that a copy accesses at this end.
    fn len(&self, copy: &Copy) -> Option<u64> {
        let last = self.row(copy.height - 1, copy.depth - 1)?;
        (last - self.at).checked_add(copy.width as u64)
    }
}

/// A copy of `depth` slices of `height` rows of `width` bytes.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) dst: End,
    pub(crate) src: End,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    /// The source's bytes, where it was pageable memory.
    pub(crate) staged: Option<Arc<[u8]>>,
}

impl Copy {
    /// A copy of bytes.
    pub(crate) fn bytes(dst: End, src: End, width: usize) -> Self {
        Self { dst, src, width, height: 1, depth: 1, staged: None }
    }

    /// The copy that a `CUDA_MEMCPY2D` asks for; with pitches checked, unless `unaligned`.
    pub(crate) fn of_2d(copy: &Copy2d) -> Result<Self> {
        let end = |end: &crate::ffi::End2d| {
            let (at, host) = operand(end.memory, end.host, end.device, end.array)?;
            if at < LOWEST && copy.width > 0 && copy.height > 0 {
                return Err(Error::InvalidValue);
            }
            let pitch = match end.memory {
                ARRAY => array::place(end.array)?.1,
                _ if end.pitch == 0 => copy.width,
                _ => end.pitch,
            };
            if copy.height > 1 && pitch < copy.width {
                return Err(Error::InvalidValue);
            }
            let at =
                end.y.checked_mul(pitch).and_then(|rows| at.checked_add(rows.checked_add(end.x)? as u64));
            Ok(End { at: at.ok_or(Error::InvalidValue)?, host, pitch, slice: 0, context: 0 })
        };
        let (width, height) = (copy.width, copy.height);
        Ok(Self { dst: end(&copy.dst)?, src: end(&copy.src)?, width, height, depth: 1, staged: None })
    }

    /// The copy that a `CUDA_MEMCPY3D` asks for, or a `CUDA_MEMCPY3D_PEER`, whose ends have contexts.
    pub(crate) fn of_3d(copy: &Copy3d, peer: bool) -> Result<Self> {
        let end = |end: &crate::ffi::End3d| {
            let (at, host) = operand(end.memory, end.host, end.device, end.array)?;
            if at < LOWEST && copy.width > 0 && copy.height > 0 && copy.depth > 0 {
                return Err(Error::InvalidValue);
            }
            let (pitch, rows) = if end.memory == ARRAY {
                let (_, pitch, rows) = array::place(end.array)?;
                (pitch, rows)
            } else {
                let rows = if end.height == 0 { copy.height } else { end.height };
                (if end.pitch == 0 { copy.width } else { end.pitch }, rows)
            };
            let slice = pitch.checked_mul(rows).ok_or(Error::InvalidValue)?;
            if (copy.height > 1 && pitch < copy.width)
                || (copy.depth > 1 && rows < copy.height)
                || end.lod != 0
            {
                return Err(Error::InvalidValue);
            }
            let offset = || {
                let rows = end.y.checked_mul(pitch)?.checked_add(end.x)?;
                at.checked_add(end.z.checked_mul(slice)?.checked_add(rows)? as u64)
            };
            let at = offset().ok_or(Error::InvalidValue)?;
            Ok(End { at, host, pitch, slice, context: if peer { end.context } else { 0 } })
        };
        let (width, height, depth) = (copy.width, copy.height, copy.depth);
        Ok(Self { dst: end(&copy.dst)?, src: end(&copy.src)?, width, height, depth, staged: None })
    }

    /// The structure that says the same.
    pub(crate) fn structure(&self) -> Copy3d {
        let end = |end: &End| crate::ffi::End3d {
            x: 0,
            y: 0,
            z: 0,
            lod: 0,
            memory: if end.host { 1 } else { 2 },
            host: if end.host { end.at } else { 0 },
            device: if end.host { 0 } else { end.at },
            array: 0,
            context: 0,
            pitch: end.pitch,
            height: end.slice.checked_div(end.pitch).unwrap_or(0),
        };
        let &Self { width, height, depth, .. } = self;
        Copy3d { src: end(&self.src), dst: end(&self.dst), width, height, depth }
    }

    fn empty(&self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Copies, if all of both ends is accessible.
    pub(crate) fn run(&self, state: &State, context: u64) -> Result {
        if self.empty() {
            return Ok(());
        }
        let by = |end: &End| By::Copy(if end.context == 0 { context } else { end.context });
        // One look where nothing between the rows is missing: there may be as many rows as an allocation has bytes.
        let whole = |end: &End, need| {
            let len = usize::try_from(end.len(self)?).ok()?;
            state.reach(end.at, len, by(end), need, end.host)
        };
        let ends = [(&self.dst, READ_WRITE), (&self.src, 1)];
        let wholes = ends.map(|(end, need)| whole(end, need));
        let reach = |which: usize, y, z| {
            let (end, need) = ends[which];
            let at = end.row(y, z).ok_or(Error::IllegalAddress)?;
            let part = wholes[which].map(|whole| whole.part((at - end.at) as usize, self.width));
            part.or_else(|| state.reach(at, self.width, by(end), need, end.host)).ok_or(Error::IllegalAddress)
        };
        let rows = || (0..self.depth).flat_map(|z| (0..self.height).map(move |y| (y, z)));
        for copying in [false, true] {
            if !copying && wholes[0].is_some() && (wholes[1].is_some() || self.staged.is_some()) {
                continue;
            }
            for (y, z) in rows() {
                let dst = reach(0, y, z)?;
                match &self.staged {
                    Some(bytes) if copying => dst.write(bytes),
                    Some(_) => {}
                    None => {
                        let src = reach(1, y, z)?;
                        if copying {
                            dst.copy_from(src);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// `CU_MEMORYTYPE_ARRAY`.
const ARRAY: u32 = 3;

/// The address of an end of a pitched copy: host (1), device (2), array (3), or unified (4).
fn operand(memory: u32, host: u64, device: u64, array: u64) -> Result<(u64, bool)> {
    match memory {
        1 => Ok((host, true)),
        2 => Ok((device, false)),
        4 => Ok((device, true)),
        ARRAY => Ok((array::place(array)?.0, false)),
        _ => Err(Error::InvalidValue),
    }
}

/// Submits a copy; `waits` for it where the function is synchronous and an end is the host's.
///
/// As in the driver, pageable memory is read before an asynchronous call returns, and written before it returns.
pub(crate) fn submit(handle: u64, mut copy: Copy, waits: bool) -> Result {
    let mut state = state::lock();
    let id = state.stream(handle)?;
    for context in [copy.dst.context, copy.src.context] {
        if context != 0 && !state.contexts.contains_key(&context) {
            return Err(Error::InvalidContext);
        }
    }
    if waits {
        state.refuse_in_capture()?;
    }
    if copy.empty() {
        return Ok(());
    }
    if [copy.dst, copy.src].iter().any(|end| end.at < LOWEST || !end.is_allocated(&state, &copy)) {
        return Err(Error::InvalidValue);
    }
    // The host's, or managed: not what has a device's address where either may be.
    let reached = |state: &State, at: u64| state.is_managed(at) || state.host_span(at).is_some();
    let plain = |state: &State, end: &End| end.host && (!state.arena.has(end.at) || reached(state, end.at));
    let pageable = |state: &State, end: &End| {
        plain(state, end) && state.host_span(end.at).is_none() && !state.arena.has(end.at)
    };
    let context_of = |end: &End| if end.context == 0 { state.streams[&id].context } else { end.context };
    let host = plain(&state, &copy.dst) || plain(&state, &copy.src);
    let capturing = state.streams[&id].capture.is_some();
    let mut blocks = waits && host;
    if !capturing && !waits {
        blocks |= pageable(&state, &copy.dst);
        let is_row = copy.height == 1 && copy.depth == 1;
        // The source is staged only if the target can be written; otherwise the copy fails in stream order without reading it.
        let dst =
            state.reach(copy.dst.at, copy.width, By::Copy(context_of(&copy.dst)), READ_WRITE, copy.dst.host);
        if pageable(&state, &copy.src) && is_row && dst.is_some() && stream::may_stage(copy.width) {
            let bytes = state.reach(copy.src.at, copy.width, By::Copy(0), 1, true).map(Range::bytes);
            copy.staged = bytes.map(Arc::from);
        } else {
            blocks |= pageable(&state, &copy.src);
        }
    }
    let mark = state.submit(id, Work::Copy(copy), Vec::new())?;
    if blocks && !capturing { stream::finish(state, mark) } else { Ok(()) }
}

/// A memset of `height` rows of `width` elements.
#[derive(Clone, Debug)]
pub(crate) struct Fill {
    pub(crate) at: u64,
    pub(crate) pitch: usize,
    pub(crate) value: u32,
    /// Bytes of an element.
    pub(crate) unit: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Fill {
    /// Checks what a memset and a node of one must be.
    pub(crate) fn check(&self) -> Result {
        let aligned = self.at.is_multiple_of(self.unit as u64)
            && (self.height <= 1 || self.pitch.is_multiple_of(self.unit));
        let apart =
            self.height <= 1 || self.width.checked_mul(self.unit).is_some_and(|width| self.pitch >= width);
        if aligned && apart { Ok(()) } else { Err(Error::InvalidValue) }
    }

    /// Bytes from the first to the last that it sets, of one that is not empty.
    fn len(&self) -> Option<usize> {
        self.pitch.checked_mul(self.height - 1)?.checked_add(self.width.checked_mul(self.unit)?)
    }

    /// Sets it, if all of it is accessible.
    pub(crate) fn run(&self, state: &State, context: u64) -> Result {
        if self.width == 0 || self.height == 0 {
            return Ok(());
        }
        let by = By::Copy(context);
        let len = self.width.checked_mul(self.unit).ok_or(Error::IllegalAddress)?;
        let whole = self.len().and_then(|len| state.reach(self.at, len, by, READ_WRITE, false));
        for filling in [false, true] {
            if !filling && whole.is_some() {
                continue;
            }
            for y in 0..self.height {
                let offset = self.pitch.checked_mul(y).ok_or(Error::IllegalAddress)?;
                let row = || state.reach(self.at.checked_add(offset as u64)?, len, by, READ_WRITE, false);
                let range = whole.map(|whole| whole.part(offset, len)).or_else(row);
                let range = range.ok_or(Error::IllegalAddress)?;
                if filling {
                    range.fill(self.value, self.unit);
                }
            }
        }
        Ok(())
    }
}

/// Submits a memset; of host memory, `waits` makes it wait.
pub(crate) fn fill(handle: u64, fill: Fill, waits: bool) -> Result {
    let mut state = state::lock();
    let id = state.stream(handle)?;
    if waits {
        state.refuse_in_capture()?;
    }
    fill.check()?;
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    // A capture records any address.
    let is_recorded = state.streams.get(&id).is_some_and(|stream| stream.capture.is_some());
    let is_known = |len| fill.at >= LOWEST && state.is_allocated(fill.at, len as u64, false);
    if !is_recorded && !fill.len().is_some_and(is_known) {
        return Err(Error::InvalidValue);
    }
    let host = state.host_span(fill.at).is_some();
    let mark = state.submit(id, Work::Fill(fill), Vec::new())?;
    if waits && host { stream::finish(state, mark) } else { Ok(()) }
}
