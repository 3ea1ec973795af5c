//! Views and arrays as the kernel's author handles them.

use super::{Builder, Val};
use crate::module::{Op, Place};
use crate::op::{Cache, Opcode, Order, Scope};
use crate::types::{Scalar, Type};

/// A view, a shared or a local array of a kernel that is being written.
#[derive(Clone, Copy, Debug)]
pub struct PlaceRef<'b> {
    builder: Builder<'b>,
    place: Place,
    element: Scalar,
}

impl<'b> PlaceRef<'b> {
    pub(super) fn new(builder: Builder<'b>, place: Place, element: Scalar) -> PlaceRef<'b> {
        PlaceRef { builder, place, element }
    }

    pub(crate) fn place(self) -> Place {
        self.place
    }

    /// The view's extent in a dimension.
    #[track_caller]
    pub fn extent(self, dimension: u8) -> Val<'b> {
        let mut op = Op::new(Opcode::Extent);
        op.place = Some(self.place);
        op.immediates = vec![dimension.into()];
        self.builder.push_one(op, Type::I64)
    }

    /// Every warp of the cluster gives a value, or a vector, to the shared arrays of all blocks of the cluster, and
    /// waits for the others.
    #[track_caller]
    pub fn gather(self, value: Val<'b>) {
        let mut op = Op::new(Opcode::ClusterGather);
        op.place = Some(self.place);
        op.operands = vec![self.builder.own(value)];
        self.builder.push(op, &[]);
    }

    /// The element at these indices, slowest dimension first.
    pub fn at<const N: usize>(self, indices: [Val<'b>; N]) -> Element<'b> {
        let scope = match self.place {
            Place::View(_) => Scope::Device,
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => Scope::Block,
        };
        Element {
            place: self,
            indices: indices.to_vec(),
            scalar: self.element,
            cache: Cache::Normal,
            order: Order::Relaxed,
            scope,
        }
    }
}

/// An element of a view or of a shared array, with how it is to be accessed: no cache hint, and atomics
/// relaxed, among the block's threads for a shared array and the device's for a view.
#[derive(Clone, Debug)]
pub struct Element<'b> {
    place: PlaceRef<'b>,
    indices: Vec<Val<'b>>,
    scalar: Scalar,
    cache: Cache,
    order: Order,
    scope: Scope,
}

impl<'b> Element<'b> {
    /// By bytes: where elements are `i8`, a number of another type that begins at the index, which is a multiple of its size.
    pub fn typed(mut self, scalar: Scalar) -> Self {
        self.scalar = scalar;
        self
    }

    /// With a cache hint.
    pub fn cached(mut self, cache: Cache) -> Self {
        self.cache = cache;
        self
    }

    /// With a memory order.
    pub fn ordered(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Among these threads.
    pub fn among(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    #[track_caller]
    fn op(&self, code: Opcode, others: &[Val<'b>]) -> Op {
        let builder = self.place.builder;
        let mut op = Op::new(code).with(self.cache).with(self.order).with(self.scope);
        op.place = Some(self.place.place);
        op.operands = self.indices.iter().chain(others).map(|v| builder.own(*v)).collect();
        op
    }

    #[track_caller]
    fn giving(&self, code: Opcode, others: &[Val<'b>]) -> Val<'b> {
        self.place.builder.push_one(self.op(code, others), self.scalar.into())
    }

    #[track_caller]
    fn modify(&self, code: Opcode, value: impl super::IntoVal<'b>) -> Val<'b> {
        let value = value.into_val(self.place.builder, self.scalar.into());
        self.giving(code, &[value])
    }

    /// Loads it.
    #[track_caller]
    pub fn load(self) -> Val<'b> {
        self.giving(Opcode::Load, &[])
    }

    /// Loads it and its followers in the row.
    #[track_caller]
    pub fn load_vector(self, lanes: u8) -> Val<'b> {
        let ty = Type::vector(self.scalar, lanes);
        if ty.is_none() {
            self.place.builder.fail(super::BuildErrorKind::Lanes(lanes.into()));
        }
        let op = self.op(Opcode::Load, &[]);
        self.place.builder.push_one(op, ty.unwrap_or(self.scalar.into()))
    }

    /// Stores a scalar, or a vector's lanes in the row.
    #[track_caller]
    pub fn store(self, value: impl super::IntoVal<'b>) {
        let value = value.into_val(self.place.builder, self.scalar.into());
        self.place.builder.push(self.op(Opcode::Store, &[value]), &[]);
    }

    /// A barrier, one load for the whole block, a barrier.
    #[track_caller]
    pub fn load_uniform(self) -> Val<'b> {
        self.giving(Opcode::LoadUniform, &[])
    }

    /// Loads it atomically.
    #[track_caller]
    pub fn atomic_load(self) -> Val<'b> {
        self.giving(Opcode::AtomicLoad, &[])
    }

    /// Stores to it atomically.
    #[track_caller]
    pub fn atomic_store(self, value: impl super::IntoVal<'b>) {
        let value = value.into_val(self.place.builder, self.scalar.into());
        self.place.builder.push(self.op(Opcode::AtomicStore, &[value]), &[]);
    }

    /// Adds to it; gives what was there.
    #[track_caller]
    pub fn atomic_add(self, value: impl super::IntoVal<'b>) -> Val<'b> {
        self.modify(Opcode::AtomicAdd, value)
    }

    /// Keeps the lesser signed integer; gives what was there.
    #[track_caller]
    pub fn atomic_min(self, value: impl super::IntoVal<'b>) -> Val<'b> {
        self.modify(Opcode::AtomicMinS, value)
    }

    /// Keeps the greater signed integer; gives what was there.
    #[track_caller]
    pub fn atomic_max(self, value: impl super::IntoVal<'b>) -> Val<'b> {
        self.modify(Opcode::AtomicMaxS, value)
    }

    /// Replaces it; gives what was there.
    #[track_caller]
    pub fn atomic_exchange(self, value: impl super::IntoVal<'b>) -> Val<'b> {
        self.modify(Opcode::AtomicExchange, value)
    }

    /// Any other atomic of one operand: `and`, `or`, `xor`, unsigned `min` and `max`.
    #[track_caller]
    pub fn atomic(self, code: Opcode, value: impl super::IntoVal<'b>) -> Val<'b> {
        self.modify(code, value)
    }

    /// Replaces it by `new` if it is `expected`; gives what was there.
    #[track_caller]
    pub fn atomic_cas(self, expected: Val<'b>, new: Val<'b>) -> Val<'b> {
        self.giving(Opcode::AtomicCas, &[expected, new])
    }
}
