//! Products of f32 without instructions for them: element by element.

use super::super::writer::{Val, Writer};
use super::SLAB;
use super::factor::{Factor, Step};
use super::layout::Kept;
use crate::backend::stage::PIECE;
use vm_ir::module::Place;

/// What is added up at a time: the elements of a piece.
const AT_ONCE: u32 = 4;

impl Writer<'_> {
    /// Adds the product of a left factor, which may be the fragment `place`, and a right one to the registers of a sum.
    pub(super) fn multiply_by_cores(
        &mut self,
        place: Place,
        mut left: Option<&mut Factor>,
        right: &mut Factor,
        kept: Kept,
        sums: &mut [Val],
    ) {
        let step = Step { run: SLAB, lanes: 1 };
        for first in (0..right.inner()).step_by(SLAB as usize) {
            let mut lefts = Vec::new();
            for slab in 0..kept.slabs {
                lefts.push(match &mut left {
                    Some(left) => self.run(left, step, slab, first),
                    None => self.run_of_fragment(place, slab, first / SLAB, true),
                });
            }
            for block in 0..kept.blocks {
                let mut of_block: Vec<Vec<Val>> = (0..kept.slabs)
                    .map(|slab| self.unpacked(kept, sums[(slab * kept.blocks + block) as usize]))
                    .collect();
                for inner in (0..SLAB).step_by(AT_ONCE as usize) {
                    if self.is_too_long() {
                        return;
                    }
                    let rights = self.cells(right, kept.width, block, first + inner);
                    for (left, sums) in lefts.iter().zip(&mut of_block) {
                        for (k, right) in (inner as usize..).zip(&rights) {
                            for (sum, right) in sums.iter_mut().zip(right) {
                                *sum = self.multiplied_and_added(left[k], *right, *sum);
                            }
                        }
                    }
                }
                for (slab, of_slab) in (0..).zip(&of_block) {
                    sums[(slab * kept.blocks + block) as usize] = self.repacked(kept, of_slab);
                }
            }
        }
    }

    /// The elements of a right factor in the lane's columns of a block, from `inner` on: by what is added up.
    fn cells(&mut self, factor: &Factor, width: u32, block: u32, inner: u32) -> Vec<Vec<Val>> {
        let quarter = self.tiles().map_or(Val::Zero, |tiles| tiles.quarter);
        let begin = self.begin_of(factor, block);
        let own = self.op32("mul", quarter, width);
        let first = self.op32("add", begin, own);
        let size = factor.stage.size;
        let in_piece = PIECE / size;
        match factor.along {
            true => {
                let columns: Vec<Vec<Val>> = (0..width)
                    .map(|i| {
                        let row = self.op32("add", first, i);
                        self.piece(factor, row, Val::from(inner * size))
                    })
                    .collect();
                let of = |k: usize| columns.iter().map(|column| column[k]).collect();
                (0..AT_ONCE as usize).map(of).collect()
            }
            false => (inner..inner + AT_ONCE)
                .map(|row| {
                    let pieces = (0..width / in_piece).map(|piece| {
                        let column = self.op32("add", first, piece * in_piece);
                        let byte = self.op32("mul", column, size);
                        self.piece(factor, Val::from(row), byte)
                    });
                    pieces.flatten().collect()
                })
                .collect(),
        }
    }

    /// The words of a piece of a stage.
    fn piece(&mut self, factor: &Factor, row: Val, byte: Val) -> Vec<Val> {
        let at = self.address_in(factor.stage, factor.offset(), row, byte);
        let all = self.def(format_args!("load <4 x i32>, ptr addrspace(3) {at}, align {PIECE}"));
        self.words_of(4, all)
    }

    fn multiplied_and_added(&mut self, a: Val, b: Val, sum: Val) -> Val {
        let [a, b, sum] = [a, b, sum].map(|word| self.def(format_args!("bitcast i32 {word} to float")));
        let sum = self.call("float", "llvm.fma.f32", &[("float", a), ("float", b), ("float", sum)]);
        self.def(format_args!("bitcast float {sum} to i32"))
    }
}
