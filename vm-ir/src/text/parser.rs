//! Text to modules: recursive descent with one token of look-ahead.

use super::error::{TextError, TextErrorKind};
use super::lexer::{Lexer, Position, Token};
use crate::format::read_literal;
use crate::limits::{
    MAX_CARRIED, MAX_CASES, MAX_DEPTH, MAX_KERNELS, MAX_MODULE_BYTES, MAX_PARAMS, MAX_RANK, MAX_SHARED_ARRAYS,
};
use crate::module::{
    GuestAddr, Kernel, Line, Module, Numbering, Op, Param, ParamKind, Place, Region, SharedArray, TooLarge,
    Value, is_name,
};
use crate::op::{Opcode, Shape};
use crate::types::{Scalar, Type};
use crate::view::{Access, Dim, ViewType};
use std::collections::{HashMap, HashSet};

type Result<T> = std::result::Result<T, TextError>;

/// Reads a module.
///
/// # Errors
///
/// The first thing in the text that is not of the form in `docs/ir.md`, with its line.
pub fn parse(text: &str) -> Result<Module> {
    let mut parser = Parser::new(text);
    if text.len() > MAX_MODULE_BYTES {
        return Err(
            parser.error(TextErrorKind::TooMany { what: "bytes in a module", limit: MAX_MODULE_BYTES })
        );
    }
    parser.advance()?;
    parser.module()
}

struct Parser<'t> {
    lexer: Lexer<'t>,
    token: Token<'t>,
    position: Position,
    kernel: Option<&'t str>,
    numbering: Numbering,
    values: HashMap<&'t str, Value>,
    places: HashMap<&'t str, Place>,
}

impl From<TooLarge> for TextErrorKind {
    fn from(error: TooLarge) -> TextErrorKind {
        match error {
            TooLarge::Values => {
                TextErrorKind::TooMany { what: "values in a kernel", limit: crate::limits::MAX_VALUES }
            }
            TooLarge::Ops => {
                TextErrorKind::TooMany { what: "ops in a kernel", limit: crate::limits::MAX_OPS }
            }
        }
    }
}

impl<'t> Parser<'t> {
    fn new(text: &'t str) -> Parser<'t> {
        Parser {
            lexer: Lexer::new(text),
            token: Token::End,
            position: Position { line: 1, column: 1 },
            kernel: None,
            numbering: Numbering::default(),
            values: HashMap::new(),
            places: HashMap::new(),
        }
    }

    // --- tokens ---

    fn error_at(&self, position: Position, kind: TextErrorKind) -> TextError {
        TextError {
            line: position.line,
            column: position.column,
            kernel: self.kernel.map(str::to_owned),
            kind,
        }
    }

    fn error(&self, kind: impl Into<TextErrorKind>) -> TextError {
        self.error_at(self.position, kind.into())
    }

    fn expected(&self, expected: &str) -> TextError {
        let found = self.token.describe();
        self.error(TextErrorKind::Expected { expected: expected.to_owned(), found })
    }

    fn too_many(&self, what: &'static str, limit: usize) -> TextError {
        self.error(TextErrorKind::TooMany { what, limit })
    }

    fn advance(&mut self) -> Result<Token<'t>> {
        let (position, token) = self.lexer.next();
        self.position = position;
        match token {
            Ok(token) => Ok(std::mem::replace(&mut self.token, token)),
            Err(kind) => Err(self.error(kind)),
        }
    }

    fn line(&self) -> Line {
        Line(self.position.line)
    }

    fn at(&self, punct: char) -> bool {
        self.token == Token::Punct(punct)
    }

    fn accept(&mut self, punct: char) -> Result<bool> {
        let here = self.at(punct);
        if here {
            self.advance()?;
        }
        Ok(here)
    }

    fn expect(&mut self, punct: char) -> Result<()> {
        if self.accept(punct)? { Ok(()) } else { Err(self.expected(&format!("{:?}", punct.to_string()))) }
    }

    fn accept_word(&mut self, word: &str) -> Result<bool> {
        let here = self.token == Token::Word(word);
        if here {
            self.advance()?;
        }
        Ok(here)
    }

    fn expect_word(&mut self, word: &str) -> Result<()> {
        if self.accept_word(word)? { Ok(()) } else { Err(self.expected(&format!("{word:?}"))) }
    }

    fn word(&mut self, what: &str) -> Result<&'t str> {
        match self.token {
            Token::Word(word) => {
                self.advance()?;
                Ok(word)
            }
            _ => Err(self.expected(what)),
        }
    }

    /// `@name`, the name checked.
    fn global(&mut self, what: &str) -> Result<&'t str> {
        match self.token {
            Token::Global(name) if is_name(name) => {
                self.advance()?;
                Ok(name)
            }
            Token::Global(name) => Err(self.error(TextErrorKind::Name(name.to_owned()))),
            _ => Err(self.expected(what)),
        }
    }

    fn integer<T: TryFrom<i128>>(&mut self, what: &str) -> Result<T> {
        let Token::Number(text) = self.token else { return Err(self.expected(what)) };
        let value = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok().map(i128::from),
            None => text.parse().ok(),
        };
        match value.and_then(|v| T::try_from(v).ok()) {
            Some(value) => {
                self.advance()?;
                Ok(value)
            }
            None => Err(self.error(TextErrorKind::Number { text: text.to_owned(), what: what.to_owned() })),
        }
    }

    // --- types ---

    fn scalar(&mut self) -> Result<Scalar> {
        let Token::Word(word) = self.token else { return Err(self.expected("a type")) };
        match Scalar::from_name(word) {
            Some(scalar) => {
                self.advance()?;
                Ok(scalar)
            }
            None => Err(self.error(TextErrorKind::UnknownType(word.to_owned()))),
        }
    }

    fn value_type(&mut self) -> Result<Type> {
        let Token::Word(word) = self.token else { return Err(self.expected("a type")) };
        let Some(lanes) = word.strip_prefix("vec") else { return self.scalar().map(Type::scalar_of) };
        let lanes = match lanes {
            "2" => 2,
            "4" => 4,
            "8" => 8,
            "16" => 16,
            _ => return Err(self.error(TextErrorKind::UnknownType(word.to_owned()))),
        };
        self.advance()?;
        self.expect('<')?;
        let scalar = self.scalar()?;
        self.expect('>')?;
        Type::vector(scalar, lanes).ok_or_else(|| self.expected("2, 4, 8 or 16 lanes"))
    }

    fn types(&mut self) -> Result<Vec<Type>> {
        let mut types = Vec::new();
        if self.accept(':')? {
            loop {
                if types.len() == MAX_CARRIED {
                    return Err(self.too_many("results of an op", MAX_CARRIED));
                }
                types.push(self.value_type()?);
                if !self.accept(',')? {
                    break;
                }
            }
        }
        Ok(types)
    }

    fn view_type(&mut self) -> Result<ViewType> {
        self.expect_word("view")?;
        self.expect('<')?;
        let element = self.scalar()?;
        self.expect(',')?;
        self.expect('[')?;
        let mut dims = Vec::new();
        while !self.at(']') {
            if dims.len() == MAX_RANK {
                return Err(self.too_many("dimensions", MAX_RANK));
            }
            dims.push(self.dim()?);
            if !self.accept(',')? {
                break;
            }
        }
        self.expect(']')?;
        self.expect(',')?;
        let Token::Word(word) = self.token else { return Err(self.expected("read, write or readwrite")) };
        let Some(access) = Access::ALL.into_iter().find(|a| a.name() == word) else {
            return Err(self.expected("read, write or readwrite"));
        };
        self.advance()?;
        let mut align = element.bytes();
        if self.accept(',')? {
            self.expect_word("align")?;
            align = self.integer("number of bytes")?;
        }
        self.expect('>')?;
        Ok(ViewType { element, dims, access, align })
    }

    fn dim(&mut self) -> Result<Dim> {
        if !self.accept('?')? {
            return Ok(Dim::Fixed(self.integer("extent")?));
        }
        let multiple = if self.accept('*')? { self.integer("multiple")? } else { 1 };
        Ok(Dim::Any { multiple })
    }

    // --- names ---

    fn define(&mut self, name: &'t str, ty: Type) -> Result<Value> {
        let number = !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit());
        if !number && !is_name(name) || name.len() > crate::limits::MAX_NAME {
            return Err(self.error(TextErrorKind::Name(name.to_owned())));
        }
        let stored = (!number).then(|| name.into());
        let value = self.numbering.define(ty, stored).map_err(|e| self.error(e))?;
        if self.values.insert(name, value).is_some() {
            return Err(self.error(TextErrorKind::Duplicate(format!("%{name}"))));
        }
        Ok(value)
    }

    fn value_token(&mut self, what: &str) -> Result<&'t str> {
        match self.token {
            Token::Value(name) => {
                self.advance()?;
                Ok(name)
            }
            _ => Err(self.expected(what)),
        }
    }

    fn value(&mut self) -> Result<Value> {
        let Token::Value(name) = self.token else { return Err(self.expected("a value")) };
        match self.values.get(name) {
            Some(value) => {
                let value = *value;
                self.advance()?;
                Ok(value)
            }
            None => Err(self.error(TextErrorKind::UnknownValue(name.to_owned()))),
        }
    }

    fn values(&mut self, limit: usize) -> Result<Vec<Value>> {
        let mut values = vec![self.value()?];
        while self.accept(',')? {
            if values.len() == limit {
                return Err(self.too_many("values in a list", limit));
            }
            values.push(self.value()?);
        }
        Ok(values)
    }

    fn define_place(&mut self, name: &'t str, place: Place) -> Result<()> {
        match self.places.insert(name, place) {
            None => Ok(()),
            Some(_) => Err(self.error(TextErrorKind::Duplicate(format!("@{name}")))),
        }
    }

    // --- modules and kernels ---

    fn module(&mut self) -> Result<Module> {
        self.expect_word("vir")?;
        match self.token {
            Token::Number(text) if text == Module::VERSION.to_string() => self.advance()?,
            Token::Number(text) => return Err(self.error(TextErrorKind::Version(text.to_owned()))),
            _ => return Err(self.expected("the version of the text")),
        };
        let mut kernels: Vec<Kernel> = Vec::new();
        let mut names = HashSet::new();
        while self.token != Token::End {
            if kernels.len() == MAX_KERNELS {
                return Err(self.too_many("kernels in a module", MAX_KERNELS));
            }
            let position = self.position;
            let kernel = self.kernel()?;
            if !names.insert(kernel.name.clone()) {
                let kind = TextErrorKind::Duplicate(format!("@{}", kernel.name));
                return Err(self.error_at(position, kind));
            }
            self.kernel = None;
            kernels.push(kernel);
        }
        Ok(Module { kernels })
    }

    fn kernel(&mut self) -> Result<Kernel> {
        let line = self.line();
        self.expect_word("kernel")?;
        let name = self.global("the kernel's name")?;
        self.kernel = Some(name);
        self.numbering = Numbering::default();
        self.values.clear();
        self.places.clear();
        let params = self.params()?;
        self.expect_word("at")?;
        let guest = GuestAddr(self.integer("guest address")?);
        self.expect_word("block")?;
        let block = self.block_size()?;
        self.expect('{')?;
        let mut shared = Vec::new();
        while self.token == Token::Word("shared") {
            if shared.len() == MAX_SHARED_ARRAYS {
                return Err(self.too_many("shared arrays", MAX_SHARED_ARRAYS));
            }
            shared.push(self.shared_array(shared.len() as u16)?);
        }
        let body = self.region(1, Vec::new())?;
        let values = std::mem::take(&mut self.numbering.values);
        Ok(Kernel { name: name.into(), guest, block, params, shared, values, body, line })
    }

    fn params(&mut self) -> Result<Vec<Param>> {
        self.expect('(')?;
        let mut params = Vec::new();
        while !self.at(')') {
            if params.len() == MAX_PARAMS {
                return Err(self.too_many("parameters", MAX_PARAMS));
            }
            params.push(self.param(params.len() as u16)?);
            if !self.accept(',')? {
                break;
            }
        }
        self.expect(')')?;
        Ok(params)
    }

    fn param(&mut self, index: u16) -> Result<Param> {
        if let Token::Value(name) = self.token {
            if !is_name(name) {
                return Err(self.error(TextErrorKind::Name(name.to_owned())));
            }
            self.advance()?;
            self.expect(':')?;
            let ty = self.value_type()?;
            let value = self.define(name, ty)?;
            let mut range = None;
            if self.accept_word("in")? {
                self.expect('[')?;
                let least = self.integer("signed 64-bit number")?;
                self.expect(',')?;
                range = Some((least, self.integer("signed 64-bit number")?));
                self.expect(']')?;
            }
            return Ok(Param { name: name.into(), kind: ParamKind::Scalar { value, range } });
        }
        let name = self.global("a parameter, @view or %number")?;
        self.define_place(name, Place::View(index))?;
        self.expect(':')?;
        Ok(Param { name: name.into(), kind: ParamKind::View(self.view_type()?) })
    }

    fn block_size(&mut self) -> Result<[u32; 3]> {
        let mut block = [1; 3];
        self.expect('(')?;
        for (i, size) in block.iter_mut().enumerate() {
            if i > 0 && !self.accept(',')? {
                break;
            }
            *size = self.integer("number of threads")?;
        }
        self.expect(')')?;
        Ok(block)
    }

    fn shared_array(&mut self, index: u16) -> Result<SharedArray> {
        let line = self.line();
        self.expect_word("shared")?;
        let name = self.global("the array's name")?;
        self.define_place(name, Place::Shared(index))?;
        self.expect(':')?;
        let element = self.scalar()?;
        self.expect('[')?;
        let mut dims = Vec::new();
        while !self.at(']') {
            if dims.len() == MAX_RANK {
                return Err(self.too_many("dimensions", MAX_RANK));
            }
            dims.push(self.integer("number of elements")?);
            if !self.accept(',')? {
                break;
            }
        }
        self.expect(']')?;
        Ok(SharedArray { name: name.into(), element, dims, line })
    }

    // --- regions and ops ---

    /// A region from behind its `{` to its `}`, both included in what is read but the first.
    fn region(&mut self, depth: usize, args: Vec<Value>) -> Result<Region> {
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
        if let Token::Global(name) = self.token {
            let Some(place) = self.places.get(name).copied() else {
                return Err(self.error(TextErrorKind::UnknownPlace(name.to_owned())));
            };
            self.advance()?;
            op.place = Some(place);
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
