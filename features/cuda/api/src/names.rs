//! `cuGetProcAddress`: which of a function's versions a program means.

/// What came of a search: `CUdriverProcAddressQueryResult`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Status {
    /// There it is.
    Found = 0,
    /// There is no such function.
    NotFound = 1,
    /// There is one, of a newer CUDA than was asked for.
    VersionNotSufficient = 2,
}

/// The version of CUDA, or the flags, that were asked for are none of this driver's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BadRequest;

/// A symbol that can be found.
#[derive(Clone, Copy, Debug)]
pub struct Symbol<'a, T> {
    /// As the library exports it.
    pub name: &'a str,
    /// The version of CUDA it came with: 11020 is 11.2.
    pub since: i32,
    /// What is had by it.
    pub what: T,
}

const LEGACY_STREAM: u64 = 1;
const PER_THREAD_STREAM: u64 = 2;

fn plain(symbol: &str) -> &str {
    symbol.strip_suffix("_ptsz").or_else(|| symbol.strip_suffix("_ptds")).unwrap_or(symbol)
}

/// Does its default stream belong to the calling thread?
#[must_use]
pub fn is_per_thread(symbol: &str) -> bool {
    plain(symbol) != symbol
}

/// A symbol without the suffixes of versions and per-thread streams.
#[must_use]
pub fn base(symbol: &str) -> &str {
    let symbol = plain(symbol);
    match symbol.rsplit_once("_v") {
        Some((base, version)) if version.parse::<u8>().is_ok() => base,
        _ => symbol,
    }
}

/// The version a symbol came with, where it is the one that `version` says or one for per-thread streams.
#[must_use]
pub fn since(symbol: &str, version: i32) -> i32 {
    if is_per_thread(symbol) { version.max(7000) } else { version }
}

/// What is had by a name, a version of CUDA, and flags for per-thread streams, of a driver of CUDA `driver`.
///
/// # Errors
/// When the driver is older than the version, or knows no such flags.
pub fn find<'a, T: Copy + 'a>(
    symbols: impl Iterator<Item = Symbol<'a, T>>,
    driver: i32,
    name: &str,
    version: i32,
    flags: u64,
) -> Result<(Option<T>, Status), BadRequest> {
    if version > driver || flags & !(LEGACY_STREAM | PER_THREAD_STREAM) != 0 {
        return Err(BadRequest);
    }
    // From CUDA 12 on the name means the function with flags.
    let renamed = name == "cuGraphInstantiate" && version >= 12000;
    let name = if renamed { "cuGraphInstantiateWithFlags" } else { name };
    let known: Vec<_> =
        symbols.filter(|symbol| symbol.since <= driver && base(symbol.name) == name).collect();
    let newest = |wanted: bool| {
        let fits =
            known.iter().filter(|symbol| symbol.since <= version && is_per_thread(symbol.name) == wanted);
        // Of those of one version the one that says more: `_v2` came with the same CUDA as `_v1` of a rare name.
        fits.max_by_key(|symbol| symbol.since)
    };
    let found = (flags & PER_THREAD_STREAM != 0).then(|| newest(true)).flatten().or_else(|| newest(false));
    Ok(match found {
        Some(symbol) => (Some(symbol.what), Status::Found),
        None if known.is_empty() => (None, Status::NotFound),
        None => (None, Status::VersionNotSufficient),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FUNCTIONS;

    #[test]
    fn a_name_and_a_version_mean_a_symbol() {
        let check = |name: &str, version: i32, flags: u64, expected: Option<&str>, status: Status| {
            let symbols = FUNCTIONS.iter().map(|function| Symbol {
                name: &function.name,
                since: function.since,
                what: function.name.as_str(),
            });
            assert_eq!(
                find(symbols, 13000, name, version, flags),
                Ok((expected, status)),
                "{name} {version}"
            );
        };
        use Status::{Found, NotFound, VersionNotSufficient};
        check("cuMemAlloc", 12000, 0, Some("cuMemAlloc_v2"), Found);
        check("cuMemAlloc", 2000, 0, Some("cuMemAlloc"), Found);
        check("cuMemcpyHtoD", 12000, 2, Some("cuMemcpyHtoD_v2_ptds"), Found);
        check("cuMemcpyHtoD", 12000, 1, Some("cuMemcpyHtoD_v2"), Found);
        check("cuLaunchKernel", 6000, 2, Some("cuLaunchKernel"), Found);
        check("cuGraphInstantiate", 12000, 0, Some("cuGraphInstantiateWithFlags"), Found);
        check("cuGraphInstantiate", 11000, 0, Some("cuGraphInstantiate_v2"), Found);
        check("cuCtxCreate", 13000, 0, Some("cuCtxCreate_v4"), Found);
        check("cuStreamGetCaptureInfo", 12030, 0, Some("cuStreamGetCaptureInfo_v3"), Found);
        check("cuNothing", 12000, 0, None, NotFound);
        check("cuLibraryLoadData", 11000, 0, None, VersionNotSufficient);
    }

    #[test]
    fn a_newer_cuda_or_an_unknown_flag_is_no_request() {
        let none = || std::iter::empty::<Symbol<'_, ()>>();
        assert_eq!(find(none(), 12000, "cuInit", 12010, 0), Err(BadRequest));
        assert_eq!(find(none(), 12000, "cuInit", 12000, 4), Err(BadRequest));
    }
}
