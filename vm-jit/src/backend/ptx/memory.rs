//! Views, shared and local arrays, and atomics.
//!
//! A guest's access to a view is done under the predicate that it is in bounds; a load's registers hold zero
//! before. Of a vector that may be partly in bounds, each lane then has a predicate of its own, behind a branch
//! that is taken only there. An access by bytes has one predicate: that it is below the last multiple of its size in the
//! view, and at one. A surface's pixel is accessed by an instruction of its own, by whoever, under the predicate that all of its
//! coordinates are in bounds. What is checked is in the [`SafetyPlan`](crate::safety::SafetyPlan).

use super::arch::Feature;
use super::asm::{Arg, Class, Label, Reg, def, when};
use super::writer::{Extent, View, Writer, class_of, memory_type, scope_name};
use crate::safety::{Access, Last};
use vm_ir::module::{Op, Place, SharedArray};
use vm_ir::op::{Cache, Opcode, Order, Shape};
use vm_ir::view::Access as Rights;
use vm_ir::{Scalar, Value};

/// The whole of what is accessed: 1.0.
const ONE: u32 = 0x3f80_0000;
/// Bytes of the widest access.
pub(super) const WIDEST: u32 = 16;

/// The constant in an access's last index, in bytes, if it fits an instruction.
fn split_offset(known: &Access, size: u32) -> Option<i64> {
    let bytes = known.base.1.checked_mul(i64::from(size))?;
    (bytes != 0 && i32::try_from(bytes).is_ok()).then_some(bytes)
}

/// The instruction of this name for a number of words of a size in bytes.
fn of_words(name: &str, count: u32, bytes: u32) -> String {
    let bits = bytes * 8;
    if count > 1 { format!("{name}.v{count}.b{bits}") } else { format!("{name}.b{bits}") }
}

/// Where an access goes.
pub(super) struct Address {
    pub(super) base: Reg,
    pub(super) offset: i64,
    /// `global`, `local`, `shared`, or `shared::cluster` for that of another block.
    pub(super) space: &'static str,
    /// What the address is known to be a multiple of, in bytes.
    pub(super) align: u32,
}

/// Under which predicate an access is done.
#[derive(Clone, Copy)]
enum Guard {
    Always,
    When(Reg),
    /// All lanes under the first predicate; else each whose index is in bounds, under the second if there is
    /// one.
    EachLane(Reg, Option<Reg>),
}

impl Writer<'_> {
    pub(super) fn view(&self, place: Place) -> Option<&View> {
        match place {
            Place::View(i) => self.views.get(usize::from(i))?.as_ref(),
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => None,
        }
    }

    /// An index as 64 bits.
    pub(super) fn wide(&mut self, index: Value) -> Reg {
        let reg = self.get(index, 0);
        match reg.class {
            Class::B64 => reg,
            _ => def!(self, B64, "cvt.s64.s32", reg),
        }
    }

    fn address(&mut self, op: &Op, place: Place, known: &Access, lanes: u32) -> Address {
        match place {
            Place::View(_) => self.view_address(op, place, known),
            Place::Shared(array) => {
                let array = usize::from(array);
                let SharedArray { element, dims, .. } = &self.kernel.shared()[array];
                let start = self.shared.unwrap_or(Reg::NONE);
                let offset = self.shared_offsets[array];
                self.array_address(op, (element.bytes(), dims), known, lanes, (start, offset, "shared"))
            }
            Place::Local(array) => {
                let array = usize::from(array);
                let len = self.kernel.local()[array].len;
                let start = self.local.unwrap_or(Reg::NONE);
                let offset = self.local_offset(array);
                self.array_address(op, (1, &[len]), known, lanes, (start, offset, "local"))
            }
            // No load or store has such a place.
            Place::Channel(_) | Place::Fragment(_) => {
                Address { base: Reg::NONE, offset: 0, space: "shared", align: 1 }
            }
        }
    }

    fn view_address(&mut self, op: &Op, place: Place, known: &Access) -> Address {
        let (size, align) = match place {
            Place::View(i) => self.kernel.view(i).map_or((1, 1), |v| (v.element.bytes(), v.align)),
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => (1, 1),
        };
        let Some(view) = self.view(place).cloned() else {
            return Address { base: Reg::NONE, offset: 0, space: "global", align: 1 };
        };
        let mut base = view.base;
        for (index, stride) in op.operands.iter().zip(&view.strides) {
            let index = self.wide(*index);
            base = def!(self, B64, "mad.lo.s64", index, *stride, base);
        }
        let (mut index, mut offset) = (op.operands[view.strides.len()], 0);
        if let Some(bytes) = split_offset(known, size) {
            (index, offset) = (known.base.0, bytes);
        }
        match self.constant(index) {
            Some(bits) => {
                let at = vm_ir::format::signed(self.ty(index).scalar(), bits);
                let bytes = at.checked_mul(i64::from(size)).and_then(|bytes| bytes.checked_add(offset));
                match bytes.filter(|o| i32::try_from(*o).is_ok()) {
                    Some(bytes) => offset = bytes,
                    None => {
                        let index = self.wide(index);
                        base = def!(self, B64, "mad.lo.s64", index, i64::from(size), base);
                    }
                }
            }
            None => {
                let reg = self.get(index, 0);
                base = match reg.class {
                    Class::B64 => def!(self, B64, "mad.lo.s64", reg, i64::from(size), base),
                    _ => def!(self, B64, "mad.wide.s32", reg, i64::from(size), base),
                };
            }
        }
        let align = known.bytes.unwrap_or(align.min(size << known.shift.min(8)));
        Address { base, offset, space: "global", align }
    }

    /// Where an access to an array is: of elements of a size and extents, which begins so far behind a start.
    fn array_address(
        &mut self,
        op: &Op,
        (size, dims): (u32, &[u32]),
        known: &Access,
        lanes: u32,
        (start, begin, space): (Reg, u32, &'static str),
    ) -> Address {
        let last = dims.len() - 1;
        let mut align = WIDEST.min(size << known.shift.min(8));
        let (mut element, mut offset) = (None, 0);
        for (dimension, extent) in dims.iter().enumerate() {
            let index = op.operands[dimension];
            let clamp = if dimension == last { known.last.is_checked() } else { known.checks(dimension) };
            let room = if dimension == last { known.bytes.unwrap_or(lanes) } else { 1 };
            let mut index = index;
            if let Some(bytes) = split_offset(known, size).filter(|_| dimension == last && !clamp) {
                (index, offset) = (known.base.0, bytes);
            }
            let reg = self.get(index, 0);
            let greatest = i64::from(extent - room.min(*extent));
            let reg = match (reg.class, clamp) {
                (Class::B64, true) => {
                    let least = def!(self, B64, "min.u64", reg, greatest);
                    def!(self, B32, "cvt.u32.u64", least)
                }
                (Class::B64, false) => def!(self, B32, "cvt.u32.u64", reg),
                (_, true) => def!(self, B32, "min.u32", reg, greatest),
                (_, false) => reg,
            };
            let reg = match known.bytes.filter(|_| clamp) {
                Some(bytes) => def!(self, B32, "and.b32", reg, -i64::from(bytes)),
                None => reg,
            };
            if clamp && dimension == last {
                align = align.min(size << (greatest as u64).trailing_zeros().min(8));
            }
            element = Some(match element {
                None => reg,
                Some(outer) => {
                    let row = size * extent;
                    align = align.min(1 << row.trailing_zeros());
                    def!(self, B32, "mad.lo.u32", outer, i64::from(*extent), reg)
                }
            });
        }
        let base = match element {
            Some(element) => def!(self, B32, "mad.lo.u32", element, i64::from(size), start),
            None => start,
        };
        let align = known.bytes.unwrap_or(align);
        Address { base, offset: offset + i64::from(begin), space, align }
    }

    /// The predicate for a guest's access to a view.
    fn guard(&mut self, op: &Op, place: Place, known: &Access, lanes: u32) -> Guard {
        let Some(view) = self.view(place).cloned() else { return Guard::Always };
        let last = view.extents.len() - 1;
        let mut outer: Option<Reg> = None;
        for dimension in 0..last {
            if !known.checks(dimension) {
                continue;
            }
            let index = self.wide(op.operands[dimension]);
            outer = Some(self.within(index, view.extents[dimension].into(), outer));
        }
        if let Last::Unchecked(_) = known.last {
            return outer.map_or(Guard::Always, Guard::When);
        }
        let index = op.operands[last];
        let extent = view.extents[last];
        match known.last {
            Last::Bytes { within, aligned } => {
                let (index, bytes) = (self.wide(index), i64::from(known.bytes.unwrap_or(1)));
                let mut all = outer;
                if aligned {
                    let rest = def!(self, B64, "and.b64", index, bytes - 1);
                    all = Some(def!(self, Pred, "setp.eq.s64", rest, 0));
                }
                if within {
                    // The last multiple of the size, as the index is one.
                    let limit = match extent {
                        Extent::Fixed(extent) => Arg::Int(extent & -bytes),
                        Extent::Reg(extent) => Arg::Reg(def!(self, B64, "and.b64", extent, -bytes)),
                    };
                    all = Some(self.within(index, limit, all));
                }
                all.map_or(Guard::Always, Guard::When)
            }
            Last::Lanes if lanes > 1 => {
                // The last index at which all lanes fit, plus one; none if the row is too short.
                let limit = match extent {
                    Extent::Fixed(extent) => Arg::Int((extent - i64::from(lanes) + 1).max(0)),
                    Extent::Reg(extent) => {
                        let limit = def!(self, B64, "sub.s64", extent, i64::from(lanes - 1));
                        Arg::Reg(def!(self, B64, "max.s64", limit, 0))
                    }
                };
                let index = self.wide(index);
                let all = self.within(index, limit, outer);
                Guard::EachLane(all, outer)
            }
            _ => {
                let index = self.wide(index);
                Guard::When(self.within(index, extent.into(), outer))
            }
        }
    }

    /// `index < extent`, unsigned, and also `with`.
    pub(super) fn within(&mut self, index: Reg, extent: Arg, with: Option<Reg>) -> Reg {
        match with {
            None => def!(self, Pred, "setp.lt.u64", index, extent),
            Some(with) => def!(self, Pred, "setp.lt.and.u64", index, extent, with),
        }
    }

    fn under(&mut self, guard: Option<Reg>, name: &str, args: &[Arg]) {
        self.asm.ins(guard.map(|reg| (reg, true)), name, args);
    }

    /// A load or a store, with the cache's policy behind it if there is one.
    fn access(&mut self, guard: Option<Reg>, name: &str, args: [Arg; 2], policy: Option<Reg>) {
        match policy {
            Some(policy) => self.under(guard, name, &[args[0], args[1], Arg::Reg(policy)]),
            None => self.under(guard, name, &args),
        }
    }

    /// The instruction of a load without its type. One that the plan wants done once is strong, so that an assembler may
    /// neither repeat it nor take memory for constant.
    fn load_name(&self, op: &Op, place: Place, space: &str) -> String {
        match self.plan.loads_once(op) {
            true => format!("ld.relaxed.sys.{space}"),
            false => format!("ld.{space}{}", self.hints(op, place)),
        }
    }

    /// What comes behind `ld.global` or `st.global`.
    fn hints(&self, op: &Op, place: Place) -> String {
        let constant = match place {
            Place::View(i) => {
                op.result().is_some() && self.kernel.view(i).is_some_and(|v| v.access == Rights::Read)
            }
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => {
                return String::new();
            }
        };
        let policies = self.has(Feature::EvictionPriority);
        let mut hints = String::new();
        match op.cache() {
            Cache::Stream if !policies => hints.push_str(".cs"),
            _ => {}
        }
        if constant {
            hints.push_str(".nc");
        }
        match op.cache() {
            Cache::Stream if policies => hints.push_str(".L1::evict_first"),
            Cache::Keep if policies => hints.push_str(".L1::evict_last"),
            _ => {}
        }
        if self.policy(op, place).is_some() {
            hints.push_str(".L2::cache_hint");
        }
        hints
    }

    /// The policy for the L2 cache that goes with `.L2::cache_hint`.
    fn policy(&self, op: &Op, place: Place) -> Option<Reg> {
        self.keep.filter(|_| op.cache() == Cache::Keep && matches!(place, Place::View(_)))
    }

    /// Makes the policy of what is to be evicted last, if any op asks for it and the target has such.
    pub(super) fn prepare_policy(&mut self) {
        let mut asked = false;
        self.kernel.for_each_op(&mut |op| {
            let memory = matches!(op.code.shape(), Shape::Load | Shape::Store);
            asked |= memory && op.cache() == Cache::Keep && matches!(op.place, Some(Place::View(_)));
        });
        if asked && self.has(Feature::CachePolicy) {
            self.keep = Some(def!(self, B64, "createpolicy.fractional.L2::evict_last.b64", Arg::F32(ONE)));
        }
    }

    /// Loads a pixel of a surface or stores one, and tells whether the place is such. What the instruction itself makes of
    /// coordinates out of bounds is the same.
    fn pixel(&mut self, op: &Op, place: Place, value: Value) -> bool {
        let Some(surface) = self.kernel.surface(place) else { return false };
        let (Some(view), Some(known)) = (self.view(place).cloned(), self.plan.access(op).cloned()) else {
            return true;
        };
        let (scalar, lanes) = (surface.element, self.lanes(value) as i64);
        let guard = match self.guard(op, place, &known, lanes as u32) {
            Guard::Always => None,
            Guard::When(reg) | Guard::EachLane(reg, _) => Some(reg),
        };
        let at: Vec<Value> = op.operands[..surface.indices()].iter().rev().copied().collect();
        let mut at: Vec<Reg> = at.into_iter().map(|index| self.narrow(index)).collect();
        at[0] = def!(self, B32, "mul.lo.u32", at[0], i64::from(scalar.bytes()) * lanes);
        let kind = match at[..] {
            [x, y, layer] => {
                // The last is ignored.
                at = vec![layer, x, y, y];
                "a2d"
            }
            _ => "2d",
        };
        let vector = if lanes > 1 { format!(".v{lanes}") } else { String::new() };
        let name = |op: &str| format!("{op}.b.{kind}{vector}.b{}.zero", scalar.bits());
        let class = if scalar.bytes() < 4 { Class::B16 } else { Class::B32 };
        let convert = class_of(scalar) != class;
        let pixel = Arg::Tensor(view.base, &at);
        if op.result().is_some() {
            let regs: Vec<Reg> = (0..lanes).map(|_| self.asm.new_reg(class)).collect();
            regs.iter().for_each(|reg| self.zero(*reg));
            self.under(guard, &name("suld"), &[Arg::List(&regs), pixel]);
            let to = format!("cvt.u32.u{}", scalar.bits());
            let all: Vec<Reg> =
                regs.into_iter().map(|reg| if convert { def!(self, B32, &to, reg) } else { reg }).collect();
            self.set_all(value, &all);
        } else {
            let all = self.all(value);
            let regs: Vec<Reg> = all
                .into_iter()
                .map(|reg| if convert { def!(self, B16, "cvt.u16.u32", reg) } else { reg })
                .collect();
            self.under(guard, &name("sust"), &[pixel, Arg::List(&regs)]);
        }
        true
    }

    /// An index that is in bounds, in 32 bits.
    fn narrow(&mut self, index: Value) -> Reg {
        let reg = self.get(index, 0);
        match reg.class {
            Class::B64 => def!(self, B32, "cvt.u32.u64", reg),
            _ => reg,
        }
    }

    pub(super) fn load(&mut self, op: &Op) {
        let (Some(place), Some(result)) = (op.place, op.result()) else { return };
        if self.pixel(op, place, result) {
            return;
        }
        let scalar = self.ty(result).scalar();
        let lanes = self.lanes(result) as u32;
        let Some(known) = self.plan.access(op).cloned() else { return };
        let guard = self.guard(op, place, &known, lanes);
        let address = self.address(op, place, &known, lanes);
        let name = self.load_name(op, place, address.space);
        let policy = self.policy(op, place).filter(|_| !self.plan.loads_once(op));
        let all = match guard {
            Guard::Always => None,
            Guard::When(reg) | Guard::EachLane(reg, _) => Some(reg),
        };
        let size = scalar.bytes();
        let total = size * lanes;
        let chunk = address.align.min(WIDEST).min(total);
        let mut regs = Vec::with_capacity(lanes as usize);
        if chunk <= size || chunk < 4 {
            let name = format!("{name}.{}", memory_type(scalar));
            for lane in 0..lanes {
                let reg = self.asm.new_reg(class_of(scalar));
                if all.is_some() {
                    self.zero(reg);
                }
                let from = Arg::At(address.base, address.offset + i64::from(lane * size));
                self.access(all, &name, [Arg::Reg(reg), from], policy);
                regs.push(reg);
            }
        } else {
            // Words of at least four bytes, cut into lanes.
            let word = size.max(4);
            let word_scalar = if word == 8 { Scalar::I64 } else { Scalar::I32 };
            let count = chunk / word;
            let vector = of_words(&name, count, word);
            for at in (0..total).step_by(chunk as usize) {
                let words: Vec<Reg> = (0..count).map(|_| self.asm.new_reg(class_of(word_scalar))).collect();
                if all.is_some() {
                    words.iter().for_each(|w| self.zero(*w));
                }
                let target = if count > 1 { Arg::List(&words) } else { Arg::Reg(words[0]) };
                let from = Arg::At(address.base, address.offset + i64::from(at));
                self.access(all, &vector, [target, from], policy);
                for w in words {
                    match size < 4 {
                        true => regs.extend(self.split(w, 32, size * 8, (4 / size) as usize, scalar)),
                        false => regs.push(w),
                    }
                }
            }
        }
        if let Guard::EachLane(all, outer) = guard {
            let name = format!("{name}.{}", memory_type(scalar));
            let done = self.begin_lanes(all);
            for lane in 0..lanes {
                let within = self.lane_within(op, place, lane, outer);
                let from = Arg::At(address.base, address.offset + i64::from(lane * size));
                self.access(Some(within), &name, [Arg::Reg(regs[lane as usize]), from], policy);
            }
            self.asm.place(done);
        }
        self.set_all(result, &regs);
    }

    /// Skips what follows if all lanes are in bounds.
    fn begin_lanes(&mut self, all: Reg) -> Label {
        let done = self.asm.new_label();
        when!(self, all, true, "bra", Arg::Label(done));
        done
    }

    fn lane_within(&mut self, op: &Op, place: Place, lane: u32, outer: Option<Reg>) -> Reg {
        let (last, extent) = match self.view(place) {
            Some(view) => (view.extents.len() - 1, view.extents[view.extents.len() - 1]),
            None => (0, Extent::Fixed(0)),
        };
        let index = self.wide(op.operands[last]);
        let at = if lane == 0 { index } else { def!(self, B64, "add.s64", index, i64::from(lane)) };
        self.within(at, extent.into(), outer)
    }

    pub(super) fn store(&mut self, op: &Op) {
        let (Some(place), Some(value)) = (op.place, op.operands.last().copied()) else { return };
        if self.pixel(op, place, value) {
            return;
        }
        let scalar = self.ty(value).scalar();
        let regs = self.all(value);
        let lanes = regs.len() as u32;
        let Some(known) = self.plan.access(op).cloned() else { return };
        let guard = self.guard(op, place, &known, lanes);
        let address = self.address(op, place, &known, lanes);
        let name = format!("st.{}{}", address.space, self.hints(op, place));
        let policy = self.policy(op, place);
        let one = format!("{name}.{}", memory_type(scalar));
        let all = match guard {
            Guard::Always => None,
            Guard::When(reg) | Guard::EachLane(reg, _) => Some(reg),
        };
        let size = scalar.bytes();
        self.put(scalar, &regs, &address, (&name, None), all, policy);
        if let Guard::EachLane(all, outer) = guard {
            let done = self.begin_lanes(all);
            for (lane, reg) in regs.iter().enumerate() {
                let within = self.lane_within(op, place, lane as u32, outer);
                let to = Arg::At(address.base, address.offset + i64::from(lane as u32 * size));
                self.access(Some(within), &one, [to, Arg::Reg(*reg)], policy);
            }
            self.asm.place(done);
        }
    }

    /// Stores lanes in a row by an instruction, named without its type, that may count down a barrier; under a predicate if
    /// there is one.
    pub(super) fn put(
        &mut self,
        scalar: Scalar,
        regs: &[Reg],
        address: &Address,
        (name, barrier): (&str, Option<Reg>),
        all: Option<Reg>,
        policy: Option<Reg>,
    ) {
        let size = scalar.bytes();
        let one_access = |w: &mut Self, name: &str, to: Arg, source: Arg| match barrier {
            Some(barrier) => w.under(all, name, &[to, source, Arg::At(barrier, 0)]),
            None => w.access(all, name, [to, source], policy),
        };
        let total = size * regs.len() as u32;
        let chunk = address.align.min(WIDEST).min(total);
        if chunk <= size || chunk < 4 {
            let one = format!("{name}.{}", memory_type(scalar));
            for (lane, reg) in regs.iter().enumerate() {
                let to = Arg::At(address.base, address.offset + i64::from(lane as u32 * size));
                one_access(self, &one, to, Arg::Reg(*reg));
            }
        } else {
            let word = size.max(4);
            let count = chunk / word;
            let vector = of_words(name, count, word);
            let words: Vec<Reg> = match size < 4 {
                true => {
                    regs.chunks((4 / size) as usize).map(|c| self.join(c, size * 8, Scalar::I32)).collect()
                }
                false => regs.to_vec(),
            };
            for (i, words) in words.chunks(count as usize).enumerate() {
                let source = if count > 1 { Arg::List(words) } else { Arg::Reg(words[0]) };
                let to = Arg::At(address.base, address.offset + i64::from(i as u32 * chunk));
                one_access(self, &vector, to, source);
            }
        }
    }

    pub(super) fn atomic(&mut self, op: &Op) {
        let Some(place) = op.place else { return };
        let Some((rank, element)) = self.kernel.place(place) else { return };
        let scalar = self.kernel.by_bytes(op).map_or(element, |ty| ty.scalar());
        let Some(known) = self.plan.access(op).cloned() else { return };
        let guard = match self.guard(op, place, &known, 1) {
            Guard::Always => None,
            Guard::When(reg) | Guard::EachLane(reg, _) => Some(reg),
        };
        let address = self.address(op, place, &known, 1);
        let at = Arg::At(address.base, address.offset);
        let scope = scope_name(op.scope());
        let order = match op.order() {
            Order::Relaxed => "relaxed",
            Order::Acquire => "acquire",
            Order::Release => "release",
            Order::AcqRel | Order::SeqCst => "acq_rel",
        };
        let bits = scalar.bits();
        let space = address.space;
        let args: Vec<Arg> = op.operands[rank..].iter().map(|v| Arg::Reg(self.get(*v, 0))).collect();
        if op.code == Opcode::AtomicStore {
            let name = format!("st.{order}.{scope}.{space}.b{bits}");
            self.under(guard, &name, &[at, args[0]]);
            return;
        }
        let Some(result) = op.result() else { return };
        let reg = self.asm.new_reg(class_of(scalar));
        if guard.is_some() {
            self.zero(reg);
        }
        let kind = match (op.code, scalar) {
            (Opcode::AtomicAdd, Scalar::F32 | Scalar::F64) => format!("add.f{bits}"),
            (Opcode::AtomicAdd, _) => format!("add.u{bits}"),
            (Opcode::AtomicMinS, _) => format!("min.s{bits}"),
            (Opcode::AtomicMaxS, _) => format!("max.s{bits}"),
            (Opcode::AtomicMinU, _) => format!("min.u{bits}"),
            (Opcode::AtomicMaxU, _) => format!("max.u{bits}"),
            (Opcode::AtomicAnd, _) => format!("and.b{bits}"),
            (Opcode::AtomicOr, _) => format!("or.b{bits}"),
            (Opcode::AtomicXor, _) => format!("xor.b{bits}"),
            (Opcode::AtomicExchange, _) => format!("exch.b{bits}"),
            _ => format!("cas.b{bits}"),
        };
        let mut list = vec![Arg::Reg(reg), at];
        list.extend(args);
        let name = match op.code {
            Opcode::AtomicLoad => format!("ld.{order}.{scope}.{space}.b{bits}"),
            _ => format!("atom.{order}.{scope}.{space}.{kind}"),
        };
        self.under(guard, &name, &list);
        self.set(result, 0, reg);
    }
}
