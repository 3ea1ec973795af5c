//! What C gives: pointers that may be NULL or askew, texts that may be none, handles.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::sync::Arc;

use crate::accelerator::{Failure, HANDLES, Handled};

/// A function of the caller's.
pub(crate) type Function = unsafe extern "C" fn(*mut std::ffi::c_void) -> i32;

/// Where a result goes.
pub(crate) struct Output<'a, T>(*mut T, PhantomData<&'a mut T>);

impl<T> Output<'_, T> {
    /// Puts it there.
    pub(crate) fn put(self, value: T) {
        // SAFETY: the caller promised that it is there, and it was looked at when this was made.
        unsafe { self.0.write(value) };
    }
}

/// So many values of the caller's, which are looked at once it is known that there can be as many.
pub(crate) struct Array<'a, T> {
    parameter: &'static str,
    at: *const T,
    count: u64,
    of: PhantomData<&'a [T]>,
}

impl<'a, T> Array<'a, T> {
    /// `count` values at `at`.
    ///
    /// # Errors
    /// There can't be as many.
    ///
    /// # Safety
    /// They are there, and nobody writes them.
    pub(super) unsafe fn new(
        parameter: &'static str,
        at: *const T,
        of: &'static str,
        count: u64,
    ) -> Result<Self, Failure> {
        check_array(parameter, at, of, count)?;
        Ok(Self { parameter, at, count, of: PhantomData })
    }

    /// How many there are said to be.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// All of them.
    ///
    /// # Errors
    /// There are more than `most`.
    pub(crate) fn get(&self, most: u64) -> Result<&'a [T], Failure> {
        check_count(self.parameter, self.count, most)?;
        if self.count == 0 {
            return Ok(&[]);
        }
        // SAFETY: as the caller promises; there can be as many.
        Ok(unsafe { std::slice::from_raw_parts(self.at, self.count as usize) })
    }
}

/// So many values of the caller's to write.
pub(crate) struct ArrayMut<'a, T> {
    parameter: &'static str,
    at: *mut T,
    count: u64,
    of: PhantomData<&'a mut [T]>,
}

impl<'a, T> ArrayMut<'a, T> {
    /// `count` values at `at`.
    ///
    /// # Errors
    /// There can't be as many.
    ///
    /// # Safety
    /// They are there, and nobody else reads or writes them.
    pub(super) unsafe fn new(
        parameter: &'static str,
        at: *mut T,
        of: &'static str,
        count: u64,
    ) -> Result<Self, Failure> {
        check_array(parameter, at, of, count)?;
        Ok(Self { parameter, at, count, of: PhantomData })
    }

    /// How many there are said to be.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// All of them.
    ///
    /// # Errors
    /// There are more than `most`.
    pub(crate) fn get(self, most: u64) -> Result<&'a mut [T], Failure> {
        check_count(self.parameter, self.count, most)?;
        if self.count == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as the caller promises; there can be as many.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at, self.count as usize) })
    }
}

fn check_count(parameter: &str, count: u64, most: u64) -> Result<(), Failure> {
    if count > most {
        return Err(Failure::invalid(parameter, format!("are {count}: at most {most} are possible")));
    }
    Ok(())
}

fn check_array<T>(
    parameter: &'static str,
    at: *const T,
    of: &'static str,
    count: u64,
) -> Result<(), Failure> {
    if count == 0 {
        return Ok(());
    }
    check_pointer(parameter, at)?;
    let bytes = count.checked_mul(size_of::<T>() as u64).filter(|bytes| *bytes <= isize::MAX as u64);
    if bytes.and_then(|bytes| at.addr().checked_add(bytes as usize)).is_none() {
        return Err(Failure::invalid(
            of,
            format!("is {count}: there can't be as many behind {parameter}, {at:p}"),
        ));
    }
    Ok(())
}

fn check_pointer<T>(parameter: &'static str, at: *const T) -> Result<(), Failure> {
    if at.is_null() {
        return Err(Failure::invalid(parameter, "is NULL"));
    }
    if !at.is_aligned() {
        return Err(Failure::invalid(
            parameter,
            format!("is {at:p}: it must be a multiple of {}", align_of::<T>()),
        ));
    }
    Ok(())
}

/// A text.
///
/// # Errors
/// It is NULL, or not in UTF-8.
///
/// # Safety
/// It is NULL or ends with a zero, and nobody writes it.
pub(super) unsafe fn text<'a>(parameter: &'static str, at: *const c_char) -> Result<&'a str, Failure> {
    check_pointer(parameter, at)?;
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_str().map_err(|error| Failure::invalid(parameter, format!("is no text in UTF-8: {error}")))
}

/// A value that is read.
///
/// # Errors
/// It is NULL, or no multiple of its alignment.
///
/// # Safety
/// It is NULL or there, and nobody writes it.
pub(super) unsafe fn input<'a, T>(parameter: &'static str, at: *const T) -> Result<&'a T, Failure> {
    check_pointer(parameter, at)?;
    // SAFETY: as the caller promises.
    Ok(unsafe { &*at })
}

/// The same of one that may be NULL.
///
/// # Errors
/// It is no multiple of its alignment.
///
/// # Safety
/// As for [`input`].
pub(super) unsafe fn optional_input<'a, T>(
    parameter: &'static str,
    at: *const T,
) -> Result<Option<&'a T>, Failure> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller promises.
    unsafe { input(parameter, at) }.map(Some)
}

/// Where a result goes.
///
/// # Errors
/// It is NULL, or no multiple of its alignment.
///
/// # Safety
/// It is NULL or there, and nobody else reads or writes it.
pub(super) unsafe fn output<'a, T>(parameter: &'static str, at: *mut T) -> Result<Output<'a, T>, Failure> {
    check_pointer(parameter, at)?;
    Ok(Output(at, PhantomData))
}

/// The same where nobody may want it.
///
/// # Errors
/// It is no multiple of its alignment.
///
/// # Safety
/// As for [`output`].
pub(super) unsafe fn optional_output<'a, T>(
    parameter: &'static str,
    at: *mut T,
) -> Result<Option<Output<'a, T>>, Failure> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller promises.
    unsafe { output(parameter, at) }.map(Some)
}

/// A function of the caller's.
///
/// # Errors
/// It is NULL.
pub(super) fn function<F>(parameter: &'static str, given: Option<F>) -> Result<F, Failure> {
    given.ok_or_else(|| Failure::invalid(parameter, "is NULL"))
}

/// A descriptor of the caller's, which stays its own: a new one of the same.
///
/// # Errors
/// It is none.
pub(crate) fn descriptor(parameter: &str, fd: i32) -> Result<OwnedFd, Failure> {
    // SAFETY: whatever the number is, the call looks it up.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Failure::invalid(parameter, format!("is {fd}, which is no open descriptor: {error}")));
    }
    // SAFETY: it is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// What a handle is of.
///
/// # Errors
/// It is none.
pub(super) fn find<T: Handled>(parameter: &'static str, handle: u64) -> Result<Arc<T>, Failure> {
    HANDLES.find(parameter, handle)
}
