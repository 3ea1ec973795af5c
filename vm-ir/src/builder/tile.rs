//! Tile kernels as their authors write them ([`crate::tile`]).

use super::memory::PlaceRef;
use super::{BuildErrorKind, Builder, IntoVal, Val};
use crate::limits::{MAX_CHANNELS, MAX_FRAGMENTS};
use crate::module::{Op, Place};
use crate::op::{Left, Opcode, Right, Turn};
use crate::tile::{Channel, Fragment, Tile};
use crate::types::{Scalar, Type};

/// A channel of a tile kernel that is being written.
#[derive(Clone, Copy, Debug)]
pub struct ChannelRef<'b> {
    builder: Builder<'b>,
    place: Place,
}

/// A fragment of a tile kernel that is being written.
#[derive(Clone, Copy, Debug)]
pub struct FragmentRef<'b> {
    builder: Builder<'b>,
    place: Place,
    element: Scalar,
}

/// A factor of a product: the newest stage of a channel, or a fragment.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    place: Place,
    transposed: bool,
}

impl Factor {
    /// The same factor transposed.
    #[must_use]
    pub fn transposed(self) -> Factor {
        Factor { transposed: !self.transposed, ..self }
    }
}

impl From<ChannelRef<'_>> for Factor {
    fn from(channel: ChannelRef<'_>) -> Factor {
        Factor { place: channel.place, transposed: false }
    }
}

impl From<FragmentRef<'_>> for Factor {
    fn from(fragment: FragmentRef<'_>) -> Factor {
        Factor { place: fragment.place, transposed: false }
    }
}

impl<'b> Builder<'b> {
    /// Makes it a tile kernel, whose fragments have their rows divided among `groups` of warps.
    pub fn tile_groups(self, groups: u32) -> Self {
        let mut state = self.block.state.borrow_mut();
        match &mut state.tile {
            Some(tile) => tile.groups = groups,
            None => state.tile = Some(Tile { groups, channels: Vec::new(), fragments: Vec::new() }),
        }
        drop(state);
        self
    }

    /// What a tile kernel has; of one group until [`tile_groups`](Self::tile_groups) says otherwise.
    fn with_tile<T>(self, change: impl FnOnce(&mut Tile) -> T) -> T {
        let mut state = self.block.state.borrow_mut();
        let empty = || Tile { groups: 1, channels: Vec::new(), fragments: Vec::new() };
        change(state.tile.get_or_insert_with(empty))
    }

    /// Adds a channel of `stages` tiles of this many rows and columns.
    #[track_caller]
    pub fn channel(self, name: &str, element: Scalar, dims: [u32; 2], stages: u32) -> ChannelRef<'b> {
        self.channel_of(name, element, dims, stages, false)
    }

    /// Adds a channel to which all blocks of a cluster fetch the same tiles.
    #[track_caller]
    pub fn multicast(self, name: &str, element: Scalar, dims: [u32; 2], stages: u32) -> ChannelRef<'b> {
        self.channel_of(name, element, dims, stages, true)
    }

    #[track_caller]
    fn channel_of(
        self,
        name: &str,
        element: Scalar,
        dims: [u32; 2],
        stages: u32,
        multicast: bool,
    ) -> ChannelRef<'b> {
        self.new_place_name(name);
        let channel = Channel { name: name.into(), element, dims, stages, multicast, line: self.line() };
        let number = self.with_tile(|tile| {
            tile.channels.push(channel);
            tile.channels.len() - 1
        });
        if number >= MAX_CHANNELS {
            self.fail(BuildErrorKind::TooLarge(format!("more than {MAX_CHANNELS} channels")));
        }
        ChannelRef { builder: self, place: Place::Channel(number as u16) }
    }

    /// Adds a fragment of this many rows and columns.
    #[track_caller]
    pub fn fragment(self, name: &str, element: Scalar, dims: [u32; 2]) -> FragmentRef<'b> {
        self.fragment_of(name, element, dims[0], Some(dims[1]))
    }

    /// Adds a fragment of one element for each of this many rows.
    #[track_caller]
    pub fn column(self, name: &str, element: Scalar, rows: u32) -> FragmentRef<'b> {
        self.fragment_of(name, element, rows, None)
    }

    /// Adds a fragment of one row, which every group has whole.
    #[track_caller]
    pub fn row(self, name: &str, element: Scalar, columns: u32) -> FragmentRef<'b> {
        self.fragment_of(name, element, 1, Some(columns))
    }

    #[track_caller]
    fn fragment_of(self, name: &str, element: Scalar, rows: u32, columns: Option<u32>) -> FragmentRef<'b> {
        self.new_place_name(name);
        let fragment = Fragment { name: name.into(), element, rows, columns, line: self.line() };
        let number = self.with_tile(|tile| {
            tile.fragments.push(fragment);
            tile.fragments.len() - 1
        });
        if number >= MAX_FRAGMENTS {
            self.fail(BuildErrorKind::TooLarge(format!("more than {MAX_FRAGMENTS} fragments")));
        }
        FragmentRef { builder: self, place: Place::Fragment(number as u16), element }
    }

    /// Computes each element of fragments: `body` is given its row and its column, and the elements of the sources there.
    #[track_caller]
    pub fn map<const N: usize, const M: usize>(
        self,
        computed: [FragmentRef<'b>; N],
        sources: [FragmentRef<'b>; M],
        body: impl FnOnce(Val<'b>, Val<'b>, [Val<'b>; M]) -> [Val<'b>; N],
    ) {
        let types = [Type::I32, Type::I32].into_iter().chain(sources.iter().map(|f| f.element.into()));
        let args: Vec<_> = types.map(|ty| self.define(ty)).collect();
        let vals: Vec<Val<'b>> = args.iter().map(|value| Val::new(self, *value)).collect();
        let given = std::array::from_fn(|i| vals[2 + i]);
        let (mut region, results) = self.in_region(args, || body(vals[0], vals[1], given));
        region.yields = results.iter().map(|val| self.own(*val)).collect();
        let mut places = computed.iter().chain(&sources).map(|fragment| fragment.place);
        let mut op = Op::new(Opcode::Map);
        op.place = places.next();
        op.others = places.collect();
        op.immediates = vec![N as u64];
        op.regions = vec![region];
        self.push(op, &[]);
    }

    #[track_caller]
    fn push_tile(self, code: Opcode, place: Place, others: Vec<Place>, operands: &[Val<'b>]) {
        let mut op = Op::new(code);
        op.place = Some(place);
        op.others = others;
        op.operands = operands.iter().map(|val| self.own(*val)).collect();
        self.push(op, &[]);
    }
}

impl<'b> ChannelRef<'b> {
    /// Brings the box of a view that begins at these indices, the last of which are its row and its column, into the next stage.
    #[track_caller]
    pub fn fetch<const N: usize>(self, view: PlaceRef<'b>, at: [Val<'b>; N]) {
        self.builder.push_tile(Opcode::Fetch, view.place(), vec![self.place], &at);
    }

    /// Gives the oldest stage back.
    #[track_caller]
    pub fn release(self) {
        self.builder.push_tile(Opcode::Release, self.place, Vec::new(), &[]);
    }

    /// The newest stage, transposed, as a factor.
    pub fn transposed(self) -> Factor {
        Factor::from(self).transposed()
    }
}

impl<'b> FragmentRef<'b> {
    /// Which fragment of the kernel it is.
    pub fn place(self) -> Place {
        self.place
    }

    /// Sets every element.
    #[track_caller]
    pub fn fill(self, value: impl IntoVal<'b>) {
        let value = value.into_val(self.builder, self.element.into());
        self.builder.push_tile(Opcode::Fill, self.place, Vec::new(), &[value]);
    }

    /// Adds a product.
    #[track_caller]
    pub fn mma(self, a: impl Into<Factor>, b: impl Into<Factor>) {
        self.multiply(Opcode::Mma, a.into(), b.into());
    }

    /// Becomes a product.
    #[track_caller]
    pub fn product(self, a: impl Into<Factor>, b: impl Into<Factor>) {
        self.multiply(Opcode::Product, a.into(), b.into());
    }

    #[track_caller]
    fn multiply(self, code: Opcode, a: Factor, b: Factor) {
        let left = if a.transposed { Left::Transposed } else { Left::Plain };
        let right = if b.transposed { Right::Transposed } else { Right::Plain };
        let mut op = Op::new(code).with(left).with(right);
        op.place = Some(self.place);
        op.others = vec![a.place, b.place];
        self.builder.push(op, &[]);
    }

    /// Adds the rows of a matrix to this column.
    #[track_caller]
    pub fn row_add(self, matrix: FragmentRef<'b>) {
        self.builder.push_tile(Opcode::RowAdd, self.place, vec![matrix.place], &[]);
    }

    /// Keeps the greatest of each row of a matrix and this column.
    #[track_caller]
    pub fn row_max(self, matrix: FragmentRef<'b>) {
        self.builder.push_tile(Opcode::RowMax, self.place, vec![matrix.place], &[]);
    }

    /// Keeps the least of each row of a matrix and this column.
    #[track_caller]
    pub fn row_min(self, matrix: FragmentRef<'b>) {
        self.builder.push_tile(Opcode::RowMin, self.place, vec![matrix.place], &[]);
    }

    /// Becomes the block's share of the columns of a sum: those of its rank in the cluster, or all of one as large as this.
    #[track_caller]
    pub fn share(self, sum: FragmentRef<'b>) {
        self.builder.push_tile(Opcode::Share, self.place, vec![sum.place], &[]);
    }

    /// Stores it into the box of a view that begins at these indices, the last of which are its row and its column.
    #[track_caller]
    pub fn put<const N: usize>(self, view: PlaceRef<'b>, at: [Val<'b>; N]) {
        self.builder.push_tile(Opcode::Put, view.place(), vec![self.place], &at);
    }

    /// Stores it transposed.
    #[track_caller]
    pub fn put_transposed<const N: usize>(self, view: PlaceRef<'b>, at: [Val<'b>; N]) {
        let mut op = Op::new(Opcode::Put).with(Turn::Transposed);
        op.place = Some(view.place());
        op.others = vec![self.place];
        op.operands = at.iter().map(|val| self.builder.own(*val)).collect();
        self.builder.push(op, &[]);
    }

    /// Stores its first `count` rows alone.
    #[track_caller]
    pub fn put_rows<const N: usize>(self, view: PlaceRef<'b>, at: [Val<'b>; N], count: Val<'b>) {
        let operands: Vec<Val<'b>> = at.into_iter().chain([count]).collect();
        self.builder.push_tile(Opcode::PutRows, view.place(), vec![self.place], &operands);
    }

    /// Adds it to the box of a view that begins at these indices, atomically for each element.
    #[track_caller]
    pub fn put_add<const N: usize>(self, view: PlaceRef<'b>, at: [Val<'b>; N]) {
        self.builder.push_tile(Opcode::PutAdd, view.place(), vec![self.place], &at);
    }

    /// Loads the box of a view that begins at these indices, the last of which are its row and its column.
    #[track_caller]
    pub fn get<const N: usize>(self, view: PlaceRef<'b>, at: [Val<'b>; N]) {
        self.builder.push_tile(Opcode::Get, view.place(), vec![self.place], &at);
    }

    /// Copies it into the next stage of a channel.
    #[track_caller]
    pub fn send(self, channel: ChannelRef<'b>) {
        self.builder.push_tile(Opcode::Send, self.place, vec![channel.place], &[]);
    }
}
