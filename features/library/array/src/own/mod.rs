//! Functions with kernels of their own: sorting, scans, scatters, searches.

mod radix;
mod scan;
mod scatter;
mod search;
mod sort;
mod tiles;

use vm_ir::Scalar;
use vm_ir::builder::{Builder, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};

use crate::device::Device;
use crate::dtype::DType;
use crate::emit::{RUN, THREADS};
use crate::error::{Error, Result};

/// Runs `body` for each number below `total`: a GPU's thread takes one, a processor's block many.
fn each<'b>(k: Builder<'b>, cpu: bool, total: Val<'b>, body: impl FnOnce(Val<'b>)) {
    if cpu {
        let first = k.block_id(Axis::X).to(Scalar::I64) * RUN;
        k.range(first, (first + RUN).min(total)).each(body);
    } else {
        k.block_size([THREADS, 1, 1]);
        let at = k.global_id(Axis::X);
        k.if_(at.lt(total), || body(at));
    }
}

/// A launch of so many blocks.
fn blocks(total: u64) -> Result<[u32; 3]> {
    let blocks = u32::try_from(total.max(1)).ok().filter(|blocks| *blocks < 1 << 31);
    blocks
        .map(|blocks| [blocks, 1, 1])
        .ok_or_else(|| Error::Device(format!("{total} blocks are too many for a launch")))
}

fn grid(device: &Device, total: u64) -> Result<[u32; 3]> {
    blocks(total.div_ceil(if device.is_sequential() { RUN as u64 } else { THREADS.into() }))
}

fn view(dtype: DType, rank: usize, access: Access, names: &[&str]) -> ViewType {
    ViewType::new(dtype.stored(), rank, access).named(names)
}
