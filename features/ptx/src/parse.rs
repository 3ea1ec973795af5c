//! Text to a module. Debugging information is skipped; names of registers and of variables of functions are resolved.

use crate::ast::{
    Ast, Class, Declared, Function, Guard, Instr, Item, Operand, Pointer, Register, Space, Ty, Variable,
};
use crate::error::{Error, Result};
use crate::lex::{Lexer, Spanned, Token};
use crate::limits::{
    MAX_CODE, MAX_DATA, MAX_FUNCTIONS, MAX_INITIALISED, MAX_INSTRUCTIONS, MAX_NESTING, MAX_OPERANDS,
    MAX_REGISTERS, MAX_TEXT, MAX_VARIABLES,
};
use std::collections::HashMap;

/// Reads a module: what is in its functions is only looked at for where it ends.
pub(crate) fn parse(text: &str) -> Result<Ast> {
    if text.len() > MAX_TEXT {
        return Err(Error::large(0, "bytes", MAX_TEXT));
    }
    let mut lexer = Lexer::new(text);
    let next = lexer.next()?;
    let mut parser = Parser { lexer, next, instructions: 0, last: 0 };
    parser.module()
}

/// Reads a function of the module that has this text.
pub(crate) fn function(text: &str, declared: &Declared) -> Result<Function> {
    let mut lexer = Lexer::new(text);
    lexer.skip_to(declared.at.unwrap_or(text.len()), declared.head.line);
    let next = lexer.next()?;
    let mut parser = Parser { lexer, next, instructions: 0, last: 0 };
    let (mut function, mut names) = parser.head(declared.head.entry)?;
    parser.expect(b'{')?;
    function.body = Some(parser.body(&mut function, &mut names)?);
    Ok(function)
}

struct Parser<'t> {
    lexer: Lexer<'t>,
    next: Spanned<'t>,
    instructions: usize,
    /// Where the last token ended.
    last: usize,
}

/// Attributes of a declaration.
#[derive(Default)]
struct Linkage {
    external: bool,
}

/// The names of a function: those of registers, and of variables by scope.
#[derive(Default)]
struct Names<'t> {
    /// Ranges of registers, `%r<10>`, by prefix; and single ones.
    ranges: HashMap<&'t str, (Ty, u64)>,
    singles: HashMap<&'t str, Ty>,
    registers: HashMap<&'t str, u32>,
    scopes: Vec<Scope<'t>>,
}

#[derive(Default)]
struct Scope<'t> {
    variables: HashMap<Box<str>, u32>,
    /// Registers that are declared in an inner scope hide others.
    registers: HashMap<&'t str, u32>,
}

impl<'t> Parser<'t> {
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
                Token::Dot("pragma" | "alias") => self.skip_to_semicolon()?,
                Token::Dot(_) => self.declaration(&mut ast, &mut data)?,
                _ => return Err(self.unexpected("a directive")),
            }
        }
        if ast.version == (0, 0) {
            return Err(Error::syntax(1, "the text begins with no .version"));
        }
        Ok(ast)
    }

    /// A function or a variable of the module.
    fn declaration(&mut self, ast: &mut Ast, data: &mut u64) -> Result<()> {
        let mut linkage = Linkage::default();
        loop {
            let line = self.line();
            match self.next.token {
                Token::Dot("extern") => linkage.external = true,
                Token::Dot("visible" | "weak" | "common") => {}
                Token::Dot("entry") => {
                    self.advance()?;
                    return self.function(ast, true);
                }
                Token::Dot("func") => {
                    self.advance()?;
                    return self.function(ast, false);
                }
                Token::Dot("global" | "const" | "shared" | "local") => {
                    for variable in self.variables()? {
                        if matches!(variable.space, Space::Global | Space::Const) {
                            *data = data.saturating_add(variable.size);
                        }
                        if *data > MAX_DATA {
                            return Err(Error::large(line, "bytes of variables", MAX_DATA as usize));
                        }
                        if ast.variables.len() >= MAX_VARIABLES {
                            return Err(Error::large(line, "variables", MAX_VARIABLES));
                        }
                        if linkage.external && !variable.unsized_array {
                            return Err(Error::unsupported(
                                line,
                                format!("{}, a variable of another module,", variable.name),
                            ));
                        }
                        ast.variables.push(variable);
                    }
                    return Ok(());
                }
                Token::Dot(word) => return Err(Error::unsupported(line, format!(".{word}"))),
                _ => return Err(self.unexpected("a directive")),
            }
            self.advance()?;
        }
    }

    fn space(&mut self) -> Result<Space> {
        let space = match self.next.token {
            Token::Dot("global") => Space::Global,
            Token::Dot("const") => Space::Const,
            Token::Dot("shared") => Space::Shared,
            Token::Dot("local") => Space::Local,
            Token::Dot("param") => Space::Param,
            _ => return Err(self.unexpected("a state space")),
        };
        self.advance()?;
        Ok(space)
    }

    /// `.global .align 4 .b8 x[4] = {1, 2}, y;`
    fn variables(&mut self) -> Result<Vec<Variable>> {
        let space = self.space()?;
        let mut all = Vec::new();
        let (ty, lanes, align) = self.of_variable()?;
        loop {
            let mut variable = self.one_variable(space, ty, lanes, align)?.0;
            if self.accept(b'=')? {
                self.initialiser(&mut variable)?;
            }
            all.push(variable);
            if all.len() > MAX_VARIABLES {
                return Err(Error::large(self.line(), "variables", MAX_VARIABLES));
            }
            if !self.accept(b',')? {
                break;
            }
        }
        self.expect(b';')?;
        Ok(all)
    }

    /// Type, lanes and alignment.
    fn of_variable(&mut self) -> Result<(Ty, u64, Option<u64>)> {
        let (mut lanes, mut align) = (1, None);
        loop {
            let Token::Dot(word) = self.next.token else { return Err(self.unexpected("a type")) };
            let line = self.line();
            self.advance()?;
            match word {
                "align" => {
                    let value = self.integer()?;
                    if !value.is_power_of_two() || value > 1 << 16 {
                        return Err(Error::syntax(line, format!("{value} is no alignment")));
                    }
                    align = Some(value);
                }
                "v2" => lanes = 2,
                "v4" => lanes = 4,
                "v8" => lanes = 8,
                "attribute" => {
                    self.expect(b'(')?;
                    while !self.accept(b')')? {
                        if self.advance()?.token == Token::End {
                            return Err(self.unexpected("\")\""));
                        }
                    }
                }
                // Where the pointer of a parameter leads.
                "ptr" | "global" | "const" | "shared" | "local" => {}
                _ => match Ty::parse(word) {
                    Some(ty) => {
                        // `.param .u64 .ptr .global .align 4 x`: the alignment is of what it points to.
                        if self.next.token == Token::Dot("ptr") {
                            while let Token::Dot(word) = self.next.token {
                                self.advance()?;
                                if word == "align" {
                                    self.integer()?;
                                }
                            }
                        }
                        return Ok((ty, lanes, align));
                    }
                    None => return Err(Error::unsupported(line, format!(".{word}"))),
                },
            }
        }
    }

    /// A name and its dimensions.
    fn one_variable(
        &mut self,
        space: Space,
        ty: Ty,
        lanes: u64,
        align: Option<u64>,
    ) -> Result<(Variable, &'t str)> {
        let line = self.line();
        let name = self.word("the name of a variable")?;
        let (mut count, mut unsized_array, mut dims) = (1u64, false, 0);
        while self.accept(b'[')? {
            dims += 1;
            if dims > MAX_NESTING {
                return Err(Error::large(line, "dimensions", MAX_NESTING));
            }
            if self.is(b']') {
                unsized_array = true;
            } else {
                count = count.saturating_mul(self.integer()?);
            }
            self.expect(b']')?;
        }
        let element = ty.bytes() * lanes;
        let size = if unsized_array { 0 } else { count.saturating_mul(element) };
        if size > MAX_DATA {
            return Err(Error::large(line, "bytes of variables", MAX_DATA as usize));
        }
        let variable = Variable {
            name: name.into(),
            space,
            ty,
            size,
            align: align.unwrap_or(element.next_power_of_two()),
            unsized_array,
            register: None,
            bytes: Vec::new(),
            pointers: Vec::new(),
            line,
        };
        Ok((variable, name))
    }

    /// What a variable begins with. Lists in lists are one behind the other.
    fn initialiser(&mut self, variable: &mut Variable) -> Result<()> {
        let mut open = 0;
        loop {
            let line = self.line();
            if self.accept(b'{')? {
                open += 1;
                if open > MAX_NESTING {
                    return Err(Error::large(line, "lists in lists", MAX_NESTING));
                }
                continue;
            }
            if !self.is(b'}') {
                self.initial_value(variable)?;
            }
            while open > 0 && self.accept(b'}')? {
                open -= 1;
            }
            if open == 0 {
                break;
            }
            self.expect(b',')?;
        }
        if variable.unsized_array {
            variable.unsized_array = false;
            variable.size = variable.bytes.len() as u64;
        }
        if variable.bytes.len() as u64 > variable.size {
            return Err(Error::syntax(
                variable.line,
                format!("{} is too short for what it begins with", variable.name),
            ));
        }
        Ok(())
    }

    fn initial_value(&mut self, variable: &mut Variable) -> Result<()> {
        let line = self.line();
        let width = variable.ty.bytes() as usize;
        if (variable.bytes.len() + width) as u64 > MAX_INITIALISED {
            return Err(Error::large(line, "initialised bytes in a variable", MAX_INITIALISED as usize));
        }
        let negative = self.accept(b'-')?;
        let float = |value: f64| if negative { -value } else { value };
        let is_float = variable.ty.is_float();
        let bits = match self.next.token {
            Token::Int(value) if !is_float => {
                if negative {
                    value.wrapping_neg()
                } else {
                    value
                }
            }
            Token::Int(value) => self.float_bits(variable.ty, float(value as f64)),
            Token::F32(bits) if variable.ty.bits == 64 => float(f32::from_bits(bits).into()).to_bits(),
            Token::F32(bits) => u64::from(bits) ^ u64::from(negative) << 31,
            Token::F64(bits) if variable.ty.bits == 64 => bits ^ u64::from(negative) << 63,
            Token::F64(bits) => self.float_bits(variable.ty, float(f64::from_bits(bits))),
            Token::Word(name) => {
                self.advance()?;
                let target = if name == "generic" {
                    self.expect(b'(')?;
                    let target = self.word("the name of a variable")?;
                    self.expect(b')')?;
                    target
                } else {
                    name
                };
                let addend = self.addend()?;
                if width != 8 {
                    return Err(Error::unsupported(line, "an address in less than 64 bits"));
                }
                let pointer = Pointer { offset: variable.bytes.len() as u64, target: target.into(), addend };
                variable.pointers.push(pointer);
                variable.bytes.extend([0; 8]);
                return Ok(());
            }
            _ => return Err(self.unexpected("a value")),
        };
        self.advance()?;
        variable.bytes.extend(bits.to_le_bytes().iter().chain(&[0; 8]).take(width));
        Ok(())
    }

    fn float_bits(&self, ty: Ty, value: f64) -> u64 {
        ty.scalar().map_or(0, |scalar| vm_ir::format::from_f64(scalar, value))
    }

    /// `+ 4`, `- 4` or nothing.
    fn addend(&mut self) -> Result<i64> {
        let mut sum = 0i64;
        while self.is(b'+') || self.is(b'-') {
            let negative = self.is(b'-');
            if !negative {
                self.advance()?;
            }
            sum = sum.wrapping_add(self.integer()? as i64);
        }
        Ok(sum)
    }

    fn function(&mut self, ast: &mut Ast, entry: bool) -> Result<()> {
        let at = self.next.start;
        let (head, _) = self.head(entry)?;
        let line = head.line;
        let at = if self.accept(b';')? { None } else { Some(at) };
        if at.is_some() {
            if !self.is(b'{') {
                return Err(self.unexpected("\"{\""));
            }
            if !self.lexer.skip_block() {
                return Err(Error::syntax(line, format!("{} does not end", head.name)));
            }
            self.next = self.lexer.next()?;
        }
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
    fn head(&mut self, entry: bool) -> Result<(Function, Names<'t>)> {
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
        };
        if self.is(b'(') {
            self.parameters(&mut function, &mut names)?;
            function.returns = function.variables.len();
        }
        function.name = self.word("the name of a function")?.into();
        if self.is(b'(') {
            self.parameters(&mut function, &mut names)?;
        }
        function.params = function.variables.len() - function.returns;
        loop {
            let line = self.line();
            match self.next.token {
                Token::Dot("maxntid" | "reqntid" | "minnctapersm" | "maxnctapersm" | "maxnreg") => {
                    let required = self.next.token == Token::Dot("reqntid");
                    self.advance()?;
                    let mut sizes = [1u32; 3];
                    for (i, size) in sizes.iter_mut().enumerate() {
                        if i > 0 && !self.accept(b',')? {
                            break;
                        }
                        *size = u32::try_from(self.integer()?)
                            .map_err(|_| Error::syntax(line, "a size beyond 32 bits"))?;
                    }
                    if required {
                        function.required = Some(sizes);
                    }
                }
                Token::Dot("noreturn" | "blocksareclusters") => {
                    self.advance()?;
                }
                Token::Dot("pragma") => self.skip_to_semicolon()?,
                Token::Dot(word) => return Err(Error::unsupported(line, format!(".{word}"))),
                _ => break,
            }
        }
        Ok((function, names))
    }

    /// `(.param .u64 a, .reg .b32 b)`
    fn parameters(&mut self, function: &mut Function, names: &mut Names<'t>) -> Result<()> {
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

    fn body(&mut self, function: &mut Function, names: &mut Names<'t>) -> Result<Vec<Item>> {
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
                    for variable in self.variables()? {
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
    fn registers(&mut self, function: &mut Function, names: &mut Names<'t>) -> Result<()> {
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
    fn statement(
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
        let mut count = 0;
        while !self.is(b';') {
            if !operands.is_empty() {
                self.expect(b',')?;
            }
            operands.push(self.operand(function, names, &mut count, 0)?);
        }
        self.advance()?;
        let span = (start as u32, self.last as u32);
        items.push(Item::Instr(Instr { line, span, guard, code: code.into(), operands }));
        Ok(())
    }

    fn operand(
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
                self.advance()?;
                let first = match names.lookup(function, name, line)? {
                    Some(operand) => operand,
                    None if name.starts_with('%') && name.len() < 32 => {
                        let mut special = name[1..].to_owned();
                        if let Token::Dot(axis @ ("x" | "y" | "z" | "w")) = self.next.token {
                            self.advance()?;
                            special.push('.');
                            special.push_str(axis);
                        }
                        Operand::Special(special.into())
                    }
                    None => Operand::Name(name.into()),
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

impl<'t> Names<'t> {
    fn new_register(&mut self, function: &mut Function, ty: Ty, line: u32) -> Result<u32> {
        if function.registers.len() >= MAX_REGISTERS {
            return Err(Error::large(line, "registers in a function", MAX_REGISTERS));
        }
        function.registers.push(Register { ty });
        Ok(function.registers.len() as u32 - 1)
    }

    /// The register of the function that is called so, from now on.
    fn register(&mut self, function: &mut Function, name: &'t str, ty: Ty, line: u32) -> Result<u32> {
        if let Some(known) = self.registers.get(name) {
            return Ok(*known);
        }
        let register = self.new_register(function, ty, line)?;
        self.registers.insert(name, register);
        Ok(register)
    }

    fn declare(&mut self, function: &mut Function, variable: Variable) -> Result<()> {
        if function.variables.len() >= MAX_VARIABLES {
            return Err(Error::large(variable.line, "variables in a function", MAX_VARIABLES));
        }
        if let Some(scope) = self.scopes.last_mut() {
            scope.variables.insert(variable.name.clone(), function.variables.len() as u32);
        }
        function.variables.push(variable);
        Ok(())
    }

    /// A register or a variable; `None` if no such name is declared.
    fn lookup(&mut self, function: &mut Function, name: &'t str, line: u32) -> Result<Option<Operand>> {
        for scope in self.scopes.iter().rev() {
            if let Some(register) = scope.registers.get(name) {
                return Ok(Some(Operand::Register(*register)));
            }
            if let Some(at) = scope.variables.get(name) {
                return Ok(Some(match function.variables[*at as usize].register {
                    Some(register) => Operand::Register(register),
                    None => Operand::Variable(*at),
                }));
            }
        }
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = name[prefix.len()..].parse::<u64>().ok();
        let ty = self.singles.get(name).copied().or_else(|| {
            let (ty, count) = self.ranges.get(prefix)?;
            (number? < *count).then_some(*ty)
        });
        match ty {
            Some(ty) => Ok(Some(Operand::Register(self.register(function, name, ty, line)?))),
            None => Ok(None),
        }
    }

    /// A predicate.
    fn find(&mut self, function: &mut Function, name: &'t str, line: u32) -> Result<u32> {
        match self.lookup(function, name, line)? {
            Some(Operand::Register(register))
                if function.registers[register as usize].ty.class == Class::Predicate =>
            {
                Ok(register)
            }
            _ => Err(Error::syntax(line, format!("{name} is no predicate"))),
        }
    }
}
