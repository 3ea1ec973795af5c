//! How rows are divided, and the launch of that.

use vm_ir::Scalar;

use crate::call::{Buffer, Call, CallError, Entry, Launch, Operand, Region};
use crate::family::{Kind, Resources};

/// Registers of a multiprocessor.
const REGISTERS: u64 = 65_536;

/// The most columns of a row.
pub const MAX_COLUMNS: u64 = 1 << 30;

/// How rows are divided among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Threads of a block.
    pub threads: u16,
    /// Neighbouring threads that share a row: a power of two up to 32, or all of the block.
    pub team: u16,
    /// Blocks that share a row: 1, 2, 4 or 8. More than one only where a block is one team.
    pub cluster: u8,
    /// Elements of an access: 1, 2, 4, 8 or 16.
    pub lanes: u8,
    /// Accesses of each thread, by which the row is held in registers; 0 if it is loaded for each use. Without a cluster a row has
    /// elements of the last one, if not for each thread.
    pub vectors: u8,
    /// May the columns be no multiple of `lanes`? Only in a team of one thread that holds nothing.
    pub tail: bool,
    /// Do rows begin anywhere, one behind the other? Then accesses are at multiples of `lanes` in memory, and the fewer elements before and
    /// behind them are taken one by one, by a thread each. A matrix is a view of one dimension, of a multiple of `lanes` elements, and
    /// rows and columns are two more parameters, behind all others.
    pub shifted: bool,
}

impl Layout {
    /// A processor's: a thread for each row.
    pub const CPU: Layout =
        Layout { threads: 1, team: 1, cluster: 1, lanes: 16, vectors: 0, tail: true, shifted: false };

    /// The layout for rows of so many columns, of arrays of these types whose bases are multiples of `align` bytes.
    /// `held` is how many numbers of f32 a thread keeps for each element that it holds.
    pub fn of(columns: u64, elements: &[Scalar], align: u32, held: u32, resources: &Resources) -> Layout {
        Layout::strided([columns, 0], elements, align, held, resources)
    }

    /// The same of rows that begin at multiples of `step` elements; of 0, if they do at any that columns are multiples of.
    pub fn strided(
        [columns, step]: [u64; 2],
        elements: &[Scalar],
        align: u32,
        held: u32,
        resources: &Resources,
    ) -> Layout {
        if resources.kind == Kind::Cpu {
            return Layout::CPU;
        }
        // Both are multiples of what the two have in common.
        let lanes = lanes(columns | step, elements, align);
        Layout::with(lanes, accesses(columns, lanes, false), false, held, resources)
    }

    /// The same of dense matrices of so many rows; or, with a step other than 0, of strided rows.
    pub fn packed(
        [rows, columns]: [u64; 2],
        step: u64,
        elements: &[Scalar],
        align: u32,
        held: u32,
        resources: &Resources,
    ) -> Layout {
        let plain = Layout::strided([columns, step], elements, align, held, resources);
        if step != 0 {
            return plain;
        }
        // What rows of an even number of columns would have.
        let wide = lanes(1 << 20, elements, align);
        let whole = rows.checked_mul(columns).is_some_and(|count| count.is_multiple_of(wide.into()));
        if plain.tail || plain.lanes >= wide || !whole || columns < 16 * u64::from(wide) {
            return plain;
        }
        let shifted = Layout::with(wide, accesses(columns, wide, true), true, held, resources);
        if shifted.holds() { shifted } else { plain }
    }

    /// Of all ways to divide rows of so many accesses the one that costs least, if registers hold a row; else rows are loaded for each use.
    fn with(lanes: u8, vectors: u64, shifted: bool, held: u32, resources: &Resources) -> Layout {
        let of = |threads: u16, team: u16, cluster: u8| Layout {
            threads,
            team,
            cluster,
            lanes,
            vectors: vectors.div_ceil(u64::from(team) * u64::from(cluster)).min(255) as u8,
            tail: false,
            shifted,
        };
        let of_warps = of(128, vectors.next_power_of_two().min(32) as u16, 1);
        if of_warps.vectors == 1 {
            return of_warps;
        }
        let block = |warps: u16, cluster| of(32 * warps, 32 * warps, cluster);
        let blocks = [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32].map(|warps| block(warps, 1));
        let clusters = [2, 4, 8].into_iter().filter(|cluster| u32::from(*cluster) <= resources.cluster);
        let clusters =
            clusters.flat_map(|cluster| [4, 8, 12, 16, 20, 24, 32].map(|warps| block(warps, cluster)));
        let ways = [of_warps].into_iter().chain(blocks).chain(clusters);
        ways.filter(|way| way.fits(vectors, held))
            .min_by_key(|way| way.cost(vectors, held))
            .unwrap_or_else(|| of_warps.streamed(256))
    }

    /// The same rows where they are only read, in one pass: a thread takes as much as it can hold, as there is little to do for it, and a
    /// latency to wait for; and a block goes through rows that it can't hold, which no cluster then has to wait for.
    pub(crate) fn read_once(self, [rows, columns]: [u64; 2]) -> Layout {
        /// Accesses that a thread holds, threads of a block at least, and columns of the longest rows that are held.
        const VECTORS: u64 = 8;
        const THREADS: u64 = 128;
        const COLUMNS: u64 = 16_384;
        if self.tail || self.lanes == 1 && columns <= COLUMNS {
            return self;
        }
        if columns > COLUMNS {
            // Few rows are few blocks.
            return self.streamed(if rows < 2048 { 512 } else { 256 });
        }
        let lanes = u64::from(self.lanes);
        let vectors = accesses(columns, self.lanes, self.shifted);
        // Neighbours have a sector of the memory; and one each of what is beside the vectors of rows that begin anywhere.
        let least = if self.shifted { 16 } else { (16 / lanes).min(vectors.next_power_of_two()) };
        let team = match vectors.div_ceil(VECTORS) {
            team @ ..=32 => team.next_power_of_two().max(least),
            team => team.next_multiple_of(32).max(THREADS),
        };
        let vectors = vectors.div_ceil(team) as u8;
        Layout { threads: team.max(THREADS) as u16, team: team as u16, vectors, cluster: 1, ..self }
    }

    /// The same accesses of a row that a block of so many threads loads for each use.
    pub(crate) fn streamed(self, threads: u16) -> Layout {
        Layout { threads, team: threads, cluster: 1, vectors: 0, ..self }
    }

    /// Numbers of f32 that a thread keeps.
    fn numbers(self, held: u32) -> u64 {
        u64::from(self.vectors) * u64::from(self.lanes) * u64::from(held.max(1))
    }

    /// Whether registers hold a row of so many accesses, of which a block has all of each thread's but the last.
    fn fits(self, vectors: u64, held: u32) -> bool {
        let team = u64::from(self.team);
        // Where rows begin anywhere, some have one access less.
        let least = if self.shifted { vectors - 1 } else { vectors };
        let is_full = self.cluster > 1 || least > team * (u64::from(self.vectors) - 1);
        let beside = if self.shifted { 56 } else { 24 };
        let most = (REGISTERS / u64::from(self.threads) - beside).min(if self.team > 32 { 64 } else { 32 });
        is_full && self.vectors <= 16 && self.numbers(held) <= most
    }

    /// What is against such a division, in hundredths; the weights are fitted to 2,300 measurements on an H100 (softmax, its gradient, norms and
    /// losses of 768 to 262,144 columns, each divided in every way), of which it costs 1.7 % on average, beside the best of each.
    fn cost(self, vectors: u64, held: u32) -> u64 {
        let (threads, numbers) = (u64::from(self.threads), self.numbers(held));
        let all = u64::from(self.team) * u64::from(self.cluster) * u64::from(self.vectors);
        let idle = 740 * all.saturating_sub(vectors) / all;
        // Large blocks come and go together, and clusters wait for each other.
        let together = 114 * threads / 512 + 30 * u64::from(self.cluster.ilog2());
        // A few numbers keep a thread busy; more keep others from the multiprocessor.
        let held = 94 * numbers.saturating_sub(6) / 16 + 73 * 6u64.saturating_sub(numbers) / 16;
        let crowded = 143 * (threads * (numbers + 22)).saturating_sub(REGISTERS) / 4096;
        let few = 62 * 4u64.saturating_sub(self.vectors.into());
        idle + together + held + crowded + few
    }

    /// Rows of a block.
    pub fn rows(self) -> u32 {
        u32::from(self.threads) / u32::from(self.team).max(1)
    }

    /// Blocks along x for so many rows; none if that is more than a grid has.
    pub fn grid(self, rows: u64) -> Option<[u32; 3]> {
        let blocks = rows.div_ceil(self.rows().into()).checked_mul(self.cluster.into())?;
        (blocks < 1 << 31).then_some([blocks as u32, 1, 1])
    }

    /// Is a row held in registers?
    pub fn holds(self) -> bool {
        self.vectors > 0
    }

    /// Elements that are as far apart as a thread's neighbouring accesses.
    pub(super) fn step(self) -> u32 {
        u32::from(self.team) * u32::from(self.lanes)
    }

    /// What a name of a variant says of it.
    pub fn name(self) -> String {
        let Layout { threads, team, cluster, lanes, vectors, tail, shifted } = self;
        let rows = if shifted {
            "shifted"
        } else if tail {
            "any"
        } else {
            ""
        };
        format!("{threads}t{team}c{cluster}x{lanes}v{vectors}{rows}")
    }
}

/// The most accesses of so many lanes that a row has; where rows begin anywhere, some have one less.
pub(crate) fn accesses(columns: u64, lanes: u8, shifted: bool) -> u64 {
    let lanes = u64::from(lanes);
    if shifted { columns / lanes } else { columns.div_ceil(lanes) }.max(1)
}

/// The widest accesses that all of these arrays' rows can be cut into: of 16 bytes of the elements that most of them have. Of as many
/// wide ones as narrow ones the last decides, which is written: a store of two accesses leaves gaps that another fills.
pub fn lanes(columns: u64, elements: &[Scalar], align: u32) -> u8 {
    let sizes = || elements.iter().map(|element| element.bytes());
    let (least, most) = (sizes().min().unwrap_or(4), sizes().max().unwrap_or(4));
    let wide = sizes().filter(|bytes| *bytes == most).count() * 2;
    let is_wide = wide > elements.len() || wide == elements.len() && sizes().next_back() == Some(most);
    let whole = 16 / if is_wide { most } else { least };
    // Wider accesses are several of 16 bytes.
    let aligned = match align {
        _ if !align.is_power_of_two() => 1,
        16.. => whole,
        _ => align.max(most) / most,
    };
    let odd = columns.trailing_zeros().min(4);
    (whole.min(aligned).min(1 << odd)).clamp(1, 8) as u8
}

/// A call of one launch of rows, whose buffers are all of the parameters, in order, and `numbers` behind them; none without elements.
///
/// # Errors
/// [`CallError::Unsupported`]: more rows or columns than there can be, or elements that are no f32, bf16 or f16.
pub fn launch_rows(
    function: &'static str,
    entry: Entry,
    layout: Layout,
    extents: [u64; 2],
    buffers: &[Buffer],
    numbers: &[Operand],
) -> Result<Call, CallError> {
    let floats = [Scalar::F32, Scalar::Bf16, Scalar::F16, Scalar::I32, Scalar::I64];
    if let Some(other) = buffers.iter().find(|buffer| !floats.contains(&buffer.element)) {
        let what = format!("{} of {}; there are f32, bf16 and f16", other.name, other.element);
        return Err(CallError::Unsupported { function, what });
    }
    let buffers = buffers.iter().enumerate();
    let views =
        buffers.map(|(at, buffer)| Operand::whole(at, buffer.element, &buffer.extents)).collect::<Vec<_>>();
    launch_views(function, entry, layout, extents, views, numbers)
}

/// The same of any views, dense ones of two dimensions of which are matrices.
///
/// # Errors
/// [`CallError::Unsupported`]: more rows or columns than there can be.
pub(crate) fn launch_views(
    function: &'static str,
    entry: Entry,
    layout: Layout,
    [rows, columns]: [u64; 2],
    mut views: Vec<Operand>,
    numbers: &[Operand],
) -> Result<Call, CallError> {
    let grid = grid_of(function, layout, [rows, columns])?;
    let Some(grid) = grid else { return Ok(Call::default()) };
    let matrix = [rows, columns];
    for view in views.iter_mut().filter(|_| layout.shifted) {
        if let Operand::Buffer(_, region) | Operand::Workspace(region) = view
            && region.extents == matrix
        {
            *region = Region::dense(region.element, region.offset, &[rows * columns]);
        }
    }
    let mut operands = views;
    operands.extend_from_slice(numbers);
    if layout.shifted {
        operands.extend([Operand::i64(rows.cast_signed()), Operand::i32(columns as i32)]);
    }
    Ok(Call { launches: vec![Launch { entry, grid, operands }], workspace: 0 })
}

/// The blocks for such rows; none where there are no elements.
///
/// # Errors
/// [`CallError::Unsupported`]: more rows or columns than there can be.
pub fn grid_of(
    function: &'static str,
    layout: Layout,
    [rows, columns]: [u64; 2],
) -> Result<Option<[u32; 3]>, CallError> {
    let unsupported = |what| CallError::Unsupported { function, what };
    if columns > MAX_COLUMNS {
        return Err(unsupported(format!("{columns} columns; the most are {MAX_COLUMNS}")));
    }
    if rows == 0 || columns == 0 {
        return Ok(None);
    }
    let grid = layout.grid(rows).ok_or_else(|| unsupported(format!("{rows} rows; the most are 2^28")))?;
    Ok(Some(grid))
}
