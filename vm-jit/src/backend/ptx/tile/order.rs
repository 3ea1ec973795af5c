//! Which stores of a block must come one after the other.
//!
//! What is put comes in the order of the program. Each group puts its rows by itself, so that groups wait for each other before
//! they do, unless it is known that no row of a view comes from two of them.

use vm_ir::Kernel;
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;

/// What is known of all that is done with a view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PutOrder {
    /// Matrices are added to it, in any order, and nothing else is done.
    pub(super) adds: bool,
    /// All its rows come from one group alone: all that is put there is as high, and begins at multiples of that. Of a power of two
    /// a product is one that overflows, too.
    pub(super) aligned: bool,
}

/// That of each parameter.
pub(super) fn put_orders(kernel: &Kernel) -> Vec<PutOrder> {
    // By value: of which power of two it is a multiple.
    let mut powers = vec![0u32; kernel.values().len()];
    kernel.for_each_op(&mut |op| {
        let of = |i: usize| op.operands.get(i).map_or(0, |value| powers[value.index()]);
        let power = match op.code {
            Opcode::Const => op.immediates.first().map_or(0, |bits| bits.trailing_zeros()),
            Opcode::Mul => of(0) + of(1),
            Opcode::Add | Opcode::Sub => of(0).min(of(1)),
            Opcode::Sext | Opcode::Zext | Opcode::Trunc => of(0),
            _ => 0,
        };
        if let Some(result) = op.result() {
            powers[result.index()] = power.min(u64::BITS);
        }
    });
    let mut found: Vec<Option<(u32, PutOrder)>> = vec![None; kernel.params().len()];
    kernel.for_each_op(&mut |op| {
        let (Some(Place::View(view)), true) = (op.place, op.code != Opcode::Extent) else { return };
        let Some(known) = found.get_mut(usize::from(view)) else { return };
        let rows = rows(kernel, op);
        let (first_rows, order) = known.get_or_insert((rows, PutOrder { adds: true, aligned: true }));
        order.adds &= op.code == Opcode::PutAdd && rows > 0;
        let row = op.operands.len().checked_sub(2).and_then(|row| op.operands.get(row));
        let begins = row.is_some_and(|row| powers[row.index()] >= rows.trailing_zeros());
        let puts = matches!(op.code, Opcode::Put | Opcode::PutAdd) && rows == *first_rows;
        order.aligned &= puts && rows.is_power_of_two() && begins;
    });
    found.into_iter().map(|known| known.map_or_else(PutOrder::default, |(_, order)| order)).collect()
}

/// Rows of the matrix that an op puts; 0 of a column or a row.
fn rows(kernel: &Kernel, op: &Op) -> u32 {
    let fragment = op.others.first().and_then(|place| kernel.fragment(*place));
    fragment.filter(|fragment| !fragment.is_line()).map_or(0, |fragment| fragment.rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(groups: u32, rows: u32, body: &str, adds: bool, aligned: bool) {
        let text = format!(
            "vir 1
             kernel @k(@c: view<f32, [?, ?], readwrite, align 16>, %n: i64) at 0 tile({groups}) {{
               fragment @s: f32[{rows}, 32]
               fragment @t: f32[64, 32]
               %z = const 0 : i64
               {body}
             }}"
        );
        let module = vm_ir::text::parse(&text).unwrap();
        assert_eq!(put_orders(&module.kernels()[0])[0], PutOrder { adds, aligned }, "{body}");
    }

    #[test]
    fn groups_wait_unless_rows_are_their_own() {
        let times = |by: u32| format!("%m = mul %n, {by} : i64\n put @c[%m, %z], @s\n");
        check(2, 128, &times(128), false, true);
        check(2, 128, &times(64), false, false);
        // A product of another number may overflow to a row that is none of its multiples.
        check(3, 192, &times(192), false, false);
        check(2, 128, &format!("{}put @c[%z, %z], @s", times(256)), false, true);
        check(1, 128, &format!("{}put @c[%z, %z], @t", times(128)), false, false);
        check(2, 128, "put @c[%n, %z], @s", false, false);
        check(2, 128, "put.add @c[%n, %z], @s", true, false);
        check(2, 128, "put.add @c[%n, %z], @s\n get @c[%z, %z], @s", false, false);
        check(2, 128, "put.rows @c[%z, %z], @s, %n", false, false);
    }
}
