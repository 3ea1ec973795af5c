//! Attention and its gradients by their definitions, in f64, and whether kernels compute them.

pub(crate) mod decode;

use vm_ir::interp::{Argument, Tensor};
use vm_ir::{GuestAddr, Kernel, Scalar};
use vm_kernels::attention::{Attention, Backward, Gradient, Mask, SplitBackward};

/// Where a kernel gave something else.
#[derive(Debug)]
pub(crate) struct Mismatch {
    what: String,
    at: usize,
    found: f64,
    wanted: f64,
}

impl std::error::Error for Mismatch {}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch { what, at, found, wanted } = self;
        write!(f, "{what}, element {at}: {found}, not {wanted}")
    }
}

/// What is attended to, in numbers: heads of queries and of keys, and by sequence its queries and keys.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub(crate) heads: [u64; 2],
    pub(crate) sequences: &'a [[u64; 2]],
    pub(crate) mask: Mask,
    pub(crate) window: [i64; 2],
}

/// Numbers from -1 to 1, the same everywhere.
fn random(seed: u64, element: Scalar, extents: &[u64]) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    let count: u64 = extents.iter().product();
    Tensor::from_f64s(element, extents, (0..count).map(|_| next()))
}

/// A tensor `[batch, heads, tokens, columns]` as numbers, by row.
struct Rows {
    extents: [u64; 3],
    columns: usize,
    numbers: Vec<f64>,
}

impl Rows {
    fn of(tensor: &Tensor) -> Rows {
        let [batch, heads, tokens, columns] = tensor.extents[..] else { panic!("{:?}", tensor.extents) };
        Rows { extents: [batch, heads, tokens], columns: columns as usize, numbers: tensor.to_f64s() }
    }

    fn zeros(like: &Rows) -> Rows {
        Rows { numbers: vec![0.0; like.numbers.len()], ..*like }
    }

    fn start(&self, at: [u64; 3]) -> usize {
        let [_, heads, tokens] = self.extents;
        ((at[0] * heads + at[1]) * tokens + at[2]) as usize * self.columns
    }

    fn row(&self, at: [u64; 3]) -> &[f64] {
        &self.numbers[self.start(at)..][..self.columns]
    }

    fn add(&mut self, at: [u64; 3], by: f64, row: &[f64]) {
        let start = self.start(at);
        self.numbers[start..].iter_mut().zip(row).for_each(|(sum, x)| *sum += by * x);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Problem<'_> {
    fn sees(&self, [queries, keys]: [u64; 2], query: u64, key: u64) -> bool {
        let distance = key as i64 - (query as i64 + keys as i64 - queries as i64);
        match self.mask {
            Mask::Full => true,
            Mask::Causal => distance <= 0,
            Mask::Window => (-self.window[0]..=self.window[1]).contains(&distance),
        }
    }

    /// For each query the keys that it sees, each with its weight, and the logarithm of the sum: by the indices of the rows.
    fn each(
        &self,
        packed: bool,
        q: &Rows,
        k: &Rows,
        scale: f64,
        mut act: impl FnMut([u64; 3], f64, &[([u64; 3], f64)]),
    ) {
        let mut begin = [0, 0];
        for (number, lengths) in self.sequences.iter().enumerate() {
            let batch = if packed { 0 } else { number as u64 };
            for (head, query) in (0..self.heads[0]).flat_map(|h| (0..lengths[0]).map(move |i| (h, i))) {
                let of_k = head / (self.heads[0] / self.heads[1]);
                let at = [batch, head, begin[0] + query];
                let seen = (0..lengths[1]).filter(|key| self.sees(*lengths, query, *key));
                let scores: Vec<([u64; 3], f64)> = seen
                    .map(|key| [batch, of_k, begin[1] + key])
                    .map(|of| (of, dot(q.row(at), k.row(of)) * scale))
                    .collect();
                let most = scores.iter().fold(f64::MIN, |most, (_, score)| most.max(*score));
                let sum: f64 = scores.iter().map(|(_, score)| (score - most).exp()).sum();
                let weights: Vec<_> = scores.iter().map(|(of, s)| (*of, (s - most).exp() / sum)).collect();
                let log = if scores.is_empty() { f64::NEG_INFINITY } else { most + sum.ln() };
                act(at, log, &weights);
            }
            if packed {
                begin = [begin[0] + lengths[0], begin[1] + lengths[1]];
            }
        }
    }

    /// Extents of a tensor of the sequences' queries (0) or keys (1).
    fn extents(&self, packed: bool, which: usize, columns: u32) -> [u64; 4] {
        let lengths = self.sequences.iter().map(|lengths| lengths[which]);
        match packed {
            true => [1, self.heads[which], lengths.sum(), columns.into()],
            false => {
                let [batch, tokens] = [self.sequences.len() as u64, lengths.max().unwrap_or(0)];
                [batch, self.heads[which], tokens, columns.into()]
            }
        }
    }

    fn window(&self) -> Vec<Argument> {
        match self.mask {
            Mask::Window => self.window.map(|reach| Argument::Bits(reach as u32 as u64)).to_vec(),
            _ => Vec::new(),
        }
    }
}

impl Problem<'_> {
    /// Where packed sequences begin, of queries and of keys.
    fn starts(&self, packed: bool) -> Vec<Argument> {
        let of = |which: usize| {
            let ends = self.sequences.iter().scan(0, |end, lengths| {
                *end += lengths[which];
                Some(*end as f64)
            });
            let starts: Vec<f64> = std::iter::once(0.0).chain(ends).collect();
            Argument::Tensor(Tensor::from_f64s(Scalar::I32, &[starts.len() as u64], starts))
        };
        if packed { vec![of(0), of(1)] } else { Vec::new() }
    }

    /// The most queries (0) or keys (1) of packed sequences.
    fn longest(&self, packed: bool, which: usize) -> Option<Argument> {
        let longest = self.sequences.iter().map(|lengths| lengths[which]).max().unwrap_or(0);
        packed.then_some(Argument::Bits(longest))
    }
}

/// What gradients are computed from, and the gradients.
struct Gradients {
    /// Q, K, V and dO; O; and the logarithms of sums.
    given: [Tensor; 4],
    o: Tensor,
    lse: Tensor,
    scale: f64,
    dq: Rows,
    dk: Rows,
    dv: Rows,
}

fn float(x: f64) -> Argument {
    Argument::Bits((x as f32).to_bits().into())
}

fn close(what: &str, found: &Argument, wanted: &[f64], within: f64) -> Result<(), Mismatch> {
    close_by(what, found, wanted, |at| within * wanted[at].abs().max(1.0))
}

/// The same with a bound for each element.
fn close_by(
    what: &str,
    found: &Argument,
    wanted: &[f64],
    within: impl Fn(usize) -> f64,
) -> Result<(), Mismatch> {
    let found = found.tensor().map(Tensor::to_f64s).unwrap_or_default();
    assert_eq!(found.len(), wanted.len(), "{what}");
    let close = |at: &usize| found[*at] == wanted[*at] || (found[*at] - wanted[*at]).abs() <= within(*at);
    match (0..found.len()).find(|at| !close(at)) {
        None => Ok(()),
        Some(at) => Err(Mismatch { what: what.to_owned(), at, found: found[at], wanted: wanted[at] }),
    }
}

/// A tensor of values as attention of FP8 takes it, `[batch, heads, columns, tokens]`, of which there are a multiple of 16.
fn transposed(v: &Tensor) -> Tensor {
    let rows = Rows::of(v);
    let [batch, heads, tokens] = rows.extents;
    let all = tokens.next_multiple_of(16);
    let columns = rows.columns as u64;
    let places = (0..batch * heads * columns).flat_map(|at| (0..all).map(move |token| (at, token)));
    let numbers = places.map(|(at, token)| {
        let (of, column) = (at / columns, (at % columns) as usize);
        let row = [of / heads, of % heads, token];
        // What is behind the last is never weighted.
        if token < tokens { rows.row(row)[column] } else { 1.0 }
    });
    Tensor::from_f64s(v.element, &[batch, heads, columns, all], numbers)
}

impl Problem<'_> {
    /// Scales of queries, keys and values: for each head of each sequence, and of queries for each head of all, and one for all values
    /// where packed.
    fn scales(&self, variant: Attention) -> Option<[Tensor; 3]> {
        let sequences = self.sequences.len() as u64;
        let extents = [
            [1, self.heads[0]],
            [sequences, self.heads[1]],
            match variant.packed {
                true => [1, 1],
                false => [sequences, self.heads[1]],
            },
        ];
        let all = [1.5, 0.75, 2.0].into_iter().zip(extents).map(|(first, extents)| {
            let numbers = (0..extents[0] * extents[1]).map(|at| first / (1.0 + at as f64 / 4.0));
            Tensor::from_f64s(Scalar::F32, &extents, numbers)
        });
        let all: Vec<Tensor> = all.collect();
        variant.fp8.then(|| all.try_into().unwrap())
    }

    /// Multiplies the rows of each sequence and head by its scale.
    fn scale(&self, packed: bool, rows: &mut Rows, scales: &Tensor) {
        let numbers = scales.to_f64s();
        let [batch, heads, tokens] = rows.extents;
        // Of packed ones by the sequence that a token is of: of queries all are alike.
        let mut ends: Vec<u64> = Vec::new();
        for lengths in self.sequences {
            ends.push(ends.last().unwrap_or(&0) + lengths[1]);
        }
        for (at, (head, token)) in (0..batch)
            .flat_map(|b| (0..heads).flat_map(move |h| (0..tokens).map(move |token| (b, (h, token)))))
        {
            let number =
                if packed { ends.iter().position(|end| token < *end).unwrap_or(0) as u64 } else { at };
            let index =
                number.min(scales.extents[0] - 1) * scales.extents[1] + head.min(scales.extents[1] - 1);
            let start = rows.start([at, head, token]);
            rows.numbers[start..][..rows.columns].iter_mut().for_each(|x| *x *= numbers[index as usize]);
        }
    }

    /// Launches a variant on as many blocks, and compares.
    pub(crate) fn check<E: From<Mismatch>>(
        &self,
        variant: Attention,
        blocks: u32,
        mut launch: impl FnMut(&Kernel, [u32; 3], Vec<Argument>) -> Result<Vec<Argument>, E>,
    ) -> Result<(), E> {
        let problem = self;
        let Attention { element, dims: [dim, value_dim], packed, .. } = variant;
        let factor = if variant.fp8 { Scalar::F8E4M3 } else { element };
        let of_element =
            |seed, element, which, columns| random(seed, element, &problem.extents(packed, which, columns));
        let tensor = |seed, which, columns| of_element(seed, factor, which, columns);
        let (q, k, v) = (tensor(4, 0, dim), tensor(5, 1, dim), tensor(6, 1, value_dim));
        let (o, scale) = (of_element(7, element, 0, value_dim), 1.0 / f64::from(dim).sqrt());
        let [mut of_q, mut of_k, mut of_v] = [&q, &k, &v].map(Rows::of);
        let scales = self.scales(variant);
        if let Some(scales) = &scales {
            let each = [&mut of_q, &mut of_k, &mut of_v].into_iter().zip(scales);
            each.for_each(|(rows, scales)| self.scale(packed, rows, scales));
        }
        let v = if variant.fp8 { transposed(&v) } else { v };
        let [mut wanted, mut sizes] = [(); 2].map(|()| Rows::zeros(&Rows::of(&o)));
        let mut logs = Vec::new();
        problem.each(packed, &of_q, &of_k, scale, |at, log, weights| {
            for (of, weight) in weights {
                let values = of_v.row(*of);
                wanted.add(at, *weight, values);
                sizes.add(at, *weight, &values.iter().map(|x| x.abs()).collect::<Vec<_>>());
            }
            logs.push((at, log));
        });
        let extents = o.extents[..3].to_vec();
        let mut arguments: Vec<Argument> = [q, k, v, o].map(Argument::Tensor).to_vec();
        if variant.log_sums {
            arguments.push(Argument::Tensor(random(8, Scalar::F32, &extents)));
        }
        arguments.extend(scales.into_iter().flatten().map(Argument::Tensor));
        arguments.extend(problem.starts(packed));
        arguments.push(float(scale));
        arguments.extend(problem.window());
        arguments.extend(problem.longest(packed, 0));
        let after = launch(&variant.kernel(GuestAddr(0x1000)).unwrap(), [blocks, 1, 1], arguments)?;
        // Weights of FP8 have three bits behind the first: each is off by a sixteenth of it at most.
        let part = if variant.fp8 { 1.0 / 16.0 } else { 0.0 };
        let wanted = &wanted.numbers;
        let within = |at: usize| part * sizes.numbers[at] + 1e-2 * wanted[at].abs().max(1.0);
        close_by(&variant.name(), &after[3], wanted, within)?;
        if variant.log_sums {
            let [_, heads, tokens] = extents[..] else { panic!() };
            let mut wanted = vec![f64::NAN; after[4].tensor().unwrap().len()];
            logs.iter()
                .for_each(|(at, log)| wanted[((at[0] * heads + at[1]) * tokens + at[2]) as usize] = *log);
            close(&format!("{}: lse", variant.name()), &after[4], &wanted, 1e-2)?;
        }
        Ok(())
    }

    /// The gradients by their definition.
    fn gradients(&self, element: Scalar, packed: bool, [dim, value_dim]: [u32; 2]) -> Gradients {
        let tensor = |seed, which, dim| random(seed, element, &self.extents(packed, which, dim));
        let (q, k) = (tensor(4, 0, dim), tensor(5, 1, dim));
        let (v, d_o) = (tensor(6, 1, value_dim), tensor(7, 0, value_dim));
        let scale = 1.0 / f64::from(dim).sqrt();
        let [of_q, of_k, of_v, of_do] = [&q, &k, &v, &d_o].map(Rows::of);
        let mut out = Rows::zeros(&of_do);
        let [mut dq, mut dk, mut dv] = [&of_q, &of_k, &of_v].map(Rows::zeros);
        let rows = q.extents[..3].to_vec();
        let mut logs = vec![0.0; rows.iter().product::<u64>() as usize];
        self.each(packed, &of_q, &of_k, scale, |at, log, weights| {
            weights.iter().for_each(|(of, weight)| out.add(at, *weight, of_v.row(*of)));
            let delta = dot(of_do.row(at), out.row(at));
            for (of, weight) in weights {
                let slope = weight * (dot(of_do.row(at), of_v.row(*of)) - delta) * scale;
                dv.add(*of, *weight, of_do.row(at));
                dk.add(*of, slope, of_q.row(at));
                dq.add(at, slope, of_k.row(*of));
            }
            logs[((at[0] * rows[1] + at[1]) * rows[2] + at[2]) as usize] = log;
        });
        let o = Tensor::from_f64s(element, &d_o.extents, out.numbers);
        let lse = Tensor::from_f64s(Scalar::F32, &rows, logs);
        Gradients { given: [q, k, v, d_o], o, lse, scale, dq, dk, dv }
    }

    /// Launches a variant's kernels, the main one on as many blocks, and compares.
    pub(crate) fn check_gradients<E: From<Mismatch>>(
        &self,
        variant: Backward,
        blocks: u32,
        mut launch: impl FnMut(&Kernel, [u32; 3], Vec<Argument>) -> Result<Vec<Argument>, E>,
    ) -> Result<(), E> {
        let Backward { element, dim, .. } = variant;
        let Gradients { given, o, lse, scale, dq, dk, dv } = self.gradients(element, false, [dim; 2]);
        let tensor = |seed, which| random(seed, element, &self.extents(false, which, dim));
        let rows = lse.extents.clone();
        let mut of_sums = given[0].extents.clone();
        if variant.turned() {
            (of_sums[2], of_sums[3]) = (of_sums[2].div_ceil(64) * u64::from(dim), 64);
        }
        // What was in them before does not matter.
        let [delta, sums] =
            [random(8, Scalar::F32, &rows), random(9, Scalar::F32, &of_sums)].map(Argument::Tensor);
        let grid = [rows[2].div_ceil(64) as u32, rows[1] as u32, rows[0] as u32];
        let arguments = vec![Argument::Tensor(o), Argument::Tensor(given[3].clone()), delta, sums];
        let after = launch(&variant.prepare(GuestAddr(0x1000)).unwrap(), grid, arguments)?;
        let (delta, sums) = (after[2].clone(), after[3].clone());
        let outs = [tensor(10, 1), tensor(11, 1)];
        let mut arguments: Vec<Argument> = given.map(Argument::Tensor).to_vec();
        arguments.extend([Argument::Tensor(lse), delta, sums]);
        arguments.extend(outs.map(Argument::Tensor));
        arguments.push(float(scale));
        arguments.extend(self.window());
        let kernel = variant.kernel(GuestAddr(0x1000)).unwrap();
        let name = kernel.name().to_owned();
        let after = launch(&kernel, [blocks, 1, 1], arguments)?;
        close(&format!("{name}: dk"), &after[7], &dk.numbers, 2e-2)?;
        close(&format!("{name}: dv"), &after[8], &dv.numbers, 2e-2)?;
        let arguments = vec![after[6].clone(), Argument::Tensor(tensor(12, 0)), float(scale)];
        let after = launch(&variant.finish(GuestAddr(0x1000)).unwrap(), grid, arguments)?;
        Ok(close(&format!("{name}: dq"), &after[1], &dq.numbers, 2e-2)?)
    }

    /// The same of the variants with a kernel for each gradient.
    pub(crate) fn check_split<E: From<Mismatch>>(
        &self,
        variant: SplitBackward,
        blocks: u32,
        mut launch: impl FnMut(&Kernel, [u32; 3], Vec<Argument>) -> Result<Vec<Argument>, E>,
    ) -> Result<(), E> {
        let SplitBackward { element, dims, packed, .. } = variant;
        let Gradients { given, o, lse, scale, dq, dk, dv } = self.gradients(element, packed, dims);
        let rows = lse.extents.clone();
        let grid = [rows[2].div_ceil(64) as u32, rows[1] as u32, rows[0] as u32];
        let [q, k, v, d_o] = given.map(Argument::Tensor);
        let arguments =
            vec![Argument::Tensor(o), d_o.clone(), Argument::Tensor(random(8, Scalar::F32, &rows))];
        let after = launch(&variant.prepare(GuestAddr(0x1000)).unwrap(), grid, arguments)?;
        let (delta, lse) = (after[2].clone(), Argument::Tensor(lse));
        for (of, wanted) in [(Gradient::Queries, &dq), (Gradient::Keys, &dk), (Gradient::Values, &dv)] {
            let (which, columns) = (usize::from(of != Gradient::Queries), wanted.columns as u32);
            let mut arguments = vec![q.clone(), k.clone()];
            arguments.extend((of != Gradient::Values).then(|| v.clone()));
            arguments.extend([d_o.clone(), lse.clone()]);
            arguments.extend((of != Gradient::Values).then(|| delta.clone()));
            let out = arguments.len();
            arguments.push(Argument::Tensor(random(10, element, &self.extents(packed, which, columns))));
            arguments.extend(self.starts(packed));
            arguments.push(float(scale));
            arguments.extend(self.window());
            arguments.extend(self.longest(packed, which));
            let kernel = variant.kernel(of, GuestAddr(0x1000)).unwrap();
            let after = launch(&kernel, [blocks, 1, 1], arguments)?;
            close(kernel.name(), &after[out], &wanted.numbers, 2e-2)?;
        }
        Ok(())
    }
}
