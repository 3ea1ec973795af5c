//! What is known of addresses. Of the program's own memory the server knows nothing.

use vm_bridge::wire::{Malformed, Reader, WINDOW, code, put};

use super::{Allocation, current_device, is_device, managed_at, registered_at, shared_at, the};
use crate::client::{Client, client, locked};
use crate::current;
use crate::sys::caller;

/// `CUpointer_attribute`, and bytes of its value. Those without a line are words.
const SIZES: [(u32, usize); 11] =
    [(2, 4), (5, 16), (6, 4), (8, 4), (9, 4), (10, 4), (13, 4), (14, 4), (15, 4), (16, 4), (21, 4)];

fn size(attribute: u32) -> usize {
    SIZES.iter().find(|(known, _)| *known == attribute).map_or(8, |(_, size)| *size)
}

/// `CU_POINTER_ATTRIBUTE_CONTEXT`, `…_MEMORY_TYPE`, `…_DEVICE_POINTER`, `…_HOST_POINTER`, `…_IS_MANAGED`, `…_DEVICE_ORDINAL`, `…_RANGE_START_ADDR`, `…_RANGE_SIZE`.
const OF_REGISTERED: [u32; 8] = [1, 2, DEVICE_POINTER, 4, 8, ORDINAL, 11, 12];
/// `CU_POINTER_ATTRIBUTE_DEVICE_POINTER`.
const DEVICE_POINTER: u32 = 3;
/// `CU_MEMORYTYPE_HOST`.
const HOST: u64 = 1;

/// Of each attribute the result, and its value.
type Values = Vec<(u32, [u8; 16])>;

/// A value of one word.
fn of_word(word: u64) -> (u32, [u8; 16]) {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&word.to_ne_bytes());
    (0, bytes)
}

/// What is said of registered memory, by this side alone: the server knows its file by another address, if it does.
fn registered(at: usize, attributes: &[u32]) -> Result<Option<Values>, u32> {
    let Some((start, memory)) = registered_at(&*client()?, at) else { return Ok(None) };
    // Without a context there is no device.
    let device = current_device().unwrap_or(0);
    let value = |attribute: &u32| {
        let [context, kind, reached, pointer, managed, ordinal, first, size] = OF_REGISTERED;
        let word = match *attribute {
            known if known == context => current::get(),
            known if known == kind => HOST,
            known if known == pointer => at as u64,
            known if known == reached && memory.shared.is_some() => {
                memory.shared.unwrap_or(0) + (at as u64 - start)
            }
            known if known == managed => 0,
            known if known == ordinal => device as u32 as u64,
            known if known == first => start,
            known if known == size => memory.len,
            _ => return (code::INVALID_VALUE, [0; 16]),
        };
        of_word(word)
    };
    Ok(Some(attributes.iter().map(value).collect()))
}

/// Attributes of managed memory, which is registered host memory to the driver.
fn managed(of: &Allocation, at: usize, attributes: &[u32]) -> Result<Values, u32> {
    /// `CU_POINTER_ATTRIBUTE_P2P_TOKENS` and `…_SYNC_MEMOPS`; `CU_MEMORYTYPE_DEVICE`.
    const TOKENS: u32 = 5;
    const SYNC: u32 = 6;
    const DEVICE: u64 = 2;
    let [_, kind, reached, pointer, managed, ordinal, first, size] = OF_REGISTERED;
    let value = |(attribute, known): (&u32, _)| {
        let word = match *attribute {
            known if known == kind => DEVICE,
            known if [reached, pointer].contains(&known) => at as u64,
            known if [managed, SYNC].contains(&known) => 1,
            known if known == ordinal => of.device as u32 as u64,
            known if known == first => of.start,
            known if known == size => of.len,
            TOKENS => 0,
            _ => return known,
        };
        of_word(word)
    };
    Ok(attributes.iter().zip(ask(at, attributes)?).map(value).collect())
}

/// Is it an address that the driver knows?
fn is_known(client: &Client, at: usize) -> bool {
    is_device(client, at) || WINDOW.contains(&(at as u64))
}

/// Asks for attributes of an address: the result of each, with its value.
fn get(at: usize, attributes: &[u32]) -> Result<Values, u32> {
    // What launches kernels asks this of each parameter.
    if let [DEVICE_POINTER] = *attributes
        && locked(&client()?.devices).is_at_home(at as u64, current::get())
    {
        return Ok(vec![of_word(at as u64)]);
    }
    if let Some(known) = registered(at, attributes)? {
        let Some(shared) = shared_at(&*client()?, at, 1) else { return Ok(known) };
        // The driver knows the rest, of where it has the memory.
        let rest = ask(shared, attributes)?;
        return Ok(known
            .into_iter()
            .zip(rest)
            .map(|(known, rest)| if known.0 == 0 { known } else { rest })
            .collect());
    }
    if let Some(of) = managed_at(&*client()?, at as u64) {
        return managed(&of, at, attributes);
    }
    if !is_known(&*client()?, at) {
        return Ok(vec![(code::INVALID_VALUE, [0; 16]); attributes.len()]);
    }
    ask(at, attributes)
}

/// Whether an address is of managed memory of the driver's own, which this process does not have.
pub(super) fn is_managed_there(at: u64) -> Result<bool, u32> {
    let [.., managed, _, _, _] = OF_REGISTERED;
    Ok(ask(at as usize, &[managed])?.first().is_some_and(|(code, value)| *code == 0 && value[0] != 0))
}

/// Asks the driver.
fn ask(at: usize, attributes: &[u32]) -> Result<Values, u32> {
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
    if to == 0 {
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
    let got = get(at, &attributes)?;
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
