//! Machine code for a CPU, by Cranelift.
//!
//! * [`isa`](Isa): machines. `legal`: the table of what they have.
//! * `plan`: splits a kernel at its barriers into loops over warps and threads.
//! * `writer`: a kernel as a function; `blocks` the loop over blocks, `lockstep` loops that threads go through side by side,
//!   `control` regions, `diverge` those at which threads part, `agree` those of which the code says who takes part, `ahead` loops
//!   that are checked before they begin.
//! * `floats`: what is known of the floats of a kernel.
//! * `lanes`: values; `arrange` the lanes of vectors of several threads; `value`, `convert`, `function`, `wide`: ops
//!   on them; `steps`: integers that go in steps from thread to thread, `stepped` loops that carry them; `ids`: where threads are; `memory`: views and shared
//!   arrays, `redirect` what is out of bounds of them, `atomics`; `warp`: ops between threads. `tile`: tile kernels.
//! * `routine`: our own routines, `wide` for functions of floats, `chunks` for copies and `micro` for products.
//! * `emit`: from the function to machine code; `limits` how large it may become, `live` how far its values live, `schedule`
//!   the order of instructions, `object` the ELF object, `spoil` what tests make of it.
//!
//! # The code
//!
//! An ELF object without relocations. The symbol of each kernel is a function
//!
//! ```c
//! void kernel(const uint8_t *params, const uint32_t grid[3], uint64_t first, uint64_t end, uint8_t *scratch);
//! ```
//!
//! that runs the blocks with numbers from `first` up to `end`, counted through x, then y, then z. `params` is the block of
//! parameters, `grid` the blocks along each axis, none of them 0. `scratch` is aligned to 64 bytes, has
//! [`Entry::dynamic_shared`](crate::Entry) bytes, and is one thread's alone while the function runs; what it holds before
//! and after means nothing. Below it lie the areas that [`vm_abi::SCRATCH_AREA`] describes. Any number of threads may run different blocks at once. The function calls nothing that is
//! not part of its symbol, and needs up to [`STACK`] bytes of stack: how many,
//! the value of an absolute symbol tells that has its name and `.stack` behind it.

mod agree;
mod ahead;
mod arrange;
mod atomics;
mod blocks;
mod chunks;
mod control;
mod convert;
mod diverge;
mod emit;
mod floats;
mod function;
mod ids;
mod isa;
mod lanes;
mod legal;
mod limits;
mod live;
mod lockstep;
mod memory;
mod micro;
mod object;
mod plan;
mod redirect;
mod routine;
mod schedule;
mod spoil;
mod stepped;
mod steps;
mod tile;
mod value;
mod warp;
mod wide;
mod writer;

pub(crate) use legal::way;

pub use isa::{Architecture, Isa, UnknownIsa};

use super::UnknownTarget;
use crate::artifact::{self, Artifact, Entry, Format};
use crate::contain::{self, Phase};
use crate::reject::{Reject, RejectKind, Rejected};
use crate::safety::{Parameters, SafetyPlan, cost::Costs};
use cranelift_codegen::Context;
use cranelift_codegen::ir::{AbiParam, Function, Signature, UserFuncName, types};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use std::fmt;
use std::str::FromStr;
use vm_abi::ParamLayout;
use vm_ir::valid::KernelFacts;
use vm_ir::{Kernel, ValidModule};

/// Bytes of stack that a kernel may need.
pub const STACK: usize = 32 << 20;

/// What a kernel becomes, for its safety plan. Costs are nanoseconds, so it polls some hundred times a second; of up to sixteen
/// threads that are run together, each does a sixteenth of an interval without.
pub(crate) const SAFETY: Parameters = Parameters {
    costs: Costs::Cpu,
    unrolling: None,
    interval: 1 << 22,
    in_loops: 1 << 18,
    straight: Some(1 << 16),
    cancels_clusters: true,
};

/// Options that change the result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// What it is for.
    pub isa: Isa,
    /// An access of a guest's kernel to a view that is out of bounds goes to address 0, for those who handle the fault; else to
    /// an area below the scratch memory, where it does nothing.
    pub strays_fault: bool,
}

impl Options {
    /// Code for a machine.
    pub fn new(isa: Isa) -> Options {
        Options { isa, strays_fault: false }
    }
}

/// Behind the machine, that strays fault.
const STRAYS: &str = "+faults";

impl FromStr for Options {
    type Err = UnknownTarget;

    fn from_str(text: &str) -> Result<Options, UnknownTarget> {
        let (isa, strays_fault) = match text.strip_suffix(STRAYS) {
            Some(isa) => (isa, true),
            None => (text, false),
        };
        Ok(Options { isa: isa.parse()?, strays_fault })
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.isa, if self.strays_fault { STRAYS } else { "" })
    }
}

/// What the head of a kernel asks for and the target does not have.
pub(crate) fn head_rejects(options: &Options, kernel: &Kernel) -> Vec<RejectKind> {
    let mut found = Vec::new();
    let needed = legal::scratch(kernel).saturating_add(tile::Tiles::of(kernel, options.isa).bytes);
    if needed > legal::MAX_SCRATCH {
        found.push(RejectKind::Scratch { needed, available: legal::MAX_SCRATCH });
    }
    found
}

/// Compiles a module that the target does not reject.
pub(crate) fn write(module: &ValidModule, options: &Options, target: String) -> Result<Artifact, Rejected> {
    let reject = |kernel: &Kernel, kind| Rejected(vec![Reject::new(kernel, kernel.line().0, kind)]);
    let gave_up = |what| RejectKind::Generator { what };
    let mut functions = Vec::new();
    let mut entries = Vec::new();
    let mut contexts = (Context::new(), FunctionBuilderContext::new());
    let generators = match (emit::Generators::new(options.isa), module.kernels().first()) {
        (Ok(generators), _) => generators,
        (Err(error), Some(kernel)) => return Err(reject(kernel, gave_up(error.to_string()))),
        (Err(_), None) => return Ok(Artifact { target, format: Format::Elf, code: Vec::new(), entries }),
    };
    let facts = module.kernels_with_facts().map(|(_, facts)| facts);
    for (kernel, facts) in contain::each(module, Phase::Write).zip(facts) {
        let safety = SafetyPlan::of(kernel, module.trust(), &SAFETY);
        let safety = safety.map_err(|error| Rejected(vec![error]))?;
        let (code, frame, entry) = function(facts, &safety, options, &generators, &mut contexts)
            .map_err(|kind| reject(kernel, kind))?;
        functions.push(object::Function { symbol: entry.symbol.clone(), code, frame });
        entries.push(entry);
    }
    let code = object::write(options.isa.architecture(), &functions);
    let code = match (code, module.kernels().first()) {
        (Some(code), _) => code,
        (None, Some(kernel)) => return Err(reject(kernel, gave_up("the object can't be written".into()))),
        (None, None) => Vec::new(),
    };
    Ok(Artifact { target, format: Format::Elf, code, entries })
}

fn function(
    facts: &KernelFacts,
    safety: &SafetyPlan<'_>,
    options: &Options,
    generators: &emit::Generators,
    contexts: &mut (Context, FunctionBuilderContext),
) -> Result<(Vec<u8>, u32, Entry), RejectKind> {
    let mut compile = |vectorize| {
        let (params, scratch) = written(facts, safety, options, generators, contexts, vectorize)?;
        let (code, frame) = emit::emit(&mut contexts.0, generators)?;
        Ok((params, scratch, code, frame))
    };
    // Threads that are run together need a second copy of each nested region, for those that diverge.
    let (params, scratch, code, frame) = match compile(true) {
        Err(RejectKind::Size { .. }) => compile(false)?,
        compiled => compiled?,
    };
    let kernel = safety.ranges().kernel();
    let entry = Entry {
        kernel: kernel.name().to_owned(),
        symbol: kernel.name().to_owned(),
        block: kernel.block(),
        cluster: kernel.cluster(),
        params,
        static_shared: 0,
        dynamic_shared: scratch.next_multiple_of(64),
        work: safety.bound(),
        products: None,
    };
    Ok((code, frame, entry))
}

/// Writes a kernel into the context's function, and tells its parameters and the bytes of scratch memory that it needs. `vectorize` has
/// neighboring threads run together where that is possible.
fn written(
    facts: &KernelFacts,
    safety: &SafetyPlan<'_>,
    options: &Options,
    generators: &emit::Generators,
    (context, builder): &mut (Context, FunctionBuilderContext),
    vectorize: bool,
) -> Result<(ParamLayout, u32), RejectKind> {
    let kernel = safety.ranges().kernel();
    let plan = plan::Plan::of(facts, safety.ranges());
    let floats = floats::Floats::of(kernel);
    let tiles = tile::Tiles::of(kernel, options.isa);
    // Whoever runs the blocks can stop between two, also where the code itself looks at nothing.
    let params = artifact::layout(kernel, &[], safety.is_guests());
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.extend([types::I64; 5].map(AbiParam::new));
    context.clear();
    context.func = Function::with_name_signature(UserFuncName::user(0, 0), signature);
    let build = FunctionBuilder::new(&mut context.func, builder);
    let known = writer::Known { facts, safety, plan: &plan, floats: &floats, tiles: &tiles };
    let build =
        writer::Build { builder: build, config: generators.thorough.frontend_config(), options, vectorize };
    let scratch = writer::write(build, known, &params)?;
    Ok((params, scratch))
}
