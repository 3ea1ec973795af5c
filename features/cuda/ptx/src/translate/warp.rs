//! Threads together. All threads of the block or the warp must provably come to these, which the IR's validator judges; so a mask of
//! threads matters only where it decides the result.

use super::Cx;
use super::table::{Modifiers, operands};
use crate::ast::{Class, Instr, Operand, Ty};
use crate::error::Result;
use vm_ir::Type;
use vm_ir::builder::Val;
use vm_ir::op::BarrierScope;

const U32: Ty = Ty::new(Class::Unsigned, 32);
const PREDICATE: Ty = Ty::new(Class::Predicate, 1);
/// The mask of all threads of a warp.
const ALL: u64 = 0xffff_ffff;

impl<'b> Cx<'_, 'b> {
    /// A value of 32 bits that all threads of the block have alike, so that the IR sees it: the first thread's.
    pub(super) fn agreed(&self, value: Val<'b>) -> Val<'b> {
        let Some(exchange) = self.exchange else { return value };
        let k = self.k;
        k.if_(k.local_index().eq(0), || exchange.at([k.i32(0)]).store(value));
        exchange.at([k.i32(0)]).load_uniform()
    }

    /// Without the threads that have ended.
    fn and_living(&self, value: Val<'b>) -> Val<'b> {
        self.living().map_or(value, |living| value & living)
    }

    /// With the threads that have ended.
    fn or_ended(&self, value: Val<'b>) -> Val<'b> {
        self.living().map_or(value, |living| value | !living)
    }

    /// Is this the mask of all threads?
    fn is_all(&self, mask: &Operand) -> bool {
        self.literal(Some(mask)).is_some_and(|mask| mask & ALL == ALL)
    }
}

pub(super) fn barrier(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    m.one_of(&["cta"]);
    if m.take("warp") {
        m.take("sync");
        cx.k.barrier_of(BarrierScope::Warp);
        return Ok(());
    }
    m.take("aligned");
    let reduces = m.take("red");
    if !reduces && !m.take("sync") {
        return Err(cx.unsupported("a barrier other than .sync"));
    }
    let threads = u64::from(cx.threads.iter().product::<u32>());
    let behind = if reduces { 1 } else { 0 };
    let at = if reduces { 1 } else { 0 };
    let number = cx.literal(instr.operands.get(at));
    let count = match instr.operands.len() {
        length if length > at + 1 + behind => cx.literal(instr.operands.get(at + 1)),
        _ => Some(threads),
    };
    // Whichever of a block's barriers: all threads come to it.
    if !matches!(number, Some(0..16)) || count != Some(threads) {
        return Err(cx.unsupported("a barrier of other than all threads"));
    }
    if !reduces {
        cx.k.barrier();
        return Ok(());
    }
    let how = m.one_of(&["popc", "and", "or"]);
    m.ty()?;
    let (Some(exchange), Some(last)) = (cx.exchange, instr.operands.last()) else {
        return Err(cx.unsupported("such a barrier"));
    };
    let given = cx.get(last, PREDICATE)?;
    let value = match how {
        Some("and") => cx.or_ended(given),
        _ => cx.and_living(given),
    };
    let element = || exchange.at([cx.k.i32(0)]);
    cx.k.barrier();
    let first = cx.k.local_index().eq(0);
    cx.k.if_(first, || element().store(cx.k.i32(0)));
    cx.k.barrier();
    element().atomic_add(cx.fit(value, Type::I32));
    let sum = element().load_uniform();
    let (value, ty) = match how {
        Some("and") => (sum.eq(cx.filled.unwrap_or(threads as u32) as i32), PREDICATE),
        Some("or") => (sum.ne(0), PREDICATE),
        _ => (sum, U32),
    };
    cx.result(instr, value, ty)
}

pub(super) fn shuffle(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    if !m.take("sync") {
        return Err(cx.unsupported("shfl without .sync"));
    }
    let Some(how) = m.one_of(&["up", "down", "bfly", "idx"]) else {
        return Err(cx.unsupported("such a shuffle"));
    };
    let ty = m.ty()?;
    let [result, a, b, bounds, _] = operands(instr)?;
    let value = cx.get(a, ty)?;
    let by = cx.get(b, U32)?;
    let k = cx.k;
    let whole = if how == "up" { 0 } else { 31 };
    let (shuffled, inside) = if cx.literal(Some(bounds)) == Some(whole)
        && (how != "idx" || cx.literal(Some(b)).is_some_and(|b| b < 32))
    {
        // Of the whole warp.
        let by_lanes = by & 31;
        let lane = k.lane_id();
        match how {
            "up" => (value.shuffle_up(by_lanes), lane.ge(by_lanes)),
            "down" => (value.shuffle_down(by_lanes), (lane + by_lanes).le(31)),
            "bfly" => (value.shuffle_xor(by_lanes), k.bool(true)),
            _ => (value.shuffle(by_lanes), k.bool(true)),
        }
    } else {
        let bounds = cx.get(bounds, U32)?;
        let lane = k.lane_id();
        let by = by & 31;
        let segments = bounds.shr_u(8) & 31;
        let clamp = bounds & 31;
        let most = (lane & segments) | (clamp & !segments);
        let least = lane & segments;
        let (from, inside) = match how {
            "up" => {
                let from = lane - by;
                (from, from.ge(most))
            }
            "down" => {
                let from = lane + by;
                (from, from.le(most))
            }
            "bfly" => {
                let from = lane ^ by;
                (from, from.le(most))
            }
            _ => {
                let from = least | (by & !segments);
                (from, from.le(most))
            }
        };
        (value.shuffle(inside.select(from, lane) & 31), inside)
    };
    match result {
        Operand::Pair(pair) => {
            cx.set(&pair[0], shuffled, false)?;
            cx.set(&pair[1], inside, false)
        }
        one => cx.set(one, shuffled, false),
    }
}

/// A bit for each thread in the mask whose predicate holds.
fn ballot<'b>(cx: &Cx<'_, 'b>, value: Val<'b>, mask: &Operand) -> Result<Val<'b>> {
    let all = cx.and_living(value).ballot();
    Ok(if cx.is_all(mask) { all } else { all & cx.get(mask, U32)? })
}

pub(super) fn vote(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    if !m.take("sync") {
        return Err(cx.unsupported("vote without .sync"));
    }
    let how = m.one_of(&["all", "any", "uni", "ballot"]);
    m.ty()?;
    let [_, value, mask] = operands(instr)?;
    let value = cx.get(value, PREDICATE)?;
    let all = cx.is_all(mask);
    match how {
        Some("ballot") => cx.result(instr, ballot(cx, value, mask)?, U32),
        Some("any") if all => cx.result(instr, cx.and_living(value).any(), PREDICATE),
        Some("all") if all => cx.result(instr, cx.or_ended(value).all(), PREDICATE),
        Some("any") => cx.result(instr, ballot(cx, value, mask)?.ne(0), PREDICATE),
        Some("all") => cx.result(instr, ballot(cx, !value, mask)?.eq(0), PREDICATE),
        Some("uni") => {
            let (some, others) = (ballot(cx, value, mask)?, ballot(cx, !value, mask)?);
            cx.result(instr, some.eq(0) | others.eq(0), PREDICATE)
        }
        _ => Err(cx.unsupported("such a vote")),
    }
}

pub(super) fn active(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    m.ty()?;
    cx.result(instr, cx.and_living(cx.k.bool(true)).ballot(), U32)
}

pub(super) fn reduce(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    if !m.take("sync") {
        return Err(cx.unsupported("redux without .sync"));
    }
    let Some(how) = m.one_of(&["add", "min", "max", "and", "or", "xor"]) else {
        return Err(cx.unsupported("such a reduction"));
    };
    let ty = m.ty()?;
    let [_, value, mask] = operands(instr)?;
    let value = cx.get(value, ty)?;
    let signed = ty.is_signed();
    if !cx.is_all(mask) || cx.living().is_some() {
        // One thread of the mask after the other.
        let k = cx.k;
        let members = cx.and_living(k.bool(true)).ballot() & cx.get(mask, U32)?;
        let neutral = match (how, signed) {
            ("min", true) => i32::MAX,
            ("max", true) => i32::MIN,
            ("and", _) | ("min", false) => -1,
            _ => 0,
        };
        let value = k.range(k.i32(0), 32).fold(k.i32(neutral), |at, sum| {
            let other = value.shuffle(at);
            let both = match (how, signed) {
                ("add", _) => sum + other,
                ("and", _) => sum & other,
                ("or", _) => sum | other,
                ("xor", _) => sum ^ other,
                ("min", true) => sum.min(other),
                ("max", true) => sum.max(other),
                ("min", false) => sum.min_u(other),
                _ => sum.max_u(other),
            };
            (members.shr_u(at) & 1).ne(0).select(both, sum)
        });
        return cx.result(instr, value, ty);
    }
    // Without a sign the order is that of signed integers whose top bit is flipped.
    let flip = cx.k.bits(Type::I32, 1 << 31);
    let value = match (how, signed) {
        ("add", _) => value.warp_add(),
        ("and", _) => value.warp_and(),
        ("or", _) => value.warp_or(),
        ("xor", _) => value.warp_xor(),
        ("min", true) => value.warp_min(),
        ("max", true) => value.warp_max(),
        ("min", false) => (value ^ flip).warp_min() ^ flip,
        _ => (value ^ flip).warp_max() ^ flip,
    };
    cx.result(instr, value, ty)
}

/// The first thread of the mask is chosen.
pub(super) fn elect(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    if !m.take("sync") {
        return Err(cx.unsupported("elect without .sync"));
    }
    let [result, mask] = operands(instr)?;
    let members = ballot(cx, cx.k.bool(true), mask)?;
    let leader = members.ctz();
    let Operand::Pair(pair) = result else { return Err(cx.unsupported("elect without a predicate")) };
    cx.set(&pair[0], leader, false)?;
    cx.set(&pair[1], leader.eq(cx.k.lane_id()), false)
}

/// Compares with each thread in turn.
pub(super) fn matching(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let any = m.one_of(&["any", "all"]) == Some("any");
    m.take("sync");
    let ty = m.ty()?;
    let [result, value, mask] = operands(instr)?;
    let value = cx.get(value, ty)?;
    let k = cx.k;
    let members = if cx.is_all(mask) {
        cx.and_living(k.bool(true)).ballot()
    } else {
        cx.get(mask, U32)? & cx.and_living(k.bool(true)).ballot()
    };
    if any {
        let lane = k.lane_id();
        let found = k.range(k.i32(0), 32).fold(k.i32(0), |at, found| {
            let same = value.shuffle(at).eq(value).ballot();
            // What this thread asked is what thread `at` answers to: whose value is mine?
            let mine = lane.eq(at);
            mine.select(same, found)
        });
        return cx.result(instr, found & members, U32);
    }
    let first = members.ctz();
    let same = value.shuffle(first).eq(value);
    let all = (!same).ballot() & members;
    let all = all.eq(0);
    let mask = all.select(members, k.i32(0));
    match result {
        Operand::Pair(pair) => {
            cx.set(&pair[0], mask, false)?;
            cx.set(&pair[1], all, false)
        }
        one => cx.set(one, mask, false),
    }
}
