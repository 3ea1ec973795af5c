//! The powers of e that softmax and the losses of rows are made of.

use vm_ir::Scalar;
use vm_ir::builder::Val;

use super::{Piece, Values};

/// How close powers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Two ulps.
    Full,
    /// 2^-20 of the magnitude, times that of the exponent where it is above 1: for what is of 16 bits before or behind it.
    Rough,
}

impl Precision {
    /// What is enough for elements of such a type.
    pub fn of(element: Scalar) -> Precision {
        if element.bytes() < 4 { Precision::Rough } else { Precision::Full }
    }

    /// e to each lane.
    pub fn exp(self, x: Val<'_>) -> Val<'_> {
        match self {
            Precision::Full => x.exp(),
            Precision::Rough => x.exp().fast(),
        }
    }
}

/// A row's powers: e to each element of its first matrix, less the greatest.
#[derive(Debug)]
pub struct Powers<'r, 'b> {
    /// The greatest element, or the least finite number where all are less.
    pub max: Val<'b>,
    /// The sum of the powers.
    pub sum: Val<'b>,
    precision: Precision,
    /// The powers in the place of the elements, where these are held; else the elements.
    values: Values<'r, 'b>,
}

impl<'r, 'b> Powers<'r, 'b> {
    /// Those of a row, whose first matrix is not read behind. `each` is given the powers, if the row is not combined in a single pass.
    pub fn of(
        values: Values<'r, 'b>,
        precision: Precision,
        each: impl Fn(&Piece<'b>, Val<'b>),
    ) -> Powers<'r, 'b> {
        if values.is_streamed() {
            // Once through the row: the sum shrinks whenever a greater element comes, of all lanes together.
            let [max, sum] = values.fold_pieces(
                "online",
                [f32::MIN, 0.0],
                |[max, sum], piece| {
                    let next = max.max(piece.across(piece[0], Val::max));
                    let powers = precision.exp(piece[0] - piece.splat(next));
                    [next, sum * precision.exp(max - next) + piece.across(powers, |a, b| a + b)]
                },
                |[a, a_sum], [b, b_sum]| {
                    let max = a.max(b);
                    [max, a_sum * (a - max).exp() + b_sum * (b - max).exp()]
                },
            );
            return Powers { max, sum, precision, values };
        }
        let greatest = |[a]: [Val<'b>; 1], [b]: [Val<'b>; 1]| [a.max(b)];
        let below = |[max]: [Val<'b>; 1], piece: &Piece<'b>| [max.max(piece.or(piece[0], f32::MIN))];
        let [max] = values.fold("max", [f32::MIN], below, greatest);
        let power = |piece: &Piece<'b>| precision.exp(piece[0] - piece.splat(max));
        let is_held = values.is_held();
        let values = values.replaced(power);
        let [sum] = values.fold(
            "sum",
            [0.0],
            |[sum], piece| {
                let power = if is_held { piece[0] } else { power(piece) };
                each(piece, power);
                [sum + piece.or(power, 0.0)]
            },
            |[a], [b]| [a + b],
        );
        Powers { max, sum, precision, values }
    }

    /// Does something with each piece and its powers, in any order.
    pub fn each(&self, work: impl Fn(&Piece<'b>, Val<'b>)) {
        let is_held = self.values.is_held();
        self.values.each(|piece| match is_held {
            true => work(piece, piece[0]),
            false => work(piece, self.precision.exp(piece[0] - piece.splat(self.max))),
        });
    }
}
