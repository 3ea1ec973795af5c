//! The norm of all gradients together, by sums of squares in an order that the extents alone decide.

use super::{Shape, THREADS, of_tensor};
use vm_ir::builder::{BuildError, Builder, IRBlock, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// What torch adds to a norm before it divides by it.
const SMALL: f64 = 1e-6;

/// The value of all threads of a block of warps: by shuffles, then through an array with an element for each warp.
pub(crate) fn block_add<'b>(k: Builder<'b>, value: Val<'b>, scratch: PlaceRef<'b>, warps: u32) -> Val<'b> {
    let of_warp = value.warp_add();
    let lane = k.lane_id();
    k.if_(lane.eq(0), || scratch.at([k.warp_id()]).store(of_warp));
    k.barrier();
    let inside = lane.lt(warps as i32);
    k.if_else(inside, || scratch.at([lane]).load(), || k.constant(value.ty(), 0.0)).warp_add()
}

/// Sums of squares of tensors.
///
/// Its parameters: a view `[n]` of each tensor; `partial`, f32, an element for each block; `tiles`, i32, the chunks of
/// `256 · lanes · vectors` elements that a block adds up; the ends, i32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Squares {
    /// What the tensors hold.
    pub element: Scalar,
    /// How many tensors, and in which pieces.
    pub shape: Shape,
}

impl Squares {
    /// Its name.
    pub fn name(&self) -> String {
        format!("squares_{}_{}", self.element, self.shape.suffix())
    }

    /// Its kernel.
    ///
    /// # Errors
    /// More tensors than there is room for parameters.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        self.write(block.builder());
        block.kernel()
    }

    fn write<'b>(self, k: Builder<'b>) {
        let Squares { element, shape } = self;
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        let tensors: Vec<_> =
            (0..shape.tensors as usize).map(|at| shape.view(k, "x", at, element, Access::Read)).collect();
        let partial = k.view("partial", Scalar::F32, 1, Access::Write);
        let tiles = k.scalar_in("tiles", Type::I32, 1, i64::from(i32::MAX));
        let ends = shape.ends(k);
        let scratch = k.shared("sums", Scalar::F32, &[THREADS / 32]);
        let vector = Type::vector(Scalar::F32, shape.lanes).unwrap_or(Type::F32);
        let mine = of_tensor(k, &ends, &|at, block| {
            let x = tensors[at];
            let n = x.extent(0);
            let from = (block.to(Scalar::I64) * tiles.to(Scalar::I64)) * shape.chunk();
            let zero = (k.constant(vector, 0.0), k.f32(0.0));
            let (sums, rest) = k.range(k.i32(0), tiles).fold(zero, |tile, (sums, rest)| {
                let first = from + tile.to(Scalar::I64) * shape.chunk();
                k.if_else(
                    first.ge(0) & shape.is_inside(first, n),
                    || {
                        let places = shape.places(k, first);
                        let load = |at: &Val<'b>| x.at([*at]).cached(Cache::Stream).load_vector(shape.lanes);
                        let loaded: Vec<_> = places.iter().map(load).collect();
                        let wide = loaded.iter().map(|value| value.to(Scalar::F32));
                        (wide.fold(sums, |sum, value| value.fma(value, sum)), rest)
                    },
                    || {
                        let low = first + k.thread_id(Axis::X).to(Scalar::I64);
                        let high = (first + shape.chunk() as i64).min(n);
                        let rest = k.range(low, high).step(THREADS).fold(rest, |at, sum| {
                            let value = x.at([at]).load().to(Scalar::F32);
                            value.fma(value, sum)
                        });
                        (sums, rest)
                    },
                )
            });
            (0..shape.lanes).fold(rest, |sum, lane| sum + sums.lane(lane))
        });
        let sum = block_add(k, mine, scratch, THREADS / 32);
        k.if_(k.thread_id(Axis::X).eq(0), || partial.at([k.block_id(Axis::X)]).store(sum));
    }
}

/// The norm of what [`Squares`] left, by one block; and the factor that clips it.
///
/// Its parameters: `partial`, f32; `norm`, f32 `[1]`; if it clips, `scale`, f32 `[1]`, and the greatest norm, f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Finish {
    /// Is the factor wanted?
    pub clips: bool,
}

impl Finish {
    /// Its name.
    pub fn name(&self) -> String {
        if self.clips { "norm_clip".into() } else { "norm".into() }
    }

    /// Its kernel.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        const WIDE: u32 = 1024;
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([WIDE, 1, 1]);
        let partial = k.view("partial", Scalar::F32, 1, Access::Read);
        let one = |name| k.view_of(name, ViewType::new(Scalar::F32, 1, Access::Write));
        let norm = one("norm");
        let clip = self.clips.then(|| (one("scale"), k.scalar("most", Type::F32)));
        let scratch = k.shared("sums", Scalar::F32, &[WIDE / 32]);
        let t = k.thread_id(Axis::X).to(Scalar::I64);
        let mine = k
            .range(t, partial.extent(0))
            .step(WIDE)
            .fold(k.f32(0.0), |at, sum| sum + partial.at([at]).load());
        let length = block_add(k, mine, scratch, WIDE / 32).sqrt();
        k.if_(t.eq(0), || {
            norm.at([k.i64(0)]).store(length);
            if let Some((scale, most)) = clip {
                scale.at([k.i64(0)]).store((most / (length + SMALL)).minimum(1.0));
            }
        });
        block.kernel()
    }
}
