//! Products: `wgmma` on stages, and on fragments as the first factor.

use super::layout::{INNER, ROW, SLAB};
use super::{channel_number, fragment_number};
use crate::backend::ptx::asm::{Arg, Reg, def, ins};
use crate::backend::ptx::writer::Writer;
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Left, Right};
use vm_ir::tile::Channel;

/// How a factor lies in a stage, as boxes of rows of 128 bytes.
#[derive(Clone, Copy)]
struct Factor {
    /// What a descriptor says beside the address: the strides and the swizzle (PTX ISA, "Matrix-descriptor encoding").
    descriptor: u64,
    /// Bytes to what the next instruction adds up, as far as that is in a box, and how many of those a box has.
    step: u32,
    steps: u32,
    /// Bytes to the next box of them.
    next_box: u32,
    /// Is the dimension that is not added up the one whose elements lie side by side?
    transposed: bool,
}

impl Factor {
    /// `by_rows`: are the elements that are added up side by side in a row?
    fn of(channel: &Channel, by_rows: bool) -> Factor {
        let bytes = channel.dims[0] * ROW;
        let encode = |leading: u32, stride: u32| {
            u64::from(leading >> 4) << 16 | u64::from(stride >> 4) << 32 | 1 << 62
        };
        if by_rows {
            Factor {
                descriptor: encode(16, 8 * ROW),
                step: INNER,
                steps: ROW / INNER,
                next_box: bytes,
                transposed: false,
            }
        } else {
            // From one box to the next of elements that are not added up, and from eight rows to the next eight.
            let descriptor = encode(bytes, 8 * ROW);
            Factor {
                descriptor,
                step: INNER / channel.element.bytes() * ROW,
                steps: u32::MAX,
                next_box: 0,
                transposed: true,
            }
        }
    }

    /// Bytes from what the first instruction adds up to what the N-th does.
    fn offset(self, n: u32) -> u32 {
        n / self.steps * self.next_box + n % self.steps * self.step
    }
}

impl<'k> Writer<'k> {
    /// The descriptor of a factor that begins in the newest stage of a channel, `offset` bytes further.
    fn descriptor(&mut self, number: usize, factor: Factor, offset: Option<Reg>) -> Reg {
        let Some(mut at) = self.tiles.as_ref().map(|tiles| tiles.rings[number].newest) else {
            return Reg::NONE;
        };
        if let Some(offset) = offset {
            at = def!(self, B32, "add.u32", at, offset);
        }
        let at = def!(self, B32, "bfe.u32", at, 4, 14);
        let at = def!(self, B64, "cvt.u64.u32", at);
        def!(self, B64, "or.b64", at, factor.descriptor as i64)
    }

    /// The registers of a left factor that is a fragment, as instructions take them.
    fn left_fragment(&mut self, place: Place) -> Option<Vec<Reg>> {
        fragment_number(place)?;
        let regs = self.fragment_regs(place);
        if self.kernel.fragment(place)?.element.bytes() > 1 || self.is_kept_as_factor(place) {
            return Some(regs);
        }
        let four = regs.chunks_exact(4).map(|four| [four[0], four[1], four[2], four[3]]);
        Some(four.flat_map(|four| self.of_bytes(four)).collect())
    }

    pub(super) fn mma(&mut self, op: &'k Op, place: Place) {
        let kernel = self.kernel;
        let (Some(sum), &[a, b]) = (kernel.fragment(place), &op.others[..]) else { return };
        let (Some(right), Some(right_number)) = (kernel.channel(b), channel_number(b)) else { return };
        let (Some(number), Some(tiles)) = (fragment_number(place), &self.tiles) else { return };
        let (groups, group) = (tiles.tile.groups, tiles.group);
        let sums = tiles.fragments[number].clone();
        let rows = sum.rows / groups;
        let columns = sum.columns.unwrap_or(0);
        let right_turned = op.attr() == Some(Right::Transposed);
        let left_turned = op.attr() == Some(Left::Transposed);
        let inner = if right_turned { right.dims[1] } else { right.dims[0] };
        let of_right = Factor::of(right, right_turned);
        let (of_a, of_b) = (kernel.place(a).map_or(right.element, |(_, element)| element), right.element);
        let at_once = INNER / of_b.bytes();
        let sum_type = if sum.element == Scalar::I32 { "s32" } else { "f32" };
        let name = format!(
            "wgmma.mma_async.sync.aligned.m64n{columns}k{at_once}.{sum_type}.{}.{}",
            type_name(of_a),
            type_name(of_b)
        );

        let fragment = self.left_fragment(a);
        ins!(self, "wgmma.fence.sync.aligned");
        let right = self.descriptor(right_number, of_right, None);
        // The group's rows begin further down, or further right.
        let left = kernel.channel(a).map(|channel| {
            let factor = Factor::of(channel, !left_turned);
            let down = if left_turned { channel.dims[0] * ROW / SLAB } else { ROW };
            let own = def!(self, B32, "sub.u32", group, 1);
            let offset = def!(self, B32, "mul.lo.u32", own, i64::from(rows * down));
            let number = channel_number(a).unwrap_or(0);
            (self.descriptor(number, factor, Some(offset)), factor, down)
        });
        let at = |writer: &mut Self, start: Reg, bytes: u32| match bytes {
            0 => start,
            bytes => def!(writer, B64, "add.s64", start, i64::from(bytes >> 4)),
        };
        let per_slab = sums.len() / (rows / SLAB) as usize;
        let keep = self.keeps(op, place);
        for step in 0..inner / at_once {
            let keep = if step > 0 { Arg::Int(1) } else { keep };
            let b = at(self, right, of_right.offset(step));
            for slab in 0..rows / SLAB {
                let from = slab as usize * per_slab;
                let sums = &sums[from..from + per_slab];
                let turned = i64::from(of_right.transposed);
                match (&left, &fragment) {
                    (Some((start, factor, down)), _) => {
                        let a = at(self, *start, factor.offset(step) + slab * SLAB * down);
                        let a_turned = i64::from(factor.transposed);
                        match of_b {
                            Scalar::F16 | Scalar::Bf16 => {
                                ins!(self, &name, Arg::List(sums), a, b, keep, 1, 1, a_turned, turned);
                            }
                            Scalar::I8 => ins!(self, &name, Arg::List(sums), a, b, keep),
                            _ => ins!(self, &name, Arg::List(sums), a, b, keep, 1, 1),
                        }
                    }
                    (None, Some(regs)) => {
                        let of_slab = regs.len() / (rows / SLAB) as usize;
                        let from = slab as usize * of_slab + 4 * step as usize;
                        let a = &regs[from..from + 4];
                        match of_b {
                            Scalar::F16 | Scalar::Bf16 => {
                                ins!(self, &name, Arg::List(sums), Arg::List(a), b, keep, 1, 1, turned);
                            }
                            Scalar::I8 => ins!(self, &name, Arg::List(sums), Arg::List(a), b, keep),
                            _ => ins!(self, &name, Arg::List(sums), Arg::List(a), b, keep, 1, 1),
                        }
                    }
                    (None, None) => {}
                }
            }
        }
        ins!(self, "wgmma.commit_group.sync.aligned");
    }
}

/// A factor's type, as `wgmma` calls it.
fn type_name(element: Scalar) -> &'static str {
    match element {
        Scalar::F16 => "f16",
        Scalar::Tf32 => "tf32",
        Scalar::F8E4M3 => "e4m3",
        Scalar::F8E5M2 => "e5m2",
        Scalar::I8 => "s8",
        _ => "bf16",
    }
}
