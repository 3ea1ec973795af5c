//! Elementwise work over many tensors in one launch: steps of optimizers, clipping, filling, gradients of activations.
//!
//! A guest's kernel has no pointers, so a launch takes a bounded number of tensors, each with views of its own, and `ends`: how
//! many blocks the tensors up to each one have. A block finds its tensor by its number, which costs it a few comparisons that all
//! its threads agree on. As many tensors go into a launch as [`MAX_PARAMS`] has room for; a caller whose tensors lie in one
//! buffer hands that over as one tensor and needs a single launch.

mod functions;
mod rows;
mod rule;

pub(crate) use functions::floats;
pub use functions::{ActivationGradient, AdamW, Fill, GradClip, GradNorm, Sgd};
pub(crate) use norm::block_add;
pub use norm::{Finish, Squares};
pub use rows::FlatRows;
pub use rule::{Activation, Rule};

mod norm;

use crate::call::{CallError, Entry, Launch, Operand};
use crate::family::{Kind, Resources};
use vm_ir::builder::{BuildError, Builder, Carry, IRBlock, PlaceRef, Val};
use vm_ir::limits::{MAX_GRID_X, MAX_PARAMS};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Threads of a block.
const THREADS: u32 = 256;

/// How many tensors a launch takes, and how a thread takes their elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Tensors of a launch, at least 1.
    pub tensors: u32,
    /// Elements that a thread takes in a row.
    pub lanes: u8,
    /// Such vectors of a thread, all of which it loads before it computes; if it is serial, one after the other.
    pub vectors: u32,
    /// Do all tensors begin at multiples of 16 bytes?
    pub aligned: bool,
    /// Does one thread do what the threads of a block would?
    pub serial: bool,
}

impl Shape {
    /// Vectors of 16 bytes of the narrowest of these types.
    pub(crate) fn of(elements: &[Scalar], vectors: u32, align: u32) -> Shape {
        let narrowest = elements.iter().map(|element| element.bytes()).min().unwrap_or(4);
        let lanes = (16 / narrowest).clamp(2, 8) as u8;
        // Wide vectors of narrow types are of several accesses where they meet wider ones.
        let vectors = if lanes > 4 { vectors.div_ceil(2) } else { vectors };
        Shape { tensors: 1, lanes, vectors, aligned: align >= 16, serial: false }
    }

    /// The same on such a device: a processor's thread takes two vectors of eight elements at a time, wherever they begin. Longer ones
    /// of all tensors have no room in its registers.
    pub(crate) fn on(self, resources: &Resources) -> Shape {
        match resources.kind {
            Kind::Cpu => Shape { lanes: 8, vectors: 2, aligned: false, serial: true, ..self },
            Kind::Gpu => self,
        }
    }

    /// Elements of a block.
    pub(crate) fn chunk(self) -> u64 {
        u64::from(THREADS) * u64::from(self.lanes) * u64::from(self.vectors)
    }

    pub(crate) fn suffix(self) -> String {
        let cut = match (self.serial, self.aligned) {
            (true, _) => "_serial",
            (false, true) => "",
            (false, false) => "_any",
        };
        format!("{}x{}x{}{cut}", self.tensors, self.lanes, self.vectors)
    }

    pub(crate) fn view<'b>(
        self,
        k: Builder<'b>,
        name: &str,
        tensor: usize,
        element: Scalar,
        access: Access,
    ) -> PlaceRef<'b> {
        let extent = format!("n{tensor}");
        let mut ty = ViewType::new(element, 1, access).named(&[&extent]);
        if self.aligned {
            ty = ty.aligned(16);
        }
        k.view_of(&format!("{name}{tensor}"), ty)
    }

    /// The parameters that say where each tensor's blocks end, but for the last.
    pub(crate) fn ends<'b>(self, k: Builder<'b>) -> Vec<Val<'b>> {
        let end = |at: u32| k.scalar_in(&format!("end{at}"), Type::I32, 0, MAX_GRID_X.into());
        (1..self.tensors).map(|at| end(at - 1)).collect()
    }

    /// Is all of a chunk inside of a tensor?
    pub(crate) fn is_inside<'b>(self, first: Val<'b>, extent: Val<'b>) -> Val<'b> {
        let inside = (first + self.chunk() as i64).le(extent);
        // Of the first tensor it is known.
        if self.tensors > 1 { first.ge(0) & inside } else { inside }
    }

    /// This thread's elements of a chunk that is inside.
    pub(crate) fn places<'b>(self, k: Builder<'b>, first: Val<'b>) -> Vec<Val<'b>> {
        let start = first + (k.thread_id(Axis::X) * i32::from(self.lanes)).to(Scalar::I64);
        let stride = u64::from(THREADS) * u64::from(self.lanes);
        (0..u64::from(self.vectors)).map(|at| if at == 0 { start } else { start + at * stride }).collect()
    }
}

/// Does `work` for this block's tensor: with its number, and the block's number among the tensor's.
pub(crate) fn of_tensor<'b, T: Carry<'b>>(
    k: Builder<'b>,
    ends: &[Val<'b>],
    work: &dyn Fn(usize, Val<'b>) -> T,
) -> T {
    halves(k, k.block_id(Axis::X), (0, ends.len()), ends, work)
}

/// The same of the tensors from the first to the last of a range.
fn halves<'b, T: Carry<'b>>(
    k: Builder<'b>,
    block: Val<'b>,
    (first, last): (usize, usize),
    ends: &[Val<'b>],
    work: &dyn Fn(usize, Val<'b>) -> T,
) -> T {
    if first == last {
        return work(first, if first == 0 { block } else { block - ends[first - 1] });
    }
    let middle = first.midpoint(last);
    let lower = || halves(k, block, (first, middle), ends, work);
    k.if_else(block.lt(ends[middle]), lower, || halves(k, block, (middle + 1, last), ends, work))
}

/// A kernel that does the same to each element of many tensors.
///
/// Its parameters: for each tensor the views of its [rule](Rule::ports), one behind the other, `[n]`; then `scale`, f32 `[1]`, if the rule
/// has it; the rule's numbers, f32; the ends, i32. A block has `256 · lanes · vectors` elements of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flat {
    /// What is done.
    pub rule: Rule,
    /// To how many tensors, and in which pieces.
    pub shape: Shape,
}

impl Flat {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        format!("{}_{}", self.rule.name(), self.shape.suffix())
    }

    /// Its kernel.
    ///
    /// # Errors
    /// More tensors than there is room for parameters.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        self.write(block.builder());
        block.kernel()
    }

    fn write<'b>(self, k: Builder<'b>) {
        let Flat { rule, shape } = self;
        k.name(&self.name()).block_size([if shape.serial { 1 } else { THREADS }, 1, 1]);
        let ports = rule.ports();
        let tensors: Vec<Vec<PlaceRef<'b>>> = (0..shape.tensors as usize)
            .map(|at| ports.iter().map(|p| shape.view(k, p.name, at, p.element, p.access)).collect())
            .collect();
        let scale = rule.is_scaled().then(|| k.view_of("scale", ViewType::new(Scalar::F32, 1, Access::Read)));
        let mut numbers: Vec<_> = rule.numbers().iter().map(|name| k.scalar(name, Type::F32)).collect();
        let ends = shape.ends(k);
        let scale = scale.map(|scale| scale.at([k.i64(0)]).load().named("factor"));
        numbers.extend(scale);
        let all = || {
            of_tensor(k, &ends, &|at, block| {
                let views = &tensors[at];
                let n = views[0].extent(0).named("n");
                let first = (block.to(Scalar::I64) * shape.chunk()).named("first");
                let load = |at: Val<'b>, lanes: u8| -> Vec<Val<'b>> {
                    let readable = ports.iter().zip(views).filter(|(port, _)| port.access.reads());
                    readable
                        .map(|(_, view)| match lanes {
                            1 => view.at([at]).load(),
                            _ => view.at([at]).cached(Cache::Stream).load_vector(lanes),
                        })
                        .collect()
                };
                let store = |at: Val<'b>, loaded: &[Val<'b>], lanes: u8| {
                    let wide: Vec<_> = loaded.iter().map(|value| value.to(Scalar::F32)).collect();
                    let numbers: Vec<_> = match lanes {
                        1 => numbers.clone(),
                        _ => numbers.iter().map(|number| number.splat(lanes)).collect(),
                    };
                    let writable = ports.iter().zip(views).filter(|(port, _)| port.access.writes());
                    for ((port, view), value) in writable.zip(rule.compute(&wide, &numbers)) {
                        view.at([at]).cached(Cache::Stream).store(value.to(port.element));
                    }
                };
                if shape.serial {
                    let lanes = shape.lanes;
                    let end = (first + shape.chunk() as i64).min(n);
                    let step = i64::from(lanes) * i64::from(shape.vectors);
                    let whole = end & -step;
                    k.range(first, whole).step(step).each(|at| {
                        for vector in 0..i64::from(shape.vectors) {
                            let at = if vector == 0 { at } else { at + vector * i64::from(lanes) };
                            store(at, &load(at, lanes), lanes);
                        }
                    });
                    return k.range(first.max(whole), end).each(|at| store(at, &load(at, 1), 1));
                }
                k.if_else(
                    shape.is_inside(first, n),
                    || {
                        let places = shape.places(k, first);
                        let loaded: Vec<_> = places.iter().map(|at| load(*at, shape.lanes)).collect();
                        for (at, loaded) in places.iter().zip(&loaded) {
                            store(*at, loaded, shape.lanes);
                        }
                    },
                    || {
                        let low = first + k.thread_id(Axis::X).to(Scalar::I64);
                        let high = (first + shape.chunk() as i64).min(n);
                        k.range(low, high).step(THREADS).each(|at| store(at, &load(at, 1), 1));
                    },
                );
            });
        };
        match (rule, scale) {
            // Nothing is to be changed by a factor of 1; of one that is not a number, all is.
            (Rule::Scale { .. }, Some(factor)) => k.if_(factor.ne(1.0), all),
            _ => all(),
        }
    }
}

/// Tensors of one launch, and the blocks that each has up to it.
pub(crate) struct Group {
    pub(crate) tensors: Vec<usize>,
    pub(crate) ends: Vec<u32>,
}

impl Group {
    pub(crate) fn blocks(&self) -> u32 {
        self.ends.last().copied().unwrap_or(0)
    }

    pub(crate) fn end_operands(&self) -> impl Iterator<Item = Operand> {
        let inner = self.ends.len().saturating_sub(1);
        self.ends.iter().take(inner).map(|end| Operand::i32(end.cast_signed()))
    }
}

/// Divides tensors that are not empty into launches of at most so many, by the elements of a block.
pub(crate) fn groups(
    function: &'static str,
    sizes: &[u64],
    most: usize,
    per_block: u64,
) -> Result<Vec<Group>, CallError> {
    let mut groups: Vec<Group> = Vec::new();
    for (tensor, size) in sizes.iter().enumerate().filter(|(_, size)| **size > 0) {
        let blocks = u32::try_from(size.div_ceil(per_block)).ok().filter(|blocks| *blocks <= MAX_GRID_X);
        let blocks = blocks.ok_or_else(|| CallError::Unsupported {
            function,
            what: format!("tensor {tensor} has {size} elements; at most {per_block} · (2^31 − 1) are taken"),
        })?;
        let room = groups.last().filter(|group| group.tensors.len() < most).map(Group::blocks);
        match room.and_then(|taken| taken.checked_add(blocks)).filter(|end| *end <= MAX_GRID_X) {
            Some(end) => groups.last_mut().into_iter().for_each(|group| {
                group.tensors.push(tensor);
                group.ends.push(end);
            }),
            None => groups.push(Group { tensors: vec![tensor], ends: vec![blocks] }),
        }
    }
    Ok(groups)
}

/// The launches of a rule over tensors: the buffers of each stand one behind the other, and `scale` behind all.
pub(crate) fn launches(
    function: &'static str,
    rule: Rule,
    sizes: &[u64],
    shape: Shape,
    numbers: &[f32],
    scale: Option<Operand>,
) -> Result<Vec<Launch>, CallError> {
    let ports = rule.ports();
    let others = rule.numbers().len() + usize::from(rule.is_scaled());
    // Each tensor has its views and an end, but for the last.
    let most = (MAX_PARAMS + 1 - others) / (ports.len() + 1);
    let mut launches = Vec::new();
    for group in groups(function, sizes, most, shape.chunk())? {
        let mut operands = Vec::new();
        for tensor in &group.tensors {
            for (at, port) in ports.iter().enumerate() {
                let buffer = tensor * ports.len() + at;
                operands.push(Operand::whole(buffer, port.element, &[sizes[*tensor]]));
            }
        }
        operands.extend(scale.clone());
        operands.extend(numbers.iter().copied().map(Operand::f32));
        operands.extend(group.end_operands());
        let shape = Shape { tensors: group.tensors.len() as u32, ..shape };
        let entry = Entry::Flat(Flat { rule, shape });
        launches.push(Launch { entry, grid: [group.blocks(), 1, 1], operands });
    }
    Ok(launches)
}
