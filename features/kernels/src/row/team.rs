//! What the threads of a team come to together.

use vm_ir::Scalar;
use vm_ir::builder::{Builder, Val};

use super::Layout;

/// What the threads of a team have, merged; every thread gets the same, if `merge` of two states is the same in either order.
pub fn team<'b, const N: usize>(
    k: Builder<'b>,
    layout: Layout,
    name: &str,
    initial: [f32; N],
    state: [Val<'b>; N],
    merge: impl Fn([Val<'b>; N], [Val<'b>; N]) -> [Val<'b>; N],
) -> [Val<'b>; N] {
    let over = |width: u16, state: [Val<'b>; N]| {
        let masks = (0..width.ilog2()).rev().map(|bit| 1 << bit);
        masks.fold(state, |state, mask: i32| merge(state, state.map(|value| value.shuffle_xor(mask))))
    };
    let team = layout.team.max(1);
    let state = over(team.min(32), state);
    let warps = u32::from(team) / 32 * u32::from(layout.cluster);
    if warps <= 1 {
        return state;
    }
    let names: [String; N] = std::array::from_fn(|at| format!("{name}_{at}"));
    let shared = names.map(|name| k.shared(&name, Scalar::F32, &[warps]));
    let lane = k.lane_id();
    if layout.cluster > 1 {
        for (place, value) in shared.iter().zip(state) {
            // Alike in the warp, which is shown by taking one lane's.
            place.gather(value.shuffle(0));
        }
    } else {
        k.if_(lane.eq(0), || {
            let warp = k.warp_id();
            shared.iter().zip(state).for_each(|(place, value)| place.at([warp]).store(value));
        });
        k.barrier();
    }
    let groups = (0..warps as i32).step_by(32).map(|base| {
        let load = || shared.map(|place| place.at([if base == 0 { lane } else { lane + base }]).load());
        match warps as i32 - base {
            32.. => load(),
            left => k.if_else(lane.lt(left), load, || initial.map(|number| k.f32(number))),
        }
    });
    let gathered: Vec<_> = groups.collect();
    over(32, gathered[1..].iter().fold(gathered[0], |state, other| merge(state, *other)))
}
