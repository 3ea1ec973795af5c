//! Literals as operands.
//!
//! A literal where an op takes a value becomes a `const` of the type that the operand must have, right before the op. Two
//! of one type and the same bits are one `const` as long as the first is visible. So only the parser knows of them:
//! canonical text, the binary form and everything behind them have `const` ops.

use super::error::TextErrorKind;
use super::lexer::{Position, Token};
use super::parser::{Parser, Result};
use crate::format::read_literal;
use crate::module::{Line, Op, Place, Value};
use crate::op::{Opcode, Shape};
use crate::types::{Scalar, Type};
use std::collections::HashMap;

/// An operand as it is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operand<'t> {
    /// `%name`.
    Value(Value),
    /// A number or a word.
    Literal(Literal<'t>),
}

/// A literal, and where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Literal<'t> {
    pub(super) text: &'t str,
    pub(super) position: Position,
}

/// The constants that literals became.
#[derive(Debug, Default)]
pub(super) struct Constants {
    /// Those to be put before the op that is being read.
    pub(super) ops: Vec<Op>,
    /// Those that are visible.
    visible: HashMap<(Type, u64), Value>,
    /// The visible ones in the order of the text.
    order: Vec<(Type, u64)>,
}

impl Constants {
    /// How many are visible.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Hides all but the first `len`, at the end of a region.
    pub(super) fn truncate(&mut self, len: usize) {
        for constant in self.order.drain(len.min(self.order.len())..) {
            self.visible.remove(&constant);
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Constants::default();
    }
}

impl<'t> Parser<'t> {
    /// A value or a literal.
    pub(super) fn operand(&mut self) -> Result<Operand<'t>> {
        match self.token {
            Token::Number(text) | Token::Word(text @ ("true" | "false" | "inf" | "nan")) => {
                let position = self.position;
                self.advance()?;
                Ok(Operand::Literal(Literal { text, position }))
            }
            Token::Value(_) => self.value().map(Operand::Value),
            _ => Err(self.expected("a value or a literal")),
        }
    }

    /// A value, or a literal of this type.
    pub(super) fn operand_of(&mut self, ty: Type) -> Result<Value> {
        match self.operand()? {
            Operand::Value(value) => Ok(value),
            Operand::Literal(literal) => self.constant(literal, ty),
        }
    }

    /// Values, or literals of the types; of those beyond the types nothing is known.
    pub(super) fn operands_of(
        &mut self,
        types: &[Type],
        limit: usize,
        of: &'static str,
    ) -> Result<Vec<Value>> {
        let mut values = Vec::new();
        loop {
            if values.len() == limit {
                return Err(self.too_many("values in a list", limit));
            }
            values.push(match (self.operand()?, types.get(values.len())) {
                (Operand::Value(value), _) => value,
                (Operand::Literal(literal), Some(ty)) => self.constant(literal, *ty)?,
                (Operand::Literal(literal), None) => return Err(self.open(literal, of)),
            });
            if !self.accept(',')? {
                return Ok(values);
            }
        }
    }

    /// Indices into a place. A literal is an `i64`, as it is the type of extents.
    pub(super) fn indices(&mut self, limit: usize) -> Result<Vec<Value>> {
        self.operands_of(&[Type::I64; crate::limits::MAX_RANK][..], limit, "an index")
    }

    /// The constant that a literal is.
    pub(super) fn constant(&mut self, literal: Literal<'t>, ty: Type) -> Result<Value> {
        let position = literal.position;
        let bits = self.literal_bits(literal, ty.scalar())?;
        if let Some(value) = self.constants.visible.get(&(ty, bits)) {
            return Ok(*value);
        }
        let mut op = Op::new(Opcode::Const);
        op.line = Line(position.line);
        op.immediates.push(bits);
        let too_large = |error| TextErrorKind::from(error);
        self.numbering.count_op().map_err(too_large).map_err(|kind| self.error_at(position, kind))?;
        let value = self
            .numbering
            .define(ty, None)
            .map_err(too_large)
            .map_err(|kind| self.error_at(position, kind))?;
        op.results.push(value);
        self.constants.ops.push(op);
        self.constants.visible.insert((ty, bits), value);
        self.constants.order.push((ty, bits));
        Ok(value)
    }

    /// The bits of a literal.
    pub(super) fn literal_bits(&self, literal: Literal<'t>, scalar: Scalar) -> Result<u64> {
        let Literal { text, position } = literal;
        let wrong = || TextErrorKind::Number { text: text.to_owned(), what: scalar.to_string() };
        read_literal(scalar, text).ok_or_else(|| self.error_at(position, wrong()))
    }

    /// The error that a literal may be of several types.
    pub(super) fn open(&self, literal: Literal<'t>, op: &'static str) -> super::error::TextError {
        let kind = TextErrorKind::OpenLiteral { text: literal.text.to_owned(), op };
        self.error_at(literal.position, kind)
    }

    /// The type that an op's operand must have, which is the one at `index` behind the indices; `None` if the op takes
    /// several.
    pub(super) fn operand_type(
        &self,
        op: &Op,
        index: usize,
        operands: &[Operand<'t>],
        result: Option<Type>,
    ) -> Option<Type> {
        match (op.code.shape(), index) {
            (Shape::Select, 0) | (Shape::Vote | Shape::Ballot, _) => Some(Type::BOOL),
            (Shape::Shuffle, 1) => Some(Type::I32),
            (Shape::Splat | Shape::Make, _) | (Shape::Insert, 1) => result.map(|ty| ty.scalar().into()),
            (Shape::Unary(_) | Shape::Binary(_) | Shape::Ternary(_) | Shape::Reduce(_), _)
            | (Shape::Select | Shape::Shuffle | Shape::Insert, _) => result,
            (Shape::Compare(_), _) => operands.iter().find_map(|operand| self.type_of(operand)),
            (Shape::AtomicRmw(_) | Shape::AtomicCas, _) => self.accessed(op, result),
            (Shape::Store | Shape::AtomicStore | Shape::Gather, _) => {
                self.element(op.place?).map(Type::scalar_of)
            }
            _ => None,
        }
    }

    /// The type of an operand; `None` for a literal.
    pub(super) fn type_of(&self, operand: &Operand<'_>) -> Option<Type> {
        match operand {
            Operand::Value(value) => self.numbering.values.get(value.index()).map(|def| def.ty),
            Operand::Literal(_) => None,
        }
    }

    /// What an atomic works on: the element of its place, or of bytes what it is given.
    pub(super) fn accessed(&self, op: &Op, given: Option<Type>) -> Option<Type> {
        let element = self.element(op.place?)?;
        Some(given.filter(|_| element == Scalar::I8).unwrap_or(element.into()))
    }

    /// What an element of a place is.
    pub(super) fn element(&self, place: Place) -> Option<Scalar> {
        match place {
            Place::Fragment(i) => self.elements.get(usize::from(i)).copied(),
            Place::View(_) | Place::Shared(_) | Place::Local(_) => self.memory.get(&place).copied(),
            Place::Channel(_) => None,
        }
    }
}
