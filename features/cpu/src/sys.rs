//! Code memory, and calls into it.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// A kernel's function.
type Function = unsafe extern "C" fn(*const u8, *const [u32; 3], u64, u64, *mut u8);

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

    /// Runs the blocks from `first` up to `end` by the function at `entry`.
    ///
    /// # Safety
    /// `entry` lies within the code. There is what a compiler made for this interface; `params` is the block of parameters
    /// that it was made for, with arguments that it admits; `scratch` has as many bytes as it asks for; no number in `grid`
    /// is 0.
    pub(crate) unsafe fn call(
        &self,
        entry: usize,
        params: &[u64],
        grid: &[u32; 3],
        first: u64,
        end: u64,
        scratch: &mut Scratch,
    ) {
        // SAFETY: `entry` lies within.
        let at = unsafe { self.base.as_ptr().add(entry) };
        // SAFETY: the code has this interface, as the caller promises.
        let function: Function = unsafe { std::mem::transmute::<*mut u8, Function>(at) };
        // SAFETY: as the caller promises.
        unsafe { function(params.as_ptr().cast(), grid, first, end, scratch.base.as_ptr()) };
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
    pub(crate) fn new() -> Scratch {
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

impl Drop for Scratch {
    fn drop(&mut self) {
        self.release();
    }
}
