//! Forward.

use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, Val};
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use super::Norm;
use crate::call::{Buffer, Call, CallError, Entry, Function, Operand, kernel_name};
use crate::family::Resources;
use crate::graph::{self, NoGraph};
use crate::row::{Layout, Piece, Row, Values, column, each_row, launch_rows, matrix, row};
use crate::strided::step;

/// A variant of the norm's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormRows {
    /// How rows are divided.
    pub layout: Layout,
    /// Which norm.
    pub norm: Norm,
    /// The elements of `x`, `residual` and `sum`.
    pub input: Scalar,
    /// Those of `weight` and `bias`.
    pub weight: Scalar,
    /// Those of `y`.
    pub output: Scalar,
    /// Is a residual added?
    pub residual: bool,
    /// Is a bias added?
    pub bias: bool,
    /// Are mean and `r` stored?
    pub statistics: bool,
}

impl NormRows {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let NormRows { layout, norm, input, weight, output, residual, bias, statistics } = self;
        let mut name = format!("{}_{input}_{weight}_{output}", norm.name());
        for (is, word) in [(residual, "_residual"), (bias, "_bias"), (statistics, "_statistics")] {
            name.push_str(if *is { word } else { "" });
        }
        format!("{name}_{}", layout.name())
    }

    /// Its kernel. Parameters: the buffers of [`NormForward`] in their order, and `epsilon`.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        self.build(block.builder());
        block.kernel()
    }

    fn build<'b>(&self, k: Builder<'b>) {
        let NormRows { layout, norm, input, output, .. } = *self;
        k.name(&kernel_name(&self.name()));
        let x = matrix(k, layout, "x", input, Access::Read);
        let residual = self.residual.then(|| matrix(k, layout, "residual", input, Access::Read));
        let weight = row(k, layout, "weight", self.weight, Access::Read);
        let bias = self.bias.then(|| row(k, layout, "bias", self.weight, Access::Read));
        let y = matrix(k, layout, "y", output, Access::Write);
        let sum = self.residual.then(|| matrix(k, layout, "sum", input, Access::Write));
        let mean =
            (self.statistics && norm == Norm::Layer).then(|| column(k, "mean", Scalar::F32, Access::Write));
        let rstd = self.statistics.then(|| column(k, "rstd", Scalar::F32, Access::Write));
        let epsilon = k.scalar("epsilon", Type::F32);
        each_row(k, layout, x, |row| {
            let views: Vec<_> = [x].into_iter().chain(residual).collect();
            let values = row.hold(&views);
            let h = |piece: &Piece<'b>| match residual {
                Some(_) => (piece[0] + piece[1]).to(input).to(Scalar::F32),
                None => piece[0],
            };
            // Written first: the memory is busy while the row is combined.
            if let Some(sum) = sum.filter(|_| layout.holds()) {
                values.each(|piece| piece.store(sum, h(piece)));
            }
            let (of_mean, variance) = moments(norm, layout, row, &values, h);
            let of_rstd = (variance + epsilon).rsqrt();
            mean.into_iter().for_each(|view| row.store(view, of_mean.unwrap_or(of_rstd)));
            rstd.into_iter().for_each(|view| row.store(view, of_rstd));
            values.each(|piece| {
                let h = h(piece);
                if let Some(sum) = sum.filter(|_| !layout.holds()) {
                    piece.store(sum, h);
                }
                let centred = of_mean.map_or(h, |mean| h - piece.splat(mean));
                let scaled = centred * piece.splat(of_rstd);
                let weight = piece.of_row(weight);
                let result = match bias {
                    Some(bias) => scaled.fma(weight, piece.of_row(bias)),
                    None => scaled * weight,
                };
                piece.store(y, result);
            });
        });
    }
}

/// The mean of a layer norm, and the mean square or the variance.
fn moments<'b>(
    norm: Norm,
    layout: Layout,
    row: &Row<'b>,
    values: &Values<'_, 'b>,
    h: impl Fn(&Piece<'b>) -> Val<'b>,
) -> (Option<Val<'b>>, Val<'b>) {
    let add = |[a]: [Val<'b>; 1], [b]: [Val<'b>; 1]| [a + b];
    let n = row.columns.to(Scalar::F32);
    if norm == Norm::Rms {
        let squares = |[sum]: [Val<'b>; 1], piece: &Piece<'b>| {
            let h = piece.or(h(piece), 0.0);
            [h.fma(h, sum)]
        };
        let [sum] = values.fold("squares", [0.0], squares, add);
        return (None, sum / n);
    }
    if !layout.holds() && !layout.tail {
        // Once through the row (Welford's method; Chan, Golub and LeVeque's to merge).
        let [_, mean, squares] = values.fold(
            "moments",
            [0.0; 3],
            |[count, mean, squares], piece| {
                let h = h(piece);
                let (count, less) = (count + piece.constant(1.0), h - mean);
                let mean = mean + less / count;
                [count, mean, less.fma(h - mean, squares)]
            },
            |[n_a, mean_a, squares_a], [n_b, mean_b, squares_b]| {
                let (n, less) = (n_a + n_b, mean_b - mean_a);
                let part = n_b / n.max(1.0);
                let between = less * less * n_a * part;
                [n, less.fma(part, mean_a), squares_a + squares_b + between]
            },
        );
        // Two states merge to others in the other order, by rounding: all take one lane's.
        return (Some(mean.shuffle(0)), squares.shuffle(0) / n);
    }
    let [sum] = values.fold("mean", [0.0], |[sum], piece| [sum + piece.or(h(piece), 0.0)], add);
    let mean = sum / n;
    let squares = |[sum]: [Val<'b>; 1], piece: &Piece<'b>| {
        let less = piece.or(h(piece) - piece.splat(mean), 0.0);
        [less.fma(less, sum)]
    };
    let [squares] = values.fold("variance", [0.0], squares, add);
    (Some(mean), squares / n)
}

/// Each row normalised. Buffers, in order, those in brackets where they are asked for: `x`, \[`residual`\], `weight`, \[`bias`\], `y`,
/// \[`sum`, of `x` and the residual\], \[`mean`, of a layer norm\], \[`rstd`, which is `r`\]. Matrices are `rows` × `columns`, `weight`
/// and `bias` have an element for each column, `mean` and `rstd` an f32 for each row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormForward {
    /// Which norm.
    pub norm: Norm,
    /// Rows.
    pub rows: u64,
    /// Elements of a row: up to [`MAX_COLUMNS`](crate::row::MAX_COLUMNS).
    pub columns: u64,
    /// ε.
    pub epsilon: f32,
    /// The elements of `x`, `residual` and `sum`: f32, bf16 or f16.
    pub input: Scalar,
    /// Those of `weight` and `bias`.
    pub weight: Scalar,
    /// Those of `y`.
    pub output: Scalar,
    /// Is a residual added, and the sum written?
    pub residual: bool,
    /// Is a bias added?
    pub bias: bool,
    /// Are mean and `r` stored, as the gradient needs them?
    pub statistics: bool,
    /// Bytes to whose multiples all buffers are aligned; 16 or more is fastest.
    pub align: u32,
}

impl NormForward {
    /// Of one type, of aligned buffers, without residual, bias and statistics.
    pub fn of(norm: Norm, rows: u64, columns: u64, element: Scalar, epsilon: f32) -> NormForward {
        let (residual, bias, statistics) = (false, false, false);
        let (input, weight, output) = (element, element, element);
        NormForward {
            norm,
            rows,
            columns,
            epsilon,
            input,
            weight,
            output,
            residual,
            bias,
            statistics,
            align: 16,
        }
    }
}

impl Function for NormForward {
    fn buffers(&self) -> Vec<Buffer> {
        let NormForward { rows, columns, input, weight, output, .. } = *self;
        let matrix = |name, element, access| Buffer::new(name, element, &[rows, columns], access);
        let number = |name| Buffer::new(name, Scalar::F32, &[rows], Access::Write);
        let mut all = vec![matrix("x", input, Access::Read)];
        all.extend(self.residual.then(|| matrix("residual", input, Access::Read)));
        all.push(Buffer::new("weight", weight, &[columns], Access::Read));
        all.extend(self.bias.then(|| Buffer::new("bias", weight, &[columns], Access::Read)));
        all.push(matrix("y", output, Access::Write));
        all.extend(self.residual.then(|| matrix("sum", input, Access::Write)));
        all.extend((self.statistics && self.norm == Norm::Layer).then(|| number("mean")));
        all.extend(self.statistics.then(|| number("rstd")));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::norm::forward(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launch(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launch(step(buffers), resources)
    }
}

impl NormForward {
    /// The launch, of rows that begin at multiples of `step` elements; of dense ones with 0.
    fn launch(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        let NormForward { norm, rows, columns, input, weight, output, residual, bias, statistics, .. } =
            *self;
        let elements = [input, weight, output];
        let held = 1 + u32::from(residual);
        let layout = Layout::packed([rows, columns], step, &elements, self.align, held, resources);
        let entry = Entry::Norm(NormRows { layout, norm, input, weight, output, residual, bias, statistics });
        let numbers = [Operand::f32(self.epsilon)];
        launch_rows(norm.name(), entry, layout, [rows, columns], &self.buffers(), &numbers)
    }
}
