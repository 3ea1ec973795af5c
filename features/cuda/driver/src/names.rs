//! `cuGetProcAddress`: which of a function's versions a program means.

use vm_cuda_api::names::{self, Symbol};
pub(crate) use vm_cuda_api::names::{Status, base, since};

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

/// The address for a name, a version of CUDA, and flags for per-thread streams: 0 where there is none.
pub(crate) fn find(name: &str, version: i32, flags: u64) -> Result<(usize, Status)> {
    let table = entry::table();
    let symbols =
        table.iter().map(|entry| Symbol { name: entry.symbol, since: entry.since, what: entry.address });
    let (address, status) = names::find(symbols, state::config().settings.version, name, version, flags)
        .map_err(|_| Error::InvalidValue)?;
    Ok((address.unwrap_or(0), status))
}
