//! Types and places of ops without regions.

use super::check::Checker;
use super::error::Rule;
use crate::limits::MAX_ACCESS_BYTES;
use crate::module::{Op, Place, SharedArray, index_count};
use crate::op::nearest::any_of;
use crate::op::{Opcode, Order, PlaceRule, Shape, Width};
use crate::types::{Class, Scalar, Type};

impl Checker<'_> {
    /// Checks that the op names the kind of place that it works on.
    pub(super) fn place(&mut self, op: &Op) -> bool {
        let shape = op.code.shape();
        let needs = match shape.place() {
            PlaceRule::None => "no place",
            PlaceRule::WholeView => "a view",
            PlaceRule::WholeShared => "a shared array, without indices",
            PlaceRule::Any if shape.is_atomic() => "a view or a shared array, with indices",
            PlaceRule::Any => "a view, a shared or a local array, with indices",
            PlaceRule::Shared => "a shared array, with indices",
            PlaceRule::Box => "a view, with indices",
            PlaceRule::Channel => "a channel",
            PlaceRule::Fragment => "a fragment",
        };
        let fits = match (shape.place(), op.place) {
            (PlaceRule::None, None) => true,
            (PlaceRule::WholeView, Some(Place::View(i))) => self.kernel.view(i).is_some(),
            (PlaceRule::Shared | PlaceRule::WholeShared, Some(place @ Place::Shared(_))) => {
                self.kernel.place(place).is_some()
            }
            (PlaceRule::Any, Some(place @ (Place::View(_) | Place::Shared(_)))) => {
                self.kernel.place(place).is_some()
            }
            (PlaceRule::Any, Some(place @ Place::Local(_))) => {
                !shape.is_atomic() && self.kernel.place(place).is_some()
            }
            (rule, _) => self.tile_place(op, rule),
        };
        if !fits {
            self.error(Rule::Place(needs));
        }
        fits
    }

    /// Checks the indices into the op's place, and that the op may do there what it does.
    pub(super) fn access(&mut self, op: &Op) {
        let shape = op.code.shape();
        let indices = index_count(self.kernel, op).min(op.operands.len());
        for (i, index) in op.operands[..indices].iter().enumerate() {
            self.operand_class(i, self.ty(*index), Class::WORD, false);
        }
        match (self.kernel.by_bytes(op), op.place) {
            (Some(value), Some(place)) => self.by_bytes(value, place),
            (None, Some(place @ (Place::Shared(_) | Place::Local(_)))) => self.row(op, place),
            _ => {}
        }
        let Some(Place::View(view)) = op.place else { return };
        self.pixel(op);
        let access = self.kernel.view(view).map(|v| v.access);
        let does = match shape {
            Shape::Load if access.is_some_and(|a| !a.reads()) => "reads",
            // All roles have to see one value.
            Shape::Load if self.kernel.tile.is_some() && access.is_some_and(|a| a.writes()) => {
                "loads, for all roles at once, from"
            }
            Shape::Store if access.is_some_and(|a| !a.writes()) => "writes",
            Shape::AtomicLoad | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas
                if access.is_some_and(|a| !(a.reads() && a.writes())) =>
            {
                "reads and writes"
            }
            _ => return,
        };
        let name = self.kernel.place_name(Place::View(view)).to_owned();
        self.error(Rule::Access { name, access: access.map_or("nothing", |a| a.name()), does });
    }

    /// Checks that an access to a surface is of a whole pixel.
    fn pixel(&mut self, op: &Op) {
        let Some(surface) = op.place.and_then(|place| self.kernel.surface(place)) else { return };
        let value = op.result().or(op.operands.last().copied()).map(|value| self.ty(value));
        let lanes = surface.pixel().unwrap_or(1);
        let what = match (op.code.shape(), value) {
            (Shape::Load | Shape::Store, Some(ty)) if ty.lanes() != lanes => {
                let pixel = Type::vector(surface.element, lanes).unwrap_or(surface.element.into());
                format!("a pixel is {pixel}, not {ty}")
            }
            (Shape::Load | Shape::Store | Shape::Extent, _) => return,
            _ => "its pixels are loaded and stored, nothing else".to_owned(),
        };
        let Some(place) = op.place else { return };
        self.error(Rule::Surface { name: self.kernel.place_name(place).to_owned(), what });
    }

    /// Checks that an access by bytes is of one instruction, begins where its index says, and fits into a shared array.
    fn by_bytes(&mut self, value: Type, place: Place) {
        let bytes = value.bytes();
        let align = match place {
            Place::View(view) => self.kernel.view(view).map_or(1, |view| view.align),
            // Those begin at multiples of 16 bytes.
            _ => MAX_ACCESS_BYTES,
        };
        let room = match place {
            Place::Shared(array) => self.kernel.shared.get(usize::from(array)).map_or(0, SharedArray::len),
            Place::Local(array) => self.kernel.local.get(usize::from(array)).map_or(0, |l| l.len.into()),
            _ => u64::MAX,
        };
        let what = if self.kernel.tile.is_some() {
            "a tile kernel has no such access".to_owned()
        } else if bytes > MAX_ACCESS_BYTES {
            format!("at most {MAX_ACCESS_BYTES} at a time are")
        } else if u64::from(bytes) > room {
            format!("it has {room}")
        } else if bytes > align {
            format!("it begins at a multiple of {align}; write align {MAX_ACCESS_BYTES}")
        } else {
            return;
        };
        let name = self.kernel.place_name(place).to_owned();
        self.error(Rule::Bytes { name, value, bytes, what });
    }

    /// Checks that a vector fits into a row of an array, so that a clamped index leaves room for it.
    fn row(&mut self, op: &Op, place: Place) {
        let row = match place {
            Place::Shared(i) => self.kernel.shared.get(usize::from(i)).and_then(|s| s.dims.last().copied()),
            Place::Local(i) => self.kernel.local.get(usize::from(i)).map(|l| l.len),
            _ => None,
        };
        let Some(value) = op.result().or(op.operands.last().copied()) else { return };
        let (row, lanes) = (row.unwrap_or(0), self.ty(value).lanes());
        if row < u32::from(lanes) {
            let name = self.kernel.place_name(place).to_owned();
            self.error(Rule::RowTooShort { name, row, lanes });
        }
    }

    /// Checks an operand against a class.
    fn operand_class(&mut self, index: usize, found: Type, class: Class, vector: bool) {
        if !class.contains(found.scalar()) || (found.is_vector() && !vector) {
            let expected =
                if vector { class.to_string() } else { format!("a single {}", strip_article(class)) };
            let index = index + 1;
            let op = self.op.and_then(Opcode::from_mnemonic);
            let instead = op.map_or(Vec::new(), |op| op.for_type(found.scalar()));
            self.error(match any_of(&instead) {
                instead if instead.is_empty() => Rule::Operand { index, expected, found },
                instead => Rule::OtherSign { index, expected, found, instead },
            });
        }
    }

    /// Checks an operand against a type.
    fn operand_is(&mut self, index: usize, found: Type, expected: Type) {
        if found != expected {
            self.error(Rule::Operand { index: index + 1, expected: expected.to_string(), found });
        }
    }

    fn result_is(&mut self, found: Type, expected: Type) {
        if found != expected {
            self.error(Rule::Result { expected: expected.to_string(), found });
        }
    }

    fn result_class(&mut self, found: Type, class: Class) {
        if !class.contains(found.scalar()) {
            self.error(Rule::Result { expected: class.to_string(), found });
        }
    }

    /// Checks the types of an op whose counts are right.
    pub(super) fn op_types(&mut self, op: &Op) {
        let skip = index_count(self.kernel, op);
        let operands: Vec<Type> = op.operands.iter().skip(skip).map(|v| self.ty(*v)).collect();
        let at = |i: usize| operands.get(i).copied().unwrap_or(Type::BOOL);
        let result = op.result().map_or(Type::BOOL, |v| self.ty(v));
        let shape = op.code.shape();
        match shape {
            Shape::If | Shape::For | Shape::While | Shape::Switch => self.control(op),
            Shape::Fetch
            | Shape::Release
            | Shape::Fill
            | Shape::Mma
            | Shape::Map
            | Shape::Rows
            | Shape::Share
            | Shape::Put
            | Shape::PutRows
            | Shape::Get
            | Shape::Send => self.tile_types(op),
            Shape::Const => {
                self.result_class(result, Class::REGISTER);
                if let Some(bits) = op.immediates.first().filter(|bits| *bits & !result.scalar().mask() != 0)
                {
                    self.error(Rule::ConstBits(*bits));
                }
            }
            Shape::Unary(class) | Shape::Binary(class) | Shape::Ternary(class) => {
                self.operand_class(0, at(0), class, true);
                for (i, ty) in operands.iter().enumerate().skip(1) {
                    self.operand_is(i, *ty, at(0));
                }
                self.result_is(result, at(0));
            }
            Shape::Compare(class) => {
                self.operand_class(0, at(0), class, true);
                self.operand_is(1, at(1), at(0));
                self.result_is(result, at(0).with_scalar(Scalar::Bool));
            }
            Shape::Select => {
                let lanes = at(1).with_scalar(Scalar::Bool);
                if at(0) != Type::BOOL && at(0) != lanes {
                    let expected =
                        if lanes.is_vector() { format!("bool or {lanes}") } else { lanes.to_string() };
                    self.error(Rule::Operand { index: 1, expected, found: at(0) });
                }
                self.operand_class(1, at(1), Class::REGISTER, true);
                self.operand_is(2, at(2), at(1));
                self.result_is(result, at(1));
            }
            Shape::Convert(from, to, width) => self.convert(at(0), result, from, to, width),
            Shape::Bitcast => {
                self.operand_class(0, at(0), Class::DATA, true);
                self.result_class(result, Class::DATA);
                if at(0).bits() != result.bits() {
                    self.error(Rule::Width { from: at(0), to: result, expected: "as many bits" });
                }
            }
            Shape::Splat => {
                self.operand_class(0, at(0), Class::REGISTER, false);
                self.vector_of(result, at(0));
            }
            Shape::Make => {
                if operands.len() != usize::from(result.lanes()) {
                    let expected = usize::from(result.lanes());
                    self.error(Rule::OperandCount { expected, found: operands.len() });
                }
                self.operand_class(0, at(0), Class::REGISTER, false);
                for (i, ty) in operands.iter().enumerate() {
                    self.operand_is(i, *ty, at(0));
                }
                self.vector_of(result, at(0));
            }
            Shape::Extract => {
                self.lane(op, at(0));
                self.result_is(result, at(0).scalar().into());
            }
            Shape::Insert => {
                self.lane(op, at(0));
                self.operand_is(1, at(1), at(0).scalar().into());
                self.result_is(result, at(0));
            }
            Shape::Id32 => self.result_is(result, Type::I32),
            Shape::Id64 => self.result_is(result, Type::I64),
            Shape::Extent => {
                self.result_is(result, Type::I64);
                let rank = match op.place {
                    Some(Place::View(i)) => self.kernel.view(i).map_or(0, |v| v.rank()),
                    _ => 0,
                };
                self.number("dimension", op.immediates[0], rank as u64);
            }
            Shape::Load | Shape::LoadUniform | Shape::AtomicLoad => {
                if let Some(element) = self.element_of(op) {
                    let vector = shape == Shape::Load;
                    if result.scalar() != element || (result.is_vector() && !vector) {
                        let expected =
                            if vector { format!("{element} or a vector of it") } else { element.to_string() };
                        self.error(Rule::Result { expected, found: result });
                    }
                }
                self.atomic_order(op);
            }
            Shape::Store => {
                if let Some(element) = self.element_of(op)
                    && at(0).scalar() != element
                {
                    let expected = format!("{element} or a vector of it");
                    self.error(Rule::Operand { index: skip + 1, expected, found: at(0) });
                }
            }
            Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas => {
                if let Some(element) = self.element_of(op) {
                    for (i, ty) in operands.iter().enumerate() {
                        self.operand_is(skip + i, *ty, element.into());
                    }
                    if shape != Shape::AtomicStore {
                        self.result_is(result, element.into());
                    }
                }
                self.atomic_order(op);
            }
            Shape::Shuffle => {
                self.operand_class(0, at(0), Class::DATA, true);
                self.operand_is(1, at(1), Type::I32);
                self.result_is(result, at(0));
            }
            Shape::Vote => {
                self.operand_is(0, at(0), Type::BOOL);
                self.result_is(result, Type::BOOL);
            }
            Shape::Ballot => {
                self.operand_is(0, at(0), Type::BOOL);
                self.result_is(result, Type::I32);
            }
            Shape::Reduce(class) => {
                self.operand_class(0, at(0), class, false);
                self.result_is(result, at(0));
            }
            Shape::Gather => self.gathered(op, at(0)),
            Shape::Sync => self.atomic_order(op),
        }
    }

    /// Checks that what all warps of the cluster give just fills the array.
    fn gathered(&mut self, op: &Op, value: Type) {
        let Some(Place::Shared(array)) = op.place else { return };
        let Some(array) = self.kernel.shared.get(usize::from(array)) else { return };
        if value.scalar() != array.element {
            let expected = format!("{} or a vector of it", array.element);
            self.error(Rule::Operand { index: 1, expected, found: value });
        }
        let warps = self.kernel.cluster_warps();
        let (expected, found) = (u64::from(warps) * u64::from(value.lanes()), array.len());
        if expected != found {
            self.error(Rule::GatherSize { name: array.name.to_string(), warps, expected, found });
        }
    }

    fn convert(&mut self, from: Type, to: Type, from_class: Class, to_class: Class, width: Width) {
        self.operand_class(0, from, from_class, true);
        self.result_class(to, to_class);
        if from.lanes() != to.lanes() {
            self.error(Rule::Result { expected: format!("a type of {} lanes", from.lanes()), found: to });
        }
        let expected = match width {
            Width::Any if from.scalar() == to.scalar() => "a change of type",
            Width::Wider if to.scalar().bits() <= from.scalar().bits() => "wider",
            Width::Narrower if to.scalar().bits() >= from.scalar().bits() => "narrower",
            _ => return,
        };
        self.error(Rule::Width { from, to, expected });
    }

    fn vector_of(&mut self, result: Type, lane: Type) {
        if !result.is_vector() || result.scalar() != lane.scalar() {
            self.error(Rule::Result { expected: format!("a vector of {}", lane.scalar()), found: result });
        }
    }

    fn lane(&mut self, op: &Op, vector: Type) {
        if !vector.is_vector() {
            self.error(Rule::Operand { index: 1, expected: "a vector".to_owned(), found: vector });
        }
        self.number("lane", op.immediates[0], u64::from(vector.lanes()));
    }

    fn number(&mut self, what: &'static str, found: u64, limit: u64) {
        if found >= limit {
            self.error(Rule::Number { what, found, limit });
        }
    }

    /// What the op accesses in its place: an element, or what some bytes make; for an atomic, checked to be something that it
    /// works on.
    fn element_of(&mut self, op: &Op) -> Option<Scalar> {
        let element = match self.kernel.by_bytes(op) {
            Some(value) if Class::DATA.contains(value.scalar()) => value.scalar(),
            _ => self.kernel.place(op.place?)?.1,
        };
        let class = match op.code.shape() {
            Shape::AtomicRmw(class) => class,
            Shape::AtomicCas => Class::WORD,
            Shape::AtomicLoad | Shape::AtomicStore => Class::WORD_ARITH,
            _ => Class::DATA,
        };
        if !class.contains(element) {
            let found = Type::scalar_of(element);
            self.error(Rule::Operand { index: 1, expected: format!("a place of {class}"), found });
            return None;
        }
        Some(element)
    }

    fn atomic_order(&mut self, op: &Op) {
        let order = op.order();
        let meaningless = match op.code {
            Opcode::AtomicLoad => matches!(order, Order::Release | Order::AcqRel | Order::SeqCst),
            Opcode::AtomicStore => matches!(order, Order::Acquire | Order::AcqRel | Order::SeqCst),
            Opcode::Fence => order == Order::Relaxed,
            _ => order == Order::SeqCst,
        };
        if meaningless {
            let name = match order {
                Order::Relaxed => "relaxed",
                Order::Acquire => "acquire",
                Order::Release => "release",
                Order::AcqRel => "acqrel",
                Order::SeqCst => "seqcst",
            };
            self.error(Rule::Order(name));
        }
    }
}

/// A class's name behind "a single".
fn strip_article(class: Class) -> String {
    let name = class.to_string();
    name.strip_prefix("an ").or(name.strip_prefix("a ")).map_or(name.clone(), str::to_owned)
}
