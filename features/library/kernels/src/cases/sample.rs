//! Argmax, top-k, draws.

use super::{Case, Expected, LONG, numbers};
use crate::sample::{Argmax, CHUNK, Logits, Sample, SoftmaxTopK, TopK, TopKSample, TopPSample};
use std::cmp::Ordering;
use std::rc::Rc;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

const TYPES: [Scalar; 3] = [Scalar::F32, Scalar::Bf16, Scalar::F16];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (at, columns) in [1, 100, 1024, 1025, 2080].into_iter().enumerate() {
        for special in [false, true] {
            let matrix = Matrix::of(TYPES[at % 3], columns, special);
            cases.push(if at % 2 == 0 { matrix.argmax() } else { matrix.sample(0.0) });
            cases.push(matrix.sample([1.0, 0.3, 4.0][at % 3]));
        }
    }
    let sorted = [(7, 3, true), (100, 100, true), (1030, 50, false), (8192, 50, false), (8200, 130, true)];
    for (at, (columns, k, special)) in sorted.into_iter().enumerate() {
        let matrix = Matrix::of(TYPES[at % 3], columns, special);
        cases.push(matrix.top_k(k));
        cases.push(matrix.top_k_sample(k, 0.8));
    }
    // Rows whose parts several threads look through, and NaNs in one's whole tiles.
    cases.push(Matrix { rows: 2, ..Matrix::of(Scalar::F32, 16_500, true) }.argmax());
    cases.push(Matrix::of(Scalar::F16, 1500, true).argmax());
    cases.push(Matrix::of(Scalar::F32, 1300, true).top_k(500));
    // More than is sorted at once; and more equal ones than there is room for.
    cases.push(Matrix { rows: 1, ..Matrix::of(Scalar::F32, 4500, false) }.top_k(4200));
    cases.push(Matrix::equal(8192).top_k(50));
    cases.push(Matrix::of(Scalar::Bf16, 2048, true).top_k_sample(1100, 3.0));
    let likely =
        [(1, 0.5, false), (50, 0.5, true), (3000, 0.9, true), (4096, 0.2, false), (2056, 0.0, false)];
    for (at, (columns, p, special)) in likely.into_iter().enumerate() {
        cases.push(Matrix::of(TYPES[at % 3], columns, special).top_p_sample(p, 0.7));
    }
    cases.push(Matrix::of(Scalar::F16, 1000, true).top_p_sample(1.0, 0.7));
    let short = [(70, 1, 1), (130, 8, 2), (5, 60, 6), (3, 128, 128), (2, 1024, 9)];
    for (at, (rows, columns, k)) in short.into_iter().enumerate() {
        let matrix = Matrix { rows, ..Matrix::of(TYPES[at % 3], columns, false) };
        cases.push(matrix.softmax_top_k(k, at % 2 == 0));
    }
    let wide = [(3, 1025, 7), (2, 2080, 1100), (1, 4500, 2), (2, 5003, 3)];
    for (at, (rows, columns, k)) in wide.into_iter().enumerate() {
        for renormalised in [false, true] {
            let matrix = Matrix { rows, ..Matrix::of(TYPES[at % 3], columns, false) };
            cases.push(matrix.softmax_top_k(k, renormalised));
        }
    }
    cases.push(Matrix::of(Scalar::F32, 1200, true).softmax_top_k(4, false));
    cases.push(Matrix::of(Scalar::Bf16, 1200, true).softmax_top_k(4, true));
    for (columns, element) in LONG {
        let matrix = Matrix { rows: 1, ..Matrix::of(element, columns, false) };
        cases.extend([
            matrix.argmax(),
            matrix.sample(0.9),
            matrix.top_k(50),
            matrix.softmax_top_k(50, false),
        ]);
        cases.extend([matrix.top_k_sample(50, 0.8), matrix.top_p_sample(0.9, 0.7)]);
    }
    cases
}

/// A matrix of logits.
#[derive(Clone, Copy)]
struct Matrix {
    element: Scalar,
    rows: u64,
    columns: u64,
    /// What the rows are.
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Random numbers.
    Random,
    /// Rows with infinite elements and NaNs, and of nothing else; rows with equal elements.
    Special,
    /// Zeros.
    Equal,
}

impl Matrix {
    fn of(element: Scalar, columns: u64, special: bool) -> Matrix {
        let kind = if special { Kind::Special } else { Kind::Random };
        // Long rows take long.
        let rows = match (special, columns) {
            (true, ..1000) => 7,
            (true, _) => 4,
            _ => 2,
        };
        Matrix { element, rows, columns, kind }
    }

    fn equal(columns: u64) -> Matrix {
        Matrix { element: Scalar::F16, rows: 1, columns, kind: Kind::Equal }
    }

    fn logits(&self) -> Logits {
        Logits { element: self.element, rows: self.rows, columns: self.columns, align: 16 }
    }

    fn tensor(&self) -> Tensor {
        let mut values = numbers(self.columns + 7 * self.rows, self.rows * self.columns);
        for (row, values) in values.chunks_mut(self.columns as usize).enumerate() {
            for (column, x) in values.iter_mut().enumerate() {
                *x = match (self.kind, row) {
                    (Kind::Equal, _) => 0.0,
                    (Kind::Special, 1) if column % 3 == 1 => f64::NAN,
                    (Kind::Special, 2) if column % 40 == 17 => f64::INFINITY,
                    (Kind::Special, 0) if column % 2 == 0 => f64::NEG_INFINITY,
                    (Kind::Special, 4) => f64::NEG_INFINITY,
                    (Kind::Special, 3) => (*x * 3.0).round(),
                    (Kind::Special, 5) if column % 5 == 0 => f64::NAN,
                    (Kind::Special, 5) => f64::NEG_INFINITY,
                    _ => *x * 5.0,
                };
            }
        }
        Tensor::from_f64s(self.element, &[self.rows, self.columns], values)
    }

    /// The rows.
    fn each_row(&self) -> Vec<Vec<f64>> {
        self.tensor().to_f64s().chunks(self.columns as usize).map(<[f64]>::to_vec).collect()
    }

    fn name(&self, what: &str) -> String {
        let Matrix { element, rows, columns, kind } = self;
        let kind = ["", ", special", ", equal"][*kind as usize];
        format!("{what} of {element}, {rows} x {columns}{kind}")
    }

    fn argmax(&self) -> Case {
        let output = Tensor::from_f64s(Scalar::I32, &[self.rows], vec![-7.0; self.rows as usize]);
        let expected = self.each_row().into_iter().map(|row| ranked(&row, Ordering::Greater)[0] as f64);
        Case {
            name: self.name("argmax"),
            function: Rc::new(Argmax { logits: self.logits() }),
            buffers: vec![self.tensor(), output],
            expected: vec![Expected::exact(1, expected.collect())],
        }
    }

    fn top_k(&self, k: u64) -> Case {
        let extents = [self.rows, k];
        let rows = self.each_row();
        let ranked: Vec<Vec<usize>> = rows.iter().map(|row| ranked(row, Ordering::Greater)).collect();
        let indices = ranked.iter().flat_map(|ranked| ranked[..k as usize].iter().map(|at| *at as f64));
        let values = rows
            .iter()
            .zip(&ranked)
            .flat_map(|(row, ranked)| ranked[..k as usize].iter().map(|at| row[*at]).collect::<Vec<_>>());
        Case {
            name: self.name(&format!("top {k}")),
            function: Rc::new(TopK { logits: self.logits(), k }),
            buffers: vec![self.tensor(), zeros(self.element, &extents), zeros(Scalar::I32, &extents)],
            expected: vec![Expected::exact(1, values.collect()), Expected::exact(2, indices.collect())],
        }
    }

    fn softmax_top_k(&self, k: u64, renormalised: bool) -> Case {
        let extents = [self.rows, k];
        let (mut weights, mut indices) = (Vec::new(), Vec::new());
        for row in self.each_row() {
            let ranked = ranked(&row, Ordering::Greater);
            let power = |at: &usize| (row[*at] - row[ranked[0]]).exp();
            let chosen = &ranked[..k as usize];
            let of = if renormalised { chosen } else { &ranked };
            let sum: f64 = of.iter().map(power).sum();
            weights.extend(chosen.iter().map(|at| power(at) / sum));
            indices.extend(chosen.iter().map(|at| *at as f64));
        }
        let tolerance = if self.element == Scalar::F32 { 1e-5 } else { 1e-2 };
        let plain = if renormalised { ", renormalised" } else { "" };
        Case {
            name: self.name(&format!("softmax and top {k}{plain}")),
            function: Rc::new(SoftmaxTopK { logits: self.logits(), k, renormalised }),
            buffers: vec![self.tensor(), zeros(self.element, &extents), zeros(Scalar::I32, &extents)],
            expected: vec![Expected::new(1, weights, tolerance), Expected::exact(2, indices)],
        }
    }

    fn sample(&self, temperature: f32) -> Case {
        let function = Sample { logits: self.logits(), temperature };
        self.drawn(&format!("sample at {temperature}"), Rc::new(function), temperature, |row, seed| {
            row.draw(seed, 0, None)
        })
    }

    fn top_k_sample(&self, k: u64, temperature: f32) -> Case {
        let function = TopKSample { logits: self.logits(), k, temperature };
        let columns = self.columns;
        self.drawn(&format!("sample of top {k}"), Rc::new(function), temperature, |row, seed| {
            if k >= columns {
                row.draw(seed, 0, None)
            } else if k > 1024 {
                row.draw_likely(seed, |rank, _| Some(rank < k as usize))
            } else {
                // By rank.
                let first = row.ranked.iter().take(k as usize);
                let weights: Vec<f64> = first.map(|at| row.weights[*at]).collect();
                Some(row.ranked[invert(&weights, philox(seed, 0)[0])?])
            }
        })
    }

    fn top_p_sample(&self, p: f32, temperature: f32) -> Case {
        let function = TopPSample { logits: self.logits(), p, temperature };
        self.drawn(&format!("sample of top {p}"), Rc::new(function), temperature, |row, seed| {
            if p == 1.0 {
                return row.draw(seed, 0, None);
            }
            let all: f64 = row.weights.iter().sum();
            row.draw_likely(seed, |rank, above| {
                let margin = above - f64::from(p) * all;
                (rank == 0 || margin.abs() > 1e-5 * all).then_some(rank == 0 || margin < 0.0)
            })
        })
    }

    /// A case of draws, for seeds with which rounding decides nothing.
    fn drawn(
        &self,
        what: &str,
        function: Rc<dyn crate::call::Function>,
        temperature: f32,
        draw: impl Fn(&Row, u64) -> Option<usize>,
    ) -> Case {
        let (mut seeds, mut tokens) = (Vec::new(), Vec::new());
        for (number, logits) in (0u64..).zip(self.each_row()) {
            let row = Row::of(&logits, temperature.into());
            let first = (self.columns + number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let (seed, token) = match &row {
                None => (first, -1.0),
                Some(row) if temperature == 0.0 => (first, row.ranked[0] as f64),
                Some(row) => (0..1000)
                    .map(|step| first.wrapping_add(step << 30))
                    .find_map(|seed| draw(row, seed).map(|token| (seed, token as f64)))
                    .unwrap_or_else(|| panic!("{}: no seed is clear", self.name(what))),
            };
            seeds.push(seed);
            tokens.push(token);
        }
        Case {
            name: self.name(what),
            function,
            buffers: vec![
                self.tensor(),
                zeros(Scalar::I32, &[self.rows]),
                Tensor::from_bits(Scalar::I64, &[self.rows], seeds),
            ],
            expected: vec![Expected::exact(1, tokens)],
        }
    }
}

fn zeros(element: Scalar, extents: &[u64]) -> Tensor {
    Tensor::from_f64s(element, extents, vec![0.0; extents.iter().product::<u64>() as usize])
}

/// Columns by their logits, the greatest first, of equal ones the lowest; NaN is greater than all numbers, or less.
fn ranked(row: &[f64], nan: Ordering) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..row.len()).collect();
    let compare = |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
        (false, false) => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
        (true, true) => Ordering::Equal,
        (true, false) => nan,
        (false, true) => nan.reverse(),
    };
    // The sort keeps the order of equal ones.
    ranked.sort_by(|a, b| compare(row[*b], row[*a]));
    ranked
}

/// A row as it is drawn from.
struct Row {
    weights: Vec<f64>,
    ranked: Vec<usize>,
}

impl Row {
    /// None if there is nothing to draw.
    fn of(logits: &[f64], temperature: f64) -> Option<Row> {
        let ranked = ranked(logits, Ordering::Less);
        let max = logits[ranked[0]];
        let weight = |x: &f64| match *x {
            x if x.is_nan() => 0.0,
            x if x == max => 1.0,
            x => ((x - max) / temperature).exp(),
        };
        (max > f64::NEG_INFINITY).then(|| Row { weights: logits.iter().map(weight).collect(), ranked })
    }

    /// Draws of the first of the order, or of all: a chunk, and one of its columns. None if rounding may decide.
    fn draw(&self, seed: u64, attempt: u32, first: Option<usize>) -> Option<usize> {
        let mut weights = self.weights.clone();
        for at in &self.ranked[first.unwrap_or(weights.len())..] {
            weights[*at] = 0.0;
        }
        let [chunk_bits, bits] = philox(seed, attempt);
        let chunks: Vec<f64> = weights.chunks(CHUNK as usize).map(|chunk| chunk.iter().sum()).collect();
        let chunk = invert(&chunks, chunk_bits)?;
        let from = chunk * CHUNK as usize;
        let upto = weights.len().min(from + CHUNK as usize);
        Some(from + invert(&weights[from..upto], bits)?)
    }

    /// Draws until `accept` takes a rank and the weight above it, each time of what is above the last.
    fn draw_likely(&self, seed: u64, accept: impl Fn(usize, f64) -> Option<bool>) -> Option<usize> {
        let mut first = None;
        for attempt in 0.. {
            let token = self.draw(seed, attempt, first)?;
            let rank = self.ranked.iter().position(|at| *at == token)?;
            if accept(rank, self.ranked[..rank].iter().map(|at| self.weights[*at]).sum())? {
                return Some(token);
            }
            first = Some(rank);
        }
        None
    }
}

/// The first place at which the running sum exceeds so much of the whole; none if it is close to another.
fn invert(weights: &[f64], bits: u64) -> Option<usize> {
    let total: f64 = weights.iter().sum();
    let target = total * (bits as f64 / 2f64.powi(64));
    let mut sum = 0.0;
    let mut found = None;
    for (at, weight) in weights.iter().enumerate() {
        let before = sum;
        sum += weight;
        if sum > target && found.is_none() {
            let clear = |edge: f64| (edge - target).abs() > 1e-5 * total || edge == 0.0 || edge == total;
            if !(clear(before) && clear(sum)) {
                return None;
            }
            found = Some(at);
        }
    }
    found
}

/// Philox 4x32-10.
fn philox(seed: u64, counter: u32) -> [u64; 2] {
    let mut c = [counter, 0, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let (a, b) = (u64::from(c[0]) * 0xd251_1f53, u64::from(c[2]) * 0xcd9e_8d57);
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    [u64::from(c[0]) | u64::from(c[1]) << 32, u64::from(c[2]) | u64::from(c[3]) << 32]
}

#[cfg(test)]
mod tests {
    /// Vectors of the authors' Random123 (kat_vectors), whose counter has only its lowest word here.
    #[test]
    fn philox_is_as_published() {
        let words = |[a, b]: [u64; 2]| [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32];
        assert_eq!(words(super::philox(0, 0)), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    }
}
