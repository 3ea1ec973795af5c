//! Arrays in FP8, and the scales that products of them and attention take.
//!
//! A scale belongs to some neighbouring elements, its *grain*: `scale = max |x| / greatest`, and `y = x / scale`, rounded to the nearest of FP8, so that
//! the greatest magnitude becomes the greatest number of the type (448 of E4M3, 57,344 of E5M2), and `y · scale` is near to x. A scale is at least 2^-126, with
//! which zeros stay zeros. What has a NaN or an infinity has a scale that is one, and so is no number when it is multiplied back.
//!
//! | grain | scales | for |
//! | --- | --- | --- |
//! | [`Grain::Rows`] | `[rows]` | [`Scales::Rows`](crate::gemm::Scales::Rows): A, and B given transposed |
//! | [`Grain::Lines`] | `[⌈columns / 128⌉, rows]` | [`Scales::Blocks`](crate::gemm::Scales::Blocks): A |
//! | [`Grain::Squares`] | `[⌈columns / 128⌉, ⌈rows / 128⌉]` | the same: B given transposed, `[N, K]` |
//!
//! With a scale that is known, as of a whole tensor, [`Chain::scale`](crate::elementwise::Chain::scale) makes FP8 of other floats.
//! On a GPU elements are read once: lines and squares always, rows as far as registers hold them ([`row`](crate::row)).

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, kernel_name};
use crate::family::{Kind, Resources};
use crate::flat::floats;
use crate::gather::blocks;
use crate::graph::{self, NoGraph};
use crate::pieces::{Pieces, THREADS, lanes};
use crate::row::{Layout, MAX_COLUMNS, column, each_row, launch_views, matrix};
use crate::strided::{aligned, step};
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Elements of a line, and rows of a square.
pub(crate) const SIDE: u32 = 128;
/// Warps of a block.
const WARPS: u32 = THREADS / 32;
/// Elements that a processor takes at once.
const AT_ONCE: u8 = 16;

/// What has a scale of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grain {
    /// A row.
    Rows,
    /// 128 elements of a row.
    Lines,
    /// 128 elements of each of 128 rows.
    Squares,
}

impl Grain {
    /// Rows that share a scale, where a row has several.
    const fn height(self) -> u32 {
        if matches!(self, Grain::Squares) { SIDE } else { 1 }
    }
}

/// How elements are divided among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// By rows.
    Rows(Layout),
    /// A warp has a line, a block 8 below each other, or a square; a thread takes so many elements at once.
    Blocks {
        /// 1, 2 or 4, of which columns are a multiple.
        lanes: u8,
    },
    /// A block's only thread has all lines of a row, or all squares beside each other, as a processor does.
    Serial,
}

/// A variant. Its parameters: `x` and `y`, `[rows, columns]`; `scales`, f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantised {
    /// What x holds: f32, bf16 or f16.
    pub input: Scalar,
    /// What y holds: f8e4m3 or f8e5m2.
    pub output: Scalar,
    /// What has a scale.
    pub grain: Grain,
    /// How elements are divided.
    pub cut: Cut,
}

/// A scale and its reciprocal.
#[derive(Clone, Copy)]
struct Scale<'b> {
    scale: Val<'b>,
    inverse: Val<'b>,
}

impl Quantised {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let Quantised { input, output, grain, cut } = self;
        let grain = match grain {
            Grain::Rows => "rows",
            Grain::Lines => "lines",
            Grain::Squares => "squares",
        };
        let cut = match cut {
            Cut::Rows(layout) => layout.name(),
            Cut::Blocks { lanes } => format!("x{lanes}"),
            Cut::Serial => "serial".to_owned(),
        };
        format!("quantise_{input}_{output}_{grain}_{cut}")
    }

    /// Its kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name()));
        match self.cut {
            Cut::Rows(layout) => self.rows(k, layout),
            Cut::Blocks { lanes } => self.blocks(k, lanes),
            Cut::Serial => self.serial(k),
        }
        block.kernel()
    }

    /// The scale of what has this greatest magnitude.
    fn scale<'b>(&self, greatest: Val<'b>) -> Scale<'b> {
        let k = greatest.builder();
        let scale = (greatest / greatest_of(self.output) as f32).maximum(k.f32(f32::MIN_POSITIVE));
        Scale { scale, inverse: 1.0 / scale }
    }

    fn rows(&self, k: Builder<'_>, layout: Layout) {
        let x = matrix(k, layout, "x", self.input, Access::Read);
        let y = matrix(k, layout, "y", self.output, Access::Write);
        let scales = column(k, "scales", Scalar::F32, Access::Write);
        each_row(k, layout, x, |row| {
            let values = row.hold(&[x]);
            let [greatest] = values.fold(
                "greatest",
                [0.0],
                |[greatest], piece| [greatest.maximum(piece.or(piece[0].abs(), 0.0))],
                |[a], [b]| [a.maximum(b)],
            );
            let Scale { scale, inverse } = self.scale(greatest);
            row.store(scales, scale);
            values.each(|piece| piece.store(y, piece[0] * piece.splat(inverse)));
        });
    }

    fn views<'b>(&self, k: Builder<'b>, pieces: Pieces) -> [PlaceRef<'b>; 3] {
        [
            pieces.view(k, "x", self.input, 2, Access::Read),
            pieces.view(k, "y", self.output, 2, Access::Write),
            k.view("scales", Scalar::F32, 2, Access::Write),
        ]
    }

    fn blocks<'b>(&self, k: Builder<'b>, lanes: u8) {
        k.block_size([THREADS, 1, 1]);
        let pieces = Pieces { lanes, threads: 32, aligned: lanes > 1 };
        let [x, y, scales] = self.views(k, pieces);
        let (rows, columns) = (x.extent(0), x.extent(1));
        let across = scales.extent(0).to(Scalar::I32).named("across");
        let block = k.block_id(Axis::X);
        let (tile, at) = (block / across, block % across);
        // Rows of a warp, one behind the other.
        let height = (self.grain.height() / WARPS).max(1) as i32;
        let top = (tile.to(Scalar::I64) * (height * WARPS as i32)).named("top");
        let top = top + (k.warp_id() * height).to(Scalar::I64);
        let left = (at * SIDE + k.lane_id() * i32::from(lanes)).to(Scalar::I64).named("left");
        let zero = k.constant(vector(self.input, lanes), 0);
        let places = (0..i64::from(height)).flat_map(|row| {
            let row = if row == 0 { top } else { top + row };
            (0..i64::from(SIDE)).step_by(32 * usize::from(lanes)).map(move |column| {
                let column = if column == 0 { left } else { left + column };
                (row, column, row.lt(rows) & column.lt(columns))
            })
        });
        let load = |row: Val<'b>, column: Val<'b>| {
            let element = x.at([row, column]).cached(Cache::Stream);
            if lanes == 1 { element.load() } else { element.load_vector(lanes) }
        };
        let held: Vec<_> = places
            .map(|(row, column, inside)| {
                (row, column, inside, k.if_else(inside, || load(row, column), || zero))
            })
            .collect();
        let bits = held.iter().map(|(.., value)| magnitude(*value, lanes)).reduce(|a, b| a.max(b));
        let bits = widest(bits.unwrap_or(k.i32(0)), lanes).warp_max();
        let bits = match self.grain {
            Grain::Squares => {
                let of_warps = k.shared("of_warps", Scalar::I32, &[WARPS]);
                k.if_(k.lane_id().eq(0), || of_warps.at([k.warp_id()]).store(bits));
                k.barrier();
                let all = (0..WARPS as i32).map(|warp| of_warps.at([k.i32(warp)]).load());
                all.reduce(|a, b| a.max(b)).unwrap_or(bits)
            }
            _ => bits,
        };
        let Scale { scale, inverse } = self.scale(bits.bitcast(Type::F32));
        let inverse = if lanes == 1 { inverse } else { inverse.splat(lanes) };
        for (row, column, inside, value) in held {
            let value = (value.to(Scalar::F32) * inverse).to(self.output);
            k.if_(inside, || y.at([row, column]).cached(Cache::Stream).store(value));
        }
        let (speaks, number) = match self.grain {
            Grain::Squares => (k.thread_id(Axis::X).eq(0), tile.to(Scalar::I64)),
            _ => (k.lane_id().eq(0), top),
        };
        k.if_(speaks & number.lt(scales.extent(1)), || scales.at([at.to(Scalar::I64), number]).store(scale));
    }

    fn serial<'b>(&self, k: Builder<'b>) {
        let [x, y, scales] = self.views(k, Pieces { lanes: 1, threads: 1, aligned: false });
        let (rows, columns) = (x.extent(0), x.extent(1));
        let (wide, height) = (i64::from(AT_ONCE), i64::from(self.grain.height()));
        let tile = k.block_id(Axis::X).to(Scalar::I64).named("tile");
        let top = tile * height;
        let below = (top + height).min(rows);
        let load = |row: Val<'b>, column: Val<'b>, lanes: u8| {
            let element = x.at([row, column]);
            if lanes == 1 { element.load() } else { element.load_vector(lanes) }
        };
        k.range(k.i64(0), scales.extent(0)).each(|at| {
            let left = at * i64::from(SIDE);
            let end = (left + i64::from(SIDE)).min(columns);
            // What is left of a line one by one.
            let whole = end & -wide;
            let start = (k.constant(vector(Scalar::I32, AT_ONCE), 0), k.i32(0));
            let (many, few) = k.range(top, below).fold(start, |row, (many, few)| {
                let many = k
                    .range(left, whole)
                    .step(wide)
                    .fold(many, |column, so_far| so_far.max(magnitude(load(row, column, AT_ONCE), AT_ONCE)));
                let few = k
                    .range(whole, end)
                    .fold(few, |column, so_far| so_far.max(magnitude(load(row, column, 1), 1)));
                (many, few)
            });
            let bits = widest(many, AT_ONCE).max(few);
            let Scale { scale, inverse } = self.scale(bits.bitcast(Type::F32));
            scales.at([at, tile]).store(scale);
            let store = |row: Val<'b>, column: Val<'b>, lanes: u8| {
                let inverse = if lanes == 1 { inverse } else { inverse.splat(lanes) };
                let value = load(row, column, lanes).to(Scalar::F32) * inverse;
                y.at([row, column]).store(value.to(self.output));
            };
            k.range(top, below).each(|row| {
                k.range(left, whole).step(wide).each(|column| store(row, column, AT_ONCE));
                k.range(whole, end).each(|column| store(row, column, 1));
            });
        });
    }
}

/// The greatest number of a type of FP8.
pub(crate) fn greatest_of(output: Scalar) -> f64 {
    if output == Scalar::F8E5M2 { 57_344.0 } else { 448.0 }
}

fn vector(element: Scalar, lanes: u8) -> Type {
    Type::vector(element, lanes).filter(|_| lanes > 1).unwrap_or(element.into())
}

/// Magnitudes as integers, which have the order of the numbers, with NaN above all.
fn magnitude(value: Val<'_>, lanes: u8) -> Val<'_> {
    let most = value.builder().constant(vector(Scalar::I32, lanes), i32::MAX);
    value.to(Scalar::F32).bitcast(vector(Scalar::I32, lanes)) & most
}

/// The greatest lane.
fn widest(value: Val<'_>, lanes: u8) -> Val<'_> {
    match lanes {
        1 => value,
        _ => (1..lanes).fold(value.lane(0), |greatest, lane| greatest.max(value.lane(lane))),
    }
}

/// An array in FP8, with the scales of its grain. Its buffers: `x` and `y`, `[rows, columns]`; `scales`, f32, as the grain has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantise {
    /// Rows.
    pub rows: u64,
    /// Elements of a row: up to [`MAX_COLUMNS`].
    pub columns: u64,
    /// What x holds: f32, bf16 or f16.
    pub input: Scalar,
    /// What y holds: f8e4m3 or f8e5m2.
    pub output: Scalar,
    /// What has a scale.
    pub grain: Grain,
    /// Bytes to whose multiples x and y are aligned; 16 or more is fastest.
    pub align: u32,
}

/// The name in errors.
const NAME: &str = "quantise";

impl Function for Quantise {
    fn buffers(&self) -> Vec<Buffer> {
        let Quantise { rows, columns, input, output, grain, .. } = *self;
        let across = columns.div_ceil(SIDE.into());
        let scales = match grain {
            Grain::Rows => vec![rows],
            Grain::Lines | Grain::Squares => vec![across, rows.div_ceil(grain.height().into())],
        };
        vec![
            Buffer::new("x", input, &[rows, columns], Access::Read),
            Buffer::new("y", output, &[rows, columns], Access::Write),
            Buffer::new("scales", Scalar::F32, &scales, Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::quantise::quantise(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launch(&self.buffers(), resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launch(buffers, resources)
    }
}

impl Quantise {
    fn launch(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let Quantise { rows, columns, input, output, grain, align } = *self;
        floats(NAME, &[input])?;
        let unsupported = |what| Err(CallError::Unsupported { function: NAME, what });
        if !matches!(output, Scalar::F8E4M3 | Scalar::F8E5M2) {
            return unsupported(format!("to {output}; there are f8e4m3 and f8e5m2"));
        }
        if columns > MAX_COLUMNS {
            return unsupported(format!("{columns} columns; the most are {MAX_COLUMNS}"));
        }
        if columns == 0 && rows > 0 && grain == Grain::Rows {
            return unsupported("rows of no columns have no greatest; give at least 1".to_owned());
        }
        if rows == 0 || columns == 0 {
            return Ok(Call::default());
        }
        let places = buffers.iter().enumerate();
        let views: Vec<_> =
            places.map(|(at, buffer)| Operand::whole(at, buffer.element, &buffer.extents)).collect();
        let entry = |cut| Entry::Quantised(Quantised { input, output, grain, cut });
        if grain == Grain::Rows {
            let layout =
                Layout::packed([rows, columns], step(buffers), &[input, output], align, 1, resources);
            return launch_views(NAME, entry(Cut::Rows(layout)), layout, [rows, columns], views, &[]);
        }
        let height = u64::from(grain.height());
        let (cut, count) = match resources.kind {
            Kind::Cpu => (Cut::Serial, blocks(NAME, rows, height)?),
            Kind::Gpu => {
                let matrices = buffers[..2].iter().zip([input, output]);
                let wide = matrices.map(|(buffer, element)| {
                    lanes(element, columns, aligned(align, std::slice::from_ref(buffer)))
                });
                let lanes = wide.fold(4, u8::min);
                let tiles = rows.div_ceil(height.max(WARPS.into()));
                let across = columns.div_ceil(SIDE.into());
                (Cut::Blocks { lanes }, blocks(NAME, tiles.saturating_mul(across), 1)?)
            }
        };
        let launch = Launch { entry: entry(cut), grid: [count, 1, 1], operands: views };
        Ok(Call { launches: vec![launch], workspace: 0 })
    }
}
