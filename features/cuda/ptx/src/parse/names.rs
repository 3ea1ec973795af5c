//! The names in a function: which register or variable each is.

use crate::ast::{Class, Function, Operand, Register, Ty, Variable};
use crate::error::{Error, Result};
use crate::limits::{MAX_REGISTERS, MAX_VARIABLES};
use std::collections::HashMap;

/// The names of a function: those of registers, and of variables by scope.
#[derive(Default)]
pub(super) struct Names<'t> {
    /// Ranges of registers, `%r<10>`, by prefix; and single ones.
    pub(super) ranges: HashMap<&'t str, (Ty, u64)>,
    pub(super) singles: HashMap<&'t str, Ty>,
    pub(super) registers: HashMap<&'t str, u32>,
    pub(super) scopes: Vec<Scope<'t>>,
}

#[derive(Default)]
pub(super) struct Scope<'t> {
    pub(super) variables: HashMap<Box<str>, u32>,
    /// Registers that are declared in an inner scope hide others.
    pub(super) registers: HashMap<&'t str, u32>,
}

impl<'t> Names<'t> {
    pub(super) fn new_register(&mut self, function: &mut Function, ty: Ty, line: u32) -> Result<u32> {
        if function.registers.len() >= MAX_REGISTERS {
            return Err(Error::large(line, "registers in a function", MAX_REGISTERS));
        }
        function.registers.push(Register { ty });
        Ok(function.registers.len() as u32 - 1)
    }

    /// The register of the function that is called so, from now on.
    pub(super) fn register(
        &mut self,
        function: &mut Function,
        name: &'t str,
        ty: Ty,
        line: u32,
    ) -> Result<u32> {
        if let Some(known) = self.registers.get(name) {
            return Ok(*known);
        }
        let register = self.new_register(function, ty, line)?;
        self.registers.insert(name, register);
        Ok(register)
    }

    pub(super) fn declare(&mut self, function: &mut Function, variable: Variable) -> Result<()> {
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
    pub(super) fn lookup(
        &mut self,
        function: &mut Function,
        name: &'t str,
        line: u32,
    ) -> Result<Option<Operand>> {
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
    pub(super) fn find(&mut self, function: &mut Function, name: &'t str, line: u32) -> Result<u32> {
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
