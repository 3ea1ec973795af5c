//! Softmax of short rows and its k greatest, as a router chooses experts.
//!
//! A row is held by up to 32 lanes of a warp, so that a warp has several short ones. Each of the k is the greatest of what lies below
//! the one before.

use super::numbers::{NONE, Nan, pair, unpair, value};
use vm_ir::builder::{BuildError, IRBlock, Val};
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// A variant. Parameters: `input` `[rows, columns]`, `weights` and `indices` `[rows, k]`, `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Router {
    /// What the input and the weights hold: f32, bf16 or f16.
    pub element: Scalar,
    /// Lanes that have a row: a power of two up to 32.
    pub lanes: u32,
    /// Elements that a lane holds.
    pub held: u32,
    /// Are the weights divided by their sum?
    pub renormalised: bool,
}

impl Router {
    /// The most columns of a row.
    pub const COLUMNS: u32 = 1024;
    /// Threads of a block.
    pub const THREADS: u32 = 128;

    /// For rows of so many columns.
    pub fn of(element: Scalar, columns: u32, renormalised: bool) -> Router {
        let lanes = columns.clamp(1, 32).next_power_of_two();
        Router { element, lanes, held: columns.div_ceil(lanes).next_power_of_two(), renormalised }
    }

    /// Rows of a block.
    pub fn rows(&self) -> u32 {
        Self::THREADS / self.lanes
    }

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let weights = if self.renormalised { "renormalised" } else { "plain" };
        format!("softmax_topk_{}_{}x{}_{weights}", self.element, self.lanes, self.held)
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([Self::THREADS, 1, 1]);
        let input = k.view("input", self.element, 2, Access::Read);
        let weights = k.view("weights", self.element, 2, Access::Write);
        let indices = k.view("indices", Scalar::I32, 2, Access::Write);
        let wanted = k.scalar_in("k", Type::I32, 1, Self::COLUMNS.into());
        let lane = k.thread_id(Axis::X) & (self.lanes as i32 - 1);
        let row = k.global_id(Axis::X) >> self.lanes.ilog2();
        let is_row = row.lt(input.extent(0));
        let steps = || (0..self.held).map(|step| lane + step * self.lanes);
        let across = |all, both: &dyn Fn(_, _) -> _| across(self.lanes, all, both);
        let columns: Vec<_> = steps().collect();
        let loaded: Vec<_> = columns
            .iter()
            .map(|column| {
                let inside = is_row & column.to(Scalar::I64).lt(input.extent(1));
                let load = || input.at([row, *column]).load().to(Scalar::F32);
                (k.if_else(inside, load, || k.f32(f32::NEG_INFINITY)), inside)
            })
            .collect();
        let pairs: Vec<_> = loaded
            .iter()
            .zip(&columns)
            .map(|((x, inside), column)| inside.select(pair(Nan::Greatest.key(*x), *column), k.i64(NONE)))
            .collect();
        let greatest = loaded.iter().map(|(x, _)| *x).reduce(|a, b| a.maximum(b));
        let max = across(greatest.unwrap_or(k.f32(0.0)), &|a, b| a.maximum(b));
        // The one of each rank is held by the lane that writes it.
        let none = vec![k.i64(NONE); self.held as usize];
        let (chosen, _) = k.range(k.i32(0), wanted).fold((none, k.i64(i64::MAX)), |rank, (chosen, last)| {
            let below = pairs.iter().map(|pair| pair.lt(last).select(*pair, k.i64(NONE)));
            let best = across(below.reduce(|a, b| a.max(b)).unwrap_or(last), &|a, b| a.max(b));
            let chosen = chosen.iter().zip(steps()).map(|(so_far, at)| rank.eq(at).select(best, *so_far));
            (chosen.collect::<Vec<_>>(), best)
        });
        let zero = k.f32(0.0);
        let powers: Vec<_> = chosen
            .iter()
            .zip(steps())
            .map(|(pair, rank)| {
                let (key, column) = unpair(*pair);
                let power = (value(key) - max).exp();
                (rank, rank.lt(wanted).select(power, zero), column)
            })
            .collect();
        let terms: Vec<_> = if self.renormalised {
            powers.iter().map(|(_, power, _)| *power).collect()
        } else {
            loaded.iter().map(|(x, inside)| inside.select((*x - max).exp(), zero)).collect()
        };
        let sum = across(terms.into_iter().reduce(|a, b| a + b).unwrap_or(zero), &|a, b| a + b);
        for (rank, power, column) in powers {
            k.if_(is_row & rank.lt(wanted), || {
                weights.at([row, rank]).store((power / sum).to(self.element));
                indices.at([row, rank]).store(column);
            });
        }
        block.kernel()
    }
}

/// What the lanes of a row have, as one.
fn across<'b>(lanes: u32, mut all: Val<'b>, both: &dyn Fn(Val<'b>, Val<'b>) -> Val<'b>) -> Val<'b> {
    let mut mask = lanes / 2;
    while mask > 0 {
        all = both(all, all.shuffle_xor(mask));
        mask /= 2;
    }
    all
}
