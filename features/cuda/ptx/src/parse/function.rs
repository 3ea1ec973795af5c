//! Functions: what they take and give, their registers, and their instructions.

use super::Parser;
use super::names::{Names, Scope};
use crate::ast::{Ast, Declaration, Declared, Function, Guard, Instr, Item, Kind, Linkage, Operand, Space};
use crate::error::{Error, Result};
use crate::lex::Token;
use crate::limits::{MAX_CODE, MAX_FUNCTIONS, MAX_INSTRUCTIONS, MAX_NESTING, MAX_OPERANDS};
use std::ops::Range;

impl<'t> Parser<'t> {
    pub(super) fn function(
        &mut self,
        ast: &mut Ast,
        entry: bool,
        linkage: Linkage,
        start: usize,
    ) -> Result<()> {
        let (at, mentions) = (self.next.start, self.mentions.len());
        let (head, _) = self.head(entry)?;
        let name_at = self.mentions.remove(mentions);
        let line = head.line;
        let open = self.next.start;
        let at = if self.accept(b';')? { None } else { Some(at) };
        let mut end = open;
        if at.is_some() {
            if !self.is(b'{') {
                return Err(self.unexpected("\"{\""));
            }
            if !self.lexer.skip_block() {
                return Err(Error::syntax(line, format!("{} does not end", head.name)));
            }
            end = self.lexer.at();
            self.next = self.lexer.next()?;
        }
        let sizes = |range: Range<usize>| head.variables[range].iter().map(|v| v.size).collect();
        ast.declarations.push(Declaration {
            name: head.name.clone(),
            kind: if entry {
                Kind::Entry
            } else {
                Kind::Function(sizes(0..head.returns), sizes(head.param_range()))
            },
            // Kernels are visible to the host in any case.
            linkage: if entry && linkage != Linkage::Weak { Linkage::Visible } else { linkage },
            line,
            name_at,
            head: start..open,
            rest: open..end,
            is_alias: false,
        });
        let declared = Declared { head, at };
        match ast.names.get(&declared.head.name).copied() {
            // Declared first, defined later.
            Some(known) if ast.functions[known].at.is_none() => ast.functions[known] = declared,
            Some(_) if at.is_none() => {}
            Some(_) => return Err(Error::syntax(line, format!("{} is defined twice", declared.head.name))),
            None if ast.functions.len() >= MAX_FUNCTIONS => {
                return Err(Error::large(line, "functions", MAX_FUNCTIONS));
            }
            None => {
                ast.names.insert(declared.head.name.clone(), ast.functions.len());
                ast.functions.push(declared);
            }
        }
        Ok(())
    }

    /// A function up to its body, and the names that it has there.
    pub(super) fn head(&mut self, entry: bool) -> Result<(Function, Names<'t>)> {
        let line = self.line();
        let mut names = Names { scopes: vec![Scope::default()], ..Names::default() };
        let mut function = Function {
            name: "".into(),
            entry,
            line,
            returns: 0,
            params: 0,
            variables: Vec::new(),
            registers: Vec::new(),
            body: None,
            required: None,
            max_threads: None,
            max_registers: None,
            unsupported: None,
        };
        if self.is(b'(') {
            self.parameters(&mut function, &mut names)?;
            function.returns = function.variables.len();
        }
        function.name = self.mention("the name of a function")?.into();
        if self.is(b'(') {
            self.parameters(&mut function, &mut names)?;
        }
        function.params = function.variables.len() - function.returns;
        loop {
            let line = self.line();
            match self.next.token {
                Token::Dot(
                    "maxntid" | "reqntid" | "minnctapersm" | "maxnctapersm" | "maxnreg" | "maxclusterrank",
                ) => {
                    let required = self.next.token == Token::Dot("reqntid");
                    let registers = self.next.token == Token::Dot("maxnreg");
                    let bounds = required || self.next.token == Token::Dot("maxntid");
                    self.advance()?;
                    let mut sizes = [1u32; 3];
                    for (i, size) in sizes.iter_mut().enumerate() {
                        if i > 0 && !self.accept(b',')? {
                            break;
                        }
                        *size = u32::try_from(self.integer()?)
                            .map_err(|_| Error::syntax(line, "a size beyond 32 bits"))?;
                    }
                    if registers {
                        function.max_registers =
                            Some(function.max_registers.map_or(sizes[0], |most| most.min(sizes[0])));
                    }
                    if required {
                        function.required = Some(sizes);
                    }
                    if bounds {
                        function.max_threads =
                            Some(sizes.iter().fold(1u32, |all, size| all.saturating_mul(*size)).min(1024));
                    }
                }
                Token::Dot("noreturn" | "blocksareclusters") => {
                    self.advance()?;
                }
                Token::Dot("pragma") => self.skip_to_semicolon()?,
                Token::Dot(word) => {
                    function.unsupported = Some(Error::unsupported(line, format!(".{word}")));
                    while !matches!(self.next.token, Token::Sign(b'{' | b';') | Token::End) {
                        self.advance()?;
                    }
                    break;
                }
                _ => break,
            }
        }
        Ok((function, names))
    }

    /// `(.param .u64 a, .reg .b32 b)`
    pub(super) fn parameters(&mut self, function: &mut Function, names: &mut Names<'t>) -> Result<()> {
        self.expect(b'(')?;
        if self.accept(b')')? {
            return Ok(());
        }
        loop {
            let line = self.line();
            let in_register = self.next.token == Token::Dot("reg");
            let space = if in_register {
                self.advance()?;
                Space::Param
            } else {
                self.space()?
            };
            if space != Space::Param {
                return Err(Error::syntax(line, "a parameter is .param or .reg"));
            }
            let (ty, lanes, align) = self.of_variable()?;
            let (mut variable, name) = self.one_variable(space, ty, lanes, align)?;
            if in_register {
                variable.register = Some(names.register(function, name, ty, line)?);
            }
            names.declare(function, variable)?;
            if !self.accept(b',')? {
                break;
            }
        }
        self.expect(b')')
    }

    pub(super) fn body(&mut self, function: &mut Function, names: &mut Names<'t>) -> Result<Vec<Item>> {
        let mut items = Vec::new();
        loop {
            let line = self.line();
            match self.next.token {
                Token::Sign(b'}') => {
                    self.advance()?;
                    names.scopes.pop();
                    if names.scopes.is_empty() {
                        return Ok(items);
                    }
                }
                Token::Sign(b'{') => {
                    self.advance()?;
                    if names.scopes.len() > MAX_NESTING {
                        return Err(Error::large(line, "blocks in blocks", MAX_NESTING));
                    }
                    names.scopes.push(Scope::default());
                }
                Token::Dot("reg") => {
                    self.advance()?;
                    self.registers(function, names)?;
                }
                Token::Dot("local" | "shared" | "param" | "global" | "const") => {
                    for (variable, _) in self.variables()? {
                        names.declare(function, variable)?;
                    }
                }
                Token::Dot("loc" | "file") => self.rest_of_line()?,
                Token::Dot("pragma") => self.skip_to_semicolon()?,
                Token::Dot("section") => {
                    self.advance()?;
                    self.skip_braces()?;
                }
                Token::Sign(b';') => {
                    self.advance()?;
                }
                Token::Word(_) | Token::Sign(b'@') => self.statement(function, names, &mut items)?,
                Token::Dot(word) => return Err(Error::unsupported(line, format!(".{word}"))),
                _ => return Err(self.unexpected("an instruction")),
            }
        }
    }

    /// `.b32 %r<10>, %x;` behind `.reg`.
    pub(super) fn registers(&mut self, function: &mut Function, names: &mut Names<'t>) -> Result<()> {
        let (ty, lanes, _) = self.of_variable()?;
        if lanes != 1 {
            return Err(Error::unsupported(self.line(), "a register of several lanes"));
        }
        loop {
            let line = self.line();
            let name = self.word("the name of a register")?;
            if self.accept(b'<')? {
                let count = self.integer()?;
                self.expect(b'>')?;
                names.ranges.insert(name, (ty, count));
            } else if names.scopes.len() > 1 {
                let register = names.new_register(function, ty, line)?;
                if let Some(scope) = names.scopes.last_mut() {
                    scope.registers.insert(name, register);
                }
            } else {
                names.singles.insert(name, ty);
            }
            if !self.accept(b',')? {
                break;
            }
        }
        self.expect(b';')
    }

    /// A label or an instruction.
    pub(super) fn statement(
        &mut self,
        function: &mut Function,
        names: &mut Names<'t>,
        items: &mut Vec<Item>,
    ) -> Result<()> {
        let (line, start) = (self.line(), self.next.start);
        self.instructions += 1;
        if self.instructions > MAX_INSTRUCTIONS {
            return Err(Error::large(line, "instructions", MAX_INSTRUCTIONS));
        }
        let mut guard = None;
        if self.accept(b'@')? {
            let negated = self.accept(b'!')?;
            let name = self.word("a predicate")?;
            guard = Some(Guard { register: names.find(function, name, line)?, negated });
        }
        let word = self.word("an instruction")?;
        if guard.is_none() && self.accept(b':')? {
            if self.next.token != Token::Dot("branchtargets") {
                // What is called through a pointer; the call is refused.
                if let Token::Dot("callprototype" | "calltargets") = self.next.token {
                    return self.skip_to_semicolon();
                }
                items.push(Item::Label(word.into(), line));
                return Ok(());
            }
            self.advance()?;
            let mut targets = Vec::new();
            loop {
                targets.push(Box::from(self.word("a label")?));
                if targets.len() > MAX_OPERANDS {
                    return Err(Error::large(line, "labels in a list", MAX_OPERANDS));
                }
                if !self.accept(b',')? {
                    break;
                }
            }
            self.expect(b';')?;
            items.push(Item::Targets(word.into(), targets));
            return Ok(());
        }
        let mut code = String::from(word);
        while let Token::Dot(modifier) = self.next.token {
            code.push('.');
            code.push_str(modifier);
            if code.len() > MAX_CODE {
                return Err(Error::large(line, "letters in an instruction's code", MAX_CODE));
            }
            self.advance()?;
        }
        let mut operands = Vec::new();
        let (mut count, mentions) = (0, self.mentions.len());
        while !self.is(b';') {
            if !operands.is_empty() {
                self.expect(b',')?;
            }
            operands.push(self.operand(function, names, &mut count, 0)?);
        }
        self.advance()?;
        if matches!(word, "bra" | "brx") {
            // Labels of the function.
            self.mentions.truncate(mentions);
        }
        let span = (start as u32, self.last as u32);
        items.push(Item::Instr(Instr { line, span, guard, code: code.into(), operands }));
        Ok(())
    }

    pub(super) fn operand(
        &mut self,
        function: &mut Function,
        names: &mut Names<'t>,
        count: &mut usize,
        depth: usize,
    ) -> Result<Operand> {
        let line = self.line();
        *count += 1;
        if *count > MAX_OPERANDS || depth > 4 {
            return Err(Error::large(line, "operands in an instruction", MAX_OPERANDS));
        }
        match self.next.token {
            Token::Sign(open @ (b'{' | b'(')) => {
                self.advance()?;
                let close = if open == b'{' { b'}' } else { b')' };
                let mut list = Vec::new();
                while !self.accept(close)? {
                    if !list.is_empty() {
                        self.expect(b',')?;
                    }
                    list.push(self.operand(function, names, count, depth + 1)?);
                }
                Ok(if open == b'{' { Operand::Vector(list) } else { Operand::List(list) })
            }
            Token::Sign(b'[') => {
                self.advance()?;
                let base = self.operand(function, names, count, depth + 1)?;
                let (base, offset) = match base {
                    Operand::Sum(base, offset) => (*base, offset),
                    other => (other, 0),
                };
                let offset = offset.wrapping_add(self.addend()?);
                if self.is(b',') {
                    // A texture and its coordinates.
                    let mut list = vec![base];
                    while self.accept(b',')? {
                        list.push(self.operand(function, names, count, depth + 1)?);
                    }
                    self.expect(b']')?;
                    return Ok(Operand::List(list));
                }
                self.expect(b']')?;
                Ok(Operand::Address(Box::new(base), offset))
            }
            Token::Sign(b'!') => {
                self.advance()?;
                let name = self.word("a predicate")?;
                Ok(Operand::Not(names.find(function, name, line)?))
            }
            Token::Sign(b'-') => {
                self.advance()?;
                let operand = match self.next.token {
                    Token::Int(value) => Operand::Int(value.wrapping_neg()),
                    Token::F32(bits) => Operand::F32(bits ^ 1 << 31),
                    Token::F64(bits) => Operand::F64(bits ^ 1 << 63),
                    _ => return Err(self.unexpected("a number")),
                };
                self.advance()?;
                Ok(operand)
            }
            Token::Int(value) => {
                self.advance()?;
                Ok(Operand::Int(value))
            }
            Token::F32(bits) => {
                self.advance()?;
                Ok(Operand::F32(bits))
            }
            Token::F64(bits) => {
                self.advance()?;
                Ok(Operand::F64(bits))
            }
            Token::Word("_") => {
                self.advance()?;
                Ok(Operand::Sink)
            }
            Token::Word(name) => {
                let start = self.next.start;
                self.advance()?;
                let first = match names.lookup(function, name, line)? {
                    Some(operand) => operand,
                    None if name == "WARP_SZ" => Operand::Int(32),
                    None if name.starts_with('%') && name.len() < 32 => {
                        let mut special = name[1..].to_owned();
                        if let Token::Dot(axis @ ("x" | "y" | "z" | "w")) = self.next.token {
                            self.advance()?;
                            special.push('.');
                            special.push_str(axis);
                        }
                        Operand::Special(special.into())
                    }
                    None => {
                        self.mentions.push(start..start + name.len());
                        Operand::Name(name.into())
                    }
                };
                if self.accept(b'|')? {
                    let second = self.operand(function, names, count, depth + 1)?;
                    return Ok(Operand::Pair(Box::new([first, second])));
                }
                match self.addend()? {
                    0 => Ok(first),
                    addend => Ok(Operand::Sum(Box::new(first), addend)),
                }
            }
            _ => Err(self.unexpected("an operand")),
        }
    }
}
