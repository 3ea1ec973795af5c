//! Shapes: what an op takes and gives, said once for all ops that agree on it.

use crate::types::Class;

/// The operands and results of an op. `T` is the op's type: that of its result where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// An immediate becomes a value; a vector has it in every lane.
    Const,
    /// `T → T`, lane by lane.
    Unary(Class),
    /// `T, T → T`, lane by lane.
    Binary(Class),
    /// `T, T, T → T`, lane by lane.
    Ternary(Class),
    /// `T, T → bool`, lane by lane.
    Compare(Class),
    /// `bool, T, T → T`; the condition is one bool, or one for each lane.
    Select,
    /// `S → T`, lane by lane, with a condition on the two widths.
    Convert(Class, Class, Width),
    /// `S → T` of as many bits in all.
    Bitcast,
    /// Scalar → vector with that scalar in every lane.
    Splat,
    /// As many scalars as `T` has lanes → `T`.
    Make,
    /// Vector, lane number → scalar.
    Extract,
    /// Vector, scalar, lane number → vector.
    Insert,
    /// Nothing → `i32`.
    Id32,
    /// Nothing → `i64`.
    Id64,
    /// View, dimension number → `i64`.
    Extent,
    /// Place and indices → `T`, a scalar or a vector of the place's element.
    Load,
    /// Place, indices and a value.
    Store,
    /// Shared place and indices → scalar, the same in every thread of the block.
    LoadUniform,
    /// Place and indices → scalar.
    AtomicLoad,
    /// Place, indices and a scalar.
    AtomicStore,
    /// Place, indices and a scalar → the scalar that was there.
    AtomicRmw(Class),
    /// Place, indices, expected, new → the scalar that was there.
    AtomicCas,
    /// `T, i32 → T`, between the threads of a warp.
    Shuffle,
    /// `bool → bool` over a warp.
    Vote,
    /// `bool → i32` over a warp, a bit for each thread.
    Ballot,
    /// Scalar → scalar over a warp.
    Reduce(Class),
    /// Shared place and a scalar or a vector of its element, alike in the warp, from every warp of a cluster.
    Gather,
    /// Nothing, nothing.
    Sync,
    /// View and indices, to a channel.
    Fetch,
    /// A channel.
    Release,
    /// A fragment and a scalar of its element.
    Fill,
    /// A fragment, of which it is the sum with the product of a channel or a fragment and a channel.
    Mma,
    /// Fragments, and a region for each element.
    Map,
    /// A fragment of a column, and a matrix.
    Rows,
    /// A fragment, and one of which it takes columns.
    Share,
    /// View and indices, from a fragment.
    Put,
    /// View and indices, from a fragment, and how many of its rows.
    PutRows,
    /// View and indices, to a fragment.
    Get,
    /// A fragment, to a channel.
    Send,
    /// A bool and two regions → what the chosen one yields.
    If,
    /// Lower bound, upper bound, step, carried values and a region → the carried values at the end.
    For,
    /// Carried values, a region for the condition and one for the body → the carried values at the end.
    While,
    /// An integer and a region for each case and for the default → what the chosen one yields.
    Switch,
}

/// How the widths of a conversion's types must relate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Any.
    Any,
    /// The result is wider.
    Wider,
    /// The result is narrower.
    Narrower,
}

/// What an op may name besides values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaceRule {
    /// Nothing.
    None,
    /// A view, without indices.
    WholeView,
    /// A shared array, without indices.
    WholeShared,
    /// A view, a shared array or, but for atomics, a local array, with indices.
    Any,
    /// A shared array, with indices.
    Shared,
    /// A view, with indices of where a box of it begins.
    Box,
    /// A channel.
    Channel,
    /// A fragment.
    Fragment,
}

impl Shape {
    /// Does the op name a place, and which kind?
    pub const fn place(self) -> PlaceRule {
        match self {
            Shape::Extent => PlaceRule::WholeView,
            Shape::LoadUniform => PlaceRule::Shared,
            Shape::Gather => PlaceRule::WholeShared,
            Shape::Fetch | Shape::Put | Shape::PutRows | Shape::Get => PlaceRule::Box,
            Shape::Release => PlaceRule::Channel,
            Shape::Fill | Shape::Mma | Shape::Map | Shape::Rows | Shape::Share | Shape::Send => {
                PlaceRule::Fragment
            }
            Shape::Load
            | Shape::Store
            | Shape::AtomicLoad
            | Shape::AtomicStore
            | Shape::AtomicRmw(_)
            | Shape::AtomicCas => PlaceRule::Any,
            Shape::Const
            | Shape::Unary(_)
            | Shape::Binary(_)
            | Shape::Ternary(_)
            | Shape::Compare(_)
            | Shape::Select
            | Shape::Convert(..)
            | Shape::Bitcast
            | Shape::Splat
            | Shape::Make
            | Shape::Extract
            | Shape::Insert
            | Shape::Id32
            | Shape::Id64
            | Shape::Shuffle
            | Shape::Vote
            | Shape::Ballot
            | Shape::Reduce(_)
            | Shape::Sync
            | Shape::If
            | Shape::For
            | Shape::While
            | Shape::Switch => PlaceRule::None,
        }
    }

    /// Number of value operands after the place's indices; `None` where it depends on the op.
    pub const fn operands(self) -> Option<usize> {
        Some(match self {
            Shape::Const | Shape::Id32 | Shape::Id64 | Shape::Extent | Shape::Sync => 0,
            Shape::Load | Shape::LoadUniform | Shape::AtomicLoad => 0,
            Shape::Fetch | Shape::Release | Shape::Mma | Shape::Map | Shape::Rows | Shape::Share => 0,
            Shape::Put | Shape::Get | Shape::Send => 0,
            Shape::Fill | Shape::PutRows => 1,
            Shape::Unary(_) | Shape::Convert(..) | Shape::Bitcast | Shape::Splat | Shape::Extract => 1,
            Shape::Vote | Shape::Ballot | Shape::Reduce(_) | Shape::If | Shape::Switch => 1,
            Shape::Store | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::Gather => 1,
            Shape::Binary(_) | Shape::Compare(_) | Shape::Insert | Shape::Shuffle | Shape::AtomicCas => 2,
            Shape::Ternary(_) | Shape::Select => 3,
            Shape::Make | Shape::For | Shape::While => return None,
        })
    }

    /// Has it exactly one result? Ops with regions have as many as they yield or carry.
    pub const fn has_result(self) -> bool {
        !matches!(self, Shape::Store | Shape::AtomicStore | Shape::Gather | Shape::Sync)
            && !self.is_tile()
            && !self.has_regions()
    }

    /// May text leave out what the op gives, as of an atomic whose old value nobody wants?
    pub const fn may_drop(self) -> bool {
        matches!(self, Shape::AtomicRmw(_) | Shape::AtomicCas)
    }

    /// Number of immediates; `None` for a `switch`, which has one for each case.
    pub const fn immediates(self) -> Option<usize> {
        match self {
            Shape::Const | Shape::Extract | Shape::Insert | Shape::Extent | Shape::For | Shape::Map => {
                Some(1)
            }
            Shape::Switch => None,
            _ => Some(0),
        }
    }

    /// Number of regions; `None` for a `switch`, which has one more than cases.
    pub const fn regions(self) -> Option<usize> {
        match self {
            Shape::If | Shape::While => Some(2),
            Shape::For | Shape::Map => Some(1),
            Shape::Switch => None,
            _ => Some(0),
        }
    }

    /// Is it an op of tile kernels alone?
    pub const fn is_tile(self) -> bool {
        matches!(self.place(), PlaceRule::Box | PlaceRule::Channel | PlaceRule::Fragment)
    }

    /// Is it atomic?
    pub const fn is_atomic(self) -> bool {
        matches!(self, Shape::AtomicLoad | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas)
    }

    /// Has it regions?
    pub const fn has_regions(self) -> bool {
        !matches!(self.regions(), Some(0))
    }

    /// The operands and results in the words of the op table.
    pub fn describe(self) -> String {
        match self {
            Shape::Const => "immediate → T".into(),
            Shape::Unary(c) => format!("T → T; T: {c}"),
            Shape::Binary(c) => format!("T, T → T; T: {c}"),
            Shape::Ternary(c) => format!("T, T, T → T; T: {c}"),
            Shape::Compare(c) => format!("T, T → bool; T: {c}"),
            Shape::Select => "bool, T, T → T".into(),
            Shape::Convert(from, to, width) => {
                let width = match width {
                    Width::Any => "",
                    Width::Wider => ", wider",
                    Width::Narrower => ", narrower",
                };
                format!("S → T; S: {from}; T: {to}{width}")
            }
            Shape::Bitcast => "S → T of as many bits".into(),
            Shape::Splat => "scalar → vector".into(),
            Shape::Make => "scalars → vector".into(),
            Shape::Extract => "vector, lane → scalar".into(),
            Shape::Insert => "vector, scalar, lane → vector".into(),
            Shape::Id32 => "→ i32".into(),
            Shape::Id64 => "→ i64".into(),
            Shape::Extent => "view, dimension → i64".into(),
            Shape::Load => "place[indices] → T".into(),
            Shape::Store => "place[indices], T".into(),
            Shape::LoadUniform => "shared[indices] → T".into(),
            Shape::AtomicLoad => "place[indices] → T".into(),
            Shape::AtomicStore => "place[indices], T".into(),
            Shape::AtomicRmw(c) => format!("place[indices], T → T; T: {c}"),
            Shape::AtomicCas => "place[indices], T, T → T; T: i32 or i64".into(),
            Shape::Shuffle => "T, i32 → T".into(),
            Shape::Vote => "bool → bool".into(),
            Shape::Ballot => "bool → i32".into(),
            Shape::Reduce(c) => format!("T → T; T: {c}"),
            Shape::Gather => "shared, T".into(),
            Shape::Fetch => "view[indices], channel".into(),
            Shape::Release => "channel".into(),
            Shape::Fill => "fragment, T".into(),
            Shape::Mma => "fragment, channel or fragment, channel".into(),
            Shape::Map => "number, fragments, region".into(),
            Shape::Rows => "column, matrix".into(),
            Shape::Share => "fragment, fragment".into(),
            Shape::Put | Shape::Get => "view[indices], fragment".into(),
            Shape::PutRows => "view[indices], fragment, integer".into(),
            Shape::Send => "fragment, channel".into(),
            Shape::Sync => "nothing".into(),
            Shape::If => "bool, 2 regions → yields".into(),
            Shape::For => "bounds, step, carried, region → carried".into(),
            Shape::While => "carried, 2 regions → carried".into(),
            Shape::Switch => "integer, regions → yields".into(),
        }
    }
}
