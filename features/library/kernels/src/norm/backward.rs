//! Backward.

use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use super::plan::{Plan, plan};
use super::{Norm, NormSums};
use crate::call::{Buffer, Call, CallError, Entry, Function, Operand, Workspace, kernel_name};
use crate::family::Resources;
use crate::graph::{self, NoGraph};
use crate::row::{Layout, Piece, Turns, View, column, grid_of, launch_rows, matrix, parts, row};
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
    /// What of rows that are held a team keeps where.
    pub keeps: Keeps,
}

/// What a team keeps from row to row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Keeps {
    /// Is the weight held in registers? Where rows begin anywhere it is.
    pub weight: bool,
    /// Do sums lie in shared memory? Only where a block has one row.
    pub shared: bool,
    /// Blocks of a multiprocessor at once, for which there are registers; 0 if that does not matter.
    pub at_once: u8,
}

impl Keeps {
    fn name(self) -> String {
        let words = [(self.weight, "w"), (self.shared, "s")];
        let words: String = words.into_iter().filter(|(is, _)| *is).map(|(_, word)| word).collect();
        if self.at_once > 0 { format!("{words}{}", self.at_once) } else { words }
    }
}

/// The parameters of the kernel.
struct Views<'b> {
    x: View<'b>,
    weight: View<'b>,
    dy: View<'b>,
    dsum: Option<View<'b>>,
    mean: Option<View<'b>>,
    rstd: View<'b>,
    dx: View<'b>,
    parts: View<'b>,
}

impl NormGradient {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let NormGradient { layout, norm, element, weight, residual, bias, keeps } = self;
        let mut name = format!("{}_backward_{element}_{weight}", norm.name());
        for (is, word) in [(residual, "_residual"), (bias, "_bias")] {
            name.push_str(if *is { word } else { "" });
        }
        format!("{name}_{}{}", layout.name(), keeps.name())
    }

    /// Its kernel. Parameters: `h`, `weight`, `dy`, \[`dsum`\], \[`mean`\], `rstd`, `dx`, in a layout that is shifted `rows` and `columns`, and
    /// `parts`, the sums of each block (rows) for each column: those of `dweight`, and behind them those of `dbias`.
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
        k.name(&kernel_name(&self.name())).resident_blocks(self.keeps.at_once.into());
        let x = matrix(k, layout, "h", element, Access::Read);
        let weight = row(k, layout, "weight", self.weight, Access::Read);
        let dy = matrix(k, layout, "dy", element, Access::Read);
        let dsum = self.residual.then(|| matrix(k, layout, "dsum", element, Access::Read));
        let mean = (norm == Norm::Layer).then(|| column(k, "mean", Scalar::F32, Access::Read));
        let rstd = column(k, "rstd", Scalar::F32, Access::Read);
        let dx = matrix(k, layout, "dx", element, Access::Write);
        let turns = Turns::of(k, layout, x);
        let access = if layout.holds() { Access::Write } else { Access::ReadWrite };
        let parts = parts(k, layout, "parts", access);
        let views = Views { x, weight, dy, dsum, mean, rstd, dx, parts };
        match layout.holds() {
            true => self.held(k, &turns, &views),
            false => self.streamed(&turns, &views),
        }
    }

    fn results(&self) -> usize {
        1 + usize::from(self.bias)
    }

    /// Of rows that registers hold.
    fn held<'b>(&self, k: Builder<'b>, turns: &Turns<'b>, views: &Views<'b>) {
        let NormGradient { layout, keeps, .. } = *self;
        let Views { x, weight, dy, dsum, mean, rstd, dx, parts } = *views;
        let first = turns.first();
        let kept = keeps.weight.then(|| first.load_columns(weight));
        let sums = Sums::of(k, layout, keeps.shared, self.results());
        // What is held of each vector, and where in it: h, dy, then the weight and dsum.
        let held: Vec<_> = [x, dy].into_iter().chain(kept.as_ref().map(|_| weight)).chain(dsum).collect();
        let state = turns.fold(sums.initial(), |row, mut state| {
            let pairs = row.load_all(&[x, dy]);
            let of_mean = mean.map(|view| row.load(view));
            let of_rstd = row.load(rstd);
            let added = dsum.map(|view| row.load_all(&[view]));
            let words: Vec<_> = (0..pairs.len() / 2)
                .flat_map(|at| {
                    let of_piece = |words: &Option<Vec<Val<'b>>>| words.as_ref().map(|words| words[at]);
                    let pair = [pairs[2 * at], pairs[2 * at + 1]];
                    pair.into_iter().chain(of_piece(&kept)).chain(of_piece(&added))
                })
                .collect();
            let centred = |piece: &Piece<'b>| of_mean.map_or(piece[0], |mean| piece[0] - piece.splat(mean));
            let dy = |piece: &Piece<'b>| piece.own_or(piece[1], 0.0);
            let weight = |piece: &Piece<'b>| match kept {
                Some(_) => piece[2],
                None => piece.of_row(weight),
            };
            let n = row.columns.to(Scalar::F32);
            let values = row.held(&held, &words);
            let (across, along) = if of_mean.is_none() {
                let step = |[sum]: [Val<'b>; 1], piece: &Piece<'b>| {
                    [(dy(piece) * weight(piece)).fma(centred(piece), sum)]
                };
                let [sum] = values.fold("g", [0.0], step, |[a], [b]| [a + b]);
                (sum, None)
            } else {
                let step = |[across, along]: [Val<'b>; 2], piece: &Piece<'b>| {
                    let g = dy(piece) * weight(piece);
                    [g.fma(centred(piece), across), along + g]
                };
                let [across, along] = values.fold("g", [0.0, 0.0], step, |[a, c], [b, d]| [a + b, c + d]);
                (across, Some(along / n))
            };
            let less = -(across * of_rstd / n);
            // From memory's format once more: that takes fewer registers meanwhile.
            row.held(&held, &row.again(&words)).each_held(|at, piece| {
                let (dy, hat) = (dy(piece), centred(piece) * piece.splat(of_rstd));
                let g = dy * weight(piece);
                let g = along.map_or(g, |along| g - piece.splat(along));
                let (gradient, of_rstd) = (hat.fma(piece.splat(less), g), piece.splat(of_rstd));
                let gradient = match added {
                    Some(_) => gradient.fma(of_rstd, piece[held.len() - 1]),
                    None => gradient * of_rstd,
                };
                piece.store(dx, gradient);
                sums.add(&mut state, at, 0, |sum| dy.fma(hat, sum));
                if self.bias {
                    sums.add(&mut state, at, 1, |sum| sum + dy);
                }
            });
            state
        });
        for result in 0..self.results() {
            let part = turns.part + turns.parts * result as i64;
            let pieces = first.hold(&[]);
            if layout.rows() > 1 {
                let columns = width(layout);
                let shared = k.shared(
                    &format!("of_warps_{result}"),
                    Scalar::F32,
                    &[layout.threads as u32 / 32, columns],
                );
                pieces.each_held(|at, piece| {
                    to_warps(k, layout, shared, piece, at, sums.get(&state, at, result));
                });
                of_warps(k, layout, shared, parts, part);
                continue;
            }
            pieces.each_held(|at, piece| {
                let sum = sums.get(&state, at, result);
                match layout.shifted {
                    true => piece.each_lane(sum, |column, sum| {
                        parts.place.at([part, column.to(Scalar::I64)]).store(sum);
                    }),
                    false => piece.inside(|| parts.place.at([part, piece.column.to(Scalar::I64)]).store(sum)),
                }
            });
        }
    }

    /// Of rows that are loaded for each use.
    fn streamed<'b>(&self, turns: &Turns<'b>, views: &Views<'b>) {
        let Views { x, weight, dy, dsum, mean, rstd, dx, parts } = *views;
        turns.fold(Vec::new(), |row, state| {
            let of_mean = mean.map(|view| row.load(view));
            let of_rstd = row.load(rstd);
            let values = row.hold(&[x, dy]);
            let hat = |piece: &Piece<'b>| {
                of_mean.map_or(piece[0], |mean| piece[0] - piece.splat(mean)) * piece.splat(of_rstd)
            };
            let n = row.columns.to(Scalar::F32);
            let step = |[across, along]: [Val<'b>; 2], piece: &Piece<'b>| {
                let g = piece[1] * piece.of_row(weight);
                [across + g * hat(piece), along + g]
            };
            let (across, along) = match of_mean {
                None => {
                    let step = |[across]: [Val<'b>; 1], piece: &Piece<'b>| [step([across; 2], piece)[0]];
                    let [across] = values.fold("g", [0.0], step, |[a], [b]| [a + b]);
                    (across / n, None)
                }
                Some(_) => {
                    let [across, along] = values.fold("g", [0.0, 0.0], step, |[a, c], [b, d]| [a + b, c + d]);
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
                // The block's sums are memory that only this thread has these columns of.
                for (result, one) in [piece[1] * hat, piece[1]].into_iter().enumerate().take(self.results()) {
                    let part = turns.part + turns.parts * result as i64;
                    let there = parts.place.at([part, piece.column.to(Scalar::I64)]);
                    // The first row finds nothing there.
                    let before = row.builder().if_else(
                        row.number.eq(turns.part),
                        || piece.constant(0.0),
                        || match piece.lanes {
                            1 => there.clone().load(),
                            lanes => there.clone().load_vector(lanes),
                        },
                    );
                    there.store(before + one);
                }
            });
            state
        });
    }
}

/// The sums of a thread's columns over its rows: of each piece that it holds, for `dweight` and then for `dbias`. A piece beside the
/// vectors is in registers always.
struct Sums<'b> {
    k: Builder<'b>,
    layout: Layout,
    results: usize,
    shared: Option<PlaceRef<'b>>,
}

impl<'b> Sums<'b> {
    fn of(k: Builder<'b>, layout: Layout, shared: bool, results: usize) -> Sums<'b> {
        let Layout { threads, lanes, vectors, .. } = layout;
        let wide = u32::from(lanes.min(4));
        let accesses = u32::from(vectors) * u32::from(lanes) / wide;
        let dims = [results as u32 * accesses, u32::from(threads) * wide];
        let shared = shared.then(|| k.shared("sums", Scalar::F32, &dims));
        let sums = Sums { k, layout, results, shared };
        if sums.shared.is_some() {
            for result in 0..results {
                for at in 0..usize::from(vectors) {
                    sums.set(at, result, sums.zero());
                }
            }
        }
        sums
    }

    fn zero(&self) -> Val<'b> {
        self.k.constant(Type::vector(Scalar::F32, self.layout.lanes).unwrap_or(Type::F32), 0.0)
    }

    /// What goes from row to row in registers.
    fn initial(&self) -> Vec<Val<'b>> {
        let held = if self.shared.is_some() { 0 } else { usize::from(self.layout.vectors) };
        let mut initial = vec![self.zero(); held * self.results];
        if self.layout.shifted {
            initial.extend((0..self.results).map(|_| self.k.f32(0.0)));
        }
        initial
    }

    /// The shared memory that has a piece's sums.
    fn shared(&self, at: usize) -> Option<PlaceRef<'b>> {
        self.shared.filter(|_| at < usize::from(self.layout.vectors))
    }

    /// Which register has a piece's sum.
    fn register(&self, state: &[Val<'b>], at: usize, result: usize) -> usize {
        let vectors = usize::from(self.layout.vectors);
        if at < vectors { result * vectors + at } else { state.len() - self.results + result }
    }

    fn add(&self, state: &mut [Val<'b>], at: usize, result: usize, to: impl Fn(Val<'b>) -> Val<'b>) {
        let sum = to(self.get(state, at, result));
        match self.shared(at) {
            Some(_) => self.set(at, result, sum),
            None => state[self.register(state, at, result)] = sum,
        }
    }

    fn get(&self, state: &[Val<'b>], at: usize, result: usize) -> Val<'b> {
        let Some(shared) = self.shared(at) else { return state[self.register(state, at, result)] };
        let mut lanes = Vec::new();
        for place in self.places(at, result) {
            let [row, column] = place;
            match self.layout.lanes.min(4) {
                1 => lanes.push(shared.at([row, column]).load()),
                wide => {
                    let some = shared.at([row, column]).load_vector(wide);
                    lanes.extend((0..wide).map(|lane| some.lane(lane)));
                }
            }
        }
        if let [lane] = lanes[..] { lane } else { self.k.vector(&lanes) }
    }

    fn set(&self, at: usize, result: usize, sum: Val<'b>) {
        let Some(shared) = self.shared else { return };
        let wide = self.layout.lanes.min(4);
        for ([row, column], first) in self.places(at, result).zip((0..).step_by(wide.into())) {
            let some = match self.layout.lanes {
                1 => sum,
                _ => self.k.vector(&(first..first + wide).map(|lane| sum.lane(lane)).collect::<Vec<_>>()),
            };
            shared.at([row, column]).store(some);
        }
    }

    /// Where the lanes of a vector are, four at a time: those of neighbouring threads side by side.
    fn places(&self, at: usize, result: usize) -> impl Iterator<Item = [Val<'b>; 2]> + use<'b> {
        let (k, Layout { lanes, vectors, .. }) = (self.k, self.layout);
        let wide = lanes.min(4);
        let accesses = usize::from(lanes / wide);
        let column = k.thread_id(Axis::X) * i32::from(wide);
        let first = (result * usize::from(vectors) + at) * accesses;
        (first..first + accesses).map(move |row| [k.i32(row as i32), column])
    }
}

/// Columns of what the warps of a block have summed.
fn width(layout: Layout) -> u32 {
    let accesses = u32::from(layout.team) * u32::from(layout.vectors) + u32::from(layout.shifted) * 2;
    accesses * u32::from(layout.lanes)
}

/// Stores what the teams of a warp have of a held vector's columns.
fn to_warps<'b>(
    k: Builder<'b>,
    layout: Layout,
    shared: PlaceRef<'b>,
    piece: &Piece<'b>,
    at: usize,
    sum: Val<'b>,
) {
    let Layout { team, lanes, .. } = layout;
    let (lane, warp) = (k.lane_id(), k.warp_id());
    if layout.shifted {
        return piece.each_lane(sum, |column, sum| shared.at([warp, column]).store(sum));
    }
    let first = (lane & (i32::from(team) - 1)) * i32::from(lanes);
    let base = at as i32 * i32::from(team) * i32::from(lanes);
    for number in 0..lanes {
        let one = if lanes == 1 { sum } else { sum.lane(number) };
        let masks = (team.ilog2()..5).map(|bit| 1 << bit);
        let one = masks.fold(one, |sum, mask: i32| sum + sum.shuffle_xor(mask));
        let place = shared.at([warp, first + (base + i32::from(number))]);
        k.if_(lane.lt(i32::from(team)), || place.store(one));
    }
}

/// Adds up what the warps of a block have of each column, and stores it as the block's.
fn of_warps<'b>(k: Builder<'b>, layout: Layout, shared: PlaceRef<'b>, parts: View<'b>, part: Val<'b>) {
    let warps = i32::from(layout.threads) / 32;
    k.barrier();
    let columns = parts.place.extent(1).to(Scalar::I32).min(width(layout) as i32);
    k.range(k.thread_id(Axis::X), columns).step(i32::from(layout.threads)).each(|column| {
        let of_warps = (0..warps).map(|warp| shared.at([k.i32(warp), column]).load());
        let sum = of_warps.reduce(|a, b| a + b).unwrap_or(k.f32(0.0));
        parts.place.at([part, column.to(Scalar::I64)]).store(sum);
    });
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

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::norm::backward(self)
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
        let Plan { layout, keeps, teams } = plan(self, step, resources);
        let buffers = self.buffers();
        let results = 1 + usize::from(bias);
        let entry = NormGradient { layout, norm, element, weight, residual, bias, keeps };
        let first = launch_rows(
            name,
            Entry::NormBackward(entry),
            layout,
            [rows, columns],
            &buffers[..buffers.len() - results],
            &[],
        )?;
        let mut call = Call::default();
        let mut workspace = Workspace::default();
        // Without rows the gradients of the weights are sums of nothing.
        let teams = if rows == 0 { 0 } else { teams };
        let parts = workspace.take(Scalar::F32, &[teams * results as u64, columns]);
        for mut launch in first.launches {
            launch.grid = [teams as u32 * u32::from(layout.cluster), 1, 1];
            launch.operands.push(parts.clone());
            call.launches.push(launch);
        }
        if columns > 0 {
            grid_of(name, layout, [1, columns])?;
            let sums = NormSums::of(weight, results as u8, [teams, columns], resources);
            let of_columns =
                (buffers.len() - results..buffers.len()).map(|at| Operand::whole(at, weight, &[columns]));
            call.launches.push(sums.launch(columns, [parts].into_iter().chain(of_columns).collect()));
        }
        call.workspace = workspace.bytes();
        Ok(call)
    }
}
