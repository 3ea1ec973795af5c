//! Code memory, and calls into it.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use crate::fault::{self, Function};

/// Machine code in memory of its own, written once and then only executed.
#[derive(Debug)]
pub(crate) struct Code {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is never written after it is made.
unsafe impl Send for Code {}
// SAFETY: as above.
unsafe impl Sync for Code {}

impl Code {
    /// Puts `code` into memory.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn new(code: &[u8]) -> io::Result<Code> {
        let bytes = code.len().next_multiple_of(4096);
        // SAFETY: a new anonymous mapping, at no address in particular.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let made = Code { base, bytes };
        // SAFETY: the mapping is writable, at least as long as the code, and nobody else knows it.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), base.as_ptr(), code.len()) };
        // SAFETY: it is this mapping, all of it.
        unsafe { mprotect(base.as_ptr().cast(), bytes, MprotectFlags::READ | MprotectFlags::EXEC) }?;
        #[cfg(target_arch = "aarch64")]
        made.flush();
        Ok(made)
    }

    /// Makes what was written visible to the fetching of instructions.
    #[cfg(target_arch = "aarch64")]
    fn flush(&self) {
        let (start, end) = (self.base.as_ptr() as usize, self.base.as_ptr() as usize + self.bytes);
        for line in (start..end).step_by(16) {
            // SAFETY: the line lies in this mapping.
            unsafe { std::arch::asm!("dc cvau, {0}", "ic ivau, {0}", in(reg) line) };
        }
        // SAFETY: a barrier.
        unsafe { std::arch::asm!("dsb ish", "isb") };
    }

    /// Runs the blocks from `first` up to `end` by the function at `entry`: where it touched what of `memory` may not be accessed, if
    /// it did.
    ///
    /// # Safety
    /// `entry` lies within the code. There is what a compiler made for this interface; `params` is the block of parameters
    /// that it was made for, with arguments that it admits, of which pages of `memory` may be missing; `scratch` has as many bytes as it
    /// asks for; no number in `grid` is 0. The handler of faults knows of `memory`.
    #[expect(clippy::too_many_arguments)]
    pub(crate) unsafe fn call(
        &self,
        entry: usize,
        params: &[u64],
        grid: &[u32; 3],
        first: u64,
        end: u64,
        scratch: &mut Scratch,
        memory: Option<&Range<u64>>,
    ) -> Option<u64> {
        // SAFETY: `entry` lies within.
        let at = unsafe { self.base.as_ptr().add(entry) };
        // SAFETY: the code has this interface, as the caller promises.
        let function: Function = unsafe { std::mem::transmute::<*mut u8, Function>(at) };
        let (params, grid, scratch) = (params.as_ptr().cast(), &raw const *grid, scratch.base.as_ptr());
        let Some(memory) = memory else {
            // SAFETY: as the caller promises.
            unsafe { function(params, grid, first, end, scratch) };
            return None;
        };
        let start = self.base.as_ptr() as u64;
        let code = start..start + self.bytes as u64;
        // SAFETY: as the caller promises.
        unsafe { fault::call(function, code, memory.clone(), params, grid, first, end, scratch) }
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no call borrows it any more.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) } {
            tracing::warn!(%error, "code memory could not be unmapped");
        }
    }
}

/// Scratch memory of one thread, aligned to pages. It grows and is reused. Its mapping also contains the areas below it that
/// [`vm_abi::SCRATCH_AREA`] describes, and a guard after it:
///
/// ```text
/// zeros (read-only) | sink | guard | scratch memory | guard
/// ```
#[derive(Debug)]
pub(crate) struct Scratch {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is this value's own.
unsafe impl Send for Scratch {}

/// Bytes of each area.
const AREA: usize = vm_abi::SCRATCH_AREA as usize;
/// Bytes below the scratch memory.
const BELOW: usize = vm_abi::SCRATCH_ZEROS as usize;
/// A multiple of the page sizes of all supported processors.
const PAGES: usize = 64 << 10;

const _: () = assert!(AREA.is_multiple_of(PAGES) && BELOW == 3 * AREA);

impl Scratch {
    /// Maps nothing.
    pub(crate) const fn new() -> Scratch {
        Scratch { base: NonNull::dangling(), bytes: 0 }
    }

    /// Makes it at least this large. Its contents are lost if it grows.
    ///
    /// # Errors
    /// Memory cannot be mapped.
    pub(crate) fn reserve(&mut self, bytes: usize) -> io::Result<()> {
        if self.bytes > 0 && bytes <= self.bytes {
            return Ok(());
        }
        let bytes = bytes.max(1).checked_next_multiple_of(PAGES);
        let bytes = bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let whole = bytes.checked_add(BELOW + AREA).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new anonymous mapping, at no address in particular.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        // SAFETY: the mapping is longer than that.
        let base = unsafe { start.cast::<u8>().add(BELOW) };
        self.release();
        (self.base, self.bytes) = (NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?, bytes);
        let allow = |below: u32, bytes: usize, flags| {
            // SAFETY: the mapping begins `BELOW` bytes below `base`, and `below` is at most that.
            let part = unsafe { base.sub(below as usize) };
            // SAFETY: the part lies in the mapping, to which no other pointer exists.
            unsafe { mprotect(part.cast(), bytes, flags) }
        };
        let allowed = allow(vm_abi::SCRATCH_ZEROS, AREA, MprotectFlags::READ)
            .and_then(|()| allow(vm_abi::SCRATCH_SINK, AREA, MprotectFlags::READ | MprotectFlags::WRITE))
            .and_then(|()| allow(0, bytes, MprotectFlags::READ | MprotectFlags::WRITE));
        if allowed.is_err() {
            self.release();
        }
        Ok(allowed?)
    }

    fn release(&mut self) {
        if self.bytes > 0 {
            let whole = self.bytes + BELOW + AREA;
            // SAFETY: the mapping begins there.
            let start = unsafe { self.base.as_ptr().sub(BELOW) };
            // SAFETY: it is the whole mapping. It is unmapped once, since `base` and `bytes` are reset below.
            if let Err(error) = unsafe { munmap(start.cast(), whole) } {
                tracing::warn!(%error, "scratch memory could not be unmapped");
            }
        }
        (self.base, self.bytes) = (NonNull::dangling(), 0);
    }
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.release();
    }
}

/// The control register of floats.
#[cfg(target_arch = "x86_64")]
type Modes = u32;
#[cfg(target_arch = "aarch64")]
type Modes = u64;

/// As every thread of Rust has them: rounding to nearest, subnormals kept, no traps.
const MODES: Modes = if cfg!(target_arch = "x86_64") { 0x1f80 } else { 0 };

#[cfg(target_arch = "x86_64")]
fn modes() -> Modes {
    let mut modes = 0;
    // SAFETY: it stores the register to a number of ours.
    unsafe { std::arch::asm!("stmxcsr [{0}]", in(reg) &raw mut modes, options(nostack, preserves_flags)) };
    modes
}

#[cfg(target_arch = "aarch64")]
fn modes() -> Modes {
    let modes;
    // SAFETY: it reads the register.
    unsafe { std::arch::asm!("mrs {0}, fpcr", out(reg) modes, options(nomem, nostack, preserves_flags)) };
    modes
}

#[cfg(target_arch = "x86_64")]
fn set(modes: Modes) {
    // SAFETY: no bit is set that is reserved: the value is ours, or was in the register.
    unsafe { std::arch::asm!("ldmxcsr [{0}]", in(reg) &raw const modes, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn set(modes: Modes) {
    // SAFETY: as above.
    unsafe { std::arch::asm!("msr fpcr, {0}", in(reg) modes, options(nostack, preserves_flags)) };
}

/// While it lives, this thread computes floats as ours do; then as it did.
struct Floats(Modes);

impl Floats {
    fn ours() -> Floats {
        let before = modes();
        if before != MODES {
            set(MODES);
        }
        Floats(before)
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        // On x86-64 it has what was signalled, too, which a kernel may have changed.
        set(self.0);
    }
}

thread_local! {
    /// Scratch memory of a thread that is not ours.
    static VISITOR: Cell<Scratch> = const { Cell::new(Scratch::new()) };
}

/// Has a thread that is not ours run blocks, with scratch memory that it keeps.
pub(crate) fn visit<R>(run: impl FnOnce(&mut Scratch) -> R) -> R {
    let _floats = Floats::ours();
    // A thread that is about to end keeps none.
    let mut scratch = VISITOR.try_with(Cell::take).unwrap_or_default();
    let done = run(&mut scratch);
    let _ = VISITOR.try_with(|kept| kept.set(scratch));
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the protection of the page at an address, from `/proc/self/maps`; `None` if it is not mapped.
    fn protection(address: u64) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
            (start..end).contains(&address).then(|| rest[..3].to_owned())
        })
    }

    #[test]
    fn scratch_memory_lies_between_guards() {
        let mut scratch = Scratch::new();
        for bytes in [0, 1, 100_000, 64] {
            scratch.reserve(bytes).unwrap();
            assert!(scratch.bytes >= bytes);
            let base = scratch.base.as_ptr().addr() as u64;
            let (area, end) = (AREA as u64, base + scratch.bytes as u64);
            let zeros = base - u64::from(vm_abi::SCRATCH_ZEROS);
            let sink = base - u64::from(vm_abi::SCRATCH_SINK);
            for (what, at, wanted) in [
                ("zeros", zeros, "r--"),
                ("the end of the zeros", zeros + area - 1, "r--"),
                ("the sink", sink, "rw-"),
                ("the end of the sink", sink + area - 1, "rw-"),
                ("the guard behind the sink", sink + area, "---"),
                ("the guard before the scratch memory", base - 1, "---"),
                ("the scratch memory", base, "rw-"),
                ("its end", end - 1, "rw-"),
                ("the guard behind it", end, "---"),
                ("the end of that", end + area - 1, "---"),
            ] {
                assert_eq!(protection(at).as_deref(), Some(wanted), "{what}, of {bytes} bytes");
            }
        }
    }
}
