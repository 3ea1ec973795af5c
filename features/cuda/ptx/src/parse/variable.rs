//! Variables: where they are, their types, and what they begin with.

use super::Parser;
use crate::ast::{Pointer, Space, Ty, Variable};
use crate::error::{Error, Result};
use crate::lex::Token;
use crate::limits::{MAX_DATA, MAX_INITIALISED, MAX_NESTING, MAX_VARIABLES};
use std::ops::Range;

impl<'t> Parser<'t> {
    pub(super) fn space(&mut self) -> Result<Space> {
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

    /// `.global .align 4 .b8 x[4] = {1, 2}, y;`, each with the text from its name on.
    pub(super) fn variables(&mut self) -> Result<Vec<(Variable, Range<usize>)>> {
        let space = self.space()?;
        let mut all = Vec::new();
        let (ty, lanes, align) = self.of_variable()?;
        loop {
            let start = self.next.start;
            let mut variable = self.one_variable(space, ty, lanes, align)?.0;
            if self.accept(b'=')? {
                self.initialiser(&mut variable)?;
            }
            all.push((variable, start..self.last));
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
    pub(super) fn of_variable(&mut self) -> Result<(Ty, u64, Option<u64>)> {
        let (mut lanes, mut align) = (1, None);
        self.managed = false;
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
                        match self.advance()?.token {
                            Token::Dot("managed") => self.managed = true,
                            Token::End => return Err(self.unexpected("\")\"")),
                            _ => {}
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
    pub(super) fn one_variable(
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
            managed: self.managed,
            register: None,
            bytes: Vec::new(),
            pointers: Vec::new(),
            line,
        };
        Ok((variable, name))
    }

    /// What a variable begins with. Lists in lists are one behind the other.
    pub(super) fn initialiser(&mut self, variable: &mut Variable) -> Result<()> {
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

    pub(super) fn initial_value(&mut self, variable: &mut Variable) -> Result<()> {
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
                let target = if name == "generic" {
                    self.advance()?;
                    self.expect(b'(')?;
                    let target = self.mention("the name of a variable")?;
                    self.expect(b')')?;
                    target
                } else {
                    self.mention("the name of a variable")?
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

    pub(super) fn float_bits(&self, ty: Ty, value: f64) -> u64 {
        ty.scalar().map_or(0, |scalar| vm_ir::format::from_f64(scalar, value))
    }

    /// `+ 4`, `- 4` or nothing.
    pub(super) fn addend(&mut self) -> Result<i64> {
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
}
