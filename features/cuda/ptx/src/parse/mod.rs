//! Text to a module. Debugging information is skipped; names of registers and of variables of functions are resolved.
//!
//! Here are the tokens and what a module consists of; `variable` has variables and what they begin with, `function` functions and
//! instructions, `names` the names in a function.

mod function;
mod names;
mod variable;

use crate::ast::{Ast, Declaration, Declared, Function, Kind, Linkage, Space};
use crate::error::{Error, Result};
use crate::lex::{Lexer, Spanned, Token};
use crate::limits::{MAX_DATA, MAX_TEXT, MAX_VARIABLES};
use std::collections::HashMap;
use std::ops::Range;

/// Reads a module: what is in its functions is only looked at for where it ends.
pub(crate) fn parse(text: &str) -> Result<Ast> {
    if text.len() > MAX_TEXT {
        return Err(Error::large(0, "bytes", MAX_TEXT));
    }
    let mut parser = Parser::new(Lexer::new(text))?;
    let mut ast = parser.module()?;
    ast.mentions = parser.mentions;
    Ok(ast)
}

/// Reads a function of the module that has this text.
pub(crate) fn function(text: &str, declared: &Declared) -> Result<Function> {
    read(text, declared).map(|(function, _)| function)
}

/// Returns where a function refers to names of module scope.
pub(crate) fn mentions(text: &str, declared: &Declared) -> Result<Vec<Range<usize>>> {
    // The first is the function's own name.
    read(text, declared).map(|(_, parser)| parser.mentions.into_iter().skip(1).collect())
}

fn read<'t>(text: &'t str, declared: &Declared) -> Result<(Function, Parser<'t>)> {
    let mut lexer = Lexer::new(text);
    lexer.skip_to(declared.at.unwrap_or(text.len()), declared.head.line);
    let mut parser = Parser::new(lexer)?;
    let (mut function, mut names) = parser.head(declared.head.entry)?;
    if let Some(error) = function.unsupported {
        return Err(error);
    }
    parser.expect(b'{')?;
    function.body = Some(parser.body(&mut function, &mut names)?);
    Ok((function, parser))
}

struct Parser<'t> {
    lexer: Lexer<'t>,
    next: Spanned<'t>,
    instructions: usize,
    /// Whether the variable at hand has the attribute `.managed`.
    managed: bool,
    /// Where the last token ended.
    last: usize,
    /// Where names of module scope are referred to.
    mentions: Vec<Range<usize>>,
}

impl<'t> Parser<'t> {
    fn new(mut lexer: Lexer<'t>) -> Result<Parser<'t>> {
        let next = lexer.next()?;
        Ok(Parser { lexer, next, instructions: 0, managed: false, last: 0, mentions: Vec::new() })
    }

    fn advance(&mut self) -> Result<Spanned<'t>> {
        let next = self.lexer.next()?;
        self.last = self.next.end;
        Ok(std::mem::replace(&mut self.next, next))
    }

    fn line(&self) -> u32 {
        self.next.line
    }

    fn is(&self, sign: u8) -> bool {
        self.next.token == Token::Sign(sign)
    }

    fn accept(&mut self, sign: u8) -> Result<bool> {
        let found = self.is(sign);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn expect(&mut self, sign: u8) -> Result<()> {
        match self.accept(sign)? {
            true => Ok(()),
            false => Err(self.unexpected(&format!("\"{}\"", char::from(sign)))),
        }
    }

    fn unexpected(&self, wanted: &str) -> Error {
        let found = match self.next.token {
            Token::End => "the end of the text".to_owned(),
            Token::Word(word) => word.chars().take(60).collect(),
            Token::Dot(word) => format!(".{}", word.chars().take(60).collect::<String>()),
            Token::Sign(sign) => format!("\"{}\"", char::from(sign)),
            Token::Int(_) | Token::F32(_) | Token::F64(_) => "a number".to_owned(),
            Token::Text(_) => "a text".to_owned(),
        };
        Error::syntax(self.line(), format!("expected {wanted}, found {found}"))
    }

    fn word(&mut self, wanted: &str) -> Result<&'t str> {
        match self.next.token {
            Token::Word(word) => {
                self.advance()?;
                Ok(word)
            }
            _ => Err(self.unexpected(wanted)),
        }
    }

    /// Reads a name of module scope.
    fn mention(&mut self, wanted: &str) -> Result<&'t str> {
        let (start, name) = (self.next.start, self.word(wanted)?);
        self.mentions.push(start..start + name.len());
        Ok(name)
    }

    fn integer(&mut self) -> Result<u64> {
        let negative = self.accept(b'-')?;
        match self.next.token {
            Token::Int(value) => {
                self.advance()?;
                Ok(if negative { value.wrapping_neg() } else { value })
            }
            _ => Err(self.unexpected("an integer")),
        }
    }

    /// Skips tokens up to the end of the line of the one at hand.
    fn rest_of_line(&mut self) -> Result<()> {
        let line = self.line();
        while self.next.line == line && self.next.token != Token::End {
            self.advance()?;
        }
        Ok(())
    }

    /// Skips what is in braces.
    fn skip_braces(&mut self) -> Result<()> {
        let mut open = 0usize;
        loop {
            match self.advance()?.token {
                Token::Sign(b'{') => open += 1,
                Token::Sign(b'}') => match open {
                    0 | 1 => return Ok(()),
                    _ => open -= 1,
                },
                Token::End => return Err(self.unexpected("\"}\"")),
                _ => {}
            }
        }
    }

    fn skip_to_semicolon(&mut self) -> Result<()> {
        while !self.accept(b';')? {
            if self.advance()?.token == Token::End {
                return Err(self.unexpected("\";\""));
            }
        }
        Ok(())
    }

    fn module(&mut self) -> Result<Ast> {
        let mut ast = Ast {
            version: (0, 0),
            target: "".into(),
            variables: Vec::new(),
            functions: Vec::new(),
            names: HashMap::new(),
            declarations: Vec::new(),
            mentions: Vec::new(),
        };
        let mut data = 0u64;
        loop {
            let line = self.line();
            match self.next.token {
                Token::End => break,
                Token::Dot("version") => {
                    self.advance()?;
                    let Token::F64(bits) = self.advance()?.token else {
                        return Err(Error::syntax(line, ".version has a number such as 8.0"));
                    };
                    let tenths = (f64::from_bits(bits) * 10.0).round() as u32;
                    ast.version = (tenths / 10, tenths % 10);
                }
                Token::Dot("target") => {
                    self.advance()?;
                    ast.target = self.word("an architecture such as sm_75")?.into();
                    while self.accept(b',')? {
                        self.word("a mode")?;
                    }
                }
                Token::Dot("address_size") => {
                    self.advance()?;
                    if self.integer()? != 64 {
                        return Err(Error::unsupported(line, "an address size other than 64"));
                    }
                }
                Token::Dot("file" | "loc") => self.rest_of_line()?,
                Token::Dot("section") => {
                    self.advance()?;
                    self.skip_braces()?;
                }
                Token::Dot("pragma") => self.skip_to_semicolon()?,
                Token::Dot("alias") => self.alias(&mut ast)?,
                Token::Dot(_) => self.declaration(&mut ast, &mut data)?,
                _ => return Err(self.unexpected("a directive")),
            }
        }
        if ast.version == (0, 0) {
            return Err(Error::syntax(1, "the text begins with no .version"));
        }
        Ok(ast)
    }

    /// `.alias f, g;`: calls of `f`, which was declared, call `g`.
    fn alias(&mut self, ast: &mut Ast) -> Result<()> {
        let start = self.next.start;
        self.advance()?;
        let name = self.mention("the name of a function")?;
        self.expect(b',')?;
        let aliasee = self.mention("the name of a function")?;
        self.expect(b';')?;
        let mut declarations = ast.declarations.iter_mut();
        if let Some(declaration) = declarations.find(|d| &*d.name == name && d.rest.is_empty()) {
            (declaration.rest, declaration.is_alias) = (start..self.last, true);
        }
        if let Some(&function) = ast.names.get(aliasee) {
            ast.names.insert(name.into(), function);
        }
        Ok(())
    }

    /// A function or a variable of the module.
    fn declaration(&mut self, ast: &mut Ast, data: &mut u64) -> Result<()> {
        let (mut linkage, start) = (Linkage::Local, self.next.start);
        loop {
            let line = self.line();
            match self.next.token {
                Token::Dot("extern") => linkage = Linkage::Extern,
                Token::Dot("visible") => linkage = Linkage::Visible,
                Token::Dot("weak") => linkage = Linkage::Weak,
                Token::Dot("common") => linkage = Linkage::Common,
                Token::Dot(word @ ("entry" | "func")) => {
                    self.advance()?;
                    return self.function(ast, word == "entry", linkage, start);
                }
                Token::Dot("global" | "const" | "shared" | "local") => {
                    let variables = self.variables()?;
                    let head = start..variables.first().map_or(start, |(_, place)| place.start);
                    for (variable, rest) in variables {
                        if matches!(variable.space, Space::Global | Space::Const) {
                            *data = data.saturating_add(variable.size);
                        }
                        if *data > MAX_DATA {
                            return Err(Error::large(line, "bytes of variables", MAX_DATA as usize));
                        }
                        if ast.variables.len() >= MAX_VARIABLES {
                            return Err(Error::large(line, "variables", MAX_VARIABLES));
                        }
                        // Shared memory whose size the launch says is declared so.
                        let is_dynamic = variable.unsized_array && variable.space == Space::Shared;
                        let linkage = if is_dynamic { Linkage::Local } else { linkage };
                        ast.declarations.push(Declaration {
                            name: variable.name.clone(),
                            kind: Kind::Variable(variable.size),
                            linkage,
                            line: variable.line,
                            name_at: rest.start..rest.start + variable.name.len(),
                            head: head.clone(),
                            rest,
                            is_alias: false,
                        });
                        if linkage != Linkage::Extern {
                            ast.variables.push(variable);
                        }
                    }
                    return Ok(());
                }
                Token::Dot(word) => return Err(Error::unsupported(line, format!(".{word}"))),
                _ => return Err(self.unexpected("a directive")),
            }
            self.advance()?;
        }
    }
}
