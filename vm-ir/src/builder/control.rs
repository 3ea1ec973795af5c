//! Control flow as closures. What a closure returns is what its region yields.

use super::{BuildErrorKind, Builder, IntoVal, Val};
use crate::limits::{MAX_CARRIED, MAX_CASES};
use crate::module::{Op, Region, Value};
use crate::op::Opcode;
use crate::types::Type;

/// What regions yield and loops carry: nothing, a value, a tuple, an array or a `Vec` of values.
pub trait Carry<'b>: Sized {
    /// The values, in order.
    fn values(&self) -> Vec<Val<'b>>;
    /// The same form of other values, of which there are as many.
    fn rebuild(&self, values: &[Val<'b>]) -> Self;
}

impl<'b> Carry<'b> for () {
    fn values(&self) -> Vec<Val<'b>> {
        Vec::new()
    }

    fn rebuild(&self, _: &[Val<'b>]) {}
}

impl<'b> Carry<'b> for Val<'b> {
    fn values(&self) -> Vec<Val<'b>> {
        vec![*self]
    }

    fn rebuild(&self, values: &[Val<'b>]) -> Self {
        values.first().copied().unwrap_or(*self)
    }
}

impl<'b> Carry<'b> for Vec<Val<'b>> {
    fn values(&self) -> Vec<Val<'b>> {
        self.clone()
    }

    fn rebuild(&self, values: &[Val<'b>]) -> Self {
        values.to_vec()
    }
}

impl<'b, const N: usize> Carry<'b> for [Val<'b>; N] {
    fn values(&self) -> Vec<Val<'b>> {
        self.to_vec()
    }

    fn rebuild(&self, values: &[Val<'b>]) -> Self {
        values.try_into().unwrap_or(*self)
    }
}

macro_rules! tuples {
    ($($($name:ident)+;)+) => {$(
        #[allow(non_snake_case)]
        impl<'b, $($name: Carry<'b>),+> Carry<'b> for ($($name,)+) {
            fn values(&self) -> Vec<Val<'b>> {
                let ($($name,)+) = self;
                let mut all = Vec::new();
                $(all.extend($name.values());)+
                all
            }

            fn rebuild(&self, values: &[Val<'b>]) -> Self {
                let ($($name,)+) = self;
                let mut rest = values;
                $(
                    let (here, behind) = rest.split_at($name.values().len().min(rest.len()));
                    rest = behind;
                    let $name = $name.rebuild(here);
                )+
                let _ = rest;
                ($($name,)+)
            }
        }
    )+};
}

tuples! { A B; A B C; A B C D; }

impl<'b> Builder<'b> {
    #[track_caller]
    fn owned(self, values: &[Val<'b>]) -> Vec<Value> {
        if values.len() > MAX_CARRIED {
            self.fail(BuildErrorKind::TooLarge(format!("more than {MAX_CARRIED} values yielded or carried")));
        }
        values.iter().map(|v| self.own(*v)).collect()
    }

    /// A region that yields what `fill` returns.
    #[track_caller]
    fn yielding<T: Carry<'b>>(self, fill: impl FnOnce() -> T) -> (Region, T) {
        let (mut region, result) = self.in_region(Vec::new(), fill);
        region.yields = self.owned(&result.values());
        (region, result)
    }

    /// Runs `then` where the bool is true.
    #[track_caller]
    pub fn if_(self, condition: Val<'b>, then: impl FnOnce()) {
        self.if_else(condition, then, || ());
    }

    /// Runs `then` where the bool is true, else `other`, and gives what that returns.
    #[track_caller]
    pub fn if_else<T: Carry<'b>>(
        self,
        condition: Val<'b>,
        then: impl FnOnce() -> T,
        other: impl FnOnce() -> T,
    ) -> T {
        let (then, result) = self.yielding(then);
        let (other, _) = self.yielding(other);
        self.choice(Op::new(Opcode::If), condition, vec![then, other], result)
    }

    #[track_caller]
    fn choice<T: Carry<'b>>(self, mut op: Op, selector: Val<'b>, regions: Vec<Region>, result: T) -> T {
        let types: Vec<Type> = result.values().iter().map(|v| v.ty()).collect();
        op.operands = vec![self.own(selector)];
        op.regions = regions;
        result.rebuild(&self.push(op, &types))
    }

    /// Begins a `switch`; end it with [`Cases::default`].
    pub fn switch<T: Carry<'b>>(self, selector: Val<'b>) -> Cases<'b, T> {
        Cases { builder: self, selector, cases: Vec::new(), regions: Vec::new(), result: None }
    }

    /// The numbers from `low` up to, not including, `high`, which takes `low`'s type if it is a literal.
    #[track_caller]
    pub fn range(self, low: Val<'b>, high: impl IntoVal<'b>) -> Range<'b> {
        let high = high.into_val(self, low.ty());
        Range { builder: self, low, high, step: None, unroll: 0, code: Opcode::For }
    }

    /// Runs `body` for each rank of the cluster; its blocks may share the iterations. It adds up products alone
    /// (`for.cluster`), whose sums [`share`](super::tile::FragmentRef::share) looks at.
    #[track_caller]
    pub fn for_cluster(self, body: impl FnOnce(Val<'b>)) {
        let blocks = self.block.state.borrow().cluster;
        self.range(self.i32(0), blocks as i32).by(Opcode::ForCluster).each(body);
    }

    /// Runs `body` as long as `condition` gives true; both are given the carried values, and `body` returns
    /// the next ones. Gives the last ones.
    #[track_caller]
    pub fn while_<T: Carry<'b>>(
        self,
        initial: T,
        condition: impl FnOnce(T) -> Val<'b>,
        body: impl FnOnce(T) -> T,
    ) -> T {
        let types: Vec<Type> = initial.values().iter().map(|v| v.ty()).collect();
        let args: Vec<Value> = types.iter().map(|ty| self.define(*ty)).collect();
        let carried: Vec<Val<'b>> = args.iter().map(|v| Val::new(self, *v)).collect();
        let (mut first, goes_on) = self.in_region(args, || condition(initial.rebuild(&carried)));
        first.yields = vec![self.own(goes_on)];
        let (second, _) = self.yielding(|| body(initial.rebuild(&carried)));
        let mut op = Op::new(Opcode::While);
        op.operands = self.owned(&initial.values());
        op.regions = vec![first, second];
        initial.rebuild(&self.push(op, &types))
    }
}

/// A `switch` being written.
#[derive(Debug)]
pub struct Cases<'b, T> {
    builder: Builder<'b>,
    selector: Val<'b>,
    cases: Vec<u64>,
    regions: Vec<Region>,
    result: Option<T>,
}

impl<'b, T: Carry<'b>> Cases<'b, T> {
    /// What to run where the selector is `case`.
    #[track_caller]
    pub fn case(mut self, case: i64, fill: impl FnOnce() -> T) -> Self {
        if self.cases.len() == MAX_CASES {
            self.builder.fail(BuildErrorKind::TooLarge(format!("more than {MAX_CASES} cases")));
            return self;
        }
        let (region, result) = self.builder.yielding(fill);
        self.cases.push(case as u64);
        self.regions.push(region);
        self.result.get_or_insert(result);
        self
    }

    /// What to run otherwise; gives what the region that ran returned.
    #[track_caller]
    pub fn default(mut self, fill: impl FnOnce() -> T) -> T {
        let (region, result) = self.builder.yielding(fill);
        self.regions.push(region);
        let mut op = Op::new(Opcode::Switch);
        op.immediates = self.cases;
        self.builder.choice(op, self.selector, self.regions, self.result.unwrap_or(result))
    }
}

/// A counted loop being written.
#[derive(Clone, Copy, Debug)]
pub struct Range<'b> {
    builder: Builder<'b>,
    low: Val<'b>,
    high: Val<'b>,
    step: Option<Val<'b>>,
    unroll: u64,
    code: Opcode,
}

impl<'b> Range<'b> {
    /// Counts by `step` instead of 1.
    #[track_caller]
    pub fn step(mut self, step: impl IntoVal<'b>) -> Self {
        self.step = Some(step.into_val(self.builder, self.low.ty()));
        self
    }

    /// Asks the compiler to unroll by `times`.
    pub fn unroll(mut self, times: u32) -> Self {
        self.unroll = times.into();
        self
    }

    fn by(self, code: Opcode) -> Self {
        Range { code, ..self }
    }

    /// Runs `body` for each number.
    #[track_caller]
    pub fn each(self, body: impl FnOnce(Val<'b>)) {
        self.fold((), |count, ()| body(count));
    }

    /// Runs `body` for each number, with the carried values, of which it returns the next ones. Gives the
    /// last ones.
    #[track_caller]
    pub fn fold<T: Carry<'b>>(self, initial: T, body: impl FnOnce(Val<'b>, T) -> T) -> T {
        let k = self.builder;
        let step = self.step.unwrap_or_else(|| 1i32.into_val(k, self.low.ty()));
        let types: Vec<Type> = initial.values().iter().map(|v| v.ty()).collect();
        let count = k.define(self.low.ty());
        let mut args = vec![count];
        args.extend(types.iter().map(|ty| k.define(*ty)));
        let carried: Vec<Val<'b>> = args[1..].iter().map(|v| Val::new(k, *v)).collect();
        let (mut region, result) = k.in_region(args, || body(Val::new(k, count), initial.rebuild(&carried)));
        region.yields = k.owned(&result.values());
        let mut op = Op::new(self.code);
        op.operands = k.owned(&[self.low, self.high, step]);
        op.operands.extend(k.owned(&initial.values()));
        op.immediates = vec![self.unroll];
        op.regions = vec![region];
        initial.rebuild(&k.push(op, &types))
    }
}
