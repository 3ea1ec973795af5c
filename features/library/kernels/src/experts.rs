//! The loss that balances the load of a mixture's experts, and its gradient.

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Workspace};
use crate::columns::of_slices;
use crate::family::Resources;
use crate::flat::{Fill, block_add, floats};
use crate::gather::{blocks, check_index};
use crate::graph::{self, NoGraph};
use crate::pieces::{Pieces, THREADS, lanes};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock};
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// The most experts, whose counts a block has in shared memory.
const MOST: u64 = 8192;

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Experts {
    /// Counts indices. Its parameters: `indices`, `[n]`; `partial`, i32, `[blocks, experts]`; the indices of a block, i64.
    Count {
        /// What an index is.
        index: Scalar,
        /// Experts that there is room for.
        room: u32,
    },
    /// The loss, by one block. Its parameters: `slices`, f32, `[slices, experts]`; `partial`; `loss`, f32, `[1]`; `counts` and `means`, f32, `[experts]`; 1 / T and α N / (T k), f32.
    Loss,
    /// The gradient of the probabilities. Its parameters: `counts`, f32, `[experts]`; `dloss`, f32, `[1]`; `dprobs`, `[tokens, experts]`; α N / (T² k), f32.
    Gradient {
        /// What dprobs holds.
        element: Scalar,
        /// Is it added to what is there?
        accumulate: bool,
        /// How a row is taken.
        pieces: Pieces,
    },
}

impl Experts {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        match self {
            Experts::Count { index, room } => format!("experts_count_{index}_{room}"),
            Experts::Loss => "experts_loss".into(),
            Experts::Gradient { element, accumulate, pieces } => {
                let plus = if *accumulate { "_plus" } else { "" };
                format!("experts_gradient_{element}_{}{plus}", pieces.suffix())
            }
        }
    }

    /// Its kernel.
    ///
    /// # Errors
    /// More room than a block has.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        match *self {
            Experts::Count { index, room } => count(k, index, room),
            Experts::Loss => loss(k),
            Experts::Gradient { element, accumulate, pieces } => gradient(k, element, accumulate, pieces),
        }
        block.kernel()
    }
}

fn count(k: Builder<'_>, index: Scalar, room: u32) {
    let indices = k.view("indices", index, 1, Access::Read);
    let partial = k.view("partial", Scalar::I32, 2, Access::Write);
    let per_block = k.scalar_in("per_block", Type::I64, 1, 1 << 40);
    let counts = k.shared("counts", Scalar::I32, &[room]);
    let t = k.thread_id(Axis::X).to(Scalar::I64);
    let experts = partial.extent(1).min(i64::from(room));
    let block = k.block_id(Axis::X).to(Scalar::I64);
    k.range(t, i64::from(room)).step(THREADS).each(|expert| counts.at([expert]).store(0));
    k.barrier();
    let from = block * per_block;
    k.range(from + t, (from + per_block).min(indices.extent(0))).step(THREADS).each(|at| {
        let expert = indices.at([at]).load().to(Scalar::I64);
        k.if_(expert.ge(0) & expert.lt(experts), || {
            counts.at([expert]).atomic_add(1);
        });
    });
    k.barrier();
    k.range(t, experts)
        .step(THREADS)
        .each(|expert| partial.at([block, expert]).store(counts.at([expert]).load()));
}

fn loss(k: Builder<'_>) {
    let slices = k.view("slices", Scalar::F32, 2, Access::Read);
    let partial = k.view("partial", Scalar::I32, 2, Access::Read);
    let loss = k.view_of("loss", ViewType::new(Scalar::F32, 1, Access::Write));
    let [counts, means] = ["counts", "means"].map(|name| k.view(name, Scalar::F32, 1, Access::Write));
    let [inverse, scale] = ["inverse", "factor"].map(|name| k.scalar(name, Type::F32));
    let scratch = k.shared("sums", Scalar::F32, &[THREADS / 32]);
    let t = k.thread_id(Axis::X).to(Scalar::I64);
    let experts = slices.extent(1).min(partial.extent(1)).min(counts.extent(0)).min(means.extent(0));
    let mine = k.range(t, experts).step(THREADS).fold(k.f32(0.0), |expert, sum| {
        let all = k.range(k.i64(0), slices.extent(0)).unroll(8);
        let probability = all.fold(k.f32(0.0), |slice, sum| sum + slices.at([slice, expert]).load());
        let all = k.range(k.i64(0), partial.extent(0)).unroll(8);
        let number = all.fold(k.i32(0), |block, sum| sum + partial.at([block, expert]).load());
        let (number, mean) = (number.to(Scalar::F32), probability * inverse);
        counts.at([expert]).store(number);
        means.at([expert]).store(mean);
        number.fma(mean, sum)
    });
    let sum = block_add(k, mine, scratch, THREADS / 32);
    k.if_(t.eq(0), || loss.at([k.i64(0)]).store(sum * scale));
}

fn gradient(k: Builder<'_>, element: Scalar, accumulate: bool, pieces: Pieces) {
    let counts = pieces.view(k, "counts", Scalar::F32, 1, Access::Read);
    let upstream = k.view("dloss", Scalar::F32, 1, Access::Read);
    let access = if accumulate { Access::ReadWrite } else { Access::Write };
    let probabilities = pieces.view(k, "dprobs", element, 2, access);
    let scale = k.scalar("factor", Type::F32);
    let (row, first) = pieces.place(k);
    k.if_(row.lt(probabilities.extent(0)), || {
        let factor = upstream.at([k.i64(0)]).load() * scale;
        let factor = if pieces.lanes > 1 { factor.splat(pieces.lanes) } else { factor };
        pieces.each(k, first, probabilities.extent(1), &|columns| {
            let value = |column| {
                let value = pieces.load(counts, [column]) * factor;
                let value = match accumulate {
                    true => value + pieces.load(probabilities, [row, column]).to(Scalar::F32),
                    false => value,
                };
                value.to(element)
            };
            let values: Vec<_> = columns.iter().copied().map(value).collect();
            for (column, value) in columns.iter().zip(values) {
                probabilities.at([row, *column]).store(value);
            }
        });
    });
}

fn check(function: &'static str, experts: u64) -> Result<(), CallError> {
    if experts > MOST {
        return Err(CallError::Unsupported {
            function,
            what: format!("{experts} experts; at most {MOST} are taken"),
        });
    }
    Ok(())
}

/// The auxiliary load-balancing loss of a mixture of experts (Fedus et al., Switch Transformers, equations 4 to 6), of T tokens that k of N experts each were chosen for:
///
/// ```text
/// loss = α · N · Σ f_i · P_i,  f_i = counts_i / (T · k),  P_i = Σ probs[t, i] / T
/// ```
///
/// With k = 1 that is the paper's; a loss of even loads is α. Indices out of range count for no expert. Its order of additions depends on the extents alone.
///
/// Its buffers: `router_probs`, `[tokens, experts]`; `expert_indices`, `[tokens, top_k]`; `aux_loss`, f32, `[1]`; `f_counts`, f32, `[experts]`: how often each was chosen; `p_means`, f32,
/// `[experts]`: P.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AuxLoss {
    /// T.
    pub tokens: u64,
    /// N: up to 8,192.
    pub experts: u64,
    /// k.
    pub top_k: u64,
    /// α.
    pub alpha: f32,
    /// What a probability is: f32, f16 or bf16. Sums are of f32.
    pub element: Scalar,
    /// What an index is: i32 or i64.
    pub index: Scalar,
    /// Bytes to whose multiples the probabilities are aligned; 16 is fast.
    pub align: u32,
}

impl Function for AuxLoss {
    fn buffers(&self) -> Vec<Buffer> {
        let AuxLoss { tokens, experts, top_k, element, index, .. } = *self;
        let float = |name, extents: &[u64], access| Buffer::new(name, Scalar::F32, extents, access);
        vec![
            Buffer::new("router_probs", element, &[tokens, experts], Access::Read),
            Buffer::new("expert_indices", index, &[tokens, top_k], Access::Read),
            float("aux_loss", &[1], Access::Write),
            float("f_counts", &[experts], Access::Write),
            float("p_means", &[experts], Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::experts::loss(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "aux_loss";
        /// The least indices of a block, and the most blocks.
        const LEAST: u64 = 4096;
        const BLOCKS: u64 = 256;
        let AuxLoss { tokens, experts, top_k, alpha, element, index, align } = *self;
        check_index(NAME, index)?;
        floats(NAME, &[element])?;
        check(NAME, experts)?;
        if [tokens, experts, top_k].contains(&0) {
            // The sum of nothing.
            let mut call =
                Fill { sizes: vec![1, experts, experts], element: Scalar::F32, align: 4, value: 0.0 }
                    .call(resources)?;
            for operand in call.launches.iter_mut().flat_map(|launch| &mut launch.operands) {
                if let Operand::Buffer(buffer, _) = operand {
                    *buffer += 2;
                }
            }
            return Ok(call);
        }
        let indices = tokens.checked_mul(top_k).filter(|count| *count < 1 << 31).ok_or_else(|| {
            CallError::Unsupported {
                function: NAME,
                what: format!("{tokens} tokens of {top_k} experts; at most 2^31 − 1 are counted"),
            }
        })?;
        let mut workspace = Workspace::default();
        let (sums, slices) = of_slices(NAME, 0, element, [tokens, experts], align, &mut workspace)?;
        let per_block = indices.div_ceil(BLOCKS).max(LEAST);
        let counters = blocks(NAME, indices, per_block)?;
        let partial = workspace.take(Scalar::I32, &[counters.into(), experts]);
        let room = experts.next_power_of_two().max(32) as u32;
        let operands = vec![
            Operand::whole(1, index, &[indices]),
            partial.clone(),
            Operand::i64(per_block.cast_signed()),
        ];
        let entry = Entry::Experts(Experts::Count { index, room });
        let count = Launch { entry, grid: [counters, 1, 1], operands };
        let numbers = [1.0 / tokens as f64, f64::from(alpha) * experts as f64 / indices as f64];
        let float = |buffer, extent| Operand::whole(buffer, Scalar::F32, &[extent]);
        let mut operands = vec![slices, partial, float(2, 1), float(3, experts), float(4, experts)];
        operands.extend(numbers.map(|number| Operand::f32(number as f32)));
        let loss = Launch { entry: Entry::Experts(Experts::Loss), grid: [1, 1, 1], operands };
        Ok(Call { launches: vec![sums, count, loss], workspace: workspace.bytes() })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let align = aligned(self.align, &buffers[..1]);
        AuxLoss { align, ..*self }.call(resources)
    }
}

/// The gradient of an [`AuxLoss`] with respect to the probabilities: dprobs\[t, i\] = dloss · α · N · f_i / T. The counts are no function of the probabilities that has one.
///
/// Its buffers: `f_counts`, f32, `[experts]`, of the loss; `aux_loss_grad`, f32, `[1]`; `router_probs_grad`, `[tokens, experts]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AuxLossGradient {
    /// T.
    pub tokens: u64,
    /// N.
    pub experts: u64,
    /// k.
    pub top_k: u64,
    /// α.
    pub alpha: f32,
    /// What the gradient is: f32, f16 or bf16.
    pub element: Scalar,
    /// Is it added to the gradient that is there, as of what the probabilities choose?
    pub accumulate: bool,
    /// Bytes to whose multiples the counts and the gradient are aligned; 16 is fast.
    pub align: u32,
}

impl Function for AuxLossGradient {
    fn buffers(&self) -> Vec<Buffer> {
        let AuxLossGradient { tokens, experts, element, accumulate, .. } = *self;
        let access = if accumulate { Access::ReadWrite } else { Access::Write };
        vec![
            Buffer::new("f_counts", Scalar::F32, &[experts], Access::Read),
            Buffer::new("aux_loss_grad", Scalar::F32, &[1], Access::Read),
            Buffer::new("router_probs_grad", element, &[tokens, experts], access),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::experts::gradient(self)
    }

    fn call(&self, _: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "aux_loss_gradient";
        let AuxLossGradient { tokens, experts, top_k, alpha, element, accumulate, align } = *self;
        check(NAME, experts)?;
        floats(NAME, &[element])?;
        if top_k == 0 {
            return Err(CallError::Unsupported {
                function: NAME,
                what: "0 experts for a token; there is at least 1".into(),
            });
        }
        if [tokens, experts].contains(&0) {
            return Ok(Call::default());
        }
        // Of 16 bytes of the counts.
        let lanes = lanes(Scalar::F32, experts, align).min(lanes(element, experts, align));
        let pieces = Pieces::with_lanes(lanes, experts);
        let factor = f64::from(alpha) * experts as f64 / (tokens as f64 * tokens as f64 * top_k as f64);
        let buffers = self.buffers().into_iter().enumerate();
        let mut operands: Vec<_> =
            buffers.map(|(at, buffer)| Operand::whole(at, buffer.element, &buffer.extents)).collect();
        operands.push(Operand::f32(factor as f32));
        let grid = [blocks(NAME, tokens, pieces.rows())?, 1, 1];
        let entry = Entry::Experts(Experts::Gradient { element, accumulate, pieces });
        Ok(Call { launches: vec![Launch { entry, grid, operands }], workspace: 0 })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        AuxLossGradient { align: aligned(self.align, buffers), ..*self }.call(resources)
    }
}
