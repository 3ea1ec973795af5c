//! Code memory, and calls into it.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
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

/// Memory of one thread for a kernel, aligned to 64 bytes. It grows and is kept.
#[derive(Debug)]
pub(crate) struct Scratch {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is this value's own.
unsafe impl Send for Scratch {}

/// What scratch memory is aligned to.
const ALIGN: usize = 64;

impl Scratch {
    /// None yet.
    pub(crate) const fn new() -> Scratch {
        Scratch { base: NonNull::dangling(), bytes: 0 }
    }

    /// Makes it at least so large.
    ///
    /// # Errors
    /// There is not so much memory.
    pub(crate) fn reserve(&mut self, bytes: usize) -> io::Result<()> {
        let bytes = bytes.max(ALIGN).next_multiple_of(ALIGN);
        if bytes <= self.bytes {
            return Ok(());
        }
        let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: the layout's size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
        self.release();
        (self.base, self.bytes) = (base, bytes);
        Ok(())
    }

    fn release(&mut self) {
        if let (false, Ok(layout)) = (self.bytes == 0, Layout::from_size_align(self.bytes, ALIGN)) {
            // SAFETY: it was allocated with this layout, and is freed once: a new one takes its place, or the value ends.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        }
        self.bytes = 0;
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
