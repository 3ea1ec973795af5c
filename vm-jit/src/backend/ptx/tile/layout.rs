//! Where a tile kernel has what in shared memory, and what it asks of the launch.

use crate::reject::RejectKind;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Left, Opcode};
use vm_ir::tile::{Channel, Tile};
use vm_ir::{Kernel, Scalar};

/// Bytes of a row of a box: what the 128-byte swizzle spreads over all banks.
pub(super) const ROW: u32 = 128;
/// What the swizzle's pattern is aligned to.
pub(super) const ALIGN: u32 = 1024;
/// Threads of a group of warps, which multiply together.
pub(super) const GROUP: u32 = 128;
/// Rows of one instruction's product.
pub(super) const SLAB: u32 = 64;
/// The most rows of a box.
const MAX_BOX: u32 = 256;
/// Places in which the roles tell each other whether the launch is cancelled.
pub(super) const SIGNALS: u32 = 2;

/// A box that is copied between a view and shared memory by a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BoxOf {
    /// The view.
    pub(super) parameter: u16,
    /// Rows and columns, in elements.
    pub(super) dims: [u32; 2],
}

/// Offsets in bytes from the first byte of shared memory.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// By channel: its first stage.
    pub(super) channels: Vec<u32>,
    /// Of what is stored, on its way.
    pub(super) staging: u32,
    /// By channel: the barriers of full stages; those of empty ones are behind.
    pub(super) barriers: Vec<u32>,
    /// The barriers of what the roles tell each other, full and empty, and the words.
    pub(super) signals: u32,
    /// All of it, and what aligning it may take.
    pub(super) bytes: u32,
    /// The tensor maps.
    pub(super) boxes: Vec<BoxOf>,
}

/// Columns of a box of this element.
pub(super) const fn columns(element: Scalar) -> u32 {
    ROW / element.bytes()
}

/// The box of a channel's stages.
pub(super) fn fetched(parameter: u16, channel: &Channel) -> BoxOf {
    BoxOf { parameter, dims: [channel.dims[0], columns(channel.element)] }
}

/// The box that a group stores of a fragment.
pub(super) fn stored(parameter: u16, rows: u32, groups: u32, element: Scalar) -> BoxOf {
    BoxOf { parameter, dims: [rows / groups, columns(element)] }
}

impl Layout {
    pub(super) fn of(kernel: &Kernel, tile: &Tile) -> Layout {
        let mut layout = Layout::default();
        let mut staged = 0;
        kernel.for_each_op(&mut |op| {
            let (Some(Place::View(view)), Some(other)) = (op.place, op.others.first()) else { return };
            let wanted = match (kernel.channel(*other), kernel.fragment(*other)) {
                (Some(channel), _) => fetched(view, channel),
                (_, Some(fragment)) => {
                    staged = staged.max(fragment.len() as u32 * fragment.element.bytes());
                    stored(view, fragment.rows, tile.groups, fragment.element)
                }
                _ => return,
            };
            if !layout.boxes.contains(&wanted) {
                layout.boxes.push(wanted);
            }
        });
        let mut at = 0u32;
        let mut take = |bytes: u32, align: u32| {
            let begin = at.next_multiple_of(align);
            at = begin + bytes;
            begin
        };
        layout.staging = take(staged, ALIGN);
        for channel in &tile.channels {
            layout.channels.push(take(channel.stage_bytes() as u32 * channel.stages, ALIGN));
        }
        for channel in &tile.channels {
            layout.barriers.push(take(16 * channel.stages, 8));
        }
        layout.signals = take(SIGNALS * (16 + 4), 8);
        layout.bytes = at + ALIGN;
        layout
    }
}

/// What of a tile kernel no Hopper instruction does.
pub(super) fn rejects(kernel: &Kernel, tile: &Tile, available: u64) -> Vec<(u32, RejectKind)> {
    let mut found = Vec::new();
    let mut need = |line: u32, holds: bool, what: String| {
        if !holds {
            found.push((line, RejectKind::Tile { what }));
        }
    };
    for channel in &tile.channels {
        let [rows, inner] = channel.dims;
        let bytes = inner * channel.element.bytes();
        let fits = rows <= MAX_BOX && rows.is_multiple_of(8) && bytes.is_multiple_of(ROW);
        need(
            channel.line.0,
            fits,
            format!(
                "a stage of @{} is {rows} rows of {bytes} bytes; it takes 8 to {MAX_BOX} rows, a multiple of 8, of a multiple of {ROW} bytes",
                channel.name
            ),
        );
    }
    kernel.for_each_op(&mut |op: &Op| {
        let line = op.line.0;
        let fragment = op.place.and_then(|place| kernel.fragment(place));
        if matches!(op.code, Opcode::Mma | Opcode::Product) {
            let (Some(sum), [a, _]) = (fragment, &op.others[..]) else { return };
            let columns = sum.columns.unwrap_or(0);
            need(
                line,
                columns.is_multiple_of(8) && columns <= 256,
                format!("@{} has {columns} columns; a sum has a multiple of 8, and at most 256", sum.name),
            );
            let slab = SLAB * tile.groups;
            need(
                line,
                sum.rows.is_multiple_of(slab),
                format!(
                    "@{} has {} rows; a sum of {} groups has a multiple of {slab}",
                    sum.name, sum.rows, tile.groups
                ),
            );
            let inner = match (kernel.channel(*a), kernel.fragment(*a), op.attr()) {
                (Some(channel), _, Some(Left::Transposed)) => channel.dims[0],
                (Some(channel), ..) => channel.dims[1],
                (_, fragment, _) => fragment.and_then(|f| f.columns).unwrap_or(0),
            };
            need(
                line,
                inner.is_multiple_of(16),
                format!("it adds {inner} products; that is no multiple of 16"),
            );
        }
        let missing = matches!(op.code, Opcode::Get | Opcode::Send | Opcode::PutAdd | Opcode::Load);
        need(line, !missing, format!("`{}` is not compiled for sm_90a", op.code.mnemonic()));
        if op.code == Opcode::Put {
            let Some(stored) = op.others.first().and_then(|place| kernel.fragment(*place)) else { return };
            let bytes = stored.columns.unwrap_or(0) * stored.element.bytes();
            let rows = stored.rows / tile.groups;
            let fits = bytes.is_multiple_of(ROW) && rows <= MAX_BOX;
            need(
                line,
                fits,
                format!(
                    "@{} has rows of {bytes} bytes; what is stored has rows of a multiple of {ROW} bytes",
                    stored.name
                ),
            );
        }
    });
    for fragment in &tile.fragments {
        let slab = SLAB * tile.groups;
        let held = matches!(fragment.element, Scalar::F32 | Scalar::I32 | Scalar::F16 | Scalar::Bf16);
        let fits = fragment.rows.is_multiple_of(slab)
            && fragment.columns.is_none_or(|columns| columns.is_multiple_of(8))
            && held
            && (fragment.columns.is_some() || fragment.element.bytes() == 4);
        need(
            fragment.line.0,
            fits,
            format!(
                "@{} has {} rows of {}; a fragment of {} groups has a multiple of {slab} rows of a multiple of 8 f32, i32, f16 or bf16, or of one f32 or i32",
                fragment.name, fragment.rows, fragment.element, tile.groups
            ),
        );
    }
    let needed = u64::from(Layout::of(kernel, tile).bytes);
    need(
        kernel.line().0,
        needed <= available,
        format!(
            "its stages, its barriers and what it stores take {needed} bytes of shared memory; a block has {available}"
        ),
    );
    found
}
