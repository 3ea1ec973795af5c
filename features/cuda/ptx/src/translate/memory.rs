//! Memory: addresses to indices, loads, stores and atomics.

use super::table::{Modifiers, operands};
use super::value::{Fact, ir};
use super::{Cx, PARAMETERS, WINDOW};
use crate::ast::{Class, Instr, Operand, Space, Symbol, Ty, int};
use crate::error::Result;
use crate::space::{GLOBAL, LOCAL, PARAM, SHARED};
use vm_ir::builder::{Element, PlaceRef, Val};
use vm_ir::op::{Opcode, Order, Scope};
use vm_ir::{Scalar, Type};

/// Hints on how to cache, which change no result.
const HINTS: &[&str] = &[
    "ca", "cg", "cs", "lu", "cv", "nc", "wb", "wt", "L1::", "L2::", "level::", "unified", "weak", "mmio",
    "cta", "gpu", "sys", "cluster",
];

const U32: Ty = Ty::new(Class::Unsigned, 32);
const B64: Ty = Ty::new(Class::Bits, 64);
const PREDICATE: Ty = Ty::new(Class::Predicate, 1);

/// Where an access goes: the kinds of memory that are possible, each with the place and the index in it.
struct Target<'b> {
    /// The address, where the kind is known only when the kernel runs.
    generic: Option<Val<'b>>,
    choices: Vec<(Space, PlaceRef<'b>, Val<'b>)>,
}

fn space_of(m: &mut Modifiers<'_>) -> Option<Space> {
    let names = [
        ("global", Space::Global),
        ("const", Space::Const),
        ("shared", Space::Shared),
        ("shared::cta", Space::Shared),
        ("local", Space::Local),
        ("param", Space::Param),
        ("param::entry", Space::Param),
    ];
    names.into_iter().find_map(|(name, space)| m.take(name).then_some(space))
}

impl<'b> Cx<'_, 'b> {
    /// Returns the place that holds a space, and what `index` is in it. In a kernel without shared or local memory, an access to it
    /// goes to the null address. Compilers emit such accesses behind a test that fails there (`isspacep.local`).
    fn place(&self, space: Space, index: Val<'b>) -> (Space, PlaceRef<'b>, Val<'b>) {
        let found = match space {
            Space::Global | Space::Const => Some(self.memory),
            Space::Shared => self.shared,
            Space::Local => self.local,
            Space::Param => {
                self.block_used.set(true);
                Some(self.memory)
            }
        };
        match found {
            Some(place) => (space, place, index),
            None => (Space::Global, self.memory, -self.base),
        }
    }

    /// Where an address operand leads.
    fn target(&self, operand: &Operand, space: Option<Space>) -> Result<Target<'b>> {
        let Operand::Address(base, offset) = operand else {
            return Err(self.unsupported("an access without an address"));
        };
        let known = |space, index| Ok(Target { generic: None, choices: vec![self.place(space, index)] });
        match (&**base, space) {
            (Operand::Symbol(symbol), _) => {
                known(symbol.space, self.constant(Type::I64, self.offset_of(*symbol, *offset)))
            }
            (Operand::Register(_) | Operand::Int(_), Some(space @ (Space::Shared | Space::Local))) => {
                // Of 32 bits, or of 64 with the upper ones zero.
                let index = self.plus(self.get(base, U32)?, *offset);
                known(space, index)
            }
            (Operand::Register(_), Some(Space::Param)) => {
                let address = self.plus(self.get(base, B64)?, *offset);
                known(Space::Param, self.in_block(address))
            }
            (Operand::Register(_) | Operand::Int(_), Some(space @ (Space::Global | Space::Const))) => {
                known(space, self.plus(self.get(base, B64)?, *offset) - self.base)
            }
            (Operand::Register(register), None) => {
                let address = self.plus(self.get(base, B64)?, *offset);
                let found = self.spaces[*register as usize] & (self.windows() | PARAM | GLOBAL);
                let found = if found == 0 { GLOBAL } else { found };
                let mut choices = Vec::new();
                let spaces = [Space::Shared, Space::Local, Space::Param, Space::Global];
                for (bit, space) in [SHARED, LOCAL, PARAM, GLOBAL].into_iter().zip(spaces) {
                    // The space of a constant address is known.
                    let inside = self.known(address).zip(self.window(space));
                    let inside = inside.map(|(address, window)| address.wrapping_sub(window) < WINDOW);
                    if found & bit != 0 && inside != Some(false) {
                        let index = match (space, self.window(space)) {
                            (Space::Param, _) => self.in_block(address),
                            (_, Some(window)) => self.plus(address, (window as i64).wrapping_neg()),
                            (_, None) => address - self.base,
                        };
                        choices.push(self.place(space, index));
                        if inside == Some(true) {
                            break;
                        }
                    }
                }
                if choices.is_empty() {
                    choices.push((Space::Global, self.memory, address - self.base));
                }
                Ok(Target { generic: Some(address), choices })
            }
            (Operand::Int(_), None) => {
                known(Space::Global, self.plus(self.get(base, B64)?, *offset) - self.base)
            }
            _ => Err(self.unsupported("such an address")),
        }
    }

    /// 32 bits at an address and so many bytes further.
    pub(super) fn load_word(&self, address: &Operand, offset: i64) -> Result<Val<'b>> {
        let target = self.target(&Operand::Address(Box::new(address.clone()), offset), None)?;
        let loaded = self.access(&target, &|element| vec![element.typed(Scalar::I32).load()]);
        loaded.first().copied().ok_or_else(|| self.unsupported("an access without memory"))
    }

    /// Where in the memory an address of parameters is.
    fn in_block(&self, address: Val<'b>) -> Val<'b> {
        self.plus(address, (PARAMETERS as i64).wrapping_neg()) + self.block
    }

    /// Does an access where its memory is known, by a test where that is not known before.
    fn access(&self, target: &Target<'b>, does: &dyn Fn(Element<'b>) -> Vec<Val<'b>>) -> Vec<Val<'b>> {
        self.access_at(target, &|place, index| does(place.at([index])))
    }

    /// The same with the place and the index in it.
    fn access_at(
        &self,
        target: &Target<'b>,
        does: &dyn Fn(PlaceRef<'b>, Val<'b>) -> Vec<Val<'b>>,
    ) -> Vec<Val<'b>> {
        self.access_one_of(target, &target.choices, does)
    }

    fn access_one_of(
        &self,
        target: &Target<'b>,
        choices: &[(Space, PlaceRef<'b>, Val<'b>)],
        does: &dyn Fn(PlaceRef<'b>, Val<'b>) -> Vec<Val<'b>>,
    ) -> Vec<Val<'b>> {
        let Some(((space, place, index), rest)) = choices.split_first() else { return Vec::new() };
        match (target.generic, self.window(*space), rest) {
            (Some(address), Some(window), [_, ..]) => {
                let inside = (address - self.k.i64(window as i64)).lt_u(WINDOW);
                self.k.if_else(inside, || does(*place, *index), || self.access_one_of(target, rest, does))
            }
            _ => does(*place, *index),
        }
    }

    /// Is it a load by which the block agrees on a value?
    pub(super) fn agrees(&self, instr: &Instr) -> bool {
        let address = instr.operands.get(1).map(|operand| match operand {
            Operand::Address(base, _) => &**base,
            other => other,
        });
        let known = match address {
            Some(Operand::Symbol(symbol)) => symbol.space == Space::Shared,
            Some(Operand::Register(register)) => {
                self.register(*register).is_ok_and(|value| self.known(value).is_some())
            }
            _ => false,
        };
        let plain = !instr.modifiers().any(|m| matches!(m, "volatile" | "relaxed" | "acquire"));
        let load = instr.opcode() == "ld" && instr.guard.is_none() && plain;
        self.agree && self.together.get() && load && known
    }

    /// Where in the kernel's parameters an address is, if it is there.
    fn in_parameters(&self, address: &Operand, space: Option<Space>) -> Result<Option<u64>> {
        let Operand::Address(base, offset) = address else { return Ok(None) };
        let found = match (&**base, space) {
            (Operand::Symbol(Symbol { space: Space::Param, offset }), _) => Some(*offset),
            (Operand::Register(register), None | Some(Space::Param)) => {
                match self.fact(self.register(*register)?) {
                    Some(Fact::Parameter(offset)) => Some(offset),
                    _ => None,
                }
            }
            _ => None,
        };
        Ok(found.map(|found| found.wrapping_add(*offset as u64)))
    }

    /// A parameter of the kernel, from an offset on.
    fn parameter(&self, offset: u64, ty: Ty) -> Result<Val<'b>> {
        let size = ty.bytes();
        let found = self.words.iter().find(|(word, _)| {
            word.offset <= offset && offset.saturating_add(size) <= word.offset + word.size
        });
        let Some((word, value)) = found else {
            // What is no scalar is in the memory.
            let index = self.in_block(self.parameter_address(offset));
            let scalar = int(ty.bits * u32::from(ty.lanes)).unwrap_or(Scalar::I64);
            let (_, place, index) = self.place(Space::Param, index);
            let value = place.at([index]).typed(scalar).load();
            return Ok(self.fit(value, ir(ty)?));
        };
        let whole = int(word.scalar.bits()).map_or(Type::I64, Type::from);
        let shift = 8 * (offset - word.offset);
        let value =
            if shift == 0 { *value } else { self.fit(*value, whole).shr_u(self.k.bits(whole, shift)) };
        Ok(self.fit(value, ir(ty)?))
    }
}

/// How many values an access is of.
fn lanes(m: &mut Modifiers<'_>) -> usize {
    match m.one_of(&["v2", "v4", "v8"]) {
        Some("v2") => 2,
        Some("v4") => 4,
        Some("v8") => 8,
        _ => 1,
    }
}

/// The order of an access that is more than plain; `None` if it is plain.
fn order(m: &mut Modifiers<'_>) -> Option<Order> {
    match m.one_of(&["volatile", "relaxed", "acquire", "release", "acq_rel"])? {
        "acquire" => Some(Order::Acquire),
        "release" => Some(Order::Release),
        "acq_rel" => Some(Order::AcqRel),
        _ => Some(Order::Relaxed),
    }
}

fn scope(m: &mut Modifiers<'_>) -> Option<Scope> {
    match m.one_of(&["cta", "gpu", "sys", "cluster"])? {
        "cta" => Some(Scope::Block),
        "sys" => Some(Scope::System),
        _ => Some(Scope::Device),
    }
}

/// The element in memory of an access, and how many of them one op moves.
fn element(cx: &Cx<'_, '_>, ty: Ty, lanes: usize) -> Result<(Scalar, usize)> {
    let scalar = int(ty.bits * u32::from(ty.lanes)).ok_or_else(|| cx.unsupported("an access of 128 bits"))?;
    Ok((scalar, lanes.min(16 / scalar.bytes() as usize)))
}

/// Where a part of 16 bytes of an access is.
fn part_of(address: &Operand, part: usize) -> Operand {
    match address {
        Operand::Address(base, offset) => {
            Operand::Address(base.clone(), offset.wrapping_add(part as i64 * 16))
        }
        _ => address.clone(),
    }
}

pub(super) fn load(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let order = order(m);
    let scope = order.and_then(|_| scope(m));
    let space = space_of(m);
    m.drop_all(HINTS);
    let count = lanes(m);
    let ty = m.ty()?;
    let [to, address, ..] = &instr.operands[..] else { return Err(cx.unsupported("so few operands")) };
    let registers = cx.list(to);
    if registers.len() != count {
        return Err(cx.unsupported("a vector of another length"));
    }
    if let Some(at) = cx.in_parameters(address, space)? {
        for (lane, register) in registers.iter().enumerate() {
            let at = at.wrapping_add(lane as u64 * ty.bytes());
            let value = cx.parameter(at, ty)?;
            cx.set(register, value, ty.is_signed())?;
        }
        return Ok(());
    }
    let (scalar, together) = element(cx, ty, count)?;
    for (part, registers) in registers.chunks(together).enumerate() {
        let target = cx.target(&part_of(address, part), space)?;
        let loaded = cx.access(&target, &|element| {
            let element = element.typed(scalar);
            let loaded = match (order, scalar) {
                (Some(order), Scalar::I32 | Scalar::I64) if registers.len() == 1 => {
                    let element = scope.into_iter().fold(element, Element::among);
                    element.ordered(order).atomic_load()
                }
                _ if registers.len() > 1 => element.load_vector(registers.len() as u8),
                _ => element.load(),
            };
            vec![loaded]
        });
        let Some(value) = loaded.first() else { return Err(cx.unsupported("an access without memory")) };
        for (lane, register) in registers.iter().enumerate() {
            let value = if registers.len() > 1 { value.lane(lane as u8) } else { *value };
            // One address for all: no thread writes there meanwhile, or they would race.
            let shared = matches!(target.choices[..], [(Space::Shared, ..)]);
            let value = match shared && cx.agrees(instr) && scalar != Scalar::I64 {
                true => cx.fit(cx.agreed(cx.fit(value, Type::I32)), value.ty()),
                false => value,
            };
            cx.set(register, value, ty.is_signed())?;
        }
    }
    Ok(())
}

pub(super) fn store(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let order = order(m);
    let scope = order.and_then(|_| scope(m));
    let space = space_of(m);
    m.drop_all(HINTS);
    let count = lanes(m);
    let ty = m.ty()?;
    let [address, from, ..] = &instr.operands[..] else { return Err(cx.unsupported("so few operands")) };
    let values = cx.list(from);
    if values.len() != count {
        return Err(cx.unsupported("a vector of another length"));
    }
    let (scalar, together) = element(cx, ty, count)?;
    let bits = Ty::new(Class::Bits, scalar.bits());
    for (part, values) in values.chunks(together).enumerate() {
        let target = cx.target(&part_of(address, part), space)?;
        if target.choices.iter().any(|(space, ..)| *space == Space::Const) {
            return Err(cx.unsupported("a store to constant memory"));
        }
        let values = values
            .iter()
            .map(|value| match value {
                // A literal of a float type is a float.
                Operand::F32(_) | Operand::F64(_) => Ok(cx.fit(cx.get(value, ty)?, ir(bits)?)),
                _ => cx.get(value, bits),
            })
            .collect::<Result<Vec<_>>>()?;
        let value = if values.len() > 1 { cx.k.vector(&values) } else { values[0] };
        cx.access(&target, &|element| {
            let element = element.typed(scalar);
            match (order, scalar) {
                (Some(order), Scalar::I32 | Scalar::I64) if values.len() == 1 => {
                    let element = scope.into_iter().fold(element, Element::among);
                    element.ordered(order).atomic_store(value);
                }
                _ => element.store(value),
            }
            Vec::new()
        });
    }
    Ok(())
}

pub(super) fn atomic(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let order = order(m).unwrap_or(Order::Relaxed);
    let scope = scope(m);
    let space = space_of(m);
    m.take("noftz");
    m.drop_all(&["L2::", "level::"]);
    let Some(what) = m.one_of(&["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]) else {
        return Err(cx.unsupported("such an atomic"));
    };
    let ty = m.ty()?;
    let (result, given) = match instr.opcode() {
        "red" => (None, &instr.operands[..]),
        _ => match instr.operands.split_first() {
            Some((result, rest)) => (Some(result), rest),
            None => return Err(cx.unsupported("so few operands")),
        },
    };
    let [address, values @ ..] = given else { return Err(cx.unsupported("so few operands")) };
    if ty.bits == 16 {
        let [value, ..] = values else { return Err(cx.unsupported("so few operands")) };
        return halves(cx, (result, address, space, value), what, ty);
    }
    if ty.bits < 32 || ty.bits > 64 {
        return Err(cx.unsupported("an atomic of such a type"));
    }
    let scalar = ir(ty)?.scalar();
    let values = values.iter().map(|value| cx.get(value, ty)).collect::<Result<Vec<_>>>()?;
    let expected = if what == "cas" { 2 } else { 1 };
    // A cache policy may stand behind.
    let (true, Some(value)) = (values.len() >= expected, values.first().copied()) else {
        return Err(cx.unsupported("so few operands"));
    };
    let target = cx.target(address, space)?;
    let signed = ty.is_signed();
    let code = match (what, signed) {
        ("add", _) => Opcode::AtomicAdd,
        ("min", true) => Opcode::AtomicMinS,
        ("min", false) => Opcode::AtomicMinU,
        ("max", true) => Opcode::AtomicMaxS,
        ("max", false) => Opcode::AtomicMaxU,
        ("and", _) => Opcode::AtomicAnd,
        ("or", _) => Opcode::AtomicOr,
        ("xor", _) => Opcode::AtomicXor,
        _ => Opcode::AtomicExchange,
    };
    if ty.is_float() && !matches!(what, "add" | "exch") {
        return Err(cx.unsupported(format!("atom.{what} of floats")));
    }
    let old = cx.access(&target, &|element| {
        let element = scope.into_iter().fold(element.typed(scalar), Element::among).ordered(order);
        vec![match what {
            "cas" => element.atomic_cas(value, values[1]),
            "inc" | "dec" => count(cx, element, what, value),
            _ => element.atomic(code, value),
        }]
    });
    match (result, old.first()) {
        (Some(result), Some(old)) => cx.set(result, *old, signed),
        _ => Ok(()),
    }
}

/// A sum in 16 bits, or in both halves of 32: the whole word is compared and exchanged until nobody came between.
fn halves(
    cx: &Cx<'_, '_>,
    (result, address, space, value): (Option<&Operand>, &Operand, Option<Space>, &Operand),
    what: &str,
    ty: Ty,
) -> Result<()> {
    if what != "add" || !ty.is_float() {
        return Err(cx.unsupported("an atomic of such a type"));
    }
    let k = cx.k;
    let (value, part) = (cx.get(value, ty)?, ir(ty)?);
    let target = cx.target(address, space)?;
    let old = cx.access_at(&target, &|place, index| {
        // A single number may be the upper half of its word.
        let (first, shift) = match ty.lanes {
            1 => {
                let shift = cx.fit((index & 2) << 3, Type::I32);
                (index & k.constant(index.ty(), -4), shift)
            }
            _ => (index, k.i32(0)),
        };
        let element = place.at([first]).typed(Scalar::I32);
        let before = element.clone().atomic_load();
        let last = k.while_(
            vec![k.bool(true), before],
            |carried| carried[0],
            |carried| {
                let old = carried[1];
                let sum = cx.fit(cx.fit(old.shr_u(shift), part) + value, Type::I32) << shift;
                let mask = if ty.lanes == 1 { k.i32(0xffff) << shift } else { k.i32(-1) };
                let found = element.clone().atomic_cas(old, (old & !mask) | sum);
                vec![found.ne(old), found]
            },
        );
        vec![cx.fit(last[1].shr_u(shift), part)]
    });
    match (result, old.first()) {
        (Some(result), Some(old)) => cx.set(result, *old, false),
        _ => Ok(()),
    }
}

/// `cp.async`, as a synchronous copy: its groups are no-ops. It copies `src-size` bytes and fills the rest of its size with zeros; a
/// true `ignore-src` is a `src-size` of 0.
pub(super) fn copy(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    if !m.take("async") || m.one_of(&["bulk", "reduce", "mbarrier"]).is_some() {
        return Err(cx.unsupported("a copy other than cp.async"));
    }
    if m.one_of(&["commit_group", "wait_group", "wait_all"]).is_some() {
        return Ok(());
    }
    let hinted = m.take("L2::cache_hint");
    m.drop_all(HINTS);
    let (true, true) = (m.take("shared") || m.take("shared::cta"), m.take("global")) else {
        return Err(cx.unsupported("a copy between such memory"));
    };
    let [to, from, size, rest @ ..] = &instr.operands[..] else {
        return Err(cx.unsupported("so few operands"));
    };
    let (scalar, lanes) = match cx.literal(Some(size)) {
        Some(4) => (Scalar::I32, 1),
        Some(8) => (Scalar::I64, 1),
        Some(16) => (Scalar::I32, 4),
        _ => return Err(cx.unsupported("a copy of such a size")),
    };
    let size = scalar.bytes() * u32::from(lanes);
    // The cache policy comes last.
    let rest = match rest.split_last() {
        Some((_, rest)) if hinted => rest,
        None if hinted => return Err(cx.unsupported("a cache hint without a policy")),
        _ => rest,
    };
    let k = cx.k;
    let copied = match rest {
        [] => cx.constant(Type::I32, size.into()),
        [ignores] if cx.is_predicate(ignores) => {
            cx.get(ignores, PREDICATE)?.select(k.i32(0), k.i32(size as i32))
        }
        [bytes] => cx.get(bytes, U32)?,
        _ => return Err(cx.unsupported("so many operands")),
    };
    let source = cx.target(from, Some(Space::Global))?;
    let target = cx.target(to, Some(Space::Shared))?;
    let ([(_, from, from_index)], [(_, to, to_index)]) = (&source.choices[..], &target.choices[..]) else {
        return Err(cx.unsupported("such a copy"));
    };
    let to_element = || to.at([*to_index]).typed(scalar);
    let whole = || {
        let element = from.at([*from_index]).typed(scalar);
        to_element().store(if lanes > 1 { element.load_vector(lanes) } else { element.load() });
    };
    let part = || {
        let zero = k.bits(scalar.into(), 0);
        to_element().store(if lanes > 1 { k.vector(&[zero; 4]) } else { zero });
        k.range(k.i32(0), copied).each(|byte| {
            let loaded = from.at([*from_index + byte.to(Scalar::I64)]).load();
            to.at([*to_index + cx.fit(byte, to_index.ty())]).store(loaded);
        });
    };
    match cx.known(copied) {
        Some(copied) if copied >= size.into() => whole(),
        Some(_) => part(),
        None => k.if_else(copied.ge_u(size as i32), whole, part),
    }
    Ok(())
}

/// `inc` and `dec`, which wrap at a bound, by comparing and exchanging until nobody came between.
fn count<'b>(cx: &Cx<'_, 'b>, element: Element<'b>, what: &str, bound: Val<'b>) -> Val<'b> {
    let k = cx.k;
    let first = element.clone().atomic_load();
    let last = k.while_(
        vec![k.bool(true), first],
        |carried| carried[0],
        |carried| {
            let old = carried[1];
            let next = match what {
                "inc" => old.ge_u(bound).select(k.bits(old.ty(), 0), old + 1),
                _ => (old.eq(0) | old.gt_u(bound)).select(bound, old - 1),
            };
            let found = element.clone().atomic_cas(old, next);
            vec![found.ne(old), found]
        },
    );
    last[1]
}

/// `membar` is `fence.sc`.
pub(super) fn fence(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let order = match m.one_of(&["sc", "acq_rel", "acquire", "release"]) {
        Some("sc") => Order::SeqCst,
        None if instr.opcode() == "membar" => Order::SeqCst,
        _ => Order::AcqRel,
    };
    let scope = match m.one_of(&["cta", "gl", "gpu", "sys", "cluster"]) {
        Some("cta") => Scope::Block,
        Some("sys") => Scope::System,
        Some("cluster") => return Err(cx.unsupported("a fence of a cluster")),
        _ => Scope::Device,
    };
    cx.k.fence(order, scope);
    Ok(())
}

pub(super) fn cvta(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let to = m.take("to");
    let Some(space) = space_of(m) else {
        return Err(cx.unsupported("cvta of such a space"));
    };
    let ty = m.ty()?;
    let [_, a] = operands(instr)?;
    let a = cx.get(a, ty)?;
    let value = match cx.window(space).filter(|_| space != Space::Param) {
        // An address of parameters is a generic one anyway.
        None => a,
        Some(window) if to => cx.plus(a, (window as i64).wrapping_neg()),
        Some(window) => cx.plus(a, window as i64),
    };
    cx.result(instr, value, ty)
}

pub(super) fn isspacep(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let space = space_of(m);
    let [_, a] = operands(instr)?;
    let address = cx.get(a, B64)?;
    let inside = |space| cx.window(space).map(|window| (address - cx.k.i64(window as i64)).lt_u(WINDOW));
    let value = match (space, inside(Space::Shared), inside(Space::Local)) {
        (Some(Space::Shared), Some(shared), _) => shared,
        (Some(Space::Local), _, Some(local)) => local,
        (Some(Space::Global), Some(shared), Some(local)) => !(shared | local),
        _ => return Err(cx.unsupported("isspacep of such a space")),
    };
    cx.result(instr, value, PREDICATE)
}

/// A cache policy, which nobody asks for.
pub(super) fn policy(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    m.drop_all(&[""]);
    cx.result(instr, cx.constant(Type::I64, 0), B64)
}

pub(super) fn nothing(_: &Cx<'_, '_>, _: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    m.drop_all(&[""]);
    Ok(())
}
