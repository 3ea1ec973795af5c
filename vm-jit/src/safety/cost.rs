//! What ops cost, in weighted operations: the time of an addition that waits for another, about, as if nothing were ever at
//! hand. They add up to a bound, not an estimate.
//!
//! A target has costs of its own, for each op and type by the way in which the target does it: f16 is native on a GPU, and
//! tens of instructions on a processor. Those of a processor are nanoseconds that were measured, and rounded up;
//! `cargo bench -p vm-cpu --bench costs` shows them beside each other again, as `gpu costs` does on a GPU.
//!
//! Of an `if` or a `switch` all regions count: threads of a warp that part go one behind the other.

use crate::backend::amdgcn::Chip;
use crate::legal::key;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Opcode, Shape};
use vm_ir::{Kernel, Scalar};

/// Whose costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Costs {
    /// A GPU's, by way of PTX for this architecture in this version.
    Ptx(crate::backend::ptx::Arch, crate::backend::ptx::Version),
    /// An AMD GPU's, of this chip.
    Amdgcn(Chip),
    /// A processor's.
    Cpu,
}

/// A loop beside its body, and each iteration.
pub(super) const LOOP: u64 = 1;
const BEGIN: u64 = 8;
const BEGIN_BLOCK: u64 = 2048;
/// To zero a word of shared memory.
const ZERO: u64 = 8;

/// Bytes of fragments that a processor zeroes in a nanosecond.
const ZEROED: u64 = 4;

/// What a thread's share is of what a block takes to begin.
pub(super) fn begin(kernel: &Kernel, costs: Costs) -> u64 {
    let threads: u64 = kernel.block().iter().map(|size| u64::from(*size)).product();
    let shared: u64 = kernel.shared().iter().map(|array| array.bytes()).sum();
    // A guest's shared memory is zeroed, word by word at worst.
    let fragments = match (costs, kernel.tile()) {
        // Fragments are zero at first: on a processor, memory.
        (Costs::Cpu, Some(tile)) => {
            tile.fragments.iter().map(|f| f.len() * u64::from(f.element.bytes()) / ZEROED).sum()
        }
        _ => 0,
    };
    let block = BEGIN_BLOCK.saturating_add(ZERO.saturating_mul(shared / 4)).saturating_add(fragments);
    // A thread zeroes its own memory, sixteen bytes at a time.
    let local = ZERO.saturating_mul(kernel.local_bytes() / 16);
    BEGIN.saturating_add(local).saturating_add(block.div_ceil(threads.max(1)))
}

/// What an op costs, without what it has inside.
pub(super) fn of(kernel: &Kernel, op: &Op, costs: Costs) -> u64 {
    if let Shape::Switch = op.code.shape() {
        return LOOP + op.regions.len() as u64;
    }
    if op.code.shape().is_tile() {
        return match costs {
            Costs::Ptx(..) | Costs::Amdgcn(_) => tile(kernel, op, costs),
            Costs::Cpu => tile_on_cpu(kernel, op),
        };
    }
    let value = op.result().or(op.operands.last().copied()).map(|value| kernel.type_of(value));
    let lanes = match op.code.shape() {
        shape if shape.has_regions() => 1,
        _ => value.map_or(1, |ty| u64::from(ty.lanes())),
    };
    let ((from, to), shared) = (key(kernel, op), matches!(op.place, Some(Place::Shared(_))));
    let tries = match costs {
        Costs::Amdgcn(chip) => crate::backend::amdgcn::tries(chip, op.code, from, op.scope(), shared),
        _ => 1,
    };
    lanes * tries * element(costs, op.code, from, to, shared)
}

/// What an op of a tile kernel costs: the time of the group that has the most to do.
fn tile(kernel: &Kernel, op: &Op, costs: Costs) -> u64 {
    /// To hand over a stage, or to wait for it.
    const STAGE: u64 = 256;
    /// Bytes that a block copies in the time of an operation.
    const BYTES: u64 = 16;
    /// Products that a block adds up in that time.
    const PRODUCTS: u64 = 4096;
    /// Elements of a fragment that are computed at the same time.
    const ELEMENTS: u64 = 128;
    let places = || op.place.iter().chain(&op.others);
    let bytes = |place: &Place| {
        let channel = kernel.channel(*place).map_or(0, |channel| channel.stage_bytes());
        channel + kernel.fragment(*place).map_or(0, |f| f.len() * u64::from(f.element.bytes()))
    };
    let elements = op.place.and_then(|place| kernel.fragment(place)).map_or(0, |f| f.len());
    match op.code {
        Opcode::Mma | Opcode::Product => {
            let inner = places().filter_map(|place| kernel.channel(*place)).map(|c| c.dims[0].max(c.dims[1]));
            STAGE + elements * u64::from(inner.max().unwrap_or(1)) / PRODUCTS
        }
        Opcode::Map => elements.div_ceil(ELEMENTS).saturating_mul(map_element(kernel, op, costs)),
        // What each block gives to each.
        Opcode::Share => 4 * STAGE + places().map(bytes).sum::<u64>() * u64::from(kernel.cluster()) / BYTES,
        Opcode::Fetch | Opcode::Put | Opcode::Release => STAGE + places().map(bytes).sum::<u64>() / BYTES,
        _ => 64 + places().map(bytes).sum::<u64>() / 4 / ELEMENTS,
    }
}

/// What an element of a map costs.
pub(crate) fn map_element(kernel: &Kernel, op: &Op, costs: Costs) -> u64 {
    let ops = op.regions.iter().flat_map(|region| &region.ops);
    ops.fold(4u64, |sum, op| sum.saturating_add(of(kernel, op, costs)))
}

/// What an op of a tile kernel costs on a processor, where one thread does it all.
fn tile_on_cpu(kernel: &Kernel, op: &Op) -> u64 {
    /// Of any op.
    const BEGIN: u64 = 64;
    /// Bytes that are copied, widened or joined in a nanosecond.
    const BYTES: u64 = 2;
    /// Products that are added up in one.
    const PRODUCTS: u64 = 4;
    let places = || op.place.iter().chain(&op.others);
    let bytes = |place: &Place| {
        let channel = kernel.channel(*place).map_or(0, |channel| channel.stage_bytes());
        channel + kernel.fragment(*place).map_or(0, |f| f.len() * u64::from(f.element.bytes()))
    };
    let elements = op.place.and_then(|place| kernel.fragment(place)).map_or(0, |f| f.len());
    let all: u64 = places().map(bytes).sum();
    BEGIN
        + match op.code {
            Opcode::Mma | Opcode::Product => {
                let inner =
                    places().filter_map(|place| kernel.channel(*place)).map(|c| c.dims[0].max(c.dims[1]));
                // Factors may have to be packed.
                elements.saturating_mul(inner.max().unwrap_or(1).into()) / PRODUCTS + all
            }
            Opcode::Map => elements.saturating_mul(map_element(kernel, op, Costs::Cpu)),
            // Each element by comparing and exchanging.
            Opcode::PutAdd => elements.saturating_add(places().map(bytes).sum::<u64>()).saturating_mul(64),
            Opcode::Release => 0,
            _ => all / BYTES,
        }
}

/// What an op costs for one element; `shared` is whether the memory that it works on is. For a conversion, `from` is what it
/// converts from and `to` what to; elsewhere they are one, or what it takes and gives.
pub(crate) fn element(costs: Costs, op: Opcode, from: Scalar, to: Scalar, shared: bool) -> u64 {
    match costs {
        Costs::Ptx(arch, version) => {
            let expanded = !crate::backend::ptx::is_native(arch, version, op, from, to);
            ptx(op, from, to, shared, expanded)
        }
        Costs::Amdgcn(_) => ptx(op, from, to, shared, !crate::backend::amdgcn::is_native(op, from, to)),
        Costs::Cpu => cpu(op, from, to, shared),
    }
}

fn is_narrow_float(ty: Scalar) -> bool {
    matches!(ty, Scalar::F16 | Scalar::Bf16 | Scalar::F8E4M3 | Scalar::F8E5M2)
}

/// On a GPU. What is expanded counts as what it becomes.
fn ptx(op: Opcode, from: Scalar, to: Scalar, shared: bool, expanded: bool) -> u64 {
    use Opcode::*;
    let float = |native: u64| match from {
        Scalar::F64 => 4 * native,
        ty if is_narrow_float(ty) && expanded => 8 * native,
        _ => native,
    };
    match op {
        Const | Splat | Make | Extract | Insert => 1,
        Add | Sub | Mul | Neg | Abs | AbsS | Min | Max | Minimum | Maximum | MinS | MaxS | MinU | MaxU => {
            float(1)
        }
        // Rounded once more, of bf16 it is two in f32.
        Fma => float(if from == Scalar::Bf16 && expanded { 4 } else { 1 }),
        MulHiS | MulHiU => {
            if from == Scalar::I64 {
                4
            } else {
                1
            }
        }
        And | Or | Xor | Not | Shl | ShrS | ShrU | Rotl => 1,
        Clz | Ctz | Popcount | BitReverse => 8,
        Eq | Ne | Lt | Le | Gt | Ge => float(1),
        LtS | LeS | GtS | GeS | LtU | LeU | GtU | GeU | Select => 1,
        Sext | Zext | Trunc | Bitcast | SiToFp | UiToFp | FpToSi | FpToUi => 8,
        FpConv => {
            if expanded && (is_narrow_float(from) || is_narrow_float(to)) {
                32
            } else {
                8
            }
        }
        DivS | DivU | RemS | RemU => 64,
        Div | Sqrt | Rsqrt | Rcp | Exp | Exp2 | Log | Log2 | Sin | Cos | Tanh | Erf | Pow => {
            if from == Scalar::F64 { 256 } else { 64 }
        }
        Floor | Ceil | Round | Fix => float(1),
        ThreadId | BlockId | BlockDim | GridDim | GlobalId | LocalIndex | LaneId | WarpId | ClusterRank
        | ClusterId | Extent => 1,
        Load | Store => {
            if shared {
                8
            } else {
                16
            }
        }
        AtomicLoad | AtomicStore | AtomicAdd | AtomicMinS | AtomicMaxS | AtomicMinU | AtomicMaxU
        | AtomicAnd | AtomicOr | AtomicXor | AtomicExchange | AtomicCas => {
            if shared {
                256
            } else {
                1024
            }
        }
        Fence | ClusterGather => 1024,
        LoadUniform | Shuffle | ShuffleXor | ShuffleUp | ShuffleDown | VoteAny | VoteAll | Ballot
        | WarpAdd | WarpMin | WarpMax | WarpMinS | WarpMaxS | WarpMinU | WarpMaxU | WarpAnd | WarpOr
        | WarpXor | Barrier | Clock => 64,
        // By what they work on: `tile`.
        Fetch | Release | Fill | Mma | Product | Map | RowAdd | RowMax | RowMin | Share | Put | PutAdd
        | PutRows | Get | Send => 1,
        If | For | ForCluster | While | Switch => LOOP,
    }
}

/// On a processor, in nanoseconds.
fn cpu(op: Opcode, from: Scalar, to: Scalar, shared: bool) -> u64 {
    use Opcode::*;
    let narrow = is_narrow_float(from) || is_narrow_float(to);
    let by_type = |narrow: u64, wide: u64| if is_narrow_float(from) { narrow } else { wide };
    match op {
        Const | Splat | Make | Extract | Insert => 1,
        Add | Sub | Mul => by_type(32, 1),
        Neg | Abs => by_type(4, 2),
        Min | Max | Minimum | Maximum => by_type(48, 4),
        Fma => by_type(64, 4),
        AbsS | MinS | MaxS | MinU | MaxU => 2,
        MulHiS | MulHiU => {
            if from == Scalar::I64 {
                8
            } else {
                4
            }
        }
        And | Or | Xor | Not => 1,
        Shl | ShrS | ShrU | Rotl => 4,
        Clz | Ctz | Popcount | BitReverse => 8,
        Eq | Ne | Lt | Le | Gt | Ge => by_type(64, 1),
        LtS | LeS | GtS | GeS | LtU | LeU | GtU | GeU | Select => 1,
        Sext | Zext | Trunc | Bitcast => 1,
        FpConv | SiToFp | UiToFp => {
            if narrow {
                24
            } else {
                4
            }
        }
        FpToSi | FpToUi => by_type(64, 16),
        DivS | DivU | RemS | RemU => 16,
        Div | Sqrt | Rcp => by_type(64, 16),
        Rsqrt => by_type(256, 16),
        Exp | Exp2 | Log | Log2 | Sin | Cos | Tanh | Erf => by_type(128, 64),
        Pow => by_type(1024, 256),
        Floor | Ceil | Round | Fix => by_type(64, 2),
        ThreadId | BlockId | BlockDim | GridDim | GlobalId | LocalIndex | LaneId | WarpId | ClusterRank
        | ClusterId | Extent => 1,
        Load | Store => {
            if shared {
                8
            } else {
                16
            }
        }
        AtomicLoad | AtomicStore => {
            if shared {
                8
            } else {
                64
            }
        }
        AtomicAdd | AtomicMinS | AtomicMaxS | AtomicMinU | AtomicMaxU | AtomicAnd | AtomicOr | AtomicXor
        | AtomicExchange | AtomicCas => {
            if shared {
                16
            } else {
                256
            }
        }
        Fence => 64,
        ClusterGather => 1024,
        LoadUniform => 16,
        Shuffle | ShuffleXor | ShuffleUp | ShuffleDown | VoteAny | VoteAll | Ballot | WarpAnd | WarpOr
        | WarpXor => 16,
        WarpAdd | WarpMin | WarpMax | WarpMinS | WarpMaxS | WarpMinU | WarpMaxU => by_type(512, 32),
        Barrier => 16,
        // By what they work on: `tile`.
        Fetch | Release | Fill | Mma | Product | Map | RowAdd | RowMax | RowMin | Share | Put | PutAdd
        | PutRows | Get | Send => 1,
        Clock => 64,
        If | For | ForCluster | While | Switch => LOOP,
    }
}
