//! Values as the kernel's author handles them: with operators, methods and literals.

use super::{BuildErrorKind, Builder};
use crate::format::from_f64;
use crate::module::{Op, Value, is_name};
use crate::op::{Accuracy, Opcode};
use crate::types::{Scalar, Type};
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Rem, Shl, Shr, Sub};

/// A value of a kernel that is being written.
///
/// Operators work lane by lane. On integers `/`, `%` and `>>` and the comparisons are signed; the unsigned
/// ones are methods ending in `_u`. A Rust number takes the type of the value that it meets.
#[derive(Clone, Copy, Debug)]
pub struct Val<'b> {
    builder: Builder<'b>,
    value: Value,
}

/// A value, or a Rust number that becomes a constant of the type it meets.
pub trait IntoVal<'b> {
    /// The value; a number becomes one of type `like`.
    #[track_caller]
    fn into_val(self, builder: Builder<'b>, like: Type) -> Val<'b>;
}

impl<'b> IntoVal<'b> for Val<'b> {
    fn into_val(self, _: Builder<'b>, _: Type) -> Val<'b> {
        self
    }
}

macro_rules! literals {
    ($from_int:ident: $($int:ty)*; $from_float:ident: $($float:ty)*) => {
        $(impl<'b> IntoVal<'b> for $int {
            #[track_caller]
            fn into_val(self, builder: Builder<'b>, like: Type) -> Val<'b> {
                $from_int(builder, like, i128::from(self))
            }
        })*
        $(impl<'b> IntoVal<'b> for $float {
            #[track_caller]
            fn into_val(self, builder: Builder<'b>, like: Type) -> Val<'b> {
                $from_float(builder, like, f64::from(self))
            }
        })*
    };
}

literals! { int_literal: i32 i64 u32 u64; float_literal: f32 f64 }

#[track_caller]
fn int_literal<'b>(builder: Builder<'b>, like: Type, value: i128) -> Val<'b> {
    let scalar = like.scalar();
    let least = -(1i128 << (scalar.bits() - 1));
    if scalar.is_float() {
        return builder.bits(like, from_f64(scalar, value as f64));
    }
    if scalar == Scalar::Bool || value < least || value > i128::from(scalar.mask()) {
        builder.fail(BuildErrorKind::Literal(value.to_string(), like));
    }
    builder.bits(like, value as u64)
}

#[track_caller]
fn float_literal<'b>(builder: Builder<'b>, like: Type, value: f64) -> Val<'b> {
    if !like.scalar().is_float() {
        builder.fail(BuildErrorKind::Literal(format!("{value:?}"), like));
    }
    builder.bits(like, from_f64(like.scalar(), value))
}

impl<'b> Val<'b> {
    pub(super) fn new(builder: Builder<'b>, value: Value) -> Val<'b> {
        Val { builder, value }
    }

    /// What builds the kernel that it is of.
    pub fn builder(self) -> Builder<'b> {
        self.builder
    }

    /// Its number.
    pub fn value(self) -> Value {
        self.value
    }

    /// Its type.
    pub fn ty(self) -> Type {
        self.builder.type_of(self.value)
    }

    /// Names it in text. A name that is taken gets a number behind it.
    #[track_caller]
    pub fn named(self, name: &str) -> Val<'b> {
        if !is_name(name) {
            self.builder.fail(BuildErrorKind::Name(name.to_owned()));
            return self;
        }
        let mut state = self.builder.block.state.borrow_mut();
        let free = (2u32..).map(|n| format!("{name}_{n}"));
        let name = std::iter::once(name.to_owned()).chain(free).find(|n| !state.names.contains(n));
        if let (Some(name), Some(_)) = (&name, state.numbering.values.get(self.value.index())) {
            state.names.insert(name.clone());
            state.numbering.values[self.value.index()].name = Some(name.as_str().into());
        }
        self
    }

    #[track_caller]
    fn unary(self, code: Opcode) -> Val<'b> {
        self.builder.emit(code, &[self], self.ty())
    }

    #[track_caller]
    fn binary(self, code: Opcode, other: impl IntoVal<'b>) -> Val<'b> {
        let other = other.into_val(self.builder, self.ty());
        self.builder.emit(code, &[self, other], self.ty())
    }

    /// The float op on floats, the signed one on integers.
    #[track_caller]
    fn by_type(self, float: Opcode, signed: Opcode, other: impl IntoVal<'b>) -> Val<'b> {
        self.binary(if self.ty().scalar().is_int() { signed } else { float }, other)
    }

    #[track_caller]
    fn compare(self, float: Opcode, signed: Opcode, other: impl IntoVal<'b>) -> Val<'b> {
        let code = if self.ty().scalar().is_int() { signed } else { float };
        let other = other.into_val(self.builder, self.ty());
        self.builder.emit(code, &[self, other], self.ty().with_scalar(Scalar::Bool))
    }

    /// The fast class of the op that defined this value, if that op has classes.
    pub fn fast(self) -> Val<'b> {
        let mut state = self.builder.block.state.borrow_mut();
        let ops = state.open.last_mut().map(|frame| frame.ops.as_mut_slice()).unwrap_or_default();
        if let Some(op) = ops.iter_mut().rev().find(|op| op.results.contains(&self.value)) {
            op.set_attr(Accuracy::Fast);
        }
        drop(state);
        self
    }

    /// `self · b + c`, rounded once.
    #[track_caller]
    pub fn fma(self, b: impl IntoVal<'b>, c: impl IntoVal<'b>) -> Val<'b> {
        let b = b.into_val(self.builder, self.ty());
        let c = c.into_val(self.builder, self.ty());
        self.builder.emit(Opcode::Fma, &[self, b, c], self.ty())
    }

    /// `a` where this bool is true, else `b`.
    #[track_caller]
    pub fn select(self, a: Val<'b>, b: impl IntoVal<'b>) -> Val<'b> {
        let b = b.into_val(self.builder, a.ty());
        self.builder.emit(Opcode::Select, &[self, a, b], a.ty())
    }

    /// The value as another scalar, lane by lane: integers are extended with their sign, cut or converted as
    /// signed; floats are rounded; a bool becomes 0 or 1.
    #[track_caller]
    pub fn to(self, scalar: Scalar) -> Val<'b> {
        self.convert(scalar, Opcode::Sext, Opcode::SiToFp, Opcode::FpToSi)
    }

    /// The value as another scalar, integers taken as unsigned.
    #[track_caller]
    pub fn to_u(self, scalar: Scalar) -> Val<'b> {
        self.convert(scalar, Opcode::Zext, Opcode::UiToFp, Opcode::FpToUi)
    }

    #[track_caller]
    fn convert(self, to: Scalar, extend: Opcode, from_int: Opcode, to_int: Opcode) -> Val<'b> {
        let from = self.ty().scalar();
        if from == to {
            return self;
        }
        let code = match (from, to.is_int()) {
            (Scalar::Bool, _) => Opcode::Zext,
            (f, true) if f.is_int() && to.bits() < f.bits() => Opcode::Trunc,
            (f, true) if f.is_int() => extend,
            (f, false) if f.is_int() => from_int,
            (_, true) => to_int,
            (_, false) => Opcode::FpConv,
        };
        self.builder.emit(code, &[self], self.ty().with_scalar(to))
    }

    /// The float from 0 to 1 that this unsigned integer, of at most 16 bits, stands for in an image (unorm).
    #[track_caller]
    pub fn from_unorm(self) -> Val<'b> {
        let most = self.ty().scalar().mask() as f32;
        self.to_u(Scalar::I32).to_u(Scalar::F32) / most
    }

    /// The integer of such a scalar that stands for this float: the nearest, that of an end for what is beyond it, 0 for a NaN.
    #[track_caller]
    pub fn to_unorm(self, scalar: Scalar) -> Val<'b> {
        let most = scalar.mask() as f32;
        (self.max(0.0f32).min(1.0f32) * most).round().to_u(Scalar::I32).to_u(scalar)
    }

    /// The same bits as another type.
    #[track_caller]
    pub fn bitcast(self, ty: impl Into<Type>) -> Val<'b> {
        self.builder.emit(Opcode::Bitcast, &[self], ty.into())
    }

    /// A vector with this scalar in every lane.
    #[track_caller]
    pub fn splat(self, lanes: u8) -> Val<'b> {
        let ty = Type::vector(self.ty().scalar(), lanes);
        if ty.is_none() {
            self.builder.fail(BuildErrorKind::Lanes(lanes.into()));
        }
        self.builder.emit(Opcode::Splat, &[self], ty.unwrap_or(self.ty()))
    }

    /// One lane of this vector.
    #[track_caller]
    pub fn lane(self, lane: u8) -> Val<'b> {
        let mut op = Op::new(Opcode::Extract);
        op.operands = vec![self.value];
        op.immediates = vec![lane.into()];
        self.builder.push_one(op, self.ty().scalar().into())
    }

    /// This vector with one lane replaced.
    #[track_caller]
    pub fn with_lane(self, lane: u8, scalar: impl IntoVal<'b>) -> Val<'b> {
        let scalar = scalar.into_val(self.builder, self.ty().scalar().into());
        let mut op = Op::new(Opcode::Insert);
        op.operands = vec![self.value, self.builder.own(scalar)];
        op.immediates = vec![lane.into()];
        self.builder.push_one(op, self.ty())
    }

    #[track_caller]
    fn shuffle_by(self, code: Opcode, by: impl IntoVal<'b>) -> Val<'b> {
        let by = by.into_val(self.builder, Type::I32);
        self.builder.emit(code, &[self, by], self.ty())
    }

    /// The value in lane `lane` of the warp.
    #[track_caller]
    pub fn shuffle(self, lane: impl IntoVal<'b>) -> Val<'b> {
        self.shuffle_by(Opcode::Shuffle, lane)
    }

    /// The value in the lane whose number is this one's xor `mask`.
    #[track_caller]
    pub fn shuffle_xor(self, mask: impl IntoVal<'b>) -> Val<'b> {
        self.shuffle_by(Opcode::ShuffleXor, mask)
    }

    /// The value `by` lanes below.
    #[track_caller]
    pub fn shuffle_up(self, by: impl IntoVal<'b>) -> Val<'b> {
        self.shuffle_by(Opcode::ShuffleUp, by)
    }

    /// The value `by` lanes above.
    #[track_caller]
    pub fn shuffle_down(self, by: impl IntoVal<'b>) -> Val<'b> {
        self.shuffle_by(Opcode::ShuffleDown, by)
    }

    /// A bit for each thread of the warp in which this bool is true.
    #[track_caller]
    pub fn ballot(self) -> Val<'b> {
        self.builder.emit(Opcode::Ballot, &[self], Type::I32)
    }

    /// The warp's least: of floats as `min`, of integers signed.
    #[track_caller]
    pub fn warp_min(self) -> Val<'b> {
        self.unary(if self.ty().scalar().is_int() { Opcode::WarpMinS } else { Opcode::WarpMin })
    }

    /// The warp's greatest: of floats as `max`, of integers signed.
    #[track_caller]
    pub fn warp_max(self) -> Val<'b> {
        self.unary(if self.ty().scalar().is_int() { Opcode::WarpMaxS } else { Opcode::WarpMax })
    }
}

macro_rules! methods {
    ($( $(#[doc = $doc:literal])+ $name:ident $kind:ident $code:ident $(/ $signed:ident)?; )+) => {
        impl<'b> Val<'b> {
            $( methods!(@one $(#[doc = $doc])+ $name $kind $code $(/ $signed)?); )+
        }
    };
    (@one $(#[doc = $doc:literal])+ $name:ident unary $code:ident) => {
        $(#[doc = $doc])+
        #[track_caller]
        pub fn $name(self) -> Val<'b> { self.unary(Opcode::$code) }
    };
    (@one $(#[doc = $doc:literal])+ $name:ident binary $code:ident) => {
        $(#[doc = $doc])+
        #[track_caller]
        pub fn $name(self, other: impl IntoVal<'b>) -> Val<'b> { self.binary(Opcode::$code, other) }
    };
    (@one $(#[doc = $doc:literal])+ $name:ident signed $code:ident / $signed:ident) => {
        $(#[doc = $doc])+
        #[track_caller]
        pub fn $name(self, other: impl IntoVal<'b>) -> Val<'b> {
            self.by_type(Opcode::$code, Opcode::$signed, other)
        }
    };
    (@one $(#[doc = $doc:literal])+ $name:ident compare $code:ident / $signed:ident) => {
        $(#[doc = $doc])+
        #[track_caller]
        pub fn $name(self, other: impl IntoVal<'b>) -> Val<'b> {
            self.compare(Opcode::$code, Opcode::$signed, other)
        }
    };
}

methods! {
    /// The magnitude of a float.
    abs unary Abs;
    /// The magnitude of a signed integer.
    abs_s unary AbsS;
    /// The lesser: of floats a number wins over a NaN; integers are signed.
    min signed Min / MinS;
    /// The greater: of floats a number wins over a NaN; integers are signed.
    max signed Max / MaxS;
    /// The lesser float, NaN if either is.
    minimum binary Minimum;
    /// The greater float, NaN if either is.
    maximum binary Maximum;
    /// The lesser unsigned integer.
    min_u binary MinU;
    /// The greater unsigned integer.
    max_u binary MaxU;
    /// The unsigned quotient.
    div_u binary DivU;
    /// The unsigned remainder.
    rem_u binary RemU;
    /// The upper half of the signed product.
    mulhi binary MulHiS;
    /// The upper half of the unsigned product.
    mulhi_u binary MulHiU;
    /// Shifted right with zeros.
    shr_u binary ShrU;
    /// Rotated left.
    rotl binary Rotl;
    /// Zero bits above the highest one.
    clz unary Clz;
    /// Zero bits below the lowest one.
    ctz unary Ctz;
    /// One bits.
    popcount unary Popcount;
    /// The bits in reverse.
    bit_reverse unary BitReverse;
    /// Is it equal?
    eq compare Eq / Eq;
    /// Is it different?
    ne compare Ne / Ne;
    /// Is it less?
    lt compare Lt / LtS;
    /// Is it less or equal?
    le compare Le / LeS;
    /// Is it greater?
    gt compare Gt / GtS;
    /// Is it greater or equal?
    ge compare Ge / GeS;
    /// Is it less, unsigned?
    lt_u compare LtU / LtU;
    /// Is it less or equal, unsigned?
    le_u compare LeU / LeU;
    /// Is it greater, unsigned?
    gt_u compare GtU / GtU;
    /// Is it greater or equal, unsigned?
    ge_u compare GeU / GeU;
    /// The square root.
    sqrt unary Sqrt;
    /// One divided by the square root.
    rsqrt unary Rsqrt;
    /// One divided by it.
    rcp unary Rcp;
    /// e to it.
    exp unary Exp;
    /// 2 to it.
    exp2 unary Exp2;
    /// Its natural logarithm.
    log unary Log;
    /// Its logarithm to base 2.
    log2 unary Log2;
    /// Its sine.
    sin unary Sin;
    /// Its cosine.
    cos unary Cos;
    /// Its hyperbolic tangent.
    tanh unary Tanh;
    /// The error function of it.
    erf unary Erf;
    /// It to a power.
    pow binary Pow;
    /// The next integer below or at it.
    floor unary Floor;
    /// The next integer above or at it.
    ceil unary Ceil;
    /// The nearest integer, a tie to the even one.
    round unary Round;
    /// The next integer towards zero.
    fix unary Fix;
    /// Is it true in any thread of the warp?
    any unary VoteAny;
    /// Is it true in every thread of the warp?
    all unary VoteAll;
    /// The warp's sum.
    warp_add unary WarpAdd;
    /// The warp's bitwise and.
    warp_and unary WarpAnd;
    /// The warp's bitwise or.
    warp_or unary WarpOr;
    /// The warp's bitwise exclusive or.
    warp_xor unary WarpXor;
}

macro_rules! operators {
    ($($trait:ident $method:ident $float:ident / $signed:ident;)+) => {$(
        impl<'b, R: IntoVal<'b>> $trait<R> for Val<'b> {
            type Output = Val<'b>;
            #[track_caller]
            fn $method(self, other: R) -> Val<'b> {
                self.by_type(Opcode::$float, Opcode::$signed, other)
            }
        }
        operators!(@left $trait $method i32 i64 u32 u64 f32 f64);
    )+};
    (@left $trait:ident $method:ident $($literal:ty)+) => {$(
        impl<'b> $trait<Val<'b>> for $literal {
            type Output = Val<'b>;
            #[track_caller]
            fn $method(self, other: Val<'b>) -> Val<'b> {
                self.into_val(other.builder, other.ty()).$method(other)
            }
        }
    )+};
}

operators! {
    Add add Add / Add;
    Sub sub Sub / Sub;
    Mul mul Mul / Mul;
    Div div Div / DivS;
    Rem rem RemS / RemS;
    BitAnd bitand And / And;
    BitOr bitor Or / Or;
    BitXor bitxor Xor / Xor;
    Shl shl Shl / Shl;
    Shr shr ShrS / ShrS;
}

impl<'b> Neg for Val<'b> {
    type Output = Val<'b>;
    #[track_caller]
    fn neg(self) -> Val<'b> {
        self.unary(Opcode::Neg)
    }
}

impl<'b> Not for Val<'b> {
    type Output = Val<'b>;
    #[track_caller]
    fn not(self) -> Val<'b> {
        self.unary(Opcode::Not)
    }
}
