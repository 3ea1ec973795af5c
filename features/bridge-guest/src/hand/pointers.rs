//! What is known of addresses. Of the program's own memory the server knows nothing.

use vm_bridge::wire::{Malformed, Reader, WINDOW, code, put};

use super::{is_device, the};
use crate::client::{Client, client};
use crate::sys::caller;

/// `CUpointer_attribute`, and bytes of its value. Those without a line are words.
const SIZES: [(u32, usize); 13] = [
    (2, 4),
    (5, 16),
    (6, 4),
    (8, 4),
    (9, 4),
    (10, 4),
    (13, 4),
    (14, 4),
    (16, 4),
    (17, 8),
    (18, 4),
    (19, 8),
    (21, 4),
];

fn size(attribute: u32) -> usize {
    SIZES.iter().find(|(known, _)| *known == attribute).map_or(8, |(_, size)| *size)
}

/// Is it an address that the driver knows?
fn is_known(client: &Client, at: usize) -> bool {
    is_device(client, at) || WINDOW.contains(&(at as u64))
}

/// Asks for attributes of an address: the result of each, with its value.
fn get(at: usize, attributes: &[u32]) -> Result<Vec<(u32, [u8; 16])>, u32> {
    let mut payload = Vec::new();
    put(&mut payload, at as u64);
    attributes.iter().for_each(|attribute| put(&mut payload, u64::from(*attribute)));
    let reply = client()?.ask(the("cuPointerGetAttributes")?, &payload, false)?;
    let mut reader = Reader(&reply);
    let mut one = || {
        let (code, value) = (reader.word()?, reader.bytes(16)?);
        Ok((code as u32, value.first_chunk().copied().unwrap_or_default()))
    };
    attributes.iter().map(|_| one().map_err(|_: Malformed| code::UNAVAILABLE)).collect()
}

pub(crate) fn cuPointerGetAttribute(_: usize, words: &[usize]) -> Result<(), u32> {
    let [to, attribute, at] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 || !is_known(&*client()?, at) {
        return Err(code::INVALID_VALUE);
    }
    match get(at, &[attribute as u32])?.first() {
        Some((0, value)) => {
            caller::write_bytes(to, &value[..size(attribute as u32)]);
            Ok(())
        }
        Some((code, _)) => Err(*code),
        None => Err(code::UNAVAILABLE),
    }
}

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`, whose value for unknown addresses is −2.
const ORDINAL: u32 = 9;
const MOST: usize = 64;

pub(crate) fn cuPointerGetAttributes(_: usize, words: &[usize]) -> Result<(), u32> {
    let [count, attributes, data, at] = *words else { return Err(code::INVALID_VALUE) };
    let count = count as u32 as usize;
    if attributes == 0 || data == 0 || count > MOST {
        return Err(code::INVALID_VALUE);
    }
    let attributes: Vec<u32> = (0..count).map(|index| caller::half(attributes + 4 * index)).collect();
    let got = if is_known(&*client()?, at) {
        get(at, &attributes)?
    } else {
        vec![(code::INVALID_VALUE, [0; 16]); count]
    };
    for (index, (attribute, (code, value))) in attributes.into_iter().zip(got).enumerate() {
        let to = caller::word(data + 8 * index) as usize;
        match code {
            0 => caller::write_bytes(to, &value[..size(attribute)]),
            // Where there is no such attribute it is nothing.
            code::INVALID_VALUE | code::NOT_SUPPORTED if attribute == ORDINAL => {
                caller::write_half(to, -2i32 as u32);
            }
            code::INVALID_VALUE | code::NOT_SUPPORTED => caller::write_bytes(to, &[0; 16][..size(attribute)]),
            code => return Err(code),
        }
    }
    Ok(())
}
