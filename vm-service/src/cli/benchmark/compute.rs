//! Kernels that show what a device computes: chains of multiplications and additions, and a copy of its memory.

use vm_ir::builder::BuildError;
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

/// Work-items of a block, of both.
pub(super) const ITEMS: u64 = 256;
/// Elements that a work-item of the copy takes.
pub(super) const LANES: u64 = 4;
/// Chains of a work-item, which do not wait for each other.
const CHAINS: usize = 8;
/// Links that each chain gets in a round.
const LINKS: usize = 8;
/// Operations of a work-item in a round: each link multiplies and adds.
pub(super) const ROUND: u64 = 2 * (CHAINS * LINKS) as u64;

/// `fma(out [f32; ?], rounds i32)`: so many rounds by each work-item; what comes of them is written, where there is room.
pub(super) fn arithmetic() -> Result<Kernel, BuildError> {
    let block = IRBlock::new(GuestAddr(0));
    let k = block.builder();
    k.name("fma").block_size([ITEMS as u32, 1, 1]);
    let out = k.view("out", Scalar::F32, 1, Access::Write);
    let rounds = k.scalar("rounds", Type::I32);
    let item = k.global_id(Axis::X);
    let (by, and) = (k.f32(0.999), item.to(Scalar::F32) * 1e-9);
    let first: [_; CHAINS] = std::array::from_fn(|chain| and + chain as f64);
    let chains = k
        .range(k.i32(0), rounds)
        .fold(first, |_, chains| (0..LINKS).fold(chains, |chains, _| chains.map(|chain| chain.fma(by, and))));
    let sum = chains.into_iter().reduce(|a, b| a + b).unwrap_or(and);
    k.if_(item.lt(out.extent(0)), || out.at([item]).store(sum));
    block.kernel()
}

/// `copy(from [f32; ?*4], to [f32; ?*4])`: 16 bytes by each work-item.
pub(super) fn copy() -> Result<Kernel, BuildError> {
    let block = IRBlock::new(GuestAddr(0));
    let k = block.builder();
    k.name("copy").block_size([ITEMS as u32, 1, 1]);
    let view = |name, access| {
        let ty = ViewType::new(Scalar::F32, 1, access).aligned(16);
        k.view_of(name, ty.with_dims(&[Dim::Any { multiple: LANES as u32 }]))
    };
    let (from, to) = (view("from", Access::Read), view("to", Access::Write));
    let at = k.global_id(Axis::X) * LANES as i64;
    let inside = at.lt(from.extent(0)) & at.lt(to.extent(0));
    k.if_(inside, || to.at([at]).store(from.at([at]).load_vector(LANES as u8)));
    block.kernel()
}
