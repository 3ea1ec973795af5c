//! Kernels that were compiled or run.

use schemars::JsonSchema;
use serde::Serialize;

/// What became of a kernel file.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Compiled {
    /// The target, as it was asked for.
    pub target: String,
    /// What the code is, `PTX` for one.
    pub format: String,
    /// Bytes of the code.
    pub code_bytes: usize,
    /// The code where it is text and went to no file, else null.
    pub code: Option<String>,
    /// The file that the code went to, null when it went to none.
    pub file: Option<String>,
    /// The kernels, in the file's order.
    pub kernels: Vec<CompiledKernel>,
}

/// A kernel of a compiled file.
#[derive(Debug, Serialize, JsonSchema)]
pub struct CompiledKernel {
    /// Its name.
    pub name: String,
    /// Its symbol in the code.
    pub symbol: String,
    /// Threads of a block along x, y and z; a launch must use just these.
    pub block: [u32; 3],
    /// Bytes of shared memory that the code declares by itself.
    pub static_shared_bytes: u32,
    /// Bytes of shared memory that the launch must ask for.
    pub dynamic_shared_bytes: u32,
    /// Bytes of the one block of parameters.
    pub parameter_bytes: u32,
    /// Its parameters, in the order of a launch's arguments.
    pub parameters: Vec<KernelParameter>,
    /// What multiplies in a tile kernel, each once: `wgmma`, `mma.sync`, or `cores`, which are no tensor cores. Empty where there are no
    /// products, or the target has one way for all.
    pub products: Vec<String>,
    /// Why a tile kernel does not go by the tensor maps and `wgmma` that the target has.
    pub fallback: Vec<Note>,
    /// Offset of the cancel flag's address in the block of parameters; null for a kernel that is not metered.
    pub stop_word_offset: Option<u32>,
    /// Offset of the fuel of each thread, which is in iterations; null for a kernel that is not metered.
    pub iterations_offset: Option<u32>,
}

/// Something that is said of a kernel.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Note {
    /// The line of the op, the declaration or the kernel; 0 if unknown.
    pub line: u32,
    /// What is said.
    pub message: String,
}

/// A parameter of a kernel.
#[derive(Debug, Serialize, JsonSchema)]
pub struct KernelParameter {
    /// Its name.
    pub name: String,
    /// Its type as the kernel's text has it, as in `view<f32, [?], read>`.
    #[serde(rename = "type")]
    pub parameter_type: String,
    /// Where in the block of parameters it begins.
    pub offset: u32,
}

/// Every op that a file uses, and how a target does it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Legal {
    /// The target, as it was asked for.
    pub target: String,
    /// Whether it compiles.
    pub compiles: bool,
    /// The ops on their types, in the file's order.
    pub ops: Vec<LegalOp>,
    /// Everything for which the target would reject the file.
    pub rejects: Vec<Reject>,
}

/// An op on a type, and how a target does it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LegalOp {
    /// The op's name.
    pub op: String,
    /// The type that it works on; for a conversion, what it converts from.
    #[serde(rename = "type")]
    pub op_type: String,
    /// What a conversion gives; null for other ops.
    pub to: Option<String>,
    /// How often the file has it.
    pub count: u32,
    /// The line where it stands first.
    pub line: u32,
    /// How the target does it.
    pub support: Support,
    /// By what it is expanded, or the code for which it is rejected; null where it is native.
    pub how: Option<String>,
}

/// How a target does an op.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Support {
    /// By an instruction, or by none.
    Native,
    /// By several.
    Expanded,
    /// Not at all.
    Rejected,
}

/// One reason for which a target does not compile a kernel.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Reject {
    /// Stable code, as in `unsupported-op`.
    pub code: String,
    /// The kernel.
    pub kernel: String,
    /// The line of the op or of the kernel; 0 if unknown.
    pub line: u32,
    /// What, where and what to do.
    pub message: String,
}

/// Something that kernels can be compiled for.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TargetInfo {
    /// The target, as `--target` takes it.
    pub target: String,
    /// What the code is, `PTX` for one.
    pub format: String,
    /// The version of PTX that is written; null where the code is none.
    pub ptx_version: Option<String>,
    /// Bytes of shared memory that a block can have; null for a processor, where it is ordinary memory.
    pub shared_bytes: Option<u64>,
    /// Whether there are clusters of blocks.
    pub clusters: bool,
    /// Whether there are tile kernels.
    pub tiles: bool,
    /// Whether it is this machine's processor, which is `cpu` as well.
    pub host: bool,
}

/// How a kernel ran.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Launched {
    /// The kernel's name.
    pub kernel: String,
    /// What ran it: `interpreter`, `cpu`, or a PCI address.
    pub device: String,
    /// The device's name.
    pub device_name: String,
    /// What it was compiled for; null where nothing was compiled.
    pub target: Option<String>,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub block: [u32; 3],
    /// Compiling and loading, in milliseconds; null where nothing was compiled.
    pub compile_ms: Option<f64>,
    /// The run, as the host saw it, in milliseconds; with `--repeat`, the median of those that were timed.
    pub run_ms: f64,
    /// With `--repeat`, how long the launches took; else null.
    pub repeated: Option<Repeated>,
    /// The ops that reached beyond a view or a shared array when the interpreter ran the kernel; null where it did not.
    pub out_of_bounds: Option<Vec<OutOfBounds>>,
    /// The views that the kernel may write, in the order of the parameters.
    pub outputs: Vec<Output>,
}

/// How long launches of a kernel took, as the host saw it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Repeated {
    /// How many were timed; one before them was not.
    pub launches: u32,
    /// The median, in milliseconds.
    pub median_ms: f64,
    /// The shortest, in milliseconds.
    pub min_ms: f64,
    /// The longest, in milliseconds.
    pub max_ms: f64,
}

/// An op that reached beyond a view or a shared array.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OutOfBounds {
    /// The op's name.
    pub op: String,
    /// Its line in the file; 0 if unknown.
    pub line: u32,
    /// The view or the array.
    pub place: String,
    /// The extents of the place, slowest dimension first.
    pub extents: Vec<u64>,
    /// The first indices that are not all within.
    pub first: Vec<i64>,
    /// How many elements each access reaches over, from the last index on.
    pub lanes: u8,
    /// How many accesses of a thread were not wholly within.
    pub accesses: u64,
}

/// What a kernel wrote.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Output {
    /// The parameter's name.
    pub name: String,
    /// The type of its elements.
    pub element: String,
    /// Its extents, slowest dimension first.
    pub shape: Vec<u64>,
    /// The file that it went to, null when it went to none.
    pub file: Option<String>,
    /// Its first elements, at most eight: numbers, or "nan", "inf" and "-inf".
    pub first: Vec<serde_json::Value>,
    /// What `--check` found, null without it.
    pub check: Option<Check>,
}

/// How a view compares with what the interpreter wrote.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Check {
    /// Whether every element is close enough.
    pub agrees: bool,
    /// How far floats may differ, times the greater of 1 and the expected magnitude; integers must be equal.
    pub tolerance: f64,
    /// The first element that is not close enough, in words; null when all are.
    pub mismatch: Option<String>,
}

/// A family that was tuned for a problem.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Tuned {
    /// The family.
    pub family: String,
    /// The shape class, which problems that share the choice have in common.
    pub class: String,
    /// What it was tuned on: `cpu`, or a PCI address.
    pub device: String,
    /// The device's name.
    pub device_name: String,
    /// The name of the variant that was chosen.
    pub chosen: String,
    /// The blocks along x, y and z to launch it over; of several kernels the one that has most to do.
    pub grid: [u32; 3],
    /// The launches of all its kernels, one behind the other.
    pub launches: Vec<TunedLaunch>,
    /// Whether the choice was kept from before, and nothing was measured.
    pub cached: bool,
    /// How long it took in all, in milliseconds.
    pub elapsed_ms: f64,
    /// All variants, in the order in which they would be taken untuned.
    pub variants: Vec<Variant>,
}

/// A launch of a chosen variant's kernel.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TunedLaunch {
    /// The kernel's name.
    pub kernel: String,
    /// The blocks along x, y and z to launch it over.
    pub grid: [u32; 3],
}

/// A variant of a family.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Variant {
    /// Its name.
    pub name: String,
    /// What came of it.
    pub outcome: VariantOutcome,
    /// The median of a launch, of several kernels of all of them, by the device's clock, in microseconds; null where it was not measured.
    pub median_us: Option<f64>,
    /// The least.
    pub least_us: Option<f64>,
    /// The greatest.
    pub greatest_us: Option<f64>,
    /// How often it was measured.
    pub samples: u32,
    /// Operations in a second at the median, in units of 10^12; null where it was not measured.
    pub tera_operations: Option<f64>,
    /// Why it failed; null where it did not.
    pub reason: Option<String>,
}

/// What came of a variant.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum VariantOutcome {
    /// It was measured to the end.
    Measured,
    /// It was clearly slower than the best, and not measured to the end.
    Slower,
    /// It can't be compiled, loaded or launched here, or did not end.
    Failed,
    /// There was no time left for it.
    Late,
}
