//! Rules on tile kernels: their heads, their ops, and the balance of their channels.

use super::check::Checker;
use super::error::Rule;
use crate::limits::{MAX_CHANNELS, MAX_FRAGMENTS, MAX_GROUPS, MAX_SHARED_BYTES, MAX_STAGES, MAX_TILE};
use crate::module::{Op, Place, Region};
use crate::op::{Group, Left, Opcode, PlaceRule, Right, Shape, Turn};
use crate::tile::{Fragment, Tile, multiplies};
use crate::types::{Class, Scalar, Type};
use crate::view::Access;
use std::collections::HashSet;

impl<'k> Checker<'k> {
    /// Checks what a tile kernel has in its head beside what others have.
    pub(super) fn tile(&mut self, tile: &'k Tile, places: &mut HashSet<&'k str>) {
        let kernel = self.kernel;
        if kernel.block != [1; 3] || !kernel.shared.is_empty() || !kernel.local.is_empty() {
            self.error(Rule::TileHead("a block of one thread and no shared or local arrays".to_owned()));
        }
        if !(1..=MAX_GROUPS).contains(&tile.groups) {
            self.error(Rule::TileHead(format!("1 to {MAX_GROUPS} groups")));
        }
        self.cap("channels", tile.channels.len(), MAX_CHANNELS);
        self.cap("fragments", tile.fragments.len(), MAX_FRAGMENTS);
        let sized = |extent: u32| (1..=MAX_TILE).contains(&extent);
        let mut bytes = 0u64;
        for channel in &tile.channels {
            self.line = channel.line;
            self.tile_name(&channel.name, places);
            if channel.element != Scalar::Tf32 {
                self.element(&channel.name, channel.element);
            }
            if !channel.dims.into_iter().all(sized) || !(1..=MAX_STAGES).contains(&channel.stages) {
                self.error(Rule::TileHead(format!(
                    "channels of 1 to {MAX_TILE} rows and columns, and of 1 to {MAX_STAGES} stages, unlike @{}",
                    channel.name
                )));
            }
            let shared = kernel.cluster > 1 && channel.dims[0].is_multiple_of(kernel.cluster);
            if channel.multicast && !shared {
                self.error(Rule::TileHead(format!(
                    "multicast channels in a cluster alone, of as many rows for each of its blocks, unlike @{}",
                    channel.name
                )));
            }
            bytes = bytes.saturating_add(channel.stage_bytes().saturating_mul(channel.stages.into()));
        }
        if bytes > MAX_SHARED_BYTES {
            self.error(Rule::SharedSize { bytes, limit: MAX_SHARED_BYTES });
        }
        for fragment in &tile.fragments {
            self.line = fragment.line;
            self.tile_name(&fragment.name, places);
            self.element(&fragment.name, fragment.element);
            let extents = [Some(fragment.rows), fragment.columns];
            let divided = fragment.is_row() || fragment.rows.is_multiple_of(tile.groups.max(1));
            if !extents.into_iter().flatten().all(sized) || !divided {
                self.error(Rule::TileHead(format!(
                    "fragments of 1 to {MAX_TILE} rows and columns, the rows a multiple of the groups, unlike @{}",
                    fragment.name
                )));
            }
        }
    }

    fn tile_name(&mut self, name: &'k str, places: &mut HashSet<&'k str>) {
        self.name(name);
        if !places.insert(name) {
            self.error(Rule::DuplicateName(format!("@{name}")));
        }
    }

    /// Checks that the op may stand in a kernel of this kind.
    pub(super) fn kind_of_kernel(&mut self, op: &Op) -> bool {
        let tile = op.code.shape().is_tile() || op.code == Opcode::ForCluster;
        if self.kernel.tile.is_none() {
            if tile {
                self.error(Rule::OutsideOfTile);
            }
            return !tile;
        }
        let fits = match op.code.info().group {
            Group::Values
            | Group::Arithmetic
            | Group::Bits
            | Group::Compare
            | Group::Convert
            | Group::Math => true,
            Group::Ids => {
                matches!(op.code, Opcode::BlockId | Opcode::GridDim | Opcode::ClusterRank | Opcode::ClusterId)
            }
            Group::Memory => match op.code {
                Opcode::Extent => true,
                // One number for the whole block.
                Opcode::Load => !self.in_map && op.result().is_none_or(|value| !self.ty(value).is_vector()),
                _ => false,
            },
            Group::Atomics | Group::Threads | Group::Trusted => false,
            Group::Tiles | Group::Control => !self.in_map,
        };
        if !fits {
            self.error(Rule::InTile(if self.in_map { "the region of a map" } else { "a tile kernel" }));
        }
        fits
    }

    /// Does the op name as many channels and fragments as it works on, each of the right kind, beside its first place?
    pub(super) fn other_places(&mut self, op: &Op) -> bool {
        let kernel = self.kernel;
        let channel = |place: &Place| kernel.channel(*place).is_some();
        let fragment = |place: &Place| kernel.fragment(*place).is_some();
        let (needs, fits) = match (op.code.shape(), &op.others[..]) {
            (Shape::Fetch | Shape::Send, others) => ("a channel", matches!(others, [c] if channel(c))),
            (Shape::Put | Shape::PutRows | Shape::Get, others) => {
                ("a fragment", matches!(others, [f] if fragment(f)))
            }
            (Shape::Rows, others) => ("a column and a matrix", matches!(others, [f] if fragment(f))),
            (Shape::Mma, others) => (
                "a fragment, a channel or a fragment, and a channel",
                matches!(others, [a, b] if (channel(a) || fragment(a)) && channel(b)),
            ),
            (Shape::Share, others) => ("two fragments", matches!(others, [f] if fragment(f))),
            (Shape::Map, others) => ("fragments", others.iter().all(fragment)),
            (_, others) => ("no other place", others.is_empty()),
        };
        if !fits {
            self.error(Rule::Place(needs));
        }
        fits
    }

    fn tile_shape(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.error(Rule::TileShape(what()));
        }
    }

    /// Checks what an op of tile kernels works on.
    pub(super) fn tile_types(&mut self, op: &Op) {
        let kernel = self.kernel;
        let Some(place) = op.place else { return };
        let other = |i: usize| op.others.get(i).copied();
        match op.code.shape() {
            Shape::Fetch => {
                let (Place::View(v), Some(channel)) = (place, other(0).and_then(|c| kernel.channel(c)))
                else {
                    return;
                };
                let Some(view) = kernel.view(v) else { return };
                let name = kernel.place_name(place).to_owned();
                if view.access != Access::Read {
                    self.error(Rule::Access {
                        name,
                        access: view.access.name(),
                        does: "fetches only from views for read, not from",
                    });
                    return;
                }
                let loaded = if channel.element == Scalar::Tf32 { Scalar::F32 } else { channel.element };
                self.tile_shape(view.rank() >= 2 && view.element == loaded, || {
                    format!("@{name} has no matrices of {}, as @{} has", channel.element, channel.name)
                });
            }
            Shape::Put | Shape::PutRows | Shape::Get => {
                let (Place::View(v), Some(fragment)) = (place, other(0).and_then(|f| kernel.fragment(f)))
                else {
                    return;
                };
                let Some(view) = kernel.view(v) else { return };
                let name = kernel.place_name(place).to_owned();
                let (allowed, does) = match op.code.shape() {
                    Shape::Put | Shape::PutRows => (view.access.writes(), "writes"),
                    _ => (view.access.reads(), "reads"),
                };
                if !allowed {
                    self.error(Rule::Access { name, access: view.access.name(), does });
                    return;
                }
                if let (Shape::PutRows, Some(count)) = (op.code.shape(), op.operands.last()) {
                    let found = self.ty(*count);
                    if found.is_vector() || !Class::WORD.contains(found.scalar()) {
                        let index = op.operands.len();
                        self.error(Rule::Operand { index, expected: Class::WORD.to_string(), found });
                    }
                }
                let rank = if fragment.is_line() { 1 } else { 2 };
                self.tile_shape(view.rank() >= rank && view.element == fragment.element, || {
                    let what = if rank == 1 { "rows" } else { "matrices" };
                    format!("@{name} has no {what} of {}, as @{} has", fragment.element, fragment.name)
                });
                let turned = op.attr() == Some(Turn::Transposed);
                self.tile_shape(!(turned && fragment.is_line()), || {
                    format!("@{} is a column or a row; a matrix is stored transposed", fragment.name)
                });
                let adds = matches!(fragment.element, Scalar::F32 | Scalar::I32);
                self.tile_shape(op.code != Opcode::PutAdd || adds, || {
                    format!("@{} is of {}; only f32 and i32 are added", fragment.name, fragment.element)
                });
            }
            Shape::Send => {
                let (Some(fragment), Some(channel)) =
                    (kernel.fragment(place), other(0).and_then(|c| kernel.channel(c)))
                else {
                    return;
                };
                let dims = [fragment.rows, fragment.columns.unwrap_or(0)];
                self.tile_shape(dims == channel.dims && fragment.element == channel.element, || {
                    format!(
                        "@{} and the stages of @{} are not of one shape and type",
                        fragment.name, channel.name
                    )
                });
            }
            Shape::Fill => {
                let Some(fragment) = kernel.fragment(place) else { return };
                let found = op.operands.first().map_or(Type::BOOL, |v| self.ty(*v));
                if found != fragment.element.into() {
                    let expected = fragment.element.to_string();
                    self.error(Rule::Operand { index: 1, expected, found });
                }
            }
            Shape::Rows => {
                let (Some(column), Some(matrix)) =
                    (kernel.fragment(place), other(0).and_then(|f| kernel.fragment(f)))
                else {
                    return;
                };
                let fits = column.columns.is_none()
                    && matrix.columns.is_some()
                    && column.rows == matrix.rows
                    && column.element == matrix.element
                    && Class::WIDE_FLOAT.contains(column.element);
                self.tile_shape(fits, || {
                    format!(
                        "@{} is no column of as many rows as the matrix @{}, both of f32",
                        column.name, matrix.name
                    )
                });
            }
            Shape::Share => {
                let (Some(part), Some(all)) =
                    (kernel.fragment(place), other(0).and_then(|f| kernel.fragment(f)))
                else {
                    return;
                };
                let shares = |blocks: u32| part.columns.and_then(|c| c.checked_mul(blocks)) == all.columns;
                let fits = !part.is_line()
                    && !all.is_line()
                    && op.others.first() != Some(&place)
                    && part.rows == all.rows
                    && (shares(1) || shares(kernel.cluster))
                    && part.element == all.element
                    && matches!(all.element, Scalar::F32 | Scalar::I32);
                self.tile_shape(fits, || {
                    format!(
                        "@{} and @{} are no matrices of f32 or of i32 of as many rows, the first of all columns of the second or of 1/{} of them",
                        part.name, all.name, kernel.cluster
                    )
                });
            }
            Shape::Mma => self.mma(op, place),
            Shape::Map => self.map(op, place),
            _ => {}
        }
    }

    fn mma(&mut self, op: &Op, place: Place) {
        let kernel = self.kernel;
        let (Some(sum), [a, b]) = (kernel.fragment(place), &op.others[..]) else { return };
        let dims = |place: &Place| match (kernel.channel(*place), kernel.fragment(*place)) {
            (Some(channel), _) => Some((channel.dims, channel.element)),
            (None, Some(fragment)) => Some(([fragment.rows, fragment.columns?], fragment.element)),
            (None, None) => None,
        };
        let (Some((mut left, of_a)), Some((mut right, of_b))) = (dims(a), dims(b)) else {
            let name = kernel.place_name(*a);
            return self.tile_shape(false, || format!("@{name} is a column, no matrix"));
        };
        if op.attr() == Some(Left::Transposed) {
            left.reverse();
            self.tile_shape(kernel.channel(*a).is_some(), || "a fragment can't be transposed".to_owned());
        }
        if op.attr() == Some(Right::Transposed) {
            right.reverse();
        }
        let columns = sum.columns.unwrap_or(0);
        let fits = left[0] == sum.rows && left[1] == right[0] && right[1] == columns;
        self.tile_shape(fits, || {
            let ([m, k], [l, n]) = (left, right);
            format!("[{m}, {k}] times [{l}, {n}] does not make @{}: [{}, {columns}]", sum.name, sum.rows)
        });
        self.tile_shape(multiplies(of_a, of_b, sum.element), || {
            format!(
                "{of_a} times {of_b} into {}; it multiplies f16, bf16, tf32, f32 and fp8 into f32, and i8 into i32",
                sum.element
            )
        });
        self.tile_shape(*a != place, || format!("@{} is a factor of its own sum", sum.name));
    }

    fn map(&mut self, op: &Op, place: Place) {
        let kernel = self.kernel;
        let all: Vec<&Fragment> =
            std::iter::once(&place).chain(&op.others).filter_map(|p| kernel.fragment(*p)).collect();
        let count = op.immediates.first().copied().unwrap_or(0);
        if count == 0 || count > all.len() as u64 {
            self.error(Rule::Number { what: "computed fragment", found: count, limit: all.len() as u64 });
            return;
        }
        let (computed, read) = all.split_at(count as usize);
        let shape = |f: &Fragment| (f.rows, f.columns);
        let first = computed[0];
        for (i, fragment) in computed.iter().enumerate() {
            let again = computed[..i].iter().any(|f| f.name == fragment.name);
            self.tile_shape(!again && shape(fragment) == shape(first), || {
                format!("@{} is computed twice, or not as large as the first, @{}", fragment.name, first.name)
            });
        }
        for fragment in read {
            let fits = shape(fragment) == shape(first)
                || fragment.columns.is_none() && fragment.rows == first.rows
                || fragment.is_row() && fragment.columns == first.columns;
            self.tile_shape(fits, || {
                format!(
                    "@{} is neither of the shape of @{}, nor a column of as many rows, nor a row of as many columns as it",
                    fragment.name, first.name
                )
            });
        }
        let elements =
            |fragments: &[&Fragment]| -> Vec<Type> { fragments.iter().map(|f| f.element.into()).collect() };
        let mut args = vec![Type::I32, Type::I32];
        args.extend(elements(read));
        self.in_map = true;
        self.whole_region(&op.regions[0], &args, &elements(computed));
        self.in_map = false;
    }

    /// Checks that channels are neither fetched to beyond their stages, nor used without one, however the control flow goes.
    pub(super) fn balance(&mut self) {
        let Some(tile) = self.kernel.tile() else { return };
        let mut held = vec![0; tile.channels.len()];
        self.balanced(&self.kernel.body, &mut held);
    }

    fn balanced(&mut self, region: &Region, held: &mut Vec<u32>) {
        let kernel = self.kernel;
        for op in &region.ops {
            (self.line, self.op) = (op.line, Some(op.code.mnemonic()));
            let channels = op.place.iter().chain(&op.others).filter_map(|place| match place {
                Place::Channel(i) => Some((usize::from(*i), kernel.channel(*place)?)),
                _ => None,
            });
            for (i, channel) in channels {
                let Some(held) = held.get_mut(i) else { continue };
                let name = || channel.name.to_string();
                match op.code {
                    Opcode::Fetch | Opcode::Send => {
                        let filled_by = *self.filled_by.entry(i).or_insert(op.code);
                        if filled_by != op.code || op.code == Opcode::Send && channel.multicast {
                            self.error(Rule::TileShape(format!(
                                "@{} is sent to; a channel that is fetched to, or multicast, is not",
                                channel.name
                            )));
                        }
                        if *held >= channel.stages {
                            self.error(Rule::ChannelFull { name: name(), stages: channel.stages });
                        } else {
                            *held += 1;
                        }
                    }
                    _ if *held == 0 => self.error(Rule::ChannelEmpty(name())),
                    Opcode::Release => *held -= 1,
                    _ => {}
                }
            }
            let begins = held.clone();
            let mut ends = None;
            for region in &op.regions {
                let mut inside = begins.clone();
                self.balanced(region, &mut inside);
                (self.line, self.op) = (op.line, Some(op.code.mnemonic()));
                // The regions of a loop end as they begin; those of a choice end alike.
                let expected = match op.code {
                    Opcode::For | Opcode::ForCluster | Opcode::While => &begins,
                    _ => ends.get_or_insert_with(|| inside.clone()),
                };
                if let Some(i) = (0..inside.len()).find(|i| inside[*i] != expected[*i]) {
                    let name = kernel.place_name(Place::Channel(i as u16)).to_owned();
                    self.error(Rule::ChannelUnbalanced { name, found: inside[i], expected: expected[i] });
                }
            }
            if let Some(ends) = ends {
                *held = ends;
            }
        }
    }

    /// Checks an op's first place by a rule of tile kernels.
    pub(super) fn tile_place(&self, op: &Op, rule: PlaceRule) -> bool {
        match (rule, op.place) {
            (PlaceRule::Box, Some(Place::View(i))) => self.kernel.view(i).is_some(),
            (PlaceRule::Channel, Some(place)) => self.kernel.channel(place).is_some(),
            (PlaceRule::Fragment, Some(place)) => self.kernel.fragment(place).is_some(),
            _ => false,
        }
    }
}
