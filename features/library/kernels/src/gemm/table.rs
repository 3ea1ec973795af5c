//! Which variants there are for a product.
//!
//! A row is a variant without what the problem fixes (types, transposition, batch, epilogue). To add one, write it into the table of
//! its class at the place that its speed deserves; what it takes is computed, and a test compiles it for every type.

use super::{Activation, Auxiliary, Batch, Epilogue, Gemm, Scales};
use crate::family::{Kind, Problem, Resources, Sample, Variant, rounded};
use vm_ir::builder::BuildError;
use vm_ir::interp::Tensor;
use vm_ir::limits::MAX_GRID_YZ;
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant of any types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    /// Rows and columns of a tile of C, and bytes of the inner dimension.
    tile: [u32; 3],
    stages: u32,
    groups: u32,
    cluster: u32,
    band: u32,
    swapped: bool,
    split: u32,
    overlap: bool,
}

impl Row {
    /// One whose inner dimension the blocks of a cluster share.
    const fn split(self, split: u32) -> Row {
        Row { split, ..self }
    }

    /// One whose products overlap.
    const fn overlapped(self) -> Row {
        Row { overlap: true, ..self }
    }
}

const fn row(tile: [u32; 3], stages: u32, groups: u32, cluster: u32, band: u32) -> Row {
    Row { tile, stages, groups, cluster, band, swapped: false, split: 1, overlap: false }
}

/// One whose tiles are computed transposed, by a block each.
const fn swapped(tile: [u32; 3], stages: u32, groups: u32) -> Row {
    Row { swapped: true, ..row(tile, stages, groups, 1, 0) }
}

/// Many tiles for each unit: the largest tiles, which read the least. From 4096³ on, on an H200.
const MANY: &[Row] = &[
    row([256, 128, 128], 3, 2, 1, 16),
    row([128, 256, 128], 4, 2, 1, 16),
    row([128, 256, 128], 3, 2, 1, 16),
    row([256, 128, 128], 3, 2, 2, 16),
    row([128, 256, 128], 4, 2, 2, 8),
    row([128, 192, 128], 4, 2, 1, 16),
    row([128, 128, 128], 5, 2, 1, 16),
];

/// A few tiles for each unit: how full the last round is decides. 2048³.
const SOME: &[Row] = &[
    row([128, 256, 128], 3, 2, 1, 16),
    row([256, 128, 128], 3, 2, 1, 16),
    row([128, 128, 128], 5, 2, 1, 16),
    row([128, 256, 128], 3, 2, 2, 16),
    row([128, 192, 128], 4, 2, 1, 16),
    row([64, 128, 128], 4, 1, 1, 8),
    row([128, 64, 128], 6, 2, 1, 8),
    row([128, 256, 128], 3, 2, 1, 16).overlapped(),
    row([128, 128, 128], 5, 2, 1, 0).split(2),
    row([128, 256, 128], 3, 2, 1, 0).split(2),
];

/// Fewer tiles than units: small ones, for more of them. 1024³ and less.
const FEW: &[Row] = &[
    row([64, 128, 128], 4, 1, 1, 0).overlapped(),
    row([128, 64, 128], 4, 2, 1, 0),
    row([64, 64, 256], 3, 1, 1, 0),
    row([64, 64, 256], 3, 1, 1, 0).split(2),
    row([64, 64, 256], 3, 1, 1, 0).overlapped(),
    row([128, 128, 128], 3, 2, 1, 0).split(2),
    row([64, 128, 128], 4, 1, 1, 0).split(2).overlapped(),
    row([64, 128, 128], 3, 1, 1, 0),
    row([128, 128, 128], 3, 2, 1, 0),
    row([128, 64, 128], 3, 2, 1, 0),
    row([64, 64, 256], 4, 1, 1, 1),
    row([64, 64, 128], 4, 1, 1, 1),
];

/// Far fewer: the smallest. 512³.
const FEWEST: &[Row] = &[
    row([64, 64, 256], 3, 1, 1, 0).overlapped(),
    row([64, 64, 256], 3, 1, 1, 0),
    row([64, 64, 256], 3, 1, 1, 0).split(2),
    row([64, 64, 256], 4, 1, 1, 1),
    row([64, 64, 128], 4, 1, 1, 1),
    row([64, 128, 128], 3, 1, 1, 0),
    row([128, 64, 128], 4, 2, 1, 0),
    row([128, 64, 128], 3, 2, 1, 0),
];

/// Up to 8 rows, as when a model generates: what B is read with.
const UP_TO_8: &[Row] = &[
    swapped([8, 64, 512], 4, 1),
    swapped([8, 64, 512], 4, 1).split(2),
    swapped([8, 64, 512], 4, 1).overlapped(),
    swapped([8, 64, 256], 3, 1).split(4),
    swapped([8, 64, 256], 3, 1),
    swapped([16, 64, 512], 4, 1),
    swapped([8, 64, 256], 8, 1),
    row([64, 64, 256], 3, 1, 1, 0),
    row([64, 128, 128], 4, 1, 1, 1),
];

/// Up to 16.
const UP_TO_16: &[Row] = &[
    swapped([16, 64, 512], 4, 1),
    swapped([16, 64, 512], 4, 1).split(2),
    swapped([16, 64, 512], 4, 1).overlapped(),
    swapped([16, 64, 256], 3, 1).split(4),
    swapped([16, 64, 256], 3, 1),
    swapped([16, 128, 256], 3, 2),
    swapped([16, 64, 256], 8, 1),
    swapped([16, 64, 512], 3, 1),
    row([64, 64, 256], 3, 1, 1, 0),
    row([64, 128, 128], 4, 1, 1, 1),
];

/// Up to 32.
const UP_TO_32: &[Row] = &[
    swapped([32, 64, 256], 3, 1),
    swapped([32, 64, 512], 3, 1).split(2),
    swapped([32, 64, 256], 4, 1).overlapped(),
    swapped([32, 64, 256], 6, 1),
    row([64, 32, 512], 4, 1, 1, 0),
    row([64, 64, 256], 4, 1, 1, 0).split(2).overlapped(),
    row([64, 64, 256], 3, 1, 1, 0),
    row([64, 128, 128], 4, 1, 1, 1),
];

/// Up to 64.
const UP_TO_64: &[Row] = &[
    row([64, 64, 256], 3, 1, 1, 0),
    row([64, 64, 256], 4, 1, 1, 0).split(2).overlapped(),
    row([64, 64, 256], 6, 1, 1, 0).split(2).overlapped(),
    row([64, 64, 256], 6, 1, 1, 0).split(2),
    row([64, 64, 512], 3, 1, 1, 0).split(2).overlapped(),
    row([64, 64, 256], 3, 1, 1, 0).split(4),
    row([64, 32, 512], 4, 1, 1, 0),
    row([64, 32, 512], 3, 1, 1, 0).overlapped(),
    row([64, 32, 256], 8, 1, 1, 0).overlapped(),
    swapped([32, 64, 256], 3, 1),
    swapped([64, 64, 256], 4, 1),
    row([64, 128, 128], 4, 1, 1, 1),
    row([128, 128, 128], 5, 2, 1, 1),
];

/// Where a block has no room for any of the others.
const TIGHT: &[Row] = &[
    row([128, 128, 128], 3, 2, 1, 16),
    row([128, 128, 128], 2, 2, 1, 16),
    row([128, 64, 128], 3, 2, 1, 8),
    row([64, 64, 128], 4, 1, 1, 8),
    row([64, 64, 128], 2, 1, 1, 8),
];

/// What an element of a tile takes longer than one of the largest: smaller tiles read more of A and B for each. An estimate.
fn cost(variant: &Gemm) -> f64 {
    let [rows, columns, _] = variant.tile.map(f64::from);
    let (read, of_largest) = (1.0 / rows + 1.0 / columns, 1.0 / 128.0 + 1.0 / 256.0);
    // Sums of parts are given from block to block.
    let split = if variant.split > 1 { 1.1 } else { 1.0 };
    let cluster = if variant.cluster > 1 { 1.05 } else { 1.0 };
    (1.0 + 0.25 * (read / of_largest - 1.0)) * split * cluster
}

/// Registers of a thread that what a tile holds may take; the rest is for addresses and the epilogue.
const REGISTERS: u32 = 208;
/// The most rows of a box that is copied at once.
const BOX: u32 = 256;
/// Bytes of a row of such a box.
const BOX_ROW: u32 = 128;
/// What barriers and alignment take of shared memory.
const OVERHEAD: u32 = 2048;

/// A product of certain extents: C = f(α · A · B + β · C + bias).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// What A and B hold, as in [`Gemm::element`].
    pub element: Scalar,
    /// What C holds, as in [`Gemm::output`].
    pub output: Scalar,
    /// Is A given transposed?
    pub a_transposed: bool,
    /// Is B given transposed?
    pub b_transposed: bool,
    /// One product, or many.
    pub batch: Batch,
    /// How many matrices B has, at least 1: [`Batch::Grouped`] shares the rows of A out among them. 1 for [`Batch::One`].
    pub matrices: u64,
    /// What is done with a sum.
    pub epilogue: Epilogue,
    /// Where matrices and their rows begin, as in [`Gemm::align`].
    pub align: u32,
    /// Rows of A and C.
    pub m: u64,
    /// Columns of B and C.
    pub n: u64,
    /// The inner dimension.
    pub k: u64,
}

impl Product {
    /// A single product of plain matrices of bf16.
    pub const fn of(m: u64, n: u64, k: u64) -> Product {
        Product {
            element: Scalar::Bf16,
            output: Scalar::Bf16,
            a_transposed: false,
            b_transposed: false,
            batch: Batch::One,
            matrices: 1,
            epilogue: Epilogue::NONE,
            align: 16,
            m,
            n,
            k,
        }
    }

    /// Rows of one matrix, on average.
    fn rows(&self) -> u64 {
        if self.batch == Batch::Grouped { self.m.div_ceil(self.matrices.max(1)) } else { self.m }
    }

    pub(super) fn tiles(&self, rows: u64, columns: u64) -> u64 {
        let of_one = self.rows().div_ceil(rows.max(1)).saturating_mul(self.n.div_ceil(columns.max(1)));
        of_one.saturating_mul(self.matrices.max(1)).max(1)
    }

    fn table(&self, units: u32) -> &'static [Row] {
        let units = u64::from(units.max(1));
        match self.tiles(128, 128) {
            _ if self.rows() <= 8 => UP_TO_8,
            _ if self.rows() <= 16 => UP_TO_16,
            _ if self.rows() <= 32 => UP_TO_32,
            _ if self.rows() <= 64 => UP_TO_64,
            tiles if tiles < units / 4 => FEWEST,
            tiles if tiles < units => FEW,
            tiles if tiles < units.saturating_mul(4) => SOME,
            _ => MANY,
        }
    }

    /// Puts the variant first that leaves the fewest multiprocessors idle in the last round of tiles, where that makes up for what
    /// smaller tiles take longer.
    fn fill_rounds(&self, variants: &mut [Gemm], resources: &Resources) {
        /// What another order must gain: tables were measured, and this is an estimate.
        const GAIN: f64 = 0.95;
        if resources.kind == Kind::Cpu || self.rows() <= 64 || self.batch == Batch::Grouped {
            return;
        }
        let units = u64::from(resources.compute_units.max(1));
        // The least products leave most units idle with any tile: what they take is not its share of a round.
        if self.tiles(128, 128) < units / 4 {
            return;
        }
        let time = |variant: &Gemm| {
            let [rows, columns, _] = variant.tile;
            let split = variant.split.max(1);
            let tiles = self.tiles(rows.into(), columns.into()).saturating_mul(split.into());
            let rounds = tiles.div_ceil(units) as f64;
            rounds * f64::from(rows * columns / split) * cost(variant)
        };
        let best = (0..variants.len()).min_by(|a, b| time(&variants[*a]).total_cmp(&time(&variants[*b])));
        if let Some(best) = best.filter(|best| time(&variants[*best]) < GAIN * time(&variants[0])) {
            variants[..=best].rotate_right(1);
        }
    }

    /// Can a processor compute it as a row by a matrix?
    pub(super) fn is_line(&self) -> bool {
        let Epilogue { scales, aux, .. } = self.epilogue;
        let floats = [Scalar::F32, Scalar::Bf16, Scalar::F16];
        self.m == 1
            && (!self.a_transposed || self.k == 1)
            && self.batch != Batch::Grouped
            && scales == Scales::None
            && aux == Auxiliary::None
            && [self.element, self.output].iter().all(|element| floats.contains(element))
    }

    /// The variant for processors of a row: few blocks of many columns where rows of B are added up, which then are read in long stretches.
    fn variant_of_lines(&self, units: u32) -> Gemm {
        let share = rounded(self.n.div_ceil(units.max(1).into())).clamp(64, 1024) as u32;
        let [columns, lanes] = match (self.b_transposed, self.element) {
            (false, _) => [share, 16],
            // As many as are converted at once.
            (true, Scalar::F16) => [32, 16],
            (true, _) => [32, 8],
        };
        let bytes = self.element.bytes().max(1);
        // Its accesses may begin anywhere.
        Gemm { align: 1, ..self.variant(row([1, columns, lanes * bytes], 1, 1, 1, 0)) }
    }

    /// The variant for processors, a block for each tile.
    fn variant_of_processors(&self) -> Gemm {
        let Gemm { tile, stages, groups, .. } = Gemm::CPU;
        let bytes = self.element.bytes().max(1);
        // Of small products no more than there is.
        let least = |most: u32, extent: u64| match u32::try_from(rounded(extent).next_power_of_two()) {
            Ok(extent) => extent.clamp(16, most),
            Err(_) => most,
        };
        let [rows, columns, inner] = tile;
        let tile = [least(rows, self.m), least(columns, self.n), least(inner, self.k)];
        self.variant(row([tile[0], tile[1], tile[2] * bytes], stages, groups, 1, 0))
    }

    fn variant(&self, row: Row) -> Gemm {
        let [rows, columns, inner] = row.tile;
        let over = rows > 1 && self.m.div_ceil(rows.into()).max(self.matrices) > MAX_GRID_YZ.into();
        Gemm {
            element: self.element,
            output: self.output,
            a_transposed: self.a_transposed,
            b_transposed: self.b_transposed,
            batch: self.batch,
            epilogue: self.epilogue,
            tile: [rows, columns, inner / self.element.bytes().max(1)],
            stages: row.stages,
            groups: row.groups,
            cluster: row.cluster,
            // Groups are taken one after the other by all blocks, and so are tiles for which a grid has no room.
            band: if self.batch == Batch::Grouped || over { row.band.max(1) } else { row.band },
            swapped: row.swapped,
            align: self.align,
            split: row.split,
            overlap: row.overlap,
        }
    }
}

impl Gemm {
    /// Whether the factors pass through registers on their way to the tensor core: f32 is divided there, and what has not 16 bits
    /// is read from shared memory only where it is contiguous along the inner dimension.
    fn by_registers(&self) -> bool {
        self.element == Scalar::F32 || self.is_turned()
    }

    /// Whether a factor is turned around in registers.
    fn is_turned(&self) -> bool {
        self.element.bytes() != 2 && (self.a_transposed || !self.b_transposed)
    }

    /// Bytes of shared memory that a block takes: its stages, what it stores or loads by box, and some for barriers.
    pub fn shared_bytes(&self) -> u32 {
        let [rows, columns, inner] = self.tile;
        if self.by_registers() {
            // Instructions find whole blocks there, and sums are stored and given from registers.
            let block = (32 / self.element.bytes()).max(16);
            let stage = (rows.next_multiple_of(block) + columns) * inner * self.element.bytes();
            return OVERHEAD + self.stages * stage;
        }
        let stage = (rows + columns) * inner * self.element.bytes();
        let boxes = if self.swapped { 0 } else { columns * self.output.bytes() / BOX_ROW };
        let [_, own] = self.own_dims();
        let boxes = if self.split > 1 { own * self.output.bytes() / BOX_ROW } else { boxes };
        let boxes = if self.swapped { 0 } else { boxes.min(2) };
        // What blocks give each other, in two buffers where they do it more than once.
        let given = if self.split > 1 { self.sum_dims()[0] * own * 4 * self.split } else { 0 };
        let buffers = if self.band == 0 { 1 } else { 2 };
        OVERHEAD + self.stages * stage + boxes * rows * BOX_ROW + buffers * given
    }

    /// Bytes that its stages take beyond that where there are no clusters: AMD's instructions find whole blocks of rows there.
    fn padding(&self, resources: &Resources) -> u32 {
        let [rows, _, inner] = self.tile;
        let block = (32 / self.element.bytes()).max(16);
        let rows = rows.next_multiple_of(block) - rows;
        let is_counted = self.by_registers() || resources.cluster > 1 || resources.kind == Kind::Cpu;
        if is_counted { 0 } else { self.stages * rows * inner * self.element.bytes() }
    }

    /// Registers of a thread that its share of the sums takes.
    pub(super) fn registers_of_sums(&self) -> u32 {
        let [rows, columns, _] = self.tile;
        rows * columns / (self.groups.max(1) * 128)
    }

    /// Registers of a thread that its share of a tile takes.
    pub fn registers(&self) -> u32 {
        // Of fragments of 32 bits; those of 16 take half.
        let words = self.registers_of_sums();
        let of = |element: Scalar| words * element.bytes() / 4;
        let sum = self.sum();
        let parts = if self.epilogue.scales == Scales::Blocks { words } else { 0 };
        let out = if self.output == sum { 0 } else { of(self.output) };
        let float =
            if sum == Scalar::I32 && !matches!(self.output, Scalar::I32 | Scalar::F32) { words } else { 0 };
        let old = if self.epilogue.loads() && self.output.bytes() == 4 { words } else { 0 };
        // The block's share of a sum is beside it.
        let own = if self.split > 1 { words } else { 0 };
        words + own + parts + out + float + old
    }

    /// The most registers that sums may have beside what a factor's elements pass through, if they do on their way to the tensor core.
    fn most_sums(&self) -> u32 {
        let turned = self.is_turned();
        // Each is the sum of two of tf32.
        let divided = self.element == Scalar::F32;
        // Beside addresses of a block's only tile, or its share of a sum, there are fewer.
        match self.element.bytes() {
            _ if divided && turned && self.band == 0 && self.split == 1 => 48,
            _ if divided => 64,
            _ if !turned => u32::MAX,
            1 if self.split > 1 => 48,
            1 => 64,
            _ => 96,
        }
    }

    /// Whether a block has what it needs, as far as its own numbers tell.
    fn fits(&self, resources: &Resources) -> bool {
        let [rows, columns, inner] = self.tile;
        let bytes = self.element.bytes();
        // Rows of what is copied are whole boxes.
        let whole = |elements: u32| (elements * bytes).is_multiple_of(BOX_ROW);
        let a = if self.a_transposed { whole(rows) && inner <= BOX } else { whole(inner) && rows <= BOX };
        let b = if self.b_transposed { whole(inner) } else { whole(columns) && inner <= BOX };
        let scaled = self.epilogue.scales != Scales::Blocks
            || (columns <= 128 && 128 % columns == 0 && inner.is_multiple_of(128));
        let split = self.split == 1
            || (self.cluster == 1
                && self.align >= 16
                && self.epilogue.scales != Scales::Blocks
                && self.batch != Batch::Grouped
                && (self.shares() || self.epilogue == Epilogue::NONE));
        let ahead = !self.overlap || (self.stages > 1 && self.epilogue.scales != Scales::Blocks);
        // What C had and a long function beside it spill from the largest tiles.
        let long = self.epilogue.loads() && self.epilogue.activation == Activation::Gelu;
        // Its derivative is longer.
        let most = match (self.output.bytes(), self.epilogue.aux) {
            (4, _) => 64,
            (_, Auxiliary::Gradient) => 96,
            _ => 128,
        };
        let room = !long || (rows <= 128 && self.registers_of_sums() <= most);
        let room = room && !(self.epilogue.scales == Scales::Rows && self.cluster > 1 && columns > 128);
        let room = room && (resources.kind == Kind::Cpu || self.registers_of_sums() <= self.most_sums());
        let alone = self.batch != Batch::Grouped && self.align >= 16 || self.cluster == 1;
        let of_groups = if self.swapped { columns } else { rows };
        let held = of_groups.is_multiple_of(64 * self.groups.max(1)) && rows.is_multiple_of(8);
        let plain = !self.swapped || self.epilogue == Epilogue::NONE && self.batch != Batch::Grouped;
        plain
            && a
            && b
            && scaled
            && split
            && ahead
            && room
            && alone
            && held
            && self.registers() <= REGISTERS
            && self.shared_bytes() + self.padding(resources) <= resources.shared_bytes
    }
}

impl Variant for Gemm {
    fn name(&self) -> String {
        Gemm::name(self)
    }

    fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        Gemm::kernel(self, guest)
    }
}

impl Problem for Product {
    type Variant = Gemm;

    fn family(&self) -> &str {
        "gemm"
    }

    fn class(&self) -> String {
        // What a variant's name says of the problem, and extents.
        let order = |transposed| if transposed { "t" } else { "n" };
        let (a, b) = (order(self.a_transposed), order(self.b_transposed));
        let (batch, epilogue) = (self.batch.suffix(), self.epilogue.suffix());
        let [m, n, k] = [self.m, self.n, self.k].map(rounded);
        let many =
            if self.batch == Batch::One { String::new() } else { format!("{}x", rounded(self.matrices)) };
        let anywhere = if self.align < 16 { "_any" } else { "" };
        format!("{a}{b}{batch}_{}_{}{epilogue}_{many}{m}x{n}x{k}{anywhere}", self.element, self.output)
    }

    fn variants(&self, resources: &Resources) -> Vec<Gemm> {
        let of = |table: &[Row]| -> Vec<Gemm> {
            let all = table.iter().map(|row| self.variant(*row));
            all.filter(|variant| variant.fits(resources)).collect()
        };
        if resources.kind == Kind::Cpu && self.is_line() {
            return vec![self.variant_of_lines(resources.compute_units)];
        }
        let enough = self.rows() >= 16 || self.batch == Batch::Batched;
        if resources.kind == Kind::Cpu && enough && self.batch != Batch::Grouped {
            return vec![self.variant_of_processors()];
        }
        let mut variants = of(self.table(resources.compute_units));
        self.fill_rounds(&mut variants, resources);
        // Of few rows those first whose blocks share the inner dimension, if there are units for twice as many blocks.
        let blocks = self.n.div_ceil(64).saturating_mul(2 * self.matrices.max(1));
        if self.rows() <= 64 && blocks <= resources.compute_units.into() {
            variants.sort_by_key(|variant| variant.split == 1);
        }
        if variants.is_empty() { of(TIGHT) } else { variants }
    }

    fn grid(&self, variant: &Gemm, resources: &Resources) -> [u32; 3] {
        let [rows, columns, _] = variant.tile.map(u64::from);
        let cluster = u64::from(variant.cluster.max(1));
        let split = u64::from(variant.split.max(1));
        let tiles = self.tiles(rows * cluster, columns).saturating_mul(cluster);
        // Groups that end within a tile have one more.
        let tiles = if self.batch == Batch::Grouped { tiles.saturating_mul(2) } else { tiles };
        if variant.band == 0 {
            let count =
                |extent: u64, by: u64| u32::try_from(extent.div_ceil(by.max(1)).max(1)).unwrap_or(u32::MAX);
            let wide = u64::from(count(self.n, columns)).saturating_mul(split);
            let wide = u32::try_from(wide).unwrap_or(u32::MAX / variant.split.max(1) * variant.split.max(1));
            // A block of a row takes several matrices where there are more than that.
            return [wide, count(self.m, rows), count(self.matrices, 1).min(MAX_GRID_YZ)];
        }
        let units = u64::from(resources.compute_units.max(1));
        let blocks = (tiles.min(units / split) / cluster).max(1) * cluster * split;
        [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1]
    }

    fn arguments(&self) -> Vec<Sample> {
        let Product { m, n, k, .. } = *self;
        let turned =
            |turned: bool, [rows, columns]: [u64; 2]| if turned { [columns, rows] } else { [rows, columns] };
        let view = |element, many: bool, extents: [u64; 2]| {
            let matrices = many.then_some(self.matrices);
            Sample::Random { element, extents: matrices.into_iter().chain(extents).collect() }
        };
        let line = |element, extents: &[u64]| Sample::Random { element, extents: extents.to_vec() };
        let loaded = if self.element == Scalar::Tf32 { Scalar::F32 } else { self.element };
        let batched = self.batch == Batch::Batched;
        let Epilogue { scaled, scales, plus, bias, aux, .. } = self.epilogue;
        let mut all = vec![
            view(loaded, batched, turned(self.a_transposed, [m, k])),
            view(loaded, self.batch != Batch::One, turned(self.b_transposed, [k, n])),
            view(self.output, batched, [m, n]),
        ];
        all.extend(scaled.then(|| Sample::f32(0.75)));
        all.extend(plus.then(|| Sample::f32(-0.5)));
        match scales {
            Scales::None => {}
            Scales::Rows => all.extend([line(Scalar::F32, &[m]), line(Scalar::F32, &[n])]),
            Scales::Blocks => all.extend([
                line(Scalar::F32, &[k.div_ceil(128), m]),
                line(Scalar::F32, &[k.div_ceil(128), n.div_ceil(128)]),
            ]),
        }
        all.extend(bias.then(|| line(self.output, &[n])));
        all.extend((aux != Auxiliary::None).then(|| view(self.output, batched, [m, n])));
        if self.batch == Batch::Grouped {
            let groups = self.matrices.max(1);
            let ends =
                (0..=groups).map(|group| (u128::from(group) * u128::from(m) / u128::from(groups)) as f64);
            all.push(Sample::Values(Tensor::from_f64s(Scalar::I32, &[groups + 1], ends)));
        }
        all
    }

    fn operations(&self) -> f64 {
        let matrices = if self.batch == Batch::Batched { self.matrices } else { 1 };
        [2, matrices, self.m, self.n, self.k].map(|number| number as f64).iter().product()
    }
}
