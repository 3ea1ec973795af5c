//! Views, shared and local arrays, and atomics.
//!
//! A guest's access to a view is done where its indices are in bounds, behind a branch; a load gives zero elsewhere. An index
//! into a shared array is clamped. What is checked is in the [`SafetyPlan`](crate::safety::SafetyPlan).

use super::writer::{LOCAL, Val, View, Writer, float, int, scope_of};
use crate::safety::{Access, Last};
use vm_ir::module::{Op, Place, SharedArray};
use vm_ir::op::{Opcode, Order};
use vm_ir::{Scalar, Value};

/// Bytes of the widest access.
const WIDEST: u32 = 16;

/// Where an access goes.
#[derive(Clone, Copy)]
struct Address {
    at: Val,
    /// The address space.
    space: u32,
    /// What the address is known to be a multiple of, in bytes.
    align: u32,
}

/// Where an access is done.
enum Bounds {
    Always,
    When(Val),
    /// Each lane whose index is in bounds, where the first is true if there is one.
    Lanes(Option<Val>),
}

impl Writer<'_> {
    pub(super) fn view(&self, place: Place) -> Option<&View> {
        match place {
            Place::View(i) => self.views.get(usize::from(i))?.as_ref(),
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => None,
        }
    }

    /// An index as 64 bits.
    pub(super) fn wide(&mut self, index: Value) -> Val {
        let reg = self.get(index, 0);
        match self.ty(index).scalar() {
            Scalar::I64 => reg,
            scalar => self.def(format_args!("sext {} {reg} to i64", int(scalar))),
        }
    }

    fn address(&mut self, op: &Op, place: Place, known: &Access, lanes: u32) -> Address {
        match place {
            Place::Shared(array) => {
                let array = usize::from(array);
                let SharedArray { element, dims, .. } = &self.kernel.shared()[array];
                let start = (self.shared.clone(), self.shared_offsets[array], 3);
                self.array_address(op, (element.bytes(), dims), known, lanes, start)
            }
            Place::Local(array) => {
                let local = self.kernel.local();
                let (before, own) = (&local[..usize::from(array)], &local[usize::from(array)]);
                let begin = before.iter().map(|array| array.bytes() as u32).sum();
                self.array_address(op, (1, &[own.len]), known, lanes, (LOCAL.to_owned(), begin, 5))
            }
            _ => self.view_address(op, place, known),
        }
    }

    fn view_address(&mut self, op: &Op, place: Place, known: &Access) -> Address {
        let (size, align) = match place {
            Place::View(i) => self.kernel.view(i).map_or((1, 1), |v| (v.element.bytes(), v.align)),
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => (1, 1),
        };
        let Some(View { base, strides, .. }) = self.view(place).cloned() else {
            return Address { at: Val::Bits(0), space: 1, align: 1 };
        };
        let mut offset = Val::Bits(0);
        for (index, stride) in op.operands.iter().zip(strides.iter().copied().chain([Val::Bits(size.into())]))
        {
            let index = self.wide(*index);
            let bytes = self.def(format_args!("mul i64 {index}, {stride}"));
            offset = self.def(format_args!("add i64 {offset}, {bytes}"));
        }
        let at = self.def(format_args!("getelementptr i8, ptr addrspace(1) {base}, i64 {offset}"));
        Address { at, space: 1, align: known.bytes.unwrap_or(align.min(size << known.shift.min(8))) }
    }

    /// Where an access to an array is: of elements of a size and extents, which begins so far behind a start in an address
    /// space.
    fn array_address(
        &mut self,
        op: &Op,
        (size, dims): (u32, &[u32]),
        known: &Access,
        lanes: u32,
        (start, begin, space): (String, u32, u32),
    ) -> Address {
        let last = dims.len() - 1;
        let mut align = WIDEST.min(size << known.shift.min(8));
        let mut element = Val::Bits(0);
        for (dimension, extent) in dims.iter().enumerate() {
            let clamp = if dimension == last { known.last.is_checked() } else { known.checks(dimension) };
            let room = if dimension == last { known.bytes.unwrap_or(lanes) } else { 1 };
            let greatest = u64::from(extent - room.min(*extent));
            let mut index = self.wide(op.operands[dimension]);
            if clamp {
                let greatest = Val::Bits(greatest);
                index = self.call("i64", "llvm.umin.i64", &[("i64", index), ("i64", greatest)]);
            }
            if let Some(bytes) = known.bytes.filter(|_| clamp) {
                index = self.def(format_args!("and i64 {index}, {}", -i64::from(bytes)));
            }
            if clamp && dimension == last {
                align = align.min(size << greatest.trailing_zeros().min(8));
            }
            let index = self.def(format_args!("trunc i64 {index} to i32"));
            if dimension > 0 {
                align = align.min(1 << (size * extent).trailing_zeros());
            }
            let row = self.def(format_args!("mul i32 {element}, {extent}"));
            element = self.def(format_args!("add i32 {row}, {index}"));
        }
        let bytes = self.def(format_args!("mul i32 {element}, {size}"));
        let bytes = self.def(format_args!("add i32 {bytes}, {begin}"));
        let at = self.def(format_args!("getelementptr i8, ptr addrspace({space}) {start}, i32 {bytes}"));
        Address { at, space, align: known.bytes.unwrap_or(align) }
    }

    /// Where a guest's access to a view is done.
    fn bounds(&mut self, op: &Op, place: Place, known: &Access, lanes: u32) -> Bounds {
        let Some(view) = self.view(place).cloned() else { return Bounds::Always };
        let last = view.extents.len() - 1;
        let mut outer = None;
        for dimension in (0..last).filter(|dimension| known.checks(*dimension)) {
            let index = self.wide(op.operands[dimension]);
            outer = Some(self.within(index, view.extents[dimension], outer));
        }
        match known.last {
            Last::Unchecked(_) => outer.map_or(Bounds::Always, Bounds::When),
            Last::Lanes if lanes > 1 => Bounds::Lanes(outer),
            Last::Bytes { within, aligned } => {
                let (index, bytes) = (self.wide(op.operands[last]), i64::from(known.bytes.unwrap_or(1)));
                let mut all = outer;
                if aligned {
                    let rest = self.def(format_args!("and i64 {index}, {}", bytes - 1));
                    all = Some(self.def(format_args!("icmp eq i64 {rest}, 0")));
                }
                if within {
                    // The last multiple of the size, as the index is one.
                    let limit = self.def(format_args!("and i64 {}, {}", view.extents[last], -bytes));
                    all = Some(self.within(index, limit, all));
                }
                all.map_or(Bounds::Always, Bounds::When)
            }
            Last::Lanes | Last::First => {
                let index = self.wide(op.operands[last]);
                Bounds::When(self.within(index, view.extents[last], outer))
            }
        }
    }

    /// `index < extent`, unsigned, and also `with`.
    fn within(&mut self, index: Val, extent: Val, with: Option<Val>) -> Val {
        let within = self.def(format_args!("icmp ult i64 {index}, {extent}"));
        with.map_or(within, |with| self.def(format_args!("and i1 {with}, {within}")))
    }

    /// Whether a lane's index in the last dimension is in bounds.
    fn lane_within(&mut self, op: &Op, place: Place, lane: u32, outer: Option<Val>) -> Val {
        let Some(view) = self.view(place).cloned() else { return Val::Bits(0) };
        let last = view.extents.len() - 1;
        let index = self.wide(op.operands[last]);
        let index = self.def(format_args!("add i64 {index}, {lane}"));
        self.within(index, view.extents[last], outer)
    }

    /// Does something where the condition is true, and gives zeros of these types elsewhere.
    pub(super) fn only_if(
        &mut self,
        condition: Val,
        types: &[&str],
        then: impl FnOnce(&mut Self) -> Vec<Val>,
    ) -> Vec<Val> {
        let (from, inside, end) = (self.at, self.label(), self.label());
        self.br_if(condition, inside, end);
        self.place(inside);
        let values = then(self);
        let last = self.at;
        self.br(end);
        self.place(end);
        let zero = |(ty, value): (&&str, Val)| {
            self.def(format_args!("phi {ty} [ {}, {from} ], [ {value}, {last} ]", Val::Zero))
        };
        types.iter().zip(values).map(zero).collect()
    }

    fn lane_address(&mut self, address: Address, lane: u32, size: u32) -> Address {
        let Address { at, space, align } = address;
        let at = self.def(format_args!("getelementptr i8, ptr addrspace({space}) {at}, i32 {}", lane * size));
        Address { at, align: align.min(size), ..address }
    }

    /// Lanes in a row.
    fn load_lanes(&mut self, scalar: Scalar, lanes: usize, address: Address, once: bool) -> Vec<Val> {
        let (ty, Address { at, space, align }) = (int(scalar), address);
        // What is checked with it must be what is used.
        let name = if once { "load volatile" } else { "load" };
        if lanes == 1 {
            return vec![self.def(format_args!("{name} {ty}, ptr addrspace({space}) {at}, align {align}"))];
        }
        let row = format!("<{lanes} x {ty}>");
        let all = self.def(format_args!("{name} {row}, ptr addrspace({space}) {at}, align {align}"));
        (0..lanes).map(|lane| self.def(format_args!("extractelement {row} {all}, i32 {lane}"))).collect()
    }

    pub(super) fn load(&mut self, op: &Op) {
        let (Some(place), Some(result)) = (op.place, op.result()) else { return };
        let (scalar, lanes) = (self.ty(result).scalar(), self.lanes(result));
        let Some(known) = self.plan.access(op).cloned() else { return };
        let once = self.plan.loads_once(op);
        let bounds = self.bounds(op, place, &known, lanes as u32);
        let address = self.address(op, place, &known, lanes as u32);
        let types = vec![int(scalar); lanes];
        let values = match bounds {
            Bounds::Always => self.load_lanes(scalar, lanes, address, once),
            Bounds::When(condition) => {
                self.only_if(condition, &types, |writer| writer.load_lanes(scalar, lanes, address, once))
            }
            Bounds::Lanes(outer) => {
                let lane = |lane: u32| {
                    let within = self.lane_within(op, place, lane, outer);
                    let values = self.only_if(within, &types[..1], |writer| {
                        let address = writer.lane_address(address, lane, scalar.bytes());
                        writer.load_lanes(scalar, 1, address, once)
                    });
                    values[0]
                };
                (0..lanes as u32).map(lane).collect()
            }
        };
        self.set_each(&[result], &values);
    }

    fn store_lanes(&mut self, scalar: Scalar, values: &[Val], address: Address) {
        let (ty, Address { at, space, align }) = (int(scalar), address);
        if let [value] = values {
            return self.line(format_args!("store {ty} {value}, ptr addrspace({space}) {at}, align {align}"));
        }
        let row = format!("<{} x {ty}>", values.len());
        let mut all = "poison".to_owned();
        for (lane, value) in values.iter().enumerate() {
            all = self.def(format_args!("insertelement {row} {all}, {ty} {value}, i32 {lane}")).to_string();
        }
        self.line(format_args!("store {row} {all}, ptr addrspace({space}) {at}, align {align}"));
    }

    pub(super) fn store(&mut self, op: &Op) {
        let (Some(place), Some(value)) = (op.place, op.operands.last().copied()) else { return };
        let scalar = self.ty(value).scalar();
        let values: Vec<Val> = self.all_of(&[value]).into_iter().map(|(_, value)| value).collect();
        let lanes = values.len() as u32;
        let Some(known) = self.plan.access(op).cloned() else { return };
        let bounds = self.bounds(op, place, &known, lanes);
        let address = self.address(op, place, &known, lanes);
        match bounds {
            Bounds::Always => self.store_lanes(scalar, &values, address),
            Bounds::When(condition) => {
                self.only_if(condition, &[], |writer| {
                    writer.store_lanes(scalar, &values, address);
                    Vec::new()
                });
            }
            Bounds::Lanes(outer) => {
                for (lane, value) in (0..).zip(values) {
                    let within = self.lane_within(op, place, lane, outer);
                    self.only_if(within, &[], |writer| {
                        let address = writer.lane_address(address, lane, scalar.bytes());
                        writer.store_lanes(scalar, &[value], address);
                        Vec::new()
                    });
                }
            }
        }
    }

    pub(super) fn atomic(&mut self, op: &Op) {
        let Some(place) = op.place else { return };
        let Some((rank, element)) = self.kernel.place(place) else { return };
        let scalar = self.kernel.by_bytes(op).map_or(element, |ty| ty.scalar());
        let Some(known) = self.plan.access(op).cloned() else { return };
        let bounds = self.bounds(op, place, &known, 1);
        let address = self.address(op, place, &known, 1);
        let args: Vec<Val> = op.operands[rank..].iter().map(|value| self.get(*value, 0)).collect();
        let types = if op.result().is_some() { vec![int(scalar)] } else { Vec::new() };
        let values = match bounds {
            Bounds::When(condition) => {
                self.only_if(condition, &types, |writer| writer.atomic_at(op, scalar, address, &args))
            }
            Bounds::Always | Bounds::Lanes(_) => self.atomic_at(op, scalar, address, &args),
        };
        self.set_each(&op.results, &values);
    }

    fn atomic_at(&mut self, op: &Op, scalar: Scalar, address: Address, args: &[Val]) -> Vec<Val> {
        let (ty, scope, align) = (int(scalar), scope_of(op), scalar.bytes());
        let pointer = format!("ptr addrspace({}) {}", address.space, address.at);
        let order = match op.order() {
            Order::Relaxed => "monotonic",
            Order::Acquire => "acquire",
            Order::Release => "release",
            Order::AcqRel | Order::SeqCst => "acq_rel",
        };
        // A load can't release, nor a store acquire.
        let only =
            |wanted: &'static str| if [wanted, "acq_rel"].contains(&order) { wanted } else { "monotonic" };
        let name = match op.code {
            Opcode::AtomicStore => {
                let order = only("release");
                self.line(format_args!(
                    "store atomic {ty} {}, {pointer} {scope}{order}, align {align}",
                    args[0]
                ));
                return Vec::new();
            }
            Opcode::AtomicLoad => {
                let order = only("acquire");
                return vec![
                    self.def(format_args!("load atomic {ty}, {pointer} {scope}{order}, align {align}")),
                ];
            }
            Opcode::AtomicCas => {
                let failed = only("acquire");
                let pair = self.def(format_args!(
                    "cmpxchg {pointer}, {ty} {}, {ty} {} {scope}{order} {failed}, align {align}",
                    args[0], args[1]
                ));
                return vec![self.def(format_args!("extractvalue {{ {ty}, i1 }} {pair}, 0"))];
            }
            Opcode::AtomicAdd if scalar.is_float() => {
                let float = float(scalar);
                let value = self.def(format_args!("bitcast {ty} {} to {float}", args[0]));
                let old = self.def(format_args!(
                    "atomicrmw fadd {pointer}, {float} {value} {scope}{order}, align {align}"
                ));
                return vec![self.as_int(scalar, old)];
            }
            Opcode::AtomicAdd => "add",
            Opcode::AtomicMinS => "min",
            Opcode::AtomicMaxS => "max",
            Opcode::AtomicMinU => "umin",
            Opcode::AtomicMaxU => "umax",
            Opcode::AtomicAnd => "and",
            Opcode::AtomicOr => "or",
            Opcode::AtomicXor => "xor",
            _ => "xchg",
        };
        vec![
            self.def(format_args!(
                "atomicrmw {name} {pointer}, {ty} {} {scope}{order}, align {align}",
                args[0]
            )),
        ]
    }
}
