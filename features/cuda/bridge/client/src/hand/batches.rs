//! Batches of copies of three dimensions, which may be made in any order: they are made one after the other.

use vm_bridge::wire::code;
use vm_bridge::wire::strided::{ARRAY, End, Form, UNIFIED};
use vm_cuda_api::{FUNCTIONS, names::is_per_thread};

use super::copies::{NONE, ORDERS};
use super::{cuMemcpy3DAsync_v2, the, the_form};
use crate::forward;
use crate::sys::caller;

/// Words of a `CUDA_MEMCPY3D_BATCH_OP`: two operands, an extent, and when what is copied may be read, with flags.
const OPERATION: usize = 14;
const OPERAND: usize = 5;
const EXTENT: usize = 2 * OPERAND;
/// `CUmemcpy3DOperandType`.
const POINTER: u32 = 1;
const IN_ARRAY: u32 = 2;

/// Bytes of an array's element.
fn element(array: u64) -> Result<u64, u32> {
    let mut descriptor = [0u64; 5];
    let words = [descriptor.as_mut_ptr() as usize, array as usize];
    forward::ask(the("cuArray3DGetDescriptor_v2")?, &words)?;
    // `CUarray_format`, and how many channels.
    let bytes = match descriptor[3] as u32 {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return Err(code::NOT_SUPPORTED),
    };
    Ok(bytes * (descriptor[3] >> 32))
}

/// An operand's words.
fn operand(at: usize) -> [u64; OPERAND] {
    std::array::from_fn(|word| caller::word(at + 8 * word))
}

/// The `CUDA_MEMCPY3D` that says the same as an operation.
fn copy(at: usize) -> Result<Vec<u64>, u32> {
    let form = Form::Three;
    let (operands, mut copy) = ([0, OPERAND].map(|word| operand(at + 8 * word)), vec![0; form.words()]);
    // All is told in elements: bytes, where there is no array.
    let array = operands.iter().find(|operand| operand[0] as u32 == IN_ARRAY);
    let unit = array.map_or(Ok(1), |operand| element(operand[1]))?;
    let times = |value: u64| value.checked_mul(unit).ok_or(code::INVALID_VALUE);
    let extent = [0, 1, 2].map(|side| caller::word(at + 8 * (EXTENT + side)));
    let order = caller::word(at + 8 * (EXTENT + 3));
    if extent.contains(&0) || !ORDERS.contains(&(order as u32)) {
        return Err(code::INVALID_VALUE);
    }
    form.resize(&mut copy, [times(extent[0])?, extent[1], extent[2]]);
    for (operand, end) in operands.iter().zip(form.ends()) {
        let End { origin, kind, device, array, pitch, height, .. } = end;
        match operand[0] as u32 {
            POINTER => {
                let [_, at, row, rows, _] = *operand;
                (copy[kind], copy[device]) = (UNIFIED, at);
                copy[pitch] = if row == 0 { times(extent[0])? } else { times(row)? };
                copy[height.unwrap_or(pitch)] = if rows == 0 { extent[1] } else { rows };
            }
            IN_ARRAY => {
                (copy[kind], copy[array]) = (ARRAY, operand[1]);
                for (side, place) in origin.into_iter().enumerate() {
                    let from = operand[2 + side];
                    copy[place.unwrap_or(0)] = if side == 0 { times(from)? } else { from };
                }
            }
            _ => return Err(code::INVALID_VALUE),
        }
    }
    Ok(copy)
}

fn batch(number: usize, [count, list, fail_to, flags, stream]: [usize; 5]) -> Result<(), u32> {
    caller::write(fail_to, NONE);
    let is_legacy = stream == 1 || stream == 0 && !is_per_thread(&FUNCTIONS[number].name);
    if count == 0 || list == 0 || flags != 0 || is_legacy {
        return Err(code::INVALID_VALUE);
    }
    let each = the_form("cuMemcpy3DAsync_v2", number)?;
    for index in 0..count {
        let made = copy(list + 8 * OPERATION * index)
            .and_then(|copy| cuMemcpy3DAsync_v2(each, &[copy.as_ptr() as usize, stream]));
        made.inspect_err(|_| caller::write(fail_to, index as u64))?;
    }
    Ok(())
}

pub(crate) fn cuMemcpy3DBatchAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    let [count, list, fail_to, flags, stream] = *words else { return Err(code::INVALID_VALUE) };
    batch(number, [count, list, fail_to, flags, stream])
}

pub(crate) fn cuMemcpy3DBatchAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    let [count, list, flags, stream] = *words else { return Err(code::INVALID_VALUE) };
    batch(number, [count, list, 0, flags, stream])
}
