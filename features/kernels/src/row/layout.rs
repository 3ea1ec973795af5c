//! How rows are divided, and the launch of that.

use vm_ir::Scalar;

use crate::call::{Buffer, Call, CallError, Entry, Launch, Operand, Region};
use crate::family::{Kind, Resources};

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
    /// Do rows begin anywhere, one behind the other? Then accesses are at multiples of `lanes` in memory, and the first and the last one of a row
    /// have elements of its neighbours, too. A matrix is a view of one dimension, of a multiple of `lanes` elements, that no block writes
    /// what another reads of, and rows and columns are two more parameters, behind all others.
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
        Layout::with(lanes, columns.div_ceil(lanes.into()).max(1), false, held, resources)
    }

    /// The same of dense matrices of so many rows, which are not written in the place of what is read; or, with a step
    /// other than 0, of strided rows.
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
        let vectors = (columns + u64::from(wide) - 1).div_ceil(wide.into());
        let shifted = Layout::with(wide, vectors, true, held, resources);
        if shifted.holds() { shifted } else { plain }
    }

    fn with(lanes: u8, vectors: u64, shifted: bool, held: u32, resources: &Resources) -> Layout {
        // Registers hold so many numbers of f32, and the places of so many accesses.
        let fits = |vectors: u64, most: u64| {
            vectors * u64::from(lanes) * u64::from(held.max(1)) <= most && vectors <= 16
        };
        let of = |threads: u64, team: u64, cluster: u64| Layout {
            threads: threads as u16,
            team: team as u16,
            cluster: cluster as u8,
            lanes,
            vectors: vectors.div_ceil(team * cluster).min(255) as u8,
            tail: false,
            shifted,
        };
        let team = vectors.next_power_of_two().min(32);
        if fits(vectors.div_ceil(team), 32) && vectors.div_ceil(team) <= 8 {
            return of(128, team, 1);
        }
        // As many threads as have the most to do; of as many those with four accesses or so. Small blocks have more registers for each
        // thread, and a multiprocessor has several.
        let blocks = (1..=16).map(|warps| of(32 * warps, 32 * warps, 1));
        let blocks = blocks.filter(|block| {
            let most = if block.threads <= 256 { 48 } else { 32 };
            block.vectors <= 16 && fits(block.vectors.into(), most) && u64::from(block.team) <= vectors
        });
        let best = blocks.min_by_key(|block| {
            let all = u64::from(block.team) * u64::from(block.vectors);
            ((all - vectors) * 16 / all, block.vectors.abs_diff(4), block.threads)
        });
        if let Some(block) = best {
            return block;
        }
        let clusters = [(2, 32), (4, 32), (8, 32), (8, 64)];
        for (cluster, most) in clusters.into_iter().filter(|(cluster, _)| *cluster <= resources.cluster) {
            let cluster = u64::from(cluster);
            if fits(vectors.div_ceil(512 * cluster), most) {
                return of(512, 512, cluster);
            }
        }
        Layout { threads: 256, team: 256, cluster: 1, lanes, vectors: 0, tail: false, shifted }
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
