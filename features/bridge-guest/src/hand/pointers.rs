//! What is known of addresses. Of the program's own memory the server knows nothing.

use vm_bridge::wire::{WINDOW, code};

use super::{is_device, the};
use crate::client::{Client, client};
use crate::forward;
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

fn get(number: usize, to: usize, attribute: usize, at: usize) -> Result<(), u32> {
    let mut value = [0u8; 64];
    forward::ask(number, &[value.as_mut_ptr() as usize, attribute, at])?;
    caller::write_bytes(to, &value[..size(attribute as u32)]);
    Ok(())
}

pub(crate) fn cuPointerGetAttribute(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, attribute, at] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 || !is_known(&*client()?, at) {
        return Err(code::INVALID_VALUE);
    }
    get(number, to, attribute, at)
}

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`, whose value for unknown addresses is −2.
const ORDINAL: u32 = 9;

pub(crate) fn cuPointerGetAttributes(_: usize, words: &[usize]) -> Result<(), u32> {
    let [count, attributes, data, at] = *words else { return Err(code::INVALID_VALUE) };
    if attributes == 0 || data == 0 {
        return Err(code::INVALID_VALUE);
    }
    let (known, number) = (is_known(&*client()?, at), the("cuPointerGetAttribute")?);
    for index in 0..count as u32 as usize {
        let attribute = caller::half(attributes + 4 * index);
        let to = caller::word(data + 8 * index) as usize;
        let got = if known { get(number, to, attribute as usize, at) } else { Err(code::INVALID_VALUE) };
        match got {
            Ok(()) => {}
            // Where there is no such attribute it is nothing.
            Err(code::INVALID_VALUE | code::NOT_SUPPORTED) if attribute == ORDINAL => {
                caller::write_half(to, -2i32 as u32);
            }
            Err(code::INVALID_VALUE | code::NOT_SUPPORTED) => {
                caller::write_bytes(to, &[0; 16][..size(attribute)]);
            }
            Err(code) => return Err(code),
        }
    }
    Ok(())
}
