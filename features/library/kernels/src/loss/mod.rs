//! Cross-entropy of rows of logits, and its gradient.
//!
//! Of a row `x` of `n` logits with target `t`, with `lse = ln Σ e^x[j]`, label smoothing `s` and z-loss `z`:
//!
//! | function | computes |
//! | --- | --- |
//! | [`CrossEntropy`] | `loss = lse − (1 − s) · x[t] − s · Σ x / n + z · lse²`; and, where asked for, `log_probs[j] = x[j] − lse` and `lse` |
//! | [`CrossEntropyBackward`] | `dx[j] = d · (e^(x[j] − lse) · (1 + 2 · z · lse) − (1 − s) · [j = t] − s / n)` |
//!
//! A row whose target is the ignored index has the loss 0 and the gradient 0. One whose target is otherwise below 0 or not below `n` has
//! NaN for both: nothing is read out of bounds. [`Reduction::Mean`] divides the sum of the losses by the number of targets that are not
//! ignored, so without any it is NaN; `d` is the gradient of the result, divided by the same number. Sums are in a fixed order: a call
//! on the same device gives the same bits each time. A gradient that is given each row's `lse` need not go through the row for it.

mod total;

use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, Val};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use crate::call::{Buffer, Call, CallError, Entry, Function, Operand, Workspace, kernel_name};
use crate::family::Resources;
use crate::graph::{self, NoGraph};
use crate::row::{Layout, Piece, Powers, Precision, Row, View, column, each_row, launch_rows, matrix};
use crate::strided::step;

use total::Totals;
pub use total::{LossSum, Step, Total};

/// What becomes of the rows' losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Each row keeps its own.
    None,
    /// Their sum.
    Sum,
    /// Their sum over the number of targets that are not ignored.
    Mean,
}

/// What a loss of a row depends on, besides logits and target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossOptions {
    /// The target that is ignored: -100, say.
    pub ignored: i64,
    /// Label smoothing, 0 to 1.
    pub smoothing: f32,
    /// The factor of the z-loss; 0 for none.
    pub z: f32,
    /// What becomes of the rows' losses.
    pub reduction: Reduction,
}

impl Default for LossOptions {
    fn default() -> LossOptions {
        LossOptions { ignored: -100, smoothing: 0.0, z: 0.0, reduction: Reduction::Mean }
    }
}

/// What a kernel of this family computes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The loss.
    Loss,
    /// The loss, and the logarithms of the probabilities in these elements.
    LogProbabilities(Scalar),
    /// The gradient.
    Gradient,
    /// The gradient in the place of the logits.
    GradientInPlace,
}

/// A variant of these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LossRows {
    /// How rows are divided.
    pub layout: Layout,
    /// The elements of the logits and their gradient.
    pub element: Scalar,
    /// Those of the targets: i32 or i64.
    pub target: Scalar,
    /// What is computed.
    pub pass: Pass,
    /// Are labels smoothed?
    pub smoothed: bool,
    /// Is `lse` of each row stored by the loss, or given to the gradient?
    pub log_sums: bool,
    /// Has each row a gradient of its own (a reduction of none)? Of gradients alone.
    pub own: bool,
    /// Is the gradient divided by a count? Of gradients alone.
    pub mean: bool,
}

/// A row's target.
struct Target<'b> {
    /// Its column; −1 if it is out of range.
    column: Val<'b>,
    valid: Val<'b>,
    ignored: Val<'b>,
}

impl<'b> Target<'b> {
    fn of(row: &Row<'b>, targets: View<'b>, ignored: Val<'b>) -> Target<'b> {
        let target = targets.place.at([row.number]).load().to(Scalar::I64);
        let valid = target.ge(0) & target.lt(row.columns.to(Scalar::I64));
        let column = valid.select(target, -1).to(Scalar::I32);
        Target { column, valid, ignored: target.eq(ignored) }
    }
}

impl LossRows {
    /// The launch over rows, which leaves out what has no elements.
    fn launch(
        self,
        function: &'static str,
        extents: [u64; 2],
        buffers: &[Buffer],
        options: &LossOptions,
    ) -> Result<Call, CallError> {
        launch_rows(function, Entry::CrossEntropy(self), self.layout, extents, buffers, &operands(options))
    }

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let LossRows { layout, element, target, pass, smoothed, log_sums, own, mean } = self;
        let mut name = format!("cross_entropy_{element}_{target}");
        match pass {
            Pass::Loss => {}
            Pass::LogProbabilities(element) => name.push_str(&format!("_log_probs_{element}")),
            Pass::Gradient => name.push_str("_backward"),
            Pass::GradientInPlace => name.push_str("_backward_in_place"),
        }
        for (is, word) in [(smoothed, "_smoothed"), (log_sums, "_lse"), (own, "_own"), (mean, "_mean")] {
            name.push_str(if *is { word } else { "" });
        }
        format!("{name}_{}", layout.name())
    }

    /// Its kernel. Parameters of a loss: `logits`, `targets`, `losses` (of f32), \[`log_probs`\], \[`log_sums`, of f32\]; of a gradient:
    /// `logits`, `targets`, `dloss` (of f32: one, or one for each row), \[`count`, one f32\], \[`log_sums`\], \[`dlogits`, if it is not in
    /// place\]. Then `ignored` of i64, `smoothing` and `z`.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name()));
        match self.pass {
            Pass::Loss => self.loss(k, None),
            Pass::LogProbabilities(element) => self.loss(k, Some(element)),
            Pass::Gradient | Pass::GradientInPlace => self.gradient(k),
        }
        block.kernel()
    }

    fn loss<'b>(&self, k: Builder<'b>, log_probs: Option<Scalar>) {
        let layout = self.layout;
        let logits = matrix(k, layout, "logits", self.element, Access::Read);
        let targets = column(k, "targets", self.target, Access::Read);
        let losses = column(k, "losses", Scalar::F32, Access::Write);
        let log_probs = log_probs.map(|element| matrix(k, layout, "log_probs", element, Access::Write));
        let log_sums = self.log_sums.then(|| column(k, "log_sums", Scalar::F32, Access::Write));
        let [ignored, smoothing, z] = numbers(k);
        each_row(k, layout, logits, |row| {
            let target = Target::of(row, targets, ignored);
            let values = row.hold(&[logits]);
            // Loaded behind the row, before anyone waits for that; or found among what a warp's threads hold, as its place is loaded first.
            let own = match layout.holds() && layout.team <= 32 {
                true => values.element_at(target.column),
                false => row.element(logits, target.column.max(0)),
            };
            let Powers { max, sum, .. } = Powers::of(values.clone(), Precision::of(self.element), |_, _| ());
            // What the logits are less: the greatest one, and the logarithm of the sum.
            let log = sum.log();
            let average = self.smoothed.then(|| {
                let below = |piece: &Piece<'b>| piece[0] - piece.splat(max);
                let [sum] = values.fold(
                    "below",
                    [0.0],
                    |[sum], piece| [sum + piece.or(below(piece), 0.0)],
                    |[a], [b]| [a + b],
                );
                sum / row.columns.to(Scalar::F32)
            });
            k.if_(row.leads(), || {
                let own = own - max;
                let likely = match average {
                    Some(average) => own + smoothing * (average - own),
                    None => own,
                };
                let lse = max + log;
                let loss = (log - likely) + z * lse * lse;
                let loss = target.valid.select(loss, f32::NAN);
                losses.place.at([row.number]).store(target.ignored.select(k.f32(0.0), loss));
                if let Some(log_sums) = log_sums {
                    log_sums.place.at([row.number]).store(lse);
                }
            });
            if let Some(view) = log_probs {
                values.each(|piece| piece.store(view, piece[0] - piece.splat(max) - piece.splat(log)));
            }
        });
    }

    fn gradient<'b>(&self, k: Builder<'b>) {
        let layout = self.layout;
        let in_place = self.pass == Pass::GradientInPlace;
        let access = if in_place { Access::ReadWrite } else { Access::Read };
        let logits = matrix(k, layout, "logits", self.element, access);
        let targets = column(k, "targets", self.target, Access::Read);
        let dloss = match self.own {
            true => column(k, "dloss", Scalar::F32, Access::Read),
            false => View::of(k, "dloss", ViewType::new(Scalar::F32, 1, Access::Read)),
        };
        let count = self.mean.then(|| k.view("count", Scalar::F32, 1, Access::Read));
        let log_sums = self.log_sums.then(|| column(k, "log_sums", Scalar::F32, Access::Read));
        let dlogits = match in_place {
            true => logits,
            false => matrix(k, layout, "dlogits", self.element, Access::Write),
        };
        let [ignored, smoothing, z] = numbers(k);
        each_row(k, layout, logits, |row| {
            let target = Target::of(row, targets, ignored);
            let values = row.hold(&[logits]);
            let number = if self.own { row.number } else { k.i64(0) };
            let given = dloss.place.at([number]).load();
            let given = count.map_or(given, |count| given / count.at([k.i64(0)]).load());
            let given = target.valid.select(given, f32::NAN);
            let hit = 1.0 - smoothing;
            let every = match self.smoothed {
                true => smoothing / row.columns.to(Scalar::F32),
                false => k.f32(0.0),
            };
            // Of powers that are `factor` times their share of the sum.
            let write = |piece: &Piece<'_>, power: Val<'_>, factor: Val<'_>| {
                let mut one = power * piece.splat(factor);
                let here = piece.columns().eq(piece.splat(target.column));
                one = one - here.select(piece.splat(hit), piece.constant(0.0));
                if self.smoothed {
                    one = one - piece.splat(every);
                }
                let one = one * piece.splat(given);
                piece.store(dlogits, target.ignored.select(piece.constant(0.0), one));
            };
            let precision = Precision::of(self.element);
            let factor = |lse: Val<'b>| (z * 2.0).fma(lse, 1.0);
            if let Some(log_sums) = log_sums {
                let lse = row.load(log_sums);
                let factor = factor(lse);
                values.each(|piece| write(piece, precision.exp(piece[0] - piece.splat(lse)), factor));
            } else {
                let powers = Powers::of(values, precision, |_, _| ());
                let factor = factor(powers.max + powers.sum.log()) / powers.sum;
                powers.each(|piece, power| write(piece, power, factor));
            }
        });
    }
}

fn numbers<'b>(k: Builder<'b>) -> [Val<'b>; 3] {
    [k.scalar("ignored", Type::I64), k.scalar("smoothing", Type::F32), k.scalar("z", Type::F32)]
}

/// Cross-entropy of each row. Buffers: `logits` (`rows` × `columns`), `targets` (`rows`), `loss` (of f32: one, or `rows` without a
/// reduction), \[`log_probs`\] (`rows` × `columns`) and \[`log_sums`\] (of f32, `rows`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Rows.
    pub rows: u64,
    /// Logits of a row: up to [`MAX_COLUMNS`](crate::row::MAX_COLUMNS).
    pub columns: u64,
    /// The elements of the logits: f32, bf16 or f16.
    pub element: Scalar,
    /// Those of the targets: i32 or i64.
    pub target: Scalar,
    /// Those of the logarithms of the probabilities, if they are written.
    pub log_probs: Option<Scalar>,
    /// Is `lse` of each row kept, for the gradient?
    pub log_sums: bool,
    /// What the loss depends on besides.
    pub options: LossOptions,
    /// Bytes to whose multiples all buffers are aligned; 16 or more is fastest.
    pub align: u32,
}

impl CrossEntropy {
    /// Of aligned buffers and targets of i64, the losses' mean.
    pub fn of(rows: u64, columns: u64, element: Scalar) -> CrossEntropy {
        let options = LossOptions::default();
        let target = Scalar::I64;
        CrossEntropy { rows, columns, element, target, log_probs: None, log_sums: false, options, align: 16 }
    }
}

/// The numbers of the kernels.
fn operands(options: &LossOptions) -> [Operand; 3] {
    [Operand::i64(options.ignored), Operand::f32(options.smoothing), Operand::f32(options.z)]
}

fn checked_target(target: Scalar) -> Result<(), CallError> {
    match target {
        Scalar::I32 | Scalar::I64 => Ok(()),
        other => Err(CallError::Unsupported {
            function: "cross_entropy",
            what: format!("targets of {other}; there are i32 and i64"),
        }),
    }
}

impl Function for CrossEntropy {
    fn buffers(&self) -> Vec<Buffer> {
        let CrossEntropy { rows, columns, element, target, log_probs, log_sums, options, .. } = *self;
        let losses = if options.reduction == Reduction::None { rows } else { 1 };
        let mut all = vec![
            Buffer::new("logits", element, &[rows, columns], Access::Read),
            Buffer::new("targets", target, &[rows], Access::Read),
            Buffer::new("loss", Scalar::F32, &[losses], Access::Write),
        ];
        all.extend(
            log_probs.map(|element| Buffer::new("log_probs", element, &[rows, columns], Access::Write)),
        );
        all.extend(log_sums.then(|| Buffer::new("log_sums", Scalar::F32, &[rows], Access::Write)));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::loss::forward(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launches(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launches(step(buffers), resources)
    }
}

impl CrossEntropy {
    /// The launches, of rows that begin at multiples of `step` elements; of dense ones with 0.
    fn launches(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        let CrossEntropy { rows, columns, element, target, log_probs, log_sums, options, align } = *self;
        checked_target(target)?;
        if rows > 0 && columns == 0 {
            let what = "rows of no columns have no loss; give at least 1".to_owned();
            return Err(CallError::Unsupported { function: "cross_entropy", what });
        }
        let elements: Vec<Scalar> = [element].into_iter().chain(log_probs).collect();
        let smoothed = options.smoothing != 0.0;
        let held = 1 + u32::from(smoothed || log_probs.is_some());
        let layout = Layout::packed([rows, columns], step, &elements, align, held, resources);
        let layout = match log_probs.is_none() && !smoothed {
            true => layout.read_once([rows, columns]),
            false => layout,
        };
        let pass = log_probs.map_or(Pass::Loss, Pass::LogProbabilities);
        let entry = LossRows { layout, element, target, pass, smoothed, log_sums, own: false, mean: false };
        let mut call = entry.launch("cross_entropy", [rows, columns], &self.buffers(), &options)?;
        let kind = match options.reduction {
            Reduction::None => return Ok(call),
            Reduction::Sum => Total::Sum,
            Reduction::Mean => Total::Mean,
        };
        let Some(launch) = call.launches.first_mut() else { return Ok(call) };
        let mut workspace = Workspace::default();
        let losses = workspace.take(Scalar::F32, &[rows]);
        launch.operands[2] = losses.clone();
        let result = Operand::whole(2, Scalar::F32, &[1]);
        let totals = Totals { kind, target, rows, align, ignored: options.ignored };
        call.launches.extend(totals.launches(Some(losses), result, &mut workspace, resources)?);
        call.workspace = workspace.bytes();
        Ok(call)
    }
}

/// The gradient of a cross-entropy. Buffers: `logits` (`rows` × `columns`; written if it is in place), `targets` (`rows`), `dloss`
/// (of f32: one, or `rows` without a reduction), \[`log_sums`\] (of f32, `rows`: what the loss kept) and, if it is not in place, `dlogits`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyBackward {
    /// Rows.
    pub rows: u64,
    /// Logits of a row.
    pub columns: u64,
    /// The elements of the logits and of their gradient.
    pub element: Scalar,
    /// Those of the targets: i32 or i64.
    pub target: Scalar,
    /// Does the gradient replace the logits?
    pub in_place: bool,
    /// Is `lse` of each row given? Else it is computed once more.
    pub log_sums: bool,
    /// What the loss depends on besides.
    pub options: LossOptions,
    /// Bytes to whose multiples all buffers are aligned.
    pub align: u32,
}

impl Function for CrossEntropyBackward {
    fn buffers(&self) -> Vec<Buffer> {
        let CrossEntropyBackward { rows, columns, element, target, in_place, log_sums, options, .. } = *self;
        let losses = if options.reduction == Reduction::None { rows } else { 1 };
        let access = if in_place { Access::ReadWrite } else { Access::Read };
        let mut all = vec![
            Buffer::new("logits", element, &[rows, columns], access),
            Buffer::new("targets", target, &[rows], Access::Read),
            Buffer::new("dloss", Scalar::F32, &[losses], Access::Read),
        ];
        all.extend(log_sums.then(|| Buffer::new("log_sums", Scalar::F32, &[rows], Access::Read)));
        all.extend((!in_place).then(|| Buffer::new("dlogits", element, &[rows, columns], Access::Write)));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::loss::backward(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launches(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launches(step(buffers), resources)
    }
}

impl CrossEntropyBackward {
    /// The launches, of rows that begin at multiples of `step` elements; of dense ones with 0.
    fn launches(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        let CrossEntropyBackward { rows, columns, element, target, in_place, log_sums, options, align } =
            *self;
        checked_target(target)?;
        let smoothed = options.smoothing != 0.0;
        let held = if smoothed { 3 } else { 1 };
        let layout = Layout::packed([rows, columns], step, &[element], align, held, resources);
        let pass = if in_place { Pass::GradientInPlace } else { Pass::Gradient };
        let (own, mean) = (options.reduction == Reduction::None, options.reduction == Reduction::Mean);
        let entry = LossRows { layout, element, target, pass, smoothed, log_sums, own, mean };
        let mut call = entry.launch("cross_entropy_backward", [rows, columns], &self.buffers(), &options)?;
        if let (true, Some(launch)) = (mean, call.launches.first_mut()) {
            let mut workspace = Workspace::default();
            let count = workspace.take(Scalar::F32, &[1]);
            launch.operands.insert(3, count.clone());
            let totals = Totals { kind: Total::Count, target, rows, align, ignored: options.ignored };
            let counting = totals.launches(None, count, &mut workspace, resources)?;
            call.launches.splice(..0, counting);
            call.workspace = workspace.bytes();
        }
        Ok(call)
    }
}
