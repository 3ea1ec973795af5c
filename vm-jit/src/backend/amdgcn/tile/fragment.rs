//! Ops on fragments alone: what is computed of elements, and of rows.

use super::super::writer::{Val, Writer, float, int};
use super::layout::Kept;
use super::{SLAB, fragment_number};
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;

/// How many elements of a row are joined at a time: each op waits for the one before it in its chain.
const CHAINS: usize = 2;

impl<'k> Writer<'k> {
    pub(super) fn fill(&mut self, op: &'k Op, place: Place) {
        let Some(number) = fragment_number(place) else { return };
        let Some((kept, mut all)) = self.registers(number) else { return };
        let value = self.get(op.operands[0], 0);
        let register = match value {
            Val::Bits(0) | Val::Zero => Val::Zero,
            value => self.repacked(kept, &vec![value; kept.width as usize]),
        };
        all.fill(register);
        self.set_registers(number, &all);
    }

    pub(super) fn map(&mut self, op: &'k Op, first: Place) {
        let kernel = self.kernel;
        let Some(shape) = kernel.fragment(first) else { return };
        let computed = op.immediates.first().map_or(1, |count| *count as usize);
        let numbers: Vec<usize> =
            std::iter::once(&first).chain(&op.others).filter_map(|place| fragment_number(*place)).collect();
        let all: Option<Vec<(Kept, Vec<Val>)>> =
            numbers.iter().map(|number| self.registers(*number)).collect();
        let Some(all) = all else { return };
        let sources = &all[computed.min(all.len())..];
        let mut targets: Vec<(Kept, Vec<Val>)> = all[..computed.min(all.len())].to_vec();
        let is_row = |number: usize| kernel.tile().is_some_and(|tile| tile.fragments[number].is_row());
        let rows: Vec<bool> =
            numbers[computed.min(all.len())..].iter().map(|number| is_row(*number)).collect();
        let [top, left] = self.corner(shape);
        let (own, body) = (targets[0].0, &op.regions[0]);
        for slab in 0..own.slabs {
            let row = self.op32("add", top, SLAB * slab);
            // Of a column the lane's in this slab.
            for block in 0..own.blocks {
                if self.is_too_long() {
                    return;
                }
                let at = (slab * own.blocks + block) as usize;
                let mut given = Vec::new();
                for ((kept, registers), is_row) in sources.iter().zip(&rows) {
                    given.push(match (kept.width, is_row) {
                        (1, _) => vec![registers[slab as usize]; own.width as usize],
                        (_, true) => self.unpacked(*kept, registers[block as usize]),
                        _ => self.unpacked(*kept, registers[at]),
                    });
                }
                let mut results = vec![Vec::new(); targets.len()];
                for i in 0..own.width {
                    let column = match own.width {
                        1 => Val::Bits(0),
                        _ => self.op32("add", left, SLAB * block + i),
                    };
                    let elements = given.iter().map(|elements| elements[i as usize]);
                    let args: Vec<Val> = [row, column].into_iter().chain(elements).collect();
                    for (arg, value) in body.args.iter().zip(args) {
                        self.set(*arg, 0, value);
                    }
                    self.region(body);
                    for (result, value) in results.iter_mut().zip(&body.yields) {
                        result.push(self.get(*value, 0));
                    }
                }
                for ((kept, registers), result) in targets.iter_mut().zip(&results) {
                    registers[at] = self.repacked(*kept, result);
                }
            }
        }
        for (number, (_, registers)) in numbers.iter().zip(&targets) {
            self.set_registers(*number, registers);
        }
    }

    /// Joins the rows of a matrix with a column: what a lane has, then the lanes that have the rest of the row.
    pub(super) fn rows(&mut self, op: &'k Op, place: Place) {
        let Some(&[matrix]) = op.others.first_chunk::<1>() else { return };
        let (Some(to), Some(from)) = (fragment_number(place), fragment_number(matrix)) else { return };
        let Some(shape) = self.kernel.fragment(matrix) else { return };
        let Some(((_, mut column), (kept, elements))) = self.registers(to).zip(self.registers(from)) else {
            return;
        };
        let columns = shape.columns.unwrap_or(0);
        let [_, left] = self.corner(shape);
        let (scalar, ty) = (kept.element, int(kept.element));
        let nothing = match op.code {
            Opcode::RowMax => f32::NEG_INFINITY,
            Opcode::RowMin => f32::INFINITY,
            _ => -0.0,
        };
        let nothing = Val::from(nothing.to_bits());
        for (slab, joined) in (0..kept.slabs).zip(&mut column) {
            let mut chains: [Option<Val>; CHAINS] = [None; CHAINS];
            for block in 0..kept.blocks {
                let own = self.unpacked(kept, elements[(slab * kept.blocks + block) as usize]);
                for (i, mut element) in own.into_iter().enumerate() {
                    // Columns that there are not are left out.
                    if SLAB * (block + 1) > columns {
                        let most = columns.saturating_sub(SLAB * block + i as u32);
                        let inside = self.def(format_args!("icmp ult i32 {left}, {most}"));
                        element =
                            self.def(format_args!("select i1 {inside}, {ty} {element}, {ty} {nothing}"));
                    }
                    let chain = &mut chains[i % CHAINS];
                    *chain = Some(match *chain {
                        Some(before) => self.row_op(op.code, scalar, before, element),
                        None => element,
                    });
                }
            }
            let ends = chains.into_iter().flatten();
            let Some(mut all) = ends.reduce(|a, b| self.row_op(op.code, scalar, a, b)) else { continue };
            let mut distance = SLAB;
            while distance < self.options.chip.wave() {
                let other = self.exchanged_word(all, distance);
                all = self.row_op(op.code, scalar, all, other);
                distance *= 2;
            }
            *joined = self.row_op(op.code, scalar, *joined, all);
        }
        self.set_registers(to, &column);
    }

    fn row_op(&mut self, code: Opcode, scalar: Scalar, a: Val, b: Val) -> Val {
        let (ty, each) = (int(scalar), float(scalar));
        let [a, b] = [a, b].map(|value| self.def(format_args!("bitcast {ty} {value} to {each}")));
        let name = match code {
            Opcode::RowMax => "maximumnum",
            Opcode::RowMin => "minimumnum",
            _ => {
                let sum = self.def(format_args!("fadd {each} {a}, {b}"));
                return self.as_int(scalar, sum);
            }
        };
        let name = format!("llvm.{name}.f{}", scalar.bits());
        let joined = self.call(each, &name, &[(each, a), (each, b)]);
        self.as_int(scalar, joined)
    }

    /// A lane's word from the one whose number differs in the bit of this distance: 16 or 32.
    pub(super) fn exchanged_word(&mut self, word: Val, distance: u32) -> Val {
        let Some(tiles) = self.tiles() else { return word };
        match tiles.others.iter().find(|(other, _)| *other == distance) {
            Some((_, at)) => {
                let at = *at;
                self.call("i32", "llvm.amdgcn.ds.bpermute", &[("i32", at), ("i32", word)])
            }
            // Sixteen lanes further, of 32.
            None => {
                let selects = [0x7654_3210u32, 0xfedc_ba98].map(|half| ("i32", Val::from(half)));
                let no = ("i1", Val::Bits(0));
                let args = [("i32", word), ("i32", word), selects[0], selects[1], no, no];
                self.call("i32", "llvm.amdgcn.permlanex16.i32", &args)
            }
        }
    }

    /// The block's share of the columns of a sum, all of which it has.
    pub(super) fn share(&mut self, op: &'k Op, place: Place) {
        let Some(&[from]) = op.others.first_chunk::<1>() else { return };
        let (Some(to), Some(from)) = (fragment_number(place), fragment_number(from)) else { return };
        let Some(((part, mut own), (sum, all))) = self.registers(to).zip(self.registers(from)) else {
            return;
        };
        let blocks = if part.blocks == sum.blocks { 1 } else { self.kernel.cluster() };
        let rank = self.cluster_rank();
        for slab in 0..part.slabs {
            for block in 0..part.blocks {
                let of = |share: u32| all[(slab * sum.blocks + share * part.blocks + block) as usize];
                let mut value = of(0);
                for share in 1..blocks {
                    let here = self.def(format_args!("icmp eq i32 {rank}, {share}"));
                    let ty = part.ty;
                    value = self.def(format_args!("select i1 {here}, {ty} {}, {ty} {value}", of(share)));
                }
                own[(slab * part.blocks + block) as usize] = value;
            }
        }
        self.set_registers(to, &own);
    }
}
