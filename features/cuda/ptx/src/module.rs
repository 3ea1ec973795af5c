//! A module that was read: its kernels, what they take, and its variables.

use crate::ast::{Ast, Class, Declaration, Declared, Function, Kind, Linkage, Space, Ty};
use crate::cfg::Cfg;
use crate::error::{Error, ErrorKind, Result};
use crate::inline::{inline, parameter_offsets, place};
use crate::limits::MAX_EAGER;
use crate::live::Live;
use crate::parse::{self, parse};
use crate::translate::{self, Options, Translated};
use std::collections::HashMap;
use vm_ir::Scalar;
use vm_ir::limits::MAX_PARAMS;

/// Registers of 32 bits that a thread of a GPU can have.
const MAX_THREAD_REGISTERS: u32 = 255;

/// Where the addresses of functions in variables begin: no memory is there, and a call through such an address is refused.
const FUNCTIONS: u64 = 0x7200_0000_0000_0000;

/// A module of PTX.
#[derive(Clone, Debug)]
pub struct Module {
    text: Box<str>,
    ast: Ast,
    data: Data,
}

/// Variables that outlive a launch, `.global` and `.const`, one behind the other: where the caller puts them is one range of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Data {
    /// Bytes of all.
    pub size: u64,
    /// What its address is a multiple of.
    pub align: u64,
    /// The variables.
    pub variables: Vec<Variable>,
    /// Where an address is to be put, and what of: offsets in the range.
    pub pointers: Vec<(u64, u64)>,
}

/// A variable that outlives a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// What a program calls it.
    pub name: String,
    /// Global or const.
    pub space: Space,
    /// Whether the host accesses it too: `__managed__`.
    pub managed: bool,
    /// Where in the range.
    pub offset: u64,
    /// Its bytes.
    pub size: u64,
    /// The first of them; the others are zero.
    pub bytes: Vec<u8>,
}

impl Data {
    /// What is to be written where, as offsets and bytes, if the range begins at `address` for the program; all else is zero.
    pub fn at(&self, address: u64) -> Vec<(u64, Vec<u8>)> {
        let mut all: Vec<_> = self
            .variables
            .iter()
            .filter(|v| !v.bytes.is_empty())
            .map(|v| (v.offset, v.bytes.clone()))
            .collect();
        let pointers = self.pointers.iter();
        all.extend(pointers.map(|(at, to)| (*at, address.wrapping_add(*to).to_le_bytes().to_vec())));
        all
    }
}

/// What a kernel takes, as a launch passes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signature {
    /// Each parameter of the kernel, in order.
    pub parameters: Vec<Parameter>,
    /// Bytes of all, as one block.
    pub size: u64,
    /// The most threads of a block, where `.maxntid` or `.reqntid` says that.
    pub max_threads: Option<u32>,
    /// What the kernel of the IR takes behind its memory and two addresses: each a part of the block.
    pub scalars: Vec<Word>,
}

/// A parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Where in the block.
    pub offset: u64,
    /// Its bytes.
    pub size: u64,
}

/// A part of the block of parameters that is a scalar of the IR's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Where in the block.
    pub offset: u64,
    /// Its bytes; fewer than the type's are extended with zeros.
    pub size: u64,
    /// What it is.
    pub scalar: Scalar,
}

impl Signature {
    /// The bits of each scalar, of a block of parameters; bytes beyond its end are zero.
    pub fn arguments(&self, block: &[u8]) -> Vec<u64> {
        let bits = |word: &Word| {
            let bytes =
                (word.offset..word.offset + word.size).map(|at| block.get(at as usize).copied().unwrap_or(0));
            bytes.rev().fold(0, |bits, byte| bits << 8 | u64::from(byte))
        };
        self.scalars.iter().map(bits).collect()
    }

    fn of(function: &Function) -> Result<Signature> {
        let mut signature = Signature { max_threads: function.max_threads, ..Signature::default() };
        for (variable, offset) in
            function.variables[function.param_range()].iter().zip(parameter_offsets(function)?)
        {
            signature.parameters.push(Parameter { offset, size: variable.size });
            signature.size = offset + variable.size;
            match variable.ty.scalar() {
                Some(scalar) if variable.size == variable.ty.bytes() && scalar != Scalar::Bool => {
                    signature.scalars.push(Word { offset, size: variable.size, scalar });
                }
                _ => {
                    let starts = (0..variable.size).step_by(8);
                    signature.scalars.extend(starts.map(|start| Word {
                        offset: offset + start,
                        size: 8.min(variable.size - start),
                        scalar: Scalar::I64,
                    }));
                }
            }
        }
        // As many as a kernel of the IR has room for; the others are read from memory.
        signature.scalars.truncate(MAX_PARAMS - 6);
        Ok(signature)
    }
}

impl Module {
    /// Reads PTX.
    ///
    /// # Errors
    ///
    /// Returns the first syntax error, and the first [cap](crate::limits) that is exceeded or construct that is not supported outside of
    /// functions. [`Module::translate`] reports those inside the functions that a kernel needs, so one such function does not refuse the other
    /// kernels. It also reports the syntax errors in functions of a [long text](MAX_EAGER).
    pub fn parse(text: &str) -> Result<Module> {
        let ast = parse(text)?;
        if text.len() <= MAX_EAGER {
            for declared in ast.functions.iter().filter(|declared| declared.at.is_some()) {
                if let Err(error) = parse::function(text, declared)
                    && !error.is_of_function()
                {
                    return Err(error);
                }
            }
        }
        let external = |d: &&Declaration| d.linkage == Linkage::Extern && matches!(d.kind, Kind::Variable(_));
        for declaration in ast.declarations.iter().filter(external) {
            let Declaration { name, line, .. } = declaration;
            if !ast.variables.iter().any(|variable| variable.name == *name) {
                return Err(Error::unsupported(*line, format!("{name}, a variable of another module,")));
            }
        }
        let data = layout(&ast)?;
        Ok(Module { text: text.into(), ast, data })
    }

    /// `.version`.
    pub fn version(&self) -> (u32, u32) {
        self.ast.version
    }

    /// `.target`: the architecture that it was compiled for.
    pub fn target(&self) -> &str {
        &self.ast.target
    }

    /// The names of its kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.ast.functions.iter().filter(|f| f.head.entry && f.at.is_some()).map(|f| &*f.head.name)
    }

    /// Its variables that outlive a launch.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// What a kernel takes.
    ///
    /// # Errors
    ///
    /// There is no such kernel.
    pub fn signature(&self, kernel: &str) -> Result<Signature> {
        Signature::of(&self.kernel(kernel)?.head)
    }

    /// Bytes of shared memory of a block, but for those whose size the launch says, and of local memory of a thread.
    ///
    /// # Errors
    ///
    /// There is no such kernel, or its calls can't be inlined.
    pub fn memory(&self, kernel: &str) -> Result<(u64, u64)> {
        let code = inline(&self.ast, &self.text, self.kernel(kernel)?, &self.offsets())?;
        Ok((code.shared, code.local))
    }

    /// Estimates the 32-bit registers of a thread: the most that are live at once, limited by `.maxnreg`. A compiler for a GPU may allocate
    /// more or fewer, because it schedules the instructions anew.
    ///
    /// # Errors
    ///
    /// There is no such kernel, its calls can't be inlined, or it exceeds a [cap](crate::limits).
    pub fn registers(&self, kernel: &str) -> Result<u32> {
        let function = self.kernel(kernel)?;
        let code = inline(&self.ast, &self.text, function, &self.offsets())?;
        let size = |ty: &Ty| match ty.class {
            Class::Predicate => 0,
            _ => (ty.bits * u32::from(ty.lanes)).div_ceil(32),
        };
        let sizes: Vec<u32> = code.registers.iter().map(size).collect();
        let cfg = Cfg::of(code)?;
        let count = Live::of(&cfg, sizes.len())?.pressure(&cfg, &sizes);
        Ok(count.min(function.head.max_registers.unwrap_or(u32::MAX)).clamp(1, MAX_THREAD_REGISTERS))
    }

    fn offsets(&self) -> HashMap<&str, u64> {
        self.data.variables.iter().map(|v| (v.name.as_str(), v.offset)).collect()
    }

    fn kernel(&self, name: &str) -> Result<&Declared> {
        let found = self.ast.function(name).filter(|f| f.head.entry && f.at.is_some());
        found.ok_or_else(|| Error::at(0, ErrorKind::Unknown(format!("{name} among the kernels"))))
    }

    /// A kernel for a size of blocks, as a guest's module of the IR.
    ///
    /// # Errors
    ///
    /// The first thing that isn't supported, with its line and the instruction.
    pub fn translate(&self, kernel: &str, options: &Options) -> Result<Translated> {
        let function = self.kernel(kernel)?;
        let signature = Signature::of(&function.head)?;
        translate::translate(&self.ast, &self.text, function, signature, &self.offsets(), options)
    }
}

/// Puts the variables one behind the other.
fn layout(ast: &Ast) -> Result<Data> {
    let mut data = Data { align: 16, ..Data::default() };
    let lasting = || ast.variables.iter().filter(|v| matches!(v.space, Space::Global | Space::Const));
    let mut offsets = HashMap::new();
    for variable in lasting() {
        let offset = place(&mut data.size, variable.size, variable.align);
        data.align = data.align.max(variable.align);
        if offsets.insert(&*variable.name, offset).is_some() {
            return Err(Error::syntax(variable.line, format!("{} is defined twice", variable.name)));
        }
        data.variables.push(Variable {
            name: variable.name.to_string(),
            space: variable.space,
            managed: variable.managed,
            offset,
            size: variable.size,
            bytes: variable.bytes.clone(),
        });
    }
    for (at, variable) in lasting().enumerate() {
        for pointer in &variable.pointers {
            let Some(target) = offsets.get(&*pointer.target) else {
                if let Some(function) = ast.names.get(&*pointer.target) {
                    let address = FUNCTIONS + 16 * *function as u64;
                    let bytes = &mut data.variables[at].bytes[pointer.offset as usize..][..8];
                    bytes.copy_from_slice(&address.wrapping_add(pointer.addend as u64).to_le_bytes());
                    continue;
                }
                return Err(Error::unsupported(
                    variable.line,
                    format!("the address of {} in a variable", pointer.target),
                ));
            };
            let to = target.wrapping_add(pointer.addend as u64);
            data.pointers.push((offsets[&*variable.name] + pointer.offset, to));
        }
    }
    Ok(data)
}
