//! Where the stages of channels lie in shared memory, and where an element lies in a stage.

use super::super::layout::SIGNALS;
use crate::backend::ptx::asm::{Reg, def};
use crate::backend::ptx::writer::Writer;
pub(super) use crate::backend::stage::{PIECE, Stage};
use vm_ir::tile::Tile;

/// Offsets in bytes from the first byte of shared memory.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// By channel.
    pub(super) stages: Vec<(u32, Stage)>,
    /// By channel: the barriers of full stages; those of empty ones are behind.
    pub(super) barriers: Vec<u32>,
    /// The barriers of what the roles tell each other, full and empty, and the words of 8 bytes.
    pub(super) signals: u32,
    /// All of it, and what aligning it may take.
    pub(super) bytes: u32,
}

/// What shared memory is aligned to.
pub(super) const ALIGN: u32 = 128;

impl Layout {
    pub(super) fn of(tile: &Tile) -> Layout {
        let mut layout = Layout::default();
        let mut at = 0u32;
        let mut take = |bytes: u32| {
            let begin = at;
            at += bytes;
            begin
        };
        for channel in &tile.channels {
            let stage = Stage::of(channel);
            layout.stages.push((take(stage.bytes() * channel.stages), stage));
        }
        for channel in &tile.channels {
            layout.barriers.push(take(16 * channel.stages));
        }
        layout.signals = take(SIGNALS * (16 + 8));
        layout.bytes = at + ALIGN;
        layout
    }
}

impl Writer<'_> {
    /// The offset in a stage of what lies in a row, so many bytes to the right.
    pub(super) fn offset_in(&mut self, stage: Stage, row: Reg, byte: Reg) -> Reg {
        let by = match stage.shift() {
            0 => row,
            shift => def!(self, B32, "shr.u32", row, i64::from(shift)),
        };
        let by = def!(self, B32, "and.b32", by, i64::from(stage.pieces - 1));
        let by = def!(self, B32, "shl.b32", by, 4);
        let at = if stage.slabs > 1 {
            let pitch = stage.pitch();
            let slab = def!(self, B32, "shr.u32", byte, i64::from(pitch.trailing_zeros()));
            let low = def!(self, B32, "and.b32", byte, i64::from(pitch - 1));
            let low = def!(self, B32, "xor.b32", low, by);
            def!(self, B32, "mad.lo.u32", slab, i64::from(stage.slab_bytes()), low)
        } else {
            def!(self, B32, "xor.b32", byte, by)
        };
        def!(self, B32, "mad.lo.u32", row, i64::from(stage.pitch()), at)
    }
}
