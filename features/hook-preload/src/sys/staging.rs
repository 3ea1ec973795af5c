//! Copies between devices and plain memory of the host at the speed of pinned memory: the device copies to and from a ring of pinned
//! buffers, one after the other, and each of some threads copies between one of those and the rest.

use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::real::{Address, NOT_FOUND, call, done, found, within};
use std::ffi::c_void;
use std::mem::transmute;
use vm_hook::driver::{Context, Failure, OUT_OF_MEMORY, Range, Result};
use vm_hook::host;

/// What a buffer of the ring holds: a large page, so that no two threads wait for the same.
const BUFFER: u64 = LARGE as u64;
/// How many there are: a thread clears and fills a page of the host in the time of about ten of the device's copies.
const BUFFERS: usize = 32;
/// The most threads that copy.
const THREADS: usize = 16;
/// Pages of the host that are as large as the device's.
const LARGE: usize = 2 << 20;

/// Plain memory of the host that has what a context's device had, and the ring that brought it there.
pub(crate) struct Saved {
    mapping: usize,
    mapped: usize,
    start: usize,
    context: Context,
    ring: Mutex<Option<Ring>>,
}

impl Saved {
    /// Memory that can be had without harm to the machine.
    fn new(bytes: u64, context: Context) -> Result<Self> {
        let read = |path: &std::path::Path| std::fs::read_to_string(path).ok();
        if host::available(read).is_some_and(|available| available < bytes) {
            return Err(OUT_OF_MEMORY);
        }
        let mapped = bytes as usize + LARGE;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the system picks the place.
        let at = unsafe { libc::mmap(ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: the mapping is this function's; what is not followed only costs time.
            unsafe { libc::madvise(at, mapped, advice) };
        }
        let mapping = at as usize;
        Ok(Self { mapping, mapped, start: mapping.next_multiple_of(LARGE), context, ring: Mutex::default() })
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        // SAFETY: it is a mapping of this type's alone, and nobody has its address.
        unsafe { libc::munmap(self.mapping as *mut c_void, self.mapped) };
        if let Some(ring) = self.ring.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // What was saved is not restored, as another context's could not be: the program has not gone on.
            let _ = within(self.context, || {
                drop(ring);
                Ok(())
            });
        }
    }
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToHost,
    ToDevice,
}

/// A part of a range, in a buffer of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// Where it is in the buffer.
    at: u64,
    /// Where it is in the host's memory.
    host: u64,
    device: Address,
    bytes: u64,
}

/// Cuts ranges, each with its offset in the host's memory, into what fills one buffer after the other.
fn buffers(ranges: &[(u64, Range)], buffer: u64) -> Vec<Vec<Segment>> {
    let (mut all, mut full): (Vec<Vec<Segment>>, u64) = (Vec::new(), buffer);
    for (host, range) in ranges {
        let mut done = 0;
        while done < range.bytes {
            if full == buffer {
                all.push(Vec::new());
                full = 0;
            }
            let bytes = (range.bytes - done).min(buffer - full);
            if let Some(last) = all.last_mut() {
                last.push(Segment { at: full, host: host + done, device: range.address + done, bytes });
            }
            (done, full) = (done + bytes, full + bytes);
        }
    }
    all
}

/// Which buffers' turn it is. Buffer `n` of the whole copy is that of the ring with the rest of `n`.
struct Progress {
    state: Mutex<State>,
    /// For the threads.
    allowed: Condvar,
    /// For who gives work to the device.
    done: Condvar,
}

struct State {
    /// The threads may copy what is before.
    allowed: usize,
    /// The next one that a thread takes.
    next: usize,
    done: Vec<bool>,
    is_over: bool,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the threads copy what is before.
    fn allow(&self, before: usize) {
        self.lock().allowed = before;
        self.allowed.notify_one();
    }

    /// What a thread copies next; none when all is over.
    fn take(&self) -> Option<usize> {
        let mut state = self.lock();
        while state.next >= state.allowed.min(state.done.len()) && !state.is_over {
            state = self.allowed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let next = state.next;
        state.next += 1;
        (!state.is_over).then_some(next)
    }

    fn set_done(&self, index: usize) {
        self.lock().done[index] = true;
        self.done.notify_one();
    }

    /// Has a thread copied it?
    fn is_done(&self, index: usize) -> bool {
        self.lock().done[index]
    }

    fn wait(&self, index: usize) {
        let mut state = self.lock();
        while !state.done[index] {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Lets the threads end, however the function is left.
struct Over<'a>(&'a Progress);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.allowed.notify_all();
    }
}

/// The ring, a stream and an event for each buffer, of the current context.
#[derive(Default)]
struct Ring {
    stream: u64,
    buffers: usize,
    events: Vec<u64>,
}

impl Ring {
    fn new() -> Result<Self> {
        let mut ring = Self::default();
        // Non-blocking: no work of the program's default stream matters to it.
        done(call!(c"cuStreamCreate" (*mut u64, c_uint) (&mut ring.stream, 1)))?;
        let (mut buffers, bytes) = (ptr::null_mut::<c_void>(), BUFFER as usize * BUFFERS);
        done(call!(c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint) (&mut buffers, bytes, 0)))?;
        ring.buffers = buffers as usize;
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

    /// Gives a buffer's segments to the device to copy.
    fn copy(&self, index: usize, way: Way, segments: &[Segment]) -> Result<()> {
        for segment in segments {
            let at = (self.at(index) as u64 + segment.at) as *mut c_void;
            let (device, bytes) = (segment.device, segment.bytes as usize);
            done(match way {
                Way::ToHost => {
                    call!(c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, u64) (at, device, bytes, self.stream))
                }
                Way::ToDevice => {
                    call!(c"cuMemcpyHtoDAsync_v2" (u64, *mut c_void, usize, u64) (device, at, bytes, self.stream))
                }
            })?;
        }
        done(call!(c"cuEventRecord"(u64, u64)(self.events[index % BUFFERS], self.stream)))
    }

    /// Waits until the device has copied a buffer.
    fn wait(&self, index: usize) -> Result<()> {
        done(call!(c"cuEventSynchronize"(u64)(self.events[index % BUFFERS])))
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
fn work(progress: &Progress, ring: &Ring, way: Way, start: usize, all: &[Vec<Segment>]) {
    while let Some(index) = progress.take() {
        for segment in &all[index] {
            let (pinned, plain) = (ring.at(index) + segment.at as usize, start + segment.host as usize);
            let (from, to) = if way == Way::ToHost { (pinned, plain) } else { (plain, pinned) };
            let (from, to, bytes) = (from as *const u8, to as *mut u8, segment.bytes as usize);
            let copy = if way == Way::ToHost { copy_past_caches } else { ptr::copy_nonoverlapping };
            // SAFETY: both are mappings that outlive the thread; no other thread has this buffer or this part of the plain memory, and the device,
            // which is waited for, has other buffers.
            unsafe { copy(from, to, bytes) };
        }
        progress.set_done(index);
    }
}

/// Copies all ranges, each with its offset in the host's memory.
fn transfer(ring: &Ring, way: Way, start: usize, ranges: &[(u64, Range)]) -> Result<()> {
    let all = buffers(ranges, BUFFER);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let allowed = if way == Way::ToDevice { BUFFERS } else { 0 };
    let state = State { allowed, next: 0, done: vec![false; all.len()], is_over: false };
    let progress = Progress { state: Mutex::new(state), allowed: Condvar::new(), done: Condvar::new() };
    std::thread::scope(|scope| {
        let _over = Over(&progress);
        for number in 0..threads {
            let (progress, all) = (&progress, all.as_slice());
            let copy = move || work(progress, ring, way, start, all);
            let name = format!("vmhook-copy-{number}");
            if std::thread::Builder::new().name(name).spawn_scoped(scope, copy).is_err() && number == 0 {
                return Err(OUT_OF_MEMORY);
            }
        }
        // What the device was given, and what it has copied: both in order.
        let (mut given, mut copied) = (0usize, 0usize);
        while copied < all.len() {
            // What must be done before the next one is given: to the host, the buffer emptied; to the device, it filled.
            let before = match way {
                Way::ToHost => given.checked_sub(BUFFERS),
                Way::ToDevice => Some(given),
            };
            if given < all.len() && before.is_none_or(|before| progress.is_done(before)) {
                ring.copy(given, way, &all[given])?;
                given += 1;
            } else if copied < given {
                ring.wait(copied)?;
                copied += 1;
                progress.allow(if way == Way::ToHost { copied } else { copied + BUFFERS });
            } else if let Some(before) = before {
                progress.wait(before);
            }
        }
        (0..all.len()).for_each(|index| progress.wait(index));
        Ok(())
    })
}

/// Copies what is at ranges of the current context to the host, one behind the other.
pub(super) fn save(context: Context, ranges: &[Range]) -> Result<Saved> {
    let mut saved = Saved::new(ranges.iter().map(|range| range.bytes).sum(), context)?;
    let mut next = 0;
    let placed = ranges.iter().map(|range| {
        next += range.bytes;
        (next - range.bytes, *range)
    });
    let placed: Vec<(u64, Range)> = placed.collect();
    let ring = Ring::new()?;
    transfer(&ring, Way::ToHost, saved.start, &placed)?;
    saved.ring = Mutex::new(Some(ring));
    Ok(saved)
}

/// Copies it back.
pub(super) fn restore(saved: &Saved, ranges: &[(u64, Range)]) -> Result<()> {
    let fits = |(host, range): &(u64, Range)| {
        host.checked_add(range.bytes).is_some_and(|end| end <= (saved.mapped - LARGE) as u64)
    };
    if !ranges.iter().all(fits) {
        return Err(Failure(NOT_FOUND));
    }
    let kept = saved.ring.lock().unwrap_or_else(PoisonError::into_inner).take();
    let ring = match kept {
        Some(ring) => ring,
        None => Ring::new()?,
    };
    transfer(&ring, Way::ToDevice, saved.start, ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_fill_buffers() {
        let check = |sizes: &[u64], buffer: u64| {
            let (mut host, mut ranges) = (0, Vec::new());
            for (at, bytes) in sizes.iter().enumerate() {
                ranges.push((host, Range { address: 1000 * (at as u64 + 1), bytes: *bytes }));
                // With a hole behind each.
                host += bytes + 3;
            }
            let all = buffers(&ranges, buffer);
            assert_eq!(all.len() as u64, sizes.iter().sum::<u64>().div_ceil(buffer));
            let mut copied = Vec::new();
            for segments in &all {
                let mut filled = 0;
                for segment in segments {
                    assert_eq!(segment.at, filled);
                    filled += segment.bytes;
                    copied.extend((0..segment.bytes).map(|at| (segment.host + at, segment.device + at)));
                }
                assert!(filled <= buffer);
            }
            let bytes = ranges
                .iter()
                .flat_map(|(host, range)| (0..range.bytes).map(move |at| (host + at, range.address + at)));
            assert!(copied.into_iter().eq(bytes), "{sizes:?} {buffer}");
        };
        check(&[], 4);
        check(&[4], 4);
        check(&[9, 1, 1, 1, 30], 8);
        check(&[1; 20], 7);
        check(&[100], 16);
    }
}
