//! All rows' losses as one number.

use vm_ir::builder::{BuildError, Builder, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use crate::call::{CallError, Entry, Launch, Operand, Region, Workspace, kernel_name};
use crate::family::{Kind, Resources};
use crate::row::{Layout, each_row, grid_of, matrix, team};

/// A variant of the kernel that makes one number of all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LossSum {
    /// How the rows' numbers, one row of them, are divided.
    pub layout: Layout,
    /// The elements of the targets.
    pub target: Scalar,
    /// Which number.
    pub kind: Total,
    /// Of which rows.
    pub step: Step,
}

/// What a launch adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// All rows, by one block.
    All,
    /// Of each block its part of the rows: [`LossSum::PART`].
    Parts,
    /// What blocks have added up.
    Join,
}

/// What becomes of all rows' losses and targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Total {
    /// The sum of the losses.
    Sum,
    /// That over the number of targets that are not ignored.
    Mean,
    /// That number.
    Count,
}

impl Total {
    fn of<'b>(self, sum: Val<'b>, count: Val<'b>) -> Val<'b> {
        match self {
            Total::Sum => sum,
            Total::Mean => sum / count,
            Total::Count => count,
        }
    }
}

impl LossSum {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let LossSum { layout, target, kind, step } = self;
        let step = match step {
            Step::All => "",
            Step::Parts => "_parts",
            Step::Join => "_join",
        };
        let kind = match kind {
            Total::Sum => "sum",
            Total::Mean => "mean",
            Total::Count => "count",
        };
        format!("losses_{kind}_{target}{step}_{}", layout.name())
    }

    /// Rows that a block adds up where several do.
    pub const PART: u32 = 4096;

    /// Its kernel. Parameters: \[`losses`\], `targets`, each as one row, `total` (one f32), and `ignored` of i64. Of parts: \[`losses`\] and
    /// `targets`, `[rows]`, `sums` and `counts` (of f32, one for each block), and `ignored`; to join them `sums`, `counts` and `total`.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let LossSum { layout, target, kind, step } = *self;
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name()));
        match step {
            Step::All => {}
            Step::Parts => {
                self.parts(k);
                return block.kernel();
            }
            Step::Join => {
                self.join(k);
                return block.kernel();
            }
        }
        let losses = (kind != Total::Count).then(|| matrix(k, layout, "losses", Scalar::F32, Access::Read));
        let targets = matrix(k, layout, "targets", target, Access::Read);
        let total = k.view_of("total", ViewType::new(Scalar::F32, 1, Access::Write));
        let ignored = k.scalar("ignored", Type::I64);
        each_row(k, layout, targets, |row| {
            let [sum, count] = row.hold(&[]).fold(
                "totals",
                [0.0, 0.0],
                |[sum, count], piece| {
                    let sum = match losses {
                        Some(losses) => sum + piece.or(piece.of_matrix(losses, Cache::Normal), 0.0),
                        None => sum,
                    };
                    let target = piece.raw(targets, Cache::Normal).to(Scalar::I64);
                    let ignored = target.eq(piece.splat(ignored));
                    let one = ignored.select(piece.constant(0.0), piece.constant(1.0));
                    [sum, count + piece.or(one, 0.0)]
                },
                |[a, c], [b, d]| [a + b, c + d],
            );
            k.if_(row.leads(), || total.at([k.i64(0)]).store(kind.of(sum, count)));
        });
        block.kernel()
    }

    /// A block's part of the rows.
    fn parts(&self, k: Builder<'_>) {
        let losses = (self.kind != Total::Count).then(|| k.view("losses", Scalar::F32, 1, Access::Read));
        let targets = k.view("targets", self.target, 1, Access::Read);
        let results = ["sums", "counts"].map(|name| k.view(name, Scalar::F32, 1, Access::Write));
        let ignored = k.scalar("ignored", Type::I64);
        let threads = self.layout.threads;
        k.block_size([threads.into(), 1, 1]);
        let (thread, number) = (k.thread_id(Axis::X).to(Scalar::I64), k.block_id(Axis::X).to(Scalar::I64));
        let first = number * i64::from(Self::PART);
        let rows = k.range(first + thread, (first + i64::from(Self::PART)).min(targets.extent(0)));
        let state = rows.step(u32::from(threads)).unroll(4).fold([k.f32(0.0); 2], |row, [sum, count]| {
            let loss = losses.map_or(k.f32(0.0), |losses| losses.at([row]).load());
            let is_one = targets.at([row]).load().to(Scalar::I64).ne(ignored);
            [sum + loss, count + is_one.select(k.f32(1.0), k.f32(0.0))]
        });
        let state = team(k, self.layout, None, "totals", [0.0; 2], state, |[a, c], [b, d]| [a + b, c + d]);
        k.if_(thread.eq(0), || {
            results.iter().zip(state).for_each(|(view, number)| view.at([k.block_id(Axis::X)]).store(number));
        });
    }

    /// All parts, by one block.
    fn join(&self, k: Builder<'_>) {
        let of = ["sums", "counts"].map(|name| k.view(name, Scalar::F32, 1, Access::Read));
        let total = k.view_of("total", ViewType::new(Scalar::F32, 1, Access::Write));
        let threads = self.layout.threads;
        k.block_size([threads.into(), 1, 1]);
        let thread = k.thread_id(Axis::X).to(Scalar::I64);
        let parts = k.range(thread, of[0].extent(0)).step(u32::from(threads)).unroll(4);
        let state = parts.fold([k.f32(0.0); 2], |part, [sum, count]| {
            [sum + of[0].at([part]).load(), count + of[1].at([part]).load()]
        });
        let [sum, count] =
            team(k, self.layout, None, "totals", [0.0; 2], state, |[a, c], [b, d]| [a + b, c + d]);
        k.if_(thread.eq(0), || total.at([k.i64(0)]).store(self.kind.of(sum, count)));
    }
}

/// All rows, of which a number is made.
pub(super) struct Totals {
    pub(super) kind: Total,
    pub(super) target: Scalar,
    pub(super) rows: u64,
    pub(super) align: u32,
    pub(super) ignored: i64,
}

impl Totals {
    /// The launches, of losses in the workspace, if the number is of these, and the call's targets.
    pub(super) fn launches(
        &self,
        losses: Option<Operand>,
        result: Operand,
        workspace: &mut Workspace,
        resources: &Resources,
    ) -> Result<Vec<Launch>, CallError> {
        let Totals { kind, target, rows, align, ignored } = *self;
        let part = u64::from(LossSum::PART);
        let ignored = Operand::i64(ignored);
        if resources.kind == Kind::Cpu || rows <= 2 * part {
            let layout = Layout::of(rows, &[Scalar::F32, target], align, 2, resources);
            let grid = grid_of("cross_entropy", layout, [1, rows])?.unwrap_or([1, 1, 1]);
            let as_row = |operand| match operand {
                Operand::Workspace(region) => {
                    Operand::Workspace(Region::dense(Scalar::F32, region.offset, &[1, rows]))
                }
                other => other,
            };
            let mut operands: Vec<_> = losses.map(as_row).into_iter().collect();
            operands.extend([Operand::whole(1, target, &[1, rows]), result, ignored]);
            let entry = Entry::Losses(LossSum { layout, target, kind, step: Step::All });
            return Ok(vec![Launch { entry, grid, operands }]);
        }
        let blocks = rows.div_ceil(part);
        let layout =
            Layout { threads: 256, team: 256, cluster: 1, lanes: 1, vectors: 0, tail: false, shifted: false };
        let sums = [(); 2].map(|()| workspace.take(Scalar::F32, &[blocks]));
        let entry = |step| Entry::Losses(LossSum { layout, target, kind, step });
        let mut operands: Vec<_> = losses.into_iter().collect();
        operands.push(Operand::whole(1, target, &[rows]));
        operands.extend(sums.iter().cloned());
        operands.push(ignored);
        let first = Launch { entry: entry(Step::Parts), grid: [blocks as u32, 1, 1], operands };
        let operands = sums.into_iter().chain([result]).collect();
        Ok(vec![first, Launch { entry: entry(Step::Join), grid: [1, 1, 1], operands }])
    }
}
