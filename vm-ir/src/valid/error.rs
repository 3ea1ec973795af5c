//! What the validator finds.

use crate::module::GuestAddr;
use crate::text::{Mark, render};
use crate::types::{Class, Scalar, Type};

/// A broken rule: which, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel @{kernel} at {guest}{}{}: {kind}", on_line(", line ", *line), op.map_or_else(String::new, |op| format!(", {op}")))]
pub struct ValidationError {
    /// The kernel's name.
    pub kernel: String,
    /// Where in the guest it came from.
    pub guest: GuestAddr,
    /// The line of the op, of the array or of the kernel; 0 if unknown.
    pub line: u32,
    /// The op's name; `None` where the kernel's head is wrong.
    pub op: Option<&'static str>,
    /// The rule.
    pub kind: Rule,
}

/// Says which line it is, if that is known.
fn on_line(words: &str, line: u32) -> String {
    if line == 0 { String::new() } else { format!("{words}{line}") }
}

impl ValidationError {
    /// The error with its line of the text that the module was read from, and carets below what is wrong.
    pub fn render(&self, source: &str) -> String {
        let operand = match self.kind {
            Rule::Operand { index, .. }
            | Rule::OtherSign { index, .. }
            | Rule::OperandNotUniform(index)
            | Rule::OperandNotWarpUniform(index) => Some(index),
            _ => None,
        };
        render(source, &Mark { line: self.line, op: self.op, operand, message: &self.to_string() })
    }
}

/// Everything that one validation found, in the order of the text; never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ValidationErrors(pub Vec<ValidationError>);

impl ValidationErrors {
    /// Each [rendered](ValidationError::render), one behind the other.
    pub fn render(&self, source: &str) -> String {
        self.0.iter().map(|error| error.render(source)).collect::<Vec<_>>().join("\n")
    }
}

/// A rule that a module breaks. Its [code](Rule::code) is the variant's name, so none is renamed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
#[non_exhaustive]
pub enum Rule {
    /// A name that cannot be written in text.
    #[error("{0:?} is no name: at most 64 letters, digits and _, not beginning with a digit")]
    Name(String),
    /// Two things of one kernel, or two kernels, have one name.
    #[error("the name {0} is used twice")]
    DuplicateName(String),
    /// A count is above its cap.
    #[error("{found} {what}; at most {limit} are allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// The cap.
        limit: u64,
    },
    /// The block is empty or too large.
    #[error(
        "a block of {0} × {1} × {2} threads; each must be at least 1, at most 1024, 1024 and 64, and all together 1024"
    )]
    BlockSize(u32, u32, u32),
    /// The cluster is of a size that does not exist, or of blocks with a warp that is not full.
    #[error(
        "a cluster of {blocks} blocks of {threads} threads; it has 2, 4 or 8 blocks of a multiple of 32 threads each"
    )]
    ClusterSize {
        /// Blocks of the cluster.
        blocks: u32,
        /// Threads of each.
        threads: u32,
    },
    /// No multiprocessor has so many blocks.
    #[error("{0} blocks of a multiprocessor at once; the most are 32")]
    Resident(u32),
    /// A tile kernel's roles take registers from one another, and would wait for ever for those that a hint took from all.
    #[error("a tile kernel has no resident(): its roles divide the registers of a block")]
    ResidentTile,
    /// The view's dimensions are none, too many, or not sensible.
    #[error(
        "@{0} has a dimension that no memory can have; a view has 1 to 4, each at most 2^40 and a multiple of at least 1"
    )]
    ViewDims(String),
    /// The view's alignment is not a power of two from the element's size to 256.
    #[error("@{name} is aligned to {align}; that must be a power of two from the element's {least} to 256")]
    ViewAlign {
        /// The view.
        name: String,
        /// Its alignment.
        align: u32,
        /// The element's size.
        least: u32,
    },
    /// A surface of a type that no image has, or an op that does not work on its pixels.
    #[error("@{name} is a surface: {what}")]
    Surface {
        /// The surface.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// The name of an extent is none, or does not fit the extent.
    #[error("@{view} names an extent {name:?}, {what}")]
    ExtentName {
        /// The view.
        view: String,
        /// The name.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// Memory does not hold this type.
    #[error("@{name} holds {element}; memory holds {}", Class::DATA)]
    Element {
        /// The view or the array.
        name: String,
        /// Its element.
        element: Scalar,
    },
    /// A scalar parameter is a vector or of a type that registers do not hold.
    #[error("%{name} is {ty}; a parameter is a single {}", Class::DATA)]
    ParamType {
        /// The parameter.
        name: String,
        /// Its type.
        ty: Type,
    },
    /// A range on something that is not an integer, or an empty one, or one beyond the type.
    #[error("%{0} has a range that is empty, beyond its type or not on an integer")]
    ParamRange(String),
    /// An array with no elements or the wrong number of dimensions.
    #[error("@{0} has no elements, or not 1 to 4 dimensions")]
    SharedDims(String),
    /// Too much shared memory.
    #[error("the shared arrays take {bytes} bytes; a block has {limit}")]
    SharedSize {
        /// The sum, each array rounded up to 16 bytes.
        bytes: u64,
        /// The cap.
        limit: u64,
    },
    /// Too much local memory.
    #[error("the local arrays take {bytes} bytes of each thread; it has {limit}")]
    LocalSize {
        /// The sum, each array rounded up to 16 bytes.
        bytes: u64,
        /// The cap.
        limit: u64,
    },
    /// Regions are nested too deeply.
    #[error("regions are nested more than {0} deep")]
    Depth(usize),
    /// The value is not defined here: its region is closed, or it comes later.
    #[error("{0} is not visible here: it is defined later, or in a region that this op is not in")]
    Scope(String),
    /// The op has the wrong number of operands.
    #[error("takes {expected} operands, has {found}")]
    OperandCount {
        /// How many it takes.
        expected: usize,
        /// How many it has.
        found: usize,
    },
    /// The op has the wrong number of immediates.
    #[error("takes {expected} numbers, has {found}")]
    ImmediateCount {
        /// How many it takes.
        expected: usize,
        /// How many it has.
        found: usize,
    },
    /// The op has the wrong number of results.
    #[error("gives {expected} results, has {found}")]
    ResultCount {
        /// How many it gives.
        expected: usize,
        /// How many it has.
        found: usize,
    },
    /// The op has the wrong number of regions.
    #[error("has {expected} regions, not {found}")]
    RegionCount {
        /// How many it has by its row.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// An attribute's word does not exist.
    #[error("attribute word {0} does not exist")]
    Attribute(u8),
    /// An operand is of the wrong type.
    #[error("operand {index} is {found}, not {expected}")]
    Operand {
        /// Which operand, from 1.
        index: usize,
        /// What it should be.
        expected: String,
        /// What it is.
        found: Type,
    },
    /// The operand's type is one for which another op does the same, as the sign of integers is in the op.
    #[error("operand {index} is {found}, not {expected}; write {instead}")]
    OtherSign {
        /// Which operand, from 1.
        index: usize,
        /// What it should be.
        expected: String,
        /// What it is.
        found: Type,
        /// The ops for it.
        instead: String,
    },
    /// The result is of the wrong type.
    #[error("the result is {found}, not {expected}")]
    Result {
        /// What it should be.
        expected: String,
        /// What it is written as.
        found: Type,
    },
    /// A constant has bits beyond its type.
    #[error("the constant {0:#x} has bits beyond its type")]
    ConstBits(u64),
    /// A conversion does not widen or narrow as it should.
    #[error("{from} to {to} is not {expected}")]
    Width {
        /// The operand's type.
        from: Type,
        /// The result's type.
        to: Type,
        /// What the op is for.
        expected: &'static str,
    },
    /// A number that is too large.
    #[error("{what} {found} does not exist; there are {limit}")]
    Number {
        /// What it counts.
        what: &'static str,
        /// The number.
        found: u64,
        /// How many there are.
        limit: u64,
    },
    /// The op needs a place and has none, or has one and needs none, or needs another kind.
    #[error("needs {0}")]
    Place(&'static str),
    /// The place needs another number of indices.
    #[error("@{name} has {expected} dimensions; there are {found} indices")]
    IndexCount {
        /// The place.
        name: String,
        /// Its rank.
        expected: usize,
        /// The number of indices.
        found: usize,
    },
    /// A vector is longer than a row of the shared array.
    #[error("@{name} has rows of {row}; a vector of {lanes} does not fit")]
    RowTooShort {
        /// The array.
        name: String,
        /// Its last extent.
        row: u32,
        /// The vector's lanes.
        lanes: u8,
    },
    /// An access by bytes is too wide, or its view may begin anywhere.
    #[error("{value} is {bytes} bytes of @{name}; {what}")]
    Bytes {
        /// The view or the array.
        name: String,
        /// What is loaded or stored.
        value: Type,
        /// Its size.
        bytes: u32,
        /// What is wrong.
        what: String,
    },
    /// The array has another size than what is gathered into it.
    #[error("@{name} has {found} elements; the {warps} warps of the cluster give {expected}")]
    GatherSize {
        /// The array.
        name: String,
        /// Warps of the cluster.
        warps: u32,
        /// Elements that they give.
        expected: u64,
        /// Elements of the array.
        found: u64,
    },
    /// The kernel may not do this with the view.
    #[error("@{name} is a view for {access}; this op {does} it")]
    Access {
        /// The view.
        name: String,
        /// What it is for.
        access: &'static str,
        /// What the op does.
        does: &'static str,
    },
    /// The order means nothing for this op.
    #[error("an order of {0} means nothing for it")]
    Order(&'static str),
    /// A region yields the wrong values.
    #[error("yields {found}, not {expected}")]
    Yields {
        /// The types it should yield.
        expected: String,
        /// The types it yields.
        found: String,
    },
    /// The arguments of a region are not those that its op gives it.
    #[error("the region's arguments are {found}, not {expected}")]
    RegionArgs {
        /// The types they should have.
        expected: String,
        /// The types they have.
        found: String,
    },
    /// Two cases of a switch are one number, or a number beyond the type.
    #[error("case {0} is there twice or beyond the operand's type")]
    Case(i64),
    /// The op must be reached by the whole block and may not be.
    #[error("all threads of the block must reach it together, but {0}")]
    NotBlockUniform(Divergence),
    /// The op must be reached by the whole warp and may not be.
    #[error("all threads of the warp must reach it together, but {0}")]
    NotWarpUniform(Divergence),
    /// The op must be reached by the whole cluster and may not be.
    #[error("all threads of the cluster must reach it together, but {0}")]
    NotClusterUniform(Divergence),
    /// The op has no meaning in a kernel with clusters.
    #[error("gives one value to a block, and the blocks of a cluster must go one way; gather instead")]
    InCluster,
    /// An operand must be the same in all threads of the warp.
    #[error("operand {0} must be the same in all threads of the warp")]
    OperandNotWarpUniform(usize),
    /// An operand must be the same in all threads of the block.
    #[error("operand {0} must be the same in all threads of the block")]
    OperandNotUniform(usize),
    /// An index of what a cluster fetches together must be the same in all its blocks.
    #[error("index {0} must be the same in all blocks of the cluster, to which the channel is multicast")]
    NotMulticast(usize),
    /// Warp ops need whole warps.
    #[error("a block of {0} threads has a warp that is not full; ops on warps need a multiple of 32")]
    PartialWarp(u32),
    /// The op is of tile kernels alone.
    #[error("only a tile kernel has it: one with `tile(groups)` in the place of `block(…)`")]
    OutsideOfTile,
    /// A tile kernel has no such op.
    #[error("has no place in {0}, which computes for a block as a whole")]
    InTile(&'static str),
    /// The head of a tile kernel is not as it should be.
    #[error("a tile kernel has {0}")]
    TileHead(String),
    /// Tiles don't fit each other.
    #[error("{0}")]
    TileShape(String),
    /// A channel may have no free stage.
    #[error("@{name} has {stages} stages, and all of them may hold a tile here; release one before")]
    ChannelFull {
        /// The channel.
        name: String,
        /// Its stages.
        stages: u32,
    },
    /// A channel may hold no tile.
    #[error("@{0} may hold no tile here; fetch one before")]
    ChannelEmpty(String),
    /// A loop or a choice leaves a channel with another number of tiles.
    #[error("@{name} holds {found} tiles where one of its regions ends, and {expected} elsewhere")]
    ChannelUnbalanced {
        /// The channel.
        name: String,
        /// Tiles at the end of the region.
        found: u32,
        /// Tiles where the loop begins, or at the end of the other region.
        expected: u32,
    },
    /// An op of a loop whose iterations a cluster shares, or the loop, is none that it can share.
    #[error("{0}")]
    Split(String),
    /// An index of what is fetched in such a loop differs from block to block.
    #[error(
        "index {0} must be the same in all blocks of the cluster, which share the iterations of the for.cluster"
    )]
    NotSplit(usize),
    /// What a sum of such a loop begins with differs from block to block.
    #[error("what the sum of a for.cluster begins with must be the same in all blocks of the cluster")]
    NotSplitSum,
    /// Only trusted modules may use the op.
    #[error("only a trusted module may use it")]
    Trusted,
}

impl Rule {
    /// The rules' codes.
    pub const CODES: &[&str] = <Rule as strum::VariantNames>::VARIANTS;

    /// The rule's name for machines; it never changes.
    pub fn code(&self) -> &'static str {
        self.into()
    }
}

/// Why threads may not arrive together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the condition of the {op}{} may differ between them", on_line(" on line ", *line))]
pub struct Divergence {
    /// The op whose condition differs between threads.
    pub op: &'static str,
    /// Its line; 0 if unknown.
    pub line: u32,
}
