//! The functions that the library exports, by what they are of: each checks pointers, and the parts do the rest.
#![allow(unsafe_code, non_snake_case)]

mod contexts;
mod copies;
mod devices;
mod graphs;
mod memories;
mod streams;
mod unsupported;
mod works;

use crate::{
    error::{Error, Result},
    names::Entry,
    state,
};
use std::{
    ffi::{c_char, c_void},
    mem::MaybeUninit,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Where a result goes: null is `None`, and what is there is not read.
type Out<'c, T> = Option<&'c mut MaybeUninit<T>>;

/// Writes a result where there is room for it.
fn put<T>(out: Out<T>, value: T) {
    if let Some(out) = out {
        out.write(value);
    }
}

/// Writes a result; null is an error, before anything is done.
fn give<T>(out: Out<T>, value: impl FnOnce() -> Result<T>) -> Result {
    let out = out.ok_or(Error::InvalidValue)?;
    out.write(value()?);
    Ok(())
}

/// An argument of a function.
trait Argument {
    /// The argument as the trace prints it.
    fn show(&self) -> String;

    /// Returns false for a result's place that is an offset from null. Each function checks for null itself, which some may be. Other
    /// pointers are checked where they are read: that to an empty list may be any.
    fn is_valid(&self) -> bool {
        true
    }
}

macro_rules! arguments {
    ($($type:ty: $format:literal),*) => {$(
        impl Argument for $type {
            fn show(&self) -> String {
                format!($format, self)
            }
        }
    )*};
}

arguments!(i32: "{}", u32: "{}", u64: "{:#x}", usize: "{}", u8: "{}", u16: "{}", f32: "{}");

impl<T> Argument for *const T {
    fn show(&self) -> String {
        format!("{:p}", *self)
    }
}

impl<T> Argument for *mut T {
    fn show(&self) -> String {
        format!("{:p}", *self)
    }
}

impl<T> Argument for Option<&mut MaybeUninit<T>> {
    fn show(&self) -> String {
        self.as_ref().map_or("0x0".to_owned(), |out| format!("{:p}", out.as_ptr()))
    }

    fn is_valid(&self) -> bool {
        self.as_ref().is_none_or(|out| crate::sys::is_address(out.as_ptr()))
    }
}

impl Argument for Option<crate::sys::HostFunction> {
    fn show(&self) -> String {
        format!("{self:?}")
    }
}

impl Argument for Option<crate::sys::SharedOf> {
    fn show(&self) -> String {
        format!("{self:?}")
    }
}

impl Argument for Option<crate::sys::Callback> {
    fn show(&self) -> String {
        format!("{self:?}")
    }
}

/// What every function does around its body: faults on demand, the trace, and no panic into C.
fn call(name: &'static str, arguments: impl FnOnce() -> String, body: impl FnOnce() -> Result) -> i32 {
    let guarded = || {
        let config = state::config();
        crate::ptx::print::before(name);
        // What fork() copied has no lock that is surely free, and that of the faults' counts is one.
        let fault = if state::forked() { None } else { Some(config.fault(name)) };
        let run = || match fault.ok_or(Error::NotInitialized)? {
            Some(0) | None if crate::stream::works() => Err(Error::NotPermitted),
            Some(0) | None => body(),
            Some(code) => Err(Error::Injected(code)),
        };
        let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or(Err(Error::Unknown));
        let code = result.map_or_else(Error::code, |()| 0);
        crate::ptx::print::after(name);
        config.trace(|| format!("{name}{} -> {code}\n", arguments()));
        code
    };
    catch_unwind(AssertUnwindSafe(guarded)).unwrap_or(Error::Unknown.code())
}

/// Exports one function.
macro_rules! export {
    ($name:ident ($($argument:ident: $type:ty),*) $body:block $($default:ident = $value:expr)?) => {
        // SAFETY: the name is the driver's, which this library stands for; nothing else of the process defines it.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> i32 {
            let shown: Vec<(&str, String)> = if crate::state::config().traced() {
                vec![$((stringify!($argument), $crate::entry::Argument::show(&$argument))),*]
            } else {
                Vec::new()
            };
            let arguments = || shown.iter().map(|(name, value)| format!(" {name}={value}")).collect();
            $(let $default: u64 = $value;)?
            let are_valid = true $(&& $crate::entry::Argument::is_valid(&$argument))*;
            $crate::entry::call(stringify!($name), arguments, move || -> $crate::error::Result {
                if !are_valid {
                    return Err($crate::error::Error::InvalidValue);
                }
                $body
            })
        }
    };
}

/// A function's line of the table; those for per-thread streams came with CUDA 7.0.
macro_rules! entry {
    ($name:ident, $since:expr) => {
        $crate::names::Entry {
            symbol: stringify!($name),
            since: $crate::names::since(stringify!($name), $since),
            address: $name as *const () as usize,
        }
    };
}

/// Exports functions, each with the version of CUDA it came with; those that use default streams twice, where the second
/// one's default is the thread's own, and where the name after `as` is the default's handle.
macro_rules! api {
    ($($since:literal fn $name:ident $arguments:tt $(/ $own:ident as $default:ident)? $body:block)*) => {
        $(
            api!(@main $name $arguments $body $($default)?);
            $($crate::entry::export!($own $arguments $body $default = $crate::stream::PER_THREAD);)?
        )*

        pub(super) fn table() -> Vec<$crate::names::Entry> {
            vec![$(
                $crate::entry::entry!($name, $since),
                $($crate::entry::entry!($own, $since),)?
            )*]
        }
    };
    (@main $name:ident $arguments:tt $body:block $default:ident) => {
        $crate::entry::export!($name $arguments $body $default = $crate::stream::LEGACY);
    };
    (@main $name:ident $arguments:tt $body:block) => {
        $crate::entry::export!($name $arguments $body);
    };
}

use {api, entry, export};

/// The stream that a handle means where null is `default`.
fn stream(handle: u64, default: u64) -> u64 {
    if handle == 0 { default } else { handle }
}

/// All functions.
pub(crate) fn table() -> Vec<Entry> {
    [
        devices::table(),
        contexts::table(),
        memories::table(),
        copies::table(),
        streams::table(),
        graphs::table(),
        works::table(),
        unsupported::table(),
    ]
    .concat()
}

/// A function's text argument.
fn text(at: *const c_char) -> Result<String> {
    crate::sys::text(at, 4096).ok_or(Error::InvalidValue)
}

/// A structure that a pointer points to.
fn read<T: crate::sys::Plain>(at: *const T) -> Result<T> {
    crate::sys::read(at).ok_or(Error::InvalidValue)
}

/// Nothing to say of a pointer that the fake does not use.
type Unused = *const c_void;
