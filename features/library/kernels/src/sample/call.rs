//! Functions of the library.

use super::best::Best;
use super::chunk::{CHUNK, Reader};
use super::draw::{Candidates, Draw};
use super::numbers::Nan;
use super::parts::{Parts, What};
use super::router::Router;
use super::select::{Output, Select, Source};
use super::serial::{Serial, Serially};
use super::shares::Shares;
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Workspace};
use crate::family::{Kind, Resources};
use crate::graph::{self, NoGraph};
use crate::row::{Layout, launch_views};
use crate::softmax::SoftmaxRows;
use crate::strided::{aligned, step};
use vm_graph::ValidGraph;
use vm_ir::limits::{MAX_GRID_X, MAX_GRID_YZ};
use vm_ir::view::Access;
use vm_ir::{Scalar, Type};

/// The most columns of a row: so many weights have a sum of 64 bits.
pub const MAX_COLUMNS: u64 = 1 << 23;

/// The fewest columns for which a processor's threads share a row.
const PART: u64 = 8192;

/// A matrix of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logits {
    /// f32, bf16 or f16.
    pub element: Scalar,
    /// Rows.
    pub rows: u64,
    /// Columns: the vocabulary.
    pub columns: u64,
    /// Bytes to whose multiples the buffer is aligned.
    pub align: u32,
}

/// The column of the greatest of each row; of equal ones the first, and NaN above all. Buffers: `logits`, `output` `[rows]` of i32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Argmax {
    /// The logits.
    pub logits: Logits,
}

/// The k greatest of each row, the greatest first; of equal ones the first, and NaN above all. Buffers: `logits`, `values` of
/// the logits' type and `indices` of i32, `[rows, k]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopK {
    /// The logits.
    pub logits: Logits,
    /// At most as many as there are columns.
    pub k: u64,
}

/// Softmax of each row, of which its k greatest are kept, as a router chooses experts. Buffers: `input`, `weights` of its type and
/// `indices` of i32, `[rows, k]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxTopK {
    /// The input. Rows of more than [`Router::COLUMNS`] columns take several launches, and a workspace.
    pub logits: Logits,
    /// At most as many as there are columns.
    pub k: u64,
    /// Are the weights that are kept divided by their sum?
    pub renormalised: bool,
}

/// A column of each row, drawn with the probability softmax(logits / temperature). Buffers: `logits`, `output` `[rows]` of i32, `seeds`
/// `[rows]` of i64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The logits.
    pub logits: Logits,
    /// Finite and not negative; at 0 the greatest is taken.
    pub temperature: f32,
}

/// The same, of the k greatest alone; of equal ones the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopKSample {
    /// The logits.
    pub logits: Logits,
    /// From 1 on; as many as there are columns, or more, are all.
    pub k: u64,
    /// Finite and not negative; at 0 the greatest is taken.
    pub temperature: f32,
}

/// The same, of the fewest greatest whose probabilities reach `p`; of equal ones the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopPSample {
    /// The logits.
    pub logits: Logits,
    /// From 0, which is the greatest alone, to 1, which is all.
    pub p: f32,
    /// Finite and not negative; at 0 the greatest is taken.
    pub temperature: f32,
}

impl Logits {
    fn buffer(&self, name: &'static str) -> Buffer {
        Buffer::new(name, self.element, &[self.rows, self.columns], Access::Read)
    }

    /// Those of rows that lie as the first buffer's do.
    fn strided(self, buffers: &[Buffer]) -> Logits {
        Logits { align: aligned(self.align, &buffers[..1]), ..self }
    }

    fn operand(&self) -> Operand {
        Operand::whole(0, self.element, &[self.rows, self.columns])
    }

    fn reader(&self) -> Reader {
        Reader::of(self.element, self.columns, self.align)
    }

    fn chunks(&self) -> u64 {
        self.columns.div_ceil(CHUNK.into())
    }

    /// A launch of a block for each row.
    fn by_row(&self, entry: Entry, operands: Vec<Operand>) -> Launch {
        Launch { entry, grid: [self.rows as u32, 1, 1], operands }
    }

    /// The first pass.
    fn parts(&self, what: What, written: &[Operand], numbers: &[Operand]) -> Launch {
        let operands = [&[self.operand()], written, numbers].concat();
        let blocks = self.chunks().div_ceil(Parts::WARPS.into()) as u32;
        let entry = Entry::Parts(Parts { reader: self.reader(), what });
        Launch { entry, grid: [self.rows as u32, blocks, 1], operands }
    }

    /// Is there anything to do?
    fn check(&self, function: &'static str) -> Result<bool, CallError> {
        let said = |what: String| Err(CallError::Unsupported { function, what });
        let (element, rows, columns) = (self.element, self.rows, self.columns);
        if !matches!(element, Scalar::F32 | Scalar::Bf16 | Scalar::F16) {
            return said(format!("logits of {element}; take f32, bf16 or f16"));
        }
        if columns > MAX_COLUMNS {
            return said(format!("{columns} columns; at most {MAX_COLUMNS} are taken"));
        }
        if rows > MAX_GRID_X.into() {
            return said(format!("{rows} rows; at most {MAX_GRID_X} are taken: call it for parts of them"));
        }
        if rows > 0 && columns == 0 {
            return said("rows of no columns have no greatest; give at least 1".to_owned());
        }
        Ok(rows > 0)
    }

    fn check_k(&self, function: &'static str, k: u64) -> Result<bool, CallError> {
        let columns = self.columns;
        if k > columns {
            let what = format!("k is {k}, and rows have {columns} columns; take at most that");
            return Err(CallError::Unsupported { function, what });
        }
        Ok(self.check(function)? && k > 0)
    }

    fn greatest(&self, nan: Nan, resources: &Resources) -> Call {
        let output = Operand::whole(1, Scalar::I32, &[self.rows]);
        if resources.kind == Kind::Cpu {
            return self.greatest_serially(nan, output, resources);
        }
        if self.chunks() == 1 {
            let entry = Entry::Best(Best { reader: Some(self.reader()), nan });
            return Call { launches: vec![self.by_row(entry, vec![self.operand(), output])], workspace: 0 };
        }
        let mut workspace = Workspace::default();
        let pairs = [workspace.take(Scalar::I64, &[self.rows, self.chunks()])];
        let first = self.parts(What::Best(nan), &pairs, &[]);
        let [pairs] = pairs;
        let second = self.by_row(Entry::Best(Best { reader: None, nan }), vec![pairs, output]);
        Call { launches: vec![first, second], workspace: workspace.bytes() }
    }

    /// The same by a thread for each row, or for each part of few rows.
    fn greatest_serially(&self, nan: Nan, output: Operand, resources: &Resources) -> Call {
        let units = u64::from(resources.compute_units.max(1));
        let parts = units.div_ceil(self.rows).min(self.columns / PART).min(MAX_GRID_YZ.into());
        let entry = |what| Entry::Serial(Serial { element: self.element, what });
        if parts <= 1 {
            let launch = self.by_row(entry(Serially::Best(nan)), vec![self.operand(), output]);
            return Call { launches: vec![launch], workspace: 0 };
        }
        let mut workspace = Workspace::default();
        let pairs = workspace.take(Scalar::I64, &[self.rows, parts]);
        let operands = vec![self.operand(), pairs.clone()];
        let grid = [self.rows as u32, parts as u32, 1];
        let first = Launch { entry: entry(Serially::Parts(nan)), grid, operands };
        let second = self.by_row(Entry::Best(Best { reader: None, nan }), vec![pairs, output]);
        Call { launches: vec![first, second], workspace: workspace.bytes() }
    }

    /// The k greatest of each row, the greatest first, written to these places; of a workspace a part is taken.
    fn sorted(&self, k: u64, written: [Operand; 2], workspace: Workspace, resources: &Resources) -> Call {
        if resources.kind == Kind::Cpu && k <= Serial::MOST {
            let entry = Entry::Serial(Serial::sorted(self.element, k));
            let operands = [vec![self.operand()], written.into(), vec![Operand::i32(k as i32)]].concat();
            return Call { launches: vec![self.by_row(entry, operands)], workspace: workspace.bytes() };
        }
        self.select(k, written.into(), Output::Sorted, workspace)
    }

    /// The k greatest of each row; with a scale, one of them drawn.
    fn select(&self, k: u64, written: Vec<Operand>, output: Output, mut workspace: Workspace) -> Call {
        let room = u64::from(Select::ROOM);
        // A thread's greatest keys: together at least four times k.
        let threads = if self.columns <= u64::from(CHUNK) { 256 } else { 512 };
        let held = (4 * k).div_ceil(threads.into()).next_power_of_two();
        let groups = self.chunks() * 32;
        let source = if groups >= 4 * k && held <= 8 && self.columns > u64::from(CHUNK) {
            Source::Groups(held as u32)
        } else if self.columns <= room {
            Source::All
        } else {
            Source::Row
        };
        let entry = Entry::Select(Select { reader: self.reader(), threads, source, output });
        let mut launches = Vec::new();
        let mut operands = vec![self.operand()];
        if let Source::Groups(_) = source {
            let keys = workspace.take(Scalar::I32, &[self.rows, groups]);
            let nan = if output == Output::Sorted { Nan::Greatest } else { Nan::Least };
            launches.push(self.parts(What::Keys(nan), std::slice::from_ref(&keys), &[]));
            operands.push(keys);
        }
        operands.extend(written);
        operands.push(Operand::i32(k as i32));
        launches.push(self.by_row(entry, operands));
        Call { launches, workspace: workspace.bytes() }
    }

    /// `output`, `seeds` and the scale of what draws.
    fn drawn(&self, scale: f32) -> Vec<Operand> {
        vec![
            Operand::whole(1, Scalar::I32, &[self.rows]),
            Operand::whole(2, Scalar::I64, &[self.rows]),
            Operand::f32(scale),
        ]
    }

    /// A draw of all, or of the most likely.
    fn draw(&self, scale: f32, candidates: Candidates, part: u64) -> Call {
        let mut operands = vec![self.operand()];
        operands.extend(self.drawn(scale));
        let mut workspace = Workspace::default();
        let mut launches = Vec::new();
        if candidates != Candidates::Chunk {
            let extents = [self.rows, self.chunks()];
            let parts = [workspace.take(Scalar::F32, &extents), workspace.take(Scalar::I64, &extents)];
            launches.push(self.parts(What::Weights, &parts, &[Operand::f32(scale)]));
            operands.extend(parts);
        }
        let warps = match candidates {
            Candidates::Chunk | Candidates::All => 1,
            Candidates::Mass | Candidates::Count => {
                operands.push(Operand::Number(part, Type::I64));
                self.chunks().next_power_of_two().min(16) as u32
            }
        };
        launches.push(self.by_row(Entry::Draw(Draw { reader: self.reader(), candidates, warps }), operands));
        Call { launches, workspace: workspace.bytes() }
    }

    fn sample(&self, scale: f32) -> Call {
        self.draw(scale, if self.chunks() == 1 { Candidates::Chunk } else { Candidates::All }, 0)
    }

    fn drawing_buffers(&self) -> Vec<Buffer> {
        vec![
            self.buffer("logits"),
            Buffer::new("output", Scalar::I32, &[self.rows], Access::Write),
            Buffer::new("seeds", Scalar::I64, &[self.rows], Access::Read),
        ]
    }

    fn selected_buffers(&self, names: [&'static str; 2], k: u64) -> Vec<Buffer> {
        let extents = [self.rows, k];
        vec![
            self.buffer(names[0]),
            Buffer::new(names[1], self.element, &extents, Access::Write),
            Buffer::new("indices", Scalar::I32, &extents, Access::Write),
        ]
    }
}

/// What logits are multiplied by, as powers are of 2; none where the greatest is taken.
pub(crate) fn scale_of(function: &'static str, temperature: f32) -> Result<Option<f32>, CallError> {
    if !(temperature.is_finite() && temperature >= 0.0) {
        let what = format!("a temperature of {temperature}; take a finite number from 0 on");
        return Err(CallError::Unsupported { function, what });
    }
    let scale = (std::f64::consts::LOG2_E / f64::from(temperature)) as f32;
    Ok(scale.is_finite().then_some(scale))
}

impl Function for Argmax {
    fn buffers(&self) -> Vec<Buffer> {
        let Logits { rows, .. } = self.logits;
        vec![self.logits.buffer("logits"), Buffer::new("output", Scalar::I32, &[rows], Access::Write)]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::sample::argmax(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let any = self.logits.check("argmax")?;
        Ok(if any { self.logits.greatest(Nan::Greatest, resources) } else { Call::default() })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        Argmax { logits: self.logits.strided(buffers) }.call(resources)
    }
}

impl Function for TopK {
    fn buffers(&self) -> Vec<Buffer> {
        self.logits.selected_buffers(["logits", "values"], self.k)
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::sample::top_k(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let Logits { element, rows, .. } = self.logits;
        if !self.logits.check_k("topk", self.k)? {
            return Ok(Call::default());
        }
        let extents = [rows, self.k];
        let written = [Operand::whole(1, element, &extents), Operand::whole(2, Scalar::I32, &extents)];
        Ok(self.logits.sorted(self.k, written, Workspace::default(), resources))
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        TopK { logits: self.logits.strided(buffers), ..*self }.call(resources)
    }
}

impl Function for SoftmaxTopK {
    fn buffers(&self) -> Vec<Buffer> {
        self.logits.selected_buffers(["input", "weights"], self.k)
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::sample::softmax_top_k(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launches(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        SoftmaxTopK { logits: self.logits.strided(buffers), ..*self }.launches(step(&buffers[..1]), resources)
    }
}

impl SoftmaxTopK {
    /// The launches, of logits whose rows begin at multiples of `step` elements; of dense ones with 0.
    fn launches(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "softmax_topk";
        let SoftmaxTopK { logits, k, renormalised } = *self;
        let Logits { element, rows, columns, align } = logits;
        if !logits.check_k(NAME, k)? {
            return Ok(Call::default());
        }
        let extents = [rows, k];
        let (weights, indices) =
            (Operand::whole(1, element, &extents), Operand::whole(2, Scalar::I32, &extents));
        if columns <= Router::COLUMNS.into() {
            let router = Router::of(element, columns as u32, renormalised);
            let operands = vec![logits.operand(), weights, indices, Operand::i32(k as i32)];
            let grid = [rows.div_ceil(router.rows().into()) as u32, 1, 1];
            let launch = Launch { entry: Entry::Router(router), grid, operands };
            return Ok(Call { launches: vec![launch], workspace: 0 });
        }
        // The k greatest first, then what becomes of them: their own softmax, or their part of the row's.
        let mut workspace = Workspace::default();
        let values = workspace.take(element, &extents);
        let mut call = logits.sorted(k, [values.clone(), indices], workspace, resources);
        let (entry, layout, views, extents) = if renormalised {
            let layout = Layout::of(k, &[element; 2], element.bytes(), 1, resources);
            let rows = SoftmaxRows { layout, input: element, output: element, log: false, backward: false };
            (Entry::Softmax(rows), layout, vec![values, weights], extents)
        } else {
            // Blocks of a cluster have no loops over k.
            let alone = Resources { cluster: 1, ..*resources };
            let layout = Layout::strided([columns, step], &[element], align, 1, &alone);
            let shares = Shares { layout, element };
            (Entry::Shares(shares), layout, vec![logits.operand(), values, weights], [rows, columns])
        };
        call.launches.extend(launch_views(NAME, entry, layout, extents, views, &[])?.launches);
        Ok(call)
    }
}

impl Function for Sample {
    fn buffers(&self) -> Vec<Buffer> {
        self.logits.drawing_buffers()
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::sample::draw("sample", self.buffers(), self.temperature)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let scale = scale_of("sample", self.temperature)?;
        if !self.logits.check("sample")? {
            return Ok(Call::default());
        }
        Ok(scale
            .map_or_else(|| self.logits.greatest(Nan::Least, resources), |scale| self.logits.sample(scale)))
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        Sample { logits: self.logits.strided(buffers), ..*self }.call(resources)
    }
}

impl Function for TopKSample {
    fn buffers(&self) -> Vec<Buffer> {
        self.logits.drawing_buffers()
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::sample::draw("topk_sample", self.buffers(), self.temperature)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let function = "topk_sample";
        let scale = scale_of(function, self.temperature)?;
        if self.k == 0 {
            let what = "k is 0, and nothing is left to draw from; take at least 1".to_owned();
            return Err(CallError::Unsupported { function, what });
        }
        if !self.logits.check(function)? {
            return Ok(Call::default());
        }
        let Some(scale) = scale else { return Ok(self.logits.greatest(Nan::Least, resources)) };
        Ok(if self.k >= self.logits.columns {
            self.logits.sample(scale)
        } else if self.k > MOST_SORTED {
            self.logits.draw(scale, Candidates::Count, self.k)
        } else {
            self.logits.select(self.k, self.logits.drawn(scale), Output::Drawn, Workspace::default())
        })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        TopKSample { logits: self.logits.strided(buffers), ..*self }.call(resources)
    }
}

/// The most of which one is drawn by sorting them.
const MOST_SORTED: u64 = 1024;

impl Function for TopPSample {
    fn buffers(&self) -> Vec<Buffer> {
        self.logits.drawing_buffers()
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::sample::draw("topp_sample", self.buffers(), self.temperature)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let function = "topp_sample";
        let scale = scale_of(function, self.temperature)?;
        if !(0.0..=1.0).contains(&self.p) {
            let what = format!("p is {}; take a number from 0 to 1", self.p);
            return Err(CallError::Unsupported { function, what });
        }
        if !self.logits.check(function)? {
            return Ok(Call::default());
        }
        let Some(scale) = scale else { return Ok(self.logits.greatest(Nan::Least, resources)) };
        Ok(if self.p == 1.0 {
            self.logits.sample(scale)
        } else {
            // Exact: p has 24 bits, and what is below 2^-64 is as good as 0.
            let part = (f64::from(self.p) * 2f64.powi(64)) as u64;
            self.logits.draw(scale, Candidates::Mass, part)
        })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        TopPSample { logits: self.logits.strided(buffers), ..*self }.call(resources)
    }
}

// Blocks along y are enough for all chunks.
const _: () = assert!(MAX_COLUMNS / (CHUNK * Parts::WARPS) as u64 <= MAX_GRID_YZ as u64);
