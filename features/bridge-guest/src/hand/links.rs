//! Links: an image that is all of its link is what is linked, and goes over when it is loaded. What links several stays with the program: it
//! has a library for that.

use std::collections::BTreeMap;
use std::sync::Mutex;

use vm_bridge::wire::code;

use super::modules::file;
use crate::client::{client, locked};
use crate::sys::caller;

/// `CUjitInputType`s that are loaded as they are: PTX and fat binaries.
const LOADED: [u32; 2] = [1, 2];

/// Links that go on, by their handles, each with its image. It stays where it is.
static LINKS: Mutex<BTreeMap<u64, Option<Box<[u8]>>>> = Mutex::new(BTreeMap::new());

pub(crate) fn cuLinkCreate_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    client()?;
    let mut links = locked(&LINKS);
    // As pointers that nothing is at.
    let handle = links.last_key_value().map_or(64, |(last, _)| last + 64);
    links.insert(handle, None);
    caller::write(words[3], handle);
    Ok(())
}

fn add(link: usize, kind: usize, image: impl FnOnce() -> Result<Vec<u8>, u32>) -> Result<(), u32> {
    if !LOADED.contains(&(kind as u32)) {
        return Err(code::NOT_SUPPORTED);
    }
    let mut links = locked(&LINKS);
    match links.get_mut(&(link as u64)) {
        Some(Some(_)) => Err(code::NOT_SUPPORTED),
        Some(place) => {
            let mut image = image()?;
            // A text ends with a zero.
            image.push(0);
            *place = Some(image.into());
            Ok(())
        }
        None => Err(code::INVALID_HANDLE),
    }
}

pub(crate) fn cuLinkAddData_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    let [link, kind, data, size, ..] = *words else { return Err(code::INVALID_VALUE) };
    add(link, kind, || Ok(caller::bytes(data, size).to_vec()))
}

pub(crate) fn cuLinkAddFile_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    let [link, kind, path, ..] = *words else { return Err(code::INVALID_VALUE) };
    add(link, kind, || file(path))
}

pub(crate) fn cuLinkComplete(_: usize, words: &[usize]) -> Result<(), u32> {
    let [link, image, size] = *words else { return Err(code::INVALID_VALUE) };
    let links = locked(&LINKS);
    let linked = links.get(&(link as u64)).ok_or(code::INVALID_HANDLE)?;
    let linked = linked.as_ref().ok_or(code::INVALID_VALUE)?;
    caller::write(image, linked.as_ptr().expose_provenance() as u64);
    caller::write(size, linked.len() as u64);
    Ok(())
}

pub(crate) fn cuLinkDestroy(_: usize, words: &[usize]) -> Result<(), u32> {
    locked(&LINKS).remove(&(words[0] as u64)).map(drop).ok_or(code::INVALID_HANDLE)
}
