//! A module's text: head, kernels, parameters, and the walk over ops.

use super::arch::Feature;
use super::asm::{Arg, Asm, Class, Label, Reg, def, ins};
use super::cluster::{BARRIER_BYTES, BARRIERS, ClusterBarriers};
use super::legal::way;
use super::tile::{self, Tiles};
use super::triple::Negations;
use super::{Options, STATIC_SHARED};
use crate::artifact::{self, Entry};
use crate::legal::{Way, key};
use crate::reject::{Reject, RejectKind, Rejected};
use crate::safety::SafetyPlan;
use std::collections::HashSet;
use std::fmt::Write;
use vm_abi::{NOTHING, NOTHING_BYTES, ParamLayout, Slot};
use vm_ir::module::{Op, ParamKind, Region};
use vm_ir::op::{BarrierScope, Opcode, Order, Scope, Shape};
use vm_ir::types::Class as Scalars;
use vm_ir::valid::{KernelFacts, Uniformity};
use vm_ir::view::Dim;
use vm_ir::{Kernel, Scalar, ValidModule, Value};

/// 1/2π in 32-bit digits, behind one digit of zero: enough for any f32.
const TURNS: &str = ".const .align 4 .b32 turns[8] = {0, 0x28be60db, 0x9391054a, 0x7f09d5f4, \
                     0x7d4d3770, 0x36d8a566, 0x4f10e410, 0x7f9458ea};\n";
/// Launch-sized shared memory has one name in a module. Symbols of kernels begin with `vir_`, so this is none of
/// theirs.
const DYNAMIC_SHARED: &str = "launch_shared";

/// A thread's local arrays, one behind the other.
const LOCAL: &str = "locals";

/// Instructions that a module may come to: some times what NVIDIA's assembler takes in a minute.
const MAX_INSTRUCTIONS: u64 = 1 << 20;

/// Writes all kernels.
///
/// # Errors
///
/// They come to too many instructions; no more are then written.
pub(super) fn module(
    module: &ValidModule,
    options: &Options,
    text: &mut String,
) -> Result<Vec<Entry>, Rejected> {
    let mut instructions = 0;
    let mut kernels = String::new();
    let (mut turns, mut dynamic, mut tiles) = (false, false, false);
    let mut entries = Vec::new();
    for ((kernel, facts), plan) in module.kernels_with_facts().zip(super::plans(module, options)?) {
        let mut writer = Writer::new(facts, plan, options);
        writer.asm.instructions = instructions;
        entries.push(match kernel.tile() {
            Some(tile) => writer.tile_kernel(tile, &mut kernels),
            None => writer.kernel(&mut kernels),
        });
        tiles |= kernel.tile().is_some();
        instructions = writer.asm.instructions;
        if instructions > MAX_INSTRUCTIONS {
            let kind =
                RejectKind::Size { what: "instructions", needed: instructions, available: MAX_INSTRUCTIONS };
            return Err(Rejected(vec![Reject::new(kernel, kernel.line().0, kind)]));
        }
        turns |= writer.turns;
        dynamic |= writer.dynamic_shared() > 0;
    }
    let _ = writeln!(text, ".version {}\n.target {}\n.address_size 64", options.version(), options.arch);
    if let Some(source) = options.source_name() {
        let _ = writeln!(text, ".file 1 \"{source}\"");
    }
    if turns {
        text.push_str(TURNS);
    }
    if dynamic {
        let _ = writeln!(text, ".extern .shared .align 16 .b8 {DYNAMIC_SHARED}[];");
    }
    if tiles {
        text.push_str(tile::DECLARATION);
    }
    if entries.iter().any(|entry| !entry.params.maps.is_empty()) {
        let _ = writeln!(text, ".visible .global .align 64 .b8 {NOTHING}[{NOTHING_BYTES}];");
    }
    text.push_str(&kernels);
    Ok(entries)
}

/// A view's parameters in registers.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) base: Reg,
    pub(super) extents: Vec<Extent>,
    /// In bytes, of all dimensions but the last.
    pub(super) strides: Vec<Reg>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Extent {
    Fixed(i64),
    Reg(Reg),
}

impl From<Extent> for Arg<'_> {
    fn from(extent: Extent) -> Self {
        match extent {
            Extent::Fixed(value) => Arg::Int(value),
            Extent::Reg(reg) => Arg::Reg(reg),
        }
    }
}

/// The registers and labels by which a guest's kernel is cancelled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cancel {
    /// Iterations left until the next poll.
    pub(super) quantum: Reg,
    /// Those left behind the quantum.
    pub(super) fuel: Reg,
    /// What is left of the interval, where some iterations are long.
    pub(super) left: Option<Reg>,
    /// Address of the cancel flag.
    pub(super) flag: Reg,
    /// Is the block not among the first?
    pub(super) late: Reg,
    pub(super) out_of_fuel: Label,
    pub(super) leave: Label,
}

pub(super) struct Writer<'k> {
    pub(super) asm: Asm,
    pub(super) kernel: &'k Kernel,
    pub(super) facts: &'k KernelFacts,
    pub(super) plan: SafetyPlan<'k>,
    pub(super) negations: Negations,
    pub(super) options: &'k Options,
    /// The first register of each value in `regs`.
    starts: Vec<u32>,
    regs: Vec<Reg>,
    /// The bits of values that are constants.
    pub(super) constants: Vec<Option<u64>>,
    /// Is every bit of the value looked at, a NaN's too?
    pub(super) exact: Vec<bool>,
    /// By parameter.
    pub(super) views: Vec<Option<View>>,
    /// Address of the shared arrays, and the offset of each.
    pub(super) shared: Option<Reg>,
    pub(super) shared_offsets: Vec<u32>,
    /// Address of the local arrays.
    pub(super) local: Option<Reg>,
    /// Ops before which shared memory is zeroed.
    pub(super) zero_at: HashSet<*const Op>,
    /// Is it zeroed at all?
    pub(super) zeroes: bool,
    /// Where the blocks of a cluster meet before they gather.
    pub(super) cluster_barriers: ClusterBarriers,
    /// How often they gathered.
    pub(super) phase: Option<Reg>,
    /// The policy by which the L2 cache evicts last.
    pub(super) keep: Option<Reg>,
    pub(super) cancel: Option<Cancel>,
    /// The address of the cancel flag, and the fuel.
    pub(super) guard: Option<(Reg, Reg)>,
    /// In a tile kernel.
    pub(super) tiles: Option<Box<Tiles<'k>>>,
    /// Is the code inside of a polled loop?
    pub(super) polled: bool,
    line: u32,
    pub(super) turns: bool,
}

impl<'k> Writer<'k> {
    fn new(facts: &'k KernelFacts, plan: SafetyPlan<'k>, options: &'k Options) -> Writer<'k> {
        let kernel = plan.ranges().kernel();
        let mut starts = Vec::with_capacity(kernel.values().len());
        let mut lanes = 0u32;
        for value in kernel.values() {
            starts.push(lanes);
            lanes += u32::from(value.ty.lanes());
        }
        let mut offset = 0u32;
        let shared_offsets = kernel
            .shared()
            .iter()
            .map(|array| {
                let at = offset;
                offset += array.bytes() as u32;
                at
            })
            .collect();
        Writer {
            asm: Asm::default(),
            kernel,
            facts,
            plan,
            negations: Negations::of(kernel),
            options,
            starts,
            regs: vec![Reg::NONE; lanes as usize],
            constants: vec![None; kernel.values().len()],
            exact: exact_values(kernel),
            views: Vec::new(),
            shared: None,
            shared_offsets,
            local: None,
            zero_at: HashSet::new(),
            zeroes: false,
            cluster_barriers: ClusterBarriers::default(),
            phase: None,
            keep: None,
            cancel: None,
            guard: None,
            tiles: None,
            polled: false,
            line: 0,
            turns: false,
        }
    }

    fn dynamic_shared(&self) -> u32 {
        if self.facts.shared_bytes > STATIC_SHARED { self.facts.shared_bytes as u32 } else { 0 }
    }

    fn kernel(&mut self, text: &mut String) -> Entry {
        let kernel = self.kernel;
        let symbol = format!("vir_{}", kernel.name());
        let params = artifact::layout(kernel, &[], self.plan.cancellable());
        self.prologue(&params);
        self.region(kernel.body());
        ins!(self, "ret");
        self.epilogue();

        let _ =
            write!(text, "\n// @{} at {}\n.visible .entry {symbol}(", kernel.name(), kernel.guest_address());
        if params.bytes > 0 {
            let _ = write!(text, "\n\t.param .align {} .b8 args[{}]\n", params.align(), params.bytes);
        }
        let [x, y, z] = kernel.block();
        let _ = writeln!(text, ")\n.reqntid {x}, {y}, {z}");
        // No target has fewer threads of a multiprocessor.
        let resident = kernel.resident().min(1024 / kernel.threads().max(1));
        if resident > 0 {
            let _ = writeln!(text, ".minnctapersm {resident}");
        }
        if kernel.cluster() > 1 {
            let _ = writeln!(text, ".explicitcluster\n.reqnctapercluster {}, 1, 1", kernel.cluster());
        }
        text.push_str("{\n");
        self.asm.declarations(text);
        let (shared, dynamic) = (self.facts.shared_bytes as u32, self.dynamic_shared());
        if shared > 0 && dynamic == 0 {
            let _ = writeln!(text, "\t.shared .align 16 .b8 arrays[{shared}];");
        }
        if kernel.local_bytes() > 0 {
            let _ = writeln!(text, "\t.local .align 16 .b8 {LOCAL}[{}];", kernel.local_bytes());
        }
        if !self.cluster_barriers.is_empty() {
            let _ = writeln!(text, "\t.shared .align 8 .b8 {BARRIERS}[{BARRIER_BYTES}];");
        }
        self.asm.write(text);
        text.push_str("}\n");
        Entry {
            kernel: kernel.name().to_owned(),
            symbol,
            block: kernel.block(),
            cluster: kernel.cluster(),
            params,
            static_shared: shared - dynamic
                + if self.cluster_barriers.is_empty() { 0 } else { BARRIER_BYTES },
            dynamic_shared: dynamic,
            work: self.plan.bound(),
            products: None,
        }
    }

    pub(super) fn prologue(&mut self, params: &ParamLayout) {
        for (param, slot) in self.kernel.params().iter().zip(&params.slots) {
            let at = |offset: u32| Arg::AtName("args", i64::from(offset));
            match (&param.kind, *slot) {
                (ParamKind::View(view), Slot::View { offset, rank }) => {
                    let generic = def!(self, B64, "ld.param.b64", at(offset));
                    let base = match view.surface {
                        // A handle.
                        true => generic,
                        false => def!(self, B64, "cvta.to.global.u64", generic),
                    };
                    let mut extents = Vec::new();
                    for (i, dim) in view.dims.iter().enumerate() {
                        extents.push(match dim {
                            Dim::Fixed(extent) => Extent::Fixed(*extent as i64),
                            Dim::Any { .. } => {
                                Extent::Reg(def!(self, B64, "ld.param.b64", at(offset + 8 + 8 * i as u32)))
                            }
                        });
                    }
                    let strides = (1..rank)
                        .map(|i| def!(self, B64, "ld.param.b64", at(offset + 8 * (rank + i))))
                        .collect();
                    self.views.push(Some(View { base, extents, strides }));
                }
                (ParamKind::Scalar { value, .. }, Slot::Scalar { offset, .. }) => {
                    let ty = self.kernel.type_of(*value).scalar();
                    let reg = match ty {
                        Scalar::Bool => {
                            let byte = def!(self, B32, "ld.param.u8", at(offset));
                            def!(self, Pred, "setp.ne.u32", byte, 0)
                        }
                        _ => {
                            let name = format!("ld.param.{}", memory_type(ty));
                            let reg = self.asm.new_reg(class_of(ty));
                            ins!(self, &name, reg, at(offset));
                            reg
                        }
                    };
                    self.set(*value, 0, reg);
                    self.views.push(None);
                }
                _ => self.views.push(None),
            }
        }
        self.prepare_policy();
        if let Some(guard) = params.guard {
            let generic = def!(self, B64, "ld.param.b64", Arg::AtName("args", i64::from(guard.stop)));
            let stop = def!(self, B64, "cvta.to.global.u64", generic);
            let all = def!(self, B64, "ld.param.b64", Arg::AtName("args", i64::from(guard.fuel)));
            self.guard = Some((stop, all));
            // The roles of a tile kernel count for themselves.
            if self.kernel.tile().is_none() {
                self.prepare_polls(stop, all);
            }
        }
        if self.facts.shared_bytes > 0 {
            let name = if self.dynamic_shared() > 0 { DYNAMIC_SHARED } else { "arrays" };
            self.shared = Some(def!(self, B32, "mov.u32", name));
            self.begin_shared();
        }
        if self.kernel.local_bytes() > 0 {
            self.local = Some(def!(self, B32, "mov.u32", LOCAL));
            if self.plan.zeroes_arrays() {
                self.zero_local();
            }
        }
    }

    /// A new register that holds a number, in the class of `ty`.
    pub(super) fn number(&mut self, ty: Scalar, bits: u64) -> Reg {
        let reg = self.asm.new_reg(class_of(ty));
        match (ty, reg.class) {
            (Scalar::F32, _) => ins!(self, "mov.b32", reg, Arg::F32(bits as u32)),
            (Scalar::F64, _) => ins!(self, "mov.b64", reg, Arg::F64(bits)),
            (_, Class::Pred) => ins!(self, "setp.ne.u32", reg, i64::from(bits as u32 & 1), 0),
            (_, Class::B16) => ins!(self, "mov.b16", reg, bits as i64),
            (_, Class::B32) => ins!(self, "mov.b32", reg, bits as i64),
            (_, Class::B64) => ins!(self, "mov.b64", reg, bits as i64),
        }
        reg
    }

    /// `target = source`.
    pub(super) fn mov(&mut self, target: Reg, source: Reg) {
        if target != source {
            let name = ["mov.pred", "mov.b16", "mov.b32", "mov.b64"][target.class as usize];
            ins!(self, name, target, source);
        }
    }

    pub(super) fn ty(&self, value: Value) -> vm_ir::Type {
        self.kernel.type_of(value)
    }

    pub(super) fn lanes(&self, value: Value) -> usize {
        usize::from(self.ty(value).lanes())
    }

    /// A lane of a value; a scalar is the same in every lane.
    pub(super) fn get(&self, value: Value, lane: usize) -> Reg {
        let lane = if self.ty(value).is_vector() { lane } else { 0 };
        self.regs[self.starts[value.index()] as usize + lane]
    }

    pub(super) fn all(&self, value: Value) -> Vec<Reg> {
        let start = self.starts[value.index()] as usize;
        self.regs[start..start + self.lanes(value)].to_vec()
    }

    pub(super) fn set(&mut self, value: Value, lane: usize, reg: Reg) {
        self.regs[self.starts[value.index()] as usize + lane] = reg;
    }

    pub(super) fn set_all(&mut self, value: Value, regs: &[Reg]) {
        regs.iter().enumerate().for_each(|(lane, reg)| self.set(value, lane, *reg));
    }

    pub(super) fn constant(&self, value: Value) -> Option<u64> {
        self.constants[value.index()]
    }

    /// Do all threads of a warp that are here have the same in it, whatever a guest writes meanwhile?
    pub(super) fn uniform(&self, value: Value) -> bool {
        self.facts.steady(value) <= Uniformity::Warp
    }

    pub(super) fn way(&self, op: Opcode, ty: Scalar, to: Scalar) -> Way {
        way(self.options.arch, self.options.version(), op, ty, to)
    }

    /// Has the target an instruction?
    pub(super) fn has(&self, feature: Feature) -> bool {
        self.options.has(feature)
    }

    pub(super) fn region(&mut self, region: &'k Region) {
        for op in &region.ops {
            self.op(op);
        }
        self.end_of_region(region);
    }

    fn op(&mut self, op: &'k Op) {
        if self.asm.instructions > MAX_INSTRUCTIONS {
            return;
        }
        if self.options.source.is_some() && op.line.0 != 0 && op.line.0 != self.line {
            self.line = op.line.0;
            let _ = writeln!(self.asm.text, "\t.loc 1 {} 0", op.line.0);
        }
        if self.zero_at.contains(&std::ptr::from_ref(op)) {
            self.zero_shared();
        }
        if !self.cluster_barriers.is_empty() {
            self.cluster_barrier(op);
        }
        self.before_op(op);
        match op.code.shape() {
            shape if shape.is_tile() => self.tile_op(op),
            Shape::If => self.if_op(op),
            Shape::For => self.for_op(op),
            Shape::While => self.while_op(op),
            Shape::Switch => self.switch_op(op),
            Shape::Load if self.tiles.is_some() => self.tile_load(op),
            Shape::Load => self.load(op),
            Shape::Store => self.store(op),
            Shape::LoadUniform => {
                ins!(self, "bar.sync", 0);
                self.load(op);
                ins!(self, "bar.sync", 0);
            }
            Shape::AtomicLoad | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas => {
                self.atomic(op)
            }
            Shape::Sync => self.sync(op),
            Shape::Shuffle => self.shuffle(op),
            Shape::Vote | Shape::Ballot => self.vote(op),
            Shape::Reduce(_) => self.reduce(op),
            Shape::Gather => self.gather(op),
            Shape::Extent | Shape::Id32 | Shape::Id64 => self.id(op),
            _ => self.values(op),
        }
    }

    fn sync(&mut self, op: &Op) {
        match (op.code, op.barrier_scope(), op.scope()) {
            (Opcode::Barrier, BarrierScope::Block, _) => ins!(self, "bar.sync", 0),
            (Opcode::Barrier, BarrierScope::Warp, _) => ins!(self, "bar.warp.sync", -1),
            (_, _, scope) => {
                let order = if op.order() == Order::SeqCst { "sc" } else { "acq_rel" };
                ins!(self, &format!("fence.{order}.{}", scope_name(scope)));
            }
        }
    }

    fn id(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let axis = op.axis();
        let letter = ["x", "y", "z"][axis as usize];
        let size = self.kernel.block()[axis as usize];
        let thread = format!("%tid.{letter}");
        let block = format!("%ctaid.{letter}");
        let reg = match op.code {
            Opcode::ThreadId => def!(self, B32, "mov.u32", &*thread),
            Opcode::BlockId => def!(self, B32, "mov.u32", &*block),
            Opcode::BlockDim => {
                self.constants[result.index()] = Some(u64::from(size));
                self.number(Scalar::I32, u64::from(size))
            }
            Opcode::GridDim => {
                let name = format!("%nctaid.{letter}");
                def!(self, B32, "mov.u32", &*name)
            }
            Opcode::GlobalId => {
                let thread = def!(self, B32, "mov.u32", &*thread);
                let block = def!(self, B32, "mov.u32", &*block);
                let wide = def!(self, B64, "cvt.u64.u32", thread);
                def!(self, B64, "mad.wide.u32", block, i64::from(size), wide)
            }
            Opcode::LocalIndex => self.local_index(),
            Opcode::LaneId => {
                let index = self.local_index();
                def!(self, B32, "and.b32", index, 31)
            }
            Opcode::WarpId => {
                let index = self.local_index();
                def!(self, B32, "shr.u32", index, 5)
            }
            Opcode::ClusterRank => self.cluster_rank(),
            Opcode::ClusterId => self.cluster_id(),
            Opcode::Clock => def!(self, B64, "mov.u64", "%clock64"),
            // The one left is `extent`.
            _ => {
                let dimension = op.immediates.first().map_or(0, |d| *d as usize);
                let view = op.place.and_then(|place| self.view(place));
                match view.and_then(|view| view.extents.get(dimension).copied()) {
                    Some(Extent::Reg(reg)) => reg,
                    Some(Extent::Fixed(extent)) => {
                        self.constants[result.index()] = Some(extent as u64);
                        self.number(Scalar::I64, extent as u64)
                    }
                    None => self.number(Scalar::I64, 0),
                }
            }
        };
        self.set(result, 0, reg);
    }

    pub(super) fn local_index(&mut self) -> Reg {
        let [x, y, z] = self.kernel.block();
        let mut index = None;
        for (name, size) in [("%tid.z", z), ("%tid.y", y), ("%tid.x", x)] {
            if size == 1 && (index.is_some() || name != "%tid.x") {
                continue;
            }
            let at = def!(self, B32, "mov.u32", name);
            index = Some(match index {
                None => at,
                Some(outer) => def!(self, B32, "mad.lo.u32", outer, i64::from(size), at),
            });
        }
        index.unwrap_or(Reg::NONE)
    }

    /// Ops on values alone, lane by lane.
    fn values(&mut self, op: &'k Op) {
        let Some(result) = op.result() else { return };
        let to = self.ty(result);
        match op.code.shape() {
            Shape::Const => {
                let bits = op.immediates.first().copied().unwrap_or(0);
                self.constants[result.index()] = Some(bits);
                let reg = self.number(to.scalar(), bits);
                (0..self.lanes(result)).for_each(|lane| self.set(result, lane, reg));
            }
            Shape::Splat => {
                self.constants[result.index()] = self.constant(op.operands[0]);
                let reg = self.get(op.operands[0], 0);
                (0..self.lanes(result)).for_each(|lane| self.set(result, lane, reg));
            }
            Shape::Make => {
                for (lane, value) in op.operands.iter().enumerate() {
                    let reg = self.get(*value, 0);
                    self.set(result, lane, reg);
                }
            }
            Shape::Extract => {
                let reg = self.get(op.operands[0], op.immediates[0] as usize);
                self.set(result, 0, reg);
            }
            Shape::Insert => {
                let mut regs = self.all(op.operands[0]);
                regs[op.immediates[0] as usize] = self.get(op.operands[1], 0);
                self.set_all(result, &regs);
            }
            Shape::Bitcast => self.bitcast(op.operands[0], result),
            _ => {
                let (from, scalar) = key(self.kernel, op);
                let mut seen: Vec<([Reg; 3], Reg)> = Vec::new();
                for lane in 0..self.lanes(result) {
                    let mut args = [Reg::NONE; 3];
                    for (arg, value) in args.iter_mut().zip(&op.operands) {
                        *arg = self.get(*value, lane);
                    }
                    // Lanes that are one register give one register.
                    let reg = match seen.iter().find(|(known, _)| *known == args) {
                        Some((_, reg)) => *reg,
                        None => {
                            let reg = self.value_op(op, from, scalar, args);
                            seen.push((args, reg));
                            reg
                        }
                    };
                    self.set(result, lane, reg);
                }
            }
        }
    }
}

/// The register class of a scalar.
pub(super) fn class_of(scalar: Scalar) -> Class {
    match scalar {
        Scalar::Bool => Class::Pred,
        Scalar::F16 | Scalar::Bf16 => Class::B16,
        Scalar::I64 | Scalar::F64 => Class::B64,
        _ => Class::B32,
    }
}

pub(super) fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Block => "cta",
        Scope::Device => "gpu",
        Scope::System => "sys",
    }
}

/// How a scalar is loaded and stored.
pub(super) fn memory_type(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::F16 | Scalar::Bf16 => "b16",
        _ => match scalar.bytes() {
            1 => "u8",
            2 => "u16",
            4 => "b32",
            _ => "b64",
        },
    }
}

/// Which values have every bit looked at: all but those that only arithmetic takes.
fn exact_values(kernel: &Kernel) -> Vec<bool> {
    fn walk(region: &Region, exact: &mut [bool]) {
        region.yields.iter().for_each(|v| exact[v.index()] = true);
        for op in &region.ops {
            let arithmetic = match op.code.shape() {
                Shape::Unary(_) => !matches!(op.code, Opcode::Neg | Opcode::Abs),
                Shape::Binary(_) | Shape::Ternary(_) | Shape::Compare(_) => true,
                Shape::Convert(from, ..) => from != Scalars::BITS && from != Scalars::INT,
                _ => false,
            };
            if !arithmetic {
                op.operands.iter().for_each(|v| exact[v.index()] = true);
            }
            op.regions.iter().for_each(|r| walk(r, exact));
        }
    }
    let mut exact = vec![false; kernel.values().len()];
    walk(kernel.body(), &mut exact);
    exact
}

#[cfg(test)]
mod tests {
    use super::super::size;
    use super::*;
    use crate::safety::Unroll;

    #[test]
    fn code_is_linear() {
        let options = Options::new("sm_90a".parse().unwrap());
        crate::growth::check("PTX", 1000, |valid| {
            let mut text = String::new();
            module(valid, &options, &mut text).unwrap();
            text.len() as u64
        });
    }

    /// Little of a guest's bytes comes to much code: it is refused before that is written.
    #[test]
    fn no_code_is_written_without_end() {
        let mut body = String::new();
        for n in 0..20_000 {
            let _ = writeln!(body, "%a{n} = pow %v, %v : vec16<f64>");
        }
        let text = format!(
            "vir 1\nkernel @k(%f: f64) at 0x0 block(32) {{\n%v = vec.splat %f : vec16<f64>\n{body}}}"
        );
        let valid = vm_ir::validate(vm_ir::text::parse(&text).unwrap(), vm_ir::Trust::Guest).unwrap();
        let options = Options::new("sm_90a".parse().unwrap());
        let mut text = String::new();
        let error = module(&valid, &options, &mut text).unwrap_err();
        assert_eq!(error.0[0].kind.code(), "too-large");
    }

    /// Code is no longer than it was counted to be beforehand, and what unrolling adds to it no more than it may.
    #[test]
    fn what_is_unrolled_is_bounded() {
        /// All instructions of a region, in all of its copies.
        fn size(plan: &SafetyPlan<'_>, region: &Region, copies: u64) -> u64 {
            let of = |op: &Op| {
                let each = match plan.loop_of(op).map(|planned| planned.unroll) {
                    Some(Unroll::Full(n)) => n,
                    Some(Unroll::Partial(n)) => n + 1,
                    _ => 1,
                };
                let inside = op.regions.iter().map(|region| size(plan, region, each * copies)).sum::<u64>();
                let own = size::instructions(plan.ranges().kernel(), op, plan.access(op));
                inside + copies * (own + if each > 1 { each * size::COPY } else { 0 })
            };
            region.ops.iter().map(of).sum()
        }
        let budget = super::super::safety(&Options::new("sm_90a".parse().unwrap())).unrolling.unwrap().budget;
        let (mut unrolled, mut longest) = (0, 0);
        for seed in 0..60 {
            let options = vm_ir::arbitrary::Options { inexact: seed % 2 == 0, ..Default::default() };
            let valid =
                vm_ir::validate(vm_ir::arbitrary::kernel(seed, options).0, vm_ir::Trust::Guest).unwrap();
            let options = Options::new(["sm_70", "sm_90a"][seed as usize / 2 % 2].parse().unwrap());
            let legal = crate::legalise::legalise(&valid, &crate::Target::Ptx(options.clone())).unwrap();
            let plan = &super::super::plans(&legal, &options).unwrap()[0];
            let kernel = plan.ranges().kernel();
            let mut once = 0;
            kernel.for_each_op(&mut |op| once += size::instructions(kernel, op, plan.access(op)));
            let planned = size(plan, kernel.body(), 1);
            assert!(planned <= once + budget, "seed {seed}: {planned}, {once} without");
            let mut text = String::new();
            module(&legal, &options, &mut text).unwrap();
            let written = text.lines().filter(|line| line.ends_with(';')).count() as u64;
            // With parameters and registers.
            assert!(written <= planned + 200, "seed {seed}: {written} of {planned}");
            (unrolled, longest) = (unrolled + u32::from(planned > once), longest.max(written));
        }
        assert!(unrolled > 30 && longest > 1 << 12, "{unrolled} {longest}");
    }
}
