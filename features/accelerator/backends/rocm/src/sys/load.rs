//! Finds the library, once for the process.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;
use vm_accel::{Error, Result};

use super::Hip;
use crate::access;
use crate::device::Roots;

/// The environment variable that names the library, alone, where it is none of the usual ones.
pub const LIBRARY_VARIABLE: &str = "VM_ROCM_HIP";

/// Names of the library, from new to old.
const LIBRARIES: &[&str] = &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];
/// Where AMD's packages have it, which is in no path of the linker's.
const USUAL: &str = "/opt/rocm/lib/libamdhip64.so";

static HIP: OnceLock<Result<Hip>> = OnceLock::new();

/// HIP, loaded and initialised once for the process.
///
/// # Errors
/// [`Error::Unavailable`] where there is none, or none that works, with what to do.
pub fn hip() -> Result<&'static Hip> {
    let loaded = HIP.get_or_init(|| {
        let named = std::env::var(LIBRARY_VARIABLE).ok().filter(|name| !name.is_empty());
        // As ROCm's own programs have it.
        let installed = std::env::var("ROCM_PATH").ok().map(|folder| format!("{folder}/lib/libamdhip64.so"));
        let usual = LIBRARIES.iter().copied().chain(installed.as_deref()).chain([USUAL]);
        let hip = load(&named.as_deref().map_or_else(|| usual.collect(), |name| vec![name]))?;
        initialise(&hip, &Roots::system())?;
        Ok(hip)
    });
    loaded.as_ref().map_err(Clone::clone)
}

/// Has [`hip`] give this one. Whether it had given none before.
#[cfg(feature = "fake")]
pub(crate) fn install(hip: Hip) -> bool {
    HIP.set(Ok(hip)).is_ok()
}

/// The first of some libraries that can be loaded.
fn load(names: &[&str]) -> Result<Hip> {
    let mut causes = Vec::new();
    for name in names {
        // SAFETY: the library's constructors are the vendor's, made to be loaded so.
        match unsafe { Library::new(*name) } {
            Ok(library) => {
                // SAFETY: it is HIP by its name, or the operator says so, and is never unloaded, as it is kept with its functions.
                let hip = unsafe { Hip::of((*name).to_owned(), Some(library), find) };
                if hip.hipInit.is_none() || hip.hipGetDeviceCount.is_none() {
                    return Err(hip.absent("hipInit or hipGetDeviceCount"));
                }
                return Ok(hip);
            }
            Err(error) => causes.push(((*name).to_owned(), one_line(&error))),
        }
    }
    // One that is there and lacks something tells more than those that are not there.
    let own = |(name, cause): &(String, String)| !cause.starts_with(&format!("{name}: cannot open"));
    let (library, cause) = causes
        .into_iter()
        .find(own)
        .unwrap_or_else(|| ("libamdhip64".into(), format!("there is none of {}", names.join(", "))));
    Err(Error::Unavailable {
        library,
        cause,
        remedy: format!(
            "install ROCm's HIP runtime (Debian and Ubuntu: libamdhip64-5 or newer, Fedora: rocm-hip, AMD's packages: \
             hip-runtime-amd), or name the file with {LIBRARY_VARIABLE}"
        ),
    })
}

fn find(library: &Option<Library>, name: &CStr) -> Option<*const c_void> {
    // SAFETY: a symbol is its address, and that is all that is taken of it.
    let symbol = unsafe { library.as_ref()?.get::<*const c_void>(name.to_bytes_with_nul()) };
    symbol.ok().map(|symbol| *symbol)
}

/// That there is a device. Without one some versions fail in `hipInit`, and some only count none.
pub(crate) fn initialise(hip: &Hip, roots: &Roots) -> Result<()> {
    let mut count: c_int = 0;
    // SAFETY: it may be called at any time.
    let begun = unsafe { hip.hipInit(0) };
    // SAFETY: the pointer is to a local.
    let counted = begun.and_then(|()| unsafe { hip.hipGetDeviceCount(&raw mut count) });
    let cause = match counted {
        Ok(()) if count > 0 => return Ok(()),
        Ok(()) => "it finds no device".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Error::Unavailable { library: hip.library.clone(), cause, remedy: access::remedy(roots) })
}

fn one_line(error: &libloading::Error) -> String {
    use std::error::Error;
    let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    cause.lines().next().unwrap_or("no reason given").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_be_loaded_is_named() {
        let check = |names: &[&str], what: &str| match load(names).map(drop) {
            Err(Error::Unavailable { library, cause, remedy }) => {
                assert!(format!("{library}: {cause}").contains(what), "{library}: {cause}");
                assert!(remedy.contains("libamdhip64-5") || remedy.contains("5.2"), "{remedy}");
            }
            other => panic!("{names:?}: {other:?}"),
        };
        check(&["libnowhere.so.7", "libnowhere.so.6"], "libnowhere.so.7");
        check(&["libnowhere.so.7", "/proc/self/maps"], "/proc/self/maps: ");
        check(&["libc.so.6"], "libc.so.6: it has no hipInit or hipGetDeviceCount");
        check(&[], "");
    }
}
