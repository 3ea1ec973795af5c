//! Memory files, mappings, and accesses to memory by its address.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_void},
    fs::File,
    io,
    marker::PhantomData,
    os::fd::{AsRawFd as _, FromRawFd, OwnedFd, RawFd},
    os::unix::fs::FileExt as _,
    ptr::null_mut,
    sync::atomic::AtomicU64,
};

/// The lowest address that memory can have: null and offsets from null are below it.
pub(crate) const LOWEST: u64 = 4096;

/// Returns whether an address is neither null nor an offset from null.
pub(crate) fn is_address<T: ?Sized>(at: *const T) -> bool {
    at.addr() as u64 >= LOWEST
}

/// What a mapping allows: nothing (0), reads (1), reads and writes (3), as in `CUmemAccess_flags`.
pub(crate) type Access = u8;

/// A range of memory that can be accessed while `'s`, the lock of the state, is held: it was checked against the table of
/// mappings, or it is the caller's own, who promised it to the C function that it called.
#[derive(Clone, Copy)]
pub(crate) struct Range<'s> {
    at: u64,
    len: usize,
    held: PhantomData<&'s ()>,
}

impl<'s> Range<'s> {
    /// A range whose `len` bytes at `at` are there while `holder` is borrowed. Only `State::reach`
    /// makes them, which looks the range up.
    pub(crate) fn promised<T>(_holder: &'s T, at: u64, len: usize) -> Self {
        Self { at, len, held: PhantomData }
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Panics
    /// The range has fewer.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        assert!(offset <= self.len && len <= self.len - offset);
        Self { at: self.at + offset as u64, len, ..self }
    }

    fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.at as usize)
    }

    /// Copies as much of `from` as both have.
    pub(crate) fn copy_from(self, from: Range) {
        // SAFETY: both ranges are accessible (the type's promise), and copy() lets them overlap.
        unsafe { std::ptr::copy(from.pointer(), self.pointer(), self.len.min(from.len)) }
    }

    /// Writes as many of the bytes as it has.
    pub(crate) fn write(self, bytes: &[u8]) {
        // SAFETY: the range is accessible, and copy() lets a caller's own memory overlap.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.pointer(), self.len.min(bytes.len())) }
    }

    /// Sets all of it to the lowest `unit` bytes of `value`, repeated.
    pub(crate) fn fill(self, value: u32, unit: usize) {
        let bytes = value.to_le_bytes();
        let mut done = unit.min(self.len).min(4);
        // SAFETY: the first `done` bytes are within an accessible range, and at most 4.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(), done) };
        while done < self.len && done > 0 {
            let more = done.min(self.len - done);
            // SAFETY: both are within an accessible range, and the second begins where the first ends at the earliest.
            unsafe { std::ptr::copy_nonoverlapping(self.pointer(), self.pointer().wrapping_add(done), more) };
            done += more;
        }
    }

    /// The bytes, copied.
    pub(crate) fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: the source is accessible, the destination has its length.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(), bytes.as_mut_ptr(), self.len) }
        bytes
    }

    /// The 32-bit word at index `index`.
    pub(crate) fn load(self, index: usize) -> u32 {
        assert!(index < self.len / 4);
        // SAFETY: within an accessible range; unaligned, as kernels' addresses are the caller's.
        unsafe { self.pointer().cast::<u32>().wrapping_add(index).read_unaligned() }
    }

    /// Writes the 32-bit word at index `index`.
    pub(crate) fn store(self, index: usize, value: u32) {
        assert!(index < self.len / 4);
        // SAFETY: within an accessible range; unaligned, as kernels' addresses are the caller's.
        unsafe { self.pointer().cast::<u32>().wrapping_add(index).write_unaligned(value) }
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn map_at(at: u64, len: u64, protection: i32, flags: i32, fd: RawFd, offset: u64) -> io::Result<u64> {
    let hint = std::ptr::with_exposed_provenance_mut(at as usize);
    // SAFETY: MAP_FIXED is only used inside the arena, where this crate alone maps; elsewhere the system picks the place.
    let at = unsafe { libc::mmap(hint, len as usize, protection, flags, fd, offset as i64) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at.expose_provenance() as u64) }
}

/// Address space that nothing backs and nobody can access, at an address if that is free.
pub(crate) fn reserve(wish: u64, len: u64) -> io::Result<u64> {
    map_at(wish, len, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0)
}

/// Maps pages of the process at an address of the arena.
pub(crate) fn map_pages(at: u64, len: u64) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    map_at(at, len, protection(3), flags, -1, 0).map(drop)
}

/// Maps a memory file's bytes at an address of the arena.
pub(crate) fn map(at: u64, len: u64, fd: RawFd, offset: u64, access: Access) -> io::Result<()> {
    map_at(at, len, protection(access), libc::MAP_SHARED | libc::MAP_FIXED, fd, offset).map(drop)
}

/// Makes a range of the arena what it was when reserved.
pub(crate) fn unmap(at: u64, len: u64) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    map_at(at, len, libc::PROT_NONE, flags, -1, 0).map(drop)
}

/// Changes what a mapped range of the arena allows.
pub(crate) fn protect(at: u64, len: u64, access: Access) -> io::Result<()> {
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(at as usize);
    // SAFETY: the range is in the arena, which holds no object of Rust's.
    check(unsafe { libc::mprotect(start, len as usize, protection(access)) })
}

fn protection(access: Access) -> i32 {
    match access {
        0 => libc::PROT_NONE,
        1 => libc::PROT_READ,
        _ => libc::PROT_READ | libc::PROT_WRITE,
    }
}

/// A sparse file of memory.
pub(crate) fn memory_file(name: &str, len: u64) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: the name is a C string that outlives the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    check(fd)?;
    // SAFETY: the descriptor was just opened and has no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // Where calls are listed by seccomp, `ftruncate` is none of them.
    if let Some(last) = len.checked_sub(1) {
        File::from(file.try_clone()?).write_all_at(&[0], last)?;
    }
    Ok(file)
}

/// Gives the pages of a part of a memory file back to the system.
pub(crate) fn punch(fd: RawFd, offset: u64, len: u64) -> io::Result<()> {
    // By a mapping, as `fallocate` is not listed where calls are, either.
    let len = len as usize;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, in the place of none.
    let start = unsafe { libc::mmap(null_mut(), len, access, libc::MAP_SHARED, fd, offset as i64) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping that was just made, of which nobody has a reference.
    let punched = check(unsafe { libc::madvise(start, len, libc::MADV_REMOVE) });
    // SAFETY: as above; it is not used from here on.
    check(unsafe { libc::munmap(start, len) })?;
    punched
}

/// Returns whether every page of a range is mapped, accessible or not.
pub(crate) fn is_mapped(at: u64, len: u64) -> bool {
    /// Pages that one call looks at.
    const PAGES: usize = 1 << 16;
    const PAGE: u64 = 4096;
    let mut present = vec![0u8; PAGES];
    let Some(end) = at.checked_add(len).and_then(|end| end.checked_next_multiple_of(PAGE)) else {
        return false;
    };
    (at / PAGE * PAGE..end).step_by(PAGES * PAGE as usize).all(|at| {
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(at as usize);
        let len = (end - at).min(PAGES as u64 * PAGE) as usize;
        // SAFETY: it reads no memory, and writes a byte for each page, of which there are no more than `PAGES`.
        unsafe { libc::mincore(start, len, present.as_mut_ptr()) == 0 }
    })
}

/// Another descriptor of an open file; the number is the caller's promise, and an error if it is none.
pub(crate) fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    check(copy)?;
    // SAFETY: the descriptor was just opened and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// A function of the caller's with its argument: `CUhostFn`.
pub(crate) type HostFunction = extern "C" fn(u64);
/// What a block of so many threads takes of shared memory.
pub(crate) type SharedOf = extern "C" fn(i32) -> usize;
/// A function of the caller's with stream, status and argument: `CUstreamCallback`.
pub(crate) type Callback = extern "C" fn(u64, i32, u64);

/// A structure with a function of the caller's.
pub(crate) fn host_node(at: *const crate::ffi::HostNode) -> Option<crate::ffi::HostNode> {
    // SAFETY: the caller promised one, in which a function is one of its own or null.
    is_address(at).then(|| unsafe { at.read_unaligned() })
}

/// The text at an address, up to its NUL and no longer than `limit` bytes.
pub(crate) fn text(at: *const std::ffi::c_char, limit: usize) -> Option<String> {
    if !is_address(at) {
        return None;
    }
    // SAFETY: the caller of the C function promised a string; strnlen() looks no further than its NUL.
    let len = unsafe { libc::strnlen(at, limit) };
    // SAFETY: as above; these bytes were just read.
    let bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) };
    Some(String::from_utf8_lossy(bytes).into_owned())
}

/// The bytes at an address.
pub(crate) fn bytes(at: *const c_void, len: usize) -> Option<Vec<u8>> {
    if len == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the caller of the C function promised so many bytes there.
    is_address(at).then(|| unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec())
}

/// A memory file that the kernel copies the caller's memory through: memory that cannot be read is no fault there.
pub(crate) struct Probe(File);

impl Probe {
    /// Bytes of one copy, at most.
    const CHUNK: usize = 1 << 20;
    /// How many bytes of a text are looked at first.
    const LINE: usize = 4096;

    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(memory_file("vm-cuda-driver-probe", 0)?.into()))
    }

    /// Appends up to `len` bytes at an address, no more than [`Self::CHUNK`]. Returns how many: 0 where the first cannot be read.
    fn append(&self, at: u64, len: usize, to: &mut Vec<u8>) -> io::Result<usize> {
        let from = std::ptr::with_exposed_provenance::<c_void>(at as usize);
        // SAFETY: the kernel reads the memory, and returns an error where there is none.
        let copied = unsafe { libc::pwrite(self.0.as_raw_fd(), from, len.min(Self::CHUNK), 0) };
        let copied = match usize::try_from(copied) {
            Ok(copied) => copied,
            Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => 0,
            Err(_) => return Err(io::Error::last_os_error()),
        };
        let before = to.len();
        to.try_reserve(copied).map_err(|_| io::ErrorKind::OutOfMemory)?;
        to.resize(before + copied, 0);
        self.0.read_exact_at(&mut to[before..], 0)?;
        Ok(copied)
    }

    /// Copies `len` bytes at an address, or as many as can be read.
    pub(crate) fn bytes(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while bytes.len() < len
            && self.append(at.saturating_add(bytes.len() as u64), len - bytes.len(), &mut bytes)? > 0
        {
        }
        Ok(bytes)
    }

    /// Copies the text at an address without its NUL; `None` if there is no NUL in the first `limit` bytes that can be read.
    pub(crate) fn text(&self, at: u64, limit: usize) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        let mut part = Self::LINE;
        while bytes.len() < limit {
            let from = bytes.len();
            if self.append(at.saturating_add(from as u64), part, &mut bytes)? == 0 {
                break;
            }
            if let Some(end) = bytes[from..].iter().position(|byte| *byte == 0) {
                bytes.truncate(from + end);
                return Ok(Some(bytes));
            }
            part = (2 * part).min(Self::CHUNK);
        }
        Ok(None)
    }
}

/// Writes `text` with its NUL into the caller's `len` bytes, cut to fit.
pub(crate) fn write_text(at: *mut u8, len: usize, text: &CStr) {
    let bytes = text.to_bytes();
    if !is_address(at) || len == 0 {
        return;
    }
    let count = bytes.len().min(len - 1);
    // SAFETY: the caller of the C function promised `len` bytes, and count < len.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, count) };
    // SAFETY: as above.
    unsafe { at.wrapping_add(count).write(0) };
}

/// The `T` at an address that the caller of a C function promised; `None` where there cannot be memory.
pub(crate) fn read<T: Plain>(at: *const T) -> Option<T> {
    // SAFETY: the caller promised a T, any bytes of which are one.
    is_address(at).then(|| unsafe { at.read_unaligned() })
}

/// The `index`-th `T` of an array that the caller of a C function promised.
pub(crate) fn read_at<T: Plain>(at: *const T, index: usize) -> Option<T> {
    if is_address(at) { read(at.wrapping_add(index)) } else { None }
}

/// Writes to an address that the caller of a C function promised; `None` where there cannot be memory.
pub(crate) fn write<T: Plain>(at: *mut T, value: T) -> Option<()> {
    // SAFETY: the caller promised room for a T.
    is_address(at).then(|| unsafe { at.write_unaligned(value) })
}

/// A C type of which all bytes are a value.
///
/// # Safety
/// Any bytes are a value of the type.
pub(crate) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty),*) => {$(
        // SAFETY: integers, floats, raw pointers, and `repr(C)` structures and arrays of them.
        unsafe impl Plain for $type {}
    )*};
}

plain!(*mut c_void);
plain!(u8, u16, u32, u64, i32, usize, f32, [u64; 2], [u64; 8], [u8; 16], [u8; 64], *const c_void, *const u64);
plain!(
    crate::ffi::Properties,
    crate::ffi::AccessOf,
    crate::ffi::Copy2d,
    crate::ffi::Copy3d,
    crate::ffi::Launch
);
plain!(crate::ffi::PoolProperties, crate::ffi::Location);
plain!(crate::ffi::KernelNode, crate::ffi::KernelNode2, crate::ffi::FillNode, crate::ffi::AnyNode);
plain!(crate::ffi::Instantiate, crate::ffi::Update);
plain!(crate::ffi::ArrayDescriptor, crate::ffi::ArrayDescriptor3d);

/// Memory of the C library's with these bytes, which [`to_the_c_library`] gives back.
pub(crate) fn of_the_c_library(bytes: [u8; 8]) -> *mut c_void {
    // SAFETY: it takes no memory.
    let memory = unsafe { libc::malloc(bytes.len()) };
    write(memory.cast(), u64::from_ne_bytes(bytes));
    memory
}

pub(crate) fn to_the_c_library(memory: *mut c_void) {
    // SAFETY: the caller gives back what `of_the_c_library` gave, once, or null.
    unsafe { libc::free(memory) };
}

unsafe extern "C" {
    /// The C library's standard output, which programs' own `printf` writes to.
    static stdout: *mut libc::FILE;
}

/// Writes to the standard output, behind what the program wrote there itself.
pub(crate) fn print(text: &[u8]) {
    // SAFETY: the C library sets it before any code of a program runs, and locks the stream. Where a program closed it, that is its own
    // library's error.
    unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stdout) };
}

/// Hands what was written to the standard output to the system.
pub(crate) fn flush() {
    // SAFETY: as above.
    unsafe { libc::fflush(stdout) };
}

/// This thread, as the C library calls it.
pub(crate) fn thread() -> u64 {
    // SAFETY: it takes and changes nothing.
    unsafe { libc::pthread_self() }
}

/// Two numbers that processes share, in a memory file.
pub(crate) struct Shared {
    file: File,
    at: u64,
}

/// Bytes of its file.
const SHARED: u64 = 4096;

impl Shared {
    pub(crate) fn new() -> io::Result<Self> {
        Self::map(memory_file("vm-cuda-driver-event", SHARED)?.into())
    }

    /// That of another process, by its path there.
    pub(crate) fn open(path: &str) -> io::Result<Self> {
        let name = std::fs::read_link(path)?;
        if !name.to_string_lossy().starts_with("/memfd:vm-cuda-driver-event") {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Self::map(File::options().read(true).write(true).open(path)?)
    }

    fn map(file: File) -> io::Result<Self> {
        let at = map_at(0, SHARED, protection(3), libc::MAP_SHARED, file.as_raw_fd(), 0)?;
        Ok(Self { file, at })
    }

    pub(crate) fn file(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn counts(&self) -> &[AtomicU64; 2] {
        let at = std::ptr::with_exposed_provenance::<[AtomicU64; 2]>(self.at as usize);
        // SAFETY: a page is mapped there as long as this is, and the numbers are atomic.
        unsafe { &*at }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let at = std::ptr::with_exposed_provenance_mut(self.at as usize);
        // SAFETY: the mapping is this one's own, and nobody has a reference any more. It can't fail.
        unsafe { libc::munmap(at, SHARED as usize) };
    }
}

/// Exports the driver from a library, with the settings that a function returns. The driver asks for them at its first call.
#[macro_export]
macro_rules! driver {
    ($settings:path) => {
        #[used]
        // SAFETY: the section is of pointers to functions that the loader calls once, and this one only stores a pointer.
        #[allow(unsafe_code)]
        #[unsafe(link_section = ".init_array")]
        static CONFIGURE: extern "C" fn() = {
            extern "C" fn configure() {
                $crate::configure($settings);
            }
            configure
        };
    };
}
