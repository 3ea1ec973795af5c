//! Softmax of rows, its logarithm, and their gradients.
//!
//! | function | computes, of a row |
//! | --- | --- |
//! | [`Softmax`] | `y[j] = e^x[j] / Σ e^x`; with `log`, `y[j] = x[j] − ln Σ e^x` |
//! | [`SoftmaxBackward`] | `dx[j] = y[j] · (dy[j] − Σ dy · y)`; with `log`, `dx[j] = dy[j] − e^y[j] · Σ dy` |
//!
//! Powers are taken of what is left below the row's greatest element. A row with a NaN or +∞, or of −∞ alone, becomes NaN.

use vm_graph::ValidGraph;
use vm_ir::builder::BuildError;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar};

use crate::call::{Buffer, Call, CallError, Entry, Function, kernel_name};
use crate::family::Resources;
use crate::graph::{self, NoGraph};
use crate::row::{Layout, Powers, Precision, each_row, launch_rows, matrix};
use crate::strided::step;

/// A variant of these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SoftmaxRows {
    /// How rows are divided.
    pub layout: Layout,
    /// The elements of `x`, or of `y` and `dy`.
    pub input: Scalar,
    /// Those of `y`, or of `dx`.
    pub output: Scalar,
    /// The logarithm?
    pub log: bool,
    /// The gradient?
    pub backward: bool,
}

impl SoftmaxRows {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let SoftmaxRows { layout, input, output, log, backward } = self;
        let log = if *log { "log_" } else { "" };
        let backward = if *backward { "_backward" } else { "" };
        format!("{log}softmax{backward}_{input}_{output}_{}", layout.name())
    }

    /// Its kernel. Parameters: `x` and `y`; of the gradient `y`, `dy` and `dx`.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let SoftmaxRows { layout, input, output, log, backward } = *self;
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name()));
        if backward {
            let y = matrix(k, layout, "y", input, Access::Read);
            let dy = matrix(k, layout, "dy", input, Access::Read);
            let dx = matrix(k, layout, "dx", output, Access::Write);
            each_row(k, layout, y, |row| {
                let values = row.hold(&[y, dy]);
                let [sum] = values.fold(
                    "sum",
                    [0.0],
                    |[sum], piece| {
                        let one = if log { piece[1] } else { piece[0] * piece[1] };
                        [sum + piece.or(one, 0.0)]
                    },
                    |[a], [b]| [a + b],
                );
                values.each(|piece| {
                    let sum = piece.splat(sum);
                    let one = match log {
                        true => piece[1] - Precision::of(output).exp(piece[0]) * sum,
                        false => piece[0] * (piece[1] - sum),
                    };
                    piece.store(dx, one);
                });
            });
            return block.kernel();
        }
        // A processor keeps the powers in the result until it knows their sum.
        let keeps = layout.tail && output == Scalar::F32 && !log;
        let x = matrix(k, layout, "x", input, Access::Read);
        let y = matrix(k, layout, "y", output, if keeps { Access::ReadWrite } else { Access::Write });
        each_row(k, layout, x, |row| {
            let precision = if output == Scalar::F32 { Precision::of(input) } else { Precision::Rough };
            let values = row.hold(&[x]);
            let elements = values.clone();
            let powers = Powers::of(values, precision, |piece, power| {
                if keeps {
                    piece.store(y, power);
                }
            });
            let (max, factor) = (powers.max, 1.0 / powers.sum);
            if log {
                let less = powers.sum.log();
                elements.each(|piece| piece.store(y, piece[0] - piece.splat(max) - piece.splat(less)));
            } else if keeps {
                row.hold(&[y]).each(|piece| piece.store(y, piece[0] * piece.splat(factor)));
            } else {
                powers.each(|piece, power| piece.store(y, power * piece.splat(factor)));
            }
        });
        block.kernel()
    }
}

/// Softmax of each row. Buffers: `x` and `y`, each `rows` × `columns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Softmax {
    /// Rows.
    pub rows: u64,
    /// Elements of a row: up to [`MAX_COLUMNS`](crate::row::MAX_COLUMNS).
    pub columns: u64,
    /// The elements of `x`: f32, bf16 or f16.
    pub input: Scalar,
    /// Those of `y`.
    pub output: Scalar,
    /// Its logarithm instead?
    pub log: bool,
    /// Bytes to whose multiples all buffers are aligned; 16 or more is fastest.
    pub align: u32,
}

impl Softmax {
    /// Of one type, of aligned buffers.
    pub fn of(rows: u64, columns: u64, element: Scalar) -> Softmax {
        Softmax { rows, columns, input: element, output: element, log: false, align: 16 }
    }
}

impl Function for Softmax {
    fn buffers(&self) -> Vec<Buffer> {
        let extents = [self.rows, self.columns];
        // Processors write the result twice, and read it in between.
        vec![
            Buffer::new("x", self.input, &extents, Access::Read),
            Buffer::new("y", self.output, &extents, Access::ReadWrite),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::softmax::forward(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launch(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launch(step(buffers), resources)
    }
}

impl Softmax {
    /// The launch, of rows that begin at multiples of `step` elements; of dense ones with 0.
    fn launch(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        let Softmax { rows, columns, input, output, log, align } = *self;
        let layout = Layout::packed([rows, columns], step, &[input, output], align, 1, resources);
        let entry = Entry::Softmax(SoftmaxRows { layout, input, output, log, backward: false });
        launch_rows("softmax", entry, layout, [rows, columns], &self.buffers(), &[])
    }
}

/// The gradient of a softmax by its result. Buffers: `y`, `dy` and `dx`, each `rows` × `columns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftmaxBackward {
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// The elements of `y` and `dy`.
    pub input: Scalar,
    /// Those of `dx`.
    pub output: Scalar,
    /// Of its logarithm instead?
    pub log: bool,
    /// Bytes to whose multiples all buffers are aligned.
    pub align: u32,
}

impl Function for SoftmaxBackward {
    fn buffers(&self) -> Vec<Buffer> {
        let extents = [self.rows, self.columns];
        vec![
            Buffer::new("y", self.input, &extents, Access::Read),
            Buffer::new("dy", self.input, &extents, Access::Read),
            Buffer::new("dx", self.output, &extents, Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::softmax::backward(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launch(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launch(step(buffers), resources)
    }
}

impl SoftmaxBackward {
    /// The launch, of rows that begin at multiples of `step` elements; of dense ones with 0.
    fn launch(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        let SoftmaxBackward { rows, columns, input, output, log, align } = *self;
        let layout = Layout::packed([rows, columns], step, &[input, output], align, 2, resources);
        let entry = Entry::Softmax(SoftmaxRows { layout, input, output, log, backward: true });
        launch_rows("softmax_backward", entry, layout, [rows, columns], &self.buffers(), &[])
    }
}
