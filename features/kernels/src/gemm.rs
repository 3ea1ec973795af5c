//! C = A · B, of matrices of f16 or bf16; products are summed in f32.
//!
//! Views, slowest dimension first: `a` is `[M, K]`, `b` is `[K, N]`, or `[N, K]` where it is transposed, `c` is `[M, N]`. Rows
//! begin on multiples of 16 bytes, and may have any distance; M, N and K are any numbers from 1 on.
//!
//! A block computes tiles of C until there are no more, so a launch is best of as many blocks as the device has multiprocessors,
//! and right with any number. Tiles are taken in bands of [`Gemm::band`] rows of tiles, one column of tiles after the other, so that
//! what is taken at the same time shares rows of A and columns of B in the cache.

use vm_ir::builder::{BuildError, IRBlock};
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// What A and B hold: f16 or bf16.
    pub element: Scalar,
    /// What C holds: the same, or f32.
    pub output: Scalar,
    /// Is B given transposed?
    pub b_transposed: bool,
    /// Rows and columns of a tile of C, and how much of the inner dimension is copied at once.
    pub tile: [u32; 3],
    /// Tiles of A and of B that are on their way or in use.
    pub stages: u32,
    /// Groups of warps that share the rows of a tile.
    pub groups: u32,
    /// Rows of tiles in a band.
    pub band: u32,
}

impl Gemm {
    /// The variant for large matrices.
    pub const LARGE: Gemm = Gemm {
        element: Scalar::Bf16,
        output: Scalar::Bf16,
        b_transposed: false,
        tile: [128, 256, 64],
        stages: 3,
        groups: 2,
        band: 16,
    };

    /// The variant for matrices of few tiles.
    pub const SMALL: Gemm = Gemm { tile: [64, 64, 64], stages: 4, groups: 1, band: 8, ..Gemm::LARGE };

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let [rows, columns, inner] = self.tile;
        let (element, output) = (self.element, self.output);
        let order = if self.b_transposed { "nt" } else { "nn" };
        let (stages, groups, band) = (self.stages, self.groups, self.band);
        format!("gemm_{order}_{element}_{output}_{rows}x{columns}x{inner}_s{stages}_g{groups}_b{band}")
    }

    /// The kernel, of parameters `a`, `b` and `c`.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).tile_groups(self.groups);
        let [rows, columns, inner] = self.tile;
        let view = |name, element, access| k.view_of(name, ViewType::new(element, 2, access).aligned(16));
        let a = view("a", self.element, Access::Read);
        let b = view("b", self.element, Access::Read);
        let c = view("c", self.output, Access::Write);
        let of_b = if self.b_transposed { [columns, inner] } else { [inner, columns] };
        let from_a = k.channel("from_a", self.element, [rows, inner], self.stages);
        let from_b = k.channel("from_b", self.element, of_b, self.stages);
        let sum = k.fragment("sum", Scalar::F32, [rows, columns]);

        let out = match self.output {
            Scalar::F32 => sum,
            narrow => k.fragment("out", narrow, [rows, columns]),
        };

        let [rows, columns, inner] = [rows, columns, inner].map(|extent| k.i64(extent.into()));
        let high = ((c.extent(0) + rows - 1) / rows).named("high");
        let wide = ((c.extent(1) + columns - 1) / columns).named("wide");
        let depth = a.extent(1).named("depth");
        let band = k.i64(self.band.into());
        let of_band = (band * wide).named("of_band");
        let first = k.block_id(Axis::X).to_u(Scalar::I64);
        let step = k.grid_dim(Axis::X).to_u(Scalar::I64);
        k.range(first, high * wide).step(step).each(|tile| {
            let top = tile / of_band * band;
            let inside = tile % of_band;
            // The last band may be lower.
            let height = (high - top).min(band);
            let row = (top + inside % height) * rows;
            let column = inside / height * columns;
            sum.fill(0.0);
            k.range(k.i64(0), depth).step(inner).each(|at| {
                from_a.fetch(a, [row, at]);
                from_b.fetch(b, if self.b_transposed { [column, at] } else { [at, column] });
                match self.b_transposed {
                    true => sum.mma(from_a, from_b.transposed()),
                    false => sum.mma(from_a, from_b),
                }
                from_a.release();
                from_b.release();
            });
            if self.output != Scalar::F32 {
                k.map([out], [sum], |_, _, [sum]| [sum.to(self.output)]);
            }
            out.put(c, [row, column]);
        });
        block.kernel()
    }
}
