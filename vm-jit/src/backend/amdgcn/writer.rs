//! A module's text: kernels, parameters, and the walk over ops.

use super::Options;
use super::control::{Cancel, State};
use super::tile::{self, Tiles};
use crate::artifact::{self, Entry};
use crate::legal::key;
use crate::reject::{Reject, RejectKind, Rejected};
use crate::safety::SafetyPlan;
use std::collections::BTreeSet;
use std::fmt::{self, Display, Write as _};
use vm_abi::{ParamLayout, Slot};
use vm_ir::module::{Op, ParamKind, Region};
use vm_ir::op::{BarrierScope, Opcode, Order, Scope, Shape};
use vm_ir::valid::KernelFacts;
use vm_ir::view::Dim;
use vm_ir::{Kernel, Scalar, ValidModule, Value};

/// A thread's local arrays, one behind the other.
pub(super) const LOCAL: &str = "%local";

/// Instructions that a module may come to.
const MAX_INSTRUCTIONS: u32 = 1 << 18;

/// What a launch fills in behind the parameters lies where code objects of version 5 have it; every LLVM makes that version.
const HEAD: &str = "target triple = \"amdgcn-amd-amdhsa\"\n!llvm.module.flags = !{!0}\n\
    !0 = !{i32 1, !\"amdhsa_code_object_version\", i32 500}\n";

/// Where what a launch fills in behind the parameters lies.
const IMPLICIT: &str = "llvm.amdgcn.implicitarg.ptr";

/// Writes all kernels.
///
/// # Errors
/// They come to too many instructions; no more are then written.
pub(super) fn module(
    module: &ValidModule,
    options: &Options,
    plans: Vec<SafetyPlan<'_>>,
) -> Result<(String, Vec<Entry>), Rejected> {
    let mut text = String::from(HEAD);
    let (mut declared, mut entries, mut next) = (BTreeSet::new(), Vec::new(), 0);
    for ((kernel, facts), plan) in module.kernels_with_facts().zip(plans) {
        let mut writer = Writer::new(facts, plan, options, entries.len());
        (writer.next, writer.declared) = (next, declared);
        entries.push(writer.kernel(&mut text));
        if writer.is_too_long() {
            let (needed, available) = (writer.next.into(), MAX_INSTRUCTIONS.into());
            let kind = RejectKind::Size { what: "instructions", needed, available };
            return Err(Rejected(vec![Reject::new(kernel, kernel.line().0, kind)]));
        }
        (next, declared) = (writer.next, writer.declared);
    }
    text.push('\n');
    declared.iter().for_each(|line| text.push_str(line));
    Ok((text, entries))
}

/// A lane of a value: a register of LLVM, or the bits of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Val {
    Reg(u32),
    Bits(u64),
    /// Zero, of any type.
    Zero,
}

impl Display for Val {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Val::Reg(number) => write!(f, "%t{number}"),
            Val::Bits(bits) => write!(f, "{bits}"),
            Val::Zero => f.write_str("zeroinitializer"),
        }
    }
}

/// A place to branch to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(u32);

impl Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%l{}", self.0)
    }
}

/// The integer that a lane of the type is written as.
pub(super) fn int(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::Bool => "i1",
        _ => match scalar.bytes() {
            1 => "i8",
            2 => "i16",
            4 => "i32",
            _ => "i64",
        },
    }
}

/// LLVM's float of the type.
pub(super) fn float(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::F16 => "half",
        Scalar::Bf16 => "bfloat",
        Scalar::F64 => "double",
        _ => "float",
    }
}

/// A view's parameters.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) base: Val,
    pub(super) extents: Vec<Val>,
    /// In bytes, of all dimensions but the last.
    pub(super) strides: Vec<Val>,
}

pub(super) struct Writer<'k> {
    text: String,
    next: u32,
    /// Intrinsics that are called.
    pub(super) declared: BTreeSet<String>,
    /// The block at hand.
    pub(super) at: Label,
    pub(super) kernel: &'k Kernel,
    facts: &'k KernelFacts,
    pub(super) plan: SafetyPlan<'k>,
    pub(super) options: &'k Options,
    /// The first lane of each value in `lanes`.
    starts: Vec<u32>,
    lanes: Vec<Val>,
    /// By parameter.
    pub(super) views: Vec<Option<View>>,
    /// The name of the shared arrays, and the offset of each.
    pub(super) shared: String,
    pub(super) shared_offsets: Vec<u32>,
    pub(super) cancel: Option<Cancel>,
    pub(super) state: State,
    pub(super) tiles: Option<Box<Tiles<'k>>>,
    /// Threads of a block.
    block: [u32; 3],
    /// Is the code inside of a polled loop?
    pub(super) polled: bool,
}

impl<'k> Writer<'k> {
    fn new(facts: &'k KernelFacts, plan: SafetyPlan<'k>, options: &'k Options, number: usize) -> Writer<'k> {
        let kernel = plan.ranges().kernel();
        let (mut starts, mut lanes) = (Vec::with_capacity(kernel.values().len()), 0u32);
        for value in kernel.values() {
            starts.push(lanes);
            lanes += u32::from(value.ty.lanes());
        }
        let offsets = kernel.shared().iter().scan(0, |next, array| {
            let at = *next;
            *next += array.bytes() as u32;
            Some(at)
        });
        Writer {
            text: String::new(),
            next: 0,
            declared: BTreeSet::new(),
            at: Label(0),
            kernel,
            facts,
            options,
            starts,
            lanes: vec![Val::Bits(0); lanes as usize],
            views: Vec::new(),
            shared: format!("@arrays{number}"),
            shared_offsets: offsets.collect(),
            cancel: None,
            state: State::default(),
            tiles: None,
            block: tile::block(kernel, options.chip).unwrap_or(kernel.block()),
            polled: false,
            plan,
        }
    }

    pub(super) fn is_too_long(&self) -> bool {
        self.next > MAX_INSTRUCTIONS
    }

    fn kernel(&mut self, text: &mut String) -> Entry {
        let kernel = self.kernel;
        let symbol = format!("vir_{}", kernel.name());
        let params = artifact::layout(kernel, &[], self.plan.cancellable());
        let begin = self.label();
        self.place(begin);
        self.prologue(&params);
        self.begin_tiles();
        self.region(kernel.body());
        self.line("ret void");
        self.epilogue();
        let [x, y, z] = self.block;
        let shared = match &self.tiles {
            Some(tiles) => tiles.shared_bytes(),
            None => self.facts.shared_bytes as u32,
        };
        let _ = writeln!(text, "\n; @{} at {}", kernel.name(), kernel.guest_address());
        if shared > 0 {
            let name = &self.shared;
            let _ = writeln!(text, "{name} = internal addrspace(3) global [{shared} x i8] poison, align 16");
        }
        let _ = write!(text, "define amdgpu_kernel void @{symbol}(");
        if params.bytes > 0 {
            let _ = write!(
                text,
                "ptr addrspace(4) byref([{} x i8]) align {} %params",
                params.bytes,
                params.align()
            );
        }
        let _ = writeln!(
            text,
            ") nounwind \"target-cpu\"=\"{}\" \"target-features\"=\"{}\" \"amdgpu-flat-work-group-size\"=\"{n},{n}\" \
             \"uniform-work-group-size\"=\"true\"{} {{\n{}}}",
            self.options.chip,
            self.options.chip.features(),
            self.unused(),
            self.text,
            n = x * y * z,
        );
        Entry {
            kernel: kernel.name().to_owned(),
            symbol,
            block: self.block,
            cluster: kernel.cluster(),
            params,
            static_shared: shared,
            dynamic_shared: 0,
            work: self.plan.bound(),
            products: None,
        }
    }

    /// What lies in the parameters at an offset.
    fn param(&mut self, ty: &str, offset: u32) -> Val {
        let at = self.def(format_args!("getelementptr i8, ptr addrspace(4) %params, i32 {offset}"));
        self.def(format_args!("load {ty}, ptr addrspace(4) {at}, !invariant.load !{{}}"))
    }

    fn prologue(&mut self, params: &ParamLayout) {
        let local = self.kernel.local_bytes();
        if local > 0 {
            self.line(format_args!("{LOCAL} = alloca [{local} x i8], align 16, addrspace(5)"));
        }
        for (param, slot) in self.kernel.params().iter().zip(&params.slots) {
            match (&param.kind, *slot) {
                (ParamKind::View(view), Slot::View { offset, rank }) => {
                    let base = self.param("ptr addrspace(1)", offset);
                    let extents = view.dims.iter().zip(0..).map(|(dim, i)| match dim {
                        Dim::Fixed(extent) => Val::Bits(*extent),
                        Dim::Any { .. } => self.param("i64", offset + 8 + 8 * i),
                    });
                    let extents = extents.collect();
                    let strides = (1..rank).map(|i| self.param("i64", offset + 8 * (rank + i))).collect();
                    self.views.push(Some(View { base, extents, strides }));
                }
                (ParamKind::Scalar { value, .. }, Slot::Scalar { offset, .. }) => {
                    let scalar = self.ty(*value).scalar();
                    let reg = match scalar {
                        Scalar::Bool => {
                            let byte = self.param("i8", offset);
                            self.def(format_args!("icmp ne i8 {byte}, 0"))
                        }
                        _ => self.param(int(scalar), offset),
                    };
                    self.set(*value, 0, reg);
                    self.views.push(None);
                }
                _ => self.views.push(None),
            }
        }
        if let Some(guard) = params.guard {
            let flag = self.param("ptr addrspace(1)", guard.stop);
            let fuel = self.param("i64", guard.fuel);
            self.prepare_polls(flag, fuel);
        }
        if self.kernel.local_bytes() > 0 && self.plan.zeroes_arrays() {
            self.zero_local();
        }
        if self.facts.shared_bytes > 0 && self.plan.zeroes_arrays() {
            self.zero_shared();
        }
    }

    /// Zeroes all shared arrays, the threads together.
    fn zero_shared(&mut self) {
        let (bytes, threads) = (self.facts.shared_bytes.next_multiple_of(4), self.kernel.threads());
        let (head, store, done) = (self.label(), self.label(), self.label());
        let (next, from) = (self.reserve(), self.at);
        let index = self.local_index();
        let first = self.def(format_args!("shl i32 {index}, 2"));
        self.br(head);
        self.place(head);
        let at = self.def(format_args!("phi i32 [ {first}, {from} ], [ {next}, {store} ]"));
        let more = self.def(format_args!("icmp ult i32 {at}, {bytes}"));
        self.br_if(more, store, done);
        self.place(store);
        let shared = self.shared.clone();
        let to = self.def(format_args!("getelementptr i8, ptr addrspace(3) {shared}, i32 {at}"));
        self.line(format_args!("store i32 0, ptr addrspace(3) {to}, align 4"));
        self.line(format_args!("{next} = add i32 {at}, {}", 4 * threads));
        self.br(head);
        self.place(done);
        self.barrier();
    }

    /// Zeroes a thread's local arrays.
    fn zero_local(&mut self) {
        let (bytes, from) = (self.kernel.local_bytes(), self.at);
        let (head, done, next) = (self.label(), self.label(), self.reserve());
        self.br(head);
        self.place(head);
        let at = self.def(format_args!("phi i32 [ 0, {from} ], [ {next}, {head} ]"));
        let to = self.def(format_args!("getelementptr i8, ptr addrspace(5) {LOCAL}, i32 {at}"));
        self.line(format_args!("store <4 x i32> zeroinitializer, ptr addrspace(5) {to}, align 16"));
        self.line(format_args!("{next} = add i32 {at}, 16"));
        let more = self.def(format_args!("icmp ult i32 {next}, {bytes}"));
        self.br_if(more, head, done);
        self.place(done);
    }

    /// A line of text.
    pub(super) fn line(&mut self, text: impl Display) {
        let _ = writeln!(self.text, "  {text}");
    }

    /// A register to be defined later.
    pub(super) fn reserve(&mut self) -> Val {
        self.next += 1;
        Val::Reg(self.next)
    }

    /// A new register.
    pub(super) fn def(&mut self, text: impl Display) -> Val {
        let reg = self.reserve();
        self.line(format_args!("{reg} = {text}"));
        reg
    }

    /// Gives a register that was reserved its value.
    pub(super) fn define(&mut self, reg: Val, ty: &str, value: Val) {
        self.line(format_args!("{reg} = bitcast {ty} {value} to {ty}"));
    }

    fn declare(&mut self, ty: &str, name: &str, args: &[(&str, Val)]) -> String {
        let types: Vec<&str> = args.iter().map(|(ty, _)| *ty).collect();
        self.declared.insert(format!("declare {ty} @{name}({})\n", types.join(", ")));
        let args: Vec<String> = args.iter().map(|(ty, value)| format!("{ty} {value}")).collect();
        format!("call {ty} @{name}({})", args.join(", "))
    }

    /// Calls an intrinsic.
    pub(super) fn call(&mut self, ty: &str, name: &str, args: &[(&str, Val)]) -> Val {
        let text = self.declare(ty, name, args);
        self.def(text)
    }

    pub(super) fn call_void(&mut self, name: &str) {
        self.call_void_with(name, &[]);
    }

    pub(super) fn call_void_with(&mut self, name: &str, args: &[(&str, Val)]) {
        let text = self.declare("void", name, args);
        self.line(text);
    }

    pub(super) fn label(&mut self) -> Label {
        self.next += 1;
        Label(self.next)
    }

    /// Begins a block.
    pub(super) fn place(&mut self, label: Label) {
        let _ = writeln!(self.text, "l{}:", label.0);
        self.at = label;
    }

    pub(super) fn br(&mut self, to: Label) {
        self.line(format_args!("br label {to}"));
    }

    pub(super) fn br_if(&mut self, condition: Val, then: Label, other: Label) {
        self.line(format_args!("br i1 {condition}, label {then}, label {other}"));
    }

    pub(super) fn ty(&self, value: Value) -> vm_ir::Type {
        self.kernel.type_of(value)
    }

    pub(super) fn lanes(&self, value: Value) -> usize {
        usize::from(self.ty(value).lanes())
    }

    /// A lane of a value; a scalar is the same in every lane.
    pub(super) fn get(&self, value: Value, lane: usize) -> Val {
        let lane = if self.ty(value).is_vector() { lane } else { 0 };
        self.lanes[self.starts[value.index()] as usize + lane]
    }

    pub(super) fn set(&mut self, value: Value, lane: usize, reg: Val) {
        self.lanes[self.starts[value.index()] as usize + lane] = reg;
    }

    /// All lanes of values, with the integers that they are written as.
    pub(super) fn all_of(&self, values: &[Value]) -> Vec<(&'static str, Val)> {
        let lanes = |value: &Value| {
            let (ty, value) = (int(self.ty(*value).scalar()), *value);
            (0..self.lanes(value)).map(move |lane| (ty, self.get(value, lane)))
        };
        values.iter().flat_map(lanes).collect()
    }

    pub(super) fn set_each(&mut self, values: &[Value], lanes: &[Val]) {
        let mut lanes = lanes.iter();
        for value in values {
            for (lane, reg) in (0..self.lanes(*value)).zip(lanes.by_ref()) {
                self.set(*value, lane, *reg);
            }
        }
    }

    pub(super) fn region(&mut self, region: &'k Region) {
        for op in &region.ops {
            if !self.is_too_long() {
                self.op(op);
            }
        }
    }

    fn op(&mut self, op: &'k Op) {
        match op.code.shape() {
            Shape::If => self.if_op(op),
            Shape::For => self.for_op(op),
            Shape::While => self.while_op(op),
            Shape::Switch => self.switch_op(op),
            Shape::Load if self.tiles.is_some() => self.load_for_all(op),
            Shape::Load => self.load(op),
            Shape::Store => self.store(op),
            Shape::LoadUniform => {
                self.barrier();
                self.load(op);
                self.barrier();
            }
            Shape::AtomicLoad | Shape::AtomicStore | Shape::AtomicRmw(_) | Shape::AtomicCas => {
                self.atomic(op);
            }
            Shape::Sync => self.sync(op),
            Shape::Shuffle => self.shuffle(op),
            Shape::Vote | Shape::Ballot => self.vote(op),
            Shape::Reduce(_) => self.reduce(op),
            Shape::Extent | Shape::Id32 | Shape::Id64 => self.id(op),
            shape if shape.is_tile() => self.tile_op(op),
            _ => self.values(op),
        }
    }

    pub(super) fn block_threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// The block's number in its cluster, whose blocks run by themselves.
    pub(super) fn cluster_rank(&mut self) -> Val {
        match self.kernel.cluster() {
            1 => Val::Bits(0),
            blocks => {
                let block = self.block("x");
                self.def(format_args!("urem i32 {block}, {blocks}"))
            }
        }
    }

    pub(super) fn barrier(&mut self) {
        self.line("fence syncscope(\"workgroup\") release");
        self.call_void("llvm.amdgcn.s.barrier");
        self.line("fence syncscope(\"workgroup\") acquire");
    }

    fn sync(&mut self, op: &Op) {
        match (op.code, op.barrier_scope()) {
            (Opcode::Barrier, BarrierScope::Block) => self.barrier(),
            (Opcode::Barrier, BarrierScope::Warp) => {
                self.line("fence syncscope(\"wavefront\") release");
                self.call_void("llvm.amdgcn.wave.barrier");
                self.line("fence syncscope(\"wavefront\") acquire");
            }
            _ => {
                let order = match op.order() {
                    Order::Acquire => "acquire",
                    Order::Release => "release",
                    Order::Relaxed | Order::AcqRel => "acq_rel",
                    Order::SeqCst => "seq_cst",
                };
                self.line(format_args!("fence {}{order}", scope_of(op)));
            }
        }
    }

    fn id(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let axis = op.axis();
        let letter = ["x", "y", "z"][axis as usize];
        let size = u64::from(self.block[axis as usize]);
        let reg = match op.code {
            Opcode::ThreadId => self.thread(letter),
            Opcode::BlockId => self.block(letter),
            Opcode::BlockDim => Val::Bits(size),
            Opcode::GridDim => {
                // Launches fill in what lies behind the parameters: first the blocks of the grid.
                let implicit = self.call("ptr addrspace(4)", IMPLICIT, &[]);
                let at = 4 * axis as u32;
                let at = self.def(format_args!("getelementptr i8, ptr addrspace(4) {implicit}, i32 {at}"));
                self.def(format_args!("load i32, ptr addrspace(4) {at}, align 4"))
            }
            Opcode::GlobalId => {
                let (thread, block) = (self.thread(letter), self.block(letter));
                let [thread, block] =
                    [thread, block].map(|id| self.def(format_args!("zext i32 {id} to i64")));
                let first = self.def(format_args!("mul nuw nsw i64 {block}, {size}"));
                self.def(format_args!("add nuw nsw i64 {first}, {thread}"))
            }
            Opcode::LocalIndex => self.local_index(),
            Opcode::LaneId => {
                let index = self.local_index();
                self.def(format_args!("and i32 {index}, 31"))
            }
            Opcode::WarpId => {
                let index = self.local_index();
                self.def(format_args!("lshr i32 {index}, 5"))
            }
            Opcode::ClusterRank => self.cluster_rank(),
            Opcode::ClusterId => match self.kernel.cluster() {
                1 => self.block("x"),
                blocks => {
                    let block = self.block("x");
                    self.def(format_args!("udiv i32 {block}, {blocks}"))
                }
            },
            Opcode::Clock => self.call("i64", "llvm.readcyclecounter", &[]),
            // The one left is `extent`.
            _ => {
                let dimension = op.immediates.first().map_or(0, |d| *d as usize);
                let view = op.place.and_then(|place| self.view(place));
                view.and_then(|view| view.extents.get(dimension).copied()).unwrap_or(Val::Bits(0))
            }
        };
        self.set(result, 0, reg);
    }

    /// What a wave need not be given when it begins: LLVM keeps room for all that is not named.
    fn unused(&self) -> String {
        let [_, y, z] = self.block;
        let implicit = self.declared.iter().any(|line| line.contains(IMPLICIT));
        let unused = [
            (true, "dispatch-ptr"),
            (true, "queue-ptr"),
            (true, "dispatch-id"),
            (true, "hostcall-ptr"),
            (true, "heap-ptr"),
            (true, "multigrid-sync-arg"),
            (true, "default-queue"),
            (true, "completion-action"),
            (!implicit, "implicitarg-ptr"),
            (y == 1, "workitem-id-y"),
            (z == 1, "workitem-id-z"),
        ];
        unused.iter().filter(|(is, _)| *is).map(|(_, name)| format!(" \"amdgpu-no-{name}\"")).collect()
    }

    fn thread(&mut self, axis: &str) -> Val {
        let size = ["x", "y", "z"].iter().position(|name| *name == axis).map(|at| self.block[at]);
        if size == Some(1) {
            return Val::Bits(0);
        }
        self.call("i32", &format!("llvm.amdgcn.workitem.id.{axis}"), &[])
    }

    pub(super) fn block(&mut self, axis: &str) -> Val {
        self.call("i32", &format!("llvm.amdgcn.workgroup.id.{axis}"), &[])
    }

    pub(super) fn local_index(&mut self) -> Val {
        let [x, y, z] = self.block;
        let mut index = self.thread("x");
        for (axis, size, inner) in [("y", y, x), ("z", z, x * y)] {
            if size > 1 {
                let at = self.thread(axis);
                let at = self.def(format_args!("mul nuw nsw i32 {at}, {inner}"));
                index = self.def(format_args!("add nuw nsw i32 {index}, {at}"));
            }
        }
        index
    }

    /// Ops on values alone, lane by lane.
    fn values(&mut self, op: &'k Op) {
        let Some(result) = op.result() else { return };
        let lanes = self.lanes(result);
        match op.code.shape() {
            Shape::Const => {
                let bits = Val::Bits(op.immediates.first().copied().unwrap_or(0));
                (0..lanes).for_each(|lane| self.set(result, lane, bits));
            }
            Shape::Splat => {
                let reg = self.get(op.operands[0], 0);
                (0..lanes).for_each(|lane| self.set(result, lane, reg));
            }
            Shape::Make => {
                let all = self.all_of(&op.operands);
                all.iter().enumerate().for_each(|(lane, (_, reg))| self.set(result, lane, *reg));
            }
            Shape::Extract => {
                let reg = self.get(op.operands[0], op.immediates[0] as usize);
                self.set(result, 0, reg);
            }
            Shape::Insert => {
                let all = self.all_of(&op.operands[..1]);
                all.iter().enumerate().for_each(|(lane, (_, reg))| self.set(result, lane, *reg));
                let reg = self.get(op.operands[1], 0);
                self.set(result, op.immediates[0] as usize, reg);
            }
            Shape::Bitcast => self.bitcast(op.operands[0], result),
            _ => {
                let (from, to) = key(self.kernel, op);
                for lane in 0..lanes {
                    let mut args = [Val::Bits(0); 3];
                    for (arg, value) in args.iter_mut().zip(&op.operands) {
                        *arg = self.get(*value, lane);
                    }
                    let reg = self.value_op(op, from, to, args);
                    self.set(result, lane, reg);
                }
            }
        }
    }

    /// The same bits in lanes of another width, the lowest first.
    fn bitcast(&mut self, value: Value, result: Value) {
        let (from, to) = (self.ty(value).scalar(), self.ty(result).scalar());
        let (parts, lanes) = (self.all_of(&[value]), self.lanes(result));
        let (narrow, wide) = (from.bits().min(to.bits()), from.bits().max(to.bits()));
        let per = (wide / narrow) as usize;
        for lane in 0..lanes {
            let reg = match from.bits().cmp(&to.bits()) {
                std::cmp::Ordering::Equal => parts[lane].1,
                std::cmp::Ordering::Greater => {
                    let (whole, by) = (parts[lane / per].1, narrow * (lane % per) as u32);
                    let shifted = self.def(format_args!("lshr {} {whole}, {by}", int(from)));
                    self.def(format_args!("trunc {} {shifted} to {}", int(from), int(to)))
                }
                std::cmp::Ordering::Less => {
                    let mut whole = Val::Bits(0);
                    for (at, (ty, part)) in parts[lane * per..][..per].iter().enumerate() {
                        let part = self.def(format_args!("zext {ty} {part} to {}", int(to)));
                        let by = narrow * at as u32;
                        let part = self.def(format_args!("shl {} {part}, {by}", int(to)));
                        whole = self.def(format_args!("or {} {whole}, {part}", int(to)));
                    }
                    whole
                }
            };
            self.set(result, lane, reg);
        }
    }
}

/// The threads that an atomic or a fence is about; nothing for all that there are.
pub(super) fn scope_of(op: &Op) -> &'static str {
    match op.scope() {
        Scope::Block => "syncscope(\"workgroup\") ",
        Scope::Device => "syncscope(\"agent\") ",
        Scope::System => "",
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Chip, Options, write};

    #[test]
    fn code_is_linear() {
        crate::growth::check("LLVM IR", 1000, |valid| {
            let artifact = write(valid, &Options { chip: Chip::Gfx942 }, String::new()).unwrap();
            artifact.code.len() as u64
        });
    }
}
