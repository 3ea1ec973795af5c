//! How programs come to the driver's functions: by their names when they are linked, by `dlsym`, and by `cuGetProcAddress`. Each gets
//! the hook's, where there is one.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The C library's own `dlsym` and `dlopen`.
static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static REAL_DLOPEN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

// Who calls `dlsym` or `dlopen` matters to them: RTLD_NEXT goes on behind the caller's library, RTLD_DEFAULT begins with what it sees, paths are
// the caller's. So they are jumped to, not called, but where a function is the driver's.

/// `dlsym`: of names that begin with `cu` the hook's functions.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "cmp qword ptr [rip + {real}], 0",
        "je 3f",
        "2:",
        "cmp rdi, -1",
        "je 4f",
        "cmp byte ptr [rsi], 0x63",
        "jne 4f",
        "cmp byte ptr [rsi + 1], 0x75",
        "jne 4f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {dlsym}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "je 4f",
        "ret",
        "4: jmp qword ptr [rip + {real}]",
        "3: push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {begin}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp 2b",
        real = sym REAL_DLSYM,
        dlsym = sym dlsym_of_a_driver,
        begin = sym begin,
    )
}

/// `dlopen`, without `RTLD_DEEPBIND` (8): such a library would not see the hook.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "and esi, -9",
        "cmp qword ptr [rip + {real}], 0",
        "jne 2f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {begin}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "2: jmp qword ptr [rip + {real}]",
        real = sym REAL_DLOPEN,
        begin = sym begin,
    )
}

/// Finds the C library's own functions.
extern "C" fn begin() {
    let find = |name: &CStr| {
        [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"].iter().find_map(|version| {
            // SAFETY: both are strings; the answer is an address or null.
            let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, name.as_ptr(), version.as_ptr()) };
            (!found.is_null()).then_some(found)
        })
    };
    for (name, to) in [(c"dlsym", &REAL_DLSYM), (c"dlopen", &REAL_DLOPEN)] {
        match find(name) {
            Some(found) => to.store(found, Ordering::Release),
            // There is no C library that has none.
            None => std::process::abort(),
        }
    }
}

/// `dlsym` as the C library has it.
pub(super) fn found_in(handle: *mut c_void, name: &CStr) -> *mut c_void {
    if REAL_DLSYM.load(Ordering::Acquire).is_null() {
        begin();
    }
    // SAFETY: it is the address of that function, which `begin` found.
    let dlsym = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(
            REAL_DLSYM.load(Ordering::Acquire),
        )
    };
    // SAFETY: the name is a string, and handles are checked by it.
    unsafe { dlsym(handle, name.as_ptr()) }
}

/// The driver's library; null where there is none.
pub(super) fn library() -> *mut c_void {
    opened(libc::RTLD_NOW)
}

/// The driver's library, opened as the flags say; null where it is not.
fn opened(flags: c_int) -> *mut c_void {
    static LIBRARY: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let known = LIBRARY.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    if REAL_DLOPEN.load(Ordering::Acquire).is_null() {
        begin();
    }
    // SAFETY: as in `dlsym`.
    let dlopen = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void>(
            REAL_DLOPEN.load(Ordering::Acquire),
        )
    };
    // SAFETY: the name is a string; the library's constructors are the driver's.
    let opened = unsafe { dlopen(c"libcuda.so.1".as_ptr(), flags) };
    if !opened.is_null() {
        LIBRARY.store(opened, Ordering::Release);
    }
    opened
}

/// The driver's own function of a name; null where it has none.
pub(super) fn real(name: &CStr) -> *mut c_void {
    let library = library();
    if library.is_null() { ptr::null_mut() } else { found_in(library, name) }
}

/// The hook's function in the place of the driver's, where there is one. What the hook does not know may look at memory unseen.
fn instead(name: &CStr, found: *mut c_void) -> *mut c_void {
    let Ok(name) = name.to_str() else { return found };
    match super::entry::hooked_by_name(name) {
        Some(hooked) => hooked.cast_mut().cast(),
        None => {
            if !super::entry::is_quiet(name) {
                crate::hook::unknown(name);
            }
            found
        }
    }
}

/// What `dlsym` of a name that begins with `cu` gives if that is the driver's; null where the C library is to find it.
extern "C" fn dlsym_of_a_driver(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller of dlsym gives a string.
    let name = unsafe { CStr::from_ptr(name) };
    let found = found_in(handle, name);
    let is_of_driver = match found.is_null() {
        // RTLD_DEFAULT, and the caller may see a driver that the hook does not.
        true => handle.is_null() && !loaded(name).is_null(),
        false => is_of_driver(found),
    };
    if is_of_driver { instead(name, found) } else { ptr::null_mut() }
}

/// The driver's function of a name, if the program has loaded a driver: the hook does not.
fn loaded(name: &CStr) -> *mut c_void {
    let library = opened(libc::RTLD_NOW | libc::RTLD_NOLOAD);
    if library.is_null() { library } else { found_in(library, name) }
}

/// Is it a function of the driver's library? One of the hook's stands for it, too.
fn is_of_driver(function: *mut c_void) -> bool {
    let file = |address: *const c_void| {
        // SAFETY: an all-zero Dl_info is one; dladdr fills it in or fails.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: as above; the address is only looked up.
        (unsafe { libc::dladdr(address, &mut info) } != 0).then_some(info.dli_fbase)
    };
    let of = file(function);
    of.is_some() && (of == file(is_of_driver as *const c_void) || of == file(loaded(c"cuInit")))
}

/// The driver's functions by their addresses.
fn by_address() -> &'static HashMap<usize, &'static str> {
    static BY_ADDRESS: OnceLock<HashMap<usize, &'static str>> = OnceLock::new();
    BY_ADDRESS.get_or_init(|| {
        let names = super::entry::names();
        let address = |name: &'static str| {
            let owned = std::ffi::CString::new(name).ok()?;
            let address = real(&owned);
            (!address.is_null()).then_some((address as usize, name))
        };
        names.filter_map(address).collect()
    })
}

/// What `cuGetProcAddress` found for a name, or the hook's function in its place.
pub(super) fn instead_of(asked: &CStr, found: *mut c_void) -> *mut c_void {
    let Some(name) = by_address().get(&(found as usize)) else {
        let quiet = asked.to_str().is_ok_and(super::entry::is_quiet);
        if !quiet {
            crate::hook::unknown(&asked.to_string_lossy());
        }
        return found;
    };
    match super::entry::hooked_by_name(name) {
        Some(hooked) => hooked.cast_mut().cast(),
        None => found,
    }
}
