//! How the rows of a matrix are divided among threads, for kernels that reduce each row.
//!
//! A [`Layout`] is a part of a variant: how many neighbouring threads are the *team* of a row (a few of a warp, a warp, a block, the
//! blocks of a cluster), how wide their accesses are, and whether they hold the row in registers. The kernel is written once for all
//! of them:
//!
//! ```
//! # use vm_ir::{IRBlock, GuestAddr, Scalar, view::Access};
//! # use vm_kernels::row::{Layout, each_row, matrix};
//! # let layout = Layout { threads: 256, team: 256, cluster: 1, lanes: 4, vectors: 2, tail: false, shifted: false };
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

mod layout;
mod powers;
mod team;
mod turns;
mod values;

use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{Scalar, Type};

pub use layout::{Layout, MAX_COLUMNS, grid_of, lanes, launch_rows};
pub(crate) use layout::{accesses, launch_views};
pub use powers::{Powers, Precision};
pub use team::team;
pub use turns::{MAX_TURNS, Turns};
pub(crate) use values::in_pairs;
pub use values::{Piece, Values};

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
    let ty = match layout.shifted {
        true => accessed(layout, ViewType::new(element, 1, access), 1).named(&["elements"]),
        false => accessed(layout, ViewType::new(element, 2, access), 2).named(&["rows", "columns"]),
    };
    View::of(k, name, ty)
}

/// A parameter with an element for each column.
#[track_caller]
pub fn row<'b>(k: Builder<'b>, layout: Layout, name: &str, element: Scalar, access: Access) -> View<'b> {
    View::of(k, name, of_columns(layout, ViewType::new(element, 1, access), 1).named(&["columns"]))
}

/// A parameter with an element for each row.
#[track_caller]
pub fn column<'b>(k: Builder<'b>, name: &str, element: Scalar, access: Access) -> View<'b> {
    View::of(k, name, ViewType::new(element, 1, access).named(&["rows"]))
}

/// A parameter of f32 with a row for each of what blocks have summed, and an element for each column.
#[track_caller]
pub fn parts<'b>(k: Builder<'b>, layout: Layout, name: &str, access: Access) -> View<'b> {
    let ty = of_columns(layout, ViewType::new(Scalar::F32, 2, access), 2).named(&["parts", "columns"]);
    View::of(k, name, ty)
}

/// The same of what has an element for each column: in a layout that is shifted it is accessed one by one.
fn of_columns(layout: Layout, ty: ViewType, rank: usize) -> ViewType {
    if layout.shifted { ty } else { accessed(layout, ty, rank) }
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
    shift: Option<Shift<'b>>,
    /// Where rows are taken in turns, 0 or 1 by turns.
    turn: Option<Val<'b>>,
}

/// Where a row of a layout that is shifted begins.
#[derive(Clone, Copy, Debug)]
struct Shift<'b> {
    /// Its place among all elements, of i64.
    start: Val<'b>,
    /// The first multiple of the lanes there, of i64.
    base: Val<'b>,
    /// Elements of the row before that, of i32.
    head: Val<'b>,
    /// All elements, of i64.
    elements: Val<'b>,
}

impl<'b> Shift<'b> {
    /// Elements of the accesses of a row of so many columns.
    fn accessed(self, columns: Val<'b>, lanes: i32) -> Val<'b> {
        (columns - self.head).max(0) & !(lanes - 1)
    }

    /// The column behind them.
    fn behind(self, columns: Val<'b>, lanes: i32) -> Val<'b> {
        self.head + self.accessed(columns, lanes)
    }

    /// Where the access is, among all elements, that begins so many elements behind the first one.
    fn access(self, behind: Val<'b>, lanes: i32) -> Val<'b> {
        (self.base + behind.to(Scalar::I64)).min(self.elements - i64::from(lanes))
    }
}

/// The kernel's block and cluster, and `work` for the team's row of the matrix `of`. All threads of a warp are there together, and in
/// larger teams all of the team.
#[track_caller]
pub fn each_row<'b>(k: Builder<'b>, layout: Layout, of: View<'b>, work: impl FnOnce(&Row<'b>)) {
    k.block_size([layout.threads.into(), 1, 1]).cluster_size(layout.cluster.into());
    let extents = Extents::of(k, layout, of);
    let rows = extents.rows;
    let teams = layout.rows() as i32;
    let number = match () {
        () if layout.cluster > 1 => k.cluster_id(),
        () if teams == 1 => k.block_id(Axis::X),
        () if layout.team == 32 => k.block_id(Axis::X) * teams + k.warp_id(),
        () => k.block_id(Axis::X) * teams + k.thread_id(Axis::X).shr_u(layout.team.ilog2()),
    };
    let number = number.to(Scalar::I64).named("row");
    if layout.team >= 32 || layout.threads == layout.team {
        return k.if_(number.lt(rows), || work(&Row::new(k, layout, extents, number)));
    }
    let exists = number.lt(rows);
    k.if_(exists.any(), || {
        let row = Row::new(k, layout, extents, number.min(rows - 1));
        work(&Row { exists: Some(exists), ..row });
    });
}

/// The extents of a matrix.
#[derive(Clone, Copy, Debug)]
struct Extents<'b> {
    rows: Val<'b>,
    columns: Val<'b>,
    /// Of one that is shifted, all elements.
    elements: Option<Val<'b>>,
}

impl<'b> Extents<'b> {
    fn of(k: Builder<'b>, layout: Layout, of: View<'b>) -> Extents<'b> {
        if layout.shifted {
            let [rows, columns] = [
                k.scalar("rows", Type::I64),
                k.scalar_in("columns", Type::I32, 1, MAX_COLUMNS.cast_signed()),
            ];
            return Extents { rows, columns, elements: Some(of.place.extent(0)) };
        }
        let columns = of.place.extent(1).to(Scalar::I32).named("columns");
        Extents { rows: of.place.extent(0), columns, elements: None }
    }
}

impl<'b> Row<'b> {
    fn new(k: Builder<'b>, layout: Layout, extents: Extents<'b>, number: Val<'b>) -> Row<'b> {
        let Extents { columns, elements, .. } = extents;
        let lanes = i32::from(layout.lanes);
        let shift = elements.map(|elements| {
            let start = number * columns.to(Scalar::I64);
            // So that it is seen to be a multiple, whatever the row's number.
            let base = (start + i64::from(lanes - 1)).shr_u(lanes.ilog2()) << i64::from(lanes.ilog2());
            Shift { start, base, head: (base - start).to(Scalar::I32) & (lanes - 1), elements }
        });
        Row { k, layout, number, columns, first: Row::first(k, layout), exists: None, shift, turn: None }
    }

    /// An element of a matrix, of the row.
    pub fn element(&self, view: View<'b>, column: Val<'b>) -> Val<'b> {
        let element = match self.shift {
            Some(Shift { start, .. }) => view.place.at([start + column.to(Scalar::I64)]),
            None => view.place.at([self.number, column]),
        };
        element.load().to(Scalar::F32)
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

    /// Does something with each number below `count`, of i64, shared by the team's threads: not in a cluster, in which
    /// a guest's kernel has no such loops.
    pub fn share(&self, count: Val<'b>, work: impl FnOnce(Val<'b>)) {
        let (k, Layout { lanes, team, .. }) = (self.k, self.layout);
        // The thread's number in its team.
        let number = self.first.shr_u(u32::from(lanes).ilog2()).to(Scalar::I64);
        let all = || k.range(number, count).step(u32::from(team)).each(work);
        match self.exists {
            Some(exists) => k.if_(exists, all),
            None => all(),
        }
    }

    /// A number of the row, as f32.
    pub fn load(&self, column: View<'b>) -> Val<'b> {
        column.place.at([self.number]).load().to(Scalar::F32)
    }

    /// The row of each of these matrices: loaded, if the layout holds rows, else to be loaded for each use.
    pub fn hold<'r>(&'r self, views: &[View<'b>]) -> Values<'r, 'b> {
        let held = self.places().map(|place| place.loaded(views, Cache::Stream)).collect();
        Values { row: self, views: views.to_vec(), held }
    }

    /// The row of each of these matrices, as it lies in memory, for [`held`](Self::held): of each held piece that of each matrix.
    pub fn load_all(&self, views: &[View<'b>]) -> Vec<Val<'b>> {
        let words = |place: Piece<'b>| views.iter().map(move |view| pack(place.raw(*view, Cache::Stream)));
        self.places().flat_map(words).collect()
    }

    /// The same of an array with an element for each column.
    pub fn load_columns(&self, view: View<'b>) -> Vec<Val<'b>> {
        self.places().map(|place| pack(place.raw_of_row(view))).collect()
    }

    /// What was loaded of these matrices and arrays, in their order of each held piece.
    pub fn held<'r>(&'r self, views: &[View<'b>], words: &[Val<'b>]) -> Values<'r, 'b> {
        let held = self.places().zip(words.chunks(views.len().max(1))).map(|(place, words)| {
            let values =
                views.iter().zip(words).map(|(view, words)| unpack(*words, view.element, place.lanes));
            Piece { values: values.collect(), ..place }
        });
        Values { row: self, views: views.to_vec(), held: held.collect() }
    }

    /// What was loaded once more, in a way that no compiler sees: as it lies in memory it takes fewer registers than what was made of it, which
    /// an assembler would keep instead.
    pub fn again(&self, words: &[Val<'b>]) -> Vec<Val<'b>> {
        // Neither is ever negative.
        let nothing = (self.first + self.columns).shr_u(31);
        let again = |word: &Val<'b>| match word.ty() {
            Type::I32 => *word ^ nothing,
            ty if ty.scalar() == Scalar::I32 => *word ^ nothing.splat(ty.lanes()),
            _ => *word,
        };
        words.iter().map(again).collect()
    }

    /// Where all is that a thread holds: its vectors, and behind them an element of those beside a row's accesses.
    fn places(&self) -> impl Iterator<Item = Piece<'b>> {
        let vectors = (0..u32::from(self.layout.vectors)).map(|vector| self.place(vector));
        let held = self.shift.filter(|_| self.layout.holds());
        vectors.chain(held.map(|shift| self.beside(shift)))
    }

    /// Where a held vector is.
    fn place(&self, vector: u32) -> Piece<'b> {
        let Layout { vectors, cluster, lanes, .. } = self.layout;
        let column = if vector == 0 { self.first } else { self.first + (vector * self.layout.step()) as i32 };
        let behind = column;
        let column = self.shift.map_or(column, |shift| shift.head + column);
        // A block has all accesses but the last in any row, and a team of one that too.
        let always = cluster == 1 && (vector + 1 < vectors.into() || self.layout.team == 1 && vectors == 1);
        let last = self.columns - i32::from(lanes);
        let inside = (!always).then(|| column.le(last));
        let column = if always { column } else { column.min(last) };
        let flat = self.shift.map(|shift| shift.access(behind, lanes.into()));
        Piece { column, inside, flat, ..Piece::new(self, lanes) }
    }

    /// The element before the accesses of a row, or behind them, that a thread has: of its team's first threads the number there, and of as many
    /// behind them.
    fn beside(&self, shift: Shift<'b>) -> Piece<'b> {
        let lanes = i32::from(self.layout.lanes);
        let thread = self.first.shr_u(lanes.ilog2());
        let is_first = thread.lt(lanes);
        let column = is_first.select(thread, thread - lanes + shift.behind(self.columns, lanes));
        let inside = column.lt(is_first.select(shift.head, self.columns));
        let column = column.min(self.columns - 1);
        let flat = (shift.start + column.to(Scalar::I64)).min(shift.elements - 1);
        Piece { column, inside: Some(inside), flat: Some(flat), ..Piece::new(self, 1) }
    }
}

/// Elements as words of 32 bits, if they are less each and fill some: what registers hold.
fn pack(elements: Val<'_>) -> Val<'_> {
    let ty = elements.ty();
    let words = ty.bytes() / 4;
    match (ty.scalar().bytes(), words) {
        (4.., _) | (_, 0) => elements,
        (_, 1) => elements.bitcast(Type::I32),
        (_, words) => elements.bitcast(Type::vector(Scalar::I32, words as u8).unwrap_or(Type::I32)),
    }
}

/// What was packed, as f32.
fn unpack(words: Val<'_>, element: Scalar, lanes: u8) -> Val<'_> {
    let ty = Type::vector(element, lanes).unwrap_or(element.into());
    if words.ty() == ty { words } else { words.bitcast(ty) }.to(Scalar::F32)
}
