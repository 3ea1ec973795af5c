//! Rows that teams take in turns.

use vm_ir::Scalar;
use vm_ir::builder::{Builder, Val};
use vm_ir::op::Axis;

use super::{Extents, Layout, Row, View};

/// The most rows that a cluster takes one after the other.
pub const MAX_TURNS: i64 = 4096;

/// The turns of a team: its rows are those whose number is the team's but for multiples of how many teams there are, in clusters at most
/// [`MAX_TURNS`] of them.
#[derive(Debug)]
pub struct Turns<'b> {
    k: Builder<'b>,
    layout: Layout,
    extents: Extents<'b>,
    /// Which block or cluster this is, of i64.
    pub part: Val<'b>,
    /// How many of them there are, of i64.
    pub parts: Val<'b>,
}

impl<'b> Turns<'b> {
    /// Those of the rows of the matrix `of`, in blocks and clusters of the layout's, which become the kernel's. In a layout that is shifted
    /// it has the parameters of rows and columns here.
    #[track_caller]
    pub fn of(k: Builder<'b>, layout: Layout, of: View<'b>) -> Turns<'b> {
        let cluster = i32::from(layout.cluster);
        k.block_size([layout.threads.into(), 1, 1]).cluster_size(cluster.unsigned_abs());
        let extents = Extents::of(k, layout, of);
        let (part, parts) = match cluster {
            1 => (k.block_id(Axis::X), k.grid_dim(Axis::X)),
            _ => (k.cluster_id(), k.grid_dim(Axis::X).div_u(cluster)),
        };
        let (part, parts) = (part.to(Scalar::I64), parts.to(Scalar::I64));
        Turns { k, layout, extents, part, parts }
    }

    /// The team's first row, or the last of all if it has none.
    pub fn first(&self) -> Row<'b> {
        let row = self.row(self.start());
        if row.exists.is_some() {
            return row;
        }
        self.row(row.number.min(self.extents.rows - 1))
    }

    /// The first row of the warp.
    fn start(&self) -> Val<'b> {
        let Layout { team, .. } = self.layout;
        match i64::from(self.layout.rows()) {
            1 => self.part,
            teams => self.part * teams + self.k.warp_id().to(Scalar::I64) * (32 / i64::from(team)),
        }
    }

    /// The row of a team whose warp is at such a row.
    fn row(&self, start: Val<'b>) -> Row<'b> {
        let Turns { k, layout, extents, .. } = *self;
        if layout.rows() == 1 || layout.team == 32 {
            return Row::new(k, layout, extents, start);
        }
        // A warp's teams go on together.
        let number = start + k.lane_id().shr_u(layout.team.ilog2()).to(Scalar::I64);
        let row = Row::new(k, layout, extents, number.min(extents.rows - 1));
        Row { exists: Some(number.lt(extents.rows)), ..row }
    }

    /// Takes the rows, with a state that goes from row to row. A team of several warps meets only where a row is combined.
    pub fn fold(
        &self,
        state: Vec<Val<'b>>,
        work: impl FnOnce(&Row<'b>, Vec<Val<'b>>) -> Vec<Val<'b>>,
    ) -> Vec<Val<'b>> {
        let Turns { k, layout, extents, parts, .. } = *self;
        let (rows, start, step) = (extents.rows, self.start(), parts * i64::from(layout.rows()));
        let row = |start, turn| Row { turn: Some(turn), ..self.row(start) };
        if layout.cluster == 1 {
            let mut state = state;
            state.push(k.i32(0));
            let mut state = k.range(start, rows).step(step).fold(state, |start, mut state| {
                let turn = state.pop().unwrap_or(k.i32(0));
                let mut state = work(&row(start, turn), state);
                state.push(1 - turn);
                state
            });
            state.pop();
            return state;
        }
        // In a loop of a guest's that gathers, iterations are bounded.
        let count = ((rows - start + (step - 1)) / step.max(1)).max(0).min(MAX_TURNS).to(Scalar::I32);
        k.range(k.i32(0), count)
            .fold(state, |turn, state| work(&row(start + turn.to(Scalar::I64) * step, turn & 1), state))
    }
}
