//! How many registers fragments take at most at a time: a pass over the program from its end, with those that are read later.

use super::fragment_number;
use super::layout::{Kept, Spread, written};
use vm_ir::Kernel;
use vm_ir::module::{Op, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::tile::Tile;

/// Fragments by number.
type Set = u64;

struct Pass {
    /// By fragment: the registers of 32 bits that a thread has of it.
    words: Vec<u32>,
    most: u32,
}

/// The registers of 32 bits that a thread has of fragments where it has the most.
pub(super) fn held(kernel: &Kernel, tile: &Tile, spread: Spread) -> u32 {
    let words = tile.fragments.iter().map(|fragment| Kept::of(fragment, spread).words()).collect();
    let mut pass = Pass { words, most: 0 };
    pass.region(kernel.body(), 0);
    pass.most
}

impl Pass {
    /// What is read in a region or behind it, by what is behind it.
    fn region(&mut self, region: &Region, mut live: Set) -> Set {
        for op in region.ops.iter().rev() {
            live = match op.code {
                Opcode::For | Opcode::ForCluster | Opcode::While => {
                    // What is read in the next iteration is, too.
                    let mut all = live;
                    loop {
                        let before = all;
                        for region in op.regions.iter().rev() {
                            all |= self.region(region, all);
                        }
                        if all == before {
                            break all;
                        }
                    }
                }
                Opcode::If | Opcode::Switch => {
                    let arms = op.regions.iter().map(|region| self.region(region, live));
                    arms.fold(0, |all, arm| all | arm)
                }
                _ => self.op(op, live),
            };
        }
        live
    }

    fn op(&mut self, op: &Op, live: Set) -> Set {
        let set = |places: &mut dyn Iterator<Item = vm_ir::module::Place>| {
            places.filter_map(fragment_number).fold(0, |set: Set, number| set | 1 << number)
        };
        let places = || op.place.iter().chain(&op.others).copied();
        let range = written(op);
        let writes = set(&mut places().skip(range.start).take(range.len()));
        let adds = op.code == Opcode::Mma || matches!(op.code.shape(), Shape::Rows);
        let mut reads = set(&mut places().take(range.start).chain(places().skip(range.end)));
        if adds {
            reads |= writes;
        }
        let before = live & !writes | reads;
        let all =
            self.words.iter().enumerate().filter(|(number, _)| (live | writes | reads) >> number & 1 == 1);
        self.most = self.most.max(all.map(|(_, words)| words).sum());
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: u32) {
        let text = format!(
            "vir 1
             kernel @k(@a: view<bf16, [?, ?], read>, @o: view<f32, [?, ?], write>) at 0 tile(1) {{
               channel @x: bf16[64, 64] stages 1
               fragment @s: f32[64, 64]
               fragment @t: f32[64, 64]
               fragment @h: bf16[64, 64]
               fragment @m: f32[64]
               %z = const 0 : i64
               %n = const 9 : i64
               %o = const 1 : i64
               %f = const 0.0 : f32
               {body}
             }}"
        );
        let module = vm_ir::text::parse(&text).unwrap();
        let kernel = &module.kernels()[0];
        let tile = kernel.tile().unwrap();
        assert_eq!(held(kernel, tile, Spread::of(kernel, tile, 64)), expected, "{body}");
    }

    #[test]
    fn as_many_as_are_read_later() {
        // Two waves, each with 32 rows of 64 columns: 32 words a lane, or 16 of bf16, and two of a column.
        let rows = "row.add @m, @s\n";
        check(&format!("{rows}put @o[%z, %z], @s"), 34);
        check(&format!("{rows}fill @s, %f\n put @o[%z, %z], @s\n fill @t, %f\n put @o[%z, %z], @t"), 34);
        check(&format!("{rows}fill @s, %f\n fill @t, %f\n put @o[%z, %z], @s\n put @o[%z, %z], @t"), 64);
        // What is read in the next iteration lives all through this one.
        let half = "map @h = @t (%i, %j, %x) {\n %y = fpconv %x : bf16\n yield %y\n }\n";
        let step = format!("fill @t, %f\n {half} fetch @a[%z, %z], @x\n mma @s, @h, @x\n release @x\n");
        check(&step, 80);
        check(&format!("for %k: i64 = %z to %n step %o {{\n{step}}}"), 80);
        check(&format!("{step} put @o[%z, %z], @s"), 80);
        let either =
            "%c = eq %z, %n : bool\n if %c {\n fill @s, %f\n } else {\n fill @t, %f\n }\n put @o[%z, %z], @s";
        check(either, 64);
    }
}
