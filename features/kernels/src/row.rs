//! How the rows of a matrix are divided among threads, for kernels that reduce each row.
//!
//! A [`Layout`] is a part of a variant: how many neighbouring threads are the *team* of a row (a few of a warp, a warp, a block, the
//! blocks of a cluster), how wide their accesses are, and whether they hold the row in registers. The kernel is written once for all
//! of them:
//!
//! ```
//! # use vm_ir::{IRBlock, GuestAddr, Scalar, view::Access};
//! # use vm_kernels::row::{Layout, each_row, matrix};
//! # let layout = Layout { threads: 256, team: 256, cluster: 1, lanes: 4, vectors: 2, tail: false };
//! # let block = IRBlock::new(GuestAddr(0));
//! # let k = block.builder();
//! let x = matrix(k, layout, "x", Scalar::Bf16, Access::Read);
//! let y = matrix(k, layout, "y", Scalar::F32, Access::Write);
//! each_row(k, layout, x, |row| {
//!     let values = row.hold(&[x]);
//!     let [sum] = values.fold("sum", [0.0], |[sum], piece| [sum + piece.or(piece[0], 0.0)], |[a], [b]| [a + b]);
//!     values.each(|piece| piece.store(y, piece[0] - piece.splat(sum)));
//! });
//! # block.kernel().unwrap();
//! ```
//!
//! A [`Piece`] is what a thread takes of a row at once: `lanes` elements, computed in f32. [`Values::fold`] combines all pieces of a row
//! and gives each thread of the team the result, always in the same order; [`Values::each`] goes through them again, in registers
//! where they are held, else by loading them once more.
//!
//! Two shapes of loops serve two kinds of devices. On a GPU accesses are whole vectors: the columns are a multiple of `lanes`
//! ([`Layout::of`] sees to that), and threads that a row has no vector for load its last one again and leave it out of what they
//! combine and store. On a processor one thread takes a row, sixteen elements at a time, and what is left of it one by one (`tail`).

use std::ops::Index;

use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{Scalar, Type};

use crate::call::{Buffer, Call, CallError, Entry, Launch, Operand};
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
    /// Accesses of each thread, by which the row is held in registers; 0 if it is loaded for each use.
    pub vectors: u8,
    /// May the columns be no multiple of `lanes`? Only in a team of one thread that holds nothing.
    pub tail: bool,
}

impl Layout {
    /// A processor's: a thread for each row.
    pub const CPU: Layout = Layout { threads: 1, team: 1, cluster: 1, lanes: 16, vectors: 0, tail: true };

    /// The layout for rows of so many columns, of arrays of these types whose bases are multiples of `align` bytes.
    /// `held` is how many numbers of f32 a thread keeps for each element that it holds.
    pub fn of(columns: u64, elements: &[Scalar], align: u32, held: u32, resources: &Resources) -> Layout {
        if resources.kind == Kind::Cpu {
            return Layout::CPU;
        }
        let lanes = lanes(columns, elements, align);
        let vectors = columns.div_ceil(lanes.into()).max(1);
        // Registers hold so many numbers of f32, and the places of so many accesses.
        let fits = |vectors: u64, most: u64| {
            vectors * u64::from(lanes) * u64::from(held.max(1)) <= most && vectors <= 16
        };
        let of = |threads: u64, team: u64, cluster: u64| Layout {
            threads: threads as u16,
            team: team as u16,
            cluster: cluster as u8,
            lanes,
            vectors: vectors.div_ceil(team * cluster) as u8,
            tail: false,
        };
        let team = vectors.next_power_of_two().min(32);
        if fits(vectors.div_ceil(team), 32) && vectors.div_ceil(team) <= 8 {
            return of(128, team, 1);
        }
        // Small blocks have more registers for each thread, and a multiprocessor has several.
        let threads = vectors.div_ceil(4).next_multiple_of(32).min(256);
        if fits(vectors.div_ceil(threads), 64) && vectors.div_ceil(threads) <= 8 {
            return of(threads, threads, 1);
        }
        if fits(vectors.div_ceil(512), 32) {
            return of(512, 512, 1);
        }
        let clusters = [(2, 32), (4, 32), (8, 32), (8, 64)];
        for (cluster, most) in clusters.into_iter().filter(|(cluster, _)| *cluster <= resources.cluster) {
            let cluster = u64::from(cluster);
            if fits(vectors.div_ceil(512 * cluster), most) {
                return of(512, 512, cluster);
            }
        }
        Layout { threads: 256, team: 256, cluster: 1, lanes, vectors: 0, tail: false }
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
    fn step(self) -> u32 {
        u32::from(self.team) * u32::from(self.lanes)
    }

    /// What a name of a variant says of it.
    pub fn name(self) -> String {
        let Layout { threads, team, cluster, lanes, vectors, tail } = self;
        format!("{threads}t{team}c{cluster}x{lanes}v{vectors}{}", if tail { "any" } else { "" })
    }
}

/// The widest accesses that all of these arrays' rows can be cut into: of up to 16 bytes of the narrowest elements.
pub fn lanes(columns: u64, elements: &[Scalar], align: u32) -> u8 {
    let [least, most] =
        [elements.iter().min_by_key(|e| e.bytes()), elements.iter().max_by_key(|e| e.bytes())]
            .map(|element| element.map_or(4, |e| e.bytes()));
    let aligned = if align.is_power_of_two() { align.max(most) / least } else { 1 };
    let odd = columns.trailing_zeros().min(4);
    // What is aligned for the narrowest elements must be for the others.
    ((16 / least).min(aligned).min(1 << odd)).clamp(1, 8) as u8
}

/// A view of rows or of one row, with what its elements are.
#[derive(Clone, Copy, Debug)]
pub struct View<'b> {
    /// The view.
    pub place: PlaceRef<'b>,
    /// Its elements.
    pub element: Scalar,
    /// May the kernel write it? Then a thread reads only what is its own.
    pub written: bool,
}

impl<'b> View<'b> {
    /// A parameter of such a type.
    #[track_caller]
    pub fn of(k: Builder<'b>, name: &str, ty: ViewType) -> View<'b> {
        let (element, written) = (ty.element, ty.access.writes());
        View { place: k.view_of(name, ty), element, written }
    }
}

/// How a view's last dimension is accessed: so many elements at once, each time at a multiple of them.
fn accessed(layout: Layout, ty: ViewType, rank: usize) -> ViewType {
    if layout.tail {
        return ty;
    }
    let lanes = u32::from(layout.lanes);
    let mut dims = vec![Dim::ANY; rank];
    dims[rank - 1] = Dim::Any { multiple: lanes };
    let align = (lanes * ty.element.bytes()).min(16);
    ty.with_dims(&dims).aligned(align)
}

/// A parameter of rows and columns, each row aligned for the layout's accesses. All matrices of a kernel have the same extents.
#[track_caller]
pub fn matrix<'b>(k: Builder<'b>, layout: Layout, name: &str, element: Scalar, access: Access) -> View<'b> {
    let ty = accessed(layout, ViewType::new(element, 2, access), 2).named(&["rows", "columns"]);
    View::of(k, name, ty)
}

/// A parameter with an element for each column.
#[track_caller]
pub fn row<'b>(k: Builder<'b>, layout: Layout, name: &str, element: Scalar, access: Access) -> View<'b> {
    let ty = accessed(layout, ViewType::new(element, 1, access), 1).named(&["columns"]);
    View::of(k, name, ty)
}

/// A parameter with an element for each row.
#[track_caller]
pub fn column<'b>(k: Builder<'b>, name: &str, element: Scalar, access: Access) -> View<'b> {
    View::of(k, name, ViewType::new(element, 1, access).named(&["rows"]))
}

/// A parameter of f32 with a row for each block and an element for each column, for what blocks have summed.
#[track_caller]
pub fn parts<'b>(k: Builder<'b>, layout: Layout, name: &str, access: Access) -> View<'b> {
    let ty = accessed(layout, ViewType::new(Scalar::F32, 2, access), 2).named(&["parts", "columns"]);
    View::of(k, name, ty)
}

/// A team's row.
#[derive(Debug)]
pub struct Row<'b> {
    k: Builder<'b>,
    layout: Layout,
    /// Its number, of i64.
    pub number: Val<'b>,
    /// Its columns, of i32.
    pub columns: Val<'b>,
    /// The thread's first column.
    first: Val<'b>,
    /// Is there such a row? Where a warp has several rows; else the warps without one are not here.
    exists: Option<Val<'b>>,
}

/// The kernel's block and cluster, and `work` for the team's row of the matrix `of`. All threads of a warp are there together, and in
/// larger teams all of the team.
#[track_caller]
pub fn each_row<'b>(k: Builder<'b>, layout: Layout, of: View<'b>, work: impl FnOnce(&Row<'b>)) {
    k.block_size([layout.threads.into(), 1, 1]).cluster_size(layout.cluster.into());
    let rows = of.place.extent(0);
    let teams = layout.rows() as i32;
    let number = match () {
        () if layout.cluster > 1 => k.cluster_id(),
        () if teams == 1 => k.block_id(Axis::X),
        () if layout.team == 32 => k.block_id(Axis::X) * teams + k.warp_id(),
        () => k.block_id(Axis::X) * teams + k.thread_id(Axis::X).shr_u(layout.team.ilog2()),
    };
    let number = number.to(Scalar::I64).named("row");
    if layout.team >= 32 || layout.threads == layout.team {
        return k.if_(number.lt(rows), || work(&Row::of(k, layout, of, number)));
    }
    let exists = number.lt(rows);
    k.if_(exists.any(), || {
        let row = Row::of(k, layout, of, number.min(rows - 1));
        work(&Row { exists: Some(exists), ..row });
    });
}

/// The kernel's block, and `work` for each row of the block's: those whose number is the block's but for multiples of the grid. The block
/// is one team, and there are no clusters; between two rows it meets at a barrier. `state` goes from row to row.
#[track_caller]
pub fn fold_rows<'b>(
    k: Builder<'b>,
    layout: Layout,
    of: View<'b>,
    state: Vec<Val<'b>>,
    work: impl FnOnce(&Row<'b>, Vec<Val<'b>>) -> Vec<Val<'b>>,
) -> Vec<Val<'b>> {
    k.block_size([layout.threads.into(), 1, 1]);
    let (block, blocks) = (k.block_id(Axis::X).to(Scalar::I64), k.grid_dim(Axis::X).to(Scalar::I64));
    let rows = k.range(block, of.place.extent(0)).step(blocks);
    rows.fold(state, |number, state| {
        let state = work(&Row::of(k, layout, of, number), state);
        if layout.team > 32 {
            k.barrier();
        }
        state
    })
}

impl<'b> Row<'b> {
    /// The row of such a number of a matrix, which has it.
    pub fn of(k: Builder<'b>, layout: Layout, of: View<'b>, number: Val<'b>) -> Row<'b> {
        let columns = of.place.extent(1).to(Scalar::I32).named("columns");
        Row { k, layout, number, columns, first: Row::first(k, layout), exists: None }
    }

    fn first(k: Builder<'b>, layout: Layout) -> Val<'b> {
        if layout.team == 1 {
            return k.i32(0);
        }
        let thread = k.thread_id(Axis::X);
        let teams = layout.rows();
        let thread = if teams > 1 { thread & (i32::from(layout.team) - 1) } else { thread };
        let first = thread * i32::from(layout.lanes);
        let first = match layout.cluster {
            1 => first,
            _ => first + k.cluster_rank() * (u32::from(layout.vectors) * layout.step()) as i32,
        };
        first.named("first")
    }

    /// What builds the kernel.
    pub fn builder(&self) -> Builder<'b> {
        self.k
    }

    /// Is this the thread that speaks for the team?
    pub fn leads(&self) -> Val<'b> {
        let mut leads = self.first.eq(0);
        if self.layout.team == 1 {
            leads = self.k.bool(true);
        }
        self.exists.map_or(leads, |exists| leads & exists)
    }

    /// Stores a number of the row, by one thread of the team.
    pub fn store(&self, column: View<'b>, value: Val<'b>) {
        self.k.if_(self.leads(), || column.place.at([self.number]).store(value.to(column.element)));
    }

    /// A number of the row, as f32.
    pub fn load(&self, column: View<'b>) -> Val<'b> {
        column.place.at([self.number]).load().to(Scalar::F32)
    }

    /// The row of each of these matrices: loaded, if the layout holds rows, else to be loaded for each use.
    pub fn hold<'r>(&'r self, views: &[View<'b>]) -> Values<'r, 'b> {
        let places = (0..u32::from(self.layout.vectors)).map(|vector| self.place(vector));
        let held = places.map(|place| place.loaded(views, Cache::Stream)).collect();
        Values { row: self, views: views.to_vec(), held }
    }

    /// Where a held vector is.
    fn place(&self, vector: u32) -> Piece<'b> {
        let Layout { vectors, cluster, lanes, .. } = self.layout;
        let column = if vector == 0 { self.first } else { self.first + (vector * self.layout.step()) as i32 };
        // The first vector of a team of one is there in any row.
        let always = self.layout.team == 1 && vectors == 1 && cluster == 1;
        let mut inside = (!always).then(|| column.lt(self.columns));
        let column = if always { column } else { column.min(self.columns - i32::from(lanes)) };
        if let Some(exists) = self.exists {
            inside = Some(inside.map_or(exists, |inside| inside & exists));
        }
        Piece { k: self.k, number: self.number, column, lanes, inside, values: Vec::new() }
    }
}

/// A row's values in one or several matrices.
#[derive(Debug)]
pub struct Values<'r, 'b> {
    row: &'r Row<'b>,
    views: Vec<View<'b>>,
    held: Vec<Piece<'b>>,
}

/// Neighbouring elements of a row, as one thread has them.
#[derive(Clone, Debug)]
pub struct Piece<'b> {
    k: Builder<'b>,
    number: Val<'b>,
    /// The first one's column, of i32.
    pub column: Val<'b>,
    /// How many they are.
    pub lanes: u8,
    inside: Option<Val<'b>>,
    values: Vec<Val<'b>>,
}

impl<'b> Index<usize> for Piece<'b> {
    type Output = Val<'b>;

    /// Those of a matrix, as f32.
    fn index(&self, matrix: usize) -> &Val<'b> {
        &self.values[matrix]
    }
}

impl<'b> Piece<'b> {
    fn loaded(mut self, views: &[View<'b>], hint: Cache) -> Piece<'b> {
        self.values = views.iter().map(|view| self.of_matrix(*view, hint)).collect();
        self
    }

    /// The elements of a matrix there, as f32.
    pub fn of_matrix(&self, view: View<'b>, hint: Cache) -> Val<'b> {
        self.raw(view, hint).to(Scalar::F32)
    }

    /// The same as they are.
    pub fn raw(&self, view: View<'b>, hint: Cache) -> Val<'b> {
        let load = || {
            let element = view.place.at([self.number, self.column]).cached(hint);
            if self.lanes == 1 { element.load() } else { element.load_vector(self.lanes) }
        };
        match self.inside {
            Some(inside) if view.written => {
                let ty = Type::vector(view.element, self.lanes).unwrap_or(view.element.into());
                self.k.if_else(inside, load, || self.k.constant(ty, 0))
            }
            _ => load(),
        }
    }

    /// Those of an array with an element for each column, which stay in the cache for other rows, as f32.
    pub fn of_row(&self, view: View<'b>) -> Val<'b> {
        let element = view.place.at([self.column]).cached(Cache::Keep);
        if self.lanes == 1 { element.load() } else { element.load_vector(self.lanes) }.to(Scalar::F32)
    }

    /// A number in each lane.
    pub fn splat(&self, number: Val<'b>) -> Val<'b> {
        if self.lanes == 1 { number } else { number.splat(self.lanes) }
    }

    /// A constant in each lane.
    pub fn constant(&self, number: f32) -> Val<'b> {
        self.k.constant(f32s(self.lanes), number)
    }

    /// The values where the row has this piece, else `other`, which adds nothing to what is combined.
    pub fn or(&self, values: Val<'b>, other: f32) -> Val<'b> {
        match self.inside {
            Some(inside) => inside.select(values, self.constant(other)),
            None => values,
        }
    }

    /// The columns, of i32.
    pub fn columns(&self) -> Val<'b> {
        let columns: Vec<_> = (0..i32::from(self.lanes)).map(|lane| self.column + lane).collect();
        if let [column] = columns[..] { column } else { self.k.vector(&columns) }
    }

    /// Stores values in a matrix, rounded to its elements.
    pub fn store(&self, view: View<'b>, values: Val<'b>) {
        self.inside(|| {
            let element = view.place.at([self.number, self.column]).cached(Cache::Stream);
            element.store(values.to(view.element));
        });
    }

    /// Does something if the row has this piece.
    pub fn inside(&self, work: impl FnOnce()) {
        match self.inside {
            Some(inside) => self.k.if_(inside, work),
            None => work(),
        }
    }
}

/// f32, or a vector of it.
fn f32s(lanes: u8) -> Type {
    Type::vector(Scalar::F32, lanes).unwrap_or(Type::F32)
}

impl<'b> Values<'_, 'b> {
    /// Combines all elements of the row: `step` takes a piece into a state, of which each lane has its own, and `merge` makes one state
    /// of two. Every thread of the team gets the row's. `initial` changes nothing when it is merged. `name` names what lies in
    /// shared memory, and is another in each fold of a kernel.
    pub fn fold<const N: usize>(
        &self,
        name: &str,
        initial: [f32; N],
        step: impl Fn([Val<'b>; N], &Piece<'b>) -> [Val<'b>; N],
        merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
    ) -> [Val<'b>; N] {
        let k = self.row.k;
        let start = |lanes: u8| initial.map(|number| k.constant(f32s(lanes), number));
        let lanes = self.row.layout.lanes;
        let state = match self.held.is_empty() {
            true => self.stream(true, start(lanes), &step),
            false => self.held.iter().fold(start(lanes), &step),
        };
        let mut states = vec![state];
        if lanes > 1 {
            states = (0..lanes).map(|lane| state.map(|values| values.lane(lane))).collect();
        }
        while states.len() > 1 {
            let pairs = states.chunks(2);
            states = pairs.map(|pair| if let [a, b] = *pair { merge(a, b) } else { pair[0] }).collect();
        }
        let mut state = states[0];
        if self.row.layout.tail {
            state = self.stream(false, state, &step);
        }
        team(k, self.row.layout, name, initial, state, &merge)
    }

    /// Does something with each piece, in any order.
    pub fn each(&self, work: impl Fn(&Piece<'b>)) {
        self.map([], |[], piece| {
            work(piece);
            []
        });
    }

    /// The same with a number that only counts pieces which are held: 0, 1, 2 and so on.
    pub fn each_held(&self, mut work: impl FnMut(usize, &Piece<'b>)) {
        self.held.iter().enumerate().for_each(|(number, piece)| work(number, piece));
    }

    fn map<const N: usize>(
        &self,
        start: [Val<'b>; N],
        step: impl Fn([Val<'b>; N], &Piece<'b>) -> [Val<'b>; N],
    ) {
        match self.held.is_empty() {
            true => {
                self.stream(true, start, &step);
                if self.row.layout.tail {
                    self.stream(false, start, &step);
                }
            }
            false => {
                self.held.iter().fold(start, &step);
            }
        }
    }

    /// Loads the row piece by piece: all whole pieces, or the elements behind them.
    fn stream<const N: usize>(
        &self,
        whole: bool,
        state: [Val<'b>; N],
        step: impl Fn([Val<'b>; N], &Piece<'b>) -> [Val<'b>; N],
    ) -> [Val<'b>; N] {
        let Row { k, layout, number, columns, first, .. } = *self.row;
        let wide = i32::from(layout.lanes);
        let pieces = columns & !(wide - 1);
        let (range, lanes) = match (layout.tail, whole) {
            (true, true) => (k.range(first, pieces).step(wide), layout.lanes),
            (true, false) => (k.range(pieces, columns), 1),
            (false, _) => (k.range(first, columns).step(layout.step() as i32).unroll(4), layout.lanes),
        };
        range.fold(state, |column, state| {
            let piece = Piece { k, number, column, lanes, inside: None, values: Vec::new() };
            step(state, &piece.loaded(&self.views, Cache::Normal))
        })
    }
}

/// A call of one launch of rows, whose buffers are all of the parameters, in order, and `numbers` behind them; none without elements.
///
/// # Errors
/// [`CallError::Unsupported`]: more rows or columns than there can be, or elements that are no f32, bf16 or f16.
pub fn launch_rows(
    function: &'static str,
    entry: Entry,
    layout: Layout,
    [rows, columns]: [u64; 2],
    buffers: &[Buffer],
    numbers: &[Operand],
) -> Result<Call, CallError> {
    let grid = grid_of(function, layout, [rows, columns])?;
    let floats = [Scalar::F32, Scalar::Bf16, Scalar::F16, Scalar::I32, Scalar::I64];
    if let Some(other) = buffers.iter().find(|buffer| !floats.contains(&buffer.element)) {
        let what = format!("{} of {}; there are f32, bf16 and f16", other.name, other.element);
        return Err(CallError::Unsupported { function, what });
    }
    let Some(grid) = grid else { return Ok(Call::default()) };
    let views =
        buffers.iter().enumerate().map(|(at, buffer)| Operand::whole(at, buffer.element, &buffer.extents));
    let operands = views.chain(numbers.iter().cloned()).collect();
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

/// What the threads of a team have, merged; every thread gets the same, if `merge` of two states is the same in either order.
pub fn team<'b, const N: usize>(
    k: Builder<'b>,
    layout: Layout,
    name: &str,
    initial: [f32; N],
    state: [Val<'b>; N],
    merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
) -> [Val<'b>; N] {
    let over = |width: u16, state: [Val<'b>; N]| {
        let masks = (0..width.ilog2()).rev().map(|bit| 1 << bit);
        masks.fold(state, |state, mask: i32| merge(state, state.map(|value| value.shuffle_xor(mask))))
    };
    let team = layout.team.max(1);
    let state = over(team.min(32), state);
    let warps = u32::from(team) / 32 * u32::from(layout.cluster);
    if warps <= 1 {
        return state;
    }
    let names: [String; N] = std::array::from_fn(|at| format!("{name}_{at}"));
    let shared = names.map(|name| k.shared(&name, Scalar::F32, &[warps]));
    let lane = k.lane_id();
    if layout.cluster > 1 {
        for (place, value) in shared.iter().zip(state) {
            // Alike in the warp, which is shown by taking one lane's.
            place.gather(value.shuffle(0));
        }
    } else {
        k.if_(lane.eq(0), || {
            let warp = k.warp_id();
            shared.iter().zip(state).for_each(|(place, value)| place.at([warp]).store(value));
        });
        k.barrier();
    }
    let groups = (0..warps as i32).step_by(32).map(|base| {
        let load = || shared.map(|place| place.at([if base == 0 { lane } else { lane + base }]).load());
        match warps as i32 - base {
            32.. => load(),
            left => k.if_else(lane.lt(left), load, || initial.map(|number| k.f32(number))),
        }
    });
    let gathered: Vec<_> = groups.collect();
    over(32, gathered[1..].iter().fold(gathered[0], |state, other| merge(state, *other)))
}

/// The greatest element of a row of the first matrix, or the least finite number where all are less, and the sum of e to each element
/// less that. `each` is given the powers, if the row is not combined in a single pass.
pub fn max_and_sum<'b>(values: &Values<'_, 'b>, each: impl Fn(&Piece<'b>, Val<'b>)) -> [Val<'b>; 2] {
    let layout = values.row.layout;
    if !layout.holds() && !layout.tail {
        // Once through the row: the sum shrinks whenever a greater element comes.
        return values.fold(
            "online",
            [f32::MIN, 0.0],
            |[max, sum], piece| {
                let next = max.max(piece[0]);
                [next, sum * (max - next).exp() + (piece[0] - next).exp()]
            },
            |[a, a_sum], [b, b_sum]| {
                let max = a.max(b);
                [max, a_sum * (a - max).exp() + b_sum * (b - max).exp()]
            },
        );
    }
    let greatest = |[a]: [Val<'b>; 1], [b]: [Val<'b>; 1]| [a.max(b)];
    let [max] =
        values.fold("max", [f32::MIN], |[max], piece| [max.max(piece.or(piece[0], f32::MIN))], greatest);
    let [sum] = values.fold(
        "sum",
        [0.0],
        |[sum], piece| {
            let power = (piece[0] - piece.splat(max)).exp();
            each(piece, power);
            [sum + piece.or(power, 0.0)]
        },
        |[a], [b]| [a + b],
    );
    [max, sum]
}
