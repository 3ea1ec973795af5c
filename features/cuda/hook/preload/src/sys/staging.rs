//! Copies between devices and memory of the host at the speed of page-locked memory: what the process has reserved of that the device copies to
//! and from itself; plain memory it reaches through a ring of page-locked buffers, one after the other, each of which some threads fill or empty.

use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use super::plain::{LARGE, Plain};
use super::real::{Address, NOT_FOUND, call, done, found, within};
use super::reserve::{self, Part};
use crate::hook;
use vm_hook::driver::{Context, Failure, OUT_OF_MEMORY, Range, Result};

/// What a buffer of the ring holds: a large page, so that no two threads wait for the same.
const BUFFER: u64 = LARGE as u64;
/// How many there are: a thread clears and fills a page of the host in the time of about ten of the device's copies.
const BUFFERS: usize = 32;
/// The most threads that copy.
const THREADS: usize = 16;
/// What the device copies at once without a buffer: enough for its full speed, and little for a buffer that waits behind it.
const STRAIGHT: u64 = 8 << 20;
/// How many such copies it is given ahead where some go through buffers. Otherwise it is as many as it has events: they last for the milliseconds
/// that the driver may keep other calls waiting in which it maps memory.
const AHEAD: usize = 4;

/// `CUDA_ERROR_UNKNOWN`.
const UNKNOWN: u32 = 999;

/// Memory of the host that has what a context's device had, and the ring that brought it there.
pub(crate) struct Saved {
    parts: Vec<Part>,
    /// What the parts have no room for.
    plain: Option<Plain>,
    places: Vec<Place>,
    context: Context,
    ring: Mutex<Option<Ring>>,
}

/// Where what was saved is, up to an offset.
#[derive(Clone, Copy, Debug)]
struct Place {
    end: u64,
    bytes: u64,
    host: usize,
    is_straight: bool,
}

impl Saved {
    fn new(bytes: u64, context: Context) -> Result<Self> {
        let parts = reserve::lend(bytes);
        let mut saved = Self { parts, plain: None, places: Vec::new(), context, ring: Mutex::default() };
        let mut left = bytes;
        for part in &saved.parts {
            let bytes = part.bytes.min(left);
            left -= bytes;
            saved.places.push(Place { end: 0, bytes, host: part.start(), is_straight: true });
        }
        if left != 0 {
            let plain = saved.plain.insert(Plain::new(left)?);
            saved.places.push(Place { end: 0, bytes: left, host: plain.start(), is_straight: false });
        }
        let mut end = 0;
        for place in &mut saved.places {
            end += place.bytes;
            place.end = end;
        }
        Ok(saved)
    }

    /// What was restored needs page-locked memory no more.
    pub(crate) fn give_back(&mut self) {
        reserve::take_back(&mut self.parts);
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        if let Some(ring) = self.ring.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // What was saved is not restored, as another context's could not be: the program has not gone on.
            let _ = within(self.context, || {
                drop(ring);
                Ok(())
            });
        }
        self.give_back();
    }
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToHost,
    ToDevice,
}

/// What is copied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    host: usize,
    device: Address,
    bytes: usize,
    is_straight: bool,
}

/// Cuts a range, whose contents are from an offset on, into what is copied at once.
fn cut(places: &[Place], mut offset: u64, range: Range) -> Result<Vec<Chunk>> {
    let (mut chunks, mut done) = (Vec::new(), 0);
    while done < range.bytes {
        let at = places.partition_point(|place| place.end <= offset);
        let place = places.get(at).ok_or(Failure(NOT_FOUND))?;
        let most = if place.is_straight { STRAIGHT } else { BUFFER };
        let bytes = (range.bytes - done).min(place.end - offset).min(most);
        let host = place.host + (offset + place.bytes - place.end) as usize;
        let (device, is_straight) = (range.address + done, place.is_straight);
        chunks.push(Chunk { host, device, bytes: bytes as usize, is_straight });
        (offset, done) = (offset + bytes, done + bytes);
    }
    Ok(chunks)
}

/// How far a copy is. What goes through the ring has its turns: chunk `n` that of the buffer with the rest of `n`.
struct Progress {
    way: Way,
    /// The most copies without a buffer that the device has.
    straight: usize,
    state: Mutex<State>,
    /// For the threads.
    allowed: Condvar,
    /// For who gives work to the device.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    straight: VecDeque<Chunk>,
    /// What goes through the ring, and whether a thread has copied it.
    staged: Vec<(Chunk, bool)>,
    /// The next one that a thread takes.
    next: usize,
    /// So many of them the device has copied.
    copied: usize,
    /// Does nothing else come?
    is_whole: bool,
    is_over: bool,
}

/// What the device is given next.
enum Step {
    Staged(Chunk),
    Straight(Chunk),
    /// Nothing, before it has copied the first that it has.
    Wait,
    End,
}

impl Progress {
    fn new(way: Way, saved: &Saved) -> Self {
        let straight = if saved.plain.is_some() { AHEAD } else { BUFFERS };
        Self { way, straight, state: Mutex::default(), allowed: Condvar::new(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        f(&mut self.lock());
        self.allowed.notify_all();
        self.changed.notify_one();
    }

    /// Lets more be copied.
    fn push(&self, chunks: Vec<Chunk>) {
        self.change(|state| {
            for chunk in chunks {
                match chunk.is_straight {
                    true => state.straight.push_back(chunk),
                    false => state.staged.push((chunk, false)),
                }
            }
        });
    }

    /// A thread has copied a chunk.
    fn set_done(&self, index: usize) {
        self.lock().staged[index].1 = true;
        self.changed.notify_one();
    }

    /// The device has copied the next that is staged.
    fn set_copied(&self) {
        self.lock().copied += 1;
        self.allowed.notify_one();
    }

    /// What a thread copies next; none when all is over.
    fn take(&self) -> Option<(usize, Chunk)> {
        let mut state = self.lock();
        loop {
            let allowed = state.copied + if self.way == Way::ToDevice { BUFFERS } else { 0 };
            let next = state.next;
            match state.staged.get(next).filter(|_| next < allowed) {
                _ if state.is_over => return None,
                Some((chunk, _)) => {
                    let chunk = *chunk;
                    state.next += 1;
                    return Some((next, chunk));
                }
                None => state = self.allowed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// What the device is given behind so many staged chunks, while it has so many copies.
    fn step(&self, given: usize, ahead: usize) -> Step {
        let mut state = self.lock();
        loop {
            // To the host, a buffer must have been emptied; to the device, filled.
            let before = if self.way == Way::ToHost { given.checked_sub(BUFFERS) } else { Some(given) };
            let is_ready = before.is_none_or(|before| state.staged.get(before).is_some_and(|of| of.1));
            if state.is_over {
                return Step::End;
            } else if let Some((chunk, _)) = state.staged.get(given).filter(|_| is_ready && ahead < BUFFERS) {
                return Step::Staged(*chunk);
            } else if ahead < self.straight
                && let Some(chunk) = state.straight.pop_front()
            {
                return Step::Straight(chunk);
            } else if ahead != 0 {
                return Step::Wait;
            } else if state.is_whole
                && given == state.staged.len()
                && state.staged.iter().rev().take(BUFFERS).all(|of| of.1)
            {
                return Step::End;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Lets all end, however the function is left.
struct Over<'a>(&'a Progress);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.is_over = true);
    }
}

/// A stream, an event for each copy that it has, and the buffers, of the current context.
#[derive(Default)]
struct Ring {
    stream: u64,
    buffers: usize,
    events: Vec<u64>,
}

impl Ring {
    fn new(has_buffers: bool) -> Result<Self> {
        let mut ring = Self::default();
        // Non-blocking: no work of the program's default stream matters to it.
        done(call!(c"cuStreamCreate" (*mut u64, c_uint) (&mut ring.stream, 1)))?;
        if has_buffers {
            let (mut buffers, bytes) = (ptr::null_mut::<c_void>(), BUFFER as usize * BUFFERS);
            done(call!(c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint) (&mut buffers, bytes, 0)))?;
            ring.buffers = buffers as usize;
        }
        for _ in 0..BUFFERS {
            let mut event = 0u64;
            // CU_EVENT_DISABLE_TIMING
            done(call!(c"cuEventCreate" (*mut u64, c_uint) (&mut event, 2)))?;
            ring.events.push(event);
        }
        Ok(ring)
    }

    /// Where a buffer is.
    fn at(&self, index: usize) -> usize {
        self.buffers + index % BUFFERS * BUFFER as usize
    }

    /// Gives the device a copy, which is counted.
    fn copy(&self, count: usize, way: Way, host: usize, chunk: Chunk) -> Result<()> {
        let (host, Chunk { device, bytes, .. }) = (host as *mut c_void, chunk);
        done(match way {
            Way::ToHost => {
                call!(c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, u64) (host, device, bytes, self.stream))
            }
            Way::ToDevice => {
                call!(c"cuMemcpyHtoDAsync_v2" (u64, *mut c_void, usize, u64) (device, host, bytes, self.stream))
            }
        })?;
        done(call!(c"cuEventRecord"(u64, u64)(self.events[count % BUFFERS], self.stream)))
    }

    /// Waits until the device has made a copy.
    fn wait(&self, count: usize) -> Result<()> {
        done(call!(c"cuEventSynchronize"(u64)(self.events[count % BUFFERS])))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // What is left of a copy that failed must not write to what is freed.
        let _ = call!(c"cuStreamSynchronize"(u64)(self.stream));
        for event in &self.events {
            let _ = call!(c"cuEventDestroy_v2"(u64)(*event));
        }
        if self.buffers != 0 {
            let _ = call!(c"cuMemFreeHost" (*mut c_void) (self.buffers as *mut c_void));
        }
        if self.stream != 0 {
            let _ = call!(c"cuStreamDestroy_v2"(u64)(self.stream));
        }
    }
}

/// Copies what is not read again soon: without caches, which would read it first.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_past_caches(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = size_of::<[__m128i; 4]>();
    let whole = if to.align_offset(align_of::<__m128i>()) == 0 { bytes / LINE * LINE } else { 0 };
    for at in (0..whole).step_by(LINE) {
        let (from, to) = (from.wrapping_add(at).cast::<__m128i>(), to.wrapping_add(at).cast::<__m128i>());
        // SAFETY: the line is in bounds, by the caller's promise.
        let line = [0, 1, 2, 3].map(|part| unsafe { _mm_loadu_si128(from.wrapping_add(part)) });
        for (part, one) in line.into_iter().enumerate() {
            // SAFETY: so it is, and it is aligned.
            unsafe { _mm_stream_si128(to.wrapping_add(part), one) };
        }
    }
    // SAFETY: all of x86-64 have it.
    unsafe { _mm_sfence() };
    // SAFETY: the rest of what the caller promises.
    unsafe { ptr::copy_nonoverlapping(from.wrapping_add(whole), to.wrapping_add(whole), bytes - whole) };
}

#[cfg(not(target_arch = "x86_64"))]
use std::ptr::copy_nonoverlapping as copy_past_caches;

/// A thread that copies between the ring and plain memory.
fn work(progress: &Progress, ring: &Ring) {
    while let Some((index, chunk)) = progress.take() {
        let (pinned, plain) = (ring.at(index), chunk.host);
        let (from, to) = if progress.way == Way::ToHost { (pinned, plain) } else { (plain, pinned) };
        let copy = if progress.way == Way::ToHost { copy_past_caches } else { ptr::copy_nonoverlapping };
        // SAFETY: both are mappings that outlive the thread; no other thread has this buffer or this part of the plain memory, and the device,
        // which is waited for, has other buffers.
        unsafe { copy(from as *const u8, to as *mut u8, chunk.bytes) };
        progress.set_done(index);
    }
}

/// Copies what comes, in the current context.
fn transfer(progress: &Progress, ring: &Ring) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    std::thread::scope(|scope| {
        let _over = Over(progress);
        for number in 0..if ring.buffers == 0 { 0 } else { threads } {
            let name = format!("vmhook-copy-{number}");
            let started = Builder::new().name(name).spawn_scoped(scope, || work(progress, ring));
            if started.is_err() && number == 0 {
                return Err(OUT_OF_MEMORY);
            }
        }
        // What the device has, in order: is it staged?
        let mut ahead: VecDeque<bool> = VecDeque::new();
        let (mut count, mut given) = (0, 0);
        loop {
            let (host, chunk) = match progress.step(given, ahead.len()) {
                Step::Staged(chunk) => (ring.at(given), chunk),
                Step::Straight(chunk) => (chunk.host, chunk),
                Step::Wait => {
                    ring.wait(count - ahead.len())?;
                    if ahead.pop_front() == Some(true) {
                        progress.set_copied();
                    }
                    continue;
                }
                Step::End => return Ok(()),
            };
            ring.copy(count, progress.way, host, chunk)?;
            count += 1;
            given += usize::from(!chunk.is_straight);
            ahead.push_back(!chunk.is_straight);
        }
    })
}

/// Copies what is at ranges of the current context to the host, one behind the other.
pub(super) fn save(context: Context, ranges: &[Range]) -> Result<Saved> {
    let mut saved = Saved::new(ranges.iter().map(|range| range.bytes).sum(), context)?;
    let (progress, mut offset) = (Progress::new(Way::ToHost, &saved), 0);
    for range in ranges {
        progress.push(cut(&saved.places, offset, *range)?);
        offset += range.bytes;
    }
    progress.change(|state| state.is_whole = true);
    let ring = Ring::new(saved.plain.is_some())?;
    transfer(&progress, &ring)?;
    saved.ring = Mutex::new(Some(ring));
    Ok(saved)
}

/// Copies it back to ranges as they come, by a thread.
pub(super) fn restore(
    context: Context,
    saved: &Saved,
    mut ranges: impl Iterator<Item = Result<(u64, Range)>>,
) -> Result<()> {
    let progress = &Progress::new(Way::ToDevice, saved);
    let copy = || {
        let _over = Over(progress);
        let kept = saved.ring.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ring = kept.map_or_else(|| Ring::new(saved.plain.is_some()), Ok)?;
        transfer(progress, &ring)
    };
    std::thread::scope(|scope| {
        let over = Over(progress);
        let thread = Builder::new().name("vmhook-copy".into());
        let thread = thread.spawn_scoped(scope, || hook::inside(|| within(context, copy)));
        let thread = thread.map_err(|_| OUT_OF_MEMORY)?;
        let come = ranges.try_for_each(|next| {
            let (offset, range) = next?;
            progress.push(cut(&saved.places, offset, range)?);
            Ok(())
        });
        match come {
            Ok(()) => progress.change(|state| state.is_whole = true),
            Err(_) => drop(over),
        }
        come.and(thread.join().unwrap_or(Err(Failure(UNKNOWN))))
    })
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_and_in_one_place() {
        let check = |sizes: &[(u64, bool)], ranges: &[u64]| {
            let (mut places, mut end) = (Vec::new(), 0);
            for (bytes, is_straight) in sizes.iter().copied() {
                end += bytes;
                // With a gap before each.
                places.push(Place { end, bytes, host: (end * 3) as usize, is_straight });
            }
            let mut offset = 0;
            for bytes in ranges.iter().copied() {
                let chunks = cut(&places, offset, Range { address: 7, bytes }).expect("places");
                let mut done = 0;
                for chunk in &chunks {
                    let within = |place: &&Place| {
                        chunk.host >= place.host
                            && chunk.host + chunk.bytes <= place.host + place.bytes as usize
                    };
                    let place = places.iter().find(within).expect("one place");
                    let at = place.end - place.bytes + (chunk.host - place.host) as u64;
                    assert_eq!((at, chunk.device), (offset + done, 7 + done));
                    let most = if place.is_straight { STRAIGHT } else { BUFFER };
                    assert!(chunk.is_straight == place.is_straight && chunk.bytes as u64 <= most);
                    done += chunk.bytes as u64;
                }
                assert_eq!(done, bytes, "{sizes:?} {ranges:?}");
                offset += bytes;
            }
            assert_eq!(cut(&places, end, Range { address: 7, bytes: 1 }), Err(Failure(NOT_FOUND)));
        };
        let large = 2 << 20;
        check(&[], &[]);
        check(&[(9 * large, false)], &[large, 3 * large, 5 * large]);
        check(&[(9 * large, true)], &[9 * large]);
        check(&[(5 * large, true), (6 * large, true), (3 * large, false)], &[large, 12 * large, large]);
    }
}
