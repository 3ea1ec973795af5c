//! Products of f32 without instructions for them: element by element.

use super::super::writer::{Val, Writer};
use super::SLAB;
use super::factor::Factor;
use super::layout::Kept;
use crate::backend::stage::PIECE;
use vm_ir::module::Place;

/// What is added up at a time: the elements of a piece.
const AT_ONCE: u32 = 4;

/// Nothing is moved by LLVM from one side of it to the other: all that is loaded would else be loaded first, and spill.
const FENCE: &str = "llvm.amdgcn.sched.barrier";

impl Writer<'_> {
    /// Adds the product of a left factor, which may be the fragment `place`, and a right one to the registers of a sum.
    pub(super) fn multiply_by_cores(
        &mut self,
        place: Place,
        left: Option<&Factor>,
        right: &Factor,
        kept: Kept,
        sums: &mut [Val],
    ) {
        let Some(left) = left else {
            for first in (0..right.inner()).step_by(SLAB as usize) {
                let slabs = 0..kept.slabs;
                let lefts: Vec<_> =
                    slabs.map(|slab| self.run_of_fragment(place, slab, first / SLAB, true)).collect();
                self.multiply_sixteen(&lefts, right, kept, first.into(), sums);
            }
            return;
        };
        let (from, head, end) = (self.at, self.label(), self.label());
        self.br(head);
        self.place(head);
        let next = self.reserve();
        let inner = self.def(format_args!("phi i32 [ 0, {from} ], [ {next}, {head} ]"));
        let mut carried = Vec::new();
        for sum in &mut *sums {
            let after = self.reserve();
            *sum = self.def(format_args!("phi {} [ {sum}, {from} ], [ {after}, {head} ]", kept.ty));
            carried.push(after);
        }
        let lefts: Vec<_> = (0..kept.slabs).map(|slab| self.row_of_stage(left, slab, inner)).collect();
        self.multiply_sixteen(&lefts, right, kept, inner, sums);
        for (sum, after) in sums.iter_mut().zip(carried) {
            self.define(after, kept.ty, *sum);
            *sum = after;
        }
        self.line(format_args!("{next} = add i32 {inner}, {SLAB}"));
        let more = self.def(format_args!("icmp ult i32 {next}, {}", right.inner()));
        self.br_if(more, head, end);
        self.place(end);
    }

    /// Sixteen elements of the lane's row of a left factor, from `inner` on.
    fn row_of_stage(&mut self, factor: &Factor, slab: u32, inner: Val) -> Vec<Val> {
        let begin = self.begin_of(factor, slab);
        let row = self.op32("add", begin, factor.own());
        let size = factor.stage.size;
        let mut all = Vec::new();
        for k in (0..SLAB).step_by(AT_ONCE as usize) {
            let inner = self.op32("add", inner, k);
            if factor.along {
                let byte = self.op32("mul", inner, size);
                all.extend(self.piece(factor, row, byte));
                continue;
            }
            let byte = self.op32("mul", row, size);
            for k in 0..AT_ONCE {
                let inner = self.op32("add", inner, k);
                let at = self.address_in(factor.stage, factor.offset(), inner, byte);
                all.push(self.def(format_args!("load i32, ptr addrspace(3) {at}, align {size}")));
            }
        }
        all
    }

    /// Adds the products of sixteen elements of left factors, and of a right one from `inner` on.
    fn multiply_sixteen(
        &mut self,
        lefts: &[Vec<Val>],
        right: &Factor,
        kept: Kept,
        inner: Val,
        sums: &mut [Val],
    ) {
        // LLVM is not to keep addresses from one time to the next.
        let inner = self.stays("i32", inner);
        let parts: Vec<(u32, u32)> = (0..kept.blocks)
            .flat_map(|block| (0..SLAB).step_by(AT_ONCE as usize).map(move |k| (block, k)))
            .collect();
        let cells = |writer: &mut Self, (block, k): (u32, u32)| {
            let inner = writer.op32("add", inner, k);
            writer.cells(right, kept.width, block, inner)
        };
        let mut loaded = parts.first().map(|part| cells(self, *part));
        let mut of_block = Vec::new();
        for (at, (block, k)) in parts.iter().enumerate() {
            if self.is_too_long() {
                return;
            }
            let Some(rights) = loaded else { return };
            // What comes next is loaded while this is multiplied.
            loaded = parts.get(at + 1).map(|part| cells(self, *part));
            if *k == 0 {
                let slabs = 0..kept.slabs;
                of_block = slabs
                    .map(|slab| self.unpacked(kept, sums[(slab * kept.blocks + block) as usize]))
                    .collect::<Vec<_>>();
            }
            for (left, sums) in lefts.iter().zip(&mut of_block) {
                for (k, right) in (*k as usize..).zip(&rights) {
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = self.multiplied_and_added(left[k], *right, *sum);
                    }
                }
            }
            if k + AT_ONCE == SLAB {
                for (slab, of_slab) in (0..).zip(&of_block) {
                    let sum = self.repacked(kept, of_slab);
                    sums[(slab * kept.blocks + block) as usize] = self.stays(kept.ty, sum);
                }
            }
            self.call_void_with(FENCE, &[("i32", Val::Bits(0))]);
        }
    }

    /// The elements of a right factor in the lane's columns of a block, from `inner` on: by what is added up.
    fn cells(&mut self, factor: &Factor, width: u32, block: u32, inner: Val) -> Vec<Vec<Val>> {
        let quarter = self.tiles().map_or(Val::Zero, |tiles| tiles.quarter);
        let begin = self.begin_of(factor, block);
        let own = self.op32("mul", quarter, width);
        let first = self.op32("add", begin, own);
        let size = factor.stage.size;
        let in_piece = PIECE / size;
        match factor.along {
            true => {
                let byte = self.op32("mul", inner, size);
                let columns: Vec<Vec<Val>> = (0..width)
                    .map(|i| {
                        let row = self.op32("add", first, i);
                        self.piece(factor, row, byte)
                    })
                    .collect();
                let of = |k: usize| columns.iter().map(|column| column[k]).collect();
                (0..AT_ONCE as usize).map(of).collect()
            }
            false => (0..AT_ONCE)
                .map(|k| {
                    let row = self.op32("add", inner, k);
                    let pieces = (0..width / in_piece).map(|piece| {
                        let column = self.op32("add", first, piece * in_piece);
                        let byte = self.op32("mul", column, size);
                        self.piece(factor, row, byte)
                    });
                    pieces.flatten().collect()
                })
                .collect(),
        }
    }

    /// The words of a piece of a factor's stage.
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
