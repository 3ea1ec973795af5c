//! Text to modules: recursive descent with one token of look-ahead. Here are modules, kernels and types; the ops are
//! in [`body`](super::body).

use super::error::{TextError, TextErrorKind};
use super::lexer::{Lexer, Position, Token};
use super::literal::{Constants, Literal};
use crate::limits::{MAX_CARRIED, MAX_KERNELS, MAX_MODULE_BYTES, MAX_PARAMS, MAX_RANK, MAX_SHARED_ARRAYS};
use crate::module::{
    GuestAddr, Kernel, Line, LocalArray, Module, Numbering, Param, ParamKind, Place, SharedArray, TooLarge,
    Value, is_name,
};
use crate::types::{Scalar, Type};
use crate::view::{Access, Dim, ViewType};
use std::collections::{HashMap, HashSet};

pub(super) type Result<T> = std::result::Result<T, TextError>;

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

pub(super) struct Parser<'t> {
    pub(super) lexer: Lexer<'t>,
    pub(super) token: Token<'t>,
    pub(super) position: Position,
    /// Where the token before ended.
    pub(super) behind: Position,
    pub(super) kernel: Option<&'t str>,
    pub(super) numbering: Numbering,
    pub(super) values: HashMap<&'t str, Value>,
    pub(super) places: HashMap<&'t str, Place>,
    /// The element of each fragment.
    pub(super) elements: Vec<Scalar>,
    /// The element of each view, shared array and local array.
    pub(super) memory: HashMap<Place, Scalar>,
    /// What the literals among the operands became.
    pub(super) constants: Constants,
}

impl From<TooLarge> for TextErrorKind {
    fn from(error: TooLarge) -> TextErrorKind {
        match error {
            TooLarge::Values(limit) => TextErrorKind::TooMany { what: "values in a kernel", limit },
            TooLarge::Ops(limit) => TextErrorKind::TooMany { what: "ops in a kernel", limit },
        }
    }
}

impl<'t> Parser<'t> {
    pub(super) fn new(text: &'t str) -> Parser<'t> {
        Parser {
            lexer: Lexer::new(text),
            token: Token::End,
            position: Position { line: 1, column: 1 },
            behind: Position { line: 1, column: 1 },
            kernel: None,
            numbering: Numbering::default(),
            values: HashMap::new(),
            places: HashMap::new(),
            elements: Vec::new(),
            memory: HashMap::new(),
            constants: Constants::default(),
        }
    }

    // --- tokens ---

    pub(super) fn error_at(&self, position: Position, kind: TextErrorKind) -> TextError {
        TextError {
            line: position.line,
            column: position.column,
            kernel: self.kernel.map(str::to_owned),
            kind,
        }
    }

    pub(super) fn error(&self, kind: impl Into<TextErrorKind>) -> TextError {
        self.error_at(self.position, kind.into())
    }

    pub(super) fn expected(&self, expected: &str) -> TextError {
        let found = self.token.describe();
        self.error(TextErrorKind::Expected { expected: expected.to_owned(), found })
    }

    /// The same of what ends an op. Where the next token is on another line, it is the line before that lacks it.
    pub(super) fn expected_behind(&self, expected: &str) -> TextError {
        match (self.behind.line < self.position.line, self.token) {
            (false, _) => self.expected(expected),
            (true, Token::End) => {
                TextError { column: self.behind.column, line: self.behind.line, ..self.expected(expected) }
            }
            (true, _) => {
                let found = "the end of the line".to_owned();
                self.error_at(self.behind, TextErrorKind::Expected { expected: expected.to_owned(), found })
            }
        }
    }

    pub(super) fn too_many(&self, what: &'static str, limit: usize) -> TextError {
        self.error(TextErrorKind::TooMany { what, limit })
    }

    pub(super) fn advance(&mut self) -> Result<Token<'t>> {
        self.behind = self.lexer.position();
        let (position, token) = self.lexer.next();
        self.position = position;
        match token {
            Ok(token) => Ok(std::mem::replace(&mut self.token, token)),
            Err(kind) => Err(self.error(kind)),
        }
    }

    pub(super) fn line(&self) -> Line {
        Line(self.position.line)
    }

    pub(super) fn at(&self, punct: char) -> bool {
        self.token == Token::Punct(punct)
    }

    pub(super) fn accept(&mut self, punct: char) -> Result<bool> {
        let here = self.at(punct);
        if here {
            self.advance()?;
        }
        Ok(here)
    }

    pub(super) fn expect(&mut self, punct: char) -> Result<()> {
        if self.accept(punct)? { Ok(()) } else { Err(self.expected(&format!("{:?}", punct.to_string()))) }
    }

    pub(super) fn accept_word(&mut self, word: &str) -> Result<bool> {
        let here = self.token == Token::Word(word);
        if here {
            self.advance()?;
        }
        Ok(here)
    }

    pub(super) fn expect_word(&mut self, word: &str) -> Result<()> {
        if self.accept_word(word)? { Ok(()) } else { Err(self.expected(&format!("{word:?}"))) }
    }

    pub(super) fn word(&mut self, what: &str) -> Result<&'t str> {
        match self.token {
            Token::Word(word) => {
                self.advance()?;
                Ok(word)
            }
            _ => Err(self.expected(what)),
        }
    }

    /// `@name`, the name checked.
    pub(super) fn global(&mut self, what: &str) -> Result<&'t str> {
        match self.token {
            Token::Global(name) if is_name(name) => {
                self.advance()?;
                Ok(name)
            }
            Token::Global(name) => Err(self.error(TextErrorKind::Name(name.to_owned()))),
            _ => Err(self.expected(what)),
        }
    }

    pub(super) fn integer<T: TryFrom<i128>>(&mut self, what: &str) -> Result<T> {
        let Token::Number(text) = self.token else { return Err(self.expected(what)) };
        let value = self.integer_at(Literal { text, position: self.position }, what)?;
        self.advance()?;
        Ok(value)
    }

    pub(super) fn integer_at<T: TryFrom<i128>>(&self, literal: Literal<'t>, what: &str) -> Result<T> {
        let Literal { text, position } = literal;
        let value = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok().map(i128::from),
            None => text.parse().ok(),
        };
        let wrong = || TextErrorKind::Number { text: text.to_owned(), what: what.to_owned() };
        value.and_then(|v| T::try_from(v).ok()).ok_or_else(|| self.error_at(position, wrong()))
    }

    // --- types ---

    pub(super) fn scalar(&mut self) -> Result<Scalar> {
        let Token::Word(word) = self.token else { return Err(self.expected("a type")) };
        match Scalar::from_name(word) {
            Some(scalar) => {
                self.advance()?;
                Ok(scalar)
            }
            None => Err(self.error(TextErrorKind::UnknownType(word.to_owned()))),
        }
    }

    pub(super) fn value_type(&mut self) -> Result<Type> {
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

    pub(super) fn types(&mut self) -> Result<Vec<Type>> {
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

    pub(super) fn view_type(&mut self) -> Result<ViewType> {
        let surface = self.accept_word("surface")?;
        if !surface {
            self.expect_word("view")?;
        }
        self.expect('<')?;
        let element = self.scalar()?;
        self.expect(',')?;
        self.expect('[')?;
        let (mut dims, mut names) = (Vec::new(), <[Option<Box<str>>; MAX_RANK]>::default());
        while !self.at(']') {
            if dims.len() == MAX_RANK {
                return Err(self.too_many("dimensions", MAX_RANK));
            }
            if let Token::Word(name) = self.token {
                if !is_name(name) {
                    return Err(self.error(TextErrorKind::Name(name.to_owned())));
                }
                names[dims.len()] = Some(name.into());
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
        Ok(ViewType { element, dims, names, access, align, surface })
    }

    pub(super) fn dim(&mut self) -> Result<Dim> {
        match self.token {
            Token::Punct('?') | Token::Word(_) => self.advance()?,
            _ => return Ok(Dim::Fixed(self.integer("extent, ? or a name")?)),
        };
        let multiple = if self.accept('*')? { self.integer("multiple")? } else { 1 };
        Ok(Dim::Any { multiple })
    }

    // --- names ---

    pub(super) fn define(&mut self, name: &'t str, ty: Type) -> Result<Value> {
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

    pub(super) fn value_token(&mut self, what: &str) -> Result<&'t str> {
        match self.token {
            Token::Value(name) => {
                self.advance()?;
                Ok(name)
            }
            _ => Err(self.expected(what)),
        }
    }

    pub(super) fn value(&mut self) -> Result<Value> {
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

    pub(super) fn define_place(&mut self, name: &'t str, place: Place) -> Result<()> {
        match self.places.insert(name, place) {
            None => Ok(()),
            Some(_) => Err(self.error(TextErrorKind::Duplicate(format!("@{name}")))),
        }
    }

    // --- modules and kernels ---

    pub(super) fn module(&mut self) -> Result<Module> {
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

    pub(super) fn kernel(&mut self) -> Result<Kernel> {
        let line = self.line();
        self.expect_word("kernel")?;
        let name = self.global("the kernel's name")?;
        self.kernel = Some(name);
        self.numbering = Numbering::default();
        self.values.clear();
        self.places.clear();
        self.memory.clear();
        self.constants.clear();
        let params = self.params()?;
        self.expect_word("at")?;
        let guest = GuestAddr(self.integer("guest address")?);
        let mut groups = None;
        let mut block = [1; 3];
        if self.accept_word("tile")? {
            self.expect('(')?;
            groups = Some(self.integer("number of groups")?);
            self.expect(')')?;
        } else {
            self.expect_word("block")?;
            block = self.block_size()?;
        }
        let mut cluster = 1;
        if self.accept_word("cluster")? {
            self.expect('(')?;
            cluster = self.integer("number of blocks")?;
            self.expect(')')?;
        }
        let mut resident = 0;
        if self.accept_word("resident")? {
            self.expect('(')?;
            resident = self.integer("number of blocks")?;
            self.expect(')')?;
        }
        self.expect('{')?;
        let mut shared = Vec::new();
        while self.token == Token::Word("shared") {
            if shared.len() == MAX_SHARED_ARRAYS {
                return Err(self.too_many("shared arrays", MAX_SHARED_ARRAYS));
            }
            shared.push(self.shared_array(shared.len() as u16)?);
        }
        let mut local = Vec::new();
        while self.token == Token::Word("local") {
            if local.len() == MAX_SHARED_ARRAYS {
                return Err(self.too_many("local arrays", MAX_SHARED_ARRAYS));
            }
            local.push(self.local_array(local.len() as u16)?);
        }
        let tile = groups.map(|groups| self.tile(groups)).transpose()?.map(Box::new);
        self.elements = tile.iter().flat_map(|tile| &tile.fragments).map(|f| f.element).collect();
        let body = self.region(1, Vec::new(), &[])?;
        let values = std::mem::take(&mut self.numbering.values);
        let name = name.into();
        Ok(Kernel { name, guest, block, cluster, resident, params, shared, local, tile, values, body, line })
    }

    pub(super) fn params(&mut self) -> Result<Vec<Param>> {
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

    pub(super) fn param(&mut self, index: u16) -> Result<Param> {
        let line = self.line();
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
            return Ok(Param { name: name.into(), kind: ParamKind::Scalar { value, range }, line });
        }
        let name = self.global("a parameter, @view or %number")?;
        self.define_place(name, Place::View(index))?;
        self.expect(':')?;
        let view = self.view_type()?;
        self.memory.insert(Place::View(index), view.element);
        Ok(Param { name: name.into(), kind: ParamKind::View(view), line })
    }

    pub(super) fn block_size(&mut self) -> Result<[u32; 3]> {
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

    pub(super) fn local_array(&mut self, index: u16) -> Result<LocalArray> {
        let line = self.line();
        self.expect_word("local")?;
        let name = self.global("the array's name")?;
        self.define_place(name, Place::Local(index))?;
        self.expect(':')?;
        if !self.accept_word(Scalar::I8.name())? {
            return Err(self.expected("i8, of which values of other types are made"));
        }
        self.memory.insert(Place::Local(index), Scalar::I8);
        self.expect('[')?;
        let len = self.integer("number of bytes")?;
        self.expect(']')?;
        Ok(LocalArray { name: name.into(), len, line })
    }

    pub(super) fn shared_array(&mut self, index: u16) -> Result<SharedArray> {
        let line = self.line();
        self.expect_word("shared")?;
        let name = self.global("the array's name")?;
        self.define_place(name, Place::Shared(index))?;
        self.expect(':')?;
        let element = self.scalar()?;
        self.memory.insert(Place::Shared(index), element);
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
}
