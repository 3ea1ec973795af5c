//! Instructions to ops.
//!
//! [`control`] walks the tree of regions, [`table`] says what is done with each instruction, and the other modules do it. Registers
//! are values of the IR; what a region assigns and somebody reads later is what it yields.

mod arithmetic;
mod bits;
mod control;
mod convert;
mod float;
mod memory;
mod print;
mod table;
mod value;
mod vote;
mod warp;

use crate::ast::{Ast, Class, Declared, Function, Instr, Space, Symbol, Ty};
use crate::cfg::Cfg;
use crate::error::{Error, ErrorKind, Result};
use crate::inline::{DYNAMIC_SHARED, inline};
use crate::limits::MAX_LOOKS;
use crate::live::{self, Live};
use crate::lockstep::{self, Ordered};
use crate::module::{Signature, Word};
use crate::space::{LOCAL, SHARED, Spaces, spaces};
use crate::structure::{Tree, structure};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use value::{Environment, Fact};
use vm_ir::builder::{Builder, IRBlock, PlaceRef, Val};
use vm_ir::limits::{MAX_NAME, MAX_SHARED_BYTES};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Scalar, Trust, Type, ValidModule, validate};

pub use table::supported;

/// What a kernel is translated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of shared memory whose size the launch says.
    pub dynamic_shared: u32,
    /// Where the module's [data](crate::Data) is in the memory.
    pub data: u64,
}

/// A translated kernel. Its parameters are `@memory: view<i8, [?], readwrite, align 16>`, all memory that the program has; `%base: i64`,
/// the address that the program has of its first byte;
/// `%parameters: i64`, where in the memory the block of parameters is, if it [must be there](Translated::parameters_in_memory); and
/// [the scalars](Signature::scalars) of the signature. One that [prints](Translated::prints) takes `%ring: i64` behind them, where in the memory a
/// [ring](crate::print) is that nothing else is put into, at a multiple of 8, and `%ring_mask: i64`, one less than its size, which is a power of two.
/// One that [traps](Translated::traps) takes `%trap: i64` behind them, an index into the memory that a thread writes 8 bytes to when it traps: where
/// nothing is mapped there, the fault ends the launch.
#[derive(Clone, Debug)]
pub struct Translated {
    /// The kernel, alone in a module.
    pub module: ValidModule,
    /// What it takes.
    pub signature: Signature,
    /// Must the block of parameters be in the memory too, at a multiple of 16? So it is where there are many, and where their
    /// addresses are computed. Else `%parameters` is any number. At the next multiple of 8 after the block is a
    /// word that is 1 in cooperative launches and otherwise 0, then 64 bytes of zeros, the workspace of the grid barrier.
    pub parameters_in_memory: bool,
    /// Whether it has `printf` or `assert`, and so needs a ring.
    pub prints: bool,
    /// Whether it has `trap` or `assert`.
    pub traps: bool,
    /// Bytes of shared memory of a block, those included whose size the launch says.
    pub shared: u64,
    /// Bytes of local memory of a thread.
    pub local: u64,
}

/// Where generic addresses of shared and of local memory begin. No memory of a program is there.
pub(crate) const SHARED_WINDOW: u64 = 0x7000_0000_0000_0000;
pub(crate) const LOCAL_WINDOW: u64 = 0x7100_0000_0000_0000;
/// What addresses of parameters count from.
const PARAMETERS: u64 = 0x7200_0000_0000_0000;
/// Bytes of each of these.
const WINDOW: u64 = 1 << 32;

pub(crate) fn translate(
    ast: &Ast,
    text: &str,
    declared: &Declared,
    signature: Signature,
    data: &HashMap<&str, u64>,
    options: &Options,
) -> Result<Translated> {
    let function = &declared.head;
    if let Some(required) = function.required.filter(|required| *required != options.block) {
        let what = format!("blocks of {:?} where .reqntid says {required:?}", options.block);
        return Err(Error::unsupported(function.line, what));
    }
    let code = inline(ast, text, declared, data)?;
    let (mut registers, local) = (code.registers.clone(), code.local);
    // The last one says whether the thread has not ended yet.
    registers.push(Ty::new(Class::Predicate, 1));
    let dynamic_at = code.shared.next_multiple_of(code.shared_align);
    let shared = if code.dynamic { dynamic_at + u64::from(options.dynamic_shared) } else { code.shared };
    if shared > MAX_SHARED_BYTES {
        return Err(Error::large(function.line, "bytes of shared memory", MAX_SHARED_BYTES as usize));
    }
    let mut cfg = Cfg::of(code)?.with_barriers_behind();
    live::prune(&mut cfg, registers.len());
    let spaces = spaces(&cfg, &registers);
    let texts = ast
        .variables
        .iter()
        .filter_map(|variable| Some((*data.get(&*variable.name)?, &variable.bytes[..])))
        .collect();
    let texts = Rc::new(texts);
    let attempt = |cfg: Cfg| {
        let prepared = Prepared {
            function,
            texts: Rc::clone(&texts),
            text,
            tree: structure(&cfg, NESTING[0], false)?,
            nesting: NESTING[0],
            live: Live::of(&cfg, registers.len())?,
            cfg,
            spaces: spaces.clone(),
            registers: registers.clone(),
            dynamic_at,
            shared,
            local,
        };
        prepared.translated(&signature, options)
    };
    let ordered = match options.block.iter().product() {
        0 | 1 => None,
        2..=WARP => Some(Ordered::All),
        _ => Some(Ordered::Volatile),
    };
    let waits = ordered.and_then(|ordered| lockstep::with_barriers(&cfg, &registers, &spaces, ordered));
    match waits.map(&attempt) {
        Some(Ok(done)) => Ok(done),
        _ => attempt(cfg),
    }
}

/// How deep conditions are nested in each loop, one try after the other.
const NESTING: [usize; 3] = [20, 5, 1];

/// Ways to write a kernel, tried one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// As it is.
    Plain,
    /// What all threads of the block read alike from shared memory, one of them passes on: so it may decide about barriers.
    Agree,
    /// Threads that end before others come to a barrier or a shuffle come along, and do nothing to memory. Devices, too, wait for
    /// no thread that has ended.
    Stay,
    /// All threads come to what they must come to together as long as one has to.
    Vote,
    /// The same, where the last warp is not full: threads that have ended before they began fill it.
    Fill,
}

/// Threads of a warp.
const WARP: u32 = 32;

/// A kernel whose regions are known.
struct Prepared<'a> {
    function: &'a Function,
    text: &'a str,
    /// What the module's variables begin with, by their offsets.
    texts: Rc<BTreeMap<u64, &'a [u8]>>,
    cfg: Cfg,
    tree: Tree,
    nesting: usize,
    live: Live,
    spaces: Vec<Spaces>,
    registers: Vec<Ty>,
    dynamic_at: u64,
    shared: u64,
    local: u64,
}

impl Prepared<'_> {
    /// Writes the kernel.
    fn translated(mut self, signature: &Signature, options: &Options) -> Result<Translated> {
        let mut done = self.best(signature, options);
        for nesting in &NESTING[1..] {
            // A kernel that is nested too deeply is written with less nesting.
            if !matches!(&done, Err(error) if matches!(error.kind, ErrorKind::Build(_))) {
                break;
            }
            self.nesting = *nesting;
            let Ok(tree) = structure(&self.cfg, *nesting, false) else { break };
            self.tree = tree;
            let flatter = self.best(signature, options);
            if flatter.is_ok() {
                done = flatter;
            }
        }
        done
    }

    /// Writes the kernel in the one way that is valid, if there is one.
    fn best(&self, signature: &Signature, options: &Options) -> Result<Translated> {
        let of_warps = self.cfg.blocks.iter().flat_map(|block| &block.instrs).any(Instr::is_of_warps);
        if of_warps && !options.block.iter().product::<u32>().is_multiple_of(WARP) {
            return self.write(signature, options, Mode::Fill);
        }
        let refused = match self.write(signature, options, Mode::Plain) {
            Err(error) if matches!(error.kind, ErrorKind::Invalid(_)) => error,
            done => return done,
        };
        if let Ok(done) = self.write(signature, options, Mode::Agree) {
            return Ok(done);
        }
        let cfg = self.cfg.with_tails();
        let (Ok(tree), Ok(live)) =
            (structure(&cfg, self.nesting, true), Live::of(&cfg, self.registers.len()))
        else {
            return Err(refused);
        };
        let (spaces, registers) = (self.spaces.clone(), self.registers.clone());
        let texts = Rc::clone(&self.texts);
        let tails = Prepared { cfg, tree, live, spaces, registers, texts, ..*self };
        if let Ok(done) = tails.write(signature, options, Mode::Stay) {
            return Ok(done);
        }
        self.write(signature, options, Mode::Vote).map_err(|error| match error.kind {
            ErrorKind::Invalid(_) => refused,
            _ => error,
        })
    }

    /// Writes the kernel.
    fn write(&self, signature: &Signature, options: &Options, mode: Mode) -> Result<Translated> {
        let block = IRBlock::new(GuestAddr(0));
        let k = block.builder();
        k.at_line(self.function.line);
        let threads = options.block.iter().product::<u32>();
        let filled = (mode == Mode::Fill).then(|| threads.next_multiple_of(WARP));
        let block_size = filled.map_or(options.block, |filled| [filled, 1, 1]);
        k.name(&identifier(&self.function.name)).block_size(block_size);
        let ty = ViewType { align: 16, ..ViewType::new(Scalar::I8, 1, Access::ReadWrite) };
        let memory = k.view_of("memory", ty);
        let base = k.scalar("base", Type::I64);
        let parameters = k.scalar("parameters", Type::I64);
        let scalars = signature.scalars.iter().enumerate();
        let words =
            scalars.map(|(i, word)| (*word, k.scalar(&format!("p{i}"), word.scalar.into()))).collect();
        let has = |codes: [&str; 2]| {
            let mut instrs = self.cfg.blocks.iter().flat_map(|block| &block.instrs);
            instrs.any(|instr| codes.contains(&instr.opcode()))
        };
        let (prints, traps) = (has(["print", "assert"]), has(["trap", "assert"]));
        let ring = prints.then(|| [k.scalar("ring", Type::I64), k.scalar("ring_mask", Type::I64)]);
        let trap = traps.then(|| k.scalar("trap", Type::I64));
        // As much as the widest access needs, so that there is room for each.
        let bytes = |bytes: u64| bytes.next_multiple_of(16).max(16) as u32;
        let shared = (self.shared > 0).then(|| k.shared("shared", Scalar::I8, &[bytes(self.shared)]));
        let local = (self.local > 0).then(|| k.local("stack", bytes(self.local)));
        let reduces = |instr: &Instr| instr.is_barrier() && instr.modifiers().any(|m| m == "red");
        let agree = matches!(mode, Mode::Agree | Mode::Stay) && self.shared > 0;
        let votes = matches!(mode, Mode::Vote | Mode::Fill);
        let stay = mode == Mode::Stay;
        let exchanges =
            agree || stay || votes || self.cfg.blocks.iter().flat_map(|block| &block.instrs).any(reduces);
        let exchange = exchanges.then(|| k.shared("exchange", Scalar::I32, &[1]));
        let cx = Cx {
            k,
            text: self.text,
            cfg: &self.cfg,
            live: &self.live,
            types: &self.registers,
            spaces: &self.spaces,
            texts: &self.texts,
            ring,
            trap,
            local_bytes: self.local,
            memory,
            base,
            block: parameters,
            block_used: Cell::new(false),
            parameter_bytes: signature.size,
            words,
            shared,
            local,
            exchange,
            agree,
            stay,
            votes,
            data: options.data,
            dynamic_at: self.dynamic_at,
            shared_bytes: self.shared,
            dynamic_bytes: options.dynamic_shared,
            threads: options.block,
            filled,
            state: RefCell::default(),
            line: Cell::new(self.function.line),
            looks: Cell::new(MAX_LOOKS),
            together: Cell::new(true),
            converged: Cell::new(true),
            no_way_out: Cell::new(false),
            active: Cell::new(None),
        };
        cx.active.set(filled.map(|_| k.local_index().lt(threads as i32)));
        cx.body(&self.tree)?;
        let of_line = |line: u32, kind| Error::at(line, kind).of(line, cx.text_of(line));
        let kernel = block.kernel().map_err(|error| of_line(error.line, ErrorKind::Build(error)))?;
        let module = validate(kernel.into(), Trust::Guest).map_err(|errors| {
            let line = errors.0.first().map_or(0, |error| error.line);
            of_line(line, ErrorKind::Invalid(errors))
        })?;
        Ok(Translated {
            module,
            signature: signature.clone(),
            parameters_in_memory: cx.block_used.get(),
            prints,
            traps,
            shared: self.shared,
            local: self.local,
        })
    }
}

/// A name as the IR has them.
fn identifier(name: &str) -> String {
    let mut name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    name.truncate(MAX_NAME - 1);
    if name.starts_with(|c: char| c.is_ascii_digit()) { format!("_{name}") } else { name }
}

/// A kernel that is being translated.
struct Cx<'a, 'b> {
    k: Builder<'b>,
    text: &'a str,
    cfg: &'a Cfg,
    live: &'a Live,
    types: &'a [Ty],
    spaces: &'a [Spaces],
    texts: &'a BTreeMap<u64, &'a [u8]>,
    /// Where what is to be printed goes.
    ring: Option<[Val<'b>; 2]>,
    /// Where a thread that traps writes.
    trap: Option<Val<'b>>,
    local_bytes: u64,
    memory: PlaceRef<'b>,
    base: Val<'b>,
    /// Where the block of parameters is in the memory, and whether anything asks for it.
    block: Val<'b>,
    block_used: Cell<bool>,
    /// Bytes of the block of parameters.
    parameter_bytes: u64,
    words: Vec<(Word, Val<'b>)>,
    shared: Option<PlaceRef<'b>>,
    local: Option<PlaceRef<'b>>,
    /// A word of shared memory by which the block agrees on a value.
    exchange: Option<PlaceRef<'b>>,
    /// Are loads from shared memory at one address agreed upon?
    agree: bool,
    /// Do threads that end stay?
    stay: bool,
    /// Do threads vote on what they must come to together?
    votes: bool,
    /// Where the module's data is.
    data: u64,
    /// Where shared memory of the launch's size begins.
    dynamic_at: u64,
    shared_bytes: u64,
    dynamic_bytes: u32,
    threads: [u32; 3],
    /// Threads of a block, where some fill the last warp.
    filled: Option<u32>,
    state: RefCell<State<'b>>,
    /// The line of the instruction at hand.
    line: Cell<u32>,
    /// How many more registers may be looked at.
    looks: Cell<usize>,
    /// Is this where barriers are, so that all threads of the block come here?
    together: Cell<bool>,
    /// Is this where barriers, shuffles or votes are, so that all threads of the warp come here?
    converged: Cell<bool>,
    /// Is this in a loop that is left by threads that end alone?
    no_way_out: Cell<bool>,
    /// Which threads don't just come along; nothing where all are here for their own sake.
    active: Cell<Option<Val<'b>>>,
}

/// What changes on the way.
#[derive(Default)]
struct State<'b> {
    environment: Environment<'b>,
    /// What is known of values, by their number.
    facts: HashMap<u32, Fact>,
    /// The first thing that went wrong; after it nothing is built that matters.
    error: Option<Error>,
}

impl<'b> Cx<'_, 'b> {
    fn failed(&self) -> bool {
        self.state.borrow().error.is_some() || self.k.failed()
    }

    fn fail(&self, error: Error) {
        self.state.borrow_mut().error.get_or_insert(error);
    }

    /// The line of the module's text, for errors that know no more.
    fn text_of(&self, line: u32) -> &str {
        self.text.lines().nth((line as usize).wrapping_sub(1)).unwrap_or("").trim()
    }

    fn unsupported(&self, what: impl Into<String>) -> Error {
        Error::unsupported(0, what)
    }

    /// An instruction, where its predicate holds.
    fn instr(&self, instr: &Instr) {
        if self.failed() {
            return;
        }
        self.line.set(instr.line);
        self.k.at_line(instr.line);
        if let Err(error) = self.guarded(instr) {
            let (start, end) = instr.span;
            self.fail(error.of(instr.line, self.text.get(start as usize..end as usize).unwrap_or("")));
        }
    }

    /// The text at a place in the memory, which the module begins with there.
    fn text_at(&self, at: u64) -> Option<&[u8]> {
        let offset = at.checked_sub(self.data)?;
        let (from, bytes) = self.texts.range(..=offset).next_back()?;
        let bytes = bytes.get((offset - from) as usize..)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        Some(&bytes[..end])
    }

    fn ring(&self) -> Val<'b> {
        self.ring.map_or_else(|| self.k.i64(0), |[ring, _]| ring)
    }

    fn ring_mask(&self) -> Val<'b> {
        self.ring.map_or_else(|| self.k.i64(0), |[_, mask]| mask)
    }

    /// Can generic addresses be of shared or local memory at all?
    fn windows(&self) -> Spaces {
        (if self.shared.is_some() { SHARED } else { 0 }) | (if self.local.is_some() { LOCAL } else { 0 })
    }

    /// Where something is in its memory.
    fn offset_of(&self, symbol: Symbol, addend: i64) -> u64 {
        let offset = match symbol.space {
            Space::Shared if symbol.offset >= DYNAMIC_SHARED => {
                self.dynamic_at + (symbol.offset - DYNAMIC_SHARED)
            }
            Space::Global | Space::Const => self.data.wrapping_add(symbol.offset),
            _ => symbol.offset,
        };
        offset.wrapping_add(addend as u64)
    }
}
