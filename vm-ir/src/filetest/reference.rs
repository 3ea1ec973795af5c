//! Plain Rust for the kernels under `filetests/run`: what each computes, in f64, with no thought of threads.

use crate::format::signed;
use crate::interp::{Argument, Launch, Tensor};
use crate::types::Scalar;

/// What a launch of the kernel of this name must leave in its views: pairs of a parameter and its contents.
/// `None` if there is no reference for the name, or the arguments are not of its form.
pub fn reference(name: &str, launch: &Launch) -> Option<Vec<(usize, Tensor)>> {
    let input = Input(&launch.arguments);
    // A kernel for rows of one width is named after it, and one of clusters after that.
    let name = name.strip_suffix("_cluster").unwrap_or(name);
    let name = match name.rsplit_once('_') {
        Some((name, width)) if width.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => name,
    };
    Some(match name {
        "silu" => input.map(0, 1, |x| x / (1.0 + (-x).exp()))?,
        "scale" => {
            let factor = input.float(2)?;
            input.map(0, 1, |x| x * factor)?
        }
        "add" => input.zip(|a, b| a + b)?,
        "mul" => input.zip(|a, b| a * b)?,
        "softmax" => input.rows(0, 1, softmax)?,
        "rmsnorm" => rmsnorm(&input)?,
        "argmax" => {
            let (x, columns) = input.matrix(0)?;
            let best = x.chunks(columns).map(|row| ranked(row)[0] as f64);
            vec![(1, Tensor::from_f64s(Scalar::I32, &[(x.len() / columns) as u64], best))]
        }
        "topk" => topk(&input)?,
        "rope" => rope(&input)?,
        "cross_entropy" => cross_entropy(&input)?,
        "adamw" => adamw(&input)?,
        "matmul" => {
            let product = matmul(input.matrix(0)?, input.matrix(1)?);
            vec![input.output(2, product.0)?]
        }
        "product" => {
            let product = matmul(input.matrix(0)?, transposed(input.matrix(1)?));
            vec![input.output(2, product.0)?]
        }
        // Factors in registers: sums of small integers, each as a number of 8 bits.
        "weigh_fp8" | "weigh_i8" => {
            let to = if name == "weigh_fp8" { Scalar::F8E5M2 } else { Scalar::I8 };
            let (sums, columns) = matmul(input.matrix(0)?, transposed(input.matrix(1)?));
            let sums = sums.into_iter().map(|sum| if to == Scalar::I8 { sum + 1.0 } else { sum });
            let rounded = Tensor::from_f64s(to, &[sums.len() as u64], sums).to_f64s();
            let (v, inner) = input.matrix(2)?;
            // What V has more columns of than there are sums is multiplied by zeros.
            let v = v.chunks(inner).flat_map(|row| row[..columns.min(inner)].to_vec()).collect();
            vec![input.output(3, matmul((rounded, columns), transposed((v, columns))).0)?]
        }
        "twice_fp8" => {
            let (a, columns) = input.matrix(0)?;
            let twice = Tensor::from_f64s(Scalar::F8E4M3, &[a.len() as u64], a.iter().map(|x| 2.0 * x));
            let product = matmul((a, columns), transposed((twice.to_f64s(), columns)));
            let (rows, width) = (product.1, input.tensor(2)?.extents[1] as usize);
            let padded = product.0.chunks(rows).flat_map(|row| {
                let mut row = row.to_vec();
                row.resize(width, 0.0);
                row
            });
            vec![input.output(1, twice.to_f64s())?, input.output(2, padded)?]
        }
        "turned" => {
            let product = matmul(input.matrix(1)?, transposed(input.matrix(0)?));
            vec![input.output(2, product.0)?]
        }
        "sent" => {
            let product = matmul(input.matrix(0)?, input.matrix(1)?);
            vec![input.output(2, matmul(transposed(product), input.matrix(0)?).0)?]
        }
        "histogram" => {
            let bins = input.tensor(1)?.len();
            let mut counts = input.tensor(1)?.to_f64s();
            for x in input.tensor(0)?.to_f64s() {
                if x >= 0.0 && (x as usize) < bins {
                    counts[x as usize] += 1.0;
                }
            }
            vec![(1, Tensor::from_f64s(Scalar::I32, &[bins as u64], counts))]
        }
        "scan" => {
            let x = input.tensor(0)?;
            let mut sum = 0i32;
            let sums = (0..x.len()).map(|i| {
                sum = if i % 256 == 0 { 0 } else { sum }.wrapping_add(x.bits(i) as i32);
                u64::from(sum as u32)
            });
            vec![(1, Tensor::from_bits(Scalar::I32, &x.extents, sums))]
        }
        "philox" => {
            let (out, seed, offset) = (input.tensor(0)?, input.bits(1)?, input.bits(2)?);
            let words = (0..out.len().div_ceil(4)).flat_map(|i| philox(seed, offset.wrapping_add(i as u64)));
            vec![(0, Tensor::from_bits(Scalar::I32, &out.extents, words.take(out.len()).map(u64::from)))]
        }
        _ => return None,
    })
}

struct Input<'a>(&'a [Argument]);

type Outputs = Vec<(usize, Tensor)>;

impl Input<'_> {
    fn tensor(&self, index: usize) -> Option<&Tensor> {
        self.0.get(index)?.tensor()
    }

    fn bits(&self, index: usize) -> Option<u64> {
        match self.0.get(index)? {
            Argument::Bits(bits) => Some(*bits),
            Argument::Tensor(_) => None,
        }
    }

    fn float(&self, index: usize) -> Option<f64> {
        self.bits(index).map(|bits| f64::from(f32::from_bits(bits as u32)))
    }

    fn int(&self, index: usize) -> Option<i64> {
        self.bits(index).map(|bits| signed(Scalar::I32, bits))
    }

    /// The elements of a tensor, and how many are in a row.
    fn matrix(&self, index: usize) -> Option<(Vec<f64>, usize)> {
        let tensor = self.tensor(index)?;
        let columns = *tensor.extents.last()? as usize;
        (columns > 0).then(|| (tensor.to_f64s(), columns))
    }

    /// Output like the tensor at `like`.
    fn output(&self, like: usize, values: impl IntoIterator<Item = f64>) -> Option<(usize, Tensor)> {
        let tensor = self.tensor(like)?;
        Some((like, Tensor::from_f64s(tensor.element, &tensor.extents, values)))
    }

    fn map(&self, from: usize, to: usize, f: impl Fn(f64) -> f64) -> Option<Outputs> {
        Some(vec![self.output(to, self.tensor(from)?.to_f64s().into_iter().map(f))?])
    }

    fn zip(&self, f: impl Fn(f64, f64) -> f64) -> Option<Outputs> {
        let (a, b) = (self.tensor(0)?.to_f64s(), self.tensor(1)?.to_f64s());
        Some(vec![self.output(2, a.into_iter().zip(b).map(|(a, b)| f(a, b)))?])
    }

    fn rows(&self, from: usize, to: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Option<Outputs> {
        let (x, columns) = self.matrix(from)?;
        Some(vec![self.output(to, x.chunks(columns).flat_map(f))?])
    }
}

fn greatest(row: &[f64]) -> f64 {
    row.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn softmax(row: &[f64]) -> Vec<f64> {
    let max = greatest(row);
    let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
    row.iter().map(|x| (x - max).exp() / sum).collect()
}

/// The positions of a row's elements, the greatest first, of equals the first first.
fn ranked(row: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
    order
}

fn topk(input: &Input) -> Option<Outputs> {
    let ((x, columns), (values, k)) = (input.matrix(0)?, input.matrix(1)?);
    let _ = values;
    let best: Vec<(f64, f64)> = x
        .chunks(columns)
        .flat_map(|row| ranked(row).into_iter().take(k).map(|i| (row[i], i as f64)).collect::<Vec<_>>())
        .collect();
    Some(vec![
        input.output(1, best.iter().map(|(value, _)| *value))?,
        input.output(2, best.iter().map(|(_, index)| *index))?,
    ])
}

fn rmsnorm(input: &Input) -> Option<Outputs> {
    let (weights, epsilon) = (input.tensor(1)?.to_f64s(), input.float(3)?);
    input.rows(0, 2, |row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        row.iter().zip(&weights).map(|(x, w)| x / (mean + epsilon).sqrt() * w).collect()
    })
}

fn rope(input: &Input) -> Option<Outputs> {
    let (positions, base) = (input.tensor(1)?.to_f64s(), input.float(3)?);
    let (x, width) = input.matrix(0)?;
    let half = width / 2;
    let rows_per_position = x.len() / width / positions.len();
    let rotated = x.chunks(width).enumerate().flat_map(|(row, x)| {
        let position = positions[row / rows_per_position];
        let angle = move |i: usize| position * base.powf(-((i % half) as f64) / half as f64);
        let turned: Vec<f64> = (0..width)
            .map(|i| {
                let (sin, cos) = angle(i).sin_cos();
                if i < half { x[i] * cos - x[i + half] * sin } else { x[i] * cos + x[i - half] * sin }
            })
            .collect();
        turned
    });
    Some(vec![input.output(2, rotated.collect::<Vec<_>>())?])
}

fn cross_entropy(input: &Input) -> Option<Outputs> {
    let (targets, (x, columns)) = (input.tensor(1)?.to_f64s(), input.matrix(0)?);
    let losses = x.chunks(columns).zip(targets).map(|(row, target)| {
        let max = greatest(row);
        max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() - row[target as usize]
    });
    Some(vec![input.output(2, losses.collect::<Vec<_>>())?])
}

fn adamw(input: &Input) -> Option<Outputs> {
    let (rate, beta1, beta2) = (input.float(4)?, input.float(5)?, input.float(6)?);
    let (epsilon, decay, step) = (input.float(7)?, input.float(8)?, input.int(9)?);
    let (mut parameters, gradients) = (input.tensor(0)?.to_f64s(), input.tensor(1)?.to_f64s());
    let (mut first, mut second) = (input.tensor(2)?.to_f64s(), input.tensor(3)?.to_f64s());
    let (correction1, correction2) = (1.0 - beta1.powi(step as i32), 1.0 - beta2.powi(step as i32));
    for (i, g) in gradients.into_iter().enumerate() {
        first[i] = beta1 * first[i] + (1.0 - beta1) * g;
        second[i] = beta2 * second[i] + (1.0 - beta2) * g * g;
        parameters[i] -= rate * decay * parameters[i];
        parameters[i] -= rate * (first[i] / correction1) / ((second[i] / correction2).sqrt() + epsilon);
    }
    Some(vec![input.output(0, parameters)?, input.output(2, first)?, input.output(3, second)?])
}

/// The product of two matrices, each with how many elements are in a row.
fn matmul((a, inner): (Vec<f64>, usize), (b, columns): (Vec<f64>, usize)) -> (Vec<f64>, usize) {
    let rows = a.len() / inner;
    let cell = |i: usize| (0..inner).map(|k| a[i / columns * inner + k] * b[k * columns + i % columns]).sum();
    ((0..rows * columns).map(cell).collect(), columns)
}

fn transposed((a, columns): (Vec<f64>, usize)) -> (Vec<f64>, usize) {
    let rows = a.len() / columns;
    ((0..a.len()).map(|i| a[i % rows * columns + i / rows]).collect(), rows)
}

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
fn philox(key: u64, counter: u64) -> [u32; 4] {
    let mut key = [key as u32, (key >> 32) as u32];
    let mut c = [counter as u32, (counter >> 32) as u32, 0, 0];
    for _ in 0..10 {
        let (p, q) = (u64::from(c[0]) * 0xd251_1f53, u64::from(c[2]) * 0xcd9e_8d57);
        c = [(q >> 32) as u32 ^ c[1] ^ key[0], q as u32, (p >> 32) as u32 ^ c[3] ^ key[1], p as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_known_answers() {
        // From Random123's kat_vectors: counter and key of zeros.
        assert_eq!(philox(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    }
}
