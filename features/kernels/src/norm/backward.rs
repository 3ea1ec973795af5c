//! Backward.

use vm_ir::builder::{BuildError, Builder, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use super::Norm;
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Workspace, kernel_name};
use crate::family::{Kind, Resources};
use crate::row::{
    Layout, MAX_TURNS, Piece, Row, View, column, fold_rows, grid_of, lanes, launch_rows, matrix, parts, row,
};
use crate::strided::step;

/// A variant of the gradient's first kernel: `dx`, and of each block's rows the sums for `dweight` and `dbias`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormGradient {
    /// How rows are divided.
    pub layout: Layout,
    /// Which norm.
    pub norm: Norm,
    /// The elements of `h`, `dy`, `dsum` and `dx`.
    pub element: Scalar,
    /// Those of `weight`.
    pub weight: Scalar,
    /// Is `dsum` added?
    pub residual: bool,
    /// Is `dbias` summed?
    pub bias: bool,
}

impl NormGradient {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let NormGradient { layout, norm, element, weight, residual, bias } = self;
        let mut name = format!("{}_backward_{element}_{weight}", norm.name());
        for (is, word) in [(residual, "_residual"), (bias, "_bias")] {
            name.push_str(if *is { word } else { "" });
        }
        format!("{name}_{}", layout.name())
    }

    /// Its kernel. Parameters: `h`, `weight`, `dy`, \[`dsum`\], \[`mean`\], `rstd`, `dx`, and the sums of each block (rows) for each
    /// column: `dweights`, \[`dbiases`\].
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        self.build(block.builder());
        block.kernel()
    }

    fn build<'b>(&self, k: Builder<'b>) {
        let NormGradient { layout, norm, element, .. } = *self;
        k.name(&kernel_name(&self.name()));
        let x = matrix(k, layout, "h", element, Access::Read);
        let weight = row(k, layout, "weight", self.weight, Access::Read);
        let dy = matrix(k, layout, "dy", element, Access::Read);
        let dsum = self.residual.then(|| matrix(k, layout, "dsum", element, Access::Read));
        let mean = (norm == Norm::Layer).then(|| column(k, "mean", Scalar::F32, Access::Read));
        let rstd = column(k, "rstd", Scalar::F32, Access::Read);
        let dx = matrix(k, layout, "dx", element, Access::Write);
        let access = if layout.holds() { Access::Write } else { Access::ReadWrite };
        let mut sums = vec![parts(k, layout, "dweights", access)];
        sums.extend(self.bias.then(|| parts(k, layout, "dbiases", access)));
        let this_block = if layout.cluster > 1 { k.cluster_id() } else { k.block_id(Axis::X) };
        let this_block = this_block.to(Scalar::I64);
        let lanes = layout.lanes;
        let zero = k.constant(Type::vector(Scalar::F32, lanes).unwrap_or(Type::F32), 0.0);
        // Held: a sum for each vector, for the weight and then for the bias.
        let state = vec![zero; usize::from(layout.vectors) * sums.len()];
        let state = fold_rows(k, layout, x, state, |row, mut state| {
            let of_mean = mean.map(|view| row.load(view));
            let of_rstd = row.load(rstd);
            let values = row.hold(&[x, dy]);
            let hat = |piece: &Piece<'b>| {
                of_mean.map_or(piece[0], |mean| piece[0] - piece.splat(mean)) * piece.splat(of_rstd)
            };
            let n = row.columns.to(Scalar::F32);
            let terms = |piece: &Piece<'b>| {
                let g = piece.or(piece[1] * piece.of_row(weight), 0.0);
                (g, g * piece.or(hat(piece), 0.0))
            };
            let (across, along) = match norm {
                Norm::Rms => {
                    let step = |[sum]: [Val<'b>; 1], piece: &Piece<'b>| [sum + terms(piece).1];
                    let [sum] = values.fold("g", [0.0], step, |[a], [b]| [a + b]);
                    (sum / n, None)
                }
                Norm::Layer => {
                    let [across, along] = values.fold(
                        "g",
                        [0.0, 0.0],
                        |[across, along], piece| {
                            let (g, product) = terms(piece);
                            [across + product, along + g]
                        },
                        |[a, c], [b, d]| [a + b, c + d],
                    );
                    (across / n, Some(along / n))
                }
            };
            values.each(|piece| {
                let g = piece[1] * piece.of_row(weight);
                let hat = hat(piece);
                let less = along.map_or(g, |along| g - piece.splat(along));
                let gradient = (less - hat * piece.splat(across)) * piece.splat(of_rstd);
                let gradient = dsum.map_or(gradient, |view| gradient + piece.of_matrix(view, Cache::Stream));
                piece.store(dx, gradient);
                if layout.holds() {
                    return;
                }
                // The block's sums are memory that only this thread has these columns of.
                for (view, one) in sums.iter().zip([piece[1] * hat, piece[1]]) {
                    let there = view.place.at([this_block, piece.column]);
                    // The first row finds nothing there.
                    let before = row.builder().if_else(
                        row.number.eq(this_block),
                        || piece.constant(0.0),
                        || match piece.lanes {
                            1 => there.clone().load(),
                            lanes => there.clone().load_vector(lanes),
                        },
                    );
                    there.store(before + one);
                }
            });
            values.each_held(|at, piece| {
                let terms = [piece[1] * hat(piece), piece[1]];
                for (kind, one) in terms.into_iter().enumerate().take(sums.len()) {
                    let sum = &mut state[kind * usize::from(layout.vectors) + at];
                    *sum = *sum + piece.or(one, 0.0);
                }
            });
            state
        });
        if layout.rows() > 1 {
            let vectors = usize::from(layout.vectors);
            for (number, (view, state)) in sums.iter().zip(state.chunks(vectors)).enumerate() {
                of_teams(k, layout, *view, state, &format!("of_warps_{number}"));
            }
        } else if layout.holds() {
            let row = Row::of(k, layout, x, this_block);
            row.hold(&[]).each_held(|at, piece| {
                for (kind, view) in sums.iter().enumerate() {
                    piece.store(*view, state[kind * usize::from(layout.vectors) + at]);
                }
            });
        }
    }
}

/// Adds up what the teams of a block have of each column, and stores it as the block's.
fn of_teams<'b>(k: Builder<'b>, layout: Layout, parts: View<'b>, state: &[Val<'b>], name: &str) {
    let Layout { threads, team, lanes, .. } = layout;
    let (threads, step) = (u32::from(threads), u32::from(team) * u32::from(lanes));
    let (warps, width) = (threads / 32, step * state.len() as u32);
    let shared = k.shared(name, Scalar::F32, &[warps, width]);
    let (lane, warp, thread) = (k.lane_id(), k.warp_id(), k.thread_id(Axis::X));
    let first = (lane & (i32::from(team) - 1)) * i32::from(lanes);
    for (vector, values) in (0u32..).zip(state) {
        let values: Vec<_> = match lanes {
            1 => vec![*values],
            _ => (0..lanes).map(|lane| values.lane(lane)).collect(),
        };
        for (at, value) in (0u32..).zip(values) {
            let masks = (team.ilog2()..5).map(|bit| 1 << bit);
            let sum = masks.fold(value, |sum, mask: i32| sum + sum.shuffle_xor(mask));
            let place = shared.at([warp, first + (vector * step + at) as i32]);
            k.if_(lane.lt(i32::from(team)), || place.store(sum));
        }
    }
    k.barrier();
    let (block, columns) = (k.block_id(Axis::X).to(Scalar::I64), parts.place.extent(1).to(Scalar::I32));
    k.range(thread, columns.min(width as i32)).step(threads).each(|column| {
        let of_warps = (0..warps as i32).map(|warp| shared.at([k.i32(warp), column]).load());
        let sum = of_warps.reduce(|a, b| a + b).unwrap_or(k.f32(0.0));
        parts.place.at([block, column]).store(sum);
    });
}

/// Threads of a block of [`NormSums`] along columns and along rows.
const COLUMNS: u32 = 32;

/// A variant of the second kernel: the sums of all blocks' sums, of each column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormSums {
    /// The elements of the result.
    pub element: Scalar,
    /// Threads that share a column: 1 or 32.
    pub rows: u8,
}

impl NormSums {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        format!("sum_of_parts_{}_{}", self.element, self.rows)
    }

    /// The launch for so many columns.
    pub(crate) fn launch(self, columns: u64, operands: Vec<Operand>) -> Launch {
        let grid = [columns.div_ceil(COLUMNS.into()) as u32, 1, 1];
        Launch { entry: Entry::NormSums(self), grid, operands }
    }

    /// Its kernel. Parameters: `parts`, of f32, parts × columns, and `sums`, an element for each column.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let rows = i32::from(self.rows);
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name())).block_size([COLUMNS, rows as u32, 1]);
        let parts = ViewType::new(Scalar::F32, 2, Access::Read).named(&["parts", "columns"]);
        let parts = k.view_of("parts", parts);
        let sums = k.view_of("sums", ViewType::new(self.element, 1, Access::Write).named(&["columns"]));
        let columns = sums.extent(0);
        let column = k.global_id(Axis::X).to(Scalar::I64).named("column");
        let first = k.thread_id(Axis::Y);
        let inside = column.lt(columns);
        let count = parts.extent(0).to(Scalar::I32);
        let at = column.min(columns - 1);
        let sum = k
            .range(first, count)
            .step(rows)
            .unroll(8)
            .fold(k.f32(0.0), |part, sum| sum + parts.at([part, at]).load());
        let sum = if rows == 1 {
            sum
        } else {
            let shared = k.shared("of_threads", Scalar::F32, &[rows as u32, COLUMNS]);
            let along = k.thread_id(Axis::X);
            shared.at([first, along]).store(sum);
            k.barrier();
            k.range(k.i32(0), rows)
                .unroll(8)
                .fold(k.f32(0.0), |part, sum| sum + shared.at([part, along]).load())
        };
        k.if_(inside & first.eq(0), || sums.at([column]).store(sum.to(self.element)));
        block.kernel()
    }
}

/// The gradients of a norm. Buffers, in order, those in brackets where they are asked for: `h` (`x`, or its sum with the residual),
/// `weight`, `dy`, \[`dsum`\], \[`mean`, of a layer norm\], `rstd`, `dx`, `dweight`, \[`dbias`\]. Matrices are `rows` × `columns`;
/// `mean` and `rstd` are what [`NormForward`](super::NormForward) stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormBackward {
    /// Which norm.
    pub norm: Norm,
    /// Rows.
    pub rows: u64,
    /// Elements of a row: up to [`MAX_COLUMNS`](crate::row::MAX_COLUMNS).
    pub columns: u64,
    /// The elements of `h`, `dy`, `dsum` and `dx`: f32, bf16 or f16.
    pub element: Scalar,
    /// Those of `weight`, `dweight` and `dbias`.
    pub weight: Scalar,
    /// Is `dsum` added to `dx`?
    pub residual: bool,
    /// Is there a bias?
    pub bias: bool,
    /// Bytes to whose multiples all buffers are aligned; 16 or more is fastest.
    pub align: u32,
}

impl NormBackward {
    /// How rows that begin at multiples of `step` elements are divided, and how many blocks or clusters take them in turns.
    fn plan(&self, step: u64, resources: &Resources) -> (Layout, u64) {
        let units = u64::from(resources.compute_units);
        if resources.kind == Kind::Cpu {
            return (Layout::CPU, units.saturating_mul(2).min(self.rows));
        }
        let wide = lanes(self.columns | step, &[self.element, self.element, self.weight], self.align);
        let vectors = self.columns.div_ceil(wide.into()).max(1);
        // Beside h and dy the sums.
        let held = u64::from(wide) * (3 + u64::from(self.bias));
        let layout = |threads: u64, team: u64, cluster: u64| Layout {
            threads: threads as u16,
            team: team as u16,
            cluster: cluster as u8,
            lanes: wide,
            vectors: vectors.div_ceil(team * cluster).min(64) as u8,
            tail: false,
            shifted: false,
        };
        let fits =
            |layout: &Layout, most: u64| layout.vectors <= 8 && u64::from(layout.vectors) * held <= most;
        let of_warp = layout(256, vectors.next_power_of_two().min(32), 1);
        // As many threads as have the most to do; of as many the fewest.
        let of_block = (2..=16).map(|warps| layout(32 * warps, 32 * warps, 1));
        let idle = |layout: &Layout| u64::from(layout.team) * u64::from(layout.vectors) - vectors;
        let of_block = of_block.filter(|layout| fits(layout, 56)).min_by_key(|layout| {
            let all = idle(layout) + vectors;
            (idle(layout) * 16 / all, layout.threads)
        });
        let clusters = [(2, 56), (4, 56), (8, 56), (8, 80)].into_iter();
        let clusters = clusters.filter(|(cluster, _)| *cluster <= resources.cluster);
        let of_cluster = clusters
            .map(|(cluster, most)| (layout(512, 512, cluster.into()), most))
            .find(|(layout, most)| fits(layout, *most));
        let streamed = Layout {
            threads: 256,
            team: 256,
            cluster: 1,
            lanes: wide.min(4),
            vectors: 0,
            tail: false,
            shifted: false,
        };
        let layout = Some(of_warp)
            .filter(|layout| fits(layout, 36))
            .or(of_block)
            .or(of_cluster.map(|(layout, _)| layout))
            .unwrap_or(streamed);
        // As many blocks as a multiprocessor has registers for, about.
        let registers = 48 + u64::from(layout.vectors) * held;
        let at_once = (65_536 / registers.max(64) / u64::from(layout.threads)).max(1);
        let mut teams = (units * at_once / u64::from(layout.cluster)).max(1);
        if layout.cluster > 1 {
            teams = teams.max(self.rows.div_ceil(MAX_TURNS.cast_unsigned()));
        }
        (layout, teams.min(self.rows.div_ceil(layout.rows().into())).max(1))
    }
}

impl Function for NormBackward {
    fn buffers(&self) -> Vec<Buffer> {
        let NormBackward { rows, columns, element, weight, .. } = *self;
        let matrix = |name, access| Buffer::new(name, element, &[rows, columns], access);
        let of_columns = |name, access| Buffer::new(name, weight, &[columns], access);
        let number = |name| Buffer::new(name, Scalar::F32, &[rows], Access::Read);
        let mut all = vec![matrix("h", Access::Read), of_columns("weight", Access::Read)];
        all.push(matrix("dy", Access::Read));
        all.extend(self.residual.then(|| matrix("dsum", Access::Read)));
        all.extend((self.norm == Norm::Layer).then(|| number("mean")));
        all.extend([number("rstd"), matrix("dx", Access::Write), of_columns("dweight", Access::Write)]);
        all.extend(self.bias.then(|| of_columns("dbias", Access::Write)));
        all
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launches(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launches(step(buffers), resources)
    }
}

impl NormBackward {
    /// The launches, of rows that begin at multiples of `step` elements.
    fn launches(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        let NormBackward { norm, rows, columns, element, weight, residual, bias, .. } = *self;
        let name = match norm {
            Norm::Rms => "rmsnorm_backward",
            Norm::Layer => "layernorm_backward",
        };
        let (layout, blocks) = self.plan(step, resources);
        let buffers = self.buffers();
        let results = 1 + usize::from(bias);
        let entry = NormGradient { layout, norm, element, weight, residual, bias };
        let first = launch_rows(
            name,
            Entry::NormBackward(entry),
            layout,
            [rows, columns],
            &buffers[..buffers.len() - results],
            &[],
        )?;
        let sums = NormSums { element: weight, rows: if layout.tail { 1 } else { 32 } };
        let mut call = Call::default();
        let mut workspace = Workspace::default();
        // Without rows the gradients of the weights are sums of nothing.
        let blocks = if rows == 0 { 0 } else { blocks };
        let parts: Vec<Operand> =
            (0..results).map(|_| workspace.take(Scalar::F32, &[blocks, columns])).collect();
        for mut launch in first.launches {
            launch.grid = [blocks as u32 * u32::from(layout.cluster), 1, 1];
            launch.operands.extend(parts.iter().cloned());
            call.launches.push(launch);
        }
        if columns > 0 {
            grid_of(name, layout, [1, columns])?;
            for (at, parts) in parts.into_iter().enumerate() {
                let result = Operand::whole(buffers.len() - results + at, weight, &[columns]);
                call.launches.push(sums.launch(columns, vec![parts, result]));
            }
        }
        call.workspace = workspace.bytes();
        Ok(call)
    }
}
