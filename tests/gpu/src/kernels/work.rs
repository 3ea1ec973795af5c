//! What is run: a kernel and the size of its arguments, and what must come out.

use std::fmt;

/// Elements of the vectors of the figures.
const ELEMENTS: u64 = 1 << 28;
/// Rows and columns of the matrices of the figures.
const SHAPES: [(u64, u64); 3] = [(32_768, 4096), (8192, 32_768), (4096, 131_072)];
/// What RMS norm adds to the mean of the squares, and what `scale` multiplies with.
pub(super) const EPSILON: f32 = 1e-6;
pub(super) const FACTOR: f32 = 2.5;

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Silu,
    Add,
    Mul,
    Scale,
    Softmax,
    RmsNorm,
}

impl Op {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Op::Silu => "silu",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Scale => "scale",
            Op::Softmax => "softmax",
            Op::RmsNorm => "rmsnorm",
        }
    }
}

/// A kernel and its size. A vector is one row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) op: Op,
    pub(super) rows: u64,
    pub(super) columns: u64,
}

impl Work {
    /// All that there are figures of.
    pub(super) fn all() -> Vec<Work> {
        let vectors = [Op::Silu, Op::Add, Op::Mul, Op::Scale];
        let mut all: Vec<Work> =
            vectors.iter().map(|op| Work { op: *op, rows: 1, columns: ELEMENTS }).collect();
        for op in [Op::Softmax, Op::RmsNorm] {
            all.extend(SHAPES.iter().map(|(rows, columns)| Work { op, rows: *rows, columns: *columns }));
        }
        all
    }

    /// The same with other sizes: a few, and such as are no multiple of what a block or a thread takes.
    pub(super) fn ragged(self) -> Vec<Work> {
        if self.is_row() {
            return [1, 3, 133].iter().map(|rows| Work { rows: *rows, ..self }).collect();
        }
        [1, 3, 4, 511, 513, 1_000_003].iter().map(|columns| Work { columns: *columns, ..self }).collect()
    }

    pub(super) fn is_row(self) -> bool {
        matches!(self.op, Op::Softmax | Op::RmsNorm)
    }

    /// The kernel's name, and its file's.
    pub(super) fn name(self) -> String {
        match self.is_row() {
            true => format!("{}_{}", self.op.name(), self.columns),
            false => self.op.name().into(),
        }
    }

    pub(super) fn extents(self) -> Vec<u64> {
        if self.is_row() { vec![self.rows, self.columns] } else { vec![self.columns] }
    }

    pub(super) fn elements(self) -> u64 {
        self.rows * self.columns
    }

    /// Inputs as large as the output.
    pub(super) fn inputs(self) -> usize {
        if matches!(self.op, Op::Add | Op::Mul) { 2 } else { 1 }
    }

    /// Bytes that it must move: each input read once, the output written once. The weights of a row stay in caches.
    pub(super) fn bytes(self) -> u64 {
        self.elements() * 4 * (self.inputs() as u64 + 1)
    }

    /// Bytes that a copy of the output moves.
    pub(super) fn copied(self) -> u64 {
        self.elements() * 8
    }

    /// Blocks that a launch takes for threads of `block`.
    pub(super) fn blocks(self, block: u32) -> u32 {
        let blocks = if self.is_row() { self.rows } else { self.columns.div_ceil(u64::from(block) * 4) };
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// What must come out of a stretch of inputs: a part of vectors, or whole rows.
    pub(super) fn expected(self, a: &[f32], b: &[f32], weights: &[f32]) -> Vec<f64> {
        let wide = |x: &f32| f64::from(*x);
        match self.op {
            Op::Silu => a.iter().map(wide).map(|x| x / (1.0 + (-x).exp())).collect(),
            Op::Add => a.iter().zip(b).map(|(a, b)| f64::from(a + b)).collect(),
            Op::Mul => a.iter().zip(b).map(|(a, b)| f64::from(a * b)).collect(),
            Op::Scale => a.iter().map(|a| f64::from(a * FACTOR)).collect(),
            Op::Softmax => a
                .chunks(self.columns as usize)
                .flat_map(|row| {
                    let most = row.iter().map(wide).fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = row.iter().map(|x| (wide(x) - most).exp()).sum();
                    row.iter().map(move |x| (f64::from(*x) - most).exp() / sum)
                })
                .collect(),
            Op::RmsNorm => a
                .chunks(self.columns as usize)
                .flat_map(|row| {
                    let mean = row.iter().map(|x| wide(x) * wide(x)).sum::<f64>() / row.len() as f64;
                    let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
                    row.iter().zip(weights).map(move |(x, w)| f64::from(*x) * factor * f64::from(*w))
                })
                .collect(),
        }
    }

    /// How far a result may be off: by so much of the expected one.
    pub(super) fn tolerance(self) -> f64 {
        match self.op {
            Op::Add | Op::Mul | Op::Scale => 0.0,
            Op::Silu => 5e-7,
            Op::Softmax | Op::RmsNorm => 4e-6,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_row() {
            true => write!(f, "{} {}×{}", self.op.name(), self.rows, self.columns),
            false => write!(f, "{} {}", self.op.name(), self.columns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_there() {
        for work in Work::all() {
            let name = work.name();
            let kernel = super::super::measure::kernel(&name).unwrap();
            assert_eq!(kernel.kernels()[0].name(), name);
            assert_eq!(work.blocks(128), if work.is_row() { work.rows as u32 } else { 1 << 19 });
        }
    }

    #[test]
    fn what_is_expected_adds_up() {
        let work = Work { op: Op::Softmax, rows: 2, columns: 4 };
        let sum: f64 = work.expected(&[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0], &[], &[]).iter().sum();
        assert!((sum - 2.0).abs() < 1e-12);
        let work = Work { op: Op::RmsNorm, rows: 1, columns: 2 };
        let normal = work.expected(&[3.0, 3.0], &[], &[1.0, 2.0]);
        assert!((normal[0] - 1.0).abs() < 1e-6 && (normal[1] - 2.0).abs() < 1e-6);
    }
}
