//! Memory of this process that may not be there, as a graph names it that runs later.

use std::ffi::c_void;
use std::io;

/// The system's pages.
pub(crate) const PAGE: usize = 4096;

/// Moves bytes between memory of this library and an address, by the system, which looks at every page.
fn move_by_system(ours: *mut c_void, at: usize, len: usize, writes: bool) -> io::Result<usize> {
    let local = libc::iovec { iov_base: ours, iov_len: len };
    let remote = libc::iovec { iov_base: at as *mut c_void, iov_len: len };
    // SAFETY: it asks for the number of this process.
    let process = unsafe { libc::getpid() };
    let moved = if writes {
        // SAFETY: the first is memory of this library, as long as is said; the system looks whether the other is there.
        unsafe { libc::process_vm_writev(process, &raw const local, 1, &raw const remote, 1, 0) }
    } else {
        // SAFETY: as above, and the caller has lent it to be written.
        unsafe { libc::process_vm_readv(process, &raw const local, 1, &raw const remote, 1, 0) }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Is every page there? It is asked where a system refuses more to sandboxed programs.
pub(crate) fn is_mapped(at: usize, len: usize) -> bool {
    /// Pages of one call.
    const PAGES: usize = 1 << 16;
    let Some(end) = at.checked_add(len).and_then(|end| end.checked_next_multiple_of(PAGE)) else {
        return false;
    };
    let mut present = vec![0u8; PAGES];
    (at / PAGE * PAGE..end).step_by(PAGES * PAGE).all(|at| {
        let len = (end - at).min(PAGES * PAGE);
        // SAFETY: it looks at no memory, and writes a byte for each page, of which there are no more than `PAGES`.
        unsafe { libc::mincore(at as *mut c_void, len, present.as_mut_ptr()) == 0 }
    })
}

/// Returns whether all of a range can be read: a byte of each page is.
pub(crate) fn can_be_read(at: usize, len: usize) -> bool {
    /// Pages of one call: the most that the system takes.
    const PAGES: usize = 1024;
    let Some(end) = at.checked_add(len) else { return false };
    // SAFETY: it asks for the number of this process.
    let process = unsafe { libc::getpid() };
    let mut bytes = [0u8; PAGES];
    let mut next = at;
    while next < end {
        let of_page = |page: usize| next.max((next / PAGE + page) * PAGE);
        let places = (0..PAGES).map(of_page).take_while(|place| *place < end);
        let places: Vec<_> =
            places.map(|place| libc::iovec { iov_base: place as *mut c_void, iov_len: 1 }).collect();
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: places.len() };
        let count = places.len();
        // SAFETY: `bytes` has room for a byte of each page; the kernel checks the addresses that it reads.
        let read =
            unsafe { libc::process_vm_readv(process, &raw const local, 1, places.as_ptr(), count as u64, 0) };
        if read < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT) {
            return is_mapped(next, end - next);
        }
        if read != count as isize {
            return false;
        }
        next = (next / PAGE).saturating_add(count).saturating_mul(PAGE);
    }
    true
}

/// Reads bytes, if all are there.
pub(crate) fn read(at: usize, to: &mut [u8]) -> bool {
    match move_by_system(to.as_mut_ptr().cast(), at, to.len(), false) {
        Ok(moved) => moved == to.len(),
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => false,
        Err(_) if is_mapped(at, to.len()) => {
            // SAFETY: the program has said that it has so many bytes there, and they are mapped.
            unsafe { std::ptr::copy_nonoverlapping(at as *const u8, to.as_mut_ptr(), to.len()) };
            true
        }
        Err(_) => false,
    }
}

/// Writes bytes, if there is room for all.
pub(crate) fn write(at: usize, from: &[u8]) -> bool {
    match move_by_system(from.as_ptr().cast_mut().cast(), at, from.len(), true) {
        Ok(moved) => moved == from.len(),
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => false,
        Err(_) if is_mapped(at, from.len()) => {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), at as *mut u8, from.len()) };
            true
        }
        Err(_) => false,
    }
}
