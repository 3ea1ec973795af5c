//! Copies between devices and plain memory of the host at the speed of pinned memory: the device copies to and from a ring of pinned
//! buffers, and threads copy between those and the rest.

use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::{Condvar, Mutex, PoisonError};

use super::real::{Address, NOT_FOUND, call, done, found};
use std::ffi::c_void;
use std::mem::transmute;
use vm_hook::driver::{Failure, OUT_OF_MEMORY, Range, Result};
use vm_hook::host;

/// What a buffer of the ring holds.
const BUFFER: u64 = 16 << 20;
/// How many there are.
const BUFFERS: usize = 4;
/// The most threads that copy.
const THREADS: usize = 8;
/// Pages of the host that are as large as the device's.
const LARGE: usize = 2 << 20;

/// Plain memory of the host that has what devices had.
pub(crate) struct Saved {
    mapping: usize,
    mapped: usize,
    start: usize,
}

impl Saved {
    /// Memory that can be had without harm to the machine.
    fn new(bytes: u64) -> Result<Self> {
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
        Ok(Self { mapping, mapped, start: mapping.next_multiple_of(LARGE) })
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        // SAFETY: it is a mapping of this type's alone, and nobody has its address.
        unsafe { libc::munmap(self.mapping as *mut c_void, self.mapped) };
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

/// The part of a segment that one of several threads copies: where in the buffer, where in the host's memory, and how much.
fn share(segment: &Segment, part: u64, parts: u64, buffer: u64) -> Option<(u64, u64, u64)> {
    let stripe = buffer.div_ceil(parts);
    let (from, to) = (segment.at.max(part * stripe), (segment.at + segment.bytes).min((part + 1) * stripe));
    (from < to).then(|| (from, segment.host + (from - segment.at), to - from))
}

/// How far the threads may go, and how far each of them is.
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    allowed: usize,
    done: Vec<usize>,
    is_over: bool,
}

impl Progress {
    fn update(&self, f: impl FnOnce(&mut State)) {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits until something holds, or all is over: then false.
    fn wait(&self, holds: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !holds(&state) && !state.is_over {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.is_over
    }
}

/// Lets the threads end, however the function is left.
struct Over<'a>(&'a Progress);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.update(|state| state.is_over = true);
    }
}

/// The ring, a stream and an event for each buffer, of the current context.
#[derive(Default)]
struct Ring {
    stream: u64,
    buffers: Vec<usize>,
    events: Vec<u64>,
}

impl Ring {
    fn new() -> Result<Self> {
        let mut ring = Self::default();
        // Non-blocking: no work of the program's default stream matters to it.
        done(call!(c"cuStreamCreate" (*mut u64, c_uint) (&mut ring.stream, 1)))?;
        for _ in 0..BUFFERS {
            let (mut buffer, mut event) = (ptr::null_mut::<c_void>(), 0u64);
            done(
                call!(c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint) (&mut buffer, BUFFER as usize, 0)),
            )?;
            ring.buffers.push(buffer as usize);
            // CU_EVENT_DISABLE_TIMING
            done(call!(c"cuEventCreate" (*mut u64, c_uint) (&mut event, 2)))?;
            ring.events.push(event);
        }
        Ok(ring)
    }

    /// Gives a buffer's segments to the device to copy.
    fn copy(&self, slot: usize, way: Way, segments: &[Segment]) -> Result<()> {
        for segment in segments {
            let at = (self.buffers[slot] as u64 + segment.at) as *mut c_void;
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
        done(call!(c"cuEventRecord"(u64, u64)(self.events[slot], self.stream)))
    }

    /// Waits until the device has copied a buffer.
    fn wait(&self, slot: usize) -> Result<()> {
        done(call!(c"cuEventSynchronize"(u64)(self.events[slot])))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // What is left of a copy that failed must not write to what is freed.
        let _ = call!(c"cuStreamSynchronize"(u64)(self.stream));
        for event in &self.events {
            let _ = call!(c"cuEventDestroy_v2"(u64)(*event));
        }
        for buffer in &self.buffers {
            let _ = call!(c"cuMemFreeHost" (*mut c_void) (*buffer as *mut c_void));
        }
        if self.stream != 0 {
            let _ = call!(c"cuStreamDestroy_v2"(u64)(self.stream));
        }
    }
}

/// Copies all ranges, each with its offset in the host's memory.
fn transfer(way: Way, start: usize, ranges: &[(u64, Range)]) -> Result<()> {
    let all = buffers(ranges, BUFFER);
    let ring = Ring::new()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let allowed = if way == Way::ToDevice { BUFFERS } else { 0 };
    let progress = Progress {
        state: Mutex::new(State { allowed, done: vec![0; threads], is_over: false }),
        changed: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let _over = Over(&progress);
        for part in 0..threads {
            let (progress, all, ring) = (&progress, &all, &ring);
            let work = move || {
                for (index, segments) in all.iter().enumerate() {
                    if !progress.wait(|state| state.allowed > index) {
                        return;
                    }
                    let buffer = ring.buffers[index % BUFFERS];
                    for segment in segments {
                        let Some((at, host, bytes)) = share(segment, part as u64, threads as u64, BUFFER)
                        else {
                            continue;
                        };
                        let (pinned, plain) = (buffer + at as usize, start + host as usize);
                        let (from, to) = if way == Way::ToHost { (pinned, plain) } else { (plain, pinned) };
                        // SAFETY: both are mappings that outlive this scope; no other thread has this share, and the device, which the ring waits
                        // for, has another buffer.
                        unsafe { ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes as usize) };
                    }
                    progress.update(|state| state.done[part] = index + 1);
                }
            };
            let name = format!("vmhook-copy-{part}");
            if std::thread::Builder::new().name(name).spawn_scoped(scope, work).is_err() {
                return Err(OUT_OF_MEMORY);
            }
        }
        let wait = |index: usize| {
            progress.wait(|state| state.done.iter().all(|done| *done > index));
        };
        match way {
            Way::ToHost => {
                let mut given = 0;
                for index in 0..all.len() {
                    while given < all.len() && given < index + BUFFERS {
                        if let Some(before) = given.checked_sub(BUFFERS) {
                            wait(before);
                        }
                        ring.copy(given % BUFFERS, way, &all[given])?;
                        given += 1;
                    }
                    ring.wait(index % BUFFERS)?;
                    progress.update(|state| state.allowed = index + 1);
                }
                if let Some(last) = all.len().checked_sub(1) {
                    wait(last);
                }
            }
            Way::ToDevice => {
                for (index, segments) in all.iter().enumerate() {
                    wait(index);
                    ring.copy(index % BUFFERS, way, segments)?;
                    // The device has one buffer to go on with; the threads fill the others.
                    if let Some(before) = index.checked_sub(1) {
                        ring.wait(before % BUFFERS)?;
                        progress.update(|state| state.allowed = before + 1 + BUFFERS);
                    }
                }
                done(call!(c"cuStreamSynchronize"(u64)(ring.stream)))?;
            }
        }
        Ok(())
    })
}

/// Copies what is at ranges of the current context to the host, one behind the other.
pub(super) fn save(ranges: &[Range]) -> Result<Saved> {
    let saved = Saved::new(ranges.iter().map(|range| range.bytes).sum())?;
    let mut next = 0;
    let placed = ranges.iter().map(|range| {
        next += range.bytes;
        (next - range.bytes, *range)
    });
    let placed: Vec<(u64, Range)> = placed.collect();
    transfer(Way::ToHost, saved.start, &placed)?;
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
    transfer(Way::ToDevice, saved.start, ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_fill_buffers_and_threads_share_them() {
        let check = |sizes: &[u64], buffer: u64, parts: u64| {
            let (mut host, mut ranges) = (0, Vec::new());
            for (at, bytes) in sizes.iter().enumerate() {
                ranges.push((host, Range { address: 1000 * (at as u64 + 1), bytes: *bytes }));
                // With a hole behind each.
                host += bytes + 3;
            }
            let all = buffers(&ranges, buffer);
            assert_eq!(all.len() as u64, sizes.iter().sum::<u64>().div_ceil(buffer));
            let mut copied = std::collections::BTreeMap::new();
            for segments in &all {
                let mut filled = vec![false; buffer as usize];
                for segment in segments {
                    for (at, host, bytes) in (0..parts).filter_map(|part| share(segment, part, parts, buffer))
                    {
                        for byte in 0..bytes {
                            assert!(!std::mem::replace(&mut filled[(at + byte) as usize], true));
                            let device = segment.device + (at + byte - segment.at);
                            assert!(copied.insert(host + byte, device).is_none());
                        }
                    }
                }
            }
            let expected = ranges
                .iter()
                .flat_map(|(host, range)| (0..range.bytes).map(move |at| (host + at, range.address + at)));
            assert!(copied.into_iter().eq(expected), "{sizes:?} {buffer} {parts}");
        };
        for parts in 1..6 {
            check(&[], 4, parts);
            check(&[4], 4, parts);
            check(&[9, 1, 1, 1, 30], 8, parts);
            check(&[1; 20], 7, parts);
            check(&[100], 16, parts);
        }
    }
}
