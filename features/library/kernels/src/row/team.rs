//! What the threads of a team come to together.

use vm_ir::Scalar;
use vm_ir::builder::{Builder, Val};

use super::Layout;

/// What the threads of a team have, merged; every thread gets the same, if `merge` of two states is the same in either order.
/// With a turn, which is 0 and 1 by turns, a team may come again before all of it have what came of the turn before.
pub fn team<'b, const N: usize>(
    k: Builder<'b>,
    layout: Layout,
    turn: Option<Val<'b>>,
    name: &str,
    initial: [f32; N],
    state: [Val<'b>; N],
    merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
) -> [Val<'b>; N] {
    let state = warp(layout, state, &merge);
    across(k, layout, turn, name, initial, state, merge)
}

/// The same of a team's threads in each warp.
pub(super) fn warp<'b, const N: usize>(
    layout: Layout,
    state: [Val<'b>; N],
    merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
) -> [Val<'b>; N] {
    butterfly(layout.team.clamp(1, 32), state, merge)
}

/// Merges what each lane has with others', until all of so many neighbours have it.
fn butterfly<'b, const N: usize>(
    width: u16,
    state: [Val<'b>; N],
    merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
) -> [Val<'b>; N] {
    let masks = (0..width.ilog2()).rev().map(|bit| 1 << bit);
    masks.fold(state, |state, mask: i32| merge(state, state.map(|value| value.shuffle_xor(mask))))
}

/// The same of a team's warps, of which each has a state.
pub(super) fn across<'b, const N: usize>(
    k: Builder<'b>,
    layout: Layout,
    turn: Option<Val<'b>>,
    name: &str,
    initial: [f32; N],
    state: [Val<'b>; N],
    merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
) -> [Val<'b>; N] {
    let warps = u32::from(layout.team.max(1)) / 32 * u32::from(layout.cluster);
    if warps <= 1 {
        return state;
    }
    let lane = k.lane_id();
    let turns = if turn.is_some() { 2 } else { 1 };
    let groups = |load: &dyn Fn(Val<'b>) -> [Val<'b>; N]| {
        let groups = (0..warps as i32).step_by(32).map(|base| {
            let load = || load(if base == 0 { lane } else { lane + base });
            match warps as i32 - base {
                32.. => load(),
                left => k.if_else(lane.lt(left), load, || initial.map(|number| k.f32(number))),
            }
        });
        let gathered: Vec<_> = groups.collect();
        gathered[1..].iter().fold(gathered[0], |state, other| merge(state, *other))
    };
    let state = if layout.cluster > 1 {
        // Alike in the warp, which is shown by taking one lane's.
        let state = state.map(|value| value.shuffle(0));
        let wide = 1 << N.next_power_of_two().ilog2();
        let all = (0..wide).map(|at| state[at.min(N - 1)]).collect::<Vec<_>>();
        let all = if let [one] = all[..] { one } else { k.vector(&all) };
        let gather = |turn: i32| {
            let place = k.shared(&format!("{name}_{turn}"), Scalar::F32, &[warps * wide as u32]);
            move || {
                place.gather(all);
                groups(&|warp| std::array::from_fn(|at| place.at([warp * wide as i32 + at as i32]).load()))
            }
        };
        match turn {
            None => gather(0)(),
            Some(turn) => k.if_else(turn.eq(0), gather(0), gather(1)),
        }
    } else {
        let names: [String; N] = std::array::from_fn(|at| format!("{name}_{at}"));
        let shared = names.map(|name| k.shared(&name, Scalar::F32, &[turns * warps]));
        let from = |warp: Val<'b>| turn.map_or(warp, |turn| warp + turn * warps as i32);
        k.if_(lane.eq(0), || {
            let warp = from(k.warp_id());
            shared.iter().zip(state).for_each(|(place, value)| place.at([warp]).store(value));
        });
        k.barrier();
        groups(&|warp| shared.map(|place| place.at([from(warp)]).load()))
    };
    butterfly(32, state, merge)
}
