//! Memory that graphs copy to and from, and what the driver keeps of such a copy.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::{Driver, Word};
use crate::server::host::Charge;
use crate::server::staged::Staged;

/// Memory of this process that the driver copies to or from.
#[derive(Debug)]
pub(in crate::server) struct Memory {
    at: NonNull<u8>,
    layout: Layout,
    _charge: Charge,
}

/// Whole pages: the driver knows no page twice.
const ALIGN: u64 = 4096;

// SAFETY: it is nobody's but the driver's, and of who is called by the driver between copies.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Returns what memory of so many bytes takes.
    pub(in crate::server) fn size(len: u64) -> Option<u64> {
        len.checked_next_multiple_of(ALIGN)
    }

    /// So many bytes, at least one, if there are as many; they are charged.
    pub(in crate::server) fn new(len: u64, charge: Charge) -> Option<Self> {
        let len = usize::try_from(Self::size(len)?).ok().filter(|len| *len > 0)?;
        let layout = Layout::from_size_align(len, ALIGN as usize).ok()?;
        // SAFETY: it is not empty.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { at, layout, _charge: charge })
    }

    pub(in crate::server) fn len(&self) -> u64 {
        self.layout.size() as u64
    }

    pub(in crate::server) fn at(&self) -> u64 {
        self.at.as_ptr() as u64
    }

    /// Does something with a part of it while the driver does nothing with it.
    pub(in crate::server) fn with<T>(
        &self,
        from: u64,
        len: u64,
        act: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        let end = from.checked_add(len).filter(|end| *end <= self.len())?;
        let at = self.at.as_ptr().wrapping_add(from as usize);
        // SAFETY: it is this one's, zeroed at first. Who calls was called by the driver, which copies before or behind that alone, and one graph that
        // runs does it once at a time.
        let bytes = unsafe { std::slice::from_raw_parts_mut(at, (end - from) as usize) };
        Some(act(bytes))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated so.
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}

unsafe extern "C" fn fetch(at: *const Staged) {
    // SAFETY: the driver passes what it was given, which its graph keeps.
    unsafe { &*at }.move_bytes(false);
}

unsafe extern "C" fn store(at: *const Staged) {
    // SAFETY: as above.
    unsafe { &*at }.move_bytes(true);
}

unsafe extern "C" fn end(at: *mut Staged) {
    // SAFETY: no graph keeps it any more, and the driver calls this once.
    drop(unsafe { Box::from_raw(at) });
}

/// What the driver calls to have bytes fetched, or stored.
pub(in crate::server) fn move_function(stores: bool) -> u64 {
    let function = if stores { store as *const () } else { fetch as *const () };
    function as u64
}

/// Makes an object of the driver's that keeps a copy: that, and where the copy is.
pub(in crate::server) fn keep_staged(driver: &Driver, staged: Staged) -> Result<(u64, u64), u32> {
    /// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`.
    const NO_SYNC: u64 = 1;
    let at = Box::into_raw(Box::new(staged));
    let mut made = [0];
    let words =
        [Word::At(0), Word::Is(at as u64), Word::Is(end as *const () as u64), Word::Is(1), Word::Is(NO_SYNC)];
    match driver.named("cuUserObjectCreate", &words, &mut made) {
        0 => {
            // SAFETY: the object keeps it.
            unsafe { &*at }.is_kept_by(made[0]);
            Ok((made[0], at as u64))
        }
        code => {
            // SAFETY: the driver has not taken it.
            drop(unsafe { Box::from_raw(at) });
            Err(code)
        }
    }
}

/// Looks at a copy that a graph keeps.
pub(in crate::server) fn with_staged<T>(at: u64, look: impl FnOnce(&Staged) -> T) -> T {
    // SAFETY: it is the argument of a node with one of the functions above, which are in nodes with such an argument alone, and the node's graph keeps it
    // while it is this lane's turn.
    look(unsafe { &*(at as *const Staged) })
}
