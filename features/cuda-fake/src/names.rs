//! `cuGetProcAddress`: which of a function's versions a program means.

use crate::{
    entry,
    error::{Error, Result},
    state,
};

/// A function of the driver.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    /// As the library exports it.
    pub(crate) symbol: &'static str,
    /// The version of CUDA it came with: 11020 is 11.2.
    pub(crate) since: i32,
    pub(crate) address: usize,
}

/// What came of a search: `CUdriverProcAddressQueryResult`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Status {
    Found = 0,
    NotFound = 1,
    VersionNotSufficient = 2,
}

const LEGACY_STREAM: u64 = 1;
const PER_THREAD_STREAM: u64 = 2;

fn plain(symbol: &str) -> &str {
    symbol.strip_suffix("_ptsz").or_else(|| symbol.strip_suffix("_ptds")).unwrap_or(symbol)
}

/// A symbol without the suffixes of versions and per-thread streams.
pub(crate) fn base(symbol: &str) -> &str {
    let symbol = plain(symbol);
    match symbol.rsplit_once("_v") {
        Some((base, version)) if version.parse::<u8>().is_ok() => base,
        _ => symbol,
    }
}

/// The version a symbol came with, where it is the one that `version` says or one for per-thread streams.
pub(crate) fn since(symbol: &str, version: i32) -> i32 {
    if plain(symbol) == symbol { version } else { version.max(7000) }
}

/// The address for a name, a version of CUDA, and flags for per-thread streams: 0 where there is none.
pub(crate) fn find(name: &str, version: i32, flags: u64) -> Result<(usize, Status)> {
    let driver = state::config().version;
    if version > driver || flags & !(LEGACY_STREAM | PER_THREAD_STREAM) != 0 {
        return Err(Error::InvalidValue);
    }
    // From CUDA 12 on the name means the function with flags.
    let renamed = name == "cuGraphInstantiate" && version >= 12000;
    let name = if renamed { "cuGraphInstantiateWithFlags" } else { name };
    let table = entry::table();
    let named = |entry: &&Entry| entry.since <= driver && base(entry.symbol) == name;
    let per_thread = |entry: &Entry| plain(entry.symbol) != entry.symbol;
    let known: Vec<&Entry> = table.iter().filter(named).collect();
    let newest = |wanted: bool| {
        let fits = known.iter().filter(|entry| entry.since <= version && per_thread(entry) == wanted);
        fits.max_by_key(|entry| entry.since)
    };
    let found = (flags & PER_THREAD_STREAM != 0).then(|| newest(true)).flatten().or_else(|| newest(false));
    Ok(match found {
        Some(entry) => (entry.address, Status::Found),
        None if known.is_empty() => (0, Status::NotFound),
        None => (0, Status::VersionNotSufficient),
    })
}
