//! The model in f64, written plainly.

use gpt::config::Config;
use gpt::parameters::{Affine, Parameters};

/// A model with its parameters, by their places.
pub(crate) struct Reference<'a> {
    pub(crate) config: &'a Config,
    pub(crate) parameters: &'a Parameters,
    pub(crate) values: Vec<f64>,
}

type Row = Vec<f64>;

impl Reference<'_> {
    fn at(&self, offset: u64, count: u64) -> &[f64] {
        &self.values[offset as usize..][..count as usize]
    }

    fn layer(&self, affine: Affine, x: &[f64], outputs: u64) -> Row {
        let weights = self.at(affine.weight, outputs * x.len() as u64);
        let biases = self.at(affine.bias, outputs);
        biases
            .iter()
            .zip(weights.chunks(x.len()))
            .map(|(bias, row)| bias + row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>())
            .collect()
    }

    fn norm(&self, affine: Affine, x: &[f64]) -> Row {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let scale = 1.0 / (variance + f64::from(self.config.epsilon)).sqrt();
        let (weights, biases) =
            (self.at(affine.weight, x.len() as u64), self.at(affine.bias, x.len() as u64));
        x.iter().zip(weights).zip(biases).map(|((x, w), b)| (x - mean) * scale * w + b).collect()
    }

    /// The logits behind each token of a sequence.
    pub(crate) fn logits(&self, tokens: &[i32]) -> Vec<Row> {
        let Config { width, heads, vocabulary, .. } = *self.config;
        let dim = self.config.dim() as usize;
        let embedding = self.at(self.parameters.tokens, vocabulary * width);
        let row = |of: &[f64], number: usize| of[number * width as usize..][..width as usize].to_vec();
        let positions = self.at(self.parameters.positions, self.config.tokens * width);
        let add = |a: &mut Row, b: &[f64]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        let mut h: Vec<Row> = tokens
            .iter()
            .enumerate()
            .map(|(place, token)| {
                let mut sum = row(embedding, *token as usize);
                add(&mut sum, &row(positions, place));
                sum
            })
            .collect();
        for block in &self.parameters.blocks {
            let qkv: Vec<Row> =
                h.iter().map(|h| self.layer(block.qkv, &self.norm(block.norm1, h), 3 * width)).collect();
            for (place, h) in h.iter_mut().enumerate() {
                let mut o = vec![0.0; width as usize];
                for head in 0..heads as usize {
                    let part = |token: usize, which: usize| {
                        &qkv[token][which * width as usize + head * dim..][..dim]
                    };
                    let score = |key: usize| {
                        let product: f64 = part(place, 0).iter().zip(part(key, 1)).map(|(q, k)| q * k).sum();
                        (product / (dim as f64).sqrt()).exp()
                    };
                    let scores: Vec<f64> = (0..=place).map(score).collect();
                    let sum: f64 = scores.iter().sum();
                    for (key, score) in scores.iter().enumerate() {
                        for (o, v) in o[head * dim..].iter_mut().zip(part(key, 2)) {
                            *o += score / sum * v;
                        }
                    }
                }
                add(h, &self.layer(block.out, &o, width));
            }
            for h in &mut h {
                let mut up = self.layer(block.up, &self.norm(block.norm2, h), 4 * width);
                up.iter_mut().for_each(|x| *x *= 0.5 * (1.0 + erf(*x / 2f64.sqrt())));
                add(h, &self.layer(block.down, &up, width));
            }
        }
        let last = |h: &Row| {
            let y = self.norm(self.parameters.norm, h);
            embedding.chunks(width as usize).map(|row| row.iter().zip(&y).map(|(w, y)| w * y).sum()).collect()
        };
        h.iter().map(last).collect()
    }

    /// The mean of all tokens' losses.
    pub(crate) fn loss(&self, tokens: &[i32], targets: &[i32]) -> f64 {
        let length = self.config.tokens as usize;
        let mut sum = 0.0;
        for (tokens, targets) in tokens.chunks(length).zip(targets.chunks(length)) {
            for (logits, target) in self.logits(tokens).iter().zip(targets) {
                let all: f64 = logits.iter().map(|x| x.exp()).sum();
                sum += all.ln() - logits[*target as usize];
            }
        }
        sum / tokens.len() as f64
    }
}

/// The error function, by its series (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.6).
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / (2.0 * f64::from(n) + 1.0);
        sum += term;
    }
    sum * 2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp()
}
