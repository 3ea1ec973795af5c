//! What a team has of a row.

use std::ops::Index;

use vm_ir::Scalar;
use vm_ir::Type;
use vm_ir::builder::{Builder, Element, Range, Val};
use vm_ir::op::Cache;

use super::{Row, View, team};

/// Pieces that a processor's thread combines before it merges them with those before.
const BLOCK: i32 = 256;

/// A row's values in one or several matrices.
#[derive(Clone, Debug)]
pub struct Values<'r, 'b> {
    pub(super) row: &'r Row<'b>,
    pub(super) views: Vec<View<'b>>,
    pub(super) held: Vec<Piece<'b>>,
}

/// Neighbouring elements of a row, as one thread has them.
#[derive(Clone, Debug)]
pub struct Piece<'b> {
    pub(super) k: Builder<'b>,
    pub(super) number: Val<'b>,
    /// The first one's column, of i32.
    pub column: Val<'b>,
    /// How many they are.
    pub lanes: u8,
    /// Does the row have it, if that is not known?
    pub(super) inside: Option<Val<'b>>,
    /// Is there such a row, if that is not known? Else this is what another row has, too.
    pub(super) exists: Option<Val<'b>>,
    /// In a layout that is shifted: its place among all elements.
    pub(super) flat: Option<Val<'b>>,
    pub(super) values: Vec<Val<'b>>,
}

impl<'b> Index<usize> for Piece<'b> {
    type Output = Val<'b>;

    /// Those of a matrix, as f32.
    fn index(&self, matrix: usize) -> &Val<'b> {
        &self.values[matrix]
    }
}

impl<'b> Piece<'b> {
    /// One of a row's first columns.
    pub(super) fn new(row: &Row<'b>, lanes: u8) -> Piece<'b> {
        let Row { k, number, first, exists, .. } = *row;
        Piece { k, number, column: first, lanes, inside: None, exists, flat: None, values: Vec::new() }
    }

    /// Where it is in a matrix.
    fn place(&self, view: View<'b>) -> Element<'b> {
        match self.flat {
            Some(flat) => view.place.at([flat]),
            None => view.place.at([self.number, self.column]),
        }
    }

    pub(super) fn loaded(mut self, views: &[View<'b>], hint: Cache) -> Piece<'b> {
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
            let element = self.place(view).cached(hint);
            if self.lanes == 1 { element.load() } else { element.load_vector(self.lanes) }
        };
        match self.own() {
            Some(own) if view.written => {
                let ty = Type::vector(view.element, self.lanes).unwrap_or(view.element.into());
                self.k.if_else(own, load, || self.k.constant(ty, 0))
            }
            _ => load(),
        }
    }

    /// Those of an array with an element for each column, which stay in the cache for other rows, as f32.
    pub fn of_row(&self, view: View<'b>) -> Val<'b> {
        self.raw_of_row(view).to(Scalar::F32)
    }

    /// The same as they are.
    pub(super) fn raw_of_row(&self, view: View<'b>) -> Val<'b> {
        let load = |column: Val<'b>| view.place.at([column]).cached(Cache::Keep);
        match self.lanes {
            1 => load(self.column).load(),
            lanes if self.flat.is_none() => load(self.column).load_vector(lanes),
            // Anywhere.
            lanes => {
                let first = self.column.to(Scalar::I64);
                let all = || (0..lanes).map(|lane| load(first + i64::from(lane)).load()).collect::<Vec<_>>();
                // Seen once for all of them.
                let is_inside = first.ge(0) & first.le(view.place.extent(0) - i64::from(lanes));
                let none = Type::vector(view.element, lanes).unwrap_or(view.element.into());
                self.k.if_else(is_inside, || self.k.vector(&all()), || self.k.constant(none, 0))
            }
        }
    }

    /// A number in each lane.
    pub fn splat(&self, number: Val<'b>) -> Val<'b> {
        if self.lanes == 1 { number } else { number.splat(self.lanes) }
    }

    /// A constant in each lane.
    pub fn constant(&self, number: f32) -> Val<'b> {
        self.k.constant(f32s(self.lanes), number)
    }

    /// The values where the row has this piece, else `other`, which adds nothing to what is combined of a row.
    pub fn or(&self, values: Val<'b>, other: f32) -> Val<'b> {
        self.choose(self.inside, values, other)
    }

    /// The same that adds nothing to what is combined of several rows either.
    pub fn own_or(&self, values: Val<'b>, other: f32) -> Val<'b> {
        self.choose(self.own(), values, other)
    }

    fn choose(&self, condition: Option<Val<'b>>, values: Val<'b>, other: f32) -> Val<'b> {
        condition.map_or(values, |condition| condition.select(values, self.constant(other)))
    }

    /// All lanes in one.
    pub fn across(&self, values: Val<'b>, merge: impl Fn(Val<'b>, Val<'b>) -> Val<'b>) -> Val<'b> {
        match self.lanes {
            1 => values,
            lanes => in_pairs((0..lanes).map(|lane| values.lane(lane)).collect(), merge),
        }
    }

    /// The columns, of i32.
    pub fn columns(&self) -> Val<'b> {
        let columns: Vec<_> = (0..i32::from(self.lanes)).map(|lane| self.column + lane).collect();
        if let [column] = columns[..] { column } else { self.k.vector(&columns) }
    }

    /// Stores values in a matrix, rounded to its elements.
    pub fn store(&self, view: View<'b>, values: Val<'b>) {
        let values = values.to(view.element);
        self.inside(|| self.place(view).cached(Cache::Stream).store(values));
    }

    /// Does something with each of these values and its column, if the row has it: where rows begin anywhere.
    pub fn each_lane(&self, values: Val<'b>, work: impl Fn(Val<'b>, Val<'b>)) {
        self.inside(|| {
            for lane in 0..self.lanes {
                let one = if self.lanes == 1 { values } else { values.lane(lane) };
                work(self.column + i32::from(lane), one);
            }
        });
    }

    /// Is there such a row that has it, if that is not known?
    fn own(&self) -> Option<Val<'b>> {
        match (self.inside, self.exists) {
            (Some(inside), Some(exists)) => Some(inside & exists),
            (inside, exists) => inside.or(exists),
        }
    }

    /// Does something if there is such a row that has this piece.
    pub fn inside(&self, work: impl FnOnce()) {
        match self.own() {
            Some(own) => self.k.if_(own, work),
            None => work(),
        }
    }
}

/// What one or more come to, merged in pairs.
pub(crate) fn in_pairs<T: Copy>(mut all: Vec<T>, merge: impl Fn(T, T) -> T) -> T {
    while let [_, _, ..] = all[..] {
        all = all.chunks(2).map(|pair| if let [a, b] = *pair { merge(a, b) } else { pair[0] }).collect();
    }
    all[0]
}

/// f32, or a vector of it.
fn f32s(lanes: u8) -> Type {
    Type::vector(Scalar::F32, lanes).unwrap_or(Type::F32)
}

impl<'b> Values<'_, 'b> {
    /// Are they in registers?
    pub fn is_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Are they loaded for each use, by several threads?
    pub fn is_streamed(&self) -> bool {
        !self.is_held() && !self.row.layout.tail
    }

    /// The same, with others in the place of the first matrix's where they are held.
    pub fn replaced(mut self, of: impl Fn(&Piece<'b>) -> Val<'b>) -> Self {
        for piece in &mut self.held {
            let value = of(piece);
            piece.values.splice(..1, [value]);
        }
        self
    }

    /// Combines all elements of the row: `step` takes a piece into a state, of which each lane has its own, and `merge` makes one state
    /// of two. Every thread of the team gets the row's. `initial` changes nothing when it is merged. `name` names what lies in
    /// shared memory, and is another in each fold of a kernel; with `None` a thread gets what it has itself.
    pub fn fold<'n, const N: usize>(
        &self,
        name: impl Into<Option<&'n str>>,
        initial: [f32; N],
        step: impl Fn([Val<'b>; N], &Piece<'b>) -> [Val<'b>; N],
        merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
    ) -> [Val<'b>; N] {
        let Row { k, layout, turn, .. } = *self.row;
        let start = |lanes: u8| initial.map(|number| k.constant(f32s(lanes), number));
        let lanes = layout.lanes;
        // A piece of one element is behind all vectors.
        let (vectors, beside): (Vec<_>, Vec<_>) = self.held.iter().partition(|piece| piece.lanes == lanes);
        let joined = |state: [Val<'b>; N]| match lanes {
            1 => state,
            _ => in_pairs((0..lanes).map(|lane| state.map(|values| values.lane(lane))).collect(), &merge),
        };
        let state = match self.held.is_empty() {
            // A long sum of f32 keeps its digits in sums of blocks.
            true if layout.tail => {
                let (columns, wide) = (self.row.columns, i32::from(lanes));
                let (pieces, block) = (columns & !(wide - 1), BLOCK * wide);
                k.range(self.row.first, pieces).step(block).fold(start(1), |from, state| {
                    let pieces = k.range(from, (from + block).min(pieces)).step(wide);
                    merge(state, joined(self.stream_over(pieces, lanes, start(lanes), &step)))
                })
            }
            true => joined(self.stream(true, start(lanes), &step)),
            false => joined(vectors.into_iter().fold(start(lanes), &step)),
        };
        let state = if layout.tail { self.stream(false, state, &step) } else { state };
        let beside = beside.into_iter().cloned().chain(self.beside());
        let state = beside.fold(state, |state, piece| step(state, &piece));
        match name.into() {
            Some(name) => team(k, layout, turn, name, initial, state, merge),
            None => state,
        }
    }

    /// The same of all threads and a row that is [streamed](Self::is_streamed), with one state for all lanes.
    pub fn fold_pieces<const N: usize>(
        &self,
        name: &str,
        initial: [f32; N],
        step: impl Fn([Val<'b>; N], &Piece<'b>) -> [Val<'b>; N],
        merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
    ) -> [Val<'b>; N] {
        let Row { k, layout, turn, .. } = *self.row;
        let state = self.stream(true, initial.map(|number| k.f32(number)), &step);
        let state = self.beside().into_iter().fold(state, |state, piece| step(state, &piece));
        team(k, layout, turn, name, initial, state, merge)
    }

    /// The first matrix's element in a column, of i32, of a row that a warp's threads hold; any number if the row has no such column.
    pub fn element_at(&self, column: Val<'b>) -> Val<'b> {
        let Row { k, layout, columns, shift, .. } = *self.row;
        let (team, lanes) = (i32::from(layout.team), i32::from(layout.lanes));
        // Among the accesses: which one, and of which thread.
        let place = shift.map_or(column, |shift| column - shift.head);
        let access = place.shr_u(lanes.ilog2());
        let vector = access.shr_u(team.ilog2());
        let vectors = &self.held[..usize::from(layout.vectors)];
        let all = vectors.iter().map(|piece| piece[0]).zip(0..);
        let chosen = all.reduce(|(a, _), (b, at)| (vector.eq(at).select(b, a), at));
        let mut chosen = match chosen {
            Some((all, _)) if lanes > 1 => (0..layout.lanes).map(|lane| all.lane(lane)).collect(),
            all => all.into_iter().map(|(one, _)| one).collect::<Vec<_>>(),
        };
        // Each bit of the place takes one of two lanes.
        for bit in 0..lanes.ilog2() {
            let odd = (place & (1 << bit)).ne(0);
            chosen = chosen.chunks(2).map(|pair| odd.select(pair[1], pair[0])).collect();
        }
        let (mut element, mut thread) = (chosen[0], access & (team - 1));
        if let (Some(shift), Some(beside)) = (shift, self.held.get(vectors.len())) {
            let behind = shift.behind(columns, lanes);
            let (is_before, is_behind) = (column.lt(shift.head), column.ge(behind));
            element = (is_before | is_behind).select(beside[0], element);
            thread = is_before.select(column, is_behind.select(column - behind + lanes, thread));
        }
        if team == 1 { element } else { element.shuffle((k.lane_id() & -team) + thread) }
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
                let state = self.stream(true, start, &step);
                if self.row.layout.tail {
                    self.stream(false, start, &step);
                }
                self.beside().into_iter().fold(state, |state, piece| step(state, &piece));
            }
            false => {
                self.held.iter().fold(start, &step);
            }
        }
    }

    /// What is beside the accesses of a row that is loaded for each use.
    fn beside(&self) -> Option<Piece<'b>> {
        let shift = self.row.shift.filter(|_| self.is_streamed())?;
        Some(self.row.beside(shift).loaded(&self.views, Cache::Normal))
    }

    /// Loads the row piece by piece: all whole pieces, or the elements behind them.
    fn stream<const N: usize>(
        &self,
        whole: bool,
        state: [Val<'b>; N],
        step: impl Fn([Val<'b>; N], &Piece<'b>) -> [Val<'b>; N],
    ) -> [Val<'b>; N] {
        let Row { k, layout, columns, first, shift, .. } = *self.row;
        let wide = i32::from(layout.lanes);
        let pieces = columns & !(wide - 1);
        let end = shift.map_or(columns, |shift| shift.accessed(columns, wide));
        let (range, lanes) = match (layout.tail, whole) {
            (true, true) => (k.range(first, pieces).step(wide), layout.lanes),
            (true, false) => (k.range(pieces, columns), 1),
            (false, _) => (k.range(first, end).step(layout.step() as i32).unroll(4), layout.lanes),
        };
        self.stream_over(range, lanes, state, step)
    }

    /// Loads the pieces of so many lanes that begin in these columns.
    fn stream_over<const N: usize>(
        &self,
        columns: Range<'b>,
        lanes: u8,
        state: [Val<'b>; N],
        step: impl Fn([Val<'b>; N], &Piece<'b>) -> [Val<'b>; N],
    ) -> [Val<'b>; N] {
        let Row { layout, shift, .. } = *self.row;
        let wide = i32::from(layout.lanes);
        columns.fold(state, |column, state| {
            let flat = shift.map(|shift| shift.access(column, wide));
            let column = shift.map_or(column, |shift| shift.head + column);
            let piece = Piece { column, flat, ..Piece::new(self.row, lanes) };
            step(state, &piece.loaded(&self.views, Cache::Normal))
        })
    }
}
