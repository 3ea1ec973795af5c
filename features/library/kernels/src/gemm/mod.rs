//! C = f(α · A · B + β · C + bias), of matrices of f16, bf16, tf32, f32, FP8 or i8.
//!
//! Views, slowest dimension first: `a` is `[M, K]`, or `[K, M]` where it is transposed, `b` is `[K, N]`, or `[N, K]`, `c` is
//! `[M, N]`. Rows begin on multiples of [`Gemm::align`] bytes, and may have any distance; M, N and K are any numbers from 1 on. A view of tf32
//! is one of f32, each element of which is rounded to the nearest.
//!
//! Products of f16, bf16, tf32 and FP8 are summed in f32, those of i8 in i32, which wraps; those of f32 are of class 2^-21 (each is
//! the sum of three products of tf32 where there is no other instruction). On Hopper products of FP8 are added up by the tensor
//! core alone, which is what cuBLAS calls fast accumulation: an addition of 32 of them keeps about 13 bits of the greatest term, so that a sum is
//! of class K / 32 · 2^-13 of Σ |a · b|. With [`Scales::Blocks`] that goes for each 128 of them, and parts are added in f32.
//!
//! Parameters behind these, as far as a variant has them, in this order: `alpha` and `beta`, f32; `a_scale` and `b_scale`, f32
//! ([`Scales`]); `bias`, `[N]`, of C's type; `aux`, as C ([`Auxiliary`]); `offsets`, i32 ([`Batch::Grouped`]).
//!
//! A block computes tiles of C until there are no more, so a launch is best of as many blocks as the device has multiprocessors,
//! and right with any number (a multiple of [`Gemm::cluster`]). Tiles are taken in bands of [`Gemm::band`] rows of tiles, one
//! column of tiles after the other, so that what is taken at the same time shares rows of A and columns of B in the cache.

mod call;
mod epilogue;
mod line;
mod schedule;
mod table;

pub use call::Multiply;
pub use epilogue::{Activation, Auxiliary, Epilogue, Scales};
pub use schedule::Batch;
pub use table::Product;

use epilogue::After;
use schedule::{Spot, Walk};
use vm_ir::builder::{BuildError, Builder, ChannelRef, FragmentRef, IRBlock, PlaceRef, Val};
use vm_ir::types::Type;
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// What A and B hold: f16, bf16, tf32, f32, f8e4m3, f8e5m2 or i8.
    pub element: Scalar,
    /// What C holds: f16, bf16 or f32; i32 for i8.
    pub output: Scalar,
    /// Is A given transposed? Of elements of 16 bits alone, on a GPU.
    pub a_transposed: bool,
    /// Is B given transposed? On a GPU, B of elements that don't have 16 bits is.
    pub b_transposed: bool,
    /// One product, or many.
    pub batch: Batch,
    /// What is done with a sum.
    pub epilogue: Epilogue,
    /// Rows and columns of a tile of C, and how much of the inner dimension is copied at once. Of one row: the columns of a block, and
    /// the elements of a vector, on a processor, with A that is not transposed, without [`Scales`], [`Auxiliary`] and [`Batch::Grouped`].
    pub tile: [u32; 3],
    /// Tiles of A and of B that are on their way or in use.
    pub stages: u32,
    /// Groups of warps that share the rows of a tile.
    pub groups: u32,
    /// Blocks below each other that fetch their tiles of B together: 1, 2, 4 or 8.
    pub cluster: u32,
    /// Blocks of a cluster that share the inner dimension of a tile, each with a part of it: 1, 2, 4 or 8 (split-K). For few tiles
    /// and a long inner dimension, on Hopper: elsewhere each block goes through all of it. With `cluster` 1, and without
    /// [`Scales::Blocks`] and [`Batch::Grouped`].
    pub split: u32,
    /// Does a product begin before the one before it is over? That takes a stage more. Without [`Scales::Blocks`].
    pub overlap: bool,
    /// Rows of tiles in a band; 0 for a block of its own for each tile, which is number x in its row of tiles, and in row y, of
    /// product z.
    pub band: u32,
    /// Are tiles computed transposed? Then their columns are the rows of an instruction, which has at least 64 of them: for
    /// fewer rows than that. Of one product, or a batch, without an epilogue.
    pub swapped: bool,
    /// Bytes to whose multiples the matrices and their rows are aligned: 16, or an element's for any place in memory, which no
    /// copying engine takes.
    pub align: u32,
}

/// A factor: its view, its channel, and whether it is given transposed.
#[derive(Clone, Copy)]
struct Side<'b> {
    view: PlaceRef<'b>,
    channel: ChannelRef<'b>,
    transposed: bool,
}

impl<'b> Side<'b> {
    /// Fetches what begins at a place of the factor as it is multiplied; in a batch, of its matrix with this number.
    fn fetch(self, matrix: Option<Val<'b>>, row: Val<'b>, column: Val<'b>) {
        let [row, column] = if self.transposed { [column, row] } else { [row, column] };
        match matrix {
            Some(matrix) => self.channel.fetch(self.view, [matrix, row, column]),
            None => self.channel.fetch(self.view, [row, column]),
        }
    }
}

impl Gemm {
    /// The variant for large matrices.
    pub const LARGE: Gemm = Gemm {
        element: Scalar::Bf16,
        output: Scalar::Bf16,
        a_transposed: false,
        b_transposed: false,
        batch: Batch::One,
        epilogue: Epilogue::NONE,
        tile: [128, 256, 64],
        stages: 3,
        groups: 2,
        cluster: 1,
        split: 1,
        overlap: false,
        band: 16,
        swapped: false,
        align: 16,
    };

    /// The variant for matrices of few tiles.
    pub const SMALL: Gemm = Gemm { tile: [64, 64, 64], stages: 4, groups: 1, band: 8, ..Gemm::LARGE };

    /// The variant for processors, of f32: its tiles stay in a core's L2 cache. A launch is best of a block for each tile of C.
    pub const CPU: Gemm = Gemm {
        element: Scalar::F32,
        output: Scalar::F32,
        tile: [128, 256, 128],
        stages: 1,
        groups: 1,
        band: 4,
        ..Gemm::LARGE
    };

    /// What sums are of.
    pub fn sum(&self) -> Scalar {
        if self.element == Scalar::I8 { Scalar::I32 } else { Scalar::F32 }
    }

    /// Rows and columns of what sums up.
    fn sum_dims(&self) -> [u32; 2] {
        let [rows, columns, _] = self.tile;
        if self.swapped { [columns, rows] } else { [rows, columns] }
    }

    /// Rows and columns of what a block has of a sum in the end.
    fn own_dims(&self) -> [u32; 2] {
        let [rows, columns] = self.sum_dims();
        [rows, columns / if self.shares() { self.split.max(1) } else { 1 }]
    }

    /// Is a sum that blocks have in part shared out among them, and not given whole to the first? So it is where each gets whole
    /// columns of an instruction's.
    fn shares(&self) -> bool {
        self.sum_dims()[1].is_multiple_of(8 * self.split.max(1))
    }

    /// Blocks of a cluster.
    fn blocks(&self) -> u32 {
        self.cluster.max(self.split)
    }

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let [rows, columns, inner] = self.tile;
        let (element, output) = (self.element, self.output);
        let swapped = if self.swapped { "w" } else { "" };
        let order = |transposed| if transposed { "t" } else { "n" };
        let (a, b) = (order(self.a_transposed), order(self.b_transposed));
        let (batch, epilogue) = (self.batch.suffix(), self.epilogue.suffix());
        let (stages, groups, cluster, band) = (self.stages, self.groups, self.cluster, self.band);
        let split = if self.split > 1 { format!("_k{}", self.split) } else { String::new() };
        let overlap = if self.overlap { "_o" } else { "" };
        let anywhere = if self.align < 16 { "_any" } else { "" };
        format!(
            "gemm{batch}_{a}{b}_{element}_{output}{epilogue}_{rows}x{columns}x{inner}_s{stages}_g{groups}_c{cluster}_b{band}{swapped}{split}{overlap}{anywhere}"
        )
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name());
        if !self.is_line() {
            k.tile_groups(self.groups).cluster_size(self.blocks());
        }
        let [rows, columns, inner] = self.tile;
        let loaded = if self.element == Scalar::Tf32 { Scalar::F32 } else { self.element };
        let a = self.view(k, "a", loaded, self.batch.of_rows(), Access::Read);
        let b = self.view(k, "b", loaded, self.batch.of_columns(), Access::Read);
        let access = if self.epilogue.plus { Access::ReadWrite } else { Access::Write };
        let c = self.view(k, "c", self.output, self.batch.of_rows(), access);
        let after = self.epilogue.parameters(k, self);
        if self.is_line() {
            self.line(k.block_size([1, 1, 1]), [a, b, c], after);
            return block.kernel();
        }
        let offsets = (self.batch == Batch::Grouped).then(|| k.view("offsets", Scalar::I32, 1, Access::Read));

        let stage = |transposed, [rows, columns]: [u32; 2]| {
            if transposed { [columns, rows] } else { [rows, columns] }
        };
        let (of_a, of_b) =
            (stage(self.a_transposed, [rows, inner]), stage(self.b_transposed, [inner, columns]));
        let from_a = k.channel("from_a", self.element, of_a, self.stages);
        let from_b = match self.cluster {
            1 => k.channel("from_b", self.element, of_b, self.stages),
            _ => k.multicast("from_b", self.element, of_b, self.stages),
        };
        let of_sum = self.sum_dims();
        let sum = k.fragment("sum", self.sum(), of_sum);
        let part = match self.epilogue.scales {
            Scales::Blocks => k.fragment("part", self.sum(), [rows, columns]),
            _ => sum,
        };
        let own_dims = self.own_dims();
        let own = if self.split > 1 { k.fragment("own", self.sum(), own_dims) } else { sum };
        let a = Side { view: a, channel: from_a, transposed: self.a_transposed };
        let b = Side { view: b, channel: from_b, transposed: self.b_transposed };
        let out = if self.output == self.sum() { own } else { k.fragment("out", self.output, own_dims) };
        let after = after.fragments(k, self, [own, part, out]);

        let depth = a
            .view
            .extent(self.batch.rank_of_a() - 1 - u8::from(self.a_transposed))
            .to(Scalar::I32)
            .named("depth");
        Walk { gemm: self, k, c, offsets }.each(|spot| {
            self.fill(k, sum);
            let products = |begin, length| self.products(&spot, [a, b], part, &after, (begin, length));
            let here = spot.own();
            after.begin(&here);
            if self.split > 1 {
                let inner = inner as i32;
                let length = (depth - 1) / (inner * self.split as i32) * inner + inner;
                k.for_cluster(|number| products(Some(number * length), length));
                own.share(sum);
            } else {
                products(None, depth);
            }
            after.finish(&here, c);
            match self.swapped {
                true => here.put_transposed(out, c),
                false => here.put(out, c),
            }
        });
        block.kernel()
    }

    /// Adds up the products of so much of the inner dimension, from somewhere on.
    fn products<'b>(
        &self,
        spot: &Spot<'b>,
        [a, b]: [Side<'b>; 2],
        sum: FragmentRef<'b>,
        after: &After<'b>,
        (begin, length): (Option<Val<'b>>, Val<'b>),
    ) {
        let (k, inner) = (length.builder(), self.tile[2] as i32);
        let multiply = |at: Val<'b>| {
            let from = begin.map_or(at, |begin| begin + at);
            a.fetch(spot.matrix_of_a(), spot.row_of_a(), from);
            b.fetch(spot.matrix_of_b(), from, spot.column);
            self.multiply(sum, a, b);
            after.step(spot, from);
        };
        let release = || [a, b].into_iter().for_each(|side| side.channel.release());
        if self.overlap {
            multiply(k.i32(0));
            k.range(k.i32(inner), length).step(inner).each(|at| {
                multiply(at);
                release();
            });
            return release();
        }
        k.range(k.i32(0), length).step(inner).each(|at| {
            multiply(at);
            release();
        });
    }

    fn view<'b>(
        &self,
        k: Builder<'b>,
        name: &str,
        element: Scalar,
        rank: usize,
        access: Access,
    ) -> PlaceRef<'b> {
        k.view_of(name, ViewType::new(element, rank, access).aligned(self.align.max(element.bytes())))
    }

    fn fill<'b>(&self, k: Builder<'b>, sum: FragmentRef<'b>) {
        sum.fill(k.bits(Type::from(self.sum()), 0));
    }

    fn multiply<'b>(&self, sum: FragmentRef<'b>, a: Side<'b>, b: Side<'b>) {
        let left = vm_ir::builder::Factor::from(a.channel);
        let right = vm_ir::builder::Factor::from(b.channel);
        let left = if a.transposed { left.transposed() } else { left };
        let right = if b.transposed { right.transposed() } else { right };
        let (left, right) =
            if self.swapped { (right.transposed(), left.transposed()) } else { (left, right) };
        match self.epilogue.scales {
            Scales::Blocks => sum.product(left, right),
            _ => sum.mma(left, right),
        }
    }
}
