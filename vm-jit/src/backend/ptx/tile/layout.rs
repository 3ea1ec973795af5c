//! Where a tile kernel has what in shared memory, and what it asks of the launch.

use crate::artifact::Note;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{Left, Opcode, Right, Shape, Turn};
use vm_ir::tile::{Channel, Fragment, Tile};
use vm_ir::{Kernel, Scalar};

/// Bytes of a row of a box: what the 128-byte swizzle spreads over all banks.
pub(super) const ROW: u32 = 128;
/// What the swizzle's pattern is aligned to.
pub(super) const ALIGN: u32 = 1024;
/// Threads of a group of warps, which multiply together.
pub(super) const GROUP: u32 = 128;
/// Bytes of a row of a factor that one instruction adds up.
pub(super) const INNER: u32 = 32;
/// Rows of one instruction's product.
pub(super) const SLAB: u32 = 64;
/// The most rows of a box.
const MAX_BOX: u32 = 256;
/// Polls on their way from one role to the others.
pub(super) const SIGNALS: u32 = 2;
/// The same of numbers that were loaded, such as those of a paged cache's pages: as many stages may be on their way.
pub(super) const WORDS: u32 = 8;

/// A box that is copied between a view and shared memory by a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BoxOf {
    /// The view.
    pub(super) parameter: u16,
    /// What its elements become.
    pub(super) element: Scalar,
    /// Rows and columns, in elements.
    pub(super) dims: [u32; 2],
    /// Is it copied to the view?
    pub(super) writes: bool,
}

impl BoxOf {
    /// One row of it.
    pub(super) fn row(self) -> BoxOf {
        BoxOf { dims: [1, self.dims[1]], ..self }
    }
}

/// Offsets in bytes from the first byte of shared memory.
#[derive(Debug, Default)]
pub(in crate::backend::ptx) struct Layout {
    /// By channel: its first stage.
    pub(super) channels: Vec<u32>,
    /// By channel: is it sent to, and not fetched to?
    pub(super) sent: Vec<bool>,
    /// Of what is stored, on its way; and the bytes of that, of which each group has its share.
    pub(super) staging: u32,
    pub(super) staged: u32,
    /// By channel: the barriers of full stages; those of empty ones are behind.
    pub(super) barriers: Vec<u32>,
    /// What the roles tell each other: whether the launch is cancelled, and numbers that were loaded. Barriers of words that
    /// are full, then of those that are empty, then the words.
    pub(super) signals: u32,
    pub(super) words: u32,
    /// By group: the barrier of what is on its way from a view; 0 if nothing ever is.
    pub(super) arrivals: u32,
    /// What the blocks of a cluster give each other of sums: buffers, the bytes of one, and a barrier for each.
    pub(super) given: u32,
    pub(super) given_buffers: u32,
    pub(super) given_bytes: u32,
    pub(super) given_barriers: u32,
    /// All of it, and what aligning it may take.
    pub(super) bytes: u32,
    /// The tensor maps.
    pub(super) boxes: Vec<BoxOf>,
}

/// Columns of a box of this element.
pub(super) const fn columns(element: Scalar) -> u32 {
    ROW / element.bytes()
}

/// Boxes of a stage side by side. The last may be narrower; its rows still lie 128 bytes apart.
pub(super) fn boxes(channel: &Channel) -> u32 {
    channel.dims[1].div_ceil(columns(channel.element))
}

/// Bytes that a stage of a channel takes.
pub(super) fn stage_bytes(channel: &Channel) -> u32 {
    boxes(channel) * channel.dims[0] * ROW
}

/// The N-th box that a block fetches for a channel's stages: its share, if others bring the rest.
pub(super) fn fetched(kernel: &Kernel, parameter: u16, channel: &Channel, number: u32) -> BoxOf {
    let rows = channel.dims[0] / share(kernel, channel);
    let (element, all) = (channel.element, columns(channel.element));
    let there = channel.dims[1].saturating_sub(number * all).min(all);
    BoxOf { parameter, element, dims: [rows, there], writes: false }
}

/// How many blocks bring a stage of the channel.
pub(super) fn share(kernel: &Kernel, channel: &Channel) -> u32 {
    if channel.multicast { kernel.cluster().max(1) } else { 1 }
}

/// The box that a group copies of a fragment, to a view or from it.
pub(super) fn copied(parameter: u16, fragment: &Fragment, groups: u32, writes: bool) -> BoxOf {
    let element = fragment.element;
    BoxOf { parameter, element, dims: [fragment.rows / groups, columns(element)], writes }
}

/// How many boxes of a fragment are on their way to a view at once.
pub(super) fn staged_boxes(fragment: &Fragment) -> u32 {
    (fragment.columns.unwrap_or(0) / columns(fragment.element)).clamp(1, 2)
}

/// Is a matrix copied as boxes of whole rows of 128 bytes, and not by the threads that have it?
pub(super) fn is_copied(op: &Op, fragment: &Fragment) -> bool {
    let bytes = fragment.columns.unwrap_or(0) * fragment.element.bytes();
    !fragment.is_line() && bytes.is_multiple_of(ROW) && op.attr() != Some(Turn::Transposed)
}

impl Layout {
    pub(super) fn of(kernel: &Kernel, tile: &Tile) -> Layout {
        let mut layout = Layout { sent: vec![false; tile.channels.len()], ..Layout::default() };
        let (mut staged, mut loads, mut gets) = (0, false, false);
        kernel.for_each_op(&mut |op| {
            loads |= op.code == Opcode::Load;
            let other = op.others.first();
            if let (Opcode::Send, Some(Place::Channel(i))) = (op.code, other)
                && let Some(sent) = layout.sent.get_mut(usize::from(*i))
            {
                *sent = true;
            }
            let (Some(Place::View(view)), Some(other)) = (op.place, other) else { return };
            let mut narrower = None;
            let wanted = match (op.code.shape(), kernel.channel(*other), kernel.fragment(*other)) {
                (Shape::Fetch, Some(channel), _) => {
                    narrower = Some(fetched(kernel, view, channel, boxes(channel).saturating_sub(1)));
                    fetched(kernel, view, channel, 0)
                }
                (Shape::Put | Shape::PutRows | Shape::Get, _, Some(fragment)) if is_copied(op, fragment) => {
                    staged = staged.max(staged_boxes(fragment) * fragment.rows * ROW);
                    gets |= op.code == Opcode::Get;
                    copied(view, fragment, tile.groups, op.code != Opcode::Get)
                }
                _ => return,
            };
            let single = (op.code == Opcode::PutRows).then(|| wanted.row());
            for wanted in std::iter::once(wanted).chain(single).chain(narrower) {
                if !layout.boxes.contains(&wanted) {
                    layout.boxes.push(wanted);
                }
            }
        });
        let mut at = 0u32;
        let mut take = |bytes: u32, align: u32| {
            let begin = at.next_multiple_of(align);
            at = begin + bytes;
            begin
        };
        (layout.staging, layout.staged) = (take(staged, ALIGN), staged);
        for channel in &tile.channels {
            layout.channels.push(take(stage_bytes(channel) * channel.stages, ALIGN));
        }
        for channel in &tile.channels {
            layout.barriers.push(take(16 * channel.stages, 8));
        }
        layout.signals = take(SIGNALS * (16 + 8), 8);
        layout.words = if loads { take(WORDS * (16 + 8), 8) } else { 0 };
        layout.arrivals = if gets { take(8 * tile.groups, 8) } else { 0 };
        (layout.given_buffers, layout.given_bytes) = given(kernel);
        layout.given = take(layout.given_buffers * layout.given_bytes, 16);
        layout.given_barriers = take(8 * layout.given_buffers, 8);
        layout.bytes = at + ALIGN;
        layout
    }
}

/// How many buffers there are for what the blocks of a cluster give each other, and how large they are: each block's share of a
/// sum, or all of it, of each block. One is enough if sums come together once.
fn given(kernel: &Kernel) -> (u32, u32) {
    fn shares(region: &Region, looped: bool) -> u32 {
        let of_op = |op: &Op| {
            let looped = looped || matches!(op.code.shape(), Shape::For | Shape::While);
            let own = u32::from(op.code == Opcode::Share) * if looped { 2 } else { 1 };
            own + op.regions.iter().map(|region| shares(region, looped)).sum::<u32>()
        };
        region.ops.iter().map(of_op).sum()
    }
    let blocks = kernel.cluster();
    if blocks == 1 {
        return (0, 0);
    }
    let mut bytes = 0;
    kernel.for_each_op(&mut |op| {
        let part = op.place.filter(|_| op.code == Opcode::Share).and_then(|place| kernel.fragment(place));
        let own = part.map_or(0, |part| part.len() as u32 * part.element.bytes());
        bytes = bytes.max(own.saturating_mul(blocks));
    });
    (shares(kernel.body(), false).min(2), bytes)
}

/// What of a tile kernel no Hopper instruction does.
pub(super) fn rejects(kernel: &Kernel, tile: &Tile, available: u64) -> Vec<Note> {
    let mut found = Vec::new();
    let mut need = |line: u32, holds: bool, what: String| {
        if !holds {
            found.push(Note { line, what });
        }
    };
    for channel in &tile.channels {
        let [rows, inner] = channel.dims;
        let (bytes, share) = (inner * channel.element.bytes(), share(kernel, channel));
        let least = 8 * share;
        let fits = rows / share <= MAX_BOX && rows.is_multiple_of(least) && bytes.is_multiple_of(INNER);
        need(
            channel.line.0,
            fits,
            format!(
                "a stage of @{} is {rows} rows of {bytes} bytes; it takes {least} to {} rows, a multiple of {least}, of a multiple of {INNER} bytes",
                channel.name,
                MAX_BOX * share
            ),
        );
    }
    kernel.for_each_op(&mut |op: &Op| {
        let mut need = |holds, what| need(op.line.0, holds, what);
        match op.code.shape() {
            Shape::Mma => product(kernel, tile, op, &mut need),
            Shape::Put | Shape::PutRows | Shape::Get => {
                let Some(stored) = op.others.first().and_then(|place| kernel.fragment(*place)) else {
                    return;
                };
                let rows = stored.rows / tile.groups.max(1);
                need(
                    !is_copied(op, stored) || rows <= MAX_BOX,
                    format!(
                        "@{} has {rows} rows for each group; what is copied at once has at most {MAX_BOX}",
                        stored.name
                    ),
                );
                need(
                    is_copied(op, stored) || stored.element.bytes() > 1,
                    format!(
                        "@{} is of {}; it is copied whole, as rows of a multiple of {ROW} bytes that are not transposed",
                        stored.name, stored.element
                    ),
                );
            }
            _ => {}
        }
    });
    for fragment in &tile.fragments {
        let slab = SLAB * tile.groups;
        let (step, held) = match fragment.element {
            Scalar::F32 | Scalar::I32 | Scalar::F16 | Scalar::Bf16 => (8, true),
            // Four to a register.
            Scalar::F8E4M3 | Scalar::F8E5M2 | Scalar::I8 => (16, !fragment.is_row()),
            _ => (8, false),
        };
        let fits = (fragment.is_row() || fragment.rows.is_multiple_of(slab))
            && fragment.columns.is_none_or(|columns| columns.is_multiple_of(step))
            && held
            && (fragment.columns.is_some() || fragment.element.bytes() == 4);
        need(
            fragment.line.0,
            fits,
            format!(
                "@{} has {} rows of {}; a fragment of {} groups has one row, or a multiple of {slab}, of a multiple of 8 f32, i32, f16 or bf16, or is a column of f32 or i32; of several rows it may have a multiple of 16 fp8 or i8",
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

/// What of a product no `wgmma` does.
fn product(kernel: &Kernel, tile: &Tile, op: &Op, need: &mut impl FnMut(bool, String)) {
    let (Some(sum), [a, b]) = (op.place.and_then(|place| kernel.fragment(place)), &op.others[..]) else {
        return;
    };
    let Some(element) = kernel.channel(*b).map(|channel| channel.element) else { return };
    if element == Scalar::F32 {
        return need(false, "f32 has no products; take a channel of tf32".to_owned());
    }
    let columns = sum.columns.unwrap_or(0);
    let step = if element == Scalar::I8 && columns > 24 { 16 } else { 8 };
    need(
        columns.is_multiple_of(step) && columns <= 256,
        format!("@{} has {columns} columns; a sum has a multiple of {step}, and at most 256", sum.name),
    );
    let slab = SLAB * tile.groups;
    need(
        sum.rows.is_multiple_of(slab),
        format!(
            "@{} has {} rows; a sum of {} groups has a multiple of {slab}",
            sum.name, sum.rows, tile.groups
        ),
    );
    let left_turned = op.attr() == Some(Left::Transposed);
    let inner = match (kernel.channel(*a), kernel.fragment(*a)) {
        (Some(channel), _) => channel.dims[usize::from(!left_turned)],
        (_, fragment) => fragment.and_then(|f| f.columns).unwrap_or(0),
    };
    let at_once = INNER / element.bytes();
    need(
        inner.is_multiple_of(at_once),
        format!("it adds {inner} products; that is no multiple of {at_once}"),
    );
    let in_rows = !left_turned && op.attr() == Some(Right::Transposed);
    need(
        element.bytes() == 2 || in_rows,
        format!(
            "factors of {element} lie row by row of what is added up: write mma.bt, with the second factor transposed"
        ),
    );
    need(
        element.bytes() <= 2 || kernel.channel(*a).is_some(),
        format!("factors of {element} lie in stages: send the first one to a channel"),
    );
}
