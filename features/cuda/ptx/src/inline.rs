//! A kernel with all that it calls in its place: one list of instructions, with registers of one numbering, and places for its
//! variables.
//!
//! Parameters of calls are registers: one for each part that nobody takes apart further.

use crate::ast::{Ast, Class, Declared, Function, Guard, Instr, Item, Operand, Space, Symbol, Ty, Variable};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{
    MAX_CALLS, MAX_INLINED_OPERANDS, MAX_INSTRUCTIONS, MAX_LOCAL, MAX_PARAMETER_BYTES, MAX_REGISTERS,
};
use crate::parse;
use std::collections::{BTreeSet, HashMap, HashSet};
use vm_ir::limits::MAX_SHARED_BYTES;

/// Where shared memory begins whose size the launch says, as offsets of symbols have it.
pub(crate) const DYNAMIC_SHARED: u64 = 1 << 40;

/// An instruction, or where a label is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    Instr(Instr),
    Label(u32),
}

/// A kernel without calls.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Code {
    pub(crate) steps: Vec<Step>,
    pub(crate) labels: u32,
    /// The types of registers.
    pub(crate) registers: Vec<Ty>,
    /// Bytes of shared memory whose size the kernel says.
    pub(crate) shared: u64,
    /// What the rest of shared memory is aligned to.
    pub(crate) shared_align: u64,
    /// Does it use the rest?
    pub(crate) dynamic: bool,
    /// Bytes of a thread's local memory.
    pub(crate) local: u64,
}

/// Bytes of what `vprintf` gives and takes.
const PRINTED: &[i64] = &[4, 8, 8];
/// Bytes of what `__assertfail` takes: message, file, line, function, and the bytes of a character.
const ASSERTED: &[i64] = &[8, 8, 4, 8, 8];

/// Offsets one behind the other.
pub(crate) fn place(at: &mut u64, size: u64, align: u64) -> u64 {
    let offset = at.next_multiple_of(align.max(1));
    *at = offset + size;
    offset
}

/// Returns the offset of a variable in local memory, which ends at `local` so far.
fn reserve_local(variable: &Variable, local: &mut u64) -> Result<u64> {
    let offset = place(local, variable.size, variable.align);
    match *local > MAX_LOCAL {
        true => Err(Error::large(variable.line, "bytes of local memory in a thread", MAX_LOCAL as usize)),
        false => Ok(offset),
    }
}

/// Returns the variables of a function whose addresses it takes, other than to access parameters there.
fn addressed(items: &[Item]) -> HashSet<u32> {
    let mut found = HashSet::new();
    for item in items {
        let Item::Instr(instr) = item else { continue };
        if instr.opcode() == "call" {
            continue;
        }
        let is_access = matches!(instr.opcode(), "ld" | "st") && instr.modifiers().next() == Some("param");
        for operand in &instr.operands {
            match operand {
                Operand::Address(base, _) if is_access && matches!(**base, Operand::Variable(_)) => {}
                other => other.variables(&mut |at| {
                    found.insert(at);
                }),
            }
        }
    }
    found
}

/// Offsets of a kernel's parameters.
pub(crate) fn parameter_offsets(function: &Function) -> Result<Vec<u64>> {
    let mut end = 0;
    let mut offsets = Vec::new();
    for variable in &function.variables[function.param_range()] {
        offsets.push(place(&mut end, variable.size, variable.align));
        if end > MAX_PARAMETER_BYTES {
            return Err(Error::large(variable.line, "bytes of parameters", MAX_PARAMETER_BYTES as usize));
        }
    }
    Ok(offsets)
}

/// Puts what a kernel calls into it. `data` has the offsets of the module's variables of memory that outlives a launch.
pub(crate) fn inline(ast: &Ast, text: &str, entry: &Declared, data: &HashMap<&str, u64>) -> Result<Code> {
    let functions = needed(ast, text, entry)?;
    let mut inliner = Inliner {
        ast,
        text,
        data,
        functions: &functions,
        variables: ast.variables.iter().map(|v| (&*v.name, v)).collect(),
        shared: HashMap::new(),
        own_shared: HashMap::new(),
        slots: Vec::new(),
        operands: 0,
        carry: None,
        open: Vec::new(),
        code: Code {
            steps: Vec::new(),
            labels: 0,
            registers: Vec::new(),
            shared: 0,
            shared_align: 16,
            dynamic: false,
            local: 0,
        },
    };
    let entry = inliner.callee(&entry.head.name)?;
    let offsets = parameter_offsets(entry)?;
    let places =
        offsets.into_iter().map(|offset| Home::Symbol(Symbol { space: Space::Param, offset })).collect();
    inliner.function(entry, places, None, 0)?;
    inliner.arguments()?;
    Ok(inliner.code)
}

/// Reads a kernel, and what it and others of these call.
fn needed<'a>(ast: &'a Ast, text: &str, entry: &'a Declared) -> Result<HashMap<&'a str, Function>> {
    let mut found = HashMap::new();
    let mut left = vec![entry];
    let mut count = 0;
    while let Some(declared) = left.pop() {
        let line = declared.head.line;
        let std::collections::hash_map::Entry::Vacant(place) = found.entry(&*declared.head.name) else {
            continue;
        };
        let function = parse::function(text, declared)?;
        let items = function.body.as_deref().unwrap_or_default();
        count += items.len();
        if count > MAX_INSTRUCTIONS {
            return Err(Error::large(line, "instructions in what a kernel calls", MAX_INSTRUCTIONS));
        }
        for item in items {
            let Item::Instr(instr) = item else { continue };
            if instr.opcode() == "call" {
                let names = instr.operands.iter().filter_map(|operand| match operand {
                    Operand::Name(name) => ast.function(name),
                    _ => None,
                });
                left.extend(names.filter(|called| called.at.is_some() && !called.head.entry));
            }
        }
        place.insert(function);
    }
    Ok(found)
}

/// Where a variable of a function is.
#[derive(Clone, Copy, Debug)]
enum Home {
    Symbol(Symbol),
    /// A parameter of a call.
    Slot(u32),
    /// A parameter that is a register.
    Register,
}

struct Inliner<'a> {
    ast: &'a Ast,
    text: &'a str,
    data: &'a HashMap<&'a str, u64>,
    /// Those that are called, with their bodies.
    functions: &'a HashMap<&'a str, Function>,
    variables: HashMap<&'a str, &'a Variable>,
    /// Offsets of the module's shared variables that the kernel uses.
    shared: HashMap<&'a str, u64>,
    /// Those of its functions, which are the same in each call: by function, name and line.
    own_shared: HashMap<(&'a str, &'a str, u32), u64>,
    /// Where accesses to each parameter of a call begin and end.
    slots: Vec<BTreeSet<i64>>,
    /// Operands so far.
    operands: usize,
    /// The register of the carry flag, once an instruction uses it.
    carry: Option<u32>,
    /// The functions that are being put in place.
    open: Vec<&'a str>,
    code: Code,
}

/// A function that is being put in place.
struct Frame<'a> {
    homes: Vec<Home>,
    /// The number of its first register.
    registers: u32,
    labels: HashMap<&'a str, u32>,
    targets: HashMap<&'a str, &'a [Box<str>]>,
    /// Where it returns to; the kernel ends.
    back: Option<u32>,
    /// Where the local memory of what it calls begins.
    local: u64,
}

impl<'a> Inliner<'a> {
    fn callee(&self, name: &str) -> Result<&'a Function> {
        self.functions.get(name).ok_or_else(|| Error::unsupported(0, format!("a call of {name}")))
    }

    fn label(&mut self) -> u32 {
        self.code.labels += 1;
        self.code.labels - 1
    }

    fn push(&mut self, line: u32, step: Step) -> Result<()> {
        if let Step::Instr(instr) = &step {
            self.operands += instr.operands.iter().map(Operand::count).sum::<usize>();
        }
        if self.operands > MAX_INLINED_OPERANDS {
            return Err(Error::large(
                line,
                "operands in a kernel with all that it calls",
                MAX_INLINED_OPERANDS,
            ));
        }
        if self.code.steps.len() >= 2 * MAX_INSTRUCTIONS {
            return Err(Error::large(
                line,
                "instructions in a kernel with all that it calls",
                MAX_INSTRUCTIONS,
            ));
        }
        self.code.steps.push(step);
        Ok(())
    }

    fn new_registers(&mut self, line: u32, types: impl IntoIterator<Item = Ty>) -> Result<u32> {
        let first = self.code.registers.len() as u32;
        self.code.registers.extend(types);
        if self.code.registers.len() > MAX_REGISTERS {
            return Err(Error::large(line, "registers in a kernel with all that it calls", MAX_REGISTERS));
        }
        Ok(first)
    }

    /// `given` are the homes of what it returns and takes.
    fn function(
        &mut self,
        function: &'a Function,
        given: Vec<Home>,
        back: Option<u32>,
        local: u64,
    ) -> Result<()> {
        let name = &*function.name;
        let Some(items) = &function.body else {
            return Err(Error::unsupported(function.line, format!("{name}, which is defined elsewhere,")));
        };
        if self.open.contains(&name) {
            return Err(Error::at(function.line, ErrorKind::Recursion(name.to_owned())));
        }
        if self.open.len() >= MAX_CALLS {
            return Err(Error::large(function.line, "calls within calls", MAX_CALLS));
        }
        self.open.push(name);
        let registers = self.new_registers(function.line, function.registers.iter().map(|r| r.ty))?;
        let mut homes = given;
        let mut local = local;
        let addressed = addressed(items);
        for (at, home) in homes.iter_mut().enumerate().skip(function.returns) {
            if let Home::Slot(slot) = *home
                && addressed.contains(&(at as u32))
            {
                *home = self.in_local(&function.variables[at], slot, &mut local)?;
            }
        }
        for variable in &function.variables[homes.len()..] {
            let home = self.home(name, variable, &mut local)?;
            homes.push(home);
        }
        self.code.local = self.code.local.max(local);
        let (mut labels, mut targets) = (HashMap::new(), HashMap::new());
        for item in items {
            match item {
                Item::Label(name, line) => {
                    let label = self.label();
                    if labels.insert(&**name, label).is_some() {
                        return Err(Error::syntax(*line, format!("the label {name} is there twice")));
                    }
                }
                Item::Targets(name, list) => {
                    targets.insert(&**name, &list[..]);
                }
                Item::Instr(_) => {}
            }
        }
        let frame = Frame { homes, registers, labels, targets, back, local };
        for item in items {
            match item {
                Item::Label(name, line) => self.push(*line, Step::Label(frame.labels[&**name]))?,
                Item::Targets(..) => {}
                Item::Instr(instr) => self.instr(&frame, instr).map_err(|error| {
                    let (start, end) = instr.span;
                    let text = self.text.get(start as usize..end as usize).unwrap_or("");
                    error.of(instr.line, text)
                })?,
            }
        }
        self.open.pop();
        Ok(())
    }

    /// Copies what a call passes to local memory, where a function that takes its parameter's address finds it (PTX ISA, "Function
    /// Parameters as local variables").
    fn in_local(&mut self, variable: &Variable, slot: u32, local: &mut u64) -> Result<Home> {
        let align = variable.align.clamp(1, 8);
        let offset = reserve_local(variable, local)?;
        let symbol = Operand::Symbol(Symbol { space: Space::Local, offset });
        let mut at = 0;
        while at < variable.size {
            let bytes = align.min(1 << (variable.size - at).ilog2());
            self.slots[slot as usize].extend([at as i64, (at + bytes) as i64]);
            let register = self.new_registers(variable.line, [Ty::new(Class::Bits, 8 * bytes as u32)])?;
            let place = Operand::Address(Box::new(symbol.clone()), at as i64);
            for (code, operands) in [
                ("argument.load", vec![Operand::Register(register), Operand::Argument(slot, at as i64)]),
                ("st.local", vec![place, Operand::Register(register)]),
            ] {
                let code = format!("{code}.b{}", 8 * bytes).into();
                let instr = Instr { line: variable.line, span: (0, 0), guard: None, code, operands };
                self.push(variable.line, Step::Instr(instr))?;
            }
            at += bytes;
        }
        Ok(Home::Symbol(Symbol { space: Space::Local, offset }))
    }

    /// Finds a place for a variable that a function declares.
    fn home(&mut self, function: &'a str, variable: &'a Variable, local: &mut u64) -> Result<Home> {
        let symbol = |space, offset| Ok(Home::Symbol(Symbol { space, offset }));
        if !variable.bytes.is_empty() {
            return Err(Error::unsupported(
                variable.line,
                format!("{}, initialised in a function,", variable.name),
            ));
        }
        match variable.space {
            Space::Local => symbol(Space::Local, reserve_local(variable, local)?),
            Space::Shared => {
                let key = (function, &*variable.name, variable.line);
                let offset = match self.own_shared.get(&key) {
                    Some(offset) => *offset,
                    None => {
                        let offset = self.in_shared(variable)?;
                        self.own_shared.insert(key, offset);
                        offset
                    }
                };
                symbol(Space::Shared, offset)
            }
            Space::Param if variable.register.is_some() => Ok(Home::Register),
            Space::Param => {
                self.slots.push(BTreeSet::new());
                Ok(Home::Slot(self.slots.len() as u32 - 1))
            }
            Space::Global | Space::Const => {
                Err(Error::unsupported(variable.line, format!("{}, global in a function,", variable.name)))
            }
        }
    }

    fn in_shared(&mut self, variable: &Variable) -> Result<u64> {
        if variable.unsized_array {
            self.code.dynamic = true;
            self.code.shared_align = self.code.shared_align.max(variable.align);
            return Ok(DYNAMIC_SHARED);
        }
        let offset = place(&mut self.code.shared, variable.size, variable.align);
        if self.code.shared > MAX_SHARED_BYTES {
            return Err(Error::large(variable.line, "bytes of shared memory", MAX_SHARED_BYTES as usize));
        }
        Ok(offset)
    }

    /// A variable of the module.
    fn global(&mut self, name: &str) -> Result<Symbol> {
        let Some((key, variable)) = self.variables.get_key_value(name).map(|(k, v)| (*k, *v)) else {
            let kind = match self.ast.function(name).is_some() {
                true => ErrorKind::Unsupported(format!("the address of the function {name}")),
                false => ErrorKind::Unknown(name.to_owned()),
            };
            return Err(Error::at(0, kind));
        };
        let space = variable.space;
        let offset = match space {
            Space::Global | Space::Const => self.data.get(name).copied().unwrap_or(0),
            Space::Shared => match self.shared.get(name) {
                Some(offset) => *offset,
                None => {
                    let offset = self.in_shared(variable)?;
                    self.shared.insert(key, offset);
                    offset
                }
            },
            Space::Local | Space::Param => {
                return Err(Error::unsupported(
                    variable.line,
                    format!("{name}, local outside of functions,"),
                ));
            }
        };
        Ok(Symbol { space, offset })
    }

    fn instr(&mut self, frame: &Frame<'a>, instr: &'a Instr) -> Result<()> {
        let guard = instr.guard.map(|g| Guard { register: g.register + frame.registers, ..g });
        match instr.opcode() {
            "ret" => {
                let (code, operands) = match frame.back {
                    Some(label) => ("bra", vec![Operand::Label(label)]),
                    None => ("exit", Vec::new()),
                };
                return self.push(
                    instr.line,
                    Step::Instr(Instr { code: code.into(), operands, guard, ..instr.clone() }),
                );
            }
            "call" => return self.call(frame, instr, guard),
            "ld" | "st" if instr.modifiers().next() == Some("param") => {
                if let Some(done) = self.parameter(frame, instr, guard) {
                    return done;
                }
            }
            _ => {}
        }
        let labels = matches!(instr.opcode(), "bra" | "brx");
        let mut operands =
            instr.operands.iter().map(|o| self.operand(frame, o, labels)).collect::<Result<Vec<_>>>()?;
        self.add_carry(instr, &mut operands)?;
        self.push(instr.line, Step::Instr(Instr { operands, guard, ..instr.clone() }))
    }

    /// Makes the carry flag (`CC.CF`) an operand like any other: the second result of instructions with `.cc`, the last source of
    /// `addc`, `subc` and `madc`.
    fn add_carry(&mut self, instr: &Instr, operands: &mut Vec<Operand>) -> Result<()> {
        let (reads, writes) = (instr.reads_carry(), instr.writes_carry());
        if !reads && !writes {
            return Ok(());
        }
        let carry = match self.carry {
            Some(carry) => carry,
            None => self.new_registers(instr.line, [Ty::new(Class::Predicate, 1)])?,
        };
        self.carry = Some(carry);
        if reads {
            operands.push(Operand::Register(carry));
        }
        if writes && let Some(result) = operands.first_mut() {
            let sum = std::mem::replace(result, Operand::Sink);
            *result = Operand::Pair(Box::new([sum, Operand::Register(carry)]));
        }
        Ok(())
    }

    fn operand(&mut self, frame: &Frame<'a>, operand: &Operand, labels: bool) -> Result<Operand> {
        let mut list = |operands: &[Operand]| {
            operands.iter().map(|o| self.operand(frame, o, labels)).collect::<Result<Vec<_>>>()
        };
        Ok(match operand {
            Operand::Register(register) => Operand::Register(register + frame.registers),
            Operand::Not(register) => Operand::Not(register + frame.registers),
            Operand::Variable(at) => match frame.homes[*at as usize] {
                Home::Symbol(symbol) => Operand::Symbol(symbol),
                Home::Slot(_) | Home::Register => {
                    return Err(Error::unsupported(0, "the address of a parameter of a call"));
                }
            },
            Operand::Name(name) if labels => match (frame.labels.get(&**name), frame.targets.get(&**name)) {
                (Some(label), _) => Operand::Label(*label),
                (None, Some(targets)) => {
                    let label = |target: &str| {
                        let found = frame.labels.get(target).copied().map(Operand::Label);
                        found.ok_or_else(|| Error::at(0, ErrorKind::Unknown(target.to_string())))
                    };
                    Operand::List(targets.iter().map(|target| label(target)).collect::<Result<Vec<_>>>()?)
                }
                (None, None) => return Err(Error::at(0, ErrorKind::Unknown(name.to_string()))),
            },
            Operand::Name(name) => Operand::Symbol(self.global(name)?),
            Operand::Vector(operands) => Operand::Vector(list(operands)?),
            Operand::List(operands) => Operand::List(list(operands)?),
            Operand::Pair(pair) => {
                let [a, b] = &**pair;
                let (a, b) = (self.operand(frame, a, labels)?, self.operand(frame, b, labels)?);
                Operand::Pair(Box::new([a, b]))
            }
            Operand::Address(base, offset) => {
                Operand::Address(Box::new(self.operand(frame, base, labels)?), *offset)
            }
            Operand::Sum(base, offset) => Operand::Sum(Box::new(self.operand(frame, base, labels)?), *offset),
            other => other.clone(),
        })
    }

    /// An access to a parameter of a call, as a move.
    fn parameter(&mut self, frame: &Frame<'a>, instr: &'a Instr, guard: Option<Guard>) -> Option<Result<()>> {
        let load = instr.opcode() == "ld";
        let [first, second] = &instr.operands[..] else { return None };
        let (address, value) = if load { (second, first) } else { (first, second) };
        let Operand::Address(base, offset) = address else { return None };
        let Operand::Variable(at) = **base else { return None };
        let Home::Slot(slot) = frame.homes[at as usize] else { return None };
        let ty = instr.modifiers().filter_map(Ty::parse).last()?;
        Some((|| {
            let values = match value {
                Operand::Vector(values) => &values[..],
                one => std::slice::from_ref(one),
            };
            for (lane, value) in values.iter().enumerate() {
                let value = self.operand(frame, value, false)?;
                // Beyond what a parameter can have, so that sums of offsets are in bounds.
                if !(0..=MAX_PARAMETER_BYTES as i64).contains(offset) {
                    return Err(Error::unsupported(0, "an access beyond a parameter"));
                }
                let at = offset + lane as i64 * ty.bytes() as i64;
                self.slots[slot as usize].extend([at, at + ty.bytes() as i64]);
                let part = Operand::Argument(slot, at);
                let operands = if load { vec![value, part] } else { vec![part, value] };
                let suffix = instr.code.rsplit('.').next().unwrap_or("b32");
                let code =
                    format!("{}.{suffix}", if load { "argument.load" } else { "argument.store" }).into();
                self.push(instr.line, Step::Instr(Instr { code, operands, guard, ..instr.clone() }))?;
            }
            Ok(())
        })())
    }

    /// Gives parameters of calls their registers.
    fn arguments(&mut self) -> Result<()> {
        let mut known: HashMap<(u32, i64), u32> = HashMap::new();
        let mut steps = std::mem::take(&mut self.code.steps);
        for step in &mut steps {
            let Step::Instr(instr) = step else { continue };
            let one = [instr.modifiers().filter_map(Ty::parse).last().map_or(0, |ty| ty.bytes() as i64); 2];
            let sizes = match instr.opcode() {
                "argument" => &one,
                "print" => PRINTED,
                "assert" => ASSERTED,
                _ => continue,
            };
            for (operand, &size) in instr.operands.iter_mut().zip(sizes) {
                let Operand::Argument(slot, first) = *operand else { continue };
                let (mut at, mut parts) = (first, Vec::new());
                while at < first + size {
                    let end =
                        self.slots[slot as usize].range(at + 1..).next().copied().unwrap_or(first + size);
                    // As many bytes as an integer has, from a multiple of that on.
                    let most = 1 << (end - at).ilog2();
                    let bytes = if at == 0 { most } else { most.min(1 << at.trailing_zeros().min(3)) };
                    let register = match known.get(&(slot, at)) {
                        Some(register) => *register,
                        None => {
                            let ty = Ty::new(Class::Bits, bytes as u32 * 8);
                            let register = self.new_registers(instr.line, [ty])?;
                            known.insert((slot, at), register);
                            register
                        }
                    };
                    parts.push(Operand::Register(register));
                    at += bytes;
                }
                *operand = Operand::Vector(parts);
            }
        }
        self.code.steps = steps;
        Ok(())
    }

    /// A call of a function of CUDA's device runtime as an instruction: its operands are the parameters that the call returns and passes.
    fn runtime_call(
        &mut self,
        frame: &Frame<'a>,
        instr: &'a Instr,
        (code, sizes): (&str, &[i64]),
        passed: Vec<Operand>,
        guard: Option<Guard>,
    ) -> Result<()> {
        if passed.len() != sizes.len() {
            return Err(Error::syntax(
                0,
                format!("the call has {} parameters, not {}", sizes.len(), passed.len()),
            ));
        }
        let mut operands = Vec::new();
        for (passed, &size) in passed.iter().zip(sizes) {
            let Operand::Variable(at) = *passed else {
                return Err(Error::unsupported(0, "a call that passes registers"));
            };
            let Home::Slot(slot) = frame.homes[at as usize] else {
                return Err(Error::unsupported(0, "a call that passes variables"));
            };
            self.slots[slot as usize].extend([0, size]);
            operands.push(Operand::Argument(slot, 0));
        }
        self.push(instr.line, Step::Instr(Instr { code: code.into(), operands, guard, ..instr.clone() }))
    }

    fn call(&mut self, frame: &Frame<'a>, instr: &'a Instr, guard: Option<Guard>) -> Result<()> {
        let (returns, name, arguments): (&[Operand], _, &[Operand]) = match &instr.operands[..] {
            [Operand::List(returns), Operand::Name(name), Operand::List(arguments)] => {
                (returns, name, arguments)
            }
            [Operand::Name(name), Operand::List(arguments)] => (&[], name, arguments),
            [Operand::List(returns), Operand::Name(name)] => (returns, name, &[]),
            [Operand::Name(name)] => (&[], name, &[]),
            _ => return Err(Error::unsupported(0, "a call through a pointer")),
        };
        let Some(declared) = self.ast.function(name) else {
            return Err(Error::at(0, ErrorKind::Unknown(name.to_string())));
        };
        let runtime = match &**name {
            "__assertfail" => Some(("assert", ASSERTED)),
            "vprintf" => Some(("print", PRINTED)),
            _ => None,
        };
        if let (Some(runtime), None) = (runtime, declared.at) {
            return self.runtime_call(frame, instr, runtime, [returns, arguments].concat(), guard);
        }
        let callee = self.callee(&declared.head.name)?;
        if callee.entry {
            return Err(Error::unsupported(0, format!("a call of {name}")));
        }
        if self.open.contains(&&*callee.name) {
            return Err(Error::at(0, ErrorKind::Recursion(name.to_string())));
        }
        // Modules may disagree whether a function returns something, as those of void in Numba do.
        let agree = returns.len() == callee.returns || returns.is_empty() || callee.returns == 0;
        if !agree || arguments.len() != callee.params {
            return Err(Error::syntax(0, format!("{name} takes and gives other parameters")));
        }
        let home = |operand: &Operand| match operand {
            Operand::Variable(at) => Ok(frame.homes[*at as usize]),
            _ => Err(Error::unsupported(0, "a call that passes registers")),
        };
        let mut homes = returns.iter().take(callee.returns).map(home).collect::<Result<Vec<_>>>()?;
        // A result that the caller drops needs a place.
        while homes.len() < callee.returns {
            self.slots.push(BTreeSet::new());
            homes.push(Home::Slot(self.slots.len() as u32 - 1));
        }
        for argument in arguments {
            homes.push(home(argument)?);
        }
        let over = self.label();
        if let Some(guard) = guard {
            let skip = Guard { negated: !guard.negated, ..guard };
            let operands = vec![Operand::Label(over)];
            self.push(
                instr.line,
                Step::Instr(Instr { code: "bra".into(), operands, guard: Some(skip), ..instr.clone() }),
            )?;
        }
        self.function(callee, homes, Some(over), frame.local)?;
        self.push(instr.line, Step::Label(over))
    }
}
