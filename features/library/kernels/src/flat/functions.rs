//! The functions that are made of these kernels.

use super::{Activation, Finish, FlatRows, Rule, Shape, Squares, groups, launches};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Workspace};
use crate::family::Resources;
use crate::graph::{self, NoGraph};
use crate::row::{Layout, launch_rows};
use crate::strided::step;
use vm_graph::ValidGraph;
use vm_ir::Scalar;
use vm_ir::limits::MAX_PARAMS;
use vm_ir::view::Access;

/// Is it a type of memory that all of these take?
pub(crate) fn is_float(element: Scalar) -> bool {
    matches!(element, Scalar::F32 | Scalar::F16 | Scalar::Bf16)
}

pub(crate) fn floats(function: &'static str, elements: &[Scalar]) -> Result<(), CallError> {
    match elements.iter().find(|element| !is_float(**element)) {
        Some(other) => {
            Err(CallError::Unsupported { function, what: format!("{other}; there are f32, f16 and bf16") })
        }
        None => Ok(()),
    }
}

/// The launches of a rule over tensors. If they are scaled, it is by the buffer behind the others.
fn call(
    function: &'static str,
    rule: Rule,
    sizes: &[u64],
    shape: Shape,
    numbers: &[f32],
    scaled: bool,
) -> Result<Call, CallError> {
    let scale = scaled.then(|| Operand::whole(rule.ports().len() * sizes.len(), Scalar::F32, &[1]));
    Ok(Call { launches: launches(function, rule, sizes, shape, numbers, scale)?, workspace: 0 })
}

/// The buffers of a rule over tensors.
fn buffers(rule: Rule, sizes: &[u64]) -> Vec<Buffer> {
    let ports = rule.ports();
    let of = |size: &u64| {
        let size = *size;
        ports
            .iter()
            .map(move |port| Buffer::new(port.name, port.element, &[size], port.access))
            .collect::<Vec<_>>()
    };
    sizes.iter().flat_map(of).collect()
}

fn one(name: &'static str, access: Access) -> Buffer {
    Buffer::new(name, Scalar::F32, &[1], access)
}

/// A step of AdamW over any number of tensors, as `torch.optim.AdamW` does it:
///
/// ```text
/// g ← scale · g                    if scaled
/// p ← p · (1 − lr · weight_decay)
/// m ← β1 · m + (1 − β1) · g
/// v ← β2 · v + (1 − β2) · g²
/// p ← p − lr / (1 − β1^step) · m / (√v / √(1 − β2^step) + ε)
/// ```
///
/// (Loshchilov and Hutter, Decoupled Weight Decay Regularization.) Its buffers, for each tensor one behind the other: `parameter`,
/// `master` (f32) if there is one, `gradient`, `m` (f32), `v` (f32); behind all of them `scale`, f32 `[1]`, if scaled, as [`GradNorm`] gives it.
/// With a master copy the step is of that, and the parameter its rounded value.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    /// Elements of each tensor.
    pub sizes: Vec<u64>,
    /// What a parameter is: f32, f16 or bf16.
    pub parameter: Scalar,
    /// What a gradient is: likewise.
    pub gradient: Scalar,
    /// Are there parameters in f32 beside those?
    pub master: bool,
    /// Are gradients multiplied with a number in memory first?
    pub scaled: bool,
    /// Bytes to whose multiples all buffers are aligned; 16 is fast.
    pub align: u32,
    /// The learning rate.
    pub lr: f64,
    /// β1, of the mean of gradients.
    pub beta1: f64,
    /// β2, of the mean of their squares.
    pub beta2: f64,
    /// ε, which is added to the divisor.
    pub eps: f64,
    /// What parameters decay by, times the learning rate.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u32,
}

impl AdamW {
    /// The first step with PyTorch's numbers, of aligned parameters and gradients of one type.
    pub fn of(sizes: &[u64], element: Scalar) -> AdamW {
        AdamW {
            sizes: sizes.to_vec(),
            parameter: element,
            gradient: element,
            master: false,
            scaled: false,
            align: 16,
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            step: 1,
        }
    }

    fn rule(&self) -> Rule {
        let AdamW { parameter, gradient, master, scaled, .. } = *self;
        Rule::AdamW { parameter, gradient, master, scaled }
    }

    /// The numbers of f32 that its launches take, in this order, which are all that depends on rates and the step.
    pub fn numbers(&self) -> [f32; 8] {
        let AdamW { lr, beta1, beta2, eps, weight_decay, step, .. } = *self;
        let correction = |beta: f64| 1.0 - beta.powf(f64::from(step));
        let numbers = [
            1.0 - lr * weight_decay,
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            lr / correction(beta1),
            1.0 / correction(beta2).sqrt(),
            eps,
        ];
        numbers.map(|number| number as f32)
    }
}

impl Function for AdamW {
    fn buffers(&self) -> Vec<Buffer> {
        let mut all = buffers(self.rule(), &self.sizes);
        all.extend(self.scaled.then(|| one("scale", Access::Read)));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::training::adamw(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let AdamW { parameter, gradient, step, .. } = *self;
        floats("adamw", &[parameter, gradient])?;
        if step == 0 {
            let what = "step 0; the first is 1, as its corrections divide by 1 − β^step".into();
            return Err(CallError::Unsupported { function: "adamw", what });
        }
        let shape = Shape::of(&[parameter, gradient], 2, self.align).on(resources);
        call("adamw", self.rule(), &self.sizes, shape, &self.numbers(), self.scaled)
    }
}

/// A step of stochastic gradient descent over any number of tensors, as `torch.optim.SGD` does it:
///
/// ```text
/// g ← scale · g                          if scaled
/// g ← g + weight_decay · p
/// b ← momentum · b + (1 − dampening) · g  if there is a momentum
/// p ← p − lr · (b, or g + momentum · b with nesterov, or g)
/// ```
///
/// Its buffers, for each tensor one behind the other: `parameter`, `master` (f32) if there is one, `gradient`, `momentum` (f32, zeros at first)
/// if there is one; behind all of them `scale`, f32 `[1]`, if scaled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    /// Elements of each tensor.
    pub sizes: Vec<u64>,
    /// What a parameter is: f32, f16 or bf16.
    pub parameter: Scalar,
    /// What a gradient is: likewise.
    pub gradient: Scalar,
    /// Are there parameters in f32 beside those?
    pub master: bool,
    /// Are gradients multiplied with a number in memory first?
    pub scaled: bool,
    /// Bytes to whose multiples all buffers are aligned; 16 is fast.
    pub align: u32,
    /// The learning rate.
    pub lr: f64,
    /// The momentum; at 0 there is no buffer of it.
    pub momentum: f64,
    /// What is left out of a gradient that joins the momentum.
    pub dampening: f64,
    /// Does the step look ahead by the momentum?
    pub nesterov: bool,
    /// What parameters add to their gradients.
    pub weight_decay: f64,
}

impl Sgd {
    fn rule(&self) -> Rule {
        let Sgd { parameter, gradient, master, scaled, .. } = *self;
        let momentum = self.momentum != 0.0;
        Rule::Sgd { parameter, gradient, master, momentum, nesterov: self.nesterov && momentum, scaled }
    }
}

impl Function for Sgd {
    fn buffers(&self) -> Vec<Buffer> {
        let mut all = buffers(self.rule(), &self.sizes);
        all.extend(self.scaled.then(|| one("scale", Access::Read)));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::training::sgd(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let Sgd { parameter, gradient, lr, momentum, dampening, weight_decay, .. } = *self;
        floats("sgd", &[parameter, gradient])?;
        let numbers = [lr, weight_decay, momentum, 1.0 - dampening].map(|number| number as f32);
        let shape = Shape::of(&[parameter, gradient], 2, self.align).on(resources);
        call("sgd", self.rule(), &self.sizes, shape, &numbers, self.scaled)
    }
}

/// The launches of a norm over the first buffers, and the kernel that finishes it.
fn norm(
    function: &'static str,
    sizes: &[u64],
    element: Scalar,
    align: u32,
    workspace: &mut Workspace,
    results: (Operand, Option<(Operand, f32)>),
) -> Result<Vec<Launch>, CallError> {
    /// Blocks among which the elements are divided, about: enough for any device, and no more than one block adds up soon.
    const BLOCKS: u64 = 2048;
    floats(function, &[element])?;
    let shape = Shape::of(&[element], 4, align);
    let chunks = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(size.div_ceil(shape.chunk())));
    // Two, as soon as that leaves a block for some multiprocessors.
    let tiles = chunks.div_ceil(BLOCKS).max(chunks.div_ceil(16).min(2)).clamp(1, i32::MAX as u64);
    // Beside a view and an end of each there are `partial` and `tiles`.
    let groups = groups(function, sizes, (MAX_PARAMS - 1) / 2, shape.chunk() * tiles)?;
    // What is read behind must have been written: without a block there is nothing to read.
    let blocks: u64 = groups.iter().map(|group| u64::from(group.blocks())).sum();
    let Operand::Workspace(partial) = workspace.take(Scalar::F32, &[blocks]) else {
        return Ok(Vec::new());
    };
    let mut all = Vec::new();
    let mut from = 0;
    for group in groups {
        let views = group.tensors.iter().map(|tensor| Operand::whole(*tensor, element, &[sizes[*tensor]]));
        let mut operands: Vec<_> = views.collect();
        let mut region = partial.clone();
        region.offset += from * 4;
        region.extents = vec![group.blocks().into()];
        from += u64::from(group.blocks());
        operands.extend([Operand::Workspace(region), Operand::i32(tiles as i32)]);
        operands.extend(group.end_operands());
        let shape = Shape { tensors: group.tensors.len() as u32, ..shape };
        let entry = Entry::Squares(Squares { element, shape });
        all.push(Launch { entry, grid: [group.blocks(), 1, 1], operands });
    }
    let (norm, clip) = results;
    let mut operands = vec![Operand::Workspace(partial), norm];
    let entry = Entry::Finish(Finish { clips: clip.is_some() });
    operands.extend(clip.into_iter().flat_map(|(scale, most)| [scale, Operand::f32(most)]));
    all.push(Launch { entry, grid: [1, 1, 1], operands });
    Ok(all)
}

/// The Euclidean norm of all elements of any number of tensors, √(Σ x²), and the factor that clips it, min(1, `clip` / (norm + 1e-6)). The
/// order of additions depends on the extents alone, so a norm has the same bits at each run.
///
/// Its buffers: `gradient` of each tensor; `norm`, f32 `[1]`; if it clips, `scale`, f32 `[1]`, for [`AdamW::scaled`] and its like, which spares
/// gradients from being read and written once more. A norm that is not a number makes the factor none either; an infinite one, 0.
#[derive(Clone, Debug, PartialEq)]
pub struct GradNorm {
    /// Elements of each tensor.
    pub sizes: Vec<u64>,
    /// What a gradient is: f32, f16 or bf16.
    pub element: Scalar,
    /// Bytes to whose multiples all buffers are aligned; 16 is fast.
    pub align: u32,
    /// The norm above which gradients are scaled.
    pub clip: Option<f32>,
}

impl Function for GradNorm {
    fn buffers(&self) -> Vec<Buffer> {
        let mut all: Vec<_> = self
            .sizes
            .iter()
            .map(|size| Buffer::new("gradient", self.element, &[*size], Access::Read))
            .collect();
        all.push(one("norm", Access::Write));
        all.extend(self.clip.map(|_| one("scale", Access::Write)));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::training::grad_norm(self)
    }

    fn call(&self, _: &Resources) -> Result<Call, CallError> {
        let (mut workspace, behind) = (Workspace::default(), self.sizes.len());
        let results = (
            Operand::whole(behind, Scalar::F32, &[1]),
            self.clip.map(|clip| (Operand::whole(behind + 1, Scalar::F32, &[1]), clip)),
        );
        let launches = norm("grad_norm", &self.sizes, self.element, self.align, &mut workspace, results)?;
        Ok(Call { launches, workspace: workspace.bytes() })
    }
}

/// Clips gradients in place by their norm, as `torch.nn.utils.clip_grad_norm_` does: each is multiplied with min(1, `clip` / (norm + 1e-6)), and
/// is not touched if that is 1. If the norm is not a number, no gradient is one behind; if it is infinite, all become 0, but for those
/// that are infinite, which become none.
///
/// Its buffers: `gradient` of each tensor; `norm`, f32 `[1]`, that of before.
#[derive(Clone, Debug, PartialEq)]
pub struct GradClip {
    /// Elements of each tensor.
    pub sizes: Vec<u64>,
    /// What a gradient is: f32, f16 or bf16.
    pub element: Scalar,
    /// Bytes to whose multiples all buffers are aligned; 16 is fast.
    pub align: u32,
    /// The norm above which gradients are scaled.
    pub clip: f32,
}

impl Function for GradClip {
    fn buffers(&self) -> Vec<Buffer> {
        let mut all = buffers(Rule::Scale { element: self.element }, &self.sizes);
        for buffer in &mut all {
            buffer.name = "gradient";
        }
        all.push(one("norm", Access::Write));
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::training::grad_clip(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let GradClip { ref sizes, element, align, clip } = *self;
        let mut workspace = Workspace::default();
        let scale = workspace.take(Scalar::F32, &[1]);
        let results = (Operand::whole(sizes.len(), Scalar::F32, &[1]), Some((scale.clone(), clip)));
        let mut all = norm("grad_clip", sizes, element, align, &mut workspace, results)?;
        let shape = Shape::of(&[element], 4, align).on(resources);
        all.extend(launches("grad_clip", Rule::Scale { element }, sizes, shape, &[], Some(scale))?);
        Ok(Call { launches: all, workspace: workspace.bytes() })
    }
}

/// Sets all elements of any number of tensors to a number, as gradients to 0. Its buffers: `x` of each tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Fill {
    /// Elements of each tensor.
    pub sizes: Vec<u64>,
    /// What an element is: f32, f16 or bf16.
    pub element: Scalar,
    /// Bytes to whose multiples all buffers are aligned; 16 is fast.
    pub align: u32,
    /// The number, which is rounded to the element.
    pub value: f32,
}

impl Function for Fill {
    fn buffers(&self) -> Vec<Buffer> {
        buffers(Rule::Fill { element: self.element }, &self.sizes)
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::training::fill(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let Fill { ref sizes, element, align, value } = *self;
        floats("fill", &[element])?;
        let shape = Shape::of(&[element], 4, align).on(resources);
        call("fill", Rule::Fill { element }, sizes, shape, &[value], false)
    }
}

/// The gradient of an activation y = f(x): dx = dy · f′(x). Its buffers, all `[rows, columns]`: `dy`, `x`, `dx`.
///
/// Of [`Activation::Swiglu`], y = silu(gate) · up: `dy`, `gate`, `up`, `dgate`, `dup`, where dgate = dy · up · silu′(gate) and dup = dy · silu(gate).
/// silu′(x) = σ(x) · (1 + x · (1 − σ(x))); that of relu is 0 at 0. With [strided rows](crate::strided) gate and up are the halves of one product,
/// and dgate and dup those of its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationGradient {
    /// Which activation.
    pub activation: Activation,
    /// Rows; 1 where there are none.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// What an element is: f32, f16 or bf16.
    pub element: Scalar,
    /// Bytes to whose multiples all buffers are aligned; 16 is fast.
    pub align: u32,
}

impl ActivationGradient {
    /// The name in errors.
    pub(crate) const NAME: &str = "activation_gradient";

    fn rule(&self) -> Rule {
        Rule::Gradient { activation: self.activation, element: self.element }
    }
}

impl Function for ActivationGradient {
    fn buffers(&self) -> Vec<Buffer> {
        let extents = [self.rows, self.columns];
        let ports = self.rule().ports().into_iter();
        ports.map(|port| Buffer::new(port.name, port.element, &extents, port.access)).collect()
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::activation::gradient(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let ActivationGradient { rows, columns, element, align, .. } = *self;
        floats(Self::NAME, &[element])?;
        let size = rows.checked_mul(columns).ok_or_else(|| CallError::Unsupported {
            function: Self::NAME,
            what: format!("{rows} rows of {columns} columns; their product overflows"),
        })?;
        let shape = Shape::of(&[element], 2, align).on(resources);
        call(Self::NAME, self.rule(), &[size], shape, &[], false)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let ActivationGradient { rows, columns, element, align, .. } = *self;
        let rule = self.rule();
        // Nothing is combined, so blocks suffice.
        let alone = Resources { cluster: 1, ..*resources };
        // What is read and what is written has registers.
        let held = rule.ports().len() as u32;
        let layout = Layout::strided([columns, step(buffers)], &[element], align, held, &alone);
        let entry = Entry::FlatRows(FlatRows { rule, layout });
        launch_rows(Self::NAME, entry, layout, [rows, columns], buffers, &[])
    }
}
