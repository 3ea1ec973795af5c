//! The block of a kernel with which most threads are resident, found in the program: the driver would call a function of it meanwhile.

use vm_bridge::wire::code;

use super::the;
use crate::forward;
use crate::sys::{call, caller};

/// `CU_DEVICE_ATTRIBUTE_…`.
const MAX_THREADS_PER_BLOCK: u32 = 1;
const WARP_SIZE: u32 = 10;
const MULTIPROCESSOR_COUNT: u32 = 16;
const MAX_THREADS_PER_MULTIPROCESSOR: u32 = 39;
/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`.
const MAX_THREADS_OF_FUNCTION: usize = 0;

/// A question whose answer is a number of 32 bits.
fn number(name: &str, rest: &[usize]) -> Result<u32, u32> {
    let mut answer = 0u32;
    let words: Vec<usize> = [&raw mut answer as usize].iter().chain(rest).copied().collect();
    forward::keep(the(name)?, &words)?;
    Ok(answer)
}

fn of_device(attribute: u32) -> Result<u32, u32> {
    let mut device = 0u32;
    forward::ask(the("cuCtxGetDevice")?, &[&raw mut device as usize])?;
    let mut answer = 0u32;
    let words = [&raw mut answer as usize, attribute as usize, device as usize];
    super::cuDeviceGetAttribute(the("cuDeviceGetAttribute")?, &words)?;
    Ok(answer)
}

/// Tries blocks of whole warps, from the largest on, as `cudaOccupancyMaxPotentialBlockSize` of the runtime's headers does: of those with as many resident
/// threads the largest.
fn most(words: &[usize], flags: usize) -> Result<(), u32> {
    let [grid, block, function, shared_of, shared, limit, ..] = *words else {
        return Err(code::INVALID_VALUE);
    };
    if grid == 0 || block == 0 {
        return Err(code::INVALID_VALUE);
    }
    let resident = of_device(MAX_THREADS_PER_MULTIPROCESSOR)?;
    let warp = of_device(WARP_SIZE)?.max(1);
    let mut largest = of_device(MAX_THREADS_PER_BLOCK)?
        .min(number("cuFuncGetAttribute", &[MAX_THREADS_OF_FUNCTION, function])?);
    if limit as u32 as i32 > 0 {
        largest = largest.min(limit as u32);
    }
    let (mut threads, mut best) = (0, (0, 0));
    for warps in (1..=largest.div_ceil(warp)).rev() {
        let tried = (warps * warp).min(largest);
        let shared = if shared_of == 0 { shared } else { call::shared(shared_of, tried) };
        let name = "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags";
        let blocks = number(name, &[function, tried as usize, shared, flags])?;
        if blocks.saturating_mul(tried) > threads {
            (threads, best) = (blocks.saturating_mul(tried), (blocks, tried));
        }
        if threads >= resident {
            break;
        }
    }
    let blocks = best.0.saturating_mul(of_device(MULTIPROCESSOR_COUNT)?);
    caller::write_bytes(grid, &blocks.to_ne_bytes());
    caller::write_bytes(block, &best.1.to_ne_bytes());
    Ok(())
}

pub(crate) fn cuOccupancyMaxPotentialBlockSize(_: usize, words: &[usize]) -> Result<(), u32> {
    most(words, 0)
}

pub(crate) fn cuOccupancyMaxPotentialBlockSizeWithFlags(_: usize, words: &[usize]) -> Result<(), u32> {
    most(words, words.get(6).map_or(0, |flags| *flags as u32 as usize))
}
