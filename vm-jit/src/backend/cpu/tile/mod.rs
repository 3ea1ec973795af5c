//! Tile kernels: a block is the sequential program that it is written as.
//!
//! Scalars are values as elsewhere. Fragments, and the newest stage of each channel, are arrays in the scratch memory: of a
//! channel nothing but the newest stage is ever looked at, so one is enough however many it has, and `release` is nothing.
//!
//! * `copy`: boxes of views, clipped, to and from the arrays. `pack`: into the form in which a product takes them.
//! * `product`: products, in calls of a routine (`micro`) or written out. `fragment`: what is computed of fragments.
//!
//! A stage has its elements as f32, which holds all that may be multiplied, and lies as its products take it: row by row as
//! a left factor, in panels of [`panel`] columns as a right one. What lies so in a view is left there, as nobody writes it. Rows of
//! fragments are padded to whole vectors; what is in the padding nobody sees.

mod copy;
mod fragment;
mod pack;
mod product;

use super::isa::{Architecture, Isa};
use super::writer::Writer;
use crate::reject::RejectKind;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use vm_ir::module::{Op, Place};
use vm_ir::op::{Right, Shape};
use vm_ir::tile::{Channel, Fragment};
use vm_ir::{Kernel, Scalar};

/// Arrays begin at multiples of this.
const ALIGN: u64 = 64;

/// Rows of fragments are padded to multiples of these many elements: the widest that is computed together, and the least of a panel.
const GRAIN: u32 = 16;

/// Columns of a panel: two of the machine's longest vectors, or four.
pub(super) fn panel(isa: Isa) -> u32 {
    match isa {
        Isa::X86V4 => 32,
        Isa::X86V3 | Isa::Aarch64 | Isa::Aarch64Lse => 16,
    }
}

/// How a stage lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Row by row.
    Rows,
    /// Panels of neighbouring columns, each row by row.
    Panels,
    /// Panels of neighbouring rows, each column by column: as of the transposed matrix.
    Turned,
}

/// A fragment's array: `rows` rows of `columns` elements, which begin `pitch` elements apart. A column is a row here.
#[derive(Clone, Copy, Debug)]
struct Array {
    at: u32,
    element: Scalar,
    rows: u32,
    columns: u32,
    pitch: u32,
    is_column: bool,
}

impl Array {
    fn of(fragment: &Fragment, at: u32) -> Array {
        let (rows, columns) = match fragment.columns {
            Some(columns) => (fragment.rows, columns),
            None => (1, fragment.rows),
        };
        let pitch = columns.next_multiple_of(GRAIN);
        let is_column = fragment.columns.is_none();
        Array { at, element: fragment.element, rows, columns, pitch, is_column }
    }

    /// Bytes from one row to the next.
    fn stride(&self) -> u32 {
        self.pitch * self.element.bytes()
    }

    fn bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.stride())
    }
}

/// A channel's newest stage.
#[derive(Clone, Copy, Debug)]
struct Stage {
    at: u32,
    element: Scalar,
    dims: [u32; 2],
    form: Form,
    /// Where it is told where its elements are, if they may be those of a view: their address, and the bytes from row to row and from
    /// panel to panel.
    told: Option<u32>,
}

/// Where everything lies, from the begin of the tiles on.
#[derive(Clone, Debug, Default)]
pub(super) struct Tiles {
    panel: u32,
    fragments: Vec<Array>,
    stages: Vec<Stage>,
    /// Bytes of the fragments that are zeroes at first, which lie in front.
    zeroed: u64,
    /// What is fetched and reaches out of its view, row by row.
    clipped: u32,
    /// A left factor, and a right one, that lie in another form than their product takes.
    left: u32,
    right: u32,
    /// A product of integers, as f32.
    sums: u32,
    /// Bytes of all that.
    pub(super) bytes: u64,
}

/// Rows and columns of a stage's form in f32: as many bytes as it takes.
fn form_bytes([rows, columns]: [u32; 2], form: Form, panel: u32) -> u64 {
    let elements = |rows: u32, columns: u32| 4 * u64::from(rows) * u64::from(columns);
    match form {
        Form::Rows => elements(rows, columns),
        Form::Panels => elements(rows, columns.next_multiple_of(panel)),
        Form::Turned => elements(columns, rows.next_multiple_of(panel)),
    }
}

/// The form in which a product takes its right factor.
fn right_form(op: &Op) -> Form {
    if op.attr() == Some(Right::Transposed) { Form::Turned } else { Form::Panels }
}

impl Tiles {
    /// Of a tile kernel; of another there is nothing.
    pub(super) fn of(kernel: &Kernel, isa: Isa) -> Tiles {
        let Some(tile) = kernel.tile() else { return Tiles::default() };
        let panel = panel(isa);
        let mut end = 0u64;
        let mut take = |bytes: u64| {
            let at = end;
            end = at.saturating_add(bytes).next_multiple_of(ALIGN);
            u32::try_from(at).unwrap_or(u32::MAX)
        };
        let mut fragments: Vec<Array> =
            tile.fragments.iter().map(|fragment| Array::of(fragment, 0)).collect();
        let filled = filled(kernel);
        let mut place = |wanted: bool| {
            let arrays = fragments.iter_mut().zip(&filled).filter(|(_, filled)| **filled == wanted);
            arrays.for_each(|(array, _)| array.at = take(array.bytes()));
            u64::from(take(0))
        };
        let zeroed = place(false);
        place(true);
        let forms = forms(kernel);
        let stage = |(channel, form): (&Channel, Option<Form>)| {
            let may_stay = isa.architecture() == Architecture::X86_64
                && channel.element == Scalar::F32
                && (form == Some(Form::Rows)
                    || form == Some(Form::Panels) && channel.dims[1].is_multiple_of(GRAIN));
            let form = form.unwrap_or(Form::Rows);
            let at = take(form_bytes(channel.dims, form, panel));
            let told = may_stay.then(|| take(24));
            Stage { at, element: channel.element, dims: channel.dims, form, told }
        };
        let stages: Vec<Stage> = tile.channels.iter().zip(forms).map(stage).collect();
        let most = tile.channels.iter().map(|c| u64::from(c.dims[0]) * u64::from(c.dims[1])).max();
        let clipped = take(8 * most.unwrap_or(0));
        let (mut left, mut right, mut sums) = (0, 0, 0);
        kernel.for_each_op(&mut |op| {
            let (Shape::Mma, Some(sum), &[a, b]) = (op.code.shape(), op.place, &op.others[..]) else {
                return;
            };
            if let Some(fragment) = kernel.fragment(a).filter(|f| f.element != Scalar::F32) {
                left = left.max(4 * fragment.len());
            }
            if let Place::Channel(b) = b
                && let Some(stage) = stages.get(usize::from(b)).filter(|stage| stage.form != right_form(op))
            {
                right = right.max(form_bytes(stage.dims, right_form(op), panel));
            }
            if let Some(sum) = kernel.fragment(sum).filter(|sum| sum.element != Scalar::F32) {
                sums = sums.max(Array::of(sum, 0).bytes());
            }
        });
        let [left, right, sums] = [left, right, sums].map(&mut take);
        Tiles { panel, fragments, stages, zeroed, clipped, left, right, sums, bytes: u64::from(take(0)) }
    }
}

/// By fragment, whether all of it is written before anything else is done with it.
fn filled(kernel: &Kernel) -> Vec<bool> {
    fn first_of(op: &Op, fills: bool, first: &mut [Option<bool>]) {
        for place in op.place.iter().chain(&op.others) {
            if let Place::Fragment(i) = place
                && let Some(first) = first.get_mut(usize::from(*i))
            {
                first.get_or_insert(fills);
            }
        }
        op.regions.iter().flat_map(|region| &region.ops).for_each(|op| first_of(op, false, first));
    }
    let mut first = vec![None; kernel.tile().map_or(0, |tile| tile.fragments.len())];
    for op in &kernel.body().ops {
        first_of(op, op.code.shape() == Shape::Fill, &mut first);
    }
    first.into_iter().map(|fills| fills == Some(true)).collect()
}

/// By channel, the form in which all ops take it; where they differ, row by row.
fn forms(kernel: &Kernel) -> Vec<Option<Form>> {
    let mut forms = vec![None; kernel.tile().map_or(0, |tile| tile.channels.len())];
    kernel.for_each_op(&mut |op| {
        if op.code.shape() != Shape::Mma {
            return;
        }
        for (place, form) in op.others.iter().zip([Form::Rows, right_form(op)]) {
            if let Place::Channel(i) = place
                && let Some(known) = forms.get_mut(usize::from(*i))
            {
                *known = Some(if known.is_some_and(|known| known != form) { Form::Rows } else { form });
            }
        }
    });
    forms
}

impl<'k> Writer<'_, 'k> {
    fn array(&self, place: Place) -> Option<Array> {
        match place {
            Place::Fragment(i) => self.tiles.fragments.get(usize::from(i)).copied(),
            _ => None,
        }
    }

    fn stage(&self, place: Place) -> Option<Stage> {
        match place {
            Place::Channel(i) => self.tiles.stages.get(usize::from(i)).copied(),
            _ => None,
        }
    }

    /// The address of what lies there among the tiles.
    fn tile_address(&mut self, at: u32) -> Ssa {
        self.b.ins().iadd_imm_s(self.scratch, i64::from(self.tiles_at) + i64::from(at))
    }

    fn long(&mut self, value: impl Into<i64>) -> Ssa {
        self.b.ins().iconst(types::I64, value.into())
    }

    /// A loop from `first` on, as long as it is below `end`.
    fn until(&mut self, first: Ssa, end: Ssa, step: i64, body: impl FnOnce(&mut Self, Ssa)) {
        let [head, inside, done] = [0; 3].map(|_| self.b.create_block());
        let at = self.b.append_block_param(head, types::I64);
        self.b.ins().jump(head, &[first.into()]);
        self.b.switch_to_block(head);
        let more = self.b.ins().icmp(IntCC::SignedLessThan, at, end);
        self.enter(more, (inside, &[]), (done, &[]));
        self.b.seal_block(inside);
        self.b.switch_to_block(inside);
        body(self, at);
        let next = self.b.ins().iadd_imm_s(at, step);
        self.b.ins().jump(head, &[next.into()]);
        self.b.seal_block(head);
        self.b.seal_block(done);
        self.b.switch_to_block(done);
    }

    /// A loop over these many, none of which may be 0; of one there is no loop.
    fn each_of_few(&mut self, count: u32, body: impl FnOnce(&mut Self, Ssa)) {
        match count {
            1 => {
                let zero = self.long(0);
                body(self, zero);
            }
            _ => {
                let end = self.long(count);
                self.counted(end, 1, body);
            }
        }
    }

    /// Zeroes the fragments of a block that begins.
    pub(super) fn zero_tiles(&mut self) {
        if self.tiles.zeroed > 0 {
            let at = self.tile_address(0);
            self.zero(at, self.tiles.zeroed);
        }
    }

    /// An op of a tile kernel.
    pub(super) fn tile_op(&mut self, op: &'k Op) {
        let Some(place) = op.place else { return };
        match op.code.shape() {
            Shape::Fetch => self.fetch(op, place),
            Shape::Put | Shape::PutRows => self.put(op, place),
            Shape::Get => self.get_box(op, place),
            Shape::Send => self.send(op, place),
            Shape::Mma => self.mma(op, place),
            Shape::Map => self.map(op, place),
            Shape::Rows => self.row_op(op, place),
            Shape::Share => self.share(op, place),
            Shape::Fill => self.fill(op, place),
            // The newest stage stays where it is.
            Shape::Release => {}
            _ => self.refuse(RejectKind::Tile { what: format!("processors have no {}", op.code.mnemonic()) }),
        }
    }
}
