//! `cuLink`: what is linked is handed back as it was given, as the driver compiles when a module is loaded.

use std::ffi::{c_char, c_void};

use crate::{
    error::{Error, Result},
    image, module, state, sys,
};

const PTX: i32 = 1;
const FAT_BINARY: i32 = 2;

/// A link that goes on: the one image in it. It stays where it is until the link is destroyed.
#[derive(Default)]
pub(crate) struct Link {
    image: Option<Box<[u8]>>,
}

/// `cuLinkCreate`.
pub(crate) fn create() -> Result<u64> {
    let mut state = state::lock();
    state.current()?;
    let id = state.id();
    state.links.insert(id, Link::default());
    Ok(id)
}

/// `cuLinkAddData`: one image with PTX.
pub(crate) fn add(link: u64, kind: i32, data: *const c_void, size: usize) -> Result {
    if ![PTX, FAT_BINARY].contains(&kind) {
        return Err(Error::NoBinaryForGpu);
    }
    add_image(link, image::of(sys::bytes(data, size).ok_or(Error::InvalidValue)?)?)
}

/// `cuLinkAddFile`.
pub(crate) fn add_file(link: u64, kind: i32, path: *const c_char) -> Result {
    if ![PTX, FAT_BINARY].contains(&kind) {
        return Err(Error::NoBinaryForGpu);
    }
    add_image(link, module::file(path)?)
}

fn add_image(link: u64, mut image: Vec<u8>) -> Result {
    image.push(0);
    let mut state = state::lock();
    let link = state.links.get_mut(&link).ok_or(Error::InvalidHandle)?;
    if link.image.is_some() {
        // Several modules would have to become one.
        return Err(Error::NotSupported);
    }
    link.image = Some(image.into());
    Ok(())
}

/// `cuLinkComplete`: address and size of the result.
pub(crate) fn complete(link: u64) -> Result<(u64, usize)> {
    let state = state::lock();
    let image =
        state.links.get(&link).ok_or(Error::InvalidHandle)?.image.as_ref().ok_or(Error::InvalidValue)?;
    Ok((image.as_ptr().expose_provenance() as u64, image.len()))
}

/// `cuLinkDestroy`.
pub(crate) fn destroy(link: u64) -> Result {
    state::lock().links.remove(&link).map(drop).ok_or(Error::InvalidHandle)
}
