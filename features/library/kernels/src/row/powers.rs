//! The powers of e that softmax and the losses of rows are made of.

use vm_ir::Scalar;
use vm_ir::builder::Val;

use super::team::{across, warp};
use super::{Piece, Row, Values};

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
    /// The factor that makes them powers of what is below the row's greatest element, where each warp's are of what is below its own.
    scale: Option<Val<'b>>,
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
        // The sum of the one with the lesser maximum shrinks.
        let join = |[a, a_sum]: [Val<'b>; 2], [b, b_sum]: [Val<'b>; 2]| {
            let max = a.max(b);
            [max, a_sum * (a - max).exp() + b_sum * (b - max).exp()]
        };
        if values.is_streamed() {
            // Once through the row: the sum shrinks whenever a greater element comes, of all lanes together.
            let [max, sum] = values.fold_pieces(
                "online",
                [f32::MIN, 0.0],
                |[max, sum], piece| {
                    let next = max.max(piece.across(piece.or(piece[0], f32::MIN), Val::max));
                    let powers = piece.or(precision.exp(piece[0] - piece.splat(next)), 0.0);
                    [next, sum * precision.exp(max - next) + piece.across(powers, |a, b| a + b)]
                },
                join,
            );
            return Powers { max, sum, precision, scale: None, values };
        }
        let greatest = |[a]: [Val<'b>; 1], [b]: [Val<'b>; 1]| [a.max(b)];
        let below = |[max]: [Val<'b>; 1], piece: &Piece<'b>| [max.max(piece.or(piece[0], f32::MIN))];
        let Row { k, layout, turn, .. } = *values.row;
        let add = |[a]: [Val<'b>; 1], [b]: [Val<'b>; 1]| [a + b];
        if values.is_held() && layout.cluster > 1 {
            // A cluster meets once: each warp's powers are those of what is left below its own greatest element.
            let [of_warp] = warp(layout, values.fold(None, [f32::MIN], below, greatest), greatest);
            let values = values.replaced(|piece| precision.exp(piece[0] - piece.splat(of_warp)));
            let sum = values.fold(None, [0.0], |[sum], piece| [sum + piece.or(piece[0], 0.0)], add);
            let [sum] = warp(layout, sum, add);
            let [max, sum] = across(k, layout, turn, "powers", [f32::MIN, 0.0], [of_warp, sum], join);
            let scale = Some((of_warp - max).exp());
            return Powers { max, sum, precision, scale, values };
        }
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
            add,
        );
        Powers { max, sum, precision, scale: None, values }
    }

    /// Does something with each piece and its powers, in any order.
    pub fn each(&self, work: impl Fn(&Piece<'b>, Val<'b>)) {
        let is_held = self.values.is_held();
        self.values.each(|piece| match is_held {
            true => work(piece, self.scale.map_or(piece[0], |scale| piece[0] * piece.splat(scale))),
            false => work(piece, self.precision.exp(piece[0] - piece.splat(self.max))),
        });
    }
}
