//! Transposes of matrices, through tiles in shared memory whose banks no two threads of a warp meet at.

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand};
use crate::family::Resources;
use crate::gather::blocks;
use crate::graph::{self, NoGraph};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Threads of a block, and its warps.
const THREADS: u32 = 256;
const WARPS: i64 = THREADS as i64 / 32;
/// Pairs of rows, and of columns, of a tile that is taken two by two: as many as two warps have threads, so rows of both matrices are
/// written and read 256 bytes at a time.
const PAIRS: i32 = 64;

/// A kernel. Its parameters: `x`, `[matrices, rows, columns]`; `y`, `[matrices, columns, rows]`; the tiles along the rows and along the columns, i32. The grid is
/// along x, tiles along the columns first, then along the rows, then matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transposed {
    /// What an element is.
    pub element: Scalar,
    /// Does a thread take two neighbours of 16 bits at once? Rows and columns are even then, and matrices begin at multiples of 4 bytes.
    pub pairs: bool,
}

impl Transposed {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        format!("transpose_{}{}", self.element, if self.pairs { "_pairs" } else { "" })
    }

    /// Rows and columns of a tile.
    pub(crate) fn side(self) -> u64 {
        match self.element.bytes() {
            _ if self.pairs => 2 * PAIRS as u64,
            8 => 32,
            _ => 64,
        }
    }

    /// Its kernel.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        let view = |name, access| {
            let ty = ViewType::new(self.element, 3, access);
            let ty = if self.pairs {
                let even = Dim::Any { multiple: 2 };
                ty.aligned(4).with_dims(&[Dim::ANY, even, even])
            } else {
                ty
            };
            k.view_of(name, ty)
        };
        let (x, y) = (view("x", Access::Read), view("y", Access::Write));
        let [down, along] =
            ["down", "along"].map(|name| k.scalar_in(name, Type::I32, 1, i64::from(i32::MAX)));
        let tile = k.block_id(Axis::X);
        let (rest, left) = (tile.div_u(along), tile.rem_u(along));
        let (matrix, top) = (rest.div_u(down), rest.rem_u(down));
        let side = self.side();
        let [matrix, top, left] =
            [(matrix, 1), (top, side), (left, side)].map(|(at, by)| at.to(Scalar::I64) * by);
        let tile = match self.pairs {
            true => k.shared("tile", Scalar::I32, &[2 * PAIRS as u32, PAIRS as u32]),
            false => k.shared("tile", self.element, &[side as u32, side as u32 + 1]),
        };
        let work = |whole| {
            let of = Tile { matrix, top, left, whole };
            match self.pairs {
                true => pairs(k, (x, y), of, tile, Type::vector(self.element, 2).unwrap_or(Type::I32)),
                false => single(k, (x, y), of, tile, (self.element, side as i64)),
            }
        };
        let fits = [(x, top, left), (y, left, top)].map(|(view, row, column)| {
            matrix.lt(view.extent(0)) & (row + side).le(view.extent(1)) & (column + side).le(view.extent(2))
        });
        k.if_else(fits[0] & fits[1], || work(true), || work(false));
        block.kernel()
    }
}

/// A tile of a matrix.
#[derive(Clone, Copy)]
struct Tile<'b> {
    matrix: Val<'b>,
    top: Val<'b>,
    left: Val<'b>,
    /// Is all of it there? Then nothing is asked of an element.
    whole: bool,
}

impl<'b> Tile<'b> {
    fn inside(self, row: Val<'b>, column: Val<'b>, view: PlaceRef<'b>) -> Option<Val<'b>> {
        let inside = || self.matrix.lt(view.extent(0)) & row.lt(view.extent(1)) & column.lt(view.extent(2));
        (!self.whole).then(inside)
    }
}

/// One by one. A row of the tile is an element longer than it has to be, so a column has all banks.
fn single<'b>(
    k: Builder<'b>,
    (x, y): (PlaceRef<'b>, PlaceRef<'b>),
    of: Tile<'b>,
    tile: PlaceRef<'b>,
    (element, side): (Scalar, i64),
) {
    let (lane, warp) = (k.lane_id().to(Scalar::I64), k.warp_id().to(Scalar::I64));
    let places: Vec<_> = (0..side)
        .step_by(WARPS as usize)
        .flat_map(|row| (0..side).step_by(32).map(move |at| (row, at)))
        .collect();
    let zero = k.constant(element.into(), 0);
    let loaded = places.iter().map(|(row, column)| {
        let (i, j) = (of.top + (warp + *row), of.left + (lane + *column));
        let load = || x.at([of.matrix, i, j]).cached(Cache::Stream).load();
        match of.inside(i, j, x) {
            Some(inside) => k.if_else(inside, load, || zero),
            None => load(),
        }
    });
    let loaded: Vec<_> = loaded.collect();
    for ((row, column), value) in places.iter().zip(loaded) {
        tile.at([warp + *row, lane + *column]).store(value);
    }
    k.barrier();
    for (row, column) in &places {
        let (i, j) = (of.left + (warp + *row), of.top + (lane + *column));
        let value = tile.at([lane + *column, warp + *row]).load();
        let store = || y.at([of.matrix, i, j]).cached(Cache::Stream).store(value);
        match of.inside(i, j, y) {
            Some(inside) => k.if_(inside, store),
            None => store(),
        }
    }
}

/// Two neighbours at once. Each thread takes squares of two rows and two columns, which it transposes in registers; what it has of a column is a word of
/// the tile, in a row for each column, where pair p of column c is at p xor c / 2: so the threads that write a row's words,
/// as those that read a column's, have a bank each.
fn pairs<'b>(
    k: Builder<'b>,
    (x, y): (PlaceRef<'b>, PlaceRef<'b>),
    of: Tile<'b>,
    tile: PlaceRef<'b>,
    vector: Type,
) {
    let (lane, warp) = (k.lane_id(), k.warp_id());
    let wide = |at: Val<'b>| at.to(Scalar::I64);
    let zero = k.i32(0);
    let squares: Vec<(i32, i32)> = (0..PAIRS)
        .step_by(WARPS as usize)
        .flat_map(|pair| (0..PAIRS).step_by(32).map(move |column| (pair, column)))
        .collect();
    let load = |row: Val<'b>, j: Val<'b>| {
        x.at([of.matrix, row, j]).cached(Cache::Stream).load_vector(2).bitcast(Type::I32)
    };
    let loaded = squares.iter().map(|(pair, column)| {
        let (i, j) = (of.top + wide((warp + *pair) * 2), of.left + wide((lane + *column) * 2));
        // With an even row the odd one behind it is inside, too.
        let both = || [load(i, j), load(i + 1, j)];
        match of.inside(i, j, x) {
            Some(inside) => k.if_else(inside, both, || [zero, zero]),
            None => both(),
        }
    });
    let loaded: Vec<_> = loaded.collect();
    for ((pair, column), [upper, lower]) in squares.iter().zip(loaded) {
        let at = (warp + *pair) ^ lane;
        let column = (lane + *column) * 2;
        tile.at([column, at]).store((upper & 0xffff) | (lower << 16));
        tile.at([column + 1, at]).store(upper.shr_u(16) | (lower & 0xffff_0000u32));
    }
    k.barrier();
    for row in (0..2 * PAIRS).step_by(WARPS as usize) {
        let column = warp + row;
        for first in (0..PAIRS).step_by(32) {
            let word = tile.at([column, (lane + first) ^ (column.shr_u(1) & 31)]).load();
            let (i, j) = (of.left + wide(column), of.top + wide((lane + first) * 2));
            let store = || y.at([of.matrix, i, j]).cached(Cache::Stream).store(word.bitcast(vector));
            match of.inside(i, j, y) {
                Some(inside) => k.if_(inside, store),
                None => store(),
            }
        }
    }
}

/// Transposes of matrices: y\[b, j, i\] = x\[b, i, j\], bit by bit. Its buffers: `x`, `[matrices, rows, columns]`; `y`, `[matrices, columns, rows]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transpose {
    /// Matrices, one behind the other.
    pub matrices: u64,
    /// Rows of each.
    pub rows: u64,
    /// Columns of each.
    pub columns: u64,
    /// What an element is: any type of memory.
    pub element: Scalar,
    /// Bytes to whose multiples both are aligned.
    pub align: u32,
}

impl Function for Transpose {
    fn buffers(&self) -> Vec<Buffer> {
        let Transpose { matrices, rows, columns, element, .. } = *self;
        vec![
            Buffer::new("x", element, &[matrices, rows, columns], Access::Read),
            Buffer::new("y", element, &[matrices, columns, rows], Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::tables::transpose(self)
    }

    fn call(&self, _: &Resources) -> Result<Call, CallError> {
        let Transpose { matrices, rows, columns, element, align } = *self;
        if [matrices, rows, columns].contains(&0) {
            return Ok(Call::default());
        }
        let even = rows.is_multiple_of(2) && columns.is_multiple_of(2);
        let kernel = Transposed { element, pairs: element.bytes() == 2 && even && align >= 4 };
        let [down, along] = [rows, columns].map(|extent| extent.div_ceil(kernel.side()));
        let tiles = down.checked_mul(along).and_then(|tiles| tiles.checked_mul(matrices)).unwrap_or(u64::MAX);
        let grid = [blocks("transpose", tiles, 1)?, 1, 1];
        let mut operands: Vec<_> = self
            .buffers()
            .iter()
            .enumerate()
            .map(|(at, buffer)| Operand::whole(at, element, &buffer.extents))
            .collect();
        // Below the number of tiles, which is one of i32.
        operands.extend([down, along].map(|tiles| Operand::i32(tiles as i32)));
        let launches = vec![Launch { entry: Entry::Transposed(kernel), grid, operands }];
        Ok(Call { launches, workspace: 0 })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        Transpose { align: aligned(self.align, buffers), ..*self }.call(resources)
    }
}
