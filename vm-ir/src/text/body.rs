//! Regions and ops of a text.

use super::error::TextErrorKind;
use super::lexer::Token;
use super::parser::{Parser, Result};
use crate::format::read_literal;
use crate::limits::{MAX_CARRIED, MAX_CASES, MAX_DEPTH, MAX_RANK};
use crate::module::{Op, Region, Value};
use crate::op::{Opcode, Shape};
use crate::types::Type;

impl<'t> Parser<'t> {
    /// A region from behind its `{` to its `}`, both included in what is read but the first.
    pub(super) fn region(&mut self, depth: usize, args: Vec<Value>) -> Result<Region> {
        let mut region = Region { args, ..Region::default() };
        loop {
            match self.token {
                Token::Punct('}') => {
                    region.yield_line = self.line();
                    break;
                }
                Token::Word("yield") => {
                    region.yield_line = self.line();
                    self.advance()?;
                    region.yields = self.values(MAX_CARRIED + 1)?;
                    break;
                }
                _ => region.ops.push(self.op(depth)?),
            }
        }
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
            _ => self.plain_op(&mut op)?,
        };
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

    fn plain_op(&mut self, op: &mut Op) -> Result<Vec<Type>> {
        let shape = op.code.shape();
        let mut literal = None;
        let mut more = shape.operands() != Some(0) || shape.immediates() != Some(0);
        if matches!(self.token, Token::Global(_)) {
            op.place = Some(self.place()?);
            if self.accept('[')? {
                if !self.at(']') {
                    op.operands = self.values(MAX_RANK)?;
                }
                self.expect(']')?;
            }
            more = self.accept(',')?;
        }
        while more {
            match self.token {
                Token::Value(_) if op.operands.len() > MAX_CARRIED => {
                    return Err(self.too_many("operands of an op", MAX_CARRIED));
                }
                Token::Value(_) => op.operands.push(self.value()?),
                Token::Number(text) | Token::Word(text) if shape == Shape::Const => {
                    literal = Some((self.position, text));
                    self.advance()?;
                    break;
                }
                Token::Number(_) if !op.immediates.is_empty() => {
                    return Err(self.too_many("numbers of an op", 1));
                }
                Token::Number(_) => op.immediates.push(self.integer("number")?),
                _ => return Err(self.expected("a value")),
            }
            more = self.accept(',')?;
        }
        let types = if shape.has_result() {
            if !self.at(':') {
                return Err(self.expected("\":\" and the type of the result"));
            }
            self.advance()?;
            vec![self.value_type()?]
        } else {
            Vec::new()
        };
        if let (Some((position, text)), Some(ty)) = (literal, types.first()) {
            match read_literal(ty.scalar(), text) {
                Some(bits) => op.immediates.push(bits),
                None => {
                    let kind = TextErrorKind::Number { text: text.to_owned(), what: ty.scalar().to_string() };
                    return Err(self.error_at(position, kind));
                }
            }
        }
        Ok(types)
    }

    fn if_op(&mut self, op: &mut Op, depth: usize) -> Result<Vec<Type>> {
        op.operands.push(self.value()?);
        let types = self.types()?;
        self.expect('{')?;
        op.regions.push(self.region(depth + 1, Vec::new())?);
        let other = if self.accept_word("else")? {
            self.expect('{')?;
            self.region(depth + 1, Vec::new())?
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
            args.push((name, self.value_type()?));
            self.expect('=')?;
            initial.push(self.value()?);
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
        let mut args = vec![(count, self.value_type()?)];
        self.expect('=')?;
        op.operands.push(self.value()?);
        self.expect_word("to")?;
        op.operands.push(self.value()?);
        self.expect_word("step")?;
        op.operands.push(self.value()?);
        op.immediates.push(if self.accept_word("unroll")? { self.integer("unroll factor")? } else { 0 });
        self.carried(&mut args, &mut op.operands)?;
        self.expect('{')?;
        let values = self.define_all(&args)?;
        op.regions.push(self.region(depth + 1, values)?);
        Ok(args[1..].iter().map(|(_, ty)| *ty).collect())
    }

    fn while_op(&mut self, op: &mut Op, depth: usize) -> Result<Vec<Type>> {
        let mut args = Vec::new();
        self.carried(&mut args, &mut op.operands)?;
        self.expect('{')?;
        let values = self.define_all(&args)?;
        op.regions.push(self.region(depth + 1, values)?);
        self.expect_word("do")?;
        self.expect('{')?;
        op.regions.push(self.region(depth + 1, Vec::new())?);
        Ok(args.into_iter().map(|(_, ty)| ty).collect())
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
            op.regions.push(self.region(depth + 1, Vec::new())?);
        }
        self.expect_word("default")?;
        self.expect('{')?;
        op.regions.push(self.region(depth + 1, Vec::new())?);
        self.expect('}')?;
        Ok(types)
    }
}
