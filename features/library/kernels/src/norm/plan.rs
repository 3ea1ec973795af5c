//! How a gradient's rows are divided.
//!
//! Memory is busy while about as many bytes are on their way to a multiprocessor as come in a latency: some 32 KiB where bandwidth is
//! greatest. Blocks load about half of the time, and combine and store for the rest, so the rows of all of them are to be twice that. What
//! is on its way has registers, beside those of the sums, so registers bound what blocks a multiprocessor has at once. Of all ways
//! to divide rows that fit, the one with enough on its way, few idle threads and little to wait for is taken.

use vm_ir::Scalar;

use super::{Keeps, NormBackward};
use crate::family::{Kind, Resources};
use crate::row::{Layout, MAX_TURNS, accesses, lanes};

/// How rows are divided, and how many blocks or clusters take them in turns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) layout: Layout,
    pub(super) keeps: Keeps,
    pub(super) teams: u64,
}

/// What a multiprocessor has: its parts, registers of each for the threads of a lane, and threads and blocks at once.
const PARTS: u64 = 4;
const REGISTERS: u64 = 512;
const THREADS: u64 = 1536;
const BLOCKS: u64 = 24;
/// Threads that a multiprocessor is busy with.
const THREADS_BUSY: u64 = 768;
/// Bytes that are to be on their way to a multiprocessor.
const ON_THE_WAY: u64 = 64 << 10;

/// A way to divide rows.
#[derive(Clone, Copy, Debug)]
struct Way {
    layout: Layout,
    keeps: Keeps,
    /// Blocks of a multiprocessor at once.
    at_once: u64,
    /// The less the better.
    cost: u64,
}

/// The plan for rows that begin at multiples of `step` elements; for dense ones with 0.
pub(super) fn plan(of: &NormBackward, step: u64, resources: &Resources) -> Plan {
    let units = u64::from(resources.compute_units);
    if resources.kind == Kind::Cpu {
        let teams = units.saturating_mul(2).min(of.rows);
        return Plan { layout: Layout::CPU, keeps: Keeps::default(), teams };
    }
    let elements = [of.element, of.element, of.weight];
    let plain = lanes(of.columns | step, &elements, of.align);
    // What rows of an even number of columns would have.
    let wide = lanes(1 << 20, &elements, of.align);
    let whole = of.rows.checked_mul(of.columns).is_some_and(|count| count.is_multiple_of(wide.into()));
    let shifted = step == 0 && plain < wide && whole && of.columns >= 16 * u64::from(wide);
    let best = |lanes, shifted| {
        let ways = ways(of, lanes, shifted, resources);
        ways.min_by_key(|way| (way.cost, way.layout.cluster, way.layout.threads))
    };
    let way = shifted.then(|| best(wide, true)).flatten().or_else(|| best(plain, false));
    let streamed = Layout { lanes: plain.min(4), tail: false, ..Layout::CPU.streamed(256) };
    let streamed = Way { layout: streamed, keeps: Keeps::default(), at_once: 4, cost: 0 };
    let Way { layout, keeps, at_once, .. } = way.unwrap_or(streamed);
    let cluster = u64::from(layout.cluster);
    // The larger clusters lie among sixteen multiprocessors, and leave out what is beside.
    let units = if cluster > 2 && units >= 16 { units / 16 * 16 } else { units };
    let mut teams = (units * at_once / cluster).max(1);
    if layout.cluster > 1 {
        teams = teams.max(of.rows.div_ceil(MAX_TURNS.cast_unsigned()));
    }
    if layout.shifted && layout.rows() == 1 {
        // So that all rows of a team begin as far behind a multiple of the lanes.
        let lanes = u64::from(layout.lanes);
        teams = (teams / lanes * lanes).max(lanes);
    }
    Plan { layout, keeps, teams: teams.min(of.rows.div_ceil(layout.rows().into())).max(1) }
}

/// All ways that fit.
fn ways(of: &NormBackward, lanes: u8, shifted: bool, resources: &Resources) -> impl Iterator<Item = Way> {
    let (of, resources) = (*of, *resources);
    let vectors = accesses(of.columns, lanes, shifted);
    let of_warps = [8, 16, 32].map(|team| (256, team.min(vectors.next_power_of_two()), 1));
    let of_blocks = (2..=16).map(|warps| (32 * warps, 32 * warps, 1));
    let of_clusters = [2, 4, 8].into_iter().filter(move |cluster| *cluster <= u64::from(resources.cluster));
    let of_clusters =
        of_clusters.flat_map(|cluster| (2..=16).map(move |warps| (32 * warps, 32 * warps, cluster)));
    let divided = of_warps.into_iter().chain(of_blocks).chain(of_clusters);
    let layouts = divided.filter_map(move |(threads, team, cluster)| {
        let each = vectors.div_ceil(team * cluster);
        // All but the last vector are there in any row; where rows begin anywhere, some have one less.
        let is_full = cluster > 1 || vectors - u64::from(shifted) > team * (each - 1);
        (each <= 8 && is_full && !(shifted && team < 32)).then_some(Layout {
            threads: threads as u16,
            team: team as u16,
            cluster: cluster as u8,
            lanes,
            vectors: each as u8,
            tail: false,
            shifted,
        })
    });
    let ways = layouts.flat_map(move |layout| [false, true].map(|shared| (layout, shared)));
    ways.filter_map(move |(layout, shared)| {
        let keeps = Keeps { weight: shifted || layout.vectors <= 2, shared, at_once: 0 };
        way(&of, layout, keeps, vectors, &resources)
    })
}

/// Registers of a thread, about.
fn registers(of: &NormBackward, layout: Layout, keeps: Keeps) -> u64 {
    let lanes = u64::from(layout.lanes);
    let words = |element: Scalar| (lanes * u64::from(element.bytes()) / 4).max(1);
    let this = 2 * words(of.element);
    let weight = if keeps.weight { words(of.weight) } else { 0 };
    let sums = if keeps.shared { 0 } else { lanes * (1 + u64::from(of.bias)) };
    let each = this + u64::from(of.residual) * words(of.element) + weight + sums;
    let is_wide = of.element.bytes() >= 4;
    let more = [(layout.shifted, 20), (layout.cluster > 1, 6), (of.residual, 4)];
    let more: u64 = more.iter().filter(|(is, _)| *is).map(|(_, more)| more).sum();
    let (base, beside) = if is_wide { (50, 1) } else { (54, 4) };
    base + more + u64::from(layout.vectors) * (each + beside)
}

fn way(of: &NormBackward, layout: Layout, keeps: Keeps, vectors: u64, resources: &Resources) -> Option<Way> {
    let Layout { threads, team, cluster, lanes, vectors: each, .. } = layout;
    let (threads, team, cluster, each) =
        (u64::from(threads), u64::from(team), u64::from(cluster), u64::from(each));
    let warps = threads > team;
    if warps && keeps.shared {
        return None;
    }
    let registers = registers(of, layout, keeps).next_multiple_of(8);
    let results = 1 + u64::from(of.bias);
    // Each thread's sums, or those of each warp at the end.
    let shared = match (keeps.shared, warps) {
        (true, _) => 4 * threads * u64::from(lanes) * each * results,
        (false, true) => 4 * threads / 32 * team * u64::from(lanes) * each * results,
        (false, false) => 0,
    };
    if registers > 216 || shared + 2048 > u64::from(resources.shared_bytes) {
        return None;
    }
    let room = u64::from(resources.shared_bytes) / (shared + 1024);
    let warps_at_once = REGISTERS / registers * PARTS;
    let at_once = (warps_at_once / (threads / 32)).min(THREADS / threads).min(BLOCKS).min(room);
    if at_once == 0 {
        return None;
    }
    let all = team * cluster * each;
    let idle = (all - vectors) * 64 / all;
    let bytes = at_once * threads * each * u64::from(lanes) * 2 * u64::from(of.element.bytes());
    let bytes = bytes * (64 - idle) / 64;
    let lacking = ON_THE_WAY.saturating_sub(bytes) >> 10;
    // Threads that wait for one another, and alone on a multiprocessor.
    let meets = if team <= 32 { 0 } else { 2 + u64::from(cluster.ilog2()) * 6 };
    let alone = if team > 32 && at_once == 1 { 6 } else { 0 };
    let narrow = if team * 16 < 128 { 4 } else { 0 };
    // What else hides a latency.
    let few = THREADS_BUSY.saturating_sub(at_once * threads) / 32;
    // Parts are written and read once more, in hundredths of all.
    let parts = 400 * results * u64::from(resources.compute_units) * at_once
        / (cluster * 3 * of.rows.max(1) * u64::from(of.element.bytes()));
    let slots = if keeps.shared { 2 } else { 0 };
    let cost = lacking + idle / 2 + meets + alone + narrow + few + parts.min(20) + slots;
    Some(Way { layout, keeps: Keeps { at_once: at_once as u8, ..keeps }, at_once, cost })
}
