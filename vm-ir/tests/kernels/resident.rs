//! Softmax and RMS norm of rows whose width is known. What a block can hold of its row stays in registers and in
//! shared memory until the row's sum is known; only what is left is read again. Or the row is a cluster's: each of its
//! blocks holds a part in registers, and nothing is read again.
//!
//! A row is cut into pieces of four columns for each thread. So every access is 16 bytes wide, and a thread reads
//! back from shared memory just what it put there, for which no barrier is needed.

use super::check;
use vm_ir::builder::{Builder, Carry, PlaceRef, Range, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{Scalar, Type};

/// Columns that a thread takes of a piece.
const LANES: u8 = 4;

/// How a block takes its row.
#[derive(Clone, Copy)]
struct Plan {
    threads: u32,
    /// Pieces that are held in registers.
    registers: u32,
    /// Pieces that are held in shared memory.
    shared: u32,
    /// Pieces that are read again.
    again: u32,
    /// Pieces of these two kinds that are on their way at the same time.
    batch: [u32; 2],
    /// Blocks that share a row.
    cluster: u32,
}

impl Plan {
    /// A row held in registers alone.
    const fn registers(threads: u32, registers: u32) -> Plan {
        Plan { threads, registers, shared: 0, again: 0, batch: [0, 0], cluster: 1 }
    }

    /// A row held in the registers of a cluster.
    const fn cluster(cluster: u32, threads: u32, registers: u32) -> Plan {
        Plan { cluster, ..Plan::registers(threads, registers) }
    }

    const fn piece(self) -> u32 {
        self.threads * LANES as u32
    }

    const fn columns(self) -> u32 {
        (self.registers + self.shared + self.again) * self.piece() * self.cluster
    }

    /// Is there more of a row than registers hold?
    const fn is_read_twice(self) -> bool {
        self.shared + self.again > 0
    }

    /// Warps that share a row.
    const fn warps(self) -> u32 {
        self.threads / 32 * self.cluster
    }
}

/// Of 4,096 columns.
const NARROW: Plan = Plan::registers(512, 2);
/// Of 32,768 columns.
const WIDE: Plan = Plan::registers(1024, 8);
/// Of 131,072 columns, more than a multiprocessor can hold. Softmax needs more registers for itself.
const WIDEST: [Plan; 2] = [
    Plan { shared: 24, again: 18, batch: [12, 18], ..Plan::registers(512, 22) },
    Plan { shared: 24, again: 12, batch: [12, 12], ..Plan::registers(512, 28) },
];
/// The same of clusters.
const CLUSTERS: [Plan; 2] = [Plan::cluster(8, 512, 8), Plan::cluster(4, 1024, 8)];

/// A block's row as a thread sees it.
#[derive(Clone, Copy)]
struct Row<'b> {
    k: Builder<'b>,
    plan: Plan,
    row: Val<'b>,
    /// This thread's first column of a piece.
    first: Val<'b>,
    held: Option<PlaceRef<'b>>,
}

impl<'b> Row<'b> {
    fn new(k: Builder<'b>, plan: Plan) -> Row<'b> {
        k.block_size([plan.threads, 1, 1]).cluster_size(plan.cluster);
        let held = (plan.shared > 0).then(|| k.shared("held", Scalar::F32, &[plan.shared * plan.piece()]));
        let row = if plan.cluster > 1 { k.cluster_id() } else { k.block_id(Axis::X) };
        let row = row.to(Scalar::I64).named("row");
        let mut first = k.thread_id(Axis::X) * i32::from(LANES);
        if plan.cluster > 1 {
            first = first + k.cluster_rank() * (plan.registers * plan.piece()) as i32;
        }
        let first = first.named("first");
        Row { k, plan, row, first, held }
    }

    /// Does `work` if both views have such a row.
    fn inside(self, x: PlaceRef<'b>, y: PlaceRef<'b>, work: impl FnOnce()) {
        self.k.if_(self.row.lt(x.extent(0)) & self.row.lt(y.extent(0)), work);
    }

    /// The columns of N pieces from `base` on.
    fn columns(self, base: Val<'b>, count: u32) -> Vec<Val<'b>> {
        let start = base + self.first;
        (0..count).map(|i| if i == 0 { start } else { start + (i * self.plan.piece()) as i32 }).collect()
    }

    /// A loop over the pieces that are held in shared memory, or over those that are read again; and how many of
    /// them a round takes.
    fn batches(self, again: bool) -> (Range<'b>, u32) {
        let Plan { shared, again: rest, batch, .. } = self.plan;
        let (from, to) = if again { (shared, shared + rest) } else { (0, shared) };
        let at = |piece: u32| (piece * self.plan.piece()) as i32;
        let batch = batch[usize::from(again)];
        assert!((to - from).is_multiple_of(batch));
        (self.k.range(self.k.i32(at(from)), at(to)).step(at(batch)), batch)
    }

    /// What is read again shall stay in the L2 cache till then, and the rest is not to drive it out. Where nothing
    /// is read again, rows that stay while they are used drive out what was written, which suits the memory.
    fn load(self, x: PlaceRef<'b>, columns: &[Val<'b>], keep: bool) -> Vec<Val<'b>> {
        let hint = if keep || self.plan.again == 0 { Cache::Keep } else { Cache::Stream };
        columns.iter().map(|c| x.at([self.row, *c]).cached(hint).load_vector(LANES)).collect()
    }

    fn store(self, y: PlaceRef<'b>, columns: &[Val<'b>], values: &[Val<'b>]) {
        for (c, v) in columns.iter().zip(values) {
            y.at([self.row, *c]).cached(Cache::Stream).store(*v);
        }
    }

    /// Folds the pieces that do not stay in registers.
    fn fold<T: Carry<'b>>(self, x: PlaceRef<'b>, initial: T, each: impl Fn(T, &[Val<'b>]) -> T) -> T {
        let mut state = initial;
        if let Some(held) = self.held {
            let (range, batch) = self.batches(false);
            state = range.fold(state, |base, state| {
                let columns = self.columns(base, batch);
                let loaded = self.load(x, &columns, false);
                columns.iter().zip(&loaded).for_each(|(c, v)| held.at([*c]).store(*v));
                each(state, &loaded)
            });
        }
        if self.plan.again > 0 {
            let (range, batch) = self.batches(true);
            state = range.fold(state, |base, state| {
                let loaded = self.load(x, &self.columns(base, batch), true);
                each(state, &loaded)
            });
        }
        state
    }

    /// The columns and values of those that do.
    fn resident(self, x: PlaceRef<'b>) -> (Vec<Val<'b>>, Vec<Val<'b>>) {
        let Plan { registers, shared, again, .. } = self.plan;
        let columns = self.columns(self.k.i32(((shared + again) * self.plan.piece()) as i32), registers);
        let loaded = self.load(x, &columns, false);
        (columns, loaded)
    }

    /// Writes what `f` makes of columns and values of the pieces that do not.
    fn rest(self, x: PlaceRef<'b>, y: PlaceRef<'b>, f: impl Fn(&[Val<'b>], &[Val<'b>]) -> Vec<Val<'b>>) {
        if self.plan.again > 0 {
            let (range, batch) = self.batches(true);
            range.each(|base| {
                let columns = self.columns(base, batch);
                let loaded = self.load(x, &columns, false);
                self.store(y, &columns, &f(&columns, &loaded));
            });
        }
        if let Some(held) = self.held {
            let (range, batch) = self.batches(false);
            range.each(|base| {
                let columns = self.columns(base, batch);
                let held: Vec<_> = columns.iter().map(|c| held.at([*c]).load_vector(LANES)).collect();
                self.store(y, &columns, &f(&columns, &held));
            });
        }
    }

    /// Puts each warp's values where all see them, and gives each thread those of the warps of its lane.
    fn exchange<const N: usize>(
        self,
        of_warp: [Val<'b>; N],
        identities: [f64; N],
        scratch: [PlaceRef<'b>; N],
    ) -> Vec<[Val<'b>; N]> {
        let k = self.k;
        let lane = k.lane_id();
        if self.plan.cluster > 1 {
            scratch.iter().zip(of_warp).for_each(|(place, value)| place.gather(value));
            let warps = (0..self.plan.warps() as i32).step_by(32);
            return warps.map(|warp| scratch.map(|place| place.at([lane + warp]).load())).collect();
        }
        k.if_(lane.eq(0), || {
            let warp = k.warp_id();
            scratch.iter().zip(of_warp).for_each(|(place, value)| place.at([warp]).store(value));
        });
        k.barrier();
        let load = || scratch.map(|place| place.at([lane]).load());
        vec![match self.plan.warps() {
            32 => load(),
            warps => k.if_else(lane.lt(warps as i32), load, || identities.map(|i| k.constant(Type::F32, i))),
        }]
    }

    /// The same of a pair, which a cluster gathers at once.
    fn exchange_pair(
        self,
        of_warp: [Val<'b>; 2],
        identities: [f64; 2],
        scratch: Pair<'b>,
    ) -> Vec<[Val<'b>; 2]> {
        let k = self.k;
        match scratch {
            Pair::Two(scratch) => self.exchange(of_warp, identities, scratch),
            Pair::One(scratch) => {
                scratch.gather(k.vector(&of_warp));
                let lane = k.lane_id();
                let pairs = (0..self.plan.warps() as i32).step_by(32).map(|warp| {
                    let pair = scratch.at([lane + warp, k.i32(0)]).load_vector(2);
                    [pair.lane(0), pair.lane(1)]
                });
                pairs.collect()
            }
        }
    }
}

/// Where the warps' pairs go: each to an array of its own, or both to one.
#[derive(Clone, Copy)]
enum Pair<'b> {
    Two([PlaceRef<'b>; 2]),
    One(PlaceRef<'b>),
}

fn vector() -> Type {
    Type::vector(Scalar::F32, LANES).unwrap()
}

/// All values as one, in pairs.
fn combine<'b>(values: &[Val<'b>], f: impl Fn(Val<'b>, Val<'b>) -> Val<'b>) -> Val<'b> {
    let mut values = values.to_vec();
    while values.len() > 1 {
        values = values.chunks(2).map(|pair| if let [a, b] = *pair { f(a, b) } else { pair[0] }).collect();
    }
    values[0]
}

/// All lanes of all vectors as one.
fn across<'b>(values: &[Val<'b>], f: impl Fn(Val<'b>, Val<'b>) -> Val<'b>) -> Val<'b> {
    let one = combine(values, &f);
    combine(&(0..LANES).map(|lane| one.lane(lane)).collect::<Vec<_>>(), f)
}

fn add<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    a + b
}

fn matrix<'b>(k: Builder<'b>, name: &str, plan: Plan, access: Access) -> PlaceRef<'b> {
    let dims = [Dim::ANY, Dim::Fixed(plan.columns().into())];
    k.view_of(name, ViewType::new(Scalar::F32, 2, access).aligned(16).with_dims(&dims))
}

/// e^x over the row's sum of e^x. Powers are counted from the greatest value so far; what is in registers, from the
/// thread's own.
fn softmax<'b>(k: Builder<'b>, plan: Plan) {
    let x = matrix(k, "x", plan, Access::Read);
    let y = matrix(k, "y", plan, Access::Write);
    let scratch = match plan.cluster {
        1 => Pair::Two(["maxima", "sums"].map(|name| k.shared(name, Scalar::F32, &[plan.warps()]))),
        _ => Pair::One(k.shared("sums", Scalar::F32, &[plan.warps(), 2])),
    };
    let this = Row::new(k, plan);
    this.inside(x, y, || {
        let greatest = |values: &[Val<'b>]| across(values, Val::max);
        let powers_of = |max: Val<'b>, values: &[Val<'b>]| -> Vec<_> {
            values.iter().map(|v| (*v - max.splat(LANES)).exp()).collect()
        };
        // Not −∞: from that nothing can be taken.
        let least = k.f32(f32::MIN);
        let before = plan.is_read_twice().then(|| {
            this.fold(x, (least, k.constant(vector(), 0.0)), |(max, sum), values| {
                let next = max.max(greatest(values));
                let powers = combine(&powers_of(next, values), add);
                (next, sum * (max - next).exp().splat(LANES) + powers)
            })
        });
        let (columns, resident) = this.resident(x);
        let from = before.map_or(least, |(max, _)| max).max(greatest(&resident));
        let powers = powers_of(from, &resident);
        let sum = match before {
            Some((max, sum)) => sum * (max - from).exp().splat(LANES) + combine(&powers, add),
            None => combine(&powers, add),
        };
        let of_warp = from.warp_max();
        let sum_of_warp = (across(&[sum], add) * (from - of_warp).exp()).warp_add();
        let pairs = this.exchange_pair([of_warp, sum_of_warp], [f64::from(f32::MIN), 0.0], scratch);
        let maxima: Vec<_> = pairs.iter().map(|[max, _]| *max).collect();
        let max = combine(&maxima, Val::max).warp_max().named("max");
        let sums: Vec<_> = pairs.iter().map(|[of, sum]| *sum * (*of - max).exp()).collect();
        let sum = combine(&sums, add).warp_add().named("sum");
        let inverse = sum.rcp();
        let factor = ((from - max).exp() * inverse).splat(LANES);
        this.store(y, &columns, &powers.iter().map(|p| *p * factor).collect::<Vec<_>>());
        let (max, inverse) = (max.splat(LANES), inverse.splat(LANES));
        this.rest(x, y, |_, values| values.iter().map(|v| (*v - max).exp() * inverse).collect());
    });
}

/// Each row over its root mean square, times the weights.
fn rmsnorm<'b>(k: Builder<'b>, plan: Plan) {
    let x = matrix(k, "x", plan, Access::Read);
    let row = ViewType::new(Scalar::F32, 1, Access::Read).aligned(16);
    let w = k.view_of("w", row.with_dims(&[Dim::Fixed(plan.columns().into())]));
    let y = matrix(k, "y", plan, Access::Write);
    let epsilon = k.scalar("epsilon", Type::F32);
    let scratch = [k.shared("sums", Scalar::F32, &[plan.warps()])];
    let this = Row::new(k, plan);
    this.inside(x, y, || {
        let weights = |columns: &[Val<'b>]| -> Vec<_> {
            columns.iter().map(|c| w.at([*c]).cached(Cache::Keep).load_vector(LANES)).collect()
        };
        let squares = |sum, values: &[Val<'b>]| values.iter().fold(sum, |sum: Val<'b>, v| v.fma(*v, sum));
        let sum = this.fold(x, k.constant(vector(), 0.0), squares);
        let (columns, resident) = this.resident(x);
        let of_warp = across(&[squares(sum, &resident)], add).warp_add();
        let sums: Vec<_> = this.exchange([of_warp], [0.0], scratch).iter().map(|[sum]| *sum).collect();
        let mean = combine(&sums, add).warp_add() * k.f32(1.0 / plan.columns() as f32);
        let factor = (mean + epsilon).rsqrt().named("factor").splat(LANES);
        let times = |values: &[Val<'b>], ws: &[Val<'b>]| {
            values.iter().zip(ws).map(|(v, w)| *v * factor * *w).collect::<Vec<_>>()
        };
        this.store(y, &columns, &times(&resident, &weights(&columns)));
        this.rest(x, y, |columns, values| times(values, &weights(columns)));
    });
}

#[test]
fn softmax_by_width() {
    let wide = [("softmax_131072", WIDEST[0]), ("softmax_131072_cluster", CLUSTERS[0])];
    for (name, plan) in [("softmax_4096", NARROW), ("softmax_32768", WIDE)].into_iter().chain(wide) {
        check(name, |k| softmax(k, plan));
    }
}

#[test]
fn rmsnorm_by_width() {
    let wide = [("rmsnorm_131072", WIDEST[1]), ("rmsnorm_131072_cluster", CLUSTERS[1])];
    for (name, plan) in [("rmsnorm_4096", NARROW), ("rmsnorm_32768", WIDE)].into_iter().chain(wide) {
        check(name, |k| rmsnorm(k, plan));
    }
}
