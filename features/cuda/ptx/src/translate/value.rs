//! Operands as values, and registers as what they hold.

use super::{Cx, LOCAL_WINDOW, PARAMETERS, SHARED_WINDOW};
use crate::ast::{Class, Operand, Space, Symbol, Ty, int};
use crate::error::{Error, Result};
use vm_ir::builder::Val;
use vm_ir::op::Axis;
use vm_ir::{Scalar, Type};

/// Something known of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fact {
    /// It is the thread's number in its block.
    LocalIndex,
    /// It is this integer.
    Constant(u64),
    /// It is the address of this byte of the memory.
    Memory(u64),
    /// It is the address of the kernel's parameters, from so many bytes on.
    Parameter(u64),
}

/// What registers hold, with what they held before, to go back to.
#[derive(Default)]
pub(super) struct Environment<'b> {
    values: Vec<Option<Val<'b>>>,
    log: Vec<(u32, Option<Val<'b>>)>,
}

impl<'b> Environment<'b> {
    fn get(&self, register: u32) -> Option<Val<'b>> {
        self.values.get(register as usize).copied().flatten()
    }

    fn set(&mut self, register: u32, value: Option<Val<'b>>) {
        let at = register as usize;
        if self.values.len() <= at {
            self.values.resize(at + 1, None);
        }
        self.log.push((register, std::mem::replace(&mut self.values[at], value)));
    }
}

/// What a type is in the IR.
pub(super) fn ir(ty: Ty) -> Result<Type> {
    let scalar = ty.scalar().ok_or_else(|| Error::unsupported(0, "a value of 128 bits"))?;
    match ty.lanes {
        1 => Ok(scalar.into()),
        lanes => Type::vector(scalar, lanes).ok_or_else(|| Error::unsupported(0, "such a vector")),
    }
}

fn width(ty: Type) -> u32 {
    ty.scalar().bits() * u32::from(ty.lanes())
}

impl<'b> Cx<'_, 'b> {
    /// What the registers held when the environment was there, from then on.
    pub(super) fn mark(&self) -> usize {
        self.state.borrow().environment.log.len()
    }

    pub(super) fn back_to(&self, mark: usize) {
        let environment = &mut self.state.borrow_mut().environment;
        while environment.log.len() > mark {
            if let Some((register, old)) = environment.log.pop() {
                environment.values[register as usize] = old;
            }
        }
    }

    /// What a register is in the IR.
    pub(super) fn register_type(&self, register: u32) -> Result<Type> {
        let ty = self.types[register as usize].register();
        ty.map(Type::from).ok_or_else(|| Error::unsupported(0, "a register of 128 bits"))
    }

    /// What a register holds; zero if nothing was put there.
    pub(super) fn register(&self, register: u32) -> Result<Val<'b>> {
        let known = self.state.borrow().environment.get(register);
        match known {
            Some(value) => Ok(value),
            // Of the register that says whether the thread has not ended, that is true.
            None => {
                let alive = register as usize == self.types.len() - 1;
                Ok(self.k.bits(self.register_type(register)?, u64::from(alive)))
            }
        }
    }

    pub(super) fn put(&self, register: u32, value: Val<'b>) -> Result<()> {
        let value = self.fit(value, self.register_type(register)?);
        self.state.borrow_mut().environment.set(register, Some(value));
        Ok(())
    }

    pub(super) fn learn(&self, value: Val<'b>, fact: Fact) -> Val<'b> {
        self.state.borrow_mut().facts.insert(value.value().index() as u32, fact);
        value
    }

    pub(super) fn fact(&self, value: Val<'b>) -> Option<Fact> {
        self.state.borrow().facts.get(&(value.value().index() as u32)).copied()
    }

    pub(super) fn knows(&self, value: Val<'b>, fact: Fact) -> bool {
        self.fact(value) == Some(fact)
    }

    /// The bits of an integer that is known.
    pub(super) fn known(&self, value: Val<'b>) -> Option<u64> {
        match self.fact(value) {
            Some(Fact::Constant(bits)) => Some(bits),
            _ => None,
        }
    }

    /// An integer that stays known.
    pub(super) fn constant(&self, ty: Type, bits: u64) -> Val<'b> {
        let bits = bits & ty.scalar().mask();
        self.learn(self.k.bits(ty, bits), Fact::Constant(bits))
    }

    /// An address so many bytes further.
    pub(super) fn plus(&self, value: Val<'b>, offset: i64) -> Val<'b> {
        match self.known(value) {
            _ if offset == 0 => value,
            Some(bits) => self.constant(value.ty(), bits.wrapping_add(offset as u64)),
            None => value + self.k.bits(value.ty(), offset as u64),
        }
    }

    /// The low bits of a value as another type, extended with zeros if it has more.
    pub(super) fn fit(&self, value: Val<'b>, to: Type) -> Val<'b> {
        let from = value.ty();
        if from == to {
            return value;
        }
        if from == Type::BOOL {
            return self.fit(value.to(Scalar::I8), to);
        }
        if to == Type::BOOL {
            return value.ne(0);
        }
        if let (Some(bits), true, true) =
            (self.known(value), from.scalar().is_int(), to.scalar().is_int() && !to.is_vector())
        {
            return self.constant(to, bits);
        }
        let (has, wants) = (width(from), width(to));
        let (Some(has_int), Some(wants_int)) = (int(has), int(wants)) else { return value };
        let value = if from == Type::from(has_int) || has == wants { value } else { value.bitcast(has_int) };
        let value = if has == wants { value } else { value.to_u(wants_int) };
        if value.ty() == to { value } else { value.bitcast(to) }
    }

    /// An operand as a value of a type.
    pub(super) fn get(&self, operand: &Operand, ty: Ty) -> Result<Val<'b>> {
        let to = ir(ty)?;
        Ok(match operand {
            Operand::Register(register) => self.fit(self.register(*register)?, to),
            Operand::Not(register) => !self.register(*register)?,
            Operand::Int(value) if ty.is_float() && ty.bits > 16 => {
                self.k.bits(to, vm_ir::format::from_f64(to.scalar(), *value as i64 as f64))
            }
            Operand::Int(value) if ty.lanes > 1 => {
                let bits = self.k.bits(Type::I32, *value);
                self.fit(bits, to)
            }
            Operand::Int(value) => match to == Type::BOOL {
                true => self.k.bool(*value != 0),
                false => self.constant(to, *value),
            },
            Operand::F32(bits) if to == Type::F32 || !ty.is_float() => self.k.bits(to, u64::from(*bits)),
            Operand::F32(bits) => {
                self.k.bits(to, vm_ir::format::from_f64(to.scalar(), f32::from_bits(*bits).into()))
            }
            Operand::F64(bits) if to == Type::F64 || !ty.is_float() => self.k.bits(to, *bits),
            Operand::F64(bits) => {
                self.k.bits(to, vm_ir::format::from_f64(to.scalar(), f64::from_bits(*bits)))
            }
            Operand::Special(name) => self.fit(self.special(name)?, to),
            Operand::Symbol(symbol) => self.fit(self.address_of(*symbol, 0)?, to),
            Operand::Sum(base, offset) => match &**base {
                Operand::Symbol(symbol) => self.fit(self.address_of(*symbol, *offset)?, to),
                _ => return Err(self.unsupported("a sum of something else than a variable")),
            },
            _ => return Err(self.unsupported("such an operand")),
        })
    }

    pub(super) fn is_predicate(&self, operand: &Operand) -> bool {
        match operand {
            Operand::Register(register) => self.types[*register as usize].class == Class::Predicate,
            Operand::Not(_) => true,
            _ => false,
        }
    }

    /// An operand that must be a literal.
    pub(super) fn literal(&self, operand: Option<&Operand>) -> Option<u64> {
        match operand {
            Some(Operand::Int(value)) => Some(*value),
            _ => None,
        }
    }

    /// Puts a value into a register, extended with zeros or with its sign if that is wider.
    pub(super) fn set(&self, operand: &Operand, value: Val<'b>, signed: bool) -> Result<()> {
        match operand {
            Operand::Sink => Ok(()),
            Operand::Register(register) => {
                let to = self.register_type(*register)?;
                let from = value.ty();
                let extend = signed && from.scalar().is_int() && !from.is_vector() && width(to) > width(from);
                match int(width(to)).filter(|_| extend) {
                    Some(scalar) => self.put(*register, value.to(scalar)),
                    None => self.put(*register, value),
                }
            }
            _ => Err(self.unsupported("a result that is no register")),
        }
    }

    /// An address as a program has it: in the memory of the device as it is, elsewhere an offset.
    fn address_of(&self, symbol: Symbol, addend: i64) -> Result<Val<'b>> {
        let offset = self.offset_of(symbol, addend) as i64;
        match symbol.space {
            Space::Global | Space::Const => {
                Ok(self.learn(self.base + self.k.i64(offset), Fact::Memory(offset as u64)))
            }
            Space::Shared | Space::Local => Ok(self.constant(Type::I64, offset as u64)),
            Space::Param => Ok(self.parameter_address(offset as u64)),
        }
    }

    /// An address of parameters, which stands for nothing but where loads from it are.
    pub(super) fn parameter_address(&self, offset: u64) -> Val<'b> {
        let address = self.k.i64(PARAMETERS.wrapping_add(offset) as i64);
        self.learn(address, Fact::Parameter(offset))
    }

    /// The address of the first byte of a window, for conversions.
    pub(super) fn window(&self, space: Space) -> Option<u64> {
        match space {
            Space::Shared => Some(SHARED_WINDOW),
            Space::Local => Some(LOCAL_WINDOW),
            Space::Param => Some(PARAMETERS),
            _ => None,
        }
    }

    /// The thread's number in its block.
    pub(super) fn local_index(&self) -> Val<'b> {
        let index = self.k.local_index();
        self.learn(index, Fact::LocalIndex)
    }

    /// Returns the address of a cooperative launch's workspace, or 0 in other launches. The word after the parameters is 1 in cooperative launches, and the
    /// workspace follows it.
    fn grid_workspace(&self) -> Val<'b> {
        self.block_used.set(true);
        let at = self.block + self.k.i64(self.parameter_bytes.next_multiple_of(8) as i64);
        let cooperative = self.memory.at([at]).typed(Scalar::I64).load();
        let workspace = self.base + at + 8;
        cooperative.ne(0).select(workspace, self.k.i64(0))
    }

    fn special(&self, name: &str) -> Result<Val<'b>> {
        let k = self.k;
        let threads: u32 = self.threads.iter().product();
        let (register, axis) = match name.split_once('.') {
            Some((register, "x")) => (register, Axis::X),
            Some((register, "y")) => (register, Axis::Y),
            Some((register, "z")) => (register, Axis::Z),
            Some(_) => return Ok(k.i32(0)),
            None => (name, Axis::X),
        };
        Ok(match register {
            "tid" if axis == Axis::X && self.threads[0] == threads => self.local_index(),
            "tid" if self.filled.is_some() => {
                let [x, y, _] = self.threads;
                match axis {
                    Axis::X => k.local_index().rem_u(x),
                    Axis::Y => k.local_index().div_u(x).rem_u(y),
                    Axis::Z => k.local_index().div_u(x * y),
                }
            }
            // Rows of whole warps: in which one a thread is, its warp says.
            "tid" if axis == Axis::X && self.threads[0] == 32 => k.lane_id(),
            "tid" if axis == Axis::Y && self.threads[0].is_multiple_of(32) && self.threads[2] == 1 => {
                let warps = self.threads[0] / 32;
                if warps == 1 { k.warp_id() } else { k.warp_id().div_u(warps) }
            }
            "tid" => k.thread_id(axis),
            "ntid" => k.i32(self.threads[axis as usize] as i32),
            "ctaid" => k.block_id(axis),
            "nctaid" => k.grid_dim(axis),
            "laneid" => k.lane_id(),
            "warpid" => k.warp_id(),
            "nwarpid" => k.i32(threads.div_ceil(32) as i32),
            "lanemask_eq" => k.i32(1) << k.lane_id(),
            "lanemask_lt" => (k.i32(1) << k.lane_id()) - 1,
            "lanemask_le" => (k.i32(2) << k.lane_id()) - 1,
            "lanemask_gt" => !((k.i32(2) << k.lane_id()) - 1),
            "lanemask_ge" => !((k.i32(1) << k.lane_id()) - 1),
            "dynamic_smem_size" => k.i32(self.dynamic_bytes as i32),
            "envreg1" => self.grid_workspace().shr_u(32i64).to(Scalar::I32),
            "envreg2" => self.grid_workspace().to(Scalar::I32),
            "total_smem_size" | "aggr_smem_size" => k.i32(self.shared_bytes as i32),
            _ => return Err(self.unsupported(format!("%{name}"))),
        })
    }
}
