//! Calls that no table packs, or that this side must know of. Each is named as the driver names it, and is of the form for per-thread streams too.
#![allow(non_snake_case)]

mod batches;
mod callbacks;
mod captures;
mod contexts;
mod copies;
mod host;
mod ipc;
mod launches;
mod managed;
mod memory;
mod modules;
mod names;
mod nodes;
mod objects;
mod occupancy;
mod pointers;
mod strided;

pub(crate) use batches::*;
pub(crate) use callbacks::*;
pub(crate) use captures::*;
pub(crate) use contexts::*;
pub(crate) use copies::*;
pub(crate) use host::*;
pub(crate) use ipc::*;
pub(crate) use launches::*;
pub(crate) use managed::*;
pub(crate) use memory::*;
pub(crate) use modules::*;
pub(crate) use names::*;
pub(crate) use nodes::*;
pub(crate) use objects::*;
pub(crate) use occupancy::*;
pub(crate) use pointers::*;
pub(crate) use strided::*;

use vm_bridge::wire::code;
use vm_cuda_api::{FUNCTIONS, names::is_per_thread, number};

use callbacks::begin_calls;
use modules::{file, pack_options};

/// The number of a function.
fn the(name: &str) -> Result<usize, u32> {
    number(name).ok_or(code::NOT_SUPPORTED)
}

/// The number of a function, in the form for per-thread streams where `like` is one.
fn the_form(name: &str, like: usize) -> Result<usize, u32> {
    let form = |suffix: &str| number(&format!("{name}{suffix}"));
    let per_thread = is_per_thread(&FUNCTIONS[like].name);
    let found = if per_thread { form("_ptsz").or_else(|| form("_ptds")) } else { None };
    found.map_or_else(|| the(name), Ok)
}
