//! Regions and ops of a text.

use super::error::TextErrorKind;
use super::lexer::Token;
use super::literal::{Literal, Operand};
use super::parser::{Parser, Result};
use crate::limits::{MAX_CARRIED, MAX_CASES, MAX_DEPTH, MAX_RANK};
use crate::module::{Op, Region, Value};
use crate::op::{Opcode, Shape};
use crate::types::Type;

impl<'t> Parser<'t> {
    /// A region from behind its `{` to its `}`, both included in what is read but the first.
    /// `types` are those of what it yields.
    pub(super) fn region(&mut self, depth: usize, args: Vec<Value>, types: &[Type]) -> Result<Region> {
        let mut region = Region { args, ..Region::default() };
        // The constants of an op around this region go before that op.
        let outer = std::mem::take(&mut self.constants.ops);
        let visible = self.constants.len();
        loop {
            match self.token {
                Token::Punct('}') => {
                    region.yield_line = self.line();
                    break;
                }
                Token::Word("yield") => {
                    region.yield_line = self.line();
                    self.advance()?;
                    region.yields = self.operands_of(types, MAX_CARRIED + 1, "yield")?;
                    region.ops.append(&mut self.constants.ops);
                    break;
                }
                _ => {
                    let op = self.op(depth)?;
                    region.ops.append(&mut self.constants.ops);
                    region.ops.push(op);
                }
            }
        }
        self.constants.truncate(visible);
        self.constants.ops = outer;
        self.expect('}')?;
        Ok(region)
    }

    fn op(&mut self, depth: usize) -> Result<Op> {
        let line = self.line();
        self.numbering.count_op().map_err(|e| self.error(e))?;
        let mut names = Vec::new();
        if matches!(self.token, Token::Value(_)) {
            loop {
                if names.len() == MAX_CARRIED {
                    return Err(self.too_many("results of an op", MAX_CARRIED));
                }
                names.push(self.value_token("a value to define")?);
                if !self.accept(',')? {
                    break;
                }
            }
            self.expect('=')?;
        }
        let position = self.position;
        let mut op = self.mnemonic()?;
        op.line = line;
        if op.code.shape().has_regions() && depth >= MAX_DEPTH {
            let kind = TextErrorKind::TooMany { what: "nested regions", limit: MAX_DEPTH };
            return Err(self.error_at(position, kind));
        }
        let types = match op.code.shape() {
            Shape::If => self.if_op(&mut op, depth)?,
            Shape::For => self.for_op(&mut op, depth)?,
            Shape::While => self.while_op(&mut op, depth)?,
            Shape::Switch => self.switch_op(&mut op, depth)?,
            shape if shape.is_tile() => self.tile_op(&mut op, depth)?,
            _ => self.plain_op(&mut op, names.is_empty())?,
        };
        if names.is_empty() && op.code.shape().may_drop() {
            for ty in types {
                let value = self.numbering.define(ty, None).map_err(|e| self.error_at(position, e.into()))?;
                op.results.push(value);
            }
            return Ok(op);
        }
        if types.len() != names.len() {
            let kind =
                TextErrorKind::Results { op: op.code.mnemonic(), expected: types.len(), found: names.len() };
            return Err(self.error_at(position, kind));
        }
        for (name, ty) in names.into_iter().zip(types) {
            let value = self.define(name, ty).map_err(|e| self.error_at(position, e.kind))?;
            op.results.push(value);
        }
        Ok(op)
    }

    /// An op's name with its attributes: the longest name in the table that the word begins with.
    fn mnemonic(&mut self) -> Result<Op> {
        let position = self.position;
        let word = self.word("an op")?;
        let mut end = word.len();
        let code = loop {
            match (Opcode::from_mnemonic(&word[..end]), word[..end].rfind('.')) {
                (Some(code), _) => break code,
                (None, Some(dot)) => end = dot,
                (None, None) => {
                    return Err(self.error_at(position, TextErrorKind::UnknownOp(word.to_owned())));
                }
            }
        };
        let mut op = Op::new(code);
        let mut words = word[end..].split('.').skip(1).peekable();
        let wrong = |expected: String, found: &str| TextErrorKind::Attribute {
            op: code.mnemonic(),
            expected,
            found: found.to_owned(),
        };
        for (slot, kind) in op.attrs.iter_mut().zip(code.info().attrs) {
            let found = words.peek().and_then(|w| kind.words().iter().position(|k| k == w));
            match (found, kind.default()) {
                (Some(index), _) => {
                    *slot = index as u8;
                    words.next();
                }
                (None, Some(default)) => *slot = default,
                (None, None) => {
                    let kind =
                        wrong(format!("one of .{}", kind.words().join(", .")), words.peek().unwrap_or(&""));
                    return Err(self.error_at(position, kind));
                }
            }
        }
        match words.next() {
            None => Ok(op),
            Some(extra) => Err(self.error_at(position, wrong("nothing more".to_owned(), extra))),
        }
    }

    /// An op without regions. `dropped`: no name is given to what it gives.
    fn plain_op(&mut self, op: &mut Op, dropped: bool) -> Result<Vec<Type>> {
        let shape = op.code.shape();
        let mut operands = Vec::new();
        let mut more = shape.operands() != Some(0) || shape.immediates() != Some(0);
        if matches!(self.token, Token::Global(_)) {
            op.place = Some(self.place()?);
            if self.accept('[')? {
                if !self.at(']') {
                    op.operands = self.indices(MAX_RANK)?;
                }
                self.expect(']')?;
            }
            more = self.accept(',')?;
        }
        while more {
            if operands.len() + op.operands.len() > MAX_CARRIED {
                return Err(self.too_many("operands of an op", MAX_CARRIED));
            }
            operands.push(match self.token {
                Token::Word(text) if shape == Shape::Const => {
                    let position = self.position;
                    self.advance()?;
                    Operand::Literal(Literal { text, position })
                }
                _ => self.operand()?,
            });
            more = self.accept(',')?;
        }
        let types = if !shape.has_result() {
            Vec::new()
        } else if self.accept(':')? {
            vec![self.value_type()?]
        } else {
            let given = operands.iter().find_map(|operand| self.type_of(operand));
            match self.accessed(op, given).filter(|_| dropped && shape.may_drop()) {
                Some(ty) => vec![ty],
                None => return Err(self.expected_behind("\":\" and the type of the result")),
            }
        };
        let result = types.first().copied();
        for (index, operand) in operands.iter().enumerate() {
            // Numbers of the op stand behind its operands.
            let number = shape.immediates() == Some(1) && index >= shape.operands().unwrap_or(0);
            match *operand {
                Operand::Value(value) => op.operands.push(value),
                Operand::Literal(_) if number && !op.immediates.is_empty() => {
                    return Err(self.too_many("numbers of an op", 1));
                }
                Operand::Literal(literal) if number => {
                    let bits = match (shape, result) {
                        (Shape::Const, Some(ty)) => self.literal_bits(literal, ty.scalar())?,
                        _ => self.integer_at(literal, "number")?,
                    };
                    op.immediates.push(bits);
                }
                Operand::Literal(literal) => {
                    let ty = self.operand_type(op, index, &operands, result);
                    let ty = ty.ok_or_else(|| self.open(literal, op.code.mnemonic()))?;
                    let value = self.constant(literal, ty)?;
                    op.operands.push(value);
                }
            }
        }
        Ok(types)
    }

    fn if_op(&mut self, op: &mut Op, depth: usize) -> Result<Vec<Type>> {
        let condition = self.operand_of(Type::BOOL)?;
        op.operands.push(condition);
        let types = self.types()?;
        self.expect('{')?;
        op.regions.push(self.region(depth + 1, Vec::new(), &types)?);
        let other = if self.accept_word("else")? {
            self.expect('{')?;
            self.region(depth + 1, Vec::new(), &types)?
        } else {
            Region { yield_line: op.line, ..Region::default() }
        };
        op.regions.push(other);
        Ok(types)
    }

    /// The carried values of a loop: names with types, and what each begins as.
    fn carried(&mut self, args: &mut Vec<(&'t str, Type)>, initial: &mut Vec<Value>) -> Result<()> {
        if !self.accept_word("carry")? {
            return Ok(());
        }
        self.expect('(')?;
        while !self.at(')') {
            if args.len() > MAX_CARRIED {
                return Err(self.too_many("carried values", MAX_CARRIED));
            }
            let name = self.value_token("a carried value")?;
            self.expect(':')?;
            let ty = self.value_type()?;
            args.push((name, ty));
            self.expect('=')?;
            initial.push(self.operand_of(ty)?);
            if !self.accept(',')? {
                break;
            }
        }
        self.expect(')')
    }

    fn define_all(&mut self, args: &[(&'t str, Type)]) -> Result<Vec<Value>> {
        args.iter().map(|(name, ty)| self.define(name, *ty)).collect()
    }

    fn for_op(&mut self, op: &mut Op, depth: usize) -> Result<Vec<Type>> {
        let count = self.value_token("the loop's count")?;
        self.expect(':')?;
        let ty = self.value_type()?;
        let mut args = vec![(count, ty)];
        self.expect('=')?;
        op.operands.push(self.operand_of(ty)?);
        self.expect_word("to")?;
        op.operands.push(self.operand_of(ty)?);
        self.expect_word("step")?;
        op.operands.push(self.operand_of(ty)?);
        op.immediates.push(if self.accept_word("unroll")? { self.integer("unroll factor")? } else { 0 });
        self.carried(&mut args, &mut op.operands)?;
        self.expect('{')?;
        let values = self.define_all(&args)?;
        let types: Vec<Type> = args[1..].iter().map(|(_, ty)| *ty).collect();
        op.regions.push(self.region(depth + 1, values, &types)?);
        Ok(types)
    }

    fn while_op(&mut self, op: &mut Op, depth: usize) -> Result<Vec<Type>> {
        let mut args = Vec::new();
        self.carried(&mut args, &mut op.operands)?;
        self.expect('{')?;
        let values = self.define_all(&args)?;
        let types: Vec<Type> = args.into_iter().map(|(_, ty)| ty).collect();
        op.regions.push(self.region(depth + 1, values, &[Type::BOOL])?);
        self.expect_word("do")?;
        self.expect('{')?;
        op.regions.push(self.region(depth + 1, Vec::new(), &types)?);
        Ok(types)
    }

    fn switch_op(&mut self, op: &mut Op, depth: usize) -> Result<Vec<Type>> {
        op.operands.push(self.value()?);
        let types = self.types()?;
        self.expect('{')?;
        while self.accept_word("case")? {
            if op.immediates.len() == MAX_CASES {
                return Err(self.too_many("cases", MAX_CASES));
            }
            let case: i64 = self.integer("signed 64-bit number")?;
            op.immediates.push(case as u64);
            self.expect('{')?;
            op.regions.push(self.region(depth + 1, Vec::new(), &types)?);
        }
        self.expect_word("default")?;
        self.expect('{')?;
        op.regions.push(self.region(depth + 1, Vec::new(), &types)?);
        self.expect('}')?;
        Ok(types)
    }
}
